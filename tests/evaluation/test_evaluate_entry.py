"""What an evaluation checks, takes and refuses before its first attack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.progress import Silent
from flatrock.core.threat import L2, Linf, Threat
from flatrock.evaluation.evaluate import evaluate


class Watch(Silent):
    """Counts the attacks that were begun."""

    begun = 0

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.begun += 1


@pytest.mark.parametrize(
    ("spec", "threat", "classes", "said"),
    [
        ("rays", L2(0.1), 3, "'rays' measures linf distances, got l2"),
        ("apgd-dlr", Linf(0.1), 2, "loss 'dlr' needs at least 3 classes, the model has 2"),
        ("pgd:loss=dlr", Linf(0.1), 2, "loss 'dlr' needs at least 3 classes, the model has 2"),
        ("apgd-t", Linf(0.1), 3, "loss 'targeted dlr' needs at least 4 classes, the model has 3; use loss 'margin'"),
        ("transfer-apgd-t", Linf(0.1), 3, "loss 'targeted dlr' needs at least 4 classes, the model has 3"),
    ],
)
def test_an_attack_that_cannot_work_is_refused_before_any_runs(
    spec: str, threat: Threat, classes: int, said: str
) -> None:
    model, watch, x = nn.Linear(5, classes), Watch(), torch.rand(4, 5)
    surrogate = nn.Linear(5, classes) if spec.startswith("transfer") else None
    with pytest.raises(ConfigError, match=f"'{spec}': .*{said}"):
        evaluate(
            model,
            x,
            model(x).argmax(1),
            threat,
            attacks=["pgd-3", spec],
            surrogate=surrogate,
            progress=watch,
        )
    assert watch.begun == 0


def test_square_is_refused_in_a_norm_it_does_not_know() -> None:
    class Other(Linf):
        norm = "l1"

    model, watch, x = nn.Linear(5, 3), Watch(), torch.rand(4, 5)
    with pytest.raises(ConfigError, match="'square' knows the norms linf and l2, got 'l1'"):
        evaluate(model, x, model(x).argmax(1), Other(0.1), attacks=["pgd-3", "square"], progress=watch)
    assert watch.begun == 0
