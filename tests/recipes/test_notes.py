"""What will not happen is told before it does not: T06, T07 and T08."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from own_cases import among_methods
from start_cases import Told
from torch import nn
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.hooks import Moment
from flatrock.core.rng import Seed
from flatrock.flatness.swa import SWA
from flatrock.objectives.gat import GAT
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.recipes.notes import Span, notes
from flatrock.recipes.pieces import build_schedule
from flatrock.workflows.cost import known_samples
from flatrock.workflows.train import train_recipe

STEPS = {"name": "piecewise", "milestones": [100, 150]}


def told(per_epoch: int | None = 10, base: str = "digits_trades", **changes: Any) -> list[str]:
    return notes(load_recipe(base, {k.replace("__", "."): v for k, v in changes.items()}), per_epoch=per_epoch)


# T06


def test_milestones_beyond_the_end() -> None:
    (text,) = told(schedule=STEPS, train__epochs=3)
    assert text.startswith("T06 the rate never drops: milestones 100, 150 lie beyond 3 epochs")
    (text,) = told(schedule=STEPS, train__epochs=120)
    assert "does not drop as often as it says: milestone 150 lies beyond 120 epochs" in text
    assert told(schedule=STEPS, train__epochs=200) == []
    (text,) = told(schedule=STEPS, train__epochs=200, train__max_steps=900)
    assert "beyond 200 epochs (900 steps of train.max_steps)" in text


@pytest.mark.parametrize("clock", ["step", "epoch", "epoch_from_1"])
@pytest.mark.parametrize("milestone", [1, 2, 2.95, 3, 4])
def test_what_is_told_of_milestones_is_what_the_schedule_does(clock: str, milestone: float) -> None:
    keys = {"schedule": {"name": "piecewise", "milestones": [milestone], "clock": clock}, "train.epochs": 3}
    schedule = build_schedule(recipe := load_recipe("digits_trades", keys))
    drops = schedule.at(29, 10) < schedule.lr
    assert bool(notes(recipe, per_epoch=10)) is not drops


def test_methods_that_wait_for_too_long() -> None:
    awp = [{"name": "awp", "warmup": 4}]
    (text,) = told(flatness=awp, train__epochs=3)
    assert text.startswith("T06 awp never acts: its warmup 4 lies beyond 3 epochs")
    assert told(flatness=awp, train__epochs=4) == []
    assert told(flatness=[{"name": "awp", "warmup": 4, "gamma": 0}], train__epochs=3) == [], "it is switched off"
    swa = [{"name": "swa", "start": 0.9, "ramp": True}]
    assert told(flatness=swa, train__epochs=3) == []
    (text,) = told(flatness=swa, train__epochs=3, train__max_steps=20)
    assert text.startswith("T06 swa never averages: its start 0.9 is not reached")
    gat = {"base": "digits_gat", "train__epochs": 3}
    assert told(**gat) == []
    (text,) = told(**gat, train__max_steps=20)
    assert text.startswith(f"T06 the weight of gat never rises: rise_after {GAT().rise_after:g} is not")
    assert told(**gat, train__max_steps=20, objective__rise_after=0.5) == []


# T07


def test_a_run_too_short_for_its_average() -> None:
    (text,) = told(flatness=[{"name": "swa"}], train__epochs=4)
    assert text.startswith("T07 swa averages 39 updates, fewer than 3 horizons 1/(1 - decay) = 200: at the end 82 %")
    assert "after 1 of 40 steps" in text
    assert "set flatness.swa.ramp=true or a decay of at most 0.923" in text, "half of 40 steps are no more than 40"


def test_a_late_start_is_a_cure_where_enough_steps_are_left() -> None:
    (text,) = told(per_epoch=180, flatness=[{"name": "swa"}], train__epochs=3)
    assert "at the end 7 %" in text
    assert "flatness.swa.ramp=true, a decay of at most 0.994 or" not in text, "270 steps leave 26 % at 0.995"
    (text,) = told(per_epoch=180, flatness=[{"name": "swa", "decay": 0.99, "start": 0.49}], train__epochs=3)
    assert text.split("; set ")[1].startswith(
        "flatness.swa.ramp=true, a decay of at most 0.989 or a start of 0.5 or later"
    )


@pytest.mark.parametrize("start", [0.5, 0.7, 0.9])
def test_a_late_start_is_told_where_the_average_is_little_but_its_first_copy(start: float) -> None:
    (text,) = told(per_epoch=18, flatness=[{"name": "swa", "decay": 0.995, "start": start}], train__epochs=6)
    updates = Span(6, 18, 108).since(start) - 1
    assert f"at the end {100 * 0.995**updates:.0f} % of the average" in text
    assert "or later" not in text
    assert text.startswith("T07 ")


@pytest.mark.parametrize("cure", [{"ramp": True}, {"decay": 0.923}, {"decay": None}, {"decay": 0.0}], ids=str)
def test_the_cures_of_it(cure: dict[str, Any]) -> None:
    assert told(flatness=[{"name": "swa", **cure}], train__epochs=4) == []
    assert told(flatness=[{"name": "swa"}], train__epochs=61) == []
    assert told(flatness=[{"name": "swa", "start": 0.5, "decay": 0.9}], train__epochs=6) == []
    assert told(per_epoch=None, flatness=[{"name": "swa"}], train__epochs=4) == [], "how many steps is not known"


@pytest.mark.parametrize("start", [0.0, 0.1, 0.33, 0.49])
def test_the_share_that_is_told_is_that_of_the_first_copy(start: float) -> None:
    """A weight that is 1 when the average begins and 0 from then on: what is left of the 1 is its share."""
    (text,) = told(flatness=[{"name": "swa", "start": start}], train__epochs=4)
    method, net, began = SWA(start=start), nn.Linear(1, 1, bias=False), False
    for step in range(40):
        share = step / 39
        nn.init.constant_(net.weight, 1.0 if not began else 0.0)
        began = began or share >= start
        method.after_step(net, Moment(epoch=step // 10 + 1, step=step, share=share, seed=Seed(0)))
    left = float(method.average()["weight"])
    assert f"at the end {100 * left:.0f} % of the average" in text
    torch.testing.assert_close(left, 0.995 ** (Span(4, 10, 40).since(start) - 1), rtol=1e-5, atol=0)


# T08


def test_attacks_that_make_no_step() -> None:
    (text,) = told(attack__steps=0)
    assert text.startswith("T08 no gradient step is made by the attack in training")
    texts = told(select__attack="pgd-0", evaluate__attacks=["fgsm", "autoattack", {"name": "mt", "steps": 0}])
    assert [re.sub(": .*", "", text) for text in texts] == [
        "T08 no gradient step is made by pgd-0 of select.attack",
        "T08 no gradient step is made by mt-0 of evaluate.attacks",
    ]
    assert told(base="digits_standard") == []


def test_steps_that_lead_nowhere() -> None:
    """Seven steps reach a fifth of a ball of 0.2 from 0.04 / 7 = 0.0057 on."""
    (text,) = told(base="digits_at", attack__step_size=0.0055)
    assert text.startswith("T08 all steps of the attack in training lead 0.0385 far, in a ball of 0.2: it hardly")
    assert told(base="digits_at", attack__step_size=0.006) == []
    assert told(base="digits_at", attack={"name": "pgd", "steps": 1}) == [], "a default step is a quarter of the ball"
    (text,) = told(base="digits_at_l2", attack__step_size=0.001)
    assert "in a ball of" in text
    (text,) = told(base="digits_at", threat__eps=0)
    assert text.startswith("T08 threat.eps is 0: no attack moves anything")
    for attack in ({"name": "fgsm"}, {"name": "mt"}, {"name": "smooth-pgd", "sigma": 0}):
        assert len(told(base="digits_at", attack=attack, threat__eps=0)) == 1
    for base in ("digits_standard", "digits_smooth", "digits_trades_smooth_pgd"):
        assert told(base=base, threat__eps=0) == [], "noise of its own"


def test_functions_of_the_users_that_make_no_step(tmp_path: Path) -> None:
    with among_methods(tmp_path):
        (text,) = told(base="digits_at", attack={"name": "mymethods:climb", "steps": 0})
        assert text.startswith("T08 no gradient step is made by the attack in training")
        assert told(base="digits_at", attack={"name": "mymethods:climb", "steps": 1}) == []
        assert told(base="digits_at", attack={"name": "mymethods:Climb", "steps": 0}) == [], "what it calls steps"
        (text,) = told(base="digits_at", select__attack="mymethods:climb-0")
        assert "made by mymethods:climb-0 of select.attack" in text


# Where it is told


def test_before_training_and_in_what_it_leaves(tmp_path: Path) -> None:
    keys = {"train.epochs": 2, "train.batch_size": 64, "attack.steps": 0, "schedule": STEPS, "train.tensorboard": False}
    heard = Told()
    recipe = load_recipe("digits_at", keys)
    run = train_recipe(recipe, folder=tmp_path / "run", device="cpu", progress=heard)
    assert [text[:3] for text in heard.said[:2]] == ["T08", "T06"]
    assert run.findings[:2] == tuple(heard.said[:2])
    again = Told()
    assert train_recipe(recipe, folder=tmp_path / "run", device="cpu", progress=again, resume=True) == run
    assert again.said == [f"{tmp_path / 'run'}: there is nothing left to train"], "notes are told once"


def test_by_check() -> None:
    words = ["check", "digits_trades", "train.epochs=3", "flatness=[{name: swa}]", "attack.steps=0", "--device", "cpu"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert re.findall(r"^note +(T\d\d)", done.output, re.M) == ["T08", "T07"]
    assert "note" not in CliRunner().invoke(app, ["check", "digits_trades", "--device", "cpu"]).output


def test_the_library_means_what_it_says() -> None:
    """But for a milestone that MART's authors have after the last epoch."""
    odd = {}
    for name in recipe_names():
        recipe = load_recipe(name)
        samples = known_samples(recipe)
        if found := notes(recipe, per_epoch=None if samples is None else -(-samples // recipe.train.batch_size)):
            odd[name] = [text[:3] for text in found]
    assert odd == {"cifar10_mart_linf_wrn34": ["T06"], "cifar10_mart_awp_linf_wrn34": ["T06"]}
