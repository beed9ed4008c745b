"""Tables of tiny rows, and what of a results file does not depend on when and in how many pieces it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY = ("train.epochs=3", "data.limit=512", "train.batch_size=64", "select.size=40", "train.tensorboard=false")
TINY += ("evaluate.attacks=[fgsm, pgd-3]", "evaluate.batch_size=100", "train.save_seconds=0.001")
NAMES = ("digits_standard", "digits_at")


def lasting(out: Path) -> list[dict[str, Any]]:
    """The rows of a results file without times, commits and the digests of files that hold them."""
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    for row in rows:
        for key in ("seconds", "elapsed", "seconds_per_epoch"):
            del row["training"][key]
        for score in row["scores"].values():
            del score["seconds"], score["result"]
        for about in (row["provenance"], *(score["provenance"] for score in row["scores"].values())):
            for key in ("time", "commit", "resumed"):
                about.pop(key, None)
    return rows
