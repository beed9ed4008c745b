"""Weights to begin with: what is resized for other images, what becomes of the head, what is kept, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.models.adapted import Adapted
from flatrock.models.catalog import create_model
from flatrock.models.pretrained import fitted, load_pretrained, of_file
from flatrock.models.vit import Transformer
from flatrock.models.weights import Weights

SIZES: dict[str, Any] = {"depth": 1, "width": 6, "heads": 2, "mlp": 8}
KERNEL, POSITIONS = "patch_embed.proj.weight", "pos_embed"


def vit(*, seed: int = 0, **options: Any) -> Transformer:
    keys: dict[str, Any] = {**SIZES, "patch": 16, "input_shape": (3, 224, 224)}
    model = create_model("vit", seed=seed, **{**keys, **options})
    assert isinstance(model, Transformer)
    return model


def cifar(**options: Any) -> Transformer:
    return vit(seed=1, **{"patch": 4, "stride": 2, "input_shape": (3, 32, 32), "num_classes": 7, **options})


def shaken(model: Transformer) -> dict[str, Tensor]:
    """Weights of which none is what it was drawn as."""
    drawn = {k: torch.randn(v.shape, generator=Seed(9).child(k).generator()) for k, v in model.state_dict().items()}
    return {k: v + 0.5 * drawn[k] for k, v in model.state_dict().items()}


def keys_cubic(t: float) -> float:
    """Keys' kernel with a = -1/2."""
    t = abs(t)
    if t < 1:
        return 1.5 * t**3 - 2.5 * t**2 + 1
    return -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t < 2 else 0.0


def matrix(old: int, new: int) -> Tensor:
    """Rows of weights with which `new` places see `old` ones; the kernel is as much wider as there are fewer places."""
    scale = max(old / new, 1.0)
    rows = []
    for i in range(new):
        centre = (i + 0.5) * old / new
        row = [keys_cubic((j + 0.5 - centre) / scale) for j in range(old)]
        rows.append([value / sum(row) for value in row])
    return torch.tensor(rows, dtype=torch.float64)


def test_a_vit_b16_for_cifar() -> None:
    state, model = shaken(vit(num_classes=11)), cifar()
    own = {k: v.clone() for k, v in model.state_dict().items()}
    load_pretrained(model, state)
    got = model.state_dict()
    down, across = matrix(16, 4), matrix(14, 15)
    kernel = torch.einsum("ai,bj,dcij->dcab", down, down, state[KERNEL].double())
    torch.testing.assert_close(got[KERNEL].double(), kernel, rtol=1e-4, atol=1e-5)
    places = state[POSITIONS][0, 1:].double().unflatten(0, (14, 14))
    spread = torch.einsum("ai,bj,ijd->abd", across, across, places).flatten(0, 1)
    torch.testing.assert_close(got[POSITIONS][0, 1:].double(), spread, rtol=1e-4, atol=1e-5)
    assert torch.equal(got[POSITIONS][:, 0], state[POSITIONS][:, 0])
    kept = [k for k in got if k not in (KERNEL, POSITIONS) and not k.startswith("head.")]
    assert len(kept) == 16
    assert all(torch.equal(got[k], state[k]) for k in kept)
    assert all(torch.equal(got[k], own[k]) for k in ("head.weight", "head.bias"))
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)


def triangle(t: float) -> float:
    return max(1 - abs(t), 0.0)


def test_the_kernel_is_resized_as_asked_for() -> None:
    """16x16 to 4x4: means with weights 1 - |t|/4 around the middle of each four, or one number of them."""
    state, models = shaken(vit(num_classes=11)), {by: cifar(resize=by) for by in ("cubic", "bilinear", "nearest")}
    for model in models.values():
        load_pretrained(model, state)
    rows = [[triangle((j + 0.5 - (4 * i + 2)) / 4) for j in range(16)] for i in range(4)]
    down = torch.tensor([[value / sum(row) for value in row] for row in rows], dtype=torch.float64)
    kernel = torch.einsum("ai,bj,dcij->dcab", down, down, state[KERNEL].double())
    torch.testing.assert_close(models["bilinear"].get_parameter(KERNEL).detach().double(), kernel, rtol=1e-4, atol=1e-5)
    assert torch.equal(models["nearest"].get_parameter(KERNEL), state[KERNEL][:, :, 2::4, 2::4])
    plain = cifar()
    load_pretrained(plain, state)
    assert torch.equal(plain.get_parameter(KERNEL), models["cubic"].get_parameter(KERNEL))
    assert all(torch.equal(model.pos_embed, plain.pos_embed) for model in models.values())
    with pytest.raises(ConfigError, match="unknown vit resize 'linear'; known: bilinear, cubic, nearest"):
        cifar(resize="linear")


def test_what_does_not_change_is_copied_bit_by_bit() -> None:
    source, model = vit(num_classes=7), vit(seed=1, num_classes=7)
    load_pretrained(model, source.state_dict())
    with torch.no_grad():
        model.head.load_state_dict(source.head.state_dict())
        x = torch.rand(1, 3, 224, 224)
        assert torch.equal(model(x), source(x))


@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 8, 24)])
def test_a_grid_that_is_no_square_is_taken_as_it_is(shape: tuple[int, int, int]) -> None:
    """2x8 places are as many as 4x4, and not those."""
    sizes = {"depth": 1, "width": 8, "heads": 2, "patch": 4, "input_shape": shape}
    source, model = (create_model("vit", num_classes=c, seed=c, **sizes) for c in (10, 5))
    assert isinstance(model, Transformer)
    load_pretrained(model, source.state_dict())
    assert torch.equal(model.pos_embed, source.state_dict()["pos_embed"])


def test_wrapping_and_layers_before_a_head_of_other_classes_are_taken_off() -> None:
    plain, wrapped = cifar(), cifar(normalize="centered")
    state = shaken(vit(num_classes=11))
    load_pretrained(plain, state)
    extra = {"pre_logits.fc.weight": torch.zeros(6, 6), "pre_logits.fc.bias": torch.zeros(6)}
    load_pretrained(wrapped, {f"module.{k}": v for k, v in {**state, **extra}.items()})
    assert wrapped.mean is not None
    assert wrapped.mean.flatten().tolist() == pytest.approx([0.47] * 3)
    own = wrapped.state_dict()
    assert all(torch.equal(own[k], v) for k, v in plain.state_dict().items())


def test_a_hybrid_has_positions_alone() -> None:
    hybrid = [create_model("hybrid", **SIZES, input_shape=(3, size, size), seed=size) for size in (64, 32)]
    assert isinstance(hybrid[1], Transformer)
    load_pretrained(hybrid[1], hybrid[0].state_dict())
    got, state = hybrid[1].state_dict(), hybrid[0].state_dict()
    assert torch.equal(got[KERNEL], state[KERNEL])
    assert got[POSITIONS].shape == (1, 5, 6)


def test_a_head_of_the_same_shape_is_taken() -> None:
    state, model = shaken(vit(num_classes=7)), cifar()
    assert load_pretrained(model, state).drawn == ""
    assert torch.equal(model.head.weight, state["head.weight"])
    assert torch.equal(model.head.bias, state["head.bias"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head.weight": None, "head.bias": None}, "the weights come without one"),
        ({"pre_logits.fc.weight": torch.zeros(6, 6)}, "another layer comes before it there"),
        ({"head.weight": torch.zeros(9, 6), "head.bias": torch.zeros(9)}, "9 classes there, 7 here"),
    ],
)
def test_why_a_head_stays_as_it_is(change: dict[str, Tensor | None], why: str) -> None:
    state = {k: v for k, v in {**shaken(vit(num_classes=7)), **change}.items() if v is not None}
    model = cifar()
    before = model.head.weight.clone()
    found = load_pretrained(model, state)
    assert found.drawn == why
    assert not any(k.startswith("head.") for k in found.tensors)
    assert torch.equal(model.head.weight, before)


def test_a_convolutional_network_takes_its_statistics_and_needs_a_head() -> None:
    source, model = (create_model("digits_cnn", seed=s) for s in (0, 1))
    state = {k: torch.full_like(v, 3) for k, v in source.state_dict().items()}
    load_pretrained(model, state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert "bn1.running_var" in state
    with pytest.raises(ConfigError, match=r"missing \(2\): head.weight; head.bias"):
        load_pretrained(model, {k: v for k, v in state.items() if not k.startswith("head.")})


class Twice(nn.Module):
    """A head with two names, after a layer called like a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 3)
        self.last = nn.Linear(3, 2)
        self.alias = self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.model(x))  # type: ignore[no-any-return]


def test_names_of_a_network_of_ones_own() -> None:
    network = Twice()
    plain = {f"module.{k}": v.clone() for k, v in network.state_dict().items()}
    model = Adapted(network, input_shape=(4,), num_classes=2)
    assert model.head_places == ["last", "alias"]
    found = of_file(model, "mine:Twice", Weights(plain, Path("w.pt"), "", "", ()))
    assert found.state.keys() == {"network.model.weight", "network.model.bias", "head.weight", "head.bias"}
    assert fitted(model, found.state).tensors.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.mlp.fc1.weight": torch.zeros(9, 6)}, r"blocks.0.mlp.fc1.weight is \[9, 6\], not \[8, 6\]"),
        ({"norm.weight": None}, r"missing \(1\): norm.weight"),
        ({"blocks.1.norm1.weight": torch.zeros(6)}, r"extra \(1\): blocks.1.norm1.weight"),
        ({POSITIONS: torch.zeros(1, 12, 6)}, r"pos_embed has 11 places beside the class token, which are no square"),
        ({KERNEL: torch.zeros(6, 1, 16, 16)}, r"proj.weight is \[6, 1, 4, 4\], not \[6, 3, 4, 4\]"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(change: dict[str, Tensor | None], message: str) -> None:
    model = cifar()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = {k: v for k, v in {**shaken(vit()), **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        load_pretrained(model, state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
