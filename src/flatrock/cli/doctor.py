"""`flatrock doctor`: is everything here that training and evaluation need?"""

from __future__ import annotations

import importlib.metadata
import platform
import textwrap
from pathlib import Path
from typing import Annotated

import torch
import typer

from flatrock.cli.console import console, friendly, say
from flatrock.core.provenance import VERSION, commit, device_name
from flatrock.data.catalog import DATA, default_folder, how_to_get, info
from flatrock.data.source import Source

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "pydantic",
    "pyyaml",
    "typer",
    "rich",
    "scikit-learn",
    "scipy",
    "pillow",
    "matplotlib",
    "tensorboard",
)


NAMES = typer.Argument(help="data sets: where they are, or what they need and where to get it")


def run(
    names: Annotated[list[str] | None, NAMES] = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder with data already there")] = None,
) -> None:
    """Print versions, the device and the data found; of the data sets that are named, how to get what is missing."""
    with friendly():
        folder = data_dir or default_folder()
        if names:
            for source in [info(name) for name in names]:  # a name that is unknown is told before anything else
                _tell(source, folder)
            return
        missing = _versions()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _line("device", device_name(device))
        say(f"data (looked for in {folder.absolute()})")
        absent = [name for name in DATA.names() if not _found(info(name), folder)]
        if absent:
            say(f"flatrock doctor {absent[0]} tells what it needs and where to get it")
        if missing:
            raise typer.Exit(1)


def _versions() -> list[str]:
    """Print them; the packages that are not installed."""
    _line("flatrock", f"{VERSION} ({commit()})")
    _line("python", platform.python_version())
    missing = []
    for package in PACKAGES:
        try:
            _line(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
            _line(package, ("missing", "red"), f": pip install {package}")
    return missing


def _found(source: Source, folder: Path) -> bool:
    """Print in a line whether a data set is here."""
    place = source.find(folder)
    if place:
        _line(source.name, place)
        return True
    size = sum(file.size for file in source.remote) / 1e6
    _line(source.name, ("not here", "yellow"), f": train with --download ({size:.0f} MB)" if source.remote else "")
    return False


def _tell(source: Source, folder: Path) -> None:
    """Where a data set is, or all that there is to know about getting it."""
    place = source.find(folder)
    if place:
        say(f"{source.name} is here: {place}")
        return
    say(f"{source.name} is ", ("not here", "yellow"), f" (looked for in {folder.absolute()})")
    wrap = textwrap.TextWrapper(min(console.width, 100), initial_indent="  ", subsequent_indent="    ")
    wrap.break_long_words = wrap.break_on_hyphens = False
    for sentence in how_to_get(source.name).split("; "):
        say("\n".join(wrap.wrap(sentence)))


def _line(name: str, *parts: str | tuple[str, str]) -> None:
    say(f"  {name:<14} ", *parts)
