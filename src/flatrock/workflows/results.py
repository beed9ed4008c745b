"""Runs -> rows of results: what their small files say, without their weights."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.files import sha256
from flatrock.core.neighbours import ASKED_EVERY
from flatrock.core.progress import Progress
from flatrock.core.records import Result, read_result
from flatrock.core.rows import Row, Score, chosen_on_test
from flatrock.core.runs import EpochRecord, Run
from flatrock.engine.folder import RunFolder
from flatrock.evaluation.journal import discard_empty, finished_batches
from flatrock.evaluation.plans import make_plan
from flatrock.recipes.changed import leaves
from flatrock.recipes.filled import in_full
from flatrock.recipes.further import options_of, surrogates, where_of
from flatrock.recipes.load import library, load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.restore import stored_recipe, with_attacks
from flatrock.recipes.schema import Further, Recipe
from flatrock.workflows.results_further import Answers, answers
from flatrock.workflows.results_origin import SOURCES, origin
from flatrock.workflows.results_score import score_of

PROTOCOL = re.compile(r"([a-z0-9]+_(?:short|full|flagship))(?:_|$)")
CHECKPOINTS = ("best", "last", "average-best", "average-last")
# The overrides of runs whose best epoch is chosen on the test set, as papers choose it.
ON_TEST = {"select.data": "test", "data.held_out": 0}


def collect_run(path: Path, progress: Progress | None = None) -> Row:
    """The row of a run folder: its records, and the result of every checkpoint evaluated with the recipe's own plan,
    beside it those of its further evaluations.

    No weights are read, so a folder without them will do.
    """
    folder = RunFolder(path)
    info = folder.read_info()
    folder.check_ended()
    run, recipe = folder.run(), stored_recipe(folder, progress)
    certificate = dict(info.get("provenance", {}))
    name = str(info.get("name", recipe.name))
    scores = {} if run.status == "failed" else _scores(path, str(info["recipe_hash"]), run, recipe)
    return Row(
        recipe=name,
        recipe_hash=str(info["recipe_hash"]),
        protocol=protocol(name),
        summary=recipe.about.summary,
        changes=(*changes(recipe), *other_sources(recipe, certificate), *other_surrogates(recipe, scores)),
        seed=recipe.seed,
        status=run.status,
        reason=run.reason,
        selection=_selection(recipe, run),
        training={
            "epochs": len(run.records),
            "seconds": sum(r.seconds for r in run.records),
            "elapsed": run.records[-1].elapsed if run.records else None,
            # The median: the first epoch may have compiled the network.
            "seconds_per_epoch": median(r.seconds for r in run.records) if run.records else None,
            "peak_memory_bytes": info.get("peak_memory_bytes"),
            **_shared(run),
        },
        findings=tuple(info.get("findings", ())),
        provenance=origin(certificate, info.get("resumed", [])),
        scores=scores,
        own=recipe.name not in library(),
    )


def _shared(run: Run) -> dict[str, int]:
    """Of how many epochs is known who else had the GPU open, and in how many of them others had.

    Somebody looks every half minute: an epoch without a look is taken for what the last one before it saw, unless that
    is so long ago that nobody looked any more.
    """
    seen, looked = list[int](), -inf
    for record in run.records:
        now = record.elapsed or 0.0
        if record.neighbours is not None:
            seen.append(record.neighbours)
            looked = now
        elif now - looked < 2 * ASKED_EVERY:
            seen.append(seen[-1])
    return {"watched_epochs": len(seen), "shared_epochs": sum(map(bool, seen))} if seen else {}


def protocol(name: str) -> str:
    """`cifar10_short` of `cifar10_short_trades_awp`; nothing for a recipe that belongs to none."""
    found = PROTOCOL.match(name)
    return found[1] if found else ""


def judged(recipe: Recipe) -> dict[str, Any]:
    """What decides the numbers of a row, by its dotted names."""
    return leaves(recipe.judged_keys())


def changes(recipe: Recipe) -> list[str]:
    """In what a recipe is not the library's, defaults included; the seed is free, sources are told by other_sources."""
    if recipe.name not in library():
        return []
    both = recipe, load_recipe(recipe.name, {"seed": recipe.seed})
    said = {key for one in both for key in judged(one)} - {*SOURCES.values()}
    own, known = (leaves(in_full(one)) for one in both)
    return [f"{k}: {own.get(k)!r} instead of {known.get(k)!r}" for k in sorted(said) if own.get(k) != known.get(k)]


def other_sources(recipe: Recipe, certificate: Mapping[str, Any]) -> list[str]:
    """What a run was built on, as its provenance says, that is no run of the recipe which the library's names."""
    if recipe.name not in library():
        return []
    known = load_recipe(recipe.name)
    named = {"helper": known.objective.options.get("helper"), "start": known.model.weights}
    told = [_other(key, certificate.get(kind) or {}, Path(named[kind] or "").name) for kind, key in SOURCES.items()]
    return [text for text in told if text]


def other_surrogates(recipe: Recipe, scores: Mapping[str, Score]) -> list[str]:
    """What inputs were crafted on that is no run of the recipe which the library's names, if that names any."""
    if recipe.name not in library():
        return []
    wanted = [place.name for place in surrogates(load_recipe(recipe.name)).values()]
    used = [one.provenance["surrogate"] for s in scores.values() for one in s.more if "surrogate" in one.provenance]
    ways = ({}, ON_TEST) if chosen_on_test(changes(recipe)) else ({},)  # a surrogate may be chosen as the run is
    told = [_other("evaluate.more.surrogate", there, wanted[0], *ways) for there in used if wanted]
    return list(dict.fromkeys(text for text in told if text))


def _other(key: str, there: Mapping[str, Any], wanted: str, *ways: Mapping[str, Any]) -> str:
    """What another run, or a file, was in the place of one of the recipe wanted, in one of these ways to change it;
    nothing if it is of that one."""
    alike = bool(wanted) and there.get("recipe") == wanted
    if not there or (alike and there.get("recipe_hash") in [_hash(wanted, there, way) for way in ways or ({},)]):
        return ""
    name = f"{there['recipe']}{', changed' if alike else ''}" if "recipe" in there else there["file"]
    return f"{key}: {name} ({str(there.get('weights'))[:12]}) instead of {wanted or 'none'}"


def _hash(name: str, there: Mapping[str, Any], way: Mapping[str, Any]) -> str:
    """That of the library's recipe with the seed of the run, changed in this way."""
    return recipe_hash(load_recipe(name, {**way, **{k: v for k, v in there.items() if k == "seed"}}))


def _selection(recipe: Recipe, run: Run) -> dict[str, Any]:
    ends: dict[str, Any] = {"data": recipe.select.data, "metric": recipe.select.metric, "every": recipe.select.every}
    if run.best is not None:
        ends["best"] = _probed(run.best)
    if run.records:
        ends["last"] = _probed(run.last)
        probes = [_probed(record) for record in run.records if record.robust is not None]
        ends["curve"] = {key: [probe[key] for probe in probes] for key in _probed(run.last)}
        if run.last.average_robust is not None:
            ends["average_last"] = _averaged(run.last)
    if run.best_average is not None:
        ends["average_best"] = _averaged(run.best_average)
    return ends


def _probed(record: EpochRecord) -> dict[str, Any]:
    return {"epoch": record.epoch, "clean": record.clean, "robust": record.robust, "train_robust": record.train_robust}


def _averaged(record: EpochRecord) -> dict[str, Any]:
    return {"epoch": record.epoch, "clean": record.average_clean, "robust": record.average_robust}


def _scores(path: Path, recipe_hash: str, run: Run, recipe: Recipe) -> dict[str, Score]:
    """The evaluated checkpoints."""
    found = {name: _result(path, name, recipe_hash, run) for name in CHECKPOINTS}
    scores = {name: score_of(*stored) for name, stored in found.items() if stored is not None}
    return {name: replace(score, more=_more(path, name, recipe)) for name, score in scores.items()}


def _more(path: Path, name: str, recipe: Recipe) -> tuple[Score, ...]:
    """What its further evaluations found."""
    made = _answers(path, name, recipe)
    return tuple(score_of(result, digest, where_of(asked, recipe.threat)) for asked, result, digest in made)


def _answers(path: Path, name: str, recipe: Recipe) -> Answers:
    folder = RunFolder(path)
    return answers(path, name, recipe, fresh=lambda result: not of_other_weights(result, name, folder))


def _result(path: Path, name: str, recipe_hash: str, run: Run) -> tuple[Result, str] | None:
    """The result of a checkpoint, if it was evaluated, and the digest of its file.

    One of other weights than the run has now is refused.
    """
    file = path / f"result-{name}.json"
    if not file.is_file():
        return None
    result = read_result(file)
    about = result.provenance
    if about.get("recipe_hash") != recipe_hash or about.get("epoch", 0) != _epoch_of(name, run):
        raise StateError(told_stale(file))
    if not about.get("whole_plan"):
        raise StateError(f"{file} is not of the recipe's own attacks on the whole test set; evaluate again")
    return result, sha256(file.read_bytes())


def _epoch_of(name: str, run: Run) -> int | None:
    """The epoch a checkpoint of the run is of now; None: there is no such."""
    record = {"best": run.best, "average-best": run.best_average}.get(name, run.records[-1] if run.records else None)
    return None if record is None else record.epoch


def of_other_weights(result: Result, name: str, folder: RunFolder) -> bool:
    """Whether a result of this checkpoint is of other weights than the run has now."""
    about = result.provenance
    if about.get("recipe_hash") != folder.owner():
        return True
    return name in CHECKPOINTS and about.get("epoch") != _epoch_of(name, folder.run())  # a kept epoch is what it was


def told_stale(file: Path, command: str = "flatrock eval") -> str:
    """Why a result file of other weights is not taken, and the command that makes it anew."""
    return f"{file} is of other weights than the run has now; evaluate again with `{command}`"


def is_evaluated(run: Run, name: str, recipe: Recipe) -> bool:
    """Whether a result of this checkpoint of the run, as it is now, is there, under all attacks of the recipe."""
    try:
        found = _result(run.folder, name, RunFolder(run.folder).owner(), run)
    except StateError:  # of other weights, or damaged
        return False
    wanted = {step.plan or step.label for step in make_plan(recipe.evaluate.attacks)}
    return found is not None and wanted <= found[0].per_attack.keys()


def questions_left(run: Run, name: str, recipe: Recipe) -> list[dict[str, Any]]:
    """What is to be asked of a checkpoint, as options of evaluate_run: none for the recipe's own plan."""
    own: list[dict[str, Any]] = [] if is_evaluated(run, name, recipe) else [{}]
    return own + [options_of(asked) for asked in further_left(run, name, recipe)]


def further_left(run: Run, name: str, recipe: Recipe) -> list[Further]:
    """The further evaluations of a checkpoint that are not there."""
    known = [asked for asked, _, _ in _answers(run.folder, name, recipe)]
    return [asked for asked in recipe.evaluate.more if asked not in known]


def take_attacks(folder: RunFolder, recipe: Recipe, progress: Progress | None = None) -> None:
    """Let a run be evaluated as a recipe says that trains the same, for which others or more attacks are named now."""
    import yaml

    own = stored_recipe(folder, progress)
    others = own.evaluate.attacks != recipe.evaluate.attacks
    if others:
        journals = {name: folder.path / f"result-{name}.part" for name in CHECKPOINTS}
        for name, journal in journals.items():
            if kept := finished_batches(journal):
                raise StateError(
                    f"{journal} holds {kept} finished batches of an evaluation with the attacks named before; finish "
                    f"it with `flatrock eval {shlex.quote(str(folder.path))} --which {name} --resume`, or delete it"
                )
        for journal in journals.values():  # of a process killed before its first batch, it names the old attacks
            discard_empty(journal)
    if others or own.evaluate.more != recipe.evaluate.more:
        folder.write_recipe(yaml.safe_dump(with_attacks(own, recipe).resolved(), sort_keys=False))
