"""Training on a GPU: the same steps as on the CPU, and nobody waits for the device inside an epoch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.core.rng import Seed
from flatrock.core.tensorfile import load
from flatrock.data.loader import Batch
from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage
from flatrock.engine.runner import Engine, Runner
from flatrock.engine.step import train_step
from flatrock.engine.watch import GPU_ASKED_EVERY, Watch
from flatrock.models.catalog import create_model
from flatrock.models.twin import Twin
from flatrock.optimizers.catalog import OPTIMIZERS
from flatrock.recipes.build import build_job
from flatrock.recipes.schema import Recipe

pytestmark = pytest.mark.gpu
MakeRecipe = Callable[..., Recipe]
REFERENCE = {"engine__precision": "float32", "engine__compile": False}
TWIN = {"engine__precision": "bfloat16", "engine__compile": False}
FAST = {"engine__precision": "bfloat16", "engine__compile": True}
OBJECTIVES = {"at": {}, "trades": {"beta": 3}, "mart": {"beta": 2}, "hat": {"gamma": 0.5}, "gat": {"weight": 5}}
ATTACKS = {"gat": {"attack": {"name": "guided"}}}
METHODS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "awp": [{"name": "awp", "gamma": 0.01}],
    "rat": [{"name": "rat", "eta": 0.2, "sigma": 0.0}],  # noise of a CPU and of a GPU differ
    "trh": [{"name": "trh", "weight": 1e-2, "gamma": 1e-4}],
    "s2o": [{"name": "s2o", "weight": 0.3}],
    "swa": [{"name": "swa", "decay": 0.9}],
}


def batches(job: Job) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from job.loader.epoch(epoch)
        epoch += 1


def losses(job: Job, count: int = 3) -> list[float]:
    job.model.train()
    steps = zip(range(count), batches(job), strict=False)
    return [float(train_step(job, batch, step=step, guard=True).losses["total"]) for step, batch in steps]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("method", METHODS)
def test_three_steps_are_those_of_the_cpu(
    make_recipe: MakeRecipe, helper_run: Path, tmp_path: Path, objective: str, method: str
) -> None:
    options = {**OBJECTIVES[objective], **({"helper": str(helper_run)} if objective == "hat" else {})}
    keys = {"objective": {"name": objective, **options}, "flatness": METHODS[method], **REFERENCE}
    keys |= ATTACKS.get(objective, {})
    cpu = losses(build_job(make_recipe(**keys), folder=tmp_path / "cpu"))
    gpu = losses(build_job(make_recipe(**keys), folder=tmp_path / "gpu", device="cuda"))
    assert gpu == pytest.approx(cpu, rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_fast_steps_are_near_the_reference(make_recipe: MakeRecipe, tmp_path: Path, method: str) -> None:
    """Passes are compiled and the attack is recorded by the third step; roundings let trainings drift apart later."""
    keys = {"objective": {"name": "trades", "beta": 3}, "flatness": METHODS[method]}
    reference = losses(build_job(make_recipe(**keys, **REFERENCE), folder=tmp_path / "a", device="cuda"), 6)
    job = build_job(make_recipe(**keys, **FAST), folder=tmp_path / "b", device="cuda")
    assert losses(job, 6) == pytest.approx(reference, rel=0.05)
    assert job.runner._joints[2] is not None, "both passes of the loss are one"
    assert job.runner.findings == {}


@pytest.mark.parametrize("engine", [REFERENCE, TWIN, FAST], ids=["reference", "twin", "compiled"])
@pytest.mark.parametrize(
    ("objective", "method"),
    [*(("trades", m) for m in METHODS), *((o, m) for o in ("hat", "gat") for m in ("none", "awp"))],
)
def test_nobody_waits_inside_an_epoch(
    make_recipe: MakeRecipe, helper_run: Path, tmp_path: Path, engine: dict[str, Any], objective: str, method: str
) -> None:
    # A weight that rises is recorded anew when it does.
    gat = {"rise": 1}
    options: dict[str, Any] = {"trades": {"beta": 3}, "hat": {"helper": str(helper_run)}, "gat": gat}[objective]
    keys = {"objective": {"name": objective, **options}, "flatness": METHODS[method], **engine}
    keys |= ATTACKS.get(objective, {})
    job = build_job(make_recipe(**keys), folder=tmp_path / "run", device="cuda")
    job.model.train()
    ready = [batch for batch, _ in zip(batches(job), range(12), strict=False)]
    watch = Watch()
    warm = 18  # compiling and recording; what comes every second step (GAT) is recorded later
    for step in range(warm):
        watch.see(train_step(job, ready[step % 12], step=step, guard=False), step)
    with no_waiting():
        for step in range(warm, warm + 2 * GPU_ASKED_EVERY):
            watch.see(train_step(job, ready[step % 12], step=step, guard=False), step)
    watch.check()
    assert torch.isfinite(torch.tensor(list(watch.means().values()))).all()


def test_batches_come_without_waiting(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    job = build_job(make_recipe(), folder=tmp_path / "run", device="cuda")
    epoch = iter(job.loader.epoch(0))
    next(epoch)  # the order of an epoch is drawn on the CPU
    with no_waiting():
        assert len(list(epoch)) == len(job.loader) - 1


@pytest.mark.parametrize("optimizer", [{"lr": 0.4}, {"name": "adamw", "lr": 0.01}], ids=["sgd", "adamw"])
@pytest.mark.parametrize("engine", [REFERENCE, FAST], ids=["reference", "fast"])
def test_a_stopped_run_goes_on(
    make_recipe: MakeRecipe, tmp_path: Path, stopper: Any, engine: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """Momentum, moments, average and statistics come back in a layout the kernels take."""
    recipe = make_recipe(flatness=METHODS["swa"], optimizer=optimizer, **engine)

    def job(name: str) -> Job:
        return build_job(recipe, folder=tmp_path / name, device="cuda")

    with pytest.raises(KeyboardInterrupt):
        train(job("stopped"), progress=stopper(8))
    resumed, whole = train(job("stopped"), resume=True), train(job("whole"))
    assert resumed.status == "finished"
    last, true = (load(folder / "last.safetensors")[0] for folder in (resumed.folder, whole.folder))
    for name, tensor in true.items():
        assert float((last[name] - tensor).float().norm()) <= 0.02 * float(tensor.float().norm()) + 1e-6, name


@pytest.mark.parametrize(
    "flatness",
    [[], [{"name": "rat", "eta": 0.2, "sigma": 0.01}], [{"name": "awp", "gamma": 0.01}]],
    ids=["atent", "atent and noise", "atent and awp"],
)
@pytest.mark.parametrize("steps", [3, 4])
def test_fast_steps_on_several_points(
    make_recipe: MakeRecipe, tmp_path: Path, flatness: list[dict[str, Any]], steps: int
) -> None:
    """Points in one group, or in two: their gradients are added; noise is the same in every engine."""
    keys = {
        "objective": {"name": "trades", "beta": 3},
        "attack": {"name": "langevin", "steps": steps},
        "flatness": flatness,
    }
    reference = losses(build_job(make_recipe(**keys, **REFERENCE), folder=tmp_path / "a", device="cuda"), 6)
    fast = losses(build_job(make_recipe(**keys, **FAST), folder=tmp_path / "b", device="cuda"), 6)
    assert fast == pytest.approx(reference, rel=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_fast_steps_in_parts(make_recipe: MakeRecipe, tmp_path: Path, method: str) -> None:
    """Parts are compiled, and run again on the way back; gradients of one must not change when the next comes."""
    keys = {"objective": {"name": "trades", "beta": 3}, "flatness": METHODS[method], "train__micro_batch": 8}
    reference = losses(build_job(make_recipe(**keys, **REFERENCE), folder=tmp_path / "a", device="cuda"), 6)
    job = build_job(make_recipe(**keys, **FAST), folder=tmp_path / "b", device="cuda")
    assert losses(job, 6) == pytest.approx(reference, rel=0.05)
    assert job.runner.findings == {}


@pytest.mark.parametrize("engine", [REFERENCE, FAST], ids=["reference", "fast"])
def test_nobody_waits_for_parts_clipping_or_adamw(
    make_recipe: MakeRecipe, tmp_path: Path, engine: dict[str, Any]
) -> None:
    keys = {"objective": {"name": "trades"}, "optimizer": {"name": "adamw", "lr": 1e-3}, "flatness": METHODS["awp"]}
    keys |= {"train__micro_batch": 8, "train__clip_norm": 1.0}
    job = build_job(make_recipe(**keys, **engine), folder=tmp_path / "run", device="cuda")
    job.model.train()
    ready = [batch for batch, _ in zip(batches(job), range(12), strict=False)]
    for step in range(12):  # warm-up: compiling and recording
        train_step(job, ready[step], step=step, guard=False)
    with no_waiting():
        for step in range(12, 24):
            outcome = train_step(job, ready[step - 12], step=step, guard=False)
    assert bool(torch.isfinite(outcome.losses["total"])), "steps were made, and nobody waited for them"


@pytest.mark.parametrize("bn_mode", ["train", "frozen"])
def test_fast_steps_with_attacks_on_batch_statistics(make_recipe: MakeRecipe, tmp_path: Path, bn_mode: str) -> None:
    """Such attacks query the compiled training pass, whose weights need no gradient then."""
    keys = {"objective": {"name": "trades", "beta": 3}, "attack": {"steps": 3, "bn_mode": bn_mode}}
    reference = losses(build_job(make_recipe(**keys, **REFERENCE), folder=tmp_path / "a", device="cuda"), 6)
    fast = losses(build_job(make_recipe(**keys, **FAST), folder=tmp_path / "b", device="cuda"), 6)
    assert fast == pytest.approx(reference, rel=0.05)


def test_fast_steps_of_an_optimizer_with_a_loop_of_its_own(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Gradients of one inner step must not change when the next one is computed."""
    keys = {"optimizer": {"name": "entropy_sgd", "lr": 0.1, "steps": 3}}
    reference = losses(build_job(make_recipe(**keys, **REFERENCE), folder=tmp_path / "a", device="cuda"), 6)
    fast = losses(build_job(make_recipe(**keys, **FAST), folder=tmp_path / "b", device="cuda"), 6)
    assert fast == pytest.approx(reference, rel=0.05)


@pytest.mark.parametrize("network", ["resnet20", "vgg16_bn", "mobilenet_v2", "wide_resnet28_4", "preact_resnet18"])
def test_networks_of_the_catalog_step_fast(make_recipe: MakeRecipe, tmp_path: Path, network: str) -> None:
    """In whatever layout their kernels choose: recorded attack, fused SGD, and for one network joint compiled passes.

    Every step begins at the weights of the reference, and the attack makes one: roundings must not add up. How far
    bfloat16 turns a step depends on the network: where BatchNorms see few values, as in this MobileNet, torch's own
    autocast turns it far, too. So ours is measured by it; a step that has nothing to do with the true one
    is at 90.
    """
    recipe = make_recipe(objective={"name": "trades", "beta": 3}, attack={"name": "pgd", "steps": 1, "start": "zero"})
    small = build_job(recipe, folder=tmp_path / "run", device="cuda")
    model = create_model(network, num_classes=10).cuda().train()
    fast = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    engine = Engine(precision="bfloat16", twin=True, compile=network == "preact_resnet18")
    plain, torchs = copy.deepcopy(model), Engine(precision="bfloat16", twin=False)
    runners = [Runner(m, e, size=64) for m, e in ((model, Engine()), (fast, engine), (plain, torchs))]
    reference, quick, autocast = (stepping(small, runner) for runner in runners)
    x = torch.rand(64, 3, 32, 32, generator=Seed(1).generator()).cuda()
    batch = Batch(x, torch.arange(64, device="cuda") % 10, torch.arange(64, device="cuda"))
    for step in range(4):
        true, got, usual = (moved(job, batch, step) for job in (reference, quick, autocast))
        assert float((true.signs == got.signs).double().mean()) > 0.9, "a random attack agrees in half of the signs"
        assert turned(true, got) < min(turned(true, usual) + 8, 70)
        assert float(got.change.norm() / true.change.norm()) == pytest.approx(1, abs=0.1)
        with torch.no_grad():
            for other in (fast, plain):
                for mine, theirs in zip(
                    [*other.parameters(), *other.buffers()], [*model.parameters(), *model.buffers()], strict=True
                ):
                    mine.copy_(theirs)
    assert quick.runner.findings == {}
    assert not engine.compile or quick.runner._joints[2] is not None


@dataclass(frozen=True)
class Moved:
    """The signs of a crafted batch, and what a step on it does to the weights."""

    signs: Tensor
    change: Tensor


def stepping(job: Job, runner: Runner) -> Job:
    optimizer = OPTIMIZERS.make("sgd", params=list(runner.model.parameters()), lr=0.01, momentum=0.9)
    return replace(job, runner=runner, optimizer=optimizer)


def moved(job: Job, batch: Batch, step: int) -> Moved:
    with job.runner.tuned():
        (point,) = craft(Stage(job, batch.x, batch.y, batch.ids, job.moment(step)), {})
    before = weights(job)
    train_step(job, batch, step=step, guard=True)
    return Moved((point.x_adv - batch.x).sign(), weights(job) - before)


def turned(true: Moved, got: Moved) -> float:
    """Degrees between two steps."""
    cosine = torch.cosine_similarity(true.change, got.change, dim=0)
    return math.degrees(math.acos(min(float(cosine), 1.0)))


def weights(job: Job) -> Tensor:
    return torch.cat([p.detach().flatten() for p in job.model.parameters()])


@pytest.mark.parametrize("method", ["none", "awp", "rat", "swa"])
def test_fast_steps_with_a_helper(make_recipe: MakeRecipe, helper_run: Path, tmp_path: Path, method: str) -> None:
    """Three passes are one, and the helper is asked through its own float16 copy."""
    keys = {"objective": {"name": "hat", "helper": str(helper_run)}, "flatness": METHODS[method], "optimizer__lr": 0.1}
    reference = losses(build_job(make_recipe(**keys, **REFERENCE), folder=tmp_path / "a", device="cuda"), 6)
    job = build_job(make_recipe(**keys, **FAST), folder=tmp_path / "b", device="cuda")
    assert job.helper is not None
    assert isinstance(job.helper._asked, Twin)
    assert losses(job, 6) == pytest.approx(reference, rel=0.05)
    assert job.runner._joints[3] is not None, "all passes of the loss are one"
    assert job.findings == {}
    x, plain = next(batches(job)).x, job.helper.plain()
    alike = [float((job.helper(x, x).y == plain(x, x).y).double().mean()) for _ in range(10)]  # recorded by the eighth
    assert min(alike) > 0.9
