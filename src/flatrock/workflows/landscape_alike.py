"""Which landscapes could be drawn together, told before any is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from flatrock.attacks.catalog import describe
from flatrock.core.errors import ConfigError
from flatrock.core.files import json_text
from flatrock.core.progress import Progress
from flatrock.core.provenance import origin
from flatrock.core.threat import Threat
from flatrock.data.dataset import Dataset
from flatrock.diagnostics.surface import Landscape
from flatrock.recipes.build import build_threat
from flatrock.recipes.part import data_part
from flatrock.recipes.restore import open_checkpoint, trained_recipe
from flatrock.workflows.foreign_model import ForeignModel, part_faults
from flatrock.workflows.landscape_plan import Plan, fingerprint
from flatrock.workflows.trained import said, training_set


def check_comparable(
    sources: Sequence[Path | ForeignModel],
    plan: Plan,
    *,
    stored: Sequence[Landscape] = (),
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> None:
    """ConfigError if landscapes of these could not be drawn together, told before any is measured.

    Threats and samples follow from recipes, or from the options of a model that is no run; `stored` are landscapes to
    be drawn beside them, of which all that was asked must be asked again, on a `device` of the same precision.
    """
    files = [source for source in sources if isinstance(source, Path)]
    others = [source for source in sources if isinstance(source, ForeignModel)]
    seen = [(path, meta, training_set(path, meta)) for path, _, meta in map(open_checkpoint, files)]
    opened = {(meta["recipe_hash"], known): (path, meta) for path, meta, known in seen}
    where = "the recipe stored in {}"
    recipes = {
        path: (trained_recipe(meta["recipe"], where.format(path), progress), known)
        for (_, known), (path, meta) in opened.items()
    }
    for other in others:
        other.check(what="measurement", faults=part_faults(str(plan.on)))
    if not sources or len(recipes) + len(others) + len(stored) < 2:
        return
    threats = [(str(path), build_threat(recipe)) for path, (recipe, _) in recipes.items()]
    threats += [(other.label, other.threat) for other in others]
    told = [(at, f"{t.norm} eps {t.eps:.6g}") for at, t in threats]
    _agree("threat", told + [(_name(r), f"{r.threat['norm']} eps {r.threat['eps']:.6g}") for r in stored])
    parts: dict[tuple[str, str | None], tuple[str, tuple[int, ...]]] = {}
    samples = []
    for path, (recipe, known) in recipes.items():
        key = repr(recipe.data), known
        if key not in parts:
            whole = data_part(recipe, str(plan.on), data_folder, training_set=known, run=path.parent)
            parts[key] = _digested(whole, plan)
        samples.append((str(path), *parts[key]))
    samples += [(other.label, *_digested(other.part(str(plan.on), data_folder), plan)) for other in others]
    told = [(at, which) for at, which, _ in samples]
    _agree("data", told + [(_name(r), f"{r.provenance['data']} ({str(r.identity['data'])[:8]})") for r in stored])
    if stored:
        _check_asked(stored[0], plan, threats[0][1], prod(samples[0][2]), torch.device(device))


def _digested(whole: Dataset, plan: Plan) -> tuple[str, tuple[int, ...]]:
    """The samples a landscape will be of, in words and as a digest; also their shape."""
    data = plan.samples(whole)
    return f"{said(str(plan.on), data, len(whole))} ({fingerprint(data)[:8]})", tuple(whole.input_shape)


def _check_asked(record: Landscape, plan: Plan, threat: Threat, pixels: int, device: torch.device) -> None:
    """ConfigError unless what was asked of a landscape is asked again: what its figure says once for all of them."""
    attack, weights = plan.made_attack(), plan.kind != "input"
    made = {} if attack is None else {"name": plan.attack, **describe(attack, threat)}
    now: dict[str, Any] = {"kind": plan.kind, "axis": _axis(plan.axis(threat, pixels).values)}
    now |= {"attack": _options(json.loads(json_text(made))), "directions": (plan.directions or 1) if weights else None}
    now |= {"seed": plan.seed, "precision": plan.computes_in(device)}
    then: dict[str, Any] = {"kind": record.kind, "axis": _axis(record.axis), "attack": _options(record.attack)}
    then |= {"directions": record.count if weights else None}
    then |= {name: record.provenance[name] for name in ("seed", "precision")}
    for what, mine in now.items():
        _agree(what, [(_name(record), str(then[what])), ("asked for", str(mine))])


def _axis(axis: Sequence[float]) -> str:
    return f"{len(axis)} points to {axis[-1]:.6g}"


def _options(attack: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(attack.items(), key=lambda item: item[0] != "name"))


def _name(record: Landscape) -> str:
    return f"record of {origin(record.provenance)[0]}"


def _agree(what: str, told: Sequence[tuple[str, str]]) -> None:
    (first, mine), *others = told
    for other, theirs in others:
        if theirs != mine:
            raise ConfigError(
                f"landscapes of different {what} are not drawn at one scale: {mine} ({first}) and {theirs} ({other}); "
                "measure them alike, or look at them one by one"
            )
