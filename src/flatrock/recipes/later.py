"""Choices that came later than the first runs: recipes from before are those without, and keep their hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys by section, and what stands for the choice not being made.
LATER: Mapping[str, Mapping[str, Any]] = {
    "": {"flatness": []},
    "train": {"clean_tick": False, "clip_norm": None, "micro_batch": None},
    "data.augment": {"shift": 0, "erase": 0.0, "rotation_mode": "bilinear", "cutmix": 0.0},
    "model": {"weights": None},
    "objective": {"label_smoothing": 0},
    "optimizer": {"schedule_on": "all"},
}


def without_unmade(keys: dict[str, Any], *, skip: str = "") -> dict[str, Any]:
    """The keys of a recipe without the later choices that were not made; those of the section `skip` all stay."""
    for path, defaults in LATER.items():
        if skip and path == skip:
            continue
        section = keys
        for name in filter(None, path.split(".")):
            section = section[name]
        unmade = [key for key, default in defaults.items() if key in section and section[key] == default]
        for key in unmade:
            del section[key]
    return keys
