"""Certified accuracy as a table and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flatrock.core.errors import StateError
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.smoothing import Smoothing
from flatrock.reports.certified import caption, certified_table, draw_certified


def certificate(**changes: Any) -> Certificate:
    """Ten samples of 3072 dimensions with 100, 99, ... votes for the true class."""
    first = torch.arange(100, 90, -1)
    options: dict[str, Any] = {
        "smoothing": Smoothing(sigma=0.12, n0=10, n=100),
        "labels": torch.zeros(10, dtype=torch.int64),
        "top": torch.zeros(10, dtype=torch.int64),
        "counts": torch.stack([first, 100 - first], 1),
        "ids": torch.arange(10),
        "shape": (3, 32, 32),
        "seconds": torch.ones(10, dtype=torch.float64),
    }
    return Certificate(**{**options, **changes})


def test_rows_are_the_radii_of_the_grid_and_those_wanted() -> None:
    found = certificate()
    wanted = found.l2_of(0.5 / 255)
    table = certified_table(found, [wanted, 0.06])
    assert table.header == ("L2 radius", "as Linf eps", "certified %", "samples")
    assert [row[0] for row in table.rows] == ["0", "0.06", f"{wanted:.4g}", "0.12", "0.18"]
    assert table.rows[2][1] == "0.50/255"
    assert table.rows[0][2:] == ("100.00", "10")
    counts = [int(row[3]) for row in table.rows]
    assert counts == sorted(counts, reverse=True)
    assert counts[3] == round(10 * found.certified(0.12)) < 10


def test_numbers_of_test_selected_checkpoints_are_marked() -> None:
    rows = certified_table(certificate(marks=("test-selected",))).rows
    assert all(row[2].endswith("*") for row in rows)
    assert "selected on the test set" in caption({"a": certificate(marks=("test-selected",))})


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    points = {"PGD on the smoothed classifier": [(0.0, 0.9), (0.3, 0.4)]}
    several = {"one": certificate(), "two": certificate(top=torch.ones(10, dtype=torch.int64))}
    for name, certificates in (("one", {"one": certificate()}), ("two", several)):
        file = draw_certified(certificates, tmp_path / f"{name}.png", radii=[0.1], attacked=points)
        with Image.open(file) as image:
            assert image.size[0] > 800
    with pytest.raises(StateError, match="nothing to draw"):
        draw_certified({}, tmp_path / "none.png")


def test_the_caption_says_what_was_done() -> None:
    about = {"data": "cifar10 test, 10 of 10000 samples", "seed": 3, "device": "cpu"}
    told = caption({"mine": certificate(provenance=about)})
    for part in ("cifar10 test, 10 of 10000 samples", "sigma 0.12, n0 10, n 100, alpha 0.001", "seed 3", "0.180"):
        assert part in told
    alike = {"mine": certificate(provenance=about), "yours": certificate(provenance=about)}
    assert caption(alike) == told, "said once"
    other = caption({**alike, "other": certificate(smoothing=Smoothing(sigma=0.5, n=100))})
    assert "mine: cifar10" in other
    assert "other: 10 samples; sigma 0.5" in other
