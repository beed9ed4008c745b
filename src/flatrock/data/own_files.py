"""Your own arrays: FOLDER/train.npz and FOLDER/test.npz with inputs and labels."""

from __future__ import annotations

from pathlib import Path

from flatrock.core.errors import DataError
from flatrock.data.arrays import Array, Part, own_dataset, part
from flatrock.data.dataset import Dataset
from flatrock.data.npz import read_arrays
from flatrock.data.source import SPLITS, Source, SplitName, check_split

INPUTS = ("image", "x")
_CURE = "write it with np.savez: plain arrays of numbers, names as text, no Python objects"


def load(split: SplitName, folder: Path) -> Dataset:
    """uint8 [N, C, H, W] of `image`, or float32 [N, ...] of `x`, with the labels of the file.

    Class numbers are those of train.npz, so that a test split lacking a class keeps the numbering. What is wrong with
    the test split is told before training on the other.
    """
    check_split(split)
    there = [s for s in SPLITS if _file(folder, s).is_file()]
    if split not in there:
        raise SOURCE.missing(f"{split}.npz", folder)
    parts: dict[SplitName, Part] = {}
    faults: list[str] = []
    for s in there:
        try:
            found, wrong = _read(_file(folder, s), labels_only=s == "train" != split)
        except DataError as error:
            found, wrong = None, [str(error)]
        faults += wrong
        if found is not None:
            parts[s] = found
    return own_dataset("npz", split, parts, faults)


def _file(folder: Path, split: SplitName) -> Path:
    return folder / f"{split}.npz"


def _read(path: Path, *, labels_only: bool) -> tuple[Part | None, list[str]]:
    """One split, or None and what is wrong with it; inputs are read last, they are what is large."""
    arrays = read_arrays(path, ("label", "classes", *(() if labels_only else INPUTS)), cure=_CURE)
    faults, classes = _names(arrays.get("classes"))
    given = [name for name in INPUTS if name in arrays]
    if len(given) != 1 and not labels_only:
        faults.append(f"holds {'both `image` and' if given else 'neither `image` nor'} `x`; {NEEDS}")
    if "label" not in arrays:
        faults.append(f"lacks `label`; {NEEDS}")
    if faults:
        return None, [f"{path}: {fault}" for fault in faults]
    x = arrays[given[0]] if given else None
    if x is not None and (x.dtype == "uint8") != (given[0] == "image"):
        cure = "`image` is for bytes 0..255, `x` for floats in [0, 1]; give it the other name or convert it"
        return None, [f"{path}: `{given[0]}` holds {x.dtype} {list(x.shape)}; {cure}"]
    return part(str(path), x, arrays["label"], classes)


def _names(array: Array | None) -> tuple[list[str], tuple[str, ...]]:
    """What is wrong with the names of the classes, and the names."""
    if array is None:
        return [], ()
    if array.dtype.kind != "U" or array.ndim != 1:
        got = f"{array.dtype} {list(array.shape)}"
        return [f"`classes` must be a list of text, got {got}; write np.array(['cat', 'dog'])"], ()
    names = tuple(str(name) for name in array)
    twice = [name for name in names if names.count(name) > 1]
    return ([f"`classes` names {twice[0]!r} twice; names must differ"] if twice else []), names


def _found(folder: Path) -> str | None:
    there = [s for s in SPLITS if _file(folder, s).is_file()]
    return f"{folder} ({' and '.join(f'{s}.npz' for s in there)})" if there else None


NEEDS = (
    "an .npz file of one's own data has `image` (uint8 [N, H, W, C] or [N, H, W]) or `x` (floats in [0, 1], [N, ...]), "
    "and `label` (whole numbers from 0, [N])"
)
SOURCE = Source(
    name="npz",
    num_classes=None,
    input_shape=None,
    train_size=None,
    needs="write FOLDER/train.npz and FOLDER/test.npz with np.savez(file, image=..., label=...), or x=... for floats "
    "in [0, 1], and pass --data-dir FOLDER (docs/data.md)",
    find=_found,
)
