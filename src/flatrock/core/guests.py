"""Functions of the user's, named `module:function`: where they are looked for, and how their file is run."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.files import json_text, sha256
from flatrock.core.identity import MODEL_CODE
from flatrock.core.processes import Terminated
from flatrock.core.rng import Seed, kept_global_rng

# What comes with flatrock, torch and Python; the script that runs now is the user's.
NOT_OWN = {"torch", "flatrock", *sys.stdlib_module_names} - {"__main__"}


def is_own(name: str) -> bool:
    """Whether the name of a model, of data or of a method leads to something of the user's."""
    return ":" in name


@contextmanager
def guests(seed: Seed) -> Iterator[None]:
    """Where the user's code runs: it can import from the current folder, and draws the same numbers every time."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        with kept_global_rng(torch.get_default_device(), seed=seed):
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


def local(name: str) -> Path | None:
    """The file of the current folder itself that a module's name leads to, if there is one."""
    folder = Path.cwd()
    file = folder / f"{name}.py"
    package = (folder / name / "__init__.py").is_file()  # which Python prefers
    return file if name.isidentifier() and name != "__main__" and file.is_file() and not package else None


def dotted(file: str) -> str | None:
    """The module that a .py file in the current folder, or below it, is; None for anything else."""
    parts = Path(file.removesuffix(".py")).parts
    named = file.endswith(".py") and Path(file).is_file() and all(part.isidentifier() for part in parts)
    return ".".join(parts) if named else None


def _loaded(name: str, file: Path) -> ModuleType:
    """The module of this file as the file is now; it runs again only if it changed since it ran here.

    What was made before keeps the code it was made with: what changed becomes a new module in the place of the old.
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


def imported(name: str, *, cure: str) -> object:
    """The module of this name, as its file is now; ConfigError says what is wrong with it, and `cure` what to write."""
    with guests(Seed(0).child("model")):
        try:
            file = local(name)
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
        except Terminated:
            raise
        except SystemExit as error:
            raise ConfigError(
                f"module {name!r} is a program that runs and ends when it is imported; {cure} in a file of its own"
            ) from error
        except Exception as error:  # it is the user's code: anything can happen
            raise ConfigError(f"importing {name!r} raised {type(error).__name__}: {error}{raised_at(error)}") from error


# What a recipe can name when what it is to name was typed into a notebook.
WRITE_FILE = (
    "write it to a .py file of the current folder, in a notebook with `%%writefile mine.py` above it, and name it "
    "'mine:make'"
)


def check_name(name: str) -> None:
    """The module is not the notebook, prompt or script itself, which nobody else can find."""
    if name == "__main__":
        raise ConfigError(f"'__main__' is the notebook or script that runs now, which nobody finds later; {WRITE_FILE}")


def check_place(name: str, *, what: str, write: str = "write a function there") -> None:
    """The module is a file of the current folder; looked up, not imported."""
    check_name(name)
    if local(name) is None:
        raise ConfigError(
            f"{name!r} is not a module of the current folder, {Path.cwd() / f'{name}.py'}; a recipe may name no other: "
            f"go to the folder that holds yours, and for {what} of a package {write}"
        )


def required(found: Callable[..., Any]) -> list[str]:
    """Names of the arguments without default."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # some functions written in C do not tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in optional]


def of_flatrock(thing: object) -> bool:
    """Whether a thing is of a class that came with flatrock."""
    return type(thing).__module__.startswith("flatrock.")


def origin(thing: object) -> dict[str, str]:
    """The file that the class or function of a thing is written in, and a digest of it; nothing if there is none.

    What a recipe or a command names is known by the content that was run, the rest by its file as it is now.
    """
    module = sys.modules.get(getattr(thing, "__module__", ""))
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if isinstance(loader, _AsItIs):
        return {"file": Path(loader.path).name, "sha256": sha256(loader.content)}
    file = Path(getattr(module, "__file__", None) or "")
    return {"file": file.name, "sha256": sha256(file.read_bytes())} if file.is_file() else {}


def told_code(*networks: nn.Module | None) -> dict[str, list[dict[str, str]]]:
    """`model_code`: the files that the user's layers of these networks are written in, and their digests; else nothing.

    Code may change gradients alone, which weights and clean answers do not tell. A script that runs now is edited for
    many reasons: of one the layer's own source counts.
    """
    layers = {type(layer) for network in networks if network is not None for layer in network.modules()}
    kinds = {kind for layer in layers for kind in layer.__mro__}  # a parametrized layer is of a class of torch's own
    own = (kind for kind in kinds if kind.__module__.partition(".")[0] not in NOT_OWN)
    found = sorted({json_text(told) for kind in own if (told := _source(kind))})
    return {MODEL_CODE: [json.loads(text) for text in found]} if found else {}


def _source(kind: type) -> dict[str, str]:
    if kind.__module__ != "__main__":
        return origin(kind)
    try:
        return {"class": kind.__qualname__, "sha256": sha256(inspect.getsource(kind))}
    except (OSError, TypeError):  # typed at a prompt
        return {}


def written_at(function: object) -> str:
    """` (mine.py:4)`: where a function is written; nothing if that is not known."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if isinstance(code, CodeType) else ""


def raised_at(error: BaseException, *things: object) -> str:
    """` (mine.py:4)`: the last line of the user's code, or of these things, on the way to an error; else nothing.

    The user's are the files of the current folder, and what a recipe or a command names, wherever it was found.
    """
    loaders = [getattr(getattr(module, "__spec__", None), "loader", None) for module in list(sys.modules.values())]
    files = {loader.path for loader in loaders if isinstance(loader, _AsItIs)}
    for thing in things:
        with suppress(TypeError, OSError):  # what is written in C or on a prompt has no file
            files.add(inspect.getfile(thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)))
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in places if str(file) in files or file.resolve().parent == Path.cwd()]
    return f" ({own[-1][0].name}:{own[-1][1]})" if own else ""
