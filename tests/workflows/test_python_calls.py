"""flatrock.train and flatrock.evaluate as they are called from Python: progress, resuming, numbers of numpy's."""

from __future__ import annotations

import inspect
import json
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import flatrock
from flatrock.cli import console
from flatrock.core.errors import ConfigError
from flatrock.core.progress import Silent

SHORT: dict[str, Any] = {"train__max_steps": 2, "data__limit": 200, "attack__steps": 1, "select__size": 20}
THREAT = flatrock.Linf(0.1)


class Bar(Silent):
    """Stands for the console's."""

    told: ClassVar[list[str]] = []

    def __enter__(self) -> Bar:
        self.told.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self.told.append("closed")

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.told.append(task)


def evaluated(**options: Any) -> flatrock.Result:
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    return flatrock.evaluate(model, x, model(x).argmax(1), THREAT, **options)


def test_progress_on_the_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "TerminalProgress", Bar)
    flatrock.train("digits_at", folder=tmp_path / "run", progress=True, **SHORT)
    assert Bar.told == ["training digits_at", "closed"]
    evaluated(progress=True, attacks=["fgsm"])
    assert Bar.told == ["evaluating fgsm", "closed"]
    with pytest.raises(ConfigError, match="unknown recipe"):
        flatrock.train("digitsat", progress=True)
    assert Bar.told == ["closed"]


def test_other_listeners(tmp_path: Path) -> None:
    bar = Bar()
    Bar.told.clear()
    evaluated(progress=bar, attacks=["fgsm"])
    assert Bar.told == ["evaluating fgsm"]
    evaluated(progress=False)
    for wrong in ("yes", 1, Bar):
        with pytest.raises(
            ConfigError, match=r"progress must be True, .* with the methods begin, advance, end and say"
        ):
            evaluated(progress=wrong)
        with pytest.raises(ConfigError, match="progress must be True"):
            flatrock.train("digits_at", folder=tmp_path / "run", progress=wrong)
    assert not (tmp_path / "run").exists()
    assert "journal" in inspect.signature(flatrock.evaluate).parameters
    for call in (flatrock.evaluate, flatrock.train):
        assert "progress=True" in (call.__doc__ or "")


def test_nothing_to_resume_is_told_without_a_listener(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.warns(UserWarning, match="there is nothing to resume in .*run; a new run begins") as caught:
        flatrock.train("digits_at", folder=folder, resume=True, **SHORT)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flatrock.train("digits_at", folder=folder, resume=True, **SHORT)
        flatrock.train("digits_at", folder=tmp_path / "told", resume=True, progress=Bar(), **SHORT)


def test_values_as_python_has_them(tmp_path: Path) -> None:
    run = flatrock.train(
        "digits_at",
        folder=tmp_path / "run",
        threat=flatrock.L2(0.5),
        flatness=("awp", {"name": "swa", "start": np.float64(0.5)}),
        attack={"steps": np.int64(1), "step_size": np.float32(0.25)},
        train={"max_steps": np.int32(2)},
        optimizer__lr=np.float32(0.125),
        data__limit=np.int64(200),
    )
    stored = json.loads(json.dumps(_recipe(run.folder)))
    assert stored["threat"] == {"norm": "l2", "eps": 0.5}
    assert [m["name"] for m in stored["flatness"]] == ["awp", "swa"]
    assert (stored["attack"]["steps"], stored["attack"]["step_size"]) == (1, 0.25)
    assert stored["optimizer"]["lr"] == 0.125
    flatrock.train("digits_at", folder=tmp_path / "eps", threat__eps=np.float32(0.125), **SHORT)
    assert _recipe(tmp_path / "eps")["threat"] == {"norm": "linf", "eps": 0.125}
    with pytest.raises(ConfigError, match=r"train\.epochs: got 2\.5"):
        flatrock.train("digits_at", train__epochs=np.float64(2.5))


def _recipe(folder: Path) -> dict[str, Any]:
    import yaml

    read: dict[str, Any] = yaml.safe_load((folder / "recipe.yaml").read_text())
    return read


def test_options_of_attacks_as_numpy_has_them() -> None:
    square = {"name": "square", "queries": np.int64(5), "p_init": np.float32(0.5)}
    result = evaluated(attacks=[square])
    assert '"queries": 5' in result.to_json()
    assert '"p_init": 0.5' in result.to_json()
    for name, wrong, words in (
        ("queries", np.float32(5), "must be a whole number >= 1, got"),
        ("queries", True, "must be a whole number >= 1, got True"),
        ("queries", np.int64(0), "must be a whole number >= 1, got 0"),
        ("p_init", np.float32("nan"), "must be a number >= 0, got nan"),
        ("p_init", np.True_, "must be a number >= 0, got"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluated(attacks=[{**square, name: wrong}])


def test_calls_can_be_sent_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(flatrock.evaluate)) is flatrock.evaluate
