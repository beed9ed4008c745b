"""TrH: the trace of the Hessian as a penalty, from a linear PAC-Bayes bound (Wang et al. 2023)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatrock.core.borrow import mode
from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Flatness, Look, Penalty
from flatrock.core.options import choose, count, weight
from flatrock.core.types import Objective
from flatrock.flatness.full_trace import (
    check_higher_derivatives,
    check_piecewise_linear,
    exact_traces,
    hutchinson,
)
from flatrock.flatness.traces import loss_trace

SCHEDULES = ("constant", "linear", "multistep")
# What an exact trace of the whole network (two classes), or one probe, and its gradient cost in training passes: timed.
FULL_PASSES = 8


@dataclass(frozen=True, kw_only=True)
class TrH(Flatness):
    """loss + weight * Tr H + gamma * ||theta||^2: the terms of the bound that depend on the data, logged either way.

    `layers: top` counts the weights of the last linear layer in closed form, at no network pass; `bias` its bias too;
    `clean: stop` (the paper's Case I) takes the clean side of a pair such as KL(s || t) as constant in the loss, `full`
    does not. `layers: full` counts every parameter of the loss as it is (`clean: full`): `estimate: exact` for small
    ReLU networks, or `hutchinson` with random `probes`. The trace belongs to the loss whose constants are exact (MART
    `form: paper`). `schedule` is that of the weight. The default weight, 1e-4, is the paper's for TRADES on CIFAR; it
    tried 1e-5 to 1e-2, with gamma 1e-3 on CIFAR. gamma * ||theta||^2 acts like SGD's weight decay of 2 gamma, hence 0
    here.
    """

    weight: float = 1e-4
    schedule: str = "constant"
    gamma: float = 0.0
    clean: str = "stop"
    bias: bool = False
    layers: str = "top"
    estimate: str = "exact"
    probes: int = 1

    def __post_init__(self) -> None:
        weight("trh", "weight", self.weight)
        weight("trh", "gamma", self.gamma)
        choose("trh", "schedule", self.schedule, SCHEDULES)
        choose("trh", "clean", self.clean, ("stop", "full"))
        choose("trh", "layers", self.layers, ("top", "full"))
        choose("trh", "estimate", self.estimate, ("exact", "hutchinson"))
        count("trh", "probes", self.probes, least=1)
        if not isinstance(self.bias, bool):
            raise ConfigError(f"trh bias must be true or false, got {self.bias!r}")
        if self.layers == "top" and self.estimate != "exact":
            raise ConfigError("trh layers: top is exact; write layers: full to use estimate: hutchinson")
        if self.estimate == "exact" and self.probes != 1:
            raise ConfigError(f"trh probes: {self.probes} are of estimate: hutchinson; leave probes out")
        if self.layers == "full" and self.clean != "full":
            raise ConfigError("trh layers: full is of the loss as it is, with no side stopped; write clean: full")
        if self.layers == "full" and self.bias:
            raise ConfigError("trh layers: full counts every bias already; leave bias out")

    @property
    def needs_reference(self) -> bool:
        """A trace of the whole network differentiates it three times."""
        return self.layers == "full"

    def check(self, model: nn.Module) -> None:
        """A trace of the whole network needs layers that can be differentiated that often."""
        if self._acts and self.layers == "full":
            with mode(model, training=True):
                check_piecewise_linear(model) if self.estimate == "exact" else check_higher_derivatives(model)

    def check_objective(self, objective: Objective) -> None:
        """The closed forms are of losses as published: exact logarithms, and nothing stopped where `clean: full`."""
        if self._acts and self.layers == "top" and getattr(objective, "form", "paper") == "code":
            raise ConfigError("trh is the trace of MART's exact loss; with form: code use form: paper instead")
        if self._acts and self.clean == "full" and getattr(objective, "stop_clean", False):
            raise ConfigError("trh clean: full is not the trace of a loss with stop_clean: true; use clean: stop")

    def in_loss(self, look: Look) -> Penalty | None:
        """Terms `trace` and `theta_sq`, unweighted."""
        if not self._acts:
            return None
        now = self.weight * schedule_factor(self.schedule, look.moment.share)
        with _only_logged(now == 0):
            trace = self._trace(look)
        with _only_logged(self.gamma == 0):
            theta_sq = squared_norm(look.model)
        return Penalty({"trace": trace, "theta_sq": theta_sq}, {"trace": now, "theta_sq": self.gamma})

    def passes(self, objective: int, attack: int) -> int:
        """None for the top layer; higher derivatives of the whole network are as dear as many plain passes."""
        if not self._acts or self.layers == "top":
            return 0
        return FULL_PASSES * self.probes * objective

    @property
    def _acts(self) -> bool:
        return self.weight != 0 or self.gamma != 0

    def _trace(self, look: Look) -> Tensor:
        if self.layers == "top":
            return loss_trace(look.parts, look.views, look.y, full=self.clean == "full", bias=self.bias)
        with torch.enable_grad():  # the loss keeps its graph, whoever asks for it first
            total = look.parts.total
        if self.estimate == "hutchinson":
            check_higher_derivatives(look.model)
            seed = look.moment.seed.child("trh", look.moment.step)
            trained = {name: p for name, p in look.model.named_parameters() if p.requires_grad}
            return hutchinson(total, trained, seed=seed, probes=self.probes)
        views = ((look.x, look.views.clean), (look.x_adv, look.views.adv), (look.x_helper, look.views.helper))
        passes = [(inputs, view.logits) for inputs, view in views if inputs is not None and view is not None]
        return torch.stack(list(exact_traces(look.model, total, passes).values())).sum()


def _only_logged(value: bool) -> AbstractContextManager[object]:
    """No graph for a term of weight 0."""
    return torch.no_grad() if value else nullcontext()


def schedule_factor(schedule: str, share: float) -> float:
    """constant: 1. linear: from 0 to 1. multistep: 0.01 before 10 % of training, 0.1 before 50 %, then 1."""
    if schedule == "linear":
        return share
    if schedule == "multistep":
        return 0.01 if share < 0.1 else 0.1 if share < 0.5 else 1.0
    return 1.0


def squared_norm(model: nn.Module) -> Tensor:
    """||theta||^2 over all parameters."""
    norms = torch._foreach_norm(list(model.parameters()))  # one kernel for many small tensors
    return torch.stack(norms).square().sum()
