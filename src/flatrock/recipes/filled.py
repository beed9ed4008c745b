"""A recipe with what it leaves unsaid: the defaults of the methods, attacks and networks it names.

The recipe itself stays as it was given: its hash, which runs and results are known by, is that of the keys said.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flatrock.attacks.catalog import ATTACKS, describe, parse_attack
from flatrock.core.errors import FlatrockError
from flatrock.core.files import json_text, sha256
from flatrock.core.guests import is_own
from flatrock.core.registry import Registry
from flatrock.core.threat import THREATS
from flatrock.data.catalog import DATA
from flatrock.engine.schedule import SCHEDULES
from flatrock.flatness.catalog import FLATNESS
from flatrock.models.catalog import model_defaults
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.optimizers.catalog import OPTIMIZERS
from flatrock.recipes.changed import leaves
from flatrock.recipes.keys import Named
from flatrock.recipes.pieces import build_attack
from flatrock.recipes.schema import Recipe

CATALOGS: Mapping[str, Registry[Any]] = {
    "objective": OBJECTIVES,
    "flatness": FLATNESS,
    "attack": ATTACKS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}
# What comes from the run and is no option, though a signature has a default for it.
FROM_RUN = ("params", "seed", "split", "folder", "lr", "epochs")


def in_full(recipe: Recipe) -> dict[str, Any]:
    """Plain values of every key, those that the things named have by default included.

    Of the attack also those that follow from the threat (step_size) or the objective (GAT's weight), in the place of
    null. What the user's code has by default is known where the code is and its signature says so.
    """
    keys = recipe.resolved()
    for section in ("data", "model", "objective", "attack", "optimizer", "schedule"):
        keys[section] = _with_defaults(section, getattr(recipe, section))
    keys["flatness"] = [_with_defaults("flatness", method) for method in recipe.flatness]
    keys["attack"] |= _followed(recipe, keys["attack"])
    return keys


def settings(recipe: Recipe) -> dict[str, Any]:
    """What decides the weights, in full: for a record of what a run was trained with."""
    keys = recipe.deciding(in_full(recipe))
    with suppress(FlatrockError):
        label, attack = parse_attack(recipe.select.attack)
        threat = THREATS[recipe.threat.norm](recipe.threat.eps)
        options = {
            key: value for key, value in describe(attack, threat).items() if key not in ("kind", "code", "holds")
        }
        keys["select"]["attack"] = _plain({"name": label, **options})
    return keys


def same_training(recipe: Recipe) -> str:
    """Equal of recipes that train the same weights, however they say it; what they are built on is not looked at."""
    keys = recipe.deciding(in_full(recipe))
    if recipe.attack.name == "none":  # of a base recipe's attack there may be options left
        keys.pop("attack")
    return sha256(json_text(_in_numbers(keys)))


def unlike(there: Recipe, asked: Recipe) -> list[str]:
    """In what recipes differ that decides the weights, as hashes see it: `key: this there, that asked for`."""
    old, new = (leaves(recipe.training_keys()) for recipe in (there, asked))
    all_old, all_new = (leaves(in_full(recipe)) for recipe in (there, asked))
    keys = [key for key in sorted(old.keys() | new.keys()) if json_text(old.get(key)) != json_text(new.get(key))]
    return [f"{key}: {_said(key, old, all_old)} there, {_said(key, new, all_new)} asked for" for key in keys]


def _said(key: str, given: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    if key in given:
        return repr(given[key])
    return f"{full[key]!r} (by default)" if key in full else "none"


def _with_defaults(section: str, named: Named) -> dict[str, Any]:
    """The section as it was given, and then the defaults it leaves."""
    given = named.model_dump(mode="json")
    return given | {key: _plain(value) for key, value in _stated(section, named).items() if key not in given}


def _stated(section: str, named: Named) -> dict[str, Any]:
    """The defaults of what a section names; none of code of the user's that is not here, or does not tell."""
    try:
        if section == "model":
            return model_defaults(named.name, named.options)
        if section == "data" and is_own(named.name):  # asked for its options only when it is called
            return {}
        catalog: Registry[Any] = DATA if section == "data" else CATALOGS[section]
        found = catalog.entry(named.name).defaults()
    except (FlatrockError, TypeError, ValueError):
        return {}
    return {key: value for key, value in found.items() if key not in FROM_RUN}


def _followed(recipe: Recipe, section: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the attack that other sections decide."""
    if recipe.attack.name not in ATTACKS:
        return {}
    with suppress(FlatrockError):
        attack = build_attack(recipe)
        told = {} if attack is None else describe(attack, THREATS[recipe.threat.norm](recipe.threat.eps))
        return {key: _plain(value) for key, value in told.items() if key in section}
    return {}


def _plain(value: Any) -> Any:
    """As a file holds it."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _in_numbers(value: Any) -> Any:
    """6 and 6.0 are one number."""
    if isinstance(value, Mapping):
        return {key: _in_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_in_numbers(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
