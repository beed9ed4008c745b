"""Faults of a flatness method of one's own are told where they are taken, with file, line, rule and cure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_cases import among_methods

import flatrock
from flatrock.core.errors import TrainingError

WRONG = '''
import torch

from flatrock.core.hooks import Flatness, Nudge, Penalty
from flatrock.core.types import Parts, Point


class Moves(Flatness):
    moves_weights = True

    def __init__(self, *, how: str = "good"):
        self.how = how

    def before_loss(self, scene):  # moves
        name, weight = next(iter(scene.model.named_parameters()))
        zeros = torch.zeros_like(weight)
        return {
            "good": Nudge({name: zeros}, scene.points),
            "spread": Nudge({name: torch.zeros(())}, list(scene.points)),
            "shape": Nudge({name: torch.zeros(5)}, scene.points),
            "number": Nudge({name: 0.5}, scene.points),
            "name": Nudge({"hed.weight": zeros}, scene.points),
            "dict": {name: zeros},
            "list": Nudge([zeros], scene.points),
            "nowhere": Nudge({name: zeros.to("meta")}, scene.points),
            "points": Nudge({name: zeros}, scene.points[0].x_adv),
            "none": Nudge({name: zeros}, ()),
            "half": Nudge({name: zeros}, (Point(scene.points[0].x_adv[:5]),)),
        }[self.how]


class Before(Flatness):
    def __init__(self, *, how: str = "good"):
        self.how = how

    def before_attack(self, model, moment):  # before
        if self.how == "nothing":
            return None
        return Nudge({}, ()) if self.how == "nudge" else {"nope": torch.zeros(3)}


class Adds(Flatness):
    def __init__(self, *, reads: str = "clean"):
        self.reads = reads

    def in_loss(self, look):
        if self.reads == "itself":
            return None.logits
        seen = getattr(look.views, self.reads)
        return Penalty({"size": seen.logits.square().mean()}, {"size": 0.1})


class Dict(Flatness):
    def in_loss(self, look):  # dict
        return {"size": look.x.mean()}


class Averages(Flatness):
    averages = True

    def __init__(self, *, how: str = "shape"):
        self.how = how

    def after_step(self, model, moment):
        self.name, self.weight = next(iter(model.named_parameters()))

    def average(self):  # averages
        return {self.name: torch.zeros(1) if self.how == "shape" else self.weight.detach().clone()}

    def state(self):  # state
        return {"steps": 3} if self.how == "state" else {}


class Late:
    """Reads the pass it did not ask for in training alone."""

    passes, inner_loss, hard_labels = ("clean",), "ce", False
    calls = 0

    def loss(self, views, y):
        Late.calls += 1
        seen = views.adv if Late.calls > 6 else views.clean
        return Parts({"ce": torch.nn.functional.cross_entropy(seen.logits, y)}, {"ce": 1.0})
'''
LINES = {text: number for number, text in enumerate(WRONG.splitlines(), 1)}
SHORT: dict[str, Any] = {
    "train": {"epochs": 1, "batch_size": 200, "tensorboard": False, "max_steps": 3},
    "attack": {"steps": 1},
    "select": {"size": 20, "attack": "pgd-1"},
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def methods(tmp_path: Path) -> Iterator[Path]:
    with among_methods(tmp_path, WRONG) as file:
        yield file


def line(text: str) -> str:
    return rf"\(mymethods.py:{LINES[text]}\)"


def trained(*flatness: dict[str, Any], base: str = "digits_at", **more: Any) -> Any:
    wanted = [{**one, "name": f"mymethods:{one['name']}"} for one in flatness]
    return flatrock.train(base, flatness=wanted, folder="runs/mine", **{**SHORT, **more})


MOVES = "before_loss of flatness mymethods:Moves " + line("    def before_loss(self, scene):  # moves")
BEFORE = "before_attack of flatness mymethods:Before " + line("    def before_attack(self, model, moment):  # before")
FAULTS: list[tuple[dict[str, Any], str]] = [
    (
        {"name": "Moves", "how": "shape"},
        MOVES + r" gave a Tensor of shape \[5\] for '.*', which has shape \[\d+, 1, 3, 3\]; give .*zeros_like",
    ),
    ({"name": "Moves", "how": "number"}, MOVES + r" gave 0.5 for '.*', which has shape"),
    (
        {"name": "Moves", "how": "name"},
        MOVES + r" names what is none: unknown parameter 'hed.weight'; known: .*named_parameters.*did you mean 'head.w",
    ),
    ({"name": "Moves", "how": "dict"}, MOVES + r" gave .*, not flatrock.core.hooks.Nudge\(shift, points\); return"),
    ({"name": "Moves", "how": "list"}, MOVES + " gave a list of 1 .*, not tensors by the names of parameters"),
    ({"name": "Moves", "how": "nowhere"}, MOVES + r" gave a tensor on meta for '.*', which is on cpu; add .to\("),
    ({"name": "Moves", "how": "points"}, MOVES + r" gave a Nudge whose points are a Tensor .*; give scene.points, or"),
    ({"name": "Moves", "how": "none"}, MOVES + r" gave a Nudge whose points are \(\)"),
    ({"name": "Moves", "how": "half"}, MOVES + r" gave a Nudge whose points are .*, of inputs \[200, 1, 8, 8\]"),
    ({"name": "Before", "how": "name"}, BEFORE + r" names what is none: unknown parameter 'nope'; known: bn1.bias, "),
    ({"name": "Before", "how": "nudge"}, BEFORE + " gave Nudge.*, not tensors by the names of parameters"),
    (
        {"name": "Adds"},
        r"in_loss of flatness mymethods:Adds reads views.clean, which is None "
        + line('        return Penalty({"size": seen.logits.square().mean()}, {"size": 0.1})')
        + r": its needs are \(\); set `needs = \('clean',\)`",
    ),
    (
        {"name": "Dict"},
        r"in_loss of flatness mymethods:Dict "
        + line("    def in_loss(self, look):  # dict")
        + " gave .*, not flatrock.core's Penalty",
    ),
    (
        {"name": "Averages"},
        r"average of flatness Averages "
        + line("    def average(self):  # averages")
        + r" gave a Tensor of shape \[1\] for",
    ),
    (
        {"name": "Averages", "how": "state"},
        r"state of flatness mymethods:Averages "
        + line("    def state(self):  # state")
        + r" gave 3, not tensors by name; store a number as torch.tensor\(number\)",
    ),
]


@pytest.mark.parametrize(("method", "words"), FAULTS, ids=lambda value: str(value)[:40])
def test_faults_are_told_in_words(method: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        trained(method)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "Moves"},
        {"name": "Moves", "how": "spread"},
        {"name": "Before", "how": "nothing"},
        {"name": "Adds", "reads": "adv"},
        {"name": "Averages", "how": "good"},
    ],
    ids=str,
)
def test_what_is_right_is_let_through(method: dict[str, Any]) -> None:
    assert trained(method).status == "truncated"


def test_a_pass_that_others_need_may_be_read_too() -> None:
    assert trained({"name": "Adds"}, base="digits_trades").status == "truncated"
    with pytest.raises(TrainingError, match="AttributeError: 'NoneType' object has no attribute 'logits'"):
        trained({"name": "Adds", "reads": "itself"}, base="digits_trades", overwrite=True)


def test_an_objective_that_reads_more_later() -> None:
    late = {"objective": {"name": "mymethods:Late"}, "attack": {"name": "auto"}}
    with pytest.raises(TrainingError, match=r"the objective reads views.adv, which is None \(mymethods.py:\d+\): its"):
        trained(**late, train={**SHORT["train"], "epochs": 3, "max_steps": 12})
    assert torch.is_grad_enabled()
