"""An evaluation on disk: what is there is played back, what is damaged is made again, what is foreign is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import BusyError, StateError
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.journal import Chunk, Journal, discard, discard_left_over, journaled

IDENTITY = {"model": "abc", "seed": 0, "attacks": {"pgd-3": {"steps": 3}}}


def chunk(*rows: int, label: str = "pgd-3") -> Chunk:
    """The first sample is broken, the others stand."""
    right = torch.arange(len(rows)) > 0
    numbers = {"seconds": 0.1 + 0.2, "forwards": 12, "backwards": 9, "no_answer": 0, "disputed": 1}
    x_adv = torch.rand(1, 2, 3, generator=Seed(0).generator())
    return Chunk(label, torch.tensor(rows), right, torch.where(right, 0.9, -0.1), x_adv, numbers)


def same(a: Chunk, b: Chunk) -> bool:
    names = ("rows", "right", "margin", "x_adv")
    return (
        (a.label, dict(a.numbers)) == (b.label, dict(b.numbers))
        and all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)
        and all(getattr(a, n).dtype == getattr(b, n).dtype for n in names)
    )


def written(folder: Path, *chunks: Chunk) -> None:
    book = Journal(folder, IDENTITY, resume=False)
    for made in chunks:
        book.keep(made)


def test_chunks_come_back_bit_by_bit_and_in_order(tmp_path: Path) -> None:
    chunks = chunk(0, 1, 2), chunk(5, 7), chunk(0, 1, label="cw-3")
    written(tmp_path / "x.part", *chunks)
    book = Journal(tmp_path / "x.part", IDENTITY, resume=True)
    for made in chunks:
        rows = torch.cat([made.rows, torch.tensor([90, 91])])  # more rows are waiting than the chunk took
        again = book.replay(made.label, rows)
        assert again is not None
        assert same(again, made)
    assert book.replay("cw-3", torch.tensor([90, 91])) is None


def test_distances_come_back_and_their_absence_too(tmp_path: Path) -> None:
    far = torch.tensor([0.1, torch.inf], dtype=torch.float64)
    measured = Chunk(**{**vars(chunk(0, 1)), "distances": far})
    written(tmp_path / "x.part", measured, chunk(2, 3))
    book = Journal(tmp_path / "x.part", IDENTITY, resume=True)
    first, second = book.replay("pgd-3", torch.tensor([0, 1])), book.replay("pgd-3", torch.tensor([2, 3]))
    assert first is not None
    assert first.distances is not None
    assert torch.equal(first.distances, far)
    assert second is not None
    assert second.distances is None


def test_a_chunk_in_which_everyone_stands_comes_back(tmp_path: Path) -> None:
    made = Chunk("a", torch.tensor([1]), torch.tensor([True]), torch.tensor([0.5]), torch.rand(0, 2, 3), {"seconds": 1})
    written(tmp_path / "x.part", made)
    again = Journal(tmp_path / "x.part", IDENTITY, resume=True).replay("a", torch.tensor([1]))
    assert again is not None
    assert again.x_adv.shape == (0, 2, 3)


@pytest.mark.parametrize(("label", "rows"), [("cw-3", [0, 1, 2]), ("pgd-3", [0, 1, 3]), ("pgd-3", [0, 1])])
def test_a_chunk_of_something_else_is_not_played_back(tmp_path: Path, label: str, rows: list[int]) -> None:
    written(tmp_path / "x.part", chunk(0, 1, 2), chunk(0, 1, label=label))
    book = Journal(tmp_path / "x.part", IDENTITY, resume=True)
    assert book.replay(label, torch.tensor(rows)) is None
    assert book.replay("pgd-3", torch.tensor([0, 1, 2])) is not None, "it is still the next one"


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    book = Journal(None, IDENTITY, resume=True)
    book.keep(chunk(0))
    assert book.replay("pgd-3", torch.tensor([0])) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_be_named_by_text(tmp_path: Path) -> None:
    x = torch.rand(6, 4, generator=Seed(0).generator())
    evaluate(nn.Flatten(), x, x.argmax(1), Linf(0.1), attacks=["pgd-2"], journal=str(tmp_path / "x.part"))
    assert (tmp_path / "x.part" / "exam.json").is_file()


# Whose folder it is


def test_another_evaluation_is_refused_with_what_differs(tmp_path: Path) -> None:
    written(tmp_path / "x.part", chunk(0, 1))
    other = {**IDENTITY, "seed": 1, "attacks": {"pgd-3": {"steps": 4}}, "precision": "float16"}
    with pytest.raises(StateError, match=r"belongs to another evaluation \(different: attacks, precision, seed\)"):
        Journal(tmp_path / "x.part", other, resume=True)
    assert Journal(tmp_path / "x.part", IDENTITY, resume=True).replay("pgd-3", torch.tensor([0, 1])) is not None


@pytest.mark.parametrize("content", [b"", b'{"model": ', b"[1, 2]", b"\xff\xfe"])
def test_a_damaged_name_is_refused(tmp_path: Path, content: bytes) -> None:
    written(tmp_path / "x.part", chunk(0, 1))
    (tmp_path / "x.part/exam.json").write_bytes(content)
    with pytest.raises(StateError, match=r"exam\.json is damaged; delete .*x\.part to start again"):
        Journal(tmp_path / "x.part", IDENTITY, resume=True)


@pytest.mark.parametrize("seed", [IDENTITY["seed"], 5])
def test_without_resume_an_unfinished_evaluation_is_not_lost(tmp_path: Path, seed: int) -> None:
    written(tmp_path / "x.part", chunk(0, 1), chunk(2, 3))
    with pytest.raises(StateError, match=r"x\.part holds 2 finished batches .* go on with --resume .*, or delete it"):
        Journal(tmp_path / "x.part", {**IDENTITY, "seed": seed}, resume=False)
    assert Journal(tmp_path / "x.part", IDENTITY, resume=True).replay("pgd-3", torch.tensor([0, 1])) is not None


def test_an_evaluation_that_had_finished_nothing_starts_over(tmp_path: Path) -> None:
    written(tmp_path / "x.part")
    Journal(tmp_path / "x.part", {**IDENTITY, "seed": 5}, resume=False)
    assert json.loads((tmp_path / "x.part/exam.json").read_text())["seed"] == 5


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "x.part").mkdir()
    (tmp_path / "x.part/photo.png").write_bytes(b"mine")
    with pytest.raises(StateError, match="exists and is not an unfinished evaluation; it is left alone"):
        Journal(tmp_path / "x.part", IDENTITY, resume=resume)
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StateError, match="left alone"):
        Journal(tmp_path / "file", IDENTITY, resume=resume)
    assert (tmp_path / "x.part/photo.png").read_bytes() == (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("resume", [False, True])
def test_killed_before_it_had_a_name(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "x.part").mkdir()
    (tmp_path / "x.part/.exam.json.part").write_bytes(b'{"mod')
    Journal(tmp_path / "x.part", IDENTITY, resume=resume).keep(chunk(0, 1))
    assert Journal(tmp_path / "x.part", IDENTITY, resume=True).replay("pgd-3", torch.tensor([0, 1])) is not None


def test_what_is_discarded_is_gone(tmp_path: Path) -> None:
    book = Journal(tmp_path / "x.part", IDENTITY, resume=False)
    book.keep(chunk(0))
    discard(tmp_path / "x.part")
    assert list(tmp_path.iterdir()) == []
    discard(tmp_path / "x.part")


def test_discarding_and_starting_over_spare_what_others_put_there(tmp_path: Path) -> None:
    written(tmp_path / "x.part")
    (tmp_path / "x.part/notes.txt").write_text("mine")
    book = Journal(tmp_path / "x.part", IDENTITY, resume=False)
    book.keep(chunk(0))
    discard(tmp_path / "x.part")
    assert [p.name for p in (tmp_path / "x.part").iterdir()] == ["notes.txt"]


# In an evaluation


def question() -> dict[str, Any]:
    with kept_global_rng(seed=Seed(0).child("net")):
        first, last = nn.Linear(6, 16), nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        first.weight.mul_(3)
        first.bias.copy_(-first.weight.sum(1) / 2)  # centred, so that it answers with every class
    model = nn.Sequential(first, nn.Tanh(), last).eval()
    x = torch.rand(30, 6, generator=Seed(1).generator())
    y = model(x).argmax(1).detach()
    y[::5] = (y[::5] + 1) % 4
    options = {"attacks": ["fgsm", "pgd-4:restarts=2", "fast"], "batch_size": 8, "keep_adversarial": True}
    return {"model": model, "x": x, "y": y, "threat": Linf(0.05), **options}


def alike(a: Result, b: Result) -> bool:
    """All but the times."""
    assert a.adversarial is not None
    assert b.adversarial is not None
    return (
        all(torch.equal(a.flags[k], b.flags[k]) for k in a.flags)
        and all(torch.equal(a.margins[k], b.margins[k]) for k in a.margins)
        and torch.equal(a.adversarial, b.adversarial)
        and [{**c, "seconds": 0} for c in a.costs.values()] == [{**c, "seconds": 0} for c in b.costs.values()]
    )


class Killed(Exception):
    pass


class Ends:
    """Progress that stops the work after so many batches."""

    def __init__(self, after: int) -> None:
        self.left = after

    def begin(self, task: str, total: int, done: int = 0) -> None: ...

    def end(self) -> None: ...

    def say(self, text: str) -> None: ...

    def advance(self, units: int, note: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that are really attacked."""
    made: list[int] = []
    real = Exam.attempt

    def watched(self: Exam, step: Any, rows: Tensor) -> Chunk:
        found = real(self, step, rows)
        made.append(len(found.rows))
        return found

    monkeypatch.setattr(Exam, "attempt", watched)
    return made


@pytest.mark.parametrize("after", [1, 5, 9])
def test_a_killed_evaluation_goes_on_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    made = attempts(monkeypatch)
    whole = evaluate(**question())
    assert 0 < whole.robust < whole.clean
    batches = len(made)
    made.clear()
    with pytest.raises(Killed):
        evaluate(**question(), journal=tmp_path / "j", progress=Ends(after))
    resumed = evaluate(**question(), journal=tmp_path / "j", resume=True)
    assert alike(resumed, whole)
    assert len(made) == batches, "nothing is attacked twice"


@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_chunk_is_made_again_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    whole = evaluate(**question(), journal=tmp_path / "j")
    victim = sorted((tmp_path / "j").glob("chunk-*"))[2]
    before = victim.read_bytes()
    if how == "gone":
        victim.unlink()
    else:
        middle = len(before) - 9
        changed = before[:middle] if how == "cut" else before[:middle] + bytes([before[middle] ^ 1]) + before[-8:]
        victim.write_bytes(changed)
    made = attempts(monkeypatch)
    again = evaluate(**question(), journal=tmp_path / "j", resume=True)
    assert alike(again, whole)
    assert len(made) == 1


def test_smaller_chunks_of_a_full_gpu_are_played_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is short in one process and not in the next changes where batches end, not what is found."""
    whole = evaluate(**question())
    real = Exam._attempt

    def short_of_memory(self: Exam, step: Any, rows: Tensor) -> Chunk:
        if len(rows) > 5:
            raise torch.OutOfMemoryError
        return real(self, step, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Exam, "_attempt", short_of_memory)
        with pytest.raises(Killed):
            evaluate(**question(), journal=tmp_path / "j", progress=Ends(4))
    made = attempts(monkeypatch)
    resumed = evaluate(**question(), journal=tmp_path / "j", resume=True)
    assert made[0] == 8
    for name, flag in whole.flags.items():
        assert torch.equal(resumed.flags[name], flag)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"threat": Linf(0.06)}, "attacks, threat"),
        ({"batch_size": 9}, "batch_size"),
        ({"attacks": ["fgsm"]}, "attacks"),
        ({"x": torch.full((30, 6), 0.5)}, "data"),
        ({"ids": torch.arange(30).flip(0)}, "ids"),
    ],
)
def test_only_the_same_question_is_resumed(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    asked = {**question(), "attacks": ["pgd-2"], "journal": tmp_path / "j"}
    evaluate(**asked)
    with pytest.raises(StateError, match=rf"\(different: {named}\)"):
        evaluate(**{**asked, **change}, resume=True)
    other = question()["model"]
    with torch.no_grad():
        other[0].bias[0] += 1e-6
    with pytest.raises(StateError, match=r"\(different: model\)"):
        evaluate(**{**asked, "model": other}, resume=True)


def test_a_finished_evaluation_is_read_by_those_who_ask_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**question(), "keep_adversarial": False, "journal": tmp_path / "x.part"}
    whole = evaluate(**asked)
    (tmp_path / "x.json").write_text(whole.to_json())
    discard(tmp_path / "x.part")
    made = attempts(monkeypatch)
    assert evaluate(**asked, resume=True).to_json() == whole.to_json()
    assert made == []
    for change in (
        {"doubt": True},
        {"seed": 1},
        {"batch_size": 9},
        {"provenance": {"epoch": 3}},
        {"keep_adversarial": True},
        {"marks": ("test-selected",)},
    ):
        evaluate(**{**asked, "resume": True, **change})
        assert made, change
        made.clear()
        discard(tmp_path / "x.part")
    (tmp_path / "x.json").write_text(whole.to_json()[:-9])
    assert evaluate(**asked, resume=True).worst.equal(whole.worst)
    assert made, "what is damaged is made again"


def test_what_is_said_about_a_finished_evaluation_is_compared_as_files_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**question(), "keep_adversarial": False, "journal": tmp_path / "x.part"}
    about = {"shape": (1, 2), "unfinished": "1 of 2 epochs"}
    (tmp_path / "x.json").write_text(evaluate(**asked, provenance=about).to_json())
    discard(tmp_path / "x.part")
    made = attempts(monkeypatch)
    evaluate(**asked, resume=True, provenance=about)
    assert made == [], "a tuple comes back as a list"
    evaluate(**asked, resume=True, provenance={"shape": (1, 2)})
    assert made, "the run is finished now"


@pytest.mark.parametrize(
    ("stored", "begun", "left_over"),
    [
        ({}, {}, True),
        ({"doubt": True}, {}, True),
        ({}, {"doubt": True}, False),
        ({"doubt": True}, {"doubt": True}, True),
        ({}, {"keep_adversarial": True}, False),
    ],
)
def test_batches_of_one_who_asked_for_more_are_no_left_overs(
    tmp_path: Path, stored: dict[str, bool], begun: dict[str, bool], left_over: bool
) -> None:
    asked = {**question(), "keep_adversarial": False, "journal": tmp_path / "x.part"}
    (tmp_path / "x.json").write_text(evaluate(**{**asked, **stored}).to_json())
    discard(tmp_path / "x.part")
    more = {**asked, **begun}
    with pytest.raises(Killed):
        evaluate(**more, progress=Ends(3))
    discard_left_over(tmp_path / "x.part")
    assert (tmp_path / "x.part").exists() != left_over
    if not left_over:
        with pytest.raises(StateError, match=r"3 finished batches of .* that was stopped; go on with --resume"):
            evaluate(**more)
    evaluate(**more, resume=not left_over)


def test_who_goes_on_may_ask_for_more(tmp_path: Path) -> None:
    asked = {**question(), "keep_adversarial": False, "journal": tmp_path / "x.part"}
    (tmp_path / "x.json").write_text(evaluate(**asked).to_json())
    discard(tmp_path / "x.part")
    for words in ({}, {"resume": True, "doubt": True}):
        with pytest.raises(Killed):
            evaluate(**asked, **words, progress=Ends(3))
    discard_left_over(tmp_path / "x.part")
    assert len(list((tmp_path / "x.part").glob("chunk-*"))) >= 3, "the stored result has no such doubts"


def test_batches_of_an_unknown_question_are_no_obstacle(tmp_path: Path) -> None:
    written(tmp_path / "x.part", chunk(0, 1))
    (tmp_path / "x.part" / "exam.json").unlink()
    Journal(tmp_path / "x.part", IDENTITY, resume=True)
    assert [path.name for path in (tmp_path / "x.part").iterdir()] == ["exam.json"]


def test_nobody_else_evaluates_until_the_doubts_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = {**question(), "journal": tmp_path / "x.part"}, list[bool]()

    def looked(*words: object) -> list[object]:
        seen.append((tmp_path / ".x.part.lock").exists())
        return []

    monkeypatch.setattr("flatrock.evaluation.evaluate.doubts_deep", looked)
    evaluate(**asked, doubt=True)
    assert seen == [True]


def test_a_journal_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    asked = {**question(), "journal": tmp_path / "x.part"}
    with (
        journaled(tmp_path / "x.part", IDENTITY, resume=False) as book,
        pytest.raises(BusyError, match=rf"^process {os.getpid()} is evaluating into .*x\.part; wait for it$"),
    ):
        book.keep(chunk(0, 1))
        evaluate(**asked)
    assert [path.name for path in tmp_path.iterdir()] == ["x.part"], "the lock is gone, the batches are there"


def test_a_finished_evaluation_of_another_function_with_the_same_weights_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**question(), "keep_adversarial": False, "journal": tmp_path / "x.part"}
    (tmp_path / "x.json").write_text(evaluate(**asked).to_json())
    discard(tmp_path / "x.part")
    made = attempts(monkeypatch)
    asked["model"].register_forward_hook(lambda module, inputs, output: output.flip(1))
    with pytest.raises(StateError, match=r"another model with these weights \(different: clean answers\)"):
        evaluate(**asked, resume=True)
    assert not made
    discard(tmp_path / "x.part")
    evaluate(**asked)
    assert made
