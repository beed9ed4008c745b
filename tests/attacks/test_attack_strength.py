"""Options only strengthen an attack; its seed, and nothing else, decides its random numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attack_cases import UNRANDOM, Make, Row, gen_for, wrong
from torch import Tensor, nn

from flatrock.attacks.catalog import ATTACKS, attack, parse_attack
from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.langevin import Langevin
from flatrock.attacks.pgd import safely_broken
from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf, Threat
from flatrock.core.types import Attack


def test_early_stop_saves_passes_and_never_adds_one(
    counting: Make, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = counting(conv_net()), images()
    y = right_labels(model.model, x)
    chosen = GradientAttack(steps=20)
    craft(chosen, model, x, y, Linf(0.03), gen_for(x), early_stop=False)
    whole, model.passes, model.samples = model.samples, 0, 0
    craft(chosen, model, x, y, Linf(0.03), gen_for(x), early_stop=True)
    assert model.passes <= 20
    assert model.samples < whole == 20 * len(x)


@pytest.mark.parametrize("kind", [GradientAttack, Langevin])
def test_early_stop_ends_when_all_are_broken(
    kind: Make, counting: Make, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = counting(conv_net()), images()
    y = (right_labels(model.model, x) + 1) % 4
    x_adv = craft(kind(steps=20, start="zero"), model, x, y, Linf(0.03), gen_for(x), early_stop=True)
    assert model.passes == 1
    assert torch.equal(x_adv, x)


def test_early_stop_never_weakens_an_attack(
    attack_row: Row, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    name, options = attack_row
    for seed in range(3):
        model, x = conv_net(seed=seed), images()
        y = right_labels(model, x)
        chosen = ATTACKS.make(name, **options)
        plain = craft(chosen, model, x, y, threat, gen_for(x), early_stop=False)
        early = craft(chosen, model, x, y, threat, gen_for(x), early_stop=True)
        broken = wrong(model, plain, y)
        assert 0 < int(broken.sum()) < len(x)
        assert bool(wrong(model, early, y)[broken].all())


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("loss", ["ce", "cw", "dlr", "kl"])
def test_more_restarts_never_help_the_defender(
    threat: Threat, loss: str, early_stop: bool, conv_net: Make, images: Make, right_labels: Make
) -> None:
    for seed in range(3):
        model, x = conv_net(seed=seed), images()
        y = right_labels(model, x)
        broken = []
        for restarts in (1, 3):
            chosen = GradientAttack(loss=loss, steps=3, restarts=restarts, start="uniform")
            x_adv = craft(chosen, model, x, y, threat, gen_for(x), early_stop=early_stop)
            broken.append(wrong(model, x_adv, y))
        assert bool(broken[1][broken[0]].all())


def test_restarts_keep_the_largest_loss_among_equals(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images()
    y = right_labels(model, x)
    threat = Linf(0.002)
    final = []
    for restarts in (1, 2, 5):
        x_adv = craft(GradientAttack(steps=2, restarts=restarts), model, x, y, threat, gen_for(x))
        keep = ~wrong(model, x_adv, y)
        final.append(nn.functional.cross_entropy(model(x_adv), y, reduction="none").where(keep, torch.inf))
    assert bool((final[1] >= final[0]).all())
    assert bool((final[2] >= final[1]).all())
    assert bool((final[2] > final[0]).any())


class BarelyBroken(nn.Module):
    """Wrong by a hair at one point; right, but with a larger cross-entropy, everywhere else."""

    def __init__(self, point: Tensor) -> None:
        super().__init__()
        self.point = point

    def forward(self, x: Tensor) -> Tensor:
        here = (x - self.point).abs().flatten(1).amax(1, keepdim=True) < 1e-12
        hair, plain = x.new_tensor([[1.0, 1.00001, -50.0]]), x.new_tensor([[0.1, 0.0, 0.0]])
        return torch.where(here, hair, plain) + 0 * x.flatten(1).sum(1, keepdim=True)


def test_a_restart_never_gives_back_a_sample_that_was_broken_by_a_hair() -> None:
    x, y = torch.full((1, 4), 0.5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    first = craft(GradientAttack(steps=0), nn.Flatten(), x, y, Linf(0.1), gen_for(x))
    model = BarelyBroken(first)
    assert bool(wrong(model, first, y).all())
    again = craft(GradientAttack(steps=0, restarts=2), model, x, y, Linf(0.1), gen_for(x))
    assert bool(wrong(model, again, y).all())


def test_seeds_decide_everything(
    attack_row: Row, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    name, options = attack_row
    model, x = conv_net(), images(16)
    y = right_labels(model, x)
    first = attack(name, model, x, y, threat, seed=1, **options)
    assert torch.equal(attack(name, model, x, y, threat, seed=1, **options), first)
    other = attack(name, model, x, y, threat, seed=2, **options)
    assert torch.equal(other, first) == (name in UNRANDOM or options.get("start") == "zero")


@pytest.mark.parametrize("start", ["uniform", "gaussian"])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_random_starts_are_the_same_in_any_batch(threat: Threat, batch: int, start: str, images: Make) -> None:
    x = images()
    y, gen, chosen = torch.zeros(64, dtype=torch.int64), gen_for(x), GradientAttack(steps=0, start=start)
    whole = craft(chosen, nn.Flatten(), x, y, threat, gen)
    pieces = [
        craft(chosen, nn.Flatten(), x[rows], y[rows], threat, gen[rows])
        for rows in torch.split(torch.arange(64), batch)
    ]
    assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(whole, x)


def test_each_sample_is_attacked_as_if_alone(
    attack_row: Row, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    name, options = attack_row
    model, x = conv_net(), images(12)
    y, gen, chosen = right_labels(model, x), gen_for(x), ATTACKS.make(name, **options)
    whole = craft(chosen, model, x, y, threat, gen)
    for i in range(12):
        row = torch.tensor([i])
        torch.testing.assert_close(
            craft(chosen, model, x[row], y[row], threat, gen[row]), whole[row], rtol=1e-9, atol=1e-9
        )


def test_start_names_what_it_does(images: Make) -> None:
    x = (images() * 0.5 + 0.25).repeat(4, 1, 1, 1)
    y = torch.zeros(len(x), dtype=torch.int64)

    def start(name: str, threat: Threat, **options: float) -> Tensor:
        return craft(GradientAttack(steps=0, start=name, **options), nn.Flatten(), x, y, threat, gen_for(x)) - x

    assert float(start("zero", Linf(0.1)).abs().max()) == 0
    assert float(start("uniform", Linf(0.1)).std()) == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert float(start("gaussian", Linf(0.1)).std()) == pytest.approx(1e-3, rel=0.02)
    assert float(start("gaussian", Linf(0.1), noise=0.01).std()) == pytest.approx(0.01, rel=0.02)


def test_kl_attack_from_the_clean_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero gradient at the clean input; use start 'gaussian'"):
        GradientAttack(loss="kl", start="zero")
    with pytest.raises(ConfigError, match="zero gradient"):
        ATTACKS.make("kl-pgd", start="zero")
    assert ATTACKS.make("kl-pgd") == GradientAttack(loss="kl", start="gaussian")


@pytest.mark.parametrize("chosen", [GradientAttack(steps=3), Langevin(steps=3)], ids=["pgd", "langevin"])
def test_soft_labels_are_attacked_through_cross_entropy(
    chosen: Attack, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images(16)
    y = right_labels(model, x)
    one_hot = nn.functional.one_hot(y, 4).double()
    mixed = 0.5 * one_hot + 0.5 * one_hot.flip(0)
    hard = craft(chosen, model, x, y, Linf(0.03), gen_for(x))
    torch.testing.assert_close(craft(chosen, model, x, one_hot, Linf(0.03), gen_for(x)), hard)
    assert not torch.equal(craft(chosen, model, x, mixed, Linf(0.03), gen_for(x)), hard)
    assert chosen.mixed_labels


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_soft_labels_work_with_restarts(loss: str, conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(16)
    soft = nn.functional.one_hot(right_labels(model, x), 4).double()
    x_adv = craft(GradientAttack(loss=loss, steps=2, restarts=2), model, x, soft, Linf(0.03), gen_for(x))
    assert x_adv.shape == x.shape


@pytest.mark.parametrize("restarts", [1, 2])
def test_kl_attack_needs_no_labels(restarts: int, conv_net: Make, images: Make, right_labels: Make) -> None:
    """Unlabeled samples (y = -1) are attacked like any other."""
    model, x = conv_net(), images(16)
    y, none = right_labels(model, x), torch.full((16,), -1)
    chosen = GradientAttack(loss="kl", steps=3, restarts=restarts)
    assert torch.equal(
        craft(chosen, model, x, none, Linf(0.03), gen_for(x)), craft(chosen, model, x, y, Linf(0.03), gen_for(x))
    )


def test_margins_that_rounding_can_undo_are_not_safe() -> None:
    y = torch.zeros(4, dtype=torch.int64)
    z = torch.tensor([[1.0, 1.00001], [1.0, 1.1], [1.0, 0.9], [1e6, 1e6 + 10]])
    assert safely_broken(z, y).tolist() == [False, True, False, False]


def test_a_class_that_is_masked_changes_no_margin() -> None:
    """Its logit is huge and never chosen; the two that are compared round as they did."""
    y = torch.zeros(3, dtype=torch.int64)
    z = torch.tensor([[1.0, 1.00001], [1.0, 1.1], [1.0, 0.9]])
    masked = torch.cat([z, torch.full((3, 1), -1e9)], 1)
    assert safely_broken(masked, y).tolist() == safely_broken(z, y).tolist() == [False, True, False]
    near = torch.tensor([[0.0, 1e-7, -15.0], [0.0, 1e-2, -15.0]])
    assert safely_broken(near, y[:2]).tolist() == [False, True], "rounding is not that of logits which happen to be 0"
    of_masked = torch.cat([z, torch.full((3, 1), -torch.inf)], 1)
    assert safely_broken(of_masked, y).all(), "an answer that is not finite is none"


class FirstIsLost(nn.Module):
    """No slope along the first coordinate: zero, or NaN, as where(..., sqrt, ...) has it beside its branch."""

    def __init__(self, *, nan: bool) -> None:
        super().__init__()
        with kept_global_rng(seed=Seed(0).child("net")):
            self.body = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
        self.nan = nan
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        first, rest = x[:, :1], x[:, 1:]
        seen = first.detach()
        if self.nan:
            seen = seen + torch.where(first > 2, (first * 0).sqrt(), torch.zeros_like(first))
        logits: Tensor = self.body(torch.cat([seen, rest], 1))
        return logits


@pytest.mark.parametrize("name", ["pgd", "cw", "mt", "apgd-ce", "apgd-t", "fab", "fab-t"])
def test_a_slope_that_is_nan_is_no_slope(name: str, threat: Threat) -> None:
    """The other coordinates move as if it were zero."""
    lost, zero = FirstIsLost(nan=True), FirstIsLost(nan=False)
    x = torch.rand(16, 8, generator=Seed(1).generator())
    y = zero(x).argmax(1)
    probe = x.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(lost(probe).sum(), probe)
    assert grad[:, 0].isnan().all() and grad[:, 1:].isfinite().all()
    wide = replace(threat, eps=1.0 if threat.norm == "linf" else 2.5)
    found = [craft(parse_attack(name)[1], model, x, y, wide, gen_for(x)) for model in (lost, zero)]
    assert torch.equal(*found) and not torch.equal(found[0], x)
