"""Recipe -> Job. The one place that knows every folder; from here on there are only ready-made objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatrock.attacks.catalog import ATTACKS
from flatrock.core.errors import ConfigError
from flatrock.core.files import json_text, sha256
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import birth_certificate
from flatrock.core.rng import Seed
from flatrock.core.threat import THREATS, Threat
from flatrock.data.augment import Augmentation
from flatrock.data.catalog import load_data
from flatrock.data.dataset import Dataset
from flatrock.data.loader import TensorLoader
from flatrock.data.npz import load as load_npz
from flatrock.data.split import Split, held_out_split
from flatrock.engine.job import Job, Keep, ProbeOutcome
from flatrock.engine.schedule import SCHEDULES
from flatrock.engine.step import decayed
from flatrock.evaluation.evaluate import evaluate
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.schema import Recipe

DEFAULT_RUNS = Path("runs")


def recipe_hash(recipe: Recipe) -> str:
    """Identifies the keys that decide the weights."""
    return sha256(json_text(recipe.training_keys()))[:16]


def build_job(
    recipe: Recipe,
    *,
    folder: Path | None = None,
    data_folder: Path | None = None,
    download: bool = False,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Job:
    """Load the data, make the model and everything else; nothing is trained and nothing is written."""
    where = torch.device(device)
    listener = progress or Silent()
    data = load_data(
        recipe.data.name, "train", folder=data_folder, download=download, progress=listener, **recipe.data.options
    )
    split = held_out_split(data, size=recipe.data.held_out)
    model = build_model(recipe).to(where)
    check_fit(model, data)
    selection = _selection(recipe, split, data_folder)
    objective = OBJECTIVES.make(recipe.objective.name, **recipe.objective.options)
    seed = Seed(recipe.seed)
    return Job(
        name=recipe.name,
        folder=folder or DEFAULT_RUNS / recipe.name,
        recipe=recipe.resolved(),
        recipe_hash=recipe_hash(recipe),
        seed=seed,
        device=where,
        model=model,
        objective=objective,
        threat=build_threat(recipe),
        attack=None if recipe.attack.name == "none" else ATTACKS.make(recipe.attack.name, **recipe.attack.options),
        bn_mode=recipe.attack.bn_mode,
        loader=_loader(recipe, limited(split.train, recipe.data.limit), seed, where),
        optimizer=_optimizer(recipe, model),
        schedule=SCHEDULES.make(
            recipe.schedule.name, lr=recipe.optimizer.lr, epochs=recipe.train.epochs, **recipe.schedule.options
        ),
        epochs=recipe.train.epochs,
        max_steps=recipe.train.max_steps,
        l1=recipe.optimizer.l1,
        l2=recipe.optimizer.l2,
        mixup_alpha=recipe.data.augment.mixup,
        probe=_probe(recipe, selection, split.train, where),
        probe_every=recipe.select.every,
        selected_on=recipe.select.data,
        select_metric=recipe.select.metric,
        keep=Keep(**recipe.train.keep.model_dump()),
        save_seconds=recipe.train.save_seconds,
        tensorboard=recipe.train.tensorboard,
        provenance=birth_certificate(
            device=where, seed=recipe.seed, recipe_hash=recipe_hash(recipe), held_out=split.digest
        ),
    )


def build_model(recipe: Recipe) -> Classifier:
    """The recipe's network with its initial weights."""
    return create_model(
        recipe.model.name,
        num_classes=recipe.model.num_classes or 10,
        normalize=recipe.model.normalize,
        seed=recipe.seed,
        **recipe.model.options,
    )


def build_threat(recipe: Recipe) -> Threat:
    """The recipe's threat."""
    return THREATS[recipe.threat.norm](recipe.threat.eps)


def check_fit(model: Classifier, data: Dataset) -> None:
    """Shapes and class counts agree (for data whose shape is only known once loaded)."""
    if tuple(model.input_shape) != data.input_shape:
        raise ConfigError(f"the model takes inputs {model.input_shape}, {data.name!r} has {data.input_shape}")
    if model.num_classes != data.num_classes:
        raise ConfigError(f"model.num_classes is {model.num_classes}, but {data.name!r} has {data.num_classes} classes")


def limited(data: Dataset, limit: int | None) -> Dataset:
    """The first `limit` samples."""
    return data if limit is None or limit >= len(data) else data.subset(torch.arange(limit))


def _selection(recipe: Recipe, split: Split, data_folder: Path | None) -> Dataset:
    """The data the best epoch is chosen on; the test set only when the recipe says so."""
    if recipe.select.data == "test":
        chosen = load_data(recipe.data.name, "test", folder=data_folder, **recipe.data.options)
    else:
        chosen = split.held_out
    return limited(chosen, recipe.select.size)


def _loader(recipe: Recipe, train: Dataset, seed: Seed, device: torch.device) -> TensorLoader:
    extra, augment = recipe.data.extra, recipe.data.augment
    more = load_npz(Path(extra.file), num_classes=train.num_classes) if extra else None
    if more is not None and bool((more.y < 0).any()) and recipe.objective.name != "trades":
        raise ConfigError(
            f"{extra and extra.file} has unlabeled images; objective must be trades, which ignores them in CE"
        )
    return TensorLoader(
        train,
        batch_size=recipe.train.batch_size,
        seed=seed.child("data"),
        augmentation=Augmentation(**augment.model_dump(exclude={"mixup"})),
        device=device,
        extra=more,
        extra_fraction=extra.fraction if extra else 0.0,
    )


def _optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    o = recipe.optimizer
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": o.weight_decay}]
    if o.decay_on == "weights":
        chosen = {id(p) for p in decayed(model)}
        groups = [
            {"params": [p for p in model.parameters() if id(p) in chosen], "weight_decay": o.weight_decay},
            {"params": [p for p in model.parameters() if id(p) not in chosen], "weight_decay": 0.0},
        ]
    return torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov)


def _probe(
    recipe: Recipe, selection: Dataset, train: Dataset, device: torch.device
) -> Callable[[nn.Module], ProbeOutcome]:
    """Clean and robust accuracy on the selection data, and robust accuracy on as many training samples."""
    threat = build_threat(recipe)
    everything = torch.arange(len(selection))
    x, y = selection.images(everything).to(device), selection.y.to(device)
    some = torch.arange(min(len(train), len(selection)))
    x_train, y_train = train.images(some).to(device), train.y[some].to(device)
    attacks = [recipe.select.attack]
    batch_size = recipe.evaluate.batch_size

    def probe(model: nn.Module) -> ProbeOutcome:
        model.eval()
        chosen = evaluate(model, x, y, threat, attacks=attacks, batch_size=batch_size, seed=recipe.seed)
        seen = evaluate(model, x_train, y_train, threat, attacks=attacks, batch_size=batch_size, seed=recipe.seed)
        with torch.no_grad():
            kinds = torch.cat([model(part).argmax(1) for part in torch.split(x, batch_size)])
        return ProbeOutcome(
            chosen.clean, chosen.robust, seen.robust, collapsed=bool((kinds == kinds[0]).all()) and len(x) > 1
        )

    return probe
