"""What commands share: numbers, which of several runs or files are meant, and where what they write goes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, TypeVar

import torch
import typer

from flatrock.cli.console import errors, say
from flatrock.core.device import pick_device
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import check_schema
from flatrock.core.numbers import number
from flatrock.core.records import SCHEMA as RESULT
from flatrock.core.rows import SCHEMA as ROWS
from flatrock.recipes.load import namesake, recipe_names
from flatrock.workflows.foreign_model import out_faults

T = TypeVar("T")
P = TypeVar("P", str, Path)
DataDir = Annotated[Path | None, typer.Option(help="folder with data already there")]
Source = Annotated[
    Path | None, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run folder or a .safetensors file of one")
]
# How the pages of commands begin, below their title.
PAGE = "Written by `flatrock "
# Exit codes of commands that make many things: some failed; all went well, but some were left for the next time.
FAILED, UNFINISHED = 1, 3
# Endings of what commands draw and list beside runs.
DRAWN = (".png", ".svg", ".csv", ".tsv", ".html", ".md")
# Endings of what is written under one name for figures, and of pictures that flatrock does not draw.
ENDINGS = (".png", ".svg", ".html", ".json")
UNDRAWN = (".pdf", ".eps", ".jpg", ".jpeg")
# A range of more seeds than that is a slip of the hand.
MOST_SEEDS = 1000


def recognised(files: Sequence[Path], read: Callable[[Path], T | None], command: str) -> list[tuple[Path, T]]:
    """The files that `command` wrote, with what `read` finds in them; the others are left out, and it is said."""
    found = [(file, read(file)) for file in files]
    for file, content in found:
        if content is None:
            say(f"left out {file}: not a file of `{command}`")
    return [(file, content) for file, content in found if content is not None]


def without_others(paths: Sequence[P], other: Callable[[Path], str] | None = None) -> list[P]:
    """What of `runs/*` can be a run or a result; the rest is told, unless there is nothing else: then it is refused by
    who reads it. `other` says why something is neither, by default `other_kind`."""
    odd = {path: why for path in paths if (why := (other or other_kind)(Path(path)))}
    if len(odd) == len(paths):
        return list(paths)
    for path, why in odd.items():
        say(("left out ", "yellow"), f"{path}: {why}")
    return [path for path in paths if path not in odd]


def other_kind(path: Path, *, rows: bool = False) -> str:
    """Why this is neither a run nor a result, though flatrock writes such; nothing of what may be one, or is foreign.

    With `rows`, files of `flatrock results` are wanted, too.
    """
    if not path.is_file():
        return ""
    if path.suffix in DRAWN:
        return "no result file"
    schema = _schema(path)
    kind = schema.partition("/")[0]
    if not kind.startswith("flatrock.") or kind == RESULT.partition("/")[0]:
        return ""
    if kind == ROWS.partition("/")[0]:
        return "" if rows else "it holds rows of many runs"
    return f"no result file, but a {schema}"


def tell_namesake(recipe: str) -> None:
    """Say that a recipe of the library is meant where a file of the user's has its name."""
    if recipe in recipe_names() and (file := namesake(recipe)):
        say(f"{recipe} is the recipe that comes with flatrock; your file is named {file}", to=errors)


def no_run(path: Path, *, rows: bool = False) -> str:
    """As other_kind, and of a folder of runs, such as that of a sweep, where a run is wanted itself."""
    if path.is_dir() and not (path / "run.json").is_file() and any(path.glob("*/run.json")):
        return "no run folder, but one that holds runs"
    return other_kind(path, rows=rows)


def _schema(path: Path) -> str:
    """What a JSON file says that it is; nothing of any other file."""
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else None
    except (OSError, ValueError):
        return ""
    return str(content.get("schema", "")) if isinstance(content, dict) else ""


def one_device(text: str) -> torch.device:
    """The device of a command that does not share its work."""
    if text.strip() == "all" or "," in text:
        raise ConfigError(
            f"device {text!r} names several, and this command works on one; name it, such as cuda:0 "
            "(train, eval, certify, landscape and reproduce take several)"
        )
    return pick_device(text)


def words(text: str) -> list[str]:
    """The checkpoints named between commas."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"which names no checkpoint, got {text!r}; name some, such as best,last or kept")
    return found


def seeds_of(text: str) -> list[int]:
    """The seeds of `--seeds 0,2-4`: whole numbers and ranges of them, none twice."""
    found: list[int] = []
    for word in (word.strip() for word in text.split(",")):
        span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word, re.ASCII)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
        if not first <= last < first + MOST_SEEDS:
            raise ConfigError(
                f"seeds must be whole numbers or ranges of them (of {MOST_SEEDS} at most), such as 0,1,2 or 0-4 or 3, "
                f"got {text!r}"
            )
        found += range(first, last + 1)
    if twice := [str(seed) for seed in dict.fromkeys(found) if found.count(seed) > 1]:
        raise ConfigError(f"seeds must differ, got {text!r} with {', '.join(twice)} twice; leave one out")
    return found


def radii_of(text: str | None) -> list[str]:
    """The radii of `--eps 4/255,8/255`, as they are written; none if there are not several."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if len(words) < 2:
        return []
    if len({f"{numeric('eps', word):.4g}" for word in words}) < len(words):  # what files are named by
        raise ConfigError(f"eps: radii must differ, in their first four digits, got {text!r}; leave one out")
    return words


def numeric(option: str, text: str) -> float:
    """The number an option is given as text; commands take several such options, so a fault says which one it is."""
    try:
        return number(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def named(out: Path | None) -> Path | None:
    """The name of figures, if that is told, to which commands add endings; one given with it is cut off."""
    if out is None:
        return None
    if out.name in ("", ".."):
        raise ConfigError(f"out must end in a name for the figures, got {str(out)!r}; say --out figures/flatness")
    if out.is_dir():
        raise ConfigError(f"out: {out} is a folder; name the figures in it, such as --out {out / 'flatness'}")
    ending = out.suffix.lower()
    if ending in UNDRAWN:
        raise ConfigError(f"out: {out} ends in {out.suffix}, which is not drawn; figures are .png and .svg, without it")
    return out.with_suffix("") if ending in ENDINGS else out


def check_out(*files: Path, option: str = "--out") -> None:
    """StateError, naming `option`, if one of these could not be written when the work is done. Nothing is left."""
    for file in files:
        if file.is_dir():
            raise StateError(f"cannot write {file}: it is a folder; give {option} the name of a file")
        try:
            folder = next(parent for parent in file.absolute().parents if parent.exists())
            with TemporaryFile(dir=folder):  # asking for permissions is not enough: not every file system heeds them
                pass
        except OSError as error:
            raise StateError(f"cannot write {file}: {error.strerror or error}; choose another {option}") from error


def check_json(out: Path, schema: str, what: str) -> None:
    """As check_out, of a JSON file: it may take the place of one of its schema, of any version, and of no other."""
    check_out(out)
    if faults := out_faults(out, lambda text: check_schema(text, schema), what=what):
        raise ConfigError(faults[0])


def check_csv(csv: Path) -> None:
    """As check_out, of a table as CSV."""
    if csv.suffix != ".csv":
        raise ConfigError(f"csv: {csv} must end in .csv")
    check_out(csv, option="--csv")


def check_page(out: Path, *pictures: Path, option: str = "--out") -> None:
    """As check_out, of a page that is written anew every time; nothing but such a page is replaced."""
    check_out(out, *pictures, option=option)
    name = option.removeprefix("--")
    if out.suffix != ".md":
        raise ConfigError(f"{name}: {out} must end in .md")
    if out.exists() and PAGE not in out.read_text(errors="replace")[:1000]:
        raise ConfigError(f"{name}: {out} is no page that flatrock wrote, and is left alone; choose another name")


def beside(sources: Sequence[Path], name: str) -> Path:
    """Where figures go unless told: into the folder of the run, or into the one that holds the runs."""
    folders = {source if source.is_dir() else source.parent for source in sources}
    if len(folders) == 1:
        return folders.pop() / name
    return Path(os.path.commonpath([folder.resolve() for folder in folders])) / name
