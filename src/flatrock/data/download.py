"""Fetch a file so that an interruption costs nothing and a wrong file is never taken for the right one."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from flatrock.core.errors import DataError
from flatrock.core.progress import Progress

CHUNK = 1 << 20
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """A file on the network: mirrors in order of preference, and what its content must be.

    `checksum` is "sha256:<hex>" or, where the publisher gives no better, "md5:<hex>".
    """

    urls: tuple[str, ...]
    filename: str
    size: int
    checksum: str


class _Failed(Exception):
    """A mirror did not deliver; the text says why."""


def fetch(source: RemoteFile, folder: Path, progress: Progress) -> Path:
    """Bring `source` into `folder` and return its path; continues a partial download, verifies size and checksum.

    A file already there is verified and kept. DataError when no mirror delivers the right bytes.
    """
    target, part = folder / source.filename, folder / f"{source.filename}.part"
    if target.exists():
        fault = _fault(target, source)
        if fault:
            raise DataError(f"{target} {fault}; move it away and run again to fetch it, or pass another --data-dir")
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create {folder}: {error.strerror or error}; choose another --data-dir") from error
    failures = []
    for url in source.urls:
        try:
            _fetch_from(url, source, part, progress)
        except _Failed as failure:
            failures.append(f"{url}: {failure}")
        else:
            part.replace(target)
            return target
    raise DataError(
        f"could not download {source.filename}: {'; '.join(failures)}. Run again to try once more; or get the file "
        f"from {source.urls[0]} elsewhere, put it at {target} and pass --data-dir FOLDER with the folder used here"
    )


def _fetch_from(url: str, source: RemoteFile, part: Path, progress: Progress) -> None:
    """Fill `part` from one mirror and verify it; a broken connection is taken up again while that yields bytes."""
    have = _size(part)
    while have < source.size:
        reason = "connection closed"
        try:
            _transfer(url, source, part, have, progress)
        except _Failed as failure:
            reason = str(failure)
        before, have = have, _size(part)
        if have <= before:
            raise _Failed(f"{reason} ({have} of {source.size} bytes so far)")
    fault = _fault(part, source)
    if fault:
        # Only our own partial file goes, so that the next try starts from nothing.
        part.unlink()
        raise _Failed(f"the download {fault}; the partial file was removed")


def _transfer(url: str, source: RemoteFile, part: Path, have: int, progress: Progress) -> None:
    """One connection: append what comes to `part`, or start it anew if the server sends the whole file."""
    with _open(url, have) as response:
        start = have if response.status == http.client.PARTIAL_CONTENT else 0
        progress.begin(f"download {source.filename}", source.size, start)
        try:
            with part.open("ab" if start else "wb") as out:
                # One byte too many is enough to know that this is another file.
                while out.tell() <= source.size and (chunk := _read(response)):
                    out.write(chunk)
                    progress.advance(len(chunk))
        except OSError as error:
            raise DataError(
                f"cannot write {part}: {error.strerror or error}; free space or choose another --data-dir, "
                "then run again to continue"
            ) from error
        finally:
            progress.end()


def _open(url: str, start: int) -> http.client.HTTPResponse:
    """The response from byte `start` on, or from the beginning if the server cannot do that."""
    request = urllib.request.Request(url, headers={"User-Agent": "flatrock"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return _open(url, 0)
        raise _Failed(f"the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _Failed(f"no connection ({error.reason})") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(f"no connection ({error})") from error
    partial = response.status == http.client.PARTIAL_CONTENT
    if partial and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        response.close()
        return _open(url, 0)
    return response


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(f"connection broken ({error})") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fault(path: Path, source: RemoteFile) -> str:
    """What is wrong with the content of `path`; empty if nothing is."""
    if _size(path) != source.size:
        return f"has {_size(path)} bytes, expected {source.size}"
    kind, _, expected = source.checksum.partition(":")
    with path.open("rb") as f:
        # Not for security: the strongest digest the publisher gives may be md5.
        got = hashlib.file_digest(f, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    return "" if got == expected else f"has {kind} {got}, expected {expected}"
