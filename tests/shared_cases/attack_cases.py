"""What the attack tests share: types of their fixtures, random numbers, and who is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatrock.attacks.catalog import ATTACKS
from flatrock.core.rng import SampleGen, Seed

Make = Callable[..., Any]
Row = tuple[str, dict[str, Any]]
# Attacks of thousands of queries, made quick where any number of them tests the same.
QUICK: dict[str, dict[str, Any]] = {
    "square": {"queries": 60},
    "rays": {"queries": 150},
    "fab": {"steps": 5},
    "fab-t": {"steps": 5},
}
# Attacks that keep to ball and box; noise for training does not.
BOUNDED = [name for name in ATTACKS.names() if ATTACKS.make(name).bounded]
# Attacks that draw no random numbers (FAB: without restarts), and attacks that know one norm only.
UNRANDOM = {"fgsm", "rays", "fab", "fab-t"}
LINF_ONLY = {"rays"}
# FAB in every variant that takes another path through the code; restarts are tested on their own.
FAB_ROWS: list[Row] = [
    ("fab", {"steps": 8}),
    ("fab-t", {"steps": 8}),
    ("fab-t", {"steps": 6, "targets": 2, "rows": 10}),
]


def gpu_waits(do: Callable[[], object]) -> int:
    """How often the CPU has to wait for the GPU while something is done."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            do()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


class Waits(TorchDispatchMode):
    """Collects the operations that would make the CPU wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Recorder(nn.Module):
    """Remembers every input it was asked about."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        logits: Tensor = self.model(x)
        return logits


def gen_for(x: Tensor, seed: int = 0) -> SampleGen:
    return Seed(seed).child("test").samples(torch.arange(len(x)))


def wrong(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(1) != y


def rivals_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """All wrong classes, by falling clean logit."""
    with torch.no_grad():
        return model(x).scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)[:, :-1]


def linear_case(
    dimension: int, classes: int, *, n: int = 60, dtype: torch.dtype = torch.float64
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear model and inputs so far inside the box that it stays out of reach."""
    gen = Seed(0).child("fab", dimension, classes).generator()
    model = nn.Linear(dimension, classes).to(dtype)
    with torch.no_grad():
        model.weight.copy_(torch.randn(classes, dimension, generator=gen))
        model.bias.copy_(-0.5 * model.weight.sum(1))
        x = (0.5 + 0.5 * (torch.rand(n, dimension, generator=gen) - 0.5)).to(dtype)
        return model, x, model(x).argmax(1)


def exact_radius(model: nn.Linear, x: Tensor, y: Tensor, norm: str) -> Tensor:
    """min_k (z_y - z_k) / ||W_y - W_k||_q."""
    w, z = model.weight.detach(), model(x).detach()
    dual = torch.linalg.vector_norm(w[y][:, None] - w[None], 1 if norm == "linf" else 2, dim=2)
    ratios = (z.gather(1, y[:, None]) - z) / dual
    return ratios.scatter(1, y[:, None], torch.inf).amin(1)
