"""A name is a recipe of the library; a file of the user's that bears it is named with its ending, and this is said."""

from __future__ import annotations

from pathlib import Path

from command_cases import flatrock, refusal

SAID = "digits_at is the recipe that comes with flatrock; your file is named digits_at.yaml"


def test_a_name_of_the_library_is_no_file(here: Path) -> None:
    assert flatrock("cp", "digits_at", "digits_at.yaml").exit_code == 0
    for command in (["check"], ["train", "train.max_steps=1", "data.limit=200"]):
        done = flatrock(command[0], "digits_at", *command[1:])
        assert done.exit_code == 0, done.output
        assert SAID in done.stderr and SAID not in done.stdout
        named = flatrock(command[0], "digits_at.yaml", *command[1:], *(["--overwrite"] if command[1:] else []))
        assert named.exit_code == 0, named.output
        assert SAID not in named.output


def test_nothing_is_said_where_no_file_has_the_name(here: Path) -> None:
    assert "your file" not in flatrock("check", "digits_at").output


def test_a_name_that_is_none_leads_to_the_file(here: Path) -> None:
    assert flatrock("cp", "digits_at", "mine.yml").exit_code == 0
    assert "unknown recipe 'mine'" in (said := refusal(flatrock("check", "mine")))
    assert said.endswith("your file is named mine.yml")
    assert "your file" not in refusal(flatrock("check", "other"))
