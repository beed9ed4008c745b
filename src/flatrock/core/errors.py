"""Errors a user can act on: each message names the value, the rule and the cure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number


class FlatrockError(Exception):
    """Base of every error raised on purpose; the command line prints it without a traceback."""


class ConfigError(FlatrockError):
    """A recipe, name or option is wrong. Lists every fault found, not only the first."""

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        self.faults = faults
        super().__init__("\n".join([message, *(f"  - {fault}" for fault in faults)]))

    @classmethod
    def of(cls, faults: Sequence[str]) -> ConfigError:
        """Of faults that have no heading: the first stands in its place, and is one of `faults` like the others."""
        error = cls(faults[0], tuple(faults[1:]))
        error.faults = tuple(faults)
        return error


def faults_of(check: Callable[[], object]) -> list[str]:
    """The faults for which a check refuses, each by itself."""
    try:
        check()
    except ConfigError as error:
        return list(error.faults or (str(error),))
    return []


class ThreatError(FlatrockError):
    """A threat or the inputs given with it break the contract (range, radius, finiteness)."""


class ModelError(FlatrockError):
    """A model does not do what every model here must: map [0, 1] inputs to one row of logits each."""


class DataError(FlatrockError):
    """A data file is missing, truncated, corrupt or not what its name says."""


class StateError(FlatrockError):
    """A run folder, checkpoint or record on disk cannot be used as asked."""


class BusyError(StateError):
    """Another process is at work in a run folder: what is asked for can be done once it has ended."""


class TrainingError(FlatrockError):
    """Training cannot go on: a loss became non-finite, at `step` where that is known, or the run collapsed."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


def in_words(error: Exception) -> str:
    """The kind of an error that someone else's code raised, and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def shown(value: object) -> str:
    """A value for a message, as Python writes it; of tensors, networks and what else is long only the kind."""
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and (shape or type(value).__name__ == "Tensor"):
        return f"a {type(value).__name__} of shape {list(shape)}"
    if isinstance(value, list | tuple) and not is_plain(value):
        more = ", ..." if len(value) > 3 else ""
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(shown, value[:3]))}{more})"
    text = repr(value)
    short = is_plain(value) or (len(text) <= 200 and "\n" not in text and " at 0x" not in text)
    return text if short else f"a {type(value).__name__}"


def is_plain(value: object) -> bool:
    """Whether a value is text, a number, true, false or nothing, or a collection of such, as files hold them."""
    if isinstance(value, dict):
        return all(map(is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | Number)
