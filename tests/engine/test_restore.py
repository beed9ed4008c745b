"""From a run folder back to a model and its evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.core.errors import StateError
from flatrock.core.records import Result
from flatrock.core.tensorfile import load as load_checkpoint
from flatrock.data.catalog import load_data
from flatrock.data.split import fair_subset
from flatrock.engine.folder import OWN_FILE, RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.recipes.check import validate
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.restore import load, open_checkpoint
from flatrock.workflows.evaluate import evaluate_run, store_result

ATTACKS = ["fgsm", "pgd-2"]


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def inputs() -> Tensor:
    return load_data("digits", "test").images(torch.arange(20))


@pytest.mark.parametrize("which", ["best", "last"])
def test_every_way_to_load_gives_the_same_model(small_run: Path, which: str) -> None:
    tensors, _ = load_checkpoint(small_run / f"{which}.safetensors")
    before = torch.get_rng_state()
    models = [
        load(small_run, which=which),
        load(str(small_run), which=which),
        load(small_run / f"{which}.safetensors"),
        load(RunFolder(small_run).run(), which=which),
    ]
    assert torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        logits = [model(inputs()) for model in models]
    for model, z in zip(models, logits, strict=True):
        assert not any(m.training for m in model.modules())
        assert torch.equal(z, logits[0])
        assert {f"model/{k}" for k in model.state_dict()} == tensors.keys()
        assert all(torch.equal(v, tensors[f"model/{k}"]) for k, v in model.state_dict().items())
        assert all(p.requires_grad for p in model.parameters())


def test_best_and_last_differ_and_state_is_last(small_run: Path) -> None:
    with torch.no_grad():
        best, last, state = (load(small_run / f"{name}.safetensors")(inputs()) for name in ("best", "last", "state"))
    assert not torch.equal(best, last)
    assert torch.equal(last, state)
    assert open_checkpoint(small_run)[0].name == "best.safetensors"


def test_a_running_run_can_be_looked_at(make_job: Callable[..., Job], run: Path, stopper: Callable[[int], Any]) -> None:
    """Also one that was finished, lost its last state, and is at its last epoch again."""
    truth = load(run).state_dict()
    (run / "state.safetensors").write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        train(make_job(run), resume=True, progress=stopper(11))
    assert RunFolder(run).run().status == "interrupted"
    assert all(torch.equal(v, truth[k]) for k, v in load(run).state_dict().items())
    assert load(run, which="last") is not None


def test_recipe_in_the_checkpoint_is_the_recipe(make_job: Callable[..., Job], small_run: Path) -> None:
    """Validated again, it is the same: nothing is lost on the way through the file."""
    job = make_job(small_run)
    _, _, meta = open_checkpoint(small_run / "best.safetensors")
    recipe = validate(meta["recipe"], "the stored recipe")
    assert recipe.resolved() == job.recipe == meta["recipe"]
    assert recipe_hash(recipe) == job.recipe_hash == meta["recipe_hash"]


def test_a_checkpoint_needs_nothing_beside_it(small_run: Path, tmp_path: Path) -> None:
    shutil.copy(small_run / "best.safetensors", tmp_path / "gift.safetensors")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "gift.safetensors")(inputs()), load(small_run)(inputs()))


@pytest.mark.parametrize("which", ["best", "last"])
def test_evaluation_is_written_and_read_back(run: Path, which: str) -> None:
    result = evaluate_run(run, which=which, attacks=ATTACKS, limit=60)
    again = Result.from_json(store_result(run, result).read_text())
    assert again.flags.keys() == {"clean", *ATTACKS}
    assert all(torch.equal(again.flags[k], v) for k, v in result.flags.items())
    assert (again.n, again.clean, again.robust) == (60, result.clean, result.robust)
    record = getattr(RunFolder(run).run(), which)
    assert again.provenance["epoch"] == record.epoch
    assert again.provenance["checkpoint"] == f"{which}.safetensors"
    assert again.provenance["recipe_hash"] == RunFolder(run).read_info()["recipe_hash"]
    assert (again.marks, again.findings) == ((), ())
    with torch.no_grad():
        test = fair_subset(load_data("digits", "test"), 60)
        predicted = load(run, which=which)(test.images(torch.arange(60))).argmax(1)
    assert torch.equal(again.flags["clean"], predicted == test.y)
    assert again.predictions is not None
    assert torch.equal(again.predictions, predicted)


def test_a_partial_result_never_takes_the_name_of_the_whole(run: Path) -> None:
    whole = store_result(run, evaluate_run(run))
    assert whole.name == "result-best.json"
    for options in ({"limit": 60}, {"attacks": ["pgd-2:step_size=1/255"]}, {"limit": 60, "seed": 3}):
        partial = store_result(run, evaluate_run(run, **options))  # type: ignore[arg-type]
        assert partial != whole
        assert OWN_FILE.fullmatch(partial.name), partial.name


def test_evaluation_takes_the_recipes_attacks(run: Path) -> None:
    result = evaluate_run(run, limit=8)
    assert list(result.per_attack) == ["fgsm", "pgd-20", "cw-20"]


def test_evaluation_of_a_file_and_of_the_state(run: Path) -> None:
    by_folder = evaluate_run(run, which="last", attacks=ATTACKS, limit=30)
    by_file = evaluate_run(run / "state.safetensors", attacks=ATTACKS, limit=30)
    assert all(torch.equal(by_file.flags[k], v) for k, v in by_folder.flags.items())
    assert by_file.provenance["epoch"] == 4


def test_selection_on_test_data_is_marked(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """Only what was chosen by looking at the test set is marked: best, not last."""
    train(make_job(tmp_path / "run", select__data="test", select__size=40))
    assert evaluate_run(tmp_path / "run", attacks=["fgsm"], limit=8).marks == ("test-selected",)
    assert evaluate_run(tmp_path / "run", which="last", attacks=["fgsm"], limit=8).marks == ()
    assert {r.selected_on for r in RunFolder(tmp_path / "run").records()} == {"test"}


def test_damaged_weights_are_not_evaluated(run: Path) -> None:
    content = bytearray((run / "best.safetensors").read_bytes())
    content[-100] ^= 4
    (run / "best.safetensors").write_bytes(content)
    with pytest.raises(StateError, match=r"best\.safetensors is damaged \(its digest does not match\)"):
        evaluate_run(run, attacks=ATTACKS)


def test_what_was_never_a_checkpoint_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "mynets.py").write_text("import torch\n")
    with pytest.raises(StateError, match=r"mynets\.py is no checkpoint .*; name a run folder or a checkpoint in it$"):
        load(tmp_path / "mynets.py")
