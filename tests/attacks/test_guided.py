"""GAT's one step against its closed form on a linear network; its turns, its passes, its start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attack_cases import Make, Recorder, Waits, gen_for
from torch import Tensor, nn

from flatrock.attacks.catalog import ATTACKS, attack, describe
from flatrock.attacks.craft import craft
from flatrock.attacks.guided import Guided
from flatrock.attacks.losses import GuidedLoss
from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Moment, TimedAttack
from flatrock.core.rng import Seed
from flatrock.core.threat import L2, Linf, Threat
from flatrock.core.types import Attack, PathAttack

EPS = 8 / 255


def linear(classes: int = 4, pixels: int = 12, n: int = 40) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear network in float64, inputs of which a third lie on the faces of the box, and labels of all kinds."""
    gen = Seed(5).child("guided").generator()
    model = nn.Linear(pixels, classes).double()
    with torch.no_grad():
        model.weight.copy_(2 * torch.randn(classes, pixels, generator=gen, dtype=torch.float64))
    x = (1.5 * torch.rand(n, pixels, generator=gen, dtype=torch.float64) - 0.25).clamp(0, 1)
    return model, x, torch.randint(classes, (n,), generator=gen)


def moment(step: int, share: float = 0.0) -> Moment:
    return Moment(epoch=1, step=step, share=share, seed=Seed(0))


def by_hand(model: nn.Linear, x: Tensor, p: Tensor, x0: Tensor, weight: float) -> Tensor:
    """d/dx' [CE + weight ||s - t||^2] = W^T [(t - p) + 2 weight (diag t - t t^T)(t - s)], sample by sample."""
    w, b = model.weight.detach(), model.bias.detach()
    rows = []
    for clean, start, label in zip(x, x0, p, strict=True):
        s, t = (torch.exp(z) / torch.exp(z).sum() for z in (w @ clean + b, w @ start + b))
        phi = torch.diag(t) - torch.outer(t, t)
        rows.append(w.T @ ((t - label) + 2 * weight * phi @ (t - s)))
    return torch.stack(rows)


def unit(g: Tensor, threat: Threat) -> Tensor:
    return torch.sign(g) if threat.norm == "linf" else g / g.square().sum(1, keepdim=True).sqrt()


def clipped(x: Tensor, moved: Tensor, threat: Threat) -> Tensor:
    delta = moved - x
    if threat.norm == "linf":
        edge = torch.full_like(delta, threat.eps)
        delta = torch.minimum(torch.maximum(delta, -edge), edge)
    else:
        length = delta.square().sum(1, keepdim=True).sqrt()
        delta = torch.where(length > threat.eps, delta * threat.eps / length, delta)
    return (x + delta).clamp(0, 1)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("threat", [Linf(EPS), Linf(0.2), L2(0.5)], ids=["8/255", "0.2", "l2"])
@pytest.mark.parametrize(("step", "share", "weight"), [(0, 0, 0), (1, 0, 10), (7, 0.84, 10), (8, 0.9, 0), (9, 0.9, 40)])
def test_the_step_in_closed_form(step: int, share: float, weight: float, threat: Threat, mixed: bool) -> None:
    """Even steps climb the cross-entropy alone, odd ones 10 and at the end 40 times the distance, too."""
    model, x, y = linear()
    seen = Recorder(model)
    rows = torch.eye(4, dtype=torch.float64)[y]
    target = 0.7 * rows + 0.3 * rows.flip(0) if mixed else y
    got = craft(Guided().at(moment(step, share)), seen, x, target, threat, gen_for(x))
    x0 = seen.seen[-1]
    away = (x0 - x).abs()
    if threat.norm == "linf":
        inside = (x > threat.eps / 2) & (x < 1 - threat.eps / 2)
        assert float((away[inside] - threat.eps / 2).abs().max()) < 1e-15
    assert float(x0.min()) >= 0
    assert float(x0.max()) <= 1
    slope = by_hand(model, x, target if mixed else rows, x0, weight)
    want = clipped(x, x0 + threat.eps * unit(slope, threat), threat)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    if weight:  # the distance decides some of the directions, or this proves nothing
        bare = clipped(x, x0 + threat.eps * unit(by_hand(model, x, rows, x0, 0), threat), threat)
        assert not torch.allclose(want, bare, atol=1e-3)


def test_the_published_constants() -> None:
    made = Guided()
    assert (made.weight, made.rise, made.rise_after, made.offset) == (10.0, 4.0, 0.85, 0.5)
    assert made.guide == "alternate"
    assert made.offset * EPS == pytest.approx(4 / 255, rel=1e-15)
    assert describe(made, Linf(EPS))["weight"] == 10.0


# Turns


def test_turns_follow_the_number_of_the_step_alone() -> None:
    made = Guided()
    assert isinstance(made, TimedAttack)
    assert not isinstance(made, PathAttack)
    order = [5, 0, 3, 2, 2, 1, 1_000_001, 4]
    assert [made.at(moment(s)).guide for s in order] == ["always" if s % 2 else "never" for s in order]
    assert made == Guided()
    for guide in ("always", "never"):
        assert {Guided(guide=guide).at(moment(s)).guide for s in range(4)} == {guide}


@pytest.mark.parametrize("per_epoch", [1, 7, 383])
def test_the_weight_rises_after_epoch_85_of_100(per_epoch: int) -> None:
    last = 100 * per_epoch - 1
    shares = [step / last for step in (0, 85 * per_epoch - 1, 85 * per_epoch, last)]
    assert [Guided().at(moment(1, share)).weight for share in shares] == [10, 10, 40, 40]
    once = Guided().at(moment(1, 1.0))
    assert once.at(moment(1, 1.0)) == once, "it rises once"


def test_unguided_is_one_step_of_pgd_and_so_is_weight_0() -> None:
    model, x, y = linear()
    never = craft(Guided(guide="never"), model, x, y, Linf(EPS), gen_for(x))
    assert torch.equal(craft(Guided(weight=0, guide="always"), model, x, y, Linf(EPS), gen_for(x)), never)
    assert torch.equal(craft(Guided().at(moment(0)), model, x, y, Linf(EPS), gen_for(x)), never)
    assert not torch.equal(craft(Guided(guide="always"), model, x, y, Linf(EPS), gen_for(x)), never)


def test_outside_of_training_it_is_guided() -> None:
    model, x, y = linear()
    for name in ("guided", "guided:guide=always"):
        assert torch.equal(attack(name, model, x, y, Linf(EPS)), attack("guided", model, x, y, Linf(EPS)))
    assert not torch.equal(
        attack("guided", model, x, y, Linf(EPS)), attack("guided:guide=never", model, x, y, Linf(EPS))
    )


# What it costs and what it leaves


@pytest.mark.parametrize(
    ("made", "forward"),
    [
        (Guided(), 2),
        (Guided(guide="always"), 2),
        (Guided().at(moment(1)), 2),
        (Guided().at(moment(0)), 1),
        (Guided(guide="never"), 1),
        (Guided(weight=0), 1),
    ],
)
def test_passes(made: Attack, forward: int) -> None:
    """At most two forward passes, one of them without gradient, and one backward pass."""
    model, x, y = linear()
    counts = {"forward": 0, "backward": 0}

    def seen(_: nn.Module, inputs: Any, output: Tensor) -> None:
        counts["forward"] += 1
        if output.requires_grad:
            output.register_hook(lambda grad: counts.__setitem__("backward", counts["backward"] + 1))

    model.register_forward_hook(seen)
    craft(made, model, x, y, Linf(EPS), gen_for(x))
    assert counts == {"forward": forward, "backward": 1}
    assert made.passes(10) == forward


def test_the_clean_pass_comes_first_and_sees_the_inputs_themselves() -> None:
    """It keeps no graph, on a network whose weights are not frozen either."""
    model, x, y = linear()
    seen, graphs = Recorder(model), []
    model.register_forward_hook(lambda _, __, output: graphs.append(output.requires_grad))
    Guided(guide="always")(seen, x, y, Linf(EPS), gen_for(x))
    assert len(seen.seen) == 2
    assert torch.equal(seen.seen[0], x)
    assert not torch.equal(seen.seen[1], x)
    assert graphs == [False, True]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("step", [0, 1])
def test_nothing_waits_for_a_gpu(step: int) -> None:
    model, x, y = linear()
    with Waits() as waits:
        Guided().at(moment(step))(model, x, y, Linf(EPS), gen_for(x))
    assert waits.found == []
    with Waits() as waits:
        bool(x.sum() > 0)
    assert waits.found, "it would notice"


def test_the_loss_is_one_graph_without_branches_on_tensors() -> None:
    whole = torch.compile(GuidedLoss(10.0), backend="eager", fullgraph=True)
    gen = Seed(0).generator()
    logits, target = torch.randn(6, 4, generator=gen), torch.rand(6, 8, generator=gen)
    torch.testing.assert_close(whole(logits, target), GuidedLoss(10.0)(logits, target))
    assert hash(GuidedLoss(10.0)) == hash(GuidedLoss(10.0)) != hash(GuidedLoss(40.0))
    assert GuidedLoss(10.0) == GuidedLoss(10.0), "a recording is found again"


# Its start


def starts(x: Tensor, threat: Threat, seed: int = 0, rows: Tensor | None = None, offset: float = 0.5) -> Tensor:
    seen, gen = Recorder(nn.Flatten()), gen_for(x, seed)
    if rows is not None:
        x, gen = x[rows], gen[rows]
    y = torch.zeros(len(x), dtype=torch.int64)
    craft(Guided(guide="never", offset=offset), seen, x, y, threat, gen)
    return seen.seen[0] - x


def test_signs_are_fair_and_belong_to_samples() -> None:
    x = torch.full((50, 200), 0.5, dtype=torch.float64)
    found = starts(x, Linf(EPS))
    assert set(torch.sign(found).unique().tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(found.abs(), torch.full_like(x, 4 / 255), rtol=1e-12, atol=0)
    heads = float((found > 0).double().mean())
    assert abs(heads - 0.5) < 5 / math.sqrt(4 * found.numel())
    rows = torch.tensor([17, 3, 40])
    assert torch.equal(starts(x, Linf(EPS), rows=rows), found[rows])
    assert not torch.equal(starts(x, Linf(EPS), seed=1), found)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("offset", [0.0, 0.25, 1.0])
def test_the_start_is_as_far_as_told(offset: float) -> None:
    x = torch.full((8, 30), 0.5, dtype=torch.float64)
    torch.testing.assert_close(starts(x, Linf(0.1), offset=offset).abs(), torch.full_like(x, offset * 0.1))
    lengths = starts(x, L2(0.4), offset=offset).square().sum(1).sqrt()
    torch.testing.assert_close(lengths, torch.full((8,), offset * 0.4, dtype=torch.float64))


def test_it_attacks(conv_net: Make, images: Make, right_labels: Make) -> None:
    """One step from a corner is no weaker than the corner, and its distance from the clean answer is larger guided."""
    model, x = conv_net(), images()
    y = right_labels(model, x)
    s = model(x).softmax(1)

    def far(guide: str) -> float:
        x_adv = craft(Guided(guide=guide), model, x, y, Linf(0.05), gen_for(x))
        return float((model(x_adv).softmax(1) - s).square().sum(1).mean().detach())

    assert far("always") > far("never") > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1}, "guided weight must be a number >= 0, got -1"),
        ({"rise": float("nan")}, "guided rise must be a number >= 0, got nan"),
        ({"offset": 1.5}, r"guided offset must lie in \[0, 1\], got 1.5"),
        ({"rise_after": 85}, r"guided rise_after must lie in \[0, 1\], got 85; write a tenth as 0.1"),
        ({"guide": "alternating"}, "unknown guided guide 'alternating'; known: .*did you mean 'alternate'"),
        ({"steps": 3}, "option of attack 'guided': 'steps'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ATTACKS.make("guided", **options)
