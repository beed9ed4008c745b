from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatrock.core.errors import ConfigError, DataError
from flatrock.core.progress import Progress, Silent
from flatrock.data import catalog, cifar
from flatrock.data.catalog import (
    DATA,
    DATA_INFO,
    check_data,
    default_folder,
    found,
    how_to_get,
    info,
    load_data,
    parse_data,
)
from flatrock.data.download import RemoteFile

NAMES = ["digits", "moons", "cifar10", "cifar100", "svhn", "mnist", "fashion_mnist", "imagenet", "folder", "npz"]


def test_every_row_has_a_summary_and_facts() -> None:
    assert DATA.names() == NAMES
    assert set(DATA_INFO) == set(NAMES)
    for entry in DATA:
        assert entry.summary
        assert info(entry.name).name == entry.name
        assert entry.options()[:2] == ("split", "folder")
    assert info("cifar100").num_classes == 100
    assert info("mnist").input_shape == (1, 28, 28)
    assert info("folder").num_classes is None
    assert (info("npz").num_classes, info("npz").input_shape, info("npz").train_size) == (None, None, None)


@pytest.mark.parametrize("name", ["digits", "moons"])
def test_facts_agree_with_what_is_loaded(name: str, tmp_path: Path) -> None:
    data = load_data(name, "test", folder=tmp_path)
    assert (data.num_classes, data.input_shape) == (info(name).num_classes, info(name).input_shape)
    assert data.name == name
    assert found(name, tmp_path) is not None


@pytest.mark.parametrize("name", NAMES[2:])
def test_files_not_there_are_explained(name: str, tmp_path: Path) -> None:
    assert found(name, tmp_path) is None
    with pytest.raises(DataError, match=rf"not found in {tmp_path}.*--data-dir FOLDER"):
        load_data(name, "train", folder=tmp_path)
    assert "--data-dir FOLDER" in how_to_get(name)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "mnist", "fashion_mnist"])
def test_remote_files_are_well_formed(name: str) -> None:
    lengths = {"sha256": 64, "md5": 32}
    for file in info(name).remote:
        kind, digest = file.checksum.split(":")
        assert len(digest) == lengths[kind]
        assert set(digest) <= set("0123456789abcdef")
        assert file.size > 1000
        assert all(url.startswith("http") and url.endswith("/" + file.filename) for url in file.urls)
    assert info(name).remote[0].filename in how_to_get(name)


def test_default_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLATROCK_DATA", raising=False)
    assert default_folder() == Path("data")
    monkeypatch.setenv("FLATROCK_DATA", str(tmp_path))
    assert default_folder() == tmp_path
    (tmp_path / "train").mkdir()
    assert found("folder") == f"{tmp_path} (train)"
    with pytest.raises(DataError, match=str(tmp_path)):
        load_data("svhn", "test")


def test_unknown_names_and_options_list_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown dataset 'cifar11'; known: .*did you mean 'cifar10'"):
        load_data("cifar11", "train", folder=tmp_path)
    with pytest.raises(ConfigError, match="unknown dataset 'mnits'"):
        found("mnits", tmp_path)
    with pytest.raises(
        ConfigError, match=r"unknown option .*'moons': 'nois'; known: noise, points; did you mean 'noise'"
    ):
        load_data("moons", "train", folder=tmp_path, nois=0.2)
    with pytest.raises(ConfigError) as raised:
        check_data("moons", {"a": 1, "b": 2, "noise": 0.1})
    assert len(raised.value.faults) == 2
    with pytest.raises(ConfigError, match="unknown option of dataset 'cifar10': 'layout'; known: none"):
        check_data("cifar10", {"layout": cifar.CIFAR10})
    check_data("folder", {"channels": 1})
    with pytest.raises(ConfigError, match="unknown split 'val'"):
        load_data("digits", "val", folder=tmp_path)  # type: ignore[arg-type]


def test_a_dataset_with_options_in_words_and_as_a_mapping() -> None:
    for spec in ("folder:size=64:channels=1", {"name": "folder", "size": 64, "channels": "1"}):
        assert parse_data(spec) == ("folder", {"size": 64, "channels": 1})
    assert parse_data("mydata:make:n=200") == ("mydata:make", {"n": 200})
    for wrong in (3, {"size": 64}, {"name": None}):
        with pytest.raises(ConfigError, match=r"named by text such as 'folder:size=64' or by a mapping .*, got"):
            parse_data(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "faults"),
    [
        ("folder", {"siz": 1, "channels": 2, "size": 0}, ["option of dataset 'folder': 'siz'", "got 2", "got 0"]),
        ("folder", {"size": 8, "resize": 7}, ["an image's resize must be a whole number >= 8, got 7"]),
        ("folder", {"resize": 7}, ["resize=7 is the length before a square is cut out; give its size, too"]),
        ("moons", {"nois": 0, "points": 1}, ["'moons': 'nois'", "needs points >= 2 and noise >= 0, got points=1"]),
        ("digits", {"size": 8}, ["unknown option of dataset 'digits': 'size'; known: none"]),
    ],
)
def test_all_faults_of_options_are_told_before_anything_is_read(
    name: str, options: dict[str, Any], faults: list[str]
) -> None:
    for refuses in (lambda: check_data(name, options), lambda: load_data(name, "test", folder=Path("no"), **options)):
        with pytest.raises(ConfigError) as raised:
            refuses()
        assert len(raised.value.faults) == len(faults)
        assert all(part in fault for part, fault in zip(faults, raised.value.faults, strict=True))


def test_options_reach_the_loader(tmp_path: Path) -> None:
    assert len(load_data("moons", "train", folder=tmp_path, points=10)) == 10


def _fake_fetch(log: list[Path]) -> object:
    def fetch(source: RemoteFile, folder: Path, progress: Progress) -> Path:
        """Leaves an unpacked CIFAR-100 instead of its archive."""
        log.append(folder / source.filename)
        (folder / "cifar-100-binary").mkdir()
        for name, n in (("train.bin", 4), ("test.bin", 3)):
            np.zeros((n, 3074), dtype=np.uint8).tofile(folder / "cifar-100-binary" / name)
        return folder / source.filename

    return fetch


def test_download_happens_only_if_asked_and_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Path] = []
    monkeypatch.setattr(catalog, "fetch", _fake_fetch(log))
    monkeypatch.setattr(cifar, "RECORDS", {("cifar100", "train"): 4, ("cifar100", "test"): 3})
    with pytest.raises(DataError, match="not found"):
        load_data("cifar100", "test", folder=tmp_path)
    assert log == []
    for _ in range(2):
        data = load_data("cifar100", "test", folder=tmp_path, download=True, progress=Silent())
        assert len(data) == 3
    assert log == [tmp_path / "cifar-100-binary.tar.gz"]


def test_datasets_with_equal_file_names_download_into_their_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[Path] = []

    def fetch(source: RemoteFile, folder: Path, progress: Progress) -> Path:
        targets.append(folder / source.filename)
        return targets[-1]

    monkeypatch.setattr(catalog, "fetch", fetch)
    for name in ("mnist", "fashion_mnist"):
        with pytest.raises(DataError, match="not found"):
            load_data(name, "train", folder=tmp_path, download=True)
    assert len(set(targets)) == 8
    assert {p.parent.relative_to(tmp_path).as_posix() for p in targets} == {"MNIST/raw", "FashionMNIST/raw"}


def test_import_needs_only_torch_and_numpy() -> None:
    code = (
        "import sys\n"
        "import flatrock.data.catalog, flatrock.data.loader, flatrock.data.npz, flatrock.data.split\n"
        "print(sorted({'sklearn', 'scipy', 'PIL', 'yaml', 'pydantic'} & {m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
