"""Named things with a one-line description; a miss lists the choices and suggests the nearest."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flatrock.core.errors import ConfigError, is_plain
from flatrock.core.guests import is_own
from flatrock.core.numbers import plain

if TYPE_CHECKING:
    from flatrock.core.own import Own

T = TypeVar("T")
# More choices than this are not listed in full.
MANY = 40


def unknown(kind: str, name: object, known: Iterable[str], *, more: str = "", near: str | None = None) -> str:
    """The text for an unknown name: value, choices (of very many, those that look alike), `more`, nearest choice.

    `near` is what was meant, where that is known better than by the letters.
    """
    choices = sorted(set(known))
    lower = {c.lower(): c for c in choices}
    if near is None:
        near = next((lower[n] for n in difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)), None)
    hint = f"; did you mean {near!r}?" if near else ""
    listed = ", ".join(choices) or "none"
    if len(choices) > MANY:
        alike = difflib.get_close_matches(str(name).lower(), lower, n=12, cutoff=0.3)
        listed = f"{len(choices)} of them, such as {', '.join(lower[a] for a in alike) or choices[0]}"
    return f"unknown {kind} {name!r}; known: {listed}{more}{hint}"


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One row of a registry; of one for a thing of the user's, options are `known`, `given` comes from the run, and
    `written` is the class or function of the user's, whose signature `make` does not show."""

    name: str
    make: Callable[..., T]
    summary: str
    cite: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    known: tuple[str, ...] | None = None
    given: tuple[str, ...] = ()
    written: Callable[..., Any] | None = None

    def options(self) -> tuple[str, ...]:
        """Names of the options `make` takes, without those this row fixes."""
        if self.known is not None:
            return self.known
        return tuple(n for n in inspect.signature(self.make).parameters if n not in self.fixed)

    def defaults(self) -> dict[str, Any]:
        """What options are when they are left out, of those that may be."""
        return defaults_of(self.written or self.make, self.options())


def defaults_of(make: Callable[..., Any], options: Iterable[str]) -> dict[str, Any]:
    """The defaults that a signature states for these arguments, where they are values that a file can hold."""
    parameters = inspect.signature(make).parameters
    stated = {name: parameters[name].default for name in options if name in parameters}
    return {name: value for name, value in stated.items() if value is not inspect.Parameter.empty and is_plain(value)}


class Registry(Generic[T]):
    """A catalogue of one kind of thing; with `own`, names such as mymethods:Mine lead to things of the user's."""

    def __init__(self, kind: str, own: Own[T] | None = None) -> None:
        self.kind = kind
        self.own = own
        self._entries: dict[str, Entry[T]] = {}

    def add(self, name: str, make: Callable[..., T], summary: str, *, cite: str = "", **fixed: Any) -> None:
        """Add a row; a second row of the same name is a programming error."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = Entry(name, make, summary, cite, fixed)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """All names, in the order they were added."""
        return list(self._entries)

    def entry(self, name: str) -> Entry[T]:
        """The row called `name`, or an error that lists the choices."""
        if self.own is not None and is_own(name):
            return self.own.entry(name)
        if name not in self._entries:
            raise ConfigError.of([unknown(self.kind, name, self._entries)])
        return self._entries[name]

    def faults(self, name: str, options: Iterable[str]) -> list[str]:
        """What is wrong with this name and these option names, all at once."""
        try:
            entry = self.entry(name)
        except ConfigError as error:
            return list(error.faults or (str(error),))
        return self._odd(entry, options)

    def _odd(self, entry: Entry[T], options: Iterable[str]) -> list[str]:
        known, all_known = entry.options(), {*entry.options(), *entry.given}
        return [unknown(f"option of {self.kind} {entry.name!r}:", o, known) for o in options if o not in all_known]

    def make(self, name: str, /, **options: Any) -> T:
        """Build the thing called `name`, with numpy's numbers as Python's; unknown names and options: ConfigError."""
        return self.made(self.entry(name), options)

    def made(self, entry: Entry[T], options: Mapping[str, Any]) -> T:
        """What a row makes of these options."""
        if faults := self._odd(entry, options):
            raise ConfigError.of(faults)
        return entry.make(**entry.fixed, **{option: plain(value) for option, value in options.items()})
