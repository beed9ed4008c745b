"""What result files say as a whole, read without their lists of a value per sample."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.records import COLLAPSED, SCHEMA

# Lists of numbers, of so many characters that no option of an attack is taken for one.
_NUMBERS = re.compile(r"\[[-+\d.,eEnul\s]{200,}\]")


@dataclass(frozen=True, kw_only=True)
class Header:
    """The accuracies that a result file states, under what, and where they come from."""

    n: int
    clean: float
    robust: float
    per_attack: Mapping[str, float]
    threat: Mapping[str, Any]
    marks: tuple[str, ...]
    collapsed: bool
    provenance: Mapping[str, Any]


def read_header(file: Path) -> Header:
    """The head of a result file; StateError if it is damaged.

    Its accuracies are taken as they are stated: they are checked against the samples by who reads all of it, which
    takes fifty times as long for 10,000 samples.
    """
    try:
        content = json.loads(_NUMBERS.sub("[]", file.read_text()))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}, expected {SCHEMA!r}")
        return Header(
            n=int(content["n"]),
            clean=float(content["clean"]),
            robust=float(content["robust"]),
            per_attack={str(name): float(share) for name, share in content["per_attack"].items()},
            threat=dict(content["threat"]),
            marks=tuple(content["marks"]),
            collapsed=any(finding["code"] == COLLAPSED for finding in content["findings"]),
            provenance=dict(content["provenance"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{file} is not a flatrock result ({error}); evaluate again") from error
