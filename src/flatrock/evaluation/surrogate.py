"""The second network of an evaluation: inputs crafted on it are tried on the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import answered, asked, check_model
from flatrock.attacks.losses import cross_entropy
from flatrock.attacks.pgd import slope
from flatrock.core.borrow import borrowed, full_precision, placed
from flatrock.core.device import memory_is_short
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.rounding import gap
from flatrock.core.tensorfile import tensors_digest
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted

OWN = (
    "the surrogate has the model's own weights, answers and gradients, so nothing is transferred; name another network"
)
# Points at which two networks of the same weights are compared, and how far gradients may differ by rounding.
FEW, ALIKE = 8, 1e-3


def check_surrogate(surrogate: nn.Module | None, model: nn.Module, x: Tensor) -> None:
    """Another module than the model, with weights of the inputs' type; else an error that names the surrogate."""
    if surrogate is None:
        return
    try:
        check_model(surrogate, x)
    except ModelError as error:
        raise ModelError(f"surrogate: {error}") from error
    if surrogate is model:
        raise ConfigError(OWN)


@contextmanager
def lent(surrogate: nn.Module | None, device: torch.device) -> Iterator[Counted | None]:
    """The surrogate in eval mode and frozen on the device, every pass counted; it comes home untouched."""
    if surrogate is None:
        yield None
        return
    with placed(surrogate, device), borrowed(surrogate, device):
        yield Counted(surrogate)


def check_answers(exam: Exam, classes: int) -> None:
    """It takes the inputs and has the classes of the model, else ModelError; it is another network, else ConfigError.

    The same weights are not enough to be the same: crafting on a network without its noise, or with a gradient through
    its rounding, is how such defences are attacked.
    """
    if exam.surrogate is None:
        return
    x, y = exam.inputs(torch.arange(min(2, exam.x.shape[0])))
    try:
        with torch.no_grad():
            logits = answered(exam.surrogate.inner, x, y)
    except ModelError as error:
        raise ModelError(f"surrogate: {error}") from error
    if logits.shape[1] != classes:
        raise ModelError(f"the surrogate has {logits.shape[1]} classes, the model {classes}; name another network")
    weights = _values(exam.model)
    if weights and weights == _values(exam.surrogate.inner) and _one_function(exam, exam.model, exam.surrogate.inner):
        raise ConfigError(OWN)


def _values(model: nn.Module) -> list[str]:
    """What tells the values of weights and buffers, whatever their names: those of a wrapped network are others."""
    return sorted(tensors_digest({"": v}) for v in model.state_dict().values() if isinstance(v, Tensor))


def _one_function(exam: Exam, model: nn.Module, surrogate: nn.Module) -> bool:
    """Whether both give the same answers and gradients at a few points of the balls, if both draw the same."""
    rows = torch.arange(min(FEW, exam.x.shape[0]))
    x, y = exam.inputs(rows)
    x = (x + exam.threat.sample(x, exam.randomness("surrogate: points", rows))).clamp(0, 1)
    with exam.drawing("surrogate", rows), full_precision(exam.device):
        mine = _response(model, x, y)
    with exam.drawing("surrogate", rows), full_precision(exam.device):
        theirs = _response(surrogate, x, y)
    if mine is None or theirs is None:
        return mine is theirs
    bound = ALIKE * float(mine[1].abs().max())
    return gap(mine[0], theirs[0]) == 0 and torch.allclose(mine[1], theirs[1], rtol=0, atol=bound, equal_nan=True)


def _response(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Logits, and the gradient of the loss; None for a model that has none."""
    leaf = x.detach().requires_grad_(True)
    try:
        with torch.enable_grad():
            logits = asked(model, leaf)
            return logits.detach(), slope(cross_entropy(logits, y).sum(), leaf)
    except (ModelError, RuntimeError) as error:  # what else may be wrong there is for the evaluation to say
        if memory_is_short(error):
            raise
        return None
