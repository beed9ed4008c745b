"""Street View House Numbers, cropped digits, from the official MATLAB files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatrock.core.errors import DataError
from flatrock.data.dataset import Dataset, check
from flatrock.data.download import RemoteFile
from flatrock.data.source import Source, SplitName, check_split

SHAPE = (3, 32, 32)
RECORDS = {"train": 73_257, "test": 26_032}
FILES: dict[SplitName, str] = {"train": "train_32x32.mat", "test": "test_32x32.mat"}

_SITE = "http://ufldl.stanford.edu/housenumbers/"


def load(split: SplitName, folder: Path) -> Dataset:
    """uint8 [N, 3, 32, 32]; the files call the digit 0 by the label 10, which becomes 0 here."""
    check_split(split)
    path = _find(folder, FILES[split])
    if path is None:
        raise SOURCE.missing(FILES[split], folder)
    pixels, labels = _arrays(path, RECORDS[split])
    x = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    y = torch.from_numpy(labels.reshape(-1).astype(np.int64) % 10)
    return check(Dataset("svhn", x, y, 10, tuple("0123456789")))


def _find(folder: Path, name: str) -> Path | None:
    places = (folder, folder / "svhn", folder / "SVHN")
    return next((place / name for place in places if (place / name).is_file()), None)


def _arrays(path: Path, expected: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """X [32, 32, 3, N] uint8 and y [N, 1] with labels 1..10, or DataError."""
    from scipy.io import loadmat

    cure = f"delete it and get a fresh copy from {_SITE}{path.name}"
    try:
        content = loadmat(path, variable_names=("X", "y"))
    except Exception as error:  # scipy answers damage with a dozen kinds of exception, some of them bare
        raise DataError(f"{path} is truncated, corrupt or not a MATLAB file ({error}); {cure}") from error
    x, y = content.get("X"), content.get("y")
    if x is None or y is None:
        raise DataError(f"{path} lacks the variable {'X' if x is None else 'y'}; {cure}")
    if x.dtype != np.uint8 or x.shape[:-1] != (32, 32, 3):
        raise DataError(f"{path}: X must be uint8 [32, 32, 3, N], got {x.dtype} {list(x.shape)}; {cure}")
    if x.shape[-1] != expected or y.size != expected:
        raise DataError(f"{path} holds {x.shape[-1]} images and {y.size} labels, expected {expected} of each; {cure}")
    wrong = np.flatnonzero(~((y >= 1) & (y <= 10)))
    if wrong.size:
        raise DataError(f"{path}: image {wrong[0]} has label {y.flat[wrong[0]]}, expected 1..10; {cure}")
    return x, y


def _found(folder: Path) -> str | None:
    paths = [_find(folder, name) for name in FILES.values()]
    return str(paths[0].parent) if paths[0] is not None and paths[1] is not None else None


SOURCE = Source(
    name="svhn",
    num_classes=10,
    input_shape=SHAPE,
    train_size=RECORDS["train"],
    needs="train_32x32.mat and test_32x32.mat (cropped digits)",
    find=_found,
    remote=(
        RemoteFile((_SITE + FILES["train"],), FILES["train"], 182_040_794, "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
        RemoteFile((_SITE + FILES["test"],), FILES["test"], 64_275_384, "md5:eb5a983be6a315427106f1b164d9cef3"),
    ),
)
