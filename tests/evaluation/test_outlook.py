"""What is told while attacks run: which one it is, who stands, and when all will have ended at most."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatrock.attacks.catalog import ATTACKS
from flatrock.attacks.craft import craft
from flatrock.attacks.transfer import Transfer
from flatrock.core.progress import Silent
from flatrock.core.rng import Seed
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.journal import Chunk
from flatrock.evaluation.outlook import most_passes, outlook, seconds_left
from flatrock.evaluation.plans import Step, make_plan
from flatrock.evaluation.tally import Tally

CLASSES = 4
# Short, so that all of them run; those that take no steps take queries or nothing.
SHORT = {"square": {"queries": 7}, "rays": {"queries": 30}, "fgsm": {}, "guided": {}}


def net() -> nn.Module:
    made = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    gen = Seed(0).generator()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=gen))
    return made.eval()


@pytest.mark.parametrize("name", [n for n in ATTACKS.names() if ATTACKS.make(n).bounded])
def test_no_attack_makes_more_passes_than_the_most(name: str) -> None:
    """Samples that never leave, in a ball so small that none is broken, cost about what is said, and not more."""
    attack = ATTACKS.make(name, **SHORT.get(name, {"steps": 3}))
    model = Counted(net())
    x = 0.2 + 0.6 * torch.rand(5, 3, 2, 2, generator=Seed(1).generator())
    gen = Seed(0).samples(torch.arange(5))
    craft(attack, model, x, net()(x).argmax(1), Linf(1e-6), gen)
    made = sum(model.taken()) / 5
    assert 0.6 * most_passes(attack, CLASSES) <= made <= most_passes(attack, CLASSES), made


def test_a_transfer_makes_those_of_the_attack_behind_it() -> None:
    behind = ATTACKS.make("fab-t")
    assert most_passes(Transfer(net(), behind), 10) == most_passes(behind, 10) == 1801 + 900
    assert [most_passes(s.attack, 10) for s in make_plan(["autoattack"], classes=10)] == [202, 1820, 2701, 5001]
    assert most_passes(ATTACKS.make("fab"), 10) == 201 + 9 * 100


STEPS = (
    Step("alone", ATTACKS.make("pgd", steps=5)),
    *(Step(f"plan/{n}", ATTACKS.make("square", queries=q), "plan") for n, q in (("a", 9), ("b", 19))),
)


def tally() -> Tally:
    """Of 8 samples 7 are right without attack."""
    logits = torch.tensor([[2.0, 0.0]] * 7 + [[0.0, 1.0]])
    return Tally(torch.zeros(8, dtype=torch.int64), logits, logits[:, 0] - logits[:, 1], None)


def enter(into: Tally, step: Step, rows: list[int], broken: list[int], **numbers: float) -> None:
    right = torch.tensor([row not in broken for row in rows])
    told = {"backwards": 0.0, "no_answer": 0.0, "disputed": 0.0, **numbers}
    into.add(step, Chunk(step.label, torch.tensor(rows), right, right.float(), torch.zeros(len(broken), 1), told))


def test_the_formula_by_hand() -> None:
    known = tally()
    known.begin(STEPS[0])
    enter(known, STEPS[0], [0, 1, 2], [0, 1], seconds=12.0, forwards=20.0, backwards=10.0)
    # 4 of 7 are left: 12 * 4 / 3 = 16. The plan sees 7 that are right: 7 (10 + 1) + 7 (20 + 1) = 224 passes of 0.4 s.
    assert seconds_left(known, STEPS[0], STEPS[1:], left=4, votes=1) == pytest.approx(16 + 0.4 * 224)
    assert outlook(known, STEPS, 1, left=4) == "attack 1/3  62.50 % stand  all in at most ~0:01:46"
    assert outlook(known, STEPS, 1, left=4, devices=2) == "attack 1/3  62.50 % stand  all in at most ~0:00:53"
    assert seconds_left(known, STEPS[0], STEPS[1:], left=4, votes=3) == pytest.approx(16 + 0.4 * (7 * 13 + 7 * 23))
    enter(known, STEPS[0], [3, 4, 5, 6], [], seconds=1.0, forwards=10.0)
    known.begin(STEPS[1])
    enter(known, STEPS[1], [0, 1, 2, 3], [0, 1, 2], seconds=2.0, forwards=5.0)
    # Of the 7 of the plan 3 fell, and the 3 that were not tried yet may stand: 4 (20 + 1) passes, 0.4 s each.
    assert seconds_left(known, STEPS[1], STEPS[2:], left=3, votes=1) == pytest.approx(2 * 3 / 4 + 0.4 * 84)
    enter(known, STEPS[1], [4, 5, 6], [4], seconds=1.0, forwards=5.0)
    known.begin(STEPS[2])
    enter(known, STEPS[2], [3], [], seconds=2.0, forwards=5.0)
    assert outlook(known, STEPS, 3, left=2) == "attack 3/3  37.50 % stand", "what is left is the ETA of this attack"


class Heard(Silent):
    """Notes what is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.task = task

    def advance(self, units: int, note: str = "") -> None:
        self.notes.append((self.task, note))


def test_an_evaluation_tells_its_place_in_the_list() -> None:
    x = torch.rand(20, 3, 2, 2, generator=Seed(2).generator())
    model = net()
    heard = Heard()
    how = {"batch_size": 10, "progress": heard}
    evaluate(model, x, model(x).argmax(1), Linf(0.05), attacks=["fgsm", "fast"], **how)  # type: ignore[arg-type]
    tasks = ["evaluating fgsm", "evaluating fast/apgd-ce", "evaluating fast/apgd-t"]
    assert list(dict.fromkeys(task for task, _ in heard.notes)) == tasks
    for task, note in heard.notes:
        number = tasks.index(task) + 1
        assert note.startswith(f"attack {number}/3  ") and " % stand" in note
        assert ("  all in at most ~0:" in note) == (number < 3), note
    heard.notes.clear()
    evaluate(model, x, model(x).argmax(1), Linf(0.05), attacks=["fgsm"], **how)  # type: ignore[arg-type]
    assert all(note.endswith(" % stand") and "attack" not in note for _, note in heard.notes)
