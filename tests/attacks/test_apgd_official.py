"""APGD takes the path of the official implementation, iterate by iterate, in float64 and from the same start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from attack_cases import Recorder, wrong
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from torch import Tensor, nn

from flatrock.attacks.apgd import Climb, apgd, damage, sphere_start
from flatrock.attacks.auto_pgd import APGDTargeted
from flatrock.attacks.craft import craft
from flatrock.attacks.losses import dlr_targeted, label_loss
from flatrock.attacks.pgd import Aim
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat, rows

CLASSES = 6
NORMS = {"linf": "Linf", "l2": "L2"}


@pytest.fixture
def float64() -> Iterator[None]:
    """The official code keeps losses and step sizes in torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class OfficialL2(L2):
    """L2 divided the official way, by a length + 1e-12.

    flatrock's own makes a unit step of any gradient but 0; the official code hardly moves where one is tiny.
    """

    def ascent(self, grad: Tensor) -> Tensor:
        return grad / (rows(self.size(grad), grad) + 1e-12)

    def project(self, delta: Tensor) -> Tensor:
        length = rows(self.size(delta), delta)
        return delta / (length + 1e-12) * length.clamp(max=self.eps)


def network(kind: str, seed: int) -> nn.Module:
    """Smooth and dense, or convolutional with ReLU; weights large enough that radii below break some samples."""
    with kept_global_rng(seed=Seed(seed).child(kind)):
        if kind == "smooth":
            model = nn.Sequential(nn.Flatten(), nn.Linear(72, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        else:
            body = [nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten()]
            model = nn.Sequential(*body, nn.Linear(32, CLASSES))
    for p in model.parameters():
        p.requires_grad_(False).mul_(3)
    return model


@dataclass(frozen=True)
class Pair:
    """What both implementations did: iterates [steps + 1, n, ...] and results."""

    aim: Aim
    y: Tensor
    theirs: Tensor
    ours: Tensor
    their_point: Tensor
    their_broken: Tensor
    climb: Climb


def both(kind: str, loss: str, threat: Threat, steps: int, seed: int = 1) -> Pair:
    model = network(kind, seed)
    x = ((torch.rand(40, 2, 6, 6, generator=Seed(seed).generator()) - 1 / 3) * 3).clamp(0, 1)
    order = model(x).argsort(1, descending=True)
    y = order[:, 0]
    start = sphere_start(x, threat, Seed(seed).samples(torch.arange(len(x))))
    theirs, ours = Recorder(model), Recorder(model)
    settings = {"n_iter": steps, "norm": NORMS[threat.norm], "eps": threat.eps, "device": "cpu"}
    if loss == "dlr-targeted":
        peer = APGDAttack_targeted(theirs, **settings)
        peer.y_target = order[:, 1]
        aim = Aim(ours, dlr_targeted, order[:, :2], y)
    else:
        peer = APGDAttack(theirs, loss=loss, **settings)
        aim = Aim(ours, label_loss(loss), y, y)
    peer.init_hyperparam(x)
    x_best, right, _, x_broken = peer.attack_single_run(x, y, x_init=start)
    climb = apgd(aim, x, threat, steps=steps, start=start)
    point = torch.where(right[:, None, None, None], x_best, x_broken).detach()
    quiet = Aim(model, aim.loss, aim.target, y)
    return Pair(quiet, y, torch.stack(theirs.seen), torch.stack(ours.seen), point, ~right, climb)


def in_the_hands_of_rounding(pair: Pair) -> Tensor:
    """[steps + 1, n]: whether before this iterate two losses tied, or the gradient was gone.

    The rules compare losses strictly, so a tie goes to whoever rounds luckily; and DLR is flat once the true class is
    third, where in l2 both implementations follow noise.
    """
    grads, losses = [], []
    for x in pair.theirs:
        grad, logits = pair.aim.gradient(x)
        grads.append(grad.flatten(1).norm(dim=1) < 1e-8)
        losses.append(pair.aim.loss(logits, pair.aim.target))
    change = torch.stack(losses).diff(dim=0).abs() < 1e-13
    doubt = torch.stack(grads)
    doubt[1:] |= change
    return torch.cat([torch.zeros_like(doubt[:1]), doubt[:-1]]).cummax(0).values


CASES = [("smooth", 20), ("smooth", 100), ("relu", 50)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("kind", "steps"), CASES)
@pytest.mark.parametrize("loss", ["ce", "dlr", "dlr-targeted"])
@pytest.mark.parametrize("threat", [Linf(0.03), OfficialL2(0.2)], ids=["linf", "l2"])
def test_every_iterate_is_the_official_one(threat: Threat, loss: str, kind: str, steps: int) -> None:
    pair = both(kind, loss, threat, steps)
    assert pair.ours.shape == pair.theirs.shape == (steps + 1, 40, 2, 6, 6)
    same = (pair.ours - pair.theirs).abs().flatten(2).amax(2) < 1e-10
    assert bool((same | in_the_hands_of_rounding(pair)).all())
    throughout = same.all(0)
    assert float(throughout.double().mean()) >= (0.65 if (loss, threat.norm) == ("dlr", "l2") else 0.9)
    assert 0 < int(pair.their_broken.sum()) < 40
    assert torch.equal(pair.climb.damage > 0, pair.their_broken)
    # Their x_best where nothing was broken, their last misclassified point elsewhere unless it is wrong by a hair.
    equal = throughout & (damage(pair.aim.model(pair.their_point), pair.y) == pair.climb.damage)
    assert int(equal.sum()) >= int(throughout.sum()) - 2
    torch.testing.assert_close(pair.climb.x_adv[equal], pair.their_point[equal], rtol=0, atol=1e-10)


class Script(nn.Module):
    """Losses follow a random script, so that every rule about step sizes meets every case; gradients are linear."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        gen = Seed(steps).generator()
        walk = (0.4 * torch.randn(steps + 1, 40, generator=gen) + 0.3 * torch.rand(40, generator=gen)).cumsum(0)
        walk[0, ::2] = walk.amax(0)[::2] + 1  # the start of every other row is its best point
        self.lead = iter(walk)
        self.weight = 1e-3 * torch.randn(72, 4, generator=gen)

    def forward(self, x: Tensor) -> Tensor:
        lead = next(self.lead)
        return x.flatten(1) @ self.weight + torch.stack([-lead, lead, 0 * lead, 0.5 * lead], 1)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", ["ce", "dlr"])
@pytest.mark.parametrize("steps", [20, 50, 100])
@pytest.mark.parametrize("threat", [Linf(0.03), OfficialL2(0.2)], ids=["linf", "l2"])
def test_every_rule_about_step_sizes_is_the_official_one(threat: Threat, steps: int, loss: str) -> None:
    x = torch.rand(40, 2, 6, 6, generator=Seed(0).generator())
    y = torch.zeros(40, dtype=torch.int64)
    start = sphere_start(x, threat, Seed(0).samples(torch.arange(40)))
    theirs, ours = Recorder(Script(steps)), Recorder(Script(steps))
    peer = APGDAttack(theirs, n_iter=steps, norm=NORMS[threat.norm], eps=threat.eps, loss=loss, device="cpu")
    peer.init_hyperparam(x)
    _, right, _, x_broken = peer.attack_single_run(x, y, x_init=start)
    climb = apgd(Aim(ours, label_loss(loss), y, y), x, threat, steps=steps, start=start)
    torch.testing.assert_close(torch.stack(ours.seen), torch.stack(theirs.seen), rtol=0, atol=1e-10)
    torch.testing.assert_close(climb.x_adv[~right], x_broken[~right].detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("threat", [Linf(0.03), L2(0.2)], ids=["linf", "l2"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_targets_together_break_the_samples_that_targets_in_turn_break(threat: Threat, seed: int) -> None:
    """float32, as in use; each with its own random starts, so a sample on the edge may fall to one alone."""
    model = network("relu", seed).float()
    x = torch.rand(40, 2, 6, 6, generator=Seed(seed).generator()).float()
    y = model(x).argmax(1)
    settings = {"n_iter": 20, "norm": NORMS[threat.norm], "eps": threat.eps, "seed": 0, "n_target_classes": 5}
    with kept_global_rng():
        theirs = APGDAttack_targeted(model, **settings).perturb(x, y)
    gen = Seed(seed).samples(torch.arange(40))
    ours = craft(APGDTargeted(targets=5, steps=20), model, x, y, threat, gen, early_stop=True)
    broken = wrong(model, ours, y)
    assert 0 < int(broken.sum()) < 40
    assert int((broken ^ wrong(model, theirs, y)).sum()) <= 1
