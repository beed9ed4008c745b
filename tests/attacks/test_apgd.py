"""APGD's kernel: checkpoints, starts, what comes back, who leaves when, who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attack_cases import Make, Recorder, gen_for, wrong
from torch import Tensor, nn

from flatrock.attacks.apgd import apgd, checkpoints, damage, sphere_start
from flatrock.attacks.auto_pgd import APGD
from flatrock.attacks.craft import craft
from flatrock.attacks.losses import cross_entropy, label_loss, margin
from flatrock.attacks.pgd import Aim, safely_broken
from flatrock.core.rng import Seed
from flatrock.core.threat import Linf, Threat


@pytest.mark.parametrize(
    ("steps", "after"),
    [
        (100, [22, 41, 57, 70, 80, 87, 93, 99]),
        (50, [11, 21, 30, 38, 45]),
        (20, [4, 7, 9, *range(10, 21)]),
        (5, [1, 2, 3, 4, 5]),
        (1, [1]),
        (0, []),
    ],
)
def test_checkpoints(steps: int, after: list[int]) -> None:
    found = checkpoints(steps)
    assert list(found) == after
    assert list(found.values()) == [b - a for a, b in zip([0, *after], after, strict=False)]


def test_starts_lie_on_the_sphere_and_belong_to_the_sample(threat: Threat) -> None:
    x = torch.full((200, 3, 4, 4), 0.5, dtype=torch.float64)
    gen = gen_for(x)
    start = sphere_start(x, threat, gen)
    torch.testing.assert_close(threat.size(start - x), torch.full((200,), threat.eps, dtype=torch.float64))
    assert float((start - x).mean().abs()) < 0.05 * threat.eps
    if threat.norm == "linf":  # uniform up to its largest coordinate, of 48
        assert float((start - x).std()) == pytest.approx(threat.eps / 3**0.5, rel=0.05)
    assert torch.equal(sphere_start(x[7:9], threat, gen[torch.tensor([7, 8])]), start[7:9])
    edge = sphere_start(torch.zeros_like(x), threat, gen)
    assert float(edge.min()) == 0


# What comes back


def paths(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, loss: str, steps: int) -> tuple[Tensor, Tensor, Any]:
    """Iterates [steps + 1, n, ...], their logits, and what the kernel returned without early stop."""
    spy = Recorder(model)
    start = sphere_start(x, threat, gen_for(x))
    climb = apgd(Aim(spy, label_loss(loss), y, y), x, threat, steps=steps, start=start)
    assert len(spy.seen) == steps + 1
    with torch.no_grad():
        return torch.stack(spy.seen), torch.stack([model(p) for p in spy.seen]), climb


@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
def test_the_last_broken_point_or_the_best_comes_back(
    loss: str, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images()
    y = right_labels(model, x)
    points, logits, climb = paths(model, x, y, threat, loss, 20)
    broken = 0
    for i in range(len(x)):
        label = y[i].expand(21)
        harm = damage(logits[:, i], label)
        if int(harm.max()):
            expected = int((harm == harm.max()).nonzero()[-1])
            broken += 1
        else:
            expected = int(label_loss(loss)(logits[:, i], label).argmax())
        assert torch.equal(climb.x_adv[i], points[expected, i])
        torch.testing.assert_close(climb.logits[i], logits[expected, i])
        assert int(climb.damage[i]) == int(harm.max())
    assert 0 < broken < len(x)


def test_early_stop_keeps_the_point_that_broke_a_row_and_changes_no_other(
    threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images()
    y = right_labels(model, x)
    points, logits, full = paths(model, x, y, threat, "ce", 20)
    aim = Aim(model, cross_entropy, y, y)
    early = apgd(aim, x, threat, steps=20, start=points[0], early_stop=True)
    assert torch.equal(early.damage, full.damage)
    for i in range(len(x)):
        safe = safely_broken(logits[:, i], y[i].expand(21)).nonzero()
        expected = points[int(safe[0]), i] if len(safe) else full.x_adv[i]
        torch.testing.assert_close(early.x_adv[i], expected, rtol=0, atol=1e-12)


class Script(nn.Module):
    """The lead over class 0 follows a script, whatever the input, which only gives a gradient, now up, now down."""

    def __init__(self, leads: list[float], draws: int = 1) -> None:
        super().__init__()
        self.leads = iter([(lead, (-1) ** (i // draws) * 1e-6) for i, lead in enumerate(leads)])

    def forward(self, x: Tensor) -> Tensor:
        lead, slope = next(self.leads)
        return torch.stack([x[:, 0] * 0, lead + slope * x[:, 0]], 1) + 100


@pytest.mark.parametrize(
    ("leads", "kept"),
    [
        ([-1, -1, -1, -1, 1, 2, 3, 4], 4),  # broken between two looks: the later point breaks more, and is not taken
        ([-1, -1, -1, 1, -1, 2, 3, 4], 3),
        ([-1, 1e-3, -1, 2e-3, -1, -1, -1, -1], 3),  # by a hair: nobody leaves, the last such point counts
        ([-1, 1e-3, -1, 2e-3, 1, -1, -1, -1], 4),
        ([-5, -3, -4, -1, -2, -2, -6, -2], 3),  # never: the point of the largest loss
    ],
)
def test_which_point_early_stop_keeps(leads: list[float], kept: int) -> None:
    x, y = torch.full((1, 3), 0.5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    spy = Recorder(Script(leads))
    start = sphere_start(x, Linf(0.1), gen_for(x))
    climb = apgd(Aim(spy, margin, y, y), x, Linf(0.1), steps=7, start=start, early_stop=True)
    others = [p for i, p in enumerate(spy.seen) if i != kept]
    assert torch.equal(climb.x_adv, spy.seen[kept])
    assert not any(torch.equal(climb.x_adv, p) for p in others)


def test_rows_that_are_broken_leave(counting: Make, conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = counting(conv_net()), images()
    y = (right_labels(model.model, x) + 1) % 4
    kept = craft(APGD(steps=20), model, x, y, Linf(0.001), gen_for(x), early_stop=True)
    assert (model.passes, model.samples) == (1, 64)
    assert bool(wrong(model, kept, y).all())


def test_a_broken_row_takes_its_group_along_and_nobody_else(conv_net: Make, images: Make, right_labels: Make) -> None:
    """Of six rows in three groups the first row starts out broken; the second leaves with it."""
    model, x = conv_net(), images(6)
    y = right_labels(model, x)
    y[0] = (y[0] + 1) % 4
    threat = Linf(1e-6)
    start = sphere_start(x, threat, gen_for(x))
    for group, left in (([7, 7, 0, 0, 2, 2], 4), ([7, 1, 0, 0, 7, 7], 3), (None, 5)):
        spy = Recorder(model)
        rows = None if group is None else torch.tensor(group)
        climb = apgd(Aim(spy, cross_entropy, y, y), x, threat, steps=12, start=start, group=rows, early_stop=True)
        assert [len(s) for s in spy.seen] == [6] + [left] * 12
        assert climb.damage.tolist() == [2, 0, 0, 0, 0, 0]
        assert torch.equal(climb.x_adv[:1], start[:1])
        alone = apgd(Aim(model, cross_entropy, y, y)[torch.tensor([3])], x[3:4], threat, steps=12, start=start[3:4])
        torch.testing.assert_close(climb.x_adv[3:4], alone.x_adv, rtol=0, atol=1e-12)


def test_nothing_on_the_device_is_waited_for_without_early_stop(threat: Threat) -> None:
    """Meta tensors hold no numbers: a branch on one would raise."""
    model = nn.Linear(8, 5, device="meta").requires_grad_(False)
    x, y = torch.empty(6, 8, device="meta"), torch.empty(6, dtype=torch.int64, device="meta")
    for loss in ("ce", "dlr"):
        climb = apgd(Aim(model, label_loss(loss), y, y), x, threat, steps=5, start=x)
        assert climb.x_adv.shape == (6, 8)
        with pytest.raises((RuntimeError, NotImplementedError)):
            apgd(Aim(model, label_loss(loss), y, y), x, threat, steps=1, start=x, early_stop=True)


class Broken(nn.Module):
    """Finite logits, but a gradient that is NaN in the first coordinate and infinite in the second at the box face."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.clone()
        z[:, 0] = torch.sqrt(x[:, 0] * 0) + x[:, 0]
        z[:, 1] = torch.sqrt(x[:, 1])
        return z


def test_a_gradient_that_is_no_number_moves_nothing(threat: Threat) -> None:
    x = torch.rand(20, 4, generator=Seed(0).generator(), dtype=torch.float64)
    x[:, 1] = 0
    for early_stop in (False, True):
        x_adv = craft(APGD(steps=5), Broken(), x, torch.ones(20).long(), threat, gen_for(x), early_stop=early_stop)
        assert bool(torch.isfinite(x_adv).all())


def test_the_last_draw_decides_nothing() -> None:
    """Means of pairs: -1, -2.25 (its last draw is the largest), -1.5 (its last draw is broken), -9."""
    x, y = torch.full((1, 3), 0.5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    spy = Recorder(Script([-1, -1, -4, -0.5, -4, 1, -9, -9], draws=2))
    start = sphere_start(x, Linf(0.1), gen_for(x))
    climb = apgd(Aim(spy, margin, y, y), x, Linf(0.1), steps=3, start=start, eot=2)
    assert torch.equal(climb.x_adv, start)
    assert not torch.equal(spy.seen[2], start)
    assert climb.damage.tolist() == [0]


class Dice(nn.Module):
    """Adds one of three known shifts to the logits, in turn."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x: Tensor) -> Tensor:
        shift = x.new_tensor([[0, 0, 0, 0], [3.0, 0, 0, 0], [-3.0, 0, 0, 0]])[self.calls % 3]
        self.calls += 1
        logits: Tensor = self.model(x) + shift
        return logits


def test_eot_is_the_mean_of_the_draws(conv_net: Make, images: Make, right_labels: Make) -> None:
    """With the margin loss of shifts that cancel: logits are those without dice, so nobody is broken by one throw."""
    model, x = conv_net(), images(16)
    y = right_labels(model, x)
    start = sphere_start(x, Linf(0.001), gen_for(x))
    plain = apgd(Aim(model, margin, y, y), x, Linf(0.001), steps=9, start=start)
    dice = Dice(model)
    mean = apgd(Aim(dice, margin, y, y), x, Linf(0.001), steps=9, start=start, eot=3)
    assert dice.calls == 3 * 10
    assert torch.equal(mean.damage, plain.damage)
    with torch.no_grad():
        torch.testing.assert_close(mean.logits, model(mean.x_adv), rtol=1e-12, atol=1e-12)
    once = apgd(Aim(Dice(model), margin, y, y), x, Linf(0.001), steps=9, start=start)
    assert int(once.damage.sum()) > int(mean.damage.sum())
    same = apgd(Aim(model, margin, y, y), x, Linf(0.001), steps=9, start=start, eot=3)
    torch.testing.assert_close(same.x_adv, plain.x_adv, rtol=0, atol=1e-12)
