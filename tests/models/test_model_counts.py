"""Parameter counts, layer counts and shapes, all on the meta device: no memory, no arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatrock.models.catalog import MODELS, create_model
from flatrock.models.classifier import Classifier

# name, classes, parameters, tensors with more than one axis, their numel (None: not published), BatchNorms, features
ROWS = [
    ("preact_resnet18", 10, 11_172_170, 21, 11_164_352, 17, 512),
    ("resnet18", 10, 11_173_962, 21, 11_164_352, 20, 512),
    ("wide_resnet34_10", 10, 46_160_474, 35, 46_138_032, 31, 640),
    ("wide_resnet28_10", 10, 36_479_194, 29, 36_461_232, 25, 640),
    ("wide_resnet28_4", 10, 5_849_050, 29, None, 25, 256),
    ("wide_resnet34_20", 10, 184_531_674, 35, None, 31, 1280),
    ("vgg16_bn", 10, 14_728_266, 14, 14_715_584, 13, 512),
    ("vgg19_bn", 10, 20_040_522, 17, 20_024_000, 16, 512),
    ("mobilenet_v2", 10, 2_296_922, 58, 2_261_824, 57, 1280),
    ("resnet20", 10, 272_474, 22, 270_896, 21, 64),
    ("vit_b16", 1000, 86_567_656, 52, None, 0, 768),
    ("vit_l16", 1000, 304_326_632, 100, None, 0, 1024),
    ("vit_b4", 10, 85_275_658, 52, None, 0, 768),
    ("vit_l4", 10, 302_604_298, 100, None, 0, 1024),
    ("hybrid_l16", 1000, 316_483_624, 152, None, 0, 1024),
    ("mnist_cnn", 10, 312_202, 7, None, 0, 200),
    ("lenet5", 10, 3_274_634, 4, None, 0, 1024),
    ("digits_cnn", 10, 24_058, 4, 23_824, 3, 64),
    ("moons_mlp", 2, 10_602, 3, 10_400, 0, 100),
]


def on_meta(name: str, classes: int) -> Classifier:
    with torch.device("meta"):
        return create_model(name, num_classes=classes)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "classes", "total", "tensors", "numel", "norms", "width"), ROWS, ids=str)
def test_counts_and_shapes(
    name: str, classes: int, total: int, tensors: int, numel: int | None, norms: int, width: int
) -> None:
    model = on_meta(name, classes)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    assert parameters(model) == total
    assert len(matrices) == tensors
    if numel is not None:
        assert sum(p.numel() for p in matrices) == numel
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == norms
    view = model.view(torch.empty(2, *model.input_shape, device="meta"))
    assert view.features.shape == (2, width)
    assert view.logits.shape == (2, classes)
    assert model.head.in_features == width


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("preact_resnet18", 11_218_340),
        ("wide_resnet34_10", 46_218_164),
        ("wide_resnet28_10", 36_536_884),
        ("mobilenet_v2", 2_412_212),
        ("vit_b4", 85_344_868),
        ("vit_l4", 302_696_548),
    ],
)
def test_counts_for_100_classes(name: str, total: int) -> None:
    assert parameters(on_meta(name, 100)) == total


def test_every_fixed_model_has_a_row() -> None:
    assert {row[0] for row in ROWS} == set(MODELS.names()) - {"wide_resnet", "resnet_cifar", "vit", "hybrid"}


def test_parametric_names_give_the_fixed_ones() -> None:
    with torch.device("meta"):
        wide = create_model("wide_resnet", depth=28, width=4)
        thin = create_model("resnet_cifar", depth=20)
        deeper = create_model("resnet_cifar", depth=56)
    assert parameters(wide) == 5_849_050
    assert parameters(thin) == 272_474
    # ResNet-56 adds six blocks of two 3x3 convolutions and two BatchNorms to each group.
    assert parameters(deeper) == 272_474 + sum(6 * (2 * 9 * w * w + 4 * w) for w in (16, 32, 64))


def test_the_stem_of_the_hybrid_network() -> None:
    assert parameters(on_meta("hybrid_l16", 10).get_submodule("patch_embed.backbone")) == 11_894_848


@pytest.mark.parametrize(
    ("name", "maps"), [("preact_resnet18", 4), ("resnet18", 4), ("mobilenet_v2", 4), ("resnet20", 8)]
)
def test_size_of_the_last_map(name: str, maps: int) -> None:
    model = on_meta(name, 10)
    sizes: list[int] = []
    blocks = model.get_submodule("blocks")
    with torch.no_grad():
        blocks.register_forward_hook(lambda _m, _i, out: sizes.append(out.shape[-1]))
        model(torch.empty(2, 3, 32, 32, device="meta"))
    assert sizes == [maps]


class Tally(TorchFunctionMode):
    """Counts torch functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "relus", "pools"),
    [
        ("preact_resnet18", 17, 0),
        ("resnet18", 17, 0),
        ("wide_resnet28_10", 25, 0),
        ("vgg16_bn", 13, 5),
        ("vgg19_bn", 16, 5),
        ("mobilenet_v2", 36, 0),
        ("resnet20", 19, 0),
        ("vit_b4", 0, 0),
        ("hybrid_l16", 49, 1),
        ("mnist_cnn", 6, 2),
        ("lenet5", 3, 2),
        ("digits_cnn", 3, 1),
        ("moons_mlp", 2, 0),
    ],
)
def test_activations_and_pools_happen(name: str, relus: int, pools: int) -> None:
    model = on_meta(name, 10)
    with Tally() as tally:
        model(torch.empty(2, *model.input_shape, device="meta"))
    assert tally.calls["relu"] == relus
    assert tally.calls["max_pool2d"] == pools
    assert tally.calls["relu_"] == 0
