"""Batches of few sizes: the same answers and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatrock.models.sizes import Filled, filled, rounded, size_for


@pytest.mark.parametrize(
    ("count", "size"),
    [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 4),
        (17, 32),
        (32, 32),
        (33, 64),
        (512, 512),
        (513, 544),
        (1024, 1024),
        (1025, 1088),
        (2048, 2048),
        (2049, 2176),
    ],
)
def test_rounded(count: int, size: int) -> None:
    assert rounded(count) == size


def test_few_sizes_with_little_to_fill() -> None:
    counts = range(1, 4097)
    assert len({rounded(n) for n in counts}) == 6 + 31 + 16 + 16
    assert all(n <= rounded(n) == rounded(rounded(n)) < 2 * n for n in counts)
    assert max((rounded(n) - n) / n for n in counts if n > 512) <= 1 / 16


def test_filled_rows_are_asked_once_and_answer_as_before() -> None:
    seen: list[int] = []
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)).double()

    def work(x: Tensor) -> Tensor:
        seen.append(x.shape[0])
        out: Tensor = network(x)
        return out

    x = torch.rand(5, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    answer = filled(work, x, 32)
    (grad,) = torch.autograd.grad(answer.square().sum(), x)
    assert seen == [32]
    assert torch.allclose(answer, network(x), rtol=1e-12)
    assert torch.allclose(grad, torch.autograd.grad(network(x).square().sum(), x)[0], rtol=1e-12)
    assert torch.equal(filled(work, x, 5), network(x))
    assert seen == [32, 5]


def test_on_the_cpu_a_batch_stays_as_it_is() -> None:
    seen: list[int] = []
    network = nn.Flatten()
    network.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    x = torch.rand(3, 2)
    assert size_for(x) == 3
    assert torch.equal(Filled(network)(x), x)
    assert seen == [3]


@pytest.mark.gpu
def test_on_a_gpu_it_is_filled_up() -> None:
    seen: list[int] = []
    network = nn.Flatten()
    network.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    x = torch.rand(3, 2, device="cuda")
    assert torch.equal(Filled(network)(x), x)
    assert seen == [4]
