"""Networks of one's own that cannot be trained, or fail on the way; and states of torch that training cannot bear."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatrock.core.errors import ConfigError, ModelError, TrainingError
from flatrock.core.team import Team
from flatrock.engine.failure import failed
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.recipes.load import load_recipe
from flatrock.workflows.cost import estimate
from flatrock.workflows.train import train_recipe

MakeJob = Callable[..., Job]
Shot = Callable[[Path], dict[str, Any]]
NETS = """
import torch
from torch import nn

def half() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).half()

def double() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()

class Aux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
    def forward(self, x):
        z = self.last(torch.relu(self.inner(x.flatten(1))))
        return (z, z) if self.training else z

class Asks(Aux):
    def forward(self, x):
        if self.training:
            raise KeyError("labels")
        return self.last(self.inner(x.flatten(1)))

class Drops(Aux):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm, self.calls = nn.Dropout(0.5), nn.BatchNorm1d(64), 0
    def forward(self, x):
        self.calls += 1
        return self.last(self.inner(self.drop(self.norm(x.flatten(1)))))

class Fails(Drops):
    def forward(self, x):
        if self.training and self.calls > 40:
            raise IndexError("nobody\\nexpected this")
        return super().forward(x)

class Ghost(Drops):
    def forward(self, x):
        x = x.flatten(1)
        parts = x.view(4, len(x) // 4, -1) if self.training else [x]
        return self.last(self.inner(torch.cat([self.norm(part) for part in parts])))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trial_nets.py").write_text(NETS)
    yield tmp_path
    sys.modules.pop("trial_nets", None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("half", r"Sequential has weights of torch.float16, but training is in torch.float32; leave out \.half\(\)"),
        ("double", r"has weights of torch.float64, but training is in torch.float32; .*or return network\.float\(\)"),
        ("Aux", r"Aux in train mode gives a tuple where its last nn.Linear takes torch.float32 \[\d+, 32\]; let it"),
        ("Asks", r"Asks in train mode fails on inputs of shape \[\d+, 1, 8, 8\]: KeyError: 'labels'"),
    ],
)
def test_networks_that_cannot_be_trained(own: Path, name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        train_recipe("digits_at", folder=own / "run", **{"model.name": f"trial_nets:{name}"})
    assert not (own / "run").exists()
    with pytest.raises(ModelError, match=words):  # what `flatrock check` asks
        estimate(load_recipe("digits_at", {"model.name": f"trial_nets:{name}"}), device=torch.device("cpu"))


def test_a_network_for_whole_batches_alone_can_be_trained(own: Path) -> None:
    """BatchNorm over quarters of a batch: two rows cannot be parted."""
    recipe = load_recipe("digits_at", {"model.name": "trial_nets:Ghost", "train.batch_size": 32})
    assert estimate(recipe, device=torch.device("cpu")).parameters > 0


def test_looking_changes_nothing(own: Path, plain_job: MakeJob) -> None:
    state = torch.get_rng_state()
    model = plain_job(own / "run", model={"name": "trial_nets:Drops"}).model
    assert torch.equal(torch.get_rng_state(), state)
    assert int(model.network.norm.num_batches_tracked) == 0  # type: ignore[union-attr, operator, arg-type]
    assert model.network.calls == 2, "those in eval mode that find its last layer"  # type: ignore[union-attr]
    assert model.training


def test_a_network_that_fails_on_the_way(own: Path, plain_job: MakeJob) -> None:
    job = plain_job(own / "run", model={"name": "trial_nets:Fails"})
    with pytest.raises(
        TrainingError, match=r"^IndexError: nobody \(trial_nets\.py:36\) \(where: .*failure\.txt\)\. "
    ) as caught:
        train(job)
    assert isinstance(caught.value.__cause__, IndexError)
    folder = RunFolder(own / "run")
    info = folder.read_info()
    assert (info["status"], info["reason"]) == ("failed", str(caught.value))
    told = folder.failure.read_text()
    assert 'trial_nets.py", line 36, in forward' in told
    assert told.endswith("IndexError: nobody\nexpected this\n")


def test_memory_has_a_cure_and_a_closed_pipe_is_no_failure(own: Path, plain_job: MakeJob) -> None:
    job = plain_job(own / "run", model={"name": "trial_nets:Drops"})
    folder = RunFolder(own / "run")
    full = (torch.OutOfMemoryError("full"), RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    for error, kind in (*((short, TrainingError) for short in full), (BrokenPipeError(), BrokenPipeError)):
        with pytest.raises(kind) as caught:
            train(replace(job, probe=raising(error)), overwrite=True)
        ended = kind is TrainingError
        assert folder.read_info()["status"] == ("failed" if ended else "interrupted")
        assert folder.failure.exists() == ended
        size = job.recipe["train"]["batch_size"]
        told = f"{type(error).__name__}: {error}; lower train.batch_size from {size}, or say train.micro_batch,"
        assert (told in str(caught.value)) == ended


@pytest.mark.parametrize(
    ("kind", "gpus", "size", "told"),
    [("cuda", 4, 1, True), ("cuda", 1, 1, False), ("cuda", 4, 4, False), ("cpu", 4, 1, False)],
)
def test_memory_of_other_gpus_is_named_where_it_is_idle(
    own: Path, plain_job: MakeJob, monkeypatch: pytest.MonkeyPatch, kind: str, gpus: int, size: int, told: bool
) -> None:
    job = plain_job(own / "run", model={"name": "trial_nets:Drops"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    job = replace(job, device=torch.device(kind), team=Team(0, size))
    RunFolder(own / "run").path.mkdir()
    said = str(failed(job, RunFolder(own / "run"), torch.OutOfMemoryError("full")))
    assert ("for parts that fit, or share batches among 4 GPUs with --device all" in said) == told


def raising(error: Exception) -> Callable[[nn.Module], Any]:
    def probe(model: nn.Module) -> Any:
        raise error

    return probe


class Raises(nn.Module):
    """A layer that does nothing, and raises in a given call."""

    def __init__(self, error: BaseException, call: int) -> None:
        super().__init__()
        self.error, self.left = error, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return x


@pytest.mark.parametrize(
    ("error", "status"),
    [(ZeroDivisionError("oh"), "failed"), (MemoryError(), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_resuming_after_it(
    make_job: MakeJob,
    tmp_path: Path,
    snapshot: Shot,
    small_shot: dict[str, Any],
    error: BaseException,
    status: str,
) -> None:
    job = make_job(tmp_path / "run", train__save_seconds=1e-9)
    inner = job.objective

    class Bad:
        passes, inner_loss, hard_labels = inner.passes, inner.inner_loss, inner.hard_labels
        stop = Raises(error, 5)

        def loss(self, views: Any, y: torch.Tensor) -> Any:
            self.stop(y)
            return inner.loss(views, y)

    with pytest.raises(TrainingError if status == "failed" else KeyboardInterrupt) as caught:
        train(replace(job, objective=Bad()))
    assert caught.value is error or caught.value.__cause__ is error
    assert RunFolder(tmp_path / "run").read_info()["status"] == status
    train(make_job(tmp_path / "run", train__save_seconds=1e-9), resume=True)
    assert snapshot(tmp_path / "run") == small_shot


def test_gradients_switched_off(make_job: MakeJob, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any]) -> None:
    with torch.no_grad():
        train(make_job(tmp_path / "run"))
        assert not torch.is_grad_enabled()
    assert snapshot(tmp_path / "run") == small_shot


def test_states_of_torch_that_are_refused(tmp_path: Path) -> None:
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"torch.inference_mode\(\).*outside of that"):
        train_recipe("digits_at", folder=tmp_path / "run")
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match=r"default dtype is torch.float64, .*set_default_dtype\(torch.float32\)"):
            train_recipe("digits_at", folder=tmp_path / "run")
    finally:
        torch.set_default_dtype(torch.float32)
    assert not (tmp_path / "run").exists()
