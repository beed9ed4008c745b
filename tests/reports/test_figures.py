"""Learning curves are drawn from records alone, atomically."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from flatrock.core.errors import StateError
from flatrock.core.records import EpochRecord, Run
from flatrock.reports.figures import learning_curves


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


def test_run_without_best_epoch_is_drawn(tmp_path: Path) -> None:
    collapsed = replace(record(1, 0.1), best_epoch=None, collapsed=True)
    assert learning_curves({"one": Run(tmp_path, (collapsed,), "truncated")}, tmp_path / "curves.png").is_file()


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no run has a finished epoch"):
        learning_curves({"empty": Run(tmp_path, (), "running")}, tmp_path / "curves.png")
