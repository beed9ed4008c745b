"""Writing so that a crash or a full disk never leaves half a file behind, and reading what may be damaged."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from flatrock.core.errors import StateError
from flatrock.core.numbers import scaled

T = TypeVar("T")


def write_atomic(path: Path, content: bytes, *, older: Path | None = None) -> None:
    """Write beside the target, force it to disk, then rename: readers see the old file or the whole new one.

    With `older`, the file that was there before is kept under that name.
    """
    part = path.with_name(f".{path.name}.part")
    kept = ""
    try:
        kept = ". The previous file is intact" if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        if older is not None and path.exists():
            path.replace(older)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StateError(
            f"could not write {path} ({scaled(len(content), 'B')}): {error.strerror or error}; "
            f"free space or choose another folder (a run continues with --resume){kept}"
        ) from error


def read_record(path: Path, schema: str, make: Callable[[dict[str, Any]], T], command: str) -> T | None:
    """What `make` makes of a JSON file of this schema ("name/version"); None for a JSON file that is something else.

    StateError says what is wrong with a file, and that `command` writes it again.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise StateError(f"there is no file {path}") from error
    except (ValueError, OSError) as error:
        raise StateError(f"{path} is not readable JSON ({error})") from error
    if not _alike(content, schema):
        return None
    try:
        if content["schema"] != schema:
            raise ValueError(f"schema {content['schema']!r}, expected {schema!r}")
        return make(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{path} is damaged ({error}); write it again with `{command}`") from error


def check_schema(text: str, schema: str) -> None:
    """ValueError unless a text is JSON of this schema, of any version: what is damaged may be written again."""
    if not _alike(json.loads(text), schema):
        raise ValueError(f"not {schema.partition('/')[0]}")


def _alike(content: object, schema: str) -> bool:
    found = str(content.get("schema", "")) if isinstance(content, dict) else ""
    return found.partition("/")[0] == schema.partition("/")[0]


def json_text(value: Any) -> str:
    """Canonical JSON: sorted keys, no NaN or infinity (they are not JSON)."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def write_csv(path: Path, header: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
    """A table as CSV, for spreadsheets and pandas."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode())


def sha256(content: bytes | str) -> str:
    """Hex digest of bytes or text."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def brief(text: str, most: int = 80) -> str:
    """A part of a file's name: what is cut off leaves a digest, so that other texts have other names."""
    return text if len(text) <= most else f"{text[: most - 9]}-{sha256(text)[:8]}"


def sealed_line(value: Mapping[str, Any], owner: str = "") -> str:
    """One JSON line with a checksum of its content and its owner: a damaged or foreign line is noticed."""
    return json_text({**value, "crc": zlib.crc32((owner + json_text(dict(value))).encode())})


def unsealed(line: str, where: str, owner: str = "") -> dict[str, Any]:
    """The value of a sealed line; StateError if it was damaged or belongs to another owner."""
    try:
        value = json.loads(line)
        crc = value.pop("crc")
        intact = zlib.crc32((owner + json_text(value)).encode()) == crc
    except (ValueError, KeyError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise StateError(
            f"{where} is damaged or of another run (its checksum does not match); "
            "`flatrock train ... --resume` rebuilds it from the last checkpoint"
        )
    return dict(value)
