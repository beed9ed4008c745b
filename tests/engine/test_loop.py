"""What a run records, keeps and leaves alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatrock.core.runs import EpochRecord
from flatrock.core.tensorfile import load
from flatrock.core.types import Parts, Views
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job, Keep, ProbeOutcome
from flatrock.engine.loop import train
from flatrock.engine.runner import Runner
from flatrock.engine.schedule import Cosine
from flatrock.recipes.restore import load as load_model

MakeJob = Callable[..., Job]
Shot = Callable[[Path], dict[str, Any]]


class Spy:
    """An objective that notes the terms of every step."""

    def __init__(self, inner: Any) -> None:
        self.passes, self.inner_loss, self.hard_labels = inner.passes, inner.inner_loss, inner.hard_labels
        self.inner = inner
        self.seen: list[tuple[int, dict[str, float]]] = []

    def loss(self, views: Views, y: Tensor) -> Parts:
        parts: Parts = self.inner.loss(views, y)
        self.seen.append((len(y), {"total": parts.total.item(), **{k: v.item() for k, v in parts.terms.items()}}))
        return parts


def test_records_say_what_happened(make_job: MakeJob, tmp_path: Path) -> None:
    """48 samples in batches of 20: the mean is over samples, so the last batch of 8 counts for less."""
    job = make_job(tmp_path / "run", objective={"name": "trades"}, train__batch_size=20, train__epochs=2)
    spy = Spy(job.objective)
    run = train(replace(job, objective=spy))
    assert (run.status, run.reason, run.folder) == ("finished", "", tmp_path / "run")
    assert [(r.epoch, r.step) for r in run.records] == [(1, 3), (2, 6)]
    schedule = Cosine(lr=0.4, epochs=2)
    assert [r.lr for r in run.records] == [schedule.at(2, 3), schedule.at(5, 3)]
    for r in run.records:
        steps = spy.seen[3 * r.epoch - 3 : 3 * r.epoch]
        assert [n for n, _ in steps] == [20, 20, 8]
        assert set(r.terms) == {"total", "ce", "kl"}
        for name, value in r.terms.items():
            assert value == pytest.approx(sum(n * terms[name] for n, terms in steps) / 48, rel=1e-12)
        assert r.terms["total"] == pytest.approx(r.terms["ce"] + 6 * r.terms["kl"], rel=1e-5)
        assert 0 <= r.running_accuracy <= 1
        assert (r.running_accuracy * 48) == pytest.approx(round(r.running_accuracy * 48), abs=1e-9)
        assert r.selected_on == "held_out"
        assert r.images_per_second == pytest.approx(48 / r.seconds)
        assert r.elapsed is not None
        assert r.elapsed >= sum(earlier.seconds for earlier in run.records[: r.epoch])


def test_small_run_is_what_its_weights_do(make_job: MakeJob, plain_job: MakeJob, small_run: Path) -> None:
    """Records of best and last are what the probe measures on the weights stored under these names."""
    run = RunFolder(small_run).run()
    assert run.best.epoch != run.last.epoch, "the small recipe should tell best from last"
    probe = make_job(small_run).probe
    assert plain_job(small_run).probe(load_model(small_run, which="last")).robust == run.last.robust
    for which, record in (("best", run.best), ("last", run.last)):
        outcome = probe(load_model(small_run, which=which))
        assert (outcome.clean, outcome.robust, outcome.train_robust, outcome.collapsed) == (
            record.clean,
            record.robust,
            record.train_robust,
            False,
        )
        assert record.gap == record.train_robust - record.robust
        assert load(small_run / f"{which}.safetensors")[1]["record"] == record.to_dict()


def test_metrics_file_holds_the_records(small_run: Path) -> None:
    run = RunFolder(small_run).run()
    lines = [json.loads(line) for line in (small_run / "metrics.jsonl").read_text().splitlines()]
    for line, record in zip(lines, run.records, strict=True):
        assert record.to_dict().items() <= line.items()
    assert [line["gap"] for line in lines] == [r.train_robust - r.robust for r in run.records]  # type: ignore[operator]


def scripted(job: Job, outcomes: list[ProbeOutcome]) -> Job:
    """The job with a probe that reads its results from a list; steps are made trivial."""
    script = iter(outcomes)
    return replace(job, probe=lambda model: next(script))


def outcome(clean: float, robust: float, *, collapsed: bool = False) -> ProbeOutcome:
    return ProbeOutcome(clean, robust, train_robust=1.0, collapsed=collapsed)


SCRIPT = [
    outcome(0.9, 0.1, collapsed=True),
    outcome(0.5, 0.2),
    outcome(0.6, 0.2),
    outcome(0.6, 0.2),
    outcome(0.4, 0.3),
    outcome(0.99, 0.99, collapsed=True),
    outcome(0.7, 0.1),
]


@pytest.mark.parametrize(
    ("metric", "best"),
    [("robust", [None, 2, 3, 3, 5, 5, 5]), ("clean", [None, 2, 3, 3, 3, 3, 7])],
)
def test_best_epoch(make_job: MakeJob, tmp_path: Path, metric: str, best: list[int | None]) -> None:
    """Higher metric wins, the other one breaks ties, an equal epoch does not replace, a collapsed one never wins."""
    job = make_job(tmp_path / "run", train__epochs=7, train__batch_size=48, select__metric=metric)
    run = train(scripted(job, SCRIPT))
    assert [r.best_epoch for r in run.records] == best
    assert [r.collapsed for r in run.records] == [o.collapsed for o in SCRIPT]
    assert run.best.epoch == best[-1]
    assert load(tmp_path / "run" / "best.safetensors")[1]["record"]["epoch"] == best[-1]
    assert load(tmp_path / "run" / "last.safetensors")[1]["record"]["epoch"] == 7
    assert run.last.gap == pytest.approx(0.9)


def test_probe_every(make_job: MakeJob, tmp_path: Path) -> None:
    """Epochs between probes have no accuracies and are never best; the last one is always probed."""
    job = make_job(tmp_path / "run", train__epochs=5, train__batch_size=48, select__every=2)
    run = train(scripted(job, [outcome(0.5, 0.3), outcome(0.5, 0.2), outcome(0.5, 0.1)]))
    assert [r.robust for r in run.records] == [None, 0.3, None, 0.2, 0.1]
    assert [r.best_epoch for r in run.records] == [None, 2, 2, 2, 2]
    assert [r.gap is None for r in run.records] == [True, False, True, False, False]


def test_standard_training_selects_on_clean(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", objective={"name": "standard"})
    assert (job.attack, job.select_metric) == (None, "clean")
    assert make_job(tmp_path / "run").select_metric == "robust"


def test_keep_rules_of_the_papers() -> None:
    rat = Keep(every=5, after=100, windows=((100, 109), (150, 159)))
    kept = [e for e in range(1, 201) if rat.wants(e)]
    assert kept == sorted({*range(100, 110), *range(150, 160), *range(100, 201, 5)})
    assert [e for e in range(1, 201) if Keep(every=10).wants(e)] == list(range(10, 201, 10))
    assert not any(Keep().wants(e) for e in range(1, 201))
    assert [e for e in range(1, 9) if Keep(windows=((3, 3),)).wants(e)] == [3]


def test_kept_epochs_lie_in_the_folder(make_job: MakeJob, tmp_path: Path) -> None:
    keep = {"every": 4, "after": 3, "windows": [[2, 3]]}
    job = make_job(tmp_path / "run", train__epochs=5, train__batch_size=48, train__keep=keep)
    train(scripted(job, [outcome(0.5, 0.3)] * 5))
    files = sorted(f.name for f in (tmp_path / "run").glob("epoch-*"))
    assert files == [f"epoch-000{e}.safetensors" for e in (2, 3, 4)]
    assert [load(tmp_path / "run" / f)[1]["record"]["epoch"] for f in files] == [2, 3, 4]


def test_same_seed_same_bits(make_job: MakeJob, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any]) -> None:
    torch.rand(3)  # whatever the global generator did before must not matter
    train(make_job(tmp_path / "again"))
    assert snapshot(tmp_path / "again") == small_shot
    train(make_job(tmp_path / "other", seed=5))
    other = snapshot(tmp_path / "other")["last.safetensors"][0]
    same = [k for k, v in small_shot["last.safetensors"][0].items() if other[k] == v]
    assert same == [f"model/bn{i}.num_batches_tracked" for i in (1, 2, 3)]


class Dropping(nn.Module):
    """A network whose passes in train mode are random."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits


def dropping(job: Job) -> Job:
    model = Dropping()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        nn.init.uniform_(p, -0.2, 0.2, generator=generator)
    return replace(job, runner=Runner(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("bn_mode", ["eval", "train"])
def test_dropout_is_seeded(
    make_job: MakeJob, tmp_path: Path, snapshot: Shot, stopper: Callable[[int], Any], bn_mode: str
) -> None:
    """Twice the same, whatever the global generator holds; also when stopped inside an epoch and resumed."""

    def run(name: str, seed: int, **how: Any) -> dict[str, Any]:
        job = make_job(tmp_path / name, train__epochs=2, train__save_seconds=1e-9, attack__bn_mode=bn_mode, seed=seed)
        train(dropping(job), **how)
        return snapshot(tmp_path / name)

    one = run("one", 0)
    torch.rand(1)
    assert run("two", 0) == one
    with pytest.raises(KeyboardInterrupt):
        run("stopped", 0, progress=stopper(5))
    torch.rand(1)
    assert run("stopped", 0, resume=True) == one
    assert run("other", 1)["last.safetensors"] != one["last.safetensors"]


def test_global_random_state_is_the_users(make_job: MakeJob, tmp_path: Path) -> None:
    model = dropping(make_job(tmp_path / "run")).model
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    job = make_job(tmp_path / "run", train__epochs=1, data__augment={"mixup": 1.0, "crop": 1})
    train(replace(job, runner=Runner(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    after = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_global_random_state_comes_back_after_a_stop(
    make_job: MakeJob, tmp_path: Path, stopper: Callable[[int], Any]
) -> None:
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path / "run"), progress=stopper(2))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("max_steps", "records"), [(2, [(1, 2)]), (3, [(1, 3)]), (7, [(1, 3), (2, 6), (3, 7)])])
def test_max_steps_cuts_the_run_short(
    make_job: MakeJob, tmp_path: Path, snapshot: Shot, max_steps: int, records: list[tuple[int, int]]
) -> None:
    run = train(make_job(tmp_path / "run", train__max_steps=max_steps))
    assert run.status == "truncated"
    assert [(r.epoch, r.step) for r in run.records] == records
    assert run.last.robust is not None, "the last epoch is probed even when cut short"
    before = snapshot(tmp_path / "run")
    again = train(make_job(tmp_path / "run", train__max_steps=max_steps), resume=True)
    assert (again.status, again.records, snapshot(tmp_path / "run")) == ("truncated", run.records, before)


def test_max_steps_beyond_the_end_changes_nothing(
    make_job: MakeJob, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any]
) -> None:
    run = train(make_job(tmp_path / "run", train__max_steps=12))
    assert run.status == "finished"
    assert snapshot(tmp_path / "run")["records"] == small_shot["records"]


def test_every_group_gets_the_rate_of_its_step(make_job: MakeJob, tmp_path: Path, listener: Callable[..., Any]) -> None:
    """Weights and biases are separate groups; both follow the schedule, step by step."""
    job = make_job(tmp_path / "run", optimizer__decay_on="weights", train__epochs=2)
    seen: list[list[float]] = []
    train(job, progress=listener(lambda step: seen.append([g["lr"] for g in job.optimizer.param_groups])))
    assert seen == [[job.schedule.at(step, 3)] * 2 for step in range(6)]
    assert len({rates[0] for rates in seen}) == 6


def test_progress_is_told_everything(make_job: MakeJob, tmp_path: Path, listener: Callable[..., Any]) -> None:
    calls: list[Any] = []

    class Ears(listener().__class__):  # type: ignore[misc]
        def begin(self, task: str, total: int, done: int = 0) -> None:
            calls.append(("begin", task, total, done))

        def advance(self, units: int, note: str = "") -> None:
            calls.append(("advance", units, note))

        def end(self) -> None:
            calls.append("end")

    train(make_job(tmp_path / "run", train__epochs=2), progress=Ears())
    assert calls[0] == ("begin", "training small", 6, 0)
    assert calls[-1] == "end"
    assert [c[:2] for c in calls[1:-1]] == [("advance", 1)] * 6
    assert calls[1][2] == "epoch 1/2"
    assert calls[4][2].startswith("epoch 2/2  clean ")


def test_run_folder_holds_recipe_and_birth_certificate(make_job: MakeJob, small_run: Path) -> None:
    import yaml

    job = make_job(small_run)
    assert yaml.safe_load((small_run / "recipe.yaml").read_text()) == job.recipe
    info = json.loads((small_run / "run.json").read_text())
    assert (info["status"], info["epochs_done"], info["recipe_hash"]) == ("finished", 4, job.recipe_hash)
    assert info["provenance"]["seed"] == 4
    assert {"commit", "torch", "device", "time", "held_out"} <= info["provenance"].keys()


def test_record_gap() -> None:
    base: dict[str, Any] = {"epoch": 1, "step": 1, "lr": 0.1, "terms": {}, "running_accuracy": 0.5, "clean": 0.5}
    rest: dict[str, Any] = {"selected_on": "held_out", "best_epoch": 1, "seconds": 1.0, "images_per_second": 1.0}
    assert EpochRecord(**base, robust=0.25, train_robust=0.75, **rest).gap == 0.5
    assert EpochRecord(**base, robust=None, train_robust=None, **rest).gap is None
