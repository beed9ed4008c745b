"""`flatrock curvature` and `flatrock landscape` of models that are not flatrock's, driven as a user drives them."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_cases import flatrock, refusal, stored
from foreign_cases import MODULE
from interrupted import stopped

from flatrock.diagnostics.curvature_record import CurvatureRecord
from flatrock.diagnostics.surface import Landscape
from flatrock.workflows.foreign import load_foreign

CURVED = ("--probes", "2", "--no-layers", "--runs", "2", "--steps", "4", "--top", "2", "--awp-steps", "1")
FEW: dict[str, tuple[str, ...]] = {
    "curvature": (*CURVED, "--images", "20", "--attack", "pgd-2", "--device", "cpu"),
    "landscape": ("--points", "3", "--directions", "2", "--images", "20", "--attack", "pgd-2", "--device", "cpu"),
}
NET = ("--model", "foreign_module:net")
ASKED = ("--data", "digits", "--norm", "linf", "--eps", "0.1")
both = pytest.mark.parametrize("command", list(FEW))


pytestmark = pytest.mark.usefixtures("here")


def content(file: Path) -> dict[str, Any]:
    """What a record says, without when and how fast it was made."""
    told: dict[str, Any] = json.loads(file.read_text())
    for name in ("time", "seconds", "measured"):
        told["provenance"].pop(name, None)
    for loss in told.get("losses", {}).values():
        loss.pop("seconds")
    return told


@both
def test_a_model_is_measured_and_its_record_says_what_it_is(command: str, here: Path) -> None:
    torch.save({"net": load_foreign(NET[1]).state_dict()}, here / "w.pt")
    done = flatrock(command, *NET, "--weights", "w.pt", "--normalize", "centered", *ASKED, *FEW[command])
    file = stored(done)
    assert file.parent == Path()
    assert file.name.startswith(f"{command}-foreign_module_net-digits-linf0.1-")
    about = json.loads(file.read_text())["provenance"]
    assert (about["model"], about["weights"], about["weights_entry"]) == ("foreign_module:net", "w.pt", "net")
    assert about["weights_sha256"] == hashlib.sha256((here / "w.pt").read_bytes()).hexdigest()
    assert about["normalize"] == {"source": "centered", "mean": [0.47], "std": [0.25]}
    assert about["data"] == "digits train, 20 of 1297 samples"
    assert not {"run", "recipe", "checkpoint", "epoch", "train_seed"} & set(about)
    assert "model foreign_module:net\n" in done.output
    assert "linf eps 0.1" in done.output
    assert "trained with seed" not in done.output
    assert list(here.glob(f"{command}*.png"))
    again = flatrock(command, file, "--out", "again")
    assert again.exit_code == 0, again.output
    assert "foreign_module:net" in again.output


def test_what_is_measured_is_the_loss_of_the_model(here: Path) -> None:
    curved = stored(flatrock("curvature", *NET, *ASKED, *FEW["curvature"]))
    record = CurvatureRecord.from_json(curved.read_text())
    seen = Landscape.from_file(stored(flatrock("landscape", *NET, *ASKED, *FEW["landscape"])))
    assert record.threat == seen.threat == {"norm": "linf", "eps": 0.1}
    assert record.settings["beta"] == 1297, "the training set"
    assert record.losses["clean"].loss == pytest.approx(seen.values["clean_loss"][0][1], rel=1e-5)
    assert record.losses["adversarial"].loss == pytest.approx(seen.middle, rel=0.02), "other random starts"
    assert record.losses["adversarial"].loss > record.losses["clean"].loss


def test_what_a_recipe_would_have_said_has_a_default(here: Path) -> None:
    record = CurvatureRecord.from_json(
        stored(flatrock("curvature", *NET, *ASKED, *CURVED, "--images", "10", "--device", "cpu")).read_text()
    )
    assert record.attack["name"] == "pgd-10"
    tested = flatrock("landscape", *NET, *ASKED, "--kind", "input", "--points", "3", "--images", "2")
    seen = Landscape.from_file(stored(tested))
    assert seen.axis == (-0.1, 0.0, 0.1), "as far as the threat reaches"
    assert seen.provenance["data"] == "digits test, 2 of 500 samples"


@both
def test_records_go_where_the_figures_go(command: str, here: Path) -> None:
    file = stored(flatrock(command, *NET, *ASKED, *FEW[command], "--on", "test", "--out", "a/b"))
    assert file.parent == Path("a")
    assert {p.name.split(".")[0].split("-")[0] for p in (here / "a").glob("*.png")} == {"b"}
    assert not list(here.glob(f"{command}*"))


@both
def test_an_interrupted_measurement_goes_on_and_ends_the_same(command: str, here: Path) -> None:
    words = (command, *NET, *ASKED, *FEW[command])
    whole = stored(flatrock(*words, "--out", "whole/figure"))
    with stopped(2):
        done = flatrock(*words)
    assert done.exit_code == 130
    assert "the same command with --resume goes on" in done.output
    (part,) = here.glob(f"{command}*.part")
    assert len(part.read_text().splitlines()) == 3
    file = stored(flatrock(*words, "--resume"))
    assert file.name == whole.name
    assert content(file) == content(whole)
    assert not part.exists()
    before = file.read_bytes()
    assert flatrock(*words, "--resume").exit_code == 0
    assert file.read_bytes() == before, "a finished one is read"


@both
def test_another_model_does_not_go_on_with_it(command: str, here: Path) -> None:
    words = (command, *ASKED, *FEW[command], "--resume")
    with stopped(2):
        flatrock(*words, *NET)
    (part,) = here.glob(f"{command}*.part")
    before = part.read_bytes()
    other = stored(flatrock(*words, "--model", "foreign_module:Shifted"))
    assert other.stem != part.stem
    assert stored(flatrock(*words, *NET, "--eps", "0.2")).stem not in (part.stem, other.stem)
    sys.modules.pop("foreign_module", None)
    (here / "foreign_module.py").write_text(MODULE.replace("nn.ReLU()", "nn.Tanh()"))
    told = "belongs to another measurement (different: clean answers); repeat its options, or delete it to start again"
    assert f"{part.name} {told}" in refusal(flatrock(*words, *NET))
    assert part.read_bytes() == before


@both
def test_a_finished_record_of_another_function_is_neither_taken_nor_lost(command: str, here: Path) -> None:
    words = (command, *NET, *ASKED, *FEW[command])
    file = stored(flatrock(*words))
    before = file.read_bytes()
    sys.modules.pop("foreign_module", None)
    (here / "foreign_module.py").write_text(MODULE.replace("nn.ReLU()", "nn.Tanh()"))
    told = f"{file.name} is a record of something else (different: clean answers); keep it under another name"
    assert told in refusal(flatrock(*words, "--resume"))
    assert file.read_bytes() == before
    assert stored(flatrock(*words)) == file
    assert file.read_bytes() != before


@both
def test_other_weights_of_a_factory_have_another_file(command: str, here: Path) -> None:
    words = (command, *NET, *ASKED, *FEW[command], "--resume")
    file = stored(flatrock(*words))
    before = file.read_bytes()
    sys.modules.pop("foreign_module", None)
    other = MODULE.replace("def net():\n", "def net():\n    torch.manual_seed(5)\n")
    (here / "foreign_module.py").write_text(other)
    assert stored(flatrock(*words)) != file
    assert file.read_bytes() == before


@both
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), "nothing to measure; name a run folder or checkpoint, or a model of your own with --model or --weights, "),
        (NET, "the measurement cannot start: - data: not given; "),
        ((*NET, "--data", "digits"), "- norm: not given; name the norm of the threat: linf, l2"),
        ((*NET, "--data", "digits", "--norm", "linf"), "- eps: not given; give the radius of the threat"),
        (
            (*NET, *ASKED, "--on", "held_out"),
            "- on: a model that is no run set no samples aside that are known",
        ),
        (("--model", "foreign_module:nett", "--data", "digit", "--norm", "l3", "--eps", "8/0"), "divides by zero"),
        (("--model", "resnet18", *ASKED), "weights: 'resnet18' has no weights of its own; give --weights FILE"),
        (("--model", "foreign_module:eleven", *ASKED), "has 11 classes, but 'digits' has 10"),
        (("--model", "foreign_module:sequence", *ASKED), "must return logits of shape"),
        ((*NET, *ASKED, "--num-classes", "11"), "has 10 classes, but num_classes says 11"),
        ((*NET, *ASKED, "--attack", "pdg-3"), "did you mean 'pgd'"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(
    command: str, given: tuple[str, ...], told: str, here: Path
) -> None:
    assert told in refusal(flatrock(command, *FEW[command], *given))
    assert not list(here.glob(f"{command}*"))


@both
def test_run_and_model_together_are_refused(command: str, run_folder: Path) -> None:
    before = sorted(run_folder.iterdir())
    done = flatrock(command, run_folder, *NET, "--eps", "0.1", *FEW[command])
    assert "leave out --model, --eps, which describe a model that is no run, or leave out the run" in refusal(done)
    assert sorted(run_folder.iterdir()) == before


@both
def test_a_record_stands_beside_a_model_if_both_were_asked_alike(command: str, run_folder: Path, here: Path) -> None:
    asked = ("--data", "digits", "--norm", "linf")
    words = (*FEW[command], "--on", "test", *(("--beta", "512") if command == "curvature" else ()))
    first = stored(flatrock(command, run_folder, *words, "--out", "run"))
    done = flatrock(command, first, *NET, *asked, "--eps", "0.2", *words, "--out", "both")
    assert stored(done).parent == Path()
    assert "tiny[a]" in done.output
    assert "foreign_module:net" in done.output
    before = set(here.iterdir())
    other = flatrock(command, first, *NET, *asked, "--eps", "0.1", *words, "--out", "both")
    assert "different threat" in refusal(other)
    assert set(here.iterdir()) == before, "refused before it is measured"


def test_a_network_that_is_there_already_is_planned_and_measured_in_double_precision(here: Path) -> None:
    (here / "foreign_module.py").write_text(MODULE + "\n\nready = net()\n")
    words = ("curvature", "--data", "digits", "--norm", "linf", "--eps", "0.1", *FEW["curvature"])
    double = (*words, "--precision", "double")
    first = stored(flatrock(*double, *NET))
    beside = stored(flatrock(*double, first, "--model", "foreign_module:ready"))
    one, two = (CurvatureRecord.from_json(file.read_text()) for file in (first, beside))
    assert one.compared == two.compared
    assert one.provenance["model"] != two.provenance["model"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("nn.Sequential(nn.Flatten(), nn.LazyLinear(10))", "the model has lazy layers without weights yet"),
        ("nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)", "frozen"),
        ("Noisy()", "at random"),
    ],
)
@both
def test_networks_that_cannot_be_measured(command: str, here: Path, body: str, told: str) -> None:
    noisy = "class Noisy(nn.Linear):\n    def forward(self, x):\n        y = x.flatten(1)\n"
    noisy += "        return super().forward(y + 0.5 * torch.rand_like(y))\n\n    def __init__(self):\n"
    noisy += "        super().__init__(64, 10)\n"
    (here / "foreign_module.py").write_text(f"{MODULE}\n\n{noisy}\n\ndef odd():\n    return {body}\n")
    said = refusal(flatrock(command, "--model", "foreign_module:odd", *ASKED, *FEW[command]))
    curved = {"frozen": "no trainable parameter", "at random": "Switch its randomness off"}
    assert (curved.get(told, told) if command == "curvature" else told) in said
    assert not list(here.glob(f"{command}*.json"))


@both
def test_beside_a_record_of_a_run_nothing_goes_into_its_folder(command: str, here: Path) -> None:
    """Also where the networks have different layers: there is no figure of them then."""
    asked = tuple(word for word in FEW[command] if word != "--no-layers")
    run = flatrock(
        "train", "digits_at", "--run-dir", "runs/at", "train.epochs=1", "train.max_steps=2", "--device", "cpu"
    )
    assert run.exit_code == 0, run.output
    beta = ("--beta", "100") if command == "curvature" else ()
    file = stored(flatrock(command, "runs/at", "--which", "last", "--on", "test", *asked, *beta))
    before = {p.name: p.stat().st_mtime_ns for p in (here / "runs/at").iterdir()}
    words = (*NET, "--data", "digits", "--norm", "linf", "--eps", "0.2", "--on", "test", *asked, *beta)
    done = flatrock(command, file, *words)
    assert stored(done).parent == Path()
    assert {p.name: p.stat().st_mtime_ns for p in (here / "runs/at").iterdir()} == before
    assert ("networks of different layers: no figure of them" in done.output) == (command == "curvature")
