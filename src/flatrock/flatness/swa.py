"""Weight averaging: exponential (TrH; Gowal 2020) or with equal weights (Izmailov 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.hooks import Flatness, Moment
from flatrock.core.layout import laid_out
from flatrock.core.options import choose, count, weight


@dataclass(kw_only=True)
class SWA(Flatness):
    """theta_avg <- d_t * theta_avg + (1 - d_t) * theta after every optimizer step.

    d_t = `decay`; with `ramp`, d_t = min(decay, (1 + t) / (10 + t)); with `decay: null`, d_t = t / (t + 1), the plain
    mean. The hook only sees weights that were stepped, so the first call whose share of training is at least `start`
    makes the average a copy of the live weights (t = 0), and t counts the calls after it; until then the average is a
    copy after every step. Only floating-point parameters are averaged. `bn` names the BatchNorm statistics the
    averaged model is evaluated with: a copy of the live model's, or recomputed on `batches` training batches.
    """

    decay: float | None = 0.995
    start: float = 0.0
    ramp: bool = False
    bn: str = "copy"
    batches: int = 50
    averages: ClassVar[bool] = True
    _mean: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _updates: int = field(default=0, init=False, repr=False, compare=False)  # the next update's t

    def __post_init__(self) -> None:
        _below_one("start", self.start)
        if self.decay is not None:
            _below_one("decay", self.decay)
        if not isinstance(self.ramp, bool):
            raise ConfigError(f"swa ramp must be true or false, got {self.ramp!r}")
        if self.ramp and self.decay is None:
            raise ConfigError("swa ramp true needs a decay to ramp up to, got decay None; give one, or ramp false")
        choose("swa", "bn", self.bn, ("copy", "recompute"))
        count("swa", "batches", self.batches, least=1)

    def decay_at(self, t: int) -> float:
        """d_t of the t-th update; 0 at t = 0, where the average is a copy."""
        if t == 0:
            return 0.0
        if self.decay is None:
            return t / (t + 1)
        return min(self.decay, (1 + t) / (10 + t)) if self.ramp else self.decay

    @torch.no_grad()
    def after_step(self, model: nn.Module, moment: Moment) -> None:
        """Take the live weights into the average."""
        live = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point()}
        if self._mean:
            self._fit(live)
            pull = 1 - self.decay_at(self._updates)
            torch._foreach_lerp_(list(self._mean.values()), list(live.values()), pull)
        else:
            self._mean = {name: p.clone() for name, p in live.items()}
        self._updates += moment.share >= self.start

    def _fit(self, live: Mapping[str, Tensor]) -> None:
        """Order and place the average like the live weights (a restored one comes from a file)."""
        odd = [n for n in live.keys() | self._mean.keys() if _shape(live, n) != _shape(self._mean, n)]
        if odd:
            raise StateError(f"the stored average does not fit this model, first {sorted(odd)[:3]}; resume its own run")
        self._mean = {name: laid_out(self._mean[name], p) for name, p in live.items()}

    def average(self) -> Mapping[str, Tensor]:
        """Averaged parameters by name, empty before the first step; later steps change these tensors in place."""
        return dict(self._mean)

    @property
    def bn_batches(self) -> int:
        """`batches` where statistics are recomputed, else 0."""
        return self.batches if self.bn == "recompute" else 0

    def state(self) -> dict[str, Tensor]:
        """Copies of the average under 'mean/', and how many updates it had."""
        if not self._mean:
            return {}
        return {"updates": torch.tensor(self._updates)} | {f"mean/{n}": m.clone() for n, m in self._mean.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of state; the average goes to the model's device at the next update."""
        self._mean = {n.removeprefix("mean/"): m.clone() for n, m in tensors.items() if n.startswith("mean/")}
        self._updates = int(tensors["updates"]) if self._mean else 0


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def _below_one(name: str, value: float) -> None:
    weight("swa", name, value)
    if value >= 1:
        raise ConfigError(f"swa {name} must be below 1, got {value!r}")
