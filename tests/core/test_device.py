"""Which devices are meant, and what is refused."""

from __future__ import annotations

import pytest
import torch

from flatrock.core.device import alike_devices, kind_fault, named_devices, pick_devices, shared_by
from flatrock.core.errors import ConfigError

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
