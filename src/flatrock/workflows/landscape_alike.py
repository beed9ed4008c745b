"""Which landscapes could be drawn together, told before any is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatrock.core.errors import ConfigError
from flatrock.core.progress import Progress
from flatrock.core.provenance import origin
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
    progress: Progress | None = None,
) -> None:
    """ConfigError if landscapes of these could not be drawn together, told before any is measured.

    Threats and samples follow from recipes, or from the options of a model that is no run; `stored` are landscapes to
    be drawn beside them.
    """
    files = [source for source in sources if isinstance(source, Path)]
    others = [source for source in sources if isinstance(source, ForeignModel)]
    seen = [(path, meta, training_set(path, meta)) for path, _, meta in map(open_checkpoint, files)]
    opened = {(meta["recipe_hash"], known): (path, meta) for path, meta, known in seen}
    where = "the recipe stored in {}"
    recipes = {path: trained_recipe(meta["recipe"], where.format(path), progress) for path, meta in opened.values()}
    for other in others:
        other.check(what="measurement", faults=part_faults(str(plan.on)))
    if len(recipes) + len(others) + len(stored) < 2:
        return
    threats = [(str(path), build_threat(recipe)) for path, recipe in recipes.items()]
    threats += [(other.label, other.threat) for other in others]
    told = [(at, f"{t.norm} eps {t.eps:.6g}") for at, t in threats]
    _agree("threat", told + [(_name(r), f"{r.threat['norm']} eps {r.threat['eps']:.6g}") for r in stored])
    trained_on = {path: known for path, _, known in seen}
    samples: dict[tuple[str, str | None], str] = {}
    told = []
    for path, recipe in recipes.items():
        key = repr(recipe.data), trained_on[path]
        if key not in samples:
            whole = data_part(recipe, str(plan.on), data_folder, training_set=trained_on[path])
            samples[key] = _digested(whole, plan)
        told.append((str(path), samples[key]))
    told += [(other.label, _digested(other.part(str(plan.on), data_folder), plan)) for other in others]
    _agree("data", told + [(_name(r), f"{r.provenance['data']} ({str(r.identity['data'])[:8]})") for r in stored])


def _digested(whole: Dataset, plan: Plan) -> str:
    """The samples a landscape will be of, in words and as a digest."""
    data = plan.samples(whole)
    return f"{said(str(plan.on), data, len(whole))} ({fingerprint(data)[:8]})"


def _name(record: Landscape) -> str:
    return f"record of {origin(record.provenance)[0]}"


def _agree(what: str, told: Sequence[tuple[str, str]]) -> None:
    (first, mine), *others = told
    for other, theirs in others:
        if theirs != mine:
            raise ConfigError(
                f"landscapes of different {what} are not drawn at one scale: {mine} ({first}) and {theirs} ({other}); "
                "look at them one by one"
            )
