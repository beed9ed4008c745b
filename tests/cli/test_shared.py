"""Where what commands write goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatrock.cli.shared import named
from flatrock.core.errors import ConfigError


@pytest.mark.parametrize("ending", ["", ".png", ".svg", ".html", ".json", ".PNG"])
def test_an_ending_of_figures_is_cut_off(tmp_path: Path, ending: str) -> None:
    assert named(tmp_path / f"x{ending}") == tmp_path / "x"


def test_dots_in_names_stay() -> None:
    assert named(Path("sigma0.25")) == Path("sigma0.25")
    assert named(None) is None


@pytest.mark.parametrize("out", ["", ".", ".."])
def test_a_name_must_be_given(out: str) -> None:
    with pytest.raises(ConfigError, match="out must end in a name for the figures"):
        named(Path(out))


def test_a_folder_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"out: {tmp_path} is a folder; .* such as --out {tmp_path}/flatness$"):
        named(tmp_path)
    (tmp_path / "x").mkdir()
    assert named(tmp_path / "x.png") == tmp_path / "x", "a file beside a folder of its name was asked for"


def test_what_is_not_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.pdf ends in \.pdf, which is not drawn; figures are \.png and \.svg"):
        named(tmp_path / "x.pdf")
