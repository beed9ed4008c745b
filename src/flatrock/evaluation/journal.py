"""What an evaluation has found so far, chunk by chunk on disk, so that a killed one goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatrock.core.errors import StateError
from flatrock.core.files import json_text, sha256, write_atomic
from flatrock.core.identity import ANSWERS, MODEL_CODE, answers, differences
from flatrock.core.locks import locked
from flatrock.core.records import Result
from flatrock.core.rng import Seed
from flatrock.core.tensorfile import load, save

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """One batch of one attack: which samples it was tried on and what came of it (all on the CPU)."""

    label: str
    rows: Tensor
    right: Tensor
    margin: Tensor
    x_adv: Tensor  # of the samples that are not right, in the order of rows
    numbers: Mapping[str, float]  # seconds, forwards, backwards, no_answer, disputed; queries where there are distances
    distances: Tensor | None = (
        None  # to the nearest adversarial point found (inf: none), where the attack measures them
    )


# Under this name exam.json says what is wanted beside the answer to its question; who goes on may want something else.
WANTED = "wanted"


class Journal:
    """The chunks of one evaluation in a folder; without a folder nothing is kept.

    Chunks are numbered in the order they were made, and an evaluation makes them in the same order every time: what is
    there is played back, what is missing or damaged is made again.
    """

    def __init__(self, folder: Path | str | None, identity: Mapping[str, Any], *, resume: bool, **wanted: bool) -> None:
        folder = None if folder is None else Path(folder)
        self._folder = folder
        self._next = 0
        if folder is None:
            return
        known = folder / "exam.json"
        _check(folder, identity, resume=resume)
        if resume and known.is_file():
            before = json.loads(known.read_text()).get(WANTED, {})
            wanted = {name: wanted.get(name, False) or before.get(name, False) for name in {*wanted, *before}}
            write_atomic(known, json_text({**identity, WANTED: wanted}).encode())
            return
        discard(folder)
        write_atomic(known, json_text({**identity, WANTED: wanted}).encode())

    def replay(self, label: str, rows: Tensor) -> Chunk | None:
        """The next chunk if it is there, whole, and of these rows."""
        if self._folder is None:
            return None
        try:
            tensors, meta = load(self._file(), role="chunk")
        except StateError:
            return None
        if meta["label"] != label or not torch.equal(tensors["rows"], rows[: len(tensors["rows"])]):
            return None
        self._next += 1
        named = {k: tensors[k] for k in ("rows", "right", "margin", "x_adv")}
        return Chunk(label=label, numbers=meta["numbers"], distances=tensors.get("distances"), **named)

    def keep(self, chunk: Chunk) -> None:
        """Store a chunk that was just made."""
        if self._folder is None:
            return
        tensors = {"rows": chunk.rows, "right": chunk.right, "margin": chunk.margin, "x_adv": chunk.x_adv}
        if chunk.distances is not None:
            tensors["distances"] = chunk.distances
        meta = {"role": "chunk", "label": chunk.label, "numbers": dict(chunk.numbers)}
        save(self._file(), tensors, meta)
        self._next += 1

    def _file(self) -> Path:
        assert self._folder is not None
        return self._folder / f"chunk-{self._next:06d}.safetensors"


def _check(folder: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
    """StateError if this evaluation can neither begin in the folder nor go on there."""
    known = folder / "exam.json"
    if resume and known.is_file():
        _check_asked(known, identity)
    elif folder.exists() and not known.is_file() and not _unnamed(folder):
        raise StateError(f"{folder} exists and is not an unfinished evaluation; it is left alone")
    elif kept := finished_batches(folder):
        raise StateError(
            f"{folder} holds {kept} finished batches of an evaluation that was stopped; go on with --resume "
            "(resume=True), or delete it to start again"
        )


def _check_asked(known: Path, identity: Mapping[str, Any]) -> None:
    try:
        asked = {k: v for k, v in json.loads(known.read_text()).items() if k != WANTED}
        odd = differences(json_text(asked), identity)
    except (ValueError, TypeError, AttributeError) as error:
        raise StateError(f"{known} is damaged; delete {known.parent} to start again") from error
    if odd:
        raise StateError(
            f"{known.parent} belongs to another evaluation (different: {', '.join(odd)}); "
            "repeat its options, or delete it to start again"
        )


def _check_seeds(asked: Mapping[Path, Mapping[str, Any]], *, resume: bool, wanted: Mapping[str, bool]) -> None:
    """Before the first of several evaluations: StateError with all that keeps any of them from its folder.

    A result that `resume` will read needs no folder.
    """
    reads, doubt = resume and not wanted.get("keep_adversarial"), wanted.get("doubt", False)
    faults = []
    for folder, identity in asked.items():
        if reads and _stored(folder) == question(identity, doubt=doubt)["question"]:
            continue
        try:
            with _alone(folder):
                _check(folder, identity, resume=resume)
        except StateError as error:
            faults.append(str(error))
    if faults:
        raise StateError("\n  - ".join(["some of these seeds cannot be evaluated:", *faults]))


def _stored(folder: Path) -> str | None:
    """The question that the result beside a journal answers; None if there is no such result, or it is damaged."""
    try:
        return Result.from_json(result_file(folder).read_text(), str(folder)).provenance.get("question")
    except (OSError, UnicodeDecodeError, StateError):
        return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process evaluates into the folder meanwhile; BusyError if one does."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), "evaluating into", folder):
        yield


@contextmanager
def journaled(
    folder: Path | str | None,
    identity: Mapping[str, Any],
    others: Mapping[int, Path] | None = None,
    *,
    resume: bool,
    **wanted: bool,
) -> Iterator[Journal]:
    """A journal that no other process evaluates into meanwhile; BusyError if one does.

    `others` are those of the same evaluation with other seeds, to be made next: what is wrong with any is told now.
    """
    if folder is None:
        yield Journal(None, identity, resume=resume)
        return
    if others:
        seeds = {place: {**identity, "seed": Seed(seed).key} for seed, place in others.items()}
        _check_seeds({Path(folder): identity, **seeds}, resume=resume, wanted=wanted)
    with _alone(Path(folder)):
        yield Journal(folder, identity, resume=resume, **wanted)


def question(identity: Mapping[str, Any], *, doubt: bool) -> dict[str, str]:
    """For the provenance: a digest of what is asked, without what tells one function of the same weights from another.

    Nothing where nothing is kept.
    """
    asked = {k: v for k, v in identity.items() if k not in (ANSWERS, MODEL_CODE, WANTED)}
    return {"question": sha256(json_text({**asked, "doubt": doubt}))} if asked else {}


def result_file(folder: Path | str) -> Path:
    """Where the result of a journal's evaluation is stored: beside it, under its name."""
    return Path(folder).with_suffix(".json")


def answered(
    folder: Path | str, told: Mapping[str, Any], identity: Mapping[str, Any], marks: tuple[str, ...]
) -> Result | None:
    """The result stored beside a journal if it answers this very question of the same model; None if there is none.

    Nor is one of a run that was not finished then, and is now. StateError if all is the same but what the model says
    or the code behind it: it is another function of these weights, or may be one with other gradients.
    """
    try:
        result = Result.from_json(result_file(folder).read_text(), str(result_file(folder)))
    except (OSError, UnicodeDecodeError, StateError):  # made again, it is replaced
        return None
    asked, about = json.loads(json_text(dict(told))), result.provenance
    if any(about.get(key) != asked.get(key) for key in {*asked, "unfinished"}) or result.marks != marks:
        return None
    said = {ANSWERS: None if identity[ANSWERS] is None else answers(result.margins["clean"])}
    said |= {MODEL_CODE: about[MODEL_CODE]} if MODEL_CODE in about else {}  # not known of older results
    if odd := differences(json_text(said), {name: identity.get(name) for name in said}):
        raise StateError(
            f"{result_file(folder)} is of another model with these weights (different: {', '.join(odd)}); keep it "
            "under another name, or leave out --resume (resume=True) to replace it"
        )
    return _in_order(result, identity["attacks"])


def _in_order(result: Result, labels: Iterable[str]) -> Result:
    """A result that was read, whose names the file has sorted, with its attacks in the order they ran."""
    place = {name: i for i, name in enumerate(("clean", *labels))}

    def ordered(part: Mapping[str, T]) -> dict[str, T]:
        return {name: part[name] for name in sorted(part, key=lambda name: place.get(name, len(place)))}

    plans = {p: result.plans[p] for p in sorted(result.plans, key=lambda p: place.get(result.plans[p][0], len(place)))}
    several: dict[str, Any] = {n: ordered(getattr(result, n)) for n in ("flags", "attacks", "distances", "costs")}
    return replace(result, plans=plans, **several)


def _unnamed(folder: Path) -> bool:
    """Whether this is a journal whose exam.json is not there, so that nobody knows what its batches answer."""
    return folder.is_dir() and set(folder.iterdir()) <= {*_chunks(folder), *folder.glob(".*.part")}


def finished_batches(folder: Path) -> int:
    """How many batches of an evaluation that was stopped would be lost with this folder.

    None of one that was killed before its first batch, of one nobody knows the question of, or whose result is stored.
    """
    return 0 if not (folder / "exam.json").is_file() or _left_over(folder) else len(_chunks(folder))


def discard_empty(folder: Path) -> None:
    """Remove a journal without finished batches; BusyError if a process is evaluating into it."""
    if folder.is_dir():
        with _alone(folder):
            if not finished_batches(folder):
                discard(folder)


def discard_left_over(folder: Path) -> None:
    """Remove the batches of an evaluation whose result is stored; those of any other are kept."""
    if _left_over(folder):
        discard(folder)


def _left_over(folder: Path) -> bool:
    """Whether the result stored beside these batches has all that their evaluation asks for.

    Who stored it was killed before they were removed, or began anew and was stopped. Not if it has fewer doubts, or
    nothing is known of the inputs that are to be kept.
    """
    try:
        asked = json.loads((folder / "exam.json").read_text())
        known = _stored(folder)
        wanted = asked.get(WANTED, {})
        enough = {True, bool(wanted.get("doubt"))}
        answers_it = known is not None and known in {question(asked, doubt=d)["question"] for d in enough}
        return answers_it and not wanted.get("keep_adversarial")
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return False


def _chunks(folder: Path) -> list[Path]:
    return list(folder.glob("chunk-*.safetensors"))


def discard(folder: Path) -> None:
    """Remove what a journal wrote, its name last, and the folder unless something else lies in it."""
    for path in (*_chunks(folder), *folder.glob(".*.part"), folder / "exam.json"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
