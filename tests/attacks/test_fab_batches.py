"""FAB and FAB-T in batches: what every attack must keep to, who leaves when, and what a step costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attack_cases import FAB_ROWS, Make, Row, gen_for, linear_case, minimal, rivals_of, wrong
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatrock.attacks.boundary import FastAdaptiveBoundary, TargetedBoundary
from flatrock.attacks.catalog import ATTACKS, attack
from flatrock.attacks.craft import craft
from flatrock.attacks.fab import TIDY_EVERY, fab
from flatrock.attacks.losses import margin
from flatrock.core.rng import Seed
from flatrock.core.threat import L2, Linf, Threat

ROWS: list[Row] = [*FAB_ROWS, ("fab", {"steps": 4, "restarts": 3}), ("fab-t", {"steps": 4, "rows": 10, "restarts": 2})]
rows_of_fab = pytest.mark.parametrize("row", ROWS, ids=["-".join([n, *map(str, o.values())]) for n, o in ROWS])


# What every attack must keep to


@rows_of_fab
@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_are_broken_and_in_ball_and_box_or_the_input(
    row: Row,
    threat: Threat,
    dtype: torch.dtype,
    early_stop: bool,
    conv_net: Make,
    images: Make,
    right_labels: Make,
) -> None:
    model, x = conv_net(dtype=dtype), images(40, dtype=dtype)
    y = right_labels(model, x)
    y[:5] = (y[:5] + 1) % 4
    x_adv = craft(ATTACKS.make(row[0], **row[1]), model, x, y, threat, gen_for(x), early_stop=early_stop)
    assert (x_adv.dtype, x_adv.requires_grad) == (dtype, False)
    moved = (x_adv != x).flatten(1).any(1)
    assert not bool(moved[:5].any()), "who is wrong already stays"
    assert 0 < int(moved.sum()) < 35
    assert torch.equal(wrong(model, x_adv, y)[5:], moved[5:])
    assert float(threat.size(x_adv.double() - x.double()).max()) <= threat.eps + 1e-7
    assert float(x_adv.min()) >= 0
    assert float(x_adv.max()) <= 1


@rows_of_fab
def test_each_sample_is_attacked_as_if_alone(
    row: Row, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x, chosen = conv_net(), images(5), ATTACKS.make(row[0], **row[1])
    y, gen = right_labels(model, x), gen_for(x)
    for early_stop in (False, True):
        whole = craft(chosen, model, x, y, threat, gen, early_stop=early_stop)
        for i in range(5):
            at = torch.tensor([i])
            alone = craft(chosen, model, x[at], y[at], threat, gen[at], early_stop=early_stop)
            if early_stop:  # a target in another batch may be the one that breaks it
                assert torch.equal(wrong(model, alone, y[at]), wrong(model, whole[at], y[at]))
            else:
                torch.testing.assert_close(alone, whole[at], rtol=1e-9, atol=1e-9)


def crooked() -> tuple[nn.Module, Tensor, Tensor]:
    """A network so far from linear that where a search starts matters."""
    gen = Seed(1).generator()
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 4)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(3 * torch.randn(p.shape, generator=gen, dtype=torch.float64))
        model[0].bias.copy_(-0.5 * model[0].weight.sum(1))
        x = torch.rand(40, 6, generator=gen, dtype=torch.float64)
        return model, x, model(x).argmax(1)


@pytest.mark.parametrize("wide", [Linf(0.3), L2(0.6)], ids=["linf", "l2"])
def test_only_restarts_are_random(wide: Threat) -> None:
    model, x, y = crooked()
    for name in ("fab", "fab-t"):
        for restarts in (1, 3):
            first, again, other = (
                attack(name, model, x, y, wide, seed=s, steps=5, restarts=restarts) for s in (1, 1, 2)
            )
            assert torch.equal(first, again)
            assert torch.equal(first, other) == (restarts == 1)


@pytest.mark.parametrize("wide", [Linf(0.3), L2(0.6)], ids=["linf", "l2"])
def test_restarts_only_come_closer(wide: Threat) -> None:
    model, x, y = crooked()
    found = [minimal(model, x, y, wide, by=FastAdaptiveBoundary(steps=10, restarts=r))[1] for r in (1, 2, 5)]
    assert bool((found[1] <= found[0]).all())
    assert bool((found[2] <= found[1]).all())
    assert int((found[2] < 0.99 * found[0]).sum()) >= 3


def test_a_restart_begins_halfway_to_the_best_point_or_to_the_sphere(threat: Threat) -> None:
    model, x, y = linear_case(20, 3, n=30)
    seen: list[Tensor] = []
    _, best = minimal(model, x, y, threat, by=FastAdaptiveBoundary(steps=2))
    threat = type(threat)(float(best.median()))
    with model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach())):
        minimal(model, x, y, threat, by=FastAdaptiveBoundary(steps=2, restarts=2))
    clean, first, start = seen[0], seen[1], seen[1 + 2 * 2]
    assert torch.equal(clean, x)
    assert torch.equal(first, x)
    torch.testing.assert_close(threat.size(start - x), best.clamp(max=threat.eps) / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wide", [Linf(0.3), L2(0.6)], ids=["linf", "l2"])
def test_the_row_limit_changes_nothing(wide: Threat) -> None:
    model, x, y = crooked()
    many, few = (
        minimal(model, x, y, wide, by=TargetedBoundary(steps=6, restarts=3, rows=limit)) for limit in (4096, 1)
    )
    torch.testing.assert_close(few, many, rtol=1e-9, atol=1e-9)


@rows_of_fab
@pytest.mark.parametrize("early_stop", [False, True])
def test_a_ball_of_radius_zero_holds_the_input_only(
    row: Row, threat: Threat, early_stop: bool, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images(8)
    y = right_labels(model, x)
    nothing = type(threat)(0.0)
    x_adv = craft(ATTACKS.make(row[0], **row[1]), model, x, y, nothing, gen_for(x), early_stop=early_stop)
    assert torch.equal(x_adv, x)


@rows_of_fab
def test_a_batch_that_is_wrong_already_costs_one_pass(
    row: Row, threat: Threat, counting: Make, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = counting(conv_net()), images(5)
    y = (right_labels(model.model, x) + 1) % 4
    x_adv = craft(ATTACKS.make(row[0], **row[1]), model, x, y, threat, gen_for(x))
    assert torch.equal(x_adv, x)
    assert model.passes == 1


# Who leaves the batch, and what a step costs


def test_early_stop_loses_no_verdict_and_saves_passes(
    threat: Threat, counting: Make, conv_net: Make, images: Make, right_labels: Make
) -> None:
    for chosen in (FastAdaptiveBoundary(steps=15), TargetedBoundary(steps=15, rows=100, restarts=2)):
        broken, samples = [], []
        for early_stop in (False, True):
            model, x = counting(conv_net()), images(32)
            y = right_labels(model.model, x)
            x_adv = craft(chosen, model, x, y, threat, gen_for(x), early_stop=early_stop)
            broken.append(wrong(model.model, x_adv, y))
            samples.append(model.samples)
            assert model.passes <= chosen.passes(4)
        assert bool(broken[1][broken[0]].all())
        assert 0 < int(broken[0].sum()) < 32
        assert samples[1] < 0.8 * samples[0]


class Sided(nn.Module):
    """Three classes over two coordinates: class 1 is near along the first, class 2 far along the second."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x[:, 0], 1.0), 2 * x[:, 0], 1 + x[:, 1] - 0.95], 1)


@pytest.mark.parametrize(("grouped", "left"), [(True, 0), (False, 4)])
def test_all_rows_of_a_sample_leave_together(grouped: bool, left: int, counting: Make) -> None:
    """Four samples, each toward class 1 (distance 0.1, inside the ball) and toward class 2 (0.55, outside it)."""
    model = counting(Sided())
    x = torch.full((8, 2), 0.4, dtype=torch.float64)
    rivals, group = torch.tensor([1, 2]).repeat_interleave(4)[:, None], torch.arange(4).repeat(2)
    y = torch.zeros(8, dtype=torch.int64)
    found = fab(model, x, y, rivals, Linf(0.2), steps=20, group=group if grouped else None, early_stop=True)
    assert found.final.tolist() == [True] * 4 + [False] * 4
    assert model.samples == 2 * (8 * TIDY_EVERY + left * (20 - TIDY_EVERY))
    assert bool((margin(Sided()(found.points[:4]), y[:4]) > 0).all())
    best = found[torch.arange(4, 8)].improved(found[torch.arange(4)])
    torch.testing.assert_close(best.points, found.points[:4], rtol=0, atol=0)
    assert bool(best.final.all())


class Scripted(nn.Module):
    """Slope 1 towards class 1, 0.1 below the boundary; checks answer 'wrong by a hair', 'wrong' twice, then 'right'."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = [[1.0, 1.00001], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            return torch.cat([torch.zeros_like(x), x - x.detach() - 0.1], 1)
        return x.new_tensor([self.answers.pop(0)])


@pytest.mark.parametrize(("early_stop", "distance"), [(False, 0.105), (True, 0.19995)])
def test_a_point_broken_by_a_hair_does_not_end_the_search(early_stop: bool, distance: float) -> None:
    """Steps by hand: to 0.305, back to 0.2945, to 0.9 * 0.3995 + 0.1 * (0.2 + 1.05 * 0.1945) = 0.39997.

    The third, at 0.486, would do as well, but the search of this row is over.
    """
    x, y = torch.full((1, 1), 0.2, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    found = fab(Scripted(), x, y, torch.ones_like(y)[:, None], Linf(0.35), steps=4, early_stop=early_stop)
    second = 0.9 * (0.2945 + 0.105) + 0.1 * (0.2 + 1.05 * 0.1945)
    assert float(found.distance) == pytest.approx(second - 0.2 if early_stop else 0.105, abs=1e-12)
    assert float(found.distance) == pytest.approx(distance, abs=1e-4)
    assert bool(found.final) == early_stop


class CountingBackward(nn.Module):
    """Counts how often a gradient reaches the input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.forwards, self.backwards = model, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = x * 1
        if x.requires_grad:
            x.register_hook(self._seen)
        logits: Tensor = self.model(x)
        return logits

    def _seen(self, _: Tensor) -> None:
        self.backwards += 1


@pytest.mark.parametrize(
    ("name", "options", "forwards", "backwards"),
    [
        ("fab", {"steps": 7}, 1 + 2 * 7, 3 * 7),
        ("fab", {"steps": 3, "restarts": 2}, 1 + 2 * 2 * 3, 2 * 3 * 3),
        ("fab-t", {"steps": 7}, 1 + 2 * 7, 7),
        ("fab-t", {"steps": 7, "targets": 1}, 1 + 2 * 7, 7),
        ("fab-t", {"steps": 7, "rows": 20}, 1 + 2 * 2 * 7, 2 * 7),
        ("fab-t", {"steps": 7, "rows": 5}, 1 + 3 * 2 * 7, 3 * 7),
    ],
)
def test_passes(
    name: str,
    options: dict[str, Any],
    forwards: int,
    backwards: int,
    threat: Threat,
    conv_net: Make,
    images: Make,
    right_labels: Make,
) -> None:
    """Ten samples, four classes; no weight gets a gradient."""
    model, x = CountingBackward(conv_net()), images(10)
    y = right_labels(model.model, x)
    attack(name, model, x, y, threat, **options)
    assert (model.forwards, model.backwards) == (forwards, backwards)
    assert all(p.grad is None for p in model.parameters())
    assert forwards <= ATTACKS.make(name, **options).passes(4)


class Waits(TorchDispatchMode):
    """Counts operations that make the host wait for a GPU: reading a number, or a result of unknown size."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masks = name.startswith("aten.index") and any(
            t is not None and t.dtype == torch.bool for t in args[1] if isinstance(args[1], list | tuple)
        )
        self.count += masks or any(w in name for w in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("early_stop", "waits"), [(False, 0), (True, (20 - 1) // TIDY_EVERY)])
def test_the_host_waits_for_the_device_only_when_rows_leave(
    threat: Threat, early_stop: bool, waits: int, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images(12)
    y = right_labels(model, x)
    rivals = rivals_of(model, x, y)
    with Waits() as seen:
        fab(model, x, y, rivals, threat, steps=20, early_stop=early_stop)
    assert seen.count == waits
    with Waits() as seen:
        assert bool((x[x > 0.5] > 0).any()), "the count must be able to see"
    assert seen.count == 2
