"""Certificates of whole data sets: against a network whose radii are known, against attacks, and to JSON and back."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, ModelError, StateError, ThreatError
from flatrock.core.rng import Seed
from flatrock.core.threat import L2
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.certify import GPU_BATCH, certify
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.smoothed_attack import attack_smoothed
from flatrock.diagnostics.smoothing import ABSTAIN, Smoothing, noise
from flatrock.evaluation.evaluate import evaluate
from flatrock.models.catalog import create_model

QUICK = Smoothing(sigma=0.25, n0=50, n=500, alpha=0.01)


def votes(counts: list[list[int]], **changes: Any) -> Certificate:
    """A certificate with these votes."""
    table = torch.tensor(counts)
    options: dict[str, Any] = {
        "smoothing": replace(QUICK, n=100),
        "labels": torch.zeros(len(counts), dtype=torch.int64),
        "top": table.argmax(1),
        "counts": table,
        "ids": torch.arange(10, 10 + len(counts)),
        "shape": (1, 4, 4),
        "seconds": torch.full((len(counts),), 0.5, dtype=torch.float64),
    }
    return Certificate(**{**options, **changes})


FIVE = [[100, 0, 0], [98, 2, 0], [55, 45, 0], [1, 99, 0], [70, 0, 0]]


def halfspace() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A linear network in 8 dimensions, inputs mid-box, labels a tenth of which is wrong, distances to its plane."""
    gen = Seed(1).child("halfspace").generator()
    model = nn.Linear(8, 2).double()
    w = torch.randn(8, generator=gen, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.stack([-w / 2, w / 2]))
        model.bias.copy_(torch.stack([w.sum() / 4, -w.sum() / 4]))
        x = 0.5 + 0.6 * (torch.rand(60, 8, generator=gen, dtype=torch.float64) - 0.5)
        y = model(x).argmax(1)
    distances = ((x - 0.5) @ w).abs() / w.square().sum().sqrt()
    y[:6] = 1 - y[:6]
    return model, x, y, distances


# What follows from votes


def test_accuracies_follow_from_votes() -> None:
    found = votes(FIVE)
    assert found.right.tolist() == [True, True, False, False, True]
    assert found.predictions.tolist() == [0, 0, ABSTAIN, 1, 0]
    assert (found.accuracy, found.abstained, found.no_answer) == (0.6, 0.2, 30)
    assert found.certified(0) == 0.6
    assert found.certified(float(found.radii[4])) == 0.4, "the ball is open: at its own radius nothing is proved"
    assert found.certified(found.smoothing.largest_radius) == 0
    assert found.radii[0] == found.smoothing.largest_radius


def test_only_votes_for_the_class_that_was_chosen_count() -> None:
    """Another class may win the fresh votes: it was not chosen before they were counted, so they prove nothing."""
    found = votes([[1, 99, 0]], top=torch.tensor([0]))
    assert found.radii.tolist() == [0]
    assert (found.abstained, found.certified(0)) == (1, 0)
    assert found.predictions.tolist() == [1]


def test_the_votes_that_count_are_not_those_that_chose() -> None:
    """n0 draws choose, n others bound: a bound on votes that also chose would be wrong more often than alpha."""
    model, x, y, _ = halfspace()
    seen: list[Tensor] = []
    handle = model.register_forward_hook(lambda m, inputs, logits: seen.append(inputs[0]))
    found = certify(model, x[:1], y[:1], replace(QUICK, n0=20, n=30), batch_size=64)
    handle.remove()
    chose, counted = seen[-2:]
    assert (len(chose), len(counted)) == (20, 30)
    assert len(torch.cat([chose, counted]).unique(dim=0)) == 50
    with torch.no_grad():
        assert int(found.top[0]) == int(model(chose).argmax(1).bincount(minlength=2).argmax())
        assert found.counts[0].tolist() == model(counted).argmax(1).bincount(minlength=2).tolist()


def test_the_curve_falls_and_ends_where_votes_end() -> None:
    found = votes(FIVE)
    shares = [found.certified(r) for r in torch.linspace(0, 1, 200).tolist()]
    assert shares == sorted(shares, reverse=True)
    assert found.grid()[0] == 0
    assert max(found.grid()) < found.smoothing.largest_radius <= max(found.grid()) + 0.125


def test_linf_is_read_through_l2() -> None:
    found = votes(FIVE)
    assert found.dimension == 16
    assert found.l2_of(0.1) == pytest.approx(0.4)
    assert found.linf_of(0.4) == pytest.approx(0.1)


# Known radii


def test_no_certificate_is_larger_than_the_distance_to_the_boundary() -> None:
    """Of a linear network the smoothed classifier is the network itself, and its radius the distance."""
    model, x, y, distances = halfspace()
    found = certify(model, x, y, replace(QUICK, n=4000, alpha=1e-6))
    assert bool((found.radii < distances).all())
    clear = distances > 0.1
    assert torch.equal((found.top == y)[clear], (torch.arange(60) >= 6)[clear])
    near = distances < 0.6 * found.smoothing.largest_radius
    assert float((found.radii / distances)[near & (distances > 0.1)].min()) > 0.6
    assert found.certified(0) > 0.7


def test_an_attack_breaks_the_smoothed_network_beyond_its_radius_and_never_within() -> None:
    model, x, y, distances = halfspace()
    x, y, distances = x[6:], y[6:], distances[6:]
    stands = attack_smoothed(model, x, y, replace(QUICK, n=2000, alpha=1e-4), 0.2)
    assert bool(stands[distances > 0.2].all())
    assert not bool(stands[distances < 0.17].any())


@pytest.fixture(scope="module")
def noisy(digits: Any, digits_model: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    return digits_model, digits.test_x[:30], digits.test_y[:30]


def test_certified_accuracy_is_never_above_that_under_attack(noisy: tuple[nn.Module, Tensor, Tensor]) -> None:
    """The sound comparison, sample by sample: certified and broken at once is a mistake of probability 2 alpha."""
    model, x, y = noisy
    smoothing = Smoothing(sigma=0.25, n0=50, n=200, alpha=1e-3)
    found = certify(model, x, y, smoothing)
    shares = []
    for radius in (0.0, 0.25, 1.2):
        stands = attack_smoothed(model, x, y, smoothing, radius, steps=6, draws=6)
        assert bool(stands[found.right & (found.radii > radius)].all())
        assert found.certified(radius) <= float(stands.double().mean())
        shares.append(float(stands.double().mean()))
    assert found.certified(0.25) > 0.3, "something is certified"
    assert shares[2] < 0.7 * shares[0], "something is broken"


def test_certified_accuracy_is_below_pgd_on_the_network_itself_here(noisy: tuple[nn.Module, Tensor, Tensor]) -> None:
    """Not a theorem, the smoothed classifier is another one than the network; on this network it holds."""
    model, x, y = noisy
    found = certify(model, x, y, Smoothing(sigma=0.1, n0=50, n=300, alpha=0.01))
    base = evaluate(model, x, y, L2(0.15), attacks=["pgd-10"]).robust
    assert found.certified(0.15) <= base


class Needle(nn.Module):
    """Class 1 everywhere but in tiny cells around a grid, where it is 0."""

    def forward(self, x: Tensor) -> Tensor:
        inside = ((x - x.round(decimals=1)).abs() < 1e-3).all(1).to(x)
        return torch.stack([inside, 0.5 * torch.ones_like(inside)], 1)


def test_the_network_itself_bounds_nothing() -> None:
    """A network that is wrong on the very input and right beside it: smoothed it is right, and provably so."""
    x, y = torch.full((3, 4), 0.5), torch.ones(3, dtype=torch.int64)
    assert int(Needle()(x).argmax(1).sum()) == 0
    found = certify(Needle(), x, y, QUICK)
    assert found.certified(0.4) == 1


# Who is asked, and how


def test_results_do_not_depend_on_batch_size_order_or_what_was_known(
    noisy: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, x, y = noisy
    x, y, ids = x[:5], y[:5], torch.tensor([7, 1, 30, 4, 12])
    whole = certify(model, x, y, QUICK, ids=ids)
    for size in (3, 64, 500):
        again = certify(model, x, y, QUICK, ids=ids, batch_size=size)
        assert torch.equal(again.counts, whole.counts)
    back = torch.tensor([4, 2, 0, 3, 1])
    turned = certify(model, x[back], y[back], QUICK, ids=ids[back])
    assert torch.equal(turned.counts, whole.counts[back])
    certify(model, x[:2], y[:2], QUICK, ids=ids[:2], ledger=Ledger(tmp_path / "part", {}, resume=False))
    ledger = Ledger(tmp_path / "part", {}, resume=True)
    assert len(ledger) == 2
    resumed = certify(model, x, y, QUICK, ids=ids, ledger=ledger)
    assert torch.equal(resumed.counts, whole.counts)
    assert torch.equal(resumed.top, whole.top)
    assert not torch.equal(certify(model, x, y, QUICK, ids=ids, seed=1).counts, whole.counts)


def test_the_network_is_asked_in_eval_mode_and_given_back() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    x, y = torch.rand(2, 1, 4, 4, generator=Seed(0).generator()), torch.tensor([0, 1])
    first, second = (certify(model, x, y, QUICK) for _ in range(2))
    assert torch.equal(first.counts, second.counts), "no dropout"
    assert all(m.training for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_certified_is_refused() -> None:
    x, y = torch.rand(3, 4), torch.tensor([0, 1, 1])
    with pytest.raises(ThreatError, match=r"inputs must lie in \[0, 1\], .*put normalisation inside the model"):
        certify(nn.Linear(4, 2), 3 * x - 1, y, QUICK)
    with pytest.raises(ThreatError, match="nothing to certify"):
        certify(nn.Linear(4, 2), x[:0], y[:0], QUICK)
    with pytest.raises(ModelError, match="float64 weights"):
        certify(nn.Linear(4, 2).double(), x, y, QUICK)
    with pytest.raises(ModelError, match=r"labels span 0\.\.2 but the model has 2 classes"):
        certify(nn.Linear(4, 2), x, 2 * y, QUICK)
    for ids in (torch.arange(2), torch.tensor([1, 1, 2]), torch.rand(3)):
        with pytest.raises(ThreatError, match=r"ids must be 3 integers, one per sample|ids must differ"):
            certify(nn.Linear(4, 2), x, y, QUICK, ids=ids)
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        certify(nn.Linear(4, 2), x, y, QUICK, batch_size=0)
    with pytest.raises(
        ModelError, match=r"the model fails on inputs of shape \(2, 4\), torch.float32 on cpu: RuntimeError"
    ):
        certify(nn.Linear(5, 2), x, y, QUICK)
    with pytest.raises(ModelError, match="lazy layers"):
        certify(nn.LazyLinear(2), x, y, QUICK)


class Centred(nn.Linear):
    """Sees its inputs relative to the mean of their batch, and through noise of its own if it has any."""

    noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) + self.noise * torch.randn_like(x))


@pytest.mark.parametrize("n", [1, 5])
def test_a_network_whose_answers_depend_on_the_batch_is_refused(n: int) -> None:
    x, y = torch.rand(n, 4), torch.zeros(n, dtype=torch.int64)
    untracked = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten())
    for model in (Centred(4, 2), untracked):
        with pytest.raises(ModelError, match=r"depends on the other inputs of its batch .* track_running_stats=True"):
            certify(model, x, y, QUICK)


def test_a_network_that_answers_at_random_may_be_smoothed() -> None:
    x, y = torch.rand(2, 4), torch.zeros(2, dtype=torch.int64)
    model = Centred(4, 2)
    model.noise = 1.0
    assert certify(model, x, y, QUICK).counts.sum() == 2 * QUICK.n


def test_no_smoothed_attack_on_what_cannot_be_attacked() -> None:
    x, y = torch.rand(3, 4), torch.tensor([0, 1, 1])
    with pytest.raises(ThreatError, match="nothing to attack: x has no samples"):
        attack_smoothed(nn.Linear(4, 2), x[:0], y[:0], QUICK, 0.1)
    with pytest.raises(ModelError, match="the model fails on inputs of shape"):
        attack_smoothed(nn.Linear(5, 2), x, y, QUICK, 0.1)


@pytest.mark.gpu
def test_a_gpu_counts_the_same_votes(noisy: tuple[nn.Module, Tensor, Tensor]) -> None:
    """The noise is the same numbers; few votes lie so near a boundary that rounding in the network decides them."""
    model, x, y = noisy
    x, y = x[:5], y[:5]
    assert torch.equal(noise(x[0].cuda(), 3, 100, Seed(1)).cpu(), noise(x[0], 3, 100, Seed(1)))
    here, there = certify(model, x, y, QUICK), certify(deepcopy(model).cuda(), x.cuda(), y.cuda(), QUICK)
    assert int((here.counts - there.counts).abs().sum()) <= 20
    assert torch.equal(here.top, there.top)
    assert there.provenance["batch_size"] == GPU_BATCH


@pytest.mark.gpu
def test_a_gpu_with_little_memory_counts_in_smaller_batches() -> None:
    x, y = torch.rand(2, 3, 32, 32, generator=Seed(0).generator()), torch.zeros(2, dtype=torch.int64)
    model, many = create_model("resnet20", seed=0).cuda(), replace(QUICK, n=40_000)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(3e9 / torch.cuda.mem_get_info()[1])
    try:
        short = certify(model, x, y, many, batch_size=40_000)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 100 <= short.provenance["batch_size"] < 40_000
    assert int(short.counts.sum()) == 80_000


# To JSON and back


def test_json_round_trip() -> None:
    took = torch.tensor([0.1, 1 / 3, 2.0, 0.0, 7e-6], dtype=torch.float64)
    found = votes(FIVE, marks=("test-selected",), provenance={"seed": 3}, seconds=took)
    again = Certificate.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert torch.equal(again.counts, found.counts)
    told = json.loads(found.to_json())
    assert told["schema"] == "flatrock.certificate/1"
    assert told["certified"][0] == [0.0, 0.6]
    assert [told[k] for k in ("sigma", "n0", "n", "alpha", "samples")] == [0.25, 50, 100, 0.01, 5]


NAN, FOLLOWS, FOREIGN = float("nan"), "do not follow from its votes", "mine.json is not a flatrock certificate"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"radii": [9.0] * 5}, f"its radii {FOLLOWS}"),
        ({"radii": [NAN] * 5}, f"its radii {FOLLOWS}"),
        ({"radii": ["a"] * 5}, f"its radii {FOLLOWS}"),
        ({"radii": []}, f"its radii {FOLLOWS}"),
        ({"radii": None}, f"its radii {FOLLOWS}"),
        ({"accuracy": 1.0}, f"its accuracy {FOLLOWS}"),
        ({"accuracy": None}, f"its accuracy {FOLLOWS}"),
        ({"accuracy": 10**400}, FOREIGN),
        ({"abstained": NAN, "largest": "x"}, f"its abstained, largest {FOLLOWS}"),
        ({"samples": 6}, f"its samples {FOLLOWS}"),
        ({"certified": [[0.0, 1.0]]}, f"its certified {FOLLOWS}"),
        ({"certified": "most"}, f"its certified {FOLLOWS}"),
        ({"predictions": [0, 0, 0, 1, 0]}, f"its predictions {FOLLOWS}"),
        ({"predictions": []}, f"its predictions {FOLLOWS}"),
        ({"counts": [[0, 100, 0]] * 5}, FOLLOWS),
        ({"counts": [[200, 0, 0]] * 5}, "counts must be votes, 0 or more and at most n = 100 per sample"),
        ({"counts": [[60, 60, 0]] * 5}, "counts must be votes"),
        ({"counts": [[101, -1, 0]] * 5}, "counts must be votes"),
        ({"counts": [[2**62, 2**62, 0]] * 5}, "counts must be votes"),
        ({"counts": [[99.5, 0.5, 0.0]] * 5}, "counts must be whole numbers"),
        ({"counts": [[100]] * 5}, "2 classes or more"),
        ({"counts": []}, "2 classes or more"),
        ({"counts": [[1, 2], [3]]}, FOREIGN),
        ({"schema": "flatrock.result/2"}, "schema 'flatrock.result/2', expected 'flatrock.certificate/1'"),
        ({"sigma": 0}, FOREIGN),
        ({"sigma": 10**400}, FOREIGN),
        ({"top": [7] * 5}, "top must be classes 0 to 2"),
        ({"labels": [-1] * 5}, "labels must be classes 0 to 2"),
        ({"labels": [True] * 5}, "labels must be whole numbers"),
        ({"shape": []}, "shape must be that of an input"),
        ({"shape": [1, 0, 4]}, "shape must be that of an input"),
        ({"shape": [16.0]}, "shape must be that of an input"),
        ({"shape": None}, FOREIGN),
        ({"ids": [10, 11]}, r"ids must be one per row of counts, \(5,\), got \(2,\)"),
        ({"ids": [10, 11, 12, 13, 13]}, "ids must differ"),
        ({"seconds": []}, r"seconds must be one per row of counts, \(5,\), got \(0,\)"),
        ({"seconds": [NAN] * 5}, "seconds must be finite"),
        ({"marks": [3]}, "marks must be words"),
        ({"provenance": [1]}, "provenance must be a mapping"),
    ],
)
def test_a_file_that_was_changed_is_refused(change: dict[str, Any], told: str) -> None:
    text = json.dumps({**json.loads(votes(FIVE).to_json()), **change})
    with pytest.raises(StateError, match=told):
        Certificate.from_json(text, "mine.json")


@pytest.mark.parametrize("name", json.loads(votes(FIVE).to_json()))
def test_a_file_that_lacks_something_is_refused(name: str) -> None:
    told = json.loads(votes(FIVE).to_json())
    told.pop(name)
    with pytest.raises(StateError, match=f"{FOREIGN} .*{name}"):
        Certificate.from_json(json.dumps(told), "mine.json")


@pytest.mark.parametrize("content", [votes(FIVE).to_json()[:-9], "", "[]", "7", b"\xff\x00\x80\x81", b"[" * 10**5])
def test_a_file_that_is_something_else_is_refused(content: str | bytes) -> None:
    with pytest.raises(StateError, match=FOREIGN):
        Certificate.from_json(content, "mine.json")


def test_votes_that_no_certification_counts_are_refused_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        votes(FIVE, ids=torch.arange(2), seconds=torch.zeros(0), shape=())
    assert len(error.value.faults) == 3
    with pytest.raises(ConfigError, match="counts must be votes, 0 or more and at most n = 50 per sample"):
        votes(FIVE, smoothing=replace(QUICK, n=50))


def test_the_table_of_cohens_scripts() -> None:
    head, *rows = [line.split("\t") for line in votes(FIVE).to_tsv().splitlines()]
    assert head == ["idx", "label", "predict", "radius", "correct", "time"]
    assert [row[0] for row in rows] == ["10", "11", "12", "13", "14"]
    assert [row[2] for row in rows] == ["0", "0", "-1", "1", "0"]
    assert [row[4] for row in rows] == ["1", "1", "0", "0", "1"]
    assert float(rows[0][3]) == pytest.approx(float(votes(FIVE).radii[0]), abs=5e-6)
    assert rows[2][3] == "0.00000"
    assert rows[0][5] == "0:00:00.500000"
