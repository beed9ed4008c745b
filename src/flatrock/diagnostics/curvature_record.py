"""What a measurement of curvature leaves behind: plain values that go to JSON and come back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import json_text
from flatrock.diagnostics.curvature import Curvature, Settings
from flatrock.diagnostics.estimate import real, whole

SCHEMA = "flatrock.curvature/1"
# What every record tells of where it comes from, that of a run and that of a model that is none.
TOLD = ("data", "precision")
OF_RUN, OF_MODEL = ("run", "checkpoint"), ("model",)
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
    def from_json(cls, text: str | bytes, where: str = "record") -> CurvatureRecord:
        """Read a record back; StateError if it is none, or if its numbers contradict each other."""
        try:
            values = json.loads(text)
            if values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']!r}, expected {SCHEMA!r}")
            record = cls(
                losses={name: Curvature.from_dict(values["losses"][name]) for name in LOSSES},
                threat=dict(values["threat"]),
                attack=dict(values["attack"]),
                settings=dict(values["settings"]),
                marks=tuple(map(str, values["marks"])),
                provenance=dict(values["provenance"]),
            )
            _check(record)
        except KeyError as error:
            raise StateError(f"{where} is not a record of curvature (it lacks {error}); measure again") from error
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, ConfigError) as error:
            raise StateError(f"{where} is not a record of curvature ({error}); measure again") from error
        return record


def _check(record: CurvatureRecord) -> None:
    """ValueError, KeyError or ConfigError if what was set is missing, impossible, or not what the losses say."""
    real(record.threat["eps"], least=0)
    about = (*(OF_MODEL if "model" in record.provenance else OF_RUN), *TOLD)
    for told, names in ((record.threat, ["norm"]), (record.attack, ["name"]), (record.provenance, about)):
        for name in names:
            if not isinstance(told[name], str):
                raise ValueError(f"expected text as {name}, got {told[name]!r}")
    whole(record.provenance["seed"])
    known = [f.name for f in fields(Settings)]
    settings = Settings(**{name: record.settings[name] for name in known})
    if odd := set(record.settings) - {*known, "beta"}:
        raise ValueError(f"unknown settings {', '.join(sorted(odd))}")
    meant = [settings.gamma, settings.awp_steps, settings.rho, settings.sigma0, record.settings["beta"]]
    for name, found in record.losses.items():
        terms = found.pac_bayes
        if [found.awp.gamma, found.awp.steps, found.sam.rho, terms.sigma0, terms.beta] != meant:
            raise ValueError(f"the {name} loss was measured with other settings")
