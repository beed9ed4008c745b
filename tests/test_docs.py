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
    text = (ROOT / "README.md").read_text()
    names = {"at": "AT", "trades": "TRADES", "trades_rat2": "TRADES + RAT", "hat": "HAT"}
    costs = [c for n in ("preact", "wrn") for c in read(f"bench_{n}.json")["costs"]]
    said = [f"{name} {391 * c['ms_per_step'] / 1000:.1f} s" for c in costs if (name := names.get(c["recipe"][14:]))]
    rows = {row["recipe"][14:]: row["scores"] for row in read("cifar10_short.json")["rows"]}
    rows = {name: rows[name]["best"]["accuracy"] for name in names}
    said += [f"{name} {100 * rows[n]['clean']:.1f} / {100 * rows[n]['autoattack']:.1f}" for n, name in names.items()]
    row = read("cifar10_flagship.json")["rows"][0]
    score, minutes = row["scores"]["average-best"], row["training"]["elapsed"] / 60
    best = score["accuracy"]
    said.append(f"{100 * best['clean']:.1f} / {100 * best['autoattack']:.1f} (one seed")
    said.append(f"trained in {minutes:.1f} minutes and evaluated in {sum(score['seconds'].values()) / 60:.1f} on")
    full, awp = (
        next(row for row in read("cifar10_full.json")["rows"] if row["recipe"] == f"cifar10_full_{name}")
        for name in ("at", "at_awp")
    )
    ends = [row["scores"][w]["accuracy"] for row, w in ((full, "best"), (full, "last"), (awp, "best"), (awp, "last"))]
    ends = [" / ".join(f"{100 * end[k]:.2f}" for k in ("clean", "pgd-20", "autoattack")) for end in ends]
    said.append(f"best epoch {ends[0]}, last {ends[1]} (one seed")
    said.append(f"200 epochs in {full['training']['elapsed'] / 60:.1f} minutes")
    said.append(
        f"with AWP, in {awp['training']['elapsed'] / 60:.1f} minutes | best epoch {ends[2]}, last {ends[3]} (one"
    )
    assert len(said) == 14
    assert [words for words in said if words not in text] == []


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
