"""What an evaluation does, in order: attacks on their own, and named plans whose attacks share the survivors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatrock.attacks.catalog import ATTACKS, parse_attack
from flatrock.core.errors import ConfigError
from flatrock.core.registry import unknown
from flatrock.core.types import Attack

Specs = list[tuple[str, dict[str, Any]]]


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


def make_plan(attacks: Sequence[str | Mapping[str, Any]], *, classes: int | None = None) -> tuple[Step, ...]:
    """The steps of a list of attacks and plans; every fault in the list is reported at once."""
    if isinstance(attacks, str | Mapping):
        attacks = [attacks]
    if not isinstance(attacks, Sequence):
        raise ConfigError(f"attacks must be a list of names such as ['pgd-20', 'cw-20'], got {attacks!r}")
    steps: dict[str, Step] = {}
    faults = [] if attacks else ["none is named, so nothing would be robustness; name at least one, such as pgd-20"]
    taken = {"clean"}
    for spec in attacks:
        try:
            made = _steps(spec, classes)
        except ConfigError as error:
            faults.append(" ".join([f"{spec!r}:", str(error.args[0]).replace("\n  - ", " ")]))
            continue
        name = made[0].plan or made[0].label
        if name in taken:
            faults.append(f"attack label {name!r} is taken; give one of the two a 'label' of its own")
        taken.add(name)
        steps |= {step.label: step for step in made}
    if faults:
        raise ConfigError("attacks:", tuple(faults))
    return tuple(steps.values())


def _steps(spec: str | Mapping[str, Any], classes: int | None) -> list[Step]:
    if isinstance(spec, str) and spec in PLANS:
        members = PLANS[spec][0](classes)
        return [Step(f"{spec}/{name}", ATTACKS.make(o.pop("name", name), **o), spec) for name, o in members]
    if isinstance(spec, str):
        name = re.sub(r"-\d+$", "", spec.partition(":")[0])
        if name not in ATTACKS:
            raise ConfigError(unknown("attack or plan", name, [*ATTACKS.names(), *PLANS]))
    label, attack = parse_attack(spec)
    return [Step(label, attack)]


def substitutes(steps: Sequence[Step], classes: int) -> list[str]:
    """What a plan's attacks climb instead of a loss that these few classes do not define."""
    members = {s.label.rpartition("/")[2] for s in steps if s.plan}
    said = []
    if classes < 4 and "apgd-t" in members:
        said.append("the targeted margin instead of the targeted DLR loss (needs 4 classes)")
    if classes < 3 and "apgd-dlr" in members:
        said.append("the margin instead of the DLR loss (needs 3 classes)")
    return said
