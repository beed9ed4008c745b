"""Networks made by a function of the user's: `package.module:factory`, from the current folder or installed."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.registry import unknown
from flatrock.core.rng import Seed, kept_global_rng

_CURE = "write a function without arguments that returns the network, such as `def net(): return Net(depth=18)`"


def find_factory(text: str) -> Callable[[], Any]:
    """The callable that `package.module:factory` names, not called yet; ConfigError says what is missing."""
    module_name, _, attribute = text.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ConfigError(f"{text!r} does not name a factory; write package.module:factory, for example mynets:make")
    module = _imported(module_name)
    if not hasattr(module, attribute):
        choices = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        raise ConfigError(f"module {module_name!r}: {unknown('factory', attribute, choices)}")
    found = getattr(module, attribute)
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise ConfigError(f"{text} is of type {type(found).__name__} and cannot be called; {_CURE}")
    if needed := _required(found):
        raise ConfigError(f"{text} needs arguments ({', '.join(needed)}); {_CURE}")
    return found  # type: ignore[no-any-return]


def make_network(text: str) -> nn.Module:
    """What the factory makes; torch's random state is left as it was."""
    factory = find_factory(text)
    with _guests():
        try:
            made = factory()
        except Exception as error:  # it is the user's code: anything can happen
            raise ConfigError(f"{text}() raised {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{text}() returned a {type(made).__name__}, not a torch.nn.Module; {_CURE}")
    return made


@contextmanager
def _guests() -> Iterator[None]:
    """Where the user's code runs: it can import from the current folder, and draws the same numbers every time."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        with kept_global_rng(torch.get_default_device(), seed=Seed(0).child("model")):
            yield
    finally:
        sys.path.remove(here)


def _imported(name: str) -> object:
    with _guests():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and f"{name}.".startswith(f"{error.name}."):
                where = f"in {Path.cwd()} nor among the installed packages"
                raise ConfigError(
                    f"there is no module {error.name!r} {where}; go to the folder that holds it"
                ) from error
            raise ConfigError(f"module {name!r} needs {error.name!r}, which is not installed") from error
        except SystemExit as error:
            raise ConfigError(
                f"module {name!r} is a program that runs and ends when it is imported; {_CURE} in a file of its own"
            ) from error
        except Exception as error:  # it is the user's code: anything can happen
            raise ConfigError(f"importing {name!r} raised {type(error).__name__}: {error}") from error


def _required(found: Callable[..., Any]) -> list[str]:
    """Names of the arguments without default."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # some functions written in C do not tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in optional]
