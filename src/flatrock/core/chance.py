"""What chance alone may do to an accuracy on n samples."""

from __future__ import annotations

import math

# Fewer samples do not tell a weak model from guesses, whose accuracy stays within so many of its standard errors.
ENOUGH, ERRORS = 100, 2.0
# Two accuracies that differ by more of these than chance would let the better of many epochs do.
FAR = 3.0


def guessed(classes: int, n: int) -> float:
    """The accuracy guesses reach: p + 2 sqrt(p (1 - p) / n), p = 1 / classes; 1 of too few samples to tell."""
    p = 1 / classes
    return 1.0 if n < ENOUGH else p + ERRORS * math.sqrt(p * (1 - p) / n)


def far_below(low: float, high: float, n: int) -> bool:
    """Whether an accuracy lies 3 standard errors of the difference below another, each on n samples.

    Of each one more right and one more wrong (Agresti and Caffo), so that few samples tell nothing. Where both are of
    the same samples the difference varies less, and this is on the safe side.
    """
    a, b = ((share * n + 1) / (n + 2) for share in (low, high))
    return b - a > FAR * math.sqrt((a * (1 - a) + b * (1 - b)) / (n + 2))
