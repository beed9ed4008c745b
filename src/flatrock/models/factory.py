"""Networks made by a function of the user's, `module:factory`: named on a command line, or in a recipe."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.registry import unknown
from flatrock.core.rng import Seed, kept_global_rng

_CURE = "write a function without arguments that returns the network, such as `def net(): return Net(depth=18)`"


def is_own(name: str) -> bool:
    """Whether a model's name leads to a function of the user's."""
    return ":" in name


def find_factory(text: str, given: Collection[str] = ()) -> Callable[..., Any]:
    """The callable that `package.module:factory` names, not called yet; ConfigError says what is missing.

    `given` are names of arguments it will get.
    """
    module_name, _, attribute = text.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ConfigError(f"{text!r} does not name a factory; write package.module:factory, for example mynets:make")
    module = _imported(module_name)
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
    if needed := [name for name in _required(found) if name not in given]:
        raise ConfigError(f"{text} needs arguments ({', '.join(needed)}); {_CURE}")
    return found  # type: ignore[no-any-return]


def make_network(text: str, *, seed: int = 0, **options: Any) -> nn.Module:
    """What the factory makes with these options; torch's random state is left as it was."""
    return _made(find_factory(text, options), text, seed, options)


def _made(factory: Callable[..., Any], text: str, seed: int, options: Mapping[str, Any]) -> nn.Module:
    with _guests(seed):
        try:
            made = factory(**options)
        except Exception as error:  # it is the user's code: anything can happen
            said = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ConfigError(f"{text}({said}) raised {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{text}() returned a {type(made).__name__}, not a torch.nn.Module; {_CURE}")
    return made


@contextmanager
def _guests(seed: int = 0) -> Iterator[None]:
    """Where the user's code runs: it can import from the current folder, and draws the same numbers every time."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        with kept_global_rng(torch.get_default_device(), seed=Seed(seed).child("model")):
            yield
    finally:
        sys.path.remove(here)


class _AsItIs(SourceFileLoader):
    """Runs a file as it is now: compiled code that Python keeps beside it may be of a version from the same second."""

    def __init__(self, name: str, file: Path) -> None:
        super().__init__(name, str(file))
        self.content = file.read_bytes()

    def get_code(self, fullname: str) -> CodeType:
        """The content, compiled."""
        return self.source_to_code(self.content, self.path)

    def made(self, module: ModuleType) -> bool:
        """Whether a module is what this file, with this content, gave before."""
        old = getattr(module.__spec__, "loader", None)
        return isinstance(old, _AsItIs) and (old.path, old.content) == (self.path, self.content)


def _local(name: str) -> Path | None:
    """The file of the current folder itself that a module's name leads to, if there is one."""
    folder = Path.cwd()
    file = folder / f"{name}.py"
    package = (folder / name / "__init__.py").is_file()  # which Python prefers
    return file if name.isidentifier() and name != "__main__" and file.is_file() and not package else None


def _loaded(name: str, file: Path) -> ModuleType:
    """The module of this file as the file is now; it runs again only if it changed since it ran here.

    Networks made before keep the code they were made with: what changed becomes a new module in the place of the old.
    """
    loader, old = _AsItIs(name, file), sys.modules.get(name)
    if old is not None and (loader.made(old) or getattr(old.__spec__, "_initializing", False)):
        return old
    spec = spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    before = None if old is None else old.__spec__
    if old is not None and not isinstance(getattr(before, "loader", None), _AsItIs):
        _check_same(old, file)
        # Imported by the user, nobody knows when: run again in place, as importlib.reload does, which goes on working.
        module, old.__spec__ = old, spec
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if old is not None:
            sys.modules[name], old.__spec__ = old, before
        raise
    return module


def _check_same(module: ModuleType, file: Path) -> None:
    """A module somebody else imported is of this file."""
    other = getattr(module, "__file__", None)
    if other is None or Path(other).resolve() != file.resolve():
        raise ConfigError(
            f"{module.__name__!r} is already imported from {other or 'Python itself'}, not from {file}: Python keeps "
            "one module of a name; call the file something else, or start Python anew in its folder"
        )


def _imported(name: str) -> object:
    with _guests():
        try:
            file = _local(name)
            return importlib.import_module(name) if file is None else _loaded(name, file)
        except ConfigError:
            raise
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


def own_network(text: str, *, seed: int, given: Mapping[str, Any], **options: Any) -> nn.Module:
    """A copy of what the factory makes with these options, and with those of `given` that it has arguments for.

    Names and options may come out of a file from elsewhere, which must not be able to run code of its own or to call
    just anything: they lead to a file of the current folder itself, and to what is written there and says that it
    returns a network.
    """
    name = text.partition(":")[0]
    _check_place(name)
    factory = find_factory(text, {*given, *options})
    if not _is_declared(factory, name):
        raise ConfigError(
            f"{text} is not written in {name}.py as a function that says it returns a network; "
            "write `def net(...) -> nn.Module` there, and let it call what makes the network"
        )
    options |= {key: value for key, value in given.items() if key in inspect.signature(factory).parameters}
    return copy.deepcopy(_made(factory, text, seed, options))


def _check_place(name: str) -> None:
    """The module is a file of the current folder; looked up, not imported."""
    if _local(name) is None:
        raise ConfigError(
            f"{name!r} is not a module of the current folder, {Path.cwd() / f'{name}.py'}; a recipe may name no other: "
            "go to the folder that holds yours, and for a network of a package write a function there"
        )


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


def _required(found: Callable[..., Any]) -> list[str]:
    """Names of the arguments without default."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # some functions written in C do not tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in optional]
