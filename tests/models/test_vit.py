"""Vision transformers against a second version written here, their first weights, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.models.catalog import create_model
from flatrock.models.hybrid_vit import Bottleneck, StdConv, Stem, group_norm
from flatrock.models.twin import faithful, probe_inputs
from flatrock.models.vit import Transformer

TINY: dict[str, Any] = {"depth": 2, "width": 12, "heads": 3, "mlp": 20}
VIT: dict[str, Any] = {**TINY, "patch": 4, "stride": 2, "input_shape": (2, 10, 8), "num_classes": 5}
HYBRID: dict[str, Any] = {**TINY, "input_shape": (3, 32, 32)}


def shaken(name: str, **options: Any) -> Transformer:
    """A network in float64 none of whose parameters is 0 or 1."""
    model = create_model(name, **options).double().eval()
    assert isinstance(model, Transformer)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=Seed(2).child(key).generator(), dtype=p.dtype))
    return model


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=Seed(1).generator(), dtype=torch.float64)


def standardised(x: Tensor, eps: float) -> Tensor:
    """Over the last axis: (x - mean) / sqrt(mean (x - mean)^2 + eps)."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return centred / (centred.square().sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


class Reference:
    """The forward pass of one image, token by token and head by head, from the weights by name."""

    def __init__(self, state: dict[str, Tensor], *, patch: int, stride: int, heads: int, depth: int) -> None:
        self.w, self.patch, self.stride, self.heads, self.depth = state, patch, stride, heads, depth

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return standardised(x, 1e-6) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def tokens(self, image: Tensor) -> Tensor:
        kernel = self.w["patch_embed.proj.weight"].flatten(1)
        places = [range(0, size - self.patch + 1, self.stride) for size in image.shape[1:]]
        cut = [image[:, i : i + self.patch, j : j + self.patch].flatten() for i in places[0] for j in places[1]]
        made = torch.stack([kernel @ pixels + self.w["patch_embed.proj.bias"] for pixels in cut])
        return torch.cat([self.w["cls_token"][0], made]) + self.w["pos_embed"][0]

    def attention(self, name: str, x: Tensor) -> Tensor:
        q, k, v = self.linear(f"{name}.qkv", x).chunk(3, 1)
        size = x.shape[1] // self.heads
        found = []
        for h in range(self.heads):
            of = slice(h * size, (h + 1) * size)
            scores = torch.exp(q[:, of] @ k[:, of].T / math.sqrt(size))
            found.append(scores / scores.sum(1, keepdim=True) @ v[:, of])
        return self.linear(f"{name}.proj", torch.cat(found, 1))

    def __call__(self, image: Tensor) -> Tensor:
        x = self.tokens(image)
        for i in range(self.depth):
            b = f"blocks.{i}"
            x = x + self.attention(f"{b}.attn", self.norm(f"{b}.norm1", x))
            x = x + self.linear(f"{b}.mlp.fc2", gelu(self.linear(f"{b}.mlp.fc1", self.norm(f"{b}.norm2", x))))
        return self.linear("head", self.norm("norm", x)[0])


@pytest.mark.parametrize("stride", [2, 4])
def test_logits_are_those_of_the_reference(stride: int) -> None:
    shape = (2, 10, 8) if stride == 2 else (2, 12, 8)
    model = shaken("vit", **{**VIT, "stride": stride, "input_shape": shape})
    assert model.grid == ((4, 3) if stride == 2 else (3, 2))
    reference = Reference(model.state_dict(), patch=4, stride=stride, heads=3, depth=2)
    x = images(3, *shape)
    true = torch.stack([reference(image) for image in x])
    assert float(true.std()) > 0.1
    torch.testing.assert_close(model(x), true, rtol=1e-12, atol=1e-12)


def test_features_are_the_class_token_and_the_head_is_the_last_step() -> None:
    model = shaken("vit", **VIT)
    seen = model.view(images(2, 2, 10, 8))
    assert torch.equal(seen.logits, model.head(seen.features))
    assert seen.features.shape == (2, 12)


def test_parameters_have_the_names_and_shapes_of_the_field() -> None:
    shapes = {k: list(v.shape) for k, v in create_model("vit", **VIT).state_dict().items()}
    block = {
        **{f"{n}.{p}": [12] for n in ("norm1", "norm2") for p in ("weight", "bias")},
        **{"attn.qkv.weight": [36, 12], "attn.qkv.bias": [36], "attn.proj.weight": [12, 12], "attn.proj.bias": [12]},
        **{"mlp.fc1.weight": [20, 12], "mlp.fc1.bias": [20], "mlp.fc2.weight": [12, 20], "mlp.fc2.bias": [12]},
    }
    assert shapes == {
        **{"cls_token": [1, 1, 12], "pos_embed": [1, 13, 12]},
        **{"patch_embed.proj.weight": [12, 2, 4, 4], "patch_embed.proj.bias": [12]},
        **{f"blocks.{i}.{name}": shape for i in (0, 1) for name, shape in block.items()},
        **{"norm.weight": [12], "norm.bias": [12], "head.weight": [5, 12], "head.bias": [5]},
    }


def test_first_weights() -> None:
    model = create_model("vit", depth=1, width=64, heads=4, patch=4)
    assert not model.get_parameter("cls_token").any()
    assert model.get_parameter("pos_embed").std().item() == pytest.approx(0.02, rel=0.05)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.get_parameter("patch_embed.proj.weight").std().item() == pytest.approx(48**-0.5, rel=0.05)
    qkv = model.get_parameter("blocks.0.attn.qkv.weight")  # three layers of 64 x 64
    assert qkv.abs().max().item() == pytest.approx(math.sqrt(6 / 128), rel=1e-3)
    assert qkv.std().item() == pytest.approx(math.sqrt(2 / 128), rel=0.05)
    fc1 = model.get_parameter("blocks.0.mlp.fc1.weight")
    assert fc1.shape == (256, 64), "four times as wide, where nothing is said"
    assert fc1.abs().max().item() == pytest.approx(math.sqrt(6 / 320), rel=1e-3)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_the_first_attack_has_a_gradient() -> None:
    model = create_model("vit", **VIT)
    x = images(2, 2, 10, 8).float().requires_grad_(True)
    (grad,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    assert bool((grad != 0).all()), "patches at stride 2 leave no pixel out"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit", {"heads": 5}, r"vit width must be a multiple of heads, got width 12 and 5 heads"),
        ("vit", {"depth": 0}, r"vit depth must be a whole number >= 1, got 0"),
        ("vit", {"mlp": 2.5}, r"vit mlp must be a whole number >= 1, got 2\.5"),
        ("vit", {"patch": 16}, r"patches of 16 pixels at stride 2 do not end where 10 pixels do"),
        ("vit", {"stride": 4}, r"patches of 4 pixels at stride 4 do not end where 10 pixels do; choose"),
        ("vit", {"stride": 6}, r"stride must not exceed patch, got stride 6 and patch 4"),
        ("vit", {"input_shape": (True, 10, 10)}, r"input_shape must be such as \[3, 32, 32\]"),
        ("vit", {"input_shape": (2,)}, r"input_shape must be such as \[3, 32, 32\], got \(2,\)"),
        ("vit", {"input_shape": 32}, r"got 32"),
        ("vit_b4", {"depth": 3}, r"unknown option of model 'vit_b4': 'depth'; known: input_shape, normalize"),
        ("hybrid", {"heads": 5}, r"hybrid width must be a multiple of heads"),
        ("hybrid", {"input_shape": (3, 40, 32)}, r"need sides that 16 divides, got 40 x 32 pixels"),
    ],
)
def test_wrong_requests_say_what_and_how(name: str, options: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {"vit": VIT, "hybrid": HYBRID}.get(name, {})
    with pytest.raises(ConfigError, match=message):
        create_model(name, **{**plain, **options})


def test_the_published_sizes_take_other_images_too() -> None:
    with torch.device("meta"):
        small = create_model("vit_b16", input_shape=[3, 32, 32])
        large = create_model("vit_l4", input_shape=(3, 64, 64))
        hybrid = create_model("hybrid_l16", input_shape=(3, 32, 32))
    assert [m.grid for m in (small, large, hybrid) if isinstance(m, Transformer)] == [(2, 2), (31, 31), (2, 2)]


# The stem of hybrid networks


def same_padded(x: Tensor, kernel: int, stride: int, weight: Tensor) -> Tensor:
    """A convolution whose output has ceil(size / stride) places, each a sum over the pixels it sees."""
    n, _, size, _ = x.shape
    out = -(-size // stride)
    before = max((out - 1) * stride + kernel - size, 0) // 2
    made = torch.zeros(n, weight.shape[0], out, out, dtype=x.dtype)
    for i in range(out):
        for j in range(out):
            top, left = i * stride - before, j * stride - before
            rows, columns = range(max(top, 0), min(top + kernel, size)), range(max(left, 0), min(left + kernel, size))
            seen = x[:, :, rows.start : rows.stop, columns.start : columns.stop]
            cut = weight[:, :, rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
            made[:, :, i, j] = seen.flatten(1) @ cut.flatten(1).T
    return made


def filters(weight: Tensor) -> Tensor:
    """(w - mean) / (std + 1e-5) of every filter."""
    rows = weight.flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    return (centred / (centred.square().mean(1, keepdim=True).sqrt() + 1e-5)).view_as(weight)


def grouped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GroupNorm of 32 groups."""
    normal = standardised(x.unflatten(1, (32, -1)).flatten(2), 1e-6).view_as(x)
    return normal * weight[:, None, None] + bias[:, None, None]


@pytest.mark.parametrize(("kernel", "stride"), [(7, 2), (3, 2), (3, 1), (1, 1), (1, 2)])
def test_a_standardised_convolution(kernel: int, stride: int) -> None:
    layer = StdConv(3, 4, kernel, stride=stride).double()
    x = images(2, 3, 8, 8)
    true = same_padded(x, kernel, stride, filters(layer.weight.detach()))
    torch.testing.assert_close(layer(x), true, rtol=1e-10, atol=1e-12)
    with torch.no_grad():  # scale and mean of a filter do not count, but for eps
        layer.weight.mul_(3).add_(1)
    torch.testing.assert_close(layer(x), true, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_bottleneck(stride: int) -> None:
    block = Bottleneck(128 if stride == 1 else 64, 32, stride=stride).double()
    assert not block.norm3.weight.any(), "a block begins as its shortcut"
    for key, p in block.named_parameters():
        p.detach().add_(0.3 * torch.randn(p.shape, generator=Seed(3).child(key).generator(), dtype=p.dtype))
    w = {k: v.detach() for k, v in block.state_dict().items()}

    def step(conv: str, norm: str, x: Tensor, kernel: int, by: int) -> Tensor:
        made = same_padded(x, kernel, by, filters(w[f"{conv}.weight"]))
        return grouped(made, w[f"{norm}.weight"], w[f"{norm}.bias"])

    x = images(2, 128 if stride == 1 else 64, 4, 4) - 0.5
    out = step("conv1", "norm1", x, 1, 1).clamp_min(0)
    out = step("conv2", "norm2", out, 3, stride).clamp_min(0)
    out = step("conv3", "norm3", out, 1, 1)
    shortcut = x if stride == 1 else step("downsample.conv", "downsample.norm", x, 1, 2)
    torch.testing.assert_close(block(x), (out + shortcut).clamp_min(0), rtol=1e-9, atol=1e-10)


def test_the_stem_begins_with_a_pool_that_sees_every_pixel() -> None:
    stem = Stem(3).double()
    seen: list[Tensor] = []
    stem.blocks.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = images(1, 3, 16, 16)
    assert stem(x).shape == (1, 1024, 1, 1)
    before = grouped(same_padded(x, 7, 2, filters(stem.conv.weight.detach())), torch.ones(64), torch.zeros(64))
    before = before.clamp_min(0)
    pooled = [[before[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].amax((2, 3)) for j in range(4)] for i in range(4)]
    torch.testing.assert_close(seen[0], torch.stack([torch.stack(row, -1) for row in pooled], -2), rtol=1e-9, atol=0)
    assert group_norm(64).num_groups == 32


def test_hybrid_tokens_are_places_of_the_map() -> None:
    model = shaken("hybrid", **HYBRID)
    x = images(1, 3, 32, 32)
    stem, proj = model.get_submodule("patch_embed.backbone"), model.get_submodule("patch_embed.proj")
    places = stem(x)[0].flatten(1).T
    assert places.shape == (4, 1024)
    assert isinstance(proj.weight, Tensor)
    assert isinstance(proj.bias, Tensor)
    tokens = places @ proj.weight[:, :, 0, 0].T + proj.bias
    torch.testing.assert_close(model.patch_embed(x)[0], tokens, rtol=1e-9, atol=1e-9)


# What a GPU's engine makes of them


@pytest.mark.parametrize(("name", "options"), [("vit", VIT), ("hybrid", HYBRID)])
def test_the_fast_copy_is_traced_and_follows(name: str, options: dict[str, Any]) -> None:
    model = create_model(name, **options).eval()
    x = probe_inputs(model)[:4]
    twin = faithful(model, x)
    assert twin.plain
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=Seed(4).generator()))
        twin.follow()
        true = model(x)
        assert float((twin(x) - true).abs().max()) < 0.02 * float(true.abs().max())


@pytest.mark.parametrize(("name", "options"), [("vit", VIT), ("hybrid", HYBRID)])
def test_channels_last_leaves_tokens_alone(name: str, options: dict[str, Any]) -> None:
    model = shaken(name, **options)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert all(p.is_contiguous() for p in other.parameters() if p.dim() != 4)
    assert other.get_parameter("patch_embed.proj.weight").is_contiguous(memory_format=torch.channels_last)
    x = images(2, *model.input_shape)
    torch.testing.assert_close(other(x.contiguous(memory_format=torch.channels_last)), model(x), rtol=1e-9, atol=1e-9)
