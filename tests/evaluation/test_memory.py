"""Attacks and evaluations keep nothing: no tensor and no graph of autograd outlives what they return."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_cases import LINF_ONLY, QUICK
from torch import Tensor, nn

import flatrock
from flatrock.attacks import gradient
from flatrock.attacks.catalog import ATTACKS
from flatrock.core.rng import Seed

# Attacks of `flatrock.attack`, which refuses noise that leaves the box.
NAMES = [name for name in ATTACKS.names() if ATTACKS.make(name).bounded]
FEW: dict[str, dict[str, Any]] = {name: {"steps": 3} for name in NAMES if "steps" in ATTACKS.entry(name).options()}


@pytest.fixture(scope="module", autouse=True)
def only_what_is_new() -> Iterator[None]:
    """What tests before these have left is set aside: looking through all of it takes seconds each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.freeze()  # as all tests begin: see tests/conftest.py


class Saved:
    """A tensor that a graph has saved for its backward pass: alive as long as the graph is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # or it would keep its own graph alive


@contextmanager
def graphs() -> Iterator[list[weakref.ref[Saved]]]:
    """Weak references to all that graphs save inside; tensors they hold are no objects of Python's otherwise."""
    seen: list[weakref.ref[Saved]] = []

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        seen.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        yield seen


def alive(seen: list[weakref.ref[Saved]]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in seen)


def tensors_alive() -> list[Tensor]:
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]


def held(before: Mapping[int, weakref.ref[Tensor]]) -> tuple[int, int]:
    """Tensors that are alive and were not before, and the bytes behind them, those shared counted once.

    Other tests have left tensors, of any kind, that may go away meanwhile.
    """
    tensors = [t for t in tensors_alive() if id(t) not in before or before[id(t)]() is not t]
    dense = [t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided]
    stores = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in dense}
    return len(tensors), sum(stores.values())


def growth(do: Callable[[], object], *, times: int = 4) -> tuple[int, int]:
    """How many more tensors and bytes there are after doing something so often, the first two times apart."""
    there = {id(t): weakref.ref(t) for t in tensors_alive()}
    for _ in range(2):
        do()
    before = held(there)
    for _ in range(times):
        do()
    after = held(there)
    return after[0] - before[0], after[1] - before[1]


def network() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 5)]
    return nn.Sequential(*layers).eval()


def samples() -> tuple[Tensor, Tensor]:
    return torch.rand(6, 3, 2, 2, generator=Seed(3).generator()), torch.arange(6) % 5


def cases() -> list[tuple[str, Any]]:
    threats = (flatrock.Linf(0.1), flatrock.L2(0.5))
    return [(name, threat) for name in NAMES for threat in threats if threat.norm == "linf" or name not in LINF_ONLY]


@pytest.mark.parametrize(("name", "threat"), cases(), ids=lambda v: v if isinstance(v, str) else v.norm)
def test_an_attack_keeps_no_tensor_and_no_graph(name: str, threat: Any) -> None:
    model, (x, y) = network(), samples()
    options = QUICK.get(name, FEW.get(name, {}))

    def do() -> Tensor:
        return flatrock.attack(name, model, x, y, threat, **options)

    with graphs() as seen:
        x_adv = do()
        assert x_adv.grad_fn is None
        assert not x_adv.requires_grad
        assert alive(seen) == 0, "what it returned holds on to a graph"
    assert bool(seen) == (name not in ("square", "rays")), "gradients leave traces, searches do without"
    assert all(p.grad is None for p in model.parameters())
    assert growth(do) == (0, 0)
    assert x_adv is not None  # it was there all the time


def test_an_evaluation_keeps_nothing_but_its_result(tmp_path: Path) -> None:
    model, other, (x, y) = network(), network(), samples()
    small = [f"{name}:steps=3" for name in ("pgd", "apgd-ce", "apgd-t", "fab-t")]
    attacks = [*small, "square:queries=30", "transfer-pgd-3"]

    def do() -> flatrock.Result:
        how: dict[str, Any] = {"attacks": attacks, "surrogate": other, "keep_adversarial": True, "doubt": True}
        return flatrock.evaluate(model, x, y, flatrock.Linf(0.1), batch_size=4, **how)

    with graphs() as seen:
        result = do()
        assert result.adversarial is not None
        assert result.adversarial.grad_fn is None
        assert alive(seen) == 0
    assert seen
    assert growth(do, times=3) == (0, 0)


# Planted leaks


def test_a_graph_that_is_kept_is_noticed() -> None:
    model, (x, _) = network(), samples()
    with graphs() as seen:
        out = model(x.requires_grad_())
        assert alive(seen) == len(seen) > 0
        out = out.detach()
        assert alive(seen) == 0
    assert out.grad_fn is None


class Keeper(nn.Module):
    """A network that somebody wrote who forgot to detach what he looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.looked_at: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.looked_at.append(out)
        return out


def test_outputs_that_are_kept_are_noticed() -> None:
    model, (x, y) = Keeper().eval(), samples()

    def do() -> Tensor:
        return flatrock.attack("pgd", model, x, y, flatrock.Linf(0.1), steps=2)

    tensors, size = growth(do, times=3)
    assert tensors >= 3 * 2
    assert size >= 3 * 2 * 6 * 5 * 4


def test_a_leak_inside_an_attack_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient per step is kept, as a cache that nobody empties would do."""
    kept: list[Tensor] = []
    honest = torch.autograd.grad

    def leaky(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = honest(*args, **options)
        kept.extend(found)
        return found

    monkeypatch.setattr(gradient.torch.autograd, "grad", leaky)
    model, (x, y) = network(), samples()
    tensors, size = growth(lambda: flatrock.attack("pgd", model, x, y, flatrock.Linf(0.1), steps=2), times=3)
    assert (tensors, size) == (3 * 2, 3 * 2 * x.numel() * 4)
