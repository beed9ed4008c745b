"""Results and epochs go to JSON and come back; numbers that do not follow from the flags are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core.errors import StateError
from flatrock.core.provenance import VERSION, birth_certificate, commit
from flatrock.core.records import Finding, Result
from flatrock.core.runs import EpochRecord, Run


def flags(text: str) -> torch.Tensor:
    return torch.tensor([c == "1" for c in text])


def a_result() -> Result:
    return Result(
        threat={"norm": "linf", "eps": 8 / 255},
        flags={"clean": flags("1111110"), "pgd-20": flags("1110000"), "cw-20": flags("1101000")},
        findings=(Finding("E01", "was in train mode", "call eval()"),),
        costs={"pgd-20": {"seconds": 0.5, "samples": 6.0}},
        marks=("test-selected",),
        provenance={"seed": 3, "torch": "2"},
    )


def test_accuracies_are_fractions_of_all_samples() -> None:
    result = a_result()
    assert result.n == 7
    assert result.clean == 6 / 7
    assert result.per_attack == {"pgd-20": 3 / 7, "cw-20": 3 / 7}
    assert result.worst.tolist() == flags("1100000").tolist()
    assert result.robust == 2 / 7


def test_a_result_says_its_accuracies_first() -> None:
    said = "clean 0.8571, pgd-20 0.4286, cw-20 0.4286, robust 0.2857, E01"
    assert repr(a_result()) == f"Result(7 samples, linf {8 / 255}: {said})"
    back = repr(Result.from_json(a_result().to_json()))
    assert back.startswith(f"Result(7 samples, linf {8 / 255}: clean 0.8571, "), "norm and radius in the same order"
    assert repr(Result(threat={}, flags={"clean": flags("10")})) == "Result(2 samples, : clean 0.5000, robust 0.5000)"


def test_a_sample_that_is_wrong_unperturbed_is_never_robust() -> None:
    result = Result(threat={}, flags={"clean": flags("0110"), "pgd": flags("1110")})
    assert result.worst.tolist() == [False, True, True, False]
    assert result.robust == 0.5
    assert result.per_attack == {"pgd": 0.75}


def test_result_survives_json() -> None:
    result = a_result()
    again = Result.from_json(result.to_json())
    assert again.to_json() == result.to_json()
    assert again.flags.keys() == result.flags.keys()
    assert all(torch.equal(again.flags[k], result.flags[k]) for k in result.flags)
    assert (again.findings, again.marks, again.threat) == (result.findings, result.marks, result.threat)
    assert (again.costs, again.provenance) == (result.costs, result.provenance)


def raised(key: str) -> Callable[[dict[str, Any]], None]:
    def change(d: dict[str, Any]) -> None:
        d[key] += 0.01

    return change


def better_attack(d: dict[str, Any]) -> None:
    d["per_attack"]["cw-20"] = 1.0


def hidden_attack(d: dict[str, Any]) -> None:
    del d["per_attack"]["cw-20"]


def flipped_flag(d: dict[str, Any]) -> None:
    d["flags"]["pgd-20"][0] = 0


@pytest.mark.parametrize(
    "change", [raised("clean"), raised("robust"), raised("n"), better_attack, hidden_attack, flipped_flag]
)
def test_numbers_that_do_not_follow_from_the_flags_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    d = json.loads(a_result().to_json())
    change(d)
    with pytest.raises(StateError, match=r"runs/a\.json: its accuracies do not follow from its flags"):
        Result.from_json(json.dumps(d), "runs/a.json")


def lost_clean(d: dict[str, Any]) -> None:
    del d["flags"]["clean"]


def short_flags(d: dict[str, Any]) -> None:
    d["flags"]["cw-20"].pop()


def no_flags(d: dict[str, Any]) -> None:
    d["flags"] = {}


def text_flags(d: dict[str, Any]) -> None:
    d["flags"]["clean"] = "1111110"


def odd_finding(d: dict[str, Any]) -> None:
    d["findings"] = [{"code": "E01"}]


@pytest.mark.parametrize("change", [lost_clean, short_flags, no_flags, text_flags, odd_finding])
def test_a_result_with_broken_parts_is_a_state_error(change: Callable[[dict[str, Any]], None]) -> None:
    d = json.loads(a_result().to_json())
    change(d)
    with pytest.raises(StateError, match="evaluate again"):
        Result.from_json(json.dumps(d))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"flags": 1}'])
def test_text_that_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(StateError, match=r"best\.json is not a flatrock result"):
        Result.from_json(text, "best.json")


def test_every_missing_key_is_refused() -> None:
    d = json.loads(a_result().to_json())
    for key in set(d) - {"schema", "ids", "labels"}:
        with pytest.raises(StateError, match="not a flatrock result"):
            Result.from_json(json.dumps({k: v for k, v in d.items() if k != key}))


def test_distances_survive_json_with_infinity() -> None:
    far = torch.tensor([0.3, 1 / 3, float("inf"), 0.01, 0.02, 0.1, 0.0], dtype=torch.float64)
    names = {"clean": flags("1111110"), "rays": far > 8 / 255}
    result = Result(threat={"norm": "linf", "eps": 8 / 255}, flags=names, distances={"rays": far})
    assert result.mean_distance == {"rays": pytest.approx((0.3 + 1 / 3 + 0.01 + 0.02 + 0.1) / 6, rel=1e-15)}
    assert result.unreached == {"rays": 1}
    text = result.to_json()
    assert json.loads(text)["distances"]["rays"][2] is None
    again = Result.from_json(text)
    assert torch.equal(again.distances["rays"], far)
    assert again.to_json() == text


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("predictions", [0], "1 predictions for 5 samples"),
        ("predictions", [0] * 6, "6 predictions for 5 samples"),
        ("rounded", [1] * 4, "4 rounded flags for 5 samples"),
        ("rounded", [1, 1, 1, 1, 2], "rounded flags that are neither 0 nor 1"),
        ("margins", {"clean": [0.5]}, "1 clean margins for 5 samples"),
        ("margins", {"clean": [None] * 5}, ""),
        ("labels", [0], "1 labels for 5 samples"),
    ],
)
def test_values_that_are_not_one_per_sample_are_refused(key: str, value: Any, said: str) -> None:
    d = json.loads(a_labelled_result().to_json())
    with pytest.raises(StateError, match=rf"r\.json is not a flatrock result \(.*{said}.*\); evaluate again"):
        Result.from_json(json.dumps({**d, key: value}), "r.json")


def test_flags_are_0_or_1() -> None:
    d = json.loads(a_labelled_result().to_json())
    d["flags"]["clean"] = [7 * v for v in d["flags"]["clean"]]
    with pytest.raises(StateError, match="flags of clean that are neither 0 nor 1"):
        Result.from_json(json.dumps(d))


# Labels and classes


def a_labelled_result() -> Result:
    """Three samples of class 2, two of class 0, none of class 1; the fourth is wrong without attack."""
    return Result(
        threat={"norm": "linf", "eps": 0.1},
        flags={"clean": flags("11101"), "p/a": flags("11001"), "p/b": flags("10001"), "rays": flags("01101")},
        plans={"p": ("p/a", "p/b")},
        predictions=torch.tensor([2, 0, 2, 1, 2]),
        labels=torch.tensor([2, 0, 2, 0, 2]),
        margins={"clean": torch.tensor([1.0, 2.0, 3.0, -4.0, 5.0], dtype=torch.float64)},
        distances={"rays": torch.tensor([0.05, 0.2, 0.3, 0.0, float("inf")], dtype=torch.float64)},
        rounded=flags("10101"),
        ids=torch.tensor([7, 3, 9, 4, 8]),
        adversarial=torch.zeros(5, 2),
        findings=(Finding("E01", "was in train mode", "call eval()"),),
        costs={"rays": {"seconds": 1.0}},
        provenance={"seed": 3},
    )


def test_each_class_is_a_result_of_its_own() -> None:
    parts = a_labelled_result().by_class
    assert list(parts) == [0, 2], "in order, and none without samples"
    zero, two = parts[0], parts[2]
    assert (zero.n, zero.clean, zero.per_attack, zero.robust) == (2, 0.5, {"rays": 0.5, "p": 0.0}, 0.0)
    assert (two.n, two.clean, two.robust) == (3, 1.0, 1 / 3)
    assert two.per_attack == {"rays": 2 / 3, "p": 2 / 3}
    assert two.ids is not None
    assert two.labels is not None
    assert (two.ids.tolist(), two.labels.tolist()) == ([7, 9, 8], [2, 2, 2])
    assert two.margins["clean"].tolist() == [1.0, 3.0, 5.0]
    assert two.mean_distance == {"rays": pytest.approx((0.05 + 0.3) / 2, rel=1e-15)}
    assert two.robust_rounded == 1.0
    assert zero.predictions is not None
    assert zero.predictions.tolist() == [0, 1]
    assert (two.costs, two.findings, two.adversarial) == ({}, (), None), "those of the whole"
    assert two.provenance == {"seed": 3}
    assert Result.from_json(two.to_json()).to_json() == two.to_json()


def test_a_part_of_all_in_order_knows_its_places() -> None:
    whole = Result(threat={}, flags={"clean": flags("1011")}, labels=torch.tensor([1, 0, 1, 0]))
    assert [part.ids.tolist() for part in whole.by_class.values() if part.ids is not None] == [[1, 3], [0, 2]]


def test_labels_survive_json_and_files_without_them_are_read() -> None:
    result = a_labelled_result()
    text = result.to_json()
    assert json.loads(text)["labels"] == [2, 0, 2, 0, 2]
    again = Result.from_json(text)
    assert again.labels is not None
    assert (again.labels.tolist(), again.labels.dtype) == ([2, 0, 2, 0, 2], torch.int64)
    assert again.to_json() == text
    older = Result.from_json(json.dumps({k: v for k, v in json.loads(text).items() if k != "labels"}))
    assert older.labels is None
    assert older.robust == result.robust
    assert Result.from_json(older.to_json()).labels is None
    with pytest.raises(StateError, match="the result has no labels, so that its classes are not known; evaluate again"):
        _ = older.by_class


def test_labels_that_cannot_be_are_refused() -> None:
    d = json.loads(a_labelled_result().to_json())
    with pytest.raises(StateError, match="4 labels for 5 samples"):
        Result.from_json(json.dumps({**d, "labels": [2, 0, 2, 0]}))
    with pytest.raises(StateError, match=r"a\.json: its labels and predictions do not agree with its flags"):
        Result.from_json(json.dumps({**d, "labels": [2, 1, 2, 0, 2]}), "a.json")
    # A prediction that is no answer is wrong whatever its largest logit is.
    assert Result.from_json(json.dumps({**d, "labels": [2, 0, 2, 1, 2]})).clean == 0.8


def test_a_finding_reads_as_one_line() -> None:
    assert str(Finding("E01", "was in train mode", "call eval()")) == "E01: was in train mode; call eval()"


def an_epoch(**changes: Any) -> EpochRecord:
    values: dict[str, Any] = {
        "epoch": 3,
        "step": 900,
        "lr": 0.05,
        "terms": {"ce": 1.5, "kl": 0.25},
        "running_accuracy": 0.5,
        "clean": 0.8,
        "robust": 0.5,
        "train_robust": 0.75,
        "selected_on": "held_out",
        "best_epoch": 2,
        "seconds": 1.5,
        "images_per_second": 1000.0,
    }
    return EpochRecord(**{**values, **changes})


def test_epoch_record_survives_json_and_shows_its_gap() -> None:
    record = an_epoch()
    d = json.loads(json.dumps(record.to_dict()))
    assert d["gap"] == 0.25
    assert EpochRecord.from_dict(d) == record


@pytest.mark.parametrize("missing", ["robust", "train_robust"])
def test_no_gap_without_both_accuracies(missing: str) -> None:
    assert an_epoch(**{missing: None}).gap is None


def test_a_run_knows_its_last_and_best_epoch() -> None:
    epochs = tuple(an_epoch(epoch=e, best_epoch=best) for e, best in ((1, 1), (2, 2), (3, 2)))
    run = Run(folder=Path("runs/a"), records=epochs, status="done")
    assert run.last.epoch == 3
    assert run.best is epochs[1]
    unprobed = Run(folder=Path("runs/a"), records=(an_epoch(epoch=5, best_epoch=None),), status="done")
    assert unprobed.best is None


def test_birth_certificate_tells_code_machine_and_seed() -> None:
    born = birth_certificate(device="cpu", seed=4, recipe="abc")
    assert born["flatrock"] == VERSION
    assert born["torch"] == torch.__version__
    assert born["seed"] == 4
    assert born["recipe"] == "abc"
    assert born["commit"] == commit()
    assert born["device"].startswith("cpu")
    assert born["time"].endswith("+00:00")
    assert json.loads(json.dumps(born)) == born


def test_a_run_is_a_line() -> None:
    """In a notebook it stands below the cell that trained it."""
    epochs = tuple(an_epoch(epoch=e, best_epoch=2, clean=0.875, robust=0.5) for e in (1, 2, 3))
    assert repr(Run(Path("runs/a"), epochs, "finished")) == (
        "Run('runs/a': finished, 3 epochs; best 2: clean 0.8750, robust 0.5000)"
    )
    assert repr(Run(Path("runs/a"), (), "running")) == "Run('runs/a': running, 0 epochs)"
    mean = an_epoch(epoch=1, best_epoch=None, average_best_epoch=1, average_clean=0.25, average_robust=0.125)
    told = "Run('runs/a': interrupted, 1 epoch; averaged, best 1: clean 0.2500, robust 0.1250)"
    assert repr(Run(Path("runs/a"), (mean,), "interrupted")) == told
