"""An attack on the smoothed classifier: what no certificate may exceed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import answered, check_inputs, check_model, craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.core.borrow import borrowed, full_precision
from flatrock.core.errors import ThreatError
from flatrock.core.rng import Seed
from flatrock.core.threat import L2
from flatrock.diagnostics.smoothing import ABSTAIN, Smoothed, Smoothing, Voter, predictions


def attack_smoothed(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    smoothing: Smoothing,
    radius: float,
    *,
    steps: int = 20,
    draws: int = 32,
    batch_size: int = 1024,
    seed: int = 0,
) -> Tensor:
    """Per sample: whether the smoothed classifier still stands after L2 PGD of this radius on its mean probability.

    The attack climbs the mean over `draws` noises, the verdict is PREDICT with n votes of its own: a sample is broken
    only if it answers another class. Where it abstains nothing is shown and the sample stands. So the accuracy is an
    upper bound of what holds within the radius, and certified accuracy, a lower one, is never above it: a sample that
    is certified and broken is a mistake of either, which has probability 2 alpha at most.
    """
    x = check_inputs(x, y, L2(radius))
    if x.shape[0] == 0:
        raise ThreatError("there is nothing to attack: x has no samples")
    check_model(model, x)
    node, attack = Seed(seed).child("attack smoothed"), GradientAttack(steps=steps)
    soft = Smoothed(model, x[0], sigma=smoothing.sigma, draws=draws, seed=node.child("climb"))
    voter = Voter(model, smoothing.sigma, batch_size)
    votes = []
    with borrowed(model, x.device), full_precision(x.device):
        with torch.no_grad():
            answered(model, x[:2], y[:2])
        for rows in torch.split(torch.arange(len(x), device=x.device), max(batch_size // draws, 1)):
            gen = node.child("start").samples(rows)
            x_adv = craft(attack, soft, x[rows], y[rows], L2(radius), gen)
            for i, point in zip(rows.tolist(), x_adv, strict=True):
                votes.append(voter.votes(point, smoothing.n, node.child("verdict", i)))
    answers = predictions(torch.stack(votes), smoothing.alpha)
    return (answers == y.cpu()) | (answers == ABSTAIN)
