"""Which runs of a sweep are set against those of its first setting, and which are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from results_cases import fake_run

from flatrock.workflows.results import collect_run
from flatrock.workflows.sweep_settled import Settled, against_first

NAME = "cifar10_short_at_swa"
Made = Callable[..., Settled]


@pytest.fixture
def setting(tmp_path: Path) -> Made:
    """A setting with a made-up run for each seed: percents of pgd-20, how the run is, and what its result says."""

    def make(name: str, runs: dict[int, float], about: dict[int, dict[str, Any]] | None = None, **told: Any) -> Settled:
        folders = []
        for seed, robust in runs.items():
            place, how = tmp_path / f"{name}-{seed}", (about or {}).get(seed, {})
            folders.append(fake_run(place, NAME, {"clean": 80.0, "pgd-20": robust}, overrides={"seed": seed}, **how))
            for file in folders[-1].glob("result-*.json"):
                file.write_text(json.dumps(json.loads(file.read_text()) | told))
        rows = tuple(collect_run(folder) for folder in folders)
        return Settled(values={"k": name}, rows=rows, folders=tuple(folders), failed=(), wanted=len(runs))

    return make


def test_every_setting_minus_the_first_over_the_seeds_both_have(setting: Made) -> None:
    first, one, other = setting("0", {0: 50, 1: 51, 2: 52}), setting("1", {0: 51, 1: 53, 2: 55}), setting("2", {1: 40})
    found = against_first([first, one, other])
    assert [(d.values, d.base, d.seeds) for d in found] == [
        ({"k": "1"}, {"k": "0"}, (0, 1, 2)),
        ({"k": "2"}, {"k": "0"}, (1,)),
    ]
    assert [gap.mean for gap in found[0].by_seed["pgd-20"]] == pytest.approx([0.01, 0.02, 0.03])
    assert found[0].gaps["pgd-20"].mean == pytest.approx(0.02) and not found[0].left_out
    assert found[1].gaps["pgd-20"].mean == pytest.approx(-0.11)
    assert against_first([first]) == [] and against_first([]) == []


def test_collapsed_runs_and_plain_weights_in_the_place_of_averages_are_left_out(setting: Made) -> None:
    averaged = {"averages": True}
    first = setting("0", {0: 50, 1: 50, 2: 50}, {0: averaged, 1: {"average_collapsed": True}, 2: averaged})
    one = setting("1", {0: 51, 1: 51, 2: 51}, {2: {"average_collapsed": True}})
    (found,) = against_first([first, one])
    assert found.seeds == (0,)
    assert found.left_out == {
        1: "the first setting is not averaged: its averages collapsed",
        2: "not averaged: its averages collapsed",
    }
    collapsed = {"findings": [{"code": "E15", "message": "one answer", "cure": "none"}]}
    (found,) = against_first([first, setting("2", {0: 51}, **collapsed)])
    assert found.seeds == () and found.left_out == {0: "COLLAPSED"} and found.gaps == {}


def test_other_questions_are_not_compared(setting: Made) -> None:
    first = setting("0", {0: 50, 1: 50})
    (found,) = against_first([first, setting("1", {0: 51, 1: 51}, threat={"norm": "linf", "eps": 4 / 255})])
    assert found.seeds == () and set(found.left_out) == {0, 1}
    assert found.left_out[0] == "linf eps 0.0313725 and linf eps 0.0156863"
    (found,) = against_first([first, setting("2", {0: 51, 1: 51}, marks=["test-selected"])])
    assert found.left_out[1] == "one has its epoch chosen on the test set, the other on held-out data"


def test_epochs_chosen_on_the_test_set_keep_their_star(setting: Made) -> None:
    starred = [setting(name, {0: 50}, marks=["test-selected"]) for name in "01"]
    (found,) = against_first(starred)
    assert found.starred and found.seeds == (0,)


def test_attacks_of_other_options_are_not_compared(setting: Made) -> None:
    first = setting("0", {0: 50}, attacks={"pgd-20": {"kind": "PGD", "steps": 20}})
    (found,) = against_first([first, setting("1", {0: 51}, attacks={"pgd-20": {"kind": "PGD", "steps": 10}})])
    assert list(found.gaps) == ["clean"] and found.unlike == ("pgd-20", "worst case")
