"""E05 to E16: for each a model that deserves the doubt and one that does not; a sound model deserves none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatrock
from flatrock.core.errors import ModelError
from flatrock.core.records import Finding, Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf
from flatrock.evaluation import checks, deep_checks, doubt
from flatrock.evaluation.checks import check_collapse
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.plans import Step, make_plan
from flatrock.evaluation.tally import Tally
from flatrock.models.sizes import rounded
from flatrock.reports.table import comparison


class Net(nn.Module):
    """A smooth network on 6x6 images that gives every class; `before` and `after` are where a fault is put."""

    def __init__(
        self, before: Callable[[Tensor], Tensor] | None = None, after: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        with kept_global_rng(seed=Seed(0).child("net")):
            first, last = nn.Linear(36, 24), nn.Linear(24, 4, bias=False)
        with torch.no_grad():
            first.weight.mul_(3)
            first.bias.copy_(-first.weight.sum(1) / 2)
        self.body = nn.Sequential(nn.Flatten(), first, nn.Tanh(), last)
        self.before, self.after = before or nn.Identity(), after or nn.Identity()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.after(4 * self.body(self.before(x)))
        return logits


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    """Random images and the answers of the network to them."""
    x = torch.rand(n, 1, 6, 6, generator=Seed(1).generator())
    return x, Net()(x).detach().argmax(1)


def labelled(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(1)


THREAT = Linf(0.02)


def look(model: nn.Module, threat: Linf | L2 = THREAT, n: int = 40, **options: Any) -> Result:
    """Evaluate on the model's own answers."""
    x, _ = data(n)
    return evaluate(model, x, labelled(model, x), threat, **{"attacks": ["pgd-5"], **options})


def codes(findings: Result | list[Finding]) -> list[str]:
    return [f.code for f in (findings.findings if isinstance(findings, Result) else findings)]


# Nothing to doubt


@pytest.mark.parametrize("threat", [Linf(0.1), Linf(0.01), L2(0.6)], ids=str)
def test_a_trained_network_raises_no_doubt(digits: Any, digits_model: nn.Module, threat: Linf | L2) -> None:
    x, y = digits.test_x[:64], digits.test_y[:64]
    result = evaluate(digits_model, x, y, threat, doubt=True)
    assert result.robust > 0
    assert result.findings == ()


def test_nor_does_it_in_half_precision(digits: Any, digits_model: nn.Module) -> None:
    x, y = digits.test_x[:12], digits.test_y[:12]
    result = evaluate(digits_model, x, y, Linf(0.1), attacks=["pgd-20"], doubt=True, precision="half")
    assert (result.provenance["precision"], result.findings) == ("float16, fused", ())


@pytest.mark.slow
@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.6)], ids=["linf", "l2"])
def test_nor_under_autoattack(digits: Any, digits_model: nn.Module, threat: Linf | L2) -> None:
    result = evaluate(digits_model, digits.test_x, digits.test_y, threat, attacks=["autoattack"], doubt=True)
    assert 0 < result.robust < result.clean
    assert result.findings == ()


@pytest.mark.parametrize("threat", [THREAT, L2(0.1), Linf(0.0), Linf(1e-6), Linf(0.4)], ids=str)
def test_a_smooth_network_raises_no_doubt(threat: Linf | L2) -> None:
    assert codes(look(Net(), threat, attacks=["pgd-20"], doubt=True)) == []


def test_deep_doubts_do_not_change_the_number() -> None:
    plain, doubted = look(Net()), look(Net(), doubt=True)
    assert torch.equal(plain.worst, doubted.worst)
    assert plain.costs["pgd-5"]["forwards"] == doubted.costs["pgd-5"]["forwards"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_sample_or_two_are_no_ground_for_doubt(n: int) -> None:
    assert codes(look(Net(), n=n, attacks=["pgd-20"], doubt=True)) == []


def test_nothing_right_nothing_to_doubt() -> None:
    x, y = data(6)
    assert codes(evaluate(Net(), x, (y + 1) % 4, THREAT, attacks=["pgd-5"], doubt=True)) == []


# E05


def noisy(x: Tensor) -> Tensor:
    return x + 0.05 * torch.randn_like(x)


def test_e05_a_model_that_answers_at_random() -> None:
    result = look(Net(before=noisy))
    assert codes(result) == ["E05"]
    assert "autoattack-rand" in result.findings[0].cure


def named(code: str, **options: Any) -> Finding:
    """The finding of this code about a model that answers at random."""
    (finding,) = (f for f in look(Net(before=noisy), **options).findings if f.code == code)
    return finding


@pytest.mark.parametrize("votes", [1, 3])
@pytest.mark.parametrize(
    ("attack", "means"), [("pgd-2", False), ("pgd-2:eot=2", True), ("apgd-ce:steps=1:eot=2", True)]
)
def test_e05_advises_what_is_not_done_yet(attack: str, means: bool, votes: int) -> None:
    finding = named("E05", attacks=[attack], votes=votes)
    assert ("each verdict is one draw" in finding.message) == (votes == 1)
    assert ("--votes 15" in finding.cure) == (votes == 1)
    assert ("autoattack-rand" in finding.cure) == (not means)
    assert ("3 votes decide and attacks climb means" in finding.cure) == (votes == 3 and means)


def test_e05_after_the_plan_does_not_advise_the_plan() -> None:
    assert "autoattack-rand" not in named("E05", n=4, attacks=["autoattack-rand"]).cure


def test_deep_doubts_about_a_random_model_know_that_it_is() -> None:
    """Weak attacks (E08), and a budget that single draws do not use (E10): no advice to use `autoattack`."""
    rough = Net(before=lambda x: x + 0.6 * torch.randn_like(x))
    single, voted = (
        {f.code: f.cure for f in look(rough, n=128, attacks=["pgd-1:step_size=0.001"], doubt=True, votes=v).findings}
        for v in (1, 5)
    )
    assert "by chance alone; judge with --votes 15" in single["E08"]
    assert "single draws" in single["E10"]
    assert all("E05" in single[code] for code in ("E08", "E10"))
    assert all("the plan autoattack" not in cure.replace("autoattack-rand", "") for cure in voted.values())


def test_deep_doubts_speak_of_chance_only_where_there_is_some() -> None:
    gains, losses = {"100 steps": 9}, {1: 1.0, 2: 3.0, 5: 1.0}
    for made, plain, random in (
        (lambda **o: deep_checks.check_steps(gains, 20, **o), "the plan autoattack", "by chance alone"),
        (
            lambda **o: deep_checks.check_steps(gains, 20, votes=3, **o),
            "the plan autoattack",
            "means over draws (eot=20)",
        ),
        (lambda **o: deep_checks.check_climb(losses, **o), "trust square", "pgd-20:eot=20"),
        (lambda **o: deep_checks.check_budget(1.0, Linf(0.5), 20, **o), "they are masked", "pgd-50:eot=20"),
    ):
        (told,), (other,) = made(), made(random=True)
        assert plain in told.cure and plain not in other.cure
        assert random in other.cure and random not in told.cure
        assert told.message == other.message


def test_e05_dropout_left_on() -> None:
    class Stubborn(nn.Dropout):
        def train(self, mode: bool = True) -> nn.Dropout:
            return super().train(True)

    assert "E05" in codes(look(Net(after=Stubborn(0.3))))


@pytest.mark.parametrize("batch_size", [7, 40])
def test_e05_not_for_rounding(batch_size: int) -> None:
    def rounded(z: Tensor) -> Tensor:
        return z + 1e-6 * torch.randn_like(z)

    assert codes(look(Net(after=rounded), batch_size=batch_size)) == []


@pytest.mark.parametrize("value", [-1e5, -1e9])
@pytest.mark.parametrize("votes", [1, 3])
def test_e05_behind_a_masked_class(value: float, votes: int) -> None:
    """Samples leave no attack early there, if a majority is to decide."""
    masked = Net(before=noisy, after=lambda z: torch.cat([z, torch.full_like(z[:, :1], value)], 1))
    assert codes(look(masked, votes=votes)) == ["E05"]


def test_e05_behind_an_offset() -> None:
    assert codes(look(Net(before=noisy, after=lambda z: z - 1e5))) == ["E05"]
    assert codes(look(Net(after=lambda z: z - 1e5))) == []


class OfTheBatch(Net):
    """Inputs are seen relative to the mean of their batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) + 0.5)


class Trains(nn.Sequential):
    """Goes into train mode whenever it is asked."""

    def forward(self, x: Tensor) -> Tensor:
        self.train()
        logits: Tensor = super().forward(x)
        return logits


def with_batchnorm(*, track: bool, kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    with kept_global_rng(seed=Seed(2).child("norm")):
        norm = nn.BatchNorm2d(3, track_running_stats=track)
        return kind(nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).eval()


@pytest.mark.parametrize(
    "model",
    [OfTheBatch(), with_batchnorm(track=False), with_batchnorm(track=True, kind=Trains)],
    ids=["mean", "statistics", "train"],
)
@pytest.mark.parametrize(("n", "batch_size"), [(128, None), (40, 10), (200, None), (3, None)])
@pytest.mark.parametrize("votes", [1, 3])
def test_e05_an_answer_that_depends_on_the_rest_of_the_batch(
    model: nn.Module, n: int, batch_size: int | None, votes: int
) -> None:
    (found,) = (f for f in look(model, n=n, batch_size=batch_size, votes=votes).findings if f.code == "E05")
    assert "depends on the other samples of its batch" in found.message
    assert "votes do not help" in found.cure and "--votes 15" not in found.cure


def test_e05_chance_beside_the_batch_is_chance() -> None:
    found = look(OfTheBatch(before=noisy)).findings
    assert [f.message.startswith("the model answers the same input differently") for f in found] == [True]


@pytest.mark.parametrize("n", [1, 2])
def test_e05_not_for_batchnorm_that_keeps_its_statistics(n: int) -> None:
    assert "E05" not in codes(look(with_batchnorm(track=True), n=n))
    assert "E05" not in codes(look(with_batchnorm(track=True), n=5, batch_size=n))


def test_e05_an_answer_that_is_gone_the_second_time() -> None:
    here = torch.tensor([[1.0, 2.0]])
    assert codes(checks.check_random(here, torch.full((1, 2), torch.nan))) == ["E05"]
    assert codes(checks.check_random(here, here.clone())) == []


# E06


def quantised(x: Tensor) -> Tensor:
    return torch.round(x * 4) / 4


@pytest.mark.parametrize("model", [Net(after=lambda z: 1e4 * z), Net(before=quantised)], ids=["saturated", "quantised"])
def test_e06_no_gradient(model: Net) -> None:
    result = look(model)
    assert codes(result) == ["E06"]
    assert "gradient of exactly zero" in result.findings[0].message


def by_numpy(x: Tensor) -> Tensor:
    """Torch refuses where x requires a gradient, and nowhere else."""
    return torch.tensor(np.round(x.numpy() * 8) / 8)


def test_e06_a_model_that_fails_where_inputs_require_gradients() -> None:
    model = Net(before=by_numpy)
    result = look(model, attacks=["square:queries=10"], doubt=True)
    assert codes(result) == ["E06"]
    assert "100 % of the inputs looked at have a gradient of exactly zero" in result.findings[0].message
    x, y = data(8)
    said = r"RuntimeError: Can't call numpy\(\) .*, and for such that require gradients\?"
    with pytest.raises(ModelError, match=said):
        flatrock.attack("pgd", model, x, y, THREAT, steps=2)
    with pytest.raises(ModelError, match=rf"attack 'pgd-2' needs gradients, but .* {said}.*'square' needs none"):
        look(model, attacks=["square:queries=10", "pgd-2"])


def test_e06_not_for_confident_models() -> None:
    """Cross-entropy of logits 10 times as large is flat, but not zero."""
    assert codes(look(Net(after=lambda z: 10 * z))) == []


def test_e06_sees_the_gradients_attacks_see() -> None:
    """The fast twin of this model has none."""
    x, y = data(20)
    model = Net()
    exam = Exam(model, Counted(model), x, y, THREAT, torch.device("cpu"), 20, Seed(0))
    logits, _ = exam.clean_pass()
    assert codes(doubt.doubts_before(exam, (), logits, "")) == []
    exam.crafting = Counted(Net(before=quantised))
    assert codes(doubt.doubts_before(exam, (), logits, "")) == ["E06"]


def trapped(x: Tensor) -> Tensor:
    """x itself; backward multiplies the zeros of the branch not taken with an infinite slope."""
    return x + 0 * torch.where(x >= 0, x, torch.sqrt(x - 2))


@pytest.mark.parametrize("attack", ["fgsm", "pgd-5", "apgd-ce:steps=5", "fab-t:steps=5", "square:queries=10"])
def test_e06_a_gradient_that_is_not_a_number(attack: str) -> None:
    """Finite logits, so nothing else shows that the attacks stood still."""
    result = look(Net(before=trapped), attacks=[attack])
    assert codes(result) == ["E06"]
    assert "100 % of the inputs looked at have a NaN or infinite gradient" in result.findings[0].message
    assert "torch.where" in result.findings[0].cure


def test_e06_an_infinite_gradient_of_a_single_input() -> None:
    x, _ = data(40)
    x[3, 0, 2, 2] = 0
    model = Net(before=lambda x: x.sqrt().square())
    result = evaluate(model, x, labelled(model, x), THREAT, attacks=["pgd-5"])
    assert codes(result) == ["E06"]
    assert result.findings[0].message.startswith("2 % of the inputs")


def test_e06_tells_zeros_and_infinities_apart() -> None:
    zeros, odd = checks.check_gradients(torch.tensor([0.0, 0.0, 1.0, torch.nan, torch.inf]))
    assert zeros.message.startswith("40 % of the inputs looked at have a gradient of exactly zero")
    assert odd.message.startswith("40 % of the inputs looked at have a NaN or infinite gradient")
    assert checks.check_gradients(torch.ones(5)) == checks.check_gradients(torch.ones(0)) == []


LEVELS = 16


def gridded(n: int = 40) -> Tensor:
    """Images of few levels, many of them black: where they were cut off they would be images of the data again."""
    return ((2 * data(n)[0] - 1).clamp(0, 1) * LEVELS).round() / LEVELS


def to_grid(x: Tensor) -> Tensor:
    """Rounds whatever is not an image of the data set, which passes with its gradient."""
    near = (x * LEVELS).round() / LEVELS
    return torch.where((x - near).abs() < 1e-6, x, near)


@pytest.mark.parametrize("threat", [THREAT, L2(0.1)], ids=str)
def test_e06_gradients_that_end_where_the_data_end(threat: Linf | L2) -> None:
    x, model = gridded(), Net(before=to_grid)
    (found,) = evaluate(model, x, labelled(model, x), threat, attacks=["pgd-5"]).findings
    assert found.code == "E06"
    assert found.message.startswith(
        "100 % of the random points looked at in the balls around inputs have a gradient of"
    )
    for other, radius in ((Net(), threat), (model, Linf(0.0))):
        assert codes(evaluate(other, x, labelled(other, x), radius, attacks=["pgd-5"])) == []


class Opaque(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def test_e06_a_model_without_gradients_is_doubted_and_still_attacked_without_them() -> None:
    result = look(Opaque(), Linf(0.1), attacks=["square:queries=30"], doubt=True)
    assert codes(result) == ["E06"]
    assert "100 %" in result.findings[0].message
    assert result.robust < 1
    with pytest.raises(ModelError, match="no gradient"):
        look(Opaque(), attacks=["pgd-5"])


class Cut(torch.autograd.Function):
    """Identity whose output says it has a gradient, and which has none: what dynamic quantisation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dummy: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0].sum()


def test_e06_a_gradient_that_does_not_reach_the_input() -> None:
    def cut(z: Tensor) -> Tensor:
        return Cut.apply(z.detach(), torch.zeros((), requires_grad=True))  # type: ignore[no-any-return, no-untyped-call]

    result = look(Net(before=cut), Linf(0.1), attacks=["square:queries=30"], doubt=True)
    assert codes(result) == ["E06"]
    for attack in ("pgd-5", "fab", "fab-t"):
        with pytest.raises(ModelError, match="no gradient"):
            look(Net(before=cut), attacks=[attack])


# E07


def test_e07_a_black_box_attack_beats_masked_gradients() -> None:
    masked = look(Net(before=quantised), Linf(0.12), n=12, attacks=["autoattack"])
    assert codes(masked) == ["E06", "E07"]
    assert masked.costs["autoattack/square"]["broken"] >= 2
    assert masked.findings[1].message.startswith("autoattack/square broke ")
    assert masked.robust == 0


def test_e07_not_for_the_same_network_with_gradients() -> None:
    open_ = look(Net(), Linf(0.12), n=12, attacks=["autoattack"])
    assert (open_.robust, codes(open_)) == (0, [])


@pytest.mark.parametrize(
    ("broken", "samples", "doubted"), [(0, 100, False), (1, 100, False), (2, 100, True), (20, 10**4, False)]
)
def test_e07_needs_two_samples_and_the_share(broken: int, samples: int, doubted: bool) -> None:
    """One sample of a hundred is chance; AutoAttack's own bound is 0.2 %."""
    assert bool(checks.check_black_box({"autoattack/square": broken}, samples)) == doubted
    assert bool(checks.check_black_box({"autoattack/square": 21}, 10**4))


def test_e07_is_about_plans() -> None:
    """On its own, square is compared with nothing: a weak gradient attack beside it proves no masking."""
    result = look(Net(), Linf(0.05), attacks=["pgd-1:step_size=0.001", "square:queries=200"])
    assert result.per_attack["square:queries=200"] < result.per_attack["pgd-1:step_size=0.001"]
    assert codes(result) == []


# E08


def test_e08_attacks_that_are_too_weak() -> None:
    result = look(Net(), attacks=["pgd-1:step_size=0.001"], doubt=True)
    assert codes(result) == ["E08"]
    assert "steps" in result.findings[0].message
    assert codes(look(Net(), attacks=["pgd-1:step_size=0.001"])) == [], "a deep doubt is only raised if asked for"


def test_e08_what_any_attack_named_had_broken_is_no_gain() -> None:
    assert codes(look(Net(), attacks=["pgd-1:step_size=0.001", "pgd-20"], doubt=True)) == []


@pytest.mark.parametrize(
    ("more", "samples", "doubted"), [(3, 20, False), (4, 20, True), (3, 128, False), (4, 128, True)]
)
def test_e08_needs_four_samples_and_the_share(more: int, samples: int, doubted: bool) -> None:
    found = deep_checks.check_steps({"100 steps": 0, "5 restarts": more}, samples)
    assert bool(found) == doubted
    assert all(f"with 5 restarts breaks another {100 * more / samples:.1f} %" in f.message for f in found)


# E09


class Backwards(torch.autograd.Function):
    """Identity whose gradient points the wrong way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def wrong_way(x: Tensor) -> Tensor:
    return Backwards.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_e09_a_loss_that_falls_along_its_gradient() -> None:
    result = look(Net(before=wrong_way), attacks=["pgd-20"], doubt=True)
    assert "E09" in codes(result)
    (finding,) = (f for f in result.findings if f.code == "E09")
    assert "1: " in finding.message
    assert ", 20: " in finding.message


def test_e09_a_rough_loss() -> None:
    """Waves much shorter than a step: the gradient says nothing about where the step ends."""

    def waves(x: Tensor) -> Tensor:
        return x + 0.02 * torch.sin(2000 * x)

    assert "E09" in codes(look(Net(before=waves), attacks=["pgd-20"], doubt=True))


@pytest.mark.parametrize(
    ("losses", "doubted"),
    [
        ([1.0, 2.0, 3.0, 4.0, 3.8], False),
        ([1.0, 2.0, 3.0, 4.0, 3.6], True),
        ([1.0, 2.0, 1.2, 2.0, 3.0], True),
        ([1.0, 2.0, 1.9, 2.0, 3.0], False),
        ([1.0, 1.0, 1.0, 1.0, 1.0], False),
        ([1.0, 1.0001, 1.0, 1.0, 1.0], False),
        ([1.0, 2.0, 9.0, float("inf"), float("inf")], False),
        ([1.0, 2.0, 9.0, float("nan"), 1.0], False),
    ],
)
def test_e09_a_tenth_of_the_rise_may_be_lost(losses: list[float], doubted: bool) -> None:
    assert bool(deep_checks.check_climb(dict(zip(doubt.LADDER, losses, strict=True)))) == doubted


def test_e08_does_not_advise_what_is_in_use() -> None:
    """Fast waves on the input: PGD stumbles over points that AutoAttack, going uphill, leaves out."""
    (found,) = deep_checks.check_steps({"100 steps": 20}, 100, planned=True)
    assert "the plan autoattack" not in found.cure
    assert "gradients mislead" in found.cure
    (other,) = deep_checks.check_steps({"100 steps": 20}, 100, planned=True, random=True)
    assert "by chance alone" in other.cure


@pytest.mark.parametrize(("plan", "planned"), [("autoattack", True), ("pgd-1", False)])
def test_e08_knows_whether_autoattack_is_in_use(plan: str, planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(doubt, "check_steps", lambda *_, planned, **__: asked.append(planned) or [])
    look(Net(), n=4, attacks=[plan], doubt=True)
    assert asked == [planned]


# E10


@pytest.mark.parametrize("threat", [THREAT, L2(0.1)], ids=["linf", "l2"])
def test_e10_surviving_any_budget(threat: Linf | L2) -> None:
    result = look(Net(before=wrong_way), threat, attacks=["pgd-20"], doubt=True)
    (finding,) = (f for f in result.findings if f.code == "E10")
    assert f"{threat.norm} eps {0.5 if threat is THREAT else 3:.3g}" in finding.message


def test_e10_quantised_inputs_survive_too() -> None:
    assert {"E06", "E10"} <= set(codes(look(Net(before=torch.round), attacks=["pgd-20"], doubt=True)))


class Threshold(nn.Module):
    """Class 1 where the first of two coordinates is above t: nothing is masked, and 1 - t may be out of reach."""

    def __init__(self, t: float) -> None:
        super().__init__()
        self.t = t

    def forward(self, x: Tensor) -> Tensor:
        z = 20 * (x[:, 0] - self.t)
        return torch.stack([-z, z], 1)


@pytest.mark.parametrize("threat", [Linf(0.05), L2(0.05)], ids=["linf", "l2"])
@pytest.mark.parametrize("t", [0.2, 0.3, 0.4, 0.5])
def test_e10_who_cannot_be_broken_is_no_sign(t: float, threat: Linf | L2) -> None:
    x = torch.rand(200, 2, generator=Seed(3).generator())
    result = evaluate(Threshold(t).eval(), x, (x[:, 0] > t).long(), threat, attacks=["pgd-20", "cw-20"], doubt=True)
    assert result.robust == float(((x[:, 0] - t).abs() > 0.05).double().mean())
    assert codes(result) == []


def test_e10_counts_who_has_a_wrong_answer_in_reach() -> None:
    """Grey is of class 1 and breaks class 0 alone; a sample of class 1 is broken by another where it gets there."""
    x = torch.tensor([[0.1, 0.5], [0.6, 0.5], [0.9, 0.5]])
    y = torch.tensor([0, 1, 1])
    exam = Exam(Threshold(0.3), Counted(Threshold(0.3)), x, y, THREAT, torch.device("cpu"), 2, Seed(0))
    assert doubt._reached(exam, torch.arange(3), Linf(0.5)).tolist() == [True, True, False], "0.9 gets to 0.4 at most"


def test_e10_a_twentieth_may_survive() -> None:
    assert codes(deep_checks.check_budget(0.05, Linf(0.5), 100)) == []
    assert codes(deep_checks.check_budget(0.06, Linf(0.5), 100)) == ["E10"]


def test_e10_the_budget_of_a_large_image_is_a_threat_there_is() -> None:
    x = torch.zeros(1, 3, 600, 600)
    exam = Exam(Net(), Counted(Net()), x, torch.zeros(1), L2(1.0), torch.device("cpu"), 1, Seed(0))
    assert doubt._huge(exam).eps == 388


# Deep doubts keep to their means


class Fragile(nn.Module):
    """NaN where an input left 0.5 by more than 0.1."""

    def forward(self, x: Tensor) -> Tensor:
        far = ((x.flatten(1) - 0.5).abs().amax(1, keepdim=True) > 0.1).to(x.dtype)
        return torch.cat([x.flatten(1).sum(1, keepdim=True), -x.flatten(1)[:, :2]], 1) + 0 / (1 - far)


@pytest.mark.parametrize("radii", [(Linf(0.2), Linf(0.05)), (L2(0.8), L2(0.05))], ids=["linf", "l2"])
def test_a_model_without_an_answer_does_not_stop_the_doubts(radii: tuple[Linf | L2, Linf | L2]) -> None:
    """Its gradient is NaN there; a step along it would be no input at all."""
    x, y = torch.full((6, 4), 0.5), torch.zeros(6, dtype=torch.int64)
    for threat, expected in zip(radii, (["E04"], []), strict=True):
        assert codes(evaluate(Fragile().eval(), x, y, threat, attacks=["pgd-20"], doubt=True)) == expected


def test_deep_doubts_keep_to_the_batch_size() -> None:
    sizes: list[int] = []
    model = Net(before=lambda x: sizes.append(len(x)) or x)  # type: ignore[func-returns-value]
    small = look(model, batch_size=7, doubt=True)
    assert max(sizes[6:]) == 7
    assert codes(small) == []


# E11


class Anxious(nn.Module):
    """A twin that gives the runner-up where the model is sure by less than `slack`."""

    def __init__(self, model: nn.Module, slack: float) -> None:
        super().__init__()
        self.model, self.slack = model, slack

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.model(x)
        return z - self.slack * torch.zeros_like(z).scatter(1, z.argmax(1, keepdim=True), 1)


def examined(slack: float, n: int = 60) -> tuple[Exam, Tally, tuple[Step, ...]]:
    x, y = data(n)
    model = Net().requires_grad_(False)
    twin = Counted(Anxious(model, slack))
    exam = Exam(model, twin, x, y, THREAT, torch.device("cpu"), n, Seed(0), exact=False)
    steps = make_plan(["pgd-10"])
    tally = Tally(y, *exam.clean_pass(), None)
    tally.begin(steps[0])
    tally.add(steps[0], exam.attempt(steps[0], torch.arange(n)))
    return exam, tally, steps


def test_e11_a_twin_that_calls_samples_broken_too_early() -> None:
    exam, tally, steps = examined(0.4)
    assert tally.disputed > 1
    assert codes(doubt.doubts_after(steps, tally, classes=4)) == ["E11"]
    exact = look(Net(), n=60, attacks=["pgd-10"])
    assert tally.standing == exact.robust, "what the twin only called broken was attacked again, in full precision"
    assert tally.costs["pgd-10"]["backwards"] > 0
    assert (exam.crafting.forwards, exam.crafting.backwards) == (0, 0)


def test_what_is_disputed_is_attacked_in_few_sizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the verdicts and the counts are the same."""
    _, before, _ = examined(0.4)
    seen: list[int] = []
    monkeypatch.setattr("flatrock.models.sizes.size_for", lambda x: seen.append(x.shape[0]) or rounded(x.shape[0]))
    _, tally, _ = examined(0.4)
    assert len(set(seen)) > 1, "samples leave as they break"
    assert torch.equal(tally.survivors, before.survivors)
    assert all(tally.costs["pgd-10"][k] == before.costs["pgd-10"][k] for k in ("forwards", "backwards"))


def test_e11_not_for_a_faithful_twin() -> None:
    _, tally, steps = examined(0.0)
    assert tally.disputed == 0
    assert codes(doubt.doubts_after(steps, tally, classes=4)) == []


def test_e11_a_few_disputes_are_normal() -> None:
    assert codes(checks.check_disputes(50, 10_000)) == []
    assert codes(checks.check_disputes(51, 10_000)) == ["E11"]


# E12


class First(nn.Module):
    """Only so many classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, z: Tensor) -> Tensor:
        return z[:, : self.classes]


@pytest.mark.parametrize(("classes", "attack", "doubted"), [(2, "fast", True), (3, "fast", True), (4, "fast", False)])
def test_e12_few_classes(classes: int, attack: str, doubted: bool) -> None:
    result = look(Net(after=First(classes)), n=8, attacks=[attack])
    assert codes(result) == (["E12"] if doubted else [])
    if doubted:
        assert f"with {classes} classes" in result.findings[0].message


@pytest.mark.parametrize("classes", [2, 3])
def test_e12_is_about_plans(classes: int) -> None:
    assert codes(look(Net(after=First(classes)), n=8, attacks=["pgd-3", "cw-3"])) == []


# E13


def test_e13_a_model_that_needs_float32() -> None:
    def stubborn(x: Tensor) -> Tensor:
        return x @ torch.eye(6)

    result = look(Net(before=stubborn), precision="half")
    assert codes(result) == ["E13"]
    assert "it does not run in half precision" in result.findings[0].message
    assert result.provenance["precision"] == "float32"
    assert torch.equal(result.worst, look(Net(before=stubborn), precision="full").worst)


@pytest.mark.parametrize("precision", ["half", "full", "auto"])
def test_e13_not_for_others(precision: str) -> None:
    assert codes(look(Net(), precision=precision)) == []


# E14


class Purified(nn.Module):
    """Takes a step towards what the network is surest of before it answers, with gradients asked for in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.way = Net(), way

    def _energy(self, x: Tensor) -> Tensor:
        return -self.net(x).logsumexp(1).sum()

    def _step(self, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_(True)
        if self.way == "func":
            found: Tensor = torch.func.grad(self._energy)(x.detach())
        elif self.way == "backward":
            self._energy(leaf).backward()
            found = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        else:
            (found,) = torch.autograd.grad(self._energy(leaf), leaf)
        return 0.01 * found.sign()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            step = self._step(x)
        logits: Tensor = self.net(x - step)
        return logits


@pytest.mark.parametrize(("way", "said"), [("grad", "grad"), ("func", "grad"), ("backward", "backward")])
def test_e14_a_model_that_takes_gradients_itself(way: str, said: str) -> None:
    result = look(Purified(way).eval(), n=8)
    assert codes(result) == ["E14"]
    assert f"(torch.autograd.{said})" in result.findings[0].message


def test_e14_not_for_attacks_and_networks() -> None:
    assert codes(look(Net(), n=8, attacks=["pgd-3", "fab", "square"])) == []


def test_looking_for_e14_leaves_a_profiler_alone() -> None:
    seen = []

    def profiler(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code is Net.forward.__code__ and event == "call":
            seen.append(frame.f_code.co_name)

    sys.setprofile(profiler)
    try:
        with pytest.raises(RuntimeError, match="away"), doubt._gradients_taken() as called:
            Net()(data(1)[0])
            raise RuntimeError("away")
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert (seen[-1:], called) == (["forward"], [])


# E15


class Stuck(nn.Module):
    """One class is far ahead of all others, whatever the input."""

    def __init__(self, lead: float = 50.0) -> None:
        super().__init__()
        self.net = Net()
        self.lead = lead

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits + self.lead * torch.eye(4)[1]


@pytest.mark.parametrize("doubt", [False, True])
def test_e15_one_answer_to_everything(doubt: bool) -> None:
    x, y = data(64)[0], torch.arange(64) % 3
    result = evaluate(Stuck().eval(), x, y, Linf(0.05), attacks=["pgd-3"], doubt=doubt)
    assert codes(result) == ["E15"], "no budget changes such an answer: no E10"
    assert "answers 1 to all 64 clean samples" in result.findings[0].message
    assert result.robust == result.clean == pytest.approx(1 / 3, abs=0.02)
    assert comparison({"m": result}).rows[0][0] == "m COLLAPSED"


@pytest.mark.parametrize(
    ("of_it", "others", "collapsed"), [(48, 1, False), (990, 9, False), (990, 10, True), (5, 5, True), (6, 4, False)]
)
def test_e15_takes_samples_of_other_classes(of_it: int, others: int, collapsed: bool) -> None:
    """One misread sample among many of one class is no collapse."""
    y = torch.tensor([1] * of_it + [0] * others)
    logits = torch.eye(4)[torch.ones_like(y)]
    assert bool(check_collapse(logits, y)) == collapsed


def test_e15_hides_no_masked_gradients() -> None:
    """One answer to clean inputs, no gradients anywhere, and an attack without gradients that gets through."""
    x, y = data(64)[0], torch.arange(64) % 3
    masked = nn.Sequential(Coarse(), Stuck(lead=6.0)).eval()
    assert masked(x).argmax(1).unique().tolist() == [1]
    result = evaluate(masked, x, y, Linf(0.4), attacks=["pgd-3", "square:queries=300"], doubt=True)
    assert result.per_attack["pgd-3"] == result.clean > result.robust
    assert {"E15", "E06", "E10"} <= set(codes(result))


class Coarse(nn.Module):
    """Inputs of few levels: no gradient anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return (4 * x).round() / 4


@pytest.mark.parametrize(("n", "several"), [(9, True), (64, False)])
def test_e15_not_for_few_samples_or_those_of_one_class(n: int, several: bool) -> None:
    y = torch.arange(n) % 3 if several else torch.ones(n, dtype=torch.long)
    result = evaluate(Stuck().eval(), data(n)[0], y, Linf(0.05), attacks=["fgsm"])
    assert "E15" not in codes(result)
    assert comparison({"m": result}).rows[0][0] == "m"


# E16


def guesses(n: int, classes: int = 4, seed: int = 3) -> Tensor:
    return torch.randint(classes, (n,), generator=Seed(seed).generator())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_e16_labels_that_have_nothing_to_do_with_the_answers(seed: int) -> None:
    result = evaluate(Net(), data(400)[0], guesses(400, seed=seed), THREAT, attacks=["fgsm"])
    (finding,) = result.findings
    assert finding.code == "E16"
    assert f"right on {100 * result.clean:.2f} % of 400 clean samples" in finding.message
    assert "among 4 classes reach up to 29.33 % (mean 25.00" in finding.message
    assert comparison({"m": result}).rows[0][0] == "m"


def test_e16_worse_than_guesses_is_no_better() -> None:
    x, y = data(120)
    assert codes(evaluate(Net(), x, (y + 1) % 4, THREAT, attacks=["fgsm"])) == ["E16"]


@pytest.mark.parametrize("n", [1, 2, 40, 99])
def test_e16_not_of_few_samples(n: int) -> None:
    assert "E16" not in codes(evaluate(Net(), data(n)[0], guesses(n), THREAT, attacks=["fgsm"]))


@pytest.mark.parametrize(("right", "doubted"), [(50, False), (39, False), (33, True), (0, True)])
def test_e16_more_than_two_standard_errors_are_enough(right: int, doubted: bool) -> None:
    """100 samples, 4 classes: 25 + 2 * 4.33 = 33.66."""
    y = torch.arange(100) % 4
    said = torch.where(torch.arange(100) < right, y, (y + 1) % 4)
    assert codes(checks.check_chance(torch.eye(4)[said], y)) == (["E16"] if doubted else [])


def test_e16_leaves_one_answer_to_e15() -> None:
    y = torch.arange(200) % 4
    logits = torch.eye(4)[torch.ones(200, dtype=torch.long)]
    assert codes(checks.check_collapse(logits, y)) == ["E15"]
    assert codes(checks.check_chance(logits, y)) == []
