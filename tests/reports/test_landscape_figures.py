"""Landscapes as tables, pictures and a page: what they say, that they stand alone, and what is not drawn together."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flatrock.core.errors import ConfigError
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.surface import Landscape, nearest_radius
from flatrock.reports.landscape import caption, draw_curves, flatness_table, labels, paired
from flatrock.reports.landscape_page import draw_page
from flatrock.reports.landscape_surfaces import draw_inputs, draw_surfaces
from flatrock.reports.style import radius

AXIS = Axis(points=5, span=1.0).values
ABOUT = {"data": "digits train, 100 of 500 samples", "seed": 0, "train_seed": 3, "precision": "float32", "epoch": 7}


def record(kind: str, *, steep: float = 1.0, run: str = "a", checkpoint: str = "best", count: int = 2) -> Landscape:
    a = np.array(AXIS)
    bowl = a**2 if kind == "weight-1d" else a[:, None] ** 2 + a[None, :] ** 2
    loss = 0.5 + np.stack([steep * (k + 1) * bowl for k in range(count)])
    values = {"loss": loss, "accuracy": (loss < 1).astype(float)}
    if kind == "input":
        values["margin"] = 1 - loss
    return Landscape(
        kind=kind,
        axis=AXIS,
        values=values,
        threat={"norm": "linf", "eps": 8 / 255},
        attack={} if kind == "input" else {"name": "pgd-10"},
        samples=tuple({"id": k, "class": "cat </script>"} for k in range(count)) if kind == "input" else (),
        provenance={**ABOUT, "run": run, "checkpoint": f"{checkpoint}.safetensors"},
    )


def test_the_table_says_how_flat() -> None:
    table = flatness_table([record("weight-1d"), record("weight-1d", steep=0.5, run="b")], at=0.5)
    assert table.header == ("landscape", "epoch", "loss", "robust %", "rise at 0.5", "mean rise to 1")
    # Rises at 0.5 are 0.25 and 0.5; by the trapezoid rule x^2 has the mean 0.375 on this grid.
    assert table.rows[0] == ("a", "7", "0.500", "100.00", "0.375 ± 0.177", "0.562 ± 0.265")
    assert table.rows[1][4] == "0.188 ± 0.088"


def test_a_rise_is_never_read_between_points() -> None:
    """Along a line a parabola of three points would rise by 0.5 at 0.5, twice as much as it does."""

    def coarse(name: str) -> Landscape:
        fine = record("weight-1d", run=name)
        return replace(fine, axis=AXIS[::2], values={key: rows[:, ::2] for key, rows in fine.values.items()})

    table = flatness_table([coarse("a")])
    assert (table.header[4], table.rows[0][4]) == ("rise at 1", "1.500 ± 0.707")
    assert paired([coarse("a"), coarse("b")])[0].startswith("b minus a: rise at 1 0.000")


def test_names_that_the_font_lacks_are_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    draw_curves([record("weight-1d", run="頑健"), record("weight-1d", run="b")], tmp_path / "curves.png")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_of_two_points_as_near_the_smaller_is_taken() -> None:
    axis = Axis(points=11, span=1.0).values
    assert nearest_radius(axis, 0.5) == pytest.approx(0.4)
    for points, span in ((21, 1.0), (3, 0.5)):
        assert nearest_radius(Axis(points=points, span=span).values, 0.5) == 0.5, "the default grids have it"


def test_surfaces_and_inputs_have_their_own_columns() -> None:
    assert flatness_table([record("weight-2d", count=1)]).header[-2:] == ("robust %", "mean |rise|")
    table = flatness_table([record("input")])
    assert table.header == ("landscape", "epoch", "loss", "mean |rise|")
    assert table.rows[0][2] == "0.500 ± 0.000"


def test_holes_are_said_not_averaged() -> None:
    one = record("weight-1d")
    loss = one.loss.copy()
    loss[0, 0] = np.nan
    row = flatness_table([replace(one, values={**one.values, "loss": loss})]).rows[0]
    assert row[4:] == ("0.375 ± 0.177", "not finite")


def test_differences_are_taken_direction_by_direction() -> None:
    lines = paired([record("weight-1d"), record("weight-1d", steep=0.5, run="b")])
    assert lines == ["b minus a: rise at 0.5 -0.188 ± 0.088, lower along 2 of 2 directions"]
    assert paired([record("weight-2d"), record("weight-2d", run="b")]) == []


def test_networks_of_different_directions_are_not_paired() -> None:
    """Random numbers hang on the names of tensors: as many weights under other names move elsewhere."""
    old, one, other = (
        replace(record("weight-1d", run=run), moved={"tensors": 2, **digest})
        for run, digest in (("a", {}), ("b", {"digest": "1"}), ("c", {"digest": "2"}))
    )
    assert "lower along" in paired([one, one])[0]
    assert "lower along" in paired([old, old])[0], "records of older versions say how many moved"
    assert paired([one, other]) == [
        "c minus b: not compared direction by direction, their layers or the names of those differ, and so their "
        "directions do"
    ]
    assert "lower along" in paired([old, one])[0] and "lower along" in paired([one, old])[0]
    assert "differ" in paired([old, replace(old, moved={"tensors": 9})])[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("a", "best"), ("b", "best")], ["a", "b"]),
        ([("a", "best"), ("a", "last")], ["best", "last"]),
        ([("a", "best"), ("a", "last"), ("b", "best")], ["a best", "a last", "b best"]),
        ([("a", "best"), ("a", "best")], ["a best", "a best (2)"]),
    ],
)
def test_names_are_short_and_tell_apart(given: list[tuple[str, str]], expected: list[str]) -> None:
    assert labels([record("weight-1d", run=run, checkpoint=mark) for run, mark in given]) == expected


def test_test_selected_landscapes_carry_a_star() -> None:
    marked = replace(record("weight-1d"), marks=("test-selected",))
    assert labels([marked]) == ["a*"]
    assert "chosen on the test set" in caption([marked])


def test_the_caption_says_what_a_reader_needs() -> None:
    text = caption([record("weight-1d")])
    for word in ("digits train, 100 of 500 samples", "linf eps 8/255", "pgd-10", "2 filter-normalised", "5 points"):
        assert word in text
    assert "seed 0" in text
    assert "trained with seed 3" in text


def test_the_caption_names_every_machine_once() -> None:
    one = record("weight-1d")
    made = [replace(one, provenance={**one.provenance, "device": name}) for name in ("a CPU", "a GPU", "a CPU")]
    assert caption(made).endswith("; a CPU and a GPU")
    assert caption([replace(one, provenance={k: v for k, v in one.provenance.items() if k != "device"})])[-1] != " "


def test_radii_as_papers_write_them() -> None:
    assert [radius(eps) for eps in (8 / 255, 128 / 255, 0.2, 0.5, 0.0)] == ["8/255", "128/255", "0.2", "0.5", "0"]


DRAWN = [("weight-1d", draw_curves), ("weight-2d", draw_surfaces), ("input", draw_inputs)]


@pytest.mark.parametrize(("kind", "draw"), DRAWN)
def test_pictures_are_drawn_alike_every_time(kind: str, draw: Any, tmp_path: Path) -> None:
    records = [record(kind), record(kind, steep=0.5, run="b")]
    with Image.open(draw(records, tmp_path / "a.png")) as picture:
        colours = picture.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 100
    first = draw(records, tmp_path / "a.svg").read_bytes()
    assert draw(records, tmp_path / "b.svg").read_bytes() == first
    assert b"digits train" in first, "what it is of is said"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg", "b.svg"]


@pytest.mark.parametrize("kind", ["weight-1d", "weight-2d", "input"])
def test_the_page_stands_alone_and_holds_the_numbers(kind: str, tmp_path: Path) -> None:
    one = record(kind)
    loss = one.loss.copy()
    loss.flat[0] = np.nan
    page = draw_page([replace(one, values={**one.values, "loss": loss})], tmp_path / "p.html").read_text()
    assert not re.search(r"""(src|href)\s*=|https?:|@import|url\((?!#)""", page), "nothing is fetched"
    assert "@DATA@" not in page
    assert "@STOPS@" not in page
    assert page.count("</script>") == 2, "text in the data does not end the script"
    inside = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert inside
    data = json.loads(inside[1])
    assert data["kind"] == kind
    flat = np.array(data["records"][0]["values"]["loss"], dtype=float)
    assert np.isnan(flat.flat[0])
    assert np.allclose(flat.flat[1:], loss.flat[1:])
    assert len(data["items"]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": Axis(points=5, span=0.5).values}, "different axis .* 5 points to 1 and 5 points to 0.5"),
        ({"threat": {"norm": "l2", "eps": 0.5}}, "different threat"),
        ({"attack": {"name": "pgd-20"}}, "different attack"),
        ({"identity": {"data": "other pixels"}}, "different samples"),
        ({"provenance": {**ABOUT, "data": "digits test, 100 of 500 samples"}}, "different data .* digits test"),
        ({"provenance": {**ABOUT, "data": "digits train, 50 of 500 samples"}}, "different data .* 50 of 500"),
        ({"provenance": {**ABOUT, "seed": 1}}, "different seed .* 0 and 1; measure them alike"),
        ({"provenance": {**ABOUT, "precision": "bfloat16"}}, "different precision .* float32 and bfloat16"),
    ],
)
def test_different_questions_are_not_drawn_together(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    both = [record("weight-1d"), replace(record("weight-1d"), **change)]
    for refuses in (flatness_table, paired, lambda r: draw_curves(r, tmp_path / "a.png")):
        with pytest.raises(ConfigError, match=message):
            refuses(both)
    assert not list(tmp_path.iterdir())


def test_different_numbers_of_directions_and_none_at_all_are_not_drawn() -> None:
    with pytest.raises(ConfigError, match=r"different directions .* 2 and 3"):
        flatness_table([record("weight-1d"), record("weight-1d", count=3)])
    with pytest.raises(ConfigError, match="no landscape to draw"):
        flatness_table([])


@pytest.mark.parametrize("level", [0.0, 0.5, np.nan])
@pytest.mark.parametrize(("kind", "draw"), DRAWN)
def test_flat_and_empty_landscapes_are_drawn(kind: str, draw: Any, level: float, tmp_path: Path) -> None:
    one = record(kind)
    values = {name: np.full_like(array, level) for name, array in one.values.items()}
    both = [replace(one, values=values), replace(one, values=values)]
    assert draw(both, tmp_path / "flat.svg").stat().st_size > 10_000
    assert draw_page(both, tmp_path / "flat.html").is_file()
    assert ("not finite" in flatness_table(both).rows[0]) == np.isnan(level)
    assert draw([one, both[0]], tmp_path / "beside.svg").stat().st_size > 10_000


def test_different_images_are_not_drawn_side_by_side(tmp_path: Path) -> None:
    other = replace(record("input"), samples=({"id": 8, "class": "dog"}, {"id": 9, "class": "dog"}))
    with pytest.raises(ConfigError, match="different images"):
        draw_inputs([record("input"), other], tmp_path / "a.png")
