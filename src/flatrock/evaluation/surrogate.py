"""The second network of an evaluation: inputs crafted on it are tried on the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import answered, check_model
from flatrock.core.borrow import borrowed, placed
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.tensorfile import weights_digest
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted


def check_surrogate(surrogate: nn.Module | None, model: nn.Module, x: Tensor) -> None:
    """Another network than the model, with weights of the inputs' type; else an error that names the surrogate."""
    if surrogate is None:
        return
    try:
        check_model(surrogate, x)
    except ModelError as error:
        raise ModelError(f"surrogate: {error}") from error
    alike = type(surrogate) is type(model) and bool(model.state_dict())
    if surrogate is model or (alike and weights_digest(surrogate) == weights_digest(model)):
        raise ConfigError("the surrogate has the model's own weights, so nothing is transferred; name another network")


@contextmanager
def lent(surrogate: nn.Module | None, device: torch.device) -> Iterator[Counted | None]:
    """The surrogate in eval mode and frozen on the device, every pass counted; it comes home untouched."""
    if surrogate is None:
        yield None
        return
    with placed(surrogate, device), borrowed(surrogate, device):
        yield Counted(surrogate)


def check_answers(exam: Exam, classes: int) -> None:
    """The surrogate takes the inputs and has the classes of the model; else ModelError."""
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
