"""Networks of one's own: the same function with a head of its own, from code that may be called, trained as ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, FlatrockError, ModelError
from flatrock.core.rng import Seed
from flatrock.core.tensorfile import load as read
from flatrock.core.tensorfile import save
from flatrock.models.adapted import Adapted
from flatrock.models.catalog import create_model
from flatrock.models.twin import Twin
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.restore import load
from flatrock.workflows.evaluate import evaluate_run
from flatrock.workflows.train import train_recipe

OWN = """
from __future__ import annotations
from torch import nn

calls = []

def make(width: int = 8, num_classes: int = 10) -> nn.Sequential:
    calls.append(width)
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(36 * width, num_classes)
    )

class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Flatten(), nn.Linear(64, 10)

    def forward(self, x):
        return self.classifier(self.body(x))

ready = Fixed()

def shaped(input_shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], 10))

def silent(num_classes=10):
    calls.append("silent")
    return Fixed()

def number() -> int:
    calls.append("number")
    return 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a module of the user's, and one in a folder below."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nets.py").write_text(OWN)
    (tmp_path / "came").mkdir()
    (tmp_path / "came" / "along.py").write_text("raise SystemExit('imported')")
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ("own_nets", "came")]:
        del sys.modules[name]


def inputs(n: int = 5) -> Tensor:
    return torch.rand(n, 1, 8, 8, generator=Seed(1).generator())


class Inner(nn.Module):
    """The last layer is neither the last registered nor at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ModuleDict({"out": nn.Linear(12, 4)})
        self.first = nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head["out"](self.first(x.flatten(1)).tanh())
        return out


@pytest.mark.parametrize("make", [Inner, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4))], ids=["inner", "seq"])
def test_the_last_linear_layer_becomes_the_head(make: Any) -> None:
    network = make().double().train()
    before = network(inputs().double()).detach()
    names = dict(network.named_parameters())
    model = Adapted(network, input_shape=(1, 8, 8), num_classes=4)
    seen = model.view(inputs().double())
    assert torch.equal(seen.logits, before)
    assert torch.equal(model.head(seen.features), before)
    assert isinstance(model.head, nn.Linear)
    assert {id(p) for p in model.parameters()} == {id(p) for p in names.values()}
    assert all(m.training for m in model.modules()), "modes are given back"


def test_a_network_that_is_a_linear_layer() -> None:
    network = nn.Linear(6, 3)
    model = Adapted(network, input_shape=(6,), num_classes=3)
    assert model.head is network
    assert torch.equal(model.features(torch.ones(2, 6)), torch.ones(2, 6))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.layer(x).relu())
        return out


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + torch.randn_like(x))
        return out


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), "is not the output"),
        (Twice(), "does more with its last nn.Linear"),
        (Noisy(), "Noisy answers at random in eval mode; let it draw only while self.training"),
        (nn.Linear(4, 7), "has 7 logits for 4 classes"),
        (nn.Identity(), "it has no nn.Linear layer"),
    ],
    ids=["softmax", "twice", "random", "classes", "none"],
)
def test_what_has_no_such_head_is_refused(network: nn.Module, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Adapted(network, input_shape=(4,), num_classes=4)


def test_weights_are_drawn_from_the_seed_and_options_are_passed_on() -> None:
    def made(seed: int, **options: Any) -> Tensor:
        return create_model("own_nets:make", num_classes=7, seed=seed, input_shape=[1, 8, 8], **options).head.weight

    assert made(0).shape == (7, 288)
    assert made(0, width=2).shape == (7, 72)
    assert torch.equal(made(0), made(0))
    assert not torch.equal(made(0), made(1))


def test_a_finished_network_is_copied() -> None:
    model = create_model("own_nets:ready", input_shape=[1, 8, 8], normalize="centered")
    own = sys.modules["own_nets"].ready
    assert isinstance(own.classifier, nn.Linear)
    x = inputs()
    assert torch.allclose(model(x), own((x - 0.47) / 0.25), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("own_nets:silent", {}, "not written in own_nets.py as a function that says it returns a network"),
        ("own_nets:number", {}, "not written in own_nets.py as a function that says it returns a network"),
        ("subprocess:run", {"args": "ls"}, "'subprocess' is not a module of the current folder"),
        ("own_nets:make", {"widh": 3}, r"own_nets:make\(widh=3, num_classes=10\) raised TypeError"),
        ("own_nets:make", {"input_shape": [3, 8, 8]}, r"fails on inputs of shape \[2, 3, 8, 8\]"),
        ("own_nets:make", {"input_shape": "8"}, "needs the option 'input_shape'"),
        ("own_nets:make", {"input_shape": ()}, r"such as \[3, 32, 32\]"),
    ],
)
def test_what_may_not_or_cannot_be_made(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(FlatrockError, match=words):
        create_model(name, **{"input_shape": [1, 8, 8], **options})
    calls = getattr(sys.modules.get("own_nets"), "calls", [])
    assert set(calls) <= {8}, "nothing was called that does not say what it is"


def test_code_of_others_is_neither_imported_nor_called(folder: Path) -> None:
    """Of packages, of folders that came along, and of what a file of the user's only brings in."""
    (folder / "came" / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "own_more.py").write_text(
        "from torch.fx.graph_module import reduce_graph_module\nfrom torch.nn import Linear"
    )
    source = {"import_block": "raise SystemExit('run')", "body": {"_code": "def forward(self, x): return x"}}
    names = ["came:make", "came.along:make", "torch.fx.graph_module:reduce_graph_module", "__main__:make", "os:getcwd"]
    for name in names:
        told = (
            "nobody finds later; write it to a .py file" if "main" in name else "is not a module of the current folder"
        )
        with pytest.raises(ConfigError, match=told):
            create_model(name, input_shape=[4], **(source if "fx" in name else {}))
    assert "came" not in sys.modules
    for name in ("reduce_graph_module", "Linear"):
        options = source if name != "Linear" else {"in_features": 4, "out_features": 10}
        with pytest.raises(ConfigError, match=r"is not written in own_more.py"):
            create_model(f"own_more:{name}", input_shape=[4], **options)
    sys.modules.pop("own_more")


def test_weights_of_others_call_nothing(folder: Path) -> None:
    run = train_recipe("digits_standard", folder=folder / "run", **{"train.max_steps": 2})
    tensors, meta = read(run.folder / "last.safetensors")
    (folder / "came" / "__init__.py").write_text("raise SystemExit('imported')")
    meta["recipe"]["model"] = {"name": "came:make", "num_classes": 10, "normalize": None, "input_shape": [1, 8, 8]}
    save(folder / "theirs.safetensors", tensors, meta)
    with pytest.raises(ConfigError, match="is not a module of the current folder"):
        load(folder / "theirs.safetensors")


def test_names_of_arguments() -> None:
    assert create_model("own_nets:shaped", input_shape=[1, 8, 8]).head.in_features == 64
    with pytest.raises(ConfigError, match=r"model\.seed: weights are drawn from the recipe's seed"):
        load_recipe("digits_at", {"model": {"name": "own_nets:make", "seed": 3}})


def test_a_head_of_two_names() -> None:
    network = Inner()
    network.other = network.head["out"]
    model = Adapted(network, input_shape=(1, 8, 8), num_classes=4)
    assert len(model.state_dict()) == 4
    assert model(inputs()).shape == (5, 4)


def test_it_has_a_twin() -> None:
    model = create_model("own_nets:make", input_shape=[1, 8, 8]).double().eval()
    twin = Twin(model, dtype=torch.float64, gradients=True)
    assert twin.plain
    assert torch.allclose(twin(inputs().double()), model(inputs().double()).float(), atol=1e-5)


def test_train_store_load_and_evaluate(folder: Path) -> None:
    changes = {"model": {"name": "own_nets:make", "width": 4}, "train.epochs": 1, "attack.steps": 1}
    recipe = load_recipe("digits_trades_rat", changes)
    assert recipe.model.options == {"width": 4, "input_shape": [1, 8, 8]}
    assert recipe.model.num_classes == 10
    job = build_job(recipe, folder=folder / "job")
    assert isinstance(job.model, Adapted)
    run = train_recipe("digits_trades_rat", folder=folder / "run", **changes)
    model = load(run.folder, which="last")
    assert isinstance(model, Adapted)
    result = evaluate_run(run, which="last", attacks=["fgsm"], limit=100)
    assert result.clean > 0.3
    (folder / "own_nets.py").unlink()
    del sys.modules["own_nets"]
    with pytest.raises(ConfigError, match="'own_nets' is not a module of the current folder"):
        load(run.folder, which="last")
