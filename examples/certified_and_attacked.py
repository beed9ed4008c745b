"""Certified accuracy beside accuracy under attack: what is proved, what PGD leaves of the smoothed classifier, and of
the network itself.

    python examples/certified_and_attacked.py runs/digits_smooth --sigma 0.25 --out certified.png

Certifies the run (or reads a finished certificate, or goes on with one), then attacks the same samples with L2 PGD-20
at the radii of its table. Certified accuracy is never above that of the smoothed classifier under attack. The network
itself is another classifier and bounds nothing, but it is what other attacks are measured on. About a quarter of an
hour for 500 digits on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flatrock.cli.console import TerminalProgress, say, show
from flatrock.core.errors import FlatrockError
from flatrock.core.files import write_atomic
from flatrock.core.threat import L2
from flatrock.data.catalog import load_data
from flatrock.data.split import fair_subset
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.smoothed_attack import attack_smoothed
from flatrock.diagnostics.smoothing import Smoothing
from flatrock.evaluation.evaluate import evaluate
from flatrock.recipes.load import load_recipe
from flatrock.recipes.restore import load
from flatrock.reports.certified import draw_certified
from flatrock.reports.table import Table, percent
from flatrock.workflows.certify import certify_run

SMOOTHED, NETWORK = "PGD-20 on the smoothed classifier", "PGD-20 on the network itself"


def attacked(
    run: Path, found: Certificate, *, draws: int, votes: int, progress: TerminalProgress
) -> list[dict[str, Any]]:
    """At each radius of the table: certified, and what stands under attack, as fractions."""
    test = fair_subset(load_data(load_recipe(run / "recipe.yaml").data.name, "test"), found.samples)
    assert torch.equal(test.ids, found.ids)
    x, y, model = test.images(torch.arange(len(test))), test.y, load(run)
    smoothing, rows = replace(found.smoothing, n=votes), []
    progress.begin("attacking", len(found.grid()))
    for radius in found.grid():
        stands = attack_smoothed(model, x, y, smoothing, radius, draws=draws)
        base = evaluate(model, x, y, L2(radius), attacks=["pgd-20"]).worst
        sure = found.right & (found.radii > radius)
        rows.append(
            {
                "radius": radius,
                "certified": found.certified(radius),
                SMOOTHED: float(stands.double().mean()),
                NETWORK: float(base.double().mean()),
                "samples certified": int(sure.sum()),
                "certified and broken": int((sure & ~stands).sum()),
                "certified and broken on the network": int((sure & ~base).sum()),
            }
        )
        progress.advance(1, f"radius {radius:.3g}")
    progress.end()
    return rows


def main() -> None:
    """Parse, certify, attack, tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument("--n", type=int, default=10_000, help="votes of the certificate")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--draws", type=int, default=16, help="noises the attack on the smoothed classifier averages")
    parser.add_argument("--votes", type=int, default=1000, help="votes of its verdict")
    parser.add_argument("--out", type=Path, default=Path("certified.png"))
    given = parser.parse_args()
    with TerminalProgress() as progress:
        smoothing = Smoothing(sigma=given.sigma, n=given.n)
        found, _ = certify_run(given.run, smoothing, limit=given.limit, resume=True, progress=progress)
        rows = attacked(given.run, found, draws=given.draws, votes=given.votes, progress=progress)
    header = ("radius", "certified", SMOOTHED, NETWORK)
    shown = [(f"{row['radius']:.4g}", *(percent(row[key]) for key in header[1:])) for row in rows]
    show(Table(header, tuple(shown)))
    for row in rows:
        say(
            f"radius {row['radius']:.4g}: of {row['samples certified']} samples certified, PGD breaks the smoothed "
            f"classifier on {row['certified and broken']}, the network on {row['certified and broken on the network']}"
        )
    points = {name: [(row["radius"], row[name]) for row in rows] for name in (SMOOTHED, NETWORK)}
    say(f"drew {draw_certified({'certified': found}, given.out, attacked=points)}")
    record = {"rows": rows, "draws": given.draws, "votes": given.votes, "provenance": dict(found.provenance)}
    write_atomic(given.out.with_suffix(".json"), json.dumps(record, indent=1).encode())


if __name__ == "__main__":
    try:
        main()
    except FlatrockError as error:
        sys.exit(f"error: {error}")
