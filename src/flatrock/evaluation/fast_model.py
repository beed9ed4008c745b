"""The model as attacks use it on a GPU: half precision, fused, weights frozen. Verdicts are not its business."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.threat import rows
from flatrock.models.fused import fused
from flatrock.models.replay import Replay

# Largest entry of each row of the gradient where it enters the network. Confident samples have tiny gradients and
# ratios of logits can have huge ones; half precision would round the first to zero and the second to infinity.
CARRIED = 128.0
# No gradient is taken to be smaller than this: the factor it is multiplied with must stay finite.
SMALLEST = 1e-30
# Share of clean predictions that must agree with full precision before half precision is trusted to craft.
AGREEMENT = 0.98
# Before half precision is trusted, the gradients of so many inputs must be finite even if so many times larger.
PROBED, HEADROOM = 32, 8.0


class _Factor:
    """What each row of a gradient was multiplied with where it entered the network."""

    def __init__(self) -> None:
        self.of_rows = torch.ones(0)


class _Enlarged(torch.autograd.Function):
    """Identity; on the way back each row of the gradient is multiplied so that its largest entry is CARRIED."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, factor: _Factor) -> Tensor:
        ctx.factor = factor
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.factor.of_rows = CARRIED / grads[0].abs().amax(1).clamp_min(SMALLEST)
        return grads[0] * rows(ctx.factor.of_rows, grads[0]), None


class _Restored(torch.autograd.Function):
    """Identity; on the way back each row of the gradient is divided by what it was multiplied with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: _Factor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / rows(ctx.factor.of_rows, grads[0]), None


class HalfModel(nn.Module):
    """A copy of the network in float16 that takes and returns float32, with its BatchNorms fused into single kernels.

    Passes without gradients are recorded and replayed where the network is known to be a plain sequence of operations.
    """

    def __init__(self, model: nn.Module, *, trace: bool = True) -> None:
        super().__init__()
        inner, self.plain = fused(copy.deepcopy(model).eval(), trace=trace)
        inner = inner.half().requires_grad_(False)
        if any(p.dim() == 4 for p in inner.parameters()):
            inner = inner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.inner = inner
        self._replay = Replay(lambda x: self.in_half(x.half()).float())

    def forward(self, x: Tensor) -> Tensor:
        """Float32 logits of a half-precision pass."""
        if not torch.is_grad_enabled():
            return self._replay(x) if self.plain else self.in_half(x.half()).float()
        factor = _Factor()
        # Gradients are resized in float32, outside the casts: half precision must not see them as they are.
        x = _Restored.apply(x, factor)  # type: ignore[no-untyped-call]
        logits: Tensor = _Enlarged.apply(self.in_half(x.half()).float(), factor)  # type: ignore[no-untyped-call]
        return logits

    def in_half(self, x: Tensor) -> Tensor:
        """Float16 logits of float16 inputs."""
        logits: Tensor = self.inner(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)
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
        if logits.requires_grad:
            logits.register_hook(self._passed)  # type: ignore[no-untyped-call]
        return logits

    def _passed(self, grad: Tensor) -> None:
        self.backwards += grad.shape[0]

    def taken(self) -> tuple[int, int]:
        """Forwards and backwards since the last call."""
        counts = self.forwards, self.backwards
        self.forwards = self.backwards = 0
        return counts


def half_model(model: nn.Module, x: Tensor) -> tuple[HalfModel | None, str]:
    """The half-precision copy if it can be trusted on these inputs, and what it is or why there is none."""
    fault = ""
    for trace in (True, False):  # a trace may be another function than the network; then without
        try:
            fast = HalfModel(model, trace=trace)
            fault = _fault(fast, model, x)
        except Exception as error:
            reason = str(error).splitlines()[0][:120] if str(error) else ""
            fault = f"it does not run in half precision ({type(error).__name__}: {reason})"
            continue
        if not fault:
            return fast, "float16, fused" if fast.plain else "float16"
    return None, fault


def _fault(fast: HalfModel, model: nn.Module, x: Tensor) -> str:
    """Why the copy cannot stand in for the model on these inputs; nothing if it can."""
    with torch.no_grad():
        said, true = fast(x), model(x)
    if not bool(torch.isfinite(said).all()):
        return "half precision overflows on its clean inputs"
    share = float((said.argmax(1) == true.argmax(1)).double().mean())
    if share < AGREEMENT:
        return f"half precision changes {100 * (1 - share):.1f} % of its clean predictions"
    leaf = x[:PROBED].half().requires_grad_(True)
    top = fast.in_half(leaf).amax(1)
    (grad,) = torch.autograd.grad(top, leaf, torch.full_like(top, HEADROOM * CARRIED))
    return "" if bool(torch.isfinite(grad).all()) else "half precision overflows in its gradients"
