"""The half-precision twin attacks craft with: its gradients, when it is trusted, what it says otherwise; counting."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.attacks.losses import cross_entropy, dlr
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf
from flatrock.core.types import SampleLoss
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.fast_model import AGREEMENT, Counted, half_model
from flatrock.models.sizes import rounded
from flatrock.models.twin import Twin

HALF = 2.0**-10  # rounding to float16 changes a number by half of this at most


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=Seed(1).generator())


def linear(scale: float = 1.0) -> nn.Sequential:
    """Without nonlinearities both precisions see the same network up to rounding; weights that float16 holds."""
    with kept_global_rng(seed=Seed(0).child("linear")):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)).eval().requires_grad_(False)
    for p in model.parameters():
        p.copy_((scale * p).half().float())
    return model


def gradient(model: nn.Module, x: Tensor, upstream: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(model(leaf), leaf, upstream)
    return grad


def relative_gap(a: Tensor, b: Tensor) -> float:
    """Largest difference of two rows, relative to the length of the second."""
    return float(((a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)).max())


# The twin


def test_takes_and_returns_float32_and_leaves_the_model_alone() -> None:
    model, x = linear(), uniform(6, 1, 8, 8)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fast = Twin(model)
    logits = fast(x)
    assert logits.dtype == torch.float32
    assert {p.dtype for p in fast.inner.parameters()} == {torch.float16}
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32 for k, v in model.state_dict().items())
    assert float((logits - model(x)).abs().max()) < 4 * HALF * float(model(x).abs().max())


@pytest.mark.parametrize("size", [1e-20, 1e-9, 1e-4, 1.0, 1e6, 1e20])
def test_gradients_of_any_size_are_those_of_float32(size: float) -> None:
    """float16 ends at 6e-8 and 65504: what attacks send back must be resized before it is cast, and restored after."""
    model, x = linear(), uniform(6, 1, 8, 8)
    upstream = size * (uniform(6, 5) - 0.5)
    fast = gradient(Twin(model), x, upstream)
    assert bool(torch.isfinite(fast).all())
    assert relative_gap(fast, gradient(model, x, upstream)) < 2 * HALF


def test_rows_of_very_different_size_do_not_disturb_each_other() -> None:
    model, x = linear(), uniform(4, 1, 8, 8)
    upstream = torch.tensor([1e-12, 0.0, 1.0, 1e8])[:, None] * (uniform(4, 5) - 0.5)
    fast, true = gradient(Twin(model), x, upstream), gradient(model, x, upstream)
    kept = torch.tensor([0, 2, 3])
    assert relative_gap(fast[kept], true[kept]) < 2 * HALF
    assert bool((fast[1] == 0).all()), "no gradient stays no gradient"


def test_powers_of_two_are_undone_exactly() -> None:
    """A gradient whose largest entry is a power of two comes back as float16 alone would have had it, bit by bit."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 4, bias=False)).requires_grad_(False)
    model[1].weight.copy_((uniform(4, 8) - 0.5).half())
    upstream = torch.zeros(3, 4)
    upstream[:, 2] = torch.tensor([2.0**-60, 1.0, -(2.0**40)])
    fast = gradient(Twin(model), uniform(3, 8), upstream)
    assert torch.equal(fast, upstream[:, 2:3] * model[1].weight[2])


@pytest.mark.parametrize("loss", [cross_entropy, dlr])
def test_confident_samples_keep_their_gradient(loss: SampleLoss) -> None:
    """With a margin of 30 the gradient of cross-entropy is 1e-13: nothing to float16, still a direction."""
    model = linear(16.0)
    x = uniform(64, 1, 8, 8)
    logits = model(x)
    y = logits.argmax(1)
    margins = -logits.topk(2, dim=1).values.diff(dim=1).squeeze(1)
    sure = ((margins > 20) & (margins < 60)).nonzero().squeeze(1)
    assert len(sure) >= 10
    fast = Twin(model)

    def direction(network: nn.Module) -> Tensor:
        leaf = x[sure].requires_grad_(True)
        (grad,) = torch.autograd.grad(loss(network(leaf), y[sure]).sum(), leaf)
        return grad.double().flatten(1) / grad.double().flatten(1).norm(dim=1, keepdim=True)

    assert float((direction(fast) * direction(model)).sum(1).min()) > 0.99


def test_several_backward_passes_through_one_forward() -> None:
    """FAB asks for the gradient of one logit difference after the other, of different size each."""
    model, x = linear(), uniform(3, 1, 8, 8)
    leaf = x.clone().requires_grad_(True)
    logits = Twin(model)(leaf)
    for size in (1.0, 1e-9, 1e7):
        upstream = size * (uniform(3, 5) - 0.5)
        (grad,) = torch.autograd.grad(logits, leaf, upstream, retain_graph=True)
        assert relative_gap(grad, gradient(model, x, upstream)) < 2 * HALF


# Whether it is trusted


def test_a_model_that_can_is_run_in_half_precision() -> None:
    fast, note = half_model(linear(), uniform(20, 1, 8, 8))
    assert fast is not None
    assert note == "float16, fused"


def test_batch_norm_and_vectors_run_too() -> None:
    with kept_global_rng(seed=Seed(0).child("vectors")):
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    fast, note = half_model(model, uniform(20, 6))
    assert fast is not None
    assert note == "float16, fused"
    assert not any(p.requires_grad for p in fast.parameters())


class Constant(nn.Module):
    """Multiplies with a tensor that is neither parameter nor buffer, so it stays float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ torch.ones(4, 3)


class OnlyFloat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("only float32\n(and a long explanation)")
        return x.flatten(1)


class Wordless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1)


class Huge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1e6 * x.flatten(1)


class Steep(nn.Module):
    """Outputs that float16 holds; the gradient on the way back is 200 times larger in between."""

    def forward(self, x: Tensor) -> Tensor:
        return 200 * (x.flatten(1) / 200)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Constant(), r"it does not run in half precision \(RuntimeError: .+\)"),
        (OnlyFloat(), r"it does not run in half precision \(TypeError: only float32\)"),
        (Wordless(), r"it does not run in half precision \(ValueError: \)"),
        (Opaque(), r"it does not run in half precision \(RuntimeError: .*grad.*\)"),
        (Huge(), "half precision overflows on its clean inputs"),
        (Steep(), "half precision overflows in its gradients"),
    ],
)
def test_a_model_that_cannot_says_why(model: nn.Module, reason: str) -> None:
    fast, note = half_model(model, uniform(5, 4))
    assert fast is None
    assert re.fullmatch(reason, note), note


class Cliff(nn.Module):
    """Class 1 from a threshold on that float16 cannot tell from the inputs below it."""

    def forward(self, x: Tensor) -> Tensor:
        over = (x[:, :1] > 0.50001).to(x.dtype)
        return torch.cat([1 - over + 0 * x[:, :1], over], 1)


@pytest.mark.parametrize(("changed", "trusted"), [(2, True), (3, False)])
def test_predictions_must_agree(changed: int, trusted: bool) -> None:
    """Of 100 predictions two may change."""
    assert AGREEMENT == 0.98
    x = torch.full((100, 1), 0.25)
    x[:changed] = 0.50002  # rounded to 0.5
    fast, note = half_model(Cliff(), x)
    assert (fast is not None) == trusted
    assert note == ("float16, fused" if trusted else "half precision changes 3.0 % of its clean predictions")


class Alias(nn.Module):
    """Changes a tensor in place and reads it under another name: a trace misses that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(x)
        second = first
        first += torch.flip(x, (1,)) * 9
        return second


def test_a_network_that_a_trace_gets_wrong_is_not_traced() -> None:
    model, x = Alias().eval().requires_grad_(False), uniform(50, 4)
    fast, note = half_model(model, x)
    assert fast is not None
    assert note == "float16"
    assert float((fast(x) - model(x)).abs().max()) < 4 * HALF * float(model(x).abs().max())


def test_an_evaluation_in_half_precision_finds_what_full_precision_finds(digits: Any, digits_model: nn.Module) -> None:
    x, y = digits.test_x[:60], digits.test_y[:60]
    half = evaluate(digits_model, x, y, Linf(0.1), attacks=["pgd-5"], precision="half")
    full = evaluate(digits_model, x, y, Linf(0.1), attacks=["pgd-5"], precision="full")
    assert (half.provenance["precision"], full.provenance["precision"]) == ("float16, fused", "float32")
    assert half.findings == full.findings == ()
    assert abs(half.robust - full.robust) <= 1 / 60
    assert half.costs["pgd-5"]["forwards"] == pytest.approx(full.costs["pgd-5"]["forwards"], rel=0.02)


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are filled up as on a GPU."""
    for user in ("sizes", "twin"):
        monkeypatch.setattr(f"flatrock.models.{user}.size_for", lambda x: rounded(x.shape[0]))


def test_filled_batches_cost_and_find_the_same(
    digits: Any, digits_model: nn.Module, request: pytest.FixtureRequest
) -> None:
    x, y = digits.test_x[:50], digits.test_y[:50]
    plan = ["pgd-5", "apgd-t:steps=3", "square:queries=20"]
    one = evaluate(digits_model, x, y, Linf(0.1), attacks=plan, precision="half", batch_size=50)
    request.getfixturevalue("few_sizes")
    two = evaluate(digits_model, x, y, Linf(0.1), attacks=plan, precision="half", batch_size=50)
    assert 0 < one.robust < one.clean
    for name in one.flags:
        assert torch.equal(one.flags[name], two.flags[name])
    for name in plan_labels(one):
        for count in ("forwards", "backwards"):
            assert one.costs[name][count] == two.costs[name][count]


def plan_labels(result: Result) -> list[str]:
    return [name for name in result.flags if name != "clean"]


class Small(nn.Module):
    """A network for which memory is short: it takes so many rows at most, where gradients are wanted."""

    def __init__(self, inner: nn.Module, room: int) -> None:
        super().__init__()
        self.inner, self.room = inner, room

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and bool(x.shape[0] > self.room):
            raise torch.OutOfMemoryError("no room")
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("room", [1, 4, 16])
def test_a_batch_is_not_filled_beyond_what_was_asked_for(
    digits: Any, digits_model: nn.Module, few_sizes: None, room: int
) -> None:
    x, y = digits.test_x[:20], digits.test_y[:20]
    model = Small(digits_model, room).eval()
    result = evaluate(model, x, y, Linf(0.1), attacks=["pgd-3"], precision="half", batch_size=room)
    assert result.provenance["precision"] == "float16"
    assert 0 < result.robust < result.clean


def test_where_gradients_take_too_much_memory_batches_are_halved(digits: Any, digits_model: nn.Module) -> None:
    """Also those of the first look at them."""
    x, y = digits.test_x[:100], digits.test_y[:100]
    result = evaluate(Small(digits_model, 30).eval(), x, y, Linf(0.1), attacks=["pgd-3"], precision="full")
    roomy = evaluate(digits_model, x, y, Linf(0.1), attacks=["pgd-3"], precision="full")
    assert result.provenance["batch_size"] == 25
    assert torch.equal(result.flags["pgd-3"], roomy.flags["pgd-3"])
    assert result.findings == roomy.findings


@pytest.mark.gpu
@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.6)], ids=["linf", "l2"])
def test_the_twin_on_a_gpu(digits: Any, digits_model: nn.Module, threat: Linf | L2) -> None:
    x, y = digits.test_x, digits.test_y
    plan = ["pgd-20", "fast", "fab-t:steps=10"]
    full = evaluate(digits_model, x, y, threat, attacks=plan, precision="full", device="cuda")
    half = evaluate(digits_model, x, y, threat, attacks=plan, device="cuda")
    assert half.provenance["precision"] == "float16, fused"
    assert abs(half.robust - full.robust) <= 0.01
    assert not {f.code for f in half.findings} & {"E06", "E13"}


# Counting


def test_rows_are_counted_forward_and_backward() -> None:
    model = Counted(linear())
    x = uniform(6, 1, 8, 8)
    with torch.no_grad():
        model(x)
    assert model.taken() == (6, 0)
    leaf = x[:4].clone().requires_grad_(True)
    logits = model(leaf)
    assert (model.forwards, model.backwards) == (4, 0), "a backward pass counts when it happens"
    torch.autograd.grad(logits[:, 0].sum(), leaf, retain_graph=True)
    torch.autograd.grad(logits[:, 1].sum(), leaf)
    assert model.taken() == (4, 8)
    assert model.taken() == (0, 0)
    assert torch.equal(model(x), model.inner(x))


def test_costs_of_an_attack_are_its_passes() -> None:
    x = uniform(10, 1, 8, 8)
    y = linear()(x).argmax(1)
    costs = evaluate(linear(), x, y, Linf(0.0), attacks=["pgd-7", "pgd-3:restarts=2", "square:queries=20"]).costs
    assert (costs["pgd-7"]["forwards"], costs["pgd-7"]["backwards"]) == (10 * 7 + 10, 10 * 7)
    assert (costs["pgd-3:restarts=2"]["forwards"], costs["pgd-3:restarts=2"]["backwards"]) == (10 * 9, 10 * 6)
    assert costs["square:queries=20"]["backwards"] == 0
