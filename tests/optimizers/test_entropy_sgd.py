"""Entropy-SGD on quadratics: inner loop, outer step and stationary law in closed form; closures and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.optimizers.entropy_sgd import EntropySGD
from flatrock.optimizers.sgld import gaussians

K = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)  # curvatures
A = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64)  # minimum
W = torch.tensor([0.2, 0.7, -1.5], dtype=torch.float64)  # anchor
QUIET: dict[str, Any] = {"noise": 0.0, "seed": Seed(0)}


def gradient_of(w: Tensor, k: Tensor = K, a: Tensor = A) -> Callable[[], None]:
    """zero_grad, forward and backward of k/2 (w - a)^2 in one."""

    def closure() -> None:
        w.grad = k * (w.detach() - a)

    return closure


def updated(w: Tensor, k: Tensor = K, a: Tensor = A, **options: Any) -> Tensor:
    """One update from w on the quadratic; by default lr 1 and the code's outer step, whose result is mu itself."""
    w = w.clone().requires_grad_(True)
    optimizer = EntropySGD([w], **{"lr": 1.0, "outer": "code", **QUIET, **options})
    closure = gradient_of(w, k, a)
    closure()
    optimizer.step(closure)
    return w.detach()


# The inner loop


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
@pytest.mark.parametrize("gamma", [0.0, 1e-3, 1.3])
def test_mu_on_a_quadratic(steps: int, gamma: float) -> None:
    """w'_k = m + r^k (w - m), r = 1 - inner_lr (k + gamma), m the minimum of L + gamma/2 |w - w'|^2.

    mu is the geometric mean (1 - alpha)^K w + alpha sum_k (1 - alpha)^(K - k) w'_k, both sums taken in closed form.
    """
    eta, alpha = 0.1, 0.25
    m = (K * A + gamma * W) / (K + gamma)
    r, q = 1 - eta * (K + gamma), 1 - alpha
    decaying = alpha * r * (r**steps - q**steps) / (r - q)
    mu = q**steps * W + (1 - q**steps) * m + decaying * (W - m)
    torch.testing.assert_close(updated(W, steps=steps, gamma=gamma), mu, rtol=0, atol=1e-12)


def test_a_long_inner_loop_ends_at_the_minimum_of_loss_plus_pull() -> None:
    """With alpha 1, mu is the last w'."""
    gamma = 0.8
    target = (K * A + gamma * W) / (K + gamma)
    torch.testing.assert_close(updated(W, steps=400, gamma=gamma, alpha=1.0), target, rtol=0, atol=1e-12)
    between = updated(W, steps=5, gamma=gamma)
    assert bool(((between - W) * (between - target) < 0).all())


@pytest.mark.parametrize("gamma", [1e2, 1e4, 1e6])
def test_a_strong_pull_keeps_mu_at_the_anchor(gamma: float) -> None:
    """|w' - w| <= |grad L(w)| / gamma, so mu tends to w as 1 / gamma."""
    got = updated(W, gamma=gamma, inner_lr=0.5 / gamma, steps=20)
    reach = (K * (W - A)).abs() / gamma
    assert bool(((got - W).abs() <= reach).all())
    assert bool(((got - W).abs() >= 0.5 * reach).all())


def test_the_stationary_law_of_the_inner_loop() -> None:
    """Precision P = k + gamma, mean (gamma w + k a) / P, variance c^2 / (P (1 - inner_lr P / 2)); many chains."""
    count, k, gamma, eta, noise, w, a = 40_000, 1.5, 0.5, 0.3, 0.7, -1.0, 2.0
    ones = torch.ones(count, dtype=torch.float64)
    options: dict[str, Any] = {"gamma": gamma, "inner_lr": eta, "noise": noise, "alpha": 1.0, "seed": Seed(7)}
    got = updated(w * ones, k * ones, a * ones, steps=30, **options)  # 0.4^30 = 1e-12 of the start is left
    precision = k + gamma
    mean, variance = (gamma * w + k * a) / precision, noise**2 / (precision * (1 - eta * precision / 2))
    assert abs(float(got.mean()) - mean) < 5 * math.sqrt(variance / count)
    assert abs(float(got.var()) - variance) < 5 * variance * math.sqrt(2 / count)
    assert abs(float(got.var()) - noise**2 / precision) > 5 * variance * math.sqrt(2 / count)  # the test can tell


def test_the_step_is_the_gradient_of_local_entropy() -> None:
    """Mean step of many chains against quadrature of -log int exp(-L - gamma/2 (w - w')^2), a tilted double well."""
    gamma, w, chains, h = 2.0, 0.4, 20_000, 1e-3
    grid = torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    loss = (grid.square() - 1).square() + grid

    def entropy(at: float) -> float:
        return -float(torch.logsumexp(-loss - gamma / 2 * (grid - at).square(), 0))

    slope = (entropy(w + h) - entropy(w - h)) / (2 * h)
    p = torch.full((chains,), w, dtype=torch.float64, requires_grad=True)
    optimizer = EntropySGD(
        [p], lr=1.0, steps=400, inner_lr=0.01, gamma=gamma, alpha=0.02, noise=1.0, outer="paper", seed=Seed(11)
    )

    def closure() -> None:
        p.grad = 4 * p.detach() * (p.detach().square() - 1) + 1

    closure()
    optimizer.step(closure)
    moved = w - p.detach()
    assert abs(float(moved.mean()) - slope) < 5 * float(moved.std()) / math.sqrt(chains)


def test_noise_comes_from_seed_update_and_inner_step() -> None:
    eta, c, shapes = 0.1, 0.3, ((2, 3), (2, 3), ())
    params = [torch.zeros(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    optimizer = EntropySGD(
        params, lr=1.0, steps=2, inner_lr=eta, gamma=0.0, alpha=1.0, noise=c, outer="code", seed=Seed(3)
    )
    before = torch.get_rng_state()

    def closure() -> None:
        for p in params:
            p.grad = torch.zeros_like(p)

    want = [torch.zeros(s, dtype=torch.float64) for s in shapes]
    for update in range(2):
        closure()
        optimizer.step(closure)
        first, second = (gaussians(Seed(3).child(update, k), params) for k in range(2))
        want = [w + c * math.sqrt(2 * eta) * (first[p] + second[p]) for p, w in zip(params, want, strict=True)]
        for p, w in zip(params, want, strict=True):
            torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-14)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.allclose(want[0], want[1])


# The outer step


def offset(w: Tensor, **options: Any) -> Tensor:
    """w - mu."""
    return w - updated(w, **options)


def test_outer_of_paper_and_code() -> None:
    gamma = 0.4
    pull = offset(W, gamma=gamma)
    paper, code = (updated(W, gamma=gamma, lr=0.7, outer=o) for o in ("paper", "code"))
    torch.testing.assert_close(paper, W - 0.7 * gamma * pull, rtol=0, atol=1e-14)
    torch.testing.assert_close(code, W - 0.7 * pull, rtol=0, atol=1e-14)
    default = W.clone().requires_grad_(True)
    assert EntropySGD([default], lr=0.1, seed=Seed(0)).outer == "code"


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_decay_by_hand(nesterov: bool) -> None:
    lr, momentum, decay, gamma = 0.3, 0.9, 0.05, 0.4
    w = W.clone().requires_grad_(True)
    optimizer = EntropySGD(
        [w],
        lr=lr,
        momentum=momentum,
        weight_decay=decay,
        nesterov=nesterov,
        gamma=gamma,
        steps=3,
        outer="paper",
        **QUIET,
    )
    closure = gradient_of(w)
    by_hand, velocity = W.clone(), torch.zeros_like(W)
    for _ in range(6):
        closure()
        optimizer.step(closure)
        direction = gamma * offset(by_hand, gamma=gamma, steps=3) + decay * by_hand
        velocity = momentum * velocity + direction
        by_hand = by_hand - lr * (direction + momentum * velocity if nesterov else velocity)
        torch.testing.assert_close(w.detach(), by_hand, rtol=0, atol=1e-13)


def test_gamma_grows_with_the_updates() -> None:
    """One inner step from a constant gradient moves w by lr gamma_t alpha inner_lr g."""
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = EntropySGD(
        [w], lr=2.0, steps=1, inner_lr=0.1, gamma=0.5, gamma_growth=0.2, alpha=0.25, outer="paper", **QUIET
    )
    moves = []
    for _ in range(4):
        before = w.item()
        w.grad = torch.ones_like(w)
        optimizer.step()
        moves.append(before - w.item())
    assert moves == pytest.approx([2.0 * 0.5 * 1.2**t * 0.25 * 0.1 for t in range(4)], rel=1e-12)


def test_gamma_that_grows_past_stability_stops_with_the_numbers() -> None:
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = EntropySGD([w], lr=1.0, steps=1, inner_lr=0.1, gamma=15.0, gamma_growth=1.0, **QUIET)
    w.grad = torch.ones_like(w)
    optimizer.step()
    before = w.item()
    with pytest.raises(ConfigError, match=r"must be below 2, got 0.1 \* 30.0 at update 1; lower inner_lr, gamma or"):
        optimizer.step()
    assert w.item() == before


def test_groups_have_their_own_decay_and_one_without_gradient_rests() -> None:
    a, b, c = (W.clone().requires_grad_(True) for _ in range(3))
    groups: list[dict[str, Any]] = [{"params": [a], "weight_decay": 0.5}, {"params": [b]}, {"params": [c]}]
    optimizer = EntropySGD(groups, lr=1.0, momentum=0.9, outer="code", **QUIET)

    def closure() -> None:
        gradient_of(a)()
        gradient_of(b)()

    closure()
    optimizer.step(closure)
    torch.testing.assert_close(b.detach(), updated(W), rtol=0, atol=1e-14)
    torch.testing.assert_close(b.detach() - a.detach(), 0.5 * W, rtol=0, atol=1e-14)
    assert torch.equal(c.detach(), W)


# The closure


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_closure_is_called_once_less_than_there_are_steps(steps: int) -> None:
    """And each time the weights are w', with gradients on, while the first gradient is the caller's."""
    w = W.clone().requires_grad_(True)
    optimizer = EntropySGD([w], lr=1.0, steps=steps, gamma=0.0, alpha=1.0, outer="code", **QUIET)
    seen = []

    def closure() -> None:
        seen.append(w.detach().clone())
        optimizer.zero_grad()
        (w * K).sum().backward()

    w.grad = torch.full_like(W, 10.0)
    optimizer.step(closure)
    assert len(seen) == steps - 1
    for k, there in enumerate(seen):
        torch.testing.assert_close(there, W - 0.1 * (10.0 + k * K), rtol=0, atol=1e-14)
    torch.testing.assert_close(w.detach(), W - 0.1 * (10.0 + (steps - 1) * K), rtol=0, atol=1e-14)


def test_a_gradient_that_is_missing_at_times_counts_as_zero() -> None:
    w = W.clone().requires_grad_(True)
    optimizer = EntropySGD([w], lr=1.0, steps=3, gamma=0.0, alpha=1.0, outer="code", **QUIET)
    w.grad = torch.ones_like(W)
    optimizer.step(optimizer.zero_grad)
    torch.testing.assert_close(w.detach(), W - 0.1, rtol=0, atol=1e-14)


def test_an_error_in_the_closure_leaves_the_anchor_and_the_count() -> None:
    w, twin = W.clone().requires_grad_(True), W.clone().requires_grad_(True)
    optimizer, calm = (EntropySGD([p], lr=1.0, noise=0.1, momentum=0.9, seed=Seed(1)) for p in (w, twin))
    good, moved = gradient_of(w), []

    def bad() -> None:
        moved.append(not torch.equal(w.detach(), W))
        if len(moved) == 3:
            raise FloatingPointError("no loss")
        good()

    good()
    with pytest.raises(FloatingPointError, match="no loss"):
        optimizer.step(bad)
    assert moved == [True] * 3
    assert torch.equal(w.detach(), W)
    good()
    optimizer.step(good)  # as if nothing had happened
    gradient_of(twin)()
    calm.step(gradient_of(twin))
    assert torch.equal(w, twin)


def test_a_missing_closure_is_named() -> None:
    w = W.clone().requires_grad_(True)
    w.grad = torch.ones_like(W)
    with pytest.raises(ConfigError, match="entropy_sgd with steps 5 needs a closure"):
        EntropySGD([w], lr=1.0, **QUIET).step()


@pytest.mark.gpu
def test_noise_is_the_same_on_every_device() -> None:
    ends = []
    for device in ("cpu", "cuda"):
        w = W.float().to(device).requires_grad_(True)
        optimizer = EntropySGD([w], lr=1.0, noise=0.5, outer="code", seed=Seed(1))
        closure = gradient_of(w, K.float().to(device), A.float().to(device))
        closure()
        optimizer.step(closure)
        ends.append(w.detach().cpu())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
