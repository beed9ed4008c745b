"""`flatrock eval --eps 0.05,0.1`: one evaluation each, the same as alone, a table and a curve of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_cases import wide as flatrock

import flatrock.cli.evaluate as command
from flatrock.recipes.restore import load

EVAL = ("--attacks", "pgd-3", "--limit", "60", "--no-doubt", "--device", "cpu")


def stored(folder: Path, eps: str) -> Any:
    radius = "" if eps == "0.2" else f"linf-{eps}-"
    return json.loads((folder / f"result-best-{radius}pgd-3-n60-seed0.json").read_text())


def test_each_is_as_if_asked_alone(copied: Path) -> None:
    done = flatrock("eval", copied, *EVAL, "--eps", "0.05, 0.1,1/5")
    assert done.exit_code == 0, done.output
    together = [stored(copied, eps) for eps in ("0.05", "0.1", "0.2")]
    for eps, found in zip(("0.05", "0.1", "0.2"), together, strict=True):
        assert flatrock("eval", copied, *EVAL, "--eps", eps).exit_code == 0
        alone = stored(copied, eps)
        assert (alone["flags"], alone["threat"]) == (found["flags"], found["threat"])
    assert [r["threat"]["eps"] for r in together] == [0.05, 0.1, 0.2]
    lines = done.output[done.output.index("run, radius by radius") :].splitlines()
    for eps, found in zip(("0.05", "0.1", "1/5"), together, strict=True):
        (line,) = (line for line in lines if line.startswith(f"│ {eps} "))
        assert f"{100 * found['robust']:.2f}" in line
    drawn = copied / "result-best-pgd-3-n60-seed0-over-eps.png"
    assert f"drew {drawn}" in done.output and drawn.is_file()


def test_what_was_stopped_goes_on(copied: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[int]) -> None:
    real = command.evaluate_run

    def stopped(source: Path, **how: Any) -> Any:
        if how["eps"] == "0.1":
            raise KeyboardInterrupt
        return real(source, **how)

    with monkeypatch.context() as patch:
        patch.setattr(command, "evaluate_run", stopped)
        assert flatrock("eval", copied, *EVAL, "--eps", "0.05,0.1").exit_code == 130
    attempts.clear()
    done = flatrock("eval", copied, *EVAL, "--eps", "0.05,0.1", "--resume")
    assert done.exit_code == 0, done.output
    assert len(attempts) == 1, "the one batch of 0.1; that of 0.05 is on disk"


def test_a_model_of_ones_own(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(load(copied).state_dict(), "own.pt")
    own = ("--model", "digits_cnn", "--weights", "own.pt", "--data", "digits", "--norm", "linf", "--num-classes", "10")
    done = flatrock("eval", *own, *EVAL, "--eps", "0.05,0.1")
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("result-digits_cnn-*.json"))) == 2
    assert len(list(tmp_path.glob("result-digits_cnn-*-over-eps.png"))) == 1
    refused = flatrock("eval", *own, *EVAL, "--eps", "0.05,8")
    assert refused.exit_code == 2 and "eps 8: Linf eps must lie in [0, 1]" in refused.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--eps", "0.05,8,16"), "eps 8: Linf eps must lie in [0, 1], got 8.0; eps is in pixel units"),
        (("--eps", "0.05,8,16"), "eps 16: Linf eps must lie in [0, 1], got 16.0"),
        (("--eps", "0.05,small"), "eps: expected a number or a fraction such as 8/255, got 'small'"),
        (("--eps", "0.05,"), "eps: expected a number or a fraction such as 8/255, got ''"),
        (("--eps", "0.2,1/5"), "eps: radii must differ, in their first four digits, got '0.2,1/5'"),
        (("--eps", "0.1,0.2", "--csv", "a.csv"), "--csv: of one evaluation, but --eps asks for several"),
        (("--eps", "0.1,0.2", "--seeds", "0,1"), "--eps with several radii: of one evaluation, but --seeds asks for"),
        (("--eps", "0.1,0.2", "--norm", "l_2"), "did you mean 'l2'"),
    ],
)
def test_what_cannot_be_asked_is_told_before_the_first(
    words: tuple[str, ...], said: str, copied: Path, attempts: list[int]
) -> None:
    before = sorted(copied.rglob("*"))
    done = flatrock("eval", copied, *EVAL, *words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert attempts == [] and sorted(copied.rglob("*")) == before


def test_step_sizes_of_the_recipe_are_told_before_the_first(copied: Path, attempts: list[int]) -> None:
    recipe = copied / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("- pgd-20", "- pgd-20:step_size=0.01"))
    assert "step_size=0.01" in recipe.read_text()
    done = flatrock("eval", copied, "--limit", "60", "--no-doubt", "--device", "cpu", "--eps", "0.2,0.05")
    assert done.exit_code == 2 and attempts == []
    assert "eps 0.05: the recipe's attacks pgd-20:step_size=0.01 have step sizes for linf eps 0.2" in done.output
