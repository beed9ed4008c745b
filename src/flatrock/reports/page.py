"""Models and all that is known of them as one HTML file, which needs neither network nor other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flatrock.core.files import write_atomic
from flatrock.core.progress import clock
from flatrock.core.provenance import VERSION
from flatrock.core.records import Result
from flatrock.core.rows import WORST
from flatrock.core.runs import Run
from flatrock.core.story import Story
from flatrock.reports.figures import learning_curves
from flatrock.reports.html import block, data, drawn, fold, link, picture, table, text
from flatrock.reports.margins import draw_margins
from flatrock.reports.samples import sample_columns
from flatrock.reports.style import radius
from flatrock.reports.table import Table, comparison, distances, per_class, percent
from flatrock.reports.waterfall import draw_waterfall, waterfall

# The first words of such a page: nothing else is replaced by one.
MARK = "<!-- a page of flatrock -->"
LEGEND = (
    "Percent of all test samples. Worst case = right without attack and under every attack named. "
    "* = the epoch was chosen on the test set. COLLAPSED = one answer to everything."
)


@dataclass(frozen=True)
class Differences:
    """Models minus the first one, paired by sample, and what to know of that; or only why they are not compared."""

    table: Table | None
    remarks: tuple[str, ...]


def write_page(
    stories: Sequence[Story], path: Path, *, title: str = "", differences: Differences | None = None
) -> Path:
    """Write the page: an overview, learning curves, then every model with its results, samples, recipe and origin."""
    name = title or ", ".join(story.name for story in stories[:3]) + (", ..." if len(stories) > 3 else "")
    places = {story.name: f"model-{i}" for i, story in enumerate(stories)}
    body = [
        text(name, "h1"),
        _overview(stories, places, differences),
        _curves({story.name: story.run for story in stories if story.run is not None and story.run.records}),
        *(_model(story, places[story.name]) for story in stories),
        text(f"Written by flatrock {VERSION} from records alone; no model was asked anything.", kind="soft"),
    ]
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = page.replace("@MARK@", MARK).replace("@TITLE@", text(name, "title")).replace("@BODY@", "\n".join(body))
    write_atomic(path, page.encode())
    return path


def _overview(stories: Sequence[Story], places: Mapping[str, str], differences: Differences | None) -> str:
    """All models in one table, how far they are from the first, and every reason for doubt."""
    known = {story.title: main for story in stories if (main := story.main) is not None}
    parts = []
    if known:
        compared = _with_questions(comparison(known), list(known.values()))
        bars = [h for h in compared.header[1:] if h in ("clean", WORST)]
        shown = [story.name for story in stories if story.main is not None]
        links = {row[0]: places[name] for row, name in zip(compared.rows, shown, strict=True)}
        parts += [table(compared, bars=bars, names=links), text(LEGEND, kind="soft")]
    bare = [story for story in stories if story.main is None]
    if bare:
        parts.append(block("p", "Not evaluated: ", ", ".join(link(places[s.name], s.name) for s in bare)))
    if differences is not None:
        parts += [table(differences.table)] if differences.table is not None else []
        parts += [text(line, kind="soft") for line in differences.remarks]
    doubts = tuple((story.name, *finding) for story in stories for finding in _findings(story))
    if doubts:
        told = table(Table(("model", "of", "code", "what"), doubts), words=True)
        parts.append(block("section", text("Reasons for doubt", "h3"), told))
    elif known:
        parts.append(text("No finding: nothing was found that makes these numbers less trustworthy.", kind="good"))
    return block("section", *parts)


def _with_questions(compared: Table, results: Sequence[Result | str]) -> Table:
    """With the threat and the data of every model, where they differ: numbers of other questions are not comparable."""
    columns = {
        "threat": [_threat(r) if isinstance(r, Result) else "" for r in results],
        "data": [_data(r) if isinstance(r, Result) else "" for r in results],
    }
    told = {name: cells for name, cells in columns.items() if len(set(filter(None, cells))) > 1}
    header = (compared.header[0], *told, *compared.header[1:])
    cells = zip(compared.rows, zip(*told.values(), strict=True) if told else [()] * len(results), strict=True)
    return Table(header, tuple((row[0], *more, *row[1:]) for row, more in cells))


def _threat(result: Result) -> str:
    return f"{result.threat['norm']} eps {radius(result.threat['eps'])}"


def _data(result: Result) -> str:
    return str(result.provenance.get("data", f"{result.n} samples"))


def _findings(story: Story) -> list[tuple[str, str, str]]:
    """What each is of, its code and its sentence."""
    trained = [told.partition(": ") for told in (story.run.findings if story.run is not None else ())]
    found = [("training", code, what) for code, _, what in trained]
    said: dict[tuple[str, str], list[str]] = {}
    for name, result in story.results.items():
        for f in result.findings:
            said.setdefault((f.code, f"{f.message}; {f.cure}"), []).append(_short(name))
    return [*found, *((", ".join(names), code, what) for (code, what), names in said.items())]


def _curves(runs: Mapping[str, Run]) -> str:
    if not runs:
        return ""
    figure = drawn(partial(learning_curves, runs), "training loss, accuracies and robust gap over epochs")
    return block("section", text("Training", "h2"), figure)


def _model(story: Story, place: str) -> str:
    """One model: facts, results, pictures, and where it comes from."""
    parts = [text(story.name, "h2"), *(text(remark, kind="warn") for remark in story.remarks)]
    if story.run is not None:
        parts.append(_facts(story.run, story.about))
    for i, (name, result) in enumerate(story.results.items()):
        told = [*_result(result), _samples(result, f"{place}-samples")] if i == 0 else _result(result)
        parts.append(fold(_heading(name, result), *told, opened=i == 0))
    if story.pictures:
        shown = [block("figure", picture(p, p.stem), text(p.name, "figcaption")) for p in story.pictures]
        parts.append(fold("pictures", *shown))
    if story.recipe:
        parts.append(fold("recipe", text(story.recipe, "pre")))
    certificates = {"training": story.about, **{_short(name): r.provenance for name, r in story.results.items()}}
    parts.append(fold("origin", *(_origin(name, about) for name, about in certificates.items() if about)))
    return block("section", *parts, name=place)


def _facts(run: Run, about: Mapping[str, Any]) -> str:
    """How training went, in a small table."""
    facts = [("status", f"{run.status}{f': {run.reason}' if run.reason else ''}")]
    if run.records:
        first = run.records[0].selected_on.replace("_", "-")
        seconds = sum(record.seconds for record in run.records)
        facts.append(("epochs", f"{len(run.records)} in {clock(run.last.elapsed or seconds)}"))
        if (best := run.best) is not None:
            facts.append((f"best epoch, {first}", _probed(best.epoch, best.clean, best.robust)))
        if (best := run.best_average) is not None:
            told = _probed(best.epoch, best.average_clean, best.average_robust)
            facts.append((f"best of averaged weights, {first}", told))
    facts += [(key, str(about[key])) for key in ("device", "commit", "time") if key in about]
    return table(Table(("training", ""), tuple(facts)), words=True)


def _probed(epoch: int, clean: float | None, robust: float | None) -> str:
    return f"{epoch}: clean {percent(clean)}, robust {percent(robust)}"


def _heading(name: str, result: Result) -> str:
    epoch = result.provenance.get("epoch")
    told = [
        _short(name),
        f"epoch {epoch}" if epoch is not None else "",
        _threat(result),
        _data(result),
        f"worst case {percent(result.robust)}",
    ]
    return "; ".join(part for part in told if part)


def _result(result: Result) -> list[str]:
    """What each attack took away and cost, class by class, how sure the model is."""
    parts = [text(f"{f.code}: {f.message}; {f.cure}", kind="warn") for f in result.findings]
    plans = [plan for plan in result.plans if len(result.per_attack) > 1]
    for plan in (None, *plans) if result.per_attack else ():
        parts.append(text(f"{plan or 'all attacks'}: what each took away", "h4"))
        parts.append(drawn(partial(draw_waterfall, result, plan=plan), "accuracy after each attack"))
        parts.append(fold("as a table, with costs", table(waterfall(result, plan), bars=["acc %"])))
    if result.distances:
        parts += [text("distance to the nearest adversarial point found", "h4"), table(distances(result))]
    if result.margins:
        parts.append(drawn(partial(draw_margins, result), "histograms of margins"))
    if result.labels is not None and result.n:
        classes = per_class(result)
        parts.append(fold("class by class", table(classes, bars=classes.header[2:])))
    return parts


def _samples(result: Result, place: str) -> str:
    """Every sample, to be sorted and chosen from by a script of the page."""
    if result.labels is None:
        return ""
    columns = sample_columns(result)
    shown = {"header": [name for name, _ in columns], "rows": list(zip(*(cells for _, cells in columns), strict=True))}
    return fold(f"{result.n} samples", block("div", kind="samples", name=place), data(f"{place}-data", shown))


def _origin(name: str, about: Mapping[str, Any]) -> str:
    rows = tuple((key, str(value)) for key, value in sorted(about.items()))
    return table(Table((name, ""), rows), words=True)


def _short(name: str) -> str:
    """Of a result file: what tells it from the others of its run."""
    return name.removeprefix("result-")
