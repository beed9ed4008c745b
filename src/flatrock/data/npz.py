"""Extra training images in .npz files: generated ones, unlabelled ones, and those another model has labelled."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatrock.core.errors import DataError
from flatrock.core.files import write_atomic
from flatrock.data.dataset import UNLABELLED, Dataset, check

NEEDS = "an .npz file with `image` uint8 [M, H, W, C] and `label` integers [M], -1 where there is no label"
NEEDS_UNLABELLED = "an .npz file with `image` uint8 [M, H, W, C]; `label` is left out or -1 throughout"
Array = np.ndarray[Any, Any]


def load(path: Path, *, num_classes: int) -> Dataset:
    """uint8 [M, C, H, W] with the labels of the file; label -1 (unlabelled) is kept."""
    arrays = _arrays(path, NEEDS)
    if "label" not in arrays:
        raise DataError(f"{path} lacks an array (label); needed is {NEEDS}. `flatrock pseudo-label` makes labels")
    return _dataset(path, arrays["image"], arrays["label"], num_classes)


def load_unlabelled(path: Path, *, num_classes: int) -> Dataset:
    """The same for images to be labelled: `label` is left out or -1 throughout, so that none is lost."""
    arrays = _arrays(path, NEEDS_UNLABELLED)
    image = arrays["image"]
    label = arrays.get("label", np.full(image.shape[:1], UNLABELLED))
    if label.dtype.kind in "iu" and (label != UNLABELLED).any():
        known = int((label != UNLABELLED).sum())
        raise DataError(f"{path} already has {known} labels; leave `label` out, or give only the images with label -1")
    return _dataset(path, image, label, num_classes)


def save(path: Path, dataset: Dataset, **more: Any) -> None:
    """Write uint8 images and their labels as `load` reads them, with more arrays beside them."""
    if dataset.x.dtype != torch.uint8:
        raise DataError(f"dataset {dataset.name!r}: only uint8 images can be written, got {dataset.x.dtype}")
    content = io.BytesIO()
    image = dataset.pixels(torch.arange(len(dataset))).cpu().numpy().transpose(0, 2, 3, 1)
    np.savez(content, image=np.ascontiguousarray(image), label=dataset.y.cpu().numpy(), **more)
    write_atomic(path, content.getvalue())


def _dataset(path: Path, image: Array, label: Array, num_classes: int) -> Dataset:
    if image.dtype != np.uint8 or image.ndim != 4:
        raise DataError(f"{path}: image must be uint8 [M, H, W, C], got {image.dtype} {list(image.shape)}; convert it")
    if label.dtype.kind not in "iu" or label.shape != image.shape[:1]:
        raise DataError(
            f"{path}: label must be {image.shape[0]} integers, one per image, got {label.dtype} {list(label.shape)}"
        )
    x = torch.from_numpy(np.ascontiguousarray(image.transpose(0, 3, 1, 2)))
    y = torch.from_numpy(label.astype(np.int64))
    return check(Dataset(path.name, x, y, num_classes), unlabelled=True)


def _arrays(path: Path, needs: str) -> dict[str, Array]:
    """`image`, and `label` if it is there."""
    if not path.is_file():
        raise DataError(f"{path} not found; needed is {needs}. It is not downloadable here: its makers publish it")
    arrays = read_arrays(path, ("image", "label"), cure="get a fresh copy")
    if "image" not in arrays:
        raise DataError(f"{path} lacks an array (image); needed is {needs}")
    return arrays


def read_arrays(path: Path, names: Sequence[str], *, cure: str) -> dict[str, Array]:
    """Those of these arrays that the file holds; no pickle in it is read."""
    try:
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in names if name in content}
    # A plain .npy file loads as an array, which is no context manager: that is the AttributeError or TypeError.
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is truncated, corrupt or not an .npz file ({error}); {cure}") from error
