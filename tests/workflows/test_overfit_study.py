"""Robust overfitting over training: what a study takes from records, what it measures, the command that draws it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.runs import EpochRecord, Run
from flatrock.diagnostics.overfit import Selection, Study
from flatrock.diagnostics.surface import Landscape
from flatrock.reports.overfit import draw_overfit, overfit_table
from flatrock.workflows.overfit import sharpness_plan, study_runs
from flatrock.workflows.train import train_recipe

QUICK: dict[str, Any] = {"directions": 2, "images": 20, "attack": "pgd-2"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs on moons, of which 2 and 4 are kept."""
    folder = tmp_path_factory.mktemp("overfit") / "moons"
    train_recipe("moons_at", folder=folder, device="cpu", train={"epochs": 4, "keep": {"every": 2}})
    return folder


def record(epoch: int, robust: float | None, train: float | None = None) -> EpochRecord:
    return EpochRecord(
        epoch=epoch,
        step=epoch,
        lr=0.1,
        terms={"total": 1.0},
        running_accuracy=0.5,
        clean=robust,
        robust=robust,
        train_robust=train,
        selected_on="held_out",
        best_epoch=2,
        seconds=1.0,
        images_per_second=1.0,
    )


def landscape(epoch: int, rise: float) -> Landscape:
    loss = np.array([[1 + rise, 1.0, 1 + rise], [1 + 3 * rise, 1.0, 1 + 3 * rise]])
    about = {"epoch": epoch, "data": "made up", "seed": 0, "train_seed": 0, "precision": "float32"}
    threat = {"norm": "linf", "eps": 0.1}
    return Landscape(kind="weight-1d", axis=(-0.5, 0.0, 0.5), values={"loss": loss}, threat=threat, provenance=about)


def made_up() -> Study:
    epochs = (record(1, 0.2, 0.2), record(2, 0.6, 0.7), record(3, None), record(4, 0.5, 0.9), record(5, 0.4, 0.95))
    kept = (landscape(2, 1.0), landscape(3, 9.0), landscape(4, 2.0), landscape(5, 3.0))
    return Study(Run(Path("made up"), epochs, "finished"), kept, Selection("held_out", "pgd-7", {"steps": 7}))


def test_a_study_pairs_gaps_with_sharpness_where_it_has_both() -> None:
    study = made_up()
    assert [e.epoch for e in study.ends] == [2, 5]
    assert study.rises[0] == pytest.approx([1.0, 3.0])
    assert study.pairs == pytest.approx(np.array([[0.1, 2.0], [0.4, 4.0], [0.55, 6.0]]))
    assert study.correlation == pytest.approx(1.0)
    assert study.to_dict()["kept"] == [2, 3, 4, 5]
    few = replace(study, landscapes=study.landscapes[:1])
    assert np.isnan(few.correlation)
    assert few.to_dict()["correlation"] is None


def test_the_table_tells_best_from_last() -> None:
    row = overfit_table({"a": made_up()}).rows[0]
    assert row == ("a", "60.0 (2)", "40.0 (5)", "10.0", "55.0", "6.00 ± 4.24", "+1.00")


def test_a_sharpness_of_another_epoch_than_the_last_says_which() -> None:
    study = made_up()
    row = overfit_table({"a": replace(study, landscapes=study.landscapes[:3])}).rows[0]
    assert (row[2], row[5]) == ("40.0 (5)", "4.00 ± 2.83 (4)")


def test_a_run_chosen_on_the_test_set_bears_a_star(tmp_path: Path) -> None:
    study = replace(made_up(), selection=Selection("test"))
    assert overfit_table({"a": study}).rows[0][0] == "a*"
    assert study.to_dict()["selected_on"] == "test"
    text = draw_overfit({"a": study}, tmp_path / "a.svg").read_text()
    assert text.count("* chosen on the test set") == 1 and "a* (+1.00)" in text
    assert "*" not in overfit_table({"a": made_up()}).rows[0][0]


def test_a_run_that_was_never_probed_is_no_study() -> None:
    study = made_up()
    with pytest.raises(StateError, match="no epoch that was probed"):
        replace(study, run=Run(Path("made up"), (record(1, None),), "running"))
    with pytest.raises(StateError, match="no epoch that was probed"):
        replace(study, landscapes=())


def test_an_epoch_counts_once_and_holes_do_not_count() -> None:
    study = made_up()
    with pytest.raises(StateError, match=r"one landscape per epoch, got epochs \[2, 2\]"):
        replace(study, landscapes=study.landscapes[:1] * 2)
    hole = replace(study, landscapes=(*study.landscapes[:3], landscape(5, float("nan"))))
    assert len(hole.pairs) == 2
    assert hole.to_dict()["sharpness"][-1] == [None, None]


def test_the_picture_is_the_same_every_time(tmp_path: Path) -> None:
    studies = {"a": made_up(), "b": made_up()}
    first = draw_overfit(studies, tmp_path / "a.svg").read_bytes()
    assert draw_overfit(studies, tmp_path / "b.svg").read_bytes() == first
    assert draw_overfit(studies, tmp_path / "a.png").stat().st_size > 20_000


def test_unlike_studies_are_not_drawn_together(tmp_path: Path) -> None:
    other = made_up()
    eps = replace(other, landscapes=tuple(replace(r, threat={"norm": "linf", "eps": 0.2}) for r in other.landscapes))
    gaps = replace(other, selection=replace(other.selection, data="test"))
    fgsm = replace(other, selection=Selection("held_out", "fgsm", {}))
    for unlike, message in (
        (eps, "different threat .* 0.1.* and .* 0.2"),
        (gaps, "gaps on different data"),
        (fgsm, r"under different attacks .*: pgd-7 \(a\) and fgsm \(b\); train with one select.attack"),
    ):
        for refuses in (overfit_table, lambda studies: draw_overfit(studies, tmp_path / "a.png")):
            with pytest.raises(ConfigError, match=message):
                refuses({"a": made_up(), "b": unlike})
    assert not list(tmp_path.iterdir())


class Counting:
    """A listener that adds up."""

    def __init__(self) -> None:
        self.total = self.done = self.ended = 0

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.total, self.done = total, done

    def advance(self, units: int, note: str = "") -> None:
        self.done += units

    def end(self) -> None:
        self.ended += 1

    def say(self, text: str) -> None:
        raise AssertionError(text)


def test_kept_epochs_are_measured_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sharpness_plan(0.5, **QUICK)
    first, again = Counting(), Counting()
    studies = study_runs([run], plan, progress=first)
    assert studies["moons"].epochs == [2, 4]
    assert (first.total, first.done, first.ended) == (10, 10, 1)
    monkeypatch.setattr("flatrock.workflows.landscape._walked", None)
    assert study_runs([run], plan, progress=again)["moons"].to_dict() == studies["moons"].to_dict()
    assert (again.total, again.done) == (10, 10)


def test_bad_runs_are_refused_before_anything_is_measured(run: Path, tmp_path: Path) -> None:
    plan = sharpness_plan(0.5, **QUICK)
    with pytest.raises(StateError, match="needs the run folder"):
        study_runs([run, run / "best.safetensors"], plan)
    with pytest.raises(ConfigError, match="told apart by the names"):
        study_runs([run, run], plan)
    with pytest.raises(StateError, match="there is no run folder"):
        study_runs([tmp_path / "none"], plan)


def test_the_command_draws_and_writes(run: Path, tmp_path: Path) -> None:
    words = ["overfit", str(run), "--directions", "2", "--images", "20", "--attack", "pgd-2", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, "--which", "kept,last", "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    assert {p.name for p in tmp_path.iterdir()} == {"o.png", "o.svg", "o.json"}
    written = json.loads((tmp_path / "o.json").read_text())
    assert written["schema"] == "flatrock.overfit/1"
    assert written["runs"]["moons"]["kept"] == [2, 4], "the last epoch was kept: once is enough"
    assert written["plan"]["span"] == 0.5
    bad = CliRunner().invoke(app, [*words, "--radius", "0"])
    assert bad.exit_code == 2
    assert "span must be a number above 0" in bad.output
    for option, message in (("--which", "which names no checkpoint"), ("--out", "out must end in a name")):
        refused = CliRunner().invoke(app, [*words, option, ""])
        assert refused.exit_code == 2
        assert message in refused.output


def test_weights_without_a_finite_loss_are_told_and_written(run: Path, tmp_path: Path) -> None:
    words = ["overfit", str(run), "--directions", "2", "--images", "20", "--attack", "pgd-2", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, "--radius", "1e30", "--out", str(tmp_path / "far")])
    assert done.exit_code == 0, done.output
    assert "not finite" in done.output
    assert json.loads((tmp_path / "far.json").read_text())["runs"]["moons"]["sharpness"] == [[None, None]] * 2


def test_runs_of_different_threats_are_refused_before_anything_is_measured(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    train_recipe(
        "moons_at", folder=other, device="cpu", threat={"eps": 0.05}, train={"epochs": 1, "keep": {"every": 1}}
    )
    monkeypatch.setattr("flatrock.workflows.overfit.measure_landscape", None)
    with pytest.raises(ConfigError, match=r"different threat .* eps 0\.05 .*other"):
        study_runs([run, other], sharpness_plan(0.5, **QUICK))


def test_runs_under_different_attacks_are_refused_before_anything_is_measured(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"other": "fgsm", "same": {"name": "pgd", "steps": 10}}
    for name, attack in asked.items():
        options = {"train": {"epochs": 1, "keep": {"every": 1}}, "select": {"attack": attack}}
        train_recipe("moons_at", folder=tmp_path / name, device="cpu", **options)
    with monkeypatch.context() as patch:
        patch.setattr("flatrock.workflows.overfit.measure_landscape", None)
        with pytest.raises(ConfigError, match=r"under different attacks .*: pgd-10 \(moons\) and fgsm \(other\)"):
            study_runs([run, tmp_path / "other"], sharpness_plan(0.5, **QUICK))
    assert len(study_runs([run, tmp_path / "same"], sharpness_plan(0.5, **QUICK))) == 2, "the same in other words"


def test_the_command_stars_a_run_chosen_on_the_test_set(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": {"held_out": 0}, "select": "test", "train": {"epochs": 3, "keep": {"every": 2}}}
    folder = train_recipe("moons_at", folder=tmp_path / "peeked", device="cpu", **options).folder
    words = ["overfit", str(folder), "--directions", "2", "--images", "20", "--attack", "pgd-2", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    assert "peeked*" in done.output and "* chosen on the test set" in done.output


def test_a_run_named_by_a_dot_has_a_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    studies = study_runs([Path()], sharpness_plan(0.5, **QUICK))
    assert list(studies) == ["moons"]
    assert studies["moons"].landscapes[0].provenance["run"] == "moons"
    with pytest.raises(ConfigError, match="told apart by the names"):
        study_runs([Path(), run], sharpness_plan(0.5, **QUICK))


def test_its_help_says_nothing_of_landscapes_of_inputs() -> None:
    shown = CliRunner().invoke(app, ["overfit", "--help"], env={"COLUMNS": "200"}).output
    assert "for inputs" not in shown
