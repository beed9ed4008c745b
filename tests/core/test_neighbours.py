"""Who else computes on a GPU, told by a program that says what nvidia-smi says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flatrock.core.neighbours import Lookout, _descends, neighbours, told

GPU = torch.device("cuda:1")
Smi = Callable[[str], Path]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """An `nvidia-smi` that writes down how it is called and prints what it is given, and a GPU for it."""

    def gpu(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"0000-{device.index}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", gpu)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def say(text: str) -> Path:
        (tmp_path / "text").write_text(text)
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\ncat {tmp_path}/text\n')
        program.chmod(0o755)
        return tmp_path / "called"

    return say


@pytest.fixture
def child() -> Iterator[int]:
    """A process of ours."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def test_this_process_alone_has_no_neighbours(smi: Smi) -> None:
    called = smi(f"{os.getpid()}, python3\n")
    assert neighbours(GPU) == 0
    assert "--id=GPU-0000-1 " in called.read_text(), "by its name: numbers depend on CUDA_VISIBLE_DEVICES"


def test_others_are_counted(smi: Smi) -> None:
    smi(f"1, python3\n{os.getpid()}, /usr/bin/python3\n{os.getppid()}, my, train.py\n")
    assert neighbours(GPU) == 2


def test_what_this_process_began_is_no_neighbour(smi: Smi, child: int) -> None:
    smi(f"{os.getpid()}, python3\n{child}, python3\n")
    assert neighbours(GPU) == 0


def test_the_server_of_several_processes_is_none_of_them(smi: Smi) -> None:
    smi(f"1, /usr/bin/nvidia-cuda-mps-server\n{os.getpid()}, python3\n")
    assert neighbours(GPU) == 0
    smi(f"1, nvidia-cuda-mps-server\n{os.getpid()}, python3\n1, python3\n")
    assert neighbours(GPU) == 1


def test_numbers_of_another_container_hold_us_too(smi: Smi) -> None:
    beyond = 2**22  # no process has it: Linux counts to there
    smi(f"{beyond}, python3\n")
    assert neighbours(GPU) == 0
    smi(f"{beyond}, python3\n{beyond + 1}, python3\n")
    assert neighbours(GPU) == 1


@pytest.mark.parametrize("text", ["", "\n", "No devices were found\n", "[Insufficient Permissions], [N/A]\n"])
def test_what_does_not_tell_is_not_believed(smi: Smi, text: str) -> None:
    smi(text)
    assert neighbours(GPU) is None


def test_without_the_program_nothing_is_known(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert neighbours(GPU) is None


def test_a_program_that_fails_tells_nothing(smi: Smi) -> None:
    called = smi(f"{os.getpid()}, python3\n")
    (called.parent / "nvidia-smi").write_text("#!/bin/sh\nexit 6\n")
    assert neighbours(GPU) is None


def test_nobody_is_asked_on_a_cpu(smi: Smi) -> None:
    called = smi("1, python3\n")
    with Lookout(torch.device("cpu"), every=0.0) as lookout:
        assert lookout.seen() is None
    assert neighbours(torch.device("cpu")) is None
    assert not called.exists()


def test_a_gpu_without_a_name_is_not_asked_about(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    called = smi("1, python3\n")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert neighbours(GPU) is None
    assert not called.exists()


def settled(lookout: Lookout, wanted: int | None) -> bool:
    """Whether this is seen within some seconds."""
    end = time.monotonic() + 20
    while (seen := lookout.seen()) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return seen == wanted


def looked(called: Path, times: int) -> bool:
    """Whether so many looks, and no more, are made within some seconds; the last of them has ended."""
    end = time.monotonic() + 20
    while not called.exists() or len(called.read_text().splitlines()) < times:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    time.sleep(0.3)
    return len(called.read_text().splitlines()) == times


def test_a_lookout_says_what_was_seen(smi: Smi) -> None:
    smi(f"{os.getpid()}, python3\n1, python3\n")
    with Lookout(GPU, every=0.01) as lookout:
        assert settled(lookout, 1)
        smi(f"{os.getpid()}, python3\n")
        assert settled(lookout, 0)


def test_a_lookout_keeps_the_most_until_it_is_asked(smi: Smi) -> None:
    """However long the epoch: somebody who came and went in it was there."""
    called = smi("")
    (called.parent / "nvidia-smi").write_text(
        f"#!/bin/sh\necho x >> {called}\necho {os.getpid()}, python3\n"
        f"[ $(wc -l < {called}) = 2 ] && echo 1, python3\n[ $(wc -l < {called}) -lt 5 ] || exec sleep 60\n"
    )
    with Lookout(GPU, every=0.01) as lookout:
        assert looked(called, 5)
        assert lookout.seen() == 1
        assert lookout.seen() is None, "nobody has looked since"


def test_a_lookout_delays_nobody(smi: Smi) -> None:
    """Not a block, nor the end of a process: a driver that does not answer is left alone."""
    called = smi("")
    (called.parent / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    program = (
        "import torch; from types import SimpleNamespace; from flatrock.core.neighbours import Lookout\n"
        "torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid='0')\n"
        "with Lookout(torch.device('cuda:0')) as lookout: assert lookout.seen() is None\n"
        "print('left', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"left\n"
        assert process.wait(timeout=15) == 0, "far from the time it waits for an answer"


def test_a_lookout_looks_now_and_then(smi: Smi) -> None:
    called = smi(f"{os.getpid()}, python3\n")
    with Lookout(GPU, every=3600.0) as lookout:
        assert looked(called, 1)
        assert lookout.seen() == 0


def test_whoever_began_the_processes_of_a_team_is_no_neighbour(smi: Smi, child: int) -> None:
    """It may have used the GPU before; its other children use others."""
    smi(f"{os.getppid()}, python3\n{os.getpid()}, python3\n{child}, python3\n")
    with Lookout(GPU, root=os.getppid()) as lookout:
        assert settled(lookout, 0)


def test_elsewhere_than_on_linux_nobody_is_asked(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    called = smi("1, explorer.exe\n")
    monkeypatch.setattr(sys, "platform", "win32")
    assert neighbours(GPU) is None
    assert not called.exists()


def test_a_first_process_of_a_container_knows_its_children() -> None:
    assert _descends(os.getpid(), 1)
    assert not _descends(os.getppid(), os.getpid())


@pytest.mark.parametrize("counts", [[], [None], [0, None, 0]])
def test_nobody_is_not_told(counts: list[int | None]) -> None:
    assert told(counts) == ""


WORK = """
import sys, time, torch
from pathlib import Path
x, folder = torch.zeros(1, device="cuda"), Path(sys.argv[1])
(folder / "there").touch()
while not (folder / "stop").exists():
    time.sleep(0.05)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("began", "more"), [("exec", 0), ("setsid", 1)])
def test_a_real_gpu(tmp_path: Path, began: str, more: int) -> None:
    """Our own child is no neighbour; one whose parent has gone is, as it belongs to nobody here."""
    device = torch.zeros(1, device="cuda").device
    before = neighbours(device)
    if before is None:
        pytest.skip("nvidia-smi lists no processes here")
    end = " &" if more else ""
    words = ["sh", "-c", f'{began} "$0" -c "$1" "$2"{end}', sys.executable, WORK, str(tmp_path)]
    with subprocess.Popen(words):
        try:
            until = time.monotonic() + 60
            while not (tmp_path / "there").exists() and time.monotonic() < until:
                time.sleep(0.05)
            assert neighbours(device) == before + more
        finally:
            (tmp_path / "stop").touch()
