"""What an evaluation does, in order: attacks on their own, and named plans whose attacks share the survivors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatrock.attacks.catalog import ATTACKS, Spec, describe, head_of, parse_attack, respelled
from flatrock.attacks.craft import check_attack
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.transfer import Transfer
from flatrock.attacks.written import called
from flatrock.core.errors import ConfigError
from flatrock.core.guests import is_own
from flatrock.core.registry import unknown
from flatrock.core.threat import Threat
from flatrock.core.types import Attack

Specs = list[tuple[str, dict[str, Any]]]
# An attack so called is tried on the surrogate, and its inputs on the model.
TRANSFER = "transfer-"
TRANSFERRED = ("pgd-20", "cw-20")


@dataclass(frozen=True)
class Step:
    """One attack. Inside a plan it sees only what the plan's earlier attacks left standing."""

    label: str
    attack: Attack
    plan: str | None = None


def _targeted(classes: int | None) -> dict[str, Any]:
    """AutoAttack's 9 nearest classes; the targeted DLR loss needs 4 classes, with fewer the margin takes its place."""
    return {} if classes is None or classes >= 4 else {"loss": "margin"}


def _dlr(classes: int | None) -> str:
    """The DLR loss needs 3 classes; with 2 the margin takes its place."""
    return "dlr" if classes is None or classes >= 3 else "margin"


def _standard(classes: int | None) -> Specs:
    return [("apgd-ce", {}), ("apgd-t", _targeted(classes)), ("fab-t", {}), ("square", {})]


def _plus(classes: int | None) -> Specs:
    return [
        ("apgd-ce", {"restarts": 5}),
        ("apgd-dlr", {"name": "apgd", "loss": _dlr(classes), "restarts": 5}),
        ("fab", {"restarts": 5}),
        ("square", {}),
        ("apgd-t", _targeted(classes)),
        ("fab-t", {}),
    ]


def _rand(classes: int | None) -> Specs:
    return [("apgd-ce", {"eot": 20}), ("apgd-dlr", {"name": "apgd", "loss": _dlr(classes), "eot": 20})]


def _fast(classes: int | None) -> Specs:
    return [("apgd-ce", {}), ("apgd-t", _targeted(classes))]


PLANS: dict[str, tuple[Callable[[int | None], Specs], str]] = {
    "autoattack": (_standard, "the standard AutoAttack: APGD-CE, APGD-T, FAB-T, Square"),
    "autoattack-plus": (_plus, "AutoAttack plus: five restarts, APGD-DLR and FAB too"),
    "autoattack-rand": (_rand, "AutoAttack for randomised models: APGD-CE and APGD-DLR, gradients averaged over 20"),
    "fast": (_fast, "APGD-CE and APGD-T: an upper bound, not AutoAttack"),
}


def make_plan(
    attacks: Sequence[Spec],
    *,
    classes: int | None = None,
    surrogate: nn.Module | None = None,
    threat: Threat | None = None,
) -> tuple[Step, ...]:
    """The steps of a list of attacks and plans; every fault in the list is reported at once.

    Attacks that cannot work with so many classes or under this threat are faults, where these are known.
    """
    if isinstance(attacks, str | Mapping) or callable(attacks):
        attacks = [attacks]
    if not isinstance(attacks, Sequence):
        raise ConfigError(f"attacks must be a list of names such as ['pgd-20', 'cw-20'], got {attacks!r}")
    steps: dict[str, Step] = {}
    faults = [] if attacks else ["none is named, so nothing would be robustness; name at least one, such as pgd-20"]
    taken = {"clean"}
    for spec in attacks:
        try:
            made = _steps(spec, classes, surrogate)
            for step in made:
                check_attack(step.attack, threat, classes)
        except ConfigError as error:
            faults.append(
                " ".join(
                    [f"{called(spec) if callable(spec) else repr(spec)}:", str(error.args[0]).replace("\n  - ", " ")]
                )
            )
            continue
        names = [made[0].plan or made[0].label, *(step.label for step in made)]  # those inside a plan are labels too
        if clash := next((name for name in names if name in taken), None):
            faults.append(
                f"attack label {clash!r} is taken; leave one of the two out, or in Python and in recipes give it a "
                "'label' of its own, as in {name: pgd, steps: 20, label: mine}"
            )
        taken.update(names)
        steps |= {step.label: step for step in made}
    if faults:
        raise ConfigError("attacks:", tuple(faults))
    return tuple(steps.values())


def _steps(spec: Spec, classes: int | None, surrogate: nn.Module | None) -> list[Step]:
    if isinstance(spec, str) and spec in PLANS:
        members = PLANS[spec][0](classes)
        return [Step(f"{spec}/{name}", ATTACKS.make(o.pop("name", name), **o), spec) for name, o in members]
    if _transferred(spec):
        return [_transfer(spec, surrogate)]
    if (name := _name(spec)) in PLANS:
        raise ConfigError(f"a plan takes no options; write {name!r} alone, or name an attack of it with its options")
    if isinstance(spec, str) and name not in ATTACKS and not is_own(name):
        known = [*ATTACKS.names(), *PLANS, *(TRANSFER + _name(n) for n in TRANSFERRED)]
        raise ConfigError(unknown("attack or plan", name, known, near=respelled(spec, PLANS)))
    label, attack = parse_attack(spec)
    return [Step(label, attack)]


def _name(spec: Spec) -> str:
    """pgd of pgd-20:restarts=5."""
    text = str(spec.get("name", "")) if isinstance(spec, Mapping) else str(spec)
    return first if (first := text.partition(":")[0]) in PLANS else re.sub(r"-\d+$", "", head_of(text)[0])


def _transferred(spec: Spec) -> bool:
    """Whether this names an attack on the surrogate."""
    name = spec.get("name", "") if isinstance(spec, Mapping) else spec
    return isinstance(name, str) and name.startswith(TRANSFER)


def _transfer(spec: Spec, surrogate: nn.Module | None) -> Step:
    assert isinstance(spec, str | Mapping)
    named = not isinstance(spec, str) and bool(spec.get("label"))
    inner: Spec = (
        spec.removeprefix(TRANSFER) if isinstance(spec, str) else {**spec, "name": spec["name"][len(TRANSFER) :]}
    )
    if _name(inner) in PLANS:
        raise ConfigError(f"a plan is not transferred as a whole; name an attack, such as {TRANSFER}apgd-ce")
    label, attack = parse_attack(inner)
    if surrogate is None:
        raise ConfigError(
            "needs a surrogate, a network to craft on; give --surrogate RUN, in Python surrogate=, in a recipe "
            "evaluate.more with surrogate: RUN"
        )
    return Step(label if named else TRANSFER + label, Transfer(surrogate, attack))


def with_transfer(attacks: Sequence[Spec], *, like: Sequence[Spec]) -> Sequence[Spec]:
    """The list with PGD-20 and CW-20 on the surrogate behind it, unless it names some attack on it already.

    Their step size is the first that an attack of `like` gives; by default that of the threat.
    """
    listed = [attacks] if isinstance(attacks, str | Mapping) or callable(attacks) else list(attacks)
    if any(_transferred(spec) for spec in listed):
        return listed
    alone = (step.attack for step in make_plan(like) if step.plan is None)
    sizes = (a.step_size for a in alone if isinstance(a, GradientAttack) and a.step_size is not None)
    options = next((f":step_size={size}" for size in sizes), "")
    return [*listed, *(f"{TRANSFER}{name}{options}" for name in TRANSFERRED)]


def described(attack: Attack, threat: Threat) -> dict[str, Any]:
    """Every option of an attack; of a transfer those of the attack behind it."""
    if isinstance(attack, Transfer):
        return {"kind": "Transfer", "by": describe(attack.by, threat)}
    return describe(attack, threat)


def substitutes(steps: Sequence[Step], classes: int) -> list[str]:
    """What a plan's attacks climb instead of a loss that these few classes do not define."""
    members = {s.label.rpartition("/")[2] for s in steps if s.plan}
    said = []
    if classes < 4 and "apgd-t" in members:
        said.append("the targeted margin instead of the targeted DLR loss (needs 4 classes)")
    if classes < 3 and "apgd-dlr" in members:
        said.append("the margin instead of the DLR loss (needs 3 classes)")
    return said
