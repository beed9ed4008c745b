from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flatrock.core.errors import DataError
from flatrock.core.progress import Silent
from flatrock.data import download
from flatrock.data.download import RemoteFile, fetch

CONTENT = bytes(range(256)) * 1200


@dataclass
class Site:
    """What the server serves, how it misbehaves, and what it was asked."""

    content: bytes = CONTENT
    ranges: bool = True
    wrong_range: bool = False
    refuses_ranges: bool = False
    cuts: list[int] = field(default_factory=list)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    port: int = 0

    def url(self, path: str = "good") -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            if self.path != "/good":
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            if start >= len(state.content) or (start and state.refuses_ranges):
                self.send_error(416)
                return
            body = state.content[start:]
            self.send_response(206 if start else 200)
            if start:
                said = 0 if state.wrong_range else start
                self.send_header("Content-Range", f"bytes {said}-{len(state.content) - 1}/{len(state.content)}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            body = body[: state.cuts.pop(0)] if state.cuts else body
            state.sent.append(len(body))
            # A client that has seen enough hangs up.
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


class Listener(Silent):
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.units = 0

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.events.append(("begin", task, total, done))

    def advance(self, units: int, note: str = "") -> None:
        self.units += units

    def end(self) -> None:
        self.events.append(("end",))


def _remote(*urls: str, checksum: str | None = None, size: int = len(CONTENT)) -> RemoteFile:
    digest = checksum or "sha256:" + hashlib.sha256(CONTENT).hexdigest()
    return RemoteFile(urls, "file.bin", size, digest)


def test_whole_download_lands_complete_and_reports_progress(site: Site, tmp_path: Path) -> None:
    listener = Listener()
    path = fetch(_remote(site.url()), tmp_path / "new" / "folder", listener)
    assert path == tmp_path / "new" / "folder" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]
    assert listener.events == [("begin", "download file.bin", len(CONTENT), 0), ("end",)]
    assert listener.units == len(CONTENT)
    assert site.asked == [("/good", None)]


def test_md5_is_accepted_as_checksum(site: Site, tmp_path: Path) -> None:
    path = fetch(_remote(site.url(), checksum="md5:" + hashlib.md5(CONTENT).hexdigest()), tmp_path, Silent())
    assert path.read_bytes() == CONTENT


def test_a_partial_file_is_continued_not_repeated(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    listener = Listener()
    assert fetch(_remote(site.url()), tmp_path, listener).read_bytes() == CONTENT
    assert site.asked == [("/good", "bytes=1000-")]
    assert site.sent == [len(CONTENT) - 1000]
    assert listener.events[0] == ("begin", "download file.bin", len(CONTENT), 1000)
    assert listener.units == len(CONTENT) - 1000
    assert not (tmp_path / "file.bin.part").exists()


@pytest.mark.parametrize("fault", ["ignores", "wrong_range", "refuses_ranges"])
def test_a_server_without_ranges_means_starting_again(site: Site, tmp_path: Path, fault: str) -> None:
    site.ranges = fault != "ignores"
    site.wrong_range, site.refuses_ranges = fault == "wrong_range", fault == "refuses_ranges"
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    assert fetch(_remote(site.url()), tmp_path, Silent()).read_bytes() == CONTENT
    assert site.asked[0] == ("/good", "bytes=1000-")
    assert max(site.sent) == len(CONTENT)  # a first answer may be noted late


def test_a_broken_connection_is_taken_up_again(site: Site, tmp_path: Path) -> None:
    site.cuts = [5000, 7000]
    assert fetch(_remote(site.url()), tmp_path, Silent()).read_bytes() == CONTENT
    assert [r for _, r in site.asked] == [None, "bytes=5000-", "bytes=12000-"]
    assert sum(site.sent) == len(CONTENT)


def test_a_transfer_that_stays_truncated_keeps_its_part_and_continues_later(site: Site, tmp_path: Path) -> None:
    site.ranges, site.cuts = False, [5000, 5000]
    with pytest.raises(DataError, match=rf"5000 of {len(CONTENT)} bytes.*Run again.*--data-dir"):
        fetch(_remote(site.url()), tmp_path, Silent())
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:5000]
    assert not (tmp_path / "file.bin").exists()
    site.ranges = True
    assert fetch(_remote(site.url()), tmp_path, Silent()).read_bytes() == CONTENT
    assert site.asked[-1] == ("/good", "bytes=5000-")


def test_wrong_checksum_names_both_digests_and_removes_only_the_part(site: Site, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    site.content = CONTENT[::-1]
    got, expected = (hashlib.sha256(c).hexdigest() for c in (CONTENT[::-1], CONTENT))
    with pytest.raises(DataError, match=rf"file\.bin.*sha256 {got}, expected {expected}.*--data-dir"):
        fetch(_remote(site.url()), tmp_path, Silent())
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_stale_part_from_another_file_is_noticed(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match="partial file was removed"):
        fetch(_remote(site.url()), tmp_path, Silent())
    assert fetch(_remote(site.url()), tmp_path, Silent()).read_bytes() == CONTENT


def test_a_longer_file_is_refused_early(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK", 1 << 10)
    with pytest.raises(DataError, match="has 2048 bytes, expected 1500"):
        fetch(_remote(site.url(), size=1500), tmp_path, Silent())
    assert list(tmp_path.iterdir()) == []


def test_a_part_as_long_as_the_servers_shorter_file_does_not_loop(site: Site, tmp_path: Path) -> None:
    site.content = CONTENT[:4000]
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:4000])
    with pytest.raises(DataError, match=f"4000 of {len(CONTENT)} bytes"):
        fetch(_remote(site.url()), tmp_path, Silent())


def test_404_names_the_answer_and_the_way_by_hand(site: Site, tmp_path: Path) -> None:
    url = site.url("absent")
    with pytest.raises(DataError, match=f"404 Not Found.*{url}.*put it at {tmp_path / 'file.bin'}.*--data-dir"):
        fetch(_remote(url), tmp_path, Silent())


def test_next_mirror_serves_when_the_first_fails(site: Site, tmp_path: Path) -> None:
    assert fetch(_remote(site.url("absent"), site.url()), tmp_path, Silent()).read_bytes() == CONTENT
    assert [path for path, _ in site.asked] == ["/absent", "/good"]


def test_all_mirrors_are_named_when_all_fail(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/absent1: .*404.*/absent2: .*404"):
        fetch(_remote(site.url("absent1"), site.url("absent2")), tmp_path, Silent())


def test_no_network_says_how_to_place_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DataError, match=r"no connection.*http://127\.0\.0\.1:9/file.*--data-dir FOLDER"):
        fetch(_remote("http://127.0.0.1:9/file"), tmp_path, Silent())


def test_a_verified_file_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(CONTENT)
    assert fetch(_remote("http://127.0.0.1:9/never"), tmp_path, Silent()) == tmp_path / "file.bin"


def test_a_complete_part_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert fetch(_remote("http://127.0.0.1:9/never"), tmp_path, Silent()).read_bytes() == CONTENT


def test_a_wrong_file_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=f"file.bin has 4 bytes, expected {len(CONTENT)}; move it away"):
        fetch(_remote("http://127.0.0.1:9/never"), tmp_path, Silent())
    assert (tmp_path / "file.bin").read_bytes() == b"mine"


def test_an_unwritable_part_is_explained(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").mkdir()
    with pytest.raises(DataError, match=r"cannot write .*file\.bin\.part.*--data-dir"):
        fetch(_remote(site.url(), size=1 << 30), tmp_path, Silent())


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"cannot create .*blocked.*--data-dir"):
        fetch(_remote("http://127.0.0.1:9/never"), tmp_path / "blocked" / "below", Silent())
