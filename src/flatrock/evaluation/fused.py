"""BatchNorm in eval mode is one factor and one shift per channel: it and the ReLU behind it as a single kernel."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
RELUS = (F.relu, F.relu_, torch.relu, torch.relu_)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _like(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel (axis 1), to be combined with x."""
    return values.reshape(-1, *[1] * (x.dim() - 2))


class _AffineReLU(torch.autograd.Function):
    """The Triton kernels; the mask of the ReLU is read off the output, which the next layer keeps anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
        from flatrock.evaluation.affine_triton import affine

        out = affine(x, scale, shift, relu=relu)
        ctx.save_for_backward(scale, *([out] if relu else []))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        from flatrock.evaluation.affine_triton import affine, affine_relu_backward

        scale, *out = ctx.saved_tensors
        if out:
            return affine_relu_backward(grads[0], out[0], scale), None, None, None
        return affine(grads[0], scale, torch.zeros_like(scale), relu=False), None, None, None


class Affine(nn.Module):
    """x * scale + shift per channel, then ReLU if asked for: what a BatchNorm with fixed statistics computes.

    scale = weight / sqrt(var + eps), shift = bias - mean * scale. Both are plain attributes, not buffers: rounding
    the network to half precision must not round them.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, *, relu: bool) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.running_var.detach().double() + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight.detach().double()
        shift = -norm.running_mean.detach().double() * scale
        if norm.bias is not None:
            shift = shift + norm.bias.detach().double()
        # Reduced precision never gets below float32 here, and double stays double.
        kind = torch.promote_types(norm.running_var.dtype, torch.float32)
        self.scale, self.shift = scale.to(kind), shift.to(kind)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """In float32 or better; the result has the dtype of x."""
        if x.is_cuda and x.dim() in (2, 4) and _has_triton():
            out: Tensor = _AffineReLU.apply(x, self.scale, self.shift, self.relu)  # type: ignore[no-untyped-call]
            return out
        out = (x * _like(self.scale, x) + _like(self.shift, x)).to(x.dtype)
        return F.relu(out) if self.relu else out


def _fixed(module: nn.Module) -> bool:
    """A BatchNorm that uses its running statistics."""
    return isinstance(module, NORMS) and module.running_mean is not None and not module.training


def fused(model: nn.Module) -> tuple[nn.Module, bool]:
    """The network with every BatchNorm (eval mode) as an `Affine`, and whether it is a plain sequence of operations.

    Where the network can be traced, a ReLU that follows goes into the same kernel; where it cannot, it stays. The
    modules are changed in place: give a copy.
    """
    traced = _traced(model)
    if traced is None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if _fixed(child):
                    setattr(parent, name, Affine(child, relu=False))  # type: ignore[arg-type]
        return model, False
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op == "call_module" and _fixed(modules[node.target]):
            _replace(traced, node, modules)
    traced.graph.lint()
    traced.recompile()
    traced.delete_all_unused_submodules()
    return traced, True


def _traced(model: nn.Module) -> fx.GraphModule | None:
    """The network as a graph, or nothing: it branches on values, has hooks, or makes tensors on its own."""
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules()):
        return None  # tracing would lose them
    try:
        traced, again = fx.symbolic_trace(model), fx.symbolic_trace(model)
    except Exception:  # whatever a foreign network does when it meets a stand-in for a tensor
        return None
    # Numbers and tensors the network makes on its own, random ones perhaps, would be frozen to what they were.
    constant = any(n.op == "get_attr" and str(n.target).startswith("_tensor_constant") for n in traced.graph.nodes)
    return None if constant or str(traced.graph) != str(again.graph) else traced


def _replace(traced: fx.GraphModule, node: fx.Node, modules: dict[str, nn.Module]) -> None:
    """Put an Affine in the place of a BatchNorm node, and of the ReLU behind it if nothing else reads between."""
    users = list(node.users)
    relu = len(users) == 1 and _is_relu(users[0], modules)
    # The same BatchNorm may be called twice; each call gets its own Affine.
    name = f"affine_{node.name}"
    traced.add_submodule(name, Affine(modules[str(node.target)], relu=relu))  # type: ignore[arg-type]
    with traced.graph.inserting_after(node):
        new = traced.graph.call_module(name, (node.args[0],))
    last = users[0] if relu else node
    last.replace_all_uses_with(new)
    if relu:
        traced.graph.erase_node(last)
    traced.graph.erase_node(node)


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return type(modules[str(node.target)]) is nn.ReLU
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in RELUS
