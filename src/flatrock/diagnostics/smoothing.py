"""Randomized smoothing (Cohen et al. 2019): votes under Gaussian noise, and what they prove.

The smoothed classifier g(x) answers the class that the network gives most often to x + sigma * N(0, I). If the network
gives class A with probability at least p > 1/2, then g answers A everywhere within the L2 radius sigma * Phi^-1(p).
p is bounded from below by counting votes, so that a certificate is wrong with probability at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.numbers import is_finite
from flatrock.core.options import noise_fault
from flatrock.core.rng import Seed
from flatrock.diagnostics.probe import fitting

# What PREDICT and CERTIFY answer when the votes prove nothing.
ABSTAIN = -1
# More votes than this are not counted in a lifetime; an error that asks for them had better ask for more noise.
MANY_VOTES = 10**9


def lower_bound(k: Tensor, n: int, alpha: float) -> Tensor:
    """One-sided Clopper-Pearson: the p of which k or more successes in n trials have probability alpha.

    The alpha-quantile of Beta(k, n - k + 1); 0 for k = 0, alpha^(1/n) for k = n. The true probability is lower with
    probability at most alpha.
    """
    from scipy.special import betaincinv

    successes = k.double().cpu().numpy()
    bound = betaincinv(successes.clip(min=1), n - successes.clip(min=1) + 1, alpha)
    return torch.as_tensor(bound) * (k.cpu() > 0)


def certified_radii(k: Tensor, n: int, *, sigma: float, alpha: float) -> Tensor:
    """sigma * Phi^-1(p) with p the lower bound; 0 where p <= 1/2 proves nothing."""
    quantile: Tensor = torch.special.ndtri(lower_bound(k, n, alpha).clamp_min(0.5))
    return sigma * quantile


def predictions(counts: Tensor, alpha: float) -> Tensor:
    """PREDICT: the class with most votes, or ABSTAIN; counts is [samples, classes].

    It abstains if a fair coin could have decided between the two classes with most votes: if their split has a
    two-sided binomial p-value above alpha. An answer that is not g(x) has probability at most alpha.
    """
    from scipy.special import betainc

    most = counts.cpu().topk(2, dim=1)
    first, second = (most.values[:, i].double().numpy() for i in (0, 1))
    tail = betainc(first.clip(min=1), second + 1, 0.5)  # of a fair coin: `first` heads or more
    return torch.where((torch.as_tensor(2 * tail) <= alpha) & (most.values[:, 0] > 0), most.indices[:, 0], ABSTAIN)


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """How a network is smoothed and certified: n0 votes choose the class, n fresh ones bound its probability.

    sigma is in pixel units of [0, 1], before any normalisation. A single certificate is wrong with probability at most
    alpha.
    """

    sigma: float
    n0: int = 100
    n: int = 100_000
    alpha: float = 0.001

    def __post_init__(self) -> None:
        faults = []
        if not (is_finite(self.sigma) and self.sigma > 0):
            faults.append(
                f"sigma must be a number > 0, got {self.sigma!r}; it is the deviation of the noise in pixel units of "
                "[0, 1]: write 0.25, not 64"
            )
        elif told := noise_fault(self.sigma):
            faults.append(f"sigma {told}")
        for name in ("n0", "n"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                faults.append(f"{name} must be a whole number >= 1, got {value!r}; usual are n0 100 and n 100000")
        if not (is_finite(self.alpha) and 0 < self.alpha < 1):
            faults.append(
                f"alpha must lie strictly between 0 and 1, got {self.alpha!r}; it is the probability that a "
                "certificate is wrong, usually 0.001"
            )
        if not faults and self.largest_radius <= 0:
            faults.append(
                f"n {self.n} proves nothing at alpha {self.alpha:g}, whatever the votes: use n {self.fewest} or more"
            )
        if faults:
            raise ConfigError("smoothing options:", tuple(faults))

    @property
    def fewest(self) -> int:
        """The least n whose votes, if all agree, certify a radius and let PREDICT answer (2 * 0.5^n <= alpha)."""
        return max(self.votes_for(0.0), math.ceil(1 - math.log2(self.alpha)))

    @property
    def largest_radius(self) -> float:
        """sigma * Phi^-1(alpha^(1/n)): what n votes that all agree certify."""
        return float(certified_radii(torch.tensor(self.n), self.n, sigma=self.sigma, alpha=self.alpha))

    def votes_for(self, radius: float) -> int:
        """The least n with which this radius can be certified: alpha^(1/n) > Phi(radius / sigma)."""
        log_share = float(torch.special.log_ndtr(torch.tensor(radius / self.sigma, dtype=torch.float64)))
        return math.floor(math.log(self.alpha) / log_share) + 1 if log_share else MANY_VOTES

    def check_votes(self) -> None:
        """ConfigError where n votes may prove something, but never let PREDICT answer."""
        if self.n < self.fewest:
            raise ConfigError(
                f"n {self.n} decides nothing at alpha {self.alpha:g}, whatever the votes: use n {self.fewest} or more"
            )

    def check_radius(self, radius: float, what: str = "") -> None:
        """Refuse a radius that these numbers could not certify even if all votes agreed; the error says what could."""
        named = what or f"radius {radius:g}"
        if not (is_finite(radius) and radius >= 0):
            raise ConfigError(f"a radius is a number >= 0, got {radius!r}")
        if radius < self.largest_radius:
            return
        needed = self.votes_for(radius)
        cure = f"use n {needed} or more, or a larger sigma" if needed < MANY_VOTES else "use a larger sigma"
        raise ConfigError(
            f"{named} is out of reach: with n {self.n}, alpha {self.alpha:g} and sigma {self.sigma:g} the largest "
            f"radius is {self.largest_radius:.5f}, if all votes agree; {cure}"
        )


def noise(like: Tensor, first: int, count: int, seed: Seed) -> Tensor:
    """N(0, I) of the draws first .. first + count - 1 of an input: a pure function of seed and number of the draw.

    So neither batch size nor device nor interruption changes them.
    """
    draws = torch.arange(first, first + count, device=like.device)
    return seed.samples(draws).normal(like.expand(count, *like.shape))


@dataclass
class Voter:
    """Lets a network vote on noisy copies of an input, at most `batch_size` at a time, fewer where memory is short.

    The caller has put the model in eval mode; noisy inputs are not clipped.
    """

    model: nn.Module
    sigma: float
    batch_size: int

    def votes(self, x: Tensor, n: int, seed: Seed, progress: Callable[[int], None] = lambda _: None) -> Tensor:
        """How often the network gives each class to x + sigma * N(0, I) in n draws; x is one input, without batch.

        An answer that is not finite is no vote, so the sum may be less than n. `progress` is told of draws done.
        """
        counts, done = torch.zeros((), dtype=torch.int64), 0
        while done < n:
            size = min(self.batch_size, n - done)
            found, draws = fitting(partial(self._batch, x, done, seed), size)
            if draws < size:  # from then on
                self.batch_size = draws
            counts = counts + found
            done += draws
            progress(draws)
        return counts

    def _batch(self, x: Tensor, first: int, seed: Seed, count: int) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(x + self.sigma * noise(x, first, count, seed))
            answers = logits.argmax(1)[torch.isfinite(logits).all(1)]
            return torch.bincount(answers, minlength=logits.shape[1]).cpu()


class Smoothed(nn.Module):
    """The smoothed classifier with probabilities in the place of votes, for attacks: log mean_j softmax(f(x + s_j)).

    A vote has no gradient; the mean probability has one, and climbing it is how smoothed classifiers are attacked
    (Salman et al. 2019). The same `draws` noises s_j = sigma * N(0, I) serve every input and every pass, so that the
    module is a fixed function. Whether an input it breaks is broken is for PREDICT to say, with votes of its own.
    """

    shifts: Tensor

    def __init__(self, model: nn.Module, like: Tensor, *, sigma: float, draws: int, seed: Seed) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("shifts", sigma * noise(like, 0, draws, seed))

    def forward(self, x: Tensor) -> Tensor:
        """Logarithms of mean class probabilities [n, classes]."""
        copies = (x[None] + self.shifts[:, None].to(x)).flatten(0, 1)
        shares: Tensor = self.model(copies).log_softmax(1)
        return shares.reshape(len(self.shifts), len(x), -1).logsumexp(0) - math.log(len(self.shifts))
