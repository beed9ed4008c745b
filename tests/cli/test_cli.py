"""The command line, driven as a user drives it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from flatrock.cli.main import app
from flatrock.core.provenance import VERSION
from flatrock.core.records import Result as Evaluation
from flatrock.data.catalog import how_to_get
from flatrock.evaluation.plans import PLANS
from flatrock.workflows import cost

runner = CliRunner()


def flatrock(*words: str | Path) -> Result:
    return runner.invoke(app, [str(w) for w in words])


def written(done: Result) -> Path:
    """The file the command says it wrote."""
    return Path(next(line for line in done.output.splitlines() if line.startswith("wrote ")).removeprefix("wrote "))


def test_ls_lists_everything_with_descriptions() -> None:
    text = flatrock("ls").output
    for word in ("recipes", "models", "data", "attacks", "objectives", "preact_resnet18", "cifar10_at_linf", "trades"):
        assert word in text
    assert "kl-pgd" in flatrock("ls", "attacks").output
    assert "preact_resnet18" not in flatrock("ls", "attacks").output


def test_ls_lists_what_eval_takes_as_attacks() -> None:
    rows = dict(line.split(maxsplit=1) for line in flatrock("ls", "plans").output.splitlines()[1:])
    assert rows == {name: summary for name, (_, summary) in PLANS.items()}
    assert list(rows) == ["autoattack", "autoattack-plus", "autoattack-rand", "fast"]
    assert "not AutoAttack" in rows["fast"]
    assert "transfer-*" in flatrock("ls", "attacks").output
    assert "plans" in flatrock("ls", "--help").output


def test_ls_of_an_unknown_kind_lists_the_choices() -> None:
    done = flatrock("ls", "atacks")
    assert done.exit_code == 2
    assert "did you mean 'attacks'" in done.output


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_help_is_whole_on_80_columns(command: str) -> None:
    done = runner.invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "…" not in done.output


def test_cp_writes_a_recipe_that_checks(tmp_path: Path) -> None:
    target = tmp_path / "mine.yaml"
    assert flatrock("cp", "digits_trades", target).exit_code == 0
    content = yaml.safe_load(target.read_text())
    assert content["name"] == "mine"
    assert content["objective"]["name"] == "trades"
    assert "base" not in content
    assert target.read_text().startswith("# ")
    checked = flatrock("check", target, "--device", "cpu")
    assert checked.exit_code == 0, checked.output
    again = flatrock("cp", "digits_trades", target)
    assert again.exit_code == 2
    assert "left alone" in again.output


@pytest.mark.parametrize(("word", "file"), [("my", "my.yaml"), ("my.v2", "my.v2.yaml"), ("my.yml", "my.yml")])
def test_cp_only_adds_to_a_name(tmp_path: Path, word: str, file: str) -> None:
    done = flatrock("cp", "digits_at", tmp_path / word)
    assert done.exit_code == 0, done.output
    assert [p.name for p in tmp_path.iterdir()] == [file]
    assert yaml.safe_load((tmp_path / file).read_text())["name"] == Path(file).stem


def test_cp_makes_a_folder_that_ends_in_a_slash(tmp_path: Path) -> None:
    done = flatrock("cp", "digits_at", f"{tmp_path / 'new'}/")
    assert done.exit_code == 0, done.output
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.yaml")] == ["new/digits_at.yaml"]


def test_cp_into_a_folder_keeps_the_name(tmp_path: Path) -> None:
    folder = tmp_path / "d[a]"
    folder.mkdir()
    done = flatrock("cp", "digits_at", f"{folder}/")
    assert done.exit_code == 0, done.output
    assert f"wrote {folder}/digits_at.yaml; " in done.output
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*.yaml")] == [Path("d[a]/digits_at.yaml")]
    again = flatrock("cp", folder / "digits_at.yaml", folder)
    assert again.exit_code == 2
    assert "left alone" in again.output


def test_check_prints_recipe_parameters_steps_and_cost() -> None:
    done = flatrock("check", "digits_at", "threat.eps=8/255", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "0.03137" in done.output
    for word in ("parameters", "24,058", "steps", "passes", "GFLOP", "time", "hash"):
        assert word in done.output


def test_check_tells_how_time_was_measured_and_what_a_busy_machine_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ("digits_at", "train.epochs=200", "--device", "cpu")
    monkeypatch.setattr(cost, "_timed_pass", lambda *_: 0.25)
    idle = flatrock("check", *recipe).output
    hours = re.search(r"^time +about ([\d.]+) hours on cpu \([^)]+\)$", idle, re.M)
    assert hours, idle
    assert "an estimate, extrapolated from the best of 3 timed passes of one batch: an order of magnitude" in idle
    times = iter([9.0, 0.25, 1.0, 1.0])
    monkeypatch.setattr(cost, "_timed_pass", lambda *_: next(times))
    busy = flatrock("check", *recipe).output
    told = re.search(
        r"^time +about ([\d.]+) hours on cpu .*, idle; while it is as busy as now, about ([\d.]+)", busy, re.M
    )
    assert told, busy
    assert told[1] == hours[1]
    assert float(told[2]) == pytest.approx(3 * float(hours[1]), rel=0.05)
    assert "the best of 3 timed passes of one batch, and from their mean" in busy


def test_check_of_several_devices() -> None:
    done = flatrock("check", "digits_at", "train.batch_size=99", "--device", "cpu,cpu")
    assert done.exit_code == 0, done.output
    assert "devices      2, each with 49 or 50 of the 99 samples of a batch (docs/speed.md)" in done.output
    assert "whose cores they share" in done.output and "what devices send to each other is not" in done.output
    wrong = flatrock("check", "digits_hat", "train.batch_size=5", "data.augment.mixup=1", "--device", "cpu,cpu,cpu")
    assert wrong.exit_code == 2
    for words in (
        "train.batch_size: 5 leaves one of 3 devices less than two samples of a kind; raise it",
        "data.augment.mixup: samples are mixed with others",
        "objective.helper: there is no",
    ):
        assert words in wrong.output, wrong.output
    alone = flatrock("check", "digits_at", "train.batch_size=5", "data.augment.mixup=1", "--device", "cpu")
    assert alone.exit_code == 0 and "devices " not in alone.output, "nothing is shared"


def test_check_tells_the_cost_and_then_the_missing_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ask = ("check", "digits_trades", "data.extra={file: more.npz, fraction: 0.5}", "--device", "cpu")
    done = flatrock(*ask)
    assert done.exit_code == 2
    assert "forward passes of the network per step" in done.output
    assert "is sound, but cannot be trained yet" in done.output
    assert "data.extra.file: there is no file more.npz; its makers publish it" in " ".join(done.output.split())
    Path("more.npz").touch()
    assert flatrock(*ask).exit_code == 0


def test_the_header_of_a_recipe_names_what_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "# run:    flatrock train moons_at [" in flatrock("check", "moons_at", "--device", "cpu").output
    flatrock("cp", "moons_at", "mine.yml")
    assert "# run:    flatrock train mine.yml [" in Path("mine.yml").read_text()
    Path("a b.yaml").write_text("base: moons_at\nabout: {summary: '', source: '', expect: '', time: ''}\n")
    lines = flatrock("check", "a b.yaml", "--device", "cpu").output.splitlines()
    assert lines[:2] == ["# run:    flatrock train 'a b.yaml' [key=value ...]", "name: a b"]


def test_check_of_points_that_are_no_number() -> None:
    done = flatrock("check", "moons_at", "data.points=abc", "--device", "cpu")
    assert done.exit_code == 2, done.output
    assert "points" in done.output.splitlines()[-1]
    assert "'abc'" in done.output.splitlines()[-1]


def test_check_reports_all_faults_at_once() -> None:
    done = flatrock(
        "check", "digits_at", "objective.name=tradse", "threat.eps=8", "train.epohcs=3", "model.name=resnet"
    )
    assert done.exit_code == 2
    for word in ("did you mean 'trades'", "8/255, not 8", "did you mean 'epochs'", "unknown model 'resnet'"):
        assert word in done.output.replace("\n", " "), done.output


def test_train_leaves_a_complete_run(run_folder: Path) -> None:
    for name in ("recipe.yaml", "run.json", "metrics.jsonl", "best.safetensors", "last.safetensors", "curves.png"):
        assert (run_folder / name).is_file(), name
    assert any((run_folder / "tensorboard").iterdir())


def test_train_refuses_an_existing_folder(run_folder: Path, tiny: tuple[str, ...]) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in run_folder.iterdir()}
    done = flatrock("train", "digits_at", *tiny, "--run-dir", run_folder, "--device", "cpu")
    assert done.exit_code == 2
    assert "--resume" in done.output
    assert {p.name: p.stat().st_mtime_ns for p in run_folder.iterdir()} == before


def test_resume_with_another_recipe_names_the_difference(run_folder: Path, tiny: tuple[str, ...]) -> None:
    words = [*tiny, "threat.eps=0.1", "--run-dir", run_folder, "--resume", "--device", "cpu"]
    done = flatrock("train", "digits_at", *words)
    assert done.exit_code == 2
    assert "threat.eps" in done.output


def test_eval_prints_the_table_and_writes_json(run_folder: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "fgsm,pgd-2", "--limit", "50", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "worst case" in done.output
    assert written(done).parent == run_folder
    result = Evaluation.from_json(written(done).read_text())
    assert result.n == 50
    assert set(result.per_attack) == {"fgsm", "pgd-2"}
    assert result.provenance["recipe"] == "digits_at"


def test_eval_of_a_mistyped_attack_is_an_error(run_folder: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "pdg-20", "--device", "cpu")
    assert done.exit_code == 2
    assert "did you mean 'pgd'" in done.output


def test_eval_of_a_checkpoint_file(run_folder: Path) -> None:
    done = flatrock("eval", run_folder / "last.safetensors", "--attacks", "fgsm", "--limit", "20", "--device", "cpu")
    assert done.exit_code == 0, done.output
    result = Evaluation.from_json(written(done).read_text())
    assert result.provenance["checkpoint"] == "last.safetensors"


def test_eval_of_nothing(tmp_path: Path) -> None:
    done = flatrock("eval", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "no run folder or checkpoint" in done.output


def test_diverged_run_is_failed_and_not_evaluated(tmp_path: Path, tiny: tuple[str, ...]) -> None:
    words = [*tiny, "optimizer.lr=1e30", "schedule.name=constant", "--run-dir", tmp_path / "r", "--device", "cpu"]
    done = flatrock("train", "digits_at", *words)
    assert done.exit_code == 1
    assert "FAILED" in done.output
    assert "non-finite" in done.output
    looked_at = flatrock("eval", tmp_path / "r", "--device", "cpu")
    assert looked_at.exit_code == 2
    assert "FAILED" in looked_at.output


def test_doctor_finds_the_embedded_data_and_says_how_to_get_the_rest(tmp_path: Path) -> None:
    done = flatrock("doctor", "--data-dir", tmp_path)
    assert done.exit_code == 0, done.output
    assert "inside scikit-learn" in done.output
    assert re.search(r"^  cifar10 +not here: train with --download \(170 MB\)$", done.output, re.M)
    assert re.search(r"^  imagenet +not here$", done.output, re.M)
    assert "flatrock doctor cifar10 tells what it needs and where to get it\n" in done.output
    paths = ("data (looked", "  flatrock")
    assert all(len(line) <= 80 for line in done.output.splitlines() if not line.startswith(paths)), done.output
    for package in ("torch", "scipy", "pillow"):
        assert re.search(rf"^  {package} +\d", done.output, re.M), package


def test_doctor_tells_all_about_the_data_that_are_named(tmp_path: Path) -> None:
    done = flatrock("doctor", "cifar10", "digits", "imagenet", "--data-dir", tmp_path)
    assert done.exit_code == 0, done.output
    assert f"cifar10 is not here (looked for in {tmp_path})\n" in done.output
    assert "digits is here: inside scikit-learn\n" in done.output
    told = " ".join(done.output.split())
    for name in ("cifar10", "imagenet"):
        for sentence in how_to_get(name).split("; "):
            assert sentence in told
    assert "https://www.cs.toronto.edu/~kriz/," in done.output.split(), "an address stays in one piece"
    assert all(len(line) <= 80 for line in done.output.splitlines() if "looked for" not in line)
    assert "torch" not in done.output


def test_doctor_finds_the_files_of_data_that_are_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "a.png").touch()
    assert "folder is here: " in flatrock("doctor", "folder", "--data-dir", tmp_path).output


def test_doctor_knows_no_other_data() -> None:
    done = flatrock("doctor", "digits", "cifar1")
    assert done.exit_code == 2
    assert "unknown dataset 'cifar1'" in done.output
    assert "did you mean 'cifar10'" in done.output
    assert "is here" not in done.output


def test_missing_data_is_named_with_the_cure(tmp_path: Path) -> None:
    words = ("train", "cifar10_at_linf", "--data-dir", tmp_path, "--run-dir", tmp_path / "r", "--device", "cpu")
    done = flatrock(*words)
    assert done.exit_code == 2
    assert "cifar-10-binary.tar.gz" in done.output
    assert not (tmp_path / "r").exists()


def test_unknown_device() -> None:
    assert "unknown device" in flatrock("train", "digits_at", "--device", "gpu9").output


def test_version() -> None:
    done = flatrock("--version")
    assert (done.exit_code, done.output) == (0, f"flatrock {VERSION}\n")


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "flatrock", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: flatrock" in done.stdout
