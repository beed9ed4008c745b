"""What the attack tests share: types of their fixtures, random numbers, and who is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatrock.attacks.boundary import FastAdaptiveBoundary, TargetedBoundary
from flatrock.attacks.catalog import ATTACKS
from flatrock.attacks.nearest import Reached, seeker
from flatrock.attacks.rays import follow_rays
from flatrock.core.rng import SampleGen, Seed
from flatrock.core.threat import Threat

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


# Operations that read numbers to know how many there are, or which; what makes tensors of numbers of Python's.
READERS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.")
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
INDEXERS = (Tensor.__getitem__, Tensor.__setitem__)


class Waits(TorchDispatchMode):
    """Collects the operations that would make the CPU wait for a GPU: who reads numbers, who sends some and waits.

    Reading: a number, or how many entries of a mask are true. Sending, for which the meta device is taken for the GPU:
    copies that were not asked to go on, tensors made of lists and numbers, lists and tensors of the CPU as indices or
    beside a tensor of the device. Single numbers beside one travel with the kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._making = _Making(self.found)

    def __enter__(self) -> Waits:
        self._making.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._making.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sent = "copy" not in name and _meta(given) and any(t.device.type == "cpu" and t.dim() for t in given)
        if sent or any(word in name for word in READERS) or _by_mask(name, args):
            self.found.append(name)
        done = func(*args, **kwargs)
        places = {tensor.device for tensor in (*given, done) if isinstance(tensor, Tensor)}
        if "copy" in name and len(places) > 1 and not _goes_on(func, args, kwargs):
            self.found.append(name)
        return done


class _Making(TorchFunctionMode):
    """Collects what sends numbers of Python's to the device: no operation tells of it."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in INDEXERS and _meta(args[:1]) and any(isinstance(part, list) for part in _parts(args[1])):
            self.found.append(func.__name__)
        done = func(*args, **kwargs)
        if func in MAKERS and _meta([done]):
            values = [*args, *kwargs.values()][func is Tensor.new_tensor]
            self.found += [] if _meta([values]) else [func.__name__]
        return done


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _meta(values: Sequence[Any]) -> bool:
    """Whether one of these is a tensor of the meta device."""
    return any(isinstance(value, Tensor) and value.device.type == "meta" for value in values)


def _by_mask(name: str, args: Any) -> bool:
    """Whether entries are read or written where a mask is true: someone must count them."""
    masks = (torch.bool, torch.uint8)
    return name.startswith(("aten.index.", "aten.index_put", "aten._index_put", "aten._unsafe_index")) and any(
        isinstance(index, Tensor) and index.dtype in masks for index in args[1]
    )


def _goes_on(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a copy was asked not to wait; `copy_` may say so without a name."""
    return bool(kwargs.get("non_blocking") or ("copy_." in str(func) and len(args) > 2 and args[2]))


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


def minimal(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, by: FastAdaptiveBoundary | None = None
) -> Reached:
    """How far the nearest points lie that FAB (FAB-T) finds, as an evaluation asks it."""
    seek = seeker(by or TargetedBoundary(), threat)
    assert seek is not None
    return seek(model, x, y, threat, gen_for(x))


class Nearest(NamedTuple):
    """What RayS finds: how far in Linf, where, and after how many queries."""

    distances: Tensor
    points: Tensor
    queries: Tensor


def rays_distance(model: nn.Module, x: Tensor, y: Tensor, *, queries: int, tolerance: float = 1e-3) -> Nearest:
    with torch.no_grad():
        points, _, used = follow_rays(model, x, y, queries=queries, tolerance=tolerance)
    return Nearest((points - x).flatten(1).abs().amax(1), points, used)


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
