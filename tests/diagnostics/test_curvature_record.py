"""Records of curvature survive JSON; what is none, or contradicts itself, is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from curvature_cases import dense_net, samples

from flatrock.core.errors import StateError
from flatrock.diagnostics.curvature import Curvature, Settings, curvature
from flatrock.diagnostics.curvature_record import CurvatureRecord
from flatrock.diagnostics.estimate import Estimate

QUICK = Settings(trace="hutch++", probes=2, runs=1, steps=4, top=2, awp_steps=2)


def record() -> CurvatureRecord:
    x, y = samples((3,), 3)
    found = curvature(dense_net(), x, y, beta=24, settings=QUICK)
    anew = replace(found, awp=replace(found.awp, attacked_anew=0.1))
    return CurvatureRecord(
        losses={"clean": found, "adversarial": anew},
        threat={"norm": "linf", "eps": 0.1},
        attack={"name": "pgd-2", "steps": 2},
        settings={**asdict(QUICK), "beta": 24},
        marks=("test-selected",),
        provenance={"run": "a", "checkpoint": "best.safetensors", "data": "some", "precision": "double", "seed": 0},
    )


def test_records_survive_json() -> None:
    stored = record()
    read = CurvatureRecord.from_json(stored.to_json())
    assert read == stored
    assert list(read.losses) == ["clean", "adversarial"]
    assert list(read.losses["clean"].layers) == ["0", "2", "4"]
    assert isinstance(read.losses["clean"], Curvature)
    assert isinstance(read.losses["clean"].whole.trace, Estimate)


@pytest.mark.parametrize(
    "damage", ["", "{}", "[]", "3", '{"schema": "flatrock.result/2"}', b"\x89PNG\r\n\x1a\n\xff", "[" * 100_000]
)
def test_what_is_no_record_is_refused(damage: str | bytes) -> None:
    with pytest.raises(StateError, match=r"x\.json is not a record of curvature"):
        CurvatureRecord.from_json(damage, "x.json")


WHOLE = ("losses", "clean", "whole")


@pytest.mark.parametrize(
    ("where", "value", "fault"),
    [
        ((*WHOLE, "trace"), None, "NoneType"),
        ((*WHOLE, "trace", "value"), "7", "expected a finite number, got '7'"),
        ((*WHOLE, "trace", "value"), float("nan"), "expected a finite number, got nan"),
        ((*WHOLE, "trace", "value"), 7.0, "does not follow from its trace and square"),
        ((*WHOLE, "trace", "value"), 10**400, "too large"),
        ((*WHOLE, "trace", "error"), -1.0, "expected a finite number >= 0, got -1"),
        ((*WHOLE, "count"), 7, "does not follow"),
        (("losses", "clean", "layers"), [["0", {}]], "it lacks 'count'"),
        (("losses", "clean", "method"), "guess", "unknown method 'guess'"),
        (("losses", "clean", "loss"), 0.0, "PAC-Bayes terms are not those of a loss of 0"),
        (("losses", "clean", "spectrum", "nodes"), [], "first Lanczos run"),
        (("losses", "clean", "awp", "gamma"), 0.5, "the clean loss was measured with other settings"),
        (("losses", "adversarial"), None, "NoneType"),
        (("settings",), {}, "it lacks 'trace'"),
        (("settings", "rho"), "x", "rho must be a number >= 0, got 'x'"),
        (("settings", "sigma0"), "x", "sigma0 must be a number > 0, got 'x'"),
        (("settings", "hue"), 1, "unknown settings hue"),
        (("threat", "eps"), "8/255", "expected a finite number"),
        (("attack",), {}, "it lacks 'name'"),
        (("provenance", "run"), 3, "expected text as run, got 3"),
    ],
)
def test_altered_records_are_refused(where: tuple[str, ...], value: object, fault: str) -> None:
    values: dict[str, Any] = json.loads(record().to_json())
    inner = values
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    with pytest.raises(StateError, match=rf"x\.json is not a record of curvature \(.*{fault}"):
        CurvatureRecord.from_json(json.dumps(values), "x.json")


def test_layers_must_add_up() -> None:
    values = json.loads(record().to_json())
    found = values["losses"]["clean"]
    left_out = {**found, "layers": found["layers"][1:]}
    with pytest.raises(ValueError, match="other parameters than the whole"):
        Curvature.from_dict(left_out)
    twice = {**found, "layers": [found["layers"][0], *found["layers"][:2]]}
    with pytest.raises(ValueError, match="other parameters than the whole"):
        Curvature.from_dict(twice)
    stored = record().losses["clean"]
    first = stored.layers["0"]
    moved = replace(first, trace=replace(first.trace, value=first.trace.value + 1))
    with pytest.raises(ValueError, match="do not add up"):
        replace(stored, layers={**stored.layers, "0": moved}).check()
