"""Digits and moons: the datasets that need no files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core.errors import ConfigError
from flatrock.data import digits, moons

NOWHERE = Path("does-not-exist")


def test_digits_are_sixteenths_split_into_1297_and_500() -> None:
    train, test = digits.load("train", NOWHERE), digits.load("test", NOWHERE)
    assert train.x.shape == (1297, 1, 8, 8)
    assert test.x.shape == (500, 1, 8, 8)
    assert train.x.dtype == torch.float32
    assert torch.equal(train.x * 16, (train.x * 16).round())
    assert float(train.x.max()) == 1.0
    assert sorted([*train.ids.tolist(), *test.ids.tolist()]) == list(range(1797))


def test_digits_are_the_same_every_time_and_match_their_source() -> None:
    from sklearn.datasets import load_digits

    test, raw = digits.load("test", NOWHERE), load_digits()
    assert test.fingerprint() == digits.load("test", NOWHERE).fingerprint()
    assert test.y.tolist() == raw.target[test.ids.numpy()].tolist()
    torch.testing.assert_close(test.x[:, 0].double(), torch.from_numpy(raw.images[test.ids.numpy()] / 16))


def test_digits_take_nothing_of_scikit_learn_but_the_file() -> None:
    """Its import takes longer than all else they need."""
    asked = "import sys; from pathlib import Path; from flatrock.data import digits; digits.load('test', Path()); "
    asked += "print('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_digits_that_are_not_where_they_were_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = digits.load("test", NOWHERE)
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    monkeypatch.setattr(digits, "_read", digits._read.__wrapped__)
    asked = digits.load("test", NOWHERE)
    assert asked.fingerprint() == here.fingerprint()
    assert torch.equal(asked.x, here.x)


def test_whoever_writes_into_digits_writes_into_a_copy() -> None:
    one, other = digits.load("train", NOWHERE), digits.load("train", NOWHERE)
    before = other.fingerprint()
    one.x.zero_()
    one.y.zero_()
    assert digits.load("train", NOWHERE).fingerprint() == other.fingerprint() == before


def test_moons_lie_in_the_unit_square_on_their_circles() -> None:
    data = moons.load("train", NOWHERE, noise=0.0)
    assert data.x.shape == (1000, 2)
    assert data.y.bincount().tolist() == [500, 500]
    plane = data.x.double() * 4 - 1.5
    centre = torch.where(data.y[:, None] == 0, torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.5]])).double()
    radius = (plane - centre).norm(dim=1)
    torch.testing.assert_close(radius, torch.ones_like(radius), atol=1e-6, rtol=0)


def test_moons_train_and_test_are_different_draws_each_repeatable() -> None:
    train, test = moons.load("train", NOWHERE), moons.load("test", NOWHERE)
    assert train.fingerprint() == moons.load("train", NOWHERE).fingerprint()
    assert train.fingerprint() != test.fingerprint()
    shared = (train.x[:, None] == test.x[None]).all(-1).any()
    assert not bool(shared)


def test_moons_options_are_used_and_checked() -> None:
    assert len(moons.load("test", NOWHERE, points=64)) == 64
    with pytest.raises(ConfigError, match=r"noise=2\.0 leave the unit square; use less noise"):
        moons.load("train", NOWHERE, noise=2.0)
    with pytest.raises(ConfigError, match="points >= 2 and noise >= 0, got points=1"):
        moons.load("train", NOWHERE, points=1)


@pytest.mark.parametrize("split", ["train", "test"])
def test_noise_that_is_too_much_for_one_split_is_told_of_both(split: Any) -> None:
    with pytest.raises(ConfigError, match=r"noise=0.17 leave the unit square; use less"):  # of test alone
        moons.load(split, NOWHERE, points=1200, noise=0.17)
