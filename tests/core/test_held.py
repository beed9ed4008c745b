"""The digest of what a thing holds: that of its contents, in any process; nothing where its file tells all."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatrock.core.held import held_digest


def closing(over: Any) -> Callable[..., Any]:
    def inner(x: Any) -> Any:
        return x, over

    return inner


class Point:
    """Its own parts, one of them itself."""

    def __init__(self, x: Any) -> None:
        self.x, self.me = x, self

    def move(self) -> None: ...


def network(bias: float) -> nn.Module:
    net = nn.Linear(2, 2)
    for parameter in net.parameters():
        nn.init.constant_(parameter, bias)
    return net


KINDS: dict[str, Callable[[int], Any]] = {
    "number": lambda i: i,
    "tensor": lambda i: torch.full((2, 2), float(i)),
    "integers": lambda i: torch.full((), i),
    "bfloat16": lambda i: torch.full((3,), float(i), dtype=torch.bfloat16),
    "transposed": lambda i: torch.tensor([[1.0, i], [3.0, 4.0]]).t(),
    "sparse": lambda i: torch.full((2, 2), float(i)).to_sparse(),
    "array": lambda i: np.full((2, 2), i),
    "array of objects": lambda i: np.array([Point(i), None], dtype=object),
    "network": lambda i: network(float(i)),
    "list": lambda i: [torch.ones(2), (1, torch.full((2,), float(i)))],
    "mapping": lambda i: {"a": torch.full((2,), float(i)), 2: "b"},
    "set": lambda i: {"a", "b", "c", i, torch.float32},
    "object": Point,
    "method": lambda i: Point(i).move,
    "function": lambda i: closing(torch.full((2,), float(i))),
    "functions": lambda i: [torch.nn.functional.relu, torch.nn.functional.selu, torch.relu, torch.selu][i],
    "partial": lambda i: functools.partial(closing, torch.full((2,), float(i))),
    "path": lambda i: Path(f"{i}"),
    "device": lambda i: torch.device("cuda", i),
    "bytes": lambda i: bytes([i]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_contents_make_the_digest(kind: str) -> None:
    one, same, other = (held_digest(closing(KINDS[kind](i)), {}) for i in (1, 1, 2))
    assert one == same != other
    options = [held_digest(Point, {"given": [KINDS[kind](i), print]}) for i in (1, 1, 2)]
    assert options[0] == options[1] != options[2]
    assert None not in (one, options[0])


def test_what_cannot_be_copied_is_known_by_its_kind(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as one, (tmp_path / "b").open("w") as other:
        assert held_digest(closing(one), {}) == held_digest(closing(other), {}) != held_digest(closing(print), {})


@torch.no_grad()
def decorated(x: Tensor, *, steps: int = 1) -> Tensor:
    return x


named = closing(0.3)


def test_where_a_file_tells_all_there_is_no_digest() -> None:
    @dataclass(frozen=True)
    class Local:
        steps: int = 3

        def __call__(self, x: Any) -> Any:
            return x

    class Bare:
        def __call__(self, x: Any) -> Any:
            return x

    def local(x: Any) -> Any:
        return x

    told = [closing, decorated, named, Point, Local, local, KINDS["path"], nn.Linear, Bare(), Bare().__call__]
    assert [held_digest(thing, {"steps": 3, "names": ["a"]}) for thing in told] == [None] * len(told)
    assert len({None, *(held_digest(thing, {}) for thing in (Local(), Local(4), Local().__call__))}) == 4


def test_a_class_that_closes_over_something() -> None:
    def made(delta: Tensor) -> type:
        class Local:
            first = delta[:1]

            def __call__(self) -> Tensor:
                return delta

        return Local

    digests = [held_digest(made(torch.tensor(rows)), {}) for rows in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0], [0.0, 2.0])]
    assert digests[0] == digests[1]
    assert len({None, *digests}) == 4


TYPED = """
import torch
from flatrock.core.held import held_digest
delta = torch.ones(2)
def help(x): return x * 3
def climb(x, *, steps=2):
    return [help(i) for i in x if i not in {"a", "b", "c"}] + [delta]
class Climb:
    size = torch.ones(1)
    def __init__(self): self.by = 0.5
    @property
    def twice(self): return self.by * 2
    def __call__(self, x): return climb(x) + [self.twice]
print(held_digest(climb, {}), held_digest(Climb, {}), held_digest(lambda x: x + 1, {}))
"""


def typed(text: str, seed: int = 0) -> list[str]:
    """The digests of climb, Climb and a lambda that are typed at a prompt."""
    run = [sys.executable, "-W", "error", "-"]
    env = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": str(seed), "PATH": ""}
    return subprocess.run(run, input=text, capture_output=True, text=True, check=True, env=env).stdout.split()


def test_code_without_a_file_is_known_by_what_it_does() -> None:
    first = typed(TYPED)
    assert typed("# a remark\n" + TYPED, seed=1) == first
    assert "None" not in first
    both = [("x * 3", "x * 4"), ('"a", "b", "c"', '"a", "b", "d"'), ("torch.ones(2)", "torch.zeros(2)")]
    one = [("self.by * 2", "self.by * 3"), ("torch.ones(1)", "torch.zeros(1)")]
    for change in [*both, *one, ("x + 1", "x + 2")]:
        moved = [a != b for a, b in zip(typed(TYPED.replace(*change)), first, strict=True)]
        assert moved == [change in both, change in both + one, change[0] == "x + 1"], change


class Key:
    """In a set its place follows from where it lies in memory."""

    def __init__(self, x: int) -> None:
        self.x = x


def test_a_set_is_in_no_order() -> None:
    digests = set()
    for ballast in range(20):
        kept = [object() for _ in range(7 * ballast)]
        keys = [Key(i) for i in range(6)]
        digests.add(held_digest(closing({"a": set(keys), "b": [keys[0], keys[3]]}), {}))
        del kept
    assert len(digests) == 1


def test_members_of_a_set_may_hold_each_other() -> None:
    keys = [Key(i) for i in range(12)]
    for key in keys:
        key.others = set(keys) - {key}  # type: ignore[attr-defined]
    assert held_digest(closing(keys), {}) is not None


def test_things_without_end_and_without_values_have_digests() -> None:
    """Of what lies too deep, wherever it is asked from, or cannot be read the kind is told."""

    def chain(length: int, last: int = 0) -> Any:
        return Point(chain(length - 1, last)) if length else last

    def deeper(calls: int, thing: Any) -> str | None:
        return deeper(calls - 1, thing) if calls else held_digest(still, {"deep": thing})

    assert deeper(0, chain(400)) == deeper(300, chain(400)) is not None
    assert held_digest(still, {"deep": chain(5, 1)}) != held_digest(still, {"deep": chain(5, 2)})
    assert held_digest(still, {"net": nn.LazyLinear(3)}) is not None
    odd = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    assert held_digest(still, {"odd": odd}) is not None


def still(x: Any) -> Any:
    return x
