"""Attack losses against loops in plain Python, golden values and their defining properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatrock.attacks.losses import (
    LABEL_LOSSES,
    best_other,
    cross_entropy,
    cw,
    dlr,
    dlr_targeted,
    kl,
    label_loss,
    margin,
    targeted_margin,
    true_logit,
)
from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed

Row = list[float]


def logits_and_labels(n: int = 200, classes: int = 6, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    gen = Seed(0).child("losses", classes).generator()
    z = scale * torch.randn(n, classes, generator=gen, dtype=torch.float64)
    return z, torch.randint(classes, (n,), generator=gen)


def log_sum_exp(z: Row) -> float:
    top = max(z)
    return top + math.log(sum(math.exp(v - top) for v in z))


def others(z: Row, y: int) -> Row:
    return [v for k, v in enumerate(z) if k != y]


def naive_ce(z: Row, y: int) -> float:
    return log_sum_exp(z) - z[y]


def naive_margin(z: Row, y: int) -> float:
    return max(others(z, y)) - z[y]


def naive_cw(z: Row, y: int) -> float:
    return -max(z[y] - max(others(z, y)) + 50, 0.0)


def naive_dlr(z: Row, y: int) -> float:
    falling = sorted(z, reverse=True)
    return -(z[y] - max(others(z, y))) / (falling[0] - falling[2] + 1e-12)


NAIVE: dict[str, Callable[[Row, int], float]] = {
    "ce": naive_ce,
    "margin": naive_margin,
    "cw": naive_cw,
    "dlr": naive_dlr,
}


def test_every_loss_with_a_name_is_tested_here() -> None:
    assert set(NAIVE) == set(LABEL_LOSSES)


@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
@pytest.mark.parametrize("name", NAIVE)
def test_label_losses_equal_naive_loops(name: str, scale: float) -> None:
    z, y = logits_and_labels(scale=scale)
    expected = [NAIVE[name](row, int(label)) for row, label in zip(z.tolist(), y, strict=True)]
    torch.testing.assert_close(
        label_loss(name)(z, y), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def test_best_other_and_true_logit() -> None:
    z, y = logits_and_labels()
    assert best_other(z, y).tolist() == [max(others(row, int(k))) for row, k in zip(z.tolist(), y, strict=True)]
    assert true_logit(z, y).tolist() == [row[int(k)] for row, k in zip(z.tolist(), y, strict=True)]


def test_targeted_losses_equal_naive_loops() -> None:
    z, y = logits_and_labels()
    target = (y + 1 + torch.arange(len(y)) % 5) % 6
    assert bool((target != y).all())
    pair = torch.stack([y, target], 1)
    gaps, ratios = [], []
    for row, a, b in zip(z.tolist(), y.tolist(), target.tolist(), strict=True):
        falling = sorted(row, reverse=True)
        gaps.append(row[b] - row[a])
        ratios.append(-(row[a] - row[b]) / (falling[0] - 0.5 * (falling[2] + falling[3]) + 1e-12))
    assert targeted_margin(z, pair).tolist() == gaps
    torch.testing.assert_close(dlr_targeted(z, pair), torch.tensor(ratios, dtype=torch.float64))


def test_kl_equals_a_naive_loop_clean_distribution_first() -> None:
    clean, _ = logits_and_labels(50)
    adv = clean.flip(0)
    expected = []
    for s_row, t_row in zip(clean.tolist(), adv.tolist(), strict=True):
        log_s = [v - log_sum_exp(s_row) for v in s_row]
        log_t = [v - log_sum_exp(t_row) for v in t_row]
        expected.append(sum(math.exp(a) * (a - b) for a, b in zip(log_s, log_t, strict=True)))
    torch.testing.assert_close(kl(adv, clean.log_softmax(1)), torch.tensor(expected, dtype=torch.float64))


def test_kl_is_zero_with_zero_gradient_at_the_clean_output() -> None:
    z, _ = logits_and_labels(20)
    at = z.clone().requires_grad_(True)
    value = kl(at, z.log_softmax(1))
    (grad,) = torch.autograd.grad(value.sum(), at)
    assert float(value.detach().abs().max()) < 1e-14
    assert float(grad.abs().max()) < 1e-14


def test_golden_fixture_e() -> None:
    z = torch.tensor([[2.0, 1.0, -1.0, 0.5]], dtype=torch.float64)
    y0, y1, pair = torch.tensor([0]), torch.tensor([1]), torch.tensor([[0, 1]])
    assert float(dlr(z, y0)) == pytest.approx(-0.6666667, abs=5e-8)
    assert float(dlr(z, y1)) == pytest.approx(0.6666667, abs=5e-8)
    assert float(dlr_targeted(z, pair)) == pytest.approx(-0.4444444, abs=5e-8)
    assert float(cw(z, y0)) == -51


@pytest.mark.parametrize(("shift", "scale"), [(7.0, 1.0), (-1e3, 1.0), (0.0, 1e-3), (0.0, 1e3), (5.0, 0.25)])
def test_dlr_ignores_shift_and_positive_scale(shift: float, scale: float) -> None:
    z, y = logits_and_labels()
    pair = torch.stack([y, (y + 1) % 6], 1)
    changed = scale * z + shift
    torch.testing.assert_close(dlr(changed, y), dlr(z, y), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(dlr_targeted(changed, pair), dlr_targeted(z, pair), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_margin_is_positive_exactly_when_misclassified(classes: int) -> None:
    z, y = logits_and_labels(500, classes)
    wrong = z.argmax(1) != y
    assert 0 < int(wrong.sum()) < 500
    assert torch.equal(margin(z, y) > 0, wrong)
    if classes > 2:
        assert torch.equal(dlr(z, y) > 0, wrong)
    assert torch.equal(cw(z, y, kappa=0.0) == 0, wrong)


def test_kappa_cuts_the_gradient_only_beyond_it() -> None:
    z = torch.tensor([[0.0, 60.0], [0.0, 40.0]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(cw(z, torch.tensor([0, 0])).sum(), z)
    assert grad.tolist() == [[0, 0], [-1, 1]]


def test_soft_labels_in_cross_entropy() -> None:
    z, y = logits_and_labels(30)
    weights = torch.softmax(logits_and_labels(30)[0].flip(0), 1)
    expected = [
        -sum(w * (v - log_sum_exp(row)) for w, v in zip(ws, row, strict=True))
        for ws, row in zip(weights.tolist(), z.tolist(), strict=True)
    ]
    torch.testing.assert_close(cross_entropy(z, weights), torch.tensor(expected, dtype=torch.float64))
    one_hot = torch.nn.functional.one_hot(y, 6).double()
    torch.testing.assert_close(cross_entropy(z, one_hot), cross_entropy(z, y))


@pytest.mark.parametrize(("loss", "classes", "least"), [(dlr, 2, 3), (dlr_targeted, 3, 4)])
def test_dlr_needs_enough_classes(loss: Callable[[Tensor, Tensor], Tensor], classes: int, least: int) -> None:
    target = torch.tensor([0]) if loss is dlr else torch.tensor([[0, 1]])
    with pytest.raises(ConfigError, match=rf"needs at least {least} classes, the model has {classes}"):
        loss(torch.zeros(1, classes), target)


def test_unknown_loss_lists_the_choices() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown attack loss 'dlrr'; known: ce, cw, dlr, margin; did you mean 'dlr'"
    ):
        label_loss("dlrr")
