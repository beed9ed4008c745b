"""Averaged weights beside the raw ones: what they are, when they are chosen, and that a stop does not change them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from merging import Merging
from torch import Tensor, nn

from flatrock.core.errors import StateError
from flatrock.core.progress import Silent
from flatrock.core.tensorfile import load
from flatrock.engine.average import averaged
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job, ProbeOutcome
from flatrock.engine.loop import train
from flatrock.engine.step import train_step
from flatrock.recipes.restore import load as load_model
from flatrock.workflows.evaluate import evaluate_run, store_result

MakeJob = Callable[..., Job]
SWA = [{"name": "swa", "decay": 0.8}]


def tensors(file: Path) -> dict[str, Tensor]:
    return load(file)[0]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def run_steps(job: Job, count: int) -> list[dict[str, Tensor]]:
    """Weights after each step."""
    job.model.train()
    found = []
    for step, batch in zip(range(count), job.loader.epoch(0), strict=False):
        train_step(job, batch, step=step, guard=True)
        found.append({n: p.detach().clone() for n, p in job.model.named_parameters()})
    return found


@pytest.mark.parametrize("decay", [0.8, None])
def test_the_average_is_the_explicit_one(make_job: MakeJob, tmp_path: Path, decay: float | None) -> None:
    job = make_job(tmp_path / "run", flatness=[{"name": "swa", "decay": decay}])
    seen = run_steps(job, 3)
    got = job.flatness["swa"].average()
    shares = [0.8**2, 0.2 * 0.8, 0.2] if decay else [1 / 3] * 3
    for name, value in got.items():
        expected = sum(s * w[name].double() for s, w in zip(shares, seen, strict=True))
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-7)


def test_training_does_not_notice(make_job: MakeJob, tmp_path: Path, snapshot: Any) -> None:
    train(make_job(tmp_path / "plain"))
    train(make_job(tmp_path / "averaged", flatness=SWA))
    a, b = tensors(tmp_path / "plain/last.safetensors"), tensors(tmp_path / "averaged/last.safetensors")
    assert all(torch.equal(a[k], b[k]) for k in a)
    raw = [{k: v for k, v in r.items() if not k.startswith("average")} for r in snapshot(tmp_path / "plain")["records"]]
    kept = snapshot(tmp_path / "averaged")["records"]
    assert raw == [{k: v for k, v in r.items() if not k.startswith("average")} for r in kept]
    assert all(r["average_robust"] is not None for r in kept)


def test_the_model_is_given_back(make_job: MakeJob, tmp_path: Path) -> None:
    for bn in ("copy", "recompute"):
        job = make_job(tmp_path / bn, flatness=[{**SWA[0], "bn": bn, "batches": 2}])
        run_steps(job, 3)
        before, modes = snapshot(job.model), [m.training for m in job.model.modules()]
        momenta = [getattr(m, "momentum", None) for m in job.model.modules()]
        with averaged(job, job.flatness["swa"], step=2) as model:
            inside = snapshot(model)
            assert not model.training
        assert all(torch.equal(v, snapshot(job.model)[k]) for k, v in before.items())
        assert [m.training for m in job.model.modules()] == modes
        assert [getattr(m, "momentum", None) for m in job.model.modules()] == momenta
        moved = {k for k in before if not torch.equal(before[k], inside[k])}
        parameters = {n for n, _ in job.model.named_parameters()}
        assert parameters <= moved
        assert (moved == parameters) == (bn == "copy"), "copy keeps the live statistics, recompute does not"


def test_given_back_after_an_error(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", flatness=SWA)
    run_steps(job, 3)
    before = snapshot(job.model)
    with pytest.raises(RuntimeError, match="on purpose"), averaged(job, job.flatness["swa"], step=2):
        raise RuntimeError("on purpose")
    assert all(torch.equal(v, before[k]) for k, v in snapshot(job.model).items())


def test_recomputed_statistics_are_the_means_over_the_batches(make_job: MakeJob, tmp_path: Path) -> None:
    """First BatchNorm of the network: mean over batches of the mean of its inputs, in the passes of the loss."""
    flatness = [{**SWA[0], "bn": "recompute", "batches": 2}]
    job = make_job(tmp_path / "run", objective={"name": "standard"}, attack={}, flatness=flatness)
    run_steps(job, 3)
    norm = next(m for m in job.model.modules() if isinstance(m, nn.BatchNorm2d))
    seen: list[Tensor] = []
    handle = norm.register_forward_hook(lambda m, x, y: seen.append(x[0].mean((0, 2, 3))))
    with averaged(job, job.flatness["swa"], step=2):
        handle.remove()
        assert len(seen) == 2
        torch.testing.assert_close(norm.running_mean, torch.stack(seen).mean(0), rtol=1e-5, atol=1e-7)
        assert int(norm.num_batches_tracked or 0) == 2


def test_statistics_are_recomputed_on_the_inputs_of_the_loss(make_job: MakeJob, tmp_path: Path) -> None:
    """Mixup narrows the inputs: the averaged model gets the mixed ones the steps of its epoch had."""
    flatness = [{**SWA[0], "bn": "recompute", "batches": 2}]
    keys = {"objective": {"name": "standard"}, "attack": {}, "data__augment": {"mixup": 1.0}}
    job = make_job(tmp_path / "run", flatness=flatness, **keys)
    seen: list[Tensor] = []
    first = next(m for m in job.model.modules() if isinstance(m, nn.Conv2d))
    first.register_forward_pre_hook(lambda m, x: seen.append(x[0].detach().clone()))
    run_steps(job, 3)
    with averaged(job, job.flatness["swa"], step=2):
        *trained, again, last = seen
    assert torch.equal(again, trained[0])
    assert torch.equal(last, trained[1])


def test_statistics_are_recomputed_on_inputs_attacked_at_the_averaged_weights(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """The average is attacked in eval mode, while it still has the live statistics, and then passed in train mode."""
    job = make_job(tmp_path / "run", objective={"name": "at"}, flatness=[{**SWA[0], "bn": "recompute", "batches": 2}])
    run_steps(job, 3)
    mean = deepcopy(job.model).eval().requires_grad_(False)
    mean.load_state_dict({**mean.state_dict(), **job.flatness["swa"].average()})
    seen: list[Tensor] = []
    first = next(m for m in job.model.modules() if isinstance(m, nn.Conv2d))
    first.register_forward_pre_hook(lambda m, x: seen.append(x[0].detach().clone()) if m.training else None)
    with averaged(job, job.flatness["swa"], step=2):
        assert len(seen) == 2
    assert job.attack is not None
    for batch, got in zip(job.loader.epoch(0), seen, strict=False):
        gen = job.seed.child("attack", 2).samples(batch.ids)
        torch.testing.assert_close(got, job.attack(mean, batch.x, batch.y, job.threat, gen), rtol=0, atol=1e-6)
        assert not torch.allclose(got, batch.x, atol=1e-2)


def scripted(job: Job, raw: list[float], mean: list[float]) -> Job:
    """Probes answer in turn: the raw weights' robust accuracy, then the average's."""
    answers = iter([value for pair in zip(raw, mean, strict=True) for value in pair])

    def probe(model: nn.Module) -> ProbeOutcome:
        value = next(answers)
        return ProbeOutcome(clean=value, robust=value, train_robust=value, collapsed=value == 0)

    return replace(job, probe=probe)


class Noted(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def advance(self, units: int, note: str = "") -> None:
        self.notes.append(note)


def test_each_has_its_own_best_epoch(make_job: MakeJob, tmp_path: Path) -> None:
    job = scripted(make_job(tmp_path / "run", flatness=SWA), [0.3, 0.5, 0.4, 0.2], [0.0, 0.2, 0.6, 0.6])
    listener = Noted()
    run = train(job, progress=listener)
    assert run.best is not None
    assert run.best_average is not None
    assert (run.best.epoch, run.best_average.epoch) == (2, 3)
    assert "epoch 4/4  clean 40.0  robust 40.0  averaged 60.0  60.0" in listener.notes
    assert [r.average_best_epoch for r in run.records] == [None, 2, 3, 3]
    folder = RunFolder(tmp_path / "run")
    assert load(folder.average_best, role="average-best")[1]["record"]["epoch"] == 3
    assert load(folder.average_last, role="average-last")[1]["record"]["epoch"] == 4
    assert load(folder.best, role="best")[1]["record"]["epoch"] == 2


def test_epochs_without_a_probe_have_no_average(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics that are estimated anew cost attacks; what nobody looks at need not have them."""
    made: list[int] = []

    def counted(job: Job, method: Any, *, step: int) -> Any:
        made.append(step)
        return averaged(job, method, step=step)

    monkeypatch.setattr("flatrock.engine.loop.averaged", counted)
    run = train(make_job(tmp_path / "run", flatness=SWA, select__every=3))
    assert made == [8, 11], "after epochs 3 and 4, the last, of 3 steps each"
    assert [r.average_robust is None for r in run.records] == [True, True, False, False]
    assert [r.average_best_epoch is None for r in run.records] == [True, True, False, False]
    assert load(RunFolder(tmp_path / "run").average_last)[1]["record"]["epoch"] == 4


def test_auto_means_the_average_where_there_is_one(make_job: MakeJob, tmp_path: Path) -> None:
    train(make_job(tmp_path / "averaged", flatness=SWA))
    train(make_job(tmp_path / "plain"))
    for name, which in (("averaged", "average-best"), ("plain", "best")):
        model, file = load_model(tmp_path / name), tensors(tmp_path / name / f"{which}.safetensors")
        assert all(torch.equal(v, file[f"model/{k}"]) for k, v in model.state_dict().items())
    result = evaluate_run(tmp_path / "averaged", attacks=["fgsm"], limit=20)
    assert result.provenance["checkpoint"] == "average-best.safetensors"
    assert store_result(tmp_path / "averaged", result).name.startswith("result-average-best")
    raw = evaluate_run(tmp_path / "averaged", which="last", attacks=["fgsm"], limit=20)
    assert raw.provenance["checkpoint"] == "last.safetensors"
    with pytest.raises(StateError, match="keeps no averaged weights"):
        load_model(tmp_path / "plain", which="average-last")


@pytest.mark.parametrize(
    "flatness", [SWA, [{**SWA[0], "bn": "recompute", "batches": 2, "start": 0.3}, {"name": "awp"}]]
)
@pytest.mark.parametrize("stop", [1, 4, 6, 11])
def test_a_stopped_run_ends_bit_identical(
    make_job: MakeJob, tmp_path: Path, snapshot: Any, stopper: Any, stop: int, flatness: list[dict[str, Any]]
) -> None:
    train(make_job(tmp_path / "whole", flatness=flatness))
    often = {"train.save_seconds": 1e-9}  # after every step
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path / "stopped", flatness=flatness, **often), progress=stopper(stop))
    train(make_job(tmp_path / "stopped", flatness=flatness, **often), resume=True)
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "stopped")
    for name in ("average-best", "average-last"):
        a, b = (tensors(tmp_path / run / f"{name}.safetensors") for run in ("whole", "stopped"))
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_lost_average_is_written_again(make_job: MakeJob, tmp_path: Path) -> None:
    train(make_job(tmp_path / "run", flatness=SWA))
    file = RunFolder(tmp_path / "run").average_last
    before = tensors(file)
    shutil.copy(file, tmp_path / "kept")
    file.unlink()
    train(make_job(tmp_path / "run", flatness=SWA), resume=True)
    assert all(torch.equal(v, before[k]) for k, v in tensors(file).items())


def test_layers_that_draw_leave_the_same_statistics(make_job: MakeJob, tmp_path: Path) -> None:
    """Dropout draws from torch's own generator, which stands elsewhere when a run is resumed."""

    def job() -> Job:
        made = make_job(tmp_path / "run", flatness=[{**SWA[0], "bn": "recompute", "batches": 2}])
        norm = next(m for m in made.model.modules() if isinstance(m, nn.BatchNorm2d))
        norm.register_forward_pre_hook(lambda m, x: nn.functional.dropout(x[0], training=m.training))
        return made

    train(job())
    before = tensors(RunFolder(tmp_path / "run").average_last)
    torch.rand(7)
    train(job(), resume=True)  # nothing to do, but the average is stored again
    after = tensors(RunFolder(tmp_path / "run").average_last)
    assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_overwriting_removes_the_averages_of_the_run_before(make_job: MakeJob, tmp_path: Path) -> None:
    train(make_job(tmp_path / "run", flatness=SWA))
    train(make_job(tmp_path / "run"), overwrite=True)
    assert not list((tmp_path / "run").glob("average-*"))


@pytest.mark.parametrize("which", ["auto", "best", "average-best", "average-last"])
def test_a_run_that_was_not_probed_yet_says_so(make_job: MakeJob, tmp_path: Path, stopper: Any, which: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path / "run", flatness=SWA, select__every=50), progress=stopper(8))
    with pytest.raises(StateError, match=r"no epoch of .*run was probed yet \(select\.every\); .*--which last"):
        load_model(tmp_path / "run", which=which)
    assert load_model(tmp_path / "run", which="last")


def test_the_average_is_taken_over_before_layers_change_their_weights() -> None:
    model, x = Merging().train(), torch.rand(4, 3)
    average = {name: p.detach() + 1 for name, p in model.named_parameters()}
    method: Any = SimpleNamespace(average=lambda: average, bn_batches=0)
    job: Any = SimpleNamespace(model=model)
    before = snapshot(model)
    with averaged(job, method, step=0):
        expected = nn.functional.linear(x, average["weight"] + average["beside"], average["bias"])
        torch.testing.assert_close(model(x), expected)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
