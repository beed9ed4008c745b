"""The shape of the source: imports point down, importing is light, files are short, and some calls are banned."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flatrock
from flatrock.core.errors import FlatrockError

SRC = Path(flatrock.__file__).parent
LEVEL = {
    "core": 0,
    "attacks": 1,
    "objectives": 1,
    "flatness": 1,
    "optimizers": 1,
    "models": 1,
    "data": 1,
    "engine": 2,
    "diagnostics": 2,
    "evaluation": 2,
    "recipes": 3,
    "reports": 3,
    "workflows": 4,
    "cli": 5,
}
OPTIONAL = ["sklearn", "scipy", "matplotlib", "pydantic", "yaml", "typer", "rich", "tensorboard", "PIL", "safetensors"]
OPTIONAL += ["curvlinops", "triton"]
FILES = sorted(SRC.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(), str(path)) for path in FILES}


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes, or '' for anything else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def import_faults(here: str, tree: ast.AST) -> Iterator[str]:
    """What a file of the folder `here` imports against the rules ('' stands for the files above all folders)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "flatrock":
                    yield f"line {node.lineno}: write `from {alias.name} import ...`, not `import {alias.name}`"
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if node.level:
                yield f"line {node.lineno}: relative import"
            elif parts[0] != "flatrock":
                continue
            elif len(parts) == 1:
                yield f"line {node.lineno}: import from the file that defines it, not from flatrock itself"
            elif here and parts[1] != here and LEVEL[parts[1]] >= LEVEL[here]:
                yield f"line {node.lineno}: {here} (level {LEVEL[here]}) imports {parts[1]} (level {LEVEL[parts[1]]})"


def test_every_folder_has_a_level_and_every_level_a_folder() -> None:
    folders = {p.parent.name for p in SRC.glob("*/__init__.py")}
    assert folders == set(LEVEL)


def test_the_walk_sees_the_source() -> None:
    assert len(FILES) >= 40
    for folder in ("core", "attacks", "objectives", "models", "data", "evaluation"):
        assert sum(name_of(p).startswith(f"{folder}/") for p in FILES) >= 3


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    parts = path.relative_to(SRC).parts
    here = parts[0] if len(parts) > 1 else ""
    assert list(import_faults(here, TREES[path])) == []


@pytest.mark.parametrize(
    ("here", "line", "fault"),
    [
        ("core", "from flatrock.attacks.pgd import pgd", "core (level 0) imports attacks (level 1)"),
        ("attacks", "from flatrock.models.catalog import MODELS", "attacks (level 1) imports models (level 1)"),
        ("engine", "from flatrock.evaluation.evaluate import evaluate", "engine (level 2) imports evaluation"),
        ("data", "def f():\n    from flatrock.cli.main import main", "line 2: data (level 1) imports cli"),
        ("core", "from . import errors", "relative import"),
        ("core", "from .errors import ConfigError", "relative import"),
        ("cli", "import flatrock.core.errors", "write `from flatrock.core.errors import ...`"),
        ("cli", "import flatrock", "write `from flatrock import ...`"),
        ("cli", "from flatrock import Linf", "import from the file that defines it"),
    ],
)
def test_the_import_rule_can_fail(here: str, line: str, fault: str) -> None:
    faults = list(import_faults(here, ast.parse(line)))
    assert len(faults) == 1
    assert fault in faults[0]


def test_the_import_rule_lets_good_imports_pass() -> None:
    good = ["import torch", "from flatrock.core.errors import ConfigError", "from flatrock.cli.ls import ls"]
    assert list(import_faults("cli", ast.parse("\n".join(good)))) == []


# Importing

BLOCKED_IMPORT = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocker())
import flatrock
import flatrock.attacks.catalog, flatrock.objectives.catalog, flatrock.models.catalog, flatrock.evaluation.evaluate
assert all(hasattr(flatrock, name) for name in flatrock.__all__)
assert not set(sys.modules) & set({OPTIONAL!r})
"""


def test_errors_are_caught_by_names_that_flatrock_offers() -> None:
    kinds = {kind.__name__ for kind in FlatrockError.__subclasses__() if kind.__module__ == FlatrockError.__module__}
    assert kinds | {"FlatrockError"} <= set(flatrock.__all__)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)


def test_importing_needs_only_torch_and_numpy() -> None:
    done = python("-c", BLOCKED_IMPORT)
    assert done.returncode == 0, done.stderr


def test_importing_gives_no_warning_and_prints_nothing() -> None:
    done = python("-W", "error", "-c", "import flatrock")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_leaves_the_random_state_and_the_threads_alone() -> None:
    code = """
import torch
before = (torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
import flatrock, flatrock.attacks.catalog, flatrock.models.catalog, flatrock.evaluation.evaluate
after = (torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


# Banned calls and sizes

BANNED_NAMES = {"eval", "exec", "compile", "__import__", "print"}
BANNED_CALLS = {
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "torch.seed",
    "np.random.seed",
    "numpy.random.seed",
    "random.seed",
    "os.system",
    "os.popen",
}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
# Between processes that work together, and begin and end together; and a reader that looks up no names but its own
# stand-ins' (tests/data/test_data_pickled.py).
MAY_PICKLE = {"core/workers.py", "data/pickled.py"}


def call_faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in BANNED_NAMES | BANNED_CALLS:
                yield f"line {node.lineno}: {called}"
            if called.endswith("torch.load") and not any(
                k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
                for k in node.keywords
            ):
                yield f"line {node.lineno}: torch.load without weights_only=True"
            if any(k.arg == "shell" for k in node.keywords):
                yield f"line {node.lineno}: shell="
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for module in names:
                if module.split(".")[0] in BANNED_MODULES:
                    yield f"line {node.lineno}: import {module}"
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if f"{node.module}.{alias.name}" in BANNED_CALLS:
                        yield f"line {node.lineno}: from {node.module} import {alias.name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_banned_calls(path: Path) -> None:
    allowed = "import pickle" if name_of(path) in MAY_PICKLE else None
    assert [fault for fault in call_faults(TREES[path]) if fault.partition(": ")[2] != allowed] == []


@pytest.mark.parametrize(
    "line",
    [
        "eval('1')",
        "exec('x = 1')",
        "import pickle",
        "from pickle import loads",
        "torch.manual_seed(0)",
        "from torch import manual_seed",
        "os.system('ls')",
        "np.random.seed(0)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run('ls', shell=True)",
        "print('x')",
    ],
)
def test_the_ban_can_fail(line: str) -> None:
    assert len(list(call_faults(ast.parse(line)))) == 1


def test_the_ban_lets_good_calls_pass() -> None:
    good = [
        "model.eval()",
        "torch.Generator().manual_seed(3)",
        "torch.load(p, weights_only=True)",
        "console.print('x')",
    ]
    assert list(call_faults(ast.parse("\n".join(good)))) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            whole = (node.end_lineno or node.lineno) - node.lineno + 1
            told = len((ast.get_docstring(node, clean=False) or "").splitlines())
            length = whole - told - (node.body[0].lineno - node.lineno)
            assert length <= 40 and whole <= 60, f"{node.name} at line {node.lineno} has {length} lines, {whole} in all"
