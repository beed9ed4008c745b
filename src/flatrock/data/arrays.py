"""Data of one's own as arrays: what they must be, and every fault of both splits at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatrock.core.errors import DataError
from flatrock.data.dataset import Dataset, check
from flatrock.data.source import SplitName

Array = np.ndarray[Any, Any]
_KINDS = "inputs must be bytes (uint8) or floats in [0, 1], got {}; convert them, 0..255 by x.astype('float32') / 255"


@dataclass(frozen=True, eq=False)
class Part:
    """A split whose labels are sound, and how messages call it; x is None if it was not read, or has faults."""

    where: str
    x: Tensor | None
    y: Tensor
    classes: tuple[str, ...] = ()


def part(
    where: str, x: Array | Tensor | None, y: Array | Tensor, classes: Sequence[str]
) -> tuple[Part | None, list[str]]:
    """One split, None if nothing can be said of its labels, and what is wrong with it."""
    inputs, faults = (None, []) if x is None else _inputs(x)
    labels, wrong = _labels(y, None if x is None else len(x))
    found = None if labels is None else Part(where, None if faults else inputs, labels, tuple(classes))
    return found, [f"{where}: {fault}" for fault in (*faults, *wrong)]


def own_dataset(name: str, split: SplitName, parts: Mapping[SplitName, Part], faults: Sequence[str]) -> Dataset:
    """The split as a dataset whose classes are those of train, if that is there; DataError tells `faults` and more."""
    classes = next((p.classes for p in parts.values() if p.classes), ())
    leading = parts.get("train") or parts.get("test")
    count = len(classes) or (0 if leading is None else int(leading.y.max()) + 1)
    faults = [*faults, *(_between(parts, count) if parts else ())]
    if faults:
        heading = f"data {name!r} cannot be used:"
        raise DataError(f"{heading} {faults[0]}" if len(faults) == 1 else "\n  - ".join([heading, *faults]))
    x = parts[split].x
    assert x is not None
    return check(Dataset(name, x, parts[split].y, count, classes))


def _inputs(given: Array | Tensor) -> tuple[Tensor | None, list[str]]:
    """uint8 [N, C, H, W] or float32 [N, ...] in [0, 1], or what is wrong."""
    if given.ndim < 2 or not math.prod(given.shape):
        return None, [f"inputs must be [samples, ...], at least one of each, got shape {list(given.shape)}"]
    bytes_given = given.dtype in (torch.uint8, np.uint8)
    if isinstance(given, Tensor):
        x = given.detach().cpu()
        if bytes_given and x.dim() != 4:
            return None, [f"a uint8 tensor must hold images [N, C, H, W], got {list(x.shape)}; use floats in [0, 1]"]
        if not bytes_given and not x.is_floating_point():
            return None, [_KINDS.format(x.dtype)]
    elif bytes_given:
        return _pixels(given)
    elif given.dtype.kind == "f":
        x = torch.from_numpy(given.astype(np.float32))
    else:
        return None, [_KINDS.format(given.dtype)]
    x = (x if bytes_given else x.float()).contiguous()
    return x, [] if bytes_given else _value_faults(x)


def _pixels(image: Array) -> tuple[Tensor | None, list[str]]:
    """Images as numpy and Pillow have them, [N, H, W] grey or [N, H, W, C]."""
    if image.ndim == 3:
        image = image[..., None]
    if image.ndim != 4:
        return None, [f"uint8 images must be [N, H, W, C], or [N, H, W] if grey, got {list(image.shape)}"]
    if image.shape[1] in (1, 3) and image.shape[3] not in (1, 3):
        return None, [
            f"uint8 images are [N, H, W, C], got {list(image.shape)}, which looks like [N, C, H, W]; write "
            "image.transpose(0, 2, 3, 1)"
        ]
    return torch.from_numpy(np.ascontiguousarray(image.transpose(0, 3, 1, 2))), []


def _value_faults(x: Tensor) -> list[str]:
    odd = ~torch.isfinite(x).flatten(1).all(1)
    faults, sound = [], x[~odd] if bool(odd.any()) else x
    if len(sound) < len(x):
        first = int(odd.nonzero()[0])
        faults.append(
            f"{int(odd.sum())} of {len(x)} inputs hold NaN or infinity (first: sample {first}); leave them out"
        )
    if not len(sound):
        return faults
    low, high = (float(v) for v in torch.aminmax(sound))
    if low >= 0 and high <= 1:
        return faults
    cure = "scale them, train and test alike, and normalise inside the model (model.normalize)"
    if low >= 0 and high <= 255 and bool((sound == sound.round()).all()):
        cure = "divide by 255"
    return [*faults, f"inputs must lie in [0, 1], got [{low:.3g}, {high:.3g}]; {cure}"]


def _labels(given: Array | Tensor, samples: int | None) -> tuple[Tensor | None, list[str]]:
    """int64 [N], one per input, none below 0, or what is wrong."""
    y = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
    if y.dtype.kind not in "iu" or y.ndim != 1:
        cure = "; write label.argmax(1)" if y.ndim == 2 and y.shape[1] > 1 else "; write label.astype('int64')"
        return None, [f"labels must be whole numbers, one per input, got {y.dtype} {list(y.shape)}{cure}"]
    if samples is not None and len(y) != samples:
        return None, [f"{samples} inputs, but {len(y)} labels; give one each"]
    if not len(y):
        return None, ["there are no labels; give at least one sample"]
    if int(y.min()) < 0:
        first = int((y < 0).argmax())
        return None, [
            f"label {int(y[first])} of sample {first}: classes are numbered from 0; leave such samples out, or name "
            "their file with data.extra if they have no label (docs/flatness/rst.md)"
        ]
    return torch.from_numpy(y.astype(np.int64)), []


def _between(parts: Mapping[SplitName, Part], count: int) -> list[str]:
    """Faults that show when the splits are laid side by side."""
    train, test, faults = parts.get("train"), parts.get("test"), []
    if count < 2:
        faults.append(f"{next(iter(parts.values())).where}: there is one class; a classifier needs two or more")
    if train is not None:
        there = torch.from_numpy(np.unique(train.y.numpy()))
        holes = (there != torch.arange(len(there))).nonzero()
        hole = int(holes[0]) if len(holes) else len(there)
        if hole < count:
            faults.append(
                f"{train.where}: no sample has label {hole}, but classes are 0..{count - 1}; number them 0, 1, 2, ... "
                "without holes (np.unique(label, return_inverse=True)[1]), and name no other"
            )
    for one in parts.values():
        if one is not train or one.classes:
            faults += _too_high(one, count, "names" if one.classes or train is None else train.where)
    if train is not None and test is not None:
        if train.x is not None and test.x is not None and train.x.shape[1:] != test.x.shape[1:]:
            shapes = [list(one.x.shape[1:]) for one in (train, test) if one.x is not None]
            faults.append(f"{train.where} has inputs {shapes[0]}, {test.where} has {shapes[1]}; they must be alike")
        if train.classes and test.classes and train.classes != test.classes:
            faults.append(
                f"{train.where} and {test.where} name other classes ({_few(train.classes)}; {_few(test.classes)}); "
                "names and their order must agree"
            )
    return faults


def _too_high(one: Part, count: int, whose: str) -> list[str]:
    wrong = (one.y >= count).nonzero().flatten()
    if not len(wrong):
        return []
    first = int(wrong[0])
    known = f"there are {count} names" if whose == "names" else f"{whose} has classes 0..{count - 1}"
    label = f"label {int(one.y[first])} of sample {first} ({len(wrong)} such)"
    return [f"{one.where}: {label}, but {known}; they must agree"]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
