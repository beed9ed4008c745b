"""How a step runs the network: the plain engine is the reference, the fast one must agree with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.borrow import nudged
from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.core.types import Point
from flatrock.engine import runner as runner_module
from flatrock.engine.craft import craft
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage, run_passes
from flatrock.engine.memory import note_memory, probed
from flatrock.engine.runner import Engine, Runner
from flatrock.engine.step import train_step
from flatrock.models import joint as joint_module
from flatrock.models.catalog import create_model
from flatrock.models.norm import normalised
from flatrock.models.twin import CARRIED, Twin
from flatrock.models.view import view
from flatrock.recipes.build import build_engine
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash

MakeJob = Callable[..., Job]


def inputs(count: int = 6) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=Seed(1).generator())


def attacked(runner: Runner, bn_mode: str = "eval", shift: Mapping[str, Tensor] | None = None) -> nn.Module:
    with runner.attacked(bn_mode, shift or {}) as model:
        return model


def running(job: Job, engine: Engine) -> Job:
    return replace(job, runner=Runner(job.model, engine, size=job.recipe["train"]["batch_size"]))


def losses(job: Job, count: int = 3) -> list[float]:
    job.model.train()
    batches = zip(range(count), job.loader.epoch(0), strict=False)
    return [float(train_step(job, batch, step=step, guard=True).losses["total"]) for step, batch in batches]


def test_the_plain_engine_is_the_network_itself() -> None:
    model = create_model("digits_cnn", num_classes=10)
    runner = Runner(model)
    for bn_mode in ("eval", "train"):
        shift = {"head.bias": torch.ones(10)}
        bias = model.head.bias.detach().clone()
        with runner.attacked(bn_mode, shift) as queried:
            assert queried is model
            assert torch.equal(model.head.bias, bias + 1)
        assert torch.equal(model.head.bias, bias)
    model.eval()
    got, true = runner.view(inputs()), view(model, inputs())
    assert torch.equal(got.logits, true.logits)
    assert torch.equal(got.features, true.features)


def test_bfloat16_keeps_weights_losses_and_head_in_float32() -> None:
    model = create_model("digits_cnn", num_classes=10).eval()
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    got, true = Runner(model, Engine(precision="bfloat16")).view(inputs()), view(model, inputs())
    assert {got.logits.dtype, got.features.dtype} == {torch.float32}
    assert seen == [torch.float32, torch.float32]
    gap = (got.logits - true.logits).detach().abs().max()
    assert 0 < float(gap) < 0.05 * float(true.logits.detach().abs().max())
    got.logits.square().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_attacks_in_eval_mode_query_the_twin_at_the_weights_of_now() -> None:
    model = create_model("digits_cnn", num_classes=10).eval()
    runner = Runner(model, Engine(precision="bfloat16", twin=True))
    twin = attacked(runner)
    assert isinstance(twin, Twin)
    with torch.no_grad():
        near = twin(inputs())
        assert float((near - model(inputs())).abs().max()) < 0.02
        shift = {name: 0.02 * torch.ones_like(p) for name, p in model.named_parameters()}
        before = {name: p.clone() for name, p in model.named_parameters()}
        moved = attacked(runner, shift=shift)(inputs())  # weights, biases and BatchNorms alike
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        with nudged(model, shift):
            assert torch.allclose(moved, model(inputs()), rtol=0.02, atol=0.02 * float(moved.abs().max()))
            assert torch.equal(attacked(runner)(inputs()), moved)
        assert float((moved - near).abs().max()) > 0.1
        assert torch.equal(attacked(runner)(inputs()), near)


def test_attacks_in_train_mode_use_batch_statistics() -> None:
    model = create_model("digits_cnn", num_classes=10).train()
    queried = attacked(Runner(model, Engine(precision="bfloat16", twin=True)), "train")
    assert not isinstance(queried, Twin)
    before = model.get_buffer("bn1.running_mean").clone()
    assert queried(inputs()).dtype == torch.float32
    assert not torch.equal(model.get_buffer("bn1.running_mean"), before)


@pytest.mark.parametrize("flatness", [[], [{"name": "awp", "gamma": 0.01}], [{"name": "rat", "eta": 0.2}]], ids=str)
def test_a_fast_step_is_a_step(make_job: MakeJob, tmp_path: Path, flatness: list[dict[str, Any]]) -> None:
    """Losses of three steps agree with the reference's to the precision of bfloat16."""
    objective = {"name": "trades", "beta": 3}
    reference = losses(make_job(tmp_path, objective=objective, flatness=flatness))
    job = running(make_job(tmp_path, objective=objective, flatness=flatness), Engine(precision="bfloat16", twin=True))
    assert losses(job) == pytest.approx(reference, rel=0.03)


def test_crafted_inputs_are_as_strong(make_job: MakeJob, tmp_path: Path) -> None:
    reference = make_job(tmp_path, objective={"name": "at"})
    fast = running(make_job(tmp_path, objective={"name": "at"}), Engine(precision="bfloat16", twin=True))
    batch = next(iter(reference.loader.epoch(0)))
    found = []
    for job in (reference, fast):
        stage = Stage(job, batch.x, batch.y, batch.ids, job.moment(0))
        x_adv = craft(stage, {})[0].x_adv
        reference.model.eval()
        with torch.no_grad():
            found.append(float(nn.functional.cross_entropy(reference.model(x_adv), batch.y)))
    assert found[1] == pytest.approx(found[0], rel=0.01)


# Compiling


def test_compiled_for_one_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last, smaller batch of an epoch runs as it is."""
    sizes: list[int] = []

    def compiler(work: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def compiled(*passes: Tensor) -> Any:
            sizes.extend(len(x) for x in passes)
            return work(*passes)

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    runner = Runner(create_model("digits_cnn", num_classes=10), Engine(compile=True), size=6)
    assert runner.must_compile
    assert runner.told == ""
    for size in (4, 6, 6, 4, 6):
        runner.view(inputs(size))
    assert sizes == [6, 6, 6]
    runner.views(inputs(6), inputs(6))  # two passes are one of all rows
    runner.views(inputs(6), inputs(4))
    assert sizes == [6, 6, 6, 12]
    assert not runner.must_compile
    assert runner.told == "  compiled in 0 s"


def test_what_compiling_took_is_the_whole_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass is compiled when it is first run, after the forward one has answered."""
    now = [100.0]
    monkeypatch.setattr(torch, "compile", lambda work, **options: work)
    monkeypatch.setattr("flatrock.engine.runner.time.monotonic", lambda: now[0])
    runner = Runner(create_model("digits_cnn", num_classes=10), Engine(compile=True), size=6)
    for forward, backward in ((20.0, 11.0), (1.0, 2.0)):  # a later step changes nothing
        with runner.clocked():
            now[0] += forward
            runner.view(inputs(6))
            now[0] += backward
    assert runner.told == "  compiled in 31 s"


def test_a_compiler_that_fails_is_told_about(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: object, **options: object) -> None:
        def compiled(x: Tensor) -> None:
            raise RuntimeError("no compiler here\nand more")

        return compiled

    monkeypatch.setattr(torch, "compile", broken)
    reference = losses(make_job(tmp_path))
    job = running(make_job(tmp_path), Engine(compile=True))
    assert losses(job) == reference
    assert job.runner.findings == {"T01": "the network is not compiled (RuntimeError: no compiler here)"}


def test_a_compiler_that_fails_later_is_told_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another mode, or frozen weights, are compiled when they come."""

    def compiler(work: Callable[[Tensor], Any], **options: Any) -> Callable[[Tensor], Any]:
        def compiled(x: Tensor) -> Any:
            if not torch.is_grad_enabled():
                raise RuntimeError("not this time")
            return work(x)

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    model = create_model("digits_cnn", num_classes=10).eval()
    runner = Runner(model, Engine(compile=True), size=6)
    runner.view(inputs())
    assert runner.findings == {}
    with torch.no_grad():
        assert torch.equal(runner.view(inputs()).logits, model(inputs()))
    assert runner.findings == {"T01": "the network is not compiled (RuntimeError: not this time)"}
    assert runner.told == ""


def test_want_of_memory_is_no_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes take no less as they are; a run that ends names the cure, one that crawls does not."""

    def compiler(work: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def compiled(*passes: Tensor) -> Any:
            raise torch.OutOfMemoryError("no room")

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    runner = Runner(create_model("digits_cnn", num_classes=10), Engine(compile=True), size=6)
    with pytest.raises(torch.OutOfMemoryError):
        runner.view(inputs())
    assert runner.findings == {}


def test_a_pass_does_not_change_what_an_earlier_one_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA graphs do, this compiler returns the same memory every time."""
    memory: list[Any] = []

    def compiler(work: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def compiled(*passes: Tensor) -> Any:
            seen = work(*passes)
            if not memory:
                memory.extend(tensor.clone() for tensor in seen)
            for mine, tensor in zip(memory, seen, strict=True):
                mine.copy_(tensor)
            return memory

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    with torch.no_grad():
        runner = Runner(create_model("digits_cnn", num_classes=10).eval(), Engine(compile=True), size=6)
        first = runner.view(inputs())
        kept = first.logits.clone()
        second = runner.view(0.5 * inputs())
    assert torch.equal(first.logits, kept)
    assert not torch.equal(second.logits, kept)
    assert runner.findings == {}


def test_a_twin_that_overflows_is_not_used() -> None:
    """Its gradients would be NaN, the attack would stand still, and nobody would notice."""
    model = create_model("digits_cnn", num_classes=10)
    runner = Runner(model, Engine(precision="bfloat16", twin=True))
    runner.check(inputs(), "eval")
    assert isinstance(attacked(runner), Twin)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "bn" in name and name.endswith("weight"):
                p.mul_(3000)
    model.eval()
    assert bool(torch.isfinite(runner.view(inputs()).logits).all())
    runner.check(inputs(), "eval")
    assert not isinstance(attacked(runner), Twin)
    assert list(runner.findings) == ["T02"]


def test_a_run_keeps_the_finding(
    make_job: MakeJob, listener: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *args, **options: broken)
    job = running(make_job(tmp_path / "run"), Engine(compile=True))
    told_to = listener()
    train(job, progress=told_to)
    told = [text for text in told_to.said if text.startswith("T01")]
    assert len(told) == 1
    assert "no compiler here" in told[0]
    assert RunFolder(tmp_path / "run").read_info()["findings"] == told


# The recipe


def test_the_engine_does_not_change_the_hash() -> None:
    plain = load_recipe("digits_at")
    for change in ("engine.precision=bfloat16", "engine.compile=true", "engine.compile=false"):
        assert recipe_hash(load_recipe("digits_at", [change])) == recipe_hash(plain)


def test_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    able = [True]
    monkeypatch.setattr("flatrock.recipes.build.computes_bfloat16", lambda device: able[0])
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    auto = load_recipe("digits_at")
    assert build_engine(auto, cpu, steps=10**6) == Engine()
    assert build_engine(auto, gpu, steps=1000) == Engine(precision="bfloat16", compile=True, twin=True)
    assert build_engine(auto, gpu, steps=999) == Engine(precision="bfloat16", twin=True)  # not worth compiling
    reference = load_recipe("digits_at", ["engine.precision=float32", "engine.compile=false"])
    assert build_engine(reference, gpu, steps=1000) == Engine()
    half = load_recipe("digits_at", ["engine.precision=float32"])
    assert build_engine(half, gpu, steps=1000) == Engine()
    able[0] = False  # an older GPU, that only imitates bfloat16
    assert build_engine(auto, gpu, steps=1000) == Engine()
    fast = load_recipe("digits_at", ["engine.precision=bfloat16", "engine.compile=true"])
    assert build_engine(fast, gpu, steps=1) == Engine(precision="bfloat16", compile=True, twin=True)
    assert build_engine(fast, cpu, steps=1) == Engine(precision="bfloat16", compile=True)


def test_a_trace_of_the_whole_network_needs_the_reference() -> None:
    full = {"flatness": [{"name": "trh", "weight": 0.1, "layers": "full", "clean": "full"}]}
    load_recipe("moons_at", full)
    for key, value in (("engine.precision", "bfloat16"), ("engine.compile", True)):
        with pytest.raises(ConfigError, match="flatness trh: it differentiates the network itself; set engine"):
            load_recipe("moons_at", {**full, key: value})


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits_at", ["engine.precision=half", "engine.compile=maybe"])
    assert "engine.precision" in str(caught.value)
    assert "engine.compile" in str(caught.value)


def test_a_twin_that_cannot_be_made_is_told_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Twin:
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr("flatrock.engine.runner.faithful", fails)
    runner = Runner(create_model("digits_cnn", num_classes=10).eval(), Engine(precision="bfloat16", twin=True))
    assert attacked(runner)(inputs()).shape == (6, 10)
    runner.check(inputs(), "eval")
    assert runner.findings == {
        "T02": "the attack's float16 copy cannot be made (RuntimeError: Failed to find C compiler); "
        "attacks use the bfloat16 passes instead"
    }


def test_an_attack_that_is_not_recorded_is_told_about() -> None:
    runner = Runner(create_model("digits_cnn", num_classes=10).eval(), Engine(precision="bfloat16", twin=True))
    twin = attacked(runner)
    assert isinstance(twin, Twin)
    assert runner.findings == {}
    twin._replay.refused["whole"] = "1.0 of 16 GiB are free, too few"
    attacked(runner)
    why = "the attack is not recorded (1.0 of 16 GiB are free, too few); it launches every kernel anew"
    assert runner.findings == {"T03": why}


def test_every_network_is_compiled_however_many_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler gives up silently on code it has met in too many variants."""
    compiled, count = torch.compile, [0]

    def backend(graph: Any, example: Any) -> Any:
        count[0] += 1
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda work, **options: compiled(work, backend=backend, dynamic=False))
    for turn in range(1, 6):
        runner = Runner(create_model("digits_cnn", num_classes=10), Engine(compile=True), size=6)
        runner.views(inputs(), inputs())
        runner.view(inputs())
        assert count[0] == 2 * turn
        assert runner.findings == {}


def test_tuning_is_given_back() -> None:
    model = create_model("digits_cnn", num_classes=10)
    for engine, inside in ((Engine(), False), (Engine(precision="bfloat16", twin=True), True)):
        with pytest.raises(KeyError), Runner(model, engine).tuned():
            assert torch.backends.cudnn.benchmark == inside
            raise KeyError
        assert not torch.backends.cudnn.benchmark


def test_comparisons_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made once, of few rows; trying algorithms on such shapes is wasted."""
    seen: list[bool] = []

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(torch.backends.cudnn.benchmark)
            return work(*args, **options)

        return call

    monkeypatch.setattr(torch, "compile", lambda work, **options: work)
    for name in ("joint", "faithful"):
        monkeypatch.setattr(f"flatrock.engine.runner.{name}", noted(getattr(runner_module, name)))
    engine = Engine(precision="bfloat16", compile=True, twin=True)
    runner = Runner(create_model("digits_cnn", num_classes=10), engine, size=6)
    with runner.tuned():
        runner.views(inputs(), inputs())
        attacked(runner)
        assert torch.backends.cudnn.benchmark
    assert seen == [False, False]
    assert runner.findings == {}


@pytest.mark.parametrize("count", [1, 2])
def test_compiled_passes_have_batch_norm_and_relu_as_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """All three pairs of this network, and its statistics are those of plain passes."""
    monkeypatch.setattr(torch, "compile", lambda work, **options: work)
    model = create_model("digits_cnn", num_classes=10).train()
    plain = copy.deepcopy(model)
    asked: list[bool] = []

    def noted(norm: nn.Module, x: Tensor, **how: Any) -> Tensor:
        asked.append(how["relu"])
        return normalised(norm, x, **how)

    monkeypatch.setattr(joint_module, "normalised", noted)
    runner = Runner(model, Engine(compile=True), size=6)
    runner.views(*(inputs() for _ in range(count)))
    for _ in range(count):
        plain(inputs())
    assert asked == 2 * 3 * [True], "judged once, then computed once"
    assert runner._joints[count] is not None
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_passes_that_cannot_be_one_are_told_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda work, **options: work)
    model = create_model("digits_cnn", num_classes=10)
    model.register_forward_hook(lambda *_: None)
    for count in (1, 2):
        runner = Runner(model, Engine(compile=True), size=6)
        runner.views(*(inputs() for _ in range(count)))
        assert "one by one" in runner.findings["T04"]
    one, two = runner.views(inputs(), inputs().square())
    assert torch.allclose(two.logits, view(model, inputs().square()).logits, atol=1e-5)
    assert not torch.allclose(one.logits, two.logits, atol=1e-3)


def test_gradients_are_taken_out_of_the_memory_of_compiled_passes() -> None:
    model = create_model("digits_cnn", num_classes=10)
    for engine, moves in ((Engine(), False), (Engine(compile=True), True)):
        model.head.weight.grad = torch.ones_like(model.head.weight)
        before = model.head.weight.grad
        Runner(model, engine).settle()
        assert (model.head.weight.grad is not before) == moves
        assert torch.equal(model.head.weight.grad, before)
        assert model.head.bias.grad is None


def test_passes_of_one_loss_are_made_in_order(make_job: MakeJob, tmp_path: Path) -> None:
    """BatchNorm statistics end nearer to the last pass."""
    job = make_job(tmp_path)
    job.model.train()
    x, x_adv = inputs(16), 0.2 * inputs(16)
    state = {k: v.clone() for k, v in job.model.state_dict().items()}
    means = {}
    for order in (("clean", "adv"), ("adv", "clean")):
        job.model.load_state_dict(state)
        run_passes(job.runner, order, x, [Point(x_adv)])
        means[order] = job.model.get_buffer("bn1.running_mean").clone()
    job.model.load_state_dict(state)
    view(job.model, x)
    view(job.model, x_adv)
    assert torch.equal(job.model.get_buffer("bn1.running_mean"), means["clean", "adv"])
    assert not torch.equal(means["clean", "adv"], means["adv", "clean"])


def test_memory_on_record_is_that_of_training(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken, reset = [5], []
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: taken[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reset.append("cache"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: reset.append("peak"))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_info(status="running", recipe_hash="0")
    cpu = make_job(tmp_path / "run")
    job = replace(cpu, device=torch.device("cuda"))
    note_memory(cpu, folder)
    assert "peak_memory_bytes" not in folder.read_info()
    for now, kept in ((5, 5), (3, 5), (7, 7)):
        taken[0] = now
        note_memory(job, folder)
        assert folder.read_info()["peak_memory_bytes"] == kept
    probed(cpu, cpu.model)
    assert not reset
    probed(job, cpu.model)
    assert reset == ["cache", "peak"]


def test_input_gradients_are_taken_out_of_the_memory_of_compiled_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks that average gradients keep one while the next is computed; as CUDA graphs do, this memory is reused."""
    memory: list[Tensor] = []

    class Reused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            memory.append(memory[0].copy_(grads[0]) if memory else grads[0].clone())
            return memory[0]

    def compiler(work: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *passes: work(*(Reused.apply(x) for x in passes))  # type: ignore[no-untyped-call]

    monkeypatch.setattr(torch, "compile", compiler)
    runner = Runner(create_model("digits_cnn", num_classes=10).eval(), Engine(compile=True), size=6)
    queried = attacked(runner, "train")

    def gradient(x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_(True)
        (grad,) = torch.autograd.grad(queried(leaf).square().sum(), leaf)
        return grad

    first = gradient(inputs())
    kept = first.clone()
    second = gradient(0.5 * inputs())
    assert torch.equal(first, kept)
    assert not torch.equal(second, kept)
    assert runner.findings == {}


def test_the_check_sends_gradients_as_large_as_attacks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = create_model("digits_cnn", num_classes=10).eval()
    runner = Runner(model, Engine(precision="bfloat16", twin=True))
    seen: list[Tensor] = []
    inside = Twin.inside

    def watched(self: Twin, x: Tensor) -> Tensor:
        logits = inside(self, x)
        if logits.requires_grad:
            logits.register_hook(seen.append)  # type: ignore[no-untyped-call]
        return logits

    monkeypatch.setattr(Twin, "inside", watched)
    attacked(runner)
    seen.clear()
    runner.check(inputs(), "eval")
    (entering,) = seen
    assert torch.equal(entering.abs().amax(1), torch.full((6,), CARRIED, dtype=torch.float16))
