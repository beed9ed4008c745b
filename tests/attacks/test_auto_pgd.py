"""The attacks made of APGD: restarts, targets, rows, names, options, costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attack_cases import Make, Recorder, gen_for, wrong
from torch import Tensor, nn

from flatrock.attacks.auto_pgd import APGD, APGDTargeted
from flatrock.attacks.catalog import ATTACKS, attack, parse_attack
from flatrock.attacks.craft import craft
from flatrock.attacks.losses import cross_entropy, margin
from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.core.threat import L2, Linf, Threat


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("kind", ["apgd-ce", "apgd-dlr", "apgd-t"])
def test_restarts_never_help_the_defender(
    kind: str, early_stop: bool, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images()
    y = right_labels(model, x)
    found = []
    for restarts in (1, 3):
        chosen = ATTACKS.make(kind, steps=3, restarts=restarts)
        x_adv = craft(chosen, model, x, y, threat, gen_for(x), early_stop=early_stop)
        loss = (cross_entropy if kind == "apgd-ce" else margin)(model(x_adv), y)
        found.append((wrong(model, x_adv, y), loss))
    (broken_1, loss_1), (broken_3, loss_3) = found
    assert bool(broken_3[broken_1].all())
    if kind != "apgd-dlr":  # whose loss is not what is compared here
        still = ~broken_3
        assert bool((loss_3 >= loss_1 - 1e-12)[still].all())


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 24])
def test_how_many_rows_go_together_changes_nothing(
    rows: int, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images(8)
    y = right_labels(model, x)
    whole = craft(APGDTargeted(steps=6, rows=1024), model, x, y, threat, gen_for(x))
    parts = craft(APGDTargeted(steps=6, rows=rows), model, x, y, threat, gen_for(x))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("rows", "largest"), [(1, 1), (2, 2), (7, 6), (23, 21), (24, 24), (1024, 24)])
def test_rows_bound_what_the_network_sees_at_once(
    rows: int, largest: int, conv_net: Make, images: Make, right_labels: Make
) -> None:
    spy, x = Recorder(conv_net()), images(8)
    y = right_labels(spy.model, x)
    chosen = APGDTargeted(steps=2, restarts=2, rows=rows)
    craft(chosen, spy, x, y, Linf(0.01), gen_for(x))
    assert max(len(s) for s in spy.seen[1:]) == largest
    assert sum(len(s) for s in spy.seen) == 8 * chosen.passes(4) == 8 * (1 + 3 * 2 * 3)


@pytest.mark.parametrize("classes", [4, 7, 12])
def test_targets_are_the_classes_with_the_largest_clean_logits(classes: int) -> None:
    """On a linear model the point for target T is x + eps * sign(W_T - W_y); targets=1 shows the runner-up's."""
    gen = Seed(classes).generator()
    model = nn.Linear(10, classes).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(classes, 10, generator=gen, dtype=torch.float64))
    x = 0.4 + 0.2 * torch.rand(30, 10, generator=gen, dtype=torch.float64)
    order = model(x).argsort(1, descending=True)
    y, threat = order[:, 0], Linf(1e-3)
    w = model.weight.detach()
    x_adv = attack("apgd-t", model, x, y, threat, targets=1, steps=10, loss="margin")
    torch.testing.assert_close(x_adv, x + 1e-3 * (w[order[:, 1]] - w[y]).sign(), rtol=0, atol=1e-12)
    spy = Recorder(model)
    craft(APGDTargeted(steps=10, loss="margin", targets=50), spy, x, y, threat, gen_for(x))
    last = spy.seen[-1].reshape(classes - 1, 30, 10)
    for rank in range(1, classes):
        expected = x + 1e-3 * (w[order[:, rank]] - w[y]).sign()
        torch.testing.assert_close(last[rank - 1], expected, rtol=0, atol=1e-12)


def test_every_restart_and_target_has_a_start_of_its_own(
    threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    spy, x = Recorder(conv_net()), images(5)
    y = right_labels(spy.model, x)
    craft(APGD(steps=1, restarts=3), spy, x, y, threat, gen_for(x))
    starts = list(torch.stack(spy.seen[::2]).flatten(0, 1))
    spy.seen.clear()
    craft(APGDTargeted(steps=1, restarts=2, targets=2), spy, x, y, threat, gen_for(x))
    assert [len(s) for s in spy.seen] == [5, 10, 10, 10, 10]
    starts += [*spy.seen[1], *spy.seen[3]]
    assert len({tuple(s.flatten().tolist()) for s in starts}) == 5 * (3 + 2 * 2)


def test_a_sample_broken_by_one_target_gives_up_the_others(conv_net: Make, images: Make, right_labels: Make) -> None:
    spy, x = Recorder(conv_net()), images()
    y = right_labels(spy.model, x)
    x_adv = craft(APGDTargeted(steps=20), spy, x, y, Linf(0.03), gen_for(x), early_stop=True)
    sizes = [len(s) for s in spy.seen]
    assert sizes[:2] == [64, 192]
    assert all(size % 3 == 0 for size in sizes[1:])
    left = int((~wrong(spy.model, x_adv, y)).sum())
    assert sizes[-1] == 3 * left
    assert 0 < left < 64


def test_a_sample_that_is_wrong_already_is_left_alone(conv_net: Make, images: Make, right_labels: Make) -> None:
    spy, x = Recorder(conv_net()), images(9)
    y = (right_labels(spy.model, x) + 1) % 4
    x_adv = craft(APGDTargeted(), spy, x, y, Linf(0.03), gen_for(x), early_stop=True)
    assert torch.equal(x_adv, x)
    assert [len(s) for s in spy.seen] == [9]


class Overflow(nn.Module):
    """Class 0 everywhere in reach, less so uphill, and without an answer once the first coordinate is 0.5."""

    def forward(self, x: Tensor) -> Tensor:
        s = x.sum(1)
        return torch.stack([3 - s, s - 3, 0 * s - 5, 0 * s - 6], 1) / (x[:, :1] < 0.5).to(x.dtype)


@pytest.mark.parametrize("name", ["apgd-ce", "apgd-dlr", "apgd-t"])
def test_a_model_without_an_answer_is_broken_by_a_finite_point(name: str) -> None:
    x = torch.full((8, 4), 0.49, dtype=torch.float64)
    for early_stop in (False, True):
        chosen = ATTACKS.make(name, steps=6)
        x_adv = craft(chosen, Overflow(), x, torch.zeros(8).long(), Linf(0.1), gen_for(x), early_stop=early_stop)
        assert bool((x_adv[:, 0] >= 0.5).all())


# Names, options, labels


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("apgd", APGD(loss="ce", steps=100, restarts=1, eot=1)),
        ("apgd:loss=margin", APGD(loss="margin")),
        ("apgd-ce", APGD(loss="ce")),
        ("apgd-ce-50:restarts=5", APGD(steps=50, restarts=5)),
        ("apgd-dlr-20:eot=20", APGD(loss="dlr", steps=20, eot=20)),
        ("apgd-t", APGDTargeted(loss="dlr", targets=9, steps=100, restarts=1)),
        ("apgd-t-20:loss=margin:targets=3:rows=64", APGDTargeted(loss="margin", targets=3, steps=20, rows=64)),
    ],
)
def test_by_name(spec: str, expected: object) -> None:
    assert parse_attack(spec) == (spec, expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("apgd:loss=kl", "unknown attack loss 'kl'; known: ce, cw, dlr, margin"),
        ("apgd-dlr:loss=ce", "option of attack 'apgd-dlr': 'loss'"),
        ("apgd-ce-0", "apgd steps must be a whole number >= 1, got 0"),
        ("apgd-ce:restarts=0", "apgd restarts must be a whole number >= 1, got 0"),
        ("apgd-ce:eot=1.5", "apgd eot must be a whole number >= 1, got 1.5"),
        ("apgd-t:loss=ce", "unknown apgd-t loss 'ce'; known: dlr, margin"),
        ("apgd-t:targets=0", "apgd-t targets must be a whole number >= 1, got 0"),
        ("apgd-t:rows=0", "apgd-t rows must be a whole number >= 1, got 0"),
    ],
)
def test_options_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_attack(spec)


def test_passes_count_every_target_once() -> None:
    assert APGD().passes(10) == 101
    assert APGD(restarts=5, eot=20).passes(10) == 5 * 20 * 101
    assert APGDTargeted().passes(10) == 1 + 9 * 101
    assert APGDTargeted().passes(1000) == 1 + 9 * 101
    assert APGDTargeted(restarts=2, steps=10).passes(4) == 1 + 3 * 2 * 11


@pytest.mark.parametrize("threat", [Linf(0.2), L2(0.4)], ids=["linf", "l2"])
@pytest.mark.parametrize(("classes", "untargeted"), [(2, "margin"), (2, "cw"), (3, "dlr")])
def test_few_classes_have_losses_too(threat: Threat, classes: int, untargeted: str) -> None:
    """Vectors of two numbers; what the refusals of dlr recommend does the work."""
    gen = Seed(classes).generator()
    model = nn.Linear(2, classes).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(classes, 2, generator=gen, dtype=torch.float64))
        model.bias.copy_(-0.5 * model.weight.sum(1))
    x = torch.rand(40, 2, generator=gen, dtype=torch.float64)
    y = model(x).argmax(1)
    by_label = attack("apgd", model, x, y, threat, loss=untargeted, steps=20)
    by_target = attack("apgd-t", model, x, y, threat, loss="margin", steps=20)
    assert bool(wrong(model, by_target, y)[wrong(model, by_label, y)].all())
    if classes == 2:
        assert torch.equal(wrong(model, by_label, y), wrong(model, by_target, y))
    assert 0 < int(wrong(model, by_label, y).sum()) <= int(wrong(model, by_target, y).sum()) < 40


def test_mixed_labels_are_for_cross_entropy_alone(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(6)
    y = right_labels(model, x)
    soft = nn.functional.one_hot(y, 4).double()
    assert APGD().mixed_labels
    hard = craft(APGD(steps=4, restarts=2), model, x, y, Linf(0.01), gen_for(x))
    torch.testing.assert_close(craft(APGD(steps=4, restarts=2), model, x, soft, Linf(0.01), gen_for(x)), hard)
    for chosen in (APGD(loss="dlr"), APGDTargeted()):
        assert not chosen.mixed_labels
        with pytest.raises(ConfigError, match=r"not defined on mixed labels; use '(apgd-)?ce'"):
            craft(chosen, model, x, soft, Linf(0.01), gen_for(x))


@pytest.mark.parametrize("chosen", [APGD(), APGDTargeted()], ids=["apgd", "apgd-t"])
def test_an_empty_batch(chosen: Any, conv_net: Make) -> None:
    x = torch.zeros(0, 2, 6, 6, dtype=torch.float64)
    for early_stop in (False, True):
        x_adv = craft(chosen, conv_net(), x, torch.zeros(0).long(), Linf(0.1), gen_for(x), early_stop=early_stop)
        assert x_adv.shape == x.shape
