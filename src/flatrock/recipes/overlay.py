"""One recipe over another: a file over its base, overrides over a file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flatrock.core.errors import ConfigError, is_plain, shown
from flatrock.core.guests import is_own
from flatrock.core.numbers import plain, scalar
from flatrock.core.registry import unknown
from flatrock.core.threat import THREATS
from flatrock.flatness.catalog import FLATNESS
from flatrock.recipes.keys import Named
from flatrock.recipes.read import read_yaml
from flatrock.recipes.schema import Recipe


def spelled_out(key: str, value: Any) -> Any:
    """`select: test` is short for `select: {data: test}`, `flatness: awp` for `flatness: [{name: awp}]`."""
    if key == "flatness" and isinstance(value, str | Mapping):
        value = [value]
    if key == "flatness" and isinstance(value, list):
        return [{"name": method} if isinstance(method, str) else method for method in value]
    return {"data": value} if key == "select" and isinstance(value, str) else value


# Sections that name a thing; keys they do not know themselves are options of the thing named.
NAMING = {
    key: kind.annotation
    for key, kind in Recipe.model_fields.items()
    if isinstance(kind.annotation, type) and issubclass(kind.annotation, Named)
}


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested merge. A section that names another thing than the one below does not have that one's options.

    A list of flatness methods says which there are; one that was there below keeps its options unless changed. Radius
    and step size are of one norm: under another, they are not passed on.
    """
    merged = _in_norm(below, above)
    for key, value in above.items():
        old = merged.get(key)
        if key == "flatness" and isinstance(old, list) and isinstance(value, list):
            merged[key] = [overlay(_method(old, m), m) if isinstance(m, Mapping) else m for m in value]
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = overlay(_lasting(key, old, value), value)
        else:
            merged[key] = value
    return merged


def _lasting(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stays of a section under a new one: where that names something else, what is said of any such thing.

    That is held_out of data or normalize of a network; its depth is its own.
    """
    kind = NAMING.get(key)
    if kind is None or "name" not in new:
        return old
    usual = kind.model_fields["name"].default
    # Who asks for `auto` wants what fits the objective, without options that fit what was there.
    before = old.get("name", None if usual == "auto" else usual)
    if new["name"] == before:
        return old
    return {k: v for k, v in old.items() if kind.stays(k, new["name"])}


def _in_norm(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """What is below without the numbers that another norm above gives another meaning: eps, and the attack's step."""
    kept, threat = dict(below), above.get("threat")
    old = kept.get("threat")
    if not isinstance(threat, Mapping) or not isinstance(old, Mapping) or "norm" not in old:
        return kept
    if threat.get("norm", old["norm"]) == old["norm"] or threat["norm"] not in list(THREATS):
        return kept
    kept["threat"] = {key: value for key, value in old.items() if key != "eps"}
    if isinstance(attack := kept.get("attack"), Mapping):
        kept["attack"] = {key: value for key, value in attack.items() if key != "step_size"}
    return kept


def _method(methods: list[Any], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options a list already has for this method."""
    same = (m for m in methods if isinstance(m, Mapping) and m.get("name") == wanted.get("name"))
    return next(same, {})


def pairs_of(overrides: Iterable[str] | Mapping[str, Any]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Keys and values, and what is wrong with the texts that are none."""
    if isinstance(overrides, Mapping):
        return list(overrides.items()), []
    pairs, faults = [], []
    for text in overrides:
        try:
            pairs.append(_pair(text))
        except ConfigError as error:
            faults.append(str(error))
    return pairs, faults


def _pair(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"an override is written key=value, for example train.epochs=3; got {text!r}")
    if value.startswith(("[", "{")):
        return key.strip(), read_yaml(value, f"override {text!r}")
    return key.strip(), scalar(value.strip())


def dotted(key: str) -> str:
    """Callers with keywords write train__epochs."""
    return key.replace("__", ".")


def lay_over(raw: dict[str, Any], pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Set keys, of one twice the last, as if one file above had said them all; what is wrong with those that cannot be.

    One file: a name drops options of what was named below, not those that are given with it, in whatever order.
    """
    faults: list[str] = []
    layer: dict[str, Any] = {}
    methods: list[tuple[str, str, dict[str, Any]]] = []
    for key, value in ((dotted(key), spelled_out(key, value)) for key, value in pairs):
        *parents, last = key.split(".")
        if len(parents) == 2 and parents[0] == "flatness":
            methods.append((key, parents[1], {last: value}))
        elif fault := _no_section(raw, parents) or _no_section(layer, parents):
            faults.append(f"override {key!r}: {fault} is a value, not a section")
        else:
            one: Any = value
            for part in reversed((*parents, last)):
                one = {part: one}
            layer = _joined(layer, one)
    raw.update(overlay(raw, layer))
    for key, method, option in methods:
        names = [m.get("name") if isinstance(m, Mapping) else m for m in raw.get("flatness", [])]
        if method not in names:
            asked = {name: value for _, other, one in methods if other == method for name, value in one.items()}
            faults.append(f"override {key!r}: the recipe's flatness has no {method!r}, it has {names}; ")
            faults[-1] += _joining(names, method, asked)
            continue
        change = [{"name": n, **(option if n == method else {})} for n in names]
        raw.update(overlay(raw, {"flatness": change}))
    return faults


def _joining(names: list[Any], method: str, options: Mapping[str, Any]) -> str:
    """How a method that is not there joins those that are; of no method, what there is."""
    if not is_own(method) and method not in FLATNESS:
        return unknown("flatness method", method, FLATNESS.names())
    values = ((name, plain(value)) for name, value in options.items())
    said = {name: value if is_plain(value) else shown(value) for name, value in values}
    return f"add it with {flatness_text([*names, {'name': method, **said}])}"


def several(name: str) -> str:
    """What is wrong with a name that is several; nothing if it is one."""
    names = [one.strip() for one in name.split(",")]
    return f"several methods are a list; write {flatness_text(names)}" if len(names) > 1 else ""


def flatness_text(methods: Sequence[Any]) -> str:
    """An override of the methods, as it is typed."""
    import yaml

    listed = yaml.safe_dump(list(methods), default_flow_style=True, sort_keys=False, width=math.inf).strip()
    return shlex.quote(f"flatness={listed}")


def _no_section(raw: Mapping[str, Any], parents: Sequence[str]) -> str:
    """The first of these nested sections that is none; nothing if they are, or are not there yet."""
    place: Any = raw
    for i, part in enumerate(parents):
        place = place.get(part, {})
        if not isinstance(place, Mapping):
            return ".".join(parents[: i + 1])
    return ""


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers as one, of a key in both the new one's; a thing named after another has none of its options."""
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if not isinstance(before, Mapping) or not isinstance(value, Mapping):
            merged[key] = value
        else:
            merged[key] = _joined(_lasting(key, before, value) if "name" in before else before, value)
    return merged
