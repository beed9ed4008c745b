"""From runs to curvature: what is stored, whose loss it is, bad input, and the command."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner, Result

from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, DataError
from flatrock.core.rng import Seed
from flatrock.core.threat import Linf
from flatrock.data.split import fair_subset
from flatrock.diagnostics.curvature import Settings
from flatrock.diagnostics.curvature_record import CurvatureRecord
from flatrock.engine.folder import OWN_FILE
from flatrock.recipes.load import load_recipe
from flatrock.recipes.part import check_classes, data_part
from flatrock.recipes.restore import load
from flatrock.workflows.checkpoints import checkpoints
from flatrock.workflows.curvature import Sampling, measure_curvature, planned_curvature

QUICK = Settings(probes=2, runs=1, steps=4, top=2, awp_steps=2)
WORDS = ("--images", "20", "--probes", "2", "--runs", "1", "--steps", "4", "--top", "2", "--awp-steps", "1")


@pytest.fixture(scope="module")
def run(two_epochs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(two_epochs, tmp_path_factory.mktemp("measured") / "tiny")


@pytest.fixture(scope="module")
def measured(run: Path) -> tuple[CurvatureRecord, Path]:
    return measure_curvature(run / "best.safetensors", Sampling(images=20), QUICK)


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["curvature", *map(str, words), "--device", "cpu"])


def test_losses_are_those_of_the_run_on_its_own_samples(run: Path, measured: tuple[CurvatureRecord, Path]) -> None:
    record = measured[0]
    model = load(run)
    data = fair_subset(data_part(load_recipe("digits_at", {"data.limit": 512}), "train"), 20)
    x, y = data.images(torch.arange(20)), data.y
    gen = Seed(0).child("curvature", "attack").samples(data.ids)
    x_adv = craft(GradientAttack(steps=2), model, x, y, Linf(0.2), gen)
    with torch.no_grad():
        losses = [float(F.cross_entropy(model(inputs), y)) for inputs in (x, x_adv)]
    assert [found.loss for found in record.losses.values()] == pytest.approx(losses, rel=1e-6)
    assert record.losses["clean"].awp.attacked_anew is None
    assert record.losses["adversarial"].awp.attacked_anew is not None
    assert record.attack["name"] == "pgd-2"
    assert record.settings["beta"] == 512 == record.losses["clean"].pac_bayes.beta
    assert list(record.losses["clean"].layers) == ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "head"]


def test_what_is_stored_can_be_read_and_says_where_it_comes_from(measured: tuple[CurvatureRecord, Path]) -> None:
    record, file = measured
    assert re.fullmatch(r"curvature-best-pgd-2-train20-seed0-[0-9a-f]{8}\.json", file.name)
    assert OWN_FILE.fullmatch(file.name)
    assert CurvatureRecord.from_json(file.read_text()) == record
    about = record.provenance
    assert (about["run"], about["recipe"], about["checkpoint"]) == ("tiny", "digits_at", "best.safetensors")
    assert about["data"] == "digits train, 20 of 512 samples"
    assert {"commit", "device", "seconds", "epoch", "train_seed", "precision", "batch_size"} <= set(about)


def test_double_precision_refines_single(run: Path, measured: tuple[CurvatureRecord, Path]) -> None:
    record, file = measure_curvature(run / "best.safetensors", Sampling(images=20, precision="double"), QUICK)
    assert file != measured[1]
    for loss in ("clean", "adversarial"):
        single, double = measured[0].losses[loss], record.losses[loss]
        assert single.loss == pytest.approx(double.loss, rel=1e-4)
        assert single.spectrum.largest[0][0] == pytest.approx(double.spectrum.largest[0][0], rel=1e-3)


def test_other_samples_attack_and_checkpoint(run: Path) -> None:
    sampling = Sampling(images=10, on="held_out", attack="fgsm", seed=3)
    record, file = measure_curvature(run / "epoch-0001.safetensors", sampling, QUICK, beta=7)
    assert file.name.startswith("curvature-epoch-0001-fgsm-held_out10-seed3-")
    assert record.attack["name"] == "fgsm"
    assert record.settings["beta"] == 7
    assert record.provenance["epoch"] == 1


@pytest.mark.parametrize(
    ("sampling", "fault"),
    [
        ({"images": 9}, "9 images leave out some of the 10 classes of 'digits'; measure curvature on at least 10"),
        ({"images": 0}, "images must be a whole number >= 1, got 0"),
        ({"attack": "pdg-3"}, r"unknown attack 'pdg'; known: .*did you mean 'pgd'"),
        ({"on": "validation"}, "unknown data part 'validation'; known: held_out, test, train"),
        ({"precision": "half"}, "unknown curvature precision 'half'; known: double, single"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
    ],
)
def test_samplings_that_cannot_work(run: Path, sampling: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        measure_curvature(run / "best.safetensors", Sampling(**sampling), QUICK)


def test_the_command_measures_tells_and_draws(run: Path, tmp_path: Path) -> None:
    done = call(run, "--which", "epoch-1,last", *WORDS, "--out", tmp_path / "both")
    assert done.exit_code == 0, done.output
    for text in ("clean loss", "adversarial loss", "tiny last", "AWP", "PAC-Bayes", "attacked once and held fixed"):
        assert text in done.output
    assert {f.name for f in tmp_path.iterdir()} == {"both-spectrum.png", "both-layers.png"}
    stored = [run / name for name in re.findall(r"curvature-\S+\.json", done.output.replace("\n", ""))]
    assert [f.name.split("-pgd-2-train20-seed0-")[0] for f in stored] == ["curvature-epoch-0001", "curvature-last"]
    again = call(*stored, "--out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert "wrote" not in again.output
    assert (tmp_path / "again-layers.png").is_file()


def test_records_alone_take_no_option_of_a_measurement(run: Path, measured: tuple[CurvatureRecord, Path]) -> None:
    done = call(measured[1], "--probes", "9", "--no-layers")
    assert done.exit_code == 2, done.output
    assert "--probes 9, --no-layers: records are drawn as they were measured" in " ".join(done.output.split())


def test_without_layers_there_is_no_picture_of_them(run: Path, tmp_path: Path) -> None:
    done = call(run, *WORDS, "--no-layers", "--seed", "5", "--out", tmp_path / "plain")
    assert done.exit_code == 0, done.output
    assert [f.name for f in tmp_path.iterdir()] == ["plain-spectrum.png"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--which", "epoch-7"), "keeps no epoch-7 (kept: 1, 2)"),
        (("--which", "average-best"), "keeps no averaged weights"),
        (("--attack", "nothing"), "unknown attack 'nothing'"),
        (("--images", "3"), "at least 10"),
        (("--probes", "1"), "probes must be a whole number >= 2"),
        (("--steps", "6"), "6 Lanczos steps cannot give 5 eigenvalues at each end; use at least 10 steps"),
        (("--trace", "magic"), "unknown curvature trace 'magic'"),
        (("--sigma0", "0"), "sigma0 must be a number > 0"),
        (("--sigma0", "1e-200"), "sigma0 must lie between 1e-50 and 1e+50"),
        (("--sigma0", "1e200"), "sigma0 must lie between 1e-50 and 1e+50"),
        (("--out", ""), "out must end in a name for the figures"),
        (("--rho", "-1"), "rho must be a number >= 0"),
        (("--rho", "long"), "rho: expected a number or a fraction such as 8/255, got 'long'"),
        (("--beta", "1/0"), "beta: '1/0' divides by zero"),
    ],
)
def test_bad_words_are_one_message(run: Path, words: tuple[str, ...], fault: str) -> None:
    rest = [] if words[0] in ("--images", "--probes", "--steps") else ["--images", "10", "--probes", "2"]
    done = call(run, *words, *rest)
    assert done.exit_code == 2, done.output
    assert fault in done.output
    assert "Traceback" not in done.output


def test_sources_that_are_not_there(run: Path, tmp_path: Path) -> None:
    assert "there is no run folder or checkpoint" in call(tmp_path / "nowhere").output
    assert "there is no record" in call(tmp_path / "x.json").output
    for content in (json.dumps({"schema": "other"}).encode(), b"\x89PNG\xff\xfe", b""):
        (tmp_path / "x.json").write_bytes(content)
        done = call(tmp_path / "x.json")
        assert done.exit_code == 2
        assert "is not a record of curvature" in " ".join(done.output.split())


def test_stored_results_can_be_read() -> None:
    files = sorted((Path(__file__).parents[2] / "results" / "curvature").glob("*.json"))
    assert len(files) == 5
    for file in files:
        assert CurvatureRecord.from_json(file.read_bytes(), file.name).provenance["run"] == file.stem


def test_data_of_other_classes_are_refused() -> None:
    data = data_part(load_recipe("digits_at", {}), "test")
    check_classes(data, {"class_names": list(data.class_names)})
    with pytest.raises(DataError, match=r"the data have classes .* the model has \['cat', 'dog'\].*--data-dir"):
        check_classes(data, {"class_names": ["cat", "dog"]})


def test_records_of_other_samples_are_not_compared(run: Path, measured: tuple[CurvatureRecord, Path]) -> None:
    other = measure_curvature(run / "best.safetensors", Sampling(images=12), QUICK)[1]
    done = call(measured[1], other)
    assert done.exit_code == 2
    assert "curvatures of different data are not compared" in done.output


def test_other_settings_go_to_other_files(run: Path, measured: tuple[CurvatureRecord, Path]) -> None:
    before = measured[1].read_bytes()
    other = measure_curvature(run / "best.safetensors", Sampling(images=20), replace(QUICK, gamma=0.01))[1]
    hotter = measure_curvature(run / "best.safetensors", Sampling(images=20), QUICK, beta=7)[1]
    assert len({measured[1], other, hotter}) == 3
    assert measured[1].read_bytes() == before
    done = call(measured[1], other)
    assert done.exit_code == 2
    assert "curvatures of different gamma are not compared: 0.005 and 0.01" in " ".join(done.output.split())


def test_what_cannot_be_compared_is_not_measured(
    run: Path, tmp_path: Path, measured: tuple[CurvatureRecord, Path]
) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(run, alone, ignore=shutil.ignore_patterns("curvature-*"))
    done = call(measured[1], alone, *WORDS, "--awp-steps", "2", "--rho", "0.5")
    assert done.exit_code == 2
    assert "curvatures of different rho are not compared: 0.05 and 0.5" in " ".join(done.output.split())
    assert not list(alone.glob("curvature-*"))


def test_a_run_has_a_name_from_inside_its_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    record = planned_curvature(checkpoints(Path())[0], Sampling(images=20), QUICK)
    assert record.provenance["run"] == "tiny"
