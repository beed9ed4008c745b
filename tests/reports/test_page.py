"""The page of `flatrock page`: one file, nothing outside it, every number that of the records, text never markup."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from results_cases import fake_result, fake_run
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Finding, Result
from flatrock.core.story import Story
from flatrock.reports.margins import draw_margins
from flatrock.reports.page import MARK, write_page
from flatrock.workflows.story import stories

AT = {"clean": 81.0, "pgd-20": 50.0, "autoattack": 47.0}
TRADES = {"clean": 80.0, "pgd-20": 52.1, "autoattack": 47.5}
EVIL = "</script><img src=x onerror=alert(1)> & co"
VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Elements in order, rows of tables, text outside scripts; AssertionError if elements are not well nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.data: dict[str, str] = {}
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            name = self.tags[-1][1].get("id")
            self.data[name or ""] = data
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def a_result(name: str = "mine") -> Result:
    flags = {"clean": [1, 1, 0, 1], name: [0, 1, 0, 1]}
    return Result(
        {"norm": "linf", "eps": 8 / 255},
        {k: torch.tensor(v).bool() for k, v in flags.items()},
        predictions=torch.tensor([1, 0, 1, 0]),
        labels=torch.tensor([1, 0, 0, 0]),
        margins={"clean": torch.tensor([1.5, 0.25, -0.75, 2.0]), "worst": torch.tensor([-0.1, 0.1, -0.75, 1.0])},
        findings=(Finding("E02", f"few {name}", "more"),),
        provenance={"data": f"data {name}", "seed": 0},
    )


def page_of(*told: Story, folder: Path) -> Reader:
    return Reader(write_page(told, folder / "page.html").read_text())


def test_it_stands_alone_and_is_the_same_every_time(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, "cifar10_short_at", AT), fake_run(tmp_path, "cifar10_short_trades", TRADES)]
    first, again = (write_page(stories(runs), tmp_path / f"{i}.html").read_bytes() for i in range(2))
    assert first == again
    text = first.decode()
    assert text.startswith("<!doctype html>\n" + MARK)
    reader = Reader(text)
    for tag, attributes in reader.tags:
        assert tag not in ("link", "iframe", "object", "base")
        for name in ("src", "href"):
            where = attributes.get(name)
            assert where is None or re.match(r"data:image/(svg\+xml|png);base64,|#model-\d+$", where), where
    assert "@import" not in text and "fetch(" not in text
    pictures = [a["src"] or "" for t, a in reader.tags if t == "img"]
    # Learning curves of both, and of each: all attacks, and those of the plan.
    assert len(pictures) == 1 + 2 * 2
    for source in pictures:
        assert b"<svg" in base64.b64decode(source.partition("base64,")[2])[:1000]


def test_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, "cifar10_short_at", AT, last={"clean": 82.0, "pgd-20": 44.0})]
    runs.append(fake_run(tmp_path, "cifar10_short_trades", TRADES))
    reader = page_of(*stories(runs), folder=tmp_path)
    assert ["cifar10_short_at", "81.00", "50.00", "47.00", "47.00"] in reader.rows
    assert ["cifar10_short_trades", "80.00", "52.10", "47.50", "47.50"] in reader.rows
    assert ["best epoch, held-out", "2: clean 80.00, robust 52.00"] in reader.rows
    assert ["epochs", "3 in 0:02:30"] in reader.rows
    headings = [w for w in reader.words if "worst case" in w and "eps" in w]
    assert headings[:2] == [
        "best; epoch 2; linf eps 8/255; cifar10 test, 1000 of 1000 samples; worst case 47.00",
        "last; epoch 3; linf eps 8/255; cifar10 test, 1000 of 1000 samples; worst case 44.00",
    ]
    assert ["cifar10_short_at", "best, last", "E02", "some attacks ran on few samples; evaluate more"] in reader.rows
    assert any("objective:" in word for word in reader.words), "the recipe is there"


def test_text_is_never_markup(tmp_path: Path) -> None:
    odd = Story(name=EVIL, results={"result-" + EVIL: a_result(EVIL)}, remarks=(EVIL,))
    reader = page_of(odd, folder=tmp_path)
    assert {tag for tag, _ in reader.tags} >= {"table", "details", "img"}
    assert all("onerror" not in a and a.get("src", "data:") != "x" for _, a in reader.tags)
    assert reader.words.count(EVIL) >= 3
    samples = json.loads(reader.data["model-0-samples-data"])
    assert samples["header"] == [
        *("id", "label", "prediction", "clean_margin", "worst_margin", "clean"),
        *(EVIL, "worst_case"),
    ]
    assert samples["rows"][0] == [0, 1, 1, 1.5, -0.1, 1, 0, 0]
    assert [row[-1] for row in samples["rows"]] == a_result(EVIL).worst.int().tolist()


def test_classes_are_those_of_the_result(tmp_path: Path) -> None:
    reader = page_of(Story(name="a", results={"result-best": a_result()}), folder=tmp_path)
    assert ["0", "3", "66.67", "66.67", "66.67"] in reader.rows
    assert ["1", "1", "100.00", "0.00", "0.00"] in reader.rows
    bars = [a["style"] for t, a in reader.tags if t == "td" and a.get("class") == "bar"]
    assert bars[0] == "--share:75%"


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_runs_without_a_result(tmp_path: Path, status: str) -> None:
    path = fake_run(tmp_path, "cifar10_short_at", AT, status=status)
    if status == "interrupted":
        (path / "result-best.json").unlink()
    reader = page_of(*stories([path]), folder=tmp_path)
    if status == "failed":
        assert ["cifar10_short_at", "FAILED", ""] in reader.rows, "a failed run has no number"
    else:
        assert "Not evaluated: " in reader.words
        assert any("the run is not finished" in word for word in reader.words)


def test_a_story_may_hold_nothing_else(tmp_path: Path) -> None:
    bare = replace(a_result(), labels=None, margins={}, predictions=None, findings=())
    reader = page_of(Story(name="a", results={"result-best": bare}), folder=tmp_path)
    assert any("No finding" in word for word in reader.words)
    assert not any(a.get("class") == "samples" for _, a in reader.tags)
    reader = page_of(Story(name="b", results={}), folder=tmp_path)
    assert "Not evaluated: " in reader.words and not any("No finding" in word for word in reader.words)


def test_results_of_other_weights_are_left_out_and_told(tmp_path: Path) -> None:
    path = fake_run(tmp_path, "cifar10_short_at", AT)
    old = fake_result("cifar10_short_at", "best", 1, {"clean": 12.0, "pgd-20": 11.0})
    (path / "result-best-pgd-20.json").write_text(old.to_json())
    (story,) = stories([path])
    assert list(story.results) == ["result-best"]
    assert story.remarks == ("left out result-best-pgd-20.json: of other weights than the run has now; evaluate again",)


def test_names_that_are_alike_become_paths(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / part, "cifar10_short_at", AT) for part in "ab"]
    assert [story.name for story in stories(runs)] == list(map(str, runs))
    with pytest.raises(ConfigError, match="is named twice"):
        stories([runs[0], runs[0] / ".." / runs[0].name])


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    run = fake_run(tmp_path, "cifar10_short_at", AT)
    assert CliRunner().invoke(app, ["results", str(run), "--out", str(rows)]).exit_code == 0
    with pytest.raises(StateError, match="rows of many runs"):
        stories([rows])
    with pytest.raises(StateError, match="there is no file"):
        stories([tmp_path / "nothing.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError, match="not a run folder"):
        stories([tmp_path / "empty"])


def test_pictures_beside_a_run_are_shown_but_not_those_of_others(tmp_path: Path) -> None:
    path = fake_run(tmp_path, "cifar10_short_at", AT)
    for name in ("curves", "result-best-autoattack", "result-best-gallery", "landscape-best", "holiday"):
        (path / f"{name}.png").write_bytes(name.encode())
    (story,) = stories([path])
    assert [p.stem for p in story.pictures] == ["landscape-best", "result-best-gallery"]
    reader = page_of(story, folder=tmp_path)
    shown = [a["src"] or "" for t, a in reader.tags if t == "img" and "image/png" in (a["src"] or "")]
    assert [base64.b64decode(s.partition("base64,")[2]) for s in shown] == [b"landscape-best", b"result-best-gallery"]


def test_margins_without_any_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no margins"):
        draw_margins(replace(a_result(), margins={}), tmp_path / "m.svg")


def test_margins_that_are_all_alike_are_drawn(tmp_path: Path) -> None:
    alike = {name: torch.full((4,), -3.0) for name in ("clean", "worst")}
    assert draw_margins(replace(a_result(), margins=alike), tmp_path / "m.svg").is_file()


def test_other_epochs_are_not_what_a_run_is_known_by(tmp_path: Path) -> None:
    path = fake_run(tmp_path, "cifar10_short_at", AT)
    kept = fake_result("cifar10_short_at", "epoch-0001", 1, {"clean": 12.0, "pgd-20": 11.0})
    (path / "result-epoch-0001.json").write_text(kept.to_json())
    (path / "result-best-pgd-20-first100.json").write_text(
        fake_result("cifar10_short_at", "best", 2, {"clean": 80.0, "pgd-20": 40.0}, whole_plan=False).to_json()
    )
    (story,) = stories([path])
    assert list(story.results) == ["result-best", "result-best-pgd-20-first100", "result-epoch-0001"]
    assert (story.main_name, story.title) == ("result-best", "cifar10_short_at")
    (path / "result-best.json").unlink()
    (story,) = stories([path])
    assert story.title == "cifar10_short_at (best-pgd-20-first100)", "it is told that this is not the whole plan"
    assert [story.title, "80.00", "40.00", "40.00"] in page_of(story, folder=tmp_path).rows
    (path / "result-best-pgd-20-first100.json").unlink()
    (story,) = stories([path])
    assert story.main is None and list(story.results) == ["result-epoch-0001"]
    reader = page_of(story, folder=tmp_path)
    assert "Not evaluated: " in reader.words and not any(row[1:2] == ["12.00"] for row in reader.rows[:3])
