"""AdamW (Loshchilov and Hutter 2019): steps of about the rate per weight, and decay that is not one of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from flatrock.core.errors import ConfigError
from flatrock.core.layout import laid_out
from flatrock.core.options import share, weight
from flatrock.core.rng import Seed
from flatrock.optimizers.fused import fused_on_gpu

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW in one pass over memory; it counts its updates on the device, so that nobody waits for it.

    Its kernel wants weights, gradients and both moments laid out alike.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; a parameter without gradient stays out of it, its moments too."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.grad = laid_out(p.grad, p)
                for name in MOMENTS:  # restored from a file, which knows no layout; the first step makes its own
                    if name in self.state[p]:
                        self.state[p][name] = laid_out(self.state[p][name], p)
        return super().step(closure)


def adamw(
    params: ParamsT,
    *,
    lr: float,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    seed: Seed | None = None,
) -> torch.optim.AdamW:
    """torch's own AdamW, on a GPU the fused one. At update t = 1, 2, ..., g the gradient,

        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        w <- w - lr weight_decay w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    A weight moves by about lr whatever the size of its gradient. It draws nothing: `seed` is taken because every
    optimizer here does.
    """
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        weight("adamw", name, value)
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ConfigError(f"adamw betas must be two numbers, got {betas!r}; write [0.9, 0.999]")
    for beta in betas:
        share("adamw", "betas", beta, less=True)
    options: dict[str, Any] = {"lr": lr, "betas": tuple(map(float, betas)), "eps": eps, "weight_decay": weight_decay}
    return fused_on_gpu(torch.optim.AdamW(params, **options), FusedAdamW, options)
