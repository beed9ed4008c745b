"""Runs -> rows of results: what their small files say, without their weights."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from flatrock.core.errors import StateError
from flatrock.core.files import sha256
from flatrock.core.progress import Progress
from flatrock.core.records import Result
from flatrock.core.rows import Row, Score
from flatrock.core.runs import EpochRecord, Run
from flatrock.engine.folder import RunFolder
from flatrock.evaluation.journal import discard_empty, finished_batches
from flatrock.evaluation.plans import make_plan
from flatrock.recipes.changed import leaves
from flatrock.recipes.load import library, load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.restore import stored_recipe
from flatrock.recipes.schema import Recipe

PROTOCOL = re.compile(r"([a-z0-9]+_(?:short|full|flagship))(?:_|$)")
CHECKPOINTS = ("best", "last", "average-best", "average-last")
# Those of a run's provenance that say how to ask the same question again; `resumed` is added where it was.
CERTIFICATE = ("commit", "flatrock", "torch", "python", "device", "time", "engine")
# What a run may be built on, by its name in provenance, and the key that names it.
SOURCES = {"helper": "objective.helper", "start": "model.weights"}


def collect_run(path: Path, progress: Progress | None = None) -> Row:
    """The row of a run folder: its records, and the result of every checkpoint evaluated with the recipe's own plan.

    Only recipe.yaml, run.json, metrics.jsonl and result-*.json are read, so a folder without weights will do.
    """
    folder = RunFolder(path)
    info = folder.read_info()
    folder.check_ended()
    run, recipe = folder.run(), stored_recipe(folder, progress)
    certificate = dict(info.get("provenance", {}))
    resumed = [str(again.get("commit")) for again in info.get("resumed", [])]
    name = str(info.get("name", recipe.name))
    return Row(
        recipe=name,
        recipe_hash=str(info["recipe_hash"]),
        protocol=protocol(name),
        summary=recipe.about.summary,
        changes=(*changes(recipe), *other_sources(recipe, certificate)),
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
        },
        findings=tuple(info.get("findings", ())),
        provenance={k: certificate.get(k) for k in CERTIFICATE}
        | {k: v for k, v in (("resumed", resumed), *((k, certificate.get(k)) for k in SOURCES)) if v},
        scores={} if run.status == "failed" else _scores(path, str(info["recipe_hash"]), run),
        own=recipe.name not in library(),
    )


def protocol(name: str) -> str:
    """`cifar10_short` of `cifar10_short_trades_awp`; nothing for a recipe that belongs to none."""
    found = PROTOCOL.match(name)
    return found[1] if found else ""


def judged(recipe: Recipe) -> dict[str, Any]:
    """What decides the numbers of a row, by its dotted names."""
    return leaves(recipe.judged_keys())


def changes(recipe: Recipe) -> list[str]:
    """In what a recipe is not the library's of that name; the seed is free, and sources are told by other_sources."""
    if recipe.name not in library():
        return []
    own, known = (judged(r) for r in (recipe, load_recipe(recipe.name, {"seed": recipe.seed})))
    keys = [key for key in sorted(own.keys() | known.keys()) if own.get(key) != known.get(key)]
    return [f"{key}: {own.get(key)!r} instead of {known.get(key)!r}" for key in keys if key not in SOURCES.values()]


def other_sources(recipe: Recipe, certificate: Mapping[str, Any]) -> list[str]:
    """What a run was built on, as its provenance says, that is no run of the recipe which the library's names."""
    if recipe.name not in library():
        return []
    known = load_recipe(recipe.name)
    named = {"helper": known.objective.options.get("helper"), "start": known.model.weights}
    told = []
    for kind, key in SOURCES.items():
        there, wanted = certificate.get(kind) or {}, Path(named[kind] or "").name
        alike = bool(wanted) and there.get("recipe") == wanted
        if alike:
            asked = load_recipe(wanted, {k: v for k, v in there.items() if k == "seed"})
            if there.get("recipe_hash") == recipe_hash(asked):
                continue
        if there:
            name = f"{there['recipe']}{', changed' if alike else ''}" if "recipe" in there else there["file"]
            told.append(f"{key}: {name} ({str(there.get('weights'))[:12]}) instead of {wanted or 'none'}")
    return told


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


def _scores(path: Path, recipe_hash: str, run: Run) -> dict[str, Score]:
    """The evaluated checkpoints."""
    found = {name: _result(path, name, recipe_hash, run) for name in CHECKPOINTS}
    return {name: _score(*stored) for name, stored in found.items() if stored is not None}


def _result(path: Path, name: str, recipe_hash: str, run: Run) -> tuple[Result, str] | None:
    """The result of a checkpoint, if it was evaluated, and the digest of its file.

    One of other weights than the run has now is refused.
    """
    file = path / f"result-{name}.json"
    if not file.is_file():
        return None
    text = file.read_text()
    result = Result.from_json(text, str(file))
    about = result.provenance
    if about.get("recipe_hash") != recipe_hash or about.get("epoch", 0) != _epoch_of(name, run):
        raise StateError(told_stale(file))
    if not about.get("whole_plan"):
        raise StateError(f"{file} is not of the recipe's own attacks on the whole test set; evaluate again")
    return result, sha256(text)


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


def take_attacks(folder: RunFolder, recipe: Recipe, progress: Progress | None = None) -> None:
    """Let a run be evaluated as a recipe says that trains the same, for which others or more attacks are named now."""
    import yaml

    own = stored_recipe(folder, progress)
    if own.evaluate.attacks != recipe.evaluate.attacks:
        journals = {name: folder.path / f"result-{name}.part" for name in CHECKPOINTS}
        for name, journal in journals.items():
            if kept := finished_batches(journal):
                raise StateError(
                    f"{journal} holds {kept} finished batches of an evaluation with the attacks named before; finish "
                    f"it with `flatrock eval {shlex.quote(str(folder.path))} --which {name} --resume`, or delete it"
                )
        for journal in journals.values():  # of a process killed before its first batch, it names the old attacks
            discard_empty(journal)
        now = own.model_copy(update={"evaluate": recipe.evaluate, "about": recipe.about})  # bands are of attacks
        folder.write_recipe(yaml.safe_dump(now.resolved(), sort_keys=False))


def verdicts(result: Result) -> dict[str, Tensor]:
    """What stood on the clean input, under each attack on its own, and under each plan as a whole."""
    plans = {plan: labels[-1] for plan, labels in result.plans.items()}
    return {name: result.flags[plans.get(name, name)] for name in ("clean", *result.per_attack)}


def _score(result: Result, digest: str) -> Score:
    about = dict(result.provenance)
    return Score(
        epoch=int(about["epoch"]),
        right=verdicts(result),
        seconds={name: float(cost["seconds"]) for name, cost in result.costs.items() if "seconds" in cost},
        findings=tuple(f"{f.code}: {f.message}" for f in result.findings),
        marks=tuple(result.marks),
        provenance={k: about.get(k) for k in ("commit", "torch", "device", "time", "seed", "precision", "batch_size")},
        result=digest,
    )
