"""One network in several threads: they take turns, and it comes back as it was."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from threading import Event, Thread

import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import attack
from flatrock.core import borrow
from flatrock.core.borrow import borrowed, exclusive
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate

WAIT = 20


class Slow(nn.Module):
    """Two halves of a pass, between which another thread gets its chance."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.inside, self.most = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.inside += 1
        self.most = max(self.most, self.inside)
        Event().wait(0.001)
        logits: Tensor = self.body(x)
        self.inside -= 1
        return logits


def together(*works: Callable[[], object]) -> list[object]:
    """What each says, done by threads at once."""
    found: dict[int, object] = {}

    def do(i: int, work: Callable[[], object]) -> None:
        found[i] = work()

    threads = [Thread(target=do, args=item, daemon=True) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    return [found[i] for i in range(len(works))]


def test_threads_that_attack_and_evaluate_one_network_take_turns() -> None:
    model, x, y = Slow().train(), torch.rand(8, 6), torch.arange(8) % 3
    alone = evaluate(model, x, y, Linf(0.1), attacks=["pgd-5"])
    crafted = attack("pgd", model, x, y, Linf(0.1), steps=5)
    evaluated = [lambda: evaluate(model, x, y, Linf(0.1), attacks=["pgd-5"])] * 3
    attacked = [lambda: attack("pgd", model, x, y, Linf(0.1), steps=5)] * 3
    *results, a, b, c = together(*evaluated, *attacked)
    assert model.most == 1
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    for result in results:
        assert torch.equal(result.flags["pgd-5"], alone.flags["pgd-5"])  # type: ignore[attr-defined]
        assert [f.code for f in result.findings] == [f.code for f in alone.findings]  # type: ignore[attr-defined]
    assert all(isinstance(t, Tensor) and torch.equal(t, crafted) for t in (a, b, c))


def test_a_wrapper_waits_for_the_network_inside_it() -> None:
    model = nn.Linear(2, 2)
    begun, order = Event(), []

    def first() -> None:
        with borrowed(model, "cpu"):
            begun.set()
            Event().wait(0.05)
            order.append("first")

    def second() -> None:
        begun.wait(WAIT)
        with borrowed(nn.Sequential(nn.Identity(), model), "cpu"):
            order.append("second")

    together(first, second)
    assert order == ["first", "second"]
    assert model.weight.requires_grad


def test_a_model_and_its_surrogate_may_change_places() -> None:
    a, b, x, y = Slow(), Slow(), torch.rand(4, 6), torch.arange(4) % 3
    attacks = ["fgsm", "transfer-pgd-2"]

    def one() -> object:
        return [evaluate(a, x, y, Linf(0.1), attacks=attacks, surrogate=b) for _ in range(3)]

    def other() -> object:
        return [evaluate(b, x, y, Linf(0.1), attacks=attacks, surrogate=a) for _ in range(3)]

    together(one, other)
    assert a.most == b.most == 1


def test_other_networks_do_not_wait() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    both = [Event(), Event()]

    def hold(model: nn.Module, mine: Event, yours: Event) -> bool:
        with exclusive(model):
            mine.set()
            return yours.wait(WAIT)

    assert together(lambda: hold(a, *both), lambda: hold(b, *both[::-1])) == [True, True]


def test_locks_neither_keep_nor_enter_a_network() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with borrowed(model, "cpu"), borrowed(model, "cpu"):
        copy.deepcopy(model)
        pickle.dumps(model)
    assert set(model.modules()) <= set(borrow._LOCKS)
    gone = [weakref.ref(m) for m in model.modules()]
    assert len(gone) == 2
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_an_error_gives_the_network_free() -> None:
    model = nn.Linear(2, 2)

    def fails() -> None:
        try:
            with borrowed(model, "cpu"):
                raise ValueError
        except ValueError:
            pass

    def works() -> bool:
        with borrowed(model, "cpu"):
            return True

    together(fails)
    assert together(works) == [True]
