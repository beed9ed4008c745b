"""State dicts of other projects -> flatrock's own networks, by explicit tables of names; every shape is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.models.catalog import MODELS, create_model
from flatrock.models.weights import Shapes, fit, shapes_of
from flatrock.models.wrapping import Pair, innermost, parts, told_parts

Network = tuple[str, dict[str, int]]
# How a network of one's own is named, on the command line and in a recipe.
FACTORY = "--model package.module:factory, in a recipe model.name=module:factory"


@dataclass(frozen=True)
class Converted:
    """Weights under flatrock's names: `create_model(model_name, **options)` takes `state`, mean and std included."""

    model_name: str
    num_classes: int
    state: dict[str, Tensor]
    normalize: Pair | None
    family: str
    options: dict[str, int] = field(default_factory=dict)


class Normalized(nn.Module):
    """Any network with (x - mean) / std, per channel, before it."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, normalize: Pair) -> None:
        super().__init__()
        self.network = network
        like = next(network.parameters(), torch.zeros(()))
        for name, values in zip(("mean", "std"), normalize, strict=True):
            self.register_buffer(name, torch.tensor(values, dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor) -> Tensor:
        """What the network makes of the normalised input."""
        mean, std = (v.reshape(-1, *[1] * (x.dim() - 2)) for v in (self.mean, self.std))
        out: Tensor = self.network((x - mean) / std)
        return out


@dataclass(frozen=True)
class _Family:
    """An architecture as other projects write it.

    A state dict with all names of `marks` and none of `lacks` belongs to it. `network` reads flatrock's name and
    options of it from the shapes; `table` gives for the beginning of each of flatrock's names the beginning of theirs.
    """

    name: str
    marks: tuple[str, ...]
    head: str
    network: Callable[[Shapes], Network]
    table: Callable[[Shapes], dict[str, str]]
    lacks: tuple[str, ...] = ()
    unused: str = ""

    def owns(self, names: Mapping[str, object]) -> bool:
        """Whether a state dict with these names is of this family."""
        return all(m in names for m in self.marks) and not any(m in names for m in self.lacks)


def _named(name: str) -> Callable[[Shapes], Network]:
    return lambda shapes: (name, {})


def _layers(**ends: str) -> Callable[[Shapes], dict[str, str]]:
    """Four stages of two blocks: blocks.5 is layer3.1."""
    return lambda shapes: {**ends, **{f"blocks.{i}": f"layer{i // 2 + 1}.{i % 2}" for i in range(8)}}


def _preact_table(shapes: Shapes) -> dict[str, str]:
    shortcuts = {f"blocks.{i}.shortcut": f"layer{i // 2 + 1}.0.shortcut.0" for i in (2, 4, 6)}
    return {**_layers(conv="conv1", bn="bn", head="linear")(shapes), **shortcuts}


def _rows(shapes: Shapes, key: str) -> int:
    """Outputs of a layer; 0 where it is not there, so that the check of shapes says so."""
    return (*shapes.get(key, ()), 0)[0]


def _group_size(shapes: Shapes) -> int:
    return len({k.split(".")[2] for k in shapes if k.startswith("block1.layer.")})


def _wide_network(shapes: Shapes) -> Network:
    """Depth 6n + 4 from the n blocks of a group; the width from the channels of the first."""
    options = {
        "depth": 6 * _group_size(shapes) + 4,
        "width": max(_rows(shapes, "block1.layer.0.conv1.weight") // 16, 1),
    }
    name = next((e.name for e in MODELS if e.name.startswith("wide_resnet") and e.fixed == options), None)
    return (name, {}) if name else ("wide_resnet", options)


def _wide_table(shapes: Shapes) -> dict[str, str]:
    """Groups of n blocks: blocks.n is block2.layer.0."""
    n = _group_size(shapes)
    blocks = {f"blocks.{i}": f"block{i // n + 1}.layer.{i % n}" for i in range(3 * n)}
    return {
        **{"conv": "conv1", "bn": "bn1", "head": "fc"},
        **blocks,
        **{f"{ours}.shortcut": f"{theirs}.convShortcut" for ours, theirs in blocks.items()},
    }


def _vgg_network(shapes: Shapes) -> Network:
    depth = 3 + sum(len(s) == 4 for k, s in shapes.items() if k.startswith("features."))
    name = f"vgg{depth}_bn"
    if name not in MODELS:
        raise ConfigError(
            f"these weights are those of a VGG of depth {depth}, and flatrock has vgg16_bn and vgg19_bn; "
            f"give a factory of it: {FACTORY}"
        )
    return name, {}


def _same(**names: str) -> Callable[[Shapes], dict[str, str]]:
    return lambda shapes: names


_FAMILIES = (
    _Family(
        name="PreActResNet-18 of AWP and robust overfitting",
        marks=("conv1.weight", "layer1.0.bn1.weight", "bn.weight", "linear.weight"),
        lacks=("bn1.weight", "layer1.0.conv3.weight"),
        head="linear",
        network=_named("preact_resnet18"),
        table=_preact_table,
    ),
    _Family(
        name="ResNet-18 of MART and TRADES-AWP",
        marks=("conv1.weight", "bn1.weight", "layer1.0.conv2.weight", "linear.weight"),
        lacks=("layer1.0.conv3.weight",),
        head="linear",
        network=_named("resnet18"),
        table=_layers(conv="conv1", bn="bn1", head="linear"),
    ),
    _Family(
        name="WideResNet of TRADES",
        marks=("conv1.weight", "block1.layer.0.bn1.weight", "bn1.weight", "fc.weight"),
        head="fc",
        network=_wide_network,
        table=_wide_table,
        # The original code builds this group a second time and never calls it.
        unused=r"sub_block1\.",
    ),
    _Family(
        name="VGG with BatchNorm of pytorch-cifar",
        marks=("features.0.weight", "features.1.running_mean", "classifier.weight"),
        head="classifier",
        network=_vgg_network,
        table=_same(layers="features", head="classifier"),
    ),
    _Family(
        name="MobileNetV2 of pytorch-cifar",
        marks=("conv1.weight", "layers.0.conv3.weight", "conv2.weight", "linear.weight"),
        head="linear",
        network=_named("mobilenet_v2"),
        table=_same(conv1="conv1", bn1="bn1", blocks="layers", conv2="conv2", bn2="bn2", head="linear"),
    ),
    _Family(
        name="SmallCNN of TRADES",
        marks=("feature_extractor.conv1.weight", "classifier.fc1.weight", "classifier.fc3.weight"),
        head="classifier.fc3",
        network=_named("mnist_cnn"),
        table=_same(
            **{f"conv{i}": f"feature_extractor.conv{i}" for i in (1, 2, 3, 4)},
            **{"fc1": "classifier.fc1", "fc2": "classifier.fc2", "head": "classifier.fc3"},
        ),
    ),
)

FAMILIES = tuple(family.name for family in _FAMILIES)

# Names that are known, and why flatrock has no network with the same outputs.
_REFUSED = (
    (("head.weight",), "they carry flatrock's own names; say which network with --model NAME"),
    (
        ("init_conv.weight", "logits.weight"),
        "they are a WideResNet of DeepMind's code, which pads unevenly where it halves the size and mostly uses Swish",
    ),
    (
        ("conv_2d.weight", "logits.weight"),
        "they are a PreActResNet of DeepMind's code, which pads unevenly where it halves the size",
    ),
    (("layer1.0.conv3.weight",), "they are a ResNet with bottleneck blocks (ResNet-50 or deeper)"),
    (
        ("layer1.0.bn1.weight", "conv1.weight", "linear.weight"),
        "they are a PreActResNet without BatchNorm before its linear layer, as in fast adversarial training; files of "
        "such networks do not tell where their shortcuts branch off",
    ),
    (
        ("layer1.0.conv1.weight", "fc.weight"),
        "they are a ResNet with torchvision's names; a file does not tell whether its stem pools",
    ),
    (("features.0.weight", "classifier.0.weight"), "they are a VGG with several linear layers, as in torchvision"),
)


def convert(state: Mapping[str, Tensor]) -> Converted:
    """The state dict of a known family under flatrock's names; the family is told by names and shapes alone.

    Mean and std stored in it become the network's own. ConfigError says what was not recognised or does not fit.
    """
    reading = innermost(state, _recognised)
    if reading is None:
        raise ConfigError(_unrecognised(state))
    family = next(f for f in _FAMILIES if f.owns(reading.state))
    shapes = shapes_of(reading.state)
    name, options = family.network(shapes)
    num_classes = _rows(shapes, f"{family.head}.weight")
    with torch.device("meta"):  # only names and shapes are needed
        model = create_model(name, num_classes=num_classes, normalize=reading.normalize, **options)
    table = family.table(shapes)
    normalization = {k: v for k, v in model.state_dict().items() if k in ("mean", "std")}
    expected = {k: s for k, s in shapes_of(model.state_dict()).items() if k not in normalization}
    fitting = fit(
        reading.state,
        expected,
        what=f"the {family.name} ({name}) whose names they have",
        theirs=lambda ours: _translated(ours, table),
        unused=family.unused,
    )
    if reading.normalize is not None:
        for key, values in zip(("mean", "std"), reading.normalize, strict=True):
            like = normalization[key]
            fitting[key] = torch.tensor(values, dtype=torch.float64).expand(like.numel()).reshape(like.shape)
    return Converted(name, num_classes, fitting, reading.normalize, family.name, options)


def _translated(ours: str, table: Mapping[str, str]) -> str:
    """Their name for ours: the longest beginning that is in the table is exchanged."""
    parts = ours.split(".")
    for cut in range(len(parts), 0, -1):
        if (begin := ".".join(parts[:cut])) in table:
            return ".".join([table[begin], *parts[cut:]])
    raise KeyError(ours)


def _recognised(state: Mapping[str, object]) -> bool:
    return any(family.owns(state) for family in _FAMILIES)


def _unrecognised(state: Mapping[str, Tensor]) -> str:
    cure = f"give a factory of their network: {FACTORY}"
    if alone := parts(state, _recognised):
        return f"one part of these weights alone is recognised: {told_parts(alone)}; or {cure}"
    reason = next((why for marks, why in _REFUSED if innermost(state, set(marks).issubset)), None)
    if reason is not None:
        return f"these weights cannot be converted: {reason}" + ("" if "--model" in reason else f"; {cure}")
    return (
        f"these weights ({', '.join(list(state)[:4])}, ...) have the names of no family that is recognised: "
        f"{', '.join(FAMILIES)}; {cure}"
    )
