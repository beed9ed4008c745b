"""CIFAR's Python version: read as its binary version is, and nothing in it is ever run."""

from __future__ import annotations

import builtins
import functools
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatrock.core.errors import DataError
from flatrock.data import cifar
from flatrock.data.catalog import found, how_to_get
from flatrock.data.cifar import CIFAR10, CIFAR100, Layout
from flatrock.data.pickled import read_pickled

COUNTS = {("cifar10", "train"): 20, ("cifar10", "test"): 30, ("cifar100", "train"): 40, ("cifar100", "test"): 10}
BOTH = pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.name)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "RECORDS", COUNTS)


def of_python2(value: object) -> bytes:
    """As cPickle of Python 2 writes it in protocol 2: text and bytes alike as byte strings, arrays by numpy 1."""

    def written(value: object) -> bytes:
        if isinstance(value, dict):
            return b"}(" + b"".join(written(k) + written(v) for k, v in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(written, value)) + b"e"
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, bytes):
            return b"T" + struct.pack("<I", len(value)) + value
        assert isinstance(value, np.ndarray)
        shape = b"(" + b"".join(map(written, value.shape)) + b"t"
        dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        return made + b"(K\x01" + shape + dtype + b"\x89" + written(value.tobytes()) + b"tb"

    return b"\x80\x02" + written(value) + b"."


def of_numpy1(value: object) -> bytes:
    """As Python 3 with numpy 1 writes it."""
    return pickle.dumps(value, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def of_numpy2(value: object) -> bytes:
    """As Python 3 with numpy 2 writes it."""
    return pickle.dumps(value, protocol=2).replace(b"numpy.core.multiarray", b"numpy._core.multiarray")


Writer = Callable[[object], bytes]
WRITERS = pytest.mark.parametrize("writer", [of_python2, of_numpy1, of_numpy2])


def contents(layout: Layout, split: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Labels [n, label bytes] and pixels of each file of a split."""
    n, drawn = COUNTS[layout.name, split], []
    for seed, _ in enumerate(layout.files[split]):  # type: ignore[index]
        rng = np.random.default_rng([seed, n])
        labels = np.stack([rng.integers(0, limit, n) for limit in layout.label_limits], axis=1)
        drawn.append((labels, rng.integers(0, 256, (n, 3072)).astype(np.uint8)))
    return drawn


def batch(layout: Layout, labels: np.ndarray, pixels: np.ndarray) -> dict[bytes, object]:
    """The dictionary of one file, with what else the official ones hold."""
    lists = {key.encode(): labels[:, i].tolist() for i, key in enumerate(layout.pickled.labels)}
    names = [b"photo_%d.png" % i for i in range(len(pixels))]
    return {b"batch_label": b"batch", **lists, b"data": pixels, b"filenames": names}


def write(layout: Layout, folder: Path, writer: Writer = of_python2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        for name, part in zip(layout.pickled.files[split], contents(layout, split), strict=True):  # type: ignore[index]
            (folder / name).write_bytes(writer(batch(layout, *part)))


def write_binary(layout: Layout, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        for name, part in zip(layout.files[split], contents(layout, split), strict=True):  # type: ignore[index]
            np.concatenate(part, axis=1).astype(np.uint8).tofile(folder / name)


@BOTH
@WRITERS
@pytest.mark.parametrize("split", ["train", "test"])
def test_same_samples_in_the_same_order_as_the_binary_version(
    layout: Layout, writer: Writer, split: Any, tmp_path: Path
) -> None:
    write(layout, tmp_path / "py" / layout.pickled.subfolder, writer)
    write_binary(layout, tmp_path / "bin" / layout.subfolder)
    read, expected = (cifar.load(split, tmp_path / place, layout=layout) for place in ("py", "bin"))
    assert read.fingerprint() == expected.fingerprint()
    assert read.ids.equal(expected.ids)
    assert (read.name, read.class_names) == (expected.name, expected.class_names)
    assert found(layout.name, tmp_path / "py") == str(tmp_path / "py" / layout.pickled.subfolder)


@BOTH
def test_its_archive_is_unpacked_and_its_folder_can_be_named_itself(layout: Layout, tmp_path: Path) -> None:
    write(layout, tmp_path / "made")
    archive = tmp_path / layout.pickled.archive
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted((tmp_path / "made").iterdir()):
            tar.add(path, f"{layout.pickled.subfolder}/{path.name}")
    assert found(layout.name, tmp_path) == str(archive)
    data = cifar.load("test", tmp_path, layout=layout)
    assert data.fingerprint() == cifar.load("test", tmp_path / "made", layout=layout).fingerprint()
    assert sorted(p.name for p in (tmp_path / layout.pickled.subfolder).iterdir()) == sorted(layout.pickled.all_files)
    assert layout.pickled.archive in how_to_get(layout.name)


def test_binary_version_is_preferred(tmp_path: Path) -> None:
    write_binary(CIFAR100, tmp_path / CIFAR100.subfolder)
    (tmp_path / CIFAR100.pickled.subfolder).mkdir()
    for name in ("train", "test"):
        (tmp_path / CIFAR100.pickled.subfolder / name).write_bytes(b"not read")
    assert len(cifar.load("train", tmp_path, layout=CIFAR100)) == 40


def test_arrays_in_fortrans_order_mean_the_same(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    (tmp_path / "f").write_bytes(pickle.dumps({"a": np.asfortranarray(array)}, protocol=2))
    assert np.array_equal(read_pickled(tmp_path / "f", cure="")["a"], array)


# What must never run


class Calls:
    """Pickled as a call of this function with these arguments."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def bombs(mark: str) -> dict[str, bytes]:
    """By the name that must be told; each would leave `mark` if it ran, or do what only code can."""
    code = f"__import__('os').mkdir({mark!r})"
    made: dict[str, Any] = {
        f"{os.system.__module__}.system": Calls(os.system, f"mkdir {mark}"),
        f"{os.name}.mkdir": Calls(os.mkdir, mark),
        "eval": Calls(builtins.eval, code),
        "exec": Calls(builtins.exec, code),
        "getattr": Calls(builtins.getattr, 1, "real"),
        "functools.partial": Calls(functools.partial, os.mkdir, mark),
        "fromfile": Calls(np.fromfile, __file__),
        "numpy.load": Calls(np.load, __file__),
        "numpy.memmap": Calls(np.memmap, __file__),
        "numpy.uint8": Calls(np.uint8, 3),
    }
    inside = {name: pickle.dumps({b"data": bomb}, protocol=2) for name, bomb in made.items()}
    inside["os.system"] = b"\x80\x02cos\nsystem\n(U" + bytes([len(mark) + 6]) + f"mkdir {mark}".encode() + b"tR."
    inside["numpy.core.multiarray.fromfile"] = b"\x80\x02cnumpy.core.multiarray\nfromfile\n."
    inside["numpy.core.multiarray._reconstruct.__globals__"] = (
        b"\x80\x04\x8c\x15numpy.core.multiarray\x8c\x18_reconstruct.__globals__\x93."
    )
    inside["nowhere.nothing"] = b"\x80\x02cnowhere\nnothing\n."
    return inside


@pytest.mark.parametrize("name", bombs("mark"))
def test_a_pickle_that_asks_for_code_is_refused_by_name_and_not_run(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    write(CIFAR100, tmp_path)
    (tmp_path / "test").write_bytes(bombs(str(mark))[name])
    with pytest.raises(DataError, match=rf"test: it asks for [\w.]*{name}, which .* was not run; delete it and get a"):
        cifar.load("test", tmp_path, layout=CIFAR100)
    assert not mark.exists()


def test_the_bombs_are_live(tmp_path: Path) -> None:
    """Plain unpickling runs them, so that the test above can fail."""
    for name in ("posix.system", "posix.mkdir", "eval", "exec", "os.system"):
        mark = tmp_path / name
        pickle.loads(bombs(str(mark))[name])
        assert mark.is_dir()


BYTES = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
NAMED = b"}U\x04data"
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
ODD = {
    "gives a state to a function": b"cnumpy\ndtype\n}b.",
    "gives a state to a function, whose attributes it would set": b"cnumpy\ndtype\n(N}U\x05_makeNstb.",
    "calls numpy.ndarray": b"cnumpy\nndarray\n(K\x02tR.",
    "array of dtype b'O8'": b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR.",
    "array of other things than bytes": EMPTY + b"(K\x01(K\x01t" + BYTES + b"\x89](K\x07etb.",
    "encodes text in b'rot13'": b"c_codecs\nencode\n(X\x01\x00\x00\x00aU\x05rot13tR.",
    "3 bytes for an array of shape": NAMED + EMPTY + b"(K\x01(K\x05t" + BYTES + b"\x89U\x03abctbs.",
    "the shape of an array is no shape": b"}U\x04data"
    + EMPTY
    + b"(K\x01(J\xff\xff\xff\xfft"
    + BYTES
    + b"\x89U\x00tbs.",
    "an array without content": NAMED + EMPTY + b"s.",
    "persistent": b"U\x01aQ.",
    "holds a list, expected a dictionary": b"].",
    "truncated, corrupt or no pickle": b"}U\x04da",
    "truncated, corrupt or no pickle .EOFError": b"",
}


@pytest.mark.parametrize("fault", ODD)
def test_odd_pickles_are_refused(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_bytes(b"\x80\x02" + ODD[fault] if ODD[fault] else b"")
    with pytest.raises(DataError, match=fault.partition(", whose")[0]) as raised:
        read_pickled(path, cure="get another")
    assert str(path) in str(raised.value)
    assert str(raised.value).endswith("get another")


def test_a_class_is_not_made_without_its_function(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"\x80\x02cnumpy\nndarray\n(K\x02t\x81.")
    with pytest.raises(DataError, match="corrupt"):
        read_pickled(tmp_path / "new", cure="")


# Files that are not what their names say


def _change(layout: Layout, folder: Path, **changes: object) -> None:
    """The test file with other entries; None leaves one out."""
    content = batch(layout, *contents(layout, "test")[0]) | {k.encode(): v for k, v in changes.items()}
    name = layout.pickled.files["test"][0]
    (folder / name).write_bytes(of_numpy2({k: v for k, v in content.items() if v is not None}))


WRONG: dict[str, dict[str, Any]] = {
    "test_batch lacks labels; ": {"labels": None},
    "test_batch lacks data; ": {"data": None},
    r"data must be bytes \[N, 3072\], got \[30, 3071\]": {"data": np.zeros((30, 3071), dtype=np.uint8)},
    r"data must be bytes \[N, 3072\], got list": {"data": [1]},
    "labels must be a list of 30 whole numbers": {"labels": [0] * 29},
    "labels must be a list of 30 whole numbers; delete": {"labels": [0.5] * 30},
    "record 2 has label 10, expected 0..9": {"labels": [0, 1, 10] + [0] * 27},
    "record 0 has label -1, expected 0..9": {"labels": [-1] * 30},
    "record 0 has label 256, expected 0..9": {"labels": [256] * 30},
    "record 0 has label 1180591620717411303424, expected 0..9": {"labels": [2**70] * 30},
    "holds 29 records, expected 30": {"labels": [0] * 29, "data": np.zeros((29, 3072), dtype=np.uint8)},
    "array of dtype 'f4', expected bytes": {"data": np.zeros((30, 3072), dtype=np.float32)},
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_content_is_named_with_its_cure(fault: str, tmp_path: Path) -> None:
    write(CIFAR10, tmp_path)
    _change(CIFAR10, tmp_path, **WRONG[fault])
    with pytest.raises(DataError, match=fault) as raised:
        cifar.load("test", tmp_path, layout=CIFAR10)
    assert "get a fresh copy of cifar-10-python.tar.gz from https://www.cs.toronto.edu" in str(raised.value)


@BOTH
def test_truncated_file_is_named(layout: Layout, tmp_path: Path) -> None:
    write(layout, tmp_path)
    path = tmp_path / layout.pickled.files["test"][0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"{path.name} is truncated, corrupt or no pickle.*fresh copy"):
        cifar.load("test", tmp_path, layout=layout)


def test_missing_file_among_others_is_named(tmp_path: Path) -> None:
    write(CIFAR10, tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(DataError, match=r"data_batch_4 \(the other 4 files are there\) not found in .*batches-py"):
        cifar.load("train", tmp_path, layout=CIFAR10)
    assert len(cifar.load("test", tmp_path, layout=CIFAR10)) == 30


def test_an_empty_folder_of_that_name_is_not_the_data(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match=r"not found in .*the Python version \(cifar-10-python.tar.gz or "):
        cifar.load("train", tmp_path, layout=CIFAR10)
