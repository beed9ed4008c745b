"""What a dataset is made of on disk, where it comes from, and how its absence is explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatrock.core.errors import ConfigError, DataError
from flatrock.core.registry import unknown
from flatrock.data.download import RemoteFile

SplitName = Literal["train", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "test")


@dataclass(frozen=True)
class Source:
    """Facts about one dataset; a None among them means that the files decide."""

    name: str
    num_classes: int | None
    input_shape: tuple[int, ...] | None
    train_size: int | None
    needs: str
    find: Callable[[Path], str | None]
    remote: tuple[RemoteFile, ...] = ()
    subfolder: str = ""

    def how_to_get(self) -> str:
        """What is needed, where it comes from and where to put it."""
        if not self.remote:
            return self.needs
        size = sum(file.size for file in self.remote) / 1e6
        site = self.remote[0].urls[0].removesuffix(self.remote[0].filename)
        names = ", ".join(file.filename for file in self.remote)
        return (
            f"needs {self.needs}; get {names} ({size:.0f} MB) from {site}, put it in a folder and pass "
            "--data-dir FOLDER (or set FLATROCK_DATA=FOLDER), or train with --download"
        )

    def missing(self, what: str, folder: Path) -> DataError:
        """The error for a file that is not there."""
        return DataError(f"{what} not found in {folder.absolute()}; {self.name}: {self.how_to_get()}")


def check_split(split: str) -> None:
    """ConfigError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        raise ConfigError(unknown("split", split, SPLITS))


def read(path: Path) -> bytes:
    """The bytes of a file, or a DataError that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the path and its permissions") from error
