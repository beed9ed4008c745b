"""How a step runs the network: as it is, or on a GPU in bfloat16, compiled, with a fast twin for the attack."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.borrow import frozen, kept_buffers, mode, nudged
from flatrock.core.device import memory_is_short
from flatrock.core.errors import in_words
from flatrock.core.hooks import Shift
from flatrock.core.types import View
from flatrock.engine.parts import in_parts, part_sizes
from flatrock.models.classifier import Classifier
from flatrock.models.joint import Joint, joint
from flatrock.models.twin import CARRIED, Twin, faithful, probe_inputs
from flatrock.models.view import view


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Choices that decide how fast a step is and how it rounds, not what it computes."""

    precision: str = "float32"  # or bfloat16: passes under autocast; weights, losses and norms stay float32
    compile: bool = False
    twin: bool = False  # attacks in eval mode query a fused float16 copy


class Runner:
    """Runs the passes of one model. The plain engine is the reference: the network itself, nothing in between.

    No more than `most` rows go through the network at once; a larger batch does in parts. `size` is that of full
    batches: passes are compiled for it, or for its largest part. `findings` tell, by code, what could not be done.
    """

    def __init__(
        self, model: nn.Module, engine: Engine | None = None, *, size: int = 0, most: int | None = None
    ) -> None:
        self.model = model
        self.engine = engine or Engine()
        self.most = most
        self.findings: dict[str, str] = {}
        self._size = max(part_sizes(size, most))
        self._seconds = 0.0  # of the step that compiled
        self._compiled: Callable[..., Sequence[Tensor]] | None = None
        self._joints: dict[int, Joint | None] = {}  # by the number of passes
        self._caster = _Autocast(self)
        self._twin: Twin | None = None

    @property
    def must_compile(self) -> bool:
        """Whether the next full batch will take its time."""
        return self.engine.compile and self._compiled is None and "T01" not in self.findings

    @property
    def told(self) -> str:
        """What compiling took, for the line that shows progress."""
        return f"  compiled in {self._seconds:.0f} s" if self._compiled is not None else ""

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Around a step: the first one compiles forward, then backward passes, and all of it is what compiling took."""
        first, begun = self.must_compile, time.monotonic()
        yield
        if first:
            self._seconds = time.monotonic() - begun

    @contextmanager
    def tuned(self) -> Iterator[None]:
        """For steps of training: their shapes come back, so cuDNN may try its algorithms on each and keep the fastest.

        Not for the reference: which one is the fastest differs from run to run, and so does rounding.
        """
        with _tuning(torch.backends.cudnn.benchmark or self.engine.twin):
            yield

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What goes through the network at once: the whole, unless it has more rows than that."""
        sizes = part_sizes(len(rows), self.most)
        return (rows,) if len(sizes) == 1 else torch.split(rows, sizes)

    def view(self, x: Tensor) -> View:
        """Features and logits of one pass, float32."""
        return self.views(x)[0]

    def views(self, *inputs: Tensor) -> tuple[View, ...]:
        """One pass after the other; of parts if there are too many rows."""
        sizes = part_sizes(len(inputs[0]), self.most)
        return _paired(self.run(*inputs) if len(sizes) == 1 else in_parts(self.model, self.run, inputs, sizes))

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Features and logits of one pass after the other, of all rows at once.

        Compiled, the passes are one over the rows of all inputs, if the network allows it.
        """
        if not self._compiles(inputs):
            return self._passes(*inputs)
        compiled = self._compiled or _compiled(self._passes)
        way = self._joint(inputs)
        if way is None:
            self.findings["T04"] = (
                "passes are compiled as the network makes them, one by one: as one, or with BatchNorm and ReLU as "
                "one operation, they would be something else, or fail"
            )
        try:  # every time: another mode, or weights that need no gradient, are compiled when they come
            with nullcontext() if self._compiled else _untold():
                seen = compiled(*inputs) if way is None else way.passes(compiled, inputs)
        except Exception as error:
            if memory_is_short(error):  # not compiled, the passes take no less
                raise
            self.findings["T01"] = f"the network is not compiled ({in_words(error)})"
            self._compiled = None
            return self._passes(*inputs)
        self._compiled = compiled
        # The next passes overwrite what these returned.
        return [tensor.clone() for tensor in seen]

    def joins(self, inputs: Sequence[Tensor]) -> bool:
        """Whether these passes, one after the other, are compiled as one over the rows of all inputs.

        Not if the rows that go through at once are limited: who does that is short of memory.
        """
        if self.most is not None or not self._compiles(inputs):
            return False
        if self._joint(inputs) is None:
            several = "passes at several points of a walk are compiled one by one: as one they would be something else"
            self.findings.setdefault("T04", several)
        return self._joint(inputs) is not None

    def _compiles(self, inputs: Sequence[Tensor]) -> bool:
        """Another size would be compiled anew; the last batch of an epoch is not worth that."""
        fits = all(x.shape[0] == self._size for x in inputs)
        return self.engine.compile and "T01" not in self.findings and fits

    def _joint(self, inputs: Sequence[Tensor]) -> Joint | None:
        """How so many passes are made one, found out once."""
        if len(inputs) not in self._joints:
            with _tuning(False):  # of sizes that do not come again
                self._joints[len(inputs)] = joint(self.model, inputs)
        return self._joints[len(inputs)]

    @contextmanager
    def attacked(self, bn_mode: str, shift: Shift) -> Iterator[nn.Module]:
        """What the attack queries: the weights of now plus `shift`, frozen, BatchNorm in the mode named.

        eval: running statistics; train: batch statistics, which tick; frozen: batch statistics, given back.
        """
        twin = self._twin_for(bn_mode)
        if twin is not None:
            twin.follow(shift)
            yield twin
            if twin.refused:
                self.findings["T03"] = f"the attack is not recorded ({twin.refused}); it launches every kernel anew"
        else:
            ticks = nullcontext() if bn_mode != "frozen" else kept_buffers(self.model)
            with mode(self.model, training=bn_mode != "eval"), ticks, frozen(self.model), nudged(self.model, shift):
                yield self.model if self.engine == Engine() else self._caster

    def _twin_for(self, bn_mode: str) -> Twin | None:
        fast = bn_mode == "eval" and self.engine.twin and "T02" not in self.findings
        if not fast or not isinstance(self.model, Classifier):
            return None
        if self._twin is None:
            try:
                with _tuning(False):  # of a size that does not come again
                    self._twin = faithful(self.model, probe_inputs(self.model), gradients=True)
            except Exception as error:  # of a network or a machine the copy was not written for
                self._without_twin(f"cannot be made ({in_words(error)})")
        return self._twin

    def _without_twin(self, why: str) -> None:
        self.findings["T02"] = f"the attack's float16 copy {why}; attacks use the bfloat16 passes instead"
        self._twin = None  # its recordings keep memory

    def check(self, x: Tensor, bn_mode: str) -> None:
        """Look whether the twin's numbers fit float16 on this batch (a wait for a GPU); from then on without it if not.

        Gradients that are not finite move no input: an attack would do nothing, and nobody would notice.
        """
        twin = self._twin_for(bn_mode)
        if twin is None:
            return
        twin.follow()
        leaf = x.detach().to(torch.float16).requires_grad_(True)
        logits = twin.inside(leaf)  # not recorded: once an epoch is not worth it
        # As large as gradients enter the copy in an attack.
        entering = CARRIED * F.one_hot(logits.argmax(1), logits.shape[1]).to(logits.dtype)
        (grad,) = torch.autograd.grad(logits, leaf, entering)
        if not bool(torch.isfinite(logits).all() & torch.isfinite(grad).all()):
            self._without_twin("overflows")

    def settle(self) -> None:
        """Take gradients out of the memory of compiled passes, which the next pass overwrites."""
        if self.engine.compile:
            for p in self.model.parameters():
                p.grad = None if p.grad is None else p.grad.clone()

    def _passes(self, *inputs: Tensor) -> list[Tensor]:
        """Features and logits of one input after the other."""
        return [tensor for x in inputs for tensor in self._pass(x)]

    def _pass(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.engine.precision == "float32" or not isinstance(self.model, Classifier):
            seen = view(self.model, x)
            return seen.features, seen.logits
        if x.dim() == 4 and x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16):
            features = self.model.features(x)
        features = features.float()  # the head, like losses, in float32
        return features, self.model.head(features)


@contextmanager
def _tuning(wanted: bool) -> Iterator[None]:
    """Whether cuDNN tries its algorithms on shapes that are new to it; the user's choice comes back."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _untold() -> Iterator[None]:
    """The compiler recommends TensorFloat32 once, for the head: it is float32 on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        yield


def _compiled(passes: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
    """The compiler counts variants by code and gives up silently after some: every network gets code of its own."""

    def own(*inputs: Tensor) -> Sequence[Tensor]:
        return passes(*inputs)

    own.__code__ = own.__code__.replace()
    return torch.compile(own, mode="reduce-overhead", dynamic=False)


def _paired(tensors: Sequence[Tensor]) -> tuple[View, ...]:
    """What `_passes` returns, by pass."""
    return tuple(View(features=f, logits=z) for f, z in zip(tensors[::2], tensors[1::2], strict=True))


class _Autocast(nn.Module):
    """The runner as a module of logits, for attacks in train mode."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = [runner]  # in a list: the network must not be a part of it, it has a mode of its own

    def forward(self, x: Tensor) -> Tensor:
        """Float32 logits."""
        if self._runner[0].engine.compile and x.requires_grad:
            x = x.view_as(x)
            # A copy of the gradient, outside the memory of compiled passes, which the next pass overwrites.
            x.register_hook(torch.clone)  # type: ignore[no-untyped-call]
        return self._runner[0].run(x)[1]
