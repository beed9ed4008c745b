"""What a run that has ended says against itself: T09, T10 and T11."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from start_cases import Told

from flatrock.core.neighbours import Lookout
from flatrock.core.runs import EpochRecord
from flatrock.core.team import Team
from flatrock.engine import loop
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job, ProbeOutcome
from flatrock.engine.loop import train
from flatrock.engine.verdict import doubts
from flatrock.recipes.restore import load
from flatrock.workflows.evaluate import evaluate_run

MakeJob = Callable[..., Job]
Pair = tuple[float, float]


def epochs(raw: list[Pair], average: list[Pair] | None = None, *, best: int | None, mean: int | None = None) -> Any:
    """Records of these (clean, robust) accuracies, the last of which names the best epochs."""
    made = []
    for i, (clean, robust) in enumerate(raw):
        means = (None, None) if average is None else average[i]
        made.append(
            EpochRecord(
                epoch=i + 1,
                step=4 * i,
                lr=0.1,
                terms={"total": 1.0},
                running_accuracy=0.5,
                clean=clean,
                robust=robust,
                train_robust=robust,
                selected_on="held_out",
                best_epoch=best,
                seconds=1.0,
                images_per_second=100.0,
                average_clean=means[0],
                average_robust=means[1],
                average_best_epoch=mean,
            )
        )
    return made


def found(records: Any, *, metric: str = "robust", samples: int = 200, classes: int = 10) -> dict[str, str]:
    return doubts(records, metric=metric, samples=samples, classes=classes)


# T09


def test_averages_far_below_the_raw_weights() -> None:
    records = epochs([(0.9, 0.5), (0.9, 0.45)], [(0.3, 0.1), (0.4, 0.2)], best=1, mean=2)
    (text,) = found(records).values()
    assert "at best robust 20.00 (epoch 2), raw 50.00 (epoch 1) on 200 samples" in text
    assert "--which best" in text
    assert list(found(records, samples=20)) == [], "on so few samples it may be chance"
    assert "at best clean 40.00" in found(records, metric="clean")["T09"]


def test_averages_that_all_collapsed() -> None:
    records = epochs([(0.9, 0.5)], [(0.1, 0.1)], best=1, mean=None)
    assert "no best epoch" in found(records)["T09"]
    assert found(epochs([(0.1, 0.1)], [(0.1, 0.1)], best=None)) == {}, "nor are the raw ones better"


@pytest.mark.parametrize("average", [None, [(0.9, 0.5)], [(0.9, 0.6)], [(0.89, 0.46)]])
def test_no_averages_or_good_ones_are_not_doubted(average: list[Pair] | None) -> None:
    assert found(epochs([(0.9, 0.5)], average, best=1, mean=None if average is None else 1)) == {}


# T10


def test_a_best_epoch_that_guesses_though_later_ones_do_not() -> None:
    text = found(epochs([(0.11, 0.10), (0.995, 0.005)], best=1))["T10"]
    assert "the best epoch, 1, has clean 11.00 on 200 samples, where guesses reach up to 14.24" in text
    assert "epoch 2 has 99.50" in text


@pytest.mark.parametrize(
    ("raw", "best", "samples"),
    [
        ([(0.11, 0.10), (0.12, 0.01)], 1, 200),  # no later one is better
        ([(0.5, 0.2), (0.995, 0.005)], 1, 200),  # it knows something
        ([(0.11, 0.10), (0.995, 0.005)], 1, 99),  # too few to tell
        ([(0.9, 0.05), (0.11, 0.10)], 2, 200),  # earlier ones do not count
    ],
)
def test_other_best_epochs_are_not_doubted(raw: list[Pair], best: int, samples: int) -> None:
    assert found(epochs(raw, best=best), samples=samples) == {}


def test_a_collapsed_epoch_is_no_better_one() -> None:
    records = epochs([(0.11, 0.10), (0.9, 0.0)], best=1)
    assert found([records[0], replace(records[1], collapsed=True)]) == {}


# T11


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ((None, 0, 1), "another process had the same GPU open in 1 of 2 epochs looked at"),
        ((3, 1, 0), "up to 3 other processes had the same GPU open in 2 of 3 epochs looked at"),
    ],
)
def test_epochs_beside_others_on_the_same_gpu(seen: tuple[int | None, ...], text: str) -> None:
    records = epochs(3 * [(0.9, 0.5)], best=1)
    told = found([replace(record, neighbours=n) for record, n in zip(records, seen, strict=True)])
    assert list(told) == ["T11"]
    assert told["T11"].startswith(text)


@pytest.mark.parametrize("seen", [None, 0])
def test_epochs_alone_or_where_nobody_can_tell_are_not_doubted(seen: int | None) -> None:
    assert found([replace(record, neighbours=seen) for record in epochs([(0.9, 0.5)], best=1)]) == {}


# In a run


def probed(*seen: tuple[float, float]) -> Callable[[Any], ProbeOutcome]:
    """A probe that finds these accuracies, one after the other."""
    left = iter(seen)

    def probe(model: Any) -> ProbeOutcome:
        clean, robust = next(left)
        return ProbeOutcome(clean, robust, robust, collapsed=False)

    return probe


def test_it_is_said_stored_and_told_again_to_who_takes_these_weights(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", flatness=[{"name": "swa", "ramp": True}], train={"epochs": 1})
    told = Told()
    run = train(replace(job, probe=probed((0.9, 0.5), (0.2, 0.1)), selected_from=200), progress=told)
    (text,) = [line for line in told.said if line.startswith("T09")]
    assert text.endswith("(docs/diagnostics.md)")
    assert text in run.findings
    assert text in json.loads((tmp_path / "run/run.json").read_text())["findings"]
    assert RunFolder(run.folder).run() == run
    with pytest.warns(UserWarning, match="T09 the averaged weights"):
        load(run)
    told = Told()
    evaluate_run(run, attacks=["fgsm"], limit=10, progress=told)
    assert told.said == [text]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(run, which="best")
        load(run, which="average-best")
        load(run.folder / "average-best.safetensors")


def test_a_run_without_doubts_says_nothing(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", flatness=[{"name": "swa", "ramp": True}], train={"epochs": 1})
    told = Told()
    run = train(replace(job, probe=probed((0.9, 0.5), (0.9, 0.5)), selected_from=200), progress=told)
    assert (told.said, run.findings) == ([], ())
    assert "findings" not in json.loads((tmp_path / "run/run.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(run)


class Crowd(Lookout):
    """Sees one more process every time, once it looks."""

    count = 0
    looks = False

    def __enter__(self) -> Crowd:
        self.looks = True
        return self

    def seen(self) -> int | None:
        self.count += 1
        return self.count if self.looks else None


def test_a_run_records_who_computed_beside_it(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Lookout", Crowd)
    told = Told()
    run = train(make_job(tmp_path / "run", train={"epochs": 2}), progress=told)
    assert [record.neighbours for record in run.records] == [1, 2]
    (text,) = [line for line in told.said if line.startswith("T11")]
    assert "up to 2 other processes had the same GPU open in 2 of 2 epochs" in text
    assert text in run.findings


def test_who_began_the_processes_of_a_run_is_nobody_else(make_job: MakeJob, tmp_path: Path) -> None:
    """Alone a run is its own process; of several, the one that began them may have used the GPU before."""
    job = make_job(tmp_path / "run")
    assert loop._lookout(job)._root == os.getpid()
    assert loop._lookout(replace(job, team=Team(0, 2)))._root == os.getppid()
