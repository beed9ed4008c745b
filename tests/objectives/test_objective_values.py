"""Training losses against loops over plain numbers and golden values derived by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from objective_cases import ROWS, batch, helper_labels, views
from torch import Tensor

from flatrock.core.types import LABEL_TERMS, Objective
from flatrock.objectives.alp import ALP
from flatrock.objectives.at import AT
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.objectives.gat import GAT
from flatrock.objectives.mart import MART
from flatrock.objectives.standard import Standard
from flatrock.objectives.trades import TRADES

Row = list[float]


# Loops over plain numbers


def softmax(z: Row) -> Row:
    top = max(z)
    e = [math.exp(v - top) for v in z]
    return [v / sum(e) for v in e]


def ce(z: Row, y: int) -> float:
    return -math.log(softmax(z)[y])


def kl(z: Row, z_adv: Row) -> float:
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(softmax(z), softmax(z_adv), strict=True))


def one_mart(z: Row, z_adv: Row, y: int, form: str) -> tuple[float, float]:
    """The margin's term and the weighted KL."""
    s, t = softmax(z), softmax(z_adv)
    t_kappa = max(v for k, v in enumerate(t) if k != y)
    if form == "paper":
        rest = sum(t) - t_kappa if t_kappa < 0.5 else sum(v for v in t if v != t_kappa)  # 1 - t_kappa, its digits kept
        return -math.log(rest), kl(z, z_adv) * (1 - s[y])
    divergence = sum(a * (math.log(a) - math.log(b + 1e-12)) for a, b in zip(s, t, strict=True))
    return -math.log(1.0001 - t_kappa + 1e-12), divergence * (1.0000001 - s[y])


def one_pair(z: Row, z_adv: Row, pair: str) -> float:
    a, b = (z, z_adv) if pair == "logits" else (softmax(z), softmax(z_adv))
    return sum((u - v) ** 2 for u, v in zip(a, b, strict=True))


def naive(name: str, options: dict[str, Any], clean: Tensor, adv: Tensor, y: Tensor) -> dict[str, float]:
    """The named terms and 'total', as means over single samples."""
    terms: dict[str, list[float]] = {}
    rows = zip(clean.tolist(), adv.tolist(), y.tolist(), helper_labels(adv).tolist(), strict=True)
    for z, z_adv, k, said in rows:
        if name in ("standard", "at"):
            one = {"ce": ce(z, k)} if name == "standard" else {"ce_adv": ce(z_adv, k)}
        elif name == "trades":
            one = {"ce": ce(z, k), "kl": kl(z, z_adv)}
        elif name == "hat":
            one = {"ce": ce(z, k)} | ({"ce_adv": ce(z_adv, k)} if "form" in options else {"kl": kl(z, z_adv)})
            if options["gamma"]:
                one["ce_helper"] = ce([2 * b - a for a, b in zip(z, z_adv, strict=True)], said)
        elif name == "gat":
            one = {"ce": ce(z, k), "pair_probabilities": one_pair(z, z_adv, "probabilities")}
        elif name == "mart":
            boost, wkl = one_mart(z, z_adv, k, options.get("form", "paper"))
            one = {"ce": ce(z, k)} if options.get("ce") == "clean" else {"ce_adv": ce(z_adv, k)}
            one |= {"boost": boost, "wkl": wkl}
        else:
            pair = options.get("pair", "logits")
            one = {"ce_adv": ce(z_adv, k), f"pair_{pair}": one_pair(z, z_adv, pair)}
        for term, value in one.items():
            terms.setdefault(term, []).append(value)
    means = {term: sum(values) / len(values) for term, values in terms.items()}
    weight = options.get("beta", options.get("weight", 1.0))
    weights = {**dict.fromkeys(LABEL_TERMS, 1.0), "ce_helper": options.get("gamma", 0.0)}
    if name == "hat":
        weights["ce_adv"] = options["beta"]
    return {**means, "total": sum(weights.get(k, weight) * v for k, v in means.items())}


def test_every_objective_in_the_catalog_is_tested_here() -> None:
    assert {name for name, _ in ROWS} == set(OBJECTIVES.names())
    assert all(entry.summary for entry in OBJECTIVES)


@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
@pytest.mark.parametrize(("name", "options"), ROWS)
def test_losses_equal_naive_loops(name: str, options: dict[str, Any], scale: float) -> None:
    clean, adv, y = batch(scale=scale)
    parts = OBJECTIVES.make(name, **options).loss(views(clean, adv), y)
    expected = naive(name, options, clean, adv, y)
    got = {**{k: float(v) for k, v in parts.terms.items()}, "total": float(parts.total)}
    assert got == pytest.approx(expected, rel=1e-10, abs=1e-12)


# Golden values: W = [[1, -.5], [.25, .75], [-1, .5]], f = (1, 2), f' = (.5, -1), y = 0

GOLD_CLEAN = torch.tensor([[0.0, 1.75, 0.0]], dtype=torch.float64)
GOLD_ADV = torch.tensor([[1.0, -0.625, -1.0]], dtype=torch.float64)
S, T = (0.12895567, 0.74208866, 0.12895567), (0.75061158, 0.14780418, 0.10158423)


def golden(objective: Objective) -> dict[str, float]:
    parts = objective.loss(views(GOLD_CLEAN, GOLD_ADV), torch.tensor([0]))
    return {**{k: float(v) for k, v in parts.terms.items()}, "total": float(parts.total)}


def test_golden_logits_are_those_of_the_fixture() -> None:
    w = torch.tensor([[1, -0.5], [0.25, 0.75], [-1, 0.5]], dtype=torch.float64)
    assert torch.equal(w @ torch.tensor([1.0, 2.0], dtype=torch.float64), GOLD_CLEAN[0])
    assert torch.equal(w @ torch.tensor([0.5, -1.0], dtype=torch.float64), GOLD_ADV[0])
    assert GOLD_CLEAN.softmax(1)[0].tolist() == pytest.approx(S, abs=5e-9)
    assert GOLD_ADV.softmax(1)[0].tolist() == pytest.approx(T, abs=5e-9)


def test_golden_standard_and_at() -> None:
    assert golden(Standard())["total"] == pytest.approx(2.0482865608, abs=5e-11)
    assert golden(AT())["total"] == pytest.approx(0.2868669592, abs=5e-11)


def test_golden_trades() -> None:
    got = golden(TRADES(beta=6.0))
    assert got["ce"] == pytest.approx(2.0482865608, abs=5e-11)
    assert got["kl"] == pytest.approx(1.0010409559, abs=5e-11)
    assert got["total"] == pytest.approx(2.0482865608 + 6 * 1.0010409559, abs=1e-9)


def test_golden_mart_with_the_constants_of_the_code() -> None:
    got = golden(MART(beta=5.0, form="code"))
    assert got["ce_adv"] + got["boost"] == pytest.approx(0.4466885703, abs=5e-11)
    assert got["wkl"] == pytest.approx(0.8719511467, abs=5e-11)
    assert got["total"] == pytest.approx(4.8064443039, abs=5e-10)


def test_golden_mart_paper_form() -> None:
    """BCE = -log t_0 - log(1 - t_1), WKL = KL * (1 - s_0)."""
    got = golden(MART(beta=5.0))
    assert got["ce_adv"] + got["boost"] == pytest.approx(0.2868669592 - math.log(1 - T[1]), abs=2e-8)
    assert got["wkl"] == pytest.approx(1.0010409559 * (1 - S[0]), abs=2e-8)


def test_golden_mart_with_the_cross_entropy_at_x() -> None:
    """As the TrH appendix writes it; the margin and the divergence are MART's."""
    got, proper = golden(MART(beta=5.0, ce="clean")), golden(MART(beta=5.0))
    assert got.keys() == {"ce", "boost", "wkl", "total"}
    assert got["ce"] == pytest.approx(2.0482865608, abs=5e-11)
    assert (got["boost"], got["wkl"]) == (proper["boost"], proper["wkl"])
    assert got["total"] == pytest.approx(proper["total"] - 0.2868669592 + 2.0482865608, abs=2e-10)


def test_golden_alp_logits() -> None:
    """(0 - 1)^2 + (1.75 + .625)^2 + (0 + 1)^2 = 1 + 5.640625 + 1."""
    got = golden(ALP(weight=0.5))
    assert got["pair_logits"] == 7.640625
    assert got["total"] == pytest.approx(0.2868669592 + 0.5 * 7.640625, abs=5e-11)


def test_golden_gat() -> None:
    squares = sum((a - b) ** 2 for a, b in zip(S, T, strict=True))
    got = golden(GAT())
    assert got["ce"] == pytest.approx(2.0482865608, abs=5e-11)
    assert got["total"] == pytest.approx(2.0482865608 + 10 * squares, abs=5e-7)


def test_golden_alp_probabilities() -> None:
    squares = sum((a - b) ** 2 for a, b in zip(S, T, strict=True))
    got = golden(ALP(weight=2.0, pair="probabilities"))
    assert got["pair_probabilities"] == pytest.approx(squares, abs=5e-8)
    assert got["total"] == pytest.approx(0.2868669592 + 2 * squares, abs=1e-7)
