"""The model as attacks use it on a GPU: half precision, compiled, weights frozen. Verdicts are not its business."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

# Gradients of confident samples are tiny; inside the network they are carried this much larger, so that half
# precision does not round them to zero.
GRADIENT_SCALE = 128.0
# Share of clean predictions that must agree with full precision before half precision is trusted to craft.
AGREEMENT = 0.98


class _Scaled(torch.autograd.Function):
    """Identity whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class HalfModel(nn.Module):
    """A copy of the network in float16 that takes and returns float32; compiled once for every batch size."""

    def __init__(self, model: nn.Module, *, compiled: bool) -> None:
        super().__init__()
        inner = copy.deepcopy(model).half().eval().requires_grad_(False)
        if any(p.dim() == 4 for p in inner.parameters()):
            inner = inner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.inner = inner
        self._run = torch.compile(inner, dynamic=True) if compiled else inner

    def forward(self, x: Tensor) -> Tensor:
        """Float32 logits of a half-precision pass."""
        x = _Scaled.apply(x, 1 / GRADIENT_SCALE).half()  # type: ignore[no-untyped-call]
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        logits: Tensor = _Scaled.apply(self._run(x), GRADIENT_SCALE).float()  # type: ignore[no-untyped-call]
        return logits


class Counted(nn.Module):
    """Counts the rows that pass forward and backward through a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """What the model says."""
        self.forwards += x.shape[0]
        logits: Tensor = self.inner(x)
        if logits.requires_grad and isinstance(logits, Tensor):
            logits.register_hook(self._passed)  # type: ignore[no-untyped-call]
        return logits

    def _passed(self, grad: Tensor) -> None:
        self.backwards += grad.shape[0]

    def taken(self) -> tuple[int, int]:
        """Forwards and backwards since the last call."""
        counts = self.forwards, self.backwards
        self.forwards = self.backwards = 0
        return counts


def half_model(model: nn.Module, x: Tensor, *, compiled: bool) -> tuple[HalfModel | None, str]:
    """The half-precision copy if it can be trusted on these inputs, and what it is or why there is none."""
    for with_compiler in (True, False) if compiled else (False,):
        try:
            fast = HalfModel(model, compiled=with_compiler)
            with torch.no_grad():
                said, true = fast(x), model(x)
            leaf = x[:2].clone().requires_grad_(True)
            torch.autograd.grad(fast(leaf).sum(), leaf)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            continue
        share = float((said.argmax(1) == true.argmax(1)).double().mean())
        if not bool(torch.isfinite(said).all()) or share < AGREEMENT:
            return None, f"half precision changes {100 * (1 - share):.1f} % of its clean predictions"
        return fast, "float16, compiled" if with_compiler else "float16"
    return None, f"it does not run in half precision ({reason})"
