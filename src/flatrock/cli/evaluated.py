"""What `flatrock eval` shows of a result, and what it stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flatrock.cli.console import say, show
from flatrock.core.records import Result
from flatrock.data.dataset import Dataset
from flatrock.evaluation.plans import PLANS, TRANSFER
from flatrock.reports.gallery import check_images
from flatrock.reports.gallery import gallery as draw_gallery
from flatrock.reports.samples import write_samples
from flatrock.reports.table import Table, class_name, comparison, distances, percent, worst_classes
from flatrock.reports.table import per_class as class_table
from flatrock.reports.waterfall import draw_waterfall, waterfall
from flatrock.workflows.evaluate import write_result

# So many classes that are equally bad are named; more are counted.
NAMED = 5


class Shown:
    """The test set, whose classes are named in tables; and some of it in a gallery, if that is wanted."""

    def __init__(self, gallery: bool) -> None:
        self._gallery = gallery
        self._data: Dataset | None = None

    def remember(self, data: Dataset) -> None:
        """Before the evaluation: what cannot be drawn is refused now, not hours later."""
        if self._gallery:
            check_images(data.input_shape)
        self._data = data

    @property
    def names(self) -> tuple[str, ...]:
        """What the classes are called."""
        assert self._data is not None
        return self._data.class_names or tuple(map(str, range(self._data.num_classes)))

    def draw(self, result: Result, stored: Path) -> None:
        """After it: beside the result."""
        if self._data is None or not self._gallery:
            return
        if bool(result.worst.equal(result.flags["clean"])):
            say("no gallery: no attack broke a sample")
            return
        x = self._data.images(torch.arange(len(self._data)))
        file = stored.with_name(f"{stored.stem}-gallery.png")
        say(f"drew {draw_gallery(x, result, file, names=self.names)}")


def called(source: Path | None, result: Result) -> str:
    """The name of the run's folder, as several runs may have one recipe; without a run that of the recipe or model."""
    about = result.provenance
    folder = None if source is None else (source if source.is_dir() else source.parent).resolve()
    known = folder is not None and (folder / "run.json").is_file()
    return folder.name if folder is not None and known else str(about.get("recipe", about.get("model")))


def store(result: Result, place: Path, name: str, classes: Sequence[str] | None, *, keep_adversarial: bool) -> None:
    """Stored before a word is said: who reads only the first lines (| head) has all of it; told in any case."""
    try:
        written = write_result(place, result if keep_adversarial else replace(result, adversarial=None))
    finally:
        tell(result, name, classes)
    if (other := written.other) is not None:
        say(f"replaced the result of another evaluation (different: {', '.join(other.different)})")
        for picture in other.pictures:
            say(f"left {picture}, which may be of that evaluation")
    say(f"wrote {place}" if written.new else f"nothing to write: {place} is there already")


def draw(result: Result, stored: Path, shown: Shown, csv: Path | None) -> None:
    """What lies beside a result."""
    if csv is not None:
        say(f"wrote {write_samples(result, csv)}")
    draw_plans(result, stored)
    shown.draw(result, stored)


def draw_plans(result: Result, stored: Path) -> None:
    """Beside a result: what each attack of its plans took away."""
    for plan in result.plans:
        say(f"drew {draw_waterfall(result, stored.with_name(f'{stored.stem}-{plan}.png'), plan=plan)}")


def tell(result: Result, name: str, classes: Sequence[str] | None) -> None:
    """The tables, that of these classes only if there are such, and the findings."""
    about = result.provenance
    show(narrow(comparison({name: result})))
    recipe = about.get("recipe_threat")
    other = f" (the recipe's: {recipe['norm']} eps {recipe['eps']:.4g})" if recipe else ""
    made = f"recipe {about['recipe']}; " if about.get("recipe", name) != name else ""
    say(
        f"{made}{about['data']}; {result.threat['norm']} eps {result.threat['eps']:.4g}{other}; percent; "
        "worst case = per sample over all attacks named"
    )
    if "votes" in about:
        say(f"{about['votes']} votes decide: a sample is right if more than half of so many answers are")
    if result.robust_rounded != result.robust:
        say(
            f"worst case {percent(result.robust_rounded)} once adversarial inputs are rounded to the 8 bits of an "
            "image file, to levels within the ball"
        )
    for plan in result.plans:
        say(f"{plan} = {PLANS[plan][1]}")
    if result.distances:
        say()
        show(distances(result), f"{result.threat['norm']} distance to the nearest adversarial point found")
    for plan in result.plans:
        say()
        show(waterfall(result, plan), f"{plan}: what each attack took away")
    if classes is not None:
        _tell_classes(result, classes)
    tell_findings(result)


def tell_findings(result: Result) -> None:
    """Reasons not to believe a result as it is."""
    for finding in result.findings:
        say(("finding ", "yellow"), str(finding))


def _tell_classes(result: Result, names: Sequence[str]) -> None:
    say()
    show(narrow(class_table(result, names)), "class by class")
    worst = worst_classes(result)
    if len(worst) == len(result.by_class):
        say(f"no class is worse than the others: {percent(result.robust)} in the worst case")
        return
    called = ", ".join(class_name(c, names) for c in worst) if len(worst) <= NAMED else f"{len(worst)} of {len(names)}"
    robust = percent(result.by_class[worst[0]].robust)
    say(
        f"worst class{'es' if len(worst) > 1 else ''}: {called}, with {robust} in the worst case "
        f"({percent(result.robust)} over all samples)"
    )


def narrow(table: Table) -> Table:
    """Long names in two lines: many columns must fit into a terminal."""
    return replace(table, header=tuple(h.replace(TRANSFER, f"{TRANSFER}\n").replace(":", "\n:") for h in table.header))
