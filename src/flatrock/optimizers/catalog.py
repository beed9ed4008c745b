"""The optimizers by name. Each is made from parameters (or groups of them) and keyword options."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from flatrock.core.layout import laid_out
from flatrock.core.own import Own
from flatrock.core.registry import Registry
from flatrock.core.rng import Seed
from flatrock.optimizers.adamw import adamw
from flatrock.optimizers.entropy_sgd import EntropySGD, check_sgd
from flatrock.optimizers.fused import fused_on_gpu
from flatrock.optimizers.sgld import SGLD


class FusedSGD(torch.optim.SGD):
    """torch's SGD in one pass over memory.

    Its kernel wants a momentum for every parameter from the first step on (0: the same numbers), and weights, gradients
    and momenta laid out alike.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = laid_out(p.grad, p)
                if group["momentum"]:  # one restored from a file, which knows no layout, or none yet
                    held = self.state[p].get("momentum_buffer")
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p) if held is None else laid_out(held, p)
        return super().step(closure)


def sgd(
    params: ParamsT,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    seed: Seed | None = None,
) -> torch.optim.SGD:
    """torch's own SGD, on a GPU the fused one. It draws nothing: `seed` is taken because every optimizer here does."""
    check_sgd("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
    options: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return fused_on_gpu(torch.optim.SGD(params, **options), FusedSGD, options)


OWN = Own[torch.optim.Optimizer](
    "an optimizer",
    "a class that derives from torch.optim.Optimizer, or `def make(params, *, lr) -> torch.optim.Optimizer`",
    calls={"step": ""},
    base=torch.optim.Optimizer,
    returns=torch.optim.Optimizer,
    given=("params", "lr", "seed"),
)
OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry("optimizer", OWN)
OPTIMIZERS.add("sgd", sgd, "gradient descent with momentum")
OPTIMIZERS.add("adamw", adamw, "steps of about lr per weight, decay apart from them", cite="Loshchilov 2019")
OPTIMIZERS.add(
    "entropy_sgd", EntropySGD, "descent on local entropy, estimated by Langevin steps", cite="Chaudhari 2017"
)
OPTIMIZERS.add("sgld", SGLD, "gradient descent with Gaussian noise that samples the posterior", cite="Welling 2011")


def own_options(name: str) -> tuple[str, ...]:
    """What a recipe may set: all options but the parameters and the seed, which come from the run."""
    return tuple(o for o in OPTIMIZERS.entry(name).options() if o not in ("params", "seed"))


def lacks(name: object, option: str) -> bool:
    """Whether this is an optimizer of ours without such an option; what one of the user's has only its code knows."""
    return isinstance(name, str) and name in OPTIMIZERS and option not in own_options(name)
