"""The attacks by name, and the one-call form `attack("pgd", model, x, y, threat, steps=20)`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.auto_pgd import APGD, APGDTargeted
from flatrock.attacks.boundary import FastAdaptiveBoundary, TargetedBoundary
from flatrock.attacks.craft import FirstChecked, check_inputs, check_model, class_indices, craft
from flatrock.attacks.gaussian import Gaussian
from flatrock.attacks.gradient import FastGradientSign, GradientAttack, MultiTargeted
from flatrock.attacks.guided import Guided
from flatrock.attacks.langevin import Langevin
from flatrock.attacks.rays import RayS
from flatrock.attacks.smooth import SmoothPGD
from flatrock.attacks.square import Square
from flatrock.attacks.written import OWN, called, described, is_ours
from flatrock.core import spelled
from flatrock.core.errors import ConfigError
from flatrock.core.guests import is_own
from flatrock.core.registry import Registry, unknown
from flatrock.core.rng import Seed
from flatrock.core.threat import Threat
from flatrock.core.types import Attack

# Options that came later: an attack from before is the one without, so they are told where they were chosen.
LATER = {"box": "last", "iterate": "any"}
# An attack in words, with its options, or a class, function or object of Python's.
Spec = str | Mapping[str, Any] | Callable[..., Any]
ATTACKS: Registry[Attack] = Registry("attack", OWN)
ATTACKS.add("fgsm", FastGradientSign, "one step of size eps up the cross-entropy", cite="Goodfellow 2015")
ATTACKS.add("pgd", GradientAttack, "projected gradient ascent on cross-entropy (or loss: cw, dlr)", cite="Madry 2018")
ATTACKS.add("cw", GradientAttack, "PGD on the Carlini-Wagner margin with kappa 50", cite="Carlini 2017", loss="cw")
ATTACKS.add("kl-pgd", GradientAttack, "PGD on KL from the clean output (TRADES inner)", cite="Zhang 2019", loss="kl")
ATTACKS.add(
    "guided", Guided, "one step up cross-entropy and distance from the clean answer (GAT)", cite="Sriramanan 2020"
)
ATTACKS.add("mt", MultiTargeted, "PGD on the margin to every other class in turn", cite="Gowal 2019")
ATTACKS.add("langevin", Langevin, "a noisy walk up the cross-entropy (ATENT)", cite="Jagatap 2021")
ATTACKS.add("gaussian", Gaussian, "unclipped noise, to train what will be smoothed; no evaluation", cite="Cohen 2019")
ATTACKS.add(
    "smooth-pgd", SmoothPGD, "PGD under noise that x and x' share, to train what will be smoothed", cite="Blum 2020"
)
ATTACKS.add("square", Square, "random search over square windows, without gradients", cite="Andriushchenko 2020")
ATTACKS.add("rays", RayS, "nearest label change along rays, from labels alone (linf)", cite="Chen 2020")
ATTACKS.add("apgd", APGD, "PGD that tunes its own step size (loss: ce, cw, dlr, margin)", cite="Croce 2020")
ATTACKS.add("apgd-ce", APGD, "APGD on the cross-entropy (AutoAttack)", cite="Croce 2020", loss="ce")
ATTACKS.add("apgd-dlr", APGD, "APGD on the difference of logits ratio (AutoAttack)", cite="Croce 2020", loss="dlr")
ATTACKS.add("apgd-t", APGDTargeted, "APGD toward the 9 nearest classes (AutoAttack)", cite="Croce 2020")
ATTACKS.add("fab", FastAdaptiveBoundary, "nearest adversarial point, against all classes at once", cite="Croce 2020")
ATTACKS.add("fab-t", TargetedBoundary, "nearest adversarial point toward 9 classes (AutoAttack)", cite="Croce 2020")


def parse_attack(spec: Spec) -> tuple[str, Attack]:
    """A label and the configured attack it names, for evaluation: one that stays in its ball.

    `pgd-20` is pgd with 20 steps; `pgd-20:restarts=5:step_size=2/255` adds options; a mapping
    {name: pgd, steps: 20} says the same. `mymethods:climb-20` is of the user's; in Python, in the place of a name may
    stand the attack itself, or a class or function that is one.
    """
    if isinstance(spec, Mapping):
        options = spelled.valued({k: v for k, v in spec.items() if k not in ("name", "label")})
        name = spec.get("name", "")
        label = spec.get("label") or _label(called(name) if callable(name) else str(name), options)
        return str(label), _bounded(name if callable(name) else str(name), options)
    if callable(spec):
        return called(spec), _bounded(spec, {})
    if not isinstance(spec, str):
        raise ConfigError(f"an attack is named by text such as 'pgd-20' or by a mapping with 'name', got {spec!r}")
    return spec, _bounded(*_spelled(spec))


def head_of(spec: str) -> tuple[str, list[str]]:
    """What an attack is called, pgd-20 of pgd-20:restarts=5 or file:name of file:name:a=1, and the rest of the text."""
    return spelled.head_of(spec, _is_attack)


def _is_attack(head: str) -> bool:
    return re.sub(r"-\d+$", "", head) in ATTACKS


def _spelled(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of pgd-20:restarts=5."""
    head, options = spelled.parsed("attack", spec, _is_attack)
    if head not in ATTACKS and (match := re.fullmatch(r"(.+)-(\d+)", head)):
        if "steps" in options:
            raise ConfigError(f"attack {spec!r} gives the number of steps twice; keep one")
        head, options["steps"] = match[1], int(match[2])
    return head, options


def respelled(spec: str, plans: Collection[str] = ()) -> str | None:
    """The attack or plan meant by PGD-20, pgd20 or pgd_20: a name in other letters, or steps written otherwise."""
    head, *options = spec.split(":")
    name = head.lower().replace("_", "-")
    if not (name in ATTACKS or name in plans):
        steps = re.fullmatch(r"(.*?)-?(\d+)", name)
        if steps is None or steps[1] not in ATTACKS:
            return None
        name = f"{steps[1]}-{steps[2]}"
    return ":".join([name, *options])


def _bounded(name: str | Callable[..., Any], options: Mapping[str, Any]) -> Attack:
    """The configured attack, if it keeps to its ball: a number measured outside it is no robustness."""
    made = ATTACKS.make(name, **options) if isinstance(name, str) else _given(name, options)
    if not made.bounded:
        given = f" with {_label('', options).lstrip(':')}" if options else ""
        projects = isinstance(name, str) and "project" in ATTACKS.entry(name).options()
        cure = "use project=last or project=every" if projects else "evaluate with pgd or another attack"
        raise ConfigError(f"attack {name!r} leaves the ball{given}, which only training may; {cure}")
    return made


def _given(thing: Callable[..., Any], options: Mapping[str, Any]) -> Attack:
    """The attack that a class or function of Python's makes, or an object that is one."""
    made = hasattr(thing, "bounded") and not inspect.isclass(thing)
    if not made:
        return ATTACKS.made(OWN.row(thing, called(thing)), options)
    if options:
        raise ConfigError(
            f"{called(thing)} is configured already, but is given {', '.join(options)}; give its class, or no options"
        )
    return OWN.fits(thing, called(thing))  # type: ignore[arg-type]


def _label(name: str, options: Mapping[str, Any]) -> str:
    """The text that names the same attack: pgd-20:step_size=0.003."""
    steps = f"-{options['steps']}" if "steps" in options else ""
    return spelled.spell(name + steps, {k: v for k, v in options.items() if k != "steps"})


def describe(attack: Attack, threat: Threat) -> dict[str, Any]:
    """Every option of a configured attack, those that follow from the threat included."""
    options: dict[str, Any] = {}
    if not is_ours(attack):
        options = described(attack)
    elif dataclasses.is_dataclass(attack) and not isinstance(attack, type):
        options = {k: v for k, v in dataclasses.asdict(attack).items() if (k, v) not in LATER.items()}
    if "step_size" in options and options["step_size"] is None:
        options["step_size"] = threat.default_step
    if isinstance(attack, Langevin):
        options["gamma"] = attack.pull(threat)
    return {"kind": type(attack).__name__, **options}


def attack(
    name: str | Callable[..., Any],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """Adversarial inputs for a model that maps [0, 1] inputs to logits; the model is given back untouched.

    `attack("pgd-20:restarts=5", ...)` says the same as `attack("pgd", ..., steps=20, restarts=5)`.
    An attack of one's own, `mymethods:climb` or in Python the class, function or object, stands in the place of a name.
    Random numbers belong to the position of a sample in x; give the same x in one piece to reproduce them.
    Of PGD it is the last point, whatever `iterate` says, while `evaluate` also counts what broke on the way.
    """
    if not isinstance(name, str) and not callable(name):
        raise ConfigError(f"an attack is named by text such as 'pgd' or 'pgd-20', got {name!r}")
    options = spelled.valued(options)
    asked, (name, said) = name, _spelled(name) if isinstance(name, str) else (name, {})
    if twice := sorted(said.keys() & options.keys()):
        raise ConfigError(f"attack {name!r} is given {', '.join(twice)} twice, in its name and as option; keep one")
    if isinstance(name, str) and name not in ATTACKS and not is_own(name):
        raise ConfigError(
            unknown(
                "attack",
                name,
                ATTACKS.names(),
                more="; plans such as 'autoattack' are for "
                "flatrock.evaluate(model, x, y, threat, attacks=['autoattack'])",
                near=respelled(str(asked)),
            )
        )
    chosen, y = _bounded(name, said | options), class_indices(y)
    x = check_inputs(x, y, threat)
    if x.shape[0] == 0:
        return x.clone()
    check_model(model, x)
    ids = torch.arange(x.shape[0], device=x.device)
    gen = Seed(seed).child("attack", name if isinstance(name, str) else called(name)).samples(ids)
    return craft(chosen, FirstChecked(model, x, y), x, y, threat, gen)
