"""`flatrock doctor`: is everything here that training and evaluation need?"""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Annotated

import torch
import typer

from flatrock.cli.console import friendly, say
from flatrock.core.provenance import VERSION, commit, device_name
from flatrock.data.catalog import DATA, default_folder, found, how_to_get

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


def run(data_dir: Annotated[Path | None, typer.Option(help="folder with data already there")] = None) -> None:
    """Print versions, the device, the data found, and how to get what is missing."""
    with friendly():
        _line("flatrock", f"{VERSION} ({commit()})")
        _line("python", platform.python_version())
        missing = []
        for package in PACKAGES:
            try:
                _line(package, importlib.metadata.version(package))
            except importlib.metadata.PackageNotFoundError:
                missing.append(package)
                _line(package, ("missing", "red"), f": pip install {package}")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _line("device", device_name(device))
        folder = data_dir or default_folder()
        say(f"data (looked for in {folder.absolute()})")
        for name in DATA.names():
            place = found(name, folder)
            if place:
                _line(name, place)
            else:
                _line(name, ("not here", "yellow"), f": {how_to_get(name)}")
        if missing:
            raise typer.Exit(1)


def _line(name: str, *parts: str | tuple[str, str]) -> None:
    say(f"  {name:<14} ", *parts)
