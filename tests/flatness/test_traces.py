"""Closed-form traces of the top layer against the Hessian that autograd computes from the loss itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from objective_cases import ROWS
from torch import Tensor
from torch.autograd.functional import hessian

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.core.types import Parts, View, Views
from flatrock.flatness import traces
from flatrock.objectives.catalog import OBJECTIVES

# The loss of one sample as a function of clean and adversarial logits, written here a second time.
SampleLoss = Callable[[Tensor, Tensor, int], Tensor]


def naive_kl(z: Tensor, z_adv: Tensor, y: int) -> Tensor:
    return (z.softmax(0) * (z.log_softmax(0) - z_adv.log_softmax(0))).sum()


def naive_boost(z: Tensor, z_adv: Tensor, y: int) -> Tensor:
    t = z_adv.softmax(0)
    seen = t.tolist()
    return -torch.log(1 - t[max((k for k in range(len(t)) if k != y), key=lambda k: seen[k])])


NAIVE: dict[str, SampleLoss] = {
    "ce": lambda z, z_adv, y: -z.log_softmax(0)[y],
    "ce_adv": lambda z, z_adv, y: -z_adv.log_softmax(0)[y],
    "kl": naive_kl,
    "wkl": lambda z, z_adv, y: (1 - z.softmax(0)[y]) * naive_kl(z, z_adv, y),
    "boost": naive_boost,
    "pair_logits": lambda z, z_adv, y: (z - z_adv).square().sum(),
    "pair_probabilities": lambda z, z_adv, y: (z.softmax(0) - z_adv.softmax(0)).square().sum(),
}
PAIRS = ("kl", "wkl", "pair_logits", "pair_probabilities")


def hessian_trace(loss: SampleLoss, w: Tensor, f: Tensor, f_adv: Tensor, y: int, *, stop: bool) -> float:
    def of(weights: Tensor) -> Tensor:
        z = weights @ f
        return loss(z.detach() if stop else z, weights @ f_adv, y)

    dense = hessian(of, w).reshape(w.numel(), w.numel())
    return float(dense.trace())


def case(classes: int, width: int, seed: int, scale: float = 1.5) -> tuple[Tensor, Tensor, Tensor, int]:
    gen = Seed(seed).child("trace", classes, width).generator()
    draw = [scale * torch.randn(*s, generator=gen, dtype=torch.float64) for s in ((classes, width), (width,), (width,))]
    w, f, f_adv = draw[0] / width**0.5, draw[1], draw[2]
    return w, f, f_adv, int(torch.randint(classes, (1,), generator=gen))


def as_views(w: Tensor, f: Tensor, f_adv: Tensor, b: Tensor | None = None) -> Views:
    return Views(*(View(features=v[None], logits=F.linear(v[None], w, b)) for v in (f, f_adv)))


@pytest.mark.parametrize("full", [False, True], ids=["stop", "full"])
@pytest.mark.parametrize("name", NAIVE)
def test_every_form_is_the_trace_of_the_hessian(name: str, full: bool) -> None:
    for seed, (classes, width) in enumerate([(3, 4), (5, 7), (10, 3), (4, 4), (7, 2)]):
        w, f, f_adv, y = case(classes, width, seed)
        got = traces.term_trace(name, as_views(w, f, f_adv), torch.tensor([y]), full=full)
        expected = hessian_trace(NAIVE[name], w, f, f_adv, y, stop=name in PAIRS and not full)
        assert got.shape == (1,)
        assert float(got) == pytest.approx(expected, rel=1e-10, abs=1e-11)


@pytest.mark.parametrize("full", [False, True], ids=["stop", "full"])
@pytest.mark.parametrize("name", NAIVE)
def test_the_bias_is_one_more_input_that_is_always_one(name: str, full: bool) -> None:
    w, f, f_adv, y = case(5, 7, seed=3)
    one = torch.ones(1, dtype=torch.float64)
    b = case(5, 7, seed=4)[0][:, 0]
    joined = torch.cat([w, b[:, None]], 1)
    expected = hessian_trace(
        NAIVE[name], joined, torch.cat([f, one]), torch.cat([f_adv, one]), y, stop=name in PAIRS and not full
    )
    got = traces.term_trace(name, as_views(w, f, f_adv, b), torch.tensor([y]), full=full, bias=True)
    assert float(got) == pytest.approx(expected, rel=1e-10, abs=1e-11)


def test_every_form_has_a_row_here() -> None:
    assert {*NAIVE, "ce_helper"} == set(traces.TERMS), "the helper's is met in whole objectives"


# Golden values: W = [[1, -.5], [.25, .75], [-1, .5]], f = (1, 2), f' = (.5, -1), y = 0

GOLD_W = torch.tensor([[1, -0.5], [0.25, 0.75], [-1, 0.5]], dtype=torch.float64)
GOLD = as_views(GOLD_W, torch.tensor([1, 2.0], dtype=torch.float64), torch.tensor([0.5, -1], dtype=torch.float64))
GOLD_Y = torch.tensor([0])


@pytest.mark.parametrize(
    ("name", "stop", "full"),
    [
        ("ce", 2.0802264811, 2.0802264811),
        ("ce_adv", 0.5055210209, 0.5055210209),
        ("kl", 0.5055210209, 1.0468348585),
        ("pair_probabilities", -0.3253950060, -0.9348874911),
        ("pair_logits", 7.5, 55.5),
        ("boost", 0.2430370573, 0.2430370573),
        ("wkl", 0.4403312178, 1.5247356254),
    ],
)
def test_golden_values(name: str, stop: float, full: float) -> None:
    assert float(traces.term_trace(name, GOLD, GOLD_Y, full=False)) == pytest.approx(stop, abs=6e-11)
    assert float(traces.term_trace(name, GOLD, GOLD_Y, full=True)) == pytest.approx(full, abs=6e-11)


def test_forms_the_paper_misprints_are_not_the_trace() -> None:
    """Its KL has <f, f'> three times and half of the ratio term; its MART loses the weight 1 - s_y."""
    w, f, f_adv, y = GOLD_W, *(torch.tensor(v, dtype=torch.float64) for v in ([1.0, 2], [0.5, -1])), 0
    s, t = (w @ f).softmax(0), (w @ f_adv).softmax(0)
    a = s.log() - t.log()
    spread, ratio = 1 - s @ s, (s * s * (a - s @ a)).sum()
    stopped = f_adv @ f_adv * (1 - t @ t)
    printed = stopped - 3 * f @ f_adv * spread + f @ f * (spread - ratio)
    assert float(printed) != pytest.approx(hessian_trace(NAIVE["kl"], w, f, f_adv, y, stop=False), rel=0.1)
    assert float(stopped) != pytest.approx(hessian_trace(NAIVE["wkl"], w, f, f_adv, y, stop=True), rel=0.1)


@pytest.mark.parametrize("bias", [False, True])
def test_without_perturbation_the_full_kl_is_flat(bias: bool) -> None:
    w, f, _, _ = case(6, 5, seed=9)
    views = as_views(w, f, f)
    assert views.clean is not None and views.adv is not None
    assert float(traces.kl(views.clean, views.adv, full=False, bias=bias)) > 0.1
    assert float(traces.kl(views.clean, views.adv, full=True, bias=bias)) == pytest.approx(0, abs=1e-13)


@pytest.mark.parametrize("full", [False, True], ids=["stop", "full"])
@pytest.mark.parametrize("name", NAIVE)
def test_gradients_reach_features_and_logits_of_what_the_form_looks_at(name: str, full: bool) -> None:
    gen = Seed(1).child("gradcheck").generator()
    leaves = [torch.randn(3, d, generator=gen, dtype=torch.float64, requires_grad=True) for d in (4, 5, 4, 5)]
    y = torch.tensor([0, 3, 4])

    def of(f: Tensor, z: Tensor, f_adv: Tensor, z_adv: Tensor) -> Tensor:
        return traces.term_trace(name, Views(View(f, z), View(f_adv, z_adv)), y, full=full)

    assert torch.autograd.gradcheck(of, leaves)
    grads = torch.autograd.grad(of(*leaves).sum(), leaves, materialize_grads=True)
    reached = [bool((g != 0).any()) for g in grads]
    logits_free = name == "pair_logits"
    clean = name == "ce" or (name in PAIRS and full)
    clean_logits = clean or (name in ("wkl", "pair_probabilities"))  # a stopped side still shapes the trace
    assert reached == [clean, clean_logits and not logits_free, name != "ce", name != "ce" and not logits_free]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("full", [False, True], ids=["stop", "full"])
@pytest.mark.parametrize("name", NAIVE)
def test_extreme_logits_give_finite_traces_and_gradients(name: str, full: bool, dtype: torch.dtype) -> None:
    rows = [[1e4, 0, -1e4], [0, 0, 0], [-1e4, 1e4, 0], [300, -300, 0], [88, -88, 88]]
    z = torch.tensor(rows, dtype=dtype, requires_grad=True)
    z_adv = torch.tensor([rows[2], rows[3], rows[0], rows[4], rows[1]], dtype=dtype, requires_grad=True)
    f = torch.ones(5, 2, dtype=dtype, requires_grad=True)
    y = torch.tensor([0, 1, 2, 1, 0])
    trace = traces.term_trace(name, Views(View(f, z), View(f, z_adv)), y, full=full)
    grads = torch.autograd.grad(trace.sum(), (f, z, z_adv), materialize_grads=True)
    assert all(bool(torch.isfinite(v).all()) for v in (trace, *grads))


def test_the_margin_keeps_its_digits_where_the_wrong_class_is_all_but_certain() -> None:
    """float32 against the Hessian of log sum_k exp z_k - log sum_{k != 1} exp z_k; the textbook form fails."""
    w = torch.tensor([[0.0, 0], [19, 0], [0.5, 0], [-1, 0]], dtype=torch.float64)
    f = torch.tensor([1.0, 1], dtype=torch.float64)
    expected = hessian_trace(lambda z, _, y: z.logsumexp(0) - z[[0, 2, 3]].logsumexp(0), w, f, f, 0, stop=False)
    z = (w @ f)[None].float()
    got = traces.boost(View(f[None].float(), z), torch.tensor([0]))
    assert float(got) == pytest.approx(expected, rel=1e-6)
    assert expected < -1
    t = z.softmax(1)[0]
    q, m = t[1], t.square().sum()
    textbook = 2 * (2 * q * (m - q) / (1 - q) + q**2 * (1 - 2 * q + m) / (1 - q) ** 2)
    assert not abs(float(textbook) - expected) < 0.1


# Whole objectives


def small_batch(classes: int = 4, width: int = 3, n: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gen = Seed(5).child("objective").generator()
    w, f, f_adv = (torch.randn(*s, generator=gen, dtype=torch.float64) for s in ((classes, width), *[(n, width)] * 2))
    return w, f, f_adv, torch.randint(classes, (n,), generator=gen)


def linear_views(w: Tensor, f: Tensor, f_adv: Tensor, *, stop: bool = False) -> Views:
    """With a helper's pass, for the objective that has one; its labels are any."""
    z, beyond = f @ w.T, 2 * f_adv - f
    said = torch.arange(len(f)) % len(w)
    return Views(View(f, z.detach() if stop else z), View(f_adv, f_adv @ w.T), View(beyond, beyond @ w.T), said)


def dense_trace(loss: Callable[[Tensor], Tensor], w: Tensor) -> float:
    return float(hessian(loss, w).reshape(w.numel(), w.numel()).trace())


@pytest.mark.parametrize("labels", ["hard", "one without", "rows"])
@pytest.mark.parametrize(("name", "options"), [r for r in ROWS if r[1].get("form") != "code"])
def test_the_trace_of_an_objective_is_that_of_its_loss(name: str, options: dict[str, Any], labels: str) -> None:
    objective = OBJECTIVES.make(name, **options)
    w, f, f_adv, y = small_batch()
    if labels == "one without":
        y[[1, 4]] = -1
    elif labels == "rows":
        y = torch.ones(6, 4, dtype=torch.float64).scatter_(1, y[:, None], 5.0) / 8
    if labels != "hard" and objective.hard_labels:
        return
    views = linear_views(w, f, f_adv)
    got = traces.loss_trace(objective.loss(views, y), views, y, full=True)
    expected = dense_trace(lambda v: objective.loss(linear_views(v, f, f_adv), y).total, w)
    assert float(got) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("ce", "share"), [("adv", 0.5055210209), ("clean", 2.0802264811)])
@pytest.mark.parametrize(("full", "wkl"), [(False, 0.4403312178), (True, 1.5247356254)], ids=["stop", "full"])
def test_golden_trace_of_mart_wherever_its_cross_entropy_is(ce: str, share: float, full: bool, wkl: float) -> None:
    """In the TrH appendix it is at x: ||f||^2 (1 - ||s||^2)."""
    parts = OBJECTIVES.make("mart", beta=5.0, ce=ce).loss(GOLD, GOLD_Y)
    assert float(traces.loss_trace(parts, GOLD, GOLD_Y, full=full)) == pytest.approx(
        share + 0.2430370573 + 5 * wkl, abs=4e-10
    )


def test_the_stopped_trace_of_trades_is_that_of_its_loss_with_clean_logits_detached_in_the_kl() -> None:
    trades = OBJECTIVES.make("trades", beta=3.0)
    w, f, f_adv, y = small_batch()
    y[2] = -1
    views = linear_views(w, f, f_adv)
    got = traces.loss_trace(trades.loss(views, y), views, y, full=False)

    def loss(v: Tensor) -> Tensor:
        ce = trades.loss(linear_views(v, f, f_adv), y).terms["ce"]
        return ce + 3.0 * trades.loss(linear_views(v, f, f_adv, stop=True), y).terms["kl"]

    assert float(got) == pytest.approx(dense_trace(loss, w), rel=1e-10)
    assert float(got) != pytest.approx(float(traces.loss_trace(trades.loss(views, y), views, y, full=True)), rel=0.05)


def test_terms_of_weight_zero_are_left_out_and_without_labels_there_is_no_cross_entropy() -> None:
    w, f, f_adv, y = small_batch()
    views = linear_views(w, f, f_adv)
    one = f.sum()
    parts = Parts({"ce": one, "kl": one}, {"ce": 1.0, "kl": 0.0})
    only_ce = Parts({"ce": one}, {"ce": 1.0})
    assert torch.equal(traces.loss_trace(parts, views, y, full=False), traces.loss_trace(only_ce, views, y, full=False))
    assert float(traces.loss_trace(only_ce, views, torch.full_like(y, -1), full=False)) == 0


def test_an_unknown_term_is_named_with_the_choices() -> None:
    w, f, f_adv, y = small_batch()
    with pytest.raises(ConfigError, match=r"'klee'.*ce, ce_adv.*did you mean 'kl'"):
        traces.loss_trace(Parts({"klee": f.sum()}, {"klee": 1.0}), linear_views(w, f, f_adv), y, full=False)
