"""From recipe to result: which data training looks at, what marks a number, extra images, real margins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from start_cases import Told
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, DataError
from flatrock.core.records import Result
from flatrock.data.catalog import load_data
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset, held_out_split
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import ProbeOutcome
from flatrock.engine.loop import train
from flatrock.engine.step import train_step
from flatrock.evaluation.checks import TEST_SELECTED
from flatrock.evaluation.evaluate import evaluate
from flatrock.recipes.build import build_job, build_threat
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.recipes.pieces import recipe_hash
from flatrock.workflows.evaluate import evaluate_run, store_result
from flatrock.workflows.train import train_recipe

# Two steps leave BatchNorm's running statistics at their start and the model with one answer, which is never "best";
# so where a best epoch is needed, there are more.
TWENTY_STEPS = {"data.limit": 640, "train.batch_size": 32, "train.epochs": 1, "attack.steps": 1}
TWO_STEPS = {"data.limit": 32, "train.batch_size": 16, "train.max_steps": 2, "data.held_out": 50}


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The splits that building and training ask for, in order."""
    asked: list[str] = []

    def spy(name: str, split: Any, **options: Any) -> Dataset:
        asked.append(split)
        return load_data(name, split, **options)

    for module in ("build", "probe"):
        monkeypatch.setattr(f"flatrock.recipes.{module}.load_data", spy)
    return asked


def test_training_never_looks_at_the_test_split(splits: list[str], run_folder: Path) -> None:
    run = train(build_job(load_recipe("digits_at", TWENTY_STEPS), folder=run_folder))
    assert splits == ["train"]
    assert [r.selected_on for r in run.records] == ["held_out"]
    result = evaluate_run(run, attacks=["fgsm"], limit=50)
    assert result.marks == ()
    assert "E03" not in [f.code for f in result.findings]


def test_a_part_of_the_test_set_gets_the_verdicts_of_the_whole(run_folder: Path) -> None:
    run = train(build_job(load_recipe("digits_at", TWENTY_STEPS), folder=run_folder))
    ask: dict[str, Any] = {"attacks": ["pgd-1:step_size=0.05"], "norm": "linf", "eps": 0.1}
    whole, part = evaluate_run(run, **ask), evaluate_run(run, limit=50, **ask)
    first = evaluate_run(run, limit=50, first=True, **ask)
    assert whole.ids is None
    assert part.ids is not None
    assert first.ids is None, "a sample is its row"
    assert not torch.equal(part.ids, torch.arange(50))
    for name, flags in part.flags.items():
        assert torch.equal(flags, whole.flags[name][part.ids])
        assert torch.equal(first.flags[name], whole.flags[name][:50])
    assert first.provenance["data"] == f"digits test, the first 50 of {whole.n} samples"
    names = [store_result(run, result).name for result in (part, first)]
    assert [name.split("-linf-0.1-")[1] for name in names] == [
        "pgd-1_step_size=0.05-n50-seed0.json",
        "pgd-1_step_size=0.05-first50-seed0.json",
    ]


def test_another_question_has_another_file(run_folder: Path) -> None:
    run = train(build_job(load_recipe("digits_at", TWENTY_STEPS), folder=run_folder))
    few = [f"pgd-{steps}:restarts=1:step_size=0.01" for steps in (1, 2)]
    asked: list[dict[str, Any]] = [{}, {"seed": 1}, *({"attacks": [*few, f"pgd-3:step_size=0.{i}"]} for i in (51, 99))]
    assert len("+".join(asked[-1]["attacks"])) > 70
    files = [store_result(run, evaluate_run(run, **how)).name for how in asked]
    assert files[0] == "result-best.json"
    assert len(set(files)) == 4
    assert all(len(name) < 120 for name in files)


def test_who_evaluates_an_unfinished_run_is_told(run_folder: Path) -> None:
    run = train(build_job(load_recipe("digits_at", {**TWENTY_STEPS, "train.epochs": 2}), folder=run_folder))
    assert "unfinished" not in evaluate_run(run, attacks=["fgsm"], limit=50).provenance
    RunFolder(run_folder).write_info(status="running")
    said = Told()
    result = evaluate_run(run_folder, attacks=["fgsm"], limit=50, progress=said)
    assert result.provenance["unfinished"] == "2 of 2 epochs"
    assert said.said == [
        "the run is not finished (2 of 2 epochs; its process is gone): this is best.safetensors as it is now"
    ]


def test_selection_on_the_test_split_marks_the_result(splits: list[str], run_folder: Path) -> None:
    recipe = load_recipe("digits_at", {**TWENTY_STEPS, "select": "test", "select.size": 50})
    run = train(build_job(recipe, folder=run_folder))
    assert splits == ["train", "test"]
    assert [r.selected_on for r in run.records] == ["test"]
    best = evaluate_run(run, attacks=["fgsm"], limit=50)
    assert best.marks == (TEST_SELECTED,) == ("test-selected",)
    assert [f.code for f in best.findings] == ["E03"]
    last = evaluate_run(run, which="last", attacks=["fgsm"], limit=50)
    assert last.marks == (), "the last epoch was not chosen, so looking did not help it"


def test_held_out_samples_are_not_trained_on(run_folder: Path) -> None:
    recipe = load_recipe("digits_at", {"data.held_out": 100, "train.batch_size": 64})
    everything = load_data("digits", "train")
    job = build_job(recipe, folder=run_folder)
    seen = torch.cat([batch.ids for batch in job.loader.epoch(0)])
    assert len(seen.unique()) == len(seen) == len(everything) - 100


def write_npz(path: Path, labels: list[int]) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 1), dtype=np.uint8)
    np.savez(path, image=images, label=np.array(labels))
    return path


@pytest.mark.parametrize(
    ("name", "labels", "changes"),
    [
        ("digits_at", [3] * 20, {}),
        ("digits_trades", [-1] * 20, {}),
        ("digits_trades", [-1] * 20, {"attack": {"name": "gaussian", "sigma": 0.25}}),
    ],
    ids=["labelled", "unlabelled", "unlabelled and noise"],
)
def test_extra_images_are_mixed_into_every_batch(
    name: str, labels: list[int], changes: dict[str, Any], tmp_path: Path, run_folder: Path
) -> None:
    file = write_npz(tmp_path / "more.npz", labels)
    extra = {"data.extra.file": str(file), "data.extra.fraction": "1/4"}
    recipe = load_recipe(name, {**TWO_STEPS, **extra, **changes})
    job = build_job(recipe, folder=run_folder)
    for batch in job.loader.epoch(0):
        assert batch.y[-4:].tolist() == labels[:4]
        assert (batch.y[:-4] >= 0).all()
    run = train(job)
    assert [r.step for r in run.records] == [2]
    assert torch.isfinite(torch.tensor(list(run.last.terms.values()))).all()


def test_unlabelled_images_need_an_objective_that_ignores_them(tmp_path: Path, run_folder: Path) -> None:
    file = write_npz(tmp_path / "more.npz", [-1, 3, 5])
    recipe = load_recipe("digits_mart", {**TWO_STEPS, "data.extra.file": str(file)})
    with pytest.raises(ConfigError, match=r"more\.npz has unlabelled images; they need objective trades"):
        build_job(recipe, folder=run_folder)


def test_missing_extra_file_is_named(tmp_path: Path, run_folder: Path) -> None:
    recipe = load_recipe("digits_at", {"data.extra.file": str(tmp_path / "gone.npz")})
    with pytest.raises(DataError, match=r"gone\.npz not found"):
        build_job(recipe, folder=run_folder)


def test_building_a_job_writes_nothing(tmp_path: Path) -> None:
    build_job(load_recipe("digits_at"), folder=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("compiled", "precision"), [(False, "full"), (True, "auto")])
def test_probes_of_compiled_runs_may_craft_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: bool, precision: str
) -> None:
    asked: list[str] = []

    def noted(*args: Any, **options: Any) -> Result:
        asked.append(options["precision"])
        return evaluate(*args, **options)

    monkeypatch.setattr("flatrock.recipes.probe.evaluate", noted)
    recipe = load_recipe("digits_at", {"engine.compile": compiled, "data.limit": 200})
    job = build_job(recipe, folder=tmp_path / "run")
    assert 0 <= job.probe(job.model).robust <= 1
    assert asked == [precision]


@pytest.mark.parametrize(("held_out", "seen", "collapsed"), [(3, 4, True), (None, 4, False)])
def test_one_class_for_all_held_out_images_is_a_collapse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held_out: int | None, seen: int, collapsed: bool
) -> None:
    """Whatever it says of images it was trained on."""

    def said(model: nn.Module, x: Tensor, y: Tensor, *_: Any, **__: Any) -> Result:
        half = len(x) // 2
        first = torch.full((half,), held_out) if held_out is not None else torch.arange(half) % 10
        flags = {"clean": torch.ones(len(x), dtype=torch.bool), "pgd-10": torch.arange(len(x)) < half // 2}
        return Result(threat={}, flags=flags, predictions=torch.cat([first, torch.full((len(x) - half,), seen)]))

    monkeypatch.setattr("flatrock.recipes.probe.evaluate", said)
    job = build_job(load_recipe("digits_at", {"data.limit": 300}), folder=tmp_path / "run")
    assert job.probe(job.model) == ProbeOutcome(1.0, 0.5, 0.0, collapsed=collapsed)


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [("shift", 0, 1), ("erase", 0, 1), ("cutmix", 0, 1), ("rotation_mode", "bilinear", "nearest")],
)
def test_later_choices_of_augmentation_are_in_the_hash_where_they_are_made(key: str, usual: Any, other: Any) -> None:
    plain = recipe_hash(load_recipe("cifar10_short_at"))
    assert recipe_hash(load_recipe("cifar10_short_at", {f"data.augment.{key}": usual})) == plain
    assert recipe_hash(load_recipe("cifar10_short_at", {f"data.augment.{key}": other})) != plain


def test_a_probe_tells_held_out_and_training_images_apart(tmp_path: Path) -> None:
    recipe = load_recipe("digits_at", {"train.epochs": 8, "data.limit": 300})
    job = build_job(recipe, folder=tmp_path / "run")
    train(job)
    told = job.probe(job.model)
    split = held_out_split(load_data("digits", "train"), size=recipe.data.held_out)
    seen = fair_subset(fair_subset(split.train, 300), len(split.held_out))
    alone = []
    for some in (split.held_out, seen):
        x = some.images(torch.arange(len(some)))
        alone.append(evaluate(job.model, x, some.y, build_threat(recipe), attacks=[recipe.select.attack], seed=0))
    assert (told.clean, told.robust) == (alone[0].clean, alone[0].robust)
    assert told.train_robust == pytest.approx(alone[1].robust, abs=0.03), "the attack starts elsewhere"
    assert told.train_robust != told.robust
    assert 0.2 < told.robust < told.clean < 1


@pytest.mark.slow
def test_robust_recipes_beat_standard_training_by_far(tmp_path: Path) -> None:
    accuracy = {}
    objectives = ("digits_standard", "digits_at", "digits_trades", "digits_mart", "digits_alp")
    for name in (*objectives, "digits_trades_awp_rat_swa", "digits_atent", "digits_at_sam"):
        run = train(build_job(load_recipe(name), folder=tmp_path / name))
        result = evaluate_run(run, attacks=["pgd-20"])
        accuracy[name] = (result.clean, result.robust)
    plain = accuracy.pop("digits_standard")
    assert plain[0] > 0.95
    for name, (clean, robust) in accuracy.items():
        assert robust - plain[1] > 0.5, name
        assert clean > 0.9, name


@pytest.mark.local
@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith("cifar10_") and "wrn" not in n])
def test_two_steps_on_real_cifar10(name: str, run_folder: Path, tmp_path: Path) -> None:
    if not (folder := os.environ.get("FLATROCK_TEST_DATA")):
        pytest.skip("set FLATROCK_TEST_DATA to the folder that holds CIFAR-10")
    tiny: dict[str, Any] = {"data.limit": 16, "train.batch_size": 8}
    if "steps" in load_recipe(name).attack.options:
        tiny["attack.steps"] = 2
    if helper := load_recipe(name).objective.options.get("helper"):
        small = {"data.limit": 16, "train.batch_size": 8, "train.max_steps": 1, "select.size": 10}
        train_recipe(Path(helper).name, folder=tmp_path / "helper", data_dir=folder, device="cpu", **small)
        tiny["objective.helper"] = str(tmp_path / "helper" / "last.safetensors")
    job = build_job(load_recipe(name, tiny), folder=run_folder, data_folder=Path(folder))
    for step, batch in enumerate(job.loader.epoch(0)):
        assert batch.x.shape == (8, 3, 32, 32)
        assert torch.isfinite(train_step(job, batch, step=step, guard=True).losses["total"])
    assert step == 1
