"""Batches that go through the network in parts: the step of the whole batch, in the memory of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from team_cases import PLAIN, among_nets
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatrock.data.loader import Batch
from flatrock.engine.average import averaged
from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage
from flatrock.engine.parts import in_turn, part_sizes
from flatrock.engine.step import train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe

SMALL = ("train.batch_size=33", "data.limit=99", "train.tensorboard=false")
ATTACK = (*SMALL, "attack.steps=3", "threat={norm: l2, eps: 0.5}")
METHODS = ("at", "trades", "mart", "alp", "at_awp", "at_sam", "atent", "trades_rat", "trades_s2o", "trades_trh")
CASES = {name: [f"digits_{name}", *ATTACK] for name in (*METHODS, "trades_awp_rat_swa")}
CASES |= {name: [f"digits_{name}", *SMALL] for name in ("standard", "entropy_sgd", "gat")}
CASES |= {
    "hat": ["digits_trades", *ATTACK, "objective={name: hat, helper: HELPER}"],
    "unlabelled": ["digits_trades", *ATTACK, "data.extra={file: extra.npz, fraction: 0.4}", "flatness=[rat, s2o]"],
    "mixup": ["digits_at", *ATTACK, "data.augment.mixup=0.5"],
    "adamw and clipping": ["digits_trades", *ATTACK, "optimizer={name: adamw, lr: 0.01}", "train.clip_norm=0.1"],
    "further rounds of awp": ["digits_trades", *ATTACK, "flatness=[{name: awp, alternations: 2, steps: 2}]"],
    "own objective": ["digits_trades", *ATTACK, "objective={name: 'parted:Spread'}"],
    "forwards of the code": ["digits_trades", *ATTACK, "objective.forwards=code"],
}
OWN = """
import torch.nn.functional as F
from flatrock.core.types import Parts


class Spread:
    '''A loss that is no mean over samples: how the logits of a batch spread.'''

    passes = ("clean", "adv")
    inner_loss = "kl"
    hard_labels = False

    def loss(self, views, y):
        spread = views.adv.logits.std(0).mean() + (views.clean.features.T @ views.adv.features).square().mean()
        return Parts({"ce": F.cross_entropy(views.clean.logits, y), "spread": spread}, {"ce": 1.0, "spread": 0.3})
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with networks, an objective and unlabelled images of one's own."""
    folder = tmp_path_factory.mktemp("parts")
    with among_nets(folder):
        (folder / "parted.py").write_text(OWN)
        rng = np.random.default_rng(0)
        images, labels = rng.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8), np.where(np.arange(40) % 3, -1, 4)
        np.savez(folder / "extra.npz", image=images, label=labels)
        yield folder


def made(words: list[str], folder: Path, helper: Path, *more: str) -> Job:
    filled = [word.replace("HELPER", str(helper)) for word in words]
    job = build_job(load_recipe(filled[0], [PLAIN, *filled[1:], *more]), folder=folder)
    job.model.double().train()
    if job.helper is not None:
        job.helper.network.double()
    return job


def stepped(job: Job, count: int = 3) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights after some steps, in double precision, and the losses of each."""
    found = []
    for step, batch in zip(range(count), job.loader.epoch(0), strict=False):
        whole = Batch(batch.x.double(), batch.y, batch.ids, batch.share)
        outcome = train_step(job, whole, step=step, guard=step == 0)
        found.append({k: float(v) for k, v in outcome.losses.items()} | {"right": float(outcome.right)})
    averages = {} if job.averaging is None else {f"average/{k}": v.clone() for k, v in job.averaging.average().items()}
    return {**{k: v.clone() for k, v in job.model.state_dict().items()}, **averages}, found


@pytest.mark.parametrize("most", [8, 16])  # of 33 samples: five parts of 7 and 6, three of 11
@pytest.mark.parametrize("case", CASES)
def test_parts_make_up_the_whole(here: Path, tmp_path: Path, helper_run: Path, case: str, most: int) -> None:
    whole = made(CASES[case], tmp_path / "whole", helper_run)
    parts = made(CASES[case], tmp_path / "parts", helper_run, f"train.micro_batch={most}")
    begun = {k: v.clone() for k, v in whole.model.state_dict().items()}
    (true, losses), (got, again) = stepped(whole), stepped(parts)
    assert [one.keys() for one in again] == [one.keys() for one in losses]
    for one, other in zip(losses, again, strict=True):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-12)
    moved = sum(float((true[k] - begun[k]).square().sum()) for k in begun) ** 0.5
    apart = sum(float((true[k] - got[k]).square().sum()) for k in true) ** 0.5
    assert moved > 0.01
    # RAT's matrices come from differences of nearly equal numbers, which magnify rounding; mixed labels are float32.
    assert apart <= 1e-9 * moved


@pytest.mark.parametrize(
    ("rows", "most", "sizes"),
    [
        (10, None, [10]),
        (10, 10, [10]),
        (10, 11, [10]),
        (10, 5, [5, 5]),
        (10, 9, [5, 5]),
        (33, 8, [7, 7, 7, 6, 6]),
        (128, 64, [64, 64]),
        (129, 64, [43, 43, 43]),
        (5, 2, [3, 2]),
        (3, 2, [3]),
        (4, 2, [2, 2]),
        (0, 4, [0]),
    ],
)
def test_sizes(rows: int, most: int | None, sizes: list[int]) -> None:
    """Of a remainder nobody is left alone: BatchNorm cannot train on one sample."""
    assert part_sizes(rows, most) == sizes
    assert sum(sizes) == rows


# What the network sees


def rows_seen(job: Job) -> list[tuple[bool, int]]:
    """Whether there is a gradient to be, and how many rows, of every pass of two steps."""
    seen: list[tuple[bool, int]] = []
    layer = next(m for m in job.model.modules() if isinstance(m, nn.Conv2d))
    layer.register_forward_hook(lambda m, x, y: seen.append((torch.is_grad_enabled(), len(x[0]))))
    job.model.train()
    for step, batch in zip(range(2), job.loader.epoch(0), strict=False):
        train_step(job, batch, step=step, guard=True)
    return seen


STACK = [{"name": "awp", "gamma": 0.01}, {"name": "rat", "eta": 0.2}, {"name": "swa", "decay": 0.9}]


@pytest.mark.parametrize("bn_mode", ["eval", "train", "frozen"])
@pytest.mark.parametrize("flatness", [[], STACK], ids=["none", "stack"])
def test_no_pass_has_more_rows_and_there_are_as_many_as_told(
    make_job: Callable[..., Job], tmp_path: Path, bn_mode: str, flatness: list[Any]
) -> None:
    """Attacks go once, losses once without and once with gradients; of TRADES, 1 + 2 attack passes and 2 of a loss."""
    keys = {"objective": {"name": "trades"}, "flatness": flatness, "train__clean_tick": True}
    keys["attack"] = {"steps": 2, "bn_mode": bn_mode}
    whole, parts = make_job(tmp_path / "a", **keys), make_job(tmp_path / "b", **keys, train__micro_batch=6)
    losses = 2 * (2 if flatness else 1)
    asked = rows_seen(whole)
    assert {rows for _, rows in asked} == {16}
    assert len(asked) == 2 * (3 + losses + 1)
    seen = rows_seen(parts)
    assert sorted({rows for _, rows in seen}) == [5, 6]
    assert len(seen) == 2 * 3 * (3 + 2 * losses + 1)


def test_a_helper_is_asked_in_parts(hat: Callable[..., Job]) -> None:
    job = hat(train__micro_batch=6)
    seen: list[int] = []
    assert job.helper is not None
    job.helper.network.register_forward_pre_hook(lambda m, x: seen.append(len(x[0])))
    assert max(rows for _, rows in rows_seen(job)) == 6
    assert max(seen) == 6


def test_statistics_are_estimated_anew_in_parts(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """Averaged weights get statistics of their own: of parts, too."""
    flatness = [{"name": "swa", "decay": 0.9, "bn": "recompute", "batches": 2}]
    job = make_job(tmp_path / "run", flatness=flatness, train__micro_batch=6)
    rows_seen(job)
    seen: list[int] = []
    layer = next(m for m in job.model.modules() if isinstance(m, nn.BatchNorm2d))
    layer.register_forward_hook(lambda m, x, y: seen.append(len(x[0])))
    with averaged(job, job.flatness["swa"], step=2):
        assert int(layer.num_batches_tracked or 0) == 2
    assert max(seen) == 6


# BatchNorm


def test_batchnorm_gathers_the_mean_over_the_parts(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """As on devices of their own: each part from the same beginning, one batch counted, whatever comes back later."""
    keys = {"objective": {"name": "standard"}, "attack": {}, "optimizer__lr": 0}
    job, other = make_job(tmp_path / "a", **keys, train__micro_batch=6), make_job(tmp_path / "b", **keys)
    batch = next(iter(job.loader.epoch(0)))
    job.model.train()
    train_step(job, batch, step=0, guard=True)
    begun = {k: b.clone() for k, b in other.model.named_buffers()}
    sums = {k: torch.zeros_like(b) for k, b in begun.items() if b.is_floating_point()}
    for x in batch.x.split([6, 5, 5]):
        other.model.load_state_dict({**other.model.state_dict(), **begun})
        other.model.train()(x)
        for name in sums:
            sums[name] += len(x) / 16 * other.model.get_buffer(name)
    for name, buffer in job.model.named_buffers():
        if name in sums:
            torch.testing.assert_close(buffer, sums[name], rtol=1e-6, atol=1e-7)
        else:
            assert int(buffer) == 1


@pytest.mark.parametrize("bn_mode", ["eval", "train", "frozen"])
def test_ticks_are_those_of_one_batch(make_job: Callable[..., Job], tmp_path: Path, bn_mode: str) -> None:
    """In the attack, in the loss and in a clean pass of its own."""
    keys = {"attack": {"steps": 4, "bn_mode": bn_mode}, "train__clean_tick": True}
    for most in (None, 6):
        job = make_job(tmp_path / "run", **keys, train__micro_batch=most)
        job.model.train()
        train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True)
        counts = {int(b) for k, b in job.model.named_buffers() if k.endswith("num_batches_tracked")}
        assert counts == {6 if bn_mode == "train" else 2}


@pytest.mark.parametrize("bn_mode", ["eval", "frozen"])
def test_attacks_leave_the_statistics_as_they_are(make_job: Callable[..., Job], tmp_path: Path, bn_mode: str) -> None:
    """To the last bit: a mean of what did not change is what it was."""
    job = make_job(tmp_path / "run", attack={"steps": 2, "bn_mode": bn_mode}, train__micro_batch=6)
    rows_seen(job)
    before = {k: b.clone() for k, b in job.model.named_buffers()}
    batch = next(iter(job.loader.epoch(0)))
    craft(Stage(job, batch.x, batch.y, batch.ids, job.moment(2)), {})
    assert all(torch.equal(b, before[k]) for k, b in job.model.named_buffers())


def test_parts_find_what_the_first_one_found() -> None:
    model = nn.BatchNorm1d(3)
    seen = []
    for i, (x,) in enumerate(in_turn(model, torch.randn(7, 3).split([3, 4]))):
        assert model.running_mean is not None
        seen.append(model.running_mean.clone())
        model(x + i)
    assert torch.equal(seen[0], seen[1])
    (whole,) = in_turn(model, (torch.ones(4, 3),))
    assert whole[0].shape == (4, 3)


# Runs


def test_a_run_stops_and_goes_on(
    make_job: Callable[..., Job], tmp_path: Path, stopper: Callable[[int], Any], snapshot: Callable[..., Any]
) -> None:
    """Bit by bit, with BatchNorm, AWP and averaged weights whose statistics are estimated anew."""
    swa = {"name": "swa", "decay": 0.5, "bn": "recompute", "batches": 2}

    def job(name: str) -> Job:
        keys = {"train__micro_batch": 6, "train__save_seconds": 1e-9, "train__epochs": 2}
        return make_job(tmp_path / name, flatness=[{"name": "awp", "gamma": 0.01}, swa], **keys)

    train(job("whole"))
    for step in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            train(job("stopped"), resume=step > 2, progress=stopper(step))
    train(job("stopped"), resume=True)
    assert snapshot(tmp_path / "stopped") == snapshot(tmp_path / "whole")


class Operations(TorchDispatchMode):
    """Names of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keys", [{}, {"objective": {"name": "trades"}, "flatness": STACK}], ids=["at", "stack"])
def test_batches_that_fit_go_as_ever(make_job: Callable[..., Job], tmp_path: Path, keys: dict[str, Any]) -> None:
    """The very same operations, and bits, as without a word about parts."""
    found = []
    for most in (None, 16):
        job = make_job(tmp_path / "run", **keys, train__micro_batch=most)
        job.model.train()
        with Operations() as done:
            for step, batch in enumerate(job.loader.epoch(0)):
                train_step(job, batch, step=step, guard=step == 0)
        found.append((done.names, job.model.state_dict()))
    (names, state), (again, other) = found
    assert names == again
    assert len(names) > 500
    assert all(torch.equal(state[k], other[k]) for k in state)
