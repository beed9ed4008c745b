from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, DataError, StateError
from flatrock.core.rng import SampleGen, Seed
from flatrock.data.augment import Augmentation
from flatrock.data.dataset import Dataset
from flatrock.data.loader import EXTRA_IDS, Batch, TensorLoader


def _dataset(n: int = 50, *, offset: int = 0, name: str = "toy") -> Dataset:
    x = torch.randint(0, 256, (n, 3, 6, 6), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
    return Dataset(name, x, torch.arange(n) % 5, 5, ids=torch.arange(n) + offset)


def _loader(dataset: Dataset | None = None, **changes: Any) -> TensorLoader:
    options = {"batch_size": 8, "seed": Seed(1), "augmentation": Augmentation(crop=1, flip=True), "device": "cpu"}
    return TensorLoader(dataset or _dataset(), **(options | changes))


def _same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.ids, b.ids)


def test_an_epoch_is_one_shuffled_pass() -> None:
    loader = _loader()
    batches = list(loader.epoch(0))
    assert len(batches) == len(loader) == 7
    assert [len(b.y) for b in batches] == [8] * 6 + [2]
    ids = torch.cat([b.ids for b in batches])
    assert torch.equal(ids, Seed(1).child("order", 0).permutation(50))
    assert all(torch.equal(b.y, b.ids % 5) for b in batches)
    assert all(b.x.dtype == torch.float32 and 0 <= float(b.x.min()) <= float(b.x.max()) <= 1 for b in batches)


def test_epochs_differ_and_repeat_exactly() -> None:
    first, again, other = (list(_loader().epoch(i)) for i in (0, 0, 1))
    assert all(_same(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].ids, other[0].ids)
    assert not torch.equal(first[0].ids, next(_loader(seed=Seed(2)).epoch(0)).ids)


@pytest.mark.parametrize("start", [0, 3, 6, 7])
def test_a_resumed_epoch_continues_where_it_was(start: int) -> None:
    extra = _dataset(20, name="extra")
    for options in ({}, {"extra": extra, "extra_fraction": 0.25}):
        whole, rest = list(_loader(**options).epoch(4)), list(_loader(**options).epoch(4, start))
        assert len(rest) == len(whole) - start
        assert all(_same(a, b) for a, b in zip(whole[start:], rest, strict=True))


@pytest.mark.parametrize("start", [-1, 8])
def test_an_impossible_start_is_refused_at_once(start: int) -> None:
    with pytest.raises(StateError, match=f"7 steps, cannot start at step {start}"):
        _loader().epoch(0, start)


def test_augmentation_belongs_to_id_and_epoch_not_to_the_batch() -> None:
    def by_id(batch_size: int, epoch: int) -> dict[int, torch.Tensor]:
        batches = _loader(batch_size=batch_size).epoch(epoch)
        return {int(i): x for b in batches for i, x in zip(b.ids, b.x, strict=True)}

    small, large, later = by_id(7, 0), by_id(32, 0), by_id(32, 1)
    assert all(torch.equal(small[i], large[i]) for i in range(50))
    assert any(not torch.equal(small[i], later[i]) for i in range(50))


def test_augmentation_uses_the_original_ids_of_a_subset() -> None:
    part = _dataset().subset(torch.arange(10, 50))
    batch = next(_loader(part, batch_size=40).epoch(2))
    assert sorted(batch.ids.tolist()) == list(range(10, 50))
    plain = part.images(batch.ids - 10)
    expected = Augmentation(crop=1, flip=True)(plain, Seed(1).child("augment", 2).samples(batch.ids))
    assert torch.equal(batch.x, expected)


def test_no_augmentation_gives_the_images_themselves() -> None:
    data = _dataset()
    for batch in _loader(data, augmentation=Augmentation()).epoch(0):
        assert torch.equal(batch.x, data.images(batch.ids))


def test_vectors_are_loaded_too() -> None:
    data = Dataset("plane", torch.rand(10, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(10).long(), 2)
    batch = next(_loader(data, batch_size=10, augmentation=Augmentation()).epoch(0))
    assert torch.equal(batch.x, data.x[batch.ids])


@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"),
    [
        (49, 8, [8] * 5 + [9]),
        (50, 8, [8] * 6 + [2]),
        (48, 8, [8] * 6),
        (9, 8, [9]),
        (8, 8, [8]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_no_lone_sample_is_left_over(n: int, batch_size: int, sizes: list[int]) -> None:
    loader = _loader(_dataset(n), batch_size=batch_size)
    batches = list(loader.epoch(0))
    assert [len(b.y) for b in batches] == sizes
    assert len(loader) == len(sizes)
    ids = torch.cat([b.ids for b in batches])
    assert len(ids.unique()) == len(ids) == sum(sizes)


def test_extra_samples_fill_their_share_of_every_batch() -> None:
    extra = _dataset(30, name="extra")
    extra = Dataset("extra", extra.x, torch.full((30,), -1), 5)
    batches = list(_loader(extra=extra, extra_fraction=0.5, augmentation=Augmentation()).epoch(0))
    assert len(batches) == 7
    order = Seed(1).child("order", 0).permutation(50)
    for step, batch in enumerate(batches):
        assert torch.equal(batch.ids[:4], order[4 * step : 4 * step + 4])
        assert batch.y[4:].tolist() == [-1] * 4
        assert torch.equal(batch.x[4:], extra.images(batch.ids[4:] - EXTRA_IDS))
    drawn = torch.cat([b.ids[4:] for b in batches])
    assert len(drawn.unique()) > 10
    assert not torch.equal(batches[0].ids[4:], batches[1].ids[4:])
    assert int(drawn.min()) >= EXTRA_IDS


def test_extra_data_does_not_change_the_number_of_steps() -> None:
    for n, sizes in ((49, [8] * 7), (50, [8] * 7), (48, [8] * 6)):
        batches = list(_loader(_dataset(n), extra=_dataset(9), extra_fraction=0.5).epoch(0))
        assert [len(b.y) for b in batches] == sizes


def test_extra_samples_with_the_same_index_get_other_random_numbers() -> None:
    data = _dataset()
    batches = list(_loader(data, batch_size=50, extra=data, extra_fraction=0.5).epoch(0))
    own = {int(i): x for i, x in zip(batches[0].ids[:25], batches[0].x[:25], strict=True)}
    extra = {int(i) - EXTRA_IDS: x for i, x in zip(batches[0].ids[25:], batches[0].x[25:], strict=True)}
    shared = own.keys() & extra.keys()
    assert len(shared) > 3
    assert any(not torch.equal(own[i], extra[i]) for i in shared)


def test_extra_draws_follow_epoch_and_seed() -> None:
    extra = _dataset(1000, name="extra")
    options = {"extra": extra, "extra_fraction": 0.5}
    draws = [
        next(_loader(**options).epoch(0)).ids[4:],
        next(_loader(**options).epoch(1)).ids[4:],
        next(_loader(**options, seed=Seed(2)).epoch(0)).ids[4:],
    ]
    assert len({tuple(d.tolist()) for d in draws}) == 3


@pytest.mark.parametrize("batch_size", [0, 51])
def test_batch_size_must_fit_the_data(batch_size: int) -> None:
    with pytest.raises(DataError, match=rf"batch_size must lie in 1\.\.50.*'toy', got {batch_size}"):
        _loader(batch_size=batch_size)


def test_extra_options_must_make_sense() -> None:
    with pytest.raises(ConfigError, match=r"extra_fraction=0\.5 needs extra data"):
        _loader(extra_fraction=0.5)
    for fraction, size in ((0.0, 0), (1.0, 8), (0.01, 0)):
        with pytest.raises(ConfigError, match=rf"batch_size=8 is {size} extra samples; .*leaves 1\.\.7"):
            _loader(extra=_dataset(9), extra_fraction=fraction)
    other_shape = Dataset("odd", torch.zeros(9, 3, 5, 5, dtype=torch.uint8), torch.zeros(9).long(), 5)
    with pytest.raises(DataError, match=r"'odd' has inputs \(3, 5, 5\).*they must agree"):
        _loader(extra=other_shape, extra_fraction=0.5)
    other_classes = Dataset("ten", _dataset(9).x, torch.zeros(9).long(), 10)
    with pytest.raises(DataError, match=r"in 10 classes, but 'toy' has .* in 5; they must agree"):
        _loader(extra=other_classes, extra_fraction=0.5)


def test_bad_data_is_refused_before_the_first_step() -> None:
    unlabelled = Dataset("toy", _dataset().x, torch.full((50,), -1), 5)
    with pytest.raises(DataError, match=r"label -1 of sample 0 is outside 0\.\.4"):
        _loader(unlabelled)


def test_the_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    list(_loader(extra=_dataset(9), extra_fraction=0.5).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_device_batches_equal_those_of_the_cpu() -> None:
    options = {"extra": _dataset(20), "extra_fraction": 0.25}
    here, there = list(_loader(**options).epoch(1)), list(_loader(**options, device="cuda").epoch(1))
    assert all(b.x.is_cuda and b.y.is_cuda and b.ids.is_cuda for b in there)
    assert all(_same(a, Batch(b.x.cpu(), b.y.cpu(), b.ids.cpu())) for a, b in zip(here, there, strict=True))


class _Noted(Augmentation):
    """Tells how many images it is given at once."""

    def __call__(self, x: Tensor, gen: SampleGen) -> Tensor:
        together.append(len(x))
        return super().__call__(x, gen)


together: list[int] = []


@pytest.mark.parametrize("extra", [{}, {"extra": _dataset(30), "extra_fraction": 0.5}], ids=["alone", "extra data"])
@pytest.mark.parametrize("start", [0, 3, 9, 10])
def test_batches_made_together_are_those_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, start: int, extra: dict[str, Any]
) -> None:
    """Also where the end cuts a group off, with a last batch that takes in a lone sample."""
    loader = _loader(_dataset(41), batch_size=4, augmentation=_Noted(crop=1, flip=True, erase=0.5), **extra)
    together.clear()
    one_by_one = list(loader.epoch(1, start))
    assert len(together) == len(one_by_one) == len(loader) - start
    together.clear()
    monkeypatch.setattr("flatrock.data.loader.AHEAD", 4)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    found = list(loader.epoch(1, start))
    assert len(together) == -(-(len(loader) - start) // 4)
    assert all(map(_same, found, one_by_one))
    assert len(found) == len(one_by_one)
