"""Curvature of small networks against their dense Hessians in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from curvature_cases import CASES, dense_hessian, dense_net, layer_blocks, samples
from torch import Tensor, nn

from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed
from flatrock.diagnostics.curvature import Settings, curvature
from flatrock.diagnostics.exact import exact_curvature
from flatrock.diagnostics.hessian import Hessian, by_layer, still
from flatrock.diagnostics.moments import Moments, moments
from flatrock.models.catalog import create_model

Case = tuple[nn.Module, Tensor, Tensor, Tensor]
TIGHT = {"rel": 1e-9, "abs": 1e-12}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    make, shape, classes = CASES[request.param]
    net = make()
    x, y = samples(shape, classes)
    return net, x, y, dense_hessian(net, x, y)


def agrees(found: Moments, block: Tensor) -> None:
    """Sum, squares and spread are those of the eigenvalues."""
    eigenvalues = torch.linalg.eigvalsh(block)
    assert found.count == len(block)
    assert found.trace.value == pytest.approx(float(eigenvalues.sum()), **TIGHT)
    assert found.square.value == pytest.approx(float(eigenvalues.square().sum()), **TIGHT)
    assert found.spread.value == pytest.approx(float(eigenvalues.std(correction=0)), **TIGHT)


def test_the_dense_hessian_is_not_trivial(case: Case) -> None:
    dense = case[3]
    assert torch.allclose(dense, dense.mT, atol=1e-12)
    assert float(torch.linalg.eigvalsh(dense)[-1]) > 0.05


@pytest.mark.parametrize("batch_size", [24, 7, 1])
@pytest.mark.parametrize("columns", [1, 9])
def test_products_are_those_of_the_dense_hessian(case: Case, batch_size: int, columns: int) -> None:
    net, x, y, dense = case
    vectors = torch.randn(len(dense), columns, generator=Seed(1).generator(), dtype=torch.float64)
    seen: list[int] = []
    with still(net, x, y):
        hessian = Hessian(net, x, y, dict(net.named_parameters()), batch_size=batch_size, seen=seen.append)
        assert tuple(hessian.shape) == tuple(dense.shape)
        assert torch.allclose(hessian @ vectors, dense @ vectors, rtol=1e-9, atol=1e-12)
    assert sum(seen) == len(x) * columns


def test_products_with_a_layer_are_those_of_its_diagonal_block(case: Case) -> None:
    net, x, y, dense = case
    layers = by_layer(dict(net.named_parameters()))
    blocks = layer_blocks(net, dense)
    assert list(layers) == list(blocks)
    with still(net, x, y):
        for name, block in blocks.items():
            product = Hessian(net, x, y, layers[name]) @ torch.eye(len(block), dtype=torch.float64)
            assert torch.allclose(product, block, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_exact_curvature(case: Case, chunk: int) -> None:
    net, x, y, dense = case
    net.eval()
    seen: list[int] = []
    found = exact_curvature(F.cross_entropy(net(x), y), dict(net.named_parameters()), chunk=chunk, seen=seen.append)
    agrees(found.whole, dense)
    for name, block in layer_blocks(net, dense).items():
        agrees(found.layers[name], block)
    assert torch.allclose(found.diagonal, dense.diagonal(), rtol=1e-9, atol=1e-12)
    assert sum(seen) == len(dense)


def test_a_parameter_the_loss_does_not_use_has_eigenvalues_of_zero() -> None:
    net = dense_net()
    x, y = samples((3,), 3)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    named = dict(net.named_parameters())
    plain = exact_curvature(F.cross_entropy(net(x), y), named)
    found = exact_curvature(F.cross_entropy(net(x), y), {**named, "other.w": unused})
    assert found.layers["other"].trace.value == found.layers["other"].spread.value == 0
    assert found.whole.trace.value == pytest.approx(plain.whole.trace.value, rel=1e-12)
    assert found.whole.count == plain.whole.count + 2


@pytest.mark.parametrize("trace", ["exact", "hutch++", "hutchinson"])
def test_everything_at_once(case: Case, trace: str) -> None:
    net, x, y, dense = case
    # As many products as the layers have parameters: each layer, and for 30 probes the whole network, is exact.
    settings = Settings(trace=trace, probes=30, runs=1, steps=60, top=3)
    found = curvature(net, x, y, beta=24, settings=settings, batch_size=10)
    eigenvalues = torch.linalg.eigvalsh(dense)
    assert found.method == trace
    assert [v for v, _ in found.spectrum.largest] == pytest.approx(eigenvalues[-3:].flip(0).tolist(), rel=1e-8)
    assert [v for v, _ in found.spectrum.smallest] == pytest.approx(eigenvalues[:3].tolist(), rel=1e-6)
    agrees(found.whole, dense)
    blocks = layer_blocks(net, dense)
    assert list(found.layers) == list(blocks)
    for name, block in blocks.items():
        agrees(found.layers[name], block)
    net.eval()
    with torch.no_grad():
        assert found.loss == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-12)


def test_traces_of_layers_add_up_to_the_whole_and_squares_do_not(
    case: Case,
) -> None:
    net, x, y, _ = case
    found = curvature(net, x, y, beta=24, settings=Settings(trace="exact", steps=10, top=2))
    assert sum(m.trace.value for m in found.layers.values()) == pytest.approx(found.whole.trace.value, rel=1e-10)
    assert sum(m.count for m in found.layers.values()) == found.whole.count
    assert sum(m.square.value for m in found.layers.values()) < found.whole.square.value


def test_estimates_of_a_network_hold_the_truth_as_often_as_they_say() -> None:
    net = dense_net(scale=2)
    x, y = samples((3,), 3)
    dense = dense_hessian(net, x, y)
    truth = float(dense.trace())
    found = [moments(dense, sketch=6, probes=6, seed=Seed(s)).trace for s in range(200)]
    inside = sum(low <= truth <= high for low, high in (f.interval() for f in found)) / len(found)
    assert 0.90 <= inside <= 0.99


def test_the_quadrature_gives_trace_and_squares_of_the_network(case: Case) -> None:
    """Many runs: mean_k w_k lambda_k n is the trace, and with squares the Frobenius norm."""
    net, x, y, dense = case
    settings = Settings(trace="exact", layers=False, runs=20, steps=6, top=2)
    found = curvature(net, x, y, beta=24, settings=settings)
    nodes, weights = (torch.tensor(v, dtype=torch.float64) for v in (found.spectrum.nodes, found.spectrum.weights))
    for power in (1, 2):
        matrix = dense if power == 1 else dense @ dense
        error = (2 * float(matrix.square().sum() - matrix.diagonal().square().sum()) / 20) ** 0.5
        assert abs(float((weights * nodes**power).sum()) * len(dense) - float(matrix.trace())) < 3.5 * error
    assert found.layers == {}


@pytest.mark.parametrize("name", ["resnet20", "mnist_cnn", "digits_cnn"])
def test_products_of_real_networks_are_those_of_two_backward_passes(name: str) -> None:
    net = create_model(name, num_classes=10, seed=0).double()
    x, y = samples(tuple(net.input_shape), 10, n=3)
    named = dict(net.named_parameters())
    vector = torch.randn(sum(p.numel() for p in named.values()), generator=Seed(1).generator(), dtype=torch.float64)
    parts = vector.split([p.numel() for p in named.values()])
    with still(net, x, y):
        product = (Hessian(net, x, y, named, batch_size=2) @ vector[:, None])[:, 0]
        slopes = torch.autograd.grad(F.cross_entropy(net(x), y), list(named.values()), create_graph=True)
        along = torch.stack([(g.flatten() * v).sum() for g, v in zip(slopes, parts, strict=True)]).sum()
        truth = torch.cat([g.flatten() for g in torch.autograd.grad(along, list(named.values()))])
    assert torch.allclose(product, truth, rtol=1e-9, atol=1e-12 * float(truth.abs().max()))


def test_shared_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    net = Tied().double()
    x, y = samples((3,), 3)
    dense = dense_hessian(net, x, y)
    found = curvature(net, x, y, beta=24, settings=Settings(trace="hutch++", steps=15, top=2))
    agrees(found.whole, dense)
    assert {name: m.count for name, m in found.layers.items()} == {"first": 12, "second": 3}
    assert found.spectrum.largest[0][0] == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-9)


class Dice(nn.Module):
    """Noise that eval mode does not switch off."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("layer", [Dice(), nn.BatchNorm1d(7, track_running_stats=False)])
def test_a_loss_without_a_hessian_is_refused(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(3, 7), layer, nn.Linear(7, 3)).double()
    x, y = samples((3,), 3)
    with pytest.raises(ModelError, match="has no Hessian"):
        curvature(net, x, y, beta=24)
