"""The one-call form takes what `evaluate` takes: spellings, numbers of numpy, labels of any integer type."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatrock
from flatrock.attacks.catalog import attack, parse_attack
from flatrock.attacks.gradient import GradientAttack
from flatrock.core.errors import ConfigError, ModelError, ThreatError
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate

THREAT = Linf(0.1)


def case() -> tuple[nn.Module, Tensor, Tensor]:
    with kept_global_rng(seed=Seed(0).child("net")):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.rand(12, 5, generator=Seed(1).generator())
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize(
    ("name", "loss", "start"), [("pgd", "ce", "uniform"), ("cw", "cw", "uniform"), ("kl-pgd", "kl", "gaussian")]
)
def test_what_a_name_alone_stands_for(name: str, loss: str, start: str) -> None:
    assert parse_attack(name)[1] == GradientAttack(loss=loss, start=start, steps=20, noise=1e-3, restarts=1, eot=1)


def test_the_spelling_of_evaluations_is_understood() -> None:
    model, x, y = case()
    told = attack("pgd", model, x, y, THREAT, steps=7, restarts=2)
    assert torch.equal(attack("pgd-7:restarts=2", model, x, y, THREAT), told)
    assert torch.equal(attack("pgd-7", model, x, y, THREAT, restarts=2), told)
    with pytest.raises(ConfigError, match="attack 'pgd' is given steps twice, in its name and as option; keep one"):
        attack("pgd-7", model, x, y, THREAT, steps=7)


def test_a_plan_is_sent_to_evaluate() -> None:
    model, x, y = case()
    with pytest.raises(ConfigError, match=r"unknown attack 'autoattack'.*plans .* are for flatrock\.evaluate\("):
        attack("autoattack", model, x, y, THREAT)
    with pytest.raises(ConfigError, match=r"named by text such as 'pgd' or 'pgd-20', got 7"):
        attack(7, model, x, y, THREAT)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    model, x, y = case()
    told = attack("pgd", model, x, y, THREAT, steps=3, step_size=0.25)
    found = attack("pgd", model, x, y, THREAT, steps=np.int64(3), step_size=np.float32(0.25))
    assert torch.equal(found, told)
    spec: dict[str, Any] = {"name": "pgd", "steps": np.int32(3), "step_size": np.float64(0.25)}
    assert parse_attack(spec) == ("pgd-3:step_size=0.25", GradientAttack(steps=3, step_size=0.25))
    square = {"name": "square", "queries": np.int64(5)}
    result = evaluate(model, x, y, THREAT, attacks=[spec, square], batch_size=np.int64(4))  # type: ignore[arg-type]
    stored = json.loads(result.to_json())
    assert stored["provenance"]["batch_size"] == 4
    assert stored["attacks"]["pgd-3:step_size=0.25"]["steps"] == 3


@pytest.mark.parametrize("value", [True, np.float64(2.0), "2", np.bool_(True), np.int64(0)])
def test_a_batch_size_is_a_whole_number(value: Any) -> None:
    model, x, y = case()
    with pytest.raises(ConfigError, match=re.escape(f"batch_size must be at least 1, got {value!r}")):
        evaluate(model, x, y, THREAT, attacks=["fgsm"], batch_size=value)
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        attack("pgd", model, x, y, THREAT, steps=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integer_type_are_labels(dtype: torch.dtype) -> None:
    model, x, y = case()
    small = y.to(dtype)
    assert torch.equal(attack("mt-3", model, x, small, THREAT), attack("mt-3", model, x, y, THREAT))
    told = evaluate(model, x, y, THREAT, attacks=["fast"])
    found = evaluate(model, x, small, THREAT, attacks=["fast"])
    assert torch.equal(found.worst, told.worst)
    assert found.labels is not None
    assert found.labels.dtype == torch.int64
    assert found.provenance["samples_digest"] == told.provenance["samples_digest"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_told_to_become_full(dtype: torch.dtype) -> None:
    model, x, y = case()
    with pytest.raises(ThreatError, match=r"inputs must be float32 or float64 .*; use x\.float\(\)"):
        evaluate(model, x.to(dtype), y, THREAT)
    with pytest.raises(
        ModelError, match=rf"has {dtype} weights but the inputs are torch.float32; use model\.float\(\)"
    ):
        evaluate(model.to(dtype), x, y, THREAT)
    with pytest.raises(ModelError, match=r"use model\.to\(x\.dtype\), or convert x"):
        evaluate(model.float(), x.double(), y, THREAT)


def test_numbers_may_be_text_as_in_recipes() -> None:
    model, x, y = nn.Linear(4, 3), torch.rand(5, 4), torch.zeros(5, dtype=torch.long)
    made = [
        flatrock.attack("pgd", model, x, y, flatrock.Linf("8/255"), steps=2, step_size=size)
        for size in ("2/255", 2 / 255)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("pgd20", "pgd-20"), ("PGD-20", "pgd-20"), ("PGD_7:restarts=2", "pgd-7:restarts=2"), ("APGD-CE", "apgd-ce")],
)
def test_another_spelling_is_answered_with_the_right_one(asked: str, meant: str) -> None:
    model, x, y = nn.Linear(4, 3), torch.rand(5, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'\\?$"):
        flatrock.attack(asked, model, x, y, flatrock.Linf(0.1))
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'\\?"):
        flatrock.evaluate(model, x, y, flatrock.Linf(0.1), attacks=[asked])
    with pytest.raises(ConfigError, match="did you mean 'autoattack'"):
        flatrock.evaluate(model, x, y, flatrock.Linf(0.1), attacks=["AutoAttack"])


def test_a_single_image_needs_a_batch() -> None:
    model = flatrock.create_model("digits_cnn")
    with pytest.raises(flatrock.ModelError, match=r"got \[1, 8, 8\]; give a batch of one: x\[None\]$"):
        flatrock.attack("fgsm", model, torch.rand(1, 8, 8), torch.tensor([3]), flatrock.Linf(0.1))
    with pytest.raises(flatrock.ThreatError, match=r"a single image needs a batch of one: x\[None\], y\.reshape\(1\)"):
        flatrock.attack("fgsm", model, torch.rand(3, 8, 8), torch.tensor(3), flatrock.Linf(0.1))
