"""What training leaves: a record per epoch, and the run they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of training. Accuracies are fractions; None where the epoch was not probed."""

    epoch: int
    step: int
    lr: float
    terms: Mapping[str, float]
    running_accuracy: float
    clean: float | None
    robust: float | None
    train_robust: float | None
    selected_on: str
    best_epoch: int | None
    seconds: float
    images_per_second: float
    collapsed: bool = False
    # The same for averaged weights, where a flatness method keeps them.
    average_clean: float | None = None
    average_robust: float | None = None
    average_best_epoch: int | None = None
    # Seconds since the run began, probes and checkpoints included; None in files older than this.
    elapsed: float | None = None
    # Other processes that were seen to have the same GPU open; None if nobody looked in that epoch, or could tell.
    neighbours: int | None = None

    @property
    def gap(self) -> float | None:
        """Robust generalization gap: robust accuracy on training data minus on the selection data."""
        return None if self.train_robust is None or self.robust is None else self.train_robust - self.robust

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the gap included for readers."""
        return {**asdict(self), "gap": self.gap}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochRecord:
        """Inverse of to_dict."""
        return cls(**{k: v for k, v in values.items() if k != "gap"})


@dataclass(frozen=True)
class Run:
    """A training run on disk: where it lies, what its epochs were, and how it ended."""

    folder: Path
    records: tuple[EpochRecord, ...]
    status: str
    reason: str = ""
    findings: tuple[str, ...] = ()  # what to know of it, each with its code: docs/diagnostics.md

    def __repr__(self) -> str:
        told = [f"{self.status}, {len(self.records)} epoch{'' if len(self.records) == 1 else 's'}"]
        if (best := self.best) is not None:
            told.append(f"best {best.epoch}: clean {best.clean or 0:.4f}, robust {best.robust or 0:.4f}")
        if (best := self.best_average) is not None:
            found = f"clean {best.average_clean or 0:.4f}, robust {best.average_robust or 0:.4f}"
            told.append(f"averaged, best {best.epoch}: {found}")
        return f"Run({str(self.folder)!r}: {'; '.join(told)})"

    @property
    def last(self) -> EpochRecord:
        """The last finished epoch."""
        return self.records[-1]

    @property
    def best(self) -> EpochRecord | None:
        """The best epoch on the selection data; None if every epoch so far predicted a single class."""
        return best_record(self.records, "best_epoch")

    @property
    def best_average(self) -> EpochRecord | None:
        """The epoch whose averaged weights were best; None if none were kept, or all predicted a single class."""
        return best_record(self.records, "average_best_epoch")

    @property
    def average_collapsed(self) -> bool:
        """Whether averaged weights were probed and none of them can be taken."""
        return self.best_average is None and any(record.average_robust is not None for record in self.records)


def best_record(records: Sequence[EpochRecord], key: str) -> EpochRecord | None:
    """The record of the epoch that the last record names as best under `key`."""
    wanted = getattr(records[-1], key) if records else None
    return next((r for r in records if r.epoch == wanted), None)
