"""Evaluate a model under attacks and plans: flags per sample, findings, costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import Spec
from flatrock.attacks.craft import check_ids, check_inputs, check_model, class_indices
from flatrock.core.borrow import home
from flatrock.core.device import Devices, pick_devices, shared_by
from flatrock.core.errors import ConfigError, ThreatError
from flatrock.core.files import json_text
from flatrock.core.guests import told_code
from flatrock.core.identity import ANSWERS, answers
from flatrock.core.neighbours import Lookout
from flatrock.core.numbers import plain
from flatrock.core.options import choose
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import VERSION, birth_certificate
from flatrock.core.records import Finding, Result
from flatrock.core.rng import Seed
from flatrock.core.tensorfile import digest, weights_digest
from flatrock.core.threat import Threat
from flatrock.evaluation.checks import all_marks, check_marks
from flatrock.evaluation.crew import Crew, crew
from flatrock.evaluation.doubt import doubts_after, doubts_before, doubts_deep
from flatrock.evaluation.exam import CPU_BATCH, GPU_BATCH, Exam
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.journal import Chunk, Journal, answered, journaled, question, result_file
from flatrock.evaluation.outlook import outlook
from flatrock.evaluation.plans import Step, described, make_plan, with_transfer
from flatrock.evaluation.setting import at_work, choose_crafting
from flatrock.evaluation.surrogate import check_answers, check_surrogate
from flatrock.evaluation.tally import NEIGHBOURS, Tally

DEFAULT_ATTACKS = ("pgd-20", "cw-20")
PRECISIONS = ("auto", "full", "half")


def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    attacks: Sequence[Spec] = DEFAULT_ATTACKS,
    surrogate: nn.Module | None = None,
    ids: Tensor | None = None,
    device: Devices | None = None,
    batch_size: int | None = None,
    precision: str = "auto",
    votes: int = 1,
    doubt: bool = False,
    keep_adversarial: bool = False,
    journal: Path | str | None = None,
    resume: bool = False,
    others: Mapping[int, Path] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    marks: Sequence[str] = (),
    noted: Sequence[Finding] = (),
    provenance: Mapping[str, Any] | None = None,
) -> Result:
    """Accuracy of any module that maps [0, 1] inputs to logits, clean and under attacks and plans.

    An attack is tried on every sample the model gets right, an attack of a plan (`autoattack`) on what the plan's
    earlier ones left; a sample that is broken leaves at once. The verdict is a separate float32 pass, or the majority
    of an odd number of them, `votes`, for models that answer at random. Random numbers belong to `ids`, one per sample,
    or to rows of x. Of several devices each attacks in a process of its own. Attacks craft in half `precision` on a GPU
    (`auto`), everywhere, or not (`full`), transfer-... on the `surrogate`. `doubt` looks for reasons not to believe it;
    `noted` are yours. A `journal` folder has finished batches, `others` those of seeds to come; `resume` goes on.
    """
    x, y, attacks = _checked(model, x, y, threat, attacks, surrogate, batch_size, precision)
    told, marks = _storable(provenance or {}), all_marks(model, marks)
    devices = [home(model)] if device is None else pick_devices(device)
    with at_work(model, surrogate, devices[0]) as (other, at_first), Lookout(devices[0]) as lookout:
        size, key = int(batch_size or _usual_batch(devices)), Seed(seed).child("evaluate")
        exam = Exam(model, Counted(model), x, y, threat, devices[0], size, key, other, _ids(ids, len(x)), votes=votes)
        logits, margins = exam.clean_pass()
        check_answers(exam, classes := logits.shape[1])
        steps = make_plan(attacks, classes=classes, surrogate=other, threat=threat)
        asked = {s.label: described(s.attack, threat) for s in steps}  # an own attack may be another once it has run
        crafted, note = choose_crafting(exam, precision)
        tally = Tally(y.cpu(), logits, margins, x if keep_adversarial else None)
        findings = [*at_first, *noted, *check_marks(marks), *doubts_before(exam, steps, logits, note)]
        identity = {} if journal is None else _identity(exam, asked, seed, crafted, margins)
        told |= question(identity, doubt=doubt)
        if resume and not keep_adversarial and (known := _known(journal, told, identity, marks, progress)):
            return known
        kept = journaled(journal, identity, others, resume=resume, doubt=doubt, keep_adversarial=keep_adversarial)
        with kept as store, crew(exam, devices, attacks, classes, precision=precision, crafted=crafted) as workers:
            _run(exam, steps, tally, store, progress, workers, lookout)
            findings += doubts_after(steps, tally, classes=classes) + (doubts_deep(exam, tally) if doubt else [])
    return Result(
        threat={"norm": threat.norm, "eps": threat.eps},
        findings=tuple(findings),
        provenance=_certificate(exam, seed, crafted, told | shared_by(devices) | _beside(tally, lookout)),
        **{**tally.kept(), "attacks": asked, "ids": exam.ids, "marks": marks},
    )


def _certificate(exam: Exam, seed: int, precision: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Where the numbers come from, with the weights of the surrogate if there is one."""
    about = birth_certificate(device=exam.device, seed=Seed(seed).key, batch_size=exam.batch_size, precision=precision)
    about |= {"samples_digest": exam.samples_digest, **_voted(exam), **_code(exam), **told}
    if exam.surrogate is None:
        return about
    return {**about, "surrogate": {**about.get("surrogate", {}), "weights": weights_digest(exam.surrogate.inner)}}


def _beside(tally: Tally, lookout: Lookout) -> dict[str, int]:
    """The most others that were seen to have the GPU open, also before a resumption; nothing if nobody could look."""
    seen = [*tally.neighbours, *_since(lookout).values()]
    return {NEIGHBOURS: int(max(seen))} if seen else {}


def _since(lookout: Lookout) -> dict[str, float]:
    """The same since this was last asked."""
    seen = lookout.seen()
    return {} if seen is None else {NEIGHBOURS: seen}


def _voted(exam: Exam) -> dict[str, int]:
    """How many answers decide, if it is not one."""
    return {"votes": exam.votes} if exam.votes > 1 else {}


def _checked(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    attacks: Sequence[Spec],
    surrogate: nn.Module | None,
    batch_size: int | None,
    precision: str,
) -> tuple[Tensor, Tensor, Sequence[Spec]]:
    """Inputs, labels and attacks, with those that transfer; what cannot be evaluated is refused first."""
    attacks = attacks if surrogate is None else with_transfer(attacks, like=attacks)
    choose("evaluate", "precision", precision, PRECISIONS)
    size = plain(batch_size)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigError(f"batch_size must be at least 1, got {batch_size!r}")
    y = class_indices(y)
    x = check_inputs(x, y, threat)
    make_plan(attacks, surrogate=surrogate, threat=threat)
    if x.shape[0] == 0:
        raise ThreatError("there is nothing to evaluate: x has no samples")
    check_model(model, x)
    check_surrogate(surrogate, model, x)
    return x, y, attacks


def _storable(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller says about the numbers, if a result's file can hold it; else ConfigError, before the work."""
    for key, value in provenance.items():
        try:
            json_text({key: value})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"provenance {key!r} cannot be stored as JSON ({error}), got {value!r}; give text, numbers, lists or "
                "dictionaries of them, such as str(path)"
            ) from error
    if not isinstance(provenance.get("surrogate", {}), Mapping):
        raise ConfigError(
            f"provenance 'surrogate' must be a dictionary, to which the digest of its weights is added, "
            f"got {provenance['surrogate']!r}"
        )
    return dict(provenance)


def _ids(ids: Tensor | None, samples: int) -> Tensor | None:
    """The ids of the samples; None if they are the rows."""
    known = torch.arange(samples) if ids is None else check_ids(ids, samples)
    return None if torch.equal(known, torch.arange(samples)) else known


def _identity(exam: Exam, asked: Mapping[str, Any], seed: int, precision: str, margins: Tensor) -> dict[str, Any]:
    """What must be the same for an evaluation to go on, and what the model said to the clean inputs."""
    return {
        ANSWERS: None if exam.random else answers(margins),  # which of a network that answers at random tell nothing
        "data": exam.samples_digest,
        "model": weights_digest(exam.model),
        "surrogate": None if exam.surrogate is None else weights_digest(exam.surrogate.inner),
        **({} if exam.ids is None else {"ids": digest({"ids": exam.ids.contiguous()}, "")}),
        "attacks": asked,
        "threat": [exam.threat.norm, exam.threat.eps],
        "flatrock": VERSION,
        "seed": Seed(seed).key,
        "batch_size": exam.batch_size,
        "precision": precision,
        **_voted(exam),
        **_code(exam),
    }


def _code(exam: Exam) -> dict[str, Any]:
    return told_code(exam.model, None if exam.surrogate is None else exam.surrogate.inner)


def _known(
    journal: Path | str | None,
    told: Mapping[str, Any],
    identity: Mapping[str, Any],
    marks: tuple[str, ...],
    progress: Progress | None,
) -> Result | None:
    """A finished result that answers the question, if there is one."""
    known = None if journal is None else answered(journal, told, identity, marks)
    if journal is not None and known is not None and progress is not None:
        progress.say(f"read {result_file(journal)}, which was evaluated before")
    return known


def _usual_batch(devices: Sequence[torch.device]) -> int:
    """Several devices take smaller batches, or there would not be one for each of them at the end."""
    return max(GPU_BATCH // len(devices), CPU_BATCH) if devices[0].type == "cuda" else CPU_BATCH


def _run(
    exam: Exam,
    steps: Sequence[Step],
    tally: Tally,
    store: Journal,
    listener: Progress | None,
    workers: Crew | None,
    lookout: Lookout,
) -> None:
    """Every step on its candidates, batch by batch; what the journal holds is not computed again."""
    progress, devices = listener or Silent(), 1 if workers is None else workers.devices
    for number, step in enumerate(steps, 1):
        rows = tally.candidates(step)
        left = len(rows)
        tally.begin(step, measured=exam.measures(step) is not None)
        progress.begin(f"evaluating {step.label}", len(rows))
        for chunk in _chunks(exam, step, rows, store, workers, lookout):
            tally.add(step, chunk)
            tally.add_rounded(exam, step, chunk)
            left -= len(chunk.rows)
            figures = outlook(tally, steps, number, left=left, votes=exam.votes, devices=devices)
            progress.advance(len(chunk.rows), figures)
        progress.end()


def _chunks(
    exam: Exam, step: Step, rows: Tensor, store: Journal, workers: Crew | None, lookout: Lookout
) -> Iterator[Chunk]:
    """The batches of a step in the order of their rows: from the journal, or made and put there."""
    while len(rows):
        chunk = store.replay(step.label, rows)
        if chunk is not None:
            yield chunk
            rows = rows[len(chunk.rows) :]
            continue
        for made in [exam.attempt(step, rows)] if workers is None else workers.attempts(step, rows):
            seen = replace(made, numbers={**made.numbers, **_since(lookout)})
            store.keep(seen)
            yield seen
            rows = rows[len(seen.rows) :]
