"""A network in eval mode with what surrounds its BatchNorms fused: convolution or sum, BatchNorm and ReLU."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from flatrock.core.rng import random_states
from flatrock.models.compare import hooked
from flatrock.models.fused_layers import Affine, FoldedConv, PaddedConv, fixed, foldable, narrow
from flatrock.models.norm import NORMS
from flatrock.models.turned import TurnedConv, turnable

RELUS = (F.relu, F.relu_, torch.relu, torch.relu_)
SUMS = (operator.add, torch.add)


def fused(model: nn.Module, *, trace: bool = True) -> tuple[nn.Module, bool]:
    """The network with every BatchNorm (eval mode) as an `Affine`, and whether it is a plain sequence of operations.

    Where the network can be traced, the sum before a BatchNorm and the ReLU behind it go into the same kernel, and a
    BatchNorm between a convolution and a ReLU becomes part of the convolution; where it cannot, they stay. A trace
    knows no aliases: who changes a tensor in place and reads it under another name gets something else. Compare before
    you trust it. The modules are changed in place: give a copy.
    """
    traced = _traced(model) if trace else None
    if traced is None:
        for name, module in list(model.named_modules()):
            if fixed(module):
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, Affine(module, name))
        return model, False
    surgery = _Surgery(traced)
    try:
        for node in list(traced.graph.nodes):
            surgery.operate(node)
        for node in list(traced.graph.nodes):
            surgery.turn(node)
        traced.graph.lint()
        traced.recompile()
        traced.delete_all_unused_submodules()
    finally:
        traced.graph.owning_module = None  # or it would hold itself, and its memory, until Python looks for garbage
    return traced, True


def _traced(model: nn.Module) -> fx.GraphModule | None:
    """The network as a graph, or nothing: it branches on values, has hooks, or makes tensors on its own."""
    if any(hooked(m) for m in model.modules()):
        return None  # tracing would lose them
    if len(inspect.signature(model.forward).parameters) != 1:
        return None  # a stand-in would be put in the place of optional arguments too
    before = random_states()
    try:
        graph, again = _graph(model), _graph(model)
        tossed = random_states() != before  # a coin; the trace would hold one side of it
        # Numbers and tensors the network makes on its own, random ones perhaps, would be frozen to what they were.
        constant = any(n.op == "get_attr" and str(n.target).startswith("_tensor_constant") for n in graph.nodes)
        return None if tossed or constant or str(graph) != str(again) else fx.GraphModule(model, graph)
    except Exception:  # whatever a foreign network does when it meets a stand-in for a tensor
        return None


class _Tracer(fx.Tracer):
    """Takes a BatchNorm of ours for one step, as it does torch's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether to look inside is not worth it."""
        return type(m) in NORMS or super().is_leaf_module(m, module_qualified_name)


def _graph(model: nn.Module) -> fx.Graph:
    """What the network does with its inputs, step by step."""
    tracer = _Tracer()
    try:
        return tracer.trace(model)
    finally:
        vars(tracer).clear()  # it holds itself, and would hold the network until Python looks for garbage


class _Surgery:
    """Replaces nodes of a traced network one by one."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.traced = traced
        self.modules = dict(traced.named_modules())

    def operate(self, node: fx.Node) -> None:
        """Replace a BatchNorm or a narrow convolution; everything else stays."""
        module = self._called(node)
        if module is not None and fixed(module):
            self._fuse(node, module)
        elif isinstance(module, nn.Conv2d) and narrow(module):
            self._replace(node, self._insert(node, PaddedConv(module, str(node.target)), node.args))

    def turn(self, node: fx.Node) -> None:
        """Replace a convolution that is left, if its gradients are faster that way."""
        module = self._called(node)
        if isinstance(module, nn.Conv2d) and turnable(module):
            self._replace(node, self._insert(node, TurnedConv(module, str(node.target)), node.args))

    def _called(self, node: fx.Node) -> nn.Module | None:
        """The layer a node calls; a call by keyword is left alone: whoever writes one may mean more by it."""
        usual = node.op == "call_module" and len(node.args) == 1 and not node.kwargs
        return self.traced.get_submodule(str(node.target)) if usual else None

    def _fuse(self, node: fx.Node, norm: nn.Module) -> None:
        """One Affine for a BatchNorm, the sum before it and the ReLU behind it (if nothing reads in between)."""
        users, name = list(node.users), str(node.target)
        relu = len(users) == 1 and self._is_relu(users[0])
        source = node.args[0]
        last = users[0] if relu else node
        if relu and (conv := self._conv_for(source)) is not None:
            assert isinstance(source, fx.Node)
            layer = FoldedConv(conv, str(source.target), Affine(norm, name, relu=True))
            self._replace(last, self._insert(node, layer, source.args))
        else:
            # The kernel takes the place of the sum; whoever else reads the sum gets it from there.
            total = source if isinstance(source, fx.Node) and _is_sum(source) else None
            keep, twice = total is not None and len(total.users) > 1, len(last.users) == 2
            place = node if total is None else total
            new = self._insert(place, Affine(norm, name, relu=relu, twice=twice, keep=keep), place.args)
            out, *others = self._parts(new, 1 + twice + keep)
            if keep and total is not None:
                total.replace_all_uses_with(others.pop(), delete_user_cb=lambda user: user is not node)
            if twice:
                second = list(last.users)[1]
                last.replace_all_uses_with(others.pop(), delete_user_cb=lambda user: user is second)
            self._replace(last, out)
        if relu:
            self.traced.graph.erase_node(node)
        if isinstance(source, fx.Node) and not source.users:
            self.traced.graph.erase_node(source)

    def _conv_for(self, source: object) -> nn.Conv2d | None:
        """The convolution that this node calls, if a BatchNorm can become a part of it: nobody else reads it."""
        alone = isinstance(source, fx.Node) and source.op == "call_module" and len(source.users) == 1
        if not (alone and isinstance(source, fx.Node) and len(source.args) == 1 and not source.kwargs):
            return None
        module = self.modules.get(str(source.target))
        return module if isinstance(module, nn.Conv2d) and foldable(module) else None

    def _insert(self, place: fx.Node, module: nn.Module, args: tuple[Any, ...]) -> fx.Node:
        """Call a new module just before a node."""
        name = f"fused_{place.name}"  # a module called twice is replaced twice
        self.traced.add_submodule(name, module)
        with self.traced.graph.inserting_before(place):
            return self.traced.graph.call_module(name, args)

    def _parts(self, node: fx.Node, count: int) -> list[fx.Node]:
        """What a node returns, one by one."""
        if count == 1:
            return [node]
        with self.traced.graph.inserting_after(node):
            made = [self.traced.graph.call_function(operator.getitem, (node, i)) for i in reversed(range(count))]
        return made[::-1]

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self.traced.graph.erase_node(old)

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.modules[str(node.target)]) is nn.ReLU
        if node.op == "call_method":
            return node.target in ("relu", "relu_")
        return node.op == "call_function" and node.target in RELUS


def _is_sum(node: fx.Node) -> bool:
    """Two tensors added."""
    of_two = len(node.args) == 2 and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args)
    return node.op == "call_function" and node.target in SUMS and of_two
