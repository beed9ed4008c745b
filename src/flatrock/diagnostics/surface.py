"""A measured landscape as a record: it goes to JSON and comes back, and says how flat it is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatrock.core.errors import StateError
from flatrock.core.files import json_text
from flatrock.core.numbers import is_finite

SCHEMA = "flatrock.landscape/1"
# Dimensions of the surface behind each kind.
KINDS = {"weight-1d": 1, "weight-2d": 2, "input": 2}
# What tables and figures take from a record's values and provenance.
NEEDED = {"weight-1d": ("loss", "accuracy"), "weight-2d": ("loss", "accuracy"), "input": ("loss", "accuracy", "margin")}
CERTIFIED = ("seed", "data", "precision")
# Of where it comes from, that of a run and that of a model that is none.
OF_RUN, OF_MODEL = ("run", "checkpoint", "epoch", "train_seed"), ("model", "weights")
# Radii that messages and tables print alike, with six digits; points of a grid lie much further apart.
SAME = 1e-5
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Landscape:
    """Losses and accuracies over a grid.

    `values["loss"][k]` is a curve or surface over `axis` (and again over `axis`): of the k-th direction, pair of
    directions or image. Weight landscapes hold loss, accuracy, clean_loss and clean_accuracy, means over the samples;
    an input landscape the loss of each image, its margin (true logit minus the largest other one) and, as accuracy,
    whether the answer is right. NaN where the network had no finite answer. `samples` say which images an input
    landscape is of, `moved` what a direction moves.
    """

    kind: str
    axis: tuple[float, ...]
    values: Mapping[str, Array]
    threat: Mapping[str, Any]
    attack: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Mapping[str, Any], ...] = ()
    moved: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS or len(self.axis) % 2 == 0:
            raise StateError(f"a landscape is {' or '.join(KINDS)} over an odd number of points, got {self.kind!r}")
        shapes = {name: array.shape for name, array in self.values.items()}
        wanted = (len(self.loss), *[len(self.axis)] * KINDS[self.kind])
        if any(shape != wanted for shape in shapes.values()) or not len(self.loss):
            raise StateError(f"the values of a landscape have shapes {shapes}, its grid {wanted}")

    @property
    def loss(self) -> Array:
        """The adversarial loss (of an input landscape: the loss)."""
        return self.values["loss"]

    @property
    def count(self) -> int:
        """Directions, pairs or images."""
        return len(self.loss)

    @property
    def middle(self) -> float:
        """rho(0): the loss at the weights themselves (of the first image, for an input landscape)."""
        return float(self._centre(self.loss)[0])

    @property
    def rise(self) -> Array:
        """loss - loss in the middle, direction by direction."""
        centre = self._centre(self.loss)
        return self.loss - centre.reshape(-1, *[1] * KINDS[self.kind])

    def _centre(self, array: Array) -> Array:
        for _ in range(KINDS[self.kind]):
            array = array[..., len(self.axis) // 2]
        return array

    @property
    def sharpness(self) -> Array:
        """How sharp, per direction: the mean of rho(a) - rho(0) over the grid; |g(a, b) - g(0, 0)| for surfaces.

        Means by the trapezoid rule, so that they do not depend on how fine the grid is.
        """
        rise = self.rise if KINDS[self.kind] == 1 else np.abs(self.rise)
        weights = np.full(len(self.axis), 1.0)
        weights[[0, -1]] = 0.5
        for _ in range(KINDS[self.kind]):
            rise = np.average(rise, axis=-1, weights=weights)
        return rise

    def rise_at(self, radius: float) -> Array:
        """(rho(-r) + rho(r)) / 2 - rho(0) per direction of a weight-1d landscape; r is a point of the grid.

        Between points nothing was measured: a line from one to the next lies far above a curve that bends.
        """
        if KINDS[self.kind] != 1:
            raise StateError(f"{self.kind} landscapes have no rise at a radius; use the sharpness")
        if not 0 < radius <= self.axis[-1] * (1 + SAME):
            raise StateError(f"the landscape reaches from {self.axis[0]:g} to {self.axis[-1]:g}, not to {radius:g}")
        if not on_grid(self.axis, radius):
            near = nearest_radius(self.axis, radius)
            raise StateError(
                f"the landscape has no point at {radius:g}; the nearest is {near:g}, or measure more points"
            )
        i = self.axis.index(nearest_radius(self.axis, radius))
        return (self.rise[:, i] + self.rise[:, -1 - i]) / 2

    def to_json(self) -> str:
        """JSON text; `from_json` checks the numbers that follow from others again."""
        return json_text(
            {
                "schema": SCHEMA,
                "kind": self.kind,
                "axis": list(self.axis),
                "values": {name: plain(array) for name, array in self.values.items()},
                "sharpness": plain(self.sharpness),
                "threat": dict(self.threat),
                "attack": dict(self.attack),
                "samples": [dict(s) for s in self.samples],
                "moved": dict(self.moved),
                "identity": dict(self.identity),
                "marks": list(self.marks),
                "provenance": dict(self.provenance),
            }
        )

    @classmethod
    def from_file(cls, path: Path) -> Landscape:
        """Read a landscape from its file; StateError if it is not there, no text, damaged or of another schema."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise StateError(f"there is no landscape {path}") from error
        except OSError as error:
            raise StateError(f"could not read {path}: {error.strerror}; name a landscape-*.json file") from error
        except UnicodeDecodeError as error:
            raise StateError(f"{path} is not a flatrock landscape (it is not text); measure it again") from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "landscape") -> Landscape:
        """Read a landscape back; StateError if it is damaged or of another schema."""
        try:
            d = json.loads(text)
            if d["schema"] != SCHEMA:
                raise ValueError(f"schema {d['schema']!r}, expected {SCHEMA!r}")
            _check_parts(d)
            found = cls(
                kind=d["kind"],
                axis=tuple(float(a) for a in d["axis"]),
                values={name: np.array(rows, dtype=np.float64) for name, rows in d["values"].items()},
                samples=tuple(d["samples"]),
                marks=tuple(d["marks"]),
                **{name: d[name] for name in ("threat", "attack", "moved", "identity", "provenance")},
            )
            follows = np.allclose(found.sharpness, np.array(d["sharpness"], dtype=np.float64), equal_nan=True)
        except KeyError as error:
            raise StateError(f"{where} is not a flatrock landscape (it has no {error}); measure it again") from error
        except (ValueError, TypeError, AttributeError, RecursionError, StateError) as error:
            raise StateError(f"{where} is not a flatrock landscape ({error}); measure it again") from error
        if not follows:
            raise StateError(f"{where}: its sharpness does not follow from its losses; measure it again")
        return found


def nearest_radius(axis: Sequence[float], radius: float) -> float:
    """The positive point of a grid that is nearest to this radius; the smaller of two."""
    outside = axis[len(axis) // 2 + 1 :]
    return min(outside, key=lambda a: (round(abs(a - radius) / axis[-1], 9), a), default=axis[-1])


def on_grid(axis: Sequence[float], radius: float) -> bool:
    """Whether a radius is a point of the grid, as it would be printed."""
    return math.isclose(nearest_radius(axis, radius), radius, rel_tol=SAME)


def _check_parts(d: Mapping[str, Any]) -> None:
    """ValueError (or KeyError) unless what tables and figures take from a record is there and of its kind."""
    for name in ("values", "threat", "attack", "moved", "identity", "provenance"):
        if not isinstance(d[name], dict):
            raise ValueError(f"{name} must be names with values, got {d[name]!r}")
    axis = d["axis"]
    if (
        not isinstance(axis, list)
        or not all(is_finite(a) for a in axis)
        or any(a != -b for a, b in zip(axis, axis[::-1], strict=True))
    ):
        raise ValueError(f"axis must be numbers on both sides of 0, got {axis!r}")
    if not isinstance(d["threat"]["norm"], str) or not is_finite(d["threat"]["eps"]):
        raise ValueError(f"threat must have a norm and a number eps, got {d['threat']!r}")
    about = (*(OF_MODEL if "model" in d["provenance"] else OF_RUN), *CERTIFIED)
    needed = {"values": NEEDED.get(d["kind"], ()), "provenance": about, "identity": ("data",)}
    for part, names in needed.items():
        if missing := [name for name in names if name not in d[part]]:
            raise ValueError(f"its {part} lack {', '.join(missing)}")
    if d["kind"] == "input" and len([(s["id"], s["class"]) for s in d["samples"]]) != len(d["values"]["loss"]):
        raise ValueError(f"{len(d['samples'])} samples for {len(d['values']['loss'])} surfaces")


def plain(array: Array) -> list[Any]:
    """Nested lists with None for NaN and infinity: JSON has none."""
    cells = array.astype(object)
    cells[~np.isfinite(array)] = None
    rows: list[Any] = cells.tolist()
    return rows
