"""Checks shared by the options of objectives, flatness methods and optimizers."""

from __future__ import annotations

from collections.abc import Iterable

from flatrock.core.errors import ConfigError
from flatrock.core.numbers import is_finite
from flatrock.core.registry import unknown


def weight(owner: str, name: str, value: float) -> None:
    """A loss weight is a finite number >= 0."""
    if not (is_finite(value) and value >= 0):
        raise ConfigError(f"{owner} {name} must be a number >= 0, got {value!r}")


def share(owner: str, name: str, value: float, *, less: bool = False) -> None:
    """A part of a whole is a number from 0 to 1; with `less` it may not be all of it."""
    weight(owner, name, value)
    if value > 1 or (less and value == 1):
        raise ConfigError(
            f"{owner} {name} must lie in [0, 1{')' if less else ']'}, got {value!r}; write a tenth as 0.1"
        )


def count(owner: str, name: str, value: int, *, least: int) -> None:
    """A number of times is a whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{owner} {name} must be a whole number >= {least}, got {value!r}")


def noise_fault(sigma: float) -> str:
    """What is wrong with noise of this deviation on inputs in [0, 1]: above 1 it was meant for 0..255; else nothing."""
    if sigma <= 1:
        return ""
    return f"must be at most 1, got {sigma:g}; it is in pixel units of [0, 1]: write {sigma:g}/255, {sigma / 255:.2g}"


def choose(owner: str, name: str, value: str, choices: Iterable[str]) -> None:
    """A named variant is one of the choices."""
    known = list(choices)
    if value not in known:
        raise ConfigError(unknown(f"{owner} {name}", value, known))
