"""Everything that can be wrong with a recipe, found before any work is done and reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from flatrock.core.errors import ConfigError, is_plain, shown
from flatrock.core.registry import unknown
from flatrock.data.catalog import info
from flatrock.evaluation.plans import make_plan
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.draft import Draft
from flatrock.recipes.pieces import data_shape, model_options
from flatrock.recipes.rules import INNER_ATTACKS, examined
from flatrock.recipes.schema import About, Evaluate, Network, Recipe
from flatrock.recipes.wording import fault

# Where a call gives a thing of Python's in the place of a section: how it is named instead.
OBJECTS = {
    "data": "recipes name their data: np.savez arrays to train.npz and test.npz of a folder and give "
    "data={'name': 'npz'}, data_dir=FOLDER, or name a function that makes them, data={'name': 'mydata:make'} "
    "(docs/data.md)",
    "model": "recipes name their model: give a function that makes it, model={'name': 'mynets:make'} "
    "(docs/own_network.md)",
    **{
        section: f"recipes name what they are made of: give a class of a file here, {section}={{'name': "
        "'mymethods:Mine'} (docs/own_methods.md)"
        for section in ("objective", "attack", "optimizer", "schedule")
    },
}

# Of a radius that is missing, above all where another norm has taken away the one there was.
OF_NORM = "; a radius is of one norm: linf 8/255 and l2 128/255 are usual for images, write threat.eps=..."


def validate(
    raw: Mapping[str, Any],
    where: str,
    *,
    known: Sequence[str] = (),
    also: Callable[[Draft], list[str]] | None = None,
) -> Recipe:
    """A Recipe, or one ConfigError that lists every fault: those `known`, and those `also` finds in the same draft."""
    sections, found = _sections(raw)
    draft = examined(sections)
    faults = [*known, *found, *draft.faults, *_band_faults(draft)]
    if faults:
        faults += also(draft) if also else []
        raise ConfigError(f"{where} has {len(faults)} fault{'s' if len(faults) > 1 else ''}:", tuple(faults))
    return _completed(Recipe.model_validate(dict(raw)))


def of_trained(raw: Mapping[str, Any], where: str) -> tuple[Recipe, list[str]]:
    """The recipe of a run that is trained: network, data and threat are needed, the rest may name what is not here.

    Beside it what is wrong with the rest, or could not be looked at.
    """
    sections, found = _sections(raw)
    draft = examined(sections)
    if faults := [*found, *(fault for fault in draft.faults if fault not in draft.of_training)]:
        raise ConfigError(f"{where} has {len(faults)} fault{'s' if len(faults) > 1 else ''}:", tuple(faults))
    return _completed(Recipe.model_validate(dict(raw))), draft.of_training


def _band_faults(draft: Draft) -> list[str]:
    """Bands of what an evaluation with the recipe's attacks does not measure."""
    about, evaluate = draft.get("about", About), draft.get("evaluate", Evaluate)
    if about is None or evaluate is None or not about.bands:
        return []
    try:
        known = ["clean", *dict.fromkeys(step.plan or step.label for step in make_plan(evaluate.attacks))]
    except ConfigError:  # a fault of the attacks, which is told
        return []
    return [f"about.bands: {unknown('measure', name, known)}" for name in about.bands if name not in known]


def _completed(recipe: Recipe) -> Recipe:
    """Fill in what follows from other keys, so that the stored recipe says everything."""
    source, model = info(recipe.data.name), recipe.model
    filled = {"num_classes": model.num_classes or source.num_classes, **model_options(model, data_shape(recipe.data))}
    name = recipe.attack.name
    if name == "auto":
        name = INNER_ATTACKS[OBJECTIVES.make(recipe.objective.name, **recipe.objective.options).inner_loss]
    metric = recipe.select.metric
    if metric == "auto":
        metric = "clean" if name == "none" else "robust"
    return recipe.model_copy(
        update={
            "model": Network.model_validate({**model.model_dump(), **filled}),
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
            whole: Any = Annotated[(kind, *field.metadata)] if field.metadata else kind
            sections[name] = TypeAdapter(whole).validate_python(raw[name])
        except ValidationError as error:
            faults += _readable(name, error, kind)
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
            texts.append(f"{where}: this key is required{OF_NORM if where == 'threat.eps' else ''}")
        elif e["type"] == "model_type":
            keys = ", ".join(f"{key}: ..." for key in _least_keys(_kind_at(kind, loc)))
            cure = OBJECTS.get(where) if not is_plain(e["input"]) else None
            cure = cure or f"write {where}: {{{keys}}} or such"
            texts.append(f"{where}: got {shown(e['input'])}, but a section holds keys; {cure}")
        elif e["type"] in ("tuple_type", "list_type"):
            cure = f"; write [{e['input']}]" if e["input"] is not None and is_plain(e["input"]) else ""
            texts.append(f"{where}: got {shown(e['input'])}, but this is a list{cure}")
        else:
            texts.append(fault(where, e))
    return texts


def _fields_at(kind: Any, path: list[str]) -> list[str]:
    return list(getattr(_kind_at(kind, path), "model_fields", {}))


def _least_keys(kind: Any) -> list[str]:
    """Keys with which a section can be written: those it must have, or else its first."""
    fields: Mapping[str, Any] = getattr(kind, "model_fields", {})
    return [key for key, field in fields.items() if field.is_required()] or list(fields)[:1]


def _kind_at(kind: Any, path: list[str]) -> Any:
    """The section at a path below one; those of a list are of one kind."""
    for part in (part for part in path if not part.isdecimal()):
        kind = kind.model_fields[part].annotation if part in getattr(kind, "model_fields", {}) else None
        options = [a for a in getattr(kind, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)]
        kind = options[0] if options else kind
    return kind
