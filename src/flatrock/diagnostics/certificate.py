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
    what each sample took.
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
                "samples": self.samples,
                "shape": list(self.shape),
                **self._stated(),
                "certified": [[r, self.certified(r)] for r in self.grid()],
                "radii": [round(r, 9) for r in self.radii.tolist()],
                "predictions": self.predictions.tolist(),
                **{name: getattr(self, name).tolist() for name in _STORED},
                "marks": list(self.marks),
                "provenance": dict(self.provenance),
            }
        )

    def _stated(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "abstained": self.abstained, "largest": self.smoothing.largest_radius}

    @classmethod
    def from_json(cls, text: str, where: str = "certificate") -> Certificate:
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
                **{name: torch.tensor(d[name]) for name in _STORED},
            )
            stated = [*d["radii"], d["accuracy"], d["abstained"], d["largest"]]
            follows = [*found.radii.tolist(), *found._stated().values()]
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
            raise StateError(f"{where} is not a flatrock certificate ({error}); certify again") from error
        # Quantiles of another scipy may differ in the last digits.
        if len(stated) != len(follows) or any(abs(a - b) > 1e-6 for a, b in zip(stated, follows, strict=True)):
            raise StateError(f"{where}: its radii and accuracies do not follow from its votes; certify again")
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


_STORED = ("labels", "top", "counts", "ids", "seconds")


def _share(flag: Tensor) -> float:
    return float(flag.double().mean())
