"""Methods of one's own in a recipe: copies of built-in ones train the same weights; a run knows its files."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import Ends
from own_cases import METHODS, among_methods
from start_cases import Told, same
from torch import Tensor
from typer.testing import CliRunner

import flatrock
from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import sha256
from flatrock.core.tensorfile import load
from flatrock.engine.schedule import SCHEDULES
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.workflows.cost import estimate
from flatrock.workflows.evaluate import evaluate_run, store_result

SHORT: dict[str, Any] = {
    "train": {"epochs": 2, "batch_size": 50, "tensorboard": False},
    "threat": {"norm": "linf", "eps": 0.02},  # of a network that learns at once none collapses
    "attack__steps": 2,
    "select": {"size": 50, "attack": "pgd-2"},
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def methods(tmp_path: Path) -> Iterator[Path]:
    with among_methods(tmp_path) as file:
        yield file


def weights(run: str, name: str = "last") -> dict[str, Tensor]:
    return {k: v for k, v in load(Path(run) / f"{name}.safetensors")[0].items() if k.startswith("model/")}


OWN = {
    "objective": ({"objective": {"name": "mymethods:Trades", "beta": 3}}, {"objective": {"name": "trades", "beta": 3}}),
    "no method": ({"flatness": ["mymethods:Nothing"]}, {}),
    "flatness": (
        {"flatness": [{"name": "mymethods:Climber", "rho": 0.1}]},
        {"flatness": [{"name": "sam", "rho": 0.1}]},
    ),
    "attack": (
        {"objective__name": "at", "attack": {"name": "mymethods:climb", "steps": 3}},
        {"objective__name": "at", "attack": {"name": "pgd", "steps": 3}},
    ),
    "attack, a class": (
        {"objective__name": "at", "attack": {"name": "mymethods:Climb", "steps": 3, "step_size": "1/20"}},
        {"objective__name": "at", "attack": {"name": "pgd", "steps": 3, "step_size": "1/20"}},
    ),
    "optimizer": ({"optimizer__name": "mymethods:sgd", "optimizer__nesterov": True}, {"optimizer__nesterov": True}),
    "schedule": ({"schedule": {"name": "mymethods:fall"}}, {"schedule": {"name": "cosine"}}),
    "schedule, a class": (
        {"schedule": {"name": "mymethods:Fall", "clock": "epoch"}},
        {"schedule": {"name": "cosine", "clock": "epoch"}},
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_copy_of_a_built_in_method_trains_the_same_weights(kind: str) -> None:
    mine, theirs = OWN[kind]
    how = SHORT if "attack" not in mine else {k: v for k, v in SHORT.items() if k != "attack__steps"}
    flatrock.train("digits_trades", **mine, **how, folder="runs/mine")
    flatrock.train("digits_trades", **theirs, **how, folder="runs/theirs")
    assert same(weights("runs/mine"), weights("runs/theirs"))


def test_a_penalty_is_part_of_the_loss_and_of_the_records() -> None:
    run = flatrock.train("digits_at", **SHORT, flatness=[{"name": "mymethods:Smaller"}], folder="runs/mine")
    flatrock.train("digits_at", **SHORT, folder="runs/plain")
    assert run.records[-1].terms["smaller"] > 0
    assert not same(weights("runs/mine"), weights("runs/plain"))


SMOOTH = """
class Smooth(Trades):
    def __init__(self, *, label_smoothing: float = 0.1) -> None:
        super().__init__()
"""


def test_the_hash_knows_name_and_options(methods: Path) -> None:
    def of(**over: Any) -> str:
        return recipe_hash(load_recipe("digits_trades", over))

    mine = {"objective": {"name": "mymethods:Trades"}}
    assert of(**mine) == of(**mine) != of()
    assert of(**mine) != of(objective={"name": "mymethods:Trades", "beta": 5})
    smooth = {"name": "mymethods:Smooth"}  # a key that is left out of the hash of built-in objectives at 0
    methods.write_text(METHODS + SMOOTH)
    assert of(objective=smooth) != of(objective={**smooth, "label_smoothing": 0.0})


def test_an_option_is_changed_on_the_command_line_and_the_cost_is_told() -> None:
    words = ["flatness=[mymethods:Smaller]", "flatness.mymethods:Smaller.weight=0.5", "attack.name=mymethods:climb"]
    recipe = load_recipe("digits_at", [*words, "attack.steps=7"])
    assert recipe.flatness[0].options == {"weight": 0.5}
    cost = estimate(recipe, device=torch.device("cpu"))
    assert cost.forwards_per_step == 7 + 2  # AT makes no clean pass, the penalty looks at one
    done = CliRunner().invoke(app, ["check", "digits_at", *words])
    assert done.exit_code == 0, done.output
    assert "mymethods:climb" in done.output


def test_adam_goes_on_bit_identically(methods: Path) -> None:
    how = {**SHORT, "optimizer": {"name": "mymethods:Adam", "lr": 1e-3, "momentum": 0, "eps": 1e-6}}
    how["train"] = {**SHORT["train"], "save_seconds": 1e-9}
    flatrock.train("digits_at", **how, folder="runs/whole")
    with pytest.raises(KeyboardInterrupt):
        flatrock.train("digits_at", **how, folder="runs/parts", progress=Ends(4, KeyboardInterrupt))
    flatrock.train("digits_at", **how, folder="runs/parts", resume=True)
    assert same(weights("runs/whole"), weights("runs/parts"))


def test_a_run_knows_the_files_and_says_if_one_changed(methods: Path) -> None:
    how = {**SHORT, "objective": {"name": "mymethods:Trades"}, "folder": "runs/mine"}
    with pytest.raises(KeyboardInterrupt):
        flatrock.train("digits_trades", **how, progress=Ends(4, KeyboardInterrupt))
    info = json.loads(Path("runs/mine/run.json").read_text())
    assert info["provenance"]["own"] == {"mymethods.py": sha256(METHODS)}
    methods.write_text(METHODS + "\n# mended\n")
    hears = Told()
    flatrock.train("digits_trades", **how, resume=True, progress=hears)
    assert [text for text in hears.said if "mymethods.py changed since the run was last at work" in text]
    info = json.loads(Path("runs/mine/run.json").read_text())
    assert info["resumed"][-1]["own"] == {"mymethods.py": sha256(METHODS + "\n# mended\n")}
    hears = Told()
    flatrock.train("digits_trades", **how, resume=True, progress=hears)
    assert not [text for text in hears.said if "changed" in text]
    with pytest.raises(KeyboardInterrupt):
        flatrock.train("digits_trades", **how, overwrite=True, progress=Ends(4, KeyboardInterrupt))
    methods.write_text(METHODS)
    with pytest.warns(UserWarning, match=r"mymethods.py changed since the run was last at work") as caught:
        flatrock.train("digits_trades", **how, resume=True)
    assert [warning.filename for warning in caught] == [__file__]


def test_of_several_devices_the_caller_says_it(methods: Path, capfd: pytest.CaptureFixture[str]) -> None:
    how = {**SHORT, "objective": {"name": "mymethods:Trades"}, "folder": "runs/mine", "device": ["cpu", "cpu"]}
    with pytest.raises(KeyboardInterrupt):
        flatrock.train("digits_trades", **how, progress=Ends(4, KeyboardInterrupt))
    methods.write_text(METHODS + "\n# mended\n")
    with pytest.warns(UserWarning, match=r"mymethods.py changed since the run was last at work") as caught:
        flatrock.train("digits_trades", **how, resume=True)
    assert [warning.filename for warning in caught] == [__file__]
    assert "changed since" not in capfd.readouterr().err, "no other process tells it"
    with pytest.raises(KeyboardInterrupt):
        flatrock.train("digits_trades", **how, overwrite=True, progress=Ends(4, KeyboardInterrupt))
    methods.write_text(METHODS)
    hears = Told()
    flatrock.train("digits_trades", **how, resume=True, progress=hears)
    assert sum("mymethods.py changed since" in text for text in hears.said) == 1
    hears = Told()
    flatrock.train("digits_trades", **how, resume=True, progress=hears)
    assert not [text for text in hears.said if "changed" in text]


def test_a_run_of_built_in_methods_names_no_files() -> None:
    flatrock.train("digits_at", **SHORT, folder="runs/plain")
    assert "own" not in json.loads(Path("runs/plain/run.json").read_text())["provenance"]


def test_two_devices_import_them_too() -> None:
    mine = {"objective": {"name": "mymethods:Trades"}, "flatness": ["mymethods:Smaller"]}
    mine |= {"attack": {"name": "mymethods:climb", "steps": 2}}
    how = {k: v for k, v in SHORT.items() if k not in ("attack__steps", "device")}
    run = flatrock.train("digits_trades", **mine, **how, folder="runs/two", device=["cpu", "cpu"])
    assert run.status == "finished"
    assert run.records[-1].terms["smaller"] > 0


# Runs whose methods are not here any more

EVERYTHING: dict[str, Any] = {
    "objective": {"name": "mymethods:Trades"},
    "flatness": ["mymethods:Smaller"],
    "attack": {"name": "mymethods:climb", "steps": 2},
    "optimizer": {"name": "mymethods:Adam", "lr": 1e-3, "momentum": 0},
    "schedule": {"name": "mymethods:fall"},
    "evaluate": {"attacks": ["pgd-2", "mymethods:climb:steps=2"]},
    "select": {"size": 20, "attack": "mymethods:climb-1"},
}


def trained_elsewhere(methods: Path, **more: Any) -> dict[str, Tensor]:
    how = {k: v for k, v in SHORT.items() if k not in ("attack__steps", "select")}
    flatrock.train("digits_trades", **(EVERYTHING | more), **how, folder="runs/mine")
    before = flatrock.load("runs/mine").state_dict()
    methods.unlink()
    return before


def test_a_run_is_loaded_without_the_methods_it_was_trained_with(methods: Path) -> None:
    before = trained_elsewhere(methods)
    with pytest.warns(UserWarning, match="could not be trained here, which is not needed to look at it") as told:
        after = flatrock.load("runs/mine").state_dict()
    assert same(before, after)
    text = str(told[0].message)
    for section in ("objective:", "flatness[0] mymethods:Smaller:", "attack:", "optimizer:", "schedule:"):
        assert section in text
    assert "'mymethods' is not a module of the current folder" in text


def test_a_run_is_evaluated_without_them(methods: Path) -> None:
    trained_elsewhere(methods)
    hears = Told()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = evaluate_run("runs/mine", attacks=["pgd-2"], limit=20, progress=hears)
    assert 0 <= result.robust <= result.clean
    assert sum("could not be trained here" in text for text in hears.said) == 1
    with pytest.raises(ConfigError, match="'mymethods' is not a module of the current folder"):
        evaluate_run("runs/mine", limit=20, progress=hears)  # the recipe's own attacks need it
    words = ["eval", "runs/mine", "--attacks", "pgd-1", "--limit", "20", "--device", "cpu"]
    for radii in ([], ["--eps", "0.05,0.1"]):
        done = CliRunner().invoke(app, [*words, *radii])
        assert done.exit_code == 0, done.output
        assert "could not be trained here" in " ".join(done.output.split())


COMMANDS = {
    "results --csv": "results runs/mine --csv a.csv",
    "results --out": "results runs/mine --out a.json",
    "results, both": "results runs/mine --csv a.csv --out a.json",
    "landscape": "landscape runs/mine --points 3 --directions 1 --images 10 --attack none --device cpu",
    "surrogate": "eval runs/plain --surrogate runs/mine --attacks pgd-1 --limit 20 --device cpu",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_say_it_once_as_a_line(methods: Path, command: str) -> None:
    flatrock.train("digits_at", **SHORT, folder="runs/plain")
    trained_elsewhere(methods)
    for seed in (0, 1):  # several results of one run
        store_result("runs/mine", evaluate_run("runs/mine", attacks=["pgd-1"], limit=20, seed=seed, progress=Told()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stdout.count("could not be trained here") == 1 and "UserWarning" not in done.output


def test_it_is_not_resumed_without_them(methods: Path) -> None:
    trained_elsewhere(methods)
    with pytest.raises(ConfigError, match="'mymethods' is not a module of the current folder"):
        flatrock.train("runs/mine/recipe.yaml", folder="runs/mine", resume=True)


def test_a_name_that_nobody_knows_is_told(methods: Path) -> None:
    """Registered at run time, or renamed since."""
    from flatrock.objectives.catalog import OBJECTIVES
    from flatrock.objectives.trades import TRADES

    OBJECTIVES.add("for_a_test", TRADES, "registered here")
    try:
        flatrock.train("digits_trades", **SHORT, objective={"name": "for_a_test"}, folder="runs/mine")
    finally:
        del OBJECTIVES._entries["for_a_test"]
    with pytest.warns(UserWarning, match="objective: unknown objective 'for_a_test'"):
        flatrock.load("runs/mine")


def test_what_loading_needs_is_still_refused() -> None:
    flatrock.train("digits_at", **SHORT, folder="runs/mine")
    from flatrock.recipes.restore import trained_recipe

    raw = load(Path("runs/mine/last.safetensors"))[1]["recipe"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained_recipe(raw, "it").name == "digits_at"
    for section, message in (("model", "unknown model 'gone'"), ("data", "unknown dataset 'gone'")):
        with pytest.raises(ConfigError, match=message):
            trained_recipe({**raw, section: {**raw[section], "name": "gone"}}, "it")
    with pytest.raises(StateError):
        flatrock.load("runs/nothing")


def test_the_page_shows_what_works(methods: Path) -> None:
    """The file and the commands of docs/own_methods.md, all five kinds at once."""
    text = (Path(__file__).parents[2] / "docs" / "own_methods.md").read_text()
    source, recipe, commands = (re.search(rf"```{kind}\n(.*?)```", text, re.S)[1] for kind in ("py", "yaml", "sh"))  # type: ignore[index]
    methods.write_text(source)
    Path("mine.yaml").write_text(recipe)
    for command in commands.splitlines():
        words = shlex.split(command)[1:]
        words += {"train": ["--device", "cpu"], "eval": ["--limit", "20", "--device", "cpu"]}.get(words[0], [])
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert "near" in json.loads(Path("runs/mine/metrics.jsonl").read_text().splitlines()[0])["terms"]
    assert len(list(Path("runs/mine").glob("result-*climb*.json"))) == 1


@pytest.mark.parametrize(
    ("epochs", "warmup", "rates"),
    [(3, 1, [0, 2, 1, 0]), (3, 0, [2, 4 / 3, 2 / 3, 0]), (2, 2, [0, 1, 0]), (1, 2, [0, 1])],
)
def test_the_schedule_of_the_page_bears_any_warmup(methods: Path, epochs: int, warmup: int, rates: list[float]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "own_methods.md").read_text()
    methods.write_text(re.search(r"```py\n(.*?)```", text, re.S)[1])  # type: ignore[index]
    schedule = SCHEDULES.make("mymethods:warm", lr=2.0, epochs=epochs, warmup=float(warmup))
    assert [schedule.rate(t) for t in range(epochs + 1)] == pytest.approx(rates)


def test_an_objective_may_change_in_the_course_of_training(methods: Path) -> None:
    methods.write_text(
        methods.read_text()
        + """

class Switched(Trades):
    def at(self, moment):
        told.append((moment.epoch, moment.step, moment.share))
        return Trades(beta=self.beta if moment.epoch == 2 else 0.0)


told = []
"""
    )
    run = flatrock.train("digits_at", folder="runs/own", **SHORT, objective={"name": "mymethods:Switched", "beta": 3})
    first, second = (record.terms for record in run.records)
    assert first["total"] == pytest.approx(first["ce"], rel=1e-5)
    assert second["total"] == pytest.approx(second["ce"] + 3 * second["kl"], rel=1e-5)


def test_an_objective_sees_inputs_and_which_samples_they_are(methods: Path) -> None:
    methods.write_text(
        methods.read_text()
        + """

class Looking(Trades):
    def loss(self, views, y):
        far = (views.adv.x - views.clean.x).abs().amax().item()
        seen.append((far, tuple(views.clean.x.shape[1:]), views.ids.tolist(), views.clean.x.requires_grad))
        return super().loss(views, y)


seen = []
"""
    )
    import sys

    flatrock.train("digits_at", folder="runs/own", **SHORT, objective={"name": "mymethods:Looking"})
    seen = sys.modules["mymethods"].seen[5:]  # the first ones were the trial
    assert {shape for _, shape, _, _ in seen} == {(1, 8, 8)}
    assert 0.0199 < max(far for far, *_ in seen) <= 0.0200001
    assert not any(grad for *_, grad in seen)
    ids = [i for _, _, ids, _ in seen for i in ids]
    half = len(ids) // 2
    assert sorted(ids[:half]) == sorted(ids[half:]), "two epochs over the same samples"
    assert len(set(ids[:half])) == half
