"""Networks that flatrock did not train: a factory or a name, a weights file, a normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.guests import dotted, local
from flatrock.core.options import count
from flatrock.core.registry import unknown
from flatrock.models.catalog import MODELS, NORMALIZATIONS, create_model
from flatrock.models.classifier import Classifier
from flatrock.models.convert import Converted, Normalized, convert
from flatrock.models.factory import find_factory, make_network
from flatrock.models.weights import Weights, fit, fits, read_weights, shapes_of
from flatrock.models.wrapping import Pair, closest, innermost, parts, readings, told_parts

# What (x - mean) / std does not change.
_NONE: Pair = ((0.0,), (1.0,))
# Where a normalisation comes from that cannot be overruled.
STORED = "stored with the weights"


@dataclass(frozen=True)
class Foreign:
    """A network in eval mode, its name, and where it comes from.

    `sure` says whether someone vouches for the normalisation: the file, the factory, or the user.
    """

    model: nn.Module
    name: str
    about: dict[str, Any]
    sure: bool

    def lines(self) -> list[str]:
        """Where it comes from, for people."""
        about, shift = self.about, self.about["normalize"]
        said = [f"model {self.name}" + (f", converted from the {about['converter']}" if about["converter"] else "")]
        if about["weights"] is not None:
            entry = f", entry {about['weights_entry']!r}" if about["weights_entry"] else ""
            averaged = " (averaged weights)" if about["weights_averaged"] else ""
            others = about["weights_others"]
            also = f"; also there, for --which: {', '.join(others)}" if others else ""
            said.append(f"weights {about['weights']}, sha256 {about['weights_sha256'][:12]}{entry}{averaged}{also}")
        values = f": {in_numbers((shift['mean'], shift['std']))}" if shift["mean"] else ""
        return [*said, f"normalisation {shift['source']}{values}"]


def model_faults(
    model: str | None, *, weights: Path | str | None, num_classes: int | None, normalize: str | None
) -> list[str]:
    """What is wrong with these options, all at once; modules are imported, no file is read."""
    faults: list[str] = []
    if model is None and weights is None:
        faults.append("model: give --model NAME or package.module:factory, or --weights of a family that is recognised")
    elif model is not None and ":" in model:
        try:
            find_factory(model)
        except ConfigError as error:
            faults.append(f"model: {error}")
    elif model is not None and model not in MODELS:
        faults.append(f"model: {_unknown(model)}")
    elif model is not None and weights is None:
        faults.append(f"weights: {model!r} has no weights of its own; give --weights FILE")
    if weights is not None and not Path(weights).is_file():
        faults.append(f"weights: there is no file {weights}")
    if num_classes is not None:
        try:
            count("the model's", "num_classes", num_classes, least=2)
        except ConfigError as error:
            faults.append(f"num_classes: {error}")
    if normalize not in (None, "none", *NORMALIZATIONS):
        faults.append(f"normalize: {unknown('normalisation', normalize, ['none', *NORMALIZATIONS])}")
    return faults


def _unknown(model: str) -> str:
    """A name that is neither flatrock's nor a factory's; maybe a file is meant, and a function in it is missing."""
    if name := dotted(model) or (model if local(model) else None):
        return f"{model!r} is a file here and no network; name what in it makes one, {name}:FUNCTION"
    return f"{unknown('model', model, MODELS.names())}; a factory is named package.module:factory"


def open_foreign(
    model: str | None = None,
    *,
    weights: Path | str | None = None,
    num_classes: int | None = None,
    normalize: str | None = None,
    which: str = "auto",
) -> Foreign:
    """The network that these options describe; see `flatrock.workflows.foreign.load_foreign`."""
    faults = model_faults(model, weights=weights, num_classes=num_classes, normalize=normalize)
    if faults:
        raise ConfigError("the model cannot be loaded:", tuple(faults))
    file = None if weights is None else read_weights(weights, which=which)
    if model is not None and ":" in model:
        return _from_factory(model, file, normalize)
    assert file is not None  # model_faults asked for it
    found = converted(model, file)
    if num_classes not in (None, found.num_classes):
        raise ConfigError(f"num_classes is {num_classes}, but the weights in {file.file} have {found.num_classes}")
    network = _built(found)
    pair, source = _normalization(normalize, found.normalize)
    if pair is not None:
        network.set_normalization(*pair)
    name = "-".join([found.model_name, *map(str, found.options.values())])
    about = _about(name, found.family, file, pair, source)
    return Foreign(network.eval(), name, about, sure=normalize is not None or pair is not None)


def _from_factory(text: str, file: Weights | None, normalize: str | None) -> Foreign:
    network = make_network(text)
    stored = None if file is None else _fill(network, file, text)
    pair, source = _normalization(normalize, stored)
    made = network if pair is None else Normalized(network, pair)
    about = _about(text, "", file, pair, "none before the factory's network" if pair is None else source)
    return Foreign(made.eval(), text, about, sure=normalize is not None or pair is not None)


def _fill(network: nn.Module, file: Weights, text: str) -> Pair | None:
    """Load the reading of the file that fits best; what it says of normalisation that the network does not hold."""
    expected = shapes_of({k: v for k, v in network.state_dict().items() if isinstance(v, Tensor)})
    best = closest(readings(file.state), expected)
    try:
        tensors = fit(best.state, expected, what=f"the network of {text}")
    except ConfigError as error:
        alone = parts(file.state, lambda part: fits(part, expected))
        if not alone:
            raise
        raise ConfigError(f"{error}\none part of the file alone fits: {told_parts(alone)}") from error
    # Every tensor was fitted; strict loading would also ask for extra state that is no tensor.
    network.load_state_dict(tensors, strict=False)
    return best.normalize


def converted(name: str | None, file: Weights) -> Converted:
    """The weights under flatrock's names, for the network called `name` or the one that the family is."""
    reading = innermost(file.state, lambda state: "head.weight" in state)
    if name is not None and reading is not None:
        return Converted(name, len(reading.state["head.weight"]), reading.state, reading.normalize, "")
    try:
        found = convert(file.state)
    except ConfigError as error:
        alone = [] if name is None else parts(file.state, lambda part: _fits_own(name, part))
        if not alone:
            raise
        raise ConfigError(f"one part of {file.file} alone fits {name!r}: {told_parts(alone)}") from error
    if name not in (None, found.model_name):
        asked, entry = MODELS.entry(str(name)), MODELS.entry(found.model_name)
        if asked.make is not entry.make or asked.fixed:  # wide_resnet stands for every depth and width
            raise ConfigError(
                f"model is {name!r}, but the weights in {file.file} are those of a {found.family} "
                f"({found.model_name}); name that network, or give a file that belongs to {name!r}"
            )
    return found


def _fits_own(name: str, state: Mapping[str, Tensor]) -> bool:
    """Whether these are weights of flatrock's network of this name, which takes no further options."""
    head = state.get("head.weight")
    if head is None or head.dim() != 2:
        return False
    try:
        with torch.device("meta"):  # only names and shapes are needed
            network = create_model(name, num_classes=len(head))
    except ConfigError:
        return False
    return fits(_without_normalization(state), shapes_of(network.state_dict()))


def _without_normalization(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if k not in ("mean", "std")}


def _built(found: Converted) -> Classifier:
    options: dict[str, Any] = dict(found.options)
    network = create_model(found.model_name, num_classes=found.num_classes, **options)
    state = _without_normalization(found.state)
    network.load_state_dict(fit(state, shapes_of(network.state_dict()), what=f"flatrock's {found.model_name}"))
    return network


def _normalization(asked: str | None, stored: Pair | None) -> tuple[Pair | None, str]:
    """Mean and std to use, and where they come from; what the file stores cannot be overruled."""
    pair = None if asked in (None, "none") else NORMALIZATIONS[str(asked)]
    if stored is None:
        return pair, asked or "none"
    if asked is not None and not same_normalization(pair, stored):
        raise ConfigError(
            f"normalize is {asked!r}, but the weights come with {in_numbers(stored)}; "
            "leave out --normalize to use those"
        )
    return stored, STORED


def same_normalization(a: Pair | None, b: Pair | None) -> bool:
    """Whether two networks, of which one may have none, normalise alike."""
    return all(map(_equal, a or _NONE, b or _NONE))


def in_numbers(pair: tuple[Sequence[float], Sequence[float]]) -> str:
    """A normalisation in words."""
    return f"mean {_short(pair[0])}, std {_short(pair[1])}"


def _equal(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two lists of values per channel are the same but for rounding to float32."""
    channels = max(len(a), len(b))
    one, two = ((*v,) * channels if len(v) == 1 else (*v,) for v in (a, b))
    return len(one) == len(two) and all(abs(x - y) < 1e-6 for x, y in zip(one, two, strict=True))


def _about(name: str, family: str, file: Weights | None, pair: Pair | None, source: str) -> dict[str, Any]:
    """What a result says of its model."""
    mean, std = (None, None) if pair is None else (list(pair[0]), list(pair[1]))
    return {
        "model": name,
        "converter": family,
        "weights": None if file is None else file.file.name,
        "weights_sha256": None if file is None else file.sha256,
        "weights_entry": "" if file is None else file.entry,
        "weights_averaged": file is not None and file.averaged,
        "weights_others": [] if file is None else list(file.others),
        "normalize": {"source": source, "mean": mean, "std": std},
    }


def _short(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{v:.4g}" for v in values) + ")"
