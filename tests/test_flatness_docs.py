"""The pages of the flatness methods say what the code does: options, hooks, passes, recipes; and their claims hold."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from flatrock.attacks.catalog import ATTACKS
from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Flatness
from flatrock.core.numbers import scalar
from flatrock.core.registry import Entry
from flatrock.core.rng import Seed
from flatrock.engine.step import train_step
from flatrock.flatness.catalog import FLATNESS
from flatrock.optimizers.catalog import OPTIMIZERS, own_options
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.schema import Extra, Optimizer, Recipe

DOCS = Path(__file__).parent.parent / "docs"
OVERVIEW = DOCS / "flatness.md"
PAGES = sorted((DOCS / "flatness").glob("*.md"))
SKELETON = ["Formula", "Where it acts", "Cost", "Options", "Zero strength", "Paper, code, here", "Use it"]
LEARNERS = [name for name in OPTIMIZERS.names() if name not in ("sgd", "adamw")]  # those that seek flat minima
OBJECTIVES = ("at", "trades", "mart", "alp")


def signature_defaults(entry: Entry[Any], names: tuple[str, ...]) -> dict[str, Any]:
    parameters = inspect.signature(entry.make).parameters
    return {name: parameters[name].default for name in names}


def learner_defaults(name: str) -> dict[str, Any]:
    """Those of the signature, and of recipes for the keys every optimizer shares."""
    shared = {key: field.default for key, field in Optimizer.model_fields.items()}
    own = signature_defaults(OPTIMIZERS.entry(name), own_options(name))
    return {key: shared.get(key, default) for key, default in own.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    **{e.name: signature_defaults(e, e.options()) for e in FLATNESS},
    **{name: learner_defaults(name) for name in LEARNERS},
    "atent": signature_defaults(ATTACKS.entry("langevin"), ATTACKS.entry("langevin").options()),
    "rst": {"file": "", "fraction": Extra.model_fields["fraction"].default},
}


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose heading begins with this cell, heading first, cells stripped."""
    block = re.search(rf"^\| {re.escape(first)} \|.*\n(?:\|.*\n)+", text, re.M)
    assert block, f"no table with the heading {first!r}"
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block[0].splitlines()]
    assert all(len(row) == len(rows[0]) for row in rows), f"a row of the table {first!r} has too many or too few cells"
    return [rows[0], *rows[2:]]


def section(page: Path, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert found, f"{page.name} has no section {title!r}"
    return found[1]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", cell)


# Pages and options


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    assert {p.stem for p in PAGES} == set(OPTIONS)
    linked = re.findall(r"\]\(flatness/(\w+)\.md\)", OVERVIEW.read_text())
    assert set(linked) == set(OPTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_pages_have_the_same_skeleton(page: Path) -> None:
    titles = re.findall(r"^## (.*)$", page.read_text(), re.M)
    assert [t for t in titles if t != "Where neither is sound"] == SKELETON
    for heading in re.findall(r"^\| ([^|]+) \|.*\n\|---", page.read_text(), re.M):
        table(page.read_text(), heading)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_options_and_defaults_are_those_of_the_code(page: Path) -> None:
    rows = table(section(page, "Options"), "option")
    assert rows[0] == ["option", "default", "meaning"]
    written = {names_in(row[0])[0]: scalar(row[1].strip("`")) for row in rows[1:]}
    expected = OPTIONS[page.stem]
    assert written == expected
    assert list(written) == list(expected), "the order of the code is the order of the table"
    assert {k for k, v in written.items() if isinstance(v, bool)} == {
        k for k, v in expected.items() if isinstance(v, bool)
    }
    assert all(len(row[2]) > 3 for row in rows[1:])


def test_the_table_of_hooks_is_that_of_the_code() -> None:
    heading, *rows = table(OVERVIEW.read_text(), "method")
    hooks = [title.replace("before the ", "before_").replace("in the ", "in_") for title in heading[1:]]
    hooks = [title.replace("after the ", "after_") for title in hooks]
    assert hooks == ["before_attack", "before_loss", "in_loss", "after_step"]
    assert [names_in(row[0])[0] for row in rows] == FLATNESS.names()
    for row in rows:
        kind = FLATNESS.entry(names_in(row[0])[0]).make
        for hook, cell in zip(hooks, row[1:], strict=True):
            assert bool(cell) == (getattr(kind, hook) is not getattr(Flatness, hook)), f"{row[0]} {hook}"


# Recipes and commands


@pytest.mark.parametrize("page", [OVERVIEW, *PAGES], ids=lambda p: p.stem)
def test_recipes_of_the_pages_load(page: Path, tmp_path: Path) -> None:
    found = blocks(page, "yaml")
    assert found
    for text in found:
        (tmp_path / "mine.yaml").write_text(text)
        recipe = load_recipe(tmp_path / "mine.yaml")
        assert recipe.flatness or recipe.optimizer.name != "sgd" or recipe.attack.name == "langevin"


@pytest.mark.parametrize("page", [OVERVIEW, *PAGES], ids=lambda p: p.stem)
def test_train_commands_of_the_pages_load(page: Path) -> None:
    lines = re.findall(r"^flatrock (?:train|check) (.*)$", "\n".join(blocks(page, "sh")), re.M)
    assert lines
    for line in lines:
        name, *overrides = shlex.split(line, comments=True)
        load_recipe(name, [o for o in overrides if not o.startswith("--")])


def spans(text: str) -> Iterator[dict[str, Any]]:
    """What is written in code font as `option: value` or `{option: value, ...}`."""
    for span in re.findall(r"`(\{[^`]+\}|[\w.]+: [^`]+)`", text):
        found = yaml.safe_load(span if span.startswith("{") else re.sub(r"^([\w.]+: )([^{].*)$", r"{\1\2}", span))
        if isinstance(found, dict):
            yield {key: scalar(value) if isinstance(value, str) else value for key, value in found.items()}


def make(method: str, options: dict[str, Any]) -> None:
    """Whether the method takes these options; ConfigError if not."""
    if method in FLATNESS:
        FLATNESS.make(method, **options)
    elif method in OPTIMIZERS:
        load_recipe("digits_at", {"optimizer": {"name": method, **options}})
    else:
        load_recipe("digits_at", {"attack": {"name": "langevin", **options}})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_options_named_as_the_other_choice_exist(page: Path) -> None:
    for options in spans(section(page, "Paper, code, here")):
        if set(options) <= {*OPTIONS[page.stem], "bn_mode"}:
            make(page.stem, options)
            continue
        assert next(iter(options)).split(".")[0] in Recipe.model_fields, options
        assert any(_loads(f"digits_{base}", options) for base in OBJECTIVES), options


def _loads(recipe: str, overrides: dict[str, Any]) -> bool:
    try:
        load_recipe(recipe, overrides)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("page", [OVERVIEW, *PAGES], ids=lambda p: p.stem)
def test_checks_named_in_the_pages_exist(page: Path) -> None:
    tests = "\n".join(p.read_text() for p in Path(__file__).parent.rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page.read_text())
    assert named
    assert [name for name in named if f"def {name}(" not in tests] == []


# Passes


@functools.cache
def counted(objective: str, methods: tuple[str, ...]) -> tuple[int, int]:
    """Forward passes of the network, and backward passes through it, in one step on 16 digits with 10 attack steps."""
    keys: dict[str, Any] = {"flatness": [m for m in methods if m in FLATNESS]}
    keys["attack"] = {"name": "langevin", "steps": 10} if "langevin" in methods else {"steps": 10}
    if learner := next((m for m in methods if m in OPTIMIZERS), None):
        keys["optimizer"] = {"name": learner}
    small = {"train.batch_size": 16, "data.limit": 16, "data.held_out": 20}
    job = build_job(load_recipe(f"digits_{objective}", {**small, **keys}), folder=Path("unused"))
    counts = [0, 0]

    def seen(_: nn.Module, inputs: Any, output: Tensor) -> None:
        counts[0] += 1
        if output.requires_grad:
            output.register_hook(lambda grad: counts.__setitem__(1, counts[1] + 1))

    job.model.get_submodule("head").register_forward_hook(seen)
    job.model.train()
    train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=False)
    return counts[0], counts[1]


def pair(cell: str) -> tuple[int, int]:
    forward, backward = (int(number) for number in cell.split("/"))
    return forward, backward


def test_passes_are_those_of_the_table() -> None:
    heading, base, *rows = table(section(OVERVIEW, "What it costs"), "with")
    assert [name for cell in heading for name in names_in(cell)] == list(OBJECTIVES)
    assert {name for row in rows for name in names_in(row[0])} == {*FLATNESS.names(), *LEARNERS, "langevin"}
    for objective, alone, *cells in zip(OBJECTIVES, base[1:], *(row[1:] for row in rows), strict=True):
        plain = counted(objective, ())
        assert pair(alone) == plain, objective
        for row, cell in zip(rows, cells, strict=True):
            forward, backward = counted(objective, tuple(names_in(row[0])))
            assert pair(cell) == (forward - plain[0], backward - plain[1]), f"{objective} {row[0]}"
            assert cell.count("+") == 2


# Claims about printed formulas that no method computes


def test_the_inequality_behind_rat_is_false() -> None:
    def divergence(a: Tensor, b: Tensor) -> float:
        return float(F.kl_div(b.log_softmax(0), a.log_softmax(0), reduction="sum", log_target=True))

    a, b = torch.tensor([0.1, 0], dtype=torch.float64), torch.tensor([0, 0.1], dtype=torch.float64)
    assert divergence(2 * a, 2 * b) == pytest.approx(0.0199, abs=5e-5)
    assert 2 * divergence(a, b) == pytest.approx(0.0100, abs=5e-5)


def test_the_lemma_behind_trh() -> None:
    """d Phi_ik / d z_k = (1 - 2 s_k) Phi_ik with Phi = diag(s) - s s^T."""

    def phi(z: Tensor) -> Tensor:
        s = z.softmax(0)
        return s.diag() - s.outer(s)

    z = torch.randn(6, generator=Seed(0).child("lemma").generator(), dtype=torch.float64)
    slopes = jacobian(phi, z)  # [i, k, derivative]
    got = torch.stack([slopes[:, k, k] for k in range(6)], 1)
    torch.testing.assert_close(got, phi(z) * (1 - 2 * z.softmax(0)), rtol=0, atol=1e-15)


def printed_curvatures(weights: list[Tensor], x: Tensor) -> tuple[list[Tensor], list[float]]:
    """TrH's H^(i) [k, d] of a ReLU network without biases, and the traces J^T (diag(s) - s s^T) J they stand for."""

    def logits(v: Tensor, first: int) -> Tensor:
        for w in weights[first:-1]:
            v = (w @ v).relu()
        return weights[-1] @ v

    inputs = [x]
    for w in weights[:-1]:
        inputs.append((w @ inputs[-1]).relu())
    s = logits(x, 0).softmax(0)
    slopes = [jacobian(functools.partial(logits, first=i), v) for i, v in enumerate(inputs)]
    true = [float((j.T @ (s.diag() - s.outer(s)) @ j).trace()) for j in slopes]
    return [j.square() * (s * (1 - s))[:, None] for j in slopes], true


def test_the_bound_between_layers_of_trh_holds_for_what_is_printed() -> None:
    """Theorem 4: H^(i)_kd = (dz_k / dI^(i)_d)^2 s_k (1 - s_k) has max H^(i) <= max H^(i+1) * ||W^(i)||_1^2.

    I^(i) is the input of layer i, the norm the largest column sum of |W| [out, in]. The sum of H is not the trace: it
    lacks the products of different classes' slopes, which may have either sign.
    """
    kept, larger = 0, 0
    for trial in range(200):
        gen = Seed(trial).child("bound").generator()
        pairs = itertools.pairwise([5, 9, 7, 8, 4])
        weights = [torch.randn(b, a, generator=gen, dtype=torch.float64) for a, b in pairs]
        printed, true = printed_curvatures(weights, torch.randn(5, generator=gen, dtype=torch.float64))
        for w, (here, above) in zip(weights, itertools.pairwise(printed), strict=False):
            kept += bool(here.max() <= above.max() * torch.linalg.matrix_norm(w, 1) ** 2)
        larger += sum(float(h.sum()) > t for h, t in zip(printed, true, strict=True))
    assert kept == 3 * 200
    assert 200 < larger < 700, "of 800"
    fan = [torch.ones(9, 1, dtype=torch.float64), torch.ones(2, 9, dtype=torch.float64)]
    printed, _ = printed_curvatures(fan, torch.ones(1, dtype=torch.float64))
    assert float(printed[0].max() / printed[1].max()) == pytest.approx(81), "the row sum, 1, is no bound"


def test_the_gradient_of_atent() -> None:
    """p(x') ~ exp(L - gamma/2 (x' - x)^2) on a grid: gradients of E_p[L] and of log Z against the printed forms."""
    grid = torch.linspace(-4, 4, 2001, dtype=torch.float64)
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    loss = F.softplus(-w * grid)
    energy = loss - 0.8 / 2 * (grid - 0.5).square()
    p = energy.softmax(0)
    (true,) = torch.autograd.grad((p * loss).sum(), w, retain_graph=True)
    (of_log_z,) = torch.autograd.grad(energy.logsumexp(0), w)
    p, loss = p.detach(), loss.detach()
    slope = -grid * torch.sigmoid(-1.3 * grid)  # dL/dw
    mean = (p * loss).sum()
    assert float((p * slope * (1 + loss - mean)).sum()) == pytest.approx(float(true), rel=1e-12)
    assert float((p * slope * (1 + loss)).sum()) != pytest.approx(float(true), rel=0.05)
    assert float((p * slope).sum()) == pytest.approx(float(of_log_z), rel=1e-12)
    assert float((p * slope).sum()) != pytest.approx(float(true), rel=0.05)
