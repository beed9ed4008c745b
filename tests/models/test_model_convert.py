"""Foreign state dicts: our converted network gives the logits of theirs, and what does not fit is named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from foreign_nets import GreyCnn, LayeredResNet, Mobile, PlainVgg, Shift, WideNet, randomised
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.models.convert import FAMILIES, Converted, convert

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
NETS: dict[str, Callable[[], nn.Module]] = {
    "preact_resnet18": lambda: LayeredResNet(pre=True),
    "resnet18": lambda: LayeredResNet(pre=False, classes=7),
    "vgg16_bn": lambda: PlainVgg(classes=5),
    "mobilenet_v2": lambda: Mobile(classes=100),
    "mnist_cnn": GreyCnn,
    "wide_resnet": lambda: WideNet(16, 2, classes=3),
}


def images(shape: tuple[int, ...] = (3, 32, 32)) -> Tensor:
    return torch.rand(2, *shape, generator=Seed(1).generator(), dtype=torch.float64)


def rebuilt(converted: Converted) -> Classifier:
    """Our network in float64, with the converted weights."""
    model = create_model(
        converted.model_name,
        num_classes=converted.num_classes,
        normalize=converted.normalize,
        **converted.options,
    )
    model = model.double().eval()
    model.load_state_dict(converted.state)
    return model


def gap(ours: nn.Module, theirs: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        a, b = ours(x), theirs(x)
    assert a.shape == b.shape
    assert float(b.std()) > 1e-3, "logits that are all alike would prove nothing"
    return float((a - b).abs().max() / b.abs().max())


@pytest.fixture
def wide() -> nn.Module:
    return randomised(WideNet(10, 1))


@pytest.mark.parametrize("name", NETS)
def test_converted_network_gives_the_same_logits(name: str) -> None:
    theirs = randomised(NETS[name]())
    converted = convert(theirs.state_dict())
    assert converted.model_name == name
    assert converted.normalize is None
    assert converted.family in FAMILIES
    ours = rebuilt(converted)
    x = images(ours.input_shape)
    assert converted.num_classes == theirs(x).shape[1]
    assert gap(ours, theirs, x) < 1e-12


def test_every_family_is_tested() -> None:
    with torch.device("meta"):
        assert {convert(make().state_dict()).family for make in NETS.values()} == set(FAMILIES)


@pytest.mark.parametrize(("width", "idle"), [(1, False), (1, True), (3, True)])
def test_wide_network_with_a_group_that_is_never_called(width: int, idle: bool) -> None:
    theirs = randomised(WideNet(10, width, idle_group=idle))
    assert any(k.startswith("sub_block1.") for k in theirs.state_dict()) == idle
    converted = convert(theirs.state_dict())
    assert converted.options == {"depth": 10, "width": width}
    assert gap(rebuilt(converted), theirs, images()) < 1e-12


@pytest.mark.parametrize(
    ("depth", "width", "name", "options"),
    [
        (34, 10, "wide_resnet34_10", {}),
        (28, 10, "wide_resnet28_10", {}),
        (28, 4, "wide_resnet28_4", {}),
        (34, 20, "wide_resnet34_20", {}),
        (70, 16, "wide_resnet", {"depth": 70, "width": 16}),
    ],
)
def test_depth_and_width_are_read_from_names_and_shapes(
    depth: int, width: int, name: str, options: dict[str, int]
) -> None:
    with torch.device("meta"):
        converted = convert(WideNet(depth, width, classes=100, idle_group=True).state_dict())
    assert (converted.model_name, converted.options, converted.num_classes) == (name, options, 100)


def test_deeper_vgg_is_told_by_its_convolutions() -> None:
    with torch.device("meta"):
        assert convert(PlainVgg((2, 2, 4, 4, 4)).state_dict()).model_name == "vgg19_bn"
        with pytest.raises(ConfigError, match=r"VGG of depth 13, and flatrock has vgg16_bn and vgg19_bn"):
            convert(PlainVgg((2, 2, 2, 2, 2)).state_dict())


# Wrapping


def inside(net: nn.Module) -> nn.Module:
    """The network with mu and sigma among its own buffers, as RobustBench keeps them."""
    net.register_buffer("mu", torch.tensor(MEAN, dtype=torch.float64).reshape(1, 3, 1, 1))
    net.register_buffer("sigma", torch.tensor(STD, dtype=torch.float64).reshape(1, 3, 1, 1))
    return net


def before(net: nn.Module, shift: str, body: str) -> nn.Module:
    layer = Shift(MEAN, STD, names=("mean", "std"))
    return nn.Sequential(OrderedDict([(shift, layer), (body, net)])).double().eval()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: before(net, "normalize", "model"),
        lambda net: before(net, "0", "1"),
        lambda net: before(net, "normalizer", "module"),
    ],
)
def test_normalisation_layer_before_the_network_becomes_ours(
    wrap: Callable[[nn.Module], nn.Module], wide: nn.Module
) -> None:
    theirs = wrap(wide)
    converted = convert(theirs.state_dict())
    assert converted.normalize is not None
    assert converted.normalize[0] == pytest.approx(MEAN)
    assert gap(rebuilt(converted), theirs, images()) < 1e-12


def test_mu_and_sigma_become_our_normalisation(wide: nn.Module) -> None:
    converted = convert(inside(wide).state_dict())
    assert converted.normalize == (MEAN, STD)
    mean, std = (torch.tensor(v, dtype=torch.float64).reshape(1, 3, 1, 1) for v in (MEAN, STD))
    x = images()
    assert gap(rebuilt(converted), wide, x) > 1e-3, "normalisation must matter"
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(converted)(x), wide((x - mean) / std), rtol=0, atol=1e-12)


def test_one_value_of_mean_and_std_serves_every_channel(wide: nn.Module) -> None:
    state = {**wide.state_dict(), "mean": torch.tensor([0.5]), "std": torch.tensor([0.25])}
    ours = rebuilt(convert(state))
    x = images()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), wide((x - 0.5) / 0.25), rtol=0, atol=1e-12)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.model."])
def test_prefixes_are_taken_off(prefix: str, wide: nn.Module) -> None:
    state = {prefix + k: v for k, v in wide.state_dict().items()}
    assert gap(rebuilt(convert(state)), wide, images()) < 1e-12
    with_mean = {**state, f"{prefix}mu": torch.tensor(MEAN), f"{prefix}sigma": torch.tensor(STD)}
    assert convert(with_mean).normalize is not None


def test_averaged_model_of_torch(wide: nn.Module) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(wide)
    assert "n_averaged" in averaged.state_dict()
    assert gap(rebuilt(convert(averaged.state_dict())), wide, images()) < 1e-12


def test_files_without_batch_counters_are_whole(wide: nn.Module) -> None:
    state = {k: v for k, v in wide.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert len(state) < len(wide.state_dict())
    assert gap(rebuilt(convert(state)), wide, images()) < 1e-12


def test_the_state_given_is_not_changed(wide: nn.Module) -> None:
    state = inside(wide).state_dict()
    copy = {k: v.clone() for k, v in state.items()}
    convert(state)
    assert state.keys() == copy.keys()
    assert all(torch.equal(state[k], copy[k]) for k in copy)


# Refusals


def test_missing_extra_and_misshapen_are_named_at_once(wide: nn.Module) -> None:
    state = dict(wide.state_dict())
    del state["block2.layer.0.conv2.weight"]
    state["block9.odd"] = torch.zeros(1)
    state["fc.bias"] = torch.zeros(11)
    with pytest.raises(ConfigError) as error:
        convert(state)
    text = str(error.value)
    assert "WideResNet of TRADES (wide_resnet)" in text
    assert "missing (1): block2.layer.0.conv2.weight" in text
    assert "extra (1): block9.odd" in text
    assert "misshapen (1): fc.bias is [11], not [10]" in text


def test_half_a_normalisation_is_not_one(wide: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"extra \(1\): mu"):
        convert({**wide.state_dict(), "mu": torch.tensor(MEAN)})


@pytest.mark.parametrize(
    ("std", "text"),
    [
        ((0.0, 1.0, 1.0), "stds finite and positive"),
        ((1.0, float("nan"), 1.0), "stds finite and positive"),
        ((), "stds finite and positive"),
        ((1.0, 1.0), "takes 3"),
    ],
)
def test_stored_normalisation_that_is_none(std: tuple[float, ...], text: str, wide: nn.Module) -> None:
    with pytest.raises(ConfigError, match=text):
        convert({**wide.state_dict(), "mean": torch.tensor(MEAN), "std": torch.tensor(std)})


def test_more_blocks_than_ours_are_extra() -> None:
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match=r"extra \(\d+\): layer1.2.conv1.weight; .* and \d+ more"),
    ):
        convert(LayeredResNet(pre=False, blocks=3).state_dict())


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            ("init_conv.weight", "layer.0.block.0.conv_0.weight", "logits.weight"),
            "DeepMind's code, which pads unevenly",
        ),
        (("conv_2d.weight", "layer_0.0.conv_2d_1.weight", "logits.weight"), "PreActResNet of DeepMind"),
        (
            ("conv1.weight", "bn1.weight", "layer1.0.conv2.weight", "layer1.0.conv3.weight", "linear.weight"),
            "bottleneck",
        ),
        (("conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "fc.weight"), "torchvision's names"),
        (("features.0.weight", "classifier.0.weight"), "several linear layers"),
        (("conv1.weight", "head.weight"), "flatrock's own names; say which network with --model NAME"),
        (("blob.a", "blob.b"), r"\(blob.a, blob.b, ...\) have the names of no family .*PreActResNet-18 of AWP"),
    ],
)
def test_what_cannot_be_converted_says_why_and_what_to_do(names: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        convert({name: torch.zeros(4, 4) for name in names})
    assert "--model" in str(error.value)


def test_preact_network_without_last_batch_norm_is_another_network() -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match="without BatchNorm before its linear layer"):
        convert(LayeredResNet(pre=True, last_bn=False).state_dict())


def test_any_damage_to_shapes_and_names_is_a_message() -> None:
    """Whatever is taken out or reshaped, the answer is a ConfigError and never a network or a crash."""
    with torch.device("meta"):
        for make in NETS.values():
            whole = make().state_dict()
            names = [k for k in whole if not k.endswith("num_batches_tracked")]
            for victim in (names[0], names[len(names) // 2], names[-2]):
                for shape in ((), (3, 3), None):
                    state = {k: v for k, v in whole.items() if k != victim or shape is not None}
                    if shape is not None:
                        state[victim] = torch.zeros(shape)
                    with pytest.raises(ConfigError):
                        convert(state)
