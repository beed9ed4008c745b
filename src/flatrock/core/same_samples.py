"""Whether rows of one table are of the same samples: a file of data may have been exchanged between two runs."""

from __future__ import annotations

from collections.abc import Iterable

from flatrock.core.rows import Row


def other_samples(named: Iterable[tuple[str, Row]]) -> list[str]:
    """Who was tested on other samples than the first whose data goes by the same name, or was trained on others though
    the recipe is the same; rows of older versions do not tell."""
    tested, trained = dict[str, dict[str, list[str]]](), dict[str, dict[str, list[str]]]()
    for name, row in named:
        about = row.scores[row.main].provenance if row.main else {}
        if "data" in about and "samples_digest" in about:
            tested.setdefault(about["data"], {}).setdefault(about["samples_digest"], []).append(name)
        if "training_set" in row.provenance:
            alike = "; ".join([row.recipe, *row.changes, str(about.get("data"))])
            trained.setdefault(alike, {}).setdefault(row.provenance["training_set"], []).append(name)
    return [
        f"{', '.join(names)}: {how} other samples than {groups[0][0]}, though the data has the same name"
        for how, found in (("tested on", tested), ("trained on", trained))
        for groups in (list(by.values()) for by in found.values())
        for names in groups[1:]
    ]
