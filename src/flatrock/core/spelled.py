"""Things with options in one word, as people write them: pgd-20:restarts=5, mydata:make:n=200."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flatrock.core.errors import ConfigError
from flatrock.core.numbers import scalar


def head_of(spec: str, known: Callable[[str], bool]) -> tuple[str, list[str]]:
    """The name, pgd-20 of pgd-20:restarts=5 or file:name of file:name:a=1, and the rest; what is `known` is no file."""
    head, *pairs = spec.split(":")
    if pairs and "=" not in pairs[0] and not known(head):
        head = f"{head}:{pairs.pop(0)}"
    return head, pairs


def parsed(kind: str, spec: str, known: Callable[[str], bool]) -> tuple[str, dict[str, Any]]:
    """The name and the options of a `kind` of thing; ConfigError with every part that is no option=value."""
    head, pairs = head_of(spec, known)
    options: dict[str, str] = {}
    faults: list[str] = []
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            faults.append(f"{kind} {spec!r}: expected option=value after ':', got {pair!r}")
        elif key in options:
            faults.append(f"{kind} {spec!r} gives {key} twice; keep one")
        options[key] = value
    if faults:
        raise ConfigError.of(faults)
    return head, valued(options)


def valued(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which text is what it would be on the command line, 2/255 a number."""
    return {key: scalar(value) if isinstance(value, str) else value for key, value in options.items()}


def spell(name: str, options: Mapping[str, Any]) -> str:
    """The text that says the same, in one way: folder:channels=1:size=64."""
    return name + "".join(f":{key}={options[key]}" for key in sorted(options, key=str))
