"""Run -> result: evaluate a checkpoint on its recipe's test set, resumably, and store what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flatrock.core.errors import DataError
from flatrock.core.files import write_atomic
from flatrock.core.progress import Progress
from flatrock.core.records import Result, Run
from flatrock.core.tensorfile import save
from flatrock.data.catalog import load_data
from flatrock.data.split import fair_subset
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.journal import discard
from flatrock.evaluation.plans import make_plan
from flatrock.recipes.build import build_threat, check_fit, recipe_hash
from flatrock.recipes.restore import open_checkpoint, restored


def evaluate_run(
    source: Path | str | Run,
    *,
    which: str = "auto",
    attacks: Sequence[str | Mapping[str, Any]] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    precision: str = "auto",
    doubt: bool = False,
    keep_adversarial: bool = False,
    journal: bool = False,
    resume: bool = False,
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Evaluate a trained model on its recipe's test set (a fair subset of it with `limit`).

    With `journal` every finished batch is kept beside the checkpoint until `store_result`; `resume` goes on from it.
    """
    path, tensors, meta = open_checkpoint(source, which)
    model, recipe = restored(path, tensors, meta)
    whole = load_data(recipe.data.name, "test", folder=data_folder, **recipe.data.options)
    check_fit(model, whole)
    if list(whole.class_names) != meta["class_names"]:
        raise DataError(f"the test data have classes {list(whole.class_names)}, the model has {meta['class_names']}")
    test = fair_subset(whole, limit)
    chosen = recipe.evaluate.attacks if attacks is None else attacks
    complete = attacks is None and len(test) == len(whole)
    stem = _stem(path.name, _names(chosen), complete=complete, samples=len(test), seed=seed)
    return evaluate(
        model,
        test.images(torch.arange(len(test))),
        test.y,
        build_threat(recipe),
        attacks=chosen,
        device=device,
        batch_size=batch_size or recipe.evaluate.batch_size,
        precision=precision,
        doubt=doubt,
        keep_adversarial=keep_adversarial,
        journal=path.parent / f"{stem}.part" if journal or resume else None,
        resume=resume,
        seed=seed,
        progress=progress,
        provenance={
            "recipe": recipe.name,
            "recipe_hash": recipe_hash(recipe),
            "checkpoint": path.name,
            "epoch": meta["record"]["epoch"] if "record" in meta else meta["epoch"],
            "data": f"{test.name} test, {len(test)} of {len(whole)} samples",
            "whole_plan": complete,
            "train_seed": recipe.seed,
        },
    )


def store_result(source: Path | str | Run, result: Result) -> Path:
    """Write a result of evaluate_run beside its checkpoint; a partial one never takes the name of the whole."""
    path = source.folder if isinstance(source, Run) else Path(source)
    folder = path.parent if path.is_file() else path
    about = result.provenance
    stem = _stem(
        str(about["checkpoint"]),
        list(result.per_attack),
        complete=bool(about["whole_plan"]),
        samples=result.n,
        seed=int(about["seed"]),
    )
    if result.adversarial is not None:
        save(folder / f"{stem}.safetensors", {"x_adv": result.adversarial}, {"role": "adversarial", **about})
    target = folder / f"{stem}.json"
    write_atomic(target, result.to_json().encode())
    discard(folder / f"{stem}.part")
    return target


def _names(attacks: Sequence[str | Mapping[str, Any]]) -> list[str]:
    """What a result calls its attacks: a plan by its own name."""
    return list(dict.fromkeys(step.plan or step.label for step in make_plan(attacks)))


def _stem(checkpoint: str, names: Sequence[str], *, complete: bool, samples: int, seed: int) -> str:
    name = f"result-{Path(checkpoint).stem}"
    if complete:
        return name
    attacks = re.sub(r"[^\w.=-]+", "_", "+".join(names))[:80]
    return f"{name}-{attacks}-n{samples}-seed{seed}"
