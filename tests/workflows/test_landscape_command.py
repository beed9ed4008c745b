"""`flatrock landscape`: what it draws, what it refuses and when, and which checkpoints are meant."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock, read_again, stored

from flatrock.cli.shared import beside
from flatrock.core.errors import ConfigError, DataError, StateError
from flatrock.diagnostics.surface import Landscape
from flatrock.recipes.part import data_part
from flatrock.workflows.checkpoints import checkpoints
from flatrock.workflows.landscape import measure_landscape
from flatrock.workflows.landscape_plan import Plan
from flatrock.workflows.train import train_recipe

QUICK: dict[str, Any] = {"points": 3, "directions": 2, "images": 20, "attack": "pgd-2"}


def test_names_of_checkpoints(run: Path) -> None:
    def names(*which: str) -> list[str]:
        return [file.stem for file in checkpoints(run, which)]

    assert names("auto") == ["best"]
    assert names("last", "epoch-2", "epoch-0002") == ["last", "epoch-0002"]
    assert names("kept", "best") == ["epoch-0001", "epoch-0002", "epoch-0003", "best"]
    assert checkpoints(run / "epoch-0001.safetensors", ["best"]) == [run / "epoch-0001.safetensors"]


def test_checkpoints_that_are_not_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"keeps no epoch-7 \(kept: 1, 2, 3\)"):
        checkpoints(run, ["epoch-7"])
    with pytest.raises(StateError, match="no averaged weights"):
        checkpoints(run, ["average-best"])
    with pytest.raises(ConfigError, match="did you mean"):
        checkpoints(run, ["bset"])
    with pytest.raises(StateError, match="there is no run folder"):
        checkpoints(tmp_path / "nowhere")
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(StateError, match=r"no run\.json"):
        checkpoints(bare, ["kept"])
    short = tmp_path / "short"
    train_recipe("moons_at", folder=short, device="cpu", train={"epochs": 1})
    with pytest.raises(StateError, match=r"train\.keep\.every=N"):
        checkpoints(short, ["kept"])
    (short / "epoch-0001.safetensors").write_bytes((run / "epoch-0001.safetensors").read_bytes())
    with pytest.raises(StateError, match="belongs to another run"):
        checkpoints(short, ["epoch-1"])


FEW = ("--points", "3", "--images", "20", "--attack", "pgd-2", "--device", "cpu")


def test_the_command_draws_checkpoints_at_one_scale_and_records_again(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "figure"
    done = flatrock("landscape", run, "--which", "last,epoch-1", "--directions", "2", *FEW, "--out", out)
    assert done.exit_code == 0, done.output
    assert "epoch-0001" in done.output
    assert "rise at 1" in done.output, "of three points the nearest to 0.5"
    assert "epoch-0001 minus last: rise at 1" in done.output
    assert {file.name for file in tmp_path.iterdir()} == {"figure.png", "figure.svg", "figure.html"}
    records = [Path(line.removeprefix("wrote ")) for line in done.output.splitlines() if line.startswith("wrote ")]
    again = flatrock("landscape", *records, "--out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "figure.svg").read_bytes()


@pytest.mark.parametrize("kind", ["weight-2d", "input"])
def test_the_command_draws_surfaces(run: Path, tmp_path: Path, kind: str) -> None:
    words = ("--points", "3", "--images", "2", "--device", "cpu", "--out", tmp_path / "figure")
    done = flatrock("landscape", run, "--kind", kind, *words)
    assert done.exit_code == 0, done.output
    assert "mean |rise|" in done.output
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--which", "epoch-9"), "keeps no epoch-9"),
        (("--points", "10"), "odd number"),
        (("--radius", "2"), "radius must lie in (0, 1]"),
        (("--radius", "0.47"), "radius 0.47 is no point of the grid, 21 points to 1; the nearest is 0.5, or choose"),
        (("--radius", "x"), "radius: expected a number"),
        (("--ids", "1,b", "--kind", "input"), "whole numbers"),
        (("--ids", "3,17,3", "--kind", "input"), "ids must differ, got (3, 17, 3) with 3 more than once"),
        (("--span", "1/0"), "span: '1/0' divides by zero"),
        (("--device", "tpu"), "unknown device"),
        (("--which", ""), "which names no checkpoint"),
        (("--out", ""), "out must end in a name"),
        (("--span", "0.3", "--radius", "0.5"), "radius must lie in (0, 0.3]"),
    ],
)
def test_the_command_refuses_in_one_line(run: Path, words: tuple[str, ...], message: str) -> None:
    done = flatrock("landscape", run, *words)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


def test_records_of_different_questions_are_not_overlaid(run: Path) -> None:
    files = [measure_landscape(run / "best.safetensors", Plan(**{**QUICK, "points": n}))[1] for n in (3, 5)]
    done = flatrock("landscape", *files)
    assert done.exit_code == 2
    assert "different axis are not drawn at one scale: 3 points to 1 and 5 points to 1" in done.output
    other = flatrock("landscape", files[0], "--kind", "input")
    assert "say --kind weight-1d" in other.output
    assert "there is no landscape" in flatrock("landscape", run / "none.json").output


def test_a_landscape_that_was_read_was_not_written(run: Path, tmp_path: Path) -> None:
    few = ("--points", "3", "--images", "12", "--attack", "none", "--directions", "1", "--device", "cpu")
    words = ("landscape", run, *few, "--out", tmp_path / "read", "--resume")
    assert stored(flatrock(*words)) == read_again(flatrock(*words))


@pytest.mark.parametrize("words", [("--span", "0.3"), ("--span", "0.47", "--radius", "0.47", "--points", "21")])
def test_the_table_looks_as_far_as_the_grid_reaches(run: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    few = ("--points", "3", "--images", "10", "--attack", "none", "--directions", "1", "--device", "cpu")
    done = flatrock("landscape", run, *few, *words, "--out", tmp_path / "near")
    assert done.exit_code == 0, done.output
    assert f"rise at {words[1]}" in done.output


@pytest.mark.parametrize(
    ("points", "span", "near", "cure"), [("7", "1", "0.3", "0.333333"), ("3", "2/3", "0.9", "0.666667")]
)
def test_the_radius_a_refusal_names_is_taken(
    run: Path, tmp_path: Path, points: str, span: str, near: str, cure: str
) -> None:
    few = ("--images", "10", "--attack", "none", "--directions", "1", "--device", "cpu", "--out", tmp_path / "near")
    ask = ("landscape", run, *few, "--points", points, "--span", span, "--radius")
    refused = flatrock(*ask, near)
    assert refused.exit_code == 2 and cure in refused.output
    done = flatrock(*ask, cure)
    assert done.exit_code == 0, done.output
    assert f"rise at {cure}" in done.output


def test_the_radius_of_a_record_is_that_of_its_own_grid(run: Path, tmp_path: Path) -> None:
    file = measure_landscape(run / "best.safetensors", Plan(**{**QUICK, "points": 9}, span=2.0))[1]
    done = flatrock("landscape", file, "--radius", "1.5", "--out", tmp_path / "far")
    assert done.exit_code == 0, done.output
    assert "rise at 1.5" in done.output
    assert "radius must lie in (0, 2]" in flatrock("landscape", file, "--radius", "2.5").output


def test_runs_that_cannot_be_compared_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, eps, data = (tmp_path / name for name in ("run", "eps", "data"))
    asked: dict[Path, dict[str, Any]] = {run: {}, eps: {"threat": {"eps": 0.05}}, data: {"data": {"limit": 200}}}
    for folder, options in asked.items():
        train_recipe("moons_at", folder=folder, device="cpu", train={"epochs": 1}, **options)
    file = measure_landscape(run / "last.safetensors", Plan(**QUICK))[1]
    monkeypatch.setattr("flatrock.cli.landscape.measure_landscape", None)
    for first in (run, file):
        for other, message in ((eps, "different threat"), (data, "different data")):
            done = flatrock("landscape", first, other, "--which", "last", "--directions", "2", *FEW)
            assert done.exit_code == 2, done.output
            assert message in done.output
            assert str(other) in done.output.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--points", "5"), "different axis .*: 3 points to 1 (record of tiny) and 5 points to 1 (asked for)"),
        (("--span", "0.5"), "different axis .*: 3 points to 1 (record of tiny) and 3 points to 0.5"),
        (("--directions", "3"), "different directions .*: 2 (record of tiny) and 3"),
        (("--attack", "pgd-3"), "different attack .*: name pgd-2, "),
        (("--attack", "none"), "different attack"),
        (("--seed", "1"), "different seed .*: 0 (record of tiny) and 1 (asked for); measure them alike"),
        (("--precision", "half"), "different precision .*: float32 (record of tiny) and bfloat16"),
        (("--images", "10"), "different data"),
        (("--on", "test"), "different data"),
    ],
)
def test_a_record_is_asked_the_same_before_anything_is_measured(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    file = measure_landscape(run / "best.safetensors", Plan(**QUICK))[1]
    monkeypatch.setattr("flatrock.cli.landscape.measure_landscape", None)
    done = flatrock("landscape", file, run, "--which", "last", "--directions", "2", *FEW, *words)
    assert done.exit_code == 2, done.output
    assert re.search(re.escape(message).replace(re.escape(".*"), ".*"), " ".join(done.output.split()))


def test_records_alone_take_no_option_of_a_measurement(run: Path, tmp_path: Path) -> None:
    file = measure_landscape(run / "best.safetensors", Plan(**QUICK))[1]
    for words, told in (
        (("--points", "21"), "--points 21: records are drawn as they were measured"),
        (("--seed", "0", "--which", "last"), "--which last, --seed 0: records"),
        (("--data-dir", tmp_path), f"--data-dir {tmp_path}: records"),
    ):
        done = flatrock("landscape", file, *words)
        assert done.exit_code == 2, done.output
        assert told in " ".join(done.output.split())
    kept = ("--kind", "weight-1d", "--radius", "1", "--resume", "--device", "cpu", "--out", tmp_path / "again")
    done = flatrock("landscape", file, *kept)
    assert done.exit_code == 0, done.output


def test_a_record_and_a_run_are_drawn_together(run: Path, tmp_path: Path) -> None:
    for kind in ("weight-1d", "input"):
        asked = {"kind": kind, **(QUICK if kind != "input" else {"points": 3, "images": 2})}
        file = measure_landscape(run / "best.safetensors", Plan(**asked))[1]
        words = [part for key, value in asked.items() for part in (f"--{key}", str(value))]
        done = flatrock("landscape", file, run, "--which", "last", *words, "--device", "cpu", "--out", tmp_path / "f")
        assert done.exit_code == 0, done.output


def test_damaged_records_are_named(run: Path, tmp_path: Path) -> None:
    binary = tmp_path / "a.json"
    binary.write_bytes(b"\xff\x00")
    done = flatrock("landscape", binary)
    assert done.exit_code == 2
    assert "is not a flatrock landscape (it is not text)" in done.output


def test_a_run_named_by_a_dot_has_a_name(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(run)
    assert flatrock("landscape", ".", "--directions", "2", *FEW, "--out", tmp_path / "dot").exit_code == 0
    record = Landscape.from_file(Path(f"{Plan(**QUICK).stem('best')}.json"))
    assert record.provenance["run"] == "tiny"


def test_data_of_other_classes_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(*args: Any, **options: Any) -> Any:
        data = data_part(*args, **options)
        return replace(data, class_names=tuple(reversed(data.class_names)))

    monkeypatch.setattr("flatrock.workflows.trained.data_part", renamed)
    with pytest.raises(DataError, match="the data have classes"):
        measure_landscape(run / "best.safetensors", Plan(**QUICK))


def test_figures_go_beside_the_runs_however_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert beside([Path(), Path("../b")], "figure") == tmp_path / "figure"
    assert beside([Path()], "figure") == Path("figure")
