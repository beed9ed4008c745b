"""Everything that can be wrong with a recipe, found before any work is done and reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from flatrock.attacks.catalog import ATTACKS, parse_attack
from flatrock.core.errors import ConfigError, FlatrockError
from flatrock.core.registry import unknown
from flatrock.core.threat import THREATS
from flatrock.data.catalog import data_faults, info
from flatrock.engine.schedule import SCHEDULES
from flatrock.models.catalog import create_model
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.schema import Data, InnerAttack, Named, Network, Recipe, Select, Train

INNER_ATTACKS = {"ce": "pgd", "kl": "kl-pgd", "none": "none"}


def validate(raw: Mapping[str, Any], where: str) -> Recipe:
    """A Recipe, or one ConfigError that lists every fault."""
    sections, faults = _sections(raw)
    for check in (_names, _attack, _schedule, _plans, _shapes, _labels):
        faults += check(sections)
    if faults:
        raise ConfigError(f"{where} has {len(faults)} fault{'s' if len(faults) > 1 else ''}:", tuple(faults))
    return _completed(Recipe.model_validate(dict(raw)))


def _completed(recipe: Recipe) -> Recipe:
    """Fill in what follows from other keys, so that the stored recipe says everything."""
    inner = OBJECTIVES.make(recipe.objective.name, **recipe.objective.options).inner_loss
    classes = recipe.model.num_classes or info(recipe.data.name).num_classes
    name = INNER_ATTACKS[inner] if recipe.attack.name == "auto" else recipe.attack.name
    metric = recipe.select.metric
    if metric == "auto":
        metric = "clean" if name == "none" else "robust"
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"num_classes": classes}),
            "attack": recipe.attack.model_copy(update={"name": name}),
            "select": recipe.select.model_copy(update={"metric": metric}),
        }
    )


def _sections(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Each section validated on its own, so that one bad section does not hide faults in another."""
    fields = Recipe.model_fields
    faults = [_unknown_section(key) for key in raw if key not in fields]
    sections: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in raw:
            if field.is_required():
                faults.append(f"{name}: this section is required")
            else:
                sections[name] = field.get_default()
            continue
        kind = field.annotation
        try:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                sections[name] = kind.model_validate(raw[name])
            else:
                sections[name] = raw[name]
                Recipe.__pydantic_validator__.validate_assignment(Recipe.model_construct(), name, raw[name])
        except ValidationError as error:
            faults += _readable(name, error, kind)
            sections.pop(name, None)
    return sections, faults


def _unknown_section(key: str) -> str:
    """Name the choices, and the section where a key of this name does exist."""
    homes = [n for n, f in Recipe.model_fields.items() if key in getattr(f.annotation, "model_fields", {})]
    if homes:
        return f"unknown recipe section {key!r}; did you mean {homes[0]}.{key}?"
    return unknown("recipe section", key, Recipe.model_fields)


def _readable(section: str, error: ValidationError, kind: Any) -> list[str]:
    texts = []
    for e in error.errors():
        loc = [str(part) for part in e["loc"]]
        where = ".".join([section, *loc] if not loc or loc[0] != section else loc)
        if e["type"] == "extra_forbidden":
            known = _fields_at(kind, loc[:-1])
            texts.append(f"{where}: {unknown('key', loc[-1], known)}")
        elif e["type"] == "missing":
            texts.append(f"{where}: this key is required")
        else:
            texts.append(f"{where}: got {e['input']!r}, {e['msg'].removeprefix('Value error, ')}")
    return texts


def _fields_at(kind: Any, path: list[str]) -> list[str]:
    for part in path:
        kind = kind.model_fields[part].annotation if part in getattr(kind, "model_fields", {}) else None
        options = [a for a in getattr(kind, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)]
        kind = options[0] if options else kind
    return list(getattr(kind, "model_fields", {}))


def _caught(where: str, build: Callable[[], object]) -> list[str]:
    """The faults a constructor reports, each prefixed with its place in the recipe."""
    try:
        build()
    except ConfigError as error:
        return [f"{where}: {fault}" for fault in (error.faults or (str(error),))]
    except FlatrockError as error:
        return [f"{where}: {error}"]
    except TypeError as error:
        return [f"{where}: {error}"]
    return []


def _names(sections: dict[str, Any]) -> list[str]:
    faults = []
    if (threat := sections.get("threat")) is not None:
        faults += _caught("threat", lambda: THREATS[threat.norm](threat.eps))
    if isinstance(objective := sections.get("objective"), Named):
        faults += _caught("objective", lambda: OBJECTIVES.make(objective.name, **objective.options))
    if isinstance(data := sections.get("data"), Data):
        faults += [f"data: {f}" for f in data_faults(data.name, data.options)]
    return faults


def _attack(sections: dict[str, Any]) -> list[str]:
    attack = sections.get("attack")
    if not isinstance(attack, InnerAttack):
        return []
    objective = sections.get("objective")
    name = attack.name
    if name == "auto":
        if not isinstance(objective, Named) or objective.name not in OBJECTIVES:
            return []
        try:
            name = INNER_ATTACKS[OBJECTIVES.make(objective.name, **objective.options).inner_loss]
        except (ConfigError, TypeError):
            return []  # the objective's own fault is reported already
    if name == "none":
        return []
    return _caught("attack", lambda: ATTACKS.make(name, **attack.options))


def _schedule(sections: dict[str, Any]) -> list[str]:
    schedule, train = sections.get("schedule"), sections.get("train")
    if not isinstance(schedule, Named) or not isinstance(train, Train):
        return []
    options = {"lr": 0.0, "epochs": train.epochs, **schedule.options}
    if given := sorted({"lr", "epochs"} & schedule.options.keys()):
        return [f"schedule: {' and '.join(given)} belong to optimizer.lr and train.epochs"]
    return _caught("schedule", lambda: SCHEDULES.make(schedule.name, **options))


def _plans(sections: dict[str, Any]) -> list[str]:
    faults = []
    if isinstance(select := sections.get("select"), Select):
        faults += _caught("select.attack", lambda: parse_attack(select.attack))
    evaluate = sections.get("evaluate")
    for spec in evaluate.attacks if evaluate is not None else ():
        faults += _caught("evaluate.attacks", lambda spec=spec: parse_attack(spec))  # type: ignore[misc]
    return faults


def _shapes(sections: dict[str, Any]) -> list[str]:
    """The model exists, takes these options, and fits the data."""
    network, data = sections.get("model"), sections.get("data")
    if not isinstance(network, Network) or not isinstance(data, Data) or data_faults(data.name, ()):
        return []
    about = info(data.name)
    classes = network.num_classes or about.num_classes
    if classes is None:
        return [f"model.num_classes: needed with data {data.name!r}, whose class count is not known in advance"]
    import torch

    try:
        with torch.device("meta"):  # no memory is taken and no weight is drawn
            model = create_model(network.name, num_classes=classes, normalize=network.normalize, **network.options)
    except ConfigError as error:
        return [f"model: {fault}" for fault in (str(error).splitlines()[0], *error.faults)]
    faults = []
    if about.input_shape is not None and tuple(about.input_shape) != tuple(model.input_shape):
        faults.append(f"model: {network.name!r} takes {model.input_shape}, {data.name!r} has {about.input_shape}")
    if about.num_classes is not None and classes != about.num_classes:
        faults.append(f"model.num_classes: got {classes}, but {data.name!r} has {about.num_classes} classes")
    return faults


def _labels(sections: dict[str, Any]) -> list[str]:
    """Mixed labels only with objectives and attacks that are defined on them; augmentation only on images."""
    data, objective = sections.get("data"), sections.get("objective")
    if not isinstance(data, Data) or not isinstance(objective, Named) or objective.name not in OBJECTIVES:
        return []
    faults = []
    try:
        made = OBJECTIVES.make(objective.name, **objective.options)
    except (ConfigError, TypeError):
        return []
    if data.augment.mixup and made.hard_labels:
        faults.append(f"data.augment.mixup: objective {objective.name!r} needs hard labels; set mixup to 0")
    if data.augment.mixup and data.extra is not None:
        faults.append("data.augment.mixup: cannot be combined with data.extra; set mixup to 0")
    shape = info(data.name).input_shape if not data_faults(data.name, ()) else None
    used = data.augment.model_dump(exclude={"crop_fill", "mixup"})
    if shape is not None and len(shape) < 3 and any(used.values()):
        faults.append(f"data.augment: {data.name!r} holds points, not images; only mixup applies")
    return faults
