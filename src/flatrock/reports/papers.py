"""The papers' figures, from a file: what they print, where, and what they claim about our rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatrock.reports.given import read_given

# Those that come with flatrock.
OWN = Path(__file__).with_name("papers.yaml")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published row: accuracies in percent by measure, of the `best` or the `last` epoch.

    `error` is the standard error the paper states.
    """

    cite: str
    differs: str
    network: str
    values: Mapping[str, float]
    end: str = "best"
    error: float | None = None

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
    """Recipes trained alike, in the order of the page; figures of these `networks` may be set against ours."""

    title: str
    text: str
    networks: tuple[str, ...]
    rows: Mapping[str, Entry]


@dataclass(frozen=True, kw_only=True)
class Papers:
    """Everything the page takes from papers."""

    measures: Mapping[str, str] = field(default_factory=dict)
    protocols: Mapping[str, Protocol] = field(default_factory=dict)

    @property
    def last_epochs(self) -> set[str]:
        """The recipes for which a paper prints a last epoch."""
        rows = [row for protocol in self.protocols.values() for row in protocol.rows.items()]
        return {name for name, entry in rows if any(figure.end == "last" for figure in entry.figures)}


def read_papers(path: Path) -> Papers:
    """Read the file; ConfigError says what in it is wrong."""
    return read_given(path, _papers, what="the papers' figures", option="--papers")


def known_papers(given: Path | None, folder: Path, protocols: Collection[str] | None = None) -> Papers:
    """The figures in the file given, else in papers.yaml in the folder, else flatrock's own (for these protocols)."""
    beside = folder / OWN.name
    if given or beside.exists():
        return read_papers(given or beside)
    own = read_papers(OWN)
    wanted = own.protocols if protocols is None else protocols
    return replace(own, protocols={key: part for key, part in own.protocols.items() if key in wanted})


def _papers(raw: Mapping[str, Any]) -> Papers:
    figures = {key: _figure(dict(row), raw) for key, row in raw["figures"].items()}
    protocols = {
        key: Protocol(
            title=part["title"],
            text=part["text"].strip(),
            networks=tuple(part["networks"]),
            rows={name: _entry(row, figures) for name, row in part["rows"].items()},
        )
        for key, part in raw["protocols"].items()
    }
    for protocol in protocols.values():
        for name, entry in protocol.rows.items():
            if entry.over is not None and entry.over not in protocol.rows:
                raise ValueError(f"{name} is compared with {entry.over}, which is no row of its protocol")
    return Papers(measures=raw["measures"], protocols=protocols)


def _figure(row: dict[str, Any], raw: Mapping[str, Any]) -> Figure:
    source = raw["sources"][row.pop("source")]
    network, end = row.pop("network"), row.pop("end", "best")
    if end not in ("best", "last"):
        raise ValueError(f"a figure is of the best or the last epoch, got {end!r}")
    return Figure(**source, network=network, end=end, values=_numbers(row, raw["measures"]))


def _numbers(row: Mapping[str, Any], measures: Mapping[str, str]) -> dict[str, float]:
    if unknown := row.keys() - measures.keys():
        raise ValueError(f"{sorted(unknown)[0]!r} is not among the measures {list(measures)}")
    return {measure: float(row[measure]) for measure in measures if measure in row}


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
