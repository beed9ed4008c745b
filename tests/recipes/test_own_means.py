"""Terms of an own objective are means over the batch: a sum is told (T12), and nothing else is taken for one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_cases import among_methods

from flatrock.recipes.load import load_recipe
from flatrock.recipes.notes import notes

TERMS = '''
import torch
import torch.nn.functional as F

from flatrock.core.types import Parts


class Base:
    passes, inner_loss, hard_labels = ("clean", "adv"), "ce", False
    weight = 1.0

    def loss(self, views, y):
        ce = F.cross_entropy(views.adv.logits, y)
        return Parts({"ce": ce, "more": self.more(views, y)}, {"ce": 1.0, "more": self.weight})

    def more(self, views, y):
        return F.cross_entropy(views.clean.logits, y)


class Sum(Base):
    def more(self, views, y):
        return F.cross_entropy(views.clean.logits, y, reduction="sum")


class Kl(Base):
    def more(self, views, y):
        clean, adv = views.clean.logits.log_softmax(1), views.adv.logits.log_softmax(1)
        return F.kl_div(adv, clean, reduction="sum", log_target=True)


class Constant(Base):
    """Right for one size of batches only."""

    def more(self, views, y):
        return F.cross_entropy(views.clean.logits, y, reduction="sum") / 128


class Negative(Base):
    def more(self, views, y):
        return -views.clean.logits.square().sum()


class Counts(Base):
    """Shown, not trained on."""

    weight = 0.0

    def more(self, views, y):
        return (views.adv.logits.argmax(1) == y).float().sum() + 1


class Labelled(Base):
    def more(self, views, y):
        each = F.cross_entropy(views.clean.logits, y.clamp(min=0), reduction="none")
        return (each * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1)


class Variance(Base):
    def more(self, views, y):
        return views.clean.features.var(0).sum() + views.clean.features.std(0).sum()


class Pairs(Base):
    """Twice as large with every sample twice, yet no sum over samples."""

    def more(self, views, y):
        return (views.clean.features @ views.clean.features.T).square().sum() / len(y)


class AllPairs(Base):
    def more(self, views, y):
        return torch.cdist(views.clean.features, views.adv.features).sum()


class Nothing(Base):
    def more(self, views, y):
        return (views.clean.logits * 0).sum()


class Sized(Base):
    """Takes batches of one size only."""

    def more(self, views, y):
        self.table = getattr(self, "table", torch.zeros(len(y)))
        return F.cross_entropy(views.clean.logits, y, reduction="none").add(self.table).mean()


class Noisy(Base):
    def more(self, views, y):
        noise = torch.randn_like(views.clean.logits)
        return F.cross_entropy(views.clean.logits + noise, y)


class Gradients(Base):
    def more(self, views, y):
        ce = F.cross_entropy(views.clean.logits, y, reduction="sum")
        return torch.autograd.grad(ce, views.clean.logits, create_graph=True)[0].square().sum(1).mean()


class Moves(Base):
    """A sum while the loss warms up as well."""

    def at(self, moment):
        return Sum()
'''
LINES = {text: number for number, text in enumerate(TERMS.splitlines(), 1)}


@pytest.fixture(autouse=True)
def methods(tmp_path: Path) -> Iterator[Path]:
    with among_methods(tmp_path, TERMS) as file:
        yield file


@pytest.mark.parametrize("name", ["Sum", "Kl", "Constant", "Negative", "Moves"])
def test_a_sum_is_told(name: str) -> None:
    """It may be meant; so a run that began with one can go on, too."""
    at = LINES["    def loss(self, views, y):"]
    words = (
        rf"T12 the loss of mymethods:{name} is a sum over the batch, not a mean \(mymethods.py:{at}\): "
        r"with every sample twice, term 'more' is (\S+) instead of (\S+); take its .mean\(\) over the samples, or "
        r"divide by len\(y\)"
    )
    (said,) = notes(load_recipe("digits_at", {"objective": {"name": f"mymethods:{name}"}}), per_epoch=10)
    assert re.match(words, said)
    twice, once = said.split("term 'more' is ")[1].split(";")[0].split(" instead of ")
    assert float(twice) == pytest.approx(2 * float(once), rel=1e-3)


OTHERS = ["Base", "Counts", "Labelled", "Variance", "Pairs", "AllPairs", "Nothing", "Sized", "Noisy", "Gradients"]


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_taken_for_one(name: str) -> None:
    assert notes(load_recipe("digits_at", {"objective": {"name": f"mymethods:{name}"}}), per_epoch=10) == []
