"""The optimizers by name. Each is made from parameters (or groups of them) and keyword options."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from flatrock.core.registry import Registry
from flatrock.core.rng import Seed
from flatrock.optimizers.entropy_sgd import EntropySGD, check_sgd
from flatrock.optimizers.sgld import SGLD


def sgd(
    params: ParamsT,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    seed: Seed | None = None,
) -> torch.optim.SGD:
    """torch's own SGD. It draws nothing: `seed` is taken because every optimizer here takes one."""
    check_sgd("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
    made = torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
    if all(p.is_cuda for group in made.param_groups for p in group["params"]):
        for group in made.param_groups:
            group |= {"fused": True, "foreach": False}  # the whole step in one pass over memory
    return made


OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry("optimizer")
OPTIMIZERS.add("sgd", sgd, "gradient descent with momentum")
OPTIMIZERS.add(
    "entropy_sgd", EntropySGD, "descent on local entropy, estimated by Langevin steps", cite="Chaudhari 2017"
)
OPTIMIZERS.add("sgld", SGLD, "gradient descent with Gaussian noise that samples the posterior", cite="Welling 2011")


def own_options(name: str) -> tuple[str, ...]:
    """What a recipe may set: all options but the parameters and the seed, which come from the run."""
    return tuple(o for o in OPTIMIZERS.entry(name).options() if o not in ("params", "seed"))
