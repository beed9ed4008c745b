"""The datasets by name: how each is loaded, where its files are, how to get them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flatrock.core.errors import ConfigError
from flatrock.core.guests import is_own
from flatrock.core.progress import Progress, Silent
from flatrock.core.registry import Registry, unknown
from flatrock.data import cifar, digits, factory, idx, imagenet, moons, own_files, svhn
from flatrock.data import folder as images
from flatrock.data.dataset import Dataset
from flatrock.data.download import fetch
from flatrock.data.source import Source, SplitName

_SILENT = Silent()
_GIVEN = ("split", "folder")
# Names that options of a function cannot have, because `load_data` has them.
_TAKEN = (*_GIVEN, "download", "progress")

DATA: Registry[Dataset] = Registry("dataset")
DATA.add("digits", digits.load, "8x8 handwritten digits, 1297 train and 500 test; no download")
DATA.add("moons", moons.load, "two half circles in the plane, computed; options points and noise")
DATA.add(
    "cifar10",
    cifar.load,
    "32x32 colour photos in 10 classes, 50,000 train and 10,000 test",
    cite="Krizhevsky 2009",
    layout=cifar.CIFAR10,
)
DATA.add(
    "cifar100",
    cifar.load,
    "32x32 colour photos in 100 classes, 50,000 train and 10,000 test",
    cite="Krizhevsky 2009",
    layout=cifar.CIFAR100,
)
DATA.add("svhn", svhn.load, "32x32 house number digits, 73,257 train and 26,032 test", cite="Netzer et al. 2011")
DATA.add(
    "mnist",
    idx.load,
    "28x28 handwritten digits, 60,000 train and 10,000 test",
    cite="LeCun et al. 1998",
    kind=idx.MNIST,
)
DATA.add(
    "fashion_mnist",
    idx.load,
    "28x28 pictures of clothes, 60,000 train and 10,000 test",
    cite="Xiao et al. 2017",
    kind=idx.FASHION_MNIST,
)
DATA.add(
    "imagenet",
    imagenet.load,
    "224x224 colour photos in 1000 classes, 1,281,167 train and 50,000 test, read from your copy",
    cite="Russakovsky et al. 2015",
)
DATA.add("folder", images.load, "your own images in train/<class>/ and test/<class>/; options channels, size, resize")
DATA.add("npz", own_files.load, "your own arrays in train.npz and test.npz")

DATA_INFO: Mapping[str, Source] = MappingProxyType(
    {s.name: s for s in (digits.SOURCE, moons.SOURCE, *cifar.SOURCES.values(), svhn.SOURCE, *idx.SOURCES.values())}
    | {s.name: s for s in (imagenet.SOURCE, images.SOURCE, own_files.SOURCE)}
)
# What looks for damaged images in the files of a dataset, where it consists of such.
DAMAGED: Mapping[str, Callable[..., list[str]]] = MappingProxyType(
    {"folder": images.damaged, "imagenet": imagenet.damaged}
)


def default_folder() -> Path:
    """Where data is looked for unless told otherwise: $FLATROCK_DATA, or ./data."""
    return Path(os.environ.get("FLATROCK_DATA") or "data")


def info(name: str) -> Source:
    """Class count, input shape and files of a dataset; unknown names raise ConfigError.

    A function of the user's is not looked up: to use weights that were trained on its data, it need not be there.
    """
    return factory.source(name) if is_own(name) else DATA_INFO[DATA.entry(name).name]


def found(name: str, folder: Path | None = None) -> str | None:
    """Where all files of the dataset are, or None."""
    return info(name).find(folder or default_folder())


def check_name(name: str) -> None:
    """ConfigError unless this names data that can be made here."""
    if is_own(name):
        factory.find_function(name)
    else:
        DATA.entry(name)


def how_to_get(name: str) -> str:
    """What files the dataset needs, where they come from and where to put them."""
    return info(name).how_to_get()


def data_faults(name: str, options: Iterable[str]) -> list[str]:
    """What is wrong with this dataset name and these option names, all at once."""
    if not is_own(name) and name not in DATA:
        return DATA.faults(name, ())
    known = data_options(name, options)
    return [unknown(f"option of dataset {name!r}:", o, known) for o in options if o not in known]


def data_options(name: str, given: Iterable[str] = ()) -> list[str]:
    """Names of the options a dataset takes; of a function of the user's, asked when it is called, those `given`."""
    if is_own(name):
        return [o for o in given if o not in _TAKEN]
    return [o for o in DATA.entry(name).options() if o not in _GIVEN]


def load_data(
    name: str,
    split: SplitName,
    *,
    folder: Path | None = None,
    download: bool = False,
    progress: Progress = _SILENT,
    **options: Any,
) -> Dataset:
    """The train or test split of a dataset, from files in `folder`, which `download` fetches if they are not there.

    `file:function` names data that a function of your own makes (docs/data.md).
    """
    faults = data_faults(name, options)
    if faults:
        raise ConfigError.of(faults)
    place = folder or default_folder()
    if is_own(name):
        return factory.load(name, split, place, **options)
    source = info(name)
    if download and source.remote and source.find(place) is None:
        for file in source.remote:
            fetch(file, place / source.subfolder, progress)
    return DATA.make(name, split=split, folder=place, **options)
