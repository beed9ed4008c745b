"""Models that flatrock did not train, evaluated like a run: options -> model, test set, result, file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import Spec as Attack
from flatrock.attacks.craft import check_inputs
from flatrock.core.device import Devices, each_device, pick_device
from flatrock.core.files import brief, json_text, sha256
from flatrock.core.options import choose
from flatrock.core.progress import Progress, Silent
from flatrock.core.records import Finding, Result
from flatrock.core.rng import Seed
from flatrock.core.tensorfile import weights_digest
from flatrock.core.threat import THREATS, Threat
from flatrock.data.catalog import Spec
from flatrock.data.dataset import Dataset
from flatrock.data.split import places, some_samples
from flatrock.evaluation.checks import check_normalization
from flatrock.evaluation.evaluate import DEFAULT_ATTACKS, PRECISIONS, evaluate
from flatrock.evaluation.exam import samples_digest
from flatrock.evaluation.plans import make_plan
from flatrock.evaluation.votes import check_votes
from flatrock.models.foreign import STORED, Foreign, open_foreign
from flatrock.recipes.restore import Source
from flatrock.workflows.evaluate import how_many, part_of_data, voted_by, votes_mark, write_result
from flatrock.workflows.foreign_model import (
    ForeignModel,
    caught,
    examine,
    in_names,
    other_normalization,
    out_faults,
    tried_on,
)
from flatrock.workflows.replaced import check_other, question_of
from flatrock.workflows.surrogate import open_surrogate, surrogate_mark, unheeded

Attacks = Sequence[Attack]
# What tells one model of a name from another, and one data set of a name from another, in the names of files.
_KNOWN_BY = ("weights", "weights_sha256", "weights_entry", "weights_digest", "normalize", "converter", "samples_digest")


def load_foreign(
    model: str | None = None,
    *,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    normalize: str | None = None,
    which: str = "auto",
) -> nn.Module:
    """A network for inputs in [0, 1] that flatrock did not train, in eval mode.

    `model` is a name of flatrock's, `package.module:factory`, or None where the weights are of a family that `convert`
    knows. `weights` is a safetensors file or a torch file (no pickle is executed); without it a factory's own are kept.
    `num_classes` is checked against the weights. `normalize` is a name of NORMALIZATIONS or 'none'; None takes what the
    file stores. `which` names the entry of a checkpoint that holds several models; auto prefers averaged weights.
    """
    return open_foreign(model, weights=weights, num_classes=num_classes, normalize=normalize, which=which).model


def evaluate_foreign(
    model: str | None = None,
    *,
    data: Spec | None = None,
    norm: str | None = None,
    eps: float | str | None = None,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    normalize: str | None = None,
    which: str = "auto",
    attacks: Attacks | None = None,
    surrogate: Source | None = None,
    limit: int | None = None,
    first: bool = False,
    batch_size: int | None = None,
    precision: str = "auto",
    votes: int = 1,
    doubt: bool = False,
    keep_adversarial: bool = False,
    out: Path | None = None,
    journal: bool = False,
    resume: bool = False,
    data_folder: Path | None = None,
    device: Devices = "cpu",
    seed: int = 0,
    others: Sequence[int] = (),
    progress: Progress | None = None,
    on_data: Callable[[Dataset], None] = unheeded,
) -> Result:
    """Evaluate a network that flatrock did not train (see ForeignModel) on a test set; every fault is listed at once.

    `journal` keeps finished batches beside `out` until `store_foreign`; the other options are those of evaluate_run.
    """
    chosen, devices = DEFAULT_ATTACKS if attacks is None else attacks, each_device(device)
    made: dict[str, Any] = {"model": model, "weights": weights, "num_classes": num_classes, "normalize": normalize}
    asked = ForeignModel(**made, which=which, data=data, norm=norm, eps=eps)
    asked.check(what="evaluation", faults=_faults(chosen, surrogate is not None, precision, votes, devices, out))
    foreign, whole = asked.opened(progress or Silent()), asked.part("test", data_folder)
    test = _examined(foreign, asked, some_samples(whole, limit, first=first), pick_device(devices[0]), on_data)
    other = open_surrogate(surrogate, test, progress)
    chosen = other.attacks(chosen, chosen)
    x, threat = check_inputs(test.images(torch.arange(len(test))), test.y, asked.threat), asked.threat
    about = {**foreign.about, **_facts(test, whole, first, votes), **other.provenance, **_digests(foreign, x, test.y)}
    how: dict[str, Any] = {"precision": precision, "votes": votes, "doubt": doubt, "keep_adversarial": keep_adversarial}
    how |= {"resume": resume, "seed": seed, "progress": progress, "provenance": about}
    if doubt:
        how["noted"] = _doubts(foreign, asked, test, pick_device(devices[0]), batch_size or len(test))
    if journal or resume:
        kept = _kept(about, other.names(chosen), threat, len(test), (seed, *others), out, resume=resume)
        how |= {"journal": kept.pop(seed), "others": kept}
    how |= {"surrogate": other.model, "ids": places(test, whole), "device": device, "batch_size": batch_size}
    return evaluate(foreign.model, x, test.y, threat, attacks=chosen, **how)


def _doubts(foreign: Foreign, asked: ForeignModel, test: Dataset, where: torch.device, batch: int) -> list[Finding]:
    """What is to be said of a normalisation that was named; what weights bring with them cannot be overruled."""
    if asked.normalize is None or foreign.about["normalize"]["source"] == STORED:
        return []
    few = tried_on(test)
    return check_normalization(len(few), *other_normalization(foreign, few, where, batch=batch))


def _examined(
    foreign: Foreign, asked: ForeignModel, test: Dataset, where: torch.device, on_data: Callable[[Dataset], None]
) -> Dataset:
    """The samples, on which the network can work; whoever wants to see them has."""
    examine(foreign, test, where, asked.num_classes)
    on_data(test)
    return test


def _facts(test: Dataset, whole: Dataset, first: bool, votes: int) -> dict[str, Any]:
    return {**part_of_data(test, whole, first=first), **voted_by(votes)}


def _digests(foreign: Foreign, x: Tensor, y: Tensor) -> dict[str, str]:
    """Of the network as it is and of the samples: neither options nor a weights file tell all that may differ."""
    return {"weights_digest": weights_digest(foreign.model), "samples_digest": samples_digest(x, y)}


def store_foreign(result: Result, out: Path | None = None) -> Path:
    """Write a result of evaluate_foreign to `out`, or to a file in the current folder that its content names."""
    target = out or foreign_place(result)
    write_result(target, result)
    return target


def foreign_place(result: Result) -> Path:
    """The file in the current folder that the content of a result of evaluate_foreign names."""
    about = result.provenance
    threat = THREATS[result.threat["norm"]](result.threat["eps"])
    return _default_target(about, sorted(result.per_attack), threat, samples=result.n, seed=int(about["seed"]))


def _default_target(
    about: Mapping[str, Any], attacks: Sequence[str], threat: Threat, *, samples: int, seed: int
) -> Path:
    """result-<model>-<data>-<norm>-<eps>-<attacks>-n<samples>-seed<seed>-<digest>.json.

    The digest is of all that tells the model and the samples (_KNOWN_BY). The first samples are first<samples>. Votes
    add -votes<votes>, a surrogate -from- and the begin of its digest.
    """
    parts = [about["model"], in_names(about["dataset"]), threat.norm, f"{threat.eps:.6g}", brief("+".join(attacks))]
    told = sha256(json_text({key: about.get(key) for key in _KNOWN_BY}))[:8]
    stem = re.sub(r"[^\w.=+-]+", "_", "-".join(["result", *parts, how_many(about, samples), f"seed{seed}", told]))
    return Path(f"{stem}{votes_mark(about)}{surrogate_mark(about)}.json")


def _kept(
    about: Mapping[str, Any],
    attacks: Sequence[str],
    threat: Threat,
    samples: int,
    seeds: Sequence[int],
    out: Path | None,
    *,
    resume: bool,
) -> dict[int, Path]:
    """Where the finished batches of each seed are kept until its result is stored.

    StateError if `resume` would put the result in the place of one that answers another question.
    """
    files = {seed: _default_target(about, attacks, threat, samples=samples, seed=seed) for seed in seeds}
    files |= {seeds[0]: out} if out else {}
    if resume:
        told = {**about, "seed": Seed(seeds[0]).key}
        check_other(files[seeds[0]], question_of({"norm": threat.norm, "eps": threat.eps}, attacks, told))
    return {seed: file.with_suffix(".part") for seed, file in files.items()}


def _faults(
    attacks: Attacks,
    transfers: bool,
    precision: str,
    votes: int,
    devices: Sequence[torch.device | str],
    out: Path | None,
) -> list[str]:
    """What is wrong with the options that do not describe the model."""
    # The surrogate is opened later; names can be checked with anything in its place.
    faults = caught("attacks", lambda: make_plan(attacks, surrogate=nn.Identity() if transfers else None))
    faults += caught("precision", lambda: choose("evaluate", "precision", precision, PRECISIONS))
    faults += caught("votes", lambda: check_votes(votes))
    faults += caught("device", lambda: [pick_device(device) for device in devices])
    return faults + out_faults(out, Result.from_json, what="result of an evaluation")
