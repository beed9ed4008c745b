"""What overrides change of a recipe, beside its summary, which speaks of the recipe as it was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from flatrock.core.errors import shown
from flatrock.recipes.schema import Recipe


def tell_changes(
    raw: dict[str, Any], given: Mapping[str, Any], changed: Iterable[str], written: Mapping[str, str]
) -> None:
    """Put what overrides `changed` beside the summary, unless they bring another or it is the same recipe after all."""
    about, before = raw.get("about"), given.get("about")
    if not isinstance(about, Mapping) or not isinstance(before, Mapping) or trained_keys(raw) == trained_keys(given):
        return
    if before.get("summary") and about.get("summary") == before["summary"]:
        told = ", ".join(f"{key.replace('__', '.')}={written[key]}" for key in dict.fromkeys(changed))
        raw["about"] = {**about, "summary": f"{before['summary']} (changed: {told})"}


def as_written(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, str]:
    """The values of overrides by key: 4/255 as it was typed, not the number that it is."""
    if isinstance(overrides, Mapping):
        return {key: value if isinstance(value, str) else shown(value) for key, value in overrides.items()}
    return {text.partition("=")[0].strip(): text.partition("=")[2].strip() for text in overrides}


def trained_keys(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys that decide the weights, other than the seed; None of a recipe that has faults."""
    try:
        keys = Recipe.model_validate(dict(raw)).training_keys()
    except ValidationError:
        return None
    return {key: value for key, value in keys.items() if key != "seed"}
