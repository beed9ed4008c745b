"""Sums over an epoch, kept on the device, and the guard against non-finite losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import TrainingError
from flatrock.engine.loss import GRAD_NORM
from flatrock.engine.step import StepOutcome

# A GPU is asked this often, and its answer looked at when it is there: nobody waits. The CPU is asked at every step.
GPU_ASKED_EVERY = 50

# Steps with the names of their losses and whether each is finite.
Pending = list[tuple[int, tuple[str, ...], Tensor]]


@dataclass
class _Asked:
    """An answer on its way from a GPU."""

    pending: Pending
    flags: Tensor
    arrived: torch.cuda.Event

    @classmethod
    def of(cls, pending: Pending) -> _Asked:
        """Send for the flags of these steps without waiting for them."""
        flags = torch.cat([finite for _, _, finite in pending])
        here = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        here.copy_(flags, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(pending, here, arrived)

    def here(self) -> bool:
        """Whether it can be read without waiting."""
        return bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def answer(self) -> Pending:
        """The steps with flags that can be read."""
        self.arrived.synchronize()
        parts = torch.split(self.flags, [len(names) for _, names, _ in self.pending])
        return [(step, names, part) for (step, names, _), part in zip(self.pending, parts, strict=True)]


@dataclass
class Watch:
    """Running sums of one epoch; exact to save and restore."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 0
    _pending: Pending = field(default_factory=list)
    _asked: _Asked | None = None

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
        if values.device.type == "cpu":
            self.check()
        elif len(self._pending) >= GPU_ASKED_EVERY and (self._asked is None or self._asked.here()):
            earlier, self._asked, self._pending = self._asked, _Asked.of(self._pending), []
            _refuse(earlier.answer() if earlier else [])

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def check(self) -> None:
        """Look at the steps not yet looked at; waits for a GPU."""
        asked = self._asked.answer() if self._asked else []
        pending, self._asked, self._pending = [*asked, *self._pending], None, []
        _refuse(pending)

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


def _refuse(pending: Pending) -> None:
    """Raise TrainingError if a loss of these steps is not finite."""
    for step, names, finite in pending:
        bad = [name for name, ok in zip(names, finite.tolist(), strict=True) if not ok]
        if bad:
            if bad == [GRAD_NORM]:
                text = f"the gradient became non-finite at step {step}, not the loss; lower optimizer.lr"
                raise TrainingError(text, step=step)
            culprits = [b for b in bad if b not in ("total", GRAD_NORM)] or bad
            raise TrainingError(
                f"the loss became non-finite at step {step}: term {', '.join(culprits)}; "
                "lower optimizer.lr or the term's weight",
                step=step,
            )
