"""Several batches in one pass: the answers, gradients and statistics of several passes, or none of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.rng import Seed, kept_global_rng
from flatrock.models.catalog import create_model
from flatrock.models.joint import joint


def batches(model: nn.Module, count: int = 2, size: int = 6) -> list[Tensor]:
    shape = (count, size, *model.input_shape)  # type: ignore[misc]
    return list(torch.rand(shape, dtype=next(model.parameters()).dtype, generator=Seed(1).generator()))


def network(name: str) -> nn.Module:
    with kept_global_rng(seed=Seed(2)):
        return create_model(name, num_classes=10).double().train()


@pytest.mark.parametrize("name", ["digits_cnn", "preact_resnet18", "resnet20", "mobilenet_v2"])
@pytest.mark.parametrize("count", [2, 3])
def test_one_pass_is_several(name: str, count: int) -> None:
    """Logits, weight gradients of a loss of all, running statistics and their counters."""
    model = network(name)
    inputs = batches(model, count)
    way = joint(model, inputs)
    assert way is not None
    alone = copy.deepcopy(model)
    for which, passes in (
        (alone, [alone(x) for x in inputs]),
        (model, way.passes(lambda x: (model(x),), inputs)),
    ):
        which.zero_grad()
        sum(((i + 1) * logits.square().sum() for i, logits in enumerate(passes)), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        if which is alone:
            true = passes
    for got, exact in zip(passes, true, strict=True):
        assert torch.allclose(got, exact, rtol=1e-9, atol=1e-9)
    largest = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
    for (label, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=1e-7, atol=1e-12 * largest), label
    for (label, p), q in zip(model.named_buffers(), alone.named_buffers(), strict=True):
        assert torch.allclose(p.double(), q[1].double(), rtol=1e-10, atol=1e-10), label


def test_asking_changes_nothing() -> None:
    """Neither statistics nor random numbers nor layers, whatever happens in the pass."""
    model = network("digits_cnn")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    way = joint(model, batches(model))
    assert way is not None

    def fails(x: Tensor) -> tuple[Tensor]:
        raise ValueError(str(len(x)))

    with pytest.raises(ValueError, match="12"):
        way.passes(fails, batches(model))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in m.__dict__ for m in model.modules())


class Net(nn.Module):
    """A small network with something in the middle; `blind` ones answer 0 at first."""

    input_shape = (4,)

    def __init__(self, middle: nn.Module, *, blind: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), middle, nn.Linear(5, 3))
        if blind:
            nn.init.zeros_(self.body[3].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Crowd(nn.Module):
    """Rows look at the largest of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.amax(0)


class Counted(nn.Module):
    """Knows how many rows come."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(20, 5)


class Rare(nn.Module):
    """Tosses a coin that almost always falls on the same side."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(torch.rand(()) < 1 - 1e-9) else 0 * x


class Twice(nn.Module):
    """One BatchNorm, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.norm(x).relu() + 1)
        return out


class Counting(nn.Module):
    """Counts its passes beside a long table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3000))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x


class Averaging(nn.Module):
    """Keeps a running mean beside a large constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("limit", torch.tensor(1e6))

    def forward(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.detach().mean(0), 0.5)  # type: ignore[operator]
        return x


def hooked() -> nn.Module:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda module, given, found: None)
    return layer


@pytest.mark.parametrize("make", [Crowd, Counted, nn.Dropout, Rare, Twice, Counting, Averaging, hooked])
@pytest.mark.parametrize("blind", [False, True])
def test_only_batch_norms_may_look_at_a_batch(make: Callable[[], nn.Module], blind: bool) -> None:
    with kept_global_rng(seed=Seed(2)):
        model = Net(make(), blind=blind).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    assert joint(model, batches(model, size=20)) is None
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_plain_layers_do_not() -> None:
    model = Net(nn.ReLU()).train()
    assert joint(model, batches(model)) is not None
    one, two = batches(model)
    assert joint(model, [one, two[:3]]) is None, "batches of one size"
    model.body[1].forward = lambda x: x  # type: ignore[method-assign]
    assert joint(model, batches(model)) is None, "a layer somebody changed keeps its change"
    assert "forward" in model.body[1].__dict__


def test_one_pass_may_toss_coins() -> None:
    model = Net(nn.Dropout(0.5)).train()
    state = torch.get_rng_state()
    (x,) = batches(model, 1, size=20)
    assert joint(model, [x]) is not None
    assert torch.equal(torch.get_rng_state(), state)


class Spare(nn.Module):
    """A BatchNorm, and another that nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.spare = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


@pytest.mark.parametrize("begun", [0, 5000])
@pytest.mark.parametrize("count", [1, 2])
def test_layers_count_the_batches_they_see(begun: int, count: int) -> None:
    """However many they have seen before: a network with a layer nobody asks, and one whose layer is asked twice."""
    for middle, seen in ((Spare(), {"norm": count, "spare": 0}), (Twice(), {"norm": 2 * count})):
        model = Net(middle).train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                assert module.num_batches_tracked is not None
                module.num_batches_tracked.fill_(begun)
        inputs = batches(model, count, size=20)
        way = joint(model, inputs)
        assert (way is None) == (count > 1 and isinstance(middle, Twice))
        if way is not None:
            way.passes(lambda x: (model(x),), inputs)  # noqa: B023
            got = {name: int(layer.num_batches_tracked) - begun for name, layer in middle.named_children()}  # type: ignore[arg-type]
            assert got == seen
