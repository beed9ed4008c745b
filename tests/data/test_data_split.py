from __future__ import annotations

import dataclasses

import pytest
import torch

from flatrock.core.errors import ConfigError, DataError
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset, held_out_split, some_samples


def _dataset(counts: list[int], name: str = "toy") -> Dataset:
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x = torch.arange(len(y), dtype=torch.float32)[:, None] / len(y)
    return Dataset(name, x, y, len(counts))


def test_parts_are_disjoint_complete_and_keep_their_ids() -> None:
    data = _dataset([50] * 4)
    split = held_out_split(data, size=40)
    assert len(split.held_out) == 40
    assert sorted([*split.train.ids.tolist(), *split.held_out.ids.tolist()]) == list(range(200))
    for part in (split.train, split.held_out):
        assert torch.equal(part.x, data.x[part.ids])
        assert torch.equal(part.y, data.y[part.ids])


@pytest.mark.parametrize(("size", "allowed"), [(40, {10}), (41, {10, 11}), (3, {0, 1})])
def test_classes_are_equally_represented(size: int, allowed: set[int]) -> None:
    counts = held_out_split(_dataset([50, 60, 40, 200]), size=size).held_out.y.bincount(minlength=4).tolist()
    assert sum(counts) == size
    assert set(counts) <= allowed


def test_small_classes_give_at_most_half_and_the_others_make_up_for_it() -> None:
    split = held_out_split(_dataset([4, 1, 100]), size=20)
    assert split.held_out.y.bincount(minlength=3).tolist() == [2, 0, 18]
    assert split.train.y.bincount(minlength=3).tolist() == [2, 1, 82]


def test_choice_is_fixed_and_spread_over_the_data() -> None:
    data = _dataset([500] * 2)
    first, second = held_out_split(data, size=100), held_out_split(data, size=100)
    assert first.digest == second.digest
    assert torch.equal(first.held_out.ids, second.held_out.ids)
    assert first.held_out.ids.tolist() == sorted(first.held_out.ids.tolist())
    # A choice of the first or last samples of each class would be a biased one.
    assert 150 < float(first.held_out.ids[first.held_out.ids < 500].double().mean()) < 350


def test_a_held_out_set_contains_every_smaller_one() -> None:
    data = _dataset([50] * 3)
    small, large = (set(held_out_split(data, size=s).held_out.ids.tolist()) for s in (10, 30))
    assert small < large


def test_digest_and_choice_depend_on_name_and_length() -> None:
    base = _dataset([50] * 3)
    digests = {
        held_out_split(base, size=30).digest,
        held_out_split(dataclasses.replace(base, name="other"), size=30).digest,
        held_out_split(_dataset([50, 50, 51]), size=30).digest,
        held_out_split(base, size=31).digest,
    }
    assert len(digests) == 4
    assert all(len(d) == 16 for d in digests)


def test_a_fair_subset_has_every_class_of_sorted_data() -> None:
    data = _dataset([50] * 3)
    few = fair_subset(data, 9)
    assert few.y.bincount().tolist() == [3, 3, 3]
    assert torch.equal(few.ids, fair_subset(data, 9).ids), "the same ones every time"
    assert set(few.ids.tolist()) < set(fair_subset(data, 30).ids.tolist())
    assert torch.equal(few.x, data.x[few.ids])
    assert fair_subset(data, None) is data
    assert fair_subset(data, 999) is data
    assert fair_subset(_dataset([2, 50]), 20).y.bincount().tolist() == [2, 18], "a small class is used up"


def test_digest_is_pinned() -> None:
    # Published results name this split; a change of the rule must be noticed.
    split = held_out_split(_dataset([5000] * 10, name="cifar10"), size=1000)
    assert split.held_out.y.bincount().tolist() == [100] * 10
    assert split.digest == "cf2b7eff58e93c33"


@pytest.mark.parametrize("size", [0, -1, 76, 1000])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(DataError, match=f"cannot hold out {size} of the 150 samples of 'toy'; choose 1 to 75"):
        held_out_split(_dataset([50] * 3), size=size)


def test_classes_of_one_sample_have_none_to_hold_out() -> None:
    with pytest.raises(
        DataError, match=r"20 of the 2 samples of 'toy': .* no class has two; add samples, or set data\.held_out=0"
    ):
        held_out_split(_dataset([1, 1]), size=20)


def test_the_first_samples_on_request() -> None:
    data = _dataset([50, 60, 40])
    assert torch.equal(some_samples(data, 70, first=True).ids, torch.arange(70))
    assert torch.equal(some_samples(data, 500, first=True).ids, data.ids)
    assert torch.equal(some_samples(data, 70, first=False).ids, fair_subset(data, 70).ids)
    assert some_samples(data, None, first=False) is data
    with pytest.raises(ConfigError, match="first: which samples a limit takes, but none is given"):
        some_samples(data, None, first=True)
