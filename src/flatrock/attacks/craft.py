"""The guard around every attack: checks what goes in and, in float32 or better, what comes out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flatrock.core.borrow import borrowed
from flatrock.core.errors import ModelError, ThreatError
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat
from flatrock.core.types import Attack

# Rounding of x + delta in float32 may leave the ball by about 1e-7; anything above this is a fault.
SLACK = 1e-6


def check_inputs(x: Tensor, y: Tensor, threat: Threat) -> None:
    """Inputs are finite floats in [0, 1] with one class index each, and eps fits the box; else ThreatError."""
    if not isinstance(threat, Threat):
        raise ThreatError(f"threat must be flatrock.Linf(eps) or flatrock.L2(eps), got {threat!r}")
    for name, value in (("inputs", x), ("labels", y)):
        if not isinstance(value, Tensor):
            raise ThreatError(f"{name} must be a torch tensor, got {type(value).__name__}; use torch.as_tensor")
    if x.dtype not in (torch.float32, torch.float64) or x.dim() < 2:
        raise ThreatError(f"inputs must be float32 or float64 [n, ...], got {x.dtype} of shape {tuple(x.shape)}")
    if y.shape != x.shape[:1] or y.dtype != torch.int64:
        raise ThreatError(
            f"labels must be integers of shape ({x.shape[0]},), got {y.dtype} of {tuple(y.shape)}; use y.long()"
        )
    if x.shape[0] == 0:
        return
    if not bool(torch.isfinite(x).all()):
        raise ThreatError("inputs contain NaN or infinity; clean the data first")
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:
        raise ThreatError(f"inputs must lie in [0, 1], got [{low:.3g}, {high:.3g}]; put normalisation inside the model")
    diameter = math.sqrt(x[0].numel())
    if threat.eps > diameter:
        raise ThreatError(f"eps {threat.eps:g} exceeds the diameter {diameter:.3g} of the input box; write 128/255?")


def check_model(model: nn.Module, x: Tensor) -> None:
    """A module whose weights have the dtype of the inputs; else ModelError."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module that maps inputs to logits, got {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise ModelError("attacks need gradients; call this outside torch.inference_mode()")
    odd = {p.dtype for p in model.parameters() if p.is_floating_point()} - {x.dtype}
    if odd:
        raise ModelError(f"the model has {odd.pop()} weights but the inputs are {x.dtype}; convert one of the two")


def looks_like_probabilities(logits: Tensor) -> bool:
    """Every entry in [0, 1] and every row summing to 1."""
    inside = bool(((logits >= -1e-5) & (logits <= 1 + 1e-5)).all())
    return inside and bool(((logits.sum(1) - 1).abs() < 1e-5).all())


def check_logits(logits: Tensor, x: Tensor, y: Tensor) -> None:
    """One finite row of logits per input, and a class for every label; else ModelError."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != x.shape[0]:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"the model must return logits of shape ({x.shape[0]}, classes), got {shape}")
    if logits.shape[1] < 2:
        raise ModelError("the model returns one column; a classifier needs one logit per class (2 or more)")
    if y.numel() and (int(y.min()) < 0 or int(y.max()) >= logits.shape[1]):
        raise ModelError(
            f"labels span {int(y.min())}..{int(y.max())} but the model has {logits.shape[1]} classes "
            f"(0..{logits.shape[1] - 1}); check num_classes and the data set"
        )
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("the model returns NaN or infinite logits on clean inputs; its weights are damaged")


@contextmanager
def first_logits_checked(model: nn.Module, y: Tensor) -> Iterator[None]:
    """Check what the model returns the first time it is called inside; costs no pass of its own."""

    def look(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        handle.remove()
        check_logits(output, inputs[0], y)
        if looks_like_probabilities(output):
            warnings.warn(
                "the model seems to return probabilities; attacks are weaker on them, return logits", stacklevel=2
            )

    handle = model.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()


def check_crafted(x_adv: Tensor, x: Tensor, threat: Threat, attack: object) -> None:
    """The perturbed inputs are finite, in the ball and in the box; else ThreatError names the attack."""
    if x_adv.shape != x.shape:
        raise ThreatError(f"{attack!r} changed the shape {tuple(x.shape)} to {tuple(x_adv.shape)}")
    if x.shape[0] == 0:
        return
    wide = torch.promote_types(x.dtype, torch.float32)
    x_adv, x = x_adv.to(wide), x.to(wide)
    if not bool(torch.isfinite(x_adv).all()):
        raise ThreatError(f"{attack!r} produced NaN or infinite inputs")
    over = float(threat.size(x_adv - x).max()) - threat.eps
    if over > SLACK:
        raise ThreatError(f"{attack!r} left the {threat.norm} ball of radius {threat.eps:g} by {over:.1e}")
    if float(x_adv.min()) < 0 or float(x_adv.max()) > 1:
        raise ThreatError(f"{attack!r} left the box [0, 1]")


def craft(
    attack: Attack,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    gen: SampleGen,
    *,
    early_stop: bool = False,
) -> Tensor:
    """Run an attack on a borrowed model (eval mode, frozen weights) and vouch for what it returns."""
    with borrowed(model, x.device):
        x_adv = attack(model, x, y, threat, gen, early_stop=early_stop).detach()
    check_crafted(x_adv, x, threat, attack)
    return x_adv
