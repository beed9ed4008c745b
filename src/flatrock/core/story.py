"""What there is to tell of one model: its training, its evaluations, the pictures made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatrock.core.provenance import checkpoint_of
from flatrock.core.records import Result
from flatrock.core.runs import Run


@dataclass(frozen=True, kw_only=True, eq=False)
class Story:
    """A model and all that is known of it.

    `results` are by the name of their file. A run is known by a checkpoint, `known_by`, and its results come first. A
    model that was not trained here has no `run`, neither `recipe` (its text) nor `about` (where its training was).
    """

    name: str
    results: Mapping[str, Result]
    run: Run | None = None
    known_by: str = ""
    recipe: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()  # what a reader must know beside the findings

    @property
    def main_name(self) -> str:
        """The file of the result the model is known by: of a run one of its checkpoint; '' if there is none."""
        own = [n for n, r in self.results.items() if self.run is None or checkpoint_of(r.provenance) == self.known_by]
        return own[0] if own else ""

    @property
    def main(self) -> Result | str | None:
        """The result the model is known by; why a run has none to show, if it failed; None: not evaluated."""
        if self.run is not None and self.run.status == "failed":
            return self.run.reason or "failed"
        return self.results.get(self.main_name)

    @property
    def title(self) -> str:
        """Its name and, where what it is known by is not the whole plan of its recipe, what that is."""
        main = self.results.get(self.main_name)
        part = self.run is not None and main is not None and not main.provenance.get("whole_plan")
        return f"{self.name} ({self.main_name.removeprefix('result-')})" if part else self.name
