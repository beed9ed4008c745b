"""How every evaluation begins, in this process or in one beside it: who is borrowed, and what attacks craft with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from flatrock.core.borrow import borrowed, exclusive, placed
from flatrock.core.records import Finding
from flatrock.evaluation.checks import check_mode
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted, half_model
from flatrock.evaluation.surrogate import lent


@contextmanager
def at_work(
    model: nn.Module, surrogate: nn.Module | None, device: torch.device
) -> Iterator[tuple[Counted | None, list[Finding]]]:
    """Model and surrogate borrowed, for this thread alone, on the device: the surrogate, and doubts about the mode."""
    with exclusive(model, surrogate):
        findings = check_mode(model)
        with placed(model, device), borrowed(model, device), lent(surrogate, device) as other:
            yield other, findings


def choose_crafting(exam: Exam, precision: str) -> tuple[str, str]:
    """Give the exam a fast twin of the model where asked for; what attacks craft with, and why not otherwise."""
    wanted = precision == "half" or (precision == "auto" and exam.device.type == "cuda")
    if exam.x.dtype != torch.float32:
        return "float64", "the inputs are float64" if precision == "half" else ""
    if not wanted:
        return "float32", ""
    first, _ = exam.inputs(torch.arange(min(exam.x.shape[0], exam.batch_size)))
    fast, note = half_model(exam.model, first)
    if fast is None:
        return "float32", note
    exam.crafting, exam.exact = Counted(fast), False
    return note, ""
