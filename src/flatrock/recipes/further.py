"""Further evaluations that a recipe asks for: other radii, inputs crafted on a surrogate, part of the test set."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.numbers import in_levels
from flatrock.core.rows import measure_name
from flatrock.core.threat import THREATS, Threat
from flatrock.evaluation.plans import TRANSFER, make_plan
from flatrock.recipes.draft import Draft
from flatrock.recipes.schema import Evaluate, Further, Recipe, ThreatKeys

# Names of attacks follow without the network that they are crafted on.
STAND_IN = nn.Identity()


def options_of(asked: Further) -> dict[str, Any]:
    """What to give to evaluate_run; not doubted: whether attacks are strong is asked of the recipe's own evaluation."""
    return {**asked.model_dump(), "attacks": list(asked.attacks), "doubt": False}


def where_of(asked: Further, own: ThreatKeys) -> str:
    """In what it differs from the evaluation under the recipe's own threat, on the whole test set: `2/255`, `l2-0.5`,
    `first1000`, `0.1-n500`; nothing if only in its attacks, or where they are crafted."""
    norm, eps = _keys(asked, own)
    other = (norm, eps) != (own.norm, own.eps)
    samples = "" if asked.limit is None else f"{'first' if asked.first else 'n'}{asked.limit}"
    parts = [norm if norm != own.norm else "", (in_levels(eps) or f"{eps:g}") if other else "", samples]
    return "-".join(filter(None, parts))


def threat_of(asked: Further, own: ThreatKeys) -> Threat:
    """The threat it is under; ConfigError if there is none."""
    if asked.eps is None and asked.norm not in (None, own.norm):
        raise ConfigError(
            f"eps is not given; the recipe's {own.eps:.4g} is a radius in {own.norm}, give one in {asked.norm}"
        )
    norm, eps = _keys(asked, own)
    return THREATS[norm](eps)


def _keys(asked: Further, own: ThreatKeys) -> tuple[str, float]:
    return asked.norm or own.norm, own.eps if asked.eps is None else asked.eps


def attack_names(asked: Further | Evaluate) -> list[str]:
    """What a result calls its attacks: a plan by its own name."""
    surrogate = STAND_IN if isinstance(asked, Further) and asked.surrogate else None
    return list(dict.fromkeys(step.plan or step.label for step in make_plan(asked.attacks, surrogate=surrogate)))


def measures_of(asked: Further, own: ThreatKeys) -> list[str]:
    """What rows of results call what it measures."""
    return [measure_name(name, where_of(asked, own)) for name in attack_names(asked)]


def surrogates(recipe: Recipe) -> dict[str, Path]:
    """The runs that inputs are crafted on, by the key that names each."""
    return {
        f"evaluate.more.{i}.surrogate": Path(one.surrogate)
        for i, one in enumerate(recipe.evaluate.more)
        if one.surrogate
    }


def crafted_on(recipe: Recipe, key: str, place: Path) -> Recipe:
    """The recipe with another place of the run that `key` names."""
    nth, more = int(key.split(".")[2]), list(recipe.evaluate.more)
    more[nth] = more[nth].model_copy(update={"surrogate": str(place)})
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"more": tuple(more)})})


def check_further(draft: Draft) -> None:
    """The rule of a recipe: every further evaluation can be made, and none measures what another does."""
    evaluate, own = draft.get("evaluate", Evaluate), draft.get("threat", ThreatKeys)
    if evaluate is None or not evaluate.more:
        return
    taken = dict.fromkeys(_known_names(evaluate), "evaluate.attacks")
    for i, asked in enumerate(evaluate.more):
        place = f"evaluate.more.{i}"
        threat = None if own is None else draft.build(place, partial(threat_of, asked, own))
        known = len(draft.faults)
        draft.build(f"{place}.attacks", partial(_planned, asked, threat, draft.classes))
        for fault in _own_faults(asked):
            draft.note(f"{place}.{fault}")
        for name in measures_of(asked, own) if own is not None and len(draft.faults) == known else ():
            if name in taken:
                draft.note(f"{place}: {name} is measured by {taken[name]}; leave one out, or ask at another eps")
            taken.setdefault(name, place)


def _planned(asked: Further, threat: Threat | None, classes: int | None) -> None:
    make_plan(asked.attacks, classes=classes, threat=threat, surrogate=STAND_IN if asked.surrogate else None)


def _known_names(evaluate: Evaluate) -> list[str]:
    try:
        return attack_names(evaluate)
    except ConfigError:  # told by the rule of these attacks
        return []


def _own_faults(asked: Further) -> Iterator[str]:
    names = [str(spec.get("name", "")) if isinstance(spec, dict) else spec for spec in asked.attacks]
    if asked.surrogate and not any(name.startswith(TRANSFER) for name in names):
        yield f"surrogate: no attack is crafted on {asked.surrogate}; name one, such as {TRANSFER}pgd-20"
    if asked.first and asked.limit is None:
        yield "first: which samples a limit takes, but none is given; say how many, such as limit: 1000"
