"""The papers' figures, from files: what they print, where, and what they claim about our rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any, TypeVar

from flatrock.core.rows import DISTANCE, Row
from flatrock.reports.given import read_given

T = TypeVar("T")
# Those that come with flatrock: our own protocols, and the published tables, a file per paper.
OWN = Path(__file__).with_name("papers.yaml")
TABLES = Path(__file__).with_name("tables")
IN_TABLES = "reports/tables/"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A column: its name on the page, and the attacks of our rows that count as it, the first of them that a row has.

    A measure without attacks is one that only papers print. Those of further evaluations are called `pgd-20@2/255`,
    mean distances `mean_distance rays`.
    """

    name: str
    attacks: tuple[str, ...]

    def written(self, value: float, sign: str = "") -> str:
        """A value as tables print it: percent with two digits, distances in the unit box with four."""
        return f"{value:{sign}.{4 if any(name.startswith(DISTANCE) for name in self.attacks) else 2}f}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published row: accuracies in percent by measure, of the `best` or the `last` epoch.

    `on_test`: its epoch was chosen on the test set. `errors` are standard errors, as far as the paper states them or
    what they follow from; `samples` how many test samples, the first ones, are behind a measure where that is not the
    whole test set.
    """

    cite: str
    differs: str
    network: str
    values: Mapping[str, float]
    end: str = "best"
    on_test: bool = False
    errors: Mapping[str, float] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Table and network, and which epoch if not the best."""
        return f"{self.cite}, {self.network}{'' if self.end == 'best' else f', {self.end} epoch'}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a row should reach, in percent by measure."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One of our recipes: its name on the page, the recipe it is compared with, and the figures that concern it.

    `claims` are pairs (with the method, without it), `drops` pairs (best epoch, last epoch).
    """

    label: str
    over: str | None = None
    papers: tuple[Figure, ...] = ()
    claims: tuple[tuple[Figure, Figure], ...] = ()
    drops: tuple[tuple[Figure, Figure], ...] = ()
    targets: tuple[Target, ...] = ()

    @property
    def figures(self) -> list[Figure]:
        """All of them."""
        return [*self.papers, *(f for pair in (*self.claims, *self.drops) for f in pair)]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Recipes trained alike, or the rows of a published table, in the order of the page.

    Figures of these `networks` may be set against ours; `file` is where all this is written down.
    """

    title: str
    text: str
    networks: tuple[str, ...]
    measures: Mapping[str, Measure]
    rows: Mapping[str, Entry]
    file: str = ""

    @property
    def published(self) -> bool:
        """Whether it is a published table, whose recipes train as the paper does."""
        return self.file.startswith(IN_TABLES)

    @property
    def measured(self) -> dict[str, Measure]:
        """The measures our rows can have."""
        return {key: measure for key, measure in self.measures.items() if measure.attacks}


@dataclass(frozen=True, kw_only=True)
class Papers:
    """Everything the page takes from papers."""

    protocols: Mapping[str, Protocol] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, Protocol]:
        """The published tables, by name."""
        return {key: part for key, part in self.protocols.items() if part.published}

    @property
    def last_epochs(self) -> set[str]:
        """The recipes for which a paper prints a last epoch."""
        rows = [row for protocol in self.protocols.values() for row in protocol.rows.items()]
        return {name for name, entry in rows if any(figure.end == "last" for figure in entry.figures)}

    def runs(self, key: str, rows: Sequence[Row]) -> list[Row]:
        """Those of the protocol; a baseline may be in several."""
        return [row for row in rows if key in self._homes(row.recipe, row.protocol)]

    def others(self, rows: Sequence[Row]) -> list[Row]:
        """Those of no protocol."""
        return [row for row in rows if not self._homes(row.recipe, row.protocol)]

    def concerning(self, names: Mapping[str, str]) -> Papers:
        """What concerns these recipes, given with the protocol in their name.

        A row that several tables print asks for those of which all rows are here, and for none if one is there for
        another row; else for the first.
        """
        homes = [found for name, protocol in names.items() if (found := self._homes(name, protocol))]
        wanted = {found[0] for found in homes if len(found) == 1}
        wanted |= {key for key, part in self.tables.items() if part.rows.keys() <= names.keys()}
        for found in homes:
            if not wanted.intersection(found):
                wanted.add(found[0])
        return replace(self, protocols={key: part for key, part in self.protocols.items() if key in wanted})

    def _homes(self, recipe: str, protocol: str) -> list[str]:
        return [key for key, part in self.protocols.items() if key == protocol or recipe in part.rows]


def read_papers(path: Path) -> Papers:
    """Read the file, which may name the figures that come with flatrock; ConfigError says what in it is wrong."""
    file = f"{IN_TABLES}{path.name}" if path.parent == TABLES else "reports/papers.yaml"
    return _read(path, lambda raw: _papers(raw, file))


def known_papers(given: Path | None, folder: Path, names: Mapping[str, str] | None = None) -> Papers:
    """The figures in the file given, else in papers.yaml in the folder, else flatrock's own.

    With `names`, recipes and the protocols in their names, flatrock's own are those that concern them.
    """
    beside = folder / OWN.name
    if given or beside.exists():
        return read_papers(given or beside)
    own = shipped_papers()
    return own if names is None else own.concerning(names)


def shipped_papers() -> Papers:
    """All that comes with flatrock."""
    files = [read_papers(path) for path in _shipped()]
    return Papers(protocols={key: part for papers in files for key, part in papers.protocols.items()})


def _shipped() -> list[Path]:
    return [OWN, *sorted(TABLES.glob("*.yaml"))]


@cache
def _known() -> dict[str, Figure]:
    """The figures that come with flatrock, by name."""
    files = [_read(path, _figures) for path in _shipped()]
    return {key: figure for found in files for key, figure in found.items()}


def _read(path: Path, make: Callable[[Any], T]) -> T:
    return read_given(path, make, what="the papers' figures", option="--papers")


def _papers(raw: Mapping[str, Any], file: str) -> Papers:
    figures = _known() | _figures(raw)
    protocols = {key: _protocol(part, raw, figures, file) for key, part in raw["protocols"].items()}
    for protocol in protocols.values():
        for name, entry in protocol.rows.items():
            if entry.over is not None and entry.over not in protocol.rows:
                raise ValueError(f"{name} is compared with {entry.over}, which is no row of its protocol")
    return Papers(protocols=protocols)


def _protocol(part: Mapping[str, Any], raw: Mapping[str, Any], figures: Mapping[str, Figure], file: str) -> Protocol:
    measures = _measures(raw)
    return Protocol(
        title=part["title"],
        text=part["text"].strip(),
        networks=tuple(part["networks"]),
        measures={key: measures[key] for key in part.get("measures", measures)},
        rows={name: _entry(row, figures) for name, row in part["rows"].items()},
        file=file,
    )


def _measures(raw: Mapping[str, Any]) -> dict[str, Measure]:
    """`pgd-20: PGD-20` is short for `pgd-20: {name: PGD-20, attacks: [pgd-20]}`."""

    def measure(key: str, said: Any) -> Measure:
        name, attacks = (said, [key]) if isinstance(said, str) else (said["name"], said["attacks"])
        return Measure(name=name, attacks=tuple(attacks))

    return {key: measure(key, said) for key, said in raw["measures"].items()}


def _figures(raw: Mapping[str, Any]) -> dict[str, Figure]:
    return {key: _figure(dict(row), raw) for key, row in raw["figures"].items()}


def _figure(row: dict[str, Any], raw: Mapping[str, Any]) -> Figure:
    """A value may be a pair, (mean, spread over the runs of the source)."""
    source = raw["sources"][row.pop("source")]
    network, end = row.pop("network", None) or source["network"], row.pop("end", "best")
    if end not in ("best", "last"):
        raise ValueError(f"a figure is of the best or the last epoch, got {end!r}")
    if unknown := row.keys() - raw["measures"].keys():
        raise ValueError(f"{sorted(unknown)[0]!r} is not among the measures {list(raw['measures'])}")
    error, runs = source.get("error"), source.get("runs", 1)
    pairs = {key: row[key] if isinstance(row[key], list) else (row[key], None) for key in raw["measures"] if key in row}
    errors = {key: error if spread is None else spread / sqrt(runs) for key, (_, spread) in pairs.items()}
    return Figure(
        cite=source["cite"],
        differs=source["differs"],
        network=network,
        end=end,
        on_test=_on_test(source.get("chosen")),
        values={key: float(mean) for key, (mean, _) in pairs.items()},
        errors={key: float(size) for key, size in errors.items() if size is not None},
        samples={key: int(count) for key, count in source.get("samples", {}).items()},
    )


def _on_test(chosen: Any) -> bool:
    if chosen not in (None, "test"):
        raise ValueError(f"a source has chosen on the 'test' set, or says nothing of it, got {chosen!r}")
    return chosen is not None


def _entry(row: Mapping[str, Any], figures: Mapping[str, Figure]) -> Entry:
    def pairs(key: str) -> tuple[tuple[Figure, Figure], ...]:
        return tuple((figures[a], figures[b]) for a, b in row.get(key, ()))

    if unknown := row.keys() - {"label", "over", "papers", "claims", "drops", "targets"}:
        raise ValueError(f"a row has no {sorted(unknown)[0]!r}")
    targets = [dict(target) for target in row.get("targets", ())]
    return Entry(
        label=row["label"],
        over=row.get("over"),
        papers=tuple(figures[key] for key in row.get("papers", ())),
        claims=pairs("claims"),
        drops=pairs("drops"),
        targets=tuple(Target(name=t.pop("name"), values={k: float(v) for k, v in t.items()}) for t in targets),
    )
