"""Sums over an epoch, kept on the device, and the guard against non-finite losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import TrainingError
from flatrock.engine.step import StepOutcome

# On a GPU the check waits for the device, so it is made only this often; on the CPU at every step.
GPU_CHECK_EVERY = 50


@dataclass
class Watch:
    """Running sums of one epoch; exact to save and restore."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 0
    _pending: list[tuple[int, tuple[str, ...], Tensor]] = field(default_factory=list)

    def see(self, outcome: StepOutcome, step: int) -> None:
        """Add one step; raises TrainingError, naming step and term, once a non-finite loss is known."""
        named = outcome.losses
        values = torch.stack([v.detach().double() for v in named.values()])
        self._pending.append((step, tuple(named), torch.isfinite(values)))
        for name, value in zip(named, values.unbind(), strict=True):
            self._add(name, value * outcome.samples)
        self._add("right", outcome.right.double())
        self._add("labelled", outcome.labelled.double())
        self.samples += outcome.samples
        if values.device.type == "cpu" or len(self._pending) >= GPU_CHECK_EVERY:
            self.check()

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def check(self) -> None:
        """Look at the steps not yet looked at."""
        pending, self._pending = self._pending, []
        for step, names, finite in pending:
            bad = [name for name, ok in zip(names, finite.tolist(), strict=True) if not ok]
            if bad:
                culprits = [b for b in bad if b != "total"] or bad
                raise TrainingError(
                    f"the loss became non-finite at step {step}: term {', '.join(culprits)}; "
                    "lower optimizer.lr or the term's weight. The last good checkpoint is kept"
                )

    def means(self) -> dict[str, float]:
        """Mean of every loss term over the samples seen."""
        counts = ("right", "labelled")
        return {k: float(v) / max(self.samples, 1) for k, v in self.sums.items() if k not in counts}

    def accuracy(self) -> float:
        """Share of the labelled samples that were right."""
        return float(self.sums["right"]) / max(float(self.sums["labelled"]), 1.0) if self.sums else 0.0

    def state(self) -> dict[str, Any]:
        """Plain values; float64 survives JSON exactly."""
        return {"sums": {k: float(v) for k, v in self.sums.items()}, "samples": self.samples}

    @classmethod
    def restored(cls, state: dict[str, Any], device: torch.device) -> Watch:
        """Inverse of state."""
        sums = {k: torch.tensor(v, dtype=torch.float64, device=device) for k, v in state["sums"].items()}
        return cls(sums, state["samples"])
