"""What a landscape is asked for: its kind, grid, directions, samples, attack and seed, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flatrock.attacks.catalog import parse_attack
from flatrock.core.device import Devices, alike_devices
from flatrock.core.errors import ConfigError
from flatrock.core.files import json_text, sha256
from flatrock.core.options import choose, count
from flatrock.core.tensorfile import digest
from flatrock.core.threat import Threat
from flatrock.core.types import Attack
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.surface import KINDS
from flatrock.recipes.part import PARTS

PRECISIONS = ("auto", "full", "half")
NO_ATTACK = "none"
DEFAULTS: dict[str, dict[str, Any]] = {
    "weight-1d": {"points": 21, "span": 1.0, "directions": 10, "on": "train", "images": 1000, "attack": "pgd-10"},
    "weight-2d": {"points": 21, "span": 1.0, "directions": 1, "on": "train", "images": 1000, "attack": "pgd-10"},
    "input": {"points": 41, "on": "test", "images": 4},
}
# What only some kinds heed.
FOREIGN = {"weight-1d": ("ids",), "weight-2d": ("ids",), "input": ("directions", "attack")}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A landscape to measure; what is left out has the kind's default.

    `directions` are directions, or pairs of them for a surface; `images` how many samples of which part of the data
    (`on`: train, held_out or test; equally many of each class); `ids` chooses the images of an input landscape by
    their place in the file. `span`: the grid reaches from -span to span; an input landscape by default to the edge of
    the recipe's threat. `attack` 'none' gives the landscape of the clean loss. `precision`: the attack computes in
    bfloat16 on a GPU (auto), everywhere (half) or nowhere (full).
    """

    kind: str = "weight-1d"
    points: int | None = None
    span: float | None = None
    directions: int | None = None
    on: str | None = None
    images: int | None = None
    ids: tuple[int, ...] | None = None
    attack: str | None = None
    seed: int = 0
    batch_size: int | None = None
    precision: str = "auto"

    def __post_init__(self) -> None:
        choose("landscape", "kind", self.kind, KINDS)
        for name in FOREIGN[self.kind]:
            if getattr(self, name) is not None:
                raise ConfigError(f"{self.kind} landscapes have no {name}, got {getattr(self, name)!r}; leave it out")
        if twice := [i for i in dict.fromkeys(self.ids or ()) if (self.ids or ()).count(i) > 1]:
            told = ", ".join(map(str, twice))
            raise ConfigError(f"ids must differ, got {self.ids} with {told} more than once; name each image once")
        if self.ids is not None and self.images is not None:
            raise ConfigError("images says how many and ids says which; keep one of them")
        for name, value in DEFAULTS[self.kind].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        choose("landscape", "on", str(self.on), PARTS)
        choose("landscape", "precision", self.precision, PRECISIONS)
        for name in ("images", "directions", "batch_size"):
            if getattr(self, name) is not None:
                count("landscape", name, getattr(self, name), least=1)
        Axis(points=self.points or 0, span=1.0 if self.span is None else self.span)
        self.made_attack()

    @property
    def dimensions(self) -> int:
        """1 for curves, 2 for surfaces."""
        return KINDS[self.kind]

    def made_attack(self) -> Attack | None:
        """The attack configured, if there is one."""
        return None if self.attack in (None, NO_ATTACK) else parse_attack(str(self.attack))[1]

    def devices(self, named: Devices) -> list[torch.device]:
        """Where it is measured; ConfigError unless they exist, are of one kind and can share it."""
        found = alike_devices(named)
        if self.kind == "input" and len(found) > 1:
            raise ConfigError(
                f"devices: got {', '.join(map(str, found))}, but an input landscape is quick and has one; name one"
            )
        return found

    def computes_in(self, device: torch.device) -> str:
        """The numbers the attack computes in: bfloat16, or float32, which is all that an input landscape knows."""
        half = self.precision == "half" or (self.precision == "auto" and device.type == "cuda")
        return "bfloat16" if half and self.kind != "input" else "float32"

    def axis(self, threat: Threat, pixels: int) -> Axis:
        """The grid. An input step of size a moves every pixel by a: that is a in Linf, a sqrt(pixels) in L2."""
        edge = threat.eps if threat.norm == "linf" else threat.eps / pixels**0.5
        span = edge if self.span is None else self.span
        if span == 0:
            raise ConfigError("the threat has eps 0, so its edge is no grid; say how far with span")
        return Axis(points=self.points or 0, span=span)

    def samples(self, whole: Dataset) -> Dataset:
        """Those of the data that are looked at."""
        return fair_subset(whole, self.images) if self.ids is None else _chosen(whole, self.ids)

    def described(self) -> dict[str, Any]:
        """Plain values, without what does not change the question."""
        kept = {k: v for k, v in asdict(self).items() if k not in ("batch_size", "precision")}
        span = None if self.span is None else float(self.span)
        return {**kept, "span": span, "ids": None if self.ids is None else list(self.ids)}

    def stem(self, checkpoint: str) -> str:
        """The name of its files beside a checkpoint: the main words, and a digest of all that was asked."""
        which = f"{self.on}{self.images}" if self.ids is None else f"{self.on}-" + "+".join(map(str, self.ids))[:40]
        words = [f"landscape-{checkpoint}-{self.kind}", which, f"p{self.points}"]
        if self.span != DEFAULTS[self.kind].get("span"):
            words.append(f"span{self.span:g}")
        if self.kind != "input":
            words += [f"d{self.directions}", str(self.attack).replace(":", "_").replace("/", "_")]
        return "-".join([*words, f"seed{self.seed}", sha256(json_text(self.described()))[:8]])


def fingerprint(data: Dataset) -> str:
    """What tells these samples from others."""
    x = data.images(torch.arange(len(data)))
    return digest({"x": x.cpu().contiguous(), "y": data.y.cpu()}, "")


def _chosen(data: Dataset, ids: Sequence[int]) -> Dataset:
    """The samples with these ids, in this order."""
    place_of = {int(i): at for at, i in enumerate(data.ids.tolist())}
    missing = [i for i in ids if i not in place_of]
    if missing or not ids:
        few = ", ".join(map(str, sorted(place_of)[:3]))
        raise ConfigError(f"{data.name!r} has no samples {missing} here; ids are such as {few} up to {max(place_of)}")
    return data.subset(torch.tensor([place_of[i] for i in ids]))
