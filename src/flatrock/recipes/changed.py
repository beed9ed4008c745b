"""What overrides change of a recipe, told beside its summary, which speaks of the recipe as it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from flatrock.core.numbers import in_levels
from flatrock.recipes.schema import Recipe


def tell_changes(raw: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Put the keys that decide the weights and are not as given beside the summary, unless there is another one.

    They are told as they are, not as they were asked for: one recipe has one summary.
    """
    about, before = raw.get("about"), given.get("about")
    if not isinstance(about, Mapping) or not isinstance(before, Mapping):
        return
    if not before.get("summary") or about.get("summary") != before["summary"]:
        return
    now, then = _trained(raw), _trained(given)
    told = [f"{key} {in_a_word(now[key])}" for key in now if key not in then or now[key] != then[key]]
    told += [f"no {key}" for key in then if key not in now]
    if now and told:
        raw["about"] = {**about, "summary": f"{before['summary']} (changed: {', '.join(told)})"}


def leaves(keys: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted keys and their values; a list is one value, but of flatness methods the options have keys, too.

    flatness: [{name: awp, gamma: 0.01}] is {flatness: [awp], flatness.awp.gamma: 0.01}.
    """
    found: dict[str, Any] = {}
    for key, value in keys.items():
        if key == "flatness" and not path:
            names = [method["name"] for method in value]
            found |= {key: names, **leaves({m["name"]: {k: m[k] for k in m if k != "name"} for m in value}, f"{key}.")}
        else:
            found |= leaves(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def _trained(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the weights, other than the seed, by its dotted names; empty if the recipe has faults."""
    try:
        keys = Recipe.model_validate(dict(raw)).training_keys()
    except ValidationError:
        return {}
    return {key: value for key, value in leaves(keys).items() if key != "seed"}


def in_a_word(value: Any) -> str:
    """A value as a recipe has it: 4/255 where the number would be long."""
    import yaml

    if isinstance(value, float) and (levels := in_levels(value)):
        return levels
    return str(yaml.safe_dump(value, default_flow_style=True, width=10_000)).removesuffix("\n...\n").strip()
