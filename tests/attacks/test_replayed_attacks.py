"""Attacks on networks that run work of many passes at once: the same attacks."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import ATTACKS
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.guided import Guided
from flatrock.attacks.langevin import Langevin
from flatrock.attacks.smooth import SmoothPGD
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat
from flatrock.core.types import Replayer
from flatrock.models.replay import Replay

ROWS = 32


class Padding(nn.Module, Replayer):
    """Does the work on copies with more rows than there are samples, as recordings do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.names: list[Hashable] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def whole(self, name: Hashable, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        self.names.append(name)
        padded = [torch.cat([t, t[:1].expand(ROWS - len(t), *t.shape[1:])]) for t in tensors]
        return work(*padded)[: len(tensors[0])]


def network() -> nn.Module:
    with kept_global_rng(seed=Seed(2)):
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4)).double()


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.3)], ids=["linf", "l2"])
@pytest.mark.parametrize(
    ("name", "soft", "times"),
    [
        ("fgsm", False, 1),
        ("pgd", False, 1),
        ("pgd", True, 1),
        ("cw", False, 1),
        ("kl-pgd", True, 1),
        ("smooth-pgd", False, 1),
        ("guided", False, 1),
        ("guided", True, 1),
        ("mt", False, 3),
        ("langevin", False, 1),
        ("langevin", True, 1),
    ],
)
def test_the_same_points_as_step_by_step(name: str, soft: bool, times: int, threat: Threat) -> None:
    generator = Seed(1).generator()
    x = torch.rand(7, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(4, (7,), generator=generator)
    target = torch.softmax(torch.randn(7, 4, dtype=torch.float64, generator=generator), 1) if soft else y
    model, gen = network(), Seed(1).samples(torch.arange(7))
    replayer = Padding(model)
    got, true = (ATTACKS.make(name)(m, x, target, threat, gen) for m in (replayer, model))
    assert torch.allclose(got, true, rtol=0, atol=1e-12)
    assert len(replayer.names) == times
    assert len(set(replayer.names)) == 1


def test_what_the_work_depends_on_is_in_its_name() -> None:
    x, y, gen = torch.rand(3, 6, dtype=torch.float64), torch.arange(3), Seed(1).samples(torch.arange(3))
    replayer = Padding(network())
    for attack, threat in (
        (GradientAttack(steps=2), Linf(0.1)),
        (GradientAttack(steps=3), Linf(0.1)),
        (GradientAttack(steps=2, step_size=0.01), Linf(0.1)),
        (GradientAttack(steps=2, box="first"), Linf(0.1)),
        (SmoothPGD(steps=2, loss="ce"), Linf(0.1)),
        (GradientAttack(steps=2, loss="margin"), Linf(0.1)),
        (GradientAttack(steps=2), Linf(0.2)),
        (GradientAttack(steps=2), L2(0.1)),
        (Guided(), Linf(0.1)),
        (Guided(weight=40.0), Linf(0.1)),
        (Guided(guide="never"), Linf(0.1)),
        (Langevin(steps=2), Linf(0.1)),
        (Langevin(steps=2, noise=0), Linf(0.1)),
        (Langevin(steps=2, drift="paper"), Linf(0.1)),
        (Langevin(steps=2, project="every"), Linf(0.1)),
    ):
        attack(replayer, x, y, threat, gen)
    assert len(set(replayer.names)) == 15
    Guided()(replayer, x, y, Linf(0.1), gen)
    assert len(set(replayer.names)) == 15
    Langevin(steps=2).path(replayer, x, y, Linf(0.1), gen)
    assert len(set(replayer.names)) == 16, "all points are more than the last"


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.3)], ids=["linf", "l2"])
def test_a_recorded_walk_is_of_the_batch_it_is_given(threat: Threat) -> None:
    """What is done again is the work of the first batch: nothing of that may be left in it."""
    model, done = network(), {}

    class Again(Padding):
        def whole(self, name: Hashable, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
            return super().whole(name, done.setdefault(name, work), *tensors)

    replayer, walk = Again(model), Langevin(steps=4, noise=0.05)
    for seed in (1, 2):
        x = torch.rand(7, 6, dtype=torch.float64, generator=Seed(seed).generator())
        y, gen = (torch.arange(7) + seed) % 4, Seed(seed).samples(torch.arange(7))
        got, true = (walk.path(m, x, y, threat, gen) for m in (replayer, model))
        assert [p.weight for p in got] == [p.weight for p in true]
        for mine, theirs in zip(got, true, strict=True):
            torch.testing.assert_close(mine.x_adv, theirs.x_adv, rtol=0, atol=1e-12)
    assert len(done) == 1


def test_means_over_passes_and_no_steps_are_not_recorded() -> None:
    x, y, gen = torch.rand(3, 6, dtype=torch.float64), torch.arange(3), Seed(1).samples(torch.arange(3))
    replayer = Padding(network())
    GradientAttack(steps=2, eot=2)(replayer, x, y, Linf(0.1), gen)
    GradientAttack(steps=0)(replayer, x, y, Linf(0.1), gen)
    assert replayer.names == []


class Whole(nn.Module):
    """A network with a layer of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)  # type: ignore[no-any-return]


def test_a_layer_called_whole_is_a_layer() -> None:
    x, gen = torch.rand(3, 6), Seed(1).samples(torch.arange(3))
    assert GradientAttack(steps=2)(Whole(), x, torch.arange(3), Linf(0.1), gen).shape == x.shape


def test_on_a_cpu_work_is_just_done() -> None:
    replay = Replay(gradients=True)
    x = torch.rand(3, 6)
    for _ in range(20):
        assert torch.equal(replay(lambda x: x * 2, x), x * 2)
        assert torch.equal(replay.whole("sum", lambda a, b: a + b, x, x), x + x)
