"""Training losses: gradients, extreme logits, soft and missing labels, passes, and options that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from objective_cases import ROWS, batch, views
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.types import Objective
from flatrock.objectives.alp import ALP
from flatrock.objectives.at import AT
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.objectives.hat import HAT
from flatrock.objectives.mart import MART
from flatrock.objectives.terms import cross_entropy, kl_per_sample
from flatrock.objectives.trades import TRADES


def test_defaults_are_the_papers() -> None:
    assert TRADES() == TRADES(beta=6.0, forwards="paper")
    assert MART() == MART(beta=5.0, form="paper", ce="adv")
    assert ALP() == ALP(weight=0.5, pair="logits", stop_clean=False)


# Gradients


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_gradients_equal_finite_differences(name: str, options: dict[str, Any]) -> None:
    clean, adv, y = batch(6, 4)
    objective = OBJECTIVES.make(name, **options)

    def total(a: Tensor, b: Tensor) -> Tensor:
        return objective.loss(views(a, b), y).total

    assert torch.autograd.gradcheck(total, (clean.requires_grad_(True), adv.requires_grad_(True)))


def grads(objective: Objective, y: Tensor, clean: Tensor, adv: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = clean.clone().requires_grad_(True), adv.clone().requires_grad_(True)
    total = objective.loss(views(a, b), y).total
    found = torch.autograd.grad(total, (a, b), allow_unused=True)
    return found[0], found[1]


def test_the_clean_branch_of_the_divergence_has_a_gradient() -> None:
    """No stop-gradient: the KL alone pulls on the clean logits of TRADES and MART."""
    clean, adv, _ = batch(10)
    clean.requires_grad_(True)
    (grad,) = torch.autograd.grad(kl_per_sample(clean, adv).mean(), clean)
    assert float(grad.abs().min(1).values.max()) > 1e-6
    y = batch(10)[2]
    bare, _ = grads(TRADES(beta=0.0), y, clean.detach(), adv)
    full, _ = grads(TRADES(beta=6.0), y, clean.detach(), adv)
    assert bare is not None
    assert full is not None
    torch.testing.assert_close(full - bare, 6 * grad)


def test_stop_clean_detaches_the_clean_side_only() -> None:
    clean, adv, y = batch(10)
    flowing, stopped = ALP(weight=1.0), ALP(weight=1.0, stop_clean=True)
    assert float(flowing.loss(views(clean, adv), y).total) == float(stopped.loss(views(clean, adv), y).total)
    with_clean, with_adv = grads(flowing, y, clean, adv)
    without_clean, without_adv = grads(stopped, y, clean, adv)
    assert with_clean is not None
    assert without_clean is None
    assert with_adv is not None
    assert without_adv is not None
    torch.testing.assert_close(with_adv, without_adv)


def test_equal_passes_have_no_divergence() -> None:
    clean, _, y = batch()
    for objective, term in ((TRADES(), "kl"), (MART(), "wkl"), (ALP(), "pair_logits")):
        assert float(objective.loss(views(clean, clean), y).terms[term]) == pytest.approx(0, abs=1e-14)


# MART at its limits


def test_mart_forms_agree_to_the_order_of_the_constants() -> None:
    clean, adv, y = batch(200, scale=1.0)
    t = adv.softmax(1)
    t_kappa = t.masked_fill(nn.functional.one_hot(y, 5).bool(), 0).amax(1)
    paper = MART().loss(views(clean, adv), y).terms
    code = MART(form="code").loss(views(clean, adv), y).terms
    gap = float(paper["boost"] - code["boost"])
    assert 0 < gap < 1.01e-4 * float((1 / (1 - t_kappa)).mean())
    assert float(paper["wkl"]) == pytest.approx(float(code["wkl"]), rel=1e-5)
    assert float(paper["wkl"]) != float(code["wkl"])


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_mart_is_finite_where_the_wrong_class_is_certain(form: str, size: float) -> None:
    """t_kappa rounds to 1 in float32; log(1 - t_kappa) must not become minus infinity."""
    adv = torch.tensor([[-size, size, 0.0], [-size, size, -size]], requires_grad=True)
    clean = torch.tensor([[size, -size, 0.0], [-size, size, 0.0]], requires_grad=True)
    parts = MART(form=form).loss(views(clean, adv), torch.tensor([0, 0]))
    found = torch.autograd.grad(parts.total, (clean, adv))
    assert bool(torch.isfinite(parts.total))
    assert all(bool(torch.isfinite(g).all()) for g in found)
    if form == "paper":
        log_rest = [-size, math.log(2) - 2 * size]  # the class at 0 leads the rest of row one, a tie that of row two
        assert float(parts.terms["boost"].detach()) == pytest.approx(-sum(log_rest) / 2, rel=1e-6)


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_losses_are_finite_at_extreme_logits(name: str, options: dict[str, Any]) -> None:
    clean = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]], requires_grad=True)
    adv = torch.tensor([[-1e4, 1e4, 0.0], [1e4, 1e4, -1e4]], requires_grad=True)
    total = OBJECTIVES.make(name, **options).loss(views(clean, adv), torch.tensor([0, 2])).total
    found = torch.autograd.grad(total, (clean, adv), allow_unused=True)
    assert bool(torch.isfinite(total))
    assert all(g is None or bool(torch.isfinite(g).all()) for g in found)


def test_mart_with_two_classes() -> None:
    """The only other class is kappa, so 1 - t_kappa = t_y."""
    clean, adv, y = batch(20, 2)
    t = adv.softmax(1)
    own = t.gather(1, y[:, None]).squeeze(1)
    got = MART().loss(views(clean, adv), y).terms
    torch.testing.assert_close(got["boost"], -own.log().mean())
    torch.testing.assert_close(got["ce_adv"], -own.log().mean())


# Labels


@pytest.mark.parametrize("name", ["standard", "at", "trades", "gat", "alp"])
def test_soft_labels(name: str) -> None:
    clean, adv, y = batch(12)
    objective = OBJECTIVES.make(name)
    assert not objective.hard_labels
    hard = objective.loss(views(clean, adv), y)
    one_hot = nn.functional.one_hot(y, 5).double()
    torch.testing.assert_close(objective.loss(views(clean, adv), one_hot).total, hard.total)
    mixed = 0.3 * one_hot + 0.7 * one_hot.flip(0)
    on_clean = name in ("standard", "trades", "gat")
    logits = clean if on_clean else adv
    by_hand = -sum(
        w * math.log(p)
        for ws, ps in zip(mixed.tolist(), logits.softmax(1).tolist(), strict=True)
        for w, p in zip(ws, ps, strict=True)
        if w > 0
    )
    term = "ce" if on_clean else "ce_adv"
    assert float(objective.loss(views(clean, adv), mixed).terms[term]) == pytest.approx(by_hand / 12, rel=1e-12)


def test_mart_asks_for_hard_labels() -> None:
    assert MART().hard_labels


def test_unlabeled_samples_of_trades_take_part_in_the_divergence_only() -> None:
    clean, adv, y = batch(20)
    labelled = torch.arange(20) % 3 == 0
    some = y.where(labelled, torch.tensor(-1))
    got = TRADES().loss(views(clean, adv), some)
    everything = TRADES().loss(views(clean, adv), y)
    only = TRADES().loss(views(clean[labelled], adv[labelled]), y[labelled])
    torch.testing.assert_close(got.terms["kl"], everything.terms["kl"])
    torch.testing.assert_close(got.terms["ce"], only.terms["ce"])
    found, _ = grads(TRADES(beta=0.0), some, clean, adv)
    assert found is not None
    assert float(found[~labelled].abs().max()) == 0
    assert float(found[labelled].abs().min(1).values.min()) > 0


def test_a_batch_without_labels_has_cross_entropy_zero() -> None:
    clean, adv, _ = batch(8)
    nobody = torch.full((8,), -1)
    assert float(cross_entropy(clean, nobody)) == 0
    parts = TRADES().loss(views(clean, adv), nobody)
    torch.testing.assert_close(parts.total, 6 * parts.terms["kl"])


# Passes and options


@pytest.mark.parametrize(
    ("name", "options", "passes", "inner"),
    [
        ("standard", {}, ("clean",), "none"),
        ("at", {}, ("adv",), "ce"),
        ("at", {"forwards": "s2o_code"}, ("clean", "adv", "clean", "adv"), "ce"),
        ("mart", {}, ("clean", "adv"), "ce"),
        ("alp", {}, ("clean", "adv"), "ce"),
        ("trades", {}, ("clean", "adv"), "kl"),
        ("hat", {"helper": "runs/some"}, ("clean", "adv", "helper"), "kl"),
        ("hat", {"gamma": 0}, ("clean", "adv"), "kl"),
        ("hat", {"helper": "runs/some", "form": "at"}, ("clean", "adv", "helper"), "ce"),
        ("gat", {}, ("clean", "adv"), "guided"),
        ("trades", {"forwards": "paper"}, ("clean", "adv"), "kl"),
        ("trades", {"forwards": "code"}, ("clean", "adv", "clean"), "kl"),
        ("trades", {"forwards": "awp_code"}, ("adv", "clean", "clean"), "kl"),
    ],
)
def test_passes_and_inner_loss(name: str, options: dict[str, Any], passes: tuple[str, ...], inner: str) -> None:
    objective = OBJECTIVES.make(name, **options)
    assert objective.passes == passes
    assert objective.inner_loss == inner


@pytest.mark.parametrize("forwards", ["code", "awp_code"])
def test_forwards_do_not_change_the_value(forwards: str) -> None:
    clean, adv, y = batch()
    expected = float(TRADES().loss(views(clean, adv), y).total)
    assert float(TRADES(forwards=forwards).loss(views(clean, adv), y).total) == expected


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "6", None])
@pytest.mark.parametrize(
    ("make", "option"), [(TRADES, "beta"), (MART, "beta"), (ALP, "weight"), (HAT, "gamma"), (HAT, "reach")]
)
def test_weights_must_be_numbers_from_zero_up(make: Callable[..., Objective], option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{option} must be a number >= 0, got"):
        make(**{option: value})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "trades",
            {"forwards": "codes"},
            "unknown trades forwards 'codes'; known: awp_code, code, paper, rat_code; did you mean",
        ),
        ("at", {"forwards": "s2o"}, "unknown at forwards 's2o'; known: paper, s2o_code; did you mean 's2o_code'"),
        ("mart", {"form": "papers"}, "unknown mart form 'papers'; known: code, paper; did you mean 'paper'"),
        ("mart", {"ce": "cleen"}, "unknown mart ce 'cleen'; known: adv, clean; did you mean 'clean'"),
        ("alp", {"pair": "logit"}, "unknown alp pair 'logit'; known: logits, probabilities; did you mean 'logits'"),
        ("trades", {"betta": 6}, "did you mean 'beta'"),
        ("at", {"beta": 6}, "option of objective 'at': 'beta'"),
        (
            "trade",
            {},
            "unknown objective 'trade'; known: alp, at, gat, hat, mart, standard, trades; did you mean 'trades'",
        ),
    ],
)
def test_options_that_do_not_exist(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OBJECTIVES.make(name, **options)


def test_a_missing_pass_is_a_fault_of_the_caller() -> None:
    clean, _, y = batch()
    with pytest.raises(RuntimeError, match="not given a network pass"):
        AT().loss(views(clean, None), y)
