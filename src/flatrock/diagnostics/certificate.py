"""What a certification found: votes per sample, and the radii and accuracies that follow from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import json_text
from flatrock.diagnostics.smoothing import ABSTAIN, Smoothing, certified_radii, predictions

SCHEMA = "flatrock.certificate/1"


@dataclass(frozen=True, eq=False)
class Certificate:
    """Certified samples. Everything else is computed from `labels`, `top` and `counts`, as fractions of all samples.

    `top[i]` is the class that the n0 votes chose for sample i, `counts[i]` the n fresh votes by class (answers that are
    not finite are no votes). `ids` say which samples of the data set these are, `shape` is that of an input, `seconds`
    what each sample took. What no certification could have counted is a ConfigError.
    """

    smoothing: Smoothing
    labels: Tensor
    top: Tensor
    counts: Tensor
    ids: Tensor
    shape: tuple[int, ...]
    seconds: Tensor
    marks: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if faults := (*_wrong_shapes(self), *_wrong_facts(self)):
            raise ConfigError("a certificate:", faults)
        # Only of tensors that fit each other may values be compared.
        if faults := _wrong_values(self):
            raise ConfigError("a certificate:", faults)

    @property
    def samples(self) -> int:
        """How many samples were certified."""
        return len(self.labels)

    @property
    def dimension(self) -> int:
        """Numbers in an input."""
        return math.prod(self.shape)

    @cached_property
    def radii(self) -> Tensor:
        """CERTIFY: the L2 radius in which the smoothed classifier answers `top`; 0 where it abstains."""
        votes = self.counts.gather(1, self.top[:, None]).squeeze(1)
        return certified_radii(votes, self.smoothing.n, sigma=self.smoothing.sigma, alpha=self.smoothing.alpha)

    @cached_property
    def predictions(self) -> Tensor:
        """PREDICT on the n votes: the smoothed classifier's class, or ABSTAIN (-1)."""
        return predictions(self.counts, self.smoothing.alpha)

    @property
    def right(self) -> Tensor:
        """Per sample: the class that CERTIFY stands for is the true one."""
        return (self.top == self.labels) & (self.radii > 0)

    @property
    def accuracy(self) -> float:
        """Accuracy of the smoothed classifier without attack, by PREDICT; abstaining is wrong."""
        return _share(self.predictions == self.labels)

    @property
    def abstained(self) -> float:
        """Share of samples for which CERTIFY proves nothing."""
        return _share(self.radii == 0)

    @property
    def no_answer(self) -> int:
        """How many of the votes were not finite."""
        return int(self.samples * self.smoothing.n - self.counts.sum())

    def certified(self, radius: float) -> float:
        """Certified accuracy: the share that is right everywhere within this L2 distance (its radius is larger)."""
        return _share(self.right & (self.radii > radius))

    def l2_of(self, linf_eps: float) -> float:
        """eps * sqrt(dimension): the L2 ball around the Linf ball, through which the latter is certified."""
        return linf_eps * math.sqrt(self.dimension)

    def linf_of(self, radius: float) -> float:
        """radius / sqrt(dimension): the largest Linf ball inside the L2 ball."""
        return radius / math.sqrt(self.dimension)

    def grid(self) -> list[float]:
        """Radii for tables: multiples of sigma / 2 that n votes could certify."""
        step = self.smoothing.sigma / 2
        return [step * i for i in range(math.ceil(self.smoothing.largest_radius / step))]

    def to_json(self) -> str:
        """JSON text; `from_json` checks what follows from the votes again."""
        return json_text(
            {
                "schema": SCHEMA,
                **asdict(self.smoothing),
                "shape": list(self.shape),
                **self._following(),
                **{name: getattr(self, name).tolist() for name in _STORED},
                "marks": list(self.marks),
                "provenance": dict(self.provenance),
            }
        )

    def _following(self) -> dict[str, Any]:
        """What is stored for readers although it follows from the votes."""
        return {
            "samples": self.samples,
            "accuracy": self.accuracy,
            "abstained": self.abstained,
            "largest": self.smoothing.largest_radius,
            "certified": [[r, self.certified(r)] for r in self.grid()],
            "radii": [round(r, 9) for r in self.radii.tolist()],
            "predictions": self.predictions.tolist(),
        }

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "certificate") -> Certificate:
        """Read a certificate back; StateError if it is damaged or its numbers do not follow from its votes."""
        try:
            d = json.loads(text)
            if d["schema"] != SCHEMA:
                raise ValueError(f"schema {d['schema']!r}, expected {SCHEMA!r}")
            found = cls(
                smoothing=Smoothing(**{name: d[name] for name in ("sigma", "n0", "n", "alpha")}),
                shape=tuple(d["shape"]),
                marks=tuple(d["marks"]),
                provenance=d["provenance"],
                **{name: torch.tensor(d[name], dtype=_STORED[name]) for name in _STORED},
            )
            odd = [name for name, value in found._following().items() if not _agree(d[name], value)]
        except (
            ConfigError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RuntimeError,
            ArithmeticError,
        ) as error:
            raise StateError(
                f"{where} is not a flatrock certificate ({error}); certify again, without --resume"
            ) from error
        if odd:
            raise StateError(
                f"{where}: its {', '.join(odd)} do not follow from its votes; certify again, without --resume"
            )
        return found

    def to_tsv(self) -> str:
        """The table Cohen's scripts write and read: one line per sample, tab-separated."""
        lines = ["idx\tlabel\tpredict\tradius\tcorrect\ttime"]
        answers = torch.where(self.radii > 0, self.top, ABSTAIN)
        for i in range(self.samples):
            idx, label, answer = int(self.ids[i]), int(self.labels[i]), int(answers[i])
            radius, seconds = float(self.radii[i]), float(self.seconds[i])
            lines.append(
                f"{idx}\t{label}\t{answer}\t{radius:.5f}\t{int(answer == label)}\t{timedelta(seconds=seconds)}"
            )
        return "\n".join(lines) + "\n"


# None: what JSON says, so that 0.5 or true where a whole number belongs is noticed.
_STORED = {"labels": None, "top": None, "counts": None, "ids": None, "seconds": torch.float64}


def _share(flag: Tensor) -> float:
    return float(flag.double().mean())


def _wrong_shapes(c: Certificate) -> tuple[str, ...]:
    """Faults of the tensors' types and shapes."""
    faults = []
    for name in ("labels", "top", "counts", "ids"):
        if getattr(c, name).dtype != torch.int64:
            faults.append(f"{name} must be whole numbers (int64), got {getattr(c, name).dtype}")
    if not c.seconds.is_floating_point():
        faults.append(f"seconds must be floats, got {c.seconds.dtype}")
    if c.counts.dim() != 2 or c.counts.shape[0] < 1 or c.counts.shape[1] < 2:
        faults.append(f"counts must be [samples, 2 classes or more], got {tuple(c.counts.shape)}")
    for name in ("labels", "top", "ids", "seconds"):
        if getattr(c, name).shape != c.counts.shape[:1]:
            shape = tuple(getattr(c, name).shape)
            faults.append(f"{name} must be one per row of counts, {tuple(c.counts.shape[:1])}, got {shape}")
    return tuple(faults)


def _wrong_facts(c: Certificate) -> tuple[str, ...]:
    """Faults of what is no tensor."""
    faults = []
    if not c.shape or not all(type(side) is int and side > 0 for side in c.shape):
        faults.append(f"shape must be that of an input, whole numbers >= 1, got {c.shape}")
    if not all(isinstance(mark, str) for mark in c.marks):
        faults.append(f"marks must be words, got {c.marks}")
    if not isinstance(c.provenance, Mapping):
        faults.append(f"provenance must be a mapping, got {c.provenance!r}")
    return tuple(faults)


def _wrong_values(c: Certificate) -> tuple[str, ...]:
    """Faults of the tensors' values."""
    faults, classes = [], c.counts.shape[1]
    for name in ("labels", "top"):
        if not bool(((getattr(c, name) >= 0) & (getattr(c, name) < classes)).all()):
            faults.append(f"{name} must be classes 0 to {classes - 1}")
    # First each, then the sum: that of huge ones might overflow.
    if not bool(((c.counts >= 0) & (c.counts <= c.smoothing.n)).all()) or int(c.counts.sum(1).max()) > c.smoothing.n:
        faults.append(f"counts must be votes, 0 or more and at most n = {c.smoothing.n} per sample")
    if len(set(c.ids.tolist())) < len(c.ids):
        faults.append("ids must differ: they are the names of the samples")
    if not bool((c.seconds.isfinite() & (c.seconds >= 0)).all()):
        faults.append("seconds must be finite and 0 or more")
    return tuple(faults)


def _agree(told: Any, value: Any) -> bool:
    """The same numbers in the same lists; those of another scipy may differ in the last digits. NaN never agrees."""
    if isinstance(value, list):
        return isinstance(told, list) and len(told) == len(value) and all(map(_agree, told, value))
    return type(told) in (int, float) and abs(told - value) <= 1e-6
