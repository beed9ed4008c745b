"""Several processes that train one network do what one process does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from team_cases import PLAIN, among_nets, in_one, in_processes
from torch import Tensor

from flatrock.core.errors import TrainingError
from flatrock.core.rng import Seed
from flatrock.core.team import ALONE, Team
from flatrock.data.augment import Augmentation
from flatrock.data.dataset import Dataset
from flatrock.data.loader import TensorLoader
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import build_model

# Parts of 17 and 16 samples. L2: where signs of gradients move inputs, rounding moves some of them the other way.
SIZES = ("train.batch_size=33",)
ATTACK = (*SIZES, "attack.steps=3", "threat={norm: l2, eps: 0.5}")
METHODS = ("at", "trades", "mart", "alp", "at_awp", "at_sam", "atent", "trades_rat", "trades_s2o", "trades_trh")
CASES = {name: [f"digits_{name}", PLAIN, *ATTACK] for name in (*METHODS, "trades_awp_rat_swa")}
CASES |= {name: [f"digits_{name}", PLAIN, *SIZES] for name in ("standard", "entropy_sgd", "gat")}
# Where gradients are almost 0, their rounding decides the direction of a step unless eps is above it.
CASES["adamw"] = ["digits_at_awp", PLAIN, *ATTACK, "optimizer={name: adamw, lr: 0.01, eps: 1e-3, weight_decay: 0.1}"]
# The norm is that of the whole batch, also in every inner step.
CASES |= {f"{name}, clipped": [*CASES[name], "train.clip_norm=0.1"] for name in ("at_awp", "entropy_sgd")}
# Each process has its part of a batch go through the network in parts.
IN_PARTS = ("at_awp", "trades_s2o", "trades_awp_rat_swa")
CASES |= {f"{name}, in parts": [*CASES[name], "train.micro_batch=6"] for name in IN_PARTS}
CASES["batchnorm"] = ["digits_standard", "train.batch_size=32", "train.max_steps=1", "optimizer.lr=0"]
# RAT's matrices come from differences of nearly equal numbers, which magnify rounding.
CLOSE = dict.fromkeys(CASES, 1e-5) | {name: 1e-3 for name in CASES if "rat" in name}

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict[str, Tensors]], dict[str, Tensors]]]:
    """What two processes, and one, hold after a few steps."""
    folder = tmp_path_factory.mktemp("team")
    with among_nets(folder):
        for name in ("two", "one"):
            (folder / name).mkdir()
        yield in_processes(2, CASES, folder / "two"), in_one(CASES, folder / "one")


def begun(case: list[str]) -> Tensors:
    model = build_model(load_recipe(case[0], case[1:]))
    return {f"model/{name}": tensor for name, tensor in model.state_dict().items()}


def distance(a: Tensors, b: Tensors) -> float:
    return float(torch.stack([(a[k].double() - b[k].double()).square().sum() for k in a]).sum().sqrt())


@pytest.mark.parametrize("name", [name for name in CASES if name != "batchnorm"])
def test_two_processes_do_what_one_does(runs: tuple[list[dict[str, Tensors]], dict[str, Tensors]], name: str) -> None:
    (leader, other), alone = runs[0], runs[1]
    assert leader[name].keys() == other[name].keys() == alone[name].keys()
    assert all(torch.equal(leader[name][k], other[name][k]) for k in leader[name])
    start = begun(CASES[name])
    moved = distance(start, alone[name])
    assert moved > 0.01
    assert distance(alone[name], leader[name]) <= CLOSE[name] * moved


def test_statistics_of_batchnorm_are_means_over_the_parts(
    runs: tuple[list[dict[str, Tensors]], dict[str, Tensors]],
) -> None:
    """Halves of a batch have the mean of the whole between them; their variances do not know how far they are apart."""
    (leader, other), alone = (both["batchnorm"] for both in runs[0]), runs[1]["batchnorm"]
    assert all(torch.equal(leader[k], other[k]) for k in leader)
    first = next(k for k in alone if k.endswith("running_mean"))
    assert torch.allclose(leader[first], alone[first], rtol=1e-4, atol=1e-6)
    spread = first.replace("running_mean", "running_var")
    assert torch.allclose(leader[spread], alone[spread], rtol=0.1)
    assert not torch.equal(leader[spread], alone[spread])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("extra", [0.0, 0.25])
def test_parts_make_up_the_batches(size: int, extra: float) -> None:
    x = torch.randint(0, 256, (50, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = Dataset("toy", x, torch.arange(50) % 5, 5)
    loader = TensorLoader(
        data,
        batch_size=12,
        seed=Seed(1),
        augmentation=Augmentation(crop=1, flip=True),
        device="cpu",
        extra=data if extra else None,
        extra_fraction=extra,
        least=2 * size,
    )
    whole = list(loader.epoch(2, 1))
    parts = [list(loader.epoch(2, 1, Team(rank, size))) for rank in range(size)]
    assert [len(batch.y) for batch in whole] == ([12] * 4 if extra else [12, 12, 14])
    for step, batch in enumerate(whole):
        shares = [part[step].share for part in parts]
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        assert [round(s * len(batch.y)) for s in shares] == [len(part[step].y) for part in parts]
        assert min(len(part[step].y) for part in parts) >= 2
        together = {int(i): x for part in parts for i, x in zip(part[step].ids, part[step].x, strict=True)}
        assert sorted(together) == sorted(batch.ids.tolist())
        assert all(torch.equal(together[int(i)], x) for i, x in zip(batch.ids, batch.x, strict=True))
    assert all(batch.share == 1 for batch in whole)


def test_alone_everything_stays_as_it_is() -> None:
    """And torch.distributed is not asked: it is not there."""
    rows = torch.arange(5)
    assert torch.equal(ALONE.part(rows), rows)
    tensor = torch.tensor([1.0, 2.0])
    ALONE.mean_([tensor], 0.5)
    assert tensor.tolist() == [1, 2]
    assert ALONE.total(tensor) is tensor
    said = object()
    assert ALONE.told(said) is said
    ALONE.check_alike({"w": tensor})
    assert ALONE.agreed(["w"], anew=True) == ["w"]
    assert ALONE.mean_found({"w": tensor, "v": None}, {}, 0.5) == {"w": tensor}


def test_numbers_that_are_no_numbers_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite is what ends such a run."""
    monkeypatch.setattr("flatrock.core.team.dist.all_reduce", lambda tensor, op: None)  # the others say the same
    Team(0, 2).check_alike({"w": torch.tensor([1.0, float("nan")]), "b": torch.tensor([float("inf")])})
    monkeypatch.setattr("flatrock.core.team.dist.all_reduce", lambda tensor, op: tensor.add_(op == dist.ReduceOp.MAX))
    with pytest.raises(TrainingError, match=r"w is not the same on all devices \(1 such tensors\)"):
        Team(0, 2).check_alike({"w": torch.tensor([1.0])})


def test_parts_are_neighbours_of_nearly_one_size() -> None:
    parts = [Team(rank, 3).part(torch.arange(8)) for rank in range(3)]
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
