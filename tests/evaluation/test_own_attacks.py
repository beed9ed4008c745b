"""Attacks of one's own: a copy of PGD gives what PGD gives, by name or as an object; what is none is refused."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import Ends, Killed
from own_cases import METHODS, among_methods
from torch import Tensor, nn

import flatrock
from flatrock.attacks.catalog import describe, parse_attack
from flatrock.attacks.written import Written
from flatrock.core.errors import ConfigError, ModelError, StateError, ThreatError
from flatrock.core.files import sha256
from flatrock.core.rng import Seed
from flatrock.core.threat import Linf

THREAT = Linf(0.1)


@pytest.fixture(autouse=True)
def methods(tmp_path: Path) -> Iterator[Path]:
    with among_methods(tmp_path) as file:
        yield file


@pytest.fixture
def asked(digits: Any, digits_model: nn.Module) -> Any:
    return partial(flatrock.evaluate, digits_model, digits.test_x[:40], digits.test_y[:40], THREAT, batch_size=16)


def loaded(name: str = "climb") -> Any:
    with suppress(ConfigError):
        parse_attack(f"mymethods:{name}")
    return sys.modules["mymethods"]


SPELLED = ["mymethods:climb-5", "mymethods:climb:steps=5", "mymethods:Climb:steps=5"]


@pytest.mark.parametrize("name", SPELLED)
def test_a_copy_of_pgd_gives_the_same_by_name(asked: Any, name: str) -> None:
    head = name.removesuffix(":steps=5").removesuffix("-5")
    theirs = asked(attacks=["pgd-5"])
    mine = asked(attacks=[{"name": head, "steps": 5, "label": "pgd-5"}])  # random numbers belong to the label
    assert torch.equal(mine.flags["pgd-5"], theirs.flags["pgd-5"])
    assert 0 < theirs.robust < theirs.clean
    assert asked(attacks=[name]).per_attack.keys() == {name}


def test_objects_classes_and_functions(asked: Any) -> None:
    module = loaded()
    specs = [
        {"name": module.climb, "steps": 5, "label": "a"},
        {"name": module.Climb, "steps": 5, "label": "b"},
        {"name": module.Climb(steps=5), "label": "c"},
        {"name": partial(module.climb, steps=5), "label": "d"},
        {"name": "mymethods:climb", "steps": 5, "label": "e"},
    ]
    for spec in specs:
        label, attack = parse_attack(spec)
        assert label == spec["label"]
        x, y = torch.rand(6, 1, 8, 8), torch.arange(6)
        net, gen = flatrock.create_model("digits_cnn").eval(), Seed(3).samples(torch.arange(6))
        assert torch.equal(attack(net, x, y, THREAT, gen), parse_attack("pgd-5")[1](net, x, y, THREAT, gen))
    found = asked(attacks=["pgd-1", module.climb, module.Climb(steps=2), specs[0]])
    assert list(found.per_attack) == ["pgd-1", "climb", "Climb", "a"]
    one = asked(attacks=module.Climb(steps=2))
    assert torch.equal(one.flags["Climb"], found.flags["Climb"])


def test_one_call(digits: Any, digits_model: nn.Module) -> None:
    x, y = digits.test_x[:8], digits.test_y[:8]
    made = [
        flatrock.attack(how, digits_model, x, y, THREAT, **options)
        for how, options in [
            ("mymethods:climb", {"steps": 3}),
            ("mymethods:climb-3", {}),
            ("mymethods:climb:steps=3", {}),
        ]
    ]
    assert all(torch.equal(made[0], other) for other in made)
    given = flatrock.attack(loaded().climb, digits_model, x, y, THREAT, steps=3)
    assert torch.equal(given, flatrock.attack(loaded().climb, digits_model, x, y, THREAT, steps=3))
    assert not torch.equal(given, flatrock.attack(loaded().climb, digits_model, x, y, THREAT, steps=3, seed=1))
    assert float((given - x).abs().max()) <= THREAT.eps + 1e-6
    with pytest.raises(ConfigError, match="steps twice"):
        flatrock.attack("mymethods:climb-3", digits_model, x, y, THREAT, steps=3)


def test_a_transfer_crafts_with_it(asked: Any) -> None:
    other = flatrock.create_model("digits_cnn", seed=5)
    found = asked(attacks=["transfer-pgd-3", "transfer-mymethods:climb-3"], surrogate=other)
    assert set(found.per_attack) == {"transfer-pgd-3", "transfer-mymethods:climb-3"}


def test_a_result_says_which_code_it_was(asked: Any) -> None:
    module = loaded()
    told = asked(attacks=["mymethods:climb:steps=2", module.Climb(steps=3)]).attacks
    code = {"file": "mymethods.py", "sha256": sha256(METHODS)}
    size = THREAT.default_step
    assert told["mymethods:climb:steps=2"] == {"kind": "climb", "steps": 2, "step_size": size, "code": code}
    assert told["Climb"] == {"kind": "Climb", "steps": 3, "step_size": size, "code": code}


def test_a_default_that_is_written_out_is_no_other_attack() -> None:
    short, long, other, bound = (
        describe(parse_attack(spec)[1], THREAT)
        for spec in ("mymethods:climb", "mymethods:climb-20", "mymethods:climb-19", partial(loaded().climb, steps=20))
    )
    assert short == long != other
    assert bound["steps"] == 20

    def heeds(model: Any, x: Tensor, y: Any, threat: Any, gen: Any = None, *, early_stop: bool = True) -> Tensor:
        return x

    assert describe(parse_attack(heeds)[1], THREAT).keys() == {"kind", "code"}, "what the run gives is no option"


class Held:
    """An attack that has no `steps` to make, but an attribute of that name."""

    mixed_labels, bounded, steps = False, True, 0

    def __call__(self, model: Any, x: Tensor, y: Any, threat: Any, gen: Any, *, early_stop: bool = False) -> Tensor:
        return x

    def passes(self, classes: int) -> int:
        return 0


def test_who_makes_no_step_is_told_where_steps_is_an_option(asked: Any) -> None:
    def findings(*attacks: Any, **more: Any) -> list[str]:
        return [f.message for f in asked(attacks=attacks, **more).findings if f.code == "E17"]

    (text,) = findings("mymethods:climb-0", "mymethods:climb-1", "pgd-0", Held(), {"name": loaded().Climb, "steps": 0})
    assert text.startswith("no gradient step is made by mymethods:climb-0, pgd-0: ")
    assert findings("mymethods:climb-1", Held()) == []
    (text,) = findings("transfer-mymethods:climb-0", surrogate=flatrock.create_model("digits_cnn", seed=5))
    assert "transfer-mymethods:climb-0" in text


def test_an_evaluation_does_not_go_on_with_other_code(asked: Any, methods: Path, tmp_path: Path) -> None:
    how = {"attacks": ["mymethods:climb-2"], "journal": tmp_path / "exam.part"}
    with pytest.raises(Killed):
        asked(**how, progress=Ends(1))
    methods.write_text(METHODS + "\n# mended\n")
    with pytest.raises(StateError, match=r"another evaluation \(different: attacks"):
        asked(**how, resume=True)
    methods.write_text(METHODS)
    assert asked(**how, resume=True).per_attack.keys() == {"mymethods:climb-2"}


def test_several_devices(asked: Any) -> None:
    alone = asked(attacks=["mymethods:climb-3", loaded().Climb(steps=2)])
    two = asked(attacks=["mymethods:climb-3", loaded().Climb(steps=2)], device=["cpu", "cpu"])
    assert all(torch.equal(two.flags[name], alone.flags[name]) for name in alone.flags)

    def here(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
        return x

    with pytest.raises(ModelError, match="the attack cannot be sent to other processes"):
        asked(attacks=[here], device=["cpu", "cpu"])


WRONG = """
import torch
from torch import Tensor


def silent(model, x, y, threat, gen):
    return x


def few(model, x) -> Tensor:
    return x


def leaves(model, x, y, threat, gen, *, by: float = 2.0) -> Tensor:
    return (x + by * threat.eps).clamp(0, 1)


def writes(model, x, y, threat, gen) -> Tensor:
    return x.add_(0.5)


def number(model, x, y, threat, gen) -> Tensor:
    return 3


def wide(model, x, y, threat, gen) -> Tensor:
    return x.double()


def cut(model, x, y, threat, gen) -> Tensor:
    return x[:1]


def fails(model, x, y, threat, gen, *, at: int = 3) -> Tensor:
    return [x][at]


class Half:
    def __call__(self, model, x, y, threat, gen, *, early_stop=False):
        return x


class Bare(Half):
    def passes(self, classes):
        return 1


class NoStop(Bare):
    mixed_labels, bounded = False, True

    def __call__(self, model, x, y, threat, gen):
        return x


class Outside(Bare):
    mixed_labels, bounded = False, False


class Raises(Bare):
    mixed_labels, bounded = False, True

    def __init__(self, *, steps: int = 1):
        raise LookupError("no luck today")


class Nones(NoStop):
    __call__ = Half.__call__
    given = None

    def passes(self, classes):
        return self.given


class Text(Nones):
    given = "3"


class Less(Nones):
    given = -1


class Parted(Nones):
    given = 1.5


class Broken(Nones):
    def passes(self, classes):
        return 1 // (classes - 2)


constant = 3


def writes_weights(model, x, y, threat, gen) -> Tensor:
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.0001)
    return x


def hides(model, x, y, threat, gen) -> Tensor:
    next(iter(model.parameters())).data.mul_(1.0001)
    return x
"""


@pytest.fixture
def wrong(methods: Path) -> None:
    methods.write_text(WRONG)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere:climb", "'nowhere' is not a module of the current folder"),
        ("mymethods:clim", "unknown name 'clim'; known: .*"),
        ("mymethods:constant", "no class or function written in mymethods.py"),
        ("mymethods:Tensor", "no class or function written in mymethods.py"),
        ("mymethods:silent", r"does not say that it returns one \(-> Tensor\); write `def climb"),
        ("mymethods:few", r"must take \(model, x, y, threat, gen\), it takes \(model, x\)"),
        ("mymethods:leaves:bi=3", "unknown option of attack 'mymethods:leaves': 'bi'; known: by; did you mean 'by'"),
        ("mymethods:leaves:by=much", "mymethods:leaves by must be a number, got 'much'"),
        ("mymethods:fails:at=0.5", "mymethods:fails at must be a whole number, got 0.5"),
        ("mymethods:Half", r"the class has no method passes\(classes\)"),
        ("mymethods:Bare", "it has no attribute 'mixed_labels', and it has no attribute 'bounded'"),
        ("mymethods:NoStop", r"its __call__ must take \(.*early_stop\), it takes \(model, x, y, threat, gen\)"),
        ("mymethods:Outside", "attack 'mymethods:Outside' leaves the ball, which only training may"),
        ("mymethods:Raises:steps=2", r"Raises\(steps=2\) raised LookupError: no luck today \(mymethods.py:63\)"),
        ("mymethods:Nones", r"its passes\(2\) gave None, and not how many, a whole number of at least 0; write"),
        ("mymethods:Text", r"its passes\(2\) gave '3', and not how many"),
        ("mymethods:Less", r"its passes\(2\) gave -1, and not how many"),
        ("mymethods:Parted", r"its passes\(2\) gave 1.5, and not how many"),
        ("mymethods:Broken", r"its passes\(2\) raised ZeroDivisionError: .* \(mymethods.py:88\)"),
        ("my methods:climb", "does not name an attack; write file:name"),
        ("pgd:5", "expected option=value after ':', got '5'"),
    ],
)
def test_what_is_no_attack_is_refused_before_any_work(wrong: None, asked: Any, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(attacks=[spec])


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("leaves", ThreatError, r"leaves\(\) left the linf ball of radius 0.1"),
        ("writes", ThreatError, r"writes\(\) left the linf ball of radius 0.1 by 4.0e-01"),
        ("number", ThreatError, r"number\(\) returned int, not inputs like those it got"),
        ("wide", ThreatError, r"wide\(\) returned torch.float64, not inputs like those it got \(torch.float32\)"),
        ("cut", ThreatError, r"cut\(\) changed the shape"),
        ("fails", ConfigError, r"attack fails\(\) raised IndexError: .* \(mymethods.py:35\)"),
    ],
)
def test_what_an_attack_may_not_do_is_told(wrong: None, asked: Any, name: str, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        asked(attacks=[f"mymethods:{name}"])


CHANGED = "changed the weights of the model, and they stay changed: load it again"


@pytest.mark.parametrize("name", ["writes_weights", "hides"])
@pytest.mark.parametrize("device", [None, ["cpu", "cpu"]])
def test_an_attack_that_changes_the_weights_is_noticed(
    wrong: None, asked: Any, digits_model: nn.Module, tmp_path: Path, name: str, device: Any
) -> None:
    x, y = asked.args[1:3]
    how = {"attacks": ["pgd-1", f"mymethods:{name}"], "device": device, "journal": tmp_path / "exam.part"}
    for resume in (False, True):  # of which nothing is kept
        with pytest.raises(ModelError, match=CHANGED):
            flatrock.evaluate(copy.deepcopy(digits_model), x, y, THREAT, **how, resume=resume)


def test_the_surrogate_is_looked_after_too(wrong: None, asked: Any) -> None:
    with pytest.raises(ModelError, match=f"attack 'transfer-mymethods:hides' {CHANGED}"):
        asked(attacks=["transfer-mymethods:hides"], surrogate=flatrock.create_model("digits_cnn", seed=5))


def test_one_call_sees_writes_that_torch_counts(wrong: None, digits: Any, digits_model: nn.Module) -> None:
    x, y = digits.test_x[:8], digits.test_y[:8]
    with pytest.raises(ModelError, match=rf"attack writes_weights\(\) {CHANGED}"):
        flatrock.attack("mymethods:writes_weights", copy.deepcopy(digits_model), x, y, THREAT)


class Counts(nn.Module):
    """Counts its calls in a buffer, in eval mode, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


def test_what_a_model_writes_into_its_buffers_is_its_own_affair(digits: Any, digits_model: nn.Module) -> None:
    x, y, spec = digits.test_x[:40], digits.test_y[:40], "mymethods:climb-2"
    counted = flatrock.evaluate(Counts(digits_model), x, y, THREAT, attacks=[spec], batch_size=16)
    alone = flatrock.evaluate(digits_model, x, y, THREAT, attacks=[spec], batch_size=16)
    assert torch.equal(counted.flags[spec], alone.flags[spec])


def test_objects_that_are_no_attacks(asked: Any, methods: Path) -> None:
    with pytest.raises(ConfigError, match="is configured already, but is given steps"):
        asked(attacks=[{"name": loaded().Climb(steps=2), "steps": 3}])
    with pytest.raises(ConfigError, match="attack label 'climb' is taken"):
        asked(attacks=[loaded().climb, loaded().climb])
    with pytest.raises(ConfigError, match="named by text such as 'pgd-20'"):
        asked(attacks=[3])
    with pytest.raises(ConfigError, match=r"must take \(model, x, y, threat, gen\)"):
        asked(attacks=[lambda x: x])
    methods.write_text(WRONG)
    module = loaded("Bare")
    for kind, message in (("Text", r"passes\(2\) gave '3'"), ("Broken", r"passes\(2\) raised ZeroDivisionError")):
        with pytest.raises(ConfigError, match=message):
            asked(attacks=[getattr(module, kind)()])


def test_a_function_that_heeds_early_stop_is_told() -> None:
    heard: list[bool] = []

    def listens(model: Any, x: Tensor, y: Any, threat: Any, gen: Any, *, early_stop: bool, steps: int = 4) -> Tensor:
        heard.append(early_stop)
        return x

    attack = parse_attack(listens)[1]
    assert isinstance(attack, Written)
    x = torch.rand(2, 3)
    attack(nn.Identity(), x, torch.zeros(2), THREAT, Seed(0).samples(torch.arange(2)), early_stop=True)
    assert heard == [True]
    assert attack.passes(10) == 4
    assert repr(attack) == "listens()"
