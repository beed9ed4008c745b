"""Doubts about an evaluation, each a Finding whose code is a section of docs/diagnostics.md."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from flatrock.attacks.craft import looks_like_probabilities
from flatrock.core.records import Finding

TEST_SELECTED = "test-selected"


def check_mode(model: nn.Module) -> list[Finding]:
    """E01: the model came in train mode."""
    if not any(m.training for m in model.modules()):
        return []
    return [
        Finding(
            "E01",
            "the model was in train mode; it was evaluated in eval mode and given back as it was",
            "call model.eval() before evaluating so that your other numbers agree with these",
        )
    ]


def check_probabilities(logits: Tensor) -> list[Finding]:
    """E02: outputs lie in [0, 1] and sum to 1: probabilities, whose gradients vanish where the model is sure."""
    if not looks_like_probabilities(logits):
        return []
    return [
        Finding(
            "E02",
            "the model seems to return probabilities, not logits; gradient attacks are weaker on them",
            "return the input of the final softmax",
        )
    ]


def check_finite(broken_answers: Mapping[str, int]) -> list[Finding]:
    """E04: the model gave NaN or infinite logits on attacked inputs; such a sample counts as broken."""
    return [
        Finding(
            "E04",
            f"the model returned NaN or infinite logits for {count} samples under {name}; they count as broken",
            "find the operation that overflows: a model without an answer is not robust",
        )
        for name, count in broken_answers.items()
        if count
    ]


def check_marks(marks: tuple[str, ...]) -> list[Finding]:
    """E03: the weights were chosen by looking at the test set."""
    if TEST_SELECTED not in marks:
        return []
    return [
        Finding(
            "E03",
            "the checkpoint was selected on the test set, so its test accuracy is optimistic",
            "train with select.data: held_out to get an unbiased number",
        )
    ]
