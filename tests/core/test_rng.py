"""Random numbers by name and sample: the exact sequence, its statistics, and global generators left alone."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed, kept_global_rng, seed_layers

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """The finaliser of SplitMix64 on unbounded Python integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(state: int, count: int) -> list[int]:
    return [mix((state + i * GOLDEN) & MASK) for i in range(1, count + 1)]


def expected_uniform(key: int, sample: int, count: int) -> list[float]:
    stream = mix(mix((sample * GOLDEN + key) & MASK))
    return [(bits >> 40) * 2.0**-24 for bits in splitmix64(stream, count)]


def test_the_reference_is_splitmix64() -> None:
    """First outputs for seed 1234567, as published with the algorithm's reference code."""
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("key", [0, 1, 12345, (1 << 63) + 17, MASK])
def test_uniforms_equal_the_pure_python_sequence(key: int) -> None:
    ids = [0, 1, 2, 49_999, 10**12]
    drawn = Seed(key).samples(torch.tensor(ids)).uniform(torch.zeros(5, 2, 3, dtype=torch.float64))
    assert drawn.flatten(1).tolist() == [expected_uniform(key, i, 6) for i in ids]


def test_normals_are_box_muller_of_the_same_sequence() -> None:
    drawn = Seed(9).samples(torch.tensor([4])).normal(torch.zeros(1, 5, dtype=torch.float64))
    u = expected_uniform(9, 4, 10)
    by_hand = [math.sqrt(-2 * math.log1p(-u[i])) * math.cos(2 * math.pi * u[5 + i]) for i in range(5)]
    assert drawn[0].tolist() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_sample_gets_the_same_numbers_in_any_batch(kind: str, batch: int) -> None:
    like = torch.zeros(64, 3, 4, 4)
    gen = Seed(1).child("attack").samples(torch.arange(64))
    whole = getattr(gen, kind)(like)
    pieces = [getattr(gen[rows], kind)(like[rows]) for rows in torch.split(torch.arange(64), batch)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_a_sample_gets_the_same_numbers_in_any_order(kind: str) -> None:
    like = torch.zeros(50, 9)
    order = Seed(2).permutation(50)
    straight = getattr(Seed(3).samples(torch.arange(50)), kind)(like)
    shuffled = getattr(Seed(3).samples(order), kind)(like)
    assert torch.equal(shuffled, straight[order])


def test_more_numbers_extend_the_sequence_and_shape_does_not_matter() -> None:
    gen = Seed(4).samples(torch.arange(3))
    long = gen.uniform(torch.zeros(3, 12))
    assert torch.equal(gen.uniform(torch.zeros(3, 5)), long[:, :5])
    assert torch.equal(gen.uniform(torch.zeros(3, 3, 2, 2)).flatten(1), long)


def test_asking_twice_gives_the_same_and_a_child_gives_others() -> None:
    gen = Seed(5).samples(torch.arange(10))
    like = torch.zeros(10, 100)
    assert torch.equal(gen.uniform(like), gen.uniform(like))
    seen = [gen.child("restart", r).uniform(like) for r in range(4)] + [gen.child("step", 0).uniform(like)]
    for i, a in enumerate(seen):
        for b in seen[i + 1 :]:
            assert float((a == b).float().mean()) < 0.01


def test_children_samples_and_positions_are_uncorrelated() -> None:
    like = torch.zeros(200, 200, dtype=torch.float64)
    gen = Seed(6).samples(torch.arange(200))
    a, b = gen.child("a").uniform(like), gen.child("b").uniform(like)
    limit = 4 / math.sqrt(a.numel())
    pairs = [(a, b), (a[1:], a[:-1]), (a[:, 1:], a[:, :-1]), (a, a.T)]
    for u, v in pairs:
        assert abs(float(torch.corrcoef(torch.stack([u.flatten(), v.flatten()]))[0, 1])) < limit


def test_uniform_moments_and_distribution() -> None:
    u = Seed(7).samples(torch.arange(400)).uniform(torch.zeros(400, 50, dtype=torch.float64)).flatten()
    assert float(u.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * u.numel()))
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.03)
    assert stats.kstest(u.numpy(), "uniform").statistic < 1.63 / math.sqrt(u.numel())


def test_normal_moments_and_distribution() -> None:
    z = Seed(8).samples(torch.arange(400)).normal(torch.zeros(400, 50, dtype=torch.float64)).flatten()
    n = z.numel()
    assert float(z.mean()) == pytest.approx(0, abs=4 / math.sqrt(n))
    assert float(z.var()) == pytest.approx(1, abs=4 * math.sqrt(2 / n))
    assert float((z**3).mean()) == pytest.approx(0, abs=4 * math.sqrt(15 / n))
    assert float((z**4).mean()) == pytest.approx(3, abs=4 * math.sqrt(96 / n))
    assert stats.kstest(z.numpy(), "norm").statistic < 1.63 / math.sqrt(n)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_float32_is_float64_rounded(kind: str) -> None:
    gen = Seed(10).samples(torch.arange(20))
    wide = getattr(gen, kind)(torch.zeros(20, 500, dtype=torch.float64))
    narrow = getattr(gen, kind)(torch.zeros(20, 500, dtype=torch.float32))
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, wide.to(torch.float32))


def test_uniform_is_never_one_and_normal_is_always_finite() -> None:
    """The largest of the 2^24 possible values survives the cast to float32 below 1."""
    top = torch.tensor((2**24 - 1) * 2.0**-24, dtype=torch.float64).float()
    assert float(top) < 1
    gen = Seed(11).samples(torch.arange(1000))
    u, z = gen.uniform(torch.zeros(1000, 500)), gen.normal(torch.zeros(1000, 500))
    assert float(u.max()) < 1
    assert float(u.min()) >= 0
    assert bool(torch.isfinite(z).all())


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 4, 4)])
def test_empty_batches_give_empty_tensors(shape: tuple[int, ...]) -> None:
    gen = Seed(0).samples(torch.arange(0))
    assert gen.uniform(torch.zeros(shape)).shape == shape
    assert gen.normal(torch.zeros(shape)).shape == shape


def test_named_seeds_are_pinned() -> None:
    """A run resumed by a later version must see the same numbers: these keys may never change."""
    assert Seed(0).child("attack").key == 5253181642904354843
    assert Seed(0).child("attack", 3).key == 6149432876225355783
    assert Seed(1).child("evaluate", "pgd-20").key == 14949636182842650377
    assert Seed(7).child("data").child("epoch", 12).key == 597323165157039885


def test_names_types_and_nesting_tell_seeds_apart() -> None:
    root = Seed(0)
    keys = [
        root.key,
        root.child("a").key,
        root.child("b").key,
        root.child("a", "b").key,
        root.child("b", "a").key,
        root.child("ab").key,
        root.child("a/str:b").key,
        root.child("a").child("b").key,
        root.child("3").key,
        root.child(3).key,
        Seed(1).child("a").key,
    ]
    assert len(set(keys)) == len(keys)


def test_permutation_is_a_shuffle_of_all_and_pinned_by_its_seed() -> None:
    p = Seed(3).permutation(100)
    assert p.sort().values.tolist() == list(range(100))
    assert torch.equal(p, Seed(3).permutation(100))
    assert not torch.equal(p, Seed(4).permutation(100))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    gen = Seed(0).samples(torch.arange(5))
    gen.uniform(torch.zeros(5, 3))
    gen.normal(torch.zeros(5, 3))
    Seed(0).permutation(9)
    torch.rand(3, generator=Seed(0).generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_kept_global_rng_gives_the_state_back_even_on_error() -> None:
    before = torch.get_rng_state()
    with kept_global_rng():
        torch.rand(10)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(KeyError), kept_global_rng(seed=Seed(1)):
        torch.rand(10)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_kept_global_rng_with_a_seed_starts_from_it() -> None:
    drawn = []
    for seed in (Seed(1), Seed(1), Seed(2), Seed(MASK)):
        with kept_global_rng(seed=seed):
            drawn.append(torch.rand(10))
        torch.rand(1)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[3])


def test_layers_can_be_seeded_again_inside() -> None:
    before = torch.get_rng_state()
    with kept_global_rng():
        seed_layers(Seed(1))
        first = torch.rand(10)
        seed_layers(Seed(1))
        assert torch.equal(torch.rand(10), first)
    with kept_global_rng(seed=Seed(1)):
        assert torch.equal(torch.rand(10), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_any_whole_number_is_a_seed_and_nothing_else_is() -> None:
    import numpy as np

    assert Seed(np.int64(3)).child("a") == Seed(3).child("a")  # type: ignore[arg-type]
    for value in (1.5, "3", None):
        with pytest.raises(ConfigError, match="a seed is a whole number"):
            Seed(value)  # type: ignore[arg-type]
