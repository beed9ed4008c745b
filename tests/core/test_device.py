"""Which devices are meant, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flatrock.core.device import (
    alike_devices,
    free_memory,
    kind_fault,
    memory_is_short,
    named_devices,
    pick_devices,
    shared_by,
)
from flatrock.core.errors import ConfigError
from flatrock.core.team import LostError, Team

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


def test_devices_are_named_between_commas() -> None:
    assert named_devices("cuda:0, cuda:1") == ["cuda:0", "cuda:1"]
    assert pick_devices(["cpu", CPU]) == pick_devices(("cpu", "cpu")) == [CPU, CPU]
    assert pick_devices("cpu") == [CPU]


def test_devices_of_different_kinds_do_not_share_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_fault([CPU]) == kind_fault([CUDA, torch.device("cuda:0")]) == ""
    assert alike_devices(["cpu", "cpu"]) == [CPU, CPU]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert alike_devices(named_devices("all")) == [torch.device("cuda:0"), CUDA]
    with pytest.raises(ConfigError, match="devices: got cpu, cuda:1; name devices of one kind"):
        alike_devices(["cpu", "cuda:1"])


def test_only_several_devices_are_told_of() -> None:
    assert shared_by([CUDA]) == {}
    assert shared_by([CPU, CPU]) == {"devices": ["cpu", "cpu"]}


# Every way to say it that libraries have; test_smoothing.py sees the CPU's allocator say it.
SAID = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "NCCL error: unhandled cuda error, Last error: Cuda failure 2 'out of memory'",
    "Triton Error [CUDA]: out of memory",
)
OTHERS = (
    "CUDA error: an illegal memory access was encountered",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
)


def test_want_of_memory_has_many_names() -> None:
    assert memory_is_short(torch.OutOfMemoryError("Tried to allocate 2 GiB"))
    assert all(memory_is_short(RuntimeError(words)) for words in SAID)
    assert not any(memory_is_short(RuntimeError(words)) for words in OTHERS)
    assert not memory_is_short(ConfigError("cuda: out of memory")), "errors of ours are not torch's"


@pytest.mark.parametrize("words", [SAID[0], SAID[2]])
def test_want_of_memory_is_no_loss_of_another_process(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    error = RuntimeError(words)

    def fails(_: torch.Tensor) -> None:
        raise error

    monkeypatch.setattr(dist, "all_reduce", fails)
    with pytest.raises(RuntimeError) as caught:
        Team(0, 2).total(torch.ones(1))
    assert caught.value is error
    error = RuntimeError("Connection closed by peer")
    with pytest.raises(LostError, match=r"another process of this training has ended .*Connection closed by peer"):
        Team(0, 2).total(torch.ones(1))


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_no_device_is_asked_before_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch refuses to tell of a device by its number before anything has initialised CUDA, which this must not do."""

    def refuses(*_: object) -> None:
        raise RuntimeError("Invalid device argument 0: did you call init?")

    for asked in ("empty_cache", "reset_peak_memory_stats", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, asked, refuses)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert free_memory(torch.device(name)) == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="did you call init"):
        free_memory(torch.device(name))
