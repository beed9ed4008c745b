"""What some data say of a network as its weights are now: clean and adversarial loss and accuracy."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.craft import answered, check_crafted, check_inputs, check_model
from flatrock.attacks.pgd import classified_right
from flatrock.attacks.written import tried
from flatrock.core.borrow import full_precision
from flatrock.core.device import memory_is_short
from flatrock.core.errors import ThreatError
from flatrock.core.rng import Seed
from flatrock.core.threat import Threat
from flatrock.core.types import Attack

T = TypeVar("T")
# Samples a network shows on whether its answers are logits.
FEW = 32


@dataclass(frozen=True)
class Reading:
    """Mean cross-entropy and accuracy (a fraction), without and under attack; without an attack both are the same.

    A sample without a finite answer is not right, and the loss of its batch is NaN or infinite.
    """

    loss: float
    accuracy: float
    clean_loss: float
    clean_accuracy: float

    def to_dict(self) -> dict[str, float | None]:
        """Plain values for JSON, which has no NaN and no infinity: None in their place."""
        return {name: value if isfinite(value) else None for name, value in asdict(self).items()}


def fitting(work: Callable[[int], T], size: int) -> tuple[T, int]:
    """What `work` returns for batches of this size, halved until they fit into memory, and the size that did."""
    while True:
        try:
            return work(size), size
        except RuntimeError as error:
            if size == 1 or not memory_is_short(error):
                raise
        # Outside the handler: what the failed pass had allocated is free by now.
        size = (size + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class HalfPass(nn.Module):
    """The network with its matrix products in bfloat16; it takes and returns what the network does in float32.

    bfloat16 has the range of float32: weights far from those that were trained can overflow float16.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        # Inputs follow the weights: a network that was not laid out so may reshape what its convolutions return.
        self._last = any(
            p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
            for p in model.parameters()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Float32 logits."""
        if x.dim() == 4 and self._last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            logits: Tensor = self.inner(x)
        return logits.float()


class Probe:
    """Attacks the same samples with the same random numbers whenever asked, and measures in full precision.

    The model must be borrowed (core.borrow.borrowed) while it is asked. Samples go through in batches of `batch_size`,
    which halves for good when memory is short. With `half`, the attack computes in bfloat16.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        ids: Tensor,
        threat: Threat,
        attack: Attack | None,
        seed: Seed,
        batch_size: int,
        half: bool = False,
    ) -> None:
        x = check_inputs(x, y, threat)
        if x.shape[0] == 0:
            raise ThreatError("there is nothing to measure: x has no samples")
        check_model(model, x)
        self.model, self.x, self.y, self.ids = model, x, y, ids
        self.threat, self.attack, self.seed = threat, attack, seed
        self.batch_size = min(batch_size, len(x))
        self._crafting = HalfPass(model) if half else model

    def sent(self, how: Callable[[Tensor], Tensor]) -> Probe:
        """A copy whose samples went elsewhere; the model is the same one."""
        other = copy(self)
        other.x, other.y, other.ids = how(self.x), how(self.y), how(self.ids)
        return other

    def check(self) -> None:
        """Whether the network, as its weights are now, answers as a classifier must; else ModelError."""
        few = slice(0, min(FEW, self.batch_size))
        with torch.no_grad():
            answered(self.model, self.x[few], self.y[few])

    def __call__(self) -> Reading:
        """What the data say of the weights as they are now."""
        reading, self.batch_size = fitting(self._read, self.batch_size)
        return reading

    def _read(self, size: int) -> Reading:
        sums = torch.zeros(4, dtype=torch.float64, device=self.x.device)
        for start in range(0, len(self.x), size):
            part = slice(start, start + size)
            sums += self._sums(self.x[part], self.y[part], self.ids[part])
        loss, right, clean_loss, clean_right = (float(s) / len(self.x) for s in sums.tolist())
        return Reading(loss, right, clean_loss, clean_right)

    def _sums(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        """Summed loss and number of right answers under attack, then without."""
        clean = self._judged(x, y)
        if self.attack is None:
            return torch.cat([clean, clean])
        x_adv = tried(self.attack, self._crafting, x, y, self.threat, self.seed.samples(ids))
        attacked = self._judged(x_adv, y)
        # The one place that waits for a GPU. Weights without finite gradients give NaN inputs: no answer, no fault.
        if bool(torch.isfinite(x_adv).all()):
            check_crafted(x_adv, x, self.threat, self.attack)
        return torch.cat([attacked, clean])

    def _judged(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad(), full_precision(x.device):
            logits: Tensor = self.model(x)
            loss = F.cross_entropy(logits, y, reduction="none").double().sum()
            return torch.stack([loss, classified_right(logits, y).sum().double()])
