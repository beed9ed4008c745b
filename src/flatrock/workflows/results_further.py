"""Which stored results answer the further evaluations of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.files import sha256
from flatrock.core.records import Result
from flatrock.engine.folder import RunFolder
from flatrock.recipes.further import attack_names, threat_of
from flatrock.recipes.schema import Further, Recipe

# Further evaluations, each with the result that answers it and the digest of its file.
Answers = list[tuple[Further, Result, str]]


def answers(path: Path, name: str, recipe: Recipe, *, fresh: Callable[[Result], bool]) -> Answers:
    """What there is of the recipe's further evaluations of a checkpoint, of weights that are `fresh`.

    Whoever made a result, it is known by what was asked; of several the newest counts. Damaged files answer nothing.
    """
    there: list[tuple[Result, str]] = []
    for file in sorted(path.glob(f"result-{name}-*.json")) if recipe.evaluate.more else ():
        with suppress(StateError, OSError, UnicodeDecodeError):
            text = file.read_text()
            there.append((Result.from_json(text, str(file)), sha256(text)))
    there = [(result, digest) for result, digest in there if fresh(result)]
    found: Answers = []
    for asked in recipe.evaluate.more:
        fitting = [one for one in there if _fits(one[0], asked, recipe)]
        if fitting:
            found.append((asked, *max(fitting, key=lambda one: str(one[0].provenance.get("time")))))
    return found


def _fits(result: Result, asked: Further, recipe: Recipe) -> bool:
    """Whether this very question was asked: threat, attacks, samples, surrogate, and chance as everywhere."""
    about, threat = result.provenance, threat_of(asked, recipe.threat)
    return (
        (result.threat["norm"], result.threat["eps"]) == (threat.norm, threat.eps)
        and set(result.per_attack) == set(attack_names(asked))
        and (about.get("seed"), about.get("votes", 1)) == (0, 1)
        and _samples(result, asked)
        and _surrogate(about.get("surrogate"), asked.surrogate)
    )


def _samples(result: Result, asked: Further) -> bool:
    if asked.limit is None or (result.ids is None and result.n <= asked.limit):  # all there are
        return result.ids is None
    return result.n == asked.limit and bool(result.provenance.get("first")) == asked.first


def _surrogate(about: Mapping[str, Any] | None, place: str | None) -> bool:
    """Whether the inputs come from the run named, as it is now; if it does not lie there, from whichever is told."""
    if about is None or place is None:
        return about is None and place is None
    folder = RunFolder(Path(place))
    if not folder.info.is_file():
        return True
    run = folder.run()
    best = run.best if run.best_average is None else run.best_average
    return best is not None and (about.get("recipe_hash"), about.get("epoch")) == (folder.owner(), best.epoch)
