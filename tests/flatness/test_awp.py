"""AWP and SAM as pure methods: the shift they ask for, how often they ask for gradients, and when they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.core.borrow import nudged
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.hooks import Flatness, Moment, Nudge, Scene, Shift
from flatrock.core.rng import Seed
from flatrock.core.types import Point
from flatrock.flatness.awp import AWP
from flatrock.flatness.sam import SAM

W = torch.tensor([[1, -0.5], [0.25, 0.75], [-1, 0.5]], dtype=torch.float64)
X_ADV = torch.tensor([[0.5, 1.0], [1.0, -0.5]], dtype=torch.float64)
Y = torch.tensor([0, 2])


@dataclass
class Bench:
    """A scene whose loss is cross-entropy on fixed inputs (or any loss given), with a count of what was asked for."""

    model: nn.Module
    x: Tensor
    y: Tensor
    epoch: int = 1
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    gradient_calls: list[Shift] = field(default_factory=list)
    crafted: list[Shift] = field(default_factory=list)

    def gradients(self, shift: Shift, points: tuple[Point, ...]) -> dict[str, Tensor]:
        self.gradient_calls.append(dict(shift))
        named = dict(self.model.named_parameters())
        with nudged(self.model, shift):
            found = torch.autograd.grad(self.loss(self.model(points[-1].x_adv), self.y), list(named.values()))
        return dict(zip(named, found, strict=True))

    def craft(self, shift: Shift) -> tuple[Point, ...]:
        self.crafted.append(dict(shift))
        return (Point(self.x + len(self.crafted)),)

    def nudge(self, method: Flatness) -> Nudge | None:
        moment = Moment(epoch=self.epoch, step=0, share=0.0, seed=Seed(0))
        return method.before_loss(Scene(self.model, moment, (Point(self.x),), self.gradients, self.craft))

    def value(self, shift: Shift) -> float:
        with nudged(self.model, shift), torch.no_grad():
            return float(self.loss(self.model(self.x), self.y))


def linear() -> Bench:
    model = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(W)
    return Bench(model, X_ADV, Y)


def network() -> Bench:
    gen = Seed(3).generator()
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.LayerNorm(6), nn.ReLU()
    )
    model = nn.Sequential(model, nn.Linear(6, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=gen, dtype=p.dtype))
    x = torch.rand(8, 1, 4, 4, generator=gen, dtype=torch.float64)
    return Bench(model, x, torch.randint(3, (8,), generator=gen))


def need(nudge: Nudge | None) -> Nudge:
    assert nudge is not None
    return nudge


def test_golden_shift_and_rise() -> None:
    bench = linear()
    shift = need(bench.nudge(AWP(gamma=0.01))).shift
    gold = [[0.00368420, -0.01165086], [0.00469268, 0.00457654], [-0.00837688, 0.00707432]]
    torch.testing.assert_close(shift["weight"], torch.tensor(gold, dtype=torch.float64), rtol=0, atol=5e-9)
    assert bench.value({}) == pytest.approx(2.1351118500, abs=5e-11)
    assert bench.value(shift) == pytest.approx(2.1505161527, abs=5e-11)
    slope = bench.gradients({}, (Point(X_ADV),))["weight"]
    assert float((slope * shift["weight"]).sum()) == pytest.approx(0.0153854, abs=5e-8)


@pytest.mark.parametrize("gamma", [1e-4, 5e-3, 0.1])
def test_every_layer_moves_by_gamma_times_its_norm_and_nothing_else_moves(gamma: float) -> None:
    bench = network()
    shift = need(bench.nudge(AWP(gamma=gamma))).shift
    weights = {n: p.detach() for n, p in bench.model.named_parameters()}
    assert set(shift) == {"0.0.weight", "0.4.weight", "1.weight"}, "convolution and linear weights, no norm, no bias"
    for name, v in shift.items():
        assert float(v.norm() / weights[name].norm()) == pytest.approx(gamma, rel=1e-12)


def test_the_rise_is_first_order_and_positive() -> None:
    bench, gamma = network(), 1e-5
    shift = need(bench.nudge(AWP(gamma=gamma))).shift
    slopes = bench.gradients({}, (Point(bench.x),))
    weights = {n: p.detach() for n, p in bench.model.named_parameters()}
    predicted = gamma * sum(float(weights[n].norm() * slopes[n].norm()) for n in shift)
    assert bench.value(shift) - bench.value({}) == pytest.approx(predicted, rel=1e-3)
    assert predicted > 0


@pytest.mark.parametrize(("steps", "turns"), [(1, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("step_size", [None, 0.08])
def test_no_schedule_of_steps_leaves_the_constraint(steps: int, turns: int, step_size: float | None) -> None:
    bench, gamma = network(), 0.05
    nudge = need(bench.nudge(AWP(gamma=gamma, steps=steps, alternations=turns, step_size=step_size)))
    weights = {n: p.detach() for n, p in bench.model.named_parameters()}
    shares = [float(v.norm() / weights[n].norm()) for n, v in nudge.shift.items()]
    assert max(shares) <= gamma * (1 + 1e-12)
    if step_size is not None or steps * turns == 1:
        assert min(shares) == pytest.approx(gamma, rel=1e-9), "a step longer than gamma ends on the boundary"
    assert len(bench.gradient_calls) == steps * turns
    assert len(bench.crafted) == turns - 1, "the first round uses the inputs crafted at w"
    assert bench.gradient_calls[0] == {}
    if turns > 1:
        assert bench.crafted[0].keys() == nudge.shift.keys()
        assert torch.equal(nudge.points[-1].x_adv, bench.x + (turns - 1)), "the loss sees the inputs attacked last"


@pytest.mark.parametrize(("steps", "turns"), [(2, 1), (1, 2), (2, 2)])
def test_small_steps_are_the_recursion_written_out(steps: int, turns: int) -> None:
    """Each is gamma / (alternations * steps) long; every round but the first has inputs of its own."""
    bench, gamma = linear(), 0.02
    shift = need(bench.nudge(AWP(gamma=gamma, steps=steps, alternations=turns))).shift["weight"]
    v = torch.zeros_like(W)
    for turn in range(turns):
        for _ in range(steps):
            w = (W + v).requires_grad_(True)
            (g,) = torch.autograd.grad(F.cross_entropy((X_ADV + turn) @ w.T, Y), w)
            v = v + gamma / (turns * steps) * W.norm() * g / g.norm()
    torch.testing.assert_close(shift, v, rtol=0, atol=1e-14)


def test_quadratic_closed_form() -> None:
    """L = |w - a|^2 / 2 has gradient w - a, so v = gamma |w| (w - a) / |w - a|."""
    bench = linear()
    a = torch.ones_like(W)
    bench.loss = lambda logits, y: (bench.model.weight - a).square().sum() / 2  # type: ignore[operator,union-attr]
    shift = need(bench.nudge(AWP(gamma=0.3))).shift["weight"]
    torch.testing.assert_close(shift, 0.3 * W.norm() * (W - a) / (W - a).norm(), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("epoch", "acts"), [(1, False), (9, False), (10, True), (11, True)])
def test_warm_up_counts_epochs_from_one(epoch: int, acts: bool) -> None:
    bench = linear()
    bench.epoch = epoch
    assert (bench.nudge(AWP(warmup=10)) is not None) == acts
    assert len(bench.gradient_calls) == acts, "a method that does not act costs nothing"


@pytest.mark.parametrize("method", [AWP(gamma=0), SAM(rho=0)])
def test_zero_strength_asks_for_nothing(method: Flatness) -> None:
    bench = network()
    assert bench.nudge(method) is None
    assert bench.gradient_calls == []
    assert method.passes(2, 11) == 0


def test_a_layer_without_gradient_is_left_where_it_is() -> None:
    bench = network()
    bench.loss = lambda logits, y: bench.model[1].weight.square().sum() + 0 * logits.sum()  # type: ignore[index,union-attr]
    shift = need(bench.nudge(AWP(gamma=0.1))).shift
    assert float(shift["0.0.weight"].abs().max()) == 0
    assert float(shift["1.weight"].norm()) > 0


@pytest.mark.parametrize(("which", "count"), [("weights", 3), ("conv", 1), ("matrices", 3), ("all", 10)])
def test_which_tensors_move(which: str, count: int) -> None:
    assert len(need(network().nudge(AWP(tensors=which))).shift) == count


def test_sam_moves_all_weights_together_by_rho() -> None:
    bench = network()
    nudge = need(bench.nudge(SAM(rho=0.07)))
    slopes = bench.gradients({}, (Point(bench.x),))
    whole = torch.cat([nudge.shift[n].flatten() for n in slopes])
    slope = torch.cat([g.flatten() for g in slopes.values()])
    assert float(whole.norm()) == pytest.approx(0.07, rel=1e-12)
    torch.testing.assert_close(whole, 0.07 * slope / slope.norm(), rtol=0, atol=1e-15)
    assert not nudge.step_inside
    assert SAM().passes(2, 11) == 2


def test_named_choices() -> None:
    assert need(linear().nudge(AWP())).step_inside
    assert not need(linear().nudge(AWP(step="after"))).step_inside
    assert AWP(steps=2, alternations=3).passes(2, 11) == 3 * 2 * 2 + 2 * 11


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (AWP, {"gamma": -1}, "awp gamma must be a number >= 0, got -1"),
        (AWP, {"steps": 0}, "awp steps must be a whole number >= 1, got 0"),
        (AWP, {"alternations": 1.5}, "awp alternations must be a whole number >= 1, got 1.5"),
        (AWP, {"warmup": -1}, "awp warmup must be a whole number >= 0, got -1"),
        (AWP, {"tensors": "conv2"}, "unknown awp tensors 'conv2'; known: all, conv, conv_named, matrices, weights"),
        (AWP, {"step": "before"}, "unknown awp step 'before'; known: after, inside"),
        (AWP, {"step_size": 0}, "awp step_size must be > 0, got 0"),
        (SAM, {"rho": float("nan")}, "sam rho must be a number >= 0, got nan"),
    ],
)
def test_bad_options_are_named(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        make(**options)


def test_a_network_without_such_tensors_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameter that 'conv' stands for"):
        AWP(tensors="conv").check(nn.Linear(2, 2))
