"""`flatrock certify` of models that are not flatrock's: what is written, what is refused, and what goes on."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from command_cases import flatrock, read_again, refusal, stored
from foreign_cases import MODULE
from interrupted import stopped

from flatrock.diagnostics.certificate import Certificate
from flatrock.workflows.foreign import load_foreign

FEW = ("--sigma", "0.25", "--n0", "20", "--n", "100", "--limit", "6", "--device", "cpu")
NET = ("certify", "--model", "foreign_module:net", "--data", "digits")


pytestmark = pytest.mark.usefixtures("here")


def test_a_factory_is_certified_and_the_certificate_says_what_it_is(here: Path) -> None:
    torch.save(load_foreign("foreign_module:net").state_dict(), here / "w.pt")
    done = flatrock(*NET, "--weights", "w.pt", "--normalize", "centered", *FEW, "--radius", "0.1")
    file = stored(done)
    assert file.parent == Path()
    assert file.name.startswith("certificate-foreign_module_net-digits-")
    assert file.name.endswith("-sigma0.25-n20+100-alpha0.001-samples6-seed0.json")
    about = Certificate.from_json(file.read_text()).provenance
    assert about["model"] == "foreign_module:net"
    assert about["weights"] == "w.pt"
    assert about["weights_sha256"] == hashlib.sha256((here / "w.pt").read_bytes()).hexdigest()
    assert about["normalize"]["source"] == "centered"
    assert about["data"] == "digits test, 6 of 500 samples"
    assert not {"recipe", "run", "trained_with"} & set(about)
    assert "foreign_module:net, sigma 0.25: certified accuracy" in done.output
    assert "it is not known whether it was trained on noise of sigma 0.25" in done.output
    assert "normalisation centered: mean (0.47), std (0.25)" in done.output
    assert {p.suffix for p in here.glob("certificate-*")} == {".json", ".tsv", ".png"}


def test_out_names_the_file_and_takes_the_place_of_a_certificate_only(here: Path) -> None:
    file = stored(flatrock(*NET, *FEW, "--out", "a/mine.json"))
    assert file == Path("a/mine.json")
    assert stored(flatrock(*NET, *FEW, "--out", "a/mine.json")) == file
    (here / "keep.json").write_text("{}")
    (here / "other.tsv").write_text("mine")
    (here / "notes.part").write_text("mine")
    for name, told in (
        (
            "notes.json",
            "out: notes.part exists and is no unfinished certificate; it is left alone, choose another name",
        ),
        ("keep.json", "out: keep.json exists and is no certificate; it is left alone, choose another name"),
        ("other.json", "out: other.tsv exists, without a certificate; it is left alone, choose another name"),
        ("mine.txt", "out: mine.txt must end in .json"),
    ):
        assert told in refusal(flatrock(*NET, *FEW, "--out", name))
    assert (here / "keep.json").read_text() == "{}"
    assert (here / "notes.part").read_text() == (here / "other.tsv").read_text() == "mine"
    assert (here / "other.tsv").read_text() == "mine"


def test_an_interrupted_certification_goes_on_and_ends_the_same(here: Path) -> None:
    whole = json.loads(stored(flatrock(*NET, *FEW, "--out", "whole.json")).read_text())
    with stopped(2):
        done = flatrock(*NET, *FEW)
    assert done.exit_code == 130
    assert "the same command with --resume goes on" in done.output
    (part,) = here.glob("*.part")
    assert len(part.read_text().splitlines()) == 3
    begun = [json.loads(line)["seconds"] for line in part.read_text().splitlines()[1:]]
    file = stored(flatrock(*NET, *FEW, "--resume"))
    found = json.loads(file.read_text())
    assert found["counts"] == whole["counts"]
    assert found["seconds"][:2] == begun, "what was on disk was not computed again"
    assert not part.exists()
    before = file.read_text()
    assert read_again(flatrock(*NET, *FEW, "--resume")) == file
    assert file.read_text() == before, "a finished one is read"


def test_which_names_the_entry_of_the_file(here: Path) -> None:
    plain, other = (load_foreign("foreign_module:net").state_dict() for _ in range(2))
    other = {name: 2 * value if value.is_floating_point() else value for name, value in other.items()}
    torch.save({"model": plain, "ema": other}, here / "w.pt")
    entries = []
    for words in ((), ("--which", "model"), ("--which", "ema")):
        file = stored(flatrock(*NET, "--weights", "w.pt", "--normalize", "none", *FEW, *words))
        entries.append((Certificate.from_json(file.read_text()).provenance["weights_entry"], file))
    assert [entry for entry, _ in entries] == ["ema", "model", "ema"]
    assert entries[0][1] == entries[2][1] != entries[1][1]


@pytest.mark.parametrize("finished", [False, True])
def test_another_model_does_not_go_on_with_it(here: Path, finished: bool) -> None:
    """Neither other weights nor another function with the same weights, in the same file."""
    to = ("--out", "mine.json")
    with stopped(100 if finished else 2):
        flatrock(*NET, *FEW, *to)
    mine = here / ("mine.json" if finished else "mine.part")
    before = mine.read_bytes()
    edited = MODULE.replace("nn.ReLU()", "nn.Tanh()")
    for text, other, told in (
        (MODULE, "Shifted", "model, model_code"),
        (edited, "net", "clean answers"),
    ):
        sys.modules.pop("foreign_module", None)
        (here / "foreign_module.py").write_text(text)
        done = flatrock("certify", "--model", f"foreign_module:{other}", "--data", "digits", *FEW, *to, "--resume")
        said = f"mine.json is a record of something else (different: {told})"
        assert (said if finished else f"mine.part belongs to another measurement (different: {told})") in refusal(done)
        assert mine.read_bytes() == before


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            (),
            "nothing to certify; name a run folder or checkpoint, or a model of your own",
        ),
        (("--model", "foreign_module:net"), "the certification cannot start: - data: not given; name a data set: "),
        (("--model", "resnet18", "--data", "cifar"), "weights: 'resnet18' has no weights of its own"),
        (("--model", "foreign_module:eleven", "--data", "digits"), "has 11 classes, but 'digits' has 10"),
        (("--model", "foreign_module:net", "--data", "digits", "--num-classes", "11"), "num_classes says 11"),
        (("--model", "foreign_module:sequence", "--data", "digits"), "must return logits of shape"),
        (("--model", "foreign_module:large", "--data", "digits"), "does not take inputs [2, 1, 8, 8] of 'digits'"),
        (("--model", "foreign_module:net", "--data", "digits", "--radius", "3"), "radius 3 is out of reach"),
    ],
)
def test_what_cannot_work_is_said_before_any_vote(here: Path, given: tuple[str, ...], told: str) -> None:
    assert told in refusal(flatrock("certify", *given, *FEW))
    assert not list(here.glob("certificate-*"))


def test_run_and_model_together_are_refused(run_folder: Path) -> None:
    done = flatrock("certify", run_folder, "--weights", "w.pt", "--out", "x.json", *FEW)
    assert "leave out --weights, --out, which describe a model that is no run, or leave out the run" in refusal(done)
