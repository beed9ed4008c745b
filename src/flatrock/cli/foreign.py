"""What commands share that also take models which flatrock did not train: their options, and which of them fit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flatrock.core.errors import ConfigError
from flatrock.core.guests import dotted, local

# How files of torch end; a run has none.
TORCH = (".pt", ".pth", ".ckpt", ".bin")
_OWN = "Models that flatrock did not train"

Model = Annotated[
    str | None,
    typer.Option(rich_help_panel=_OWN, help="a name (flatrock ls models) or package.module:factory of your own"),
]
Weights = Annotated[
    Path | None, typer.Option(rich_help_panel=_OWN, help="a safetensors or torch file; alone if its network is known")
]
Data = Annotated[
    str | None, typer.Option(rich_help_panel=_OWN, help="the data set, e.g. cifar10, or folder:size=64 with options")
]
NumClasses = Annotated[int | None, typer.Option(rich_help_panel=_OWN, help="checked against the model")]
Normalize = Annotated[
    str | None, typer.Option(rich_help_panel=_OWN, help="cifar10, ..., or none; what the file stores by default")
]
Norm = Annotated[str | None, typer.Option(rich_help_panel=_OWN, help="of the threat: linf or l2")]
Eps = Annotated[str | None, typer.Option(rich_help_panel=_OWN, help="radius of the threat, e.g. 8/255")]
Out = Annotated[Path | None, typer.Option(rich_help_panel=_OWN, help="the .json file to write")]


def check_source(source: Path | None, own: Mapping[str, Any], verb: str, *, threat: bool = True) -> None:
    """Either a run or a model of one's own, described by the options in `own`; else ConfigError."""
    _check([] if source is None else [source], own, verb, "--data, --norm and --eps" if threat else "and --data")


def check_sources(sources: Sequence[Path], own: Mapping[str, Any], verb: str) -> None:
    """Either runs or a model of one's own; records (.json), which are not measured again, beside either."""
    runs = [source for source in sources if source.suffix != ".json"]
    if runs or not sources or any_given(own):
        _check(runs, own, verb, "--data, --norm and --eps")


def any_given(own: Mapping[str, Any]) -> bool:
    """Whether an option describes a model of one's own."""
    return any(value is not None for value in own.values())


def _check(runs: Sequence[Path], own: Mapping[str, Any], verb: str, needed: str) -> None:
    if not runs and not any_given(own):
        raise ConfigError(
            f"nothing to {verb}; name a run folder or checkpoint, or a model of your own with --model or --weights, "
            f"{needed}"
        )
    if runs and (meant := _no_run(runs[0])):
        raise ConfigError(meant)
    if runs and any_given(own):
        given = ", ".join(f"--{name.replace('_', '-')}" for name, value in own.items() if value is not None)
        raise ConfigError(
            f"{runs[0]} is a run, whose recipe names network and data; leave out {given}, which describe a model that "
            "is no run, or leave out the run"
        )


def _no_run(source: Path) -> str:
    """What to say where a run is named and a network or weights are meant; nothing if it may be a run."""
    told = str(source)
    if ":" in told and not source.exists():
        return f"{told} is no run; a network of your own is named by an option: --model {shlex.quote(told)}"
    if local(told) is not None and not source.exists():
        return f"there is no run {told}; a network of {told}.py is named --model {told}:FUNCTION"
    if module := dotted(told):
        return f"{told} is no run; a network of it is named --model {module}:FUNCTION"
    if source.suffix in TORCH and source.is_file():
        return f"{told} is no run, whose checkpoints are .safetensors; weights are named --weights {shlex.quote(told)}"
    return ""
