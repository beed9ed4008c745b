"""What the documents show is run: Python blocks are executed, `flatrock` commands parse, links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.data.catalog import DATA
from flatrock.recipes.load import load_recipe

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def test_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "diagnostics.md"} <= {p.name for p in PAGES}


@contextmanager
def among_files(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder with the files that a page shows: blocks that begin with `# name.py`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    files = {named[1]: text for text in blocks(page, "py") if (named := re.match(r"# (\w+)\.py\n", text))}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    yield
    for name in files:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, object] = {}
    again = 2 if page.name == "README.md" else 1  # what people paste first they paste twice
    with among_files(page, tmp_path, monkeypatch):
        for code in blocks(page, "python") * again:
            exec(compile(code, str(page), "exec"), scope)
    assert scope


def test_readme_has_the_two_commands_first() -> None:
    text = (ROOT / "README.md").read_text()
    first = text.index("```")
    assert text.index("make demo") < text.index("## "), "the two commands come before any section"
    assert "make test" in text[first : first + 400]


def test_readme_says_what_the_files_of_results_say() -> None:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (ROOT / "README.md").read_text().splitlines()]
    speed = {cells[0]: cells[1] for cells in lines if len(cells) == 4}
    cost = {(n, c["recipe"][14:]): c for n in ("preact", "wrn") for c in read(f"bench_{n}.json")["costs"]}
    epoch = {who: f"{391 * c['ms_per_step'] / 1000:.1f}" for who, c in cost.items()}
    memory = f"{cost['wrn', 'trades_rat2']['memory_gib'] * 2**30 / 1e9:.1f} GB"
    at = next(name for name in speed if name.endswith("PreActResNet-18 AT"))
    assert speed[at] == epoch["preact", "at"]
    assert speed["TRADES; TRADES + RAT"] == f"{epoch['preact', 'trades']}; {epoch['preact', 'trades_rat2']}"
    assert speed["WRN-34-10 TRADES + RAT"] == f"{epoch['wrn', 'trades_rat2']}, {memory}"

    said = {cells[0]: cells[1:4] for cells in lines if len(cells) == 5}
    for name, recipe in (("AT", "at"), ("TRADES", "trades"), ("TRADES + RAT", "trades_rat2")):
        row = row_of("short", recipe)
        (cells,) = (c for n, c in said.items() if n.startswith(f"{name}, 30 epochs in"))
        assert cells == shares(row, "best")
        assert f"{name}, 30 epochs in {row['training']['seconds'] / 60:.1f} min" in " ".join(said)
    for name, recipe in (("AT, the published", "at"), ("AT + AWP,", "at_awp")):
        row = row_of("full", recipe)
        both = zip(shares(row, "best"), shares(row, "last"), strict=True)
        minutes = f"{row['training']['elapsed'] / 60:.1f}"
        assert said[f"{name} 200 epochs in {minutes} min: best epoch; last"] == ["; ".join(pair) for pair in both]
    row = read("cifar10_flagship.json")["rows"][0]
    name = f"flagship: HAT + RAT + AWP + SWA in {row['training']['elapsed'] / 60:.1f} min, no extra data"
    assert said[name] == shares(row, "average-best")


def row_of(protocol: str, name: str) -> Any:
    rows = read(f"cifar10_{protocol}.json")["rows"]
    return next(row for row in rows if row["recipe"] == f"cifar10_{protocol}_{name}")


def shares(row: Any, which: str) -> list[str]:
    accuracy = row["scores"][which]["accuracy"]
    return [f"{100 * accuracy[name]:.2f}" for name in ("clean", "pgd-20", "autoattack")]


def read(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_parse(page: Path) -> None:
    known = {command.name for command in app.registered_commands}
    for line in re.findall(r"^flatrock (.*)$", "\n".join(blocks(page, "sh")), re.M):
        words = shlex.split(line, comments=True)
        assert words[0] in known, line
        done = CliRunner().invoke(app, [words[0], "--help"])
        options = [w.split("=")[0] for w in words[1:] if w.startswith("--")]
        assert all(option in done.output for option in options), line


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "yaml")], ids=lambda p: p.name)
def test_recipes_with_a_base_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with among_files(page, tmp_path, monkeypatch):
        for i, text in enumerate(blocks(page, "yaml")):
            if text.startswith("base:"):
                (tmp_path / f"{i}.yaml").write_text(text)
                assert load_recipe(tmp_path / f"{i}.yaml").name == str(i)


def test_every_data_set_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "data.md").read_text(), re.M)
    assert rows == DATA.names()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_source_package_holds_what_the_readme_and_the_makefile_name() -> None:
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    held = {name for words in lines if words and words[0] in ("include", "graft") for name in words[1:]}
    assert all((ROOT / name).exists() for name in held)
    named = re.findall(r"\]\(([^)#:]+)[^):]*\)", (ROOT / "README.md").read_text())
    named += re.findall(r"\b(?:requirements\S*\.lock|examples/\w+\.py)", (ROOT / "Makefile").read_text())
    assert {Path(name).parts[0] for name in (*named, "Makefile", "tests")} <= held


def test_the_tables_of_a_sweep_are_shown_in_their_order() -> None:
    heads = re.findall(r"^\| objective.beta \| (.*) \|$", (ROOT / "docs" / "sweep.md").read_text(), re.M)
    assert len(heads) == 2
    for words in (head.split(" | ") for head in heads):
        assert words == ["seeds", "clean", *sorted(words[2:-1]), "worst case"]
