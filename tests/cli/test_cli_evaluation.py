"""`flatrock eval` with a surrogate, distances and a gallery, driven as a user drives it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_cases import flatrock
from PIL import Image
from typer.testing import Result

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Result as Evaluation
from flatrock.recipes.restore import load
from flatrock.workflows.evaluate import evaluate_run
from flatrock.workflows.replaced import adversarial_file

FEW = ("--limit", "40", "--device", "cpu", "--no-doubt")


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
    assert "\nfast = APGD-CE and APGD-T: an upper bound, not AutoAttack\n" in done.output


def test_the_recipes_own_attacks_with_a_surrogate_do_not_take_the_name_of_those_without(
    run_folder: Path, other_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = evaluate_run(run_folder, surrogate=other_run, limit=5)
    assert list(result.per_attack) == ["fgsm", "pgd-20", "cw-20", "transfer-pgd-20", "transfer-cw-20"]
    monkeypatch.setattr("flatrock.workflows.evaluate.evaluate", lambda *words, **options: options["provenance"])
    assert evaluate_run(run_folder)["whole_plan"]  # type: ignore[index]
    assert not evaluate_run(run_folder, surrogate=other_run)["whole_plan"]  # type: ignore[index]


def with_attacks(run_folder: Path, place: Path, attacks: list[str]) -> Path:
    """A copy of the run whose recipe.yaml names these attacks."""
    copy = Path(shutil.copytree(run_folder, place / "run"))
    file = copy / "recipe.yaml"
    raw = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**raw, "evaluate": {**raw["evaluate"], "attacks": attacks}}))
    return copy


@pytest.mark.parametrize("attacks", [None, ["fgsm"]])
def test_the_step_size_is_the_recipes(
    run_folder: Path, other_run: Path, tmp_path: Path, attacks: list[str] | None
) -> None:
    sized = with_attacks(run_folder, tmp_path, ["pgd-3:step_size=0.01"])
    result = evaluate_run(sized, surrogate=other_run, attacks=attacks, limit=5)
    names = ["transfer-pgd-20:step_size=0.01", "transfer-cw-20:step_size=0.01"]
    assert list(result.per_attack) == [*(attacks or ["pgd-3:step_size=0.01"]), *names]
    assert result.attacks[names[0]]["by"]["step_size"] == 0.01


def test_a_recipe_that_says_nothing_is_not_passed_over(run_folder: Path, tmp_path: Path) -> None:
    """Unless the checkpoint is on its own: then it knows how it was meant."""
    odd = with_attacks(run_folder, tmp_path, ["pgd-nosuch"])
    with pytest.raises(ConfigError, match="pgd-nosuch"):
        evaluate_run(odd, limit=5)
    (odd / "recipe.yaml").write_text("{")
    with pytest.raises(StateError, match=r"(?s)recipe.yaml is not readable .*`train --resume` writes it again"):
        evaluate_run(odd, limit=5)
    (odd / "recipe.yaml").unlink()
    assert list(evaluate_run(odd, limit=5).per_attack) == ["fgsm", "pgd-20", "cw-20"]
    (tmp_path / "recipe.yaml").write_text("{")
    alone = Path(shutil.copy(odd / "best.safetensors", tmp_path))
    assert list(evaluate_run(alone, limit=5).per_attack) == ["fgsm", "pgd-20", "cw-20"]


def test_interrupted_and_resumed_with_a_surrogate(
    run_folder: Path, other_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval", run_folder, "--attacks", "transfer-pgd-3", "--surrogate", other_run, *FEW, "--batch-size", "10")
    done = flatrock(*words)
    whole = result_of(done)
    told(done, "wrote ")[0].unlink()  # or that would be read

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
        (moons_run, "takes inputs (2,), not (1, 8, 8); name a run on the same kind of data"),
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
    assert not adversarial_file(stored).exists(), "that is --keep-adversarial"


def test_keep_adversarial_and_gallery(run_folder: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "pgd-3", "--gallery", "--keep-adversarial", *FEW)
    result_of(done)
    stored, kept = told(done, "wrote ")
    assert kept == adversarial_file(stored)
    assert kept.is_file()


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


# Another threat than the recipe's


def test_another_radius_and_norm_have_files_of_their_own(run_folder: Path) -> None:
    asked = {(): 0.2, ("--eps", "0"): 0.0, ("--eps", "1/20"): 0.05, ("--norm", "l2", "--eps", "1/2"): 0.5}
    files, robust = set(), {}
    for words, eps in asked.items():
        done = flatrock("eval", run_folder, "--attacks", "pgd-5", *words, *FEW)
        result = result_of(done)
        assert result.threat == {"norm": "l2" if "l2" in words else "linf", "eps": eps}
        assert result.provenance.get("recipe_threat") == ({"norm": "linf", "eps": 0.2} if words else None)
        assert ("(the recipe's: linf eps 0.2)" in done.output) == bool(words)
        files.add(told(done, "wrote ")[0].name)
        robust[eps] = result.robust
    marks = ("", "-linf-0", "-linf-0.05", "-l2-0.5")
    assert files == {f"result-best{mark}-pgd-5-n40-seed0.json" for mark in marks}
    assert robust[0.0] == result.clean
    assert robust[0.0] >= robust[0.05] > robust[0.2]


def test_another_threat_never_takes_the_name_of_the_whole_evaluation(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("flatrock.workflows.evaluate.evaluate", lambda *words, **options: asked.append(options))
    threats: list[dict[str, Any]] = [{}, {"eps": "1/5"}, {"norm": "linf"}, {"norm": "linf", "eps": 0.2}]
    threats += [{"eps": 0.05}, {"norm": "l2", "eps": 0.2}]
    for threat in threats:
        evaluate_run(run_folder, journal=True, **threat)
    wholes = [options["provenance"]["whole_plan"] for options in asked]
    assert wholes == [True, True, True, True, False, False]
    names = [options["journal"].name for options in asked]
    assert names[:4] == ["result-best.part"] * 4
    assert [name.split("-cw")[0] for name in names[4:]] == ["result-best-linf-0.05", "result-best-l2-0.2"]


def test_threats_that_cannot_be_asked_about(run_folder: Path) -> None:
    before = sorted(run_folder.iterdir())
    for words, said in (
        (("--norm", "l2"), "eps: not given; the recipe's 0.2 is a radius in linf, give one in l2"),
        (("--norm", "l_2", "--eps", "1"), "did you mean 'l2'"),
        (("--eps", "8"), "write 8/255, not 8"),
        (("--eps", "4/0"), "eps: '4/0' divides by zero"),
        (("--eps", "small"), "eps: expected a number or a fraction such as 8/255, got 'small'"),
    ):
        done = flatrock("eval", run_folder, *words, *FEW)
        assert done.exit_code == 2, done.output
        assert said in done.output
    assert sorted(run_folder.iterdir()) == before


def test_step_sizes_of_the_recipe_are_for_its_own_threat(run_folder: Path, other_run: Path, tmp_path: Path) -> None:
    sized = with_attacks(run_folder, tmp_path, ["fgsm", "pgd-3:step_size=0.01"])
    assert "pgd-3:step_size=0.01" in evaluate_run(sized, eps=0.2, limit=5).per_attack
    with pytest.raises(ConfigError, match=r"attacks pgd-3:step_size=0.01 have step sizes for linf eps 0.2, not for"):
        evaluate_run(sized, eps=0.01, limit=5)
    result = evaluate_run(sized, eps=0.01, attacks=["pgd-2"], surrogate=other_run, limit=5)
    assert list(result.per_attack) == ["pgd-2", "transfer-pgd-20", "transfer-cw-20"]
    assert result.attacks["transfer-pgd-20"]["by"]["step_size"] == 0.01 / 4


def test_an_evaluation_is_not_resumed_under_another_threat(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*more: object) -> None:
        raise KeyboardInterrupt

    words = ("eval", run_folder, "--attacks", "pgd-7", *FEW, "--batch-size", "10", "--eps")
    with monkeypatch.context() as patch:
        patch.setattr("flatrock.cli.evaluate.TerminalProgress.advance", interrupt)
        assert flatrock(*words, "0.05").exit_code == 130
    other = result_of(flatrock(*words, "0.02", "--resume"))
    assert other.threat["eps"] == 0.02
    assert len(list(run_folder.glob("*.part"))) == 1, "the interrupted one is still there"
    # Equal to six digits: the same file, but not the same question.
    refused = flatrock(*words, "0.05000000001", "--resume")
    assert refused.exit_code != 0
    assert "(different: attacks, threat)" in refused.output
    whole = evaluate_run(run_folder, attacks=["pgd-7"], eps=0.05, limit=40)
    resumed = result_of(flatrock(*words, "0.05", "--resume"))
    assert torch.equal(resumed.worst, whole.worst)
    assert not list(run_folder.glob("*.part"))


# What is finished


def test_resume_reads_what_is_finished(run_folder: Path) -> None:
    asked = ("eval", run_folder, "--attacks", "pgd-4", *FEW)
    first = result_of(flatrock(*asked))
    file = run_folder / "result-best-pgd-4-n40-seed0.json"
    before = file.stat().st_mtime_ns
    again = flatrock(*asked, "--resume")
    assert "which was evaluated before" in again.output
    assert f"\nnothing to write: {file} is there already\n" in again.output and not told(again, "wrote ")
    assert file.stat().st_mtime_ns == before and Evaluation.from_json(file.read_text()).to_json() == first.to_json()
    anew = flatrock(*asked)
    assert "before" not in anew.output and told(anew, "wrote ") == [file], "without it, it is made again"


def test_what_was_finished_is_told_as_the_first_time(run_folder: Path) -> None:
    """A result's file has its names sorted; attacks, plans and distances come back in the order they ran."""
    asked = ("eval", run_folder, "--attacks", "pgd-2,fast,fgsm,autoattack-rand,rays:queries=20,fab:steps=2", *FEW)
    first, again = flatrock(*asked), flatrock(*asked, "--resume")

    def tables(done: Result) -> list[str]:
        assert done.exit_code == 0, done.output
        return [line for line in done.output.splitlines() if not line.startswith(("read ", "wrote ", "nothing "))]

    assert "which was evaluated before" in again.output
    assert tables(again) == tables(first)
    places = [again.output.index(name) for name in ("│ pgd-2", "│ fgsm", "│ rays", "│ fab", "│ fast")]
    assert places == sorted(places)


def test_a_result_is_stored_before_it_is_told(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has seen enough (| head) closes the pipe."""

    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("flatrock.cli.evaluated.show", closed)
    flatrock("eval", run_folder, "--attacks", "pgd-6", *FEW)
    assert (run_folder / "result-best-pgd-6-n40-seed0.json").is_file()


def test_votes_have_a_file_of_their_own_and_are_told(run_folder: Path) -> None:
    words = ("eval", run_folder, "--attacks", "fgsm", *FEW)
    one, three = flatrock(*words), flatrock(*words, "--votes", "3")
    assert torch.equal(result_of(one).worst, result_of(three).worst), "it answers the same each time"
    assert told(three, "wrote ")[0].stem == f"{told(one, 'wrote ')[0].stem}-votes3"
    assert "votes" not in result_of(one).provenance and result_of(three).provenance["votes"] == 3
    assert "\n3 votes decide: a sample is right if more than half of so many answers are\n" in three.output
    assert "votes" not in one.output
    assert not list(run_folder.glob("*.part"))


def test_a_whole_plan_with_votes_does_not_take_the_name_of_the_usual_one(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatrock.workflows.evaluate.evaluate", lambda *words, **options: options["provenance"])
    assert not evaluate_run(run_folder, votes=3)["whole_plan"]  # type: ignore[index]


@pytest.mark.parametrize("of", ["run", "model"])
def test_votes_without_a_majority_are_refused(run_folder: Path, of: str) -> None:
    source = (run_folder,) if of == "run" else ("--model", "digits_cnn", "--data", "digits", "--eps", "0.1")
    done = flatrock("eval", *source, "--votes", "4", *FEW)
    assert done.exit_code == 2
    assert "votes must be an odd number >= 1, so that there is a majority, got 4" in " ".join(done.output.split())


def test_what_rounding_undoes_is_told_where_it_undoes_something(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval", run_folder, "--attacks", "fgsm", *FEW)
    said = "once adversarial inputs are rounded to the 8 bits of an image file, to levels within the ball"
    plain = flatrock(*words)
    assert (said in plain.output) == (result_of(plain).robust_rounded != result_of(plain).robust)
    judged = "flatrock.evaluation.tally.in_8_bits"  # what breaks a sample, and whether it is in the ball
    monkeypatch.setattr(judged, lambda x_adv, x, threat: (x, torch.ones(len(x), dtype=torch.bool)))
    mended = flatrock(*words)
    result = result_of(mended)
    assert result.robust < result.clean
    assert f"\nworst case {100 * result.clean:.2f} {said}" in mended.output
    monkeypatch.setattr(judged, lambda x_adv, x, threat: (x_adv, torch.ones(len(x), dtype=torch.bool)))
    assert said not in flatrock(*words).output


def test_the_table_names_the_run_and_the_line_below_its_recipe(run_folder: Path, tmp_path: Path) -> None:
    """Two runs of one recipe are told apart; weights on their own are known by their recipe alone."""
    words = ("--attacks", "fgsm", *FEW)
    copy = Path(shutil.copytree(run_folder, tmp_path / "digits_at"))
    lone = Path(shutil.copy(run_folder / "best.safetensors", tmp_path))
    for source, name, told in (
        (run_folder, "tiny[a]", "\nrecipe digits_at; digits test, 40 of 500 samples; "),
        (run_folder / "last.safetensors", "tiny[a]", "\nrecipe digits_at; "),
        (copy, "digits_at", "\ndigits test, 40 of 500 samples; "),
        (lone, "digits_at", "\ndigits test, 40 of 500 samples; "),
    ):
        done = flatrock("eval", source, *words)
        assert done.exit_code == 0, done.output
        assert f"\n│ {name} " in done.output and told in done.output
