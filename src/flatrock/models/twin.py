"""A fast copy of a network for attacks: float16, fused, replayed on a GPU, following the weights of the network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn

from flatrock.core.borrow import full_precision, kept_buffers, mode, nudged
from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed
from flatrock.core.threat import rows
from flatrock.core.types import Replayer
from flatrock.models.classifier import Classifier
from flatrock.models.compare import near
from flatrock.models.fused import fused
from flatrock.models.fused_layers import Affine, FoldedConv, PaddedConv, follow, refold
from flatrock.models.replay import Replay
from flatrock.models.sizes import filled, size_for
from flatrock.models.turned import TurnedConv, turn

# Largest entry of each row of the gradient where it enters the network. Confident samples have tiny gradients and
# ratios of logits can have huge ones; half precision would round the first to zero and the second to infinity.
CARRIED = 128.0
# No gradient is taken to be smaller than this: the factor it is multiplied with must stay finite.
SMALLEST = 1e-30
# Inputs on which copy and network are compared once.
COMPARED = 32


class _Factor:
    """What each row of a gradient was multiplied with where it entered the network."""

    def __init__(self) -> None:
        self.of_rows = torch.ones(0)


class _Enlarged(torch.autograd.Function):
    """Identity; on the way back each row of the gradient is multiplied so that its largest entry is CARRIED."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, factor: _Factor) -> Tensor:
        ctx.factor = factor
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.factor.of_rows = CARRIED / grads[0].abs().amax(1).clamp_min(SMALLEST)
        return grads[0] * rows(ctx.factor.of_rows, grads[0]), None


class _Restored(torch.autograd.Function):
    """Identity; on the way back each row of the gradient is divided by what it was multiplied with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: _Factor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / rows(ctx.factor.of_rows, grads[0]), None


class Twin(nn.Module, Replayer):
    """A copy of the network in eval mode and `dtype` that takes and returns float32; `follow()` brings it up to date.

    Only gradients of the input exist. A traced network is a plain sequence of operations: its passes are recorded on a
    GPU and replayed, those without gradients, and with `gradients` the others too. It lives where the network lives and
    must not be moved or cast. `faithful` makes one and looks whether it is the same function.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float16,
        trace: bool = True,
        channels_last: bool = True,
        gradients: bool = False,
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self.inner, self.plain = fused(copy.deepcopy(model).eval(), trace=trace)
        self.inner.to(dtype).requires_grad_(False)
        self._channels_last = channels_last and any(p.dim() == 4 for p in self.inner.parameters())
        if self._channels_last:
            self.inner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Then nothing stands between the inputs and a layer that casts and arranges them as it reads them.
        self._direct = _first_is_padded(self.inner)
        self._affines = [m for m in self.inner.modules() if isinstance(m, Affine)]
        self._turned = [m for m in self.inner.modules() if isinstance(m, TurnedConv)]
        self._pairs, self._folds = _pairs(self.inner, model), _folds(self.inner, model)
        # In lists, so that the network does not become a part of its twin.
        self._source = [model]
        self._norms = [model.get_submodule(a.source) for a in self._affines]
        self._gradients = gradients
        self._replay = Replay(gradients=gradients)
        self.eval()

    def follow(self, shift: Mapping[str, Tensor] | None = None) -> None:
        """Take over the weights, plus what `shift` has for them by name, and the statistics the network has now."""
        model = self._source[0]
        now = [(mine, held[name]) for mine, held, name in self._pairs]
        folds = [(fold, weight["weight"], None if bias is None else bias["bias"]) for fold, weight, bias in self._folds]
        moved = _Moved(model, shift or {})
        copied = [*(tensor for _, tensor in now), *(t for _, *both in folds for t in both if t is not None)]
        with torch.no_grad(), nudged(model, moved.rest(copied)):
            follow(self._affines, self._norms)
            _copy(now, moved)
            turn([m.turned for m in self._turned], [m.weight for m in self._turned])
            # With a shift one after the other: moved weights of all layers at once would be as large as the network.
            for some in [[each] for each in folds] if moved.any else [folds]:
                refold(
                    [fold for fold, _, _ in some],
                    [moved(weight) for _, weight, _ in some],
                    [None if bias is None else moved(bias) for _, _, bias in some],
                )

    def forward(self, x: Tensor) -> Tensor:
        """Float32 logits of a pass in reduced precision."""
        if not torch.is_grad_enabled():
            return self._replay(self._pass, x) if self.plain else self._pass(x)
        factor = _Factor()
        # Gradients are resized in float32, outside the casts: half precision must not see them as they are.
        x = _Restored.apply(x, factor)  # type: ignore[no-untyped-call]
        logits = self._replay(self._pass, x) if self.plain and self._gradients else self._pass(x)
        out: Tensor = _Enlarged.apply(logits, factor)  # type: ignore[no-untyped-call]
        return out

    def whole(self, name: Hashable, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Work of many passes of this network on rows of tensors; on a GPU recorded and replayed (`Replay.whole`)."""
        return self._replay.whole(name, work, *tensors) if self.plain else work(*tensors)

    @property
    def refused(self) -> str:
        """Why something is not recorded any more; nothing if all is."""
        return "; ".join(self._replay.refused.values())

    def inside(self, x: Tensor) -> Tensor:
        """Logits, in the precision of the copy, of inputs in the same (or in any, if the first layer casts them)."""
        last = self._channels_last and x.dim() == 4 and not self._direct
        logits: Tensor = self.inner(x.contiguous(memory_format=torch.channels_last) if last else x)
        return logits

    def _pass(self, x: Tensor) -> Tensor:
        def logits(rows: Tensor) -> Tensor:
            return self.inside(rows if self._direct else rows.to(self._dtype)).float()

        return filled(logits, x, x.shape[0] if self._gradients else size_for(x))  # training has one size


def faithful(model: nn.Module, x: Tensor, *, dtype: torch.dtype = torch.float16, gradients: bool = False) -> Twin:
    """A twin that is the same function as the network up to rounding, judged by a few inputs.

    It is traced if the trace, in the network's own precision, gives its answers and treats every row for itself, and
    has channels last if the network can read that. Raises what the network raises if no way of copying it works, and
    ModelError if its rows depend on each other.
    """
    x = x[:COMPARED]
    trace = _same_function(model, x)
    ways = [{"trace": t, "channels_last": c} for t in ((True, False) if trace else (False,)) for c in (True, False)]
    for i, way in enumerate(ways):
        try:
            with redirect_stderr(StringIO()):  # fx prints the code of a traced network that fails
                twin = Twin(model, dtype=dtype, gradients=gradients, **way)
                leaf = x.to(dtype).requires_grad_(True)
                torch.autograd.grad(twin.inside(leaf).float().sum(), leaf)
        except Exception:  # of a foreign network, in a precision or layout it was not written for
            if i == len(ways) - 1:
                raise
        else:
            return twin
    raise AssertionError("there is always a way to try")


def _same_function(model: nn.Module, x: Tensor) -> bool:
    """Whether the fused trace answers as the network does, row by row; ModelError for a network whose rows mix.

    Each row of a gradient is resized on its own, and batches are filled up with zeros, which is only right where rows
    do not depend on each other.
    """
    with mode(model, training=False), kept_buffers(model), full_precision(x.device), torch.no_grad():
        true = model(x)
        few = max(len(x) // 2, 1)
        if not near(model(x[:few]), true[:few]) or not near(filled(model, x, 2 * len(x)), true):
            raise ModelError("its answer to an input depends on the rest of the batch")
        inner, plain = fused(copy.deepcopy(model))
        if not plain:
            return False
        with redirect_stderr(StringIO()):
            try:
                return near(inner(x), true) and near(inner(x[:few]), true[:few])
            except Exception:
                return False


def probe_inputs(model: Classifier) -> Tensor:
    """Random inputs to compare a network and its twin on."""
    tensor = next(model.parameters())
    x = torch.rand(COMPARED, *model.input_shape, generator=Seed(0).child("twin").generator())
    return x.to(device=tensor.device, dtype=tensor.dtype)


class _Moved:
    """The tensors of a network plus a shift by name, added while they are copied: it need not be moved for that.

    Tensors are told by identity: one that layers share has one name in the shift.
    """

    def __init__(self, model: nn.Module, shift: Mapping[str, Tensor]) -> None:
        self._shift = shift
        self._names = {id(p): name for name, p in model.named_parameters() if name in shift} if shift else {}

    @property
    def any(self) -> bool:
        """Whether anything moves."""
        return bool(self._names)

    def has(self, tensor: Tensor) -> bool:
        """Whether this tensor moves."""
        return id(tensor) in self._names

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor + self._shift[self._names[id(tensor)]] if self.has(tensor) else tensor

    def rest(self, copied: Iterable[Tensor]) -> dict[str, Tensor]:
        """What moves tensors that are not among the copied ones."""
        names = {self._names[id(tensor)] for tensor in copied if self.has(tensor)}
        return {name: self._shift[name] for name in self._shift if name not in names}  # values are drawn when asked for


def _copy(pairs: Sequence[tuple[Tensor, Tensor]], moved: _Moved) -> None:
    """Copy the second of each pair, moved, into the first: those that stay as they are all in one launch."""
    alike = [(mine, tensor) for mine, tensor in pairs if mine.shape == tensor.shape and not moved.has(tensor)]
    if alike:
        torch._foreach_copy_([mine for mine, _ in alike], [tensor for _, tensor in alike])
    for mine, tensor in pairs:
        if mine.shape != tensor.shape:  # a padded convolution follows in its first channels
            mine[:, : tensor.shape[1]].copy_(moved(tensor))
        elif moved.has(tensor):
            mine.copy_(moved(tensor))


def _first_is_padded(inner: nn.Module) -> bool:
    """Whether only padded convolutions of a traced network read its inputs."""
    if not isinstance(inner, fx.GraphModule):
        return False
    readers = [user for node in inner.graph.nodes if node.op == "placeholder" for user in node.users]
    layers = [inner.get_submodule(str(reader.target)) for reader in readers if reader.op == "call_module"]
    return 0 < len(readers) == sum(isinstance(layer, PaddedConv) for layer in layers)


def _places(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Where a network keeps each parameter and buffer, by name; tensors may be replaced there."""
    found: dict[str, dict[str, Any]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            found |= {f"{prefix}.{name}".lstrip("."): held for name, tensor in held.items() if tensor is not None}
    return found


def _pairs(inner: nn.Module, model: nn.Module) -> list[tuple[Tensor, dict[str, Any], str]]:
    """Tensors of the copy, and where those they follow are kept, under which name."""
    theirs = _places(model)
    found = []
    for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]:
        owner, _, last = name.rpartition(".")
        module: Any = inner.get_submodule(owner)
        if isinstance(module, FoldedConv):
            continue
        source = f"{module.source}.{last}" if isinstance(module, Affine | PaddedConv | TurnedConv) else name
        if source in theirs:  # else it is neither parameter nor buffer of the network: nothing trains it
            found.append((tensor.detach(), theirs[source], last))
    return found


def _folds(inner: nn.Module, model: nn.Module) -> list[tuple[FoldedConv, dict[str, Any], dict[str, Any] | None]]:
    """Folded convolutions of the copy, and where weight and bias of those they follow are kept."""
    theirs = _places(model)
    folds = [m for m in inner.modules() if isinstance(m, FoldedConv)]
    return [(fold, theirs[f"{fold.source}.weight"], theirs.get(f"{fold.source}.bias")) for fold in folds]
