"""`flatrock compare` of runs without the usual results: the one evaluation they have in common, or a list to choose."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_cases import wide as flatrock
from results_cases import fake_result, fake_run

AT, TRADES = {"clean": 81.0, "pgd-20": 50.0}, {"clean": 80.0, "pgd-20": 52.1}
PGD = {"kind": "GradientAttack", "steps": 5, "step_size": 2 / 255}


def asked(run: Path, name: str, percents: dict[str, float], *, which: str = "best", **changes: Any) -> Path:
    """A result of the run's weights, asked in a way of its own."""
    epoch = 3 if which == "last" else 2
    content = json.loads(fake_result(run.name, which, epoch, percents, whole_plan=False).to_json())
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    file = run / f"result-{which}-{name}.json"
    file.write_text(json.dumps(content))
    return file


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [fake_run(tmp_path / "a b", "cifar10_short_at", {}), fake_run(tmp_path, "cifar10_short_trades", {})]


def test_the_one_evaluation_in_common_is_taken_and_told(runs: list[Path]) -> None:
    for run, found in zip(runs, (AT, TRADES), strict=True):
        asked(run, "pgd-20-n64-seed0", found)
    asked(runs[0], "pgd-20-n64-seed1", AT, provenance={"seed": 1})
    asked(runs[1], "linf-0.01-pgd-20", TRADES, threat={"eps": 0.01})
    asked(runs[1], "last-only", TRADES, which="last", provenance={"seed": 1})
    done = flatrock("compare", *runs)
    assert done.exit_code == 0, done.output
    said = "compared: result-best-pgd-20-n64-seed0.json of each run, the one evaluation they have in common"
    assert done.output.startswith(said)
    assert "+2.10 ± 0.45 !" in done.output and "not compared" not in done.output
    assert f"│ {runs[0]} " in done.output, "the runs are named, not the files"
    by_name = flatrock("compare", *(run / "result-best-pgd-20-n64-seed0.json" for run in runs))
    assert "in common" not in by_name.output and "+2.10 ± 0.45 !" in by_name.output


def test_the_usual_results_come_first(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, name, f) for name, f in (("cifar10_short_at", AT), ("cifar10_short_trades", TRADES))]
    before = flatrock("compare", *runs).output
    for run in runs:
        asked(run, "pgd-20-n64-seed0", {"clean": 70.0, "pgd-20": 10.0})
    assert flatrock("compare", *runs).output == before


def test_several_in_common_are_listed_as_commands(runs: list[Path]) -> None:
    for run, found in zip(runs, (AT, TRADES), strict=True):
        for seed in (0, 1):
            asked(run, f"pgd-20-n64-seed{seed}", found, provenance={"seed": seed})
    done = flatrock("compare", *runs)
    assert done.exit_code == 2
    assert "there are 2 evaluations that these runs have in common; choose one:" in done.output
    commands = [line.removeprefix("  - ") for line in done.output.splitlines() if line.startswith("  - flatrock ")]
    assert len(commands) == 2
    for command in commands:
        assert "+2.10 ± 0.45 !" in flatrock(*shlex.split(command)[1:]).output


def test_one_attack_under_two_names_is_in_common(runs: list[Path]) -> None:
    for run, name in zip(runs, ("pgd-5:step_size=2/255", "mine"), strict=True):
        asked(run, name.replace("/", "_"), {"clean": 80.0, name: 50.0}, attacks={name: PGD})
    done = flatrock("compare", *runs)
    assert done.exit_code == 0, done.output
    assert (
        f"compared: {runs[0]}/result-best-pgd-5:step_size=2_255.json, {runs[1]}/result-best-mine.json, " in done.output
    )
    assert "not compared" not in done.output


@pytest.mark.parametrize(
    "other",
    [
        {"threat": {"eps": 0.01}},
        {"threat": {"norm": "l2"}},
        {"provenance": {"data": "cifar10 test, 64 of 1000 samples"}},
        {"provenance": {"samples_digest": "bb"}},
        {"provenance": {"votes": 3}},
        {"provenance": {"seed": 5}},
        {"attacks": {"pgd-20": {**PGD, "steps": 20}}},
        {"ids": list(range(1, 1001))},
    ],
)
def test_other_questions_are_never_taken_for_one(runs: list[Path], other: dict[str, Any]) -> None:
    base: dict[str, Any] = {"provenance": {"samples_digest": "aa"}, "attacks": {"pgd-20": PGD}}
    if "ids" in other:
        base["provenance"] = {}
    asked(runs[0], "x", AT, **base)
    asked(runs[1], "x", TRADES, **base)
    assert flatrock("compare", *runs).exit_code == 0
    merged = {k: {**base.get(k, {}), **v} if isinstance(v, dict) else v for k, v in other.items()}
    asked(runs[1], "x", TRADES, **{**base, **merged})
    done = flatrock("compare", *runs)
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert f"{runs[1]} has no result-best.json, and no other evaluation in common" in said
    assert f"run `flatrock eval '{runs[0]}'`; run `flatrock eval {runs[1]}` first. There is" in said
    assert f"- {runs[0]}: result-best-x.json - {runs[1]}: result-best-x.json" in said


def test_weights_are_chosen_by_name(runs: list[Path]) -> None:
    for run, found in zip(runs, (AT, TRADES), strict=True):
        asked(run, "x", found, which="last")
        asked(run, "x", found, which="epoch-0010")
    refused = flatrock("compare", *runs)
    assert refused.exit_code == 2 and "result-last-x.json" in refused.output, "what there is"
    for which in ("last", "epoch-0010"):
        done = flatrock("compare", *runs, "--which", which)
        assert done.exit_code == 0, done.output
        assert f"compared: result-{which}-x.json of each run" in done.output
    lacking = flatrock("compare", *runs, "--which", "average-last").output
    assert f"flatrock eval {runs[1]} --which average-last" in lacking
    kept = flatrock("compare", *runs, "--which", "epoch-0020").output
    assert f"flatrock eval {runs[1]}/epoch-0020.safetensors" in kept
    assert "did you mean 'best'" in flatrock("compare", *runs, "--which", "bset").output
    files = [run / "result-last-x.json" for run in runs]
    assert (
        "which: last is asked of run folders, and none is named"
        in flatrock("compare", *files, "--which", "last").output
    )


def test_a_file_beside_a_run_decides_what_is_asked(runs: list[Path]) -> None:
    first = asked(runs[0], "pgd-20-n64-seed0", AT)
    asked(runs[1], "pgd-20-n64-seed0", TRADES)
    asked(runs[1], "linf-0.01-pgd-20", TRADES, threat={"eps": 0.01})
    asked(runs[1], "cw-20-n64-seed0", {"clean": 80.0, "cw-20": 50.0})
    done = flatrock("compare", first, runs[1])
    assert done.exit_code == 0, done.output
    assert "compared: result-best-pgd-20-n64-seed0.json of each run" in done.output
    assert "not compared" not in done.output


def test_rows_of_a_results_file_beside_a_run(runs: list[Path], tmp_path: Path) -> None:
    whole = fake_run(tmp_path / "whole", "cifar10_short_at", AT)
    rows = tmp_path / "rows.json"
    assert flatrock("results", whole, "--out", rows).exit_code == 0
    asked(runs[1], "pgd-20-n64-seed0", TRADES, attacks={"pgd-20": PGD})
    asked(runs[1], "more", {**TRADES, "cw-20": 50.0})
    done = flatrock("compare", rows, runs[1])
    assert done.exit_code == 0, done.output
    assert "compared: result-best-pgd-20-n64-seed0.json of each run" in done.output
    assert "+2.10 ± 0.45 !" in done.output


def test_results_of_other_weights_are_passed_over(runs: list[Path]) -> None:
    """A run that was trained on has other weights than those evaluated; what is of those is not in common."""
    older = [asked(run, "x", found, provenance={"epoch": 1}) for run, found in zip(runs, (AT, TRADES), strict=True)]
    assert flatrock("compare", *older).exit_code == 0, "files named are taken as they are"
    for run, found in zip(runs, (AT, TRADES), strict=True):
        asked(run, "y", found, provenance={"seed": 1})
    done = flatrock("compare", *runs)
    assert done.exit_code == 0, done.output
    assert "compared: result-best-y.json of each run" in done.output
    asked(runs[1], "y", TRADES, provenance={"seed": 1, "recipe_hash": "0" * 16})
    (runs[1] / "result-best.json").write_text(fake_result(runs[1].name, "best", 1, TRADES).to_json())
    done = flatrock("compare", *runs)
    assert done.exit_code == 2
    assert f"{runs[1]} has a result-best.json of other weights than it has now, and no other" in done.output
    assert f"run `flatrock eval '{runs[0]}'`; run `flatrock eval {runs[1]}` first" in done.output
    assert f"- {runs[0]}: result-best-x.json (of other weights), result-best-y.json\n" in done.output
    asked(runs[1], "y", TRADES, provenance={"seed": 1})
    assert flatrock("compare", *runs).exit_code == 0, "the usual one of these weights is not needed"


def test_findings_are_named(runs: list[Path]) -> None:
    """But those that the tables mark themselves, and each once."""
    finding = {"message": "what was seen", "cure": "what to do"}
    codes = ["E06", "E08", "E06", "E03"]
    asked(runs[0], "pgd-20", AT, findings=[{"code": code, **finding} for code in codes])
    asked(runs[1], "pgd-20", TRADES)
    done = flatrock("compare", *runs)
    assert done.exit_code == 0, done.output
    assert f"findings {runs[0]}: E06, E08; see docs/diagnostics.md" in done.output
    assert f"findings {runs[1]}: E02; see" in done.output, "that of the case"
