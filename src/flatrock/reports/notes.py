"""What somebody wrote about rows of results files, into a notes.yaml beside them, because no file tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatrock.core.rows import Row
from flatrock.reports.given import read_given

# What of a row takes time.
TIMES = ("training", "evaluation")


@dataclass(frozen=True)
class Note:
    """The text a page prints, of which seed if not of all, and the times of what others may have made longer."""

    text: str
    seed: int | None = None
    shared: frozenset[str] = frozenset()  # of TIMES

    def of(self, row: Row) -> bool:
        """Whether it speaks of this row, whose recipe it is filed under."""
        return self.seed in (None, row.seed)


def read_notes(files: Iterable[Path]) -> dict[str, Note]:
    """The notes beside these results files, by recipe."""
    beside = dict.fromkeys(file.parent / "notes.yaml" for file in files)
    found = [read_given(path, _notes, what="notes", option="that name") for path in beside if path.exists()]
    return {name: note for notes in found for name, note in notes.items()}


def noted(rows: Sequence[Row], notes: Mapping[str, Note]) -> list[Row]:
    """The rows; one whose note says that it shared a GPU says so itself, as if it had been seen all the time."""
    return [
        _shared(row, notes[row.recipe]) if row.recipe in notes and notes[row.recipe].of(row) else row for row in rows
    ]


def _shared(row: Row, note: Note) -> Row:
    if "training" in note.shared:
        epochs = row.training["epochs"]
        row = replace(row, training={**row.training, "watched_epochs": epochs, "shared_epochs": epochs})
    if "evaluation" in note.shared:
        beside = {name: replace(s, provenance={**s.provenance, "neighbours": 1}) for name, s in row.scores.items()}
        row = replace(row, scores=beside)
    return row


def _notes(raw: Any) -> dict[str, Note]:
    return {name: _note(name, said) for name, said in raw.items()}


def _note(name: str, said: Any) -> Note:
    """A text, or one with the seed it is about and `shared`: the times that others may have made longer."""
    if isinstance(said, str):
        return Note(said)
    if not isinstance(said, dict) or not isinstance(said.get("text"), str):
        raise ValueError(f"the note on {name} is {said!r}, not a text, nor text: ... with seed: or shared:")
    if unknown := sorted(map(str, said.keys() - {"text", "seed", "shared"})):
        raise ValueError(f"the note on {name} has {unknown[0]!r}; there are text, seed and shared")
    seed, shared = said.get("seed"), said.get("shared", [])
    if not isinstance(shared, list) or not set(map(str, shared)) <= set(TIMES):
        raise ValueError(f"shared of the note on {name} is {shared!r}; give a list of {' and '.join(TIMES)}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"the seed of the note on {name} is {seed!r}, not a whole number")
    return Note(said["text"], seed, shared=frozenset(shared))
