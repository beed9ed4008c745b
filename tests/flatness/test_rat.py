"""RAT with top-layer terms: golden values, the official procedure written out, and strengths of zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.hooks import Look, Moment, Penalty
from flatrock.core.rng import Seed
from flatrock.core.types import LABEL_TERMS, Objective, Parts, View, Views
from flatrock.flatness.rat import RAT
from flatrock.flatness.tensors import noise
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.objectives.at import AT
from flatrock.objectives.mart import MART
from flatrock.objectives.trades import TRADES

W = torch.tensor([[1, -0.5], [0.25, 0.75], [-1, 0.5]], dtype=torch.float64)
CLEAN = torch.tensor([[1, 2], [0.5, -1]], dtype=torch.float64)
ADV = torch.tensor([[0.5, 1], [1, -0.5]], dtype=torch.float64)
LABELS = torch.tensor([0, 2])


def at(step: int = 0) -> Moment:
    return Moment(epoch=1, step=step, share=0.0, seed=Seed(0))


def look(views: Views, y: Tensor, objective: Objective, model: nn.Module | None = None) -> Look:
    x = torch.zeros(0)  # the top-layer terms need no input and, unless one is given, no network
    return Look(model or nn.Identity(), x, x, y, views, objective.loss(views, y), at())


def whole(parts: Parts, penalty: Penalty | None) -> Tensor:
    """The sum the engine makes of an objective and a penalty, written out."""
    penalty = penalty or Penalty()
    factors = {name: penalty.label_factor if name in LABEL_TERMS else 1.0 for name in parts.terms}
    total = torch.zeros((), dtype=torch.float64)
    for name, term in parts.terms.items():
        total = total + factors[name] * parts.weights[name] * term
    for name, term in penalty.terms.items():
        total = total + penalty.weights[name] * term
    return total


def penalty_of(rat: RAT, seen: Look) -> Penalty:
    penalty = rat.in_loss(seen)
    assert penalty is not None
    return penalty


@pytest.fixture
def golden() -> Look:
    return look(Views(View(CLEAN, CLEAN @ W.T), View(ADV, ADV @ W.T)), LABELS, TRADES(beta=6.0))


def test_golden_objective(golden: Look) -> None:
    assert float(golden.parts.terms["ce"]) == pytest.approx(2.1675767600, abs=5e-11)
    assert float(golden.parts.terms["kl"]) == pytest.approx(0.0491194117, abs=5e-11)


@pytest.mark.parametrize(
    ("options", "second", "total"),
    [
        ({}, 0.8918494901, 2.2353402106),
        ({"second_pair": "paper", "ce_weight": "paper"}, 0.5981869834, 2.6394893119),
    ],
)
def test_golden_loss(options: dict[str, Any], second: float, total: float, golden: Look) -> None:
    penalty = penalty_of(RAT(eta=0.2, cc=0.8, **options), golden)
    assert list(penalty.terms) == ["rat_first", "rat_second"]
    assert float(penalty.terms["rat_first"]) == pytest.approx(0.5868869177, abs=5e-11)
    assert float(penalty.terms["rat_second"]) == pytest.approx(second, abs=5e-11)
    assert float(whole(golden.parts, penalty)) == pytest.approx(total, abs=5e-10)


def test_weights(golden: Look) -> None:
    penalty = penalty_of(RAT(eta=0.3), golden)
    assert penalty.weights == {"rat_first": 0.3, "rat_second": 0.15}
    assert penalty.label_factor == pytest.approx(0.7)
    penalty = penalty_of(RAT(eta=0.5, second_factor=0.4, ce_weight="paper"), golden)
    assert penalty.weights == {"rat_first": 0.5, "rat_second": 0.2}
    assert penalty.label_factor == 1


def test_first_order_only(golden: Look) -> None:
    one, two = penalty_of(RAT(order=1), golden), penalty_of(RAT(order=2), golden)
    assert list(one.terms) == list(one.weights) == ["rat_first"]
    assert one.weights["rat_first"] == two.weights["rat_first"]
    assert float(one.terms["rat_first"]) == float(two.terms["rat_first"])


# The official procedure, with a backward pass for each vector of row sums


def naive_matrix(v: Tensor, cc: float) -> Tensor:
    v = v - v.min()
    v = v / v.sum()
    matrix = v.repeat(len(v), 1)
    matrix.fill_diagonal_(0)
    matrix = cc * matrix / matrix.sum(1, keepdim=True)
    return matrix.fill_diagonal_(1 - cc)


def naive_kl(target: Tensor, logits: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(logits, 1), target, reduction="batchmean")


def naive_loss(model: Classifier, x: Tensor, x_adv: Tensor, y: Tensor, *, pair: str, eta: float, cc: float) -> Tensor:
    """Eight forward and two backward passes; y must be hard labels."""
    vectors = []
    for where in (x, x_adv):
        F.cross_entropy(model(where), y).backward()
        assert model.head.weight.grad is not None
        vectors.append(model.head.weight.grad.sum(1).clone())
        model.zero_grad()
    r, r_adv = vectors
    g1, g1_ = naive_matrix(r.abs() - r_adv.abs(), cc), naive_matrix(r_adv.abs() - r.abs(), cc)
    g2, g2_ = naive_matrix(r**2 - r_adv**2, cc), naive_matrix(r_adv**2 - r**2, cc)
    upper = g2_ if pair == "code" else g2
    first = (naive_kl(g1[y], model(x_adv)) + naive_kl(g1_[y], model(x))) / 2
    second = (naive_kl(upper[y], model(x_adv)) + naive_kl(g2_[y], model(x))) / 2
    natural, robust = F.cross_entropy(model(x), y), naive_kl(model(x).softmax(1), model(x_adv))
    return (1 - eta) * natural + 6 * robust + eta * first + 0.5 * eta * second


def images(n: int) -> tuple[Tensor, Tensor]:
    gen = Seed(0).child("images").generator()
    x = torch.rand(n, 1, 8, 8, generator=gen, dtype=torch.float64)
    return x, (x + 0.2 * torch.rand(x.shape, generator=gen, dtype=torch.float64)).clamp(0, 1)


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("pair", ["code", "paper"])
def test_loss_and_gradient_equal_the_official_procedure(pair: str) -> None:
    model = create_model("digits_cnn").double().train()
    (x, x_adv), y = images(12), torch.arange(12) % 10
    expected = naive_loss(model, x, x_adv, y, pair=pair, eta=0.3, cc=0.8)
    slopes = gradients(expected, model)
    views = Views(model.view(x), model.view(x_adv))
    seen = look(views, y, TRADES(beta=6.0))
    loss = whole(seen.parts, RAT(eta=0.3, second_pair=pair).in_loss(seen))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for got, slope in zip(gradients(loss, model), slopes, strict=True):
        assert torch.allclose(got, slope, rtol=1e-9, atol=1e-12)
    # The terms are a real part of that gradient.
    plain = gradients(look(Views(model.view(x), model.view(x_adv)), y, TRADES(beta=6.0)).parts.total, model)
    assert any(not torch.allclose(a, b, rtol=1e-2) for a, b in zip(plain, slopes, strict=True))


def test_targets_are_constants(golden: Look) -> None:
    """No gradient into features; into logits that of a divergence from fixed targets, (p - q)/(2n) per sample."""
    leaves = {k: v.clone().requires_grad_() for k, v in zip("fgzw", (CLEAN, ADV, CLEAN @ W.T, ADV @ W.T), strict=True)}
    views = Views(View(leaves["f"], leaves["z"]), View(leaves["g"], leaves["w"]))
    first = penalty_of(RAT(cc=0.8), look(views, LABELS, AT())).terms["rat_first"]
    got = torch.autograd.grad(first, list(leaves.values()), allow_unused=True)
    assert got[0] is None
    assert got[1] is None
    r = torch.tensor([-1.49421939, 1.07618194, 0.41803745], dtype=torch.float64)
    r_adv = torch.tensor([-0.39222538, 0.45635466, -0.06412928], dtype=torch.float64)
    for gradient, logits, gap in (
        (got[2], CLEAN @ W.T, r_adv.abs() - r.abs()),
        (got[3], ADV @ W.T, r.abs() - r_adv.abs()),
    ):
        expected = (logits.softmax(1) - naive_matrix(gap, 0.8)[LABELS]) / 4
        assert torch.allclose(gradient, expected, rtol=0, atol=5e-9)


# Labels, objectives, degenerate batches


@pytest.mark.parametrize("objective", [AT(), TRADES(), MART()])
def test_label_terms_of_every_objective_give_way(objective: Objective, golden: Look) -> None:
    seen = look(golden.views, LABELS, objective)
    penalty = penalty_of(RAT(eta=1.0), seen)
    kept = sum(w * seen.parts.terms[n] for n, w in seen.parts.weights.items() if n not in LABEL_TERMS)
    soft = penalty.terms["rat_first"] + 0.5 * penalty.terms["rat_second"]
    assert float(whole(seen.parts, penalty)) == pytest.approx(float(kept + soft), rel=1e-14)


def test_unlabeled_samples_do_not_count(golden: Look) -> None:
    clean, adv = golden.views.clean, golden.views.adv
    assert clean is not None
    assert adv is not None
    more = [View(torch.cat([v.features, 9 * v.features]), torch.cat([v.logits, 7 - v.logits])) for v in (clean, adv)]
    longer = look(Views(*more), torch.tensor([0, 2, -1, -1]), TRADES())
    for name, term in penalty_of(RAT(), longer).terms.items():
        assert float(term) == pytest.approx(float(penalty_of(RAT(), golden).terms[name]), rel=1e-14)


def test_one_hot_rows_are_hard_labels(golden: Look) -> None:
    rows = look(golden.views, F.one_hot(LABELS, 3).double(), TRADES())
    for name, term in penalty_of(RAT(), rows).terms.items():
        assert float(term) == pytest.approx(float(penalty_of(RAT(), golden).terms[name]), rel=1e-14)


@pytest.mark.parametrize("cc", [None, 0.8])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("case", ["same passes", "zero head", "no labels"])
def test_degenerate_batches_are_finite(case: str, classes: int, cc: float | None) -> None:
    gen = Seed(0).child("degenerate").generator()
    clean, adv = torch.randn(2, 6, classes, generator=gen)
    if case == "zero head":
        clean, adv = torch.zeros_like(clean), torch.zeros_like(adv)
    if case == "same passes":
        adv = clean.clone()
    y = torch.full((6,), -1) if case == "no labels" else torch.arange(6) % classes
    logits = [z.requires_grad_() for z in (clean, adv)]
    seen = look(Views(*(View(torch.ones(6, 4), z) for z in logits)), y, TRADES())
    penalty = penalty_of(RAT(cc=cc), seen)
    total = whole(seen.parts, penalty)
    assert bool(total.isfinite())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(total, logits))
    if case == "no labels":
        assert [float(t.detach()) for t in penalty.terms.values()] == [0, 0]


def test_a_missing_pass_is_an_error(golden: Look) -> None:
    with pytest.raises(RuntimeError, match="not given both"):
        RAT().in_loss(look(Views(None, golden.views.adv), LABELS, AT()))


# Strength zero, noise, options


@pytest.mark.parametrize("options", [{"eta": 0.0}, {"order": 0}, {"order": 0, "eta": 0.0, "sigma": 0.0}])
@pytest.mark.parametrize("terms", ["top_layer", "exact"])
def test_no_strength_adds_nothing(options: dict[str, Any], terms: str, golden: Look) -> None:
    rat = RAT(terms=terms, **options)
    assert rat.in_loss(golden) is None
    assert rat.needs == ()
    assert rat.passes(2, 10) == 0


def test_needs_and_passes() -> None:
    assert RAT().needs == RAT(order=1, sigma=0.0).needs == ("clean", "adv")
    assert RAT(terms="exact").needs == ()
    assert RAT().passes(2, 10) == 0
    assert RAT(terms="exact", order=1).passes(2, 10) == 4
    assert RAT(terms="exact", order=2).passes(2, 10) == 8
    assert not RAT().moves_weights


@pytest.mark.parametrize("noise_on", ["weights", "conv", "conv_named"])
def test_noise_before_the_attack(noise_on: str) -> None:
    model = create_model("digits_cnn")
    rat = RAT(sigma=0.01, noise_on=noise_on, order=0)
    shift = rat.before_attack(model, at(3))
    expected = noise(model, noise_on, 0.01, Seed(0).child("rat", 3))
    assert shift.keys() == expected.keys()
    assert all(torch.equal(shift[n], expected[n]) for n in shift)
    assert ("head.weight" in shift) == (noise_on == "weights")
    again, later = rat.before_attack(model, at(3)), rat.before_attack(model, at(4))
    assert all(torch.equal(shift[n], again[n]) and not torch.equal(shift[n], later[n]) for n in shift)


def test_no_noise() -> None:
    rat = RAT(sigma=0.0, noise_on="conv")
    model = create_model("moons_mlp")
    assert rat.before_attack(model, at()) == {}
    rat.check(model)


def test_check_refuses_a_network_without_such_tensors() -> None:
    RAT().check(create_model("moons_mlp"))
    with pytest.raises(ModelError, match="MoonsMLP"):
        RAT(noise_on="conv").check(create_model("moons_mlp"))
    with pytest.raises(ModelError, match=r"VGG.*'conv_named'.*set sigma to 0: the official code has no noise"):
        RAT(noise_on="conv_named").check(create_model("vgg16_bn"))
    RAT(noise_on="conv_named", sigma=0.0).check(create_model("vgg16_bn"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 3}, "order must be 0, 1 or 2, got 3"),
        ({"order": True}, "order"),
        ({"order": "2"}, "order"),
        ({"eta": -0.1}, "eta"),
        ({"eta": 1.5}, r"eta must lie in \[0, 1\], got 1.5"),
        ({"sigma": float("nan")}, "sigma"),
        ({"second_factor": -1.0}, "second_factor"),
        ({"noise_on": "all"}, "noise_on 'all'; known: conv, conv_named, weights"),
        ({"terms": "toplayer"}, "did you mean 'top_layer'"),
        ({"second_pair": "both"}, "second_pair"),
        ({"ce_weight": 0.8}, "ce_weight"),
        ({"cc": 1.1}, r"cc is a share of probability in \[0, 1\], got 1.1"),
        ({"cc": -0.1}, "cc"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"rat .*{message}"):
        RAT(**options)


def test_large_eta_where_labels_keep_their_weight() -> None:
    assert RAT(eta=1.5, ce_weight="paper").eta == RAT(eta=1.5, terms="exact").eta == 1.5
