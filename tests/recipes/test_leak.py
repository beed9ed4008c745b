"""No epoch is chosen on samples that the weights a run begins with were trained on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from start_cases import Told, weights
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.errors import ConfigError
from flatrock.core.runs import Run
from flatrock.data.catalog import load_data
from flatrock.data.dataset import Dataset
from flatrock.data.overlap import shared_samples
from flatrock.data.split import Split, fair_subset, held_out_split, places
from flatrock.recipes.build import build_job
from flatrock.recipes.leak import leak
from flatrock.recipes.load import load_recipe
from flatrock.workflows.train import train_recipe

QUICK = {"train.epochs": 1, "train.batch_size": 32, "train.tensorboard": False, "select.attack": "pgd-1"}


def standard(**changes: Any) -> Any:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe("digits_standard", {**QUICK, **keys})


def trained(folder: Path, **changes: Any) -> Run:
    return train_recipe(standard(**changes), folder=folder, device="cpu")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on 400 samples beside 50 that it held out."""
    return trained(tmp_path_factory.mktemp("first") / "l1", data__held_out=50, data__limit=400, train__epochs=4).folder


def shared(held_out: int, size: int | None = None) -> int:
    """How many samples to choose on it was trained on, counted by hand."""
    data = load_data("digits", "train")
    mine = fair_subset(held_out_split(data, size=held_out).held_out, size).ids.tolist()
    theirs = fair_subset(held_out_split(data, size=50).train, 400).ids.tolist()
    return sum(sample in theirs for sample in mine)


@pytest.mark.parametrize(("held_out", "size"), [(600, None), (600, 100), (60, None)])
def test_refused_with_the_count_before_anything_is_written(
    first: Path, tmp_path: Path, held_out: int, size: int | None
) -> None:
    count = shared(held_out, size)
    assert count > 0
    with pytest.raises(ConfigError) as caught:
        trained(tmp_path / "new", model__weights=str(first), data__held_out=held_out, select__size=size)
    assert f"run l1 (data.held_out=50, data.limit=400) was trained on {count} of the {size or held_out}" in str(
        caught.value
    )
    assert "say data.held_out=50, or less" in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("changes", [{}, {"data__held_out": 20}, {"data__limit": None}], ids=str)
def test_the_cure_helps_and_nothing_is_said_of_it(first: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = standard(**{"model__weights": str(first), "data__held_out": 50, "data__limit": 400, **changes})
    told = Told()
    train_recipe(recipe, folder=tmp_path / "new", device="cpu", progress=told)
    assert [line for line in told.said if "held" in line] == []


def test_held_out_samples_are_among_those_of_any_larger_part() -> None:
    data = load_data("digits", "train")
    few, more = (set(held_out_split(data, size=size).held_out.ids.tolist()) for size in (37, 333))
    assert few < more, "so that holding out less is a cure"


def test_check_tells_it_where_the_data_are_there(first: Path) -> None:
    words = ["check", "digits_standard", f"model.weights={first}", "data.held_out=600", "--device", "cpu"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert f"was trained on {shared(600)} of the 600" in re.sub(r"\s+", " ", done.output)
    assert CliRunner().invoke(app, [*words[:3], "data.held_out=50", *words[4:]]).exit_code == 0


def test_what_a_run_began_with_is_remembered(first: Path, tmp_path: Path) -> None:
    """The second run saw 10 samples itself; what it began with saw more, and need not be there any more."""
    gone = tmp_path / "gone"
    shutil.copytree(first, gone)
    second = trained(tmp_path / "l2", model__weights=str(gone), data__held_out=50, data__limit=10, train__batch_size=5)
    shutil.rmtree(gone)
    about = json.loads((second.folder / "run.json").read_text())["provenance"]["start"]["seen"]
    assert [(one["run"], one["held_out"], one["limit"]) for one in about] == [("gone", 50, 400)]
    with pytest.raises(ConfigError, match=rf"run gone .* trained on {shared(600)} of the 600"):
        trained(tmp_path / "l3", model__weights=str(second.folder), data__held_out=600)


def test_a_checkpoint_without_its_run_knows_what_it_was_trained_on(first: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(first / "last.safetensors", tmp_path / "some.safetensors"))
    with pytest.raises(ConfigError, match=f"trained on {shared(600)} of the 600"):
        trained(tmp_path / "new", model__weights=str(alone), data__held_out=600)


def test_weights_of_unknown_training_are_taken(first: Path, tmp_path: Path) -> None:
    torch.save(weights(first / "last.safetensors"), tmp_path / "some.pt")
    recipe = standard(model__weights=str(tmp_path / "some.pt"), data__held_out=600)
    assert "seen" not in build_job(recipe, folder=tmp_path / "new").provenance["start"]


def test_who_chooses_on_the_test_set_chooses_on_none_of_them(first: Path, tmp_path: Path) -> None:
    chosen = standard(model__weights=str(first), data__held_out=600, select="test")
    start = build_job(chosen, folder=tmp_path / "new").provenance["start"]
    assert [one["run"] for one in start["seen"]] == ["l1"], "known, and no reason to refuse"


def test_a_run_that_had_begun_goes_on_and_says_it(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Told):
        def advance(self, units: int, note: str = "") -> None:
            if note.startswith("epoch 2"):
                raise KeyboardInterrupt

    recipe = standard(model__weights=str(first), data__held_out=600, train__epochs=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("flatrock.recipes.start.leak", lambda *given: None)  # as it was before
        train_recipe(recipe, folder=tmp_path / "new", device="cpu", progress=Stop())
    told = Told()
    done = train_recipe(recipe, folder=tmp_path / "new", device="cpu", resume=True, progress=told)
    assert done.status == "finished"
    assert any(f"trained on {shared(600)} of the 600" in line and "goes on" in line for line in told.said)


# Which data are the same


def found(**changes: Any) -> str | None:
    data = load_data("digits", "train")
    split = held_out_split(data, size=100)
    seen = {"run": "a", "data": "digits", "options": {}, "held_out": 50, "limit": None, **changes}
    return leak(standard(data__held_out=100), data, split, [seen])


def test_data_of_another_name_options_or_split_are_others() -> None:
    digest = held_out_split(load_data("digits", "train"), size=50).digest
    assert "trained on 50 of the 100" in str(found())
    assert "trained on 50 of the 100" in str(found(digest=digest))
    assert "trained on 50 of the 100" in str(found(digest=None)), "not recorded"
    assert "trained on 50 of the 100" in str(found(options={"size": 8})), "the same images, however large"
    for changes in ({"data": "mnist"}, {"options": {"points": 7}}, {"digest": "0" * 16}, {"held_out": 10**6}):
        assert found(**changes) is None
    assert found(held_out=100) is None
    everything = str(found(held_out=0, digest="none"))
    assert "trained on 100 of the 100" in everything
    assert "say select=test" in everything


def files(folder: Path, *, turned: bool = False) -> Path:
    """Digits as arrays of one's own; `turned` ones have other labels."""
    folder.mkdir()
    for split in ("train", "test"):
        data = load_data("digits", split)  # type: ignore[arg-type]
        x = data.images(torch.arange(len(data))).permute(0, 2, 3, 1).numpy()
        y = data.y.flip(0) if turned else data.y
        np.savez(folder / f"{split}.npz", image=(255 * x).astype(np.uint8), label=y.numpy())
    return folder


def test_own_data_are_known_by_their_content(tmp_path: Path) -> None:
    own = {"data__name": "npz", "model__num_classes": 10}
    here, there = files(tmp_path / "here"), files(tmp_path / "there", turned=True)
    start = train_recipe(standard(**own, data__held_out=50), folder=tmp_path / "l1", data_dir=here, device="cpu")
    recipe = standard(**own, model__weights=str(start.folder), data__held_out=100)
    with pytest.raises(ConfigError, match="trained on 50 of the 100"):
        build_job(recipe, folder=tmp_path / "new", data_folder=here)
    build_job(recipe, folder=tmp_path / "new", data_folder=there)
    (start.folder / "run.json").unlink()
    alone = standard(**own, model__weights=str(start.folder / "last.safetensors"), data__held_out=100)
    build_job(alone, folder=tmp_path / "new", data_folder=here)


def test_own_data_of_which_nothing_was_held_out_are_known_too(tmp_path: Path) -> None:
    own = {"data__name": "npz", "model__num_classes": 10}
    here, there = files(tmp_path / "here"), files(tmp_path / "there", turned=True)
    first = standard(**own, data__held_out=0, select__data="test")
    start = train_recipe(first, folder=tmp_path / "l1", data_dir=here, device="cpu")
    recipe = standard(**own, model__weights=str(start.folder / "last.safetensors"), data__held_out=100)
    with pytest.raises(ConfigError, match="trained on 100 of the 100"):
        build_job(recipe, folder=tmp_path / "new", data_folder=here)
    build_job(recipe, folder=tmp_path / "new", data_folder=there)


def test_of_older_runs_own_data_are_known_by_who_was_held_out() -> None:
    data = load_data("digits", "train")
    recipe = load_recipe("digits_standard", {"data.name": "npz", "model.num_classes": 10, "data.held_out": 100})
    split = held_out_split(data, size=100)
    seen = {"run": "a", "data": "npz", "options": {}, "held_out": 0, "limit": None, "digest": "none"}
    assert leak(recipe, data, split, [seen]) is None, "nobody was"
    assert leak(recipe, data, Split(data, data, "none"), []) is None
    fifty = seen | {"held_out": 50, "digest": held_out_split(data, size=50).digest}
    assert "trained on 50 of the 100" in str(leak(recipe, data, split, [fifty]))
    assert leak(recipe, data, split, [fifty | {"digest": "0" * 16}]) is None


# Extra images


def extra_file(folder: Path, rows: torch.Tensor) -> str:
    """Some of the training digits as an .npz file; as bytes, which change nothing of 17 grey levels but their names."""
    data = load_data("digits", "train")
    images = (255 * data.images(rows)).round().to(torch.uint8).permute(0, 2, 3, 1)
    np.savez(folder / "more.npz", image=images.numpy(), label=data.y[rows].numpy())
    return str(folder / "more.npz")


def with_extra(file: str, **changes: Any) -> Any:
    return standard(data__extra={"file": file, "fraction": 0.5}, data__held_out=100, **changes)


def test_extra_images_that_are_held_out_are_refused(tmp_path: Path) -> None:
    data = load_data("digits", "train")
    split = held_out_split(data, size=100)
    held_out, others = places(split.held_out, data), places(split.train, data)
    file = extra_file(tmp_path, torch.cat([others[:50], held_out[:7]]))
    with pytest.raises(ConfigError, match=r"7 of the 100 held-out samples .* among the images of .*more\.npz"):
        build_job(with_extra(file), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    build_job(with_extra(file, select__data="test"), folder=tmp_path / "run")
    build_job(with_extra(extra_file(tmp_path, others)), folder=tmp_path / "run")


def test_shared_samples_are_equal_in_every_byte() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (30, 3, 4, 4), generator=gen, dtype=torch.uint8)
    y = torch.zeros(30, dtype=torch.int64)
    many = Dataset("many", x, y, 2)
    few = Dataset("few", x[[3, 3, 17, 20, 29]].clone(), y[:5], 2)
    assert shared_samples(few, many) == 5
    few.x[0, 0, 0, 0] += 1
    few.x[4, 2, 3, 3] += 1
    assert shared_samples(few, many) == 3
    assert shared_samples(Dataset("floats", few.x / 255, y[:5], 2), many) == 3
    assert shared_samples(few, Dataset("other", x[:, :1], y, 2)) == 0


def test_floats_are_rounded_beside_bytes_only() -> None:
    """Close beside each other they are other samples; images and numbers that are none alike."""
    for shape in ((3, 4, 4), (2,)):
        x = 0.5 + 0.001 * torch.rand(30, *shape, generator=torch.Generator().manual_seed(0))
        y = torch.zeros(30, dtype=torch.int64)
        many = Dataset("many", x[:10], y[:10], 2)
        assert shared_samples(Dataset("others", x[10:], y[10:], 2), many) == 0
        assert shared_samples(Dataset("few", x[5:15], y[5:15], 2), many) == 5


def test_samples_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatrock.data.overlap.TOGETHER", 4 * 48 * 4)
    x = torch.randint(0, 256, (30, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    many = Dataset("many", x, torch.zeros(30, dtype=torch.int64), 2)
    assert shared_samples(many.subset(torch.arange(7, 20)), many) == 13
    assert shared_samples(many, many.subset(torch.arange(7, 20))) == 13
