"""Things with options in one word: name, file:name, and option=value after colons."""

from __future__ import annotations

from typing import Any

import pytest

from flatrock.core.errors import ConfigError
from flatrock.core.spelled import parsed, spell, valued


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("folder", "folder", {}),
        ("folder:size=64:channels=1", "folder", {"size": 64, "channels": 1}),
        ("mine:make", "mine:make", {}),
        ("mine:make:n=2/4:kind=easy:on=true", "mine:make", {"n": 0.5, "kind": "easy", "on": True}),
        ("mine:n=2", "mine", {"n": 2}),
        ("folder:path=a=b", "folder", {"path": "a=b"}),
    ],
)
def test_parts_with_a_value_are_options_and_the_others_the_name(text: str, name: str, options: dict[str, Any]) -> None:
    assert parsed("data", text, {"folder"}.__contains__) == (name, options)
    assert parsed("data", spell(name, options), {"folder"}.__contains__) == (name, options)


def test_every_part_that_is_no_option_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        parsed("data", "folder:64:size=1:size=2", {"folder"}.__contains__)
    assert raised.value.faults == (
        "data 'folder:64:size=1:size=2': expected option=value after ':', got '64'",
        "data 'folder:64:size=1:size=2' gives size twice; keep one",
    )


def test_one_way_to_spell_it() -> None:
    assert spell("folder", {"size": 64, "channels": 1}) == spell("folder", {"channels": 1, "size": 64})
    assert spell("folder", {"size": 64, "channels": 1}) == "folder:channels=1:size=64"
    assert spell("moons", valued({"noise": "1/10"})) == spell("moons", {"noise": 0.1})
