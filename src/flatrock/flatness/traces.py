"""Trace of the Hessian of each loss term w.r.t. the weights of the last linear layer, in closed form.

f, f' are the features of the clean and the adversarial pass, <f, f'> their inner product; s, t the softmax of their
logits, Phi = diag(s) - s s^T, Phi' the same of t; a = log s - log t, K = KL(s || t). Inputs are constants, everything
else carries gradient. `full` differentiates the loss through both passes; otherwise the clean side of a pair counts as
constant in the loss (not in the trace). With `bias` the layer's bias is counted too: every inner product of features
grows by 1. The TrH appendix misprints some of these; here are the corrected forms, checked against autograd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.registry import unknown
from flatrock.core.types import Parts, View, Views

TERMS = ("ce", "ce_adv", "ce_helper", "boost", "kl", "wkl", "pair_logits", "pair_probabilities")


def cross_entropy(view: View, *, bias: bool = False) -> Tensor:
    """||f||^2 (1 - ||s||^2), whatever the label (also rows of probabilities)."""
    return _inner(view, view, bias) * _spread(F.softmax(view.logits, 1))


def kl(clean: View, adv: View, *, full: bool, bias: bool = False) -> Tensor:
    """KL(s || t): ||f'||^2 (1 - ||t||^2), and if `full` also

    ||f||^2 [(1 - ||s||^2) - 2 sum_k s_k^2 (a_k - K)] - 2 <f, f'> (1 - ||s||^2); zero in total where x' = x.
    """
    stopped = cross_entropy(adv, bias=bias)
    if not full:
        return stopped
    s, excess, _ = _log_ratio(clean, adv)
    spread = _spread(s)
    rest = spread - 2 * (s.square() * excess).sum(1)
    return stopped + _inner(clean, clean, bias) * rest - 2 * _inner(clean, adv, bias) * spread


def weighted_kl(clean: View, adv: View, y: Tensor, *, full: bool, bias: bool = False) -> Tensor:
    """MART's (1 - s_y) KL(s || t): (1 - s_y) T with T the trace of the KL, and if `full` also

    - 2 sum_k Phi_yk [||f||^2 s_k (a_k - K) + <f, f'> (t_k - s_k)] + 2 K ||f||^2 s_y (s_y - ||s||^2).
    """
    trace = kl(clean, adv, full=full, bias=bias)
    if not full:
        return (1 - _pick(F.softmax(clean.logits, 1), y)) * trace
    s, excess, divergence = _log_ratio(clean, adv)
    s_y = _pick(s, y)
    size, cross = _inner(clean, clean, bias), _inner(clean, adv, bias)
    slope = size[:, None] * s * excess + cross[:, None] * (F.softmax(adv.logits, 1) - s)
    mixed = s_y * (_pick(slope, y) - (s * slope).sum(1))
    return (1 - s_y) * trace - 2 * mixed + 2 * divergence * size * s_y * (s_y - s.square().sum(1))


def boost(adv: View, y: Tensor, *, bias: bool = False) -> Tensor:
    """MART's margin -log(1 - q), q = t_kappa, kappa the most probable wrong class: ||f'||^2 q [(2 - q) ||u||^2 - q].

    u is t given that the class is not kappa, so that nothing is divided by 1 - q. The trace may be negative.
    """
    classes = adv.logits.shape[1]
    kappa = adv.logits.detach().masked_fill(F.one_hot(y, classes).bool(), -torch.inf).argmax(1)
    q = _pick(F.softmax(adv.logits, 1), kappa)
    u = F.softmax(adv.logits.masked_fill(F.one_hot(kappa, classes).bool(), -torch.inf), 1)
    return _inner(adv, adv, bias) * q * ((2 - q) * u.square().sum(1) - q)


def pair_logits(clean: View, adv: View, *, full: bool, bias: bool = False) -> Tensor:
    """||z - z'||^2: 2C ||f'||^2, and 2C ||f - f'||^2 if `full` (where a bias cancels)."""
    factor = 2 * adv.logits.shape[1]
    if full:
        return factor * (clean.features - adv.features).square().sum(1)
    return factor * _inner(adv, adv, bias)


def pair_probabilities(clean: View, adv: View, *, full: bool, bias: bool = False) -> Tensor:
    """||r||^2 with r = s - t: 2 ||f'||^2 [||Phi'||_F^2 - sum_k (1 - 2 t_k) (Phi' r)_k], and if `full` also

    2 ||f||^2 [||Phi||_F^2 + sum_k (1 - 2 s_k) (Phi r)_k] - 4 <f, f'> <Phi, Phi'>_F.
    """
    s, t = F.softmax(clean.logits, 1), F.softmax(adv.logits, 1)
    r = s - t
    trace = 2 * _inner(adv, adv, bias) * (_phi_inner(t, t) - _bend(t, r))
    if not full:
        return trace
    trace = trace + 2 * _inner(clean, clean, bias) * (_phi_inner(s, s) + _bend(s, r))
    return trace - 4 * _inner(clean, adv, bias) * _phi_inner(s, t)


def term_trace(name: str, views: Views, y: Tensor, *, full: bool, bias: bool = False) -> Tensor:
    """Trace of the loss term of this name, per sample."""
    match name:
        case "ce":
            return cross_entropy(_made(views.clean), bias=bias)
        case "ce_adv":
            return cross_entropy(_made(views.adv), bias=bias)
        case "ce_helper":
            return cross_entropy(_made(views.helper), bias=bias)
        case "boost":
            return boost(_made(views.adv), y, bias=bias)
        case "kl":
            return kl(_made(views.clean), _made(views.adv), full=full, bias=bias)
        case "wkl":
            return weighted_kl(_made(views.clean), _made(views.adv), y, full=full, bias=bias)
        case "pair_logits":
            return pair_logits(_made(views.clean), _made(views.adv), full=full, bias=bias)
        case "pair_probabilities":
            return pair_probabilities(_made(views.clean), _made(views.adv), full=full, bias=bias)
    raise ConfigError(f"{unknown('loss term with a closed trace', name, TERMS)}; or use trh layers: full")


def loss_trace(parts: Parts, views: Views, y: Tensor, *, full: bool, bias: bool = False) -> Tensor:
    """Trace of a whole loss: sum_k weights[k] * mean trace_k, means over the samples the term itself is a mean of."""
    total = next(iter(parts.terms.values())).new_zeros(())
    for name in parts.terms:
        if parts.weights[name] != 0:
            per_sample = term_trace(name, views, y, full=full, bias=bias)
            total = total + parts.weights[name] * _mean(name, per_sample, y)
    return total


def _mean(name: str, per_sample: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy is a mean over the labelled samples, every other term over all (a helper labels all)."""
    if y.is_floating_point() or name not in ("ce", "ce_adv"):
        return per_sample.mean()
    labelled = y >= 0
    return (per_sample * labelled).sum() / labelled.sum().clamp_min(1)


def _made(view: View | None) -> View:
    if view is None:
        raise RuntimeError("a loss term is there, but not the network pass it was computed from")
    return view


def _inner(one: View, other: View, bias: bool) -> Tensor:
    """<f, f'>, plus the product of the constant inputs of the bias."""
    product = (one.features * other.features).sum(1)
    return product + 1 if bias else product


def _pick(rows: Tensor, classes: Tensor) -> Tensor:
    return rows.gather(1, classes[:, None]).squeeze(1)


def _spread(p: Tensor) -> Tensor:
    """1 - ||p||^2, written so that rounding cannot make it negative."""
    return (p * (1 - p)).sum(1)


def _log_ratio(clean: View, adv: View) -> tuple[Tensor, Tensor, Tensor]:
    """s, a - K and K; from logits, so that no logarithm of zero is taken."""
    log_s = F.log_softmax(clean.logits, 1)
    s, a = log_s.exp(), log_s - F.log_softmax(adv.logits, 1)
    divergence = (s * a).sum(1)
    return s, a - divergence[:, None], divergence


def _phi_inner(p: Tensor, q: Tensor) -> Tensor:
    """<diag(p) - p p^T, diag(q) - q q^T>_F = sum_k p_k q_k (1 - p_k - q_k) + (p . q)^2."""
    product = p * q
    return (product * (1 - p - q)).sum(1) + product.sum(1).square()


def _bend(p: Tensor, r: Tensor) -> Tensor:
    """sum_k (1 - 2 p_k) (Phi r)_k, where (Phi r)_k = p_k (r_k - p . r)."""
    return ((1 - 2 * p) * p * (r - (p * r).sum(1, keepdim=True))).sum(1)
