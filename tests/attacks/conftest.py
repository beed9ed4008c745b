"""Every attack with its options, both threats, a small network, and inputs that crowd the faces of the box."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attack_cases import FAB_ROWS, LINF_ONLY
from torch import Tensor, nn

from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("fgsm", {}),
    ("pgd", {"steps": 6}),
    ("pgd", {"steps": 6, "start": "zero"}),
    ("pgd", {"steps": 6, "loss": "dlr", "start": "gaussian"}),
    ("pgd", {"steps": 4, "restarts": 3}),
    ("pgd", {"steps": 4, "restarts": 2, "iterate": "last"}),
    ("pgd", {"steps": 6, "start": "wide", "box": "first"}),
    ("cw", {"steps": 6}),
    ("kl-pgd", {"steps": 6}),
    ("kl-pgd", {"steps": 4, "restarts": 2, "start": "uniform"}),
    ("smooth-pgd", {"steps": 5}),
    ("smooth-pgd", {"steps": 3, "restarts": 2, "loss": "ce", "sigma": 0.05}),
    ("guided", {}),
    ("guided", {"guide": "never", "offset": 1.0}),
    ("mt", {"steps": 4}),
    ("langevin", {"steps": 8}),
    ("langevin", {"steps": 6, "project": "every", "start": "uniform", "noise": 0.05}),
    ("langevin", {"steps": 6, "drift": "paper", "step_size": 0.02, "gamma": 0.5}),
    ("square", {"queries": 60}),
    ("square", {"queries": 20, "restarts": 3, "p_init": 0.3}),
    ("rays", {"queries": 150}),
    ("rays", {"queries": 80, "tolerance": 0.05}),
    ("apgd", {"steps": 8, "loss": "margin", "eot": 2}),
    ("apgd-ce", {"steps": 8}),
    ("apgd-dlr", {"steps": 5, "restarts": 3}),
    ("apgd-t", {"steps": 8}),
    ("apgd-t", {"steps": 4, "loss": "margin", "targets": 2, "restarts": 2, "rows": 50}),
    *FAB_ROWS,
]
IDS = ["-".join([name, *map(str, options.values())]) for name, options in ROWS]


@pytest.fixture(scope="session")
def attack_names() -> set[str]:
    """The attacks that `attack_row` goes through."""
    return {name for name, _ in ROWS}


@pytest.fixture(params=ROWS, ids=IDS)
def attack_row(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Every attack in turn, in every variant that takes another path through the code."""
    row: tuple[str, dict[str, Any]] = request.param
    return row


@pytest.fixture(params=[Linf(0.03), L2(0.25)], ids=["linf", "l2"])
def threat(request: pytest.FixtureRequest) -> Threat:
    """Both norms, at radii that break some samples of the network below and not all."""
    chosen: Threat = request.param
    return chosen


@pytest.fixture(autouse=True)
def in_its_norm(request: pytest.FixtureRequest) -> None:
    """No row of an attack that knows linf only meets another threat."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    row, threat = params.get("attack_row"), params.get("threat")
    if row is not None and threat is not None and row[0] in LINF_ONLY and threat.norm != Linf.norm:
        pytest.skip(f"{row[0]} knows linf only")


class Counting(nn.Module):
    """Counts forward passes, and the samples in them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.passes, self.samples = model, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.samples += len(x)
        logits: Tensor = self.model(x)
        return logits


@pytest.fixture
def counting() -> type[Counting]:
    return Counting


class ConvNet(nn.Module):
    """Convolution, BatchNorm, ReLU, linear; never trained, so its decision boundaries are everywhere."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(6 * 4 * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


@pytest.fixture
def conv_net() -> Callable[..., nn.Module]:
    def make(*, classes: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        with kept_global_rng(seed=Seed(seed).child("net")):
            net = ConvNet(classes).to(dtype)
            net(torch.rand(64, 2, 6, 6, dtype=dtype))
        return net.eval()

    return make


@pytest.fixture
def images() -> Callable[..., Tensor]:
    def make(n: int = 64, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """A third of the pixels are 0, a third are 1, the rest lie between."""
        gen = Seed(0).child("images").generator()
        x = torch.rand(n, 2, 6, 6, generator=gen, dtype=torch.float64)
        return ((x - 1 / 3) * 3).clamp(0, 1).to(dtype)

    return make


@pytest.fixture
def right_labels() -> Callable[[nn.Module, Tensor], Tensor]:
    def make(model: nn.Module, x: Tensor) -> Tensor:
        """The model's own answers, so that every sample starts out right."""
        with torch.no_grad():
            return model(x).argmax(1)

    return make
