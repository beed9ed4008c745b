"""`flatrock certify`, driven as a user drives it: killed, resumed, and given what cannot work."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock, read_again, stored
from PIL import Image

from flatrock.diagnostics.certificate import Certificate

FEW = ("--sigma", "0.25", "--n0", "20", "--n", "200", "--limit", "12", "--device", "cpu")


def content(file: Path) -> dict[str, Any]:
    """What a certificate says, without what tells when and how fast it was made."""
    told: dict[str, Any] = json.loads(file.read_text())
    told.pop("seconds")
    told["provenance"].pop("time")
    return told


@pytest.fixture(scope="module")
def run(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: certificates lie beside the checkpoint."""
    return shutil.copytree(run_folder, tmp_path_factory.mktemp("certified") / "run")


def test_a_certificate_its_table_and_its_figure(run: Path) -> None:
    done = flatrock("certify", run, *FEW, "--radius", "0.1,0.2", "--linf-eps", "4/255")
    file = stored(done)
    assert file.name == "certificate-best-sigma0.25-n20+200-alpha0.001-samples12-seed0.json"
    found = Certificate.from_json(file.read_text())
    assert found.samples == 12
    assert found.dimension == 64
    assert found.l2_of(4 / 255) == pytest.approx(32 / 255)
    row = next(line for line in done.output.splitlines() if "4.00/255" in line)
    assert row.replace("│", " ").split() == ["0.1255", "4.00/255", *_share(found, 32 / 255)]
    assert "digits test, 12 of 500 samples; n0 20, n 200, alpha 0.001: radii up to 0.4564" in done.output
    assert "trained without Gaussian noise" in done.output
    with Image.open(file.with_suffix(".png")) as image:
        assert image.size[0] > 800
    assert len(file.with_suffix(".tsv").read_text().splitlines()) == 13
    assert not file.with_suffix(".part").exists()
    about = found.provenance
    assert (about["recipe"], about["checkpoint"], about["trained_with"]) == ("digits_at", "best.safetensors", None)


def _share(found: Certificate, radius: float) -> list[str]:
    share = found.certified(radius)
    return [f"{100 * share:.2f}", str(round(12 * share))]


def test_killed_and_resumed_equals_uninterrupted(run: Path) -> None:
    """A real process, a real SIGKILL; on the way it must have left finished samples behind, and not all of them."""
    words = ["certify", str(run), "--sigma", "0.25", "--n0", "20", "--n", "2000", "--limit", "10", "--device", "cpu"]
    whole = stored(flatrock(*words))
    expected, votes = content(whole), json.loads(whole.read_text())["counts"]
    whole.unlink()
    part = whole.with_suffix(".part")
    process = subprocess.Popen(
        [sys.executable, "-m", "flatrock", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 100
    while _lines(part) < 4 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "killed before the end"
    assert not whole.exists()
    before = part.read_text().splitlines()
    assert 3 <= len(before) - 1 < 10
    kept = json.loads(before[1])
    part.write_text("\n".join(before)[:-7])  # the kill may also fall into the writing of a line
    assert flatrock(*words, "--resume").exit_code == 0
    assert content(whole) == expected
    assert json.loads(whole.read_text())["counts"] == votes
    assert kept["counts"] in votes
    assert kept["seconds"] in json.loads(whole.read_text())["seconds"], "what was on disk was not computed again"
    assert not part.exists()


def _lines(file: Path) -> int:
    return file.read_text().count("\n") if file.is_file() else 0


def test_resuming_a_finished_certificate_reads_it(run: Path) -> None:
    words = ("certify", run, *FEW, "--seed", "3")
    file = stored(flatrock(*words))
    before = file.read_text()
    assert read_again(flatrock(*words, "--resume")) == file
    assert file.read_text() == before
    assert stored(flatrock(*words)) == file
    assert json.loads(file.read_text())["counts"] == json.loads(before)["counts"]
    assert json.loads(file.read_text())["seconds"] != json.loads(before)["seconds"], "without --resume it is made anew"


def test_a_finished_certificate_is_read_wherever_it_was_made_and_its_part_removed(run: Path) -> None:
    words = ("certify", run, *FEW, "--seed", "6")
    file = stored(flatrock(*words))
    told = json.loads(file.read_text())
    assert told["provenance"]["asked"]["device"] == "cpu"
    told["provenance"]["asked"]["device"] = "cuda"
    file.write_text(json.dumps(told))
    file.with_suffix(".part").write_text("of a repetition that was stopped\n")
    assert read_again(flatrock(*words, "--resume")) == file
    assert json.loads(file.read_text()) == told
    assert not file.with_suffix(".part").exists()


def test_what_another_device_began_is_not_finished_here(run: Path) -> None:
    words = ("certify", run, *FEW, "--seed", "7")
    file = stored(flatrock(*words))
    asked = json.loads(file.read_text())["provenance"]["asked"]
    file.unlink()
    file.with_suffix(".part").write_text(json.dumps({**asked, "device": "cuda"}) + "\n")
    done = flatrock(*words, "--resume")
    assert done.exit_code == 2
    assert "belongs to another measurement (different: device)" in " ".join(done.output.split())
    assert stored(flatrock(*words)) == file, "without --resume it is made anew"


@pytest.fixture(scope="module")
def finished(run: Path) -> Path:
    return stored(flatrock("certify", run, *FEW, "--seed", "8"))


def spoilt(told: dict[str, Any], place: str, value: Any) -> str:
    """The certificate with another value at this place (`a.b` lies in `a`); None as value takes it away."""
    *outer, name = place.split(".")
    inside = told[outer[0]] if outer else told
    inside.pop(name)
    if value is not None:
        inside[name] = value
    return json.dumps(told)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("provenance.trained_with", None, "is damaged (wrong: trained_with); certify again, without --resume"),
        ("provenance.trained_with", "much", "is damaged (wrong: trained_with)"),
        ("provenance.recipe", None, "is damaged (wrong: recipe)"),
        ("provenance.data", [], "is damaged (wrong: data)"),
        ("shape", [1, 4, 4], "is damaged (wrong: shape)"),
        ("ids", list(range(600, 612)), "is damaged (wrong: ids)"),
        ("n0", 21, "is damaged (wrong: smoothing)"),
        ("accuracy", [], "its accuracy do not follow from its votes; certify again, without --resume"),
        ("seconds", None, "is not a flatrock certificate ('seconds')"),
    ],
)
def test_a_damaged_certificate_is_not_resumed(run: Path, finished: Path, place: str, value: Any, told: str) -> None:
    intact = finished.read_bytes()
    finished.write_text(spoilt(json.loads(intact), place, value))
    done = flatrock("certify", run, *FEW, "--seed", "8", "--resume")
    finished.write_bytes(intact)
    assert done.exit_code == 2
    assert told in " ".join(done.output.split())


def test_a_binary_file_is_no_certificate(run: Path, finished: Path) -> None:
    intact = finished.read_bytes()
    finished.write_bytes(b"\x89PNG\r\n\x1a\n\xff\x00")
    done = flatrock("certify", run, *FEW, "--seed", "8", "--resume")
    finished.write_bytes(intact)
    assert done.exit_code == 2
    assert "is not a flatrock certificate" in " ".join(done.output.split())


def test_another_question_is_not_resumed(run: Path) -> None:
    words = ("certify", run, *FEW, "--seed", "4")
    file = stored(flatrock(*words))
    other = file.with_name(file.name.replace("seed4.json", "seed5.part"))
    other.write_text('{"seed": 4}\n')
    file.unlink()
    done = flatrock("certify", run, *FEW, "--seed", "5", "--resume")
    assert done.exit_code == 2
    assert "belongs to another measurement (different: alpha, data," in done.output
    assert flatrock("certify", run, *FEW, "--seed", "5").exit_code == 0


def test_the_last_checkpoint_and_a_file_of_one(run: Path) -> None:
    by_name = stored(flatrock("certify", run, *FEW, "--which", "last"))
    by_file = stored(flatrock("certify", run / "last.safetensors", *FEW))
    assert by_name == by_file
    assert by_name.name.startswith("certificate-last-")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--sigma", "0"), "sigma must be a number > 0, got 0.0; it is the deviation of the noise in pixel units"),
        (("--sigma", "-0.1"), "sigma must be a number > 0, got -0.1"),
        (("--sigma", "loud"), "sigma: expected a number or a fraction such as 8/255, got 'loud'"),
        (
            ("--sigma", "0.25", "--radius", "0.1,far"),
            "radius: expected a number or a fraction such as 8/255, got 'far'",
        ),
        (("--sigma", "0.25", "--linf-eps", "2/0"), "linf-eps: '2/0' divides by zero"),
        (("--sigma", "0.25", "--n", "0"), "n must be a whole number >= 1, got 0"),
        (("--sigma", "0.25", "--alpha", "1"), "alpha must lie strictly between 0 and 1, got 1.0"),
        (("--sigma", "0.25", "--n", "5"), "n 5 proves nothing at alpha 0.001, whatever the votes: use n 11 or more"),
        (
            ("--sigma", "0.25", "--n", "100", "--radius", "0.2,0.5"),
            "radius 0.5 is out of reach: with n 100, alpha 0.001 and sigma 0.25 the largest radius is 0.37512, "
            "if all votes agree; use n 301 or more, or a larger sigma",
        ),
        (
            ("--sigma", "0.12", "--n", "1000", "--linf-eps", "12/255"),
            "Linf 0.0470588 = 12/255 (radius 0.37647 in 64 dimensions) is out of reach",
        ),
        (("--sigma", "0.25", "--radius", "-1"), "a radius is a number >= 0, got -1.0"),
        (("--sigma", "0.25", "--which", "average-best"), "keeps no averaged weights"),
        (("--sigma", "0.25", "--which", "worst"), "unknown checkpoint 'worst'"),
    ],
)
def test_what_cannot_work_is_said_before_any_vote(run: Path, words: tuple[str, ...], told: str) -> None:
    done = flatrock("certify", run, *words, "--device", "cpu")
    assert done.exit_code == 2
    assert told in done.output
    assert not list(run.glob("*.part"))


def test_a_run_without_that_checkpoint(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "best.safetensors").unlink()
    done = flatrock("certify", copy, *FEW)
    assert done.exit_code == 2
    assert "best.safetensors is lost; use another checkpoint of the run, --which last" in done.output
    done = flatrock("certify", tmp_path / "nowhere", *FEW)
    assert done.exit_code == 2
    assert "there is no run folder or checkpoint" in done.output


@pytest.mark.parametrize("recipe", ["digits_smooth", "digits_trades_smooth_pgd"])
def test_noise_of_another_sigma_is_noted(tmp_path: Path, tiny: tuple[str, ...], recipe: str) -> None:
    small = [word for word in tiny if "attack" not in word]
    trained = flatrock("train", recipe, *small, "--run-dir", tmp_path / "r", "--device", "cpu")
    assert trained.exit_code == 0, trained.output
    done = flatrock("certify", tmp_path / "r", "--sigma", "0.5", "--n", "50", "--limit", "3", "--device", "cpu")
    assert "trained with noise of sigma 0.25; the same sigma usually certifies most" in done.output
    same = flatrock("certify", tmp_path / "r", "--sigma", "1/4", "--n", "50", "--limit", "3", "--device", "cpu")
    assert "note " not in same.output
