"""A dataset is a few tensors: images (or the files they are in), labels and the identity of each sample."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatrock.core.errors import DataError
from flatrock.data.pictures import Pictures

UNLABELLED = -1
# Images that are looked at to know a dataset that stays in its files.
LOOKED_AT = 256


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples x with labels y.

    x is uint8 [N, C, H, W], meaning value/255, or float32 [N, ...] in [0, 1]; Pictures stay in their files. `ids` is
    the original index of each sample (0..N-1 when left out): random numbers belong to it, so it survives `subset`.
    """

    name: str
    x: Tensor | Pictures
    y: Tensor
    num_classes: int
    class_names: tuple[str, ...] = ()
    ids: Tensor = field(default_factory=_no_ids)

    def __post_init__(self) -> None:
        if self.ids.numel() == 0:
            object.__setattr__(self, "ids", torch.arange(len(self.x), device=self.x.device))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    def subset(self, indices: Tensor) -> Dataset:
        """The samples at these positions, with their ids."""
        indices = indices.to(self.x.device)
        x = self.x.pick(indices) if isinstance(self.x, Pictures) else self.x[indices]
        return replace(self, x=x, y=self.y[indices], ids=self.ids[indices])

    def to(self, device: torch.device | str) -> Dataset:
        """The same dataset with its tensors on `device`; one that stays in its files stays as it is."""
        if isinstance(self.x, Pictures):
            return self
        return replace(self, x=self.x.to(device), y=self.y.to(device), ids=self.ids.to(device))

    def pixels(self, indices: Tensor) -> Tensor:
        """The inputs at these positions as they are kept."""
        return self.x[indices.to(self.x.device)]

    def images(self, indices: Tensor) -> Tensor:
        """The inputs at these positions as float32 in [0, 1]."""
        return scaled(self.pixels(indices))

    def fingerprint(self) -> str:
        """sha256 of the content: shape, type and bytes of x and y, and the number of classes.

        Of x in files: their names, and the bytes of LOOKED_AT images from the first to the last; all of them would take
        as long as an epoch to read.
        """
        digest, x = hashlib.sha256(), self.x
        if isinstance(x, Pictures):
            digest.update("".join(f"{name}\n" for name in x.names).encode())
            x = self.pixels(torch.linspace(0, len(self) - 1, min(len(self), LOOKED_AT), dtype=torch.float64).long())
        for part in (x, self.y):
            digest.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
            digest.update(part.cpu().contiguous().numpy().data)
        digest.update(f"{self.num_classes} classes".encode())
        return digest.hexdigest()


def scaled(x: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]; floats as they are."""
    if x.dtype != torch.uint8:
        return x
    # A tensor divisor, because CUDA turns division by a Python number into a product with its rounded inverse, and a
    # pixel must be the same number on every device.
    return x.float() / torch.full((), 255.0, device=x.device)


def check(dataset: Dataset, *, unlabelled: bool = False) -> Dataset:
    """Return the dataset if it keeps its promises, else DataError. `unlabelled` also permits the label -1."""
    _check_lengths(dataset)
    _check_inputs(dataset)
    _check_labels(dataset, lowest=UNLABELLED if unlabelled else 0)
    return dataset


def _check_lengths(dataset: Dataset) -> None:
    x, y, ids = dataset.x, dataset.y, dataset.ids
    if len(x.shape) < 2 or y.dim() != 1 or ids.dim() != 1:
        raise DataError(
            f"dataset {dataset.name!r}: x must be [N, ...], y and ids [N]; "
            f"got x {tuple(x.shape)}, y {tuple(y.shape)}, ids {tuple(ids.shape)}"
        )
    if not len(x) == len(y) == len(ids):
        raise DataError(
            f"dataset {dataset.name!r}: {len(x)} inputs, {len(y)} labels and {len(ids)} ids; give one label per input"
        )
    if not math.prod(x.shape):
        raise DataError(f"dataset {dataset.name!r} is empty (x has shape {tuple(x.shape)}); give at least one sample")


def _check_inputs(dataset: Dataset) -> None:
    x = dataset.x
    if isinstance(x, Pictures) or x.dtype == torch.uint8:
        if len(x.shape) != 4:
            raise DataError(
                f"dataset {dataset.name!r}: uint8 inputs must be images [N, C, H, W], got shape {tuple(x.shape)}"
            )
        return
    if x.dtype != torch.float32:
        raise DataError(f"dataset {dataset.name!r}: inputs must be uint8 or float32, got {x.dtype}; convert them")
    low, high = (float(v) for v in torch.aminmax(x))
    # Written so that NaN, which compares false with everything, is refused as well.
    if not (low >= 0 and high <= 1):
        raise DataError(
            f"dataset {dataset.name!r}: inputs must lie in [0, 1] without NaN, got [{low:.3g}, {high:.3g}]; "
            "scale them, and put normalisation inside the model"
        )


def _check_labels(dataset: Dataset, *, lowest: int) -> None:
    y, classes = dataset.y, dataset.num_classes
    if y.dtype != torch.int64:
        raise DataError(f"dataset {dataset.name!r}: labels must be int64 class indices, got {y.dtype}; use y.long()")
    wrong = ((y < lowest) | (y >= classes)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"dataset {dataset.name!r}: label {int(y[first])} of sample {first} is outside {lowest}..{classes - 1} "
            f"({len(wrong)} such labels); correct the labels or num_classes={classes}"
        )
    if dataset.class_names and len(dataset.class_names) != classes:
        raise DataError(
            f"dataset {dataset.name!r}: {len(dataset.class_names)} class names for {classes} classes; give one each"
        )
