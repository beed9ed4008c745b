"""`flatrock eval --per-class` and `--csv`, driven as a user drives them."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from command_cases import flatrock, result_of
from foreign_cases import MODULE
from typer.testing import Result as Done

from flatrock.core.records import Result
from flatrock.data.catalog import load_data
from flatrock.data.dataset import Dataset
from flatrock.reports.table import per_class

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay")
FEW = ("--limit", "40", "--device", "cpu", "--no-doubt")


def class_rows(done: Done) -> list[tuple[str, ...]]:
    """The cells of the second table, without its header."""
    after = done.output.split("class by class")[1].split("worst class")[0]
    return [tuple(c.strip() for c in line.strip("│").split("│")) for line in after.splitlines() if line[:1] == "│"]


def test_classes_and_samples_of_a_run(run_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "samples.csv"
    done = flatrock("eval", run_folder, "--attacks", "pgd-2,fgsm", "--per-class", "--csv", file, *FEW)
    result = result_of(done)
    test = load_data("digits", "test")
    assert result.ids is not None
    assert result.labels is not None
    assert torch.equal(result.labels, test.y[result.ids])
    rows = class_rows(done)
    assert [row[:2] for row in rows] == [*((str(c), "4") for c in range(10)), ("all", "40")]
    for c in range(10):
        mine = [flag[result.labels == c].double().mean() for flag in (result.flags["clean"], result.worst)]
        assert [rows[c][2], rows[c][-1]] == [f"{100 * float(share):.2f}" for share in mine]
    assert done.output.endswith(f"wrote {file}\n")
    with file.open(newline="") as text:
        lines = list(csv.DictReader(text))
    assert [int(line["id"]) for line in lines] == result.ids.tolist()
    assert [int(line["label"]) for line in lines] == result.labels.tolist()
    assert [line["worst_case"] == "1" for line in lines] == result.worst.tolist()
    assert [line["fgsm"] == "1" for line in lines] == result.flags["fgsm"].tolist()
    assert [float(line["worst_margin"]) for line in lines] == result.margins["worst"].tolist()


def test_fewer_samples_than_classes(run_folder: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "pgd-2", "--per-class", *FEW[2:], "--limit", "3")
    result = result_of(done)
    rows = class_rows(done)
    assert len(rows) == 11
    assert sorted(row[1] for row in rows[:10]) == ["0"] * 7 + ["1"] * 3
    assert all(row[2:] == ("", "", "") for row in rows if row[1] == "0")
    assert tuple(rows) == per_class(result, [str(c) for c in range(10)]).rows


def test_without_the_options_nothing_more_is_told_or_written(run_folder: Path, tmp_path: Path) -> None:
    done = flatrock("eval", run_folder, "--attacks", "pgd-2", *FEW)
    assert result_of(done).labels is not None, "they are in every result"
    assert "class" not in done.output


@pytest.fixture
def animals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Digits under other names, and a folder with networks for them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign_module.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "foreign_module", raising=False)
    digits = load_data("digits", "test")
    data = Dataset("digits", digits.x, digits.y, 10, NAMES)
    monkeypatch.setattr("flatrock.workflows.foreign_model.load_data", lambda name, split, folder=None: data)
    return data


OWN = ("--model", "foreign_module:net", "--data", "digits", "--norm", "linf", "--eps", "8/255", "--attacks", "fgsm")


def test_a_model_of_ones_own_and_names_of_classes(animals: Dataset, tmp_path: Path) -> None:
    done = flatrock("eval", *OWN, "--per-class", "--csv", "a.csv", "--out", "a.json", *FEW)
    result = result_of(done)
    assert [row[0] for row in class_rows(done)][:3] == ["0 ant", "1 bee", "2 cat"]
    parts = {c: part.robust for c, part in result.by_class.items()}
    worst = [c for c in parts if parts[c] == min(parts.values())]
    assert len(worst) > 5, "an untrained network"
    said = (
        f"worst classes: {len(worst)} of 10, with 0.00 in the worst case ({100 * result.robust:.2f} over all samples)"
    )
    assert f"\n{said}\n" in done.output
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 41


def test_one_worst_class_is_named(animals: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"clean": torch.tensor([1, 1, 1, 1]).bool(), "fgsm": torch.tensor([1, 0, 0, 0]).bool()}
    about = {"model": "m", "data": "d", "dataset": "digits", "weights_sha256": "", "seed": 0}
    threat = {"norm": "linf", "eps": 0.1}

    def answer(*words: object, **options: object) -> Result:
        return Result(threat, flags, labels=torch.tensor(labels), provenance=about)

    monkeypatch.setattr("flatrock.workflows.foreign.evaluate", answer)
    labels = [3, 3, 5, 5]
    said = "worst class: 5 fox, with 0.00 in the worst case (25.00 over all samples)\n"
    assert said in flatrock("eval", *OWN, "--per-class", *FEW).output
    labels = [3, 1, 5, 5]
    assert "worst classes: 1 bee, 5 fox, with 0.00 in" in flatrock("eval", *OWN, "--per-class", *FEW).output
    flags = {"clean": torch.tensor([1, 1, 1, 1]).bool(), "fgsm": torch.tensor([1, 1, 1, 1]).bool()}
    done = flatrock("eval", *OWN, "--per-class", *FEW)
    assert "no class is worse than the others: 100.00 in the worst case" in done.output


def test_a_table_that_cannot_be_written_is_refused_before_any_work(run_folder: Path, tmp_path: Path) -> None:
    before = sorted(run_folder.iterdir())
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    weights = run_folder / "best.safetensors"
    for file, said in (
        (
            tmp_path / "file" / "x.csv",
            f"cannot write {tmp_path / 'file' / 'x.csv'}: Not a directory; choose another --csv",
        ),
        (tmp_path / "folder.csv", "it is a folder; give --csv the name of a file"),
        (weights, f"csv: {weights} must end in .csv"),
        ("--per-class", "csv: --per-class must end in .csv"),
    ):
        done = flatrock("eval", run_folder, "--csv", file, *FEW)
        assert done.exit_code == 2, done.output
        assert done.stdout == ""
        assert said in done.stderr
    assert sorted(run_folder.iterdir()) == before
