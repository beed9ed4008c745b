"""Image files: how one becomes pixels, and many that are read when they are needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, DataError, faults_of
from flatrock.core.options import count
from flatrock.core.progress import Progress

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
# Modes with 8 bits or less per channel; others would be clipped, not scaled, by a conversion.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
# Decoders and filters run outside of Python's lock, so threads are enough.
_THREADS = [min(os.cpu_count() or 1, 32)]
# Images between two signs of progress.
READ_TOGETHER = 1024
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What images become: grey or RGB; with `size` the square of that side in the middle of the image.

    Before it is cut out, the shorter side is made `resize` pixels long (`size` if not given), by Pillow's bilinear
    filter, which averages where images shrink. Lengths and places are rounded as torchvision does.
    """

    channels: int = 3
    size: int | None = None
    resize: int | None = None

    def __post_init__(self) -> None:
        good = self.channels in (1, 3)
        faults = [] if good else [f"channels must be 1 (grey) or 3 (RGB), got {self.channels!r}"]
        least = max(1, self.size) if isinstance(self.size, int) else 1
        for name, value, lowest in (("size", self.size, 1), ("resize", self.resize, least)):
            if value is not None:
                faults += faults_of(partial(count, "an image's", name, value, least=lowest))
        if self.resize is not None and self.size is None:
            faults.append(f"resize={self.resize!r} is the length before a square is cut out; give its size, too")
        if faults:
            raise ConfigError.of(faults)

    def pixels(self, path: Path) -> Array:
        """One image as uint8 [channels, H, W]; DataError if it cannot be read."""
        from PIL import Image

        try:
            with Image.open(path) as image:
                mode = image.mode
                found = self._made(image) if mode in MODES else None
        except Exception as error:  # Pillow's decoders raise many kinds of exception on damaged files
            raise DataError(f"{path} cannot be decoded ({error}); replace or remove it") from error
        if found is None:
            raise DataError(f"{path} has mode {mode}, which is not read; save it as RGB or grey, 8 bits per channel")
        return found[None] if self.channels == 1 else found.transpose(2, 0, 1)

    def _made(self, image: Any) -> Array:
        from PIL import Image

        image = image.convert("L" if self.channels == 1 else "RGB")
        if self.size is None:
            return np.asarray(image)
        short, wanted, size = min(image.size), self.resize or self.size, self.size
        sides = [wanted if side == short else int(wanted * side / short) for side in image.size]
        # The square alone is computed: of a very long image the rest would fill the memory.
        scales = [old / new for old, new in zip(image.size, sides, strict=True)]
        begin = [round((side - size) / 2) for side in sides]
        (left, top), (right, bottom) = (
            [(at + more) * scale for at, scale in zip(begin, scales, strict=True)] for more in (0, size)
        )
        box = (left, top, min(right, image.size[0]), min(bottom, image.size[1]))
        return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box))


def read_all(paths: Sequence[Path], form: Form) -> Tensor:
    """uint8 [N, channels, H, W]; DataError names the first image that is damaged or of another size than the first."""
    first = form.pixels(paths[0])
    stack = np.empty((len(paths), *first.shape), dtype=np.uint8)

    def read(i: int) -> None:
        image = form.pixels(paths[i])
        if image.shape != first.shape:
            height, width = image.shape[1:]
            raise DataError(
                f"{paths[i]} is {width}x{height}, but {paths[0]} is {first.shape[2]}x{first.shape[1]}; "
                "give data.size to have squares of one size cut out (without a recipe: --data folder:size=64)"
            )
        stack[i] = image

    for _ in _pool().map(read, range(len(paths))):
        pass
    return torch.from_numpy(stack)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS[0], thread_name_prefix="flatrock-pictures")


def share_cores(processes: int) -> None:
    """Before the first image is read: so many processes on this machine read, too."""
    _THREADS[0] = max(1, _THREADS[0] // processes)


def damaged(root: Path, names: Sequence[str], form: Form, progress: Progress) -> list[str]:
    """What is wrong with every file that cannot be read; reads all of them."""

    def fault(name: str) -> str:
        try:
            form.pixels(root / name)
        except DataError as error:
            return str(error)
        return ""

    found: list[str] = []
    progress.begin(f"reading {root.name}", len(names))
    for first in range(0, len(names), READ_TOGETHER):
        told = list(_pool().map(fault, names[first : first + READ_TOGETHER]))
        found += filter(None, told)
        progress.advance(len(told), f"{len(found)} damaged")
    progress.end()
    return found


class Pictures:
    """Images in files, read each time they are asked for: of more than fit into memory.

    Stands where a dataset has a uint8 tensor [N, channels, size, size].
    """

    dtype = torch.uint8
    device = torch.device("cpu")

    def __init__(self, root: Path, names: Sequence[str], form: Form) -> None:
        if form.size is None:
            raise ConfigError("images that are read when they are needed are made one size; give data.size")
        self.root, self.names, self._form = root, names, form
        self.shape = (len(names), form.channels, form.size, form.size)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """The images at these positions, decoded."""
        if not len(indices):
            return torch.empty(0, *self.shape[1:], dtype=self.dtype)
        try:
            return read_all([self.root / self.names[i] for i in indices.tolist()], self._form)
        except DataError as error:
            raise DataError(
                f"{error} (an intact copy of the same name, if a run is to go on with it; `flatrock check RECIPE "
                "--every-image` finds all such files)"
            ) from error

    def pick(self, indices: Tensor) -> Pictures:
        """The files at these positions, not read."""
        return Pictures(self.root, [self.names[i] for i in indices.tolist()], self._form)
