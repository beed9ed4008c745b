"""The page of results: rows and the papers' figures in, Markdown out. Nothing on it is typed by hand."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

from flatrock.core.bands import Bands
from flatrock.core.gaps import student
from flatrock.core.rows import Row, Score
from flatrock.reports.claims import (
    beside_rows,
    by_recipe,
    claim_lines,
    drop,
    gain,
    points,
    score_at,
    target_lines,
    value,
)
from flatrock.reports.expected import expected_parts
from flatrock.reports.names import NOWHERE, method_names, row_names
from flatrock.reports.notes import Note
from flatrock.reports.papers import Measure, Papers, Protocol
from flatrock.reports.remarks import remarks
from flatrock.reports.results_beside import beside, part_of_images
from flatrock.reports.results_costs import costs, epoch_time
from flatrock.reports.table import Table, markdown, named

COMMAND = "flatrock report results/*.json --out docs/results.md"
OTHERS = "other"  # runs of no protocol

OPENING = """\
# Results

Written by `{command}`; no number on this page is typed by hand. Ours come
from results files, which flatrock makes of runs, the papers' from {papers} of flatrock or one of yours.

Percent of all test images. The weights are those of the best epoch on held-out training images (averaged ones where
the recipe averages) unless the last is named; the test set is looked at after training only, but for numbers with a
`*`, whose epoch was chosen on it. `±` is the standard error of a difference, paired by test image: it knows the chance
of the test set and, of several seeds, their spread; one seed tells nothing about the chance of the seed. A difference
counts as contradicted if ours has the other sign than the paper's and is more than two standard errors, and as
reproduced if it has the same sign by as much and half to twice the size, give or take two standard errors; far smaller
and far larger ones are called that. Ours is undecided if it is less than two standard errors from both 0 and theirs.
Few seeds do not know their own standard error well: for two of theirs read {two} of two seeds, {three} of three and
{five} of five, by Student's t. Nothing is claimed by a difference within twice the paper's own error, which for a
figure of few test images is taken to be what ours would be on as many."""

ON_TEST = """\
Rows whose best epoch was chosen on the test set, as most papers choose it (`*`); they held no images out, and are set
against nothing that did."""

HOW = """\
```sh
flatrock reproduce cifar10_short_trades_awp  # or train and eval, one after the other
flatrock compare results/cifar10_short.json:cifar10_short_trades_awp runs/cifar10_short_trades_awp  # with the row there
flatrock results runs/cifar10_short_trades_awp --add --out results/cifar10_short.json
flatrock report results/*.json --out docs/results.md
```"""


def results_page(
    rows: Sequence[Row],
    papers: Papers,
    files: Sequence[str],
    pictures: Mapping[str, str],
    *,
    notes: Mapping[str, Note] = MappingProxyType({}),
    bands: Mapping[Hashable, Bands] = MappingProxyType({}),
    command: str = COMMAND,
) -> str:
    """The whole page.

    `files` are the names of the results files the rows come from, `pictures` those of what was drawn: of all runs under
    the empty name, of a protocol's curves under the protocol's, of other runs under OTHERS. `notes`, by recipe, say
    what is to be known about rows beside what they hold, `bands`, by the key of the row, what is expected of them.
    `command` writes the page.
    """
    written = dict.fromkeys(["reports/papers.yaml", *(part.file for part in papers.protocols.values())])
    reach = {name: f"{student(seeds):.1f}" for name, seeds in (("two", 2), ("three", 3), ("five", 5))}
    parts = [OPENING.format(command=command, papers=", ".join(f"`{file}`" for file in written), **reach)]
    if not rows:
        parts.append("There are no results yet: no run has been collected with `flatrock results`.")
    else:
        parts.append(f"Results in {', '.join(f'`{name}`' for name in sorted(files))}.")
    if "" in pictures:
        parts.append(f"![clean and AutoAttack accuracy of every run, and the papers']({pictures['']})")
    for key, protocol in papers.protocols.items():
        parts += _section(protocol, papers.runs(key, rows), pictures.get(key, ""), notes, bands)
    if others := papers.others(rows):
        parts += [
            "## Other runs",
            *_picture("clean accuracy and that under all attacks, of every run", pictures.get(OTHERS, "")),
            markdown(overview(others)),
            *remarks(others, row_names(others), notes),
            *expected_parts(row_names(others), others, bands),
        ]
    what = "this page" if command.startswith("flatrock report ") else "the rows last made"
    again = [f"## Making {what} again", f"```sh\n{command}\n```"]
    parts += ["## Adding a row", HOW] if command == COMMAND else again
    return "\n\n".join(parts) + "\n"


def _section(
    protocol: Protocol, rows: Sequence[Row], curves: str, notes: Mapping[str, Note], bands: Mapping[Hashable, Bands]
) -> list[str]:
    parts = [f"## {protocol.title}", protocol.text]
    labels = {name: entry.label for name, entry in protocol.rows.items()}
    order = {name: i for i, name in enumerate(protocol.rows)}
    rows = sorted(rows, key=lambda row: (order.get(row.recipe, len(order)), row.recipe, row.seed))
    missing = _missing(protocol, rows)
    if rows:
        names = method_names(rows, labels)
        parts += [
            *_picture("accuracy under attack, epoch by epoch", curves),
            markdown(measured(rows, protocol)),
            markdown(costs(rows, names)),
            *remarks(rows, [f"{name} (seed {row.seed})" for name, row in zip(names, rows, strict=True)], notes),
            *expected_parts(row_names(rows), rows, bands),
        ]
        parts += _compared(protocol, rows)
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return parts


def _picture(text: str, name: str) -> list[str]:
    return [f"![{text}]({name})"] if name else []


def _missing(protocol: Protocol, rows: Sequence[Row]) -> list[str]:
    """The rows nobody ran, and the last epochs papers print that were not evaluated here."""
    ran, found = {row.recipe for row in rows}, []
    known = [by_recipe(rows, on_test=on_test) for on_test in (False, True)]
    for name, entry in protocol.rows.items():
        found += [] if name in ran else [f"`{name}`"]
        runs = [row for one in known for row in one.get(name, {}).values()]
        if entry.drops and any(score_at(row, "last") is None for row in runs):
            found.append(f"the last epoch of `{name}`")
    return found


def _compared(protocol: Protocol, rows: Sequence[Row]) -> list[str]:
    """Our rows with each other and with the papers: those that held images out, then those chosen on the test set."""
    parts = _beside_papers(protocol, rows, on_test=False)
    if starred := _beside_papers(protocol, rows, on_test=True):
        parts += [ON_TEST, *starred]
    reached = [line for name in protocol.rows for line in target_lines(name, protocol, rows)]
    if reached:
        parts.append("What was to be reached:\n\n" + "\n".join(reached))
    return parts


def _beside_papers(protocol: Protocol, rows: Sequence[Row], *, on_test: bool) -> list[str]:
    """Differences between our rows, then the papers' figures, then what became of their claims."""
    known = by_recipe(rows, on_test=on_test)
    parts = []
    for title, table in (
        ("Gains over the base, in points:", gains(protocol, rows, on_test=on_test)),
        ("From the best epoch to the last, in points:", drops(protocol, rows, on_test=on_test)),
        (
            f"Beside the papers: their figure and, where the network is alike, ours minus theirs."
            f"{part_of_images(protocol, known)}",
            beside(protocol, rows, on_test=on_test),
        ),
    ):
        if table.rows:
            parts += [title, markdown(table)]
    differs: dict[str, list[str]] = {}
    for name, entry in protocol.rows.items():
        for figure in entry.figures if name in known else ():
            if beside_rows(figure, on_test=on_test):
                differs.setdefault(figure.differs, []).append(figure.cite)
    if differs:
        lines = [f"- {', '.join(dict.fromkeys(cites))}: {text}" for text, cites in differs.items()]
        title = "How theirs were made:" if protocol.published else "What differs there:"
        parts.append(f"{title}\n\n" + "\n".join(lines))
    if lines := claim_lines(protocol, rows, on_test=on_test):
        parts.append("The differences papers print, and what became of them here:\n\n" + "\n".join(lines))
    return parts


def overview(rows: Sequence[Row], folders: Mapping[Hashable, str] = NOWHERE) -> Table:
    """One line per run: its accuracies and seconds per epoch; `folders` by the keys of rows, where they are known."""
    names = sorted({a for row in rows for score in row.scores.values() for a in score.figures} - {"clean"})
    columns = [Measure(name=name, attacks=(name,)) for name in ("clean", *names)]
    lines = []
    for name, row in zip(row_names(rows, folders), rows, strict=True):
        main = row.scores[row.main] if row.main else None
        cells = ("" if main is None else _cell(main, column) for column in columns)
        lines.append((name, *cells, epoch_time(row)))
    return Table(("recipe", *(column.name for column in columns), "s/epoch"), tuple(lines))


def _cell(score: Score, measure: Measure) -> str:
    """What a checkpoint has under a measure, marked if it was chosen on the test set."""
    found = value(score, measure)
    return "" if found is None else measure.written(found) + ("*" if score.marks else "")


def measured(rows: Sequence[Row], protocol: Protocol) -> Table:
    """Accuracy of every evaluated checkpoint; a failed run has a row and no number."""
    labels, measures = {name: entry.label for name, entry in protocol.rows.items()}, _columns(rows, protocol)
    lines = []
    for name, row in zip(method_names(rows, labels), rows, strict=True):
        head = (name, f"`{row.recipe}`", str(row.seed))
        if not row.scores:
            said = "FAILED" if row.status == "failed" else "not evaluated"
            lines.append((*head, said, *("" for _ in measures)))
        for checkpoint, score in row.scores.items():
            cells = (_cell(score, measure) for measure in measures.values())
            epoch = named(f"{checkpoint.replace('-', ' ')}, {score.epoch}", collapsed=score.collapsed)
            lines.append((*head, epoch, *cells))
    return Table(("method", "recipe", "seed", "epoch", *_heads(measures)), tuple(lines))


def _columns(rows: Sequence[Row], protocol: Protocol) -> dict[str, Measure]:
    """The protocol's measures, and behind them what some row was attacked with beside them.

    Further evaluations of a row may be asked for by another published table; each shows those it has a column for.
    """
    known = {name for measure in protocol.measured.values() for name in measure.attacks}
    scores = [score for row in rows for score in row.scores.values()]
    tried = {name for score in scores for name in (score.right if protocol.published else score.figures)}
    return protocol.measured | {name: Measure(name=name, attacks=(name,)) for name in sorted(tried - known)}


def _heads(measures: Mapping[str, Measure]) -> list[str]:
    return [measure.name for measure in measures.values()]


def gains(protocol: Protocol, rows: Sequence[Row], *, on_test: bool = False) -> Table:
    """Every row that has a base, minus its base."""
    known, star = by_recipe(rows, on_test=on_test), "*" if on_test else ""
    lines = []
    for name, entry in protocol.rows.items():
        if entry.over is None or name not in known or entry.over not in known:
            continue
        found = [gain(known[name], known[entry.over], m) for m in protocol.measured.values()]
        what = f"{entry.label}{star} - {protocol.rows[entry.over].label}{star}"
        lines.append((what, *("" if g is None else points(g) for g in found)))
    return Table(("difference", *_heads(protocol.measured)), tuple(lines))


def drops(protocol: Protocol, rows: Sequence[Row], *, on_test: bool = False) -> Table:
    """Every row whose last epoch was evaluated too: last minus best."""
    known, star = by_recipe(rows, on_test=on_test), "*" if on_test else ""
    lines = []
    for name, entry in protocol.rows.items():
        found = [drop(known[name], m) for m in protocol.measured.values()] if name in known else []
        if any(g is not None for g in found):
            lines.append((f"{entry.label}{star}", *("" if g is None else points(g) for g in found)))
    return Table(("last - best", *_heads(protocol.measured)), tuple(lines))
