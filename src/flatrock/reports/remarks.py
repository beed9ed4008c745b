"""What a reader of a table of runs must know beside its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatrock.core.provenance import NO_COMMIT
from flatrock.core.rows import Row
from flatrock.core.same_samples import other_samples
from flatrock.reports.notes import Note

ON_TEST = "best epoch chosen on the test set, no images held out"


def remarks(rows: Sequence[Row], names: Sequence[str], notes: Mapping[str, Note]) -> list[str]:
    """What a reader of the numbers must know: marks, changes, failures, findings, notes, where they come from.

    `names` are those of the table above, so that each row is found there.
    """
    said: dict[str, list[str]] = {}
    for name, row in zip(names, rows, strict=True):
        for text in _of_run(row, notes.get(row.recipe)):
            said.setdefault(text, []).append(name)
        for where, text in _of_scores(row):
            said.setdefault(text, []).append(f"{name} {where}")
    lines = [f"- {who}: {text}." for who, text in told_once(said, names)]
    lines += [f"- {text}." for text in other_samples(zip(names, rows, strict=True))]
    parts = ["\n".join(lines)] if lines else []
    if any(score.marks for row in rows for score in row.scores.values()):
        parts.append("`*` the epoch was chosen on the test set.")
    sizes = sorted({score.n for row in rows for score in row.scores.values()})
    if sizes:
        parts.append(f"Accuracies are of {' and of '.join(f'{n:,}' for n in sizes)} test images.")
    return [*parts, _origin(rows, names)]


def _of_run(row: Row, note: Note | None) -> list[str]:
    """What changed, how it ended, what was found in training, and the note on it."""
    texts = [f"changed, {'; '.join(row.changes)}; not compared"] if row.changes and not row.on_test else []
    texts += [f"{ON_TEST}; compared with papers that chose so, marked `*`"] if row.on_test else []
    if row.status != "finished":
        texts.append(f"{row.status}{f', {row.reason}' if row.reason else ''}; not compared")
    noted = note.text.strip().rstrip(".") if note is not None and note.of(row) else ""
    return [*texts, *row.findings, *([noted] if noted else [])]


def _of_scores(row: Row) -> list[tuple[str, str]]:
    """Which evaluation, and what was found in it."""
    found = []
    for checkpoint, score in row.scores.items():
        for one in (score, *score.more):
            further = f" further{f' at {one.where}' if one.where else ''}" if one is not score else ""
            found += [(f"{checkpoint.replace('-', ' ')}{further}", text) for text in one.findings]
    return found


def told_once(said: Mapping[str, Sequence[str]], everyone: Sequence[str]) -> list[tuple[str, str]]:
    """Who, and what is said of them; what is said of all rows needs no names."""
    told = []
    for text, names in said.items():
        every = len(everyone) > 1 and sorted(names) == sorted(everyone)
        told.append((f"all {len(everyone)} rows" if every else ", ".join(dict.fromkeys(names)), text))
    return told


def _origin(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Commits, devices and dates of the runs, those alike said once; by recipes where that tells the rows apart."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, row in zip(names, rows, strict=True):
        about = row.provenance
        known = about.get("commit") != NO_COMMIT
        where = f"commit {about.get('commit')}" if known else f"an unknown commit of flatrock {about.get('flatrock')}"
        said = f"{where}, torch {about.get('torch')}, {about.get('device')}"
        said = ", ".join([said, str(about.get("time"))[:10], *_settings(about.get("engine")), *_continued(about)])
        found.setdefault(said, []).append((row.recipe, name))
    places = [recipe for who in found.values() for recipe in {recipe for recipe, _ in who}]
    named = [
        f"{said} ({', '.join(dict.fromkeys(f'`{r}`' if places.count(r) == 1 else name for r, name in who))})"
        for said, who in found.items()
    ]
    every = (
        f"Trained at {named[0]}. "
        if len(named) == 1
        else "\n".join(["Trained at", "", *(f"- {n}" for n in named), "", ""])
    )
    told = f"{every}Times are those of training without probes; in all: with probes and checkpoints."
    shared = any(
        row.training.get("shared_epochs") or (row.main and row.scores[row.main].evaluated_beside) for row in rows
    )
    return f"{told} Those in brackets may be longer for other processes that had the same GPU open." if shared else told


def _settings(engine: Mapping[str, Any] | None, *, other_than: Mapping[str, Any] | None = None) -> list[str]:
    """How steps were computed: what is not as in another engine, if one is named."""
    known = other_than or {}
    return [f"{k} {v}" for k, v in (engine or {}).items() if k not in known or known[k] != v]


def _continued(about: Mapping[str, Any]) -> list[str]:
    """What a run was continued with after interruptions, where it is not what it began with."""
    told = []
    for again in about.get("continued", ()):
        place = [f"on {again['device']}"] if "device" in again else []
        how = _settings(again.get("engine"), other_than=about.get("engine"))
        told.append(f"continued {' '.join([*place, *(['with'] if how else []), ' and '.join(how)]).strip()}")
    return told
