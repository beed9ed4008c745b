"""Which parameters are chosen, and the noise put on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from flatrock.core.borrow import nudged
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.rng import Seed
from flatrock.flatness.tensors import TENSORS, chosen, noise
from flatrock.models.catalog import create_model


class Odd(nn.Module):
    """One of each: convolutions, norms, an embedding, a free matrix, attention, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.conv_norm = nn.BatchNorm2d(3)  # its name says conv, but it is none
        self.stem = nn.Conv2d(1, 3, 3)
        self.up = nn.ConvTranspose1d(3, 3, 2)
        self.norm = nn.LayerNorm([3, 2])  # two-dimensional, but no matrix of a layer
        self.attention = nn.MultiheadAttention(3, 1)
        self.position = nn.Parameter(torch.zeros(1, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(3, 4)


def test_choices() -> None:
    model = Odd()
    conv = ["stem.weight", "up.weight"]
    weights = [*conv, "attention.in_proj_weight", "attention.out_proj.weight", "head.weight"]
    extra = ["table.weight", "norm.weight", "norm.bias", "position"]
    assert list(chosen(model, "conv")) == conv
    assert list(chosen(model, "weights")) == weights
    assert set(chosen(model, "matrices")) == {*weights, *extra}
    assert list(chosen(model, "all")) == [n for n, _ in model.named_parameters()]
    assert list(chosen(model, "conv_named")) == ["conv_norm.weight", "conv_norm.bias"], "a name is only a name"
    assert list(TENSORS) == ["weights", "conv", "conv_named", "matrices", "all"]


@pytest.mark.parametrize("which", TENSORS)
def test_parameters_come_under_their_names(which: str) -> None:
    model = create_model("digits_cnn")
    found = chosen(model, which)
    assert all(model.get_parameter(name) is p for name, p in found.items())


def test_network_of_the_catalog() -> None:
    model = create_model("preact_resnet18")
    assert len(chosen(model, "conv")) == 20  # 17 of 3x3 and the three 1x1 shortcuts
    assert chosen(model, "weights").keys() - chosen(model, "conv").keys() == {"head.weight"}


def test_what_the_rule_of_rats_code_takes() -> None:
    """conv in the name: of networks of the catalog all convolutions but those of shortcuts, of VGG none."""
    networks = {"preact_resnet18": (20, 3), "mobilenet_v2": (57, 4), "wide_resnet34_10": (34, 3)}
    for name, (all_of_them, shortcuts) in networks.items():
        with torch.device("meta"):
            model = create_model(name)
        conv, named = chosen(model, "conv"), chosen(model, "conv_named")
        assert (len(conv), len(named)) == (all_of_them, all_of_them - shortcuts)
        assert named.keys() < conv.keys()
        assert all("shortcut" in n for n in conv.keys() - named.keys())
    # The official network calls its shortcuts convShortcut, so that its noise is `conv` here.
    assert sum(p.numel() for p in conv.values()) == 46_131_632
    with pytest.raises(ModelError, match="VGG has no trainable parameter that 'conv_named' stands for"):
        chosen(create_model("vgg16_bn"), "conv_named")


def test_attention_with_widths_of_its_own_has_three_matrices() -> None:
    model = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True)
    matrices = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
    assert list(chosen(model, "weights")) == matrices


MADE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), "parametrizations.weight.original1"),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), "parametrizations.weight.original"),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), "parametrizations.weight.original"),
    "both": (
        lambda: parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(3, 4))),
        "parametrizations.weight.original1",
    ),
    "older weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(3, 4)), "weight_v"),
    "older spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 4)), "weight_orig"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.3), "weight_orig"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", MADE)
def test_of_a_computed_weight_what_it_is_proportional_to(kind: str) -> None:
    make, origin = MADE[kind]
    layer = make().train()
    model = nn.Sequential(nn.Linear(3, layer.in_features), layer, nn.Linear(4, 2))
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert list(chosen(model, "weights")) == ["0.weight", f"1.{origin}", "2.weight"]
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert layer.training
    model.eval()
    shift = {f"1.{origin}": noise(model, "weights", 0.5, Seed(1))[f"1.{origin}"]}
    x = torch.ones(2, 3)
    plain = model(x)
    with nudged(model, shift):
        assert not torch.allclose(model(x), plain, atol=1e-3)
    layer.get_parameter(origin).requires_grad_(False)
    if kind not in ("weight_norm", "older weight_norm", "both"):  # those have lengths left to train
        assert list(chosen(model, "weights")) == ["0.weight", "2.weight"]


def test_convolutions_and_attention_with_computed_weights() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(1, 3, 3)), nn.ConvTranspose2d(3, 2, 3))
    parametrizations.spectral_norm(model[1])
    names = ["0.parametrizations.weight.original1", "1.parametrizations.weight.original"]
    assert list(chosen(model, "conv")) == list(chosen(model, "weights")) == names
    attention = parametrizations.weight_norm(nn.MultiheadAttention(4, 2), "in_proj_weight")
    found = ["parametrizations.in_proj_weight.original1", "out_proj.weight"]
    assert sorted(chosen(attention, "weights")) == sorted(found)


class LowRank(nn.Module):
    """weight = A B."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight[:, :1].clone(), weight[:1].clone()


def test_weights_computed_from_other_shapes_are_refused_by_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parametrize.register_parametrization(model[1], "weight", LowRank())
    with pytest.raises(
        ModelError,
        match=r"layer '1' computes its weight of shape \(2, 4\) from parameters of other shapes \(\(2, 1\), \(1, 4\)\)"
        r".* choose 'matrices' or 'all'",
    ):
        chosen(model, "weights")
    assert len(chosen(model, "matrices")) == 3
    model[1].requires_grad_(False)
    assert list(chosen(model, "weights")) == ["0.weight"]


def test_a_weight_that_is_a_buffer_is_not_moved() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fixed = model[0].weight.detach()
    del model[0].weight
    model[0].register_buffer("weight", fixed)
    assert list(chosen(model, "weights")) == ["1.weight"]


def test_frozen_parameters_are_left_out() -> None:
    model = create_model("digits_cnn")
    model.get_parameter("conv2.weight").requires_grad_(False)
    for which in TENSORS:
        assert "conv2.weight" not in chosen(model, which)
        assert "conv1.weight" in chosen(model, which)


def test_shared_parameters_are_listed_once_under_their_first_name() -> None:
    model = Odd()
    model.head.weight = model.table.weight  # tied as in language models; the first name is the embedding's
    for which in ("weights", "matrices", "all"):
        assert "table.weight" in chosen(model, which)
        assert "head.weight" not in chosen(model, which)
    twice = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    twice[1] = twice[0]
    assert list(chosen(twice, "weights")) == ["0.weight"]


def test_a_single_layer_is_a_model() -> None:
    assert list(chosen(nn.Linear(2, 3), "weights")) == ["weight"]


@pytest.mark.parametrize("which", TENSORS)
def test_nothing_to_choose(which: str) -> None:
    with pytest.raises(ModelError, match=rf"ReLU has no trainable parameter that '{which}' stands for.*matrices"):
        chosen(nn.ReLU(), which)


def test_no_convolution_is_an_error_that_names_the_model() -> None:
    with pytest.raises(ModelError, match=r"MoonsMLP .*'conv'"):
        chosen(create_model("moons_mlp"), "conv")
    with pytest.raises(ModelError, match="MoonsMLP"):
        noise(create_model("moons_mlp"), "conv", 0.1, Seed(0))


def test_unknown_choice_lists_the_choices() -> None:
    known = "all, conv, conv_named, matrices, weights"
    with pytest.raises(ConfigError, match=rf"tensors 'weight'; known: {known}; .*'weights'"):
        chosen(nn.Linear(2, 2), "weight")


# Noise


def flat(shift: object) -> Tensor:
    assert isinstance(shift, Mapping)
    return torch.cat([v.flatten() for v in shift.values()])


@pytest.mark.parametrize("sigma", [1e-4, 0.01, 3.0])
def test_noise_is_gaussian_with_the_standard_deviation_asked_for(sigma: float) -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 200))
    z = flat(noise(model, "weights", sigma, Seed(1))).double() / sigma
    n = len(z)
    assert n == 120_000
    # Five standard errors of the mean, variance, skewness and fourth moment of n normal numbers.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float(z.pow(power).mean()) - moment) < 5 * (variance / n) ** 0.5


def test_noise_of_two_tensors_is_independent() -> None:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    a, b = noise(model, "weights", 1.0, Seed(1)).values()
    assert abs(float((a * b).mean())) < 5 / 200


def test_noise_fits_its_parameters() -> None:
    model = create_model("digits_cnn").double()
    model.get_parameter("conv1.weight").data = model.get_parameter("conv1.weight").data.float()
    shift = noise(model, "conv", 0.1, Seed(0))
    assert list(shift) == ["conv1.weight", "conv2.weight", "conv3.weight"]
    for name, delta in shift.items():
        p = model.get_parameter(name)
        assert (delta.shape, delta.dtype, delta.device) == (p.shape, p.dtype, p.device)
        assert not delta.requires_grad


def test_noise_depends_on_seed_and_name_only() -> None:
    model, other = create_model("digits_cnn", seed=0), create_model("digits_cnn", seed=1)
    first = noise(model, "weights", 0.1, Seed(5))
    assert torch.equal(flat(first), flat(noise(other, "weights", 0.1, Seed(5))))
    assert not torch.equal(flat(first), flat(noise(model, "weights", 0.1, Seed(6))))
    conv = noise(model, "conv", 0.1, Seed(5))
    assert all(torch.equal(first[name], conv[name]) for name in conv)
    scalar = noise(Odd(), "all", 0.1, Seed(5))["scale"]
    assert scalar.shape == ()


def test_noise_leaves_the_model_and_the_global_random_state_alone() -> None:
    model = create_model("digits_cnn")
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    noise(model, "all", 0.1, Seed(0))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_no_noise_moves_nothing() -> None:
    assert noise(nn.ReLU(), "weights", 0.0, Seed(0)) == {}


def test_noise_is_the_same_each_time_and_in_every_layout() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3))
    first = noise(model, "weights", 0.1, Seed(5))
    assert torch.equal(first["0.weight"], first["0.weight"])
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert torch.equal(noise(model, "weights", 0.1, Seed(5))["0.weight"], first["0.weight"])


def test_noise_is_drawn_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    drawn: list[tuple[int, ...]] = []
    draw = Tensor.normal_

    def counted(self: Tensor, *args: object, **options: object) -> Tensor:
        drawn.append(tuple(self.shape))
        return draw(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Tensor, "normal_", counted)
    shift = noise(model, "weights", 0.1, Seed(5))
    assert len(shift) == 2
    assert list(shift) == ["0.weight", "1.weight"]
    assert "0.weight" in shift
    assert "0.bias" not in shift
    assert drawn == []
    assert shift["1.weight"].shape == (2, 4)
    assert drawn == [(2, 4)]
