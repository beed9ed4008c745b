"""The Hessian of a mean cross-entropy w.r.t. parameters as a matrix that is never stored: products by curvlinops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import answered
from flatrock.core.borrow import full_precision, kept_buffers, mode
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.rng import kept_global_rng
from flatrock.diagnostics.probe import fitting

# Columns multiplied at the same time: amortises overhead for small networks, costs memory for large ones.
COLUMNS = 4
# Samples on which a network shows that its answers depend on nothing but its input.
FEW = 32


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


class Hessian:
    """H = d^2/dw^2 mean_i CE(z(x_i), y_i) for some parameters of a network, the others held fixed.

    Order of the rows: the parameters as given, each flattened. Inputs are constants, adversarial ones too. Samples go
    through in batches, halved where memory is short; `seen(k)` is called after each batch with the number of samples
    times the number of columns. Use it inside `still(model)`.
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
    ) -> None:
        self._make = _curvlinops().HessianLinearOperator
        self._model, self._x, self._y, self._seen = model, x, y, seen
        self._parameters = list(parameters.values())
        self.batch_size = min(batch_size, len(x))
        size = sum(p.numel() for p in self._parameters)
        self.shape = (size, size)
        self.dtype, self.device = self._parameters[0].dtype, self._parameters[0].device

    def __matmul__(self, columns: Tensor) -> Tensor:
        """H V, a few columns at a time."""
        return torch.cat([self._times(part) for part in torch.split(columns, COLUMNS, dim=1)], 1)

    def _times(self, columns: Tensor) -> Tensor:
        def work(size: int) -> Tensor:
            batches = _Batches(self._x, self._y, size, lambda samples: self._seen(samples * columns.shape[1]))
            operator = self._make(
                self._model,
                nn.CrossEntropyLoss(),
                self._parameters,
                batches,
                num_data=len(self._x),
                check_deterministic=False,  # `still` has looked, and says it in words
            )
            product: Tensor = operator @ columns
            return product

        product, self.batch_size = fitting(work, self.batch_size)
        return product


class _Batches:
    """The samples in batches, as often as asked."""

    def __init__(self, x: Tensor, y: Tensor, size: int, seen: Callable[[int], None]) -> None:
        self._pairs = list(zip(torch.split(x, size), torch.split(y, size), strict=True))
        self._seen = seen

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self._pairs:
            yield x, y
            self._seen(len(x))


def check_installed() -> None:
    """ConfigError if curvlinops is missing: said before any work, not after it."""
    _curvlinops()


def _curvlinops() -> Any:
    try:
        import curvlinops
    except ImportError as error:
        raise ConfigError(
            f"curvature needs the package curvlinops, which cannot be imported ({error}); "
            "pip install 'flatrock[curvature]', or pip install curvlinops-for-pytorch"
        ) from error
    return curvlinops


def by_layer(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Parameters grouped by the module that holds them: a layer is a name up to its last dot."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        layers.setdefault(name.rpartition(".")[0] or name, {})[name] = parameter
    return layers


@contextmanager
def still(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[None]:
    """The model as second derivatives need it: eval mode, full precision, the same answer every time.

    Modes, buffers and the global RNG are given back; parameters and their gradients are not touched. ModelError if it
    returns no finite logits, or if an answer depends on chance or on who else is in the batch.
    """
    with ExitStack() as stack:
        stack.enter_context(kept_global_rng(x.device))
        stack.enter_context(mode(model, training=False))
        stack.enter_context(kept_buffers(model))
        stack.enter_context(full_precision(x.device))
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
