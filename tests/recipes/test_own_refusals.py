"""Methods of one's own that cannot work are refused before anything is written, with file, line and cure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_cases import among_methods

import flatrock
from flatrock.core.errors import ConfigError, TrainingError
from flatrock.core.rng import random_states
from flatrock.engine.schedule import SCHEDULES
from flatrock.recipes.load import load_recipe

WRONG = '''
import torch
import torch.nn.functional as F

from flatrock.core.hooks import Flatness, Nudge, Penalty
from flatrock.core.types import Parts


class Plain:
    passes, inner_loss, hard_labels = ("clean", "adv"), "ce", False

    def __init__(self, *, beta: float = 1.0, big: bool = False, name: str | None = None, scale: int = 1):
        self.beta = beta

    def loss(self, views, y):
        return Parts({"ce": self.of(F.cross_entropy(views.clean.logits, y, reduction="none"))}, {"ce": 1.0})

    def of(self, ce):
        return ce.mean()


class Bare:
    def loss(self, views, y):
        return None


class Lossless:
    pass


class Short(Plain):
    def loss(self, views):
        return None


class Strange(Plain):
    passes = ("clean", "dirty")


class Climbs(Plain):
    inner_loss = "kll"


class Idle(Plain):
    inner_loss = "none"


class Raises(Plain):
    def __init__(self, *, beta: float):
        raise ValueError(f"no beta {beta}")


class Fails(Plain):
    def of(self, ce):
        return ce.mean() + missing


class Long(Plain):
    def of(self, ce):
        return ce


class Number(Plain):
    def of(self, ce):
        return 0.5


class Weightless(Plain):
    def loss(self, views, y):
        return Parts({"ce": views.clean.logits.mean()}, {})


class NoParts(Plain):
    def loss(self, views, y):
        return views.clean.logits.mean()


class Nan(Plain):
    def of(self, ce):
        return ce.mean() * float("nan")


class Still(Plain):
    def of(self, ce):
        return ce.mean().detach()


class Centred(Plain):
    """Knows how wide features are, and descends on them alone."""

    def __init__(self, *, width: int = 64):
        self.centres = torch.zeros(10, width)

    def loss(self, views, y):
        return Parts({"far": (views.clean.features - self.centres[y]).square().mean()}, {"far": 1.0})


class At(Plain):
    def __init__(self, *, at: int = 20):
        self.at = at


class AtWhat(Plain):
    def at(self):
        return self


class AtFails(Plain):
    def at(self, moment):
        return 1 / moment.step


class Unasked(Plain):
    passes = ("clean",)

    def loss(self, views, y):
        return self.of(views.adv.logits)


class Later(Plain):
    """Not finite in training only: random logits are small."""

    calls = 0

    def of(self, ce):
        Later.calls += 1
        return ce.mean() * (float("nan") if Later.calls > 7 else 1)


class NoFlat:
    def in_loss(self, look):
        return None


class Typo(Flatness):
    def in_los(self, look):
        return None


class Mover(Flatness):
    def before_loss(self, scene):
        return None


class Average(Flatness):
    averages = True

    def after_step(self, model, moment):
        pass


class Needy(Flatness):
    needs = ("dirty",)

    def in_loss(self, look):
        return None


class Hook(Flatness):
    def in_loss(self):
        return None


class Vector(Flatness):
    def in_loss(self, look):
        return Penalty({"vector": look.x.flatten(1).sum(1)}, {"vector": 1.0})


class NanTerm(Flatness):
    def in_loss(self, look):
        return Penalty({"odd": look.x.mean() * float("nan")}, {"odd": 1.0})


class Surprise(Flatness):
    def in_loss(self, look):
        raise RuntimeError("not today")


class Picky(Flatness):
    def in_loss(self, look):
        return None

    def check(self, model):
        return {}["network"]


class Two(Flatness):
    averages = True

    def after_step(self, model, moment):
        pass

    def average(self):
        return {}


def undecayed(params: list, *, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Rprop(params, lr=lr)


def unsaid(params, *, lr):
    return torch.optim.Rprop(params, lr=lr)


def liar(params, *, lr) -> torch.optim.Optimizer:
    return 3


def negative(t: float, *, lr: float) -> float:
    return 1 - t


def failing(t: float) -> float:
    return 1 / 0


def texty(t: float) -> float:
    return "much"


def timeless(*, lr: float) -> float:
    return lr


def needs(t: float, *, power: float) -> float:
    return power
'''
LINES = {text: number for number, text in enumerate(WRONG.splitlines(), 1)}


@pytest.fixture(autouse=True)
def methods(tmp_path: Path) -> Iterator[Path]:
    with among_methods(tmp_path, WRONG) as file:
        yield file


def objective(name: str, **options: Any) -> dict[str, Any]:
    return {"objective": {"name": f"mymethods:{name}", **options}}


def flat(*names: str) -> dict[str, Any]:
    return {"flatness": [f"mymethods:{name}" for name in names]}


def line(text: str) -> str:
    return rf"\(mymethods.py:{LINES[text]}\)"


CASES: list[tuple[dict[str, Any], str]] = [
    (objective("Plian"), "unknown name 'Plian'; known: .*; did you mean 'Plain'"),
    ({"objective": {"name": "nowhere:Plain"}}, r"'nowhere' is not a module of the current folder, .*nowhere.py"),
    ({"objective": {"name": "a.b:Plain"}}, "does not name an objective; write file:name, such as mymethods:Mine"),
    (objective("Plain", bta=2), "unknown option of objective 'mymethods:Plain': 'bta'; known: .*; did you mean 'beta'"),
    (objective("Plain", beta="x", scale=1.5), "beta must be a number, got 'x'"),
    (objective("Plain", beta="x", scale=1.5), "scale must be a whole number, got 1.5"),
    (objective("Plain", big=1), "big must be true or false, got 1"),
    (objective("Plain", name__=1), "unknown option"),
    (objective("Bare"), "it has no attribute 'passes', and it has no attribute 'inner_loss'"),
    (objective("Lossless"), r"the class has no method loss\(views, y\); write a class with"),
    (objective("Short"), r"its loss must take \(views, y\), it takes \(views\)"),
    (objective("Strange"), r"its passes are \('clean', 'dirty'\), and not a tuple of 'clean' and 'adv'"),
    (objective("Climbs"), "unknown inner_loss 'kll'; known: .*; did you mean 'kl'"),
    (objective("Idle"), "it makes an 'adv' pass, but its inner_loss is 'none'"),
    (objective("Raises"), "mymethods:Raises needs the option beta"),
    (
        objective("Raises", beta=2),
        r"mymethods:Raises\(beta=2\) raised ValueError: no beta 2 "
        + line('        raise ValueError(f"no beta {beta}")'),
    ),
    (objective("Fails"), "the loss of .*Fails raised NameError: .* " + line("        return ce.mean() + missing")),
    (objective("Long"), r"term 'ce' is a Tensor of shape \[4\], not a scalar tensor; take its .mean\(\)"),
    (objective("Number"), "term 'ce' is 0.5, not a scalar tensor"),
    (objective("Weightless"), r"term 'ce' has no weight, there are \[\]"),
    (objective("NoParts"), "gave a Tensor of shape .*, not flatrock.core's Parts"),
    (objective("Nan"), "the loss of mymethods:Nan is not finite on logits of a normal distribution: term ce"),
    (objective("Still"), "has no gradient, so nothing would be learned"),
    (objective("Centred", width=65), r"the loss of mymethods:Centred raised RuntimeError: .*64.*65"),
    (objective("At"), r"it has no method at\(moment\), and 'at', which it has, means that here; call it otherwise"),
    (objective("AtWhat"), r"its at must take \(moment\), it takes \(\)"),
    (objective("AtFails"), "AtFails raised ZeroDivisionError: .* " + line("        return 1 / moment.step")),
    (flat("NoFlat"), r"flatness\[0\] mymethods:NoFlat: mymethods:NoFlat is not .*: the class is no Flatness"),
    (flat("Typo"), "it overrides none of the hooks before_attack, before_loss, in_loss, after_step"),
    (flat("Mover"), "it overrides before_loss, so it must say `moves_weights = True`"),
    (flat("Average"), "it says `averages = True`, so it must override average"),
    (flat("Needy"), r"its needs are \('dirty',\), and not a tuple of 'clean' and 'adv'"),
    (flat("Hook"), r"its in_loss must take \(look\), it takes \(\)"),
    (
        objective("Unasked"),
        r"the loss of mymethods:Unasked reads views.adv, which is None "
        + line("        return self.of(views.adv.logits)")
        + r": its passes are \('clean',\); set `passes = \('clean', 'adv'\)`",
    ),
    (flat("Picky"), r"mymethods:Picky: KeyError: 'network' " + line('        return {}["network"]')),
    ({"flatness": ["swa", "mymethods:Two"]}, "swa and mymethods:Two both keep an average; keep one of them"),
    ({"optimizer": {"name": "mymethods:undecayed", "momentum": 0}}, "undecayed has no weight_decay, got 0.0005"),
    ({"optimizer": {"name": "mymethods:undecayed"}}, "undecayed has no momentum, got 0.9; set optimizer.momentum=0"),
    ({"optimizer": {"name": "mymethods:unsaid"}}, r"does not say that it returns one \(-> Optimizer\)"),
    ({"optimizer": {"name": "mymethods:liar", "momentum": 0}}, "mymethods:liar is not an optimizer: it is 3"),
    (
        {"optimizer": {"name": "mymethods:undecayed", "betta": 1, "momentum": 0}},
        "unknown option .*'betta'",
    ),
    ({"schedule": {"name": "mymethods:negative"}}, r"gives the rate -10.0 at time 11; it must be a number >= 0"),
    ({"schedule": {"name": "mymethods:failing"}}, "failing raised ZeroDivisionError: .* " + line("    return 1 / 0")),
    ({"schedule": {"name": "mymethods:texty"}}, "gives the rate 'much'"),
    ({"schedule": {"name": "mymethods:timeless"}}, r"must take \(t\), it takes \(lr\)"),
    ({"schedule": {"name": "mymethods:needs"}}, "mymethods:needs needs the option power"),
    ({"schedule": {"name": "mymethods:needs", "power": 1, "clock": "noon"}}, "unknown clock 'noon'"),
    ({"schedule": {"name": "mymethods:needs", "lr": 1}}, "lr belong to optimizer.lr"),
]


@pytest.mark.parametrize(("overrides", "message"), CASES)
def test_what_cannot_work_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("digits_at", overrides)


def test_an_objective_may_know_how_wide_the_features_are() -> None:
    assert load_recipe("digits_at", objective("Centred")).objective.name == "mymethods:Centred"
    assert load_recipe("moons_at", objective("Centred", width=100)).model.name == "moons_mlp"


def test_faults_are_told_at_once_and_nothing_is_written() -> None:
    wrong = {**objective("Long"), **flat("Typo"), "optimizer": {"name": "mymethods:liar", "momentum": 0}}
    with pytest.raises(ConfigError, match="has 3 faults") as caught:
        flatrock.train("digits_at", **wrong, train={"epochs": 1}, folder="runs/mine")
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        "optimizer",
        "objective",
        "flatness[0] mymethods",
    ]
    assert not Path("runs").exists()


def test_a_file_that_cannot_be_imported(methods: Path) -> None:
    methods.write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match="module 'mymethods' needs 'nothing_of_this_name', which is not installed"):
        load_recipe("digits_at", objective("Plain"))
    methods.write_text("class Plain(:\n")
    with pytest.raises(ConfigError, match=r"importing 'mymethods' raised SyntaxError: .*mymethods.py, line 1"):
        load_recipe("digits_at", objective("Plain"))


def test_random_state_is_given_back() -> None:
    before = random_states()
    load_recipe("digits_at", {**objective("Plain"), "schedule": {"name": "mymethods:needs", "power": 0.1}})
    assert random_states() == before


SHORT: dict[str, Any] = {"train": {"epochs": 1, "batch_size": 200, "tensorboard": False}, "attack": {"steps": 1}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (objective("Later"), "the loss became non-finite at step 2: term ce"),
        (flat("NanTerm"), "the loss became non-finite at step 0: term odd"),
        (
            flat("Vector"),
            r"in_loss of flatness mymethods:Vector \(mymethods.py:\d+\): term 'vector' is a Tensor of shape \[200\]",
        ),
        (flat("Surprise"), "RuntimeError: not today " + line('        raise RuntimeError("not today")') + r" \(where"),
    ],
)
def test_what_goes_wrong_on_the_way_is_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        flatrock.train("digits_at", **overrides, **SHORT, folder="runs/mine", device="cpu")


def test_objects_are_named_instead() -> None:
    for section in ("objective", "attack", "optimizer", "schedule"):
        with pytest.raises(ConfigError, match=rf"{section}={{'name': 'mymethods:Mine'}} \(docs/own_methods.md\)"):
            flatrock.train("digits_at", **{section: torch.nn.Identity()})


def test_a_schedule_without_meaning_is_noticed_on_the_way() -> None:
    schedule = SCHEDULES.make("mymethods:negative", lr=0.1, epochs=3)
    assert schedule.at(0, 2) == 0.5
    with pytest.raises(TrainingError, match=r"gives the rate -0.5 at time 1.5"):
        schedule.at(2, 2)
