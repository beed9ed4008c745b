"""The epoch figures as TensorBoard events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.progress import Progress
from flatrock.core.runs import EpochRecord
from flatrock.engine.loss import GRAD_NORM


class EventLog:
    """Writes scalars; says so once, and goes on, where TensorBoard is not installed (metrics.jsonl has them all)."""

    def __init__(self, folder: Path, *, history: Sequence[EpochRecord], wanted: bool, progress: Progress) -> None:
        self._writer: Any = None
        if not wanted:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            progress.say("tensorboard is not installed: metrics go to metrics.jsonl only (pip install tensorboard)")
            return
        # Written anew from the records: after a kill the old file may lack epochs or hold some twice.
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(folder))
        for record in history:
            self.write(record)

    def write(self, record: EpochRecord) -> None:
        """One epoch's figures."""
        if self._writer is None:
            return
        values = {
            **{name if name == GRAD_NORM else f"loss/{name}": value for name, value in record.terms.items()},
            "lr": record.lr,
            "accuracy/running": record.running_accuracy,
            "accuracy/clean": record.clean,
            "accuracy/robust": record.robust,
            "accuracy/robust_gap": record.gap,
            "accuracy/average_clean": record.average_clean,
            "accuracy/average_robust": record.average_robust,
            "speed/images_per_second": record.images_per_second,
        }
        try:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, record.epoch)
            self._writer.flush()
        except OSError as error:
            raise StateError(
                f"could not write tensorboard events: {error.strerror}; free space, then --resume"
            ) from error

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            with suppress(OSError):  # a full disk was reported by `write`; the records hold the figures
                self._writer.close()
