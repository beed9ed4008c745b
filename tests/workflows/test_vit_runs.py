"""Vision transformers from recipe to result: training, flatness methods, evaluation, landscape, curvature, resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interrupted import Ends
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Look
from flatrock.core.rng import Seed
from flatrock.core.tensorfile import load as load_tensors
from flatrock.core.types import Views
from flatrock.diagnostics.curvature import Settings, curvature
from flatrock.diagnostics.landscape import filter_direction
from flatrock.engine.average import averaged
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.runner import Engine, Runner
from flatrock.engine.step import train_step
from flatrock.flatness.tensors import chosen
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.restore import load
from flatrock.workflows.evaluate import evaluate_run
from flatrock.workflows.landscape import measure_landscape
from flatrock.workflows.landscape_plan import Plan

# Digits of 8x8 pixels: 3x3 patches of 4x4 at stride 2.
VIT = {"name": "vit", "depth": 2, "width": 12, "heads": 3, "patch": 4, "stride": 2}
SMALL: dict[str, Any] = {
    "model": VIT,
    "data.limit": 32,
    "data.held_out": 20,
    "train.batch_size": 16,
    "train.epochs": 2,
    "train.tensorboard": False,
    "attack.steps": 2,
    "select.attack": "pgd-1",
}
STACKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "at+awp": ("digits_at", [{"name": "awp", "gamma": 0.01}]),
    "trades+rat": ("digits_trades", [{"name": "rat", "order": 2, "eta": 0.2, "sigma": 0.01}]),
    "at+trh": ("digits_at", [{"name": "trh", "weight": 1e-2, "gamma": 1e-3, "schedule": "multistep"}]),
    "trades+s2o+sam": ("digits_trades", [{"name": "s2o"}, {"name": "sam"}]),
}


def job_of(folder: Path, source: str = "digits_at", **keys: Any) -> Job:
    return build_job(load_recipe(source, {**SMALL, **keys}), folder=folder)


def tiny(**options: Any) -> Classifier:
    """Few enough parameters for a dense Hessian."""
    keys: dict[str, Any] = {"depth": 1, "width": 4, "heads": 2, "mlp": 4, "patch": 4, "input_shape": (1, 8, 8)}
    return create_model("vit", num_classes=3, **{**keys, **options}).double()


def samples(n: int = 6) -> tuple[Tensor, Tensor]:
    gen = Seed(5).generator()
    return torch.rand(n, 1, 8, 8, generator=gen, dtype=torch.float64), torch.arange(n) % 3


# The recipe


def test_the_images_are_those_of_the_data() -> None:
    assert load_recipe("digits_at", SMALL).model.options["input_shape"] == [1, 8, 8]
    recipe = load_recipe("cifar10_at_linf", {"model.name": "vit_b4"})
    assert recipe.model.options == {"input_shape": [3, 32, 32]}
    assert recipe_hash(recipe) == recipe_hash(load_recipe("cifar10_at_linf", {"model": dict(recipe.model)}))
    assert "input_shape" not in load_recipe("cifar10_at_linf").model.options


def test_images_that_do_not_fit_are_a_fault() -> None:
    with pytest.raises(ConfigError, match=r"'vit' takes \(1, 16, 16\), 'digits' has \(1, 8, 8\)"):
        load_recipe("digits_at", {**SMALL, "model": {**VIT, "input_shape": [1, 16, 16]}})
    with pytest.raises(ConfigError, match=r"model: vit patches of 16 pixels at stride 16 do not end where 8"):
        load_recipe("digits_at", {"model.name": "vit_b16"})
    with pytest.raises(ConfigError, match=r"model: vit takes images: .* got \[2\]"):
        load_recipe("moons_at", {"model": VIT})


def test_check_counts_it(tmp_path: Path) -> None:
    words = [f"model.{k}={v}" for k, v in VIT.items()]
    done = CliRunner().invoke(app, ["check", "digits_at", *words])
    assert done.exit_code == 0, done.output
    with torch.device("meta"):
        count = sum(p.numel() for p in create_model(**VIT, input_shape=(1, 8, 8)).parameters())
    assert f"{count:,}" in done.output


# Training


@pytest.mark.parametrize("stack", STACKS)
def test_two_steps_and_an_evaluation(stack: str, run_folder: Path) -> None:
    source, flatness = STACKS[stack]
    job = job_of(run_folder, source, flatness=flatness, **{"train.max_steps": 2})
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    run = train(job)
    assert [r.step for r in run.records] == [2]
    assert all(math.isfinite(v) for v in run.records[0].terms.values())
    assert [n for n, p in job.model.named_parameters() if torch.equal(p, before[n])] == []
    result = evaluate_run(run, which="last", attacks=["pgd-3"], limit=40)
    assert 0 <= result.robust <= result.clean <= 1


def test_a_run_learns_and_is_loaded_again(run_folder: Path) -> None:
    keys: dict[str, Any] = {"data.limit": 640, "train.batch_size": 32, "train.epochs": 6, "threat.eps": 0.02}
    keys |= {"optimizer.lr": 0.1, "attack.steps": 1, "optimizer.weight_decay": 0}
    run = train(job_of(run_folder, **keys))
    model = load(run.folder, which="last")
    assert model.input_shape == (1, 8, 8)
    assert evaluate_run(run, which="last", attacks=["pgd-3"], limit=100).clean > 0.5


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"flatness": [*STACKS["at+awp"][1], {"name": "swa", "decay": 0.9}]}
    keys |= {"train.epochs": 3, "train.max_steps": 5, "train.save_seconds": 1e-9}  # a state after every step
    train(job_of(tmp_path / "whole", **keys))
    with pytest.raises(KeyboardInterrupt):
        train(job_of(tmp_path / "halves", **keys), progress=Ends(3, KeyboardInterrupt))
    assert load_tensors(tmp_path / "halves" / "state.safetensors")[1]["epoch"] == 1
    assert train(job_of(tmp_path / "halves", **keys), resume=True).last.step == 5
    one, two = (load_tensors(tmp_path / run / "last.safetensors")[0] for run in ("whole", "halves"))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_nothing_is_estimated_anew_for_an_average(tmp_path: Path) -> None:
    found = []
    for bn in ("copy", "recompute"):
        job = job_of(tmp_path / bn, flatness=[{"name": "swa", "decay": 0.5, "bn": bn, "batches": 2}])
        for step, batch in enumerate(job.loader.epoch(0)):
            train_step(job, batch, step=step, guard=True)
        with averaged(job, job.flatness["swa"], step=2) as model, torch.no_grad():
            found.append(model(batch.x))
            assert not torch.equal(found[-1], torch.zeros_like(found[-1]))
    assert torch.equal(*found)


@pytest.mark.parametrize("engine", [Engine(precision="bfloat16", twin=True), Engine(compile=True)], ids=["fast", "one"])
def test_the_engines_compute_the_same_step(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatrock.engine.runner._compiled", lambda passes: torch.compile(passes, backend="aot_eager"))
    totals = []
    for how in (Engine(), engine):
        job = job_of(tmp_path / how.precision, "digits_trades")
        if how.precision == "bfloat16":
            job.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        job = Job(**{**vars(job), "runner": Runner(job.model, how, size=16)})
        job.model.train()
        losses = [train_step(job, b, step=i, guard=True).losses for i, b in enumerate(job.loader.epoch(0))]
        assert job.runner.findings == {}
        totals.append([float(each["total"]) for each in losses])
    assert totals[1] == pytest.approx(totals[0], rel=0.02)


FACTORY = """
from torch import nn
from flatrock.models.catalog import create_model
from flatrock.models.pretrained import load_pretrained
from flatrock.models.weights import read_weights

def vit(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    sizes = {"depth": 2, "width": 12, "heads": 3, "patch": 4, "stride": 2}
    model = create_model("vit", num_classes=num_classes, input_shape=input_shape, **sizes)
    load_pretrained(model, read_weights("vit16.pt").state)
    return model
"""


def test_a_run_begins_with_weights_for_other_images(here: Path, run_folder: Path) -> None:
    """As docs/vit.md shows it: a function of one's own that loads them."""
    source = create_model("vit", depth=2, width=12, heads=3, patch=16, input_shape=(1, 64, 64), num_classes=21, seed=3)
    torch.save(source.state_dict(), "vit16.pt")
    (here / "mynets.py").write_text(FACTORY)
    job = job_of(run_folder, model={"name": "mynets:vit"}, **{"train.max_steps": 2})
    name = "blocks.1.mlp.fc1.weight"
    assert torch.equal(job.model.get_parameter(f"network.{name}"), source.get_parameter(name))
    assert chosen(job.model, "weights").keys() >= {"head.weight", f"network.{name}"}
    run = train(job)
    assert evaluate_run(run, which="last", attacks=["pgd-2"], limit=20).robust >= 0


# What methods see and move


def test_awp_and_rat_move_the_weights_of_layers() -> None:
    model = create_model(**VIT)
    layers = [f"blocks.{i}.{n}" for i in (0, 1) for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    named = {f"{n}.weight" for n in ("patch_embed.proj", *layers, "head")}
    assert chosen(model, "weights").keys() == named
    assert chosen(model, "matrices").keys() == named | {"cls_token", "pos_embed"}
    assert chosen(model, "conv").keys() == {"patch_embed.proj.weight"}
    hybrid = create_model("hybrid", depth=1, width=8, heads=2, input_shape=(3, 16, 16))
    convolutions = [n for n in chosen(hybrid, "conv") if n.startswith("patch_embed.backbone")]
    assert len(convolutions) == 52


@pytest.mark.parametrize(("source", "terms"), [("digits_at", {"ce_adv": 1}), ("digits_trades", {"ce": 1, "kl": 6})])
def test_the_trace_is_that_of_the_hessian_of_the_head(source: str, terms: dict[str, float], tmp_path: Path) -> None:
    """TrH's top layer, Case I, against second derivatives of the loss through the whole network."""
    trh = [{"name": "trh", "weight": 1e-3}]
    job = job_of(tmp_path, source, flatness=trh, **{"model.width": 6, "model.heads": 2, "data.limit": 16})
    job.model.double()
    (batch,) = job.loader.epoch(0)
    x, y = batch.x[:4].double(), batch.y[:4]
    x_adv = (x + 0.1 * torch.randn(x.shape, generator=Seed(1).generator(), dtype=x.dtype)).clamp(0, 1)
    clean, adv = job.runner.views(x, x_adv)
    views = Views(clean, adv)
    parts = job.objective.loss(views, y)
    penalty = job.flatness["trh"].in_loss(Look(job.model, x, x_adv, y, views, parts, job.moment(0)))
    assert penalty is not None

    def loss(weight: Tensor) -> Tensor:
        z, z_adv = (functional_call(job.model, {"head.weight": weight}, (inputs,)) for inputs in (x, x_adv))
        z_stop, beta = z.detach(), terms.get("kl", 0)
        kl = (z_stop.softmax(1) * (z_stop.log_softmax(1) - z_adv.log_softmax(1))).sum(1).mean()
        total = terms.get("ce", 0) * F.cross_entropy(z, y) + terms.get("ce_adv", 0) * F.cross_entropy(z_adv, y)
        return total + beta * kl

    weight = job.model.get_parameter("head.weight").detach()
    dense = hessian(loss, weight).reshape(weight.numel(), weight.numel())
    assert float(penalty.terms["trace"].detach()) == pytest.approx(float(dense.trace()), rel=1e-9)


def test_traces_of_the_whole_network_are_refused() -> None:
    """torch's third derivatives of a LayerNorm are wrong."""
    trh = {"name": "trh", "layers": "full", "clean": "full", "estimate": "hutchinson"}
    with pytest.raises(ConfigError, match=r"flatness\[0\] trh: .*\(LayerNorm\); use layers: top"):
        load_recipe("digits_at", {**SMALL, "flatness": [trh]})


# Diagnostics


def test_landscapes_move_filters_and_leave_vectors(run_folder: Path) -> None:
    model = create_model(**VIT)
    weights, shift = dict(model.named_parameters()), filter_direction(model, Seed(0))
    assert shift.keys() == {name for name, p in weights.items() if p.dim() > 1}
    for name, d in shift.items():
        filters, true = d.flatten(1).norm(dim=1), weights[name].flatten(1).norm(dim=1)
        torch.testing.assert_close(filters, true, rtol=1e-4, atol=1e-6, msg=name)
    assert len(shift["pos_embed"]) == 1, "embeddings of positions are one filter"
    run = train(job_of(run_folder, **{"train.max_steps": 1}))
    plan = Plan(points=3, directions=1, images=8, attack="pgd-1")
    record, _ = measure_landscape(run.folder / "last.safetensors", plan)
    assert record.loss.shape == (1, 3)


def test_curvature_is_that_of_finite_differences() -> None:
    model, (x, y) = tiny().eval(), samples()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=Seed(2).child(name).generator(), dtype=p.dtype))
    found = curvature(model, x, y, beta=100.0, settings=Settings(trace="exact", runs=1, steps=4, top=1, awp_steps=1))
    parameters = list(model.parameters())
    diagonal = torch.cat([bends(model, p, x, y) for p in parameters])
    assert found.whole.count == len(diagonal) == sum(p.numel() for p in parameters)
    assert found.whole.trace.value == pytest.approx(float(diagonal.sum()), rel=1e-5)
    assert {"cls_token", "pos_embed", "blocks.0.attn.qkv", "head"} < found.layers.keys()


def bends(model: nn.Module, parameter: Tensor, x: Tensor, y: Tensor, h: float = 1e-5) -> Tensor:
    """d^2 L / dp_i^2 by central differences of gradients."""
    found = torch.zeros(parameter.numel(), dtype=parameter.dtype)
    flat = parameter.detach().view(-1)
    for i in range(len(found)):
        slopes = []
        for step in (h, -2 * h):
            flat[i] += step
            slopes.append(torch.autograd.grad(F.cross_entropy(model(x), y), parameter)[0].flatten()[i])
        flat[i] += h
        found[i] = (slopes[0] - slopes[1]) / (2 * h)
    return found
