"""What there is to tell of one model: its training, its evaluations, the pictures made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatrock.core.records import Result
from flatrock.core.runs import Run


@dataclass(frozen=True, kw_only=True, eq=False)
class Story:
    """A model and all that is known of it.

    `results` are by the name of their file, the one the model is known by first. A model that was not trained here has
    no `run`, and neither `recipe` (its text) nor `about` (the provenance of its training).
    """

    name: str
    results: Mapping[str, Result]
    run: Run | None = None
    recipe: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()  # what a reader must know beside the findings

    @property
    def main(self) -> Result | str | None:
        """The result the model is known by; why a run has none to show, if it failed; None: not evaluated."""
        if self.run is not None and self.run.status == "failed":
            return self.run.reason or "failed"
        return next(iter(self.results.values()), None)
