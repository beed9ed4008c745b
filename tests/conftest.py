"""Fixtures shared by all tests: one thread, the digits, and a small network trained on them once per session."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from foreign_cases import MODULE
from start_cases import SMALL, weights
from torch import Tensor, nn

from flatrock.core.rng import Seed, kept_global_rng
from flatrock.models.catalog import create_model
from flatrock.workflows.train import train_recipe

FGSM_RADIUS = 0.1


def pytest_collection_finish() -> None:
    """What thousands of collected tests are made of stays to the end: no collection of garbage need walk through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Begun in the background of a shell, or by nohup, these tests and all they begin would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors are tiny here: a second thread costs more time than it gives, and one sums in a fixed order.

    Processes that tests begin are no different, and there are as many tests at once as cores.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """What a test draws without a seed, weights of its networks above all, is the same whatever ran before."""
    with kept_global_rng(seed=Seed(0)):
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, an empty one but for foreign_module.py with networks that are not flatrock's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign_module.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("foreign_module", None)


@dataclass(frozen=True)
class Digits:
    """The 8x8 digits of scikit-learn in [0, 1], shuffled; 400 of them are kept for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@pytest.fixture(scope="session")
def digits() -> Digits:
    from sklearn.datasets import load_digits  # here, because few tests need it and it is slow to import

    bunch = load_digits()
    order = Seed(0).child("digits").permutation(len(bunch.target))
    x = torch.tensor(bunch.images, dtype=torch.float32)[order, None] / 16
    y = torch.tensor(bunch.target)[order]
    return Digits(train_x=x[400:], train_y=y[400:], test_x=x[:400], test_y=y[:400])


@pytest.fixture(scope="session")
def digits_model(digits: Digits, one_thread: None) -> nn.Module:
    """A convolutional network trained on one-step attacks written out here; treat it as read-only."""
    model = create_model("digits_cnn", seed=0).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(8):
        for rows in Seed(0).child("epoch", epoch).permutation(len(digits.train_x)).split(64):
            x, y = digits.train_x[rows], digits.train_y[rows]
            probe = x.clone().requires_grad_(True)
            (grad,) = torch.autograd.grad(F.cross_entropy(model(probe), y), probe)
            x_adv = (x + FGSM_RADIUS * grad.sign()).clamp(0, 1)
            optimizer.zero_grad()
            F.cross_entropy(model(x_adv), y).backward()
            optimizer.step()
    return model.eval()


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[Path]:
    """A run of a large network leaves hundreds of megabytes, which pytest would keep for three sessions."""
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.fixture(scope="session")
def averaged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits trained without attacks, with averaged weights; to be copied, not written to."""
    folder = tmp_path_factory.mktemp("averages") / "digits_standard"
    keys = {**SMALL, "data.limit": 800, "train.epochs": 4, "flatness": [{"name": "swa", "decay": 0.8}]}
    return train_recipe("digits_standard", folder=folder, device="cpu", **keys).folder


@pytest.fixture(scope="session")
def averaged(averaged_run: Path) -> dict[str, Tensor]:
    """The weights of it that are meant."""
    return weights(averaged_run / "average-best.safetensors")
