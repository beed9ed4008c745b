"""What an evaluation leaves behind: plain frozen values that go to JSON and come back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import fsum, inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import StateError
from flatrock.core.files import json_text

SCHEMA = "flatrock.result/2"
# The finding about a model that gives one answer to everything.
COLLAPSED = "E15"


@dataclass(frozen=True)
class Finding:
    """Something that makes a number less trustworthy; the code is a section of docs/diagnostics.md."""

    code: str
    message: str
    cure: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}; {self.cure}"


@dataclass(frozen=True, eq=False)
class Result:
    """An evaluation. `flags[name][i]` says whether sample i is still classified right under `name`.

    Every accuracy is computed from the flags, as a fraction of ALL samples. `predictions` are the classes given to
    the unperturbed inputs, `attacks` the options behind each name. Attacks of a plan (`plans[name]`) share survivors:
    the flags of each say what still stood after it, those of the last are the plan's. `margins` hold z_y minus the
    largest other logit, on the clean input and, as `worst`, on the input that hurt most. `rounded` says what stands
    after adversarial inputs were rounded to 8 bits. `distances[name]` say how far the nearest adversarial point lies
    that an attack which measures this found: 0 for a sample that is wrong anyway, inf where it found none.
    `adversarial` holds, for each broken sample, the input of the first attack that broke it, and the clean input of the
    others (it is not in the JSON). `ids` are the samples' places in their test set; None: all, in order. `labels` are
    their true classes; None in files older than these.
    """

    threat: Mapping[str, Any]
    flags: Mapping[str, Tensor]
    predictions: Tensor | None = None
    attacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    margins: Mapping[str, Tensor] = field(default_factory=dict)
    distances: Mapping[str, Tensor] = field(default_factory=dict)
    rounded: Tensor | None = None
    adversarial: Tensor | None = None
    findings: tuple[Finding, ...] = ()
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    ids: Tensor | None = None
    labels: Tensor | None = None

    def __repr__(self) -> str:
        shares = {"clean": self.clean, **self.per_attack, "robust": self.robust}
        told = ", ".join([*(f"{k} {v:.4f}" for k, v in shares.items()), *(f.code for f in self.findings)])
        ball = " ".join(str(self.threat[key]) for key in ("norm", "eps") if key in self.threat)  # a file sorts its keys
        return f"Result({self.n} samples, {ball}: {told})"

    @property
    def collapsed(self) -> bool:
        """Whether the model gives one answer to everything; its numbers are worth nothing."""
        return any(finding.code == COLLAPSED for finding in self.findings)

    @property
    def n(self) -> int:
        """Number of samples."""
        return int(self.flags["clean"].numel())

    @property
    def clean(self) -> float:
        """Accuracy on unperturbed inputs."""
        return self._share(self.flags["clean"])

    @property
    def worst(self) -> Tensor:
        """Per sample: right on the clean input and under every attack named."""
        return torch.stack(list(self.flags.values())).all(0)

    @property
    def robust(self) -> float:
        """Accuracy of the per-sample worst case over all attacks named."""
        return self._share(self.worst)

    @property
    def per_attack(self) -> dict[str, float]:
        """Robust accuracy under each attack on its own, and under each plan as a whole."""
        members = {label for labels in self.plans.values() for label in labels}
        alone = {n: self._share(flag) for n, flag in self.flags.items() if n != "clean" and n not in members}
        return alone | {plan: self._share(self.flags[labels[-1]]) for plan, labels in self.plans.items()}

    @property
    def after(self) -> dict[str, float]:
        """Accuracy after each attack, the attacks of plans included."""
        return {name: self._share(flag) for name, flag in self.flags.items()}

    @property
    def robust_rounded(self) -> float | None:
        """Accuracy of the worst case once adversarial inputs are rounded to 8 bits."""
        return None if self.rounded is None else self._share(self.rounded)

    @property
    def mean_distance(self) -> dict[str, float | None]:
        """Mean distance over all samples but those of `unreached` (for RayS this is ADBD); None if there are no others.

        Samples that are wrong without attack count with distance 0.
        """
        near = {name: d[torch.isfinite(d)].tolist() for name, d in self.distances.items()}
        # The exact sum: a file read on another machine must give the same mean.
        return {name: fsum(d) / len(d) if d else None for name, d in near.items()}

    @property
    def unreached(self) -> dict[str, int]:
        """How many samples have no distance, because the attack found no adversarial point at all."""
        return {name: int((~torch.isfinite(d)).sum()) for name, d in self.distances.items()}

    @property
    def by_class(self) -> dict[int, Result]:
        """The samples of each class that has some, as a result of their own.

        Costs, findings and adversarial inputs belong to the whole and are left out. StateError without labels.
        """
        if self.labels is None:
            raise StateError("the result has no labels, so that its classes are not known; evaluate again")
        return {c: self._part((self.labels == c).nonzero().squeeze(1)) for c in sorted(set(self.labels.tolist()))}

    def _part(self, rows: Tensor) -> Result:
        several = ("flags", "margins", "distances")
        parts: dict[str, Any] = {name: {k: v[rows] for k, v in getattr(self, name).items()} for name in several}
        single = {name: getattr(self, name) for name in ("predictions", "rounded", "labels")}
        parts |= {name: None if v is None else v[rows] for name, v in single.items()}
        ids = rows if self.ids is None else self.ids[rows]
        return replace(self, **parts, ids=ids, costs={}, findings=(), adversarial=None)

    def _share(self, flag: Tensor) -> float:
        return float(flag.double().mean()) if flag.numel() else float("nan")

    def to_json(self) -> str:
        """JSON text; `from_json` checks the accuracies against the flags again."""
        return json_text(
            {
                "schema": SCHEMA,
                "n": self.n,
                "threat": dict(self.threat),
                "clean": self.clean,
                "robust": self.robust,
                "per_attack": self.per_attack,
                "robust_rounded": self.robust_rounded,
                "flags": {name: flag.int().tolist() for name, flag in self.flags.items()},
                "ids": None if self.ids is None else self.ids.tolist(),
                "labels": None if self.labels is None else self.labels.tolist(),
                "predictions": None if self.predictions is None else self.predictions.tolist(),
                "attacks": {k: dict(v) for k, v in self.attacks.items()},
                "plans": {k: list(v) for k, v in self.plans.items()},
                "margins": {k: [round(m, 6) for m in v.double().tolist()] for k, v in self.margins.items()},
                "distances": {k: [d if isfinite(d) else None for d in v.tolist()] for k, v in self.distances.items()},
                "mean_distance": self.mean_distance,
                "unreached": self.unreached,
                "rounded": None if self.rounded is None else self.rounded.int().tolist(),
                "findings": [asdict(f) for f in self.findings],
                "costs": {k: dict(v) for k, v in self.costs.items()},
                "marks": list(self.marks),
                "provenance": dict(self.provenance),
            }
        )

    @classmethod
    def from_json(cls, text: str, where: str = "result") -> Result:
        """Read a result back; StateError if it is damaged or its numbers do not follow from its flags."""
        try:
            d = json.loads(text)
            if d["schema"] != SCHEMA:
                raise ValueError(f"schema {d['schema']!r}, expected {SCHEMA!r}")
            n = len(d["flags"]["clean"])
            result = cls(
                threat=d["threat"],
                flags={k: _flags(f"flags of {k}", v, n) for k, v in d["flags"].items()},
                ids=None if d.get("ids") is None else _each("ids", d["ids"], n),
                labels=None if d.get("labels") is None else _each("labels", d["labels"], n),
                predictions=None if d["predictions"] is None else _each("predictions", d["predictions"], n),
                attacks=d["attacks"],
                plans={k: tuple(v) for k, v in d["plans"].items()},
                margins={k: _each(f"{k} margins", v, n, torch.float64) for k, v in d["margins"].items()},
                distances={  # JSON has no infinity, so null stands for it
                    k: _each("distances", [inf if far is None else far for far in v], n, torch.float64)
                    for k, v in d["distances"].items()
                },
                rounded=None if d["rounded"] is None else _flags("rounded flags", d["rounded"], n),
                findings=tuple(Finding(**f) for f in d["findings"]),
                costs=d["costs"],
                marks=tuple(d["marks"]),
                provenance=d["provenance"],
            )
            stated = [d["n"], *(d[name] for name in _COMPUTED)]
            doubt = result._contradiction(stated)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise StateError(f"{where} is not a flatrock result ({error}); evaluate again") from error
        if doubt:
            raise StateError(f"{where}: {doubt}; evaluate again")
        return result

    def _contradiction(self, stated: Sequence[Any]) -> str:
        """What of a stored result its values for each sample do not confirm; nothing if all of it."""
        if stated != [self.n, *(getattr(self, name) for name in _COMPUTED)]:
            return "its accuracies do not follow from its flags"
        near = {name: far <= self.threat["eps"] for name, far in self.distances.items()}
        if not all(torch.equal(self.flags[name], ~broken) for name, broken in near.items()):
            return "its distances do not agree with its flags"
        right, said, true = self.flags["clean"], self.predictions, self.labels
        if said is not None and true is not None and not torch.equal(said[right], true[right]):
            return "its labels and predictions do not agree with its flags"
        return ""


def read_result(file: Path) -> Result:
    """The result in a file; StateError if there is none."""
    try:
        return Result.from_json(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{file} cannot be read ({error}); name run folders, or result-*.json files") from error


# What a result file states and its per-sample values must confirm.
_COMPUTED = ("clean", "robust", "per_attack", "robust_rounded", "mean_distance", "unreached")


def _each(what: str, values: Sequence[Any], n: int, dtype: torch.dtype | None = None) -> Tensor:
    """One value per sample."""
    if len(values) != n:
        raise ValueError(f"{len(values)} {what} for {n} samples")
    return torch.tensor(values, dtype=dtype)


def _flags(what: str, values: Sequence[int], n: int) -> Tensor:
    """Yes or no per sample."""
    if not set(values) <= {0, 1}:
        raise ValueError(f"{what} that are neither 0 nor 1")
    return _each(what, values, n, torch.bool)
