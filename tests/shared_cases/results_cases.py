"""Run folders made up without training: the small files of a run and its evaluations, with the accuracies asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from flatrock.core.files import write_atomic
from flatrock.core.records import Finding, Result
from flatrock.core.runs import EpochRecord
from flatrock.engine.folder import RunFolder
from flatrock.recipes.further import attack_names, threat_of
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Recipe

N = 1000
CERTIFICATE = {
    "flatrock": "0.1.0",
    "commit": "abc123def456",
    "torch": "2.11.0",
    "python": "3.11.7",
    "device": "NVIDIA H200",
    "time": "2026-11-15T12:00:00+00:00",
    "seed": 0,
    "engine": {"precision": "bfloat16", "compile": True, "twin": True},
}


def standing(count: int) -> Tensor:
    """The first `count` of N samples are right: what is right under one attack is right under a weaker one."""
    return torch.arange(N) < count


def fake_result(recipe: str, checkpoint: str, epoch: int, percents: Mapping[str, float], **about: Any) -> Result:
    """A result whose accuracies are these; autoattack is a plan of two attacks."""
    counts = {name: round(N * value / 100) for name, value in percents.items()}
    flags = {name: standing(count) for name, count in counts.items() if name != "autoattack"}
    plans: dict[str, tuple[str, ...]] = {}
    if "autoattack" in counts:
        plans = {"autoattack": ("autoattack/apgd-ce", "autoattack/square")}
        flags["autoattack/apgd-ce"] = standing(counts["autoattack"] + 3)
        flags["autoattack/square"] = standing(counts["autoattack"])
    loaded = load_recipe(recipe)
    about = {"data": f"{loaded.data.name} test, {N} of {N} samples", **about}
    facts = {"recipe": recipe, "recipe_hash": recipe_hash(loaded), "checkpoint": f"{checkpoint}.safetensors"}
    return Result(
        threat={"norm": "linf", "eps": 8 / 255},
        flags=flags,
        plans=plans,
        findings=(Finding("E02", "some attacks ran on few samples", "evaluate more"),),
        costs={name: {"seconds": 30.0, "samples": N} for name in flags if name != "clean"},
        provenance={**CERTIFICATE, **facts, "epoch": epoch, "whole_plan": True, "precision": "float16", **about},
    )


def fake_further(path: Path, recipe: Recipe, checkpoint: str, epoch: int, percents: Mapping[str, float]) -> None:
    """Results of the further evaluations of a recipe: accuracies of attacks of these names, else half of clean."""
    for nth, asked in enumerate(recipe.evaluate.more):
        threat, names = threat_of(asked, recipe.threat), attack_names(asked)
        found = {name: percents.get(name, percents["clean"] / 2) for name in names}
        about: dict[str, Any] = {"whole_plan": False, "recipe_hash": recipe_hash(recipe)}
        if asked.surrogate is not None:
            other = Path(asked.surrogate).name
            way = {"select.data": recipe.select.data, "data.held_out": recipe.data.held_out}  # chosen as the run is
            known = recipe_hash(load_recipe(other, way))
            about["surrogate"] = {"recipe": other, "recipe_hash": known, "epoch": 2, "seed": 0}
        made = fake_result(recipe.name, checkpoint, epoch, {"clean": percents["clean"], **found}, **about)
        made = replace(made, threat={"norm": threat.norm, "eps": threat.eps}, findings=())
        made = replace(made, marks=_marks(recipe, checkpoint))
        write_atomic(path / f"result-{checkpoint}-further{nth}.json", made.to_json().encode())


def _marks(recipe: Recipe, checkpoint: str) -> tuple[str, ...]:
    return ("test-selected",) if recipe.select.data == "test" and checkpoint.endswith("best") else ()


def fake_run(
    folder: Path,
    recipe: str,
    percents: Mapping[str, float],
    *,
    last: Mapping[str, float] | None = None,
    status: str = "finished",
    overrides: Mapping[str, Any] | None = None,
    averages: bool = False,
    average_collapsed: bool = False,
    further: bool = True,
    probes: tuple[float | None, float, float] = (0.30, 0.52, 0.48),
    **info: Any,
) -> Path:
    """A run folder of three epochs, the second of which was best; `last` are the accuracies of the third, if asked.

    Where every average collapsed there is no best one, and the plain weights were evaluated. Without `further` only the
    recipe's own evaluation was made.
    """
    averages = averages or average_collapsed
    path, loaded = folder / recipe, load_recipe(recipe, overrides or {})
    run = RunFolder(path)
    path.mkdir(parents=True)
    run.write_info(
        name=recipe,
        recipe_hash=recipe_hash(loaded),
        averages=averages,
        status=status,
        reason="",
        epochs_done=3,
        provenance=CERTIFICATE,
        **info,
    )
    run.write_recipe(yaml.safe_dump(loaded.resolved(), sort_keys=False))
    for epoch, robust in enumerate(probes, 1):
        record = _record(epoch, robust, averages)
        run.append(replace(record, average_best_epoch=None) if average_collapsed else record, run.owner())
    stem = "average-" if averages and not average_collapsed else ""
    for end, epoch, found in (("best", 2, percents), ("last", 3, last or {})):
        if found:
            result = fake_result(recipe, f"{stem}{end}", epoch, found, recipe_hash=recipe_hash(loaded))
            result = replace(result, marks=_marks(loaded, end))
            write_atomic(path / f"result-{stem}{end}.json", result.to_json().encode())
            if further:
                fake_further(path, loaded, f"{stem}{end}", epoch, found)
    return path


def _record(epoch: int, robust: float | None, averages: bool) -> EpochRecord:
    return EpochRecord(
        epoch=epoch,
        step=epoch * 10,
        lr=0.1,
        terms={"total": 1.0},
        running_accuracy=0.5,
        clean=None if robust is None else 0.8,
        robust=robust,
        train_robust=None if robust is None else robust + 0.1,
        selected_on="held_out",
        best_epoch=min(epoch, 2),
        seconds=60.0 if epoch == 1 else 7.0,
        images_per_second=7000.0,
        elapsed=50.0 * epoch,
        average_clean=0.81 if averages else None,
        average_robust=None if robust is None or not averages else robust + 0.01,
        average_best_epoch=min(epoch, 2) if averages else None,
    )
