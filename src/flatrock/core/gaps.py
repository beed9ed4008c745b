"""Differences of accuracies on the same samples, with what chance leaves to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt

import torch
from torch import Tensor

from flatrock.core.errors import StateError


@dataclass(frozen=True)
class Gap:
    """A difference of accuracies on `samples` samples (0: not known) with its standard error.

    Chance reaches `reach` standard errors far, in 95.45 % of cases: 2, and more where few seeds tell how seeds differ.
    """

    mean: float
    error: float
    samples: int = 0
    reach: float = 2.0

    @property
    def beyond_chance(self) -> bool:
        """More than chance reaches."""
        return abs(self.mean) > self.reach * self.error


def paired(a: Tensor, b: Tensor) -> Gap:
    """Accuracy a minus accuracy b on the same samples; mean and standard error of the per-sample differences."""
    return mean_paired([(a, b)])


def mean_paired(pairs: Sequence[tuple[Tensor, Tensor]]) -> Gap:
    """The mean over seeds s of accuracies a_s - b_s, all on the same n samples.

    With d[s, i] the difference on sample i, error^2 = var_i(mean_s d) / n + var_s(mean_i d) / S: the seeds share the
    samples, so more seeds make what the test set leaves to chance no smaller; their own chance is the second term, of
    which one seed knows nothing. Few seeds know little of it, so chance reaches 2 of the first error and t of the
    second, Student's t of S - 1 freedoms: sqrt((2 first)^2 + (t second)^2).
    """
    sizes = sorted({flags.numel() for pair in pairs for flags in pair})
    if len(sizes) > 1:
        raise StateError(f"accuracies on {sizes[0]} and on {sizes[-1]} samples cannot be paired; evaluate both alike")
    steps = torch.stack([a.double() - b.double() for a, b in pairs])
    of_samples = float(steps.mean(0).std(correction=0)) / sqrt(sizes[0])
    of_seeds = float(steps.mean(1).std(correction=1)) / sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    error = hypot(of_samples, of_seeds)
    reach = hypot(2 * of_samples, student(len(pairs)) * of_seeds) / error if of_seeds else 2.0
    return Gap(float(steps.mean()), error, sizes[0], reach)


def student(seeds: int) -> float:
    """How many standard errors far the mean of so many seeds gets as often as a normal variable gets two."""
    from scipy.special import ndtr, stdtrit

    return float(stdtrit(seeds - 1, ndtr(2.0)))
