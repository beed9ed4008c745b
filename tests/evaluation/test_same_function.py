"""What an evaluation is of: the function behind the weights, and the samples."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from flatrock.core.errors import StateError
from flatrock.core.files import sha256
from flatrock.core.guests import told_code
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate
from flatrock.models.small_cnn import DigitsCNN


class Scaled(nn.Module):
    """Weights do not tell its scale, nor its noise."""

    def __init__(self, scale: float = 1.0, noise: float = 0.0) -> None:
        super().__init__()
        with kept_global_rng(seed=Seed(0).child("net")):
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scale, self.noise, self.climbed = scale, noise, 0
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.climbed += x.requires_grad
        x = x + self.noise * torch.randn_like(x) if self.noise else x
        logits: Tensor = self.body(self.scale * x)
        return logits


def data() -> tuple[Tensor, Tensor]:
    x = torch.rand(40, 6, generator=Seed(1).generator())
    return x, Scaled()(x).argmax(1)


def asked(model: nn.Module, folder: Path, *, resume: bool) -> Result:
    return evaluate(model, *data(), Linf(0.05), attacks=["pgd-3"], journal=folder, resume=resume)


@pytest.mark.parametrize("scale", [0.1, 0.9])
def test_another_function_of_the_same_weights_is_not_resumed(tmp_path: Path, scale: float) -> None:
    asked(Scaled(), tmp_path / "j", resume=False)
    with pytest.raises(StateError, match=r"another evaluation \(different: clean answers\)"):
        asked(Scaled(scale), tmp_path / "j", resume=True)


def test_rounding_of_another_machine_is_resumed(tmp_path: Path) -> None:
    first, again = Scaled(), Scaled(1 + 1e-5)
    asked(first, tmp_path / "j", resume=False)
    asked(again, tmp_path / "j", resume=True)
    assert first.climbed - again.climbed == 3, "the attack's steps were not made again"


def test_a_network_that_answers_at_random_is_resumed(tmp_path: Path) -> None:
    first, again = Scaled(noise=0.3), Scaled(noise=0.3)
    result = asked(first, tmp_path / "j", resume=False)
    assert "E05" in {f.code for f in result.findings}
    asked(again, tmp_path / "j", resume=True)
    assert first.climbed - again.climbed == 3, "the attack's steps were not made again"


def test_a_journal_whose_answers_are_damaged_is_refused(tmp_path: Path) -> None:
    asked(Scaled(), tmp_path / "j", resume=False)
    known = tmp_path / "j/exam.json"
    known.write_text(json.dumps({**json.loads(known.read_text()), "clean answers": ["x"]}))
    with pytest.raises(StateError, match="damaged"):
        asked(Scaled(), tmp_path / "j", resume=True)


def test_results_of_the_same_samples_have_the_same_digest() -> None:
    x, y = data()

    def digest(x: Tensor, y: Tensor) -> str:
        return str(evaluate(Scaled(), x, y, Linf(0.05), attacks=["fgsm"]).provenance["samples_digest"])

    known = digest(x, y)
    assert len(known) == 64
    assert known == digest(x.clone(), y.clone())
    assert known != digest(x.flip(0), y.flip(0))
    assert known != digest(x, (y + 1) % 4)
    assert digest(x[::2], y[::2]) == digest(x[::2].clone(), y[::2].clone())


def test_strided_samples_and_ids_can_be_journaled(tmp_path: Path) -> None:
    x, y = data()
    ids = torch.arange(40)
    evaluate(Scaled(), x[::2], y[::2], Linf(0.05), attacks=["fgsm"], ids=ids[::2], journal=tmp_path / "j", resume=True)
    assert (tmp_path / "j/exam.json").is_file()


STEP = """
from torch import nn

class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 4)

    def forward(self, x):
        q = (x * 16).round() / 16
        return self.body({given})
"""


def stepping(folder: Path, given: str, patch: pytest.MonkeyPatch) -> nn.Module:
    """A network of a file that quantises its input."""
    file = folder / "steps.py"
    file.write_text(STEP.format(given=given))
    module = ModuleType("steps")
    module.__file__ = str(file)
    patch.setitem(sys.modules, "steps", module)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    with kept_global_rng(seed=Seed(0).child("net")):
        network: nn.Module = module.Steps()
    return network.eval()


def test_other_code_whose_clean_answers_are_the_same_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A straight-through estimator changes gradients alone."""
    x = torch.randint(0, 17, (40, 6), generator=Seed(1).generator()) / 16
    masked = stepping(tmp_path, "q", monkeypatch)
    question: dict[str, Any] = {"y": masked(x).argmax(1), "threat": Linf(0.2), "attacks": ["pgd-3"], "doubt": False}
    first = evaluate(masked, x, **question, journal=tmp_path / "j")
    digest = sha256((tmp_path / "steps.py").read_bytes())
    assert first.provenance["model_code"] == [{"file": "steps.py", "sha256": digest}]
    through = stepping(tmp_path, "x + (q - x).detach()", monkeypatch)
    assert torch.equal(through(x), masked(x))
    with pytest.raises(StateError, match=r"another evaluation \(different: model_code\)"):
        evaluate(through, x, **question, journal=tmp_path / "j", resume=True)
    (tmp_path / "j.json").write_text(first.to_json())
    shutil.rmtree(tmp_path / "j")
    with pytest.raises(StateError, match=r"another model with these weights \(different: model_code\)"):
        evaluate(through, x, **question, journal=tmp_path / "j", resume=True)
    assert evaluate(through, x, **question).robust < first.robust
    again = evaluate(stepping(tmp_path, "q", monkeypatch), x, **question, journal=tmp_path / "j", resume=True)
    assert again.to_json() == first.to_json()


def test_torch_s_own_layers_have_no_code_to_tell() -> None:
    x, y = data()
    found = evaluate(nn.Sequential(nn.Linear(6, 4)).eval(), x, y, Linf(0.05), attacks=["fgsm"])
    assert "model_code" not in found.provenance


class Mine(nn.Linear):
    """A layer of one's own."""


def test_own_layers_are_found_where_torch_derives_from_them() -> None:
    this = {"file": Path(__file__).name, "sha256": sha256(Path(__file__).read_bytes())}
    for network in (Mine(3, 2), nn.Sequential(nn.ReLU(), Mine(3, 2)), weight_norm(Mine(3, 2))):
        assert told_code(network) == {"model_code": [this]}
    for ours in (weight_norm(nn.Linear(3, 2)), nn.DataParallel(nn.Linear(3, 2)), DigitsCNN(num_classes=10)):
        assert told_code(ours, None) == {}, "what comes with torch, Python and flatrock is nobody's own"
