"""Figures a page needs beside our own: YAML files that people write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flatrock.core.errors import ConfigError

T = TypeVar("T")


def read_given(path: Path, make: Callable[[Any], T], *, what: str, option: str) -> T:
    """What `make` makes of the file; ConfigError says what in it is wrong, or which option names another."""
    import yaml

    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file of {what} at {path}; name it with {option}") from error
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    try:
        return make(raw)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path}: {type(error).__name__} {error}; its first lines say how it is built") from error
