"""Shared by the workflow tests: small runs on digits whose epochs are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatrock.workflows.train import train_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few epochs of AT on digits; epochs 1, 2 and 3 are kept."""
    return _tiny(tmp_path_factory.mktemp("landscapes"), epochs=3)


@pytest.fixture(scope="session")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of AT on digits, both kept; to be copied, not written to."""
    return _tiny(tmp_path_factory.mktemp("curvatures"), epochs=2, attack="pgd-2")


def _tiny(folder: Path, *, epochs: int, **select: Any) -> Path:
    """A run of AT on some of the digits that keeps all its epochs."""
    run = train_recipe(
        "digits_at",
        folder=folder / "tiny",
        device="cpu",
        data={"limit": 512},
        train={"epochs": epochs, "batch_size": 64, "keep": {"every": 1}},
        attack={"steps": 2},
        select={"size": 40, **select},
    )
    return run.folder
