"""Where a run comes from, as its row of results says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Those of a run's provenance that say how to ask the same question again.
CERTIFICATE = ("commit", "flatrock", "torch", "python", "device", "time", "engine")
# What a run may be built on, by its name in provenance, and the key that names it.
SOURCES = {"helper": "objective.helper", "start": "model.weights"}
# How steps are computed: runs may go on otherwise than they began, with numbers that are rounded otherwise.
FREE = ("engine", "device")


def origin(began: Mapping[str, Any], resumed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The provenance of a row: how a run began, the commits that resumed it (`resumed`), the other engines and devices
    it went on with (`continued`), what it was built on and the data. What was not, is left out."""
    others = [{key: again[key] for key in FREE if again.get(key) not in (None, began.get(key))} for again in resumed]
    more: dict[str, Any] = {
        "resumed": [str(again.get("commit")) for again in resumed],
        "continued": [other for i, other in enumerate(others) if other and other not in others[:i]],
        **{kind: began.get(kind) for kind in (*SOURCES, "training_set")},
    }
    return {key: began.get(key) for key in CERTIFICATE} | {key: value for key, value in more.items() if value}
