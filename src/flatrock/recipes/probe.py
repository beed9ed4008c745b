"""What the best epoch is chosen by: accuracy on held-out data, now and then while a run trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatrock.core.threat import Threat
from flatrock.data.catalog import load_data
from flatrock.data.dataset import Dataset
from flatrock.data.split import Split, fair_subset
from flatrock.engine.job import ProbeOutcome
from flatrock.evaluation.evaluate import evaluate
from flatrock.recipes.schema import Recipe


def selection_data(recipe: Recipe, split: Split, data_folder: Path | None) -> Dataset:
    """The data the best epoch is chosen on; the test set only when the recipe says so."""
    chosen = split.held_out
    if recipe.select.data == "test":
        chosen = load_data(recipe.data.name, "test", folder=data_folder, **recipe.data.options)
    return fair_subset(chosen, recipe.select.size)


def build_probe(
    recipe: Recipe, threat: Threat, selection: Dataset | None, train: Dataset, device: torch.device, *, fast: bool
) -> Callable[[nn.Module], ProbeOutcome]:
    """Clean and robust accuracy on the selection data, and robust accuracy on as many training samples.

    Attacks craft in half precision if `fast`; verdicts are always those of full precision. A process without such data
    follows another, which probes for all.
    """
    if selection is None:
        return _not_probed
    everything = torch.arange(len(selection))
    seen = fair_subset(train, len(selection))
    # Together: a half-precision copy takes longer to make than to ask.
    x = torch.cat([selection.images(everything), seen.images(torch.arange(len(seen)))]).to(device)
    y = torch.cat([selection.y, seen.y]).to(device)
    attacks = [recipe.select.attack]
    # A half-precision twin takes longer to make than the probe of a small network, not worth compiling, takes to run.
    precision = "auto" if fast else "full"
    options: dict[str, Any] = {"batch_size": recipe.evaluate.batch_size, "seed": recipe.seed, "precision": precision}

    def probe(model: nn.Module) -> ProbeOutcome:
        model.eval()
        result = evaluate(model, x, y, threat, attacks=attacks, **options)
        robust, trained = result.worst.double().tensor_split([len(selection)])
        clean = result.flags["clean"][: len(selection)].double().mean()
        classes = set() if result.predictions is None else set(result.predictions[: len(selection)].tolist())
        collapsed = len(classes) == 1 and len(selection) > 1
        return ProbeOutcome(float(clean), float(robust.mean()), float(trained.mean()), collapsed=collapsed)

    return probe


def _not_probed(model: nn.Module) -> ProbeOutcome:
    """Of a process that follows: the first one probes for all."""
    raise RuntimeError("a process that follows was asked to probe")
