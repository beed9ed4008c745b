"""RAT's Eq. 8 by forward-mode differentiation: finite differences, closed forms, and a model given back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from flatrock.core.borrow import nudged
from flatrock.core.errors import ModelError
from flatrock.core.hooks import Look, Moment, Penalty
from flatrock.core.rng import Seed
from flatrock.core.types import Views
from flatrock.flatness.rat import RAT
from flatrock.flatness.rat_exact import directional, exact_terms
from flatrock.flatness.tensors import noise
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.objectives.trades import TRADES

LONG = {"sigma": 0.05, "terms": "exact"}


def smooth() -> nn.Module:
    """A network with bounded derivatives of every order; 35 parameters, 27 of them weights."""
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3), nn.Softplus(), nn.Linear(3, 3)).double()
    gen = Seed(0).child("smooth").generator()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=gen, dtype=torch.float64)
    return model


def digits_net() -> Classifier:
    """Convolutions, BatchNorm with statistics of its own, max-pooling and ReLU."""
    model = create_model("digits_cnn").double()
    model.train()(images(16)[0])
    return model.eval()


def images(n: int) -> tuple[Tensor, Tensor]:
    gen = Seed(0).child("images").generator()
    x = torch.rand(n, 1, 8, 8, generator=gen, dtype=torch.float64)
    return x, (x + 0.2 * torch.rand(x.shape, generator=gen, dtype=torch.float64)).clamp(0, 1)


def points(n: int) -> Tensor:
    return torch.randn(n, 2, generator=Seed(0).child("points").generator(), dtype=torch.float64)


@torch.no_grad()
def moved(model: nn.Module, x: Tensor, u: Mapping[str, Tensor], t: float) -> Tensor:
    with nudged(model, {name: t * delta for name, delta in u.items()}):
        out: Tensor = model(x)
        return out


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


# The derivatives


@pytest.mark.parametrize("which", ["weights", "all"])
@pytest.mark.parametrize("kind", ["smooth", "digits"])
def test_derivatives_equal_central_differences(kind: str, which: str) -> None:
    model, x = (smooth(), points(6)) if kind == "smooth" else (digits_net(), images(6)[0])
    u = noise(model, which, 0.05, Seed(1))
    slope, curvature = directional(model, x, u, order=2)
    h = 1e-3 if kind == "smooth" else 1e-5  # small enough to stay on one linear piece of every ReLU
    ahead, here, behind = (moved(model, x, u, t) for t in (h, 0.0, -h))
    assert relative(slope, (ahead - behind) / (2 * h)) < 1e-6
    assert relative(curvature, (ahead - 2 * here + behind) / h**2) < 1e-4
    assert float(curvature.detach().norm()) > 1e-4


def test_first_order_is_the_same_without_the_second() -> None:
    model, (x, _) = digits_net(), images(3)
    u = noise(model, "weights", 0.05, Seed(1))
    (alone,) = directional(model, x, u, order=1)
    assert torch.allclose(alone, directional(model, x, u, order=2)[0], rtol=1e-12, atol=0)


def test_taylor_remainder_is_of_third_order() -> None:
    model, x = smooth(), points(6)
    u = noise(model, "weights", 0.05, Seed(1))
    slope, curvature = (d.detach() for d in directional(model, x, u, order=2))

    def remainder(t: float) -> float:
        return float((moved(model, x, u, t) - moved(model, x, u, 0) - t * slope - t**2 / 2 * curvature).norm())

    assert remainder(0.1) / remainder(0.05) == pytest.approx(8, rel=0.05)
    assert remainder(0.05) / remainder(0.025) == pytest.approx(8, rel=0.025)


def test_shared_weights_move_together() -> None:
    layer = nn.Linear(2, 2).double()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    u, x, h = noise(model, "weights", 0.1, Seed(0)), points(4), 1e-3
    assert list(u) == ["0.weight"]
    slope, curvature = directional(model, x, u, order=2)
    ahead, here, behind = (moved(model, x, u, t) for t in (h, 0.0, -h))
    assert relative(slope, (ahead - behind) / (2 * h)) < 1e-6
    assert relative(curvature, (ahead - 2 * here + behind) / h**2) < 1e-5


def test_expected_curvature_is_the_trace_of_the_hessian() -> None:
    """E[u^T H u] = sigma^2 tr H: the sum over unit directions is the trace, for every sample and output."""
    model, x = smooth(), points(3)
    w = model.get_parameter("0.weight")
    total = torch.zeros(3, 3, dtype=torch.float64)
    for i in range(w.numel()):
        unit = F.one_hot(torch.tensor(i), w.numel()).double().reshape(w.shape)
        total += directional(model, x, {"0.weight": unit}, order=2)[1].detach()
    full = hessian(lambda v: functional_call(model, {"0.weight": v}, (x,)))(w.detach())
    trace = full.reshape(3, 3, w.numel(), w.numel()).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert relative(total, trace) < 1e-12


# The terms


def test_terms_are_divergences_of_the_derivatives() -> None:
    model, (x, x_adv) = digits_net(), images(5)
    u = noise(model, "weights", 0.3, Seed(1))
    terms = exact_terms(model, x, x_adv, u, order=2)
    pairs = zip(directional(model, x, u, order=2), directional(model, x_adv, u, order=2), strict=True)
    for term, (a, b) in zip(terms, pairs, strict=True):
        s, t = a.softmax(1), b.softmax(1)
        expected = (s * (s.log() - t.log())).sum(1).mean()
        assert float(term.detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
        assert float(term.detach()) > 0


def jacobian(model: nn.Module, x: Tensor, names: list[str]) -> Tensor:
    """[n, C, number of weights]."""
    start = {name: model.get_parameter(name).detach() for name in names}
    blocks = jacrev(lambda p: functional_call(model, p, (x,)))(start)
    return torch.cat([blocks[name].detach().flatten(2) for name in names], 2)


def test_small_noise_gives_the_squared_distance_of_the_jacobians() -> None:
    """first = ||P (J_x - J_x') u||^2 / 2C + O(|u|^3), so E first = sigma^2 ||P (J_x - J_x')||_F^2 / 2C."""
    model, x = smooth(), points(4)
    x_adv, sigma, classes = x + 0.1, 1e-5, 3
    names = ["0.weight", "2.weight", "4.weight"]
    gap = jacobian(model, x, names) - jacobian(model, x_adv, names)
    gap = gap - gap.mean(1, keepdim=True)  # P takes the mean over outputs off
    u = noise(model, "weights", sigma, Seed(2))
    along = gap @ torch.cat([u[name].flatten() for name in names])
    (first,) = exact_terms(model, x, x_adv, u, order=1)
    assert float(first.detach()) == pytest.approx(float(along.square().sum(1).mean() / (2 * classes)), rel=1e-3)
    total, count = 0.0, gap.shape[2]
    for i in range(count):  # orthogonal directions of length sigma add up to the expectation
        flat = sigma * F.one_hot(torch.tensor(i), count).double()
        shapes = [model.get_parameter(name).shape for name in names]
        parts = flat.split([shape.numel() for shape in shapes])
        unit = {n: p.reshape(shape) for n, p, shape in zip(names, parts, shapes, strict=True)}
        total += float(exact_terms(model, x, x_adv, unit, order=1)[0].detach())
    assert total == pytest.approx(sigma**2 / (2 * classes) * float(gap.square().sum((1, 2)).mean()), rel=1e-3)


def test_literal_second_order_vector_of_the_paper_vanishes() -> None:
    """sum_{i,j,k} d^2 CE / dW_li dW_jk = 0 for every row l, because rows of the softmax Hessian sum to 0."""
    gen = Seed(0).child("eq18").generator()
    weight, f = (torch.randn(*shape, generator=gen, dtype=torch.float64) for shape in ((4, 3), (6, 3)))
    y = torch.arange(6) % 4
    full = hessian(lambda w: F.cross_entropy(f @ w.T, y))(weight)
    assert float(full.abs().max()) > 1e-2
    assert float(full.sum((1, 2, 3)).abs().max()) < 1e-14


@pytest.mark.parametrize("term", [0, 1])
@pytest.mark.parametrize("name", ["conv1.weight", "bn2.weight", "bn2.bias", "head.weight"])
def test_gradient_equals_finite_differences(name: str, term: int) -> None:
    model, (x, x_adv) = digits_net(), images(4)
    u = noise(model, "weights", 0.3, Seed(1))
    w = model.get_parameter(name)
    (gradient,) = torch.autograd.grad(exact_terms(model, x, x_adv, u, order=2)[term], w)
    direction = torch.randn(w.shape, generator=Seed(3).generator(), dtype=torch.float64)
    h, values = 1e-6, []
    for t in (h, -h):
        with nudged(model, {name: t * direction}), torch.no_grad():
            values.append(float(exact_terms(model, x, x_adv, u, order=2)[term]))
    slope = float((gradient * direction).sum())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-4)
    assert abs(slope) > 1e-9


def test_single_precision_keeps_tiny_terms() -> None:
    """At the official noise the divergence is 1e-11, far below the rounding of float32 logarithms."""
    model, (x, x_adv) = digits_net(), images(8)
    u = noise(model, "weights", 1e-4, Seed(1))
    exact = exact_terms(model, x, x_adv, u, order=2)
    low = {name: delta.float() for name, delta in u.items()}
    single = exact_terms(model.float(), x.float(), x_adv.float(), low, order=2)
    assert float(exact[0].detach()) < 1e-9
    for a, b in zip(single, exact, strict=True):
        assert a.dtype == torch.float32
        assert float(a.detach()) == pytest.approx(float(b.detach()), rel=1e-3)


# As a method


def look(model: Classifier, step: int = 0) -> Look:
    (x, x_adv), y = images(6), torch.arange(6)
    views = Views(model.view(x), model.view(x_adv))
    return Look(model, x, x_adv, y, views, TRADES().loss(views, y), Moment(1, step, 0.0, Seed(0)))


def penalty_of(rat: RAT, seen: Look) -> Penalty:
    penalty = rat.in_loss(seen)
    assert penalty is not None
    return penalty


def test_method_uses_the_noise_of_the_attack() -> None:
    model = digits_net()
    seen, rat = look(model, step=7), RAT(eta=0.4, **LONG)
    u = rat.before_attack(model, seen.moment)
    penalty = penalty_of(rat, seen)
    expected = exact_terms(model, seen.x, seen.x_adv, u, order=2)
    assert [float(t.detach()) for t in penalty.terms.values()] == [float(t.detach()) for t in expected]
    assert penalty.weights == {"rat_first": 0.4, "rat_second": 0.2}
    assert penalty.label_factor == 1
    other = penalty_of(rat, look(model, step=8))
    assert float(other.terms["rat_first"].detach()) != float(penalty.terms["rat_first"].detach())


def test_order_one_and_no_noise() -> None:
    seen = look(digits_net())
    one = penalty_of(RAT(order=1, **LONG), seen)
    assert list(one.terms) == list(one.weights) == ["rat_first"]
    assert RAT(sigma=0.0, terms="exact").in_loss(seen) is None
    assert RAT(sigma=0.0, terms="exact").passes(2, 10) == 0


def test_gradients_arrive_beside_those_of_a_train_mode_loss() -> None:
    model = digits_net().train()
    rat, seen = RAT(noise_on="conv", **LONG), look(model)
    penalty = penalty_of(rat, seen)
    total = seen.parts.total + sum(penalty.weights[n] * t for n, t in penalty.terms.items())
    total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    # Tensors the noise leaves alone are constants of the derivative, not of the loss.
    again = penalty_of(rat, look(model)).terms["rat_first"]
    reached = torch.autograd.grad(again, list(model.parameters()), allow_unused=True)
    missed = [n for (n, _), g in zip(model.named_parameters(), reached, strict=True) if g is None or not g.any()]
    assert missed == ["bn3.bias", "head.bias"]  # J u does not depend on them: only ReLU and a fixed head follow


def test_model_is_given_back_as_it_was() -> None:
    model = digits_net().train()
    model.bn2.eval()  # frozen by its user
    model.get_parameter("conv2.weight").requires_grad_(False)
    seen = look(model)
    model.get_parameter("conv1.weight").grad = torch.ones_like(model.get_parameter("conv1.weight"))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    random = torch.get_rng_state()
    penalty = penalty_of(RAT(**LONG), seen)
    assert [m.training for m in model.modules()] == modes
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["conv2.weight"]
    assert bool((model.get_parameter("conv1.weight").grad == 1).all())
    assert all(p.grad is None for n, p in model.named_parameters() if n != "conv1.weight")
    assert torch.equal(torch.get_rng_state(), random)
    penalty.terms["rat_first"].backward()
    assert model.get_parameter("conv2.weight").grad is None


def test_modes_come_back_after_an_error() -> None:
    model = digits_net().train()
    wrong = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    with pytest.raises(Exception, match="expects inputs"):
        exact_terms(model, wrong, wrong, noise(model, "weights", 0.1, Seed(0)), order=2)
    assert all(m.training for m in model.modules())


def test_terms_ignore_batch_statistics_and_dropout() -> None:
    (x, x_adv) = images(6)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    model = nn.Sequential(body, nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 5)).double().train()
    u = noise(model, "weights", 0.1, Seed(0))
    whole = [float(t.detach()) for t in exact_terms(model, x, x_adv, u, order=2)]
    halves = [exact_terms(model, x[rows], x_adv[rows], u, order=2) for rows in (slice(0, 3), slice(3, 6))]
    means = [float((a + b).detach() / 2) for a, b in zip(*halves, strict=True)]
    assert whole == pytest.approx(means, rel=1e-9)
    assert whole[0] > 0


class Pictures(nn.Module):
    """A convolution and a norm of its channels."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 4, 3), norm, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.norm(self.conv(x[:, None]))).flatten(1))
        return out


def normed(norm: nn.Module) -> nn.Module:
    model = Pictures(norm).double()
    gen = Seed(0).child("normed").generator()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=gen, dtype=torch.float64) / 2
    return model.eval()


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.BatchNorm1d(4)])
def test_gradients_through_norms_equal_finite_differences(norm: nn.Module, order: int) -> None:
    """Those that are not refused."""
    model = normed(norm)
    RAT(order=order, **LONG).check(model)
    x = torch.rand(6, 6, generator=Seed(4).generator(), dtype=torch.float64)
    x_adv = (x + 0.1 * torch.randn(x.shape, generator=Seed(5).generator(), dtype=torch.float64)).clamp(0, 1)
    u = dict(noise(model, "weights", 0.5, Seed(1)))
    weight = model.get_parameter("conv.weight")
    slope = torch.autograd.grad(exact_terms(model, x, x_adv, u, order=order)[-1], weight)[0]
    along = torch.randn(weight.shape, generator=Seed(6).generator(), dtype=torch.float64)
    values = []
    for h in (1e-5, -1e-5):
        with nudged(model, {"conv.weight": h * along}):
            values.append(exact_terms(model, x, x_adv, u, order=order)[-1].item())
    assert float((slope * along).sum()) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4),
        nn.InstanceNorm1d(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.BatchNorm1d(4, track_running_stats=False),
    ],
)
def test_layers_torch_differentiates_wrongly_are_refused(norm: nn.Module) -> None:
    model = normed(norm).train()
    for order in (1, 2):
        with pytest.raises(
            ModelError, match=rf"rat's exact terms .* layer 'norm' \({type(norm).__name__}\); use terms: top_layer"
        ):
            RAT(order=order, **LONG).check(model)
    assert model.training
    RAT(order=2).check(model)  # top_layer needs no such derivatives
    for nothing in ({"order": 0}, {"eta": 0.0}, {"sigma": 0.0}):
        RAT(**{**LONG, **nothing}).check(model)


def test_a_network_without_forward_mode_is_refused_with_a_cure() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))).double()
    u = dict(noise(model, "weights", 0.1, Seed(1)))
    with pytest.raises(ModelError, match=r"torch lacks for this network: [^;]*forward AD[\s\S]*; use terms: top_layer"):
        exact_terms(model, points(2), points(2), u, order=1)
