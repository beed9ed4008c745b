"""The Hessian of a mean cross-entropy w.r.t. parameters as a matrix that is never stored: products only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatrock.attacks.craft import answered
from flatrock.core.borrow import full_precision, kept_buffers, mode
from flatrock.core.device import memory_is_short
from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.diagnostics.probe import fitting

# Samples on which a network shows that its answers depend on nothing but its input.
FEW = 32
# Random vectors that show whether a Hessian is symmetric: two could be unlucky.
VECTORS = 4


class Operator(Protocol):
    """A symmetric matrix known by its products with columns [n, k]; a tensor is one."""

    @property
    def shape(self) -> Sequence[int]:
        """[n, n]."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the columns it takes."""

    @property
    def device(self) -> torch.device:
        """Of the columns it takes."""

    def __matmul__(self, columns: Tensor) -> Tensor:
        """H V."""


def unheeded(samples: int) -> None:
    """For products nobody counts."""


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Summed over samples."""
    return F.cross_entropy(logits, y, reduction="sum")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """How far the logit of a sample's class is above that of the next class, summed over samples."""
    own = y.long()[:, None]
    return (logits.gather(1, own) - logits.gather(1, (own + 1) % logits.shape[1])).sum()


class Hessian:
    """H = d^2/dw^2 mean_i CE(z(x_i), y_i) for some parameters of a network, the others held fixed.

    H v is the gradient of v . dL/dw: two backward passes. Order of the rows: the parameters as given, each flattened.
    Inputs are constants, adversarial ones too. Samples go through in batches, halved where memory is short; `seen(k)`
    is called after each batch with the number of samples times that of columns. `loss` takes the place of CE, summed
    over samples. Use it inside `still(model)`.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        parameters: Mapping[str, Tensor],
        *,
        batch_size: int = 250,
        seen: Callable[[int], None] = unheeded,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    ) -> None:
        self._model, self._x, self._y, self._seen, self._loss = model, x, y, seen, loss
        self._parameters = list(parameters.values())
        self.batch_size = min(batch_size, len(x))
        size = sum(p.numel() for p in self._parameters)
        self.shape = (size, size)
        self.dtype, self.device = self._parameters[0].dtype, self._parameters[0].device

    def __matmul__(self, columns: Tensor) -> Tensor:
        """H V."""

        def work(size: int) -> Tensor:
            product = torch.zeros_like(columns)
            for x, y in zip(torch.split(self._x, size), torch.split(self._y, size), strict=True):
                self._add(product, columns, x, y)
                self._seen(len(x) * columns.shape[1])
            return product

        product, self.batch_size = fitting(work, self.batch_size)
        return product

    def _add(self, product: Tensor, columns: Tensor, x: Tensor, y: Tensor) -> None:
        """The batch's share of H V; its graph serves all columns."""
        loss = self._loss(self._model(x), y) / len(self._x)
        slopes = torch.autograd.grad(loss, self._parameters, create_graph=True, materialize_grads=True)
        bent = [slope.requires_grad for slope in slopes]  # not: of parameters the loss does not depend on
        if not any(bent):
            return
        outputs = [slope for slope, counts in zip(slopes, bent, strict=True) if counts]
        for i, column in enumerate(columns.mT.contiguous()):
            parts = column.split([p.numel() for p in self._parameters])
            along = [v.view_as(p) for v, p, counts in zip(parts, self._parameters, bent, strict=True) if counts]
            rows = torch.autograd.grad(outputs, self._parameters, along, retain_graph=True, materialize_grads=True)
            product[:, i] += torch.cat([row.flatten() for row in rows])


def check_network(model: nn.Module, x: Tensor, y: Tensor, parameters: Mapping[str, Tensor], seed: Seed) -> None:
    """ModelError if the network cannot be differentiated twice, or if that gives a matrix that is not symmetric.

    Of the logits' margin on a few samples: the Hessian of a cross-entropy that is nearly 0 is rounding alone.
    """
    hessian = Hessian(model, x[:FEW], y[:FEW], parameters, loss=margin)
    try:
        check_symmetric(hessian, seed)
    except RuntimeError as error:
        if memory_is_short(error):
            raise
        raise ModelError(
            f"the network cannot be differentiated twice, as a Hessian needs: {error}; replace that layer by one "
            "torch has second derivatives of"
        ) from error


def check_symmetric(hessian: Operator, seed: Seed) -> None:
    """u^T H v = v^T H u for every two of some random vectors, up to sqrt(eps) of ||H v||."""
    columns = torch.randn(hessian.shape[0], VECTORS, generator=seed.generator(), dtype=torch.float64)
    columns = columns.to(hessian.device, hessian.dtype)
    product = (hessian @ columns).double()
    crossed = columns.double().mT @ product
    gap, scale = float((crossed - crossed.mT).abs().max()), float(product.norm(dim=0).mean())
    allowed = torch.finfo(hessian.dtype).eps ** 0.5
    if gap > allowed * scale:
        raise ModelError(
            f"the Hessian is not symmetric: u.Hv and v.Hu of random u and v differ by {gap / scale:.2g} of |Hv|, and "
            f"rounding explains {allowed:.2g}; second derivatives of some layer are wrong. Remove torch's "
            "weight_norm and layers whose backward pass is written by hand; if there are none, use --precision double"
        )


def by_layer(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Parameters grouped by the module that holds them: a layer is a name up to its last dot."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        layers.setdefault(name.rpartition(".")[0] or name, {})[name] = parameter
    return layers


@contextmanager
def still(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[None]:
    """The model as second derivatives need it: eval mode, full precision, the same answer every time.

    Attention is computed in plain steps, because its fused kernels cannot be differentiated twice.

    Modes, buffers and the global RNG are given back; parameters and their gradients are not touched. ModelError if it
    returns no finite logits, or if an answer depends on chance or on who else is in the batch.
    """
    with ExitStack() as stack:
        stack.enter_context(kept_global_rng(x.device))
        stack.enter_context(mode(model, training=False))
        stack.enter_context(kept_buffers(model))
        stack.enter_context(full_precision(x.device))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        _check_still(model, x[:FEW], y[:FEW])
        yield


@torch.no_grad()
def _check_still(model: nn.Module, x: Tensor, y: Tensor) -> None:
    logits = answered(model, x, y)
    half = model(x[: (len(x) + 1) // 2])
    if not torch.allclose(half, logits[: len(half)], rtol=1e-3, atol=1e-4):
        raise ModelError(
            "the network answers the same inputs differently the second time, or depending on who else is in the "
            "batch; its loss has no Hessian. Switch its randomness off, and let BatchNorm keep running statistics"
        )
