"""Read a pickled dictionary of byte arrays, as Python versions of CIFAR are, without running what a pickle can ask for.

A pickle names functions and says what to call them with. Here no such name leads to a function of Python or numpy: the
three that arrays and bytes are written with lead to stand-ins that note what they are told, and any other is refused.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flatrock.core.errors import DataError, in_words
from flatrock.data.source import read

Array = np.ndarray[Any, Any]


def read_pickled(path: Path, *, cure: str) -> dict[str, Any]:
    """The entries of the dictionary: byte arrays as arrays, lists, numbers, text as bytes. DataError ends in `cure`."""
    raw = read(path)
    try:
        content = _Reader(raw).load()
        if isinstance(content, dict):
            return {_text(key): value.array() if isinstance(value, _Array) else value for key, value in content.items()}
    except _Refused as error:
        raise DataError(f"{path}: {error}; {cure}") from error
    except Exception as error:  # damage shows as anything, from EOFError to MemoryError
        raise DataError(f"{path} is truncated, corrupt or no pickle ({in_words(error)}); {cure}") from error
    raise DataError(f"{path} holds a {type(content).__name__}, expected a dictionary of arrays and lists; {cure}")


class _Refused(Exception):
    """A pickle asks for what data do not need."""


class _StandIn:
    """In the place of a function that a pickle names; an object of no state, so that a pickle can change nothing."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., object]) -> None:
        self._make = make

    def __call__(self, *args: object) -> object:
        return self._make(*args)

    def __setstate__(self, state: object) -> None:
        raise _Refused("it gives a state to a function, which no data need")


class _Bytes:
    """In the place of numpy's dtype of bytes, the only one there is."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, of which bytes have none."""


class _Array:
    """In the place of an array: its shape, order and bytes, once they are told."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: tuple[tuple[int, ...], bool, bytes] | None = None

    def __setstate__(self, state: Any) -> None:
        """numpy's (version, shape, dtype, whether in Fortran's order, content)."""
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Bytes) or not isinstance(content, bytes):
            raise _Refused("it holds an array of other things than bytes")
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("the shape of an array is no shape")
        if math.prod(shape) != len(content):
            raise ValueError(f"{len(content)} bytes for an array of shape {shape}")
        self._state = shape, bool(fortran), content

    def array(self) -> Array:
        """The array, new and writable."""
        if self._state is None:
            raise ValueError("an array without content")
        shape, fortran, content = self._state
        return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C").copy()


def _array(*args: object) -> _Array:
    """numpy's (ndarray, (0,), 'b'), always: an empty array, filled afterwards."""
    return _Array()


def _dtype(name: object, *args: object) -> _Bytes:
    if name not in ("u1", b"u1", "|u1", b"|u1"):
        raise _Refused(f"it holds an array of dtype {name!r}, expected bytes (u1)")
    return _Bytes()


def _encoded(text: object, encoding: object = "latin1") -> bytes:
    """How Python 3 writes bytes in the protocol of Python 2."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise _Refused(f"it encodes text in {encoding!r}, expected latin1")
    return text.encode("latin1")


def _never(*args: object) -> object:
    raise _Refused("it calls numpy.ndarray, which no data need")


_NAMES: Mapping[tuple[str, str], _StandIn] = {
    ("numpy.core.multiarray", "_reconstruct"): _StandIn(_array),  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _StandIn(_array),  # numpy 2
    ("numpy", "ndarray"): _StandIn(_never),
    ("numpy", "dtype"): _StandIn(_dtype),
    ("_codecs", "encode"): _StandIn(_encoded),
}


class _Reader(pickle.Unpickler):
    """Looks names up in _NAMES and nowhere else; text of Python 2 stays bytes."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="bytes")

    def find_class(self, module_name: str, global_name: str) -> Any:
        """The stand-in of this name."""
        found = _NAMES.get((module_name, global_name))
        if found is None:
            raise _Refused(
                f"it asks for {module_name}.{global_name}, which is not needed to hold images and was not run"
            )
        return found


def _text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)
