"""Models that flatrock did not train: evaluated like a run, with everything that does not fit refused first."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foreign_cases import noise, outputs
from foreign_nets import GreyCnn, WideNet, randomised
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, DataError, FlatrockError, ModelError, StateError
from flatrock.core.progress import Silent
from flatrock.core.records import Result
from flatrock.data.dataset import Dataset
from flatrock.models.catalog import NORMALIZATIONS, create_model
from flatrock.workflows.foreign import evaluate_foreign, store_foreign

DIGITS: dict[str, Any] = {"data": "digits", "norm": "linf", "eps": "1/8", "attacks": ["fgsm", "pgd-3"], "limit": 40}


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def grey(monkeypatch: pytest.MonkeyPatch, here: Path) -> Path:
    """A recognised network and a test set of noise on which it is right."""
    net = randomised(GreyCnn()).float()
    x = noise(60, 1, 28, 28)
    data = Dataset("mnist", x, outputs(net, x).argmax(1), 10)
    monkeypatch.setattr("flatrock.workflows.foreign_model.load_data", lambda name, split, folder=None: data)
    torch.save({"model": net.state_dict(), "ema": net.state_dict()}, here / "grey.pt")
    return here / "grey.pt"


class Told(Silent):
    def __init__(self, interrupt_after: int = 10**6) -> None:
        self.lines: list[str] = []
        self.left = interrupt_after

    def say(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, units: int, note: str = "") -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_result_says_where_its_model_comes_from(grey: Path) -> None:
    told = Told()
    result = evaluate_foreign(
        weights=grey, data="mnist", norm="linf", eps="1/10", attacks=["fgsm"], normalize="none", progress=told
    )
    assert result.clean == 1.0
    assert result.threat == {"norm": "linf", "eps": 0.1}
    about = result.provenance
    digest = hashlib.sha256(grey.read_bytes()).hexdigest()
    assert (about["model"], about["converter"]) == ("mnist_cnn", "SmallCNN of TRADES")
    assert (about["weights"], about["weights_sha256"]) == ("grey.pt", digest)
    assert (about["weights_entry"], about["weights_averaged"], about["weights_others"]) == ("ema", True, ["model"])
    assert about["normalize"] == {"source": "none", "mean": None, "std": None}
    assert about["data"] == "mnist test, 60 of 60 samples"
    assert told.lines[0] == "model mnist_cnn, converted from the SmallCNN of TRADES"
    assert "entry 'ema' (averaged weights); also there, for --which: model" in told.lines[1]
    path = store_foreign(result)
    assert re.fullmatch(r"result-mnist_cnn-mnist-linf-0\.1-fgsm-n60-seed0-[0-9a-f]{8}\.json", str(path))
    assert Result.from_json(path.read_text()).provenance["weights_sha256"] == digest


@pytest.mark.parametrize("out", [None, Path("deep/er/mine.json")])
def test_interrupted_evaluation_goes_on_and_ends_the_same(grey: Path, here: Path, out: Path | None) -> None:
    options: dict[str, Any] = {
        **{"weights": grey, "data": "mnist", "norm": "linf", "eps": 0.1, "attacks": ["fgsm", "pgd-2"]},
        **{"batch_size": 16, "normalize": "none", "out": out, "journal": True, "keep_adversarial": True},
    }
    whole = evaluate_foreign(**{**options, "journal": False})
    with pytest.raises(KeyboardInterrupt):
        evaluate_foreign(**options, progress=Told(interrupt_after=3))
    (part,) = here.rglob("*.part")
    assert part.parent == (here if out is None else here / "deep/er")
    chunks = sorted(part.glob("chunk-*"))
    assert chunks
    stamps = [c.stat().st_mtime_ns for c in chunks]
    resumed = evaluate_foreign(**options, resume=True)
    assert [c.stat().st_mtime_ns for c in chunks] == stamps, "what was computed is not computed again"
    assert resumed.flags.keys() == whole.flags.keys()
    assert all(torch.equal(resumed.flags[k], whole.flags[k]) for k in whole.flags)
    target = store_foreign(resumed, out)
    assert not part.exists()
    assert target.with_name(f"{target.stem}-adversarial.safetensors").is_file()
    assert Result.from_json(target.read_text()).robust == whole.robust


def test_factory_on_real_data() -> None:
    result = evaluate_foreign("foreign_module:net", **DIGITS)
    assert result.n == 40
    assert list(result.per_attack) == ["fgsm", "pgd-3"]
    assert result.provenance["weights_sha256"] is None
    assert result.provenance["normalize"]["source"] == "none before the factory's network"
    name = r"result-foreign_module_net-digits-linf-0\.125-fgsm\+pgd-3-n40-seed0-[0-9a-f]{8}\.json"
    assert re.fullmatch(name, str(store_foreign(result)))


def test_state_that_is_no_tensor_does_not_keep_a_network_from_being_resumed(here: Path) -> None:
    options: dict[str, Any] = {**DIGITS, "journal": True, "batch_size": 20}
    with pytest.raises(KeyboardInterrupt):
        evaluate_foreign("foreign_module:noted", **options, progress=Told(interrupt_after=1))
    assert evaluate_foreign("foreign_module:noted", **options, resume=True).n == 40


def test_few_samples_of_data_without_a_normalisation_of_their_own(here: Path) -> None:
    torch.save(create_model("digits_cnn").state_dict(), here / "own.pt")
    result = evaluate_foreign("digits_cnn", weights="own.pt", **{**DIGITS, "limit": 3})
    assert result.n == 3
    assert result.provenance["converter"] == ""


def needing_cifar10(file: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, kept in a file, and one-coloured images; it is right on all that are normalised as CIFAR-10 is."""
    mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) for v in NORMALIZATIONS["cifar10"])
    x = noise(60, 3, 1, 1).expand(-1, -1, 32, 32).contiguous()
    net = randomised(WideNet(10, 1)).float()
    net.fc.bias.data -= outputs(net, (x - mean) / std).mean(0)  # no class is the favourite
    torch.save(net.state_dict(), file)
    y = outputs(net, (x - mean) / std).argmax(1)
    assert len(set(y.tolist())) > 3
    return net, x, y


def test_normalisation_that_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    net, x, y = needing_cifar10("wide.pt")
    options: dict[str, Any] = {"weights": "wide.pt", "norm": "l2", "eps": 0.1, "attacks": ["fgsm"]}

    def on(name: str, **more: Any) -> Result:
        data = Dataset(name, x, y, 10)
        monkeypatch.setattr("flatrock.workflows.foreign_model.load_data", lambda name, split, folder=None: data)
        return evaluate_foreign(**options, data=name, **more)

    with pytest.raises(ConfigError, match=r"right on \d+ of 60 samples, but on 60 with that of 'cifar10'; say --norm"):
        on("cifar10")
    # The normalisation of CIFAR-100 is nearly the same: on its data it is the one to propose.
    with pytest.raises(ConfigError, match=r"but on [56]\d with that of 'cifar100'; say --normalize cifar100, or"):
        on("cifar100")
    with pytest.raises(ConfigError, match=r"but on 60 with that of 'cifar10'"):
        on("svhn")
    assert on("cifar10", normalize="cifar10").clean == 1.0
    assert on("cifar10", normalize="none").clean < 0.9
    # The same network from a factory that forgot it.
    monkeypatch.setitem(sys.modules, "forgetful", SimpleNamespace(make=lambda: net))
    options = {**options, "model": "forgetful:make", "weights": None}
    with pytest.raises(
        ConfigError, match=r"inputs are not normalised, .* say --normalize cifar10, or --normalize none"
    ):
        on("cifar10")
    assert on("cifar10", normalize="cifar10").clean == 1.0
    assert on("cifar10", normalize="none").clean < 0.9


@pytest.mark.parametrize("made", ["weights", "factory"])
def test_a_wrong_normalisation_that_was_asked_for_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, here: Path, made: str
) -> None:
    net, x, y = needing_cifar10("wide.pt")
    data = Dataset("cifar10", x, y, 10)
    monkeypatch.setattr("flatrock.workflows.foreign_model.load_data", lambda name, split, folder=None: data)
    monkeypatch.setitem(sys.modules, "forgetful", SimpleNamespace(make=lambda: net))
    model = {"weights": "wide.pt"} if made == "weights" else {"model": "forgetful:make"}
    options: dict[str, Any] = {**model, "data": "cifar10", "norm": "l2", "eps": 0.1, "attacks": ["fgsm"], "doubt": True}

    def told(normalize: str) -> tuple[int, list[str]]:
        result = evaluate_foreign(**options, normalize=normalize)
        return round(60 * result.clean), [f.message for f in result.findings if f.code == "E19"]

    assert told("cifar10") == (60, [])
    assert told("cifar100")[1] == [], "a similar one makes no difference worth a word"
    for wrong in ("none", "symmetric"):
        right, (message,) = told(wrong)
        assert right < 50
        assert message.startswith(f"the model is right on {right} of 60 clean samples, but on 60 with ")
        assert message.endswith(" the normalisation of 'cifar10' instead")
    del options["doubt"]
    assert told("none")[1] == []


def test_a_network_without_logits_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.flatten(1)), x

    monkeypatch.setitem(sys.modules, "pair", SimpleNamespace(make=lambda: Pair(64, 10)))
    with pytest.raises(ModelError, match="let it return the logits alone"):
        evaluate_foreign("pair:make", **{**DIGITS, "normalize": "none", "doubt": True})


def test_a_network_that_refuses_other_inputs_is_evaluated(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    sizes: list[int] = []

    class Strict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            assert x.min() >= 0 and x.max() <= 1
            return 20 * x.flatten(1)[:, :10]

    monkeypatch.setitem(sys.modules, "strict", SimpleNamespace(make=Strict))
    options = {**DIGITS, "batch_size": 7, "normalize": "none", "doubt": True}
    result = evaluate_foreign("strict:make", **options)
    assert "E19" not in [finding.code for finding in result.findings]
    assert max(sizes) <= 7


def test_a_normalisation_that_weights_bring_is_not_doubted(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    net = create_model("digits_cnn", normalize=([0.9], [0.5])).eval()
    torch.save(net.state_dict(), here / "own.pt")
    monkeypatch.setattr("flatrock.workflows.foreign.other_normalization", lambda *_, **__: pytest.fail("tried"))
    result = evaluate_foreign("digits_cnn", weights="own.pt", **{**DIGITS, "doubt": True})
    assert result.provenance["normalize"]["source"] == "stored with the weights"


def test_faults_of_the_options_come_together(here: Path) -> None:
    with pytest.raises(ConfigError) as error:
        evaluate_foreign(
            "foreign_module:nett",
            weights="no.pt",
            data="cifar11",
            norm="linff",
            eps="8/0",
            num_classes=0,
            normalize="cifar",
            attacks=["pdg-20"],
            precision="quarter",
            device="gpu",
            out=Path("result.txt"),
        )
    text = str(error.value)
    assert len(error.value.faults) == 11
    for part in (
        *(
            "unknown factory 'nett'",
            "there is no file no.pt",
            "'cifar11'; known",
            "did you mean 'linf'",
            "divides by zero",
        ),
        *(
            ">= 2, got 0",
            "did you mean 'cifar10'",
            "did you mean 'pgd'",
            "'quarter'",
            "unknown device 'gpu'",
            "in .json",
        ),
    ):
        assert part in text, part
    with pytest.raises(ConfigError, match=r"data: not given[\s\S]*norm: not given[\s\S]*eps: not given"):
        evaluate_foreign("foreign_module:net")
    with pytest.raises(ConfigError, match=r"eps: Linf eps must lie in .* write 8/255, not 8"):
        evaluate_foreign("foreign_module:net", **{**DIGITS, "eps": 8})


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b"weights"])
def test_out_does_not_take_the_place_of_anything_but_a_result(here: Path, content: bytes) -> None:
    (here / "w.json").write_bytes(content)
    with pytest.raises(ConfigError, match="exists and is no result of an evaluation; it is left alone"):
        evaluate_foreign("foreign_module:net", **DIGITS, out=Path("w.json"))
    assert (here / "w.json").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("eleven", ConfigError, "foreign_module:eleven has 11 classes, but 'digits' has 10; name the --data"),
        ("large", ModelError, r"large does not take inputs \[2, 1, 8, 8\] of 'digits': RuntimeError"),
        ("double", ModelError, "float64 weights but the inputs are torch.float32"),
        ("sequence", ModelError, "must return logits of shape"),
    ],
)
def test_networks_that_do_not_suit_the_data(name: str, kind: type[FlatrockError], text: str) -> None:
    with pytest.raises(kind, match=text):
        evaluate_foreign(f"foreign_module:{name}", **DIGITS)


def test_classes_asked_for_and_data_that_are_not_there(here: Path) -> None:
    with pytest.raises(ConfigError, match="has 10 classes, but num_classes says 11; leave --num-classes out"):
        evaluate_foreign("foreign_module:net", **DIGITS, num_classes=11)
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz"):
        evaluate_foreign("foreign_module:net", **{**DIGITS, "data": "cifar10"}, data_folder=here)
    (here / "damaged.pt").write_bytes(b"<html>")
    with pytest.raises(StateError, match="web page"):
        evaluate_foreign("foreign_module:net", **DIGITS, weights="damaged.pt")


def test_the_first_samples_have_a_file_of_their_own(here: Path) -> None:
    first = evaluate_foreign("foreign_module:net", **{**DIGITS, "attacks": ["fgsm"]}, first=True)
    assert first.ids is None, "a sample is its row"
    assert first.provenance["data"].startswith("digits test, the first 40 of ")
    assert str(store_foreign(first)).startswith("result-foreign_module_net-digits-linf-0.125-fgsm-first40-seed0-")
    with pytest.raises(ConfigError, match="such as limit 1000"):
        evaluate_foreign("foreign_module:net", **{**DIGITS, "limit": None}, first=True)
