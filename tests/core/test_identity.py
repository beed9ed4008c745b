"""What two pieces of work must have in common for one to go on where the other stopped."""

from __future__ import annotations

import json

import pytest
import torch

from flatrock.core.identity import ANSWERS, answers, differences


def test_keys_that_differ_are_named() -> None:
    stored = json.dumps({"seed": 0, "data": "a", "old": None})
    assert differences(stored, {"seed": 0, "data": "a", "old": None}) == []
    assert differences(stored, {"seed": 1, "data": "a", "new": None}) == ["new", "old", "seed"]
    with pytest.raises(ValueError, match="JSON object"):
        differences("[]", {})


def test_answers_may_differ_by_rounding_only() -> None:
    margins = torch.tensor([1.23456, -2.0, float("nan")])
    assert answers(margins) == [1.235, -2.0, 0.0]
    stored = json.dumps({ANSWERS: answers(margins), "model": "a"})
    assert differences(stored, {ANSWERS: answers(margins * 1.001), "model": "a"}) == []
    assert differences(stored, {ANSWERS: answers(margins * 1.1), "model": "a"}) == [ANSWERS]
    assert differences(stored, {ANSWERS: answers(margins[:2]), "model": "a"}) == [ANSWERS]
    assert differences(stored, {ANSWERS: None, "model": "a"}) == [], "a network that answers at random"
    assert differences(stored, {ANSWERS: answers(-margins), "model": "b"}) == ["model"], "other weights say more"
