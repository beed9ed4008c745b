"""A recipe under examination: its sections, what could be built from them, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flatrock.core.errors import ConfigError, FlatrockError, in_words
from flatrock.core.guests import raised_at
from flatrock.core.registry import unknown
from flatrock.core.threat import Threat
from flatrock.core.types import Attack, Objective
from flatrock.data.source import Source
from flatrock.recipes.keys import Named


@dataclass
class Draft:
    """The sections that parsed, what could be built from them, and the faults met."""

    sections: dict[str, Any]
    faults: list[str] = field(default_factory=list)
    of_training: list[str] = field(default_factory=list)  # those of them that only training minds
    threat: Threat | None = None
    objective: Objective | None = None
    attack: Attack | None = None
    optimizer: torch.optim.Optimizer | None = None
    model: nn.Module | None = None
    source: Source | None = None
    shape: tuple[int, ...] | None = None
    classes: int | None = None

    def get(self, name: str, kind: type[Any]) -> Any:
        """A section, or None if it did not parse."""
        section = self.sections.get(name)
        return section if isinstance(section, kind) else None

    def build(self, where: str, make: Callable[[], Any]) -> Any:
        """What `make` returns; its faults are noted under their place in the recipe."""
        try:
            return make()
        except ConfigError as error:
            self.faults += [f"{where}: {fault}" for fault in (error.faults or (str(error),))]
        except FlatrockError as error:
            self.faults.append(f"{where}: {error}")
        except (TypeError, ValueError) as error:  # the first line: torch adds where in its own code it was
            self.faults.append(f"{where}: {(str(error).splitlines() or [''])[0]}{raised_at(error)}")
        except Exception as error:
            if not (place := raised_at(error)):  # not of the user's code: a fault of ours
                raise
            self.faults.append(f"{where}: {in_words(error)}{place}")
        return None

    def note(self, text: str) -> None:
        """One more fault."""
        self.faults.append(text)

    def option_faults(self, where: str, section: Named, options: Iterable[str]) -> bool:
        """Note the keys that are neither the section's own nor options of what it names; whether there are any."""
        known = [*type(section).model_fields, *options]
        said = " (those of the attack that the objective brings)" if section.name == "auto" else ""
        faults = [f"{where}.{key}: {unknown('key', key, known)}{said}" for key in section.options if key not in known]
        self.faults += faults
        return bool(faults)
