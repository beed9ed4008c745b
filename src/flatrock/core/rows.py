"""Results of many runs in one file: a row per run, with the verdict on every test sample behind each accuracy."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatrock.core.files import read_record, write_atomic
from flatrock.core.locks import alone
from flatrock.core.provenance import VERSION, commit
from flatrock.core.records import COLLAPSED

SCHEMA = "flatrock.results/1"
# The name under which a sample is right if it is so on the clean input and under every attack.
WORST = "worst case"
# What the mean distance that an attack measured is called beside accuracies: `mean_distance rays`.
DISTANCE = "mean_distance "
# Keys of a score that are left out where they are empty, as in files from before there were such.
LATER = ("distances", "where", "more")
# What `select=test data.held_out=0` changes in a recipe: the way in which most papers chose their best epochs.
ON_TEST = {"data.held_out: 0", "select.data: 'test'"}


def chosen_on_test(changes: Iterable[str]) -> bool:
    """Whether these are all that a recipe was changed in: the best epoch is chosen on the test set, none held out."""
    return {change.partition(" instead of ")[0] for change in changes} == ON_TEST


def measure_name(attack: str, where: str) -> str:
    """What an attack of a further evaluation is called in tables: `pgd-20@2/255`."""
    return f"{attack}@{where}" if where else attack


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """The evaluation of one checkpoint: `right[name][i]` says whether sample i is right, name `clean`, an attack or a
    plan. `seconds` are those of each attack, `result` is the digest of the result file, `distances` are the means that
    attacks measured.

    `more` are further evaluations of it, each of which says `where` it is not as this one: at which radius, of which
    samples. They take no part in the worst case.
    """

    epoch: int
    right: Mapping[str, Tensor]
    seconds: Mapping[str, float]
    findings: tuple[str, ...]
    marks: tuple[str, ...]
    provenance: Mapping[str, Any]
    result: str
    distances: Mapping[str, float] = field(default_factory=dict)
    where: str = ""
    more: tuple[Score, ...] = ()

    @property
    def n(self) -> int:
        """Number of samples."""
        return int(self.right["clean"].numel())

    @property
    def collapsed(self) -> bool:
        """Whether the model gives one answer to everything; findings begin with their code."""
        return any(text.startswith(f"{COLLAPSED}:") for text in self.findings)

    @property
    def evaluated_beside(self) -> bool:
        """Whether others were seen to have the GPU open during this evaluation, or a further one."""
        return any(one.provenance.get("neighbours") for one in (self, *self.more))

    @property
    def worst(self) -> Tensor:
        """Whether each sample is right on the clean input and under every attack."""
        return torch.stack(list(self.right.values())).all(0)

    @property
    def accuracy(self) -> dict[str, float]:
        """The share of right samples under each name."""
        return {name: float(flags.double().mean()) for name, flags in self.right.items()}

    @property
    def verdicts(self) -> dict[str, Tensor]:
        """`right` of this evaluation and, under the names of their measures, of further ones."""
        found = dict(self.right)
        for one in self.more:
            found |= {measure_name(name, one.where): flags for name, flags in one.right.items() if name != "clean"}
        return found

    @property
    def figures(self) -> dict[str, float]:
        """What tables print, by measure: accuracies in percent, mean distances as they are."""
        shares = {name: 100 * float(flags.double().mean()) for name, flags in self.verdicts.items()}
        means = {measure_name(f"{DISTANCE}{n}", s.where): d for s in (self, *self.more) for n, d in s.distances.items()}
        return shares | means

    @property
    def error(self) -> dict[str, float]:
        """The standard error a test set of this size leaves to each: sqrt(p (1 - p) / n)."""
        return {name: sqrt(share * (1 - share) / self.n) for name, share in self.accuracy.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; flags are packed, eight samples to a byte."""
        plain = {k: v for k, v in vars(self).items() if k != "right" and (v or k not in LATER)}
        plain |= {"more": [one.to_dict() for one in self.more]} if self.more else {}
        packed = {name: _packed(flags) for name, flags in self.right.items()}
        return {**plain, "n": self.n, "accuracy": self.accuracy, "right": packed}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        """Inverse of to_dict; ValueError if the accuracies do not follow from the flags."""
        given = dict(values)
        n, accuracy = int(given.pop("n")), given.pop("accuracy")
        right = {name: _unpacked(text, n) for name, text in given.pop("right").items()}
        given |= {key: tuple(given[key]) for key in ("findings", "marks")}
        given["more"] = tuple(cls.from_dict(one) for one in given.get("more", ()))
        score = cls(right=right, **given)
        if score.accuracy != accuracy:
            raise ValueError("accuracies do not follow from the flags")
        return score


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One run. `changes` are the keys in which its recipe differs from the library's of that name, other than the seed;
    a recipe of one's own has none to differ from, only its hash tells it from others of its name.

    `selection` holds the epochs `best` and `last` (`average_best`, `average_last`) with their accuracies on the
    selection data and, as `curve`, those of every epoch probed; `training` seconds and memory, `scores` the evaluation
    of each checkpoint that has one.
    """

    recipe: str
    recipe_hash: str
    protocol: str
    summary: str
    changes: tuple[str, ...]
    seed: int
    status: str
    reason: str
    selection: Mapping[str, Any]
    training: Mapping[str, Any]
    findings: tuple[str, ...]
    provenance: Mapping[str, Any]
    scores: Mapping[str, Score]
    own: bool = False

    @property
    def main(self) -> str | None:
        """The checkpoint the run is known by, if it was evaluated: the best epoch, of the averaged weights if kept."""
        wanted = "average-best" if "average_best" in self.selection else "best"
        return wanted if wanted in self.scores else None

    @property
    def key(self) -> tuple[str, int, tuple[str, ...], str]:
        """What there can be one of: a recipe that was changed is another one."""
        return self.recipe, self.seed, self.changes, self.recipe_hash if self.own else ""

    @property
    def comparable(self) -> bool:
        """Whether the run is what its recipe says, to the end, was evaluated with the weights meant, and tells inputs
        apart."""
        return self.judged and self.sound

    @property
    def on_test(self) -> bool:
        """The same of a run whose best epoch was chosen on the test set, and which is what its recipe says in all else:
        it may be compared with papers that chose so, and with no row that held images out."""
        return self.status == "finished" and self.main is not None and self.sound and chosen_on_test(self.changes)

    @property
    def judged(self) -> bool:
        """Whether the run is what its recipe says, to the end, and was evaluated."""
        return self.status == "finished" and not self.changes and self.main is not None

    @property
    def sound(self) -> bool:
        """Whether the model tells inputs apart and has the weights meant."""
        return not self.collapsed and not self.stands_in

    @property
    def collapsed(self) -> bool:
        """Whether it was evaluated and gives one answer to everything."""
        return self.main is not None and self.scores[self.main].collapsed

    @property
    def stands_in(self) -> bool:
        """Whether it is known by plain weights in the place of averaged ones, every probe of which had collapsed."""
        return self.main == "best" and "average_last" in self.selection

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "scores": {name: score.to_dict() for name, score in self.scores.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """Inverse of to_dict."""
        given = dict(values)
        scores = {name: Score.from_dict(score) for name, score in given.pop("scores").items()}
        given |= {key: tuple(given[key]) for key in ("changes", "findings")}
        return cls(scores=scores, **given)


def repeated(rows: Sequence[Row]) -> list[Row]:
    """Rows whose key another one has too, by key."""
    keys = [row.key for row in rows]
    return sorted((row for row in rows if keys.count(row.key) > 1), key=lambda row: row.key)


def added(rows: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The rows, without those of the keys of new ones, and the new ones."""
    keys = {row.key for row in new}
    return [*(row for row in rows if row.key not in keys), *new]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a results file."""
    content = {
        "schema": SCHEMA,
        "rows": [row.to_dict() for row in rows],
        "collected": {"flatrock": VERSION, "commit": commit()},
    }
    write_atomic(path, (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def add_rows(path: Path, new: Sequence[Row]) -> list[Row]:
    """Put rows into a results file, beside those of others or in the place of older ones; all that are there then.

    Several processes may do so: each sees what the others have written. BusyError if one holds the file for long.
    """
    with alone(path, "adding rows to"):
        rows = added((read_rows(path) or []) if path.exists() else [], new)
        write_rows(path, rows)
    return rows


def read_rows(path: Path) -> list[Row] | None:
    """The rows of a results file, checked; None for a JSON file that is something else."""
    return read_record(path, SCHEMA, lambda content: [Row.from_dict(r) for r in content["rows"]], "flatrock results")


def _packed(flags: Tensor) -> str:
    return base64.b64encode(np.packbits(flags.numpy().astype(np.uint8)).tobytes()).decode()


def _unpacked(text: str, n: int) -> Tensor:
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text, validate=True), np.uint8))
    if not n <= len(bits) < n + 8:
        raise ValueError(f"{len(bits)} flags for {n} samples")
    return torch.from_numpy(bits[:n].astype(bool))
