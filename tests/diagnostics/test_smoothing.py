"""Votes and what they prove: exact binomial bounds, a linear network whose radius is known, and who owns the noise."""

from __future__ import annotations

from math import prod

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.diagnostics.smoothing import (
    ABSTAIN,
    Smoothed,
    Smoothing,
    Voter,
    certified_radii,
    lower_bound,
    noise,
    predictions,
)

NODE = Seed(0).child("test")


def bound(k: int, n: int, alpha: float = 0.001) -> float:
    return float(lower_bound(torch.tensor(k), n, alpha))


# Bounds


@pytest.mark.parametrize(
    ("k", "n", "expected"),
    [(99, 100, 0.91137), (990, 1000, 0.97604), (99_000, 100_000, 0.98899), (60, 100, 0.44098), (0, 100, 0.0)],
)
def test_clopper_pearson_table(k: int, n: int, expected: float) -> None:
    assert bound(k, n) == pytest.approx(expected, abs=5e-6)


def test_unanimous_votes() -> None:
    assert bound(100_000, 100_000) == pytest.approx(0.99993092, abs=5e-9)
    for n in (1, 10, 1000, 10**7):
        assert bound(n, n, 0.01) == pytest.approx(0.01 ** (1 / n), rel=1e-12)


@pytest.mark.parametrize(("k", "n", "alpha"), [(1, 7, 0.05), (60, 100, 0.001), (999, 1000, 0.01), (4, 4, 0.3)])
def test_the_bound_is_where_k_or_more_successes_have_probability_alpha(k: int, n: int, alpha: float) -> None:
    assert float(stats.binom.sf(k - 1, n, bound(k, n, alpha))) == pytest.approx(alpha, rel=1e-9)
    two_sided = stats.binomtest(k, n).proportion_ci(confidence_level=1 - 2 * alpha, method="exact")
    assert bound(k, n, alpha) == pytest.approx(float(two_sided.low), rel=1e-12)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.77, 0.999])
@pytest.mark.parametrize("alpha", [0.001, 0.05])
def test_the_bound_is_wrong_with_probability_alpha_at_most(p: float, alpha: float) -> None:
    """Summed exactly over all outcomes of 200 trials."""
    k = torch.arange(201)
    chance = torch.tensor(stats.binom.pmf(k.numpy(), 200, p))
    assert float(chance[lower_bound(k, 200, alpha) > p].sum()) <= alpha


def test_radii_follow_from_the_bound_and_vanish_below_one_half() -> None:
    k = torch.tensor([0, 60, 65, 66, 99, 100])
    radii = certified_radii(k, 100, sigma=0.25, alpha=0.001)
    assert radii[:3].tolist() == [0, 0, 0]
    expected = [0.25 * stats.norm.ppf(bound(int(i), 100)) for i in k[3:]]
    assert radii[3:].tolist() == pytest.approx(expected, rel=1e-12)
    assert expected[0] > 0


# What numbers of votes can reach


def test_the_numbers_of_votes_are_cohens() -> None:
    assert Smoothing(sigma=0.25) == Smoothing(sigma=0.25, n0=100, n=100_000, alpha=0.001)


def test_the_largest_radius_of_a_hundred_thousand_votes() -> None:
    assert Smoothing(sigma=0.12).largest_radius == pytest.approx(0.45737, abs=5e-6)
    assert Smoothing(sigma=0.25).largest_radius == pytest.approx(0.95286, abs=5e-6)


@pytest.mark.parametrize(("sigma", "alpha", "radius"), [(0.12, 0.001, 0.4347), (0.25, 0.01, 0.5), (1.0, 0.2, 3.0)])
def test_the_votes_asked_for_suffice_and_no_fewer_do(sigma: float, alpha: float, radius: float) -> None:
    least = Smoothing(sigma=sigma, alpha=alpha).votes_for(radius)
    assert Smoothing(sigma=sigma, alpha=alpha, n=least).largest_radius > radius
    assert Smoothing(sigma=sigma, alpha=alpha, n=least - 1).largest_radius <= radius


def test_two_levels_of_linf_on_cifar_need_almost_unanimous_votes() -> None:
    """Linf 2/255 in 3072 dimensions is L2 0.43471: p >= 0.999854 at sigma 0.12, out of reach of 10,000 votes."""
    radius = 2 / 255 * 3072**0.5
    assert radius == pytest.approx(0.43471, abs=5e-6)
    assert float(stats.norm.cdf(radius / 0.12)) == pytest.approx(0.999854, abs=5e-7)
    Smoothing(sigma=0.12).check_radius(radius)
    with pytest.raises(ConfigError) as told:
        Smoothing(sigma=0.12, n=10_000).check_radius(radius)
    for part in ("radius 0.434711 is out of reach", "n 10000, alpha 0.001 and sigma 0.12", "is 0.38383", "use n 47"):
        assert part in str(told.value)


def test_a_radius_no_lifetime_can_reach_asks_for_more_noise() -> None:
    with pytest.raises(ConfigError, match=r"the largest radius is 0\.95286, if all votes agree; use a larger sigma$"):
        Smoothing(sigma=0.25).check_radius(100)
    with pytest.raises(ConfigError, match="a radius is a number >= 0, got -1"):
        Smoothing(sigma=0.25).check_radius(-1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sigma": 0.0}, "sigma must be a number > 0, got 0.0; it is the deviation of the noise in pixel units"),
        ({"sigma": -0.25}, "sigma must be a number > 0, got -0.25"),
        ({"sigma": float("nan")}, "sigma must be a number > 0, got nan"),
        ({"sigma": 64}, "sigma must be at most 1, got 64; it is in pixel units of [0, 1]: write 64/255, 0.25"),
        ({"sigma": 0.25, "n": 0}, "n must be a whole number >= 1, got 0; usual are n0 100 and n 100000"),
        ({"sigma": 0.25, "n0": 0}, "n0 must be a whole number >= 1, got 0"),
        ({"sigma": 0.25, "n": 1e5}, "n must be a whole number >= 1, got 100000.0"),
        ({"sigma": 0.25, "alpha": 0.0}, "alpha must lie strictly between 0 and 1, got 0.0"),
        ({"sigma": 0.25, "alpha": 1}, "alpha must lie strictly between 0 and 1, got 1"),
        ({"sigma": 0.25, "n": 9}, "n 9 proves nothing at alpha 0.001, whatever the votes: use n 11 or more"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        Smoothing(**options)  # type: ignore[arg-type]
    assert told in str(error.value)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Smoothing(sigma=0, n=-1, n0=-1, alpha=2)
    assert len(error.value.faults) == 4


# PREDICT


def test_predict_is_the_two_sided_binomial_test_of_the_two_leaders() -> None:
    counts = torch.tensor([[a, b, 3] for a in range(0, 60, 3) for b in range(0, 60, 7)])
    for alpha in (0.001, 0.05):
        for row, answer in zip(counts.tolist(), predictions(counts, alpha).tolist(), strict=True):
            first, second = sorted(row, reverse=True)[:2]
            sure = stats.binomtest(first, first + second).pvalue <= alpha
            assert answer == (row.index(first) if sure else ABSTAIN)


def test_predict_abstains_without_votes_and_on_ties() -> None:
    assert predictions(torch.tensor([[0, 0], [50, 50], [100, 0]]), 0.001).tolist() == [ABSTAIN, ABSTAIN, 0]


# Noise


def test_noise_is_that_of_the_draw_whatever_the_batch() -> None:
    x = torch.rand(2, 3, 3)
    whole = noise(x, 0, 40, NODE)
    assert whole.shape == (40, 2, 3, 3)
    parts = [noise(x, first, count, NODE) for first, count in ((0, 7), (7, 32), (39, 1))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(noise(x, 0, 40, NODE.child("other")), whole)


def test_noise_is_gaussian() -> None:
    z = noise(torch.empty(16, dtype=torch.float64), 0, 4000, NODE)
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 0.01
    correlation = torch.corrcoef(z.T) - torch.eye(16)
    assert float(correlation.abs().max()) < 5 / 4000**0.5


# Votes


def halfspace(gap: float, dimension: int = 6) -> tuple[nn.Linear, Tensor]:
    """A two-class linear network, and an input of class 1 at this distance from its boundary."""
    model = nn.Linear(dimension, 2).double()
    w = torch.linspace(-1, 2, dimension, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.stack([-w / 2, w / 2]))
        model.bias.zero_()
    return model, gap * w / w.square().sum().sqrt()


@pytest.mark.parametrize("gap", [0.05, 0.2, 0.5])
def test_a_linear_network_votes_as_the_normal_distribution_says(gap: float) -> None:
    """P(class 1) = Phi(gap / sigma), and the certified radius comes close to gap from below."""
    model, x = halfspace(gap)
    counts = Voter(model, 0.25, 4096).votes(x, 20_000, NODE)
    assert int(counts.sum()) == 20_000
    p = float(stats.norm.cdf(gap / 0.25))
    assert float(counts[1]) / 20_000 == pytest.approx(p, abs=4 * (p * (1 - p) / 20_000) ** 0.5)
    radius = float(certified_radii(counts[1], 20_000, sigma=0.25, alpha=0.001))
    assert 0.93 * gap - 0.01 < radius < gap


def test_batch_size_changes_nothing() -> None:
    model, x = halfspace(0.1)
    expected = Voter(model, 0.25, 1000).votes(x, 1000, NODE)
    for size in (1, 7, 333):
        assert torch.equal(Voter(model, 0.25, size).votes(x, 1000, NODE), expected)
    told: list[int] = []
    Voter(model, 0.25, 300).votes(x, 1000, NODE, told.append)
    assert told == [300, 300, 300, 100]


class Greedy(nn.Module):
    """Fails above a number of rows, for want of memory unless told otherwise."""

    def __init__(self, model: nn.Module, most: int, error: RuntimeError | None = None) -> None:
        super().__init__()
        self.model, self.most, self.sizes = model, most, list[int]()
        self.error = error or torch.OutOfMemoryError()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise self.error
        logits: Tensor = self.model(x)
        return logits


# What torch says on Linux and on Windows when the CPU's memory is short.
LINUX = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
)
WINDOWS = (
    "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."
)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError(LINUX), RuntimeError(WINDOWS)])
def test_batches_are_halved_until_they_fit_and_stay_so(error: RuntimeError) -> None:
    model, x = halfspace(0.1)
    greedy = Greedy(model, 30, error)
    voter = Voter(greedy, 0.25, 200)
    assert torch.equal(voter.votes(x, 200, NODE), Voter(model, 0.25, 200).votes(x, 200, NODE))
    assert greedy.sizes == [200, 100, 50, *[25] * 8]
    assert voter.batch_size == 25
    with pytest.raises(type(error)):
        Voter(Greedy(model, 0, error), 0.25, 4).votes(x, 10, NODE)


def test_torch_says_so_when_the_cpu_has_no_memory() -> None:
    """The real message; no machine has this much."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        torch.empty(2**55)


def test_other_errors_are_not_taken_for_want_of_memory() -> None:
    model, x = halfspace(0.1)
    greedy = Greedy(model, 30, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        Voter(greedy, 0.25, 200).votes(x, 200, NODE)
    assert greedy.sizes == [200], "not tried again"


class Watcher(nn.Module):
    """Remembers the range of what it sees, and gives no finite answer to inputs beyond 1."""

    def __init__(self) -> None:
        super().__init__()
        self.low = self.high = 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))
        first = x[:, :1].masked_fill(x[:, :1] > 1, torch.nan)
        return torch.cat([first, 0.5 - first, torch.zeros_like(first)], 1)


def test_noisy_inputs_are_not_clipped_and_answers_that_are_not_finite_are_no_votes() -> None:
    model, x = Watcher(), torch.full((4,), 0.9)
    counts = Voter(model, 0.5, 256).votes(x, 2000, NODE)
    assert model.low < -0.5
    assert model.high > 2
    lost = float(stats.norm.sf(0.1 / 0.5))
    assert (2000 - float(counts.sum())) / 2000 == pytest.approx(lost, abs=0.05)
    assert counts.shape == (3,)


# The smoothed classifier as a function with gradients


def test_smoothed_is_the_mean_probability() -> None:
    gen = NODE.generator()
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 3)).double()
    x = torch.rand(5, 2, 4, generator=gen, dtype=torch.float64)
    soft = Smoothed(model, x[0], sigma=0.3, draws=11, seed=NODE)
    shares = torch.stack([model(x + 0.3 * z).softmax(1) for z in noise(x[0], 0, 11, NODE)]).mean(0)
    torch.testing.assert_close(soft(x).exp(), shares, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(soft(x[2:3]), soft(x)[2:3], rtol=1e-12, atol=1e-15)


def test_smoothed_has_the_gradient_of_what_it_computes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.rand(3, 4, dtype=torch.float64, generator=NODE.generator()).requires_grad_(True)
    soft = Smoothed(model, x[0].detach(), sigma=0.3, draws=5, seed=NODE)
    assert torch.autograd.gradcheck(soft, (x,))
    assert prod(soft(x).shape) == 9


def test_so_few_votes_that_none_decides_are_refused_before_work() -> None:
    """10 votes that agree certify a radius at alpha 0.001, but PREDICT, two-sided, would abstain from everything."""
    few = Smoothing(sigma=0.25, n=10)
    assert few.largest_radius > 0 and few.fewest == 11
    assert predictions(torch.tensor([[10, 0]]), 0.001).tolist() == [-1]
    assert predictions(torch.tensor([[11, 0]]), 0.001).tolist() == [0]
    with pytest.raises(ConfigError, match=r"n 10 decides nothing .* use n 11 or more"):
        few.check_votes()
    Smoothing(sigma=0.25, n=11).check_votes()
