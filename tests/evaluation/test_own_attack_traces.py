"""Attacks of one's own that write where they should not, or leave something behind in the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import Ends, Killed
from own_cases import among_methods
from torch import Tensor, nn

import flatrock
from flatrock.core.errors import ModelError, StateError, ThreatError
from flatrock.core.threat import Linf

THREAT = Linf(0.1)


@pytest.fixture
def samples(digits: Any) -> tuple[Tensor, Tensor]:
    return digits.test_x[:40].clone(), digits.test_y[:40].clone()


def relabels(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    y.add_(1).remainder_(10)
    return x.clone()


def steps_in_place(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    return x.add_(0.5 * threat.eps).clamp_(0, 1)


def numpys(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    x.numpy()[...] = 0.5
    return x


def data(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    x.data.clamp_(0.5, 1)
    return x


def still(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    return x.clone()


def steps(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    return (x + 0.5 * threat.eps).clamp(0, 1)


@pytest.mark.parametrize(("writes", "same"), [(relabels, still), (steps_in_place, steps)])
def test_an_attack_is_judged_by_the_samples_it_was_given(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], writes: Callable[..., Tensor], same: Callable[..., Tensor]
) -> None:
    x, y = samples
    result = flatrock.evaluate(digits_model, x, y, THREAT, attacks=[writes, same], keep_adversarial=True)
    assert torch.equal(result.flags[writes.__name__], result.flags[same.__name__])
    given = x.clone(), y.clone()
    made = [flatrock.attack(one, digits_model, x, y, THREAT) for one in (writes, same)]
    assert torch.equal(made[0], made[1])
    assert torch.equal(x, given[0])
    assert torch.equal(y, given[1]), "what belongs to the caller stays as it is"


@pytest.mark.parametrize("writes", [numpys, data])
def test_who_leaves_the_ball_in_place_is_seen(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], writes: Callable[..., Tensor]
) -> None:
    x, y = samples
    given = x.clone()
    with pytest.raises(ThreatError, match=r"left the linf ball of radius 0.1 by 4.0e-01"):
        flatrock.evaluate(digits_model, x, y, THREAT, attacks=[writes])
    with pytest.raises(ThreatError, match=r"left the linf ball of radius 0.1 by 4.0e-01"):
        flatrock.attack(writes, digits_model, x, y, THREAT)
    assert torch.equal(x, given)


CHANGED = "changed the model, which no longer answers as before .*, and it stays changed: load it again"


def last(model: nn.Module) -> nn.Module:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def hooks(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    last(model).register_forward_hook(lambda module, given, made: -made)
    return x


def hooks_quietly(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    """Leaves the classes as they are, but hardly a gradient to those who come after; on what attacks get alone."""
    model.register_forward_hook(lambda module, given, made: made / 1000)
    return x


def puts_an_attribute(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    next(m for m in model.modules() if isinstance(m, Warm)).heat = 2.0
    return x


def looks(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    """A hook that only looks changes no answer."""
    last(model).register_forward_hook(lambda module, given, made: None)
    return x


class Warm(nn.Module):
    """Divides its logits by an attribute."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.heat = inner, 1.0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x) / self.heat
        return logits


LEAVES = [hooks, hooks_quietly, puts_an_attribute]


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("device", [None, ["cpu", "cpu"]])
def test_an_attack_that_leaves_the_model_changed_is_noticed(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], tmp_path: Path, leaves: Callable[..., Tensor], device: Any
) -> None:
    how = {"attacks": ["pgd-1", leaves, "pgd-2"], "device": device, "journal": tmp_path / "exam.part"}
    for resume in (False, True):  # of which nothing is kept
        with pytest.raises(ModelError, match=f"attack '{leaves.__name__}' {CHANGED}"):
            flatrock.evaluate(Warm(copy.deepcopy(digits_model)), *samples, THREAT, **how, resume=resume)


HOOKS = """
from torch import Tensor


def hooks(model, x, y, threat, gen) -> Tensor:
    model.register_forward_hook(lambda module, given, made: -made)
    return x
"""


def test_a_surrogate_that_is_changed_is_noticed(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    other = flatrock.create_model("digits_cnn", seed=5)
    with (
        among_methods(tmp_path, HOOKS),
        pytest.raises(ModelError, match=f"attack 'transfer-mymethods:hooks' {CHANGED}"),
    ):
        flatrock.evaluate(digits_model, *samples, THREAT, attacks=["transfer-mymethods:hooks"], surrogate=other)


class Noisy(nn.Module):
    """Answers at random, by other numbers than torch's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.inner(x) * (1 + 1 / self.calls)
        return logits


def test_who_changes_nothing_is_left_alone(digits_model: nn.Module, samples: tuple[Tensor, Tensor]) -> None:
    model = copy.deepcopy(digits_model)
    alone = flatrock.evaluate(model, *samples, THREAT, attacks=["pgd-2"], batch_size=16)
    beside = flatrock.evaluate(model, *samples, THREAT, attacks=[looks, "pgd-2"], batch_size=16)
    assert torch.equal(beside.flags["pgd-2"], alone.flags["pgd-2"])
    assert beside.costs["pgd-2"]["forwards"] == alone.costs["pgd-2"]["forwards"]
    assert beside.costs["looks"]["forwards"] == beside.costs["looks"]["samples"], "looking at the model is no cost"
    random = flatrock.evaluate(Noisy(model), *samples, THREAT, attacks=[hooks_quietly], batch_size=16)
    assert "E05" in [finding.code for finding in random.findings], "whose answers say nothing"
    flatrock.evaluate(model, *samples, THREAT, attacks=["transfer-pgd-1", looks], surrogate=Noisy(model))


def adding(delta: Tensor) -> Callable[..., Tensor]:
    def adds(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
        return (x + delta).clamp(0, 1)

    return adds


class Adds:
    """The same as an object."""

    mixed_labels, bounded = False, True

    def __init__(self, delta: Tensor) -> None:
        self.delta = delta

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any, *, early_stop: bool = False
    ) -> Tensor:
        return (x + self.delta).clamp(0, 1)

    def passes(self, classes: int) -> int:
        return 0


@pytest.mark.parametrize("made", [adding, Adds])
def test_an_evaluation_does_not_go_on_with_another_tensor(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], tmp_path: Path, made: Callable[[Tensor], Any]
) -> None:
    def asked(delta: Tensor, **more: Any) -> Any:
        how = {"attacks": [made(delta)], "batch_size": 16, "journal": tmp_path / "exam.part"}
        return flatrock.evaluate(digits_model, *samples, THREAT, **how, **more)

    delta = THREAT.eps * torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0)).sign()
    with pytest.raises(Killed):
        asked(delta, progress=Ends(1))
    with pytest.raises(StateError, match=r"another evaluation \(different: attacks"):
        asked(-delta, resume=True)
    first = asked(delta.clone(), resume=True)
    assert "holds" in next(iter(first.attacks.values()))
    path = (tmp_path / "exam.part").with_suffix(".json")
    path.write_text(first.to_json())
    assert asked(delta, resume=True).provenance["time"] == first.provenance["time"], "the result that is there"
    with pytest.raises(StateError, match="different: attacks"):
        asked(-delta, resume=True)


class Few(nn.Module):
    """Takes a few rows at once and no more."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits: Tensor = self.inner(x)
        return logits


@pytest.mark.parametrize("size", [None, 8, 1])
def test_a_network_of_small_batches_is_asked_in_small_batches(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], size: int | None
) -> None:
    x, y = samples
    asked: dict[str, Any] = {"attacks": [steps], "doubt": False}
    result = flatrock.evaluate(Few(digits_model, size or 8), x, y, THREAT, batch_size=size, **asked)
    assert torch.equal(result.worst, flatrock.evaluate(digits_model, x, y, THREAT, **asked).worst)


class Keeps:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any, **_: Any) -> Tensor:
        self.seen = x.clone()
        return x.clone()


def test_an_attack_is_described_as_it_was_before_it_ran(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor]
) -> None:
    asked: dict[str, Any] = {"doubt": False, "batch_size": 16}
    found = [flatrock.evaluate(digits_model, *samples, THREAT, attacks=[Keeps()], **asked).attacks for _ in range(2)]
    assert found[0] == found[1] and "holds" in found[0]["Keeps"]
    kept = Keeps()
    assert flatrock.evaluate(digits_model, *samples, THREAT, attacks=[kept], **asked).attacks == found[0]
    assert len(kept.seen) > 1


def asks_wrongly(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    model(x.flatten(1))
    return x


def test_the_line_that_asked_the_model_is_named(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    said = r"attack 'asks_wrongly': .* got \[40, 64\]; .* \(test_own_attack_traces.py:\d+\)"
    with pytest.raises(ModelError, match=said):
        flatrock.evaluate(digits_model, *samples, THREAT, attacks=[asks_wrongly])


class Centred(nn.Module):
    """Its answers depend on the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner((x - x.mean(0) + 0.5).clamp(0, 1))
        return logits


def greedy(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    if len(x) > 8:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return x.clone()


def test_an_attack_that_needs_smaller_batches_has_changed_nothing(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor]
) -> None:
    asked: dict[str, Any] = {"attacks": [greedy], "doubt": False, "batch_size": 32}
    result = flatrock.evaluate(Centred(digits_model), *samples, THREAT, **asked)
    assert "E05" in {finding.code for finding in result.findings}
