"""Networks whose full trace is refused: which, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed
from flatrock.flatness.full_trace import check_higher_derivatives, check_piecewise_linear, exact_traces
from flatrock.flatness.rat import RAT
from flatrock.models.catalog import create_model


class Functional(nn.Module):
    """Two linear layers with a function between them that is no module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two, self.kind = nn.Linear(3, 4), nn.Linear(4, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.one(x)
        if self.kind == "gelu":
            return self.two(F.gelu(hidden))  # type: ignore[no-any-return]
        if self.kind == "square":
            return self.two(hidden * hidden)  # type: ignore[no-any-return]
        if self.kind == "softmax":
            return self.two(hidden).softmax(1)  # type: ignore[no-any-return]
        if self.kind == "dropout":
            return self.two(F.dropout(hidden, 0.5))  # type: ignore[no-any-return]
        if self.kind == "twice":
            return self.two(self.one(hidden[:, :3].relu()))  # type: ignore[no-any-return]
        return self.two(hidden[:, None].relu()).squeeze(1)  # type: ignore[no-any-return]


REFUSED: list[tuple[nn.Module, str]] = [
    (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), r"'1' \(BatchNorm1d\)"),
    (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)), r"'1' \(BatchNorm1d\)"),
    (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)), r"'1' \(LayerNorm\)"),
    (nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 3)), r"'1' \(Dropout\)"),
    *[
        (nn.Sequential(nn.Linear(3, 4), act(), nn.Linear(4, 3)), rf"'1' \({act.__name__}\)")
        for act in (nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.PReLU)
    ],
    (Functional("gelu"), "bends the logits after layer 'one'"),
    (Functional("square"), "bends the logits after layer 'one'"),
    (Functional("softmax"), "bends the logits after layer 'two'"),
    (Functional("dropout"), "same logits when asked twice"),
    (Functional("twice"), "'one' to run once"),
    (Functional("rank"), "'two' to run once per pass on one row per sample"),
]


@pytest.mark.parametrize(("net", "said"), REFUSED)
def test_other_networks_are_refused_by_layer_with_a_cure(net: nn.Module, said: str) -> None:
    net = net.double().train()
    x, y = torch.rand(6, 3, generator=Seed(8).generator(), dtype=torch.float64), torch.arange(6) % 3
    z = net(x)
    with pytest.raises(ModelError, match=said) as error:
        exact_traces(net, F.cross_entropy(z, y), [(x, z)])
    cure = "layers: top" if "Norm" in said else "estimate: hutchinson"
    assert str(error.value).endswith(f"; use {cure}")


@pytest.mark.parametrize(
    ("name", "cure"), [("mnist_cnn", "estimate: hutchinson"), ("digits_cnn", "layers: top")], ids=["plain", "BatchNorm"]
)
def test_convolutional_networks_are_refused_with_a_cure_that_works(name: str, cure: str) -> None:
    with pytest.raises(ModelError, match=rf"'conv1' \(Conv2d\) is neither; use {cure}$"):
        check_piecewise_linear(create_model(name).train())


def test_shared_and_loose_parameters_are_refused() -> None:
    shared = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    shared[2].weight = shared[0].weight
    with pytest.raises(ModelError, match="share no parameter"):
        check_piecewise_linear(shared)
    loose = nn.Sequential(nn.Linear(3, 3))
    loose.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ModelError, match="'scale'"):
        check_piecewise_linear(loose)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_the_estimate_is_refused_where_torch_differentiates_wrongly(layer: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"layer '1' \(\w*Norm\w*\); use layers: top"):
        check_higher_derivatives(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 3)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_weight_norm_is_refused(normed: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Sequential(nn.Linear(3, 4), normed(nn.Linear(4, 3)))
    with pytest.raises(ModelError, match=r"wrong for the weight_norm at '1.*'; use layers: top, or remove"):
        check_higher_derivatives(net)
    with pytest.raises(ModelError, match=r"rat's exact terms .* weight_norm at '1.*'; use terms: top_layer, or remove"):
        RAT(terms="exact").check(net)
    check_higher_derivatives(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))))
