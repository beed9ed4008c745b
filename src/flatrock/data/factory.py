"""Data made by a function of the user's, `module:function`, which is called with the name of a split."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, DataError, in_words
from flatrock.core.guests import check_name, check_place, guests, imported, local, raised_at, required
from flatrock.core.registry import unknown
from flatrock.core.rng import Seed
from flatrock.data.arrays import Array, Part, own_dataset, part
from flatrock.data.dataset import Dataset
from flatrock.data.source import SPLITS, Source, SplitName, check_split

# Arguments that are given, and thus no options, and names that options cannot have, because `load_data` has them.
GIVEN = ("split", "folder")
TAKEN = (*GIVEN, "name", "download", "progress")
_CURE = "write `def make(split: str) -> tuple[Tensor, Tensor]` or `-> torch.utils.data.Dataset`"
_PAIR = "return a pair (x, y) of tensors, or a dataset whose samples are pairs (input, label)"


def load(name: str, split: SplitName, folder: Path, **options: Any) -> Dataset:
    """What the function makes of the split, read into memory; of the other one its classes and its faults."""
    check_split(split)
    function = find_function(name)
    given = options | ({"folder": folder} if "folder" in inspect.signature(function).parameters else {})
    parts: dict[SplitName, Part] = {}
    faults: list[str] = []
    for s in SPLITS:
        found, wrong = _made(function, name, s, given)
        faults += wrong
        if found is not None:
            parts[s] = found
    return own_dataset(name, split, parts, faults)


def check_options(name: str, options: Collection[str]) -> None:
    """ConfigError unless there is such a function, which takes these options and needs no others; nothing is called."""
    function = find_function(name)
    takes = {*inspect.signature(function).parameters} - {*TAKEN}
    faults = [unknown(f"option of data {name!r}:", o, takes) for o in options if o not in takes]
    if needed := [o for o in required(function) if o not in (*GIVEN, *options)]:
        words = ":".join(f"{o}=..." for o in needed)
        faults.append(
            f"data {name!r} needs options ({', '.join(needed)}); give them beside data.name (without a recipe: "
            f"--data {name}:{words})"
        )
    if faults:
        raise ConfigError.of(faults)


def source(name: str) -> Source:
    """What is known of such data without running anything; ConfigError if the name is none."""
    module, _, function = name.partition(":")
    check_name(module)
    if not (module.isidentifier() and function.isidentifier()):
        raise ConfigError(f"{name!r} does not name data; write file:function, for example mydata:make (docs/data.md)")

    def find(folder: Path) -> str | None:
        file = local(module)
        return None if file is None else str(file)

    needs = f"{module}.py in the current folder, with a function {function}(split) that makes the data (docs/data.md)"
    return Source(name, num_classes=None, input_shape=None, train_size=None, needs=needs, find=find)


def find_function(name: str) -> Callable[..., Any]:
    """The function, not called yet; ConfigError says what is missing.

    A name may come out of a recipe from elsewhere, which must not be able to call just anything: it leads to a file of
    the current folder itself, and to what is written there, takes a split and says that it returns data.
    """
    source(name)
    module_name, _, attribute = name.partition(":")
    check_place(module_name, what="data")
    module = imported(module_name, cure=_CURE)
    if not hasattr(module, attribute):
        choices = [n for n, v in vars(module).items() if _is_declared(v, module_name)]
        raise ConfigError(f"module {module_name!r}: {unknown('function that makes data', attribute, choices)}")
    found: Callable[..., Any] = getattr(module, attribute)
    if not _is_declared(found, module_name):
        raise ConfigError(
            f"{name} is not written in {module_name}.py as a function that takes `split` and says it returns data; "
            f"{_CURE} there"
        )
    return found


def _is_declared(found: object, module: str) -> bool:
    """Whether this takes a split, and is a kind of dataset or a function annotated to return one or a pair."""
    from torch.utils.data import Dataset as TorchDataset

    if getattr(found, "__module__", None) != module or not (inspect.isfunction(found) or inspect.isclass(found)):
        return False
    if "split" not in inspect.signature(found).parameters:
        return False
    if inspect.isclass(found):
        return issubclass(found, TorchDataset)
    try:
        made = typing.get_type_hints(found).get("return")
    except Exception:  # annotations are anything
        return False
    made = typing.get_origin(made) or made
    return inspect.isclass(made) and issubclass(made, TorchDataset | tuple)


def _made(
    function: Callable[..., Any], name: str, split: SplitName, given: Mapping[str, Any]
) -> tuple[Part | None, list[str]]:
    where = f"{name}({split!r})"
    with guests(Seed(0).child("data", split)):
        try:
            made = function(split=split, **given)
        except Exception as error:  # it is the user's code: anything can happen
            raise ConfigError(f"{where} raised {in_words(error)}{raised_at(error)}") from error
        try:
            x, y = _gathered(made)
        except DataError as error:
            return None, [f"{where}: {error}"]
    names = getattr(made, "classes", ())
    named = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
    return part(where, x, y, names if named else ())


def _gathered(made: Any) -> tuple[Array | Tensor, Array | Tensor]:
    """Inputs and labels of what a function returned."""
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(one, Tensor | np.ndarray) for one in made):
        return made
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__") or isinstance(made, Mapping | str | Tensor):
        cure = "return its .dataset" if hasattr(made, "dataset") else _PAIR
        raise DataError(f"it is a {type(made).__name__}, whose samples cannot be asked for one by one; {cure}")
    if not len(made):
        raise DataError("it has no samples; give at least one")
    inputs: list[Tensor] = []
    labels: list[int] = []
    for i in range(len(made)):
        x, y = _sample(made, i)
        if inputs and (x.shape, x.dtype) != (inputs[0].shape, inputs[0].dtype):
            raise DataError(
                f"sample {i} is {_said(x)}, but sample 0 is {_said(inputs[0])}; give all inputs one size and type"
            )
        inputs.append(x)
        labels.append(y)
    return torch.stack(inputs), np.array(labels)


def _sample(made: Any, i: int) -> tuple[Tensor, int]:
    """An input as a tensor, channels first, and its label."""
    try:
        item = made[i]
    except Exception as error:  # it is the user's code: anything can happen
        raise DataError(f"sample {i} raised {in_words(error)}{raised_at(error)}") from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(f"sample {i} is a {type(item).__name__}, not a pair; {_PAIR}")
    x, y = item
    label = y.tolist() if isinstance(y, Tensor | np.ndarray | np.generic) and not y.ndim else y
    if isinstance(label, bool) or not isinstance(label, int):
        raise DataError(f"sample {i} has a label of type {type(y).__name__}, not a whole number; {_PAIR}")
    return _input(x, i), label


def _input(x: Any, i: int) -> Tensor:
    """Pillow's images and numpy's bytes have channels last; what is a tensor or of floats is taken as it is."""
    mode = getattr(x, "mode", None)
    if isinstance(mode, str):
        if mode not in ("L", "RGB"):
            raise DataError(f"sample {i} is an image of mode {mode}; write image.convert('RGB'), or 'L' for grey")
        x = np.asarray(x)
    if isinstance(x, np.ndarray):
        if x.dtype == np.uint8 and x.ndim in (2, 3):
            x = (x[..., None] if x.ndim == 2 else x).transpose(2, 0, 1)
        x = torch.from_numpy(np.array(x, order="C")) if x.dtype.kind in "biuf" else x
    if not isinstance(x, Tensor):
        raise DataError(f"sample {i} has an input of type {type(x).__name__}; give a tensor, an array or an image")
    return x.detach().cpu()


def _said(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"
