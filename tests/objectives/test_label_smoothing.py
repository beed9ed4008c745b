"""Label smoothing: the cross-entropy of every objective against plain numbers, 0 to the bit, and who refuses it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from objective_cases import batch, views
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.types import View, Views
from flatrock.flatness.traces import loss_trace
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.objectives.terms import cross_entropy

# Objectives with a cross-entropy that may be smoothed, its term, and whether it is that of the clean pass.
SMOOTHED: list[tuple[str, dict[str, Any], str, bool]] = [
    ("standard", {}, "ce", True),
    ("at", {}, "ce_adv", False),
    ("trades", {}, "ce", True),
    ("hat", {"helper": "runs/some"}, "ce", True),
    ("gat", {}, "ce", True),
    ("alp", {}, "ce_adv", False),
]


def by_hand(logits: Tensor, rows: list[list[float]], smoothing: float) -> float:
    """- sum_k [(1 - e) p_k + e/C] log softmax(z)_k, a mean over the rows that are labels."""
    values = []
    for z, p in zip(logits.tolist(), rows, strict=True):
        if sum(p) > 0:
            log_sum = math.log(sum(math.exp(v) for v in z))
            q = [(1 - smoothing) * share + smoothing / len(z) for share in p]
            values.append(-sum(a * (v - log_sum) for a, v in zip(q, z, strict=True)))
    return sum(values) / len(values)


def one_hot(y: Tensor, classes: int = 5) -> list[list[float]]:
    return [[float(k == label) for k in range(classes)] for label in y.tolist()]


def test_every_objective_is_here_or_refuses() -> None:
    assert {name for name, *_ in SMOOTHED} | {"mart"} == set(OBJECTIVES.names())
    assert all("label_smoothing" in entry.options() for entry in OBJECTIVES)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize(("name", "options", "term", "clean"), SMOOTHED, ids=[row[0] for row in SMOOTHED])
def test_the_cross_entropy_and_nothing_else(
    name: str, options: dict[str, Any], term: str, clean: bool, smoothing: float
) -> None:
    z, z_adv, y = batch(20)
    parts = OBJECTIVES.make(name, **options, label_smoothing=smoothing).loss(views(z, z_adv), y)
    plain = OBJECTIVES.make(name, **options).loss(views(z, z_adv), y)
    want = by_hand(z if clean else z_adv, one_hot(y), smoothing)
    assert float(parts.terms[term]) == pytest.approx(want, rel=1e-12)
    assert parts.weights == plain.weights
    for other in plain.terms.keys() - {term}:
        assert parts.terms[other].item() == plain.terms[other].item(), other
    assert (parts.total.item() == plain.total.item()) == (smoothing == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["indices", "unlabelled", "rows"])
def test_zero_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    z, _, y = batch(30)
    z = z.to(dtype).requires_grad_(True)
    labels = {"indices": y, "unlabelled": y.where(y > 1, -1), "rows": torch.tensor(one_hot(y), dtype=dtype)}[kind]
    if kind == "rows":
        before = nn.functional.cross_entropy(z, labels)
    else:
        each = nn.functional.cross_entropy(z, labels, reduction="none", ignore_index=-1)
        before = each.sum() / (labels >= 0).sum()
    for value in (cross_entropy(z, labels, smoothing=0.0), cross_entropy(z, labels)):
        assert value.item() == before.item()
        grads = [torch.autograd.grad(v, z, retain_graph=True)[0] for v in (value, before)]
        assert torch.equal(*grads)


@pytest.mark.parametrize("smoothing", [0.1, 0.9])
def test_the_gradient_in_closed_form(smoothing: float) -> None:
    """d/dz = (softmax(z) - (1 - e) e_y - e/C) / n."""
    z, _, y = batch(12)
    z.requires_grad_(True)
    (got,) = torch.autograd.grad(cross_entropy(z, y, smoothing=smoothing), z)
    target = (1 - smoothing) * torch.tensor(one_hot(y), dtype=torch.float64) + smoothing / 5
    torch.testing.assert_close(got, (z.detach().softmax(1) - target) / 12, rtol=1e-12, atol=1e-15)


def test_unlabelled_samples_stay_out() -> None:
    z, _, y = batch(20)
    labelled = torch.arange(20) % 3 == 0
    some = y.where(labelled, torch.tensor(-1))
    want = by_hand(z[labelled], one_hot(y[labelled]), 0.1)
    assert float(cross_entropy(z, some, smoothing=0.1)) == pytest.approx(want, rel=1e-12)
    assert float(cross_entropy(z, torch.full_like(y, -1), smoothing=0.1)) == 0


def test_mixed_labels_are_smoothed_too() -> None:
    z, _, y = batch(12)
    rows = torch.tensor(one_hot(y), dtype=torch.float64)
    mixed = 0.6 * rows + 0.4 * rows.flip(0)
    want = by_hand(z, mixed.tolist(), 0.2)
    assert float(cross_entropy(z, mixed, smoothing=0.2)) == pytest.approx(want, rel=1e-12)


def test_the_trace_of_the_hessian_is_that_of_hard_labels() -> None:
    """Cross-entropy is linear in the label up to a term linear in the logits; TrH needs no other formula."""
    gen = torch.Generator().manual_seed(0)
    f = torch.randn(6, 3, generator=gen, dtype=torch.float64)
    w = torch.randn(4, 3, generator=gen, dtype=torch.float64)
    y = torch.arange(6) % 4
    objective = OBJECTIVES.make("standard", label_smoothing=0.3)

    def total(weights: Tensor) -> Tensor:
        return objective.loss(Views(View(f, f @ weights.T), None), y).total

    hessian = torch.autograd.functional.hessian(total, w).reshape(12, 12)  # type: ignore[no-untyped-call]
    seen = Views(View(f, f @ w.T), None)
    trace = loss_trace(objective.loss(seen, y), seen, y, full=True)
    torch.testing.assert_close(trace, hessian.diagonal().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [1, 1.0, 1.5, 10, -0.1, float("nan"), float("inf"), True, "0.1", None])
@pytest.mark.parametrize("name", [row[0] for row in SMOOTHED])
def test_values_outside_the_range_are_refused(name: str, value: Any) -> None:
    options = {"helper": "runs/some"} if name == "hat" else {}
    rule = r"\[0, 1\), got 1" if value in (1, 1.5, 10) and value is not True else "a number >= 0, got"
    with pytest.raises(ConfigError, match=rf"{name} label_smoothing must (lie in|be) {rule}"):
        OBJECTIVES.make(name, **options, label_smoothing=value)


def test_mart_refuses_with_reason_and_cure() -> None:
    with pytest.raises(ConfigError, match=r"mart label_smoothing must be 0, got 0\.1: .*leave it out, or use trades"):
        OBJECTIVES.make("mart", label_smoothing=0.1)
    z, z_adv, y = batch()
    plain, zero = (OBJECTIVES.make("mart", **options) for options in ({}, {"label_smoothing": 0}))
    assert plain.loss(views(z, z_adv), y).total.item() == zero.loss(views(z, z_adv), y).total.item()
