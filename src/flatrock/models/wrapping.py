"""What other projects put around a network: prefixes of all names, mean and std, copies; taken off layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError

Pair = tuple[tuple[float, ...], tuple[float, ...]]

# Where other projects keep the mean and the standard deviation of their inputs; '0.' is the first of a Sequential.
_NORMALIZERS = tuple(
    (place + mean, place + std)
    for place in ("", "normalize.", "normalizer.", "normalization.", "norm.", "0.")
    for mean, std in (("mu", "sigma"), ("mean", "std"), ("new_mean", "new_std"))
)
# Counter of averaging (torch's AveragedModel): no prediction depends on it.
_AVERAGE_COUNTER = "n_averaged"
# MAIR's number of classes, which lies beside the network and not in it.
_CLASSES = "n_classes"
# MadryLab's robustness stores its network twice, once inside the attacker, whose normaliser has another name.
_ATTACKER, _ITS_NORMALIZER = "attacker.", (r"^normalize\.", "normalizer.")


@dataclass(frozen=True)
class Reading:
    """A state dict with some of its wrapping taken off, and the normalisation found on the way."""

    state: dict[str, Tensor]
    normalize: Pair | None = None


def readings(state: Mapping[str, Tensor]) -> Iterator[Reading]:
    """The state as it is, then with ever more of its wrapping taken off; only one of them has a network's names."""
    now: Reading | None = Reading({k: v for k, v in state.items() if k != _AVERAGE_COUNTER})
    while now is not None:
        yield now
        now = _inside(now)


def _inside(outer: Reading) -> Reading | None:
    """With one thing less around it; None if nothing is."""
    state, known = outer.state, outer.normalize
    if prefix := _shared_prefix(state):
        return Reading({k.removeprefix(prefix): v for k, v in state.items()}, known)
    if copies := _copies(state):
        return Reading({k: v for k, v in state.items() if k not in copies}, known)
    pair = next((p for p in _NORMALIZERS if known is None and set(p) < state.keys()), None)
    if pair is not None:
        return Reading({k: v for k, v in state.items() if k not in pair}, _stored(state, pair))
    if _CLASSES in state and not state[_CLASSES].dim() and len(state) > 1:
        return Reading({k: v for k, v in state.items() if k != _CLASSES}, known)
    return None


def _shared_prefix(names: Collection[str]) -> str:
    """`net.` where every name begins with it, '' if they do not begin alike."""
    first = {name.partition(".")[0] if "." in name else "" for name in names}
    return f"{first.pop()}." if len(first) == 1 and "" not in first else ""


def _copies(state: Mapping[str, Tensor]) -> set[str]:
    """Names of an attacker that holds the network once more, tensor by tensor; none if it holds anything else."""
    inner = {k: k.removeprefix(_ATTACKER) for k in state if k.startswith(_ATTACKER)}
    for name, short in inner.items():
        twin = state.get(short, state.get(re.sub(*_ITS_NORMALIZER, short)))
        if twin is None or twin.dtype != state[name].dtype or not torch.equal(twin, state[name]):
            return set()
    return set(inner)


def _stored(state: Mapping[str, Tensor], names: tuple[str, str]) -> Pair:
    mean, std = (tuple(float(v) for v in state[name].flatten()) for name in names)
    if not mean or not std or min(std) <= 0 or not all(map(math.isfinite, (*mean, *std))):
        raise ConfigError(
            f"the weights come with {names[0]} = {list(mean)} and {names[1]} = {list(std)}, which normalise nothing: "
            "means must be finite, stds finite and positive"
        )
    return mean, std


def closest(candidates: Iterable[Reading], names: Collection[str]) -> Reading:
    """The reading with most of these names and fewest others."""
    best: tuple[tuple[int, int], Reading] | None = None
    for reading in candidates:
        if reading.state.keys() == set(names):
            return reading
        score = (len(reading.state.keys() & set(names)), -len(reading.state))
        if best is None or score > best[0]:
            best = score, reading
    assert best is not None  # the state as it is comes first
    return best[1]


def innermost(state: Mapping[str, Tensor], known: Callable[[Mapping[str, Tensor]], bool]) -> Reading | None:
    """The last reading that is `known`."""
    return next((r for r in reversed(list(readings(state))) if known(r.state)), None)


def parts(state: Mapping[str, Tensor], known: Callable[[Mapping[str, Tensor]], bool]) -> list[str]:
    """Prefixes, without the dot, under which alone there is what is `known`, beside other names."""
    steps = [name.split(".") for name in state]
    prefixes = dict.fromkeys(".".join(step[:cut]) for step in steps for cut in range(1, len(step)))
    return [prefix for prefix in prefixes if known(under(state, prefix))]


def under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix and a dot, which are taken off."""
    return {k.removeprefix(f"{prefix}."): v for k, v in state.items() if k.startswith(f"{prefix}.")}


def told_parts(prefixes: Iterable[str]) -> str:
    """How to take one of the parts of a file."""
    return f"say {' or '.join(f'--which {prefix}' for prefix in prefixes)} (for a recipe, save it alone)"
