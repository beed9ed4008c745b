"""Answers that differ by rounding, and answers that differ by more."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatrock.core.rng import Seed
from flatrock.core.rounding import gap


def normal(name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=Seed(0).child(name).generator())


def plain(z: Tensor) -> Tensor:
    return z


def masked(value: float) -> Callable[[Tensor], Tensor]:
    return lambda z: torch.cat([z, torch.full_like(z[:, :1], value)], 1)


def shifted(value: float) -> Callable[[Tensor], Tensor]:
    return lambda z: z + value


VIEWS = [plain, masked(-1e5), masked(-1e9), shifted(-1e5), shifted(1e5)]


@pytest.mark.parametrize("view", VIEWS)
def test_neither_a_masked_class_nor_an_offset_hides_a_difference(view: Callable[[Tensor], Tensor]) -> None:
    z = 4 * normal("z", 64, 10)
    lead = float(z.topk(2, 1).values.diff(dim=1).abs().max())
    other = z + 0.5 * normal("noise", 64, 10)
    true = float((z - z.amax(1, keepdim=True) - other + other.amax(1, keepdim=True)).abs().max()) / lead
    assert gap(view(z), view(other)) == pytest.approx(true, rel=0.02)
    assert gap(view(z), view(z)) == 0


@pytest.mark.parametrize("offset", [0.0, -1e5, 1e5])
def test_sums_in_another_order_are_rounding(offset: float) -> None:
    """What a GPU may do from pass to pass, with a last layer of 2000 features."""
    features, weights = normal("features", 64, 2000), normal("weights", 2000, 10)
    order = torch.randperm(2000, generator=Seed(1).generator())
    first, second = features @ weights + offset, features[:, order] @ weights[order] + offset
    assert not torch.equal(first, second)
    assert gap(first, second) == 0


def test_what_is_added_to_a_whole_row_is_no_other_answer() -> None:
    z = normal("z", 8, 4)
    assert gap(z, z + normal("rows", 8, 1)) == 0


def test_numbers_that_are_none_are_another_answer() -> None:
    z = torch.tensor([[1.0, 2.0]])
    assert math.isnan(gap(z, z * torch.nan))
    assert gap(z, torch.tensor([[1.0, -torch.inf]])) == math.inf
    assert gap(z, torch.ones(1, 3)) == math.inf
    assert gap(torch.ones(2, 3), torch.ones(2, 3)) == gap(torch.ones(0, 3), torch.ones(0, 3)) == 0
