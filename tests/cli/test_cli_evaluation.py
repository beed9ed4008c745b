"""`flatrock eval` with a surrogate, distances and a gallery, driven as a user drives it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from flatrock.cli.main import app
from flatrock.core.records import Result as Evaluation
from flatrock.recipes.evaluate import evaluate_run
from flatrock.recipes.load import load_recipe
from flatrock.recipes.restore import load

FEW = ("--limit", "40", "--device", "cpu", "--no-doubt")


def flatrock(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def told(done: Result, word: str) -> list[Path]:
    """The files the command says it wrote or drew."""
    return [Path(line.removeprefix(word)) for line in done.output.splitlines() if line.startswith(word)]


def result_of(done: Result) -> Evaluation:
    assert done.exit_code == 0, done.output
    return Evaluation.from_json(told(done, "wrote ")[0].read_text())


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("others") / "other"
    done = flatrock("train", "digits_at", *tiny, "seed=5", "name=other", "--run-dir", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def moons_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others") / "moons"
    done = flatrock("train", "moons_at", "train.epochs=1", "attack.steps=1", "--run-dir", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    return folder


def test_a_surrogate_adds_two_attacks_and_is_named(run_folder: Path, other_run: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "fast,fgsm", "--surrogate", other_run, *FEW)
    result = result_of(done)
    assert set(result.per_attack) == {"fast", "fgsm", "transfer-pgd-20", "transfer-cw-20"}
    about = result.provenance["surrogate"]
    assert (about["recipe"], about["checkpoint"]) == ("other", "best.safetensors")
    assert len(about["recipe_hash"]) == 16
    assert about["recipe_hash"] != result.provenance["recipe_hash"]
    file = told(done, "wrote ")[0]
    assert file.stem.endswith(f"-n40-seed0-from-{about['weights'][:8]}")
    assert not list(run_folder.glob("*.part")), "the journal of a finished evaluation goes, whatever its attacks"
    assert "transfer-" in done.output


def test_the_recipes_own_attacks_with_a_surrogate_do_not_take_the_name_of_those_without(
    run_folder: Path, other_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = evaluate_run(run_folder, surrogate=other_run, limit=5)
    assert list(result.per_attack) == ["fgsm", "pgd-20", "cw-20", "transfer-pgd-20", "transfer-cw-20"]
    monkeypatch.setattr("flatrock.recipes.evaluate.evaluate", lambda *words, **options: options["provenance"])
    assert evaluate_run(run_folder)["whole_plan"]  # type: ignore[index]
    assert not evaluate_run(run_folder, surrogate=other_run)["whole_plan"]  # type: ignore[index]


@pytest.mark.parametrize("attacks", [None, ["fgsm"]])
def test_the_step_size_is_the_recipes(
    run_folder: Path, other_run: Path, monkeypatch: pytest.MonkeyPatch, attacks: list[str] | None
) -> None:
    asked = load_recipe("digits_at", {"evaluate": {"attacks": ["pgd-3:step_size=0.01"]}}).evaluate
    real = evaluate_run.__globals__["restored"]

    def other_steps(*words: object) -> object:
        model, recipe = real(*words)
        return model, recipe.model_copy(update={"evaluate": asked})

    monkeypatch.setattr("flatrock.recipes.evaluate.restored", other_steps)
    result = evaluate_run(run_folder, surrogate=other_run, attacks=attacks, limit=5)
    names = ["transfer-pgd-20:step_size=0.01", "transfer-cw-20:step_size=0.01"]
    assert list(result.per_attack) == [*(attacks or ["pgd-3:step_size=0.01"]), *names]
    assert result.attacks[names[0]]["by"]["step_size"] == 0.01


def test_interrupted_and_resumed_with_a_surrogate(
    run_folder: Path, other_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval", run_folder, "--attacks", "transfer-pgd-3", "--surrogate", other_run, *FEW, "--batch-size", "10")
    whole = result_of(flatrock(*words))

    def interrupt(*more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flatrock.cli.evaluate.TerminalProgress.advance", interrupt)
        stopped = flatrock(*words)
    assert stopped.exit_code == 130
    assert len(list(run_folder.glob("*.part"))) == 1
    resumed = result_of(flatrock(*words, "--resume"))
    assert resumed.to_json()[:200] == whole.to_json()[:200]
    assert all((resumed.flags[k] == whole.flags[k]).all() for k in whole.flags)
    assert not list(run_folder.glob("*.part"))


def test_surrogates_that_do_not_fit(run_folder: Path, moons_run: Path, tmp_path: Path) -> None:
    for surrogate, said in (
        (run_folder, "the surrogate has the model's own weights"),
        (moons_run, "takes inputs (2,), 'digits' has (1, 8, 8); name a run on the same kind of data"),
        (tmp_path / "nowhere", "there is no run folder or checkpoint"),
    ):
        done = flatrock("eval", run_folder, "--surrogate", surrogate, *FEW)
        assert done.exit_code == 2, done.output
        assert said in done.output
    done = flatrock("eval", run_folder, "--attacks", "transfer-pgd-20,pdg-20", *FEW)
    assert done.exit_code == 2
    assert "needs a surrogate" in done.output
    assert "did you mean 'pgd'" in done.output


def test_distances_are_told_under_the_table(run_folder: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "rays:queries=60,pgd-2", *FEW)
    result = result_of(done)
    mean = result.mean_distance["rays:queries=60"]
    assert mean is not None
    assert "linf distance to the nearest adversarial point found" in done.output
    row = next(line for line in done.output.splitlines() if "(ADBD)" in line)
    cells = row.replace("│", " ").split()
    assert cells[2] == f"{mean:.4g}"
    assert cells[-2:] == [f"{100 * result.per_attack['rays:queries=60']:.2f}", "60"]
    assert "(ADBD)" not in flatrock("eval", run_folder, "--attacks", "pgd-2", *FEW).output


# Pictures


def test_a_gallery_lies_beside_the_result_and_the_inputs_do_not(run_folder: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "pgd-4:restarts=2", "--gallery", *FEW)
    result_of(done)
    (picture,) = told(done, "drew ")
    stored = told(done, "wrote ")[0]
    assert picture == stored.with_name(f"{stored.stem}-gallery.png")
    with Image.open(picture) as image:
        assert image.size[0] > 600
    assert not stored.with_suffix(".safetensors").exists(), "that is --keep-adversarial"


def test_keep_adversarial_and_gallery(run_folder: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "pgd-3", "--gallery", "--keep-adversarial", *FEW)
    result_of(done)
    assert told(done, "wrote ")[0].with_suffix(".safetensors").is_file()


def test_no_gallery_of_nothing_and_none_of_points(run_folder: Path, moons_run: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "pgd-1:step_size=1e-9:start=zero", "--gallery", *FEW)
    result_of(done)
    assert "no gallery: no attack broke a sample" in done.output
    assert not told(done, "drew ")
    before = sorted(moons_run.iterdir())
    done = flatrock("eval", moons_run, "--gallery", *FEW)
    assert done.exit_code == 2
    assert "a gallery shows images" in done.output
    assert sorted(moons_run.iterdir()) == before, "refused before it began"


def test_a_model_of_ones_own_with_surrogate_and_gallery(
    run_folder: Path, other_run: Path, moons_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(load(run_folder).state_dict(), "own.pt")
    own = ("--model", "digits_cnn", "--weights", "own.pt", "--data", "digits", "--norm", "linf")
    words = ("eval", *own, "--eps", "1/5", "--attacks", "pgd-2", *FEW)
    done = flatrock(*words, "--surrogate", other_run, "--gallery")
    result = result_of(done)
    assert set(result.per_attack) == {"pgd-2", "transfer-pgd-20", "transfer-cw-20"}
    assert result.provenance["surrogate"]["recipe"] == "other"
    assert told(done, "wrote ")[0].stem.endswith(f"-from-{result.provenance['surrogate']['weights'][:8]}")
    assert told(done, "drew ")[0].is_file()
    assert not list(tmp_path.glob("*.part"))
    refused = flatrock(*words, "--surrogate", moons_run)
    assert refused.exit_code == 2
    assert "takes inputs (2,)" in refused.output
    typo = flatrock("eval", *own, "--attacks", "transfer-pdg-2", "--surrogate", other_run)
    assert typo.exit_code == 2
    assert "did you mean 'pgd'" in typo.output
    assert "eps: not given" in typo.output
