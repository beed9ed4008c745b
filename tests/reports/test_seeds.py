"""Several seeds in one table: mean, standard deviation, and the worst case over all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from flatrock.core.records import Result
from flatrock.core.runs import EpochRecord, Run
from flatrock.reports.seeds import evaluated_seeds, trained_seeds

THREAT = {"norm": "linf", "eps": 0.1}


def result(clean: list[int], pgd: list[int], fgsm: list[int]) -> Result:
    flags = {"clean": clean, "pgd": pgd, "fgsm": fgsm}
    return Result(THREAT, {name: torch.tensor(marks, dtype=torch.bool) for name, marks in flags.items()})


def test_evaluations() -> None:
    results = {0: result([1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]), 7: result([1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 0])}
    results[9] = result([1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0])
    table = evaluated_seeds(results)
    assert table.header == ("seed", "clean", "pgd", "fgsm", "worst case")
    assert table.rows == (
        ("0", "75.00", "50.00", "75.00", "50.00"),
        ("7", "75.00", "50.00", "75.00", "50.00"),
        ("9", "75.00", "75.00", "50.00", "50.00"),
        # 25 points in one of three: 25 / sqrt(3)
        ("mean ± s.d.", "75.00 ± 0.00", "58.33 ± 14.43", "66.67 ± 14.43", "50.00 ± 0.00"),
        ("all seeds", "75.00", "25.00", "50.00", "25.00"),
    )


def test_attacks_of_a_plan_are_one_column() -> None:
    one = replace(result([1, 1], [1, 1], [0, 1]), plans={"both": ("pgd", "fgsm")})
    other = replace(result([1, 1], [1, 0], [1, 0]), plans={"both": ("pgd", "fgsm")})
    table = evaluated_seeds({0: one, 1: other})
    assert table.header == ("seed", "clean", "both", "worst case")
    assert table.rows[-1] == ("all seeds", "100.00", "0.00", "0.00")


def record(epoch: int, clean: float | None, robust: float | None, **others: float | int) -> EpochRecord:
    values = {"epoch": epoch, "step": epoch, "seconds": 1.0, "lr": 0.1, "terms": {}, "selected_on": "held_out"}
    values |= {"images_per_second": 1.0, "running_accuracy": 0.5, "best_epoch": epoch, "collapsed": False}
    return EpochRecord.from_dict({**values, "clean": clean, "robust": robust, "train_robust": None, **others})


def run(*records: EpochRecord) -> Run:
    return Run(Path("runs/x"), records, status="finished")


def test_runs() -> None:
    runs = {0: run(record(3, 0.7, 0.4)), 1: None, 5: run(record(2, 0.9, 0.6))}
    table = trained_seeds(runs)
    assert table.header == ("seed", "best epoch", "clean", "robust")
    assert table.rows == (
        ("0", "3", "70.00", "40.00"),
        ("1", "FAILED", "", ""),
        ("5", "2", "90.00", "60.00"),
        ("mean ± s.d. of 2", "", "80.00 ± 14.14", "50.00 ± 14.14"),
    )
    assert [row[0] for row in trained_seeds({0: runs[0], 1: None}).rows] == ["0", "1"]  # of one run there is no spread


def test_averaged_weights_say_so_and_have_no_mean_with_plain_ones() -> None:
    averaged = run(record(2, 0.8, 0.5, average_clean=0.9, average_robust=0.6, average_best_epoch=2))
    assert trained_seeds({0: averaged, 5: averaged}).rows == (
        ("0", "2, averaged", "90.00", "60.00"),
        ("5", "2, averaged", "90.00", "60.00"),
        ("mean ± s.d. of 2", "", "90.00 ± 0.00", "60.00 ± 0.00"),
    )
    assert trained_seeds({0: run(record(3, 0.7, 0.4)), 5: averaged}).rows == (
        ("0", "3", "70.00", "40.00"),
        ("5", "2, averaged", "90.00", "60.00"),
        ("no mean: some are averaged", "", "", ""),
    )
