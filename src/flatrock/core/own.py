"""Classes and functions of the user's in the place of built-in methods, named `file:name`: one way for all kinds."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from flatrock.core.errors import ConfigError, FlatrockError, in_words, shown
from flatrock.core.guests import check_place, guests, imported, raised_at, required
from flatrock.core.registry import Entry, unknown
from flatrock.core.rng import Seed

T = TypeVar("T")
PAGE = "docs/own_methods.md"
# What values of a recipe are called; other annotations are not checked.
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}


def _no_faults(made: Any) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Own(Generic[T]):
    """What a class or function of the user's must be to serve as one kind of thing.

    A class is a `base`, and what it makes has the `attributes` and the methods `calls`, each of which can be called
    with what stands there; those of `may` it need not have; `check` finds what else is wrong with it. A function says
    that it `returns` the thing; or it is the thing itself, called with `asked`, and `wrapped` makes an object of it and
    of its options, those of `also` included. `given` are arguments that come from the run, and thus no options.
    """

    what: str
    example: str
    calls: Mapping[str, str]
    base: type | None = None
    attributes: tuple[str, ...] = ()
    may: Mapping[str, str] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    returns: type | None = None
    asked: str = ""
    wrapped: Callable[[Callable[..., Any], dict[str, Any]], T] | None = None
    also: tuple[str, ...] = ()
    check: Callable[[T], Iterable[str]] = field(default=_no_faults)

    def entry(self, name: str) -> Entry[T]:
        """The row of `file:name`; ConfigError says what is missing.

        A name may come out of a recipe from elsewhere, which must not be able to run code of its own or to call just
        anything: it leads to a file of the current folder itself, and to what is written there and is such a thing.
        """
        module_name, _, attribute = name.partition(":")
        if not (module_name.isidentifier() and attribute.isidentifier()):
            raise ConfigError(f"{name!r} does not name {self.what}; write file:name, such as mymethods:Mine ({PAGE})")
        check_place(module_name, what=self.what, write="write one there that makes use of it")
        module = imported(module_name, cure=self._cure)
        if not hasattr(module, attribute):
            there = [n for n, v in vars(module).items() if not self._strange(v, module_name)]
            raise ConfigError(f"module {module_name!r}: {unknown('name', attribute, there)}; {self._cure}")
        found = getattr(module, attribute)
        if why := self._strange(found, module_name):
            raise ConfigError(f"{name} is not {self.what}: {why}; {self._cure}")
        return self.row(found, name)

    def row(self, found: Callable[..., Any], name: str) -> Entry[T]:
        """The row of a class or function."""
        takes = _options(found)
        if self._is_thing(found):
            if not _takes(found, self.asked, all_of_it=False):
                raise ConfigError(f"{name} must take ({self.asked}), it takes {_signature(found)}; {self._cure}")
            takes = [*takes[len(_names(self.asked)) :], *self.also]
        known = tuple(option for option in takes if option not in self.given)
        return Entry(name, partial(self._made, found, name), "", known=known, given=self.given, written=found)

    def fits(self, made: T, name: str) -> T:
        """An object, if it is such a thing; ConfigError names everything that it lacks."""
        faults = [f"it is {shown(made)}"] if self.base is not None and not isinstance(made, self.base) else []
        asked = {**self.calls, **{name: words for name, words in self.may.items() if hasattr(made, name)}}
        for method, words in {} if faults else asked.items():
            found = getattr(made, method, None)
            if not callable(found):
                other = (
                    f", and {method!r}, which it has, means that here; call it otherwise" if method in self.may else ""
                )
                faults.append(f"it has no method {method}({words}){other}")
            elif not _takes(found, words):
                faults.append(f"its {method} must take ({words}), it takes {_signature(found)}")
        faults += [f"it has no attribute {a!r}" for a in self.attributes if not faults and not hasattr(made, a)]
        faults += [] if faults else self.check(made)
        if faults:
            raise ConfigError(f"{name} is not {self.what}: {', and '.join(faults)}; {self._cure}")
        return made

    @property
    def _cure(self) -> str:
        return f"write {self.example} ({PAGE})"

    def _is_thing(self, found: object) -> bool:
        """Whether this is a function that is the thing itself."""
        return self.wrapped is not None and callable(found) and not inspect.isclass(found)

    def _strange(self, found: object, module: str) -> str:
        """Why a name of a file may not be followed to this, without calling it; nothing if it may."""
        if getattr(found, "__module__", None) != module or not (inspect.isfunction(found) or inspect.isclass(found)):
            return f"it is no class or function written in {module}.py"
        if inspect.isclass(found):
            if self.base is not None:
                return "" if issubclass(found, self.base) else f"the class is no {self.base.__name__}"
            written = {name for kind in found.__mro__[:-1] for name in vars(kind)}
            lacking = [f"{m}({words})" for m, words in self.calls.items() if m not in written]
            return f"the class has no method {' and '.join(lacking)}" if lacking else ""
        if self.returns is None:
            return "it is a function"
        made = _hints(found).get("return")
        says = inspect.isclass(made) and issubclass(made, self.returns)
        return "" if says else f"the function does not say that it returns one (-> {self.returns.__name__})"

    def _made(self, found: Callable[..., Any], name: str, /, **options: Any) -> T:
        takes, is_thing = _options(found), self._is_thing(found)
        if not is_thing:  # `wrapped` knows what to do with what the run gives
            options = {key: value for key, value in options.items() if key in takes or key not in self.given}
        asked = takes[: len(_names(self.asked))] if is_thing else []
        lacking = [o for o in required(found) if o not in {*asked, *options, *self.given}]
        faults = [f"{name} needs the option{'s' * (len(lacking) > 1)} {', '.join(lacking)}"] if lacking else []
        if faults := [*faults, *_type_faults(found, name, options)]:
            raise ConfigError.of(faults)
        with guests(Seed(0).child("own")):
            try:
                made = self.wrapped(found, options) if self.wrapped and is_thing else found(**options)
                return self.fits(made, name)
            except FlatrockError:
                raise
            except Exception as error:  # it is the user's code: anything can happen
                said = ", ".join(f"{k}={shown(v)}" for k, v in options.items() if k not in self.given)
                raise ConfigError(f"{name}({said}) raised {in_words(error)}{raised_at(error, found)}") from error


def _options(found: Callable[..., Any]) -> list[str]:
    """Names of arguments; what *args and **kwargs might take is not known, and no option."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(found).parameters.values() if p.kind in named]


def _takes(found: Callable[..., Any], words: str, *, all_of_it: bool = True) -> bool:
    """Whether it can be called with `x, y, *, flag`, and with nothing else if that is all of it."""
    first, _, others = words.partition("*")
    try:
        signature = inspect.signature(found)
        bind = signature.bind if all_of_it else signature.bind_partial
        bind(*_names(first), **dict.fromkeys(_names(others)))
    except TypeError:
        return False
    except ValueError:  # some functions written in C do not tell
        return True
    return True


def _names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def _signature(found: Callable[..., Any]) -> str:
    names = [str(p).partition(":")[0].partition("=")[0] for p in inspect.signature(found).parameters.values()]
    return f"({', '.join(names)})"


def _hints(found: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except Exception:  # annotations are anything
        return {}


def _type_faults(found: Callable[..., Any], name: str, options: Mapping[str, Any]) -> list[str]:
    """Options whose values are not what plain annotations say."""
    hints = _hints(found)
    return [f"{name} {o} must be {fault}, got {v!r}" for o, v in options.items() if (fault := _misfit(hints.get(o), v))]


def _misfit(hint: Any, value: Any) -> str:
    """What the value should be, in words; nothing if it is that, or if it cannot be told."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if any(kind not in WORDS for kind in kinds) or type(value) in kinds or (type(value) is int and float in kinds):
        return ""
    return " or ".join(WORDS[kind] for kind in kinds)
