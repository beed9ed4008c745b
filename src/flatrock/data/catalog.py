"""The datasets by name: how each is loaded, where its files are, how to get them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flatrock.core import spelled
from flatrock.core.errors import ConfigError, faults_of, shown
from flatrock.core.guests import is_own
from flatrock.core.numbers import plain
from flatrock.core.progress import Progress, Silent
from flatrock.core.registry import Registry, unknown
from flatrock.data import cifar, digits, factory, idx, imagenet, moons, own_files, pictures, svhn
from flatrock.data import folder as images
from flatrock.data.dataset import Dataset
from flatrock.data.download import fetch
from flatrock.data.source import Source, SplitName

_SILENT = Silent()
# A dataset in words, with its options.
Spec = str | Mapping[str, Any]
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
# What refuses wrong values of a dataset's options before anything is read.
_CHECKED: Mapping[str, Callable[..., object]] = MappingProxyType(
    {"folder": pictures.Form, "moons": moons.check_options}
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


def parse_data(spec: Spec) -> tuple[str, dict[str, Any]]:
    """The name and the options of `folder:size=64`, or of the mapping {name: folder, size: 64} that says the same."""
    if isinstance(spec, str):
        return spelled.parsed("data", spec, DATA.__contains__)
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise ConfigError(
            f"data is named by text such as 'folder:size=64' or by a mapping with 'name', got {shown(spec)}"
        )
    return spec["name"], spelled.valued({key: value for key, value in spec.items() if key != "name"})


def check_data(name: str, options: Mapping[str, Any]) -> None:
    """ConfigError with all that is wrong with a dataset's name and its options, before anything is read or made."""
    if is_own(name):
        factory.check_options(name, options)
        return
    known = data_options(name)
    faults = [unknown(f"option of dataset {name!r}:", o, known) for o in options if o not in known]
    given = {o: plain(value) for o, value in options.items() if o in known}
    if faults := faults + (faults_of(lambda: _CHECKED[name](**given)) if name in _CHECKED else []):
        raise ConfigError.of(faults)


def how_to_get(name: str) -> str:
    """What files the dataset needs, where they come from and where to put them."""
    return info(name).how_to_get()


def data_options(name: str, given: Iterable[str] = ()) -> list[str]:
    """Names of the options a dataset takes; of a function of the user's, asked when it is called, those `given`."""
    if is_own(name):
        return [o for o in given if o not in factory.TAKEN]
    return [o for o in DATA.entry(name).options() if o not in factory.GIVEN]


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
    check_data(name, options)
    place = folder or default_folder()
    if is_own(name):
        return factory.load(name, split, place, **options)
    source = info(name)
    if download and source.remote and source.find(place) is None:
        for file in source.remote:
            fetch(file, place / source.subfolder, progress)
    return DATA.make(name, split=split, folder=place, **options)
