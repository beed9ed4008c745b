"""Models that flatrock did not train: what options say of them, with every fault at once, and what they work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import answered, check_model
from flatrock.attacks.losses import margin
from flatrock.attacks.pgd import classified_right
from flatrock.core.borrow import borrowed, placed
from flatrock.core.errors import ConfigError, FlatrockError, ModelError, StateError, faults_of
from flatrock.core.files import brief
from flatrock.core.identity import answers
from flatrock.core.numbers import number
from flatrock.core.options import choose
from flatrock.core.progress import Progress
from flatrock.core.registry import unknown
from flatrock.core.spelled import spell
from flatrock.core.threat import THREATS, Threat, norm_named
from flatrock.data.catalog import DATA, Spec, check_data, data_options, load_data, parse_data
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset
from flatrock.models.catalog import NORMALIZATIONS
from flatrock.models.foreign import Foreign, model_faults, open_foreign
from flatrock.recipes.part import PARTS

# Samples on which other normalisations are tried, and how much one must gain to ask for a decision.
_TRIED, _GAIN, _LEAST = 200, 0.1, 10
# So many answers tell a network from others with the same weights.
_ASKED = 16


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A model that is no run, as options describe it, and what a recipe would say: its data, and a threat.

    `model`, `weights`, `num_classes`, `normalize` and `which` are those of load_foreign, `norm` and `eps` a threat.
    `data` is a name with options, 'folder:size=64', or the mapping {"name": "folder", "size": 64}.
    """

    model: str | None = None
    weights: Path | str | None = None
    num_classes: int | None = None
    normalize: str | None = None
    which: str = "auto"
    data: Spec | None = None
    norm: str | None = None
    eps: float | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", norm_named(self.norm))

    @property
    def label(self) -> str:
        """What it is called before it is opened."""
        return str(self.model or self.weights)

    def check(self, *, what: str, faults: Sequence[str] = (), threat: bool = True) -> None:
        """ConfigError with all that is wrong with it and all other `faults`, for which `what` cannot start.

        Without `threat` none is asked for.
        """
        wrong = [*model_faults(self.model, **self._made), *self._asked(threat), *faults]
        if wrong:
            raise ConfigError(f"the {what} cannot start:", tuple(wrong))

    def opened(self, progress: Progress) -> Foreign:
        """The network, once it is checked, which says what data it is asked about, and a word on what it is."""
        foreign = open_foreign(self.model, which=self.which, **self._made)
        for line in foreign.lines():
            progress.say(line)
        return replace(foreign, about={**foreign.about, "dataset": self.dataset})

    @property
    def _made(self) -> dict[str, Any]:
        return {"weights": self.weights, "num_classes": self.num_classes, "normalize": self.normalize}

    @property
    def threat(self) -> Threat:
        """The threat, once it is known to be one."""
        return THREATS[str(self.norm)](number(self.eps))

    @property
    def dataset(self) -> str:
        """The data set with its options, spelled in one way, once it is known to be one."""
        return spell(*self._named)

    @property
    def _named(self) -> tuple[str, dict[str, Any]]:
        assert self.data is not None
        return parse_data(self.data)

    def part(self, on: str, folder: Path | None) -> Dataset:
        """The training or the test samples."""
        name, options = self._named
        return load_data(name, "test" if on == "test" else "train", folder=folder, **options)

    def _asked(self, threat: bool) -> list[str]:
        """What is wrong with the data, and with the threat if there must be one."""
        norm, eps = self.norm, self.eps
        needed: list[tuple[str, object, str]] = [("data", self.data, f"name a data set: {', '.join(DATA.names())}")]
        if threat:
            needed.append(("norm", norm, f"name the norm of the threat: {', '.join(THREATS)}"))
            needed.append(("eps", eps, "give the radius of the threat in pixel units of [0, 1], such as 8/255"))
        faults = [f"{name}: not given; {hint}" for name, value, hint in needed if value is None]
        if self.data is not None:
            faults += caught("data", lambda: check_data(*self._named))
        if norm is not None and norm not in THREATS:
            faults.append(f"norm: {unknown('norm', norm, THREATS)}")
        if eps is not None:
            # A radius that is no number is wrong in any norm, one that is too large depends on it.
            faults += caught("eps", lambda: THREATS[norm](number(eps)) if norm in THREATS else number(eps))
        return faults


def part_faults(on: str) -> list[str]:
    """What is wrong with asking for these samples of a model that is no run."""
    if on == "held_out":
        return ["on: a model that is no run set no samples aside that are known; choose train or test"]
    return caught("on", lambda: choose("data", "part", on, PARTS))


def caught(where: str, make: Callable[[], object]) -> list[str]:
    """The faults that `make` raises, under the name of the option."""
    try:
        return [f"{where}: {fault}" for fault in faults_of(make)]
    except FlatrockError as error:
        return [f"{where}: {error}"]


def out_faults(out: Path | None, read: Callable[[str], object], *, what: str) -> list[str]:
    """A file of its kind, which `read` reads, may be written over, and nothing else."""
    if out is None:
        return []
    if out.suffix != ".json":
        return [f"out: {out} must end in .json"]
    if not out.exists():
        return []
    try:
        read(out.read_text())
    except (StateError, OSError, ValueError):
        return [f"out: {out} exists and is no {what}; it is left alone, choose another name"]
    return []


def examine(foreign: Foreign, data: Dataset, where: torch.device, num_classes: int | None) -> None:
    """The network takes these inputs and has these classes, and its normalisation is not obviously wrong."""
    model = foreign.model
    x = data.images(torch.arange(min(len(data), 2))).to(where)
    check_model(model, x)
    with placed(model, where), borrowed(model, where), torch.no_grad():
        try:
            logits = model(x)
        except FlatrockError:
            raise
        except Exception as error:  # it is the user's code: anything can happen
            raise ModelError(
                f"{foreign.name} does not take inputs {list(x.shape)} of {data.name!r}: {type(error).__name__}: {error}"
                f"{_other_sizes(data.name)}"
            ) from error
        # Anything but rows of logits is refused later, in other words.
        classes = logits.shape[1] if isinstance(logits, Tensor) and logits.dim() == 2 else None
        told = ("num_classes says", num_classes, "leave --num-classes out")
        there = (
            f"{data.name!r} has",
            data.num_classes,
            "name the --data it was trained on, or weights of these classes",
        )
        for who, wanted, cure in (told, there):
            if classes is not None and wanted not in (None, classes):
                raise ConfigError(f"{foreign.name} has {classes} classes, but {who} {wanted}; {cure}")
        if not foreign.sure and classes is not None:
            _check_normalization(foreign, tried_on(data), where)


def _other_sizes(name: str) -> str:
    """What to say of inputs that do not fit, if the data can be had otherwise."""
    if name not in DATA or "size" not in data_options(name):
        return ""
    return f"; give the size and channels that it takes, such as --data {name}:size=28:channels=1"


def _check_normalization(foreign: Foreign, few: Dataset, where: torch.device) -> None:
    """Refuse to go on without normalisation where another one is far better: nobody said that there is none."""
    plain, better = other_normalization(foreign, few, where)
    if better is not None:
        name, more = better
        raise ConfigError(
            f"inputs are not normalised, and so the network is right on {plain} of {len(few)} samples, but "
            f"on {more} with that of {name!r}; say --normalize {name}, or --normalize none to go on without"
        )


def other_normalization(
    foreign: Foreign, few: Dataset, where: torch.device, *, batch: int = _TRIED
) -> tuple[int, tuple[str, int] | None]:
    """On how many samples the network is right, and another normalisation, or none, with which it is on far more.

    Inputs are moved, not the network: its (x - m) / s makes of (x - mean) * s / std + m what (x - mean) / std would be.
    """
    model, now = foreign.model, foreign.about["normalize"]
    x, y = few.images(torch.arange(len(few))), few.y

    def values(numbers: Sequence[float] | None, usual: float) -> Tensor:
        return torch.tensor(numbers or [usual]).reshape(-1, *[1] * (x.dim() - 2))

    def right(mean: Sequence[float], std: Sequence[float]) -> int:
        m, s = values(now["mean"], 0.0), values(now["std"], 1.0)
        moved = (x - values(mean, 0.0)) * (s / values(std, 1.0)) + m
        try:
            return _right(model, moved, y, where, batch)
        except ModelError:  # of a network that refuses inputs outside the box
            return 0

    fitting = {name: pair for name, pair in NORMALIZATIONS.items() if len(pair[0]) in (1, few.input_shape[0])}
    with placed(model, where), borrowed(model, where), torch.no_grad():
        plain = _right(model, x, y, where, batch)
        tried = {name: right(*pair) for name, pair in ({"none": ((), ())} | fitting).items()}
    clear = max(_LEAST, _GAIN * len(y))
    best = max(tried, key=lambda name: tried[name])
    # Those of similar data sets differ little: the data set's own wins unless another is clearly better.
    if few.name in tried and tried[best] - tried[few.name] < clear:
        best = few.name
    return plain, (best, tried[best]) if tried[best] - plain >= clear else None


def _right(model: nn.Module, x: Tensor, y: Tensor, where: torch.device, batch: int) -> int:
    """On how many samples the network is right, so many at a time."""
    parts = zip(torch.split(x, batch), torch.split(y, batch), strict=True)
    near = ((some.to(where), true.to(where)) for some, true in parts)
    return sum(int(classified_right(answered(model, some, true), true).sum()) for some, true in near)


def in_names(dataset: str) -> str:
    """A data set in the name of a file, where options can be many."""
    return brief(dataset, 60) if "=" in dataset else dataset


def tried_on(data: Dataset) -> Dataset:
    """The samples that normalisations are tried on."""
    return fair_subset(data, _TRIED)


def known_answers(model: nn.Module, data: Dataset, where: torch.device) -> list[float] | None:
    """What the network says to a few samples, which tells it from others with its weights; None of one that guesses.

    ModelError if it gives no logits.
    """
    few = fair_subset(data, _ASKED)
    x, y = few.images(torch.arange(len(few))).to(where), few.y.to(where)
    with placed(model, where), borrowed(model, where), torch.no_grad():
        once, again = (margin(answered(model, x, y), y) for _ in range(2))
    return answers(once) if torch.allclose(once, again, rtol=1e-3, equal_nan=True) else None
