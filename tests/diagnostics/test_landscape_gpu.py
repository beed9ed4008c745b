"""Weight landscapes on CUDA: the numbers of the CPU, and a PreActResNet-18 fast enough to be looked at."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from flatrock.attacks.gradient import GradientAttack
from flatrock.core.progress import Silent
from flatrock.core.rng import Seed
from flatrock.core.threat import Linf
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.probe import Probe
from flatrock.diagnostics.weight_landscape import MIDDLE, place, walk_weights
from flatrock.models.catalog import create_model

pytestmark = pytest.mark.gpu
AXIS = Axis(points=3, span=0.5)


def walked(model: nn.Module, shape: tuple[int, ...], *, n: int, steps: int, device: str, half: bool) -> Ledger:
    gen = Seed(5).generator()
    x, y = torch.rand(n, *shape, generator=gen), torch.randint(10, (n,), generator=gen)
    model = model.to(device).eval()
    probe = Probe(
        model,
        x.to(device),
        y.to(device),
        ids=torch.arange(n, device=device),
        threat=Linf(8 / 255),
        attack=GradientAttack(steps=steps, step_size=2 / 255),
        seed=Seed(9),
        batch_size=2048,
        half=half,
    )
    found = Ledger(None, {}, resume=False)
    walk_weights(model, probe, AXIS, count=2, dimensions=1, seed=Seed(1), ledger=found, progress=Silent())
    return found


def test_the_numbers_of_the_cpu() -> None:
    ways = (("cpu", False), ("cuda", False), ("cuda", True))
    slow, fast, rough = (
        walked(create_model("digits_cnn", seed=3), (1, 8, 8), n=64, steps=3, device=device, half=half)
        for device, half in ways
    )
    for key in (MIDDLE, place(0, 0), place(1, 2)):
        assert fast.get(key) == pytest.approx(slow.get(key), rel=1e-4)
        assert (rough.get(key) or {})["loss"] == pytest.approx((slow.get(key) or {})["loss"], rel=2e-2)


def test_a_landscape_of_21_points_and_10_directions_takes_less_than_two_minutes() -> None:
    model = create_model("preact_resnet18", normalize="cifar10")
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    walked(model, (3, 32, 32), n=1000, steps=10, device="cuda", half=True)
    begun = time.monotonic()
    walked(model, (3, 32, 32), n=1000, steps=10, device="cuda", half=True)
    seconds = (time.monotonic() - begun) / 5
    assert 201 * seconds < 120
