"""Input landscapes against a linear classifier, whose surface is known; the record and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatrock.core.errors import ModelError, StateError, ThreatError
from flatrock.core.progress import Silent
from flatrock.core.rng import Seed
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.input_landscape import random_signs, sign_gradient, walk_inputs
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.surface import CERTIFIED, OF_RUN, Landscape

AXIS = Axis(points=5, span=0.4)


def linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, -2.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0]]))
        model[1].bias.zero_()
    return model.eval()


def test_signs_are_plus_or_minus_one_and_belong_to_the_sample() -> None:
    like = torch.zeros(3, 1, 40, 40)
    signs = random_signs(like, Seed(0).samples(torch.tensor([4, 7, 9])))
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.05
    alone = random_signs(like[:1], Seed(0).samples(torch.tensor([7])))
    assert torch.equal(alone[0], signs[1])


def test_the_surface_of_a_linear_classifier_is_the_softplus_of_a_plane() -> None:
    model = linear()
    x = torch.full((2, 1, 2, 2), 0.9, dtype=torch.float64)
    y = torch.tensor([0, 1])
    weight = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    steep = sign_gradient(model, x, y)
    assert torch.equal(steep[0].flatten(), -weight.sign()), "uphill for class 0 is down its logit"
    assert torch.equal(steep[1].flatten(), weight.sign())
    gen = Seed(3).samples(torch.tensor([0, 1]))
    found = Ledger(None, {}, resume=False)
    walk_inputs(model, x, y, AXIS, gen=gen, batch_size=3, ledger=found, progress=Silent())
    signs = random_signs(x, gen)
    for k, side in ((0, -1.0), (1, 1.0)):
        for i, a in enumerate(AXIS.values):
            row = found.get(f"{k}/{i}")
            assert row is not None
            # Not clipped: 0.9 + 0.4 + 0.4 lies outside the box and counts as it is.
            at = torch.stack([x[k].flatten() + a * steep[k].flatten() + b * signs[k].flatten() for b in AXIS.values])
            logit = side * (at @ weight)
            assert torch.allclose(torch.tensor(row["loss"], dtype=torch.float64), F.softplus(logit), rtol=1e-12)
            assert torch.allclose(torch.tensor(row["margin"], dtype=torch.float64), -logit, rtol=1e-9, atol=1e-12)
            assert row["accuracy"] == (logit < 0).double().tolist()


def test_inputs_that_cannot_be_walked() -> None:
    model, gen = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval(), Seed(0).samples(torch.arange(2))
    x, y = torch.rand(2, 4), torch.tensor([0, 1])
    for given, kind, said in (
        (x.double(), ModelError, "float32 weights"),
        ((255 * x).to(torch.uint8), ThreatError, "divide by 255"),
    ):
        with pytest.raises(kind, match=said):
            found = Ledger(None, {}, resume=False)
            walk_inputs(model, given, y, AXIS, gen=gen, batch_size=3, ledger=found, progress=Silent())


def test_rows_that_are_there_are_not_walked_again() -> None:
    model = linear()
    x, y = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64), torch.tensor([0])
    found = Ledger(None, {}, resume=False)
    found.put("0/2", {"loss": ["kept"], "accuracy": [], "margin": []})
    gen = Seed(3).samples(torch.tensor([0]))
    walk_inputs(model, x, y, AXIS, gen=gen, batch_size=9, ledger=found, progress=Silent())
    assert len(found) == AXIS.points
    assert (found.get("0/2") or {})["loss"] == ["kept"]


# The record


def curve(*rows: list[float]) -> Landscape:
    values = np.array(rows, dtype=float)
    axis = Axis(points=values.shape[1], span=1.0).values
    return Landscape(
        kind="weight-1d",
        axis=axis,
        values={"loss": values, "accuracy": values / 10},
        threat={"norm": "linf", "eps": 0.1},
        identity={"data": "digest"},
        provenance=dict.fromkeys((*OF_RUN, *CERTIFIED), "known"),
    )


def test_sharpness_is_the_mean_rise_by_the_trapezoid_rule() -> None:
    parabola = [2 + a * a for a in Axis(points=401, span=1.0).values]
    record = curve(parabola, [1.0] * 401)
    assert record.middle == 2
    assert record.sharpness == pytest.approx([1 / 3, 0], abs=1e-5)
    assert record.rise_at(0.5) == pytest.approx([0.25, 0], abs=1e-9)
    coarse = curve([3.0, 2.0, 3.0])
    assert coarse.sharpness == pytest.approx([0.5])
    with pytest.raises(StateError, match=r"no point at 0\.25; the nearest is 1, or measure more points"):
        coarse.rise_at(0.25)
    tilted = curve([5.0, 3.0, 2.0, 2.5, 3.0])
    assert tilted.rise_at(1) == pytest.approx([2.0]), "the mean of both sides"
    assert tilted.rise_at(0.5) == pytest.approx([0.75])
    assert tilted.rise_at(0.5 * (1 + 1e-12)) == pytest.approx([0.75]), "but for rounding"
    thirds = curve([5.0, 4.0, 3.0, 2.0, 2.5, 3.0, 3.5])
    for i, text in enumerate(("0.333333", "0.666667", "1")):
        assert thirds.rise_at(float(text)) == pytest.approx([0.75 * (i + 1)]), "as it is printed"
    with pytest.raises(StateError, match="not to 2"):
        coarse.rise_at(2)


def test_a_surface_counts_falls_as_rises() -> None:
    values = np.array([[[0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]])
    record = Landscape(
        kind="weight-2d", axis=(-1.0, 0.0, 1.0), values={"loss": values}, threat={"norm": "linf", "eps": 0.1}
    )
    # Two corners with a quarter of a cell each, of four cells.
    assert record.sharpness == pytest.approx([0.125])
    with pytest.raises(StateError, match="no rise at a radius"):
        record.rise_at(0.5)


def test_records_survive_json_and_holes() -> None:
    record = curve([3.0, 2.0, float("nan")])
    text = record.to_json()
    again = Landscape.from_json(text)
    assert again.to_json() == text
    assert np.isnan(again.sharpness[0])
    assert json.loads(text)["values"]["loss"] == [[3.0, 2.0, None]]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "flatrock.landscape/9", "schema"),
        ("sharpness", [7.0], "does not follow"),
        ("axis", [-1.0, 1.0], "odd number"),
        ("axis", [-1.0, -0.5, 0.0, 0.5, 1.0], "shapes"),
        ("axis", "-1,0,1", "axis must be numbers"),
        ("axis", [-1.0, "0", 1.0], "axis must be numbers"),
        ("axis", [-1.0, 0.0, 2.0], "axis must be numbers"),
        ("kind", "weight-3d", "weight-1d or weight-2d"),
        ("kind", ["weight-1d"], "not a flatrock landscape"),
        ("threat", {}, "no 'norm'"),
        ("threat", {"norm": "linf", "eps": "8/255"}, "a number eps"),
        ("values", [], "values must be names"),
        ("values", {"accuracy": [[0.1, 0.2, 0.1]]}, "its values lack loss"),
        ("values", {"loss": [[3.0, 2.0, 3.0]]}, "its values lack accuracy"),
        ("values", {"loss": [["x", 2.0, 3.0]], "accuracy": [[0.1, 0.2, 0.1]]}, "could not convert"),
        ("provenance", {}, "its provenance lack run, checkpoint"),
        ("provenance", {"model": "resnet18"}, "its provenance lack weights, seed"),
        ("identity", {}, "its identity lack data"),
        ("identity", None, "identity must be names"),
    ],
)
def test_altered_records_are_refused(key: str, value: object, message: str) -> None:
    d = json.loads(curve([3.0, 2.0, 3.0]).to_json())
    d[key] = value
    with pytest.raises(StateError, match=message):
        Landscape.from_json(json.dumps(d), "a.json")


def test_an_input_record_names_each_image() -> None:
    d = json.loads(curve([3.0, 2.0, 3.0]).to_json())
    surface = [[[1.0] * 3] * 3]
    d.update(kind="input", values=dict.fromkeys(("loss", "accuracy", "margin"), surface), sharpness=[0.0])
    with pytest.raises(StateError, match="0 samples for 1 surfaces"):
        Landscape.from_json(json.dumps(d))
    d["samples"] = [{"id": 3, "class": "cat"}]
    assert Landscape.from_json(json.dumps(d)).count == 1


def test_files_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "a.json"
    binary.write_bytes(b"\x89PNG\xff\x00")
    with pytest.raises(StateError, match=r"a\.json is not a flatrock landscape \(it is not text\)"):
        Landscape.from_file(binary)
    with pytest.raises(StateError, match="there is no landscape"):
        Landscape.from_file(tmp_path / "none.json")
    with pytest.raises(StateError, match="could not read"):
        Landscape.from_file(tmp_path)


def test_what_is_no_record_is_refused() -> None:
    for text in ("", "[]", "{}", '{"schema": "flatrock.result/2"}'):
        with pytest.raises(StateError, match=r"a\.json is not a flatrock landscape"):
            Landscape.from_json(text, "a.json")
