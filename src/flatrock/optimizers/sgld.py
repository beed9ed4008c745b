"""Stochastic gradient Langevin dynamics (Welling and Teh 2011), and the noise that optimizers share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flatrock.core.errors import ConfigError
from flatrock.core.options import weight
from flatrock.core.rng import Seed

_BLOCK = 1 << 21  # numbers per draw; a draw holds some 100 bytes for each


class SGLD(Optimizer):
    """theta <- theta - lr * (scale * grad + weight_decay * theta) + noise * sqrt(2 * lr) * N(0, I).

    With `scale` = number of training samples, the gradient of a batch-mean loss estimates that of the whole negative
    log-likelihood, `weight_decay` is the precision of a Gaussian prior, and the steps sample the posterior.
    `noise` = sqrt(temperature); 0 makes it plain SGD.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        weight_decay: float = 0.0,
        scale: float = 1.0,
        noise: float = 1.0,
        seed: Seed,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("scale", scale), ("noise", noise)):
            weight("sgld", name, value)
        check_seed("sgld", seed)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.scale, self.noise, self.seed = scale, noise, seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step along the gradients in `.grad`; a closure, if given, makes them first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        noise = gaussians(self.seed.child(updates_done(self)), parameters(self)) if self.noise > 0 else {}
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.grad is not None]
            if not chosen:
                continue
            self._drift(chosen, lr=group["lr"], weight_decay=group["weight_decay"])
            if noise:
                width = self.noise * math.sqrt(2 * group["lr"])
                torch._foreach_add_(chosen, [noise[p] for p in chosen], alpha=width)
        count_update(self)
        return loss

    def _drift(self, params: list[Tensor], *, lr: float, weight_decay: float) -> None:
        directions = torch._foreach_mul([p.grad for p in params if p.grad is not None], self.scale)
        if weight_decay != 0:
            torch._foreach_add_(directions, params, alpha=weight_decay)
        torch._foreach_add_(params, directions, alpha=-lr)


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gaussians(seed: Seed, like: list[Tensor]) -> dict[Tensor, Tensor]:
    """N(0, I) for each tensor: a function of seed and position, the same on every device and in every process.

    Drawn for all tensors together, since many small draws would leave a GPU idle, in blocks that bound the memory.
    """
    sizes = [p.numel() for p in like]
    blocks = torch.split(like[0].new_empty(1).expand(sum(sizes)), _BLOCK)
    one = torch.zeros(1, dtype=torch.int64, device=like[0].device)  # moved there, it would be waited for
    flat = torch.cat([seed.child(i).samples(one).normal(block[None])[0] for i, block in enumerate(blocks)])
    return {p: part.reshape(p.shape).to(p) for part, p in zip(torch.split(flat, sizes), like, strict=True)}


def updates_done(optimizer: Optimizer) -> int:
    """How many updates were made; kept with the first parameter's state, so that state_dict carries it."""
    return int(optimizer.state[parameters(optimizer)[0]].get("updates", 0))


def count_update(optimizer: Optimizer) -> None:
    """One update more."""
    optimizer.state[parameters(optimizer)[0]]["updates"] = updates_done(optimizer) + 1


def check_seed(owner: str, seed: Seed) -> None:
    """Noise needs a seed of its own: optimizers never draw from torch's global generators."""
    if not isinstance(seed, Seed):
        raise ConfigError(f"{owner} seed must be a Seed, got {seed!r}; write for example Seed(0)")
