"""`flatrock eval` of models that are not flatrock's, driven as a user drives it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_cases import flatrock, result_of
from foreign_cases import noise, outputs
from foreign_nets import GreyCnn, randomised

from flatrock.data.dataset import Dataset
from flatrock.workflows.foreign import load_foreign

THREAT = ("--norm", "linf", "--eps", "8/255", "--device", "cpu")
ON_DIGITS = ("--data", "digits", "--limit", "30", "--attacks", "fgsm,pgd-2", *THREAT)


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def grey(monkeypatch: pytest.MonkeyPatch, here: Path) -> Path:
    """Weights of a network that is recognised, and test images on which it is right."""
    net = randomised(GreyCnn()).float()
    x = noise(40, 1, 28, 28)
    data = Dataset("mnist", x, outputs(net, x).argmax(1), 10)
    monkeypatch.setattr("flatrock.workflows.foreign_model.load_data", lambda name, split, folder=None: data)
    torch.save({"model_state_dict": net.state_dict(), "ema": net.state_dict()}, here / "grey.pt")
    return here / "grey.pt"


def test_factory_in_the_current_folder(here: Path) -> None:
    done = flatrock("eval", "--model", "foreign_module:net", "--keep-adversarial", *ON_DIGITS)
    result = result_of(done)
    (kept,) = here.glob("*-adversarial.safetensors")
    assert f"\nwrote {kept.name}\n" in done.output
    assert "worst case" in done.output
    assert "digits test, 30 of 500 samples; linf eps 0.03137" in done.output
    assert "foreign_module:net" in done.output
    assert (result.n, result.threat["eps"]) == (30, 8 / 255)
    assert result.provenance["model"] == "foreign_module:net"
    (file,) = here.glob("result*.json")
    assert file.name.startswith("result-foreign_module_net-digits-linf-0.0313725-fgsm+pgd-2-n30-seed0-")


def test_several_devices_share_a_network_of_the_current_folder(here: Path) -> None:
    """Their processes find its module, too, though the folder is no place of Python's for the command `flatrock`."""
    words = ("eval", "--model", "foreign_module:Shifted", *ON_DIGITS, "--batch-size", "8", "--device")
    assert str(here) not in sys.path
    one, two = (result_of(flatrock(*words, device, "--out", f"{device}.json")) for device in ("cpu", "cpu,cpu"))
    assert all(torch.equal(one.flags[name], two.flags[name]) for name in one.flags)
    assert two.provenance["devices"] == ["cpu", "cpu"]


def test_factory_with_weights_normalisation_and_a_place_to_write(here: Path) -> None:
    net = load_foreign("foreign_module:net")
    torch.save({"net": {f"module.{k}": v for k, v in net.state_dict().items()}, "epoch": 7}, here / "w[a].pt")
    words = ("--weights", "w[a].pt", "--normalize", "centered", "--out", "a/b.json", *ON_DIGITS)
    done = flatrock("eval", "--model", "foreign_module:net", *words)
    result = result_of(done)
    assert "weights w[a].pt, sha256 " in done.output
    assert "normalisation centered: mean (0.47), std (0.25)\n" in done.output
    assert done.output.endswith("wrote a/b.json\n")
    assert result.provenance["normalize"] == {"source": "centered", "mean": [0.47], "std": [0.25]}
    unfit = flatrock("eval", "--model", "foreign_module:eleven", *words)
    assert unfit.exit_code == 2
    assert "misshapen (2): 1.weight is [16, 64], not [11, 64]; 1.bias is [16], not [11]" in unfit.output


def test_weights_alone_are_recognised(grey: Path, here: Path) -> None:
    done = flatrock(
        "eval",
        "--weights",
        grey,
        "--data",
        "mnist",
        "--normalize",
        "none",
        "--attacks",
        "fgsm",
        "--out",
        "r.json",
        *THREAT,
    )
    result = result_of(done)
    assert "model mnist_cnn, converted from the SmallCNN of TRADES\n" in done.output
    assert "entry 'ema' (averaged weights); also there, for --which: model_state_dict\n" in done.output
    assert "normalisation none\n" in done.output
    assert result.clean == 1.0
    assert result.provenance["converter"] == "SmallCNN of TRADES"
    assert (here / "r.json").is_file()
    assert not (here / "r.part").exists()
    again = flatrock(
        *("eval", "--model", "mnist_cnn", "--weights", grey, "--which", "model_state_dict", "--num-classes", "10"),
        *("--data", "mnist", "--normalize", "none", "--attacks", "fgsm", "--out", "r.json", *THREAT),
    )
    assert result_of(again).provenance["weights_entry"] == "model_state_dict"


def test_interrupted_evaluation_goes_on(grey: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[Any] = ["eval", "--weights", grey, "--data", "mnist", "--normalize", "none", "--attacks", "fgsm,pgd-2"]
    words += ["--batch-size", "8", "--out", "r.json", "--no-doubt", *THREAT]
    whole = result_of(flatrock(*words[:-4], "--out", "whole.json", *THREAT))

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flatrock.cli.evaluate.TerminalProgress.advance", interrupt)
        stopped = flatrock(*words)
    assert stopped.exit_code == 130
    assert "the same command with --resume goes on" in stopped.output
    assert len(list((here / "r.part").glob("chunk-*"))) == 1
    resumed = result_of(flatrock(*words, "--resume"))
    assert all(torch.equal(resumed.flags[k], whole.flags[k]) for k in whole.flags)
    assert not (here / "r.part").exists()


def test_run_and_model_together_are_refused(run_folder: Path) -> None:
    before = sorted(run_folder.iterdir())
    done = flatrock("eval", run_folder, "--model", "resnet18", "--eps", "8/255", "--num-classes", "10")
    assert done.exit_code == 2
    assert "leave out --model, --num-classes, which describe a model that is no run" in done.output
    assert sorted(run_folder.iterdir()) == before


def test_nothing_to_evaluate() -> None:
    done = flatrock("eval")
    assert done.exit_code == 2
    assert "nothing to evaluate; name a run folder or checkpoint, or a model of your own" in done.output


def test_all_faults_are_reported_at_once(here: Path) -> None:
    (here / "keep.json").write_text("mine")
    done = flatrock(
        *(
            "eval",
            "--model",
            "foreign_module:needed",
            "--weights",
            "no.pt",
            "--data",
            "cifar",
            "--norm",
            "l3",
            "--eps",
            "8",
        ),
        *(
            "--normalize",
            "cifar9",
            "--num-classes",
            "1",
            "--attacks",
            "pdg,fgsmm",
            "--precision",
            "low",
            "--device",
            "tpu",
        ),
        *("--out", "keep.json"),
    )
    assert done.exit_code == 2
    lines = done.output.splitlines()
    assert lines[0] == "error: the evaluation cannot start:"
    options = [
        "model",
        "weights",
        "num_classes",
        "normalize",
        "data",
        "norm",
        "attacks",
        "attacks",
        "precision",
        "device",
    ]
    assert [line.split(":")[0].removeprefix("  - ") for line in lines[1:]] == [*options, "out"]
    assert (here / "keep.json").read_text() == "mine"


def test_pickled_model_is_refused_with_the_way_out(here: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), here / "whole.pt")
    done = flatrock("eval", "--weights", "whole.pt", "--data", "digits", *THREAT)
    assert done.exit_code == 2
    assert "would run code from the file, so it is refused" in done.output
    assert 'torch.load("whole.pt"' in done.output


def test_checkpoint_of_a_run_as_weights_is_sent_the_right_way(run_folder: Path) -> None:
    path = run_folder / "best.safetensors"
    done = flatrock("eval", "--model", "digits_cnn", "--weights", path, "--data", "digits", *THREAT)
    assert done.exit_code == 2
    assert f"without --weights, as in `flatrock eval {shlex.quote(str(path))}`" in done.output


def test_a_result_in_the_place_of_another_is_told(here: Path) -> None:
    words = ("eval", "--model", "foreign_module:net", "--data", "digits", "--limit", "20", "--attacks", "fgsm")
    said = ["--norm", "linf", "--device", "cpu", "--out", "r.json", "--eps"]
    assert "replaced" not in flatrock(*words, *said, "0.1").output
    assert "replaced" not in flatrock(*words, *said, "0.1").output, "the same once more"
    refused = flatrock(*words, *said, "0.2", "--resume")
    assert refused.exit_code == 2
    assert "r.json is the result of another evaluation (different: eps); repeat its options, choose" in refused.output
    assert "r.json is there already" in flatrock(*words, *said, "0.1", "--resume").output
    done = flatrock(*words, *said, "0.2")
    assert "replaced the result of another evaluation (different: eps)\n" in done.output
    assert result_of(done).threat["eps"] == 0.2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nets:make"], "nets:make is no run; a network of your own is named by an option: --model nets:make"),
        (["nets"], "there is no run nets; a network of nets.py is named --model nets:FUNCTION"),
        (["nets.py"], "nets.py is no run; a network of it is named --model nets:FUNCTION"),
        (["w.pt"], "w.pt is no run, whose checkpoints are .safetensors; weights are named --weights w.pt"),
        (["--model", "nets"], "model: 'nets' is a file here and no network; name what in it makes one, nets:FUNCTION"),
        (["--model", "nets.py"], "model: 'nets.py' is a file here and no network; name what in it makes one, nets:FUN"),
        (["--model", "nets.py:make"], "model: 'nets.py:make' begins with a file, not a module; write nets:make"),
        (
            ["--model", "deep/nets.py:make"],
            "begins with a file, not a module; write deep.nets:make",
        ),
    ],
)
@pytest.mark.parametrize("command", ["eval", "landscape", "curvature"])
def test_a_network_that_is_named_almost_right(here: Path, command: str, words: list[str], said: str) -> None:
    (here / "deep").mkdir()
    for file in ("nets.py", "deep/nets.py", "w.pt"):
        (here / file).write_text("def make(): ...")
    done = flatrock(command, *words, "--data", "digits")
    assert done.exit_code == 2
    assert said in done.output
    assert "is a run" not in done.output


def test_norms_may_be_spelled_as_elsewhere(here: Path) -> None:
    words = ("eval", "--model", "foreign_module:net", *ON_DIGITS[:4], "--attacks", "fgsm", "--device", "cpu", "--eps")
    assert result_of(flatrock(*words, "8/255", "--norm", "Linf")).threat["norm"] == "linf"
    done = flatrock(*words, "0.1,0.2", "--norm", "L2")
    assert result_of(done).threat["norm"] == "l2"
    assert [f.name.split("-fgsm")[0] for f in sorted(here.glob("*-l2-*.json"))] == [
        f"result-foreign_module_net-digits-l2-{eps}" for eps in (0.1, 0.2)
    ]
