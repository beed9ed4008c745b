"""Every network by name, and the normalisations the field uses with them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from flatrock.core.errors import ConfigError, FlatrockError, in_words
from flatrock.core.guests import is_own
from flatrock.core.registry import Entry, Registry, unknown
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.models.adapted import Adapted
from flatrock.models.classifier import Classifier
from flatrock.models.factory import own_defaults, own_network
from flatrock.models.hybrid_vit import HybridTransformer
from flatrock.models.mobilenet_v2 import MobileNetV2
from flatrock.models.moons_mlp import MoonsMLP
from flatrock.models.preact_resnet import PreActResNet18
from flatrock.models.resnet_cifar import CifarResNet, ResNet18
from flatrock.models.small_cnn import DigitsCNN, LeNet5, MnistCNN
from flatrock.models.vgg import VGG
from flatrock.models.vit import VisionTransformer
from flatrock.models.wide_resnet import WideResNet

MODELS: Registry[Classifier] = Registry("model")
MODELS.add("preact_resnet18", PreActResNet18, "PreActResNet-18, 32x32 colour", cite="arXiv:1603.05027")
MODELS.add("resnet18", ResNet18, "ResNet-18 with a 3x3 stem, 32x32 colour", cite="arXiv:1512.03385")
MODELS.add("resnet20", CifarResNet, "thin ResNet-20, 32x32 colour", cite="arXiv:1512.03385", depth=20)
MODELS.add("resnet_cifar", CifarResNet, "thin ResNet of depth 6n+2, 32x32 colour", cite="arXiv:1512.03385")
_WRN = "arXiv:1605.07146"
MODELS.add("wide_resnet28_4", WideResNet, "WRN-28-4, 32x32 colour", cite=_WRN, depth=28, width=4)
MODELS.add("wide_resnet28_10", WideResNet, "WRN-28-10, 32x32 colour", cite=_WRN, depth=28, width=10)
MODELS.add("wide_resnet34_10", WideResNet, "WRN-34-10, 32x32 colour", cite=_WRN, depth=34, width=10)
MODELS.add("wide_resnet34_20", WideResNet, "WRN-34-20, 32x32 colour", cite=_WRN, depth=34, width=20)
MODELS.add("wide_resnet", WideResNet, "WRN of depth 6n+4 and any width, 32x32 colour", cite=_WRN)
MODELS.add(
    "vgg16_bn", VGG, "VGG-16 with BatchNorm and one linear layer, 32x32 colour", cite="arXiv:1409.1556", depth=16
)
MODELS.add(
    "vgg19_bn", VGG, "VGG-19 with BatchNorm and one linear layer, 32x32 colour", cite="arXiv:1409.1556", depth=19
)
MODELS.add("mobilenet_v2", MobileNetV2, "MobileNetV2 in its CIFAR form, 32x32 colour", cite="arXiv:1801.04381")
_VIT = "arXiv:2010.11929"
_BASE = {"depth": 12, "width": 768, "heads": 12, "mlp": 3072}
_LARGE = {"depth": 24, "width": 1024, "heads": 16, "mlp": 4096}
_vit_224 = partial(VisionTransformer, input_shape=(3, 224, 224))
MODELS.add("vit_b16", _vit_224, "ViT-B, 16x16 patches", cite=_VIT, patch=16, stride=16, **_BASE)
MODELS.add("vit_l16", _vit_224, "ViT-L, 16x16 patches", cite=_VIT, patch=16, stride=16, **_LARGE)
MODELS.add("vit_b4", VisionTransformer, "ViT-B, 4x4 patches at stride 2", cite=_VIT, patch=4, stride=2, **_BASE)
MODELS.add("vit_l4", VisionTransformer, "ViT-L, 4x4 patches at stride 2", cite=_VIT, patch=4, stride=2, **_LARGE)
MODELS.add("vit", VisionTransformer, "vision transformer of any size, for the data's images", cite=_VIT)
MODELS.add("hybrid_l16", HybridTransformer, "ViT-L on a ResNet-50 stem with GroupNorm", cite=_VIT, **_LARGE)
MODELS.add("hybrid", HybridTransformer, "transformer of any size on a ResNet-50 stem with GroupNorm", cite=_VIT)
MODELS.add("mnist_cnn", MnistCNN, "7-layer CNN of TRADES, 28x28 grey", cite="arXiv:1901.08573")
MODELS.add("lenet5", LeNet5, "LeNet-5 as used by Madry et al., 28x28 grey", cite="arXiv:1706.06083")
MODELS.add("digits_cnn", DigitsCNN, "3-layer CNN with BatchNorm, 8x8 grey; trains in seconds on a CPU")
MODELS.add("moons_mlp", MoonsMLP, "2-100-100-C dense network for points in the plane")

# (mean, std) per channel of inputs in [0, 1]; a single value serves every channel.
NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "centered": ((0.47,), (0.25,)),
    "symmetric": ((0.5,), (0.5,)),  # inputs in [-1, 1], as vision transformers were trained with
    # Two-moons points are stored as (x + 1.5) / 4 to lie in [0, 1]; this is the way back.
    "moons": ((0.375, 0.375), (0.25, 0.25)),
}


def create_model(
    name: str,
    *,
    num_classes: int = 10,
    normalize: str | tuple[Sequence[float], Sequence[float]] | None = None,
    seed: int = 0,
    **options: Any,
) -> Classifier:
    """Build the network called `name` for inputs in [0, 1], with weights drawn from `seed`.

    `normalize` is a name of NORMALIZATIONS, a pair (mean, std), or None; it happens inside the model, so that attack
    radii stay in pixel units. `options` are the architecture's own (depth and width of `wide_resnet`).
    `module:factory` names a network of your own that ends in an nn.Linear (docs/own_network.md); its options are
    `input_shape` and what the factory takes. torch's global random state is left as it was.
    """
    if is_own(name):
        return _own(name, num_classes, _mean_std(normalize), seed, **options)
    entry = MODELS.entry(name)
    known = [*entry.options(), "normalize", "seed"]
    faults = [unknown(f"option of model {name!r}:", option, known) for option in options if option not in known]
    faults += [f"model {name!r} needs the option {option!r}" for option in _required(entry) if option not in options]
    if isinstance(seed, bool) or not isinstance(seed, int):
        faults.append(f"seed must be an integer, got {seed!r}")
    if faults:
        raise ConfigError.of(faults)
    pair = _mean_std(normalize)
    with kept_global_rng(torch.get_default_device(), seed=Seed(seed).child("model")):
        model = MODELS.make(name, num_classes=num_classes, **options)
    if pair is not None:
        model.set_normalization(*pair)
    return model


def model_defaults(name: str, given: Collection[str]) -> dict[str, Any]:
    """What the architecture's own options are that are not `given`."""
    given = {*given, "num_classes", "input_shape"}  # which the data decide
    if is_own(name):
        return own_defaults(name, given)
    return {option: value for option, value in MODELS.entry(name).defaults().items() if option not in given}


def _own(
    name: str,
    num_classes: int,
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None,
    seed: int,
    *,
    input_shape: Sequence[int] = (),
    **options: Any,
) -> Classifier:
    """What a factory of the user's makes (a copy of it), as a Classifier."""
    shape = tuple(input_shape) if isinstance(input_shape, Sequence) and not isinstance(input_shape, str) else ()
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ConfigError(f"model {name!r} needs the option 'input_shape', such as [3, 32, 32], got {input_shape!r}")
    given = {"num_classes": num_classes, "input_shape": shape}
    network = own_network(name, seed=seed, given=given, **options)
    try:
        model = Adapted(network, input_shape=shape, num_classes=num_classes)
    except FlatrockError:
        raise
    except Exception as error:  # of the user's network, in its first pass
        said = in_words(error)
        raise ConfigError(f"model {name!r} fails on inputs of shape {[2, *shape]}: {said}") from error
    if normalize is not None:
        model.set_normalization(*normalize)
    return model


def _required(entry: Entry[Classifier]) -> list[str]:
    """Options of the architecture that have no default; `create_model` itself gives num_classes."""
    parameters = inspect.signature(entry.make).parameters
    empty = inspect.Parameter.empty
    return [o for o in entry.options() if o != "num_classes" and parameters[o].default is empty]


def _mean_std(normalize: object) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The pair of values per channel that `normalize` stands for."""
    if normalize is None:
        return None
    if isinstance(normalize, str):
        if normalize not in NORMALIZATIONS:
            raise ConfigError(unknown("normalisation", normalize, NORMALIZATIONS))
        return NORMALIZATIONS[normalize]
    try:
        mean, std = (tuple(float(v) for v in values) for values in normalize)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"normalize must be a name ({', '.join(NORMALIZATIONS)}), None, or a pair (mean, std) of number lists "
            f"such as ([0.5], [0.5]); got {normalize!r}"
        ) from error
    if not all(map(math.isfinite, (*mean, *std))) or min(std, default=0.0) <= 0:
        raise ConfigError(f"normalize needs finite means and positive, finite stds, got {normalize!r}")
    return mean, std
