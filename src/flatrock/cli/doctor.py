"""`flatrock doctor`: is everything here that training and evaluation need?"""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Annotated

import torch
import typer

from flatrock.cli.console import console, friendly
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
                _line(package, "[red]missing[/]: pip install " + package)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _line("device", device_name(device))
        folder = data_dir or default_folder()
        console.print(f"data (looked for in {folder.absolute()})", highlight=False, soft_wrap=True)
        for name in DATA.names():
            place = found(name, folder)
            _line(name, place if place else f"[yellow]not here[/]: {how_to_get(name)}")
        if missing:
            raise typer.Exit(1)


def _line(name: str, text: str) -> None:
    console.print(f"  {name:<14} {text}", highlight=False, soft_wrap=True)
