"""What papers print about the cost of their training, beside ours of the same kind, for the page of speed targets."""

from __future__ import annotations

from collections.abc import Mapping

from flatrock.core.costs import Bench
from flatrock.reports.speed_found import Found, found, told
from flatrock.reports.speed_targets import Published, PublishedRow, SpeedTargets
from flatrock.reports.table import Table, markdown

TITLE = "## Beside what papers print"
WORDS = """\
Times of other hardware say little beside ours; what a method adds to its base says more: theirs is computed from what
they print, ours is measured as above. An empty cell of ours was not measured. Nothing here is a target."""
HEADER = ("paper", "what", "per epoch", "memory, MB", "time over base", "memory over base")
OURS = ("ours: s/epoch (95 %)", "ours: time over base", "ours: memory over base", "measured with")


def published_parts(targets: SpeedTargets, files: Mapping[str, Bench]) -> list[str]:
    """The part of the page; nothing if the targets name no paper."""
    if not targets.published:
        return []
    said: dict[str, list[str]] = {}
    for part in targets.published:
        said.setdefault(" ".join(part.text.split()), []).append(part.cite)
    lines = [f"- {'; '.join(cites)}: {text}" for text, cites in said.items()]
    return [TITLE, WORDS, markdown(published_table(targets, files)), "\n".join(lines)]


def published_table(targets: SpeedTargets, files: Mapping[str, Bench]) -> Table:
    """One line per row that a paper prints."""
    lines = [_line(targets, part, row, files) for part in targets.published for row in part.rows]
    return Table((*HEADER, *OURS), tuple(lines))


def _line(targets: SpeedTargets, part: Published, row: PublishedRow, files: Mapping[str, Bench]) -> tuple[str, ...]:
    """The first row of a paper is the base of the others."""
    base = part.rows[0]
    ratios = [_ratio(row.epoch, base.epoch), _ratio(row.megabytes, base.megabytes)] if row is not base else ["", ""]
    printed = f"{row.epoch:g} {part.unit}".strip()
    memory = "" if row.megabytes is None else f"{row.megabytes:g}"
    ours = [next(iter(found(targets, row.kind, m, files)), None) for m in ("seconds", "time_ratio", "memory_ratio")]
    where = next((f"`{one.cost.recipe}`, `{one.file}`" for one in ours if one is not None), "")
    return (part.cite, row.kind.label, printed, memory, *ratios, *map(_told, ours), where)


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or base is None else f"{value / base:.2f}"


def _told(one: Found | None) -> str:
    return "" if one is None else told(one.ours)
