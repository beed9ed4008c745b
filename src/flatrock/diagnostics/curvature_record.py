"""What a measurement of curvature leaves behind: plain values that go to JSON and come back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.files import json_text
from flatrock.diagnostics.curvature import Curvature

SCHEMA = "flatrock.curvature/1"
LOSSES = CLEAN, ADVERSARIAL = "clean", "adversarial"


@dataclass(frozen=True)
class CurvatureRecord:
    """A checkpoint's curvature by loss: `clean`, and `adversarial` for inputs attacked once at its weights."""

    losses: Mapping[str, Curvature]
    threat: Mapping[str, Any]
    attack: Mapping[str, Any]
    settings: Mapping[str, Any]
    marks: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compared(self) -> dict[str, Any]:
        """What must be the same for two records to stand in one table."""
        told = {name: self.provenance.get(name) for name in ("data", "precision", "seed")}
        return {"threat": dict(self.threat), "attack": dict(self.attack), **told, **self.settings}

    def to_json(self) -> str:
        """JSON text."""
        losses = {name: found.to_dict() for name, found in self.losses.items()}
        return json_text({"schema": SCHEMA, **asdict(replace(self, losses={})), "losses": losses})

    @classmethod
    def from_json(cls, text: str, where: str = "record") -> CurvatureRecord:
        """Read a record back; StateError if it is none."""
        try:
            values = json.loads(text)
            if values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']!r}, expected {SCHEMA!r}")
            return cls(
                losses={name: Curvature.from_dict(values["losses"][name]) for name in LOSSES},
                threat=dict(values["threat"]),
                attack=dict(values["attack"]),
                settings=dict(values["settings"]),
                marks=tuple(values["marks"]),
                provenance=dict(values["provenance"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"{where} is not a record of curvature ({error}); measure again") from error
