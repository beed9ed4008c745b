"""Trace of the Hessian of a batch loss w.r.t. all parameters: estimated, and exact for small ReLU networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed

_KIND = "the exact trace is for networks of nn.Linear layers and ReLUs"
CURE = "use estimate: hutchinson"
# Layers with statistics of their input: torch's third derivative of these is wrong (pytorch issues 175754, 186256),
# and so is the gradient of a forward-mode derivative.
_STATISTICS = (nn.modules.batchnorm._NormBase, nn.LayerNorm)
# Layers whose output is piecewise linear in their input, row by row; everything else is refused.
_BENT = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Identity, nn.Flatten)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def hutchinson(total: Tensor, parameters: Mapping[str, Tensor], *, seed: Seed, probes: int = 1) -> Tensor:
    """mean_v v^T H v over Rademacher vectors v: unbiased, variance 2 (||H||_F^2 - sum_i H_ii^2) for one v.

    H is the Hessian of `total`, whose graph must reach the parameters. The estimate is differentiable, if the network
    passes `check_higher_derivatives`.
    """
    tensors = list(parameters.values())
    slopes = torch.autograd.grad(total, tensors, create_graph=True, materialize_grads=True)
    estimates = []
    for i in range(probes):
        signs = [rademacher(p, seed.child("probe", i, name)) for name, p in parameters.items()]
        with torch.enable_grad():
            along = _dot(slopes, signs)
            curved = torch.autograd.grad(along, tensors, create_graph=True, materialize_grads=True)
            estimates.append(_dot(curved, signs))
    return torch.stack(estimates).mean()


def rademacher(like: Tensor, seed: Seed) -> Tensor:
    """Random signs with the shape of `like`, the same on every device."""
    row = torch.empty(1, like.numel(), device=like.device)
    heads = seed.samples(torch.zeros(1)).uniform(row) < 0.5
    return heads.to(like.dtype).mul_(2).sub_(1).reshape(like.shape)


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()


def check_higher_derivatives(model: nn.Module, *, of: str = "an estimated trace", cure: str = "layers: top") -> None:
    """torch differentiates every layer as often as it should: none works with statistics of its input, as it is now.

    `of` is what needs such derivatives, `cure` the option that does not.
    """
    for name, module in model.named_modules():
        if _counts(module):
            raise ModelError(
                f"the gradient of {of} needs higher derivatives, which torch gets wrong for layer "
                f"{name!r} ({type(module).__name__}); use {cure}, or nn.GroupNorm instead of that layer"
            )
        if _lengths_apart(module):
            raise ModelError(
                f"the gradient of {of} needs higher derivatives, which torch gets wrong for the weight_norm at "
                f"{name!r}; use {cure}, or remove it with torch.nn.utils.parametrize.remove_parametrizations"
            )


def _counts(module: nn.Module) -> bool:
    """Whether it takes statistics of its input; BatchNorm in eval mode uses those it kept."""
    if not isinstance(module, _STATISTICS):
        return False
    kept = isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
    return module.training or not kept


def _lengths_apart(module: nn.Module) -> bool:
    """Whether it is torch's weight_norm, or a layer that has the older one: even second derivatives are wrong."""
    return isinstance(module, _WeightNorm) or any(
        isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()
    )


def exact_traces(model: nn.Module, total: Tensor, passes: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Trace of the Hessian of `total` w.r.t. each parameter, by name; their sum is the trace of the network.

    `passes` are (inputs, logits) of the network passes `total` was computed from. In a network of linear layers and
    ReLUs no logit is curved within one layer, so that block of the Hessian is sum_i J_i^T L_i J_i: L_i the Hessian of
    the loss w.r.t. all logits of sample i, J_i their Jacobian, whose row a is slope_a (x) input for a weight and
    slope_a for a bias. Only inner products of slopes and of inputs are needed; one more forward pass yields them.
    Differentiable. ModelError if the network is not of this kind.
    """
    check_piecewise_linear(model)
    curvature, used = _logit_hessian(total, [logits for _, logits in passes])
    with torch.enable_grad():
        traces = {}
        for name, layer in _layers(model, [passes[i] for i in used]).items():
            weighted = curvature * (layer.slopes @ layer.slopes.mT)
            if layer.module.weight.requires_grad:
                traces[_joined(name, "weight")] = (weighted * layer.inputs_inner()).sum()
            if layer.module.bias is not None and layer.module.bias.requires_grad:
                traces[_joined(name, "bias")] = weighted.sum()
        return traces


def _joined(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def check_piecewise_linear(model: nn.Module) -> None:
    """Every layer is linear, a ReLU of some kind, or does nothing; every parameter belongs to one linear layer."""
    # The estimate cannot help where it is refused itself.
    cure = "use layers: top" if any(map(_counts, model.modules())) else CURE
    owned = set()
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            owned |= {_joined(name, p) for p, _ in module.named_parameters()}
        elif isinstance(module, _DROPOUT):
            if module.training and module.p > 0:
                raise ModelError(f"{_KIND}, but layer {name!r} ({type(module).__name__}) is random; {cure}")
        elif not isinstance(module, _BENT) and next(module.children(), None) is None and name:
            raise ModelError(f"{_KIND}, but layer {name!r} ({type(module).__name__}) is neither; {cure}")
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in owned:
            raise ModelError(f"{_KIND}, but the parameter {name!r} belongs to neither; {cure}")
    if len(list(model.parameters())) != len(owned):
        raise ModelError(f"{_KIND} that share no parameter; {cure}")


def _logit_hessian(total: Tensor, logits: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Second derivatives [n, PC, PC] w.r.t. all logits of a sample jointly, and which P passes the loss depends on."""
    slopes = torch.autograd.grad(total, logits, create_graph=True, allow_unused=True)
    used = [i for i, slope in enumerate(slopes) if slope is not None]
    chosen = [logits[i] for i in used]
    rows = []
    with torch.enable_grad():
        for i in used:
            for column in slopes[i].unbind(1):
                # Samples do not meet in the loss, so the gradient of a sum over samples is each sample's own row.
                row = torch.autograd.grad(column.sum(), chosen, create_graph=True, materialize_grads=True)
                rows.append(torch.cat(row, 1))
        return torch.stack(rows, 1), used


@dataclass(frozen=True)
class _Layer:
    """A linear layer in one pass over a batch: its inputs [n, P, in] and the slopes [n, PC, out] of all logits."""

    inputs: Tensor
    slopes: Tensor
    module: nn.Linear

    def inputs_inner(self) -> Tensor:
        """Inner products of inputs [n, PC, PC]: the same for all C logits of a pass."""
        classes = self.slopes.shape[1] // self.inputs.shape[1]
        inner = self.inputs @ self.inputs.mT
        return inner.repeat_interleave(classes, 1).repeat_interleave(classes, 2)


def _trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _layers(model: nn.Module, passes: Sequence[tuple[Tensor, Tensor]]) -> dict[str, _Layer]:
    """Run the inputs of all passes through the network once more and look at every linear layer."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and _trained(m)}
    with _watched(linears) as calls:
        logits = model(torch.cat([x for x, _ in passes]))
    _check_calls(calls, logits, torch.cat([z for _, z in passes]))
    outputs = [calls[name][0][1] for name in linears]
    # [C][layer] of [Pn, out]: one backward pass per class.
    slopes = [
        torch.autograd.grad(z.sum(), outputs, create_graph=True, materialize_grads=True) for z in logits.unbind(1)
    ]
    _check_straight(list(linears), outputs, slopes)
    layers = {}
    for i, (name, module) in enumerate(linears.items()):
        inputs = torch.stack(calls[name][0][0].chunk(len(passes)), 1)
        by_class = torch.stack([row[i] for row in slopes], 1)
        layers[name] = _Layer(inputs, torch.cat(by_class.chunk(len(passes)), 1), module)
    return layers


@contextmanager
def _watched(linears: Mapping[str, nn.Linear]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Input and output of every call of these layers."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in linears}
    handles = []

    def watch(name: str, module: nn.Linear) -> None:
        def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            calls[name].append((args[0], output))
            return output.clone()  # a ReLU in place would turn what was kept into its own result

        handles.append(module.register_forward_hook(keep))

    try:
        for name, module in linears.items():
            watch(name, module)
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _check_calls(calls: Mapping[str, Sequence[tuple[Tensor, Tensor]]], logits: Tensor, before: Tensor) -> None:
    for name, made in calls.items():
        if len(made) != 1 or made[0][0].dim() != 2 or len(made[0][0]) != len(logits):
            shapes = [list(inputs.shape) for inputs, _ in made]
            raise ModelError(
                f"the exact trace needs layer {name!r} to run once per pass on one row per sample, "
                f"but its inputs were {shapes}; {CURE}"
            )
    if not torch.allclose(logits, before, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise ModelError(f"the exact trace needs a network that gives the same logits when asked twice; {CURE}")


def _check_straight(names: Sequence[str], outputs: Sequence[Tensor], slopes: Sequence[Sequence[Tensor]]) -> None:
    """No slope may depend on a layer's output except by jumps: finds curved functions that are not modules."""
    sizes = [slope.square().sum() for row in slopes for slope in row if slope.requires_grad]
    if not sizes:
        return
    bends = torch.autograd.grad(sizes, outputs, retain_graph=True, allow_unused=True)
    # What is not finite is no evidence: the loss will say so itself.
    for name, bend in reversed(list(zip(names, bends, strict=True))):
        if bend is not None and bool(bend.nan_to_num(0, 0, 0).any()):
            raise ModelError(f"{_KIND}, but something bends the logits after layer {name!r}; {CURE}")
