"""create_model: seeds, normalisation, initial weights and messages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.models.catalog import MODELS, create_model


def weights(name: str, **options: object) -> dict[str, Tensor]:
    return create_model(name, **options).state_dict()  # type: ignore[arg-type]


def test_same_seed_same_weights_and_other_seed_others() -> None:
    one, two, other = (weights("digits_cnn", seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_weights_do_not_depend_on_the_global_generator_nor_move_it() -> None:
    first = weights("moons_mlp", num_classes=2)
    torch.rand(7)
    before = torch.get_rng_state()
    second = weights("moons_mlp", num_classes=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_global_generator_is_given_back_on_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        create_model("digits_cnn", num_classes=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("cifar10", ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))),
        ("cifar100", ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))),
        ("svhn", ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))),
        ("centered", ((0.47,), (0.25,))),
    ],
)
def test_normalisation_inside_equals_the_published_one_outside(
    name: str, published: tuple[tuple[float, ...], tuple[float, ...]]
) -> None:
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inside = create_model("resnet20", normalize=name).eval()
    plain = create_model("resnet20").eval()
    mean, std = (torch.tensor(v).reshape(1, -1, 1, 1) for v in published)
    assert torch.equal(inside(x), plain((x - mean) / std))
    assert not torch.equal(inside(x), plain(x))


def test_moons_normalisation_undoes_the_storage() -> None:
    points = torch.tensor([[-1.5, 0.0], [0.3, 2.5], [1.0, -0.5]])
    inside = create_model("moons_mlp", num_classes=2, normalize="moons")
    plain = create_model("moons_mlp", num_classes=2)
    torch.testing.assert_close(inside((points + 1.5) / 4), plain(points), rtol=1e-6, atol=1e-6)


def test_normalisation_as_a_pair_of_lists() -> None:
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    pair = create_model("digits_cnn", normalize=([0.3], [0.4])).eval()
    assert torch.equal(pair(x), create_model("digits_cnn").eval()((x - 0.3) / 0.4))


def test_normalisation_travels_with_the_weights() -> None:
    source = create_model("resnet20", normalize="centered", seed=1)
    target = create_model("resnet20", normalize="cifar10", seed=2)
    target.load_state_dict(source.state_dict())
    assert target.mean is not None
    assert target.mean.flatten().tolist() == pytest.approx([0.47] * 3)
    source.load_state_dict(create_model("resnet20", normalize="cifar10").state_dict())
    assert source.mean is not None
    assert source.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*mean"):
        create_model("resnet20").load_state_dict(source.state_dict())


def test_wide_resnet_initialisation() -> None:
    model = create_model("wide_resnet", depth=10, width=8)
    last = model.get_parameter("blocks.2.conv2.weight")
    assert last.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)
    assert last.mean().item() == pytest.approx(0, abs=1e-4)
    widening = model.get_parameter("blocks.2.shortcut.weight")
    assert widening.std().item() == pytest.approx(math.sqrt(2 / 512), rel=0.01)
    assert not model.head.bias.any()
    assert model.head.weight.any()


def test_thin_resnet_and_default_initialisation() -> None:
    thin = create_model("resnet20").get_parameter("blocks.8.conv2.weight")
    assert thin.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.02)
    default = create_model("preact_resnet18").get_parameter("blocks.7.conv2.weight")
    bound = 1 / math.sqrt(9 * 512)
    assert default.abs().max().item() == pytest.approx(bound, rel=1e-5)
    assert default.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_mnist_cnn_initialisation() -> None:
    model = create_model("mnist_cnn")
    assert not model.head.weight.any()
    assert not model.head.bias.any()
    assert model.get_parameter("conv4.weight").std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.02)


def test_batch_norm_starts_at_identity() -> None:
    for module in create_model("mobilenet_v2").modules():
        if isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 1).all())
            assert not module.bias.any()


def test_summaries_are_single_lines() -> None:
    assert all(entry.summary and "\n" not in entry.summary for entry in MODELS)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("preact_resnet8", {}, r"unknown model 'preact_resnet8'; known: .*did you mean 'preact_resnet18'"),
        ("digits_cnn", {"widht": 3}, r"option of model 'digits_cnn': 'widht'; known: normalize, num_classes, seed"),
        ("digits_cnn", {"normalise": "cifar10"}, r"did you mean 'normalize'"),
        ("wide_resnet28_10", {"depth": 34}, r"unknown option of model 'wide_resnet28_10': 'depth'"),
        ("wide_resnet", {"depth": 28}, r"'wide_resnet' needs the option 'width'"),
        ("wide_resnet", {"depth": 30, "width": 2}, r"depth must be an integer 6n \+ 4 with n >= 1, got 30; use .*28"),
        ("wide_resnet", {"depth": 4, "width": 2}, r"6n \+ 4 with n >= 1, got 4"),
        ("wide_resnet", {"depth": "28", "width": 2}, r"got '28'"),
        ("wide_resnet", {"depth": 10, "width": 0}, r"width must be an integer of at least 1, got 0"),
        ("resnet_cifar", {"depth": 18}, r"6n \+ 2 with n >= 1, got 18; use one of 8, 14, 20"),
        ("digits_cnn", {"num_classes": 1}, r"num_classes must be an integer of at least 2, got 1"),
        ("digits_cnn", {"num_classes": True}, r"got True"),
        ("digits_cnn", {"num_classes": 10.0}, r"got 10\.0"),
        ("digits_cnn", {"seed": "0"}, r"seed must be an integer, got '0'"),
        ("digits_cnn", {"normalize": "cifar10"}, r"mean has 3 values but DigitsCNN takes 1 channel"),
        ("resnet20", {"normalize": "cifar"}, r"unknown normalisation 'cifar'; .*did you mean 'cifar10'"),
        ("resnet20", {"normalize": ([0.5, 0.5], [0.5])}, r"mean has 2 values but CifarResNet takes 3"),
        ("resnet20", {"normalize": ([0.5], [0.5, 0.5])}, r"std has 2 values but CifarResNet takes 3"),
        ("resnet20", {"normalize": (0.5, 0.5)}, r"pair \(mean, std\) of number lists .*got \(0\.5, 0\.5\)"),
        ("resnet20", {"normalize": ([0.5],)}, r"pair \(mean, std\)"),
        ("resnet20", {"normalize": ([0.5], [0.0])}, r"positive, finite stds"),
        ("resnet20", {"normalize": ([0.5], [])}, r"positive, finite stds"),
        ("resnet20", {"normalize": ([float("nan")], [1.0])}, r"finite means"),
    ],
)
def test_wrong_requests_say_what_and_how(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_model(name, **options)  # type: ignore[arg-type]


def test_all_option_faults_are_listed() -> None:
    with pytest.raises(ConfigError) as error:
        create_model("wide_resnet", depht=28, width=10, colour=3)
    text = str(error.value)
    assert "did you mean 'depth'" in text
    assert "'colour'" in text
    assert "needs the option 'depth'" in text
