"""Random numbers from one seed, by name, without touching torch's global generators.

Two kinds are needed. A `torch.Generator` from a named `Seed` serves what happens once (shuffles, initial weights).
A `SampleGen` serves attacks and augmentation: its numbers are a pure function of (seed, name, sample id, position),
so a sample gets the same numbers whatever batch, device or resumed process it is in. Asking twice gives the same
numbers twice; ask `child(...)` for fresh ones.
"""

from __future__ import annotations

import hashlib
import json
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError


def _signed(value: int) -> int:
    """The same 64 bits read as a signed integer, the only 64-bit kind torch multiplies everywhere."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea, Flood 2014): increment and the two multipliers of its finaliser.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _mix(z: Tensor) -> Tensor:
    """SplitMix64 finaliser on int64 tensors; `>>` is arithmetic in torch, so the sign bits are masked off."""
    for shift, factor in _MULTIPLIERS:
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@dataclass(frozen=True)
class Seed:
    """A node in the tree of seeds: `Seed(0).child("attack", 3)` is always the same 64-bit key."""

    key: int

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "key", operator.index(self.key))  # numpy's integers become Python's
        except TypeError as error:
            raise ConfigError(f"a seed is a whole number, got {self.key!r}") from error

    def child(self, *path: str | int) -> Seed:
        """The seed of a named purpose below this one."""
        text = json.dumps([self.key, *path])
        return Seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big"))

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh torch generator that starts from this seed."""
        return self.restart(torch.Generator(device=device))

    def restart(self, generator: torch.Generator) -> torch.Generator:
        """Let a generator start from this seed."""
        return generator.manual_seed(_signed(self.key))

    def permutation(self, n: int) -> Tensor:
        """A shuffle of 0..n-1, drawn on the CPU so that it is the same on every device."""
        return torch.randperm(n, generator=self.generator())

    def samples(self, ids: Tensor) -> SampleGen:
        """Random numbers that belong to the samples with these ids."""
        return SampleGen(self, ids)


@dataclass(frozen=True)
class SampleGen:
    """Counter-based random numbers, one independent sequence per sample id."""

    seed: Seed
    ids: Tensor

    def child(self, *path: str | int) -> SampleGen:
        """Fresh numbers for a named purpose (a restart, a step) for the same samples."""
        return SampleGen(self.seed.child(*path), self.ids)

    def __getitem__(self, keep: Tensor) -> SampleGen:
        """The same numbers for a subset of the samples."""
        return SampleGen(self.seed, self.ids[keep])

    def _bits(self, count: int, device: torch.device) -> Tensor:
        ids = self.ids.to(device=device, dtype=torch.int64)
        keys = _mix(_mix(ids * _GOLDEN + _signed(self.seed.key)))
        counter = torch.arange(1, count + 1, device=device, dtype=torch.int64)
        return _mix(keys[:, None] + counter * _GOLDEN)

    def uniform(self, like: Tensor) -> Tensor:
        """U[0, 1) with the shape, dtype and device of `like`; row i belongs to sample ids[i]."""
        count = like[0].numel() if like.shape[0] else 0
        return self._unit_interval(count, like.device).to(like.dtype).reshape(like.shape)

    def normal(self, like: Tensor) -> Tensor:
        """N(0, 1) by Box-Muller from two uniforms per number."""
        count = like[0].numel() if like.shape[0] else 0
        u = self._unit_interval(2 * count, like.device)
        radius = torch.sqrt(-2 * torch.log1p(-u[:, :count]))
        return (radius * torch.cos(2 * torch.pi * u[:, count:])).to(like.dtype).reshape(like.shape)

    def _unit_interval(self, count: int, device: torch.device) -> Tensor:
        # 24 bits survive the cast to float32 exactly, so no value is rounded up to 1.
        bits = (self._bits(count, device) >> 40) & ((1 << 24) - 1)
        return bits.to(torch.float64) * 2.0**-24


def _global_generators(device: torch.device | str) -> list[torch.Generator]:
    device = torch.device(device)
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]


def layer_states(device: torch.device | str = "cpu") -> list[Tensor]:
    """Where the generators stand that layers such as dropout draw from; to be put back, and the same is drawn again."""
    return [g.get_state() for g in _global_generators(device)]


def put_layer_states(device: torch.device | str, states: list[Tensor]) -> None:
    """Inverse of layer_states; only inside `kept_global_rng`, which gives the generators back."""
    for g, state in zip(_global_generators(device), states, strict=True):
        g.set_state(state)


def random_states() -> list[object]:
    """Where the global generators of torch, Python and numpy stand: who tosses a coin moves one of them."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    numpy: Any = np.random.get_state(legacy=True)
    return [*(s.numpy().tobytes() for s in states), random.getstate(), numpy[1].tobytes(), numpy[2:]]


@contextmanager
def kept_global_rng(device: torch.device | str = "cpu", seed: Seed | None = None) -> Iterator[None]:
    """Give torch's global generators back bit-identical; with `seed`, layers that use them start from it inside.

    Layers such as dropout, and `nn.Module` initialisers, can only draw from the global generators.
    """
    states = layer_states(device)
    try:
        if seed is not None:
            seed_layers(seed, device)
        yield
    finally:
        put_layer_states(device, states)


def seed_layers(seed: Seed, device: torch.device | str = "cpu") -> None:
    """Start the global generators from `seed`; only inside `kept_global_rng`, which gives them back."""
    for g in _global_generators(device):
        g.manual_seed(_signed(seed.key))
