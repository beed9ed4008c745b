"""Learning curves are drawn from records alone, atomically."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from flatrock.core.errors import StateError
from flatrock.core.runs import EpochRecord, Run
from flatrock.reports.figures import PALE, learning_curves


def record(epoch: int, robust: float | None) -> EpochRecord:
    return EpochRecord(
        epoch=epoch,
        step=epoch * 10,
        lr=0.1,
        terms={"total": 1.0 / epoch},
        running_accuracy=0.5,
        clean=robust,
        robust=robust,
        train_robust=robust,
        selected_on="held_out",
        best_epoch=1,
        seconds=1.0,
        images_per_second=100.0,
    )


def test_draws_a_picture(tmp_path: Path) -> None:
    run = Run(tmp_path, (record(1, 0.3), record(2, None), record(3, 0.6)), "finished")
    path = learning_curves({"one": run, "empty": Run(tmp_path, (), "running")}, tmp_path / "curves.png")
    with Image.open(path) as picture:
        assert picture.size[0] > 1000
        colours = picture.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 50
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def test_averages_are_drawn_where_they_are_kept(tmp_path: Path) -> None:
    """They are what is evaluated: the marked epoch is theirs, the other weights' lines are pale."""
    averaged = [
        replace(record(e, 0.1 * e), average_clean=0.5, average_robust=0.4, average_best_epoch=2) for e in (1, 2)
    ]
    seen: list[tuple[list[float], list[float], float | None]] = []

    def look(figure: Figure, path: Path) -> Path:
        lines = figure.axes[1].lines
        seen.extend((list(line.get_xdata()), list(line.get_ydata()), line.get_alpha()) for line in lines)
        assert figure.axes[2].get_title(loc="left").endswith("before averaging")
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatrock.reports.figures.store", look)
        learning_curves({"one": Run(tmp_path, tuple(averaged), "finished")}, tmp_path / "curves.png")
    assert ([1, 2], [40.0, 40.0], None) in seen
    assert ([1, 2], [10.0, 20.0], PALE) in seen
    assert ([2], [40.0], None) in seen


def test_run_without_best_epoch_is_drawn(tmp_path: Path) -> None:
    collapsed = replace(record(1, 0.1), best_epoch=None, collapsed=True)
    assert learning_curves({"one": Run(tmp_path, (collapsed,), "truncated")}, tmp_path / "curves.png").is_file()


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no run has a finished epoch"):
        learning_curves({"empty": Run(tmp_path, (), "running")}, tmp_path / "curves.png")


def test_many_runs_have_a_colour_each_and_a_place_may_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Figure] = []
    monkeypatch.setattr("flatrock.reports.figures.store", lambda figure, path: seen.append(figure) or Path(path))
    runs = {str(i): Run(tmp_path, (record(1, 0.3), record(2, 0.5)), "finished") for i in range(12)}
    assert learning_curves(runs, "curves.png") == Path("curves.png")
    colours = {str(line.get_color()) for line in seen[0].axes[0].get_lines()}
    assert len(colours) == 12
    monkeypatch.undo()
    assert learning_curves(runs, str(tmp_path / "curves.png")).is_file()


def test_accuracies_on_the_test_set_are_never_drawn_as_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Figure] = []
    monkeypatch.setattr("flatrock.reports.figures.store", lambda figure, path: seen.append(figure) or path)
    held = (record(1, 0.3), record(2, 0.5))
    tested = tuple(replace(one, selected_on="test", robust=0.7, clean=0.7) for one in held)
    learning_curves({n: Run(tmp_path, r, "finished") for n, r in (("a", held), ("b", tested))}, tmp_path / "c.png")
    axes = seen[0].axes
    titles = [one.get_title(loc="left") for one in axes]
    assert titles[1::3] == ["held-out accuracy", "test accuracy"]
    assert titles[2::3] == ["robust gap, train - held-out", "robust gap, train - test"]
    drawn = [[list(line.get_ydata()) for line in one.lines if len(line.get_xdata()) > 1] for one in axes[1::3]]
    assert drawn == [[[30.0, 50.0]] * 2, [[70.0, 70.0]] * 2]
    assert [one.get_legend().get_texts()[0].get_text() for one in axes[::3]] == ["a", "b"]
    assert len({axes[i].lines[0].get_color() for i in (0, 3)}) == 2, "a run keeps its own colour"
