"""Where results of models that flatrock did not train lie: none takes the place of another without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatrock.core.errors import StateError
from flatrock.core.progress import Silent
from flatrock.core.records import Result
from flatrock.evaluation.exam import Exam
from flatrock.models.catalog import create_model
from flatrock.workflows.evaluate import write_result
from flatrock.workflows.foreign import evaluate_foreign, store_foreign
from flatrock.workflows.replaced import adversarial_file

DIGITS: dict[str, Any] = {"data": "digits", "norm": "l2", "eps": 0.3, "attacks": ["fgsm"], "limit": 20}
MADE = "from torch import nn, manual_seed, Tensor\n\ndef make() -> nn.Module:\n    manual_seed({seed})\n{body}"
PLAIN = "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()\n"
SCALED = """    return Scaled(nn.Flatten(), nn.Linear(64, 10)).eval()

class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)
"""

pytestmark = pytest.mark.usefixtures("here")


def write(here: Path, name: str, *, seed: int = 0, body: str = PLAIN) -> str:
    (here / f"{name}.py").write_text(MADE.format(seed=seed, body=body))
    return f"{name}:make"


class Ends(Silent):
    def advance(self, units: int, note: str = "") -> None:
        raise KeyboardInterrupt


def asked(model: str | None, **options: Any) -> tuple[Result, Path]:
    result = evaluate_foreign(model, **{**DIGITS, **options}, journal=True)
    return result, store_foreign(result, options.get("out"))


def test_the_name_tells_models_apart_that_have_one_name(here: Path) -> None:
    net = create_model("digits_cnn")
    more = {k: v + 0.01 for k, v in net.state_dict().items()}
    torch.save({"ema": net.state_dict(), "model": more}, here / "two.pt")
    files = [asked("digits_cnn", weights="two.pt", which=which)[1] for which in ("ema", "model")]
    files += [asked("digits_cnn", weights="two.pt", normalize=shift)[1] for shift in ("none", "centered")]
    files += [asked(write(here, "changing", seed=seed))[1] for seed in (0, 1)]
    # ema is what auto takes, and none the normalisation where nothing else is said.
    assert files[0] == files[2]
    assert len(set(files)) == 5
    assert all("-digits-l2-0.3-fgsm-n20-seed0-" in file.name for file in files)


def test_the_name_tells_data_apart_that_have_one_name(here: Path) -> None:
    files, found = [], []
    for seed in (0, 1):
        x, y = np.random.default_rng(seed).random((20, 8, 8, 1)), np.arange(20) % 10
        folder = here / f"data{seed}"
        folder.mkdir()
        for part in ("train", "test"):
            np.savez(folder / f"{part}.npz", image=(255 * x).astype(np.uint8), label=y)
        result, file = asked(write(here, "one"), data="npz", data_folder=folder, limit=None)
        found.append(result.provenance["samples_digest"])
        files.append(file)
    assert found[0] != found[1]
    assert files[0] != files[1]


def test_a_finished_result_is_found_again_under_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(here, "same")
    with pytest.raises(KeyboardInterrupt):
        evaluate_foreign(model, **DIGITS, batch_size=8, journal=True, progress=Ends())
    (part,) = here.glob("*.part")
    assert list(part.glob("chunk-*"))
    resumed = evaluate_foreign(model, **DIGITS, batch_size=8, resume=True)
    file = store_foreign(resumed)
    assert (file.stem, part.exists()) == (part.stem, False)

    def never(self: Exam, *words: Any) -> None:
        raise AssertionError("it was evaluated before")

    monkeypatch.setattr(Exam, "attempt", never)
    again = evaluate_foreign(model, **DIGITS, batch_size=8, resume=True)
    assert again.to_json() == resumed.to_json()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"eps": 0.2}, "eps"),
        ({"norm": "linf", "eps": 0.1}, "eps, norm"),
        ({"attacks": ["pgd-2"]}, "attacks"),
        ({"limit": 30}, "data"),
        ({"seed": 1}, "seed"),
        ({"votes": 3}, "votes"),
        ({"normalize": "centered"}, "model, normalize"),
    ],
)
def test_resume_leaves_another_result_alone(here: Path, change: dict[str, Any], named: str) -> None:
    model, out = write(here, "mine"), Path("r.json")
    asked(model, out=out)
    before = out.read_bytes()
    with pytest.raises(
        StateError, match=rf"r\.json is the result of another evaluation \(different: {named}\); repeat"
    ):
        evaluate_foreign(model, **{**DIGITS, **change}, out=out, resume=True)
    assert out.read_bytes() == before
    assert evaluate_foreign(model, **DIGITS, out=out, resume=True).to_json().encode() == before


def test_resume_leaves_the_result_of_another_model_alone(here: Path) -> None:
    out = Path("r.json")
    asked(write(here, "mine"), out=out)
    before = out.read_bytes()
    for change, named in (({"seed": 1}, "model"), ({"body": SCALED}, "clean answers")):
        write(here, "mine", **change)
        with pytest.raises(StateError, match=rf"\(different: {named}\)"):
            evaluate_foreign("mine:make", **DIGITS, out=out, resume=True)
    assert out.read_bytes() == before


def test_inputs_of_a_result_that_is_replaced_go_and_pictures_are_told(here: Path) -> None:
    """Whose pictures they are nobody knows: they may be the user's."""
    out, model = Path("r.json"), write(here, "mine")
    pictures = (Path("r-fast.png"), Path("r-gallery.png"))
    asked(model, out=out, attacks=["fast"], keep_adversarial=True)
    for picture in pictures:
        picture.write_bytes(b"png")
    asked(model, out=out, attacks=["fast"])
    assert all(file.is_file() for file in (*pictures, adversarial_file(out))), "the same question"
    written = write_result(out, evaluate_foreign(model, **{**DIGITS, "attacks": ["pgd-2"]}))
    assert written.other is not None
    assert (written.other.different, written.other.pictures) == (("attacks",), pictures)
    assert [file.is_file() for file in (*pictures, adversarial_file(out))] == [True, True, False]


def test_a_result_that_cannot_be_stored_leaves_the_other_and_its_inputs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model = Path("r.json"), write(here, "mine")
    asked(model, out=out, keep_adversarial=True)
    before = out.read_bytes()

    def full(path: Path, text: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flatrock.workflows.evaluate.write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        write_result(out, evaluate_foreign(model, **{**DIGITS, "eps": 0.2}))
    assert out.read_bytes() == before
    assert adversarial_file(out).is_file()


def test_weights_of_the_user_s_are_not_taken_for_what_lies_beside_a_result(here: Path) -> None:
    out, model = Path("r.json"), write(here, "mine")
    asked(model, out=out)
    torch.save(nn.Linear(2, 2).state_dict(), adversarial_file(out))
    asked(model, out=out, eps=0.2)
    assert adversarial_file(out).is_file()
