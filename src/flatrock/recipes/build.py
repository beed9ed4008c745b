"""Recipe -> Job. The one place that knows every folder; from here on there are only ready-made objects."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, ModelError, in_words
from flatrock.core.files import json_text, sha256
from flatrock.core.guests import raised_at
from flatrock.core.hooks import Flatness
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import birth_certificate
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.team import ALONE, Team
from flatrock.core.threat import THREATS, Threat
from flatrock.data.augment import Augmentation
from flatrock.data.catalog import DATA, data_options, load_data
from flatrock.data.dataset import Dataset
from flatrock.data.loader import TensorLoader
from flatrock.data.npz import load as load_npz
from flatrock.data.split import Split, fair_subset, held_out_split
from flatrock.engine.folder import RunFolder
from flatrock.engine.helper import Helper
from flatrock.engine.job import Job, Keep
from flatrock.engine.runner import Engine, Runner
from flatrock.flatness.catalog import FLATNESS
from flatrock.models.adapted import Adapted
from flatrock.models.classifier import Classifier
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.filled import settings
from flatrock.recipes.helper import open_helper
from flatrock.recipes.leak import extra_leak
from flatrock.recipes.notes import notes
from flatrock.recipes.optimizer import build_optimizer
from flatrock.recipes.own import origins
from flatrock.recipes.pieces import (
    DEFAULT_RUNS,
    build_attack,
    build_model,
    build_schedule,
    recipe_hash,
    rows_at_once,
)
from flatrock.recipes.probe import build_probe, selection_data
from flatrock.recipes.schema import Recipe
from flatrock.recipes.start import Start, begin

# Steps; compiling takes as long as so many of a small network, or more, and shorter runs are over before it pays.
WORTH_COMPILING = 1000


def build_job(
    recipe: Recipe,
    *,
    folder: Path | None = None,
    data_folder: Path | None = None,
    download: bool = False,
    device: torch.device | str = "cpu",
    resume: bool = False,
    team: Team = ALONE,
    progress: Progress | None = None,
) -> Job:
    """Load the data, make the model and everything else (`resume`: see begin); nothing is trained, nothing written."""
    where, target, listener = torch.device(device), folder or DEFAULT_RUNS / recipe.name, progress or Silent()
    going_on = resume and RunFolder(target).begun()
    data, split = _loaded(recipe, data_folder, download, listener)
    train, content = fair_subset(split.train, recipe.data.limit), data.fingerprint()
    extra = _extra(recipe, split)
    seed = Seed(recipe.seed)
    loader = _loader(recipe, train, extra, seed, where, least=2 * team.size)
    engine = build_engine(recipe, where, steps=recipe.train.steps(len(loader)))
    model = build_model(recipe)
    start = begin(recipe, model, data, split, folder=RunFolder(target), resume=resume, progress=listener)
    check_fit(model, data)
    _place(model, where, engine, rows=rows_at_once(recipe, team, samples=len(train)))
    objective = OBJECTIVES.make(recipe.objective.name, **recipe.objective.options)
    helper = open_helper(objective, model, data.class_names, fast=engine.twin)
    threat = build_threat(recipe)
    selection = selection_data(recipe, split, data_folder) if team.rank == 0 else None
    return Job(
        folder=target,
        data_digest=_digest(content, data, extra, split.digest),
        class_names=data.class_names,
        num_classes=model.num_classes,
        seed=seed,
        device=where,
        runner=Runner(model, engine, size=team.rows(recipe.train.batch_size), most=recipe.train.micro_batch),
        objective=objective,
        flatness=build_flatness(recipe),
        threat=threat,
        attack=build_attack(recipe),
        loader=loader,
        optimizer=build_optimizer(recipe.optimizer, model, seed),
        schedule=build_schedule(recipe),
        probe=build_probe(recipe, threat, selection, train, where, fast=engine.compile),
        selected_from=0 if selection is None else len(selection),
        notes=tuple(notes(recipe, per_epoch=len(loader))),
        helper=helper,
        start=None if start is None else start.digest,
        team=team,
        provenance=_certificate(recipe, where, content, split, engine, helper, start, team, again=going_on),
        **_as_said(recipe),
    )


def _as_said(recipe: Recipe) -> dict[str, Any]:
    """What a job takes over from its recipe as it is."""
    return {
        "name": recipe.name,
        "recipe": recipe.resolved(),
        "recipe_hash": recipe_hash(recipe),
        "bn_mode": recipe.attack.bn_mode,
        "epochs": recipe.train.epochs,
        "max_steps": recipe.train.max_steps,
        "l1": recipe.optimizer.l1,
        "l2": recipe.optimizer.l2,
        "mixup_alpha": recipe.data.augment.mixup,
        "cutmix_alpha": recipe.data.augment.cutmix,
        "clean_tick": recipe.train.clean_tick,
        "clip_norm": recipe.train.clip_norm,
        "probe_every": recipe.select.every,
        "selected_on": recipe.select.data,
        "select_metric": recipe.select.metric,
        "keep": Keep(**recipe.train.keep.model_dump()),
        "save_seconds": recipe.train.save_seconds,
        "tensorboard": recipe.train.tensorboard,
    }


def _loaded(recipe: Recipe, folder: Path | None, download: bool, progress: Progress) -> tuple[Dataset, Split]:
    """The training set, and the part of it that is trained on beside the one set aside."""
    source = recipe.data
    data = load_data(source.name, "train", folder=folder, download=download, progress=progress, **source.options)
    return data, held_out_split(data, size=source.held_out) if source.held_out else Split(data, data, "none")


def _certificate(
    recipe: Recipe,
    device: torch.device,
    content: str,
    split: Split,
    engine: Engine,
    helper: Helper | None,
    start: Start | None,
    team: Team,
    *,
    again: bool,
) -> dict[str, Any]:
    """Where a run comes from; what it was told stays the same when it is resumed, and is recorded once."""
    about: dict[str, Any] = {"recipe_hash": recipe_hash(recipe), "training_set": content[:16]}
    about |= {"held_out": split.digest, "engine": asdict(engine)}
    about |= {} if helper is None else {"helper": {**helper.about, "weights": helper.digest}}
    about |= {} if start is None else {"start": dict(start.about)}
    about |= {} if team.alone else {"processes": team.size}
    about |= {"own": own} if (own := origins(recipe)) else {}
    about |= {} if again else {"settings": settings(recipe)}
    return birth_certificate(device=device, seed=recipe.seed, **about)


def _place(model: Classifier, device: torch.device, engine: Engine, *, rows: int) -> None:
    """Put a network on its device; in reduced precision in the memory layout tensor cores read fastest."""
    model.to(device)
    check_training(model, rows=rows)
    if device.type == "cuda" and engine.precision == "bfloat16":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def build_engine(recipe: Recipe, device: torch.device, *, steps: int) -> Engine:
    """The recipe's choices for a run of so many steps; `auto` is what makes a GPU fast, and the reference elsewhere."""
    gpu = device.type == "cuda"
    plain = any(method.needs_reference for method in build_flatness(recipe).values())
    auto = "bfloat16" if gpu and computes_bfloat16(device) and not plain else "float32"
    precision = auto if recipe.engine.precision == "auto" else recipe.engine.precision
    fast = gpu and precision == "bfloat16"
    compiled = recipe.engine.compile
    if compiled == "auto":
        compiled = fast and steps >= WORTH_COMPILING
    return Engine(precision=precision, compile=compiled, twin=fast)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether a GPU does so in hardware; older ones imitate it, slower than float32."""
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def build_threat(recipe: Recipe) -> Threat:
    """The recipe's threat."""
    return THREATS[recipe.threat.norm](recipe.threat.eps)


def build_flatness(recipe: Recipe) -> dict[str, Flatness]:
    """The recipe's flatness methods by name, new ones: some keep state."""
    return {f.name: FLATNESS.make(f.name, **f.options) for f in recipe.flatness}


def check_fit(model: Classifier, data: Dataset) -> None:
    """Shapes and class counts agree (for data whose shape is only known once loaded)."""
    if tuple(model.input_shape) != data.input_shape:
        raise ConfigError(
            f"the model takes inputs {tuple(model.input_shape)}, {data.name!r} has {data.input_shape}; "
            f"{_size_cure(tuple(model.input_shape), data)}"
        )
    if model.num_classes != data.num_classes:
        raise ConfigError(
            f"model.num_classes is {model.num_classes}, but {data.name!r} has {data.num_classes} classes; "
            f"set model.num_classes={data.num_classes}"
        )


def _size_cure(shape: tuple[int, ...], data: Dataset) -> str:
    """What to do about images of another size than a model takes: those of one's own can be cut to it."""
    square = len(shape) == 3 and shape[1] == shape[2] and shape[:1] == data.input_shape[:1]
    if square and data.name in DATA and "size" in data_options(data.name):
        return f"set data.size={shape[1]} (and data.resize, see docs/data.md), or choose a model for such images"
    return "choose a model for such inputs, or other data"


def check_training(model: Classifier, *, rows: int) -> None:
    """A network of the user's, seen in eval mode until now, gives float32 features in train mode; a copy is asked."""
    if not isinstance(model, Adapted):
        return
    name, head = type(model.network).__name__, model.head
    if head.weight.dtype != torch.float32:
        raise ModelError(
            f"{name} has weights of {head.weight.dtype}, but training is in torch.float32; leave out .half(), "
            ".double() and dtype=, or return network.float()"
        )
    x = torch.rand(rows, *model.input_shape, generator=Seed(0).child("check").generator()).to(head.weight.device)
    try:
        with torch.no_grad(), kept_global_rng(x.device):
            made: object = copy.deepcopy(model).train().features(x)
    except Exception as error:  # it is the user's code: anything can happen
        raise ModelError(
            f"{name} in train mode fails on inputs of shape {list(x.shape)}: {in_words(error)}{raised_at(error)}"
        ) from error
    wanted = [rows, head.in_features]
    if not isinstance(made, Tensor) or list(made.shape) != wanted or made.dtype != torch.float32:
        found = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise ModelError(
            f"{name} in train mode gives {found} where its last nn.Linear takes torch.float32 {wanted}; let it return "
            "what that layer gives, and nothing else, in both modes: no auxiliary outputs"
        )


def extra_fault(recipe: Recipe) -> str | None:
    """What keeps the extra images from being read, as far as that is known without reading them."""
    extra = recipe.data.extra
    if extra is None or Path(extra.file).is_file():
        return None
    return f"data.extra.file: there is no file {extra.file}; its makers publish it, name it with data.extra.file=FILE"


def _extra(recipe: Recipe, split: Split) -> Dataset | None:
    """The extra images, none of them held out; those without label need an objective and an attack that do without."""
    if recipe.data.extra is None:
        return None
    extra = load_npz(Path(recipe.data.extra.file), num_classes=split.train.num_classes)
    label_free = recipe.objective.name in ("trades", "hat") and recipe.attack.name in ("kl-pgd", "gaussian")
    if bool((extra.y < 0).any()) and not label_free:
        file = recipe.data.extra.file
        raise ConfigError(f"{file} has unlabelled images; they need objective trades or hat, with kl-pgd or gaussian")
    if leaked := extra_leak(recipe, extra, split.held_out):
        raise ConfigError(leaked)
    return extra


def _digest(content: str, data: Dataset, extra: Dataset | None, held_out: str) -> str:
    """Identifies the data a run was trained on."""
    parts = [content, data.class_names, extra.fingerprint() if extra else None, held_out]
    return sha256(json_text(parts))[:16]


def _loader(
    recipe: Recipe, train: Dataset, extra: Dataset | None, seed: Seed, device: torch.device, *, least: int
) -> TensorLoader:
    return TensorLoader(
        train,
        batch_size=recipe.train.batch_size,
        seed=seed.child("data"),
        augmentation=Augmentation(**recipe.data.augment.model_dump(exclude={"mixup", "cutmix"})),
        device=device,
        extra=extra,
        extra_fraction=recipe.data.extra.fraction if recipe.data.extra else 0.0,
        least=least,
    )
