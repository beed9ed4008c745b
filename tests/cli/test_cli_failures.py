"""What people see when something goes wrong, and that names and messages come out as they are."""

from __future__ import annotations

import io
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock
from typer.main import get_command

from flatrock.cli.console import friendly, say, show
from flatrock.cli.main import app, main
from flatrock.cli.shared import check_out
from flatrock.core.errors import StateError, TrainingError
from flatrock.core.runs import EpochRecord, Run
from flatrock.reports.table import Table

# Brackets and colons that rich would take for markup, a closing tag without opening, and an emoji.
AWKWARD = "x[a][/b]:x:"
ON_CPU = ("--device", "cpu")


def raising(error: BaseException) -> Any:
    def call(*args: Any, **options: Any) -> None:
        raise error

    return call


def finished(folder: Path) -> Run:
    record = EpochRecord(
        epoch=1,
        step=4,
        lr=0.1,
        terms={"total": 1.0},
        running_accuracy=0.5,
        clean=0.75,
        robust=0.5,
        train_robust=0.5,
        selected_on="held_out",
        best_epoch=1,
        seconds=1.0,
        images_per_second=100.0,
    )
    return Run(folder, (record,), "finished")


def test_awkward_folder_and_a_run_without_best_epoch(tmp_path: Path) -> None:
    # After two steps BatchNorm's running statistics are still at their start: the model has one answer.
    words = ("data.limit=32", "train.batch_size=16", "train.max_steps=2", "--run-dir", tmp_path / AWKWARD, *ON_CPU)
    done = flatrock("train", "digits_at", *words)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("truncated: 1 epoch, ")
    assert "no best epoch: every epoch predicted one class (collapsed)" in lines
    assert f"run folder {tmp_path / AWKWARD}" in lines
    assert (tmp_path / AWKWARD / "curves.png").is_file()
    assert "flatrock eval" not in done.output
    looked_at = flatrock("eval", tmp_path / AWKWARD, *ON_CPU)
    assert looked_at.exit_code == 2
    assert f"{tmp_path / AWKWARD} has no best epoch" in looked_at.output


def test_failed_training_says_why_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatrock.cli.train.train_recipe", raising(TrainingError(f"step 3: {AWKWARD} is NaN")))
    done = flatrock("train", "digits_at", "--run-dir", tmp_path / "r", *ON_CPU)
    assert done.exit_code == 1
    assert done.output == f"FAILED: step 3: {AWKWARD} is NaN\n"


def test_full_disk_at_the_figure_still_tells_how_training_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatrock.cli.train.train_recipe", lambda *a, **k: finished(tmp_path))
    full = OSError(28, "No space left on device", "font[/b]cache")
    monkeypatch.setattr("flatrock.cli.train.learning_curves", raising(full))
    done = flatrock("train", "digits_at", *ON_CPU)
    assert done.exit_code == 2
    assert "best epoch 1: clean 75.00, robust 50.00 on held-out data" in done.stdout
    assert done.stderr.startswith("error: font[/b]cache: No space left on device; free space")


def test_a_run_that_averages_tells_how_the_averages_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path)
    averaged = replace(run.records[0], average_clean=0.7, average_robust=0.6, average_best_epoch=1)
    monkeypatch.setattr("flatrock.cli.train.train_recipe", lambda *a, **k: replace(run, records=(averaged,)))
    done = flatrock("train", "digits_at", *ON_CPU)
    assert "\nbest epoch 1: clean 75.00, robust 50.00 on held-out data\n" in done.stdout
    assert "\naveraged weights, best epoch 1: clean 70.00, robust 60.00; evaluations take these\n" in done.stdout
    alone = replace(averaged, best_epoch=None)
    monkeypatch.setattr("flatrock.cli.train.train_recipe", lambda *a, **k: replace(run, records=(alone,)))
    done = flatrock("train", "digits_at", *ON_CPU)
    assert "\nno best epoch: every epoch predicted one class (collapsed)\n" in done.stdout
    assert done.stdout.endswith(f"next: flatrock eval {tmp_path}\n"), "the averages can be evaluated"


def test_averages_that_collapsed_are_not_what_to_evaluate_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path)
    collapsed = replace(run.records[0], average_clean=0.1, average_robust=0.1)
    monkeypatch.setattr("flatrock.cli.train.train_recipe", lambda *a, **k: replace(run, records=(collapsed,)))
    done = flatrock("train", "digits_at", *ON_CPU)
    assert done.exit_code == 0, done.output
    assert "\naveraged weights: no best epoch, every probe of them predicted one class (collapsed)\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"next: flatrock eval {tmp_path} --which best")


def test_result_that_cannot_be_stored_is_shown(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatrock.cli.evaluated.write_result", raising(StateError(f"could not write {AWKWARD}")))
    own = shutil.copytree(run_folder, tmp_path / "run")  # others look at what is in theirs
    before = sorted(own.iterdir())
    done = flatrock("eval", own, "--attacks", "fgsm", "--limit", "20", *ON_CPU)
    assert done.exit_code == 2
    assert "worst case" in done.stdout
    assert "20 of 500 samples" in done.stdout
    assert done.stderr == f"error: could not write {AWKWARD}\n"
    left = {p.name for p in own.iterdir()} - {p.name for p in before}
    assert left == {"result-best-fgsm-n20-seed0.part"}, "what was computed is there to be resumed"


@pytest.mark.parametrize(
    ("where", "words", "text"),
    [
        ("train.train_recipe", ("train", "digits_at"), "interrupted; the same command with --resume continues from"),
        ("evaluate.evaluate_run", ("eval", "somewhere"), "interrupted; the same command with --resume goes on from"),
        ("check.estimate", ("check", "digits_at"), "interrupted\n"),
        (
            "pseudo_label.pseudo_label",
            ("pseudo-label", "somewhere", "--images", "a.npz", "--out", "b.npz"),
            "interrupted; nothing was written\n",
        ),
    ],
)
def test_interruption_promises_only_what_the_command_has(
    monkeypatch: pytest.MonkeyPatch, where: str, words: tuple[str, ...], text: str
) -> None:
    monkeypatch.setattr(f"flatrock.cli.{where}", raising(KeyboardInterrupt()))
    done = flatrock(*words, *ON_CPU)
    assert done.exit_code == 130
    assert done.stderr.lstrip().startswith(text)
    assert ("--resume" in done.stderr) == (words[0] in ("train", "eval"))


@pytest.mark.parametrize(("where", "command"), [("train.train_recipe", "train"), ("evaluate.evaluate_run", "eval")])
def test_sigterm_is_an_interruption_too(monkeypatch: pytest.MonkeyPatch, where: str, command: str) -> None:
    """As a scheduler sends it; whoever began the command sees by its exit code what it was."""

    def asked(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(f"flatrock.cli.{where}", asked)
    before = signal.getsignal(signal.SIGTERM)
    done = flatrock(command, "digits_at", *ON_CPU)
    assert done.exit_code == 143
    assert done.stderr.lstrip().startswith("interrupted by SIGTERM; the same command with --resume")
    assert signal.getsignal(signal.SIGTERM) is before


def test_closed_pipe_is_not_an_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokenPipeError), friendly():
        raise BrokenPipeError(32, "Broken pipe")
    assert capsys.readouterr().err == ""


def test_awkward_names_in_errors_check_and_doctor(tmp_path: Path) -> None:
    assert f"there is no recipe file {AWKWARD}.yaml" in flatrock("check", f"{AWKWARD}.yaml").output
    file = tmp_path / "x[a]:x:.yaml"
    assert f"wrote {file}; " in flatrock("cp", "moons_at", file).output
    assert "\nrecipe       x[a]:x:, valid" in flatrock("check", file, *ON_CPU).output
    assert f"looked for in {tmp_path / AWKWARD})" in flatrock("doctor", "--data-dir", tmp_path / AWKWARD).output


def test_letters_the_terminal_lacks_are_no_reason_to_die(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.argv", ["flatrock", "ls", "plans"])
    monkeypatch.setattr("flatrock.cli.ls.KINDS", {"plans": lambda: [("mean ± deviation", "σ")]})
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    say("mean ± deviation")
    show(Table(("σ", "sum"), (("a", "7 ± 1"),)))
    out.flush()
    lines = out.buffer.getvalue().decode("ascii").splitlines()  # type: ignore[attr-defined]
    assert lines[:3] == ["plans", "  mean ? deviation  ?", "mean ? deviation"]
    assert "| a | 7 ? 1 |" in lines


COMMANDS_WITH_OUT = {
    "bench": ("digits_at",),
    "certify": ("--model", "digits_cnn", "--data", "digits", "--sigma", "0.25"),
    "curvature": ("nowhere",),
    "eval": ("--model", "digits_cnn", "--data", "digits", "--norm", "linf", "--eps", "0.1"),
    "export": ("nowhere",),
    "landscape": ("nowhere",),
    "overfit": ("nowhere",),
    "page": ("nowhere",),
    "pseudo-label": ("nowhere", "--images", "a.npz"),
    "report": ("nowhere.json",),
    "report-speed": ("nowhere.json",),
    "reproduce": ("nowhere",),
    "results": ("nowhere",),
}


def test_commands_with_out_are_all_known() -> None:
    found = {name for name, command in get_command(app).commands.items() if "out" in {p.name for p in command.params}}
    assert found == set(COMMANDS_WITH_OUT)


@pytest.mark.parametrize("command", COMMANDS_WITH_OUT)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, command: str) -> None:
    """Before even the runs are looked for, which are not there."""
    (tmp_path / "file").touch()
    done = flatrock(command, *COMMANDS_WITH_OUT[command], "--out", tmp_path / "file" / "new" / "x.json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: cannot write {tmp_path / 'file' / 'new' / 'x'}")
    assert done.stderr.endswith("Not a directory; choose another --out\n")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("command", ["report", "report-speed"])
def test_a_page_takes_the_place_of_nothing_else(tmp_path: Path, command: str) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text("{}")
    done = flatrock(command, mine, "--out", mine)
    assert done.exit_code == 2
    assert done.stderr == f"error: out: {mine} must end in .md\n"
    assert mine.read_text() == "{}"


def test_looking_whether_a_file_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    check_out(tmp_path / "x.json", tmp_path / "new" / "folder" / "x.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StateError, match="it is a folder; give --out the name of a file"):
        check_out(tmp_path)
