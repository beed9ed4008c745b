"""A run as a study of robust overfitting: its robust accuracies, and the landscapes of the epochs it kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.runs import EpochRecord, Run
from flatrock.diagnostics.surface import Array, Landscape, plain


@dataclass(frozen=True)
class Selection:
    """How a run's epochs were chosen, and so what its accuracies are: on which data, under which attack.

    `label` is what the attack is called, `attack` its options; empty where nothing is known of it.
    """

    data: str
    label: str = ""
    attack: Mapping[str, Any] = field(default_factory=dict)


def check_selections(selections: Mapping[str, Selection]) -> None:
    """ConfigError unless accuracies and gaps of these runs can stand in one table: on alike data, under one attack."""
    where = {name: one.data for name, one in selections.items()}
    if len(set(where.values())) > 1:
        raise ConfigError(
            f"gaps on different data are not drawn together: {where}; train with one select.data, or draw them apart"
        )
    first, mine = next(iter(selections.items()), ("", Selection("")))
    for name, one in selections.items():
        if one.attack != mine.attack:
            raise ConfigError(
                f"robust accuracies under different attacks are not drawn together: {mine.label} ({first}) and "
                f"{one.label} ({name}); train with one select.attack, or draw them apart"
            )


@dataclass(frozen=True)
class Study:
    """A run and the weight-1d landscapes of epochs it kept; sharpness is the rise of the loss at the edge of the grid.

    The gap is robust accuracy on training samples minus on the selection data, under the same attack.
    """

    run: Run
    landscapes: tuple[Landscape, ...]
    selection: Selection

    def __post_init__(self) -> None:
        if not self.probed or not self.landscapes:
            raise StateError(f"{self.run.folder} has no epoch that was probed for robust accuracy and kept; train on")
        if len(set(self.epochs)) != len(self.epochs):
            raise StateError(f"{self.run.folder}: one landscape per epoch, got epochs {self.epochs}; leave one out")

    @property
    def probed(self) -> list[EpochRecord]:
        """The epochs whose accuracy was measured."""
        return [r for r in self.run.records if r.robust is not None]

    @property
    def on_test(self) -> bool:
        """Whether its best epoch was chosen by looking at the test set."""
        return self.selection.data == "test"

    @property
    def ends(self) -> tuple[EpochRecord, EpochRecord]:
        """The best and the last epoch that was probed."""
        return self.run.best or self.probed[-1], self.probed[-1]

    @property
    def epochs(self) -> list[int]:
        """The epochs whose landscape was measured."""
        return [int(record.provenance["epoch"]) for record in self.landscapes]

    @property
    def rises(self) -> Array:
        """Per epoch and direction: how much the adversarial loss rises at the edge of the grid, mean of both sides."""
        return np.stack([record.rise_at(record.axis[-1]) for record in self.landscapes])

    @property
    def pairs(self) -> Array:
        """Rows of gap (a fraction) and mean sharpness, of the epochs that have both and are finite."""
        gaps = {r.epoch: r.gap for r in self.probed}
        rows = zip(self.epochs, self.rises.mean(1).tolist(), strict=True)
        both = [(gap, rise) for epoch, rise in rows if (gap := gaps.get(epoch)) is not None and np.isfinite(rise)]
        return np.array(both, dtype=np.float64).reshape(-1, 2)

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation of gap and sharpness over epochs; NaN for fewer than three."""
        from scipy.stats import spearmanr

        pairs = self.pairs
        if len(pairs) < 3 or min(len(set(column)) for column in pairs.T.tolist()) < 2:
            return float("nan")
        return float(spearmanr(pairs[:, 0], pairs[:, 1]).statistic)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what the figure shows; None for a sharpness that is not finite."""
        best = self.run.best
        return {
            "epochs": [r.epoch for r in self.probed],
            "robust": [r.robust for r in self.probed],
            "train_robust": [r.train_robust for r in self.probed],
            "gap": [r.gap for r in self.probed],
            "selected_on": self.selection.data,
            "best_epoch": None if best is None else best.epoch,
            "kept": self.epochs,
            "sharpness": plain(self.rises),
            "correlation": None if np.isnan(self.correlation) else self.correlation,
        }
