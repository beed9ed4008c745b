"""The sections of a recipe, typed. Values are checked here; names and cross-section rules in check.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from flatrock.core.bands import Band, bands_text
from flatrock.core.guests import is_own
from flatrock.optimizers.catalog import lacks
from flatrock.recipes.keys import AttackSpec, Named, Number, Section, Whole, to_number
from flatrock.recipes.later import without_unmade


def _folder_name(value: str) -> str:
    if not value or value.startswith(".") or "/" in value or "\\" in value:
        raise ValueError(
            "but it is the name of the run's folder, too: without / and \\ and with no dot at its beginning; where the "
            "run goes is said by --run-dir"
        )
    return value


def _band(value: Any) -> Band:
    ends = [to_number(end) for end in value] if isinstance(value, list | tuple) else []
    if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= 100:
        raise ValueError("but a band is [lowest, highest] in percent of the test set, such as [97.5, 99.0]")
    return ends[0], ends[1]


class About(Section):
    """What the recipe is: for people, never for training.

    `bands` say in what range each measure (`clean`, an attack or a plan of `evaluate`) is expected, in percent of the
    test set, for the checkpoint the run is known by; `expect` what else there is to say about that.
    """

    summary: str = ""
    source: str = ""
    bands: dict[str, Annotated[Band, BeforeValidator(_band)]] = Field(default_factory=dict)
    expect: str = ""
    time: str = ""

    @property
    def expected(self) -> str:
        """What is expected, in a line: the bands, and the rest."""
        bands = f"{bands_text(self.bands)} (percent)" if self.bands else ""
        return "; ".join(filter(None, [bands, self.expect]))


class Augment(Section):
    """Random changes of training images."""

    crop: Annotated[Whole, Field(ge=0)] = 0
    crop_fill: Literal["zero", "reflect"] = "zero"
    flip: bool = False
    cutout: Annotated[Whole, Field(ge=0)] = 0
    rotation: Annotated[Number, Field(ge=0, le=180)] = 0.0
    rotation_mode: Literal["bilinear", "nearest"] = "bilinear"
    brightness: Annotated[Number, Field(ge=0, le=1)] = 0.0
    mixup: Annotated[Number, Field(ge=0)] = 0.0
    cutmix: Annotated[Number, Field(ge=0)] = 0.0
    shift: Annotated[Whole, Field(ge=0)] = 0
    erase: Annotated[Number, Field(ge=0, le=1)] = 0.0


class Extra(Section):
    """Extra images from an .npz file, a fixed share of every batch."""

    file: str
    fraction: Annotated[Number, Field(gt=0, lt=1)] = 0.5


class Data(Named):
    """Training data; `held_out` samples are set aside to choose the best epoch, `limit` keeps a fair few."""

    held_out: Annotated[Whole, Field(ge=0)] = 1000
    limit: Annotated[Whole, Field(ge=4)] | None = None
    augment: Augment = Augment()
    extra: Extra | None = None


class Network(Named):
    """The network; num_classes follows from the data when left out.

    `weights` is what it begins with instead of drawn ones: a run folder, a checkpoint or a weights file.
    """

    num_classes: Annotated[Whole, Field(ge=2)] | None = None
    normalize: str | None = None
    weights: Annotated[str, Field(min_length=1)] | None = None


class ThreatKeys(Section):
    """The attacker's budget, in pixel units."""

    norm: Literal["linf", "l2"]
    eps: Number


class InnerAttack(Named):
    """The attack used in training; its name follows from the objective when left out."""

    its_own = ("bn_mode",)
    name: str = "auto"
    bn_mode: Literal["eval", "train", "frozen"] = "eval"


# Keys of the optimizer section that are options of those optimizers that have them.
SHARED = ("momentum", "nesterov")


class Optimizer(Named):
    """The update rule; keys beyond these are options of the optimizer named.

    Those that some optimizers lack (SHARED) are 0 where they are left out and the one named lacks them. `decay_on:
    weights` spares biases and BatchNorm; `schedule_on: decayed` leaves them at lr for good, too. l1 and l2 are
    penalties on weights, added to the loss.
    """

    name: str = "sgd"
    lr: Annotated[Number, Field(ge=0)] = 0.1
    momentum: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[Number, Field(ge=0)] = 5e-4
    nesterov: bool = False
    decay_on: Literal["all", "weights"] = "all"
    schedule_on: Literal["all", "decayed"] = "all"
    l1: Annotated[Number, Field(ge=0)] = 0.0
    l2: Annotated[Number, Field(ge=0)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _of_those_that_have_it(cls, values: Any) -> Any:
        """Nothing that was not asked for is in the way, and the stored recipe says that there is none."""
        if not isinstance(values, Mapping):
            return values
        return {**{key: 0 for key in SHARED if lacks(values.get("name"), key)}, **values}

    @classmethod
    def stays(cls, key: str, name: object) -> bool:
        """Momentum goes where an optimizer without is named."""
        return super().stays(key, name) and not (key in SHARED and lacks(name, key))

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Optimizer:
        if self.nesterov and self.momentum == 0 and not lacks(self.name, "nesterov"):
            raise ValueError("nesterov needs momentum > 0")
        return self


class KeepKeys(Section):
    """Epochs whose weights are kept beside best and last."""

    every: Annotated[Whole, Field(ge=1)] | None = None
    after: Annotated[Whole, Field(ge=0)] = 0
    windows: tuple[tuple[Whole, Whole], ...] = ()

    @model_validator(mode="after")
    def _windows_open(self) -> KeepKeys:
        for first, last in self.windows:
            if first > last:
                raise ValueError(f"a window is [first, last] epoch, got [{first}, {last}]")
        return self


class Train(Section):
    """How long, in what batches, and what is written on the way."""

    epochs: Annotated[Whole, Field(ge=1)]
    batch_size: Annotated[Whole, Field(ge=2)] = 128
    max_steps: Annotated[Whole, Field(ge=1)] | None = None
    # One more train-mode pass of the clean batch after the step, as the AWP and ATENT code makes for its logs.
    clean_tick: bool = False
    # The largest norm, over all parameters together, of a gradient that is stepped on; none: as it comes.
    clip_norm: Annotated[Number, Field(gt=0)] | None = None
    # How many samples go through the network at once, in a step; none: all of a batch.
    micro_batch: Annotated[Whole, Field(ge=2)] | None = None
    keep: KeepKeys = KeepKeys()
    save_seconds: Annotated[Number, Field(gt=0)] = 120.0
    tensorboard: bool = True

    def steps(self, per_epoch: int) -> int:
        """All that will be made, of so many per epoch."""
        return min(self.epochs * per_epoch, self.max_steps or self.epochs * per_epoch)


class Select(Section):
    """How the best epoch is chosen. `select: test` looks at the test set and marks every number that follows.

    `metric: auto` is robust accuracy, or clean accuracy for training without attack. (The key is not called `on`
    because YAML reads that word as true.)
    """

    data: Literal["held_out", "test"] = "held_out"
    metric: Literal["auto", "robust", "clean"] = "auto"
    attack: AttackSpec = "pgd-10"
    every: Annotated[Whole, Field(ge=1)] = 1
    size: Annotated[Whole, Field(ge=1)] | None = None


class Further(Section):
    """One more evaluation, of another question: options of `flatrock eval`; what is left out is as in the recipe's own.

    `surrogate` is the run that attacks called transfer- craft on.
    """

    attacks: tuple[AttackSpec, ...]
    norm: Literal["linf", "l2"] | None = None
    eps: Number | None = None
    surrogate: Annotated[str, Field(min_length=1)] | None = None
    limit: Annotated[Whole, Field(ge=1)] | None = None
    first: bool = False


class Evaluate(Section):
    """The attacks and plans `flatrock eval` runs unless told otherwise; without batch_size it fits the device.

    `more` are evaluations beside it, each with a result of its own: they take no part in its worst case.
    """

    attacks: tuple[AttackSpec, ...] = ("fgsm", "pgd-20", "cw-20")
    more: tuple[Further, ...] = ()
    batch_size: Annotated[Whole, Field(ge=1)] | None = None


class EngineKeys(Section):
    """How a step is computed. `auto` is the reference, float32 and not compiled, except on a GPU. See docs/speed.md.

    These choices round differently but ask for the same training: they are not part of the recipe's hash, and the ones
    taken are in the run's provenance.
    """

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto"] | bool = "auto"


class Recipe(Section):
    """A whole training run, every choice written down."""

    # Also the name of the run folder, so it may not lead elsewhere.
    name: Annotated[str, AfterValidator(_folder_name)]
    about: About = About()
    seed: Annotated[Whole, Field(ge=0)] = 0
    data: Data
    model: Network
    threat: ThreatKeys
    objective: Named
    flatness: tuple[Named, ...] = ()
    attack: InnerAttack = InnerAttack()
    optimizer: Optimizer = Optimizer()
    schedule: Named
    train: Train
    engine: EngineKeys = EngineKeys()
    select: Select = Select()
    evaluate: Evaluate = Evaluate()

    def resolved(self) -> dict[str, Any]:
        """Plain values, every default filled in."""
        return self.model_dump(mode="json")

    def training_keys(self) -> dict[str, Any]:
        """The keys that decide the weights: the rest may change between a run and its resumption."""
        own = is_own(self.objective.name)  # options of the user's are all kept
        return without_unmade(self.deciding(self.resolved()), skip="objective" if own else "")

    def deciding(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Of the keys of this recipe, however many are filled in, those that decide the weights."""
        for free in ("about", "engine", "evaluate", "name"):
            keys.pop(free)
        for free in ("save_seconds", "tensorboard", "keep"):
            keys["train"].pop(free)
        if keys["model"]["weights"] is not None:
            keys["model"]["weights"] = "given"  # where they lie; a run's state knows them
        if not is_own(self.objective.name):
            keys["objective"].pop("helper", None)  # the same
        return keys

    def judged_keys(self) -> dict[str, Any]:
        """The keys that decide the numbers of a row: those that decide the weights, and the attacks."""
        return {**self.training_keys(), "evaluate": {"attacks": self.resolved()["evaluate"]["attacks"]}}
