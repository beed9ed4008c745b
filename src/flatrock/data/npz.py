"""Extra training images from an .npz file: generated, or pseudo-labelled by another model."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatrock.core.errors import DataError
from flatrock.data.dataset import Dataset, check

NEEDS = "an .npz file with `image` uint8 [M, H, W, C] and `label` integers [M], -1 where there is no label"


def load(path: Path, *, num_classes: int) -> Dataset:
    """uint8 [M, C, H, W] with the labels of the file; label -1 (unlabelled) is kept."""
    if not path.is_file():
        raise DataError(f"{path} not found; extra data is {NEEDS}. It is not downloadable here: its makers publish it")
    image, label = _arrays(path)
    if image.dtype != np.uint8 or image.ndim != 4:
        raise DataError(f"{path}: image must be uint8 [M, H, W, C], got {image.dtype} {list(image.shape)}; convert it")
    if label.dtype.kind not in "iu" or label.shape != image.shape[:1]:
        raise DataError(
            f"{path}: label must be {image.shape[0]} integers, one per image, got {label.dtype} {list(label.shape)}"
        )
    x = torch.from_numpy(np.ascontiguousarray(image.transpose(0, 3, 1, 2)))
    y = torch.from_numpy(label.astype(np.int64))
    return check(Dataset(path.name, x, y, num_classes), unlabelled=True)


def _arrays(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return content["image"], content["label"]
    except KeyError as error:
        raise DataError(f"{path} lacks an array ({error.args[0]}); needed is {NEEDS}") from error
    # A plain .npy file loads as an array, which is no context manager: that is the AttributeError or TypeError.
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is truncated, corrupt or not an .npz file ({error}); get a fresh copy") from error
