"""The model as attacks use it on a GPU: half precision, fused, weights frozen. Verdicts are not its business."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatrock.attacks.answers import answer
from flatrock.core.errors import in_words
from flatrock.models.twin import CARRIED, Twin, faithful

# Share of clean predictions that must agree with full precision before half precision is trusted to craft.
AGREEMENT = 0.98
# Before half precision is trusted, the gradients of so many inputs must be finite even if so many times larger.
PROBED, HEADROOM = 32, 8.0


class Counted(nn.Module):
    """Counts the rows that pass forward and backward through a model; checks its answers for `classes`, if known."""

    def __init__(self, model: nn.Module, classes: int | None = None) -> None:
        super().__init__()
        self.inner, self.classes = model, classes
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """What the model says."""
        self.forwards += x.shape[0]
        logits = answer(self.inner, x, self.classes)
        if logits.requires_grad:
            logits.register_hook(self._passed)  # type: ignore[no-untyped-call]
        return logits

    def aside(self, x: Tensor) -> Tensor:
        """What the model says; this pass does not count."""
        counts = self.forwards, self.backwards
        try:
            logits: Tensor = self(x)
            return logits
        finally:
            self.forwards, self.backwards = counts

    def _passed(self, grad: Tensor) -> None:
        self.backwards += grad.shape[0]

    def taken(self) -> tuple[int, int]:
        """Forwards and backwards since the last call."""
        counts = self.forwards, self.backwards
        self.forwards = self.backwards = 0
        return counts


def half_model(model: nn.Module, x: Tensor) -> tuple[Twin | None, str]:
    """The half-precision copy if it can be trusted on these inputs, and what it is or why there is none."""
    try:
        fast = faithful(model, x)
        fault = _fault(fast, model, x)
    except Exception as error:
        return None, f"it does not run in half precision ({in_words(error)})"
    if fault:
        return None, fault
    return fast, "float16, fused" if fast.plain else "float16"


def _fault(fast: Twin, model: nn.Module, x: Tensor) -> str:
    """Why the copy cannot stand in for the model on these inputs; nothing if it can."""
    with torch.no_grad():
        said, true = fast(x), model(x)
    if not bool(torch.isfinite(said).all()):
        return "half precision overflows on its clean inputs"
    share = float((said.argmax(1) == true.argmax(1)).double().mean())
    if share < AGREEMENT:
        return f"half precision changes {100 * (1 - share):.1f} % of its clean predictions"
    leaf = x[:PROBED].half().requires_grad_(True)
    top = fast.inside(leaf).amax(1)
    (grad,) = torch.autograd.grad(top, leaf, torch.full_like(top, HEADROOM * CARRIED))
    return "" if bool(torch.isfinite(grad).all()) else "half precision overflows in its gradients"
