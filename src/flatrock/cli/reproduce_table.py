"""A table that can be made: everything is looked at first, then rows, results file and page are made in one call."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatrock.cli.shared import check_json, check_out, check_page
from flatrock.core.device import Devices, each_device, pick_device
from flatrock.core.locks import alone
from flatrock.core.progress import Progress
from flatrock.core.rows import SCHEMA, Row, chosen_on_test, read_rows
from flatrock.recipes.changed import leaves
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.reports.claims import outlook
from flatrock.reports.notes import read_notes
from flatrock.reports.papers import Papers, known_papers, shipped_papers
from flatrock.reports.results_files import write_results
from flatrock.workflows.expected import expected_bands
from flatrock.workflows.reproduce import Listener, Outcome, reproduce_rows
from flatrock.workflows.reproduce_names import Overrides, whole_tables
from flatrock.workflows.reproduce_plan import Planned, plan_rows
from flatrock.workflows.results import changes, protocol


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A table that can be made: its rows, the files it is written to, and with what.

    `lacking` are recipes of published tables that are left out, and what they would need.
    """

    rows: Sequence[Planned]
    lacking: Mapping[str, str]
    out: Path
    page: Path
    papers: Path | None
    data_dir: Path | None
    download: bool
    device: Devices
    command: str

    def known(self) -> list[Row]:
        """The rows of the results file: these, and those that were there before."""
        return (read_rows(self.out) or []) if self.out.exists() else []

    def figures(self, rows: Sequence[Row]) -> Papers:
        """What the papers print, as far as it concerns these rows."""
        return known_papers(self.papers, self.out.parent, {row.recipe: row.protocol for row in rows})

    def outlooks(self) -> dict[str, str]:
        """What papers print about the rows to be and those that are there, by protocol; changed rows aside."""
        planned, known = {row.recipe.name: changes(row.recipe) for row in self.rows}, self.known()
        held = {name: protocol(name) for name, changed in planned.items() if not changed}
        held |= {row.recipe: row.protocol for row in known if row.comparable}
        tested = {name: protocol(name) for name, changed in planned.items() if chosen_on_test(changed)}
        tested |= {row.recipe: row.protocol for row in known if row.on_test}
        found: dict[str, str] = {}
        for names, way in ((held, ""), (tested, ", chosen on the test set*")):
            parts = known_papers(self.papers, self.out.parent, names).protocols
            texts = {f"{key}{way}": outlook(part, names, on_test=bool(way)) for key, part in parts.items()}
            found |= {key: text for key, text in texts.items() if text}
        return found

    def make(
        self,
        *,
        limit_minutes: float | None = None,
        progress: Progress | None = None,
        listener: Listener | None = None,
    ) -> Outcome:
        """Make the rows."""
        how: dict[str, Any] = {"data_dir": self.data_dir, "download": self.download, "device": self.device}
        outcome = reproduce_rows(
            self.rows, self.out, **how, limit_minutes=limit_minutes, progress=progress, listener=listener
        )
        return replace(outcome, lacking=self.lacking)

    def report(self) -> list[Path]:
        """Write the page of all rows of the results file; it and its pictures, or nothing if there is no row yet."""
        if not self.known():
            return []
        with alone(self.page):  # processes that share the rows often end together
            rows = self.known()
            bands = expected_bands(rows, [planned.recipe for planned in self.rows])
            pictures = write_results(rows, self.figures(rows), [self.out], self.page, bands=bands, command=self.command)
        return [self.page, *pictures]


def prepare(
    names: Iterable[str],
    overrides: Overrides = (),
    *,
    runs_dir: Path = DEFAULT_RUNS,
    out: Path | None = None,
    page: Path | None = None,
    papers: Path | None = None,
    seeds: Sequence[int] = (),
    data_dir: Path | None = None,
    download: bool = False,
    device: Devices = "auto",
) -> Prepared:
    """Look at everything a table needs before any work is done; what is wrong with its recipes is told at once."""
    names, overrides = list(names), overrides if isinstance(overrides, Mapping) else list(overrides)
    out = runs_dir / "reproduce.json" if out is None else out
    page = out.with_suffix(".md") if page is None else page
    check_json(out, SCHEMA, "results file")
    if out.exists():
        read_rows(out)  # one that is damaged is refused now, not after the first row
    read_notes([out])
    check_page(page, page.with_suffix(".png"), option="--page")
    check_out(runs_dir / "run", option="--runs-dir")
    for one in each_device(device):
        pick_device(one)
    tables, lacking = whole_tables(names, table_rows(), overrides)
    rows = plan_rows(
        names,
        overrides,
        runs_dir=runs_dir,
        seeds=seeds,
        last=known_papers(papers, out.parent).last_epochs,
        data_dir=data_dir,
        download=download,
        tables=tables,
    )
    places = {"--runs-dir": runs_dir, "--out": out, "--page": page, "--papers": papers, "--data-dir": data_dir}
    return Prepared(
        rows=rows,
        lacking=lacking,
        out=out,
        page=page,
        papers=papers,
        data_dir=data_dir,
        download=download,
        device=device,
        command=_command(names, overrides, seeds, places),
    )


def table_rows() -> dict[str, list[str]]:
    """The recipes of each published table, by its name: all that its page lists."""
    return {key: list(part.rows) for key, part in shipped_papers().tables.items()}


def table_summaries() -> dict[str, str]:
    """What each of them is, in a line."""
    counts = {key: (len(part.rows), part.title) for key, part in sorted(shipped_papers().tables.items())}
    return {key: f"{rows} row{'s' if rows > 1 else ''}, {title}" for key, (rows, title) in counts.items()}


def _command(
    names: Sequence[str], overrides: Overrides, seeds: Sequence[int], places: Mapping[str, Path | None]
) -> str:
    """What makes the same rows in a terminal; places that are the usual ones go without saying."""
    if isinstance(overrides, Mapping):
        found = {key.replace("__", "."): value for key, value in leaves(overrides).items()}
        overrides = [f"{key}={'null' if value is None else value}" for key, value in found.items()]
    runs, out = places["--runs-dir"] or DEFAULT_RUNS, places["--out"]
    usual = {"--runs-dir": DEFAULT_RUNS, "--out": runs / "reproduce.json", "--papers": None, "--data-dir": None}
    usual["--page"] = None if out is None else out.with_suffix(".md")
    said = [word for key, place in places.items() if place != usual[key] for word in (key, str(place))]
    words = [*names, *overrides, *(["--seeds", ",".join(map(str, seeds))] if seeds else []), *said]
    return f"flatrock reproduce {shlex.join(words)}"
