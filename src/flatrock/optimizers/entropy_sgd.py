"""Entropy-SGD (Chaudhari et al. 2017): gradient descent on the local entropy of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from flatrock.core.errors import ConfigError
from flatrock.core.options import choose, count, weight
from flatrock.core.rng import Seed
from flatrock.optimizers.sgld import check_seed, count_update, gaussians, parameters, updates_done


class EntropySGD(Optimizer):
    """Descend F(w) = -log int exp(-L(w') - gamma/2 ||w - w'||^2) dw', whose gradient is gamma * (w - E[w']).

    Langevin steps estimate E[w'] by a running mean mu; w' = mu = w at first, then `steps` times

        w' <- w' - inner_lr * (grad L(w') + gamma * (w' - w)) + noise * sqrt(2 * inner_lr) * N(0, I)
        mu <- (1 - alpha) * mu + alpha * w'

    after which w makes an SGD step (weight decay and momentum included) along w - mu for `outer: code`, where gamma is
    left to the learning rate, or along gamma * (w - mu) for `outer: paper`, which hardly moves w at the gamma the paper
    names. gamma = gamma_0 * (1 + gamma_growth)^t
    at update t = 0, 1, ...
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        steps: int = 5,
        inner_lr: float = 0.1,
        gamma: float = 1e-3,
        gamma_growth: float = 0.0,
        alpha: float = 0.25,
        noise: float = 1e-4,
        outer: str = "code",
        seed: Seed,
    ) -> None:
        check_sgd("entropy_sgd", lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
        count("entropy_sgd", "steps", steps, least=1)
        _check_inner(inner_lr=inner_lr, gamma=gamma, gamma_growth=gamma_growth, alpha=alpha, noise=noise)
        choose("entropy_sgd", "outer", outer, ("paper", "code"))
        if outer == "paper" and gamma == 0:
            raise ConfigError("entropy_sgd gamma 0 with outer: paper moves nothing; use outer: code, or gamma > 0")
        check_seed("entropy_sgd", seed)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})
        self.steps, self.inner_lr, self.alpha, self.noise = steps, inner_lr, alpha, noise
        self.gamma, self.gamma_growth, self.outer, self.seed = gamma, gamma_growth, outer, seed
        self.gamma_at(0)

    @property
    def inner_loops(self) -> int:
        """Gradients one update takes; an engine must give step() a closure for all but the first."""
        return self.steps

    def gamma_at(self, t: int) -> float:
        """gamma at update t; an error once the pull to the anchor overshoots further than it started."""
        gamma = self.gamma * (1 + self.gamma_growth) ** t if self.gamma > 0 else 0.0
        if self.inner_lr * gamma >= 2:
            raise ConfigError(
                f"entropy_sgd inner_lr * gamma must be below 2, got {self.inner_lr!r} * {gamma!r} at update {t}; "
                "lower inner_lr, gamma or gamma_growth"
            )
        return gamma

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """One update. `.grad` holds the gradient at w and serves the first inner step.

        `closure` (zero_grad, forward, backward at the weights it finds) is called steps - 1 times. If it raises, the
        weights are w again and nothing is counted. Parameters without gradient stay out of the update.
        """
        if closure is None and self.steps > 1:
            raise ConfigError(f"entropy_sgd with steps {self.steps} needs a closure: call step(closure)")
        params = [p for p in parameters(self) if p.grad is not None]
        if not params:
            return
        gamma = self.gamma_at(updates_done(self))
        anchors = [p.clone() for p in params]
        try:
            means = self._inner_loop(params, anchors, gamma, closure)
        finally:
            torch._foreach_copy_(params, anchors)
        directions = torch._foreach_mul(means, -gamma if self.outer == "paper" else -1.0)
        self._outer_step(dict(zip(params, directions, strict=True)))
        count_update(self)

    def _inner_loop(
        self, params: list[Tensor], anchors: list[Tensor], gamma: float, closure: Callable[[], object] | None
    ) -> list[Tensor]:
        """mu - w, from offsets w' - w: differences of nearby weights would lose digits."""
        offsets = [torch.zeros_like(p) for p in params]
        means = [torch.zeros_like(p) for p in params]
        for k in range(self.steps):
            if k > 0 and closure is not None:
                torch._foreach_copy_(params, torch._foreach_add(anchors, offsets))
                with torch.enable_grad():
                    closure()
            # Layers that are skipped at random may have no gradient this time.
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            torch._foreach_mul_(offsets, 1 - self.inner_lr * gamma)
            torch._foreach_add_(offsets, grads, alpha=-self.inner_lr)
            self._add_noise(params, offsets, k)
            torch._foreach_lerp_(means, offsets, self.alpha)
        return means

    def _add_noise(self, params: list[Tensor], offsets: list[Tensor], k: int) -> None:
        if self.noise == 0:
            return
        noise = gaussians(self.seed.child(updates_done(self), k), parameters(self))
        width = self.noise * math.sqrt(2 * self.inner_lr)
        torch._foreach_add_(offsets, [noise[p] for p in params], alpha=width)

    def _outer_step(self, directions: dict[Tensor, Tensor]) -> None:
        """torch's own SGD update with these directions in the place of gradients."""
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p in directions]
            buffers: list[Tensor | None] = [self.state[p].get("momentum_buffer") for p in chosen]
            sgd(
                chosen,
                [directions[p] for p in chosen],
                buffers,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                dampening=0.0,
                maximize=False,
            )
            if group["momentum"] != 0:
                for p, buffer in zip(chosen, buffers, strict=True):
                    self.state[p]["momentum_buffer"] = buffer


def check_sgd(owner: str, *, lr: float, momentum: float, weight_decay: float, nesterov: bool) -> None:
    """The options of an SGD step: numbers >= 0, momentum below 1, Nesterov only with momentum."""
    for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
        weight(owner, name, value)
    if momentum >= 1:
        raise ConfigError(f"{owner} momentum must be below 1, got {momentum!r}")
    if not isinstance(nesterov, bool):
        raise ConfigError(f"{owner} nesterov must be true or false, got {nesterov!r}")
    if nesterov and momentum == 0:
        raise ConfigError(f"{owner} nesterov true needs momentum above 0, got {momentum!r}")


def _check_inner(**numbers: float) -> None:
    for name, value in numbers.items():
        weight("entropy_sgd", name, value)
    inner_lr, alpha = numbers["inner_lr"], numbers["alpha"]
    if inner_lr == 0:
        raise ConfigError(f"entropy_sgd inner_lr must be above 0, got {inner_lr!r}")
    if not 0 < alpha <= 1:
        raise ConfigError(f"entropy_sgd alpha must be above 0 and at most 1, got {alpha!r}")
