"""Networks made by a function of the user's, `module:factory`: named on a command line, or in a recipe."""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.guests import check_place, dotted, guests, imported, raised_at, required
from flatrock.core.registry import defaults_of, unknown
from flatrock.core.rng import Seed

_CURE = "write a function without arguments that returns it, such as `def net() -> nn.Module: return Net(depth=18)`"


def find_factory(text: str, given: Collection[str] = (), *, key: str = "") -> Callable[..., Any]:
    """The callable that `package.module:factory` names, not called yet; ConfigError says what is missing.

    `given` are names of arguments it will get; with `key`, others can be given as key.name=value.
    """
    module_name, _, attribute = text.partition(":")
    if meant := dotted(module_name):
        raise ConfigError(f"{text!r} begins with a file, not a module; write {meant}:{attribute}")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ConfigError(f"{text!r} does not name a factory; write package.module:factory, for example mynets:make")
    module = imported(module_name, cure=_CURE)
    if not hasattr(module, attribute):
        choices = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        raise ConfigError(f"module {module_name!r}: {unknown('factory', attribute, choices)}")
    found = getattr(module, attribute)
    if isinstance(found, nn.Module):

        def same() -> nn.Module:
            return found

        same.__module__ = module_name
        return same
    if not callable(found):
        raise ConfigError(f"{text} is of type {type(found).__name__} and cannot be called; {_CURE}")
    if needed := [name for name in required(found) if name not in given]:
        options = f"give {'it' if len(needed) == 1 else 'them'}, such as {key}.{needed[0]}=8, or " if key else ""
        raise ConfigError(f"{text} needs arguments ({', '.join(needed)}); {options}{_CURE}")
    return found  # type: ignore[no-any-return]


def make_network(text: str) -> nn.Module:
    """What the factory makes; torch's random state is left as it was."""
    return _made(find_factory(text), text, 0, {})


def _made(factory: Callable[..., Any], text: str, seed: int, options: Mapping[str, Any]) -> nn.Module:
    with guests(Seed(seed).child("model")):
        try:
            made = factory(**options)
        except Exception as error:  # it is the user's code: anything can happen
            said = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ConfigError(f"{text}({said}) raised {type(error).__name__}: {error}{raised_at(error)}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{text}() returned a {type(made).__name__}, not a torch.nn.Module; {_CURE}")
    return made


def own_network(text: str, *, seed: int, given: Mapping[str, Any], **options: Any) -> nn.Module:
    """A copy of what the factory makes with these options, and with those of `given` that it has arguments for.

    Names and options may come out of a file from elsewhere, which must not be able to run code of its own or to call
    just anything: they lead to a file of the current folder itself, and to what is written there and says that it
    returns a network.
    """
    name = text.partition(":")[0]
    check_place(name, what="a network")
    factory = find_factory(text, {*given, *options}, key="model")
    if not _is_declared(factory, name):
        raise ConfigError(
            f"{text} is not written in {name}.py as a function that says it returns a network; "
            "write `def net(...) -> nn.Module` there, and let it call what makes the network"
        )
    options |= {key: value for key, value in given.items() if key in inspect.signature(factory).parameters}
    return copy.deepcopy(_made(factory, text, seed, options))


def own_defaults(text: str, given: Collection[str]) -> dict[str, Any]:
    """What the arguments of a factory are that are not `given`; it is looked at, not called."""
    check_place(text.partition(":")[0], what="a network")
    factory = find_factory(text, given)
    return defaults_of(factory, [name for name in inspect.signature(factory).parameters if name not in given])


def _is_declared(found: Callable[..., Any], module: str) -> bool:
    """Whether this is a kind of network, or a function annotated to return one, written in this module."""
    if getattr(found, "__module__", None) != module:
        return False
    if inspect.isclass(found):
        return issubclass(found, nn.Module)
    try:
        made = typing.get_type_hints(found).get("return")
    except Exception:  # annotations are anything
        return False
    return inspect.isclass(made) and issubclass(made, nn.Module)
