"""Take expected files, and nothing else, out of a tar archive."""

from __future__ import annotations

import gzip
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from shutil import copyfileobj

from flatrock.core.errors import DataError

CHUNK = 1 << 20


def extract(archive: Path, members: Sequence[str], folder: Path) -> None:
    """Unpack the named members of a .tar.gz into `folder`, each complete or not at all.

    A member is written under the name asked for, whatever the archive says of links, owners, modes or paths.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as aside:
            found = _unpack(archive, members, Path(aside))
            absent = [m for m in members if m not in found]
            if absent:
                raise DataError(
                    f"{archive} lacks {', '.join(absent)}; it is not the expected archive, get a fresh copy"
                )
            for member in members:
                (folder / member).parent.mkdir(parents=True, exist_ok=True)
                found[member].replace(folder / member)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is truncated or corrupt ({error}); delete it and get a fresh copy") from error
    except OSError as error:
        raise DataError(
            f"cannot unpack {archive} into {folder} ({error}); get a fresh copy, or unpack it elsewhere and pass "
            "that folder with --data-dir"
        ) from error


def _unpack(archive: Path, members: Sequence[str], aside: Path) -> dict[str, Path]:
    """One pass over the archive, because going back in a compressed file means starting again."""
    found: dict[str, Path] = {}
    with gzip.open(archive) as raw:
        with tarfile.open(fileobj=raw, mode="r|") as tar:
            for entry in tar:
                name = str(PurePosixPath(entry.name))
                content = tar.extractfile(entry) if entry.isreg() and name in members else None
                if content is not None:
                    found[name] = aside / str(len(found))
                    with content, found[name].open("wb") as out:
                        copyfileobj(content, out)
        # tar stops at its own end mark; only at the end of the compressed stream is its checksum compared.
        while raw.read(CHUNK):
            pass
    return found
