"""Further evaluations on pages: columns of their own, verdicts under them, distances, subsets as the paper's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from results_cases import N, fake_run, standing

from flatrock.core.rows import Row, Score
from flatrock.reports.claims import claim_lines, gain
from flatrock.reports.papers import Measure, shipped_papers
from flatrock.reports.remarks import remarks
from flatrock.reports.results import beside, costs, measured, overview
from flatrock.workflows.results import collect_run

PROTOCOLS = shipped_papers().protocols
PGD, CW = "pgd-20:step_size=0.003", "cw-20:step_size=0.003"
FOUND = {"clean": 82.0, PGD: 52.0, CW: 50.0, "autoattack": 48.0}


def further(where: str, percents: dict[str, float], *, n: int = N, **more: object) -> Score:
    flags = {name: standing(round(N * value / 100))[:n] for name, value in {"clean": 82.0, **percents}.items()}
    fields = {"seconds": dict.fromkeys(percents, 60.0), "findings": (), "marks": (), "provenance": {}, "result": ""}
    return Score(epoch=2, right=flags, where=where, **{**fields, **more})  # type: ignore[arg-type]


def row(folder: Path, name: str, *more: Score, **found: float) -> Row:
    made = collect_run(fake_run(folder, name, {**FOUND, **found}, further=False))
    return replace(made, scores={"best": replace(made.scores["best"], more=more)})


def test_columns_cells_and_time(tmp_path: Path) -> None:
    one = row(
        tmp_path,
        "cifar10_trades_linf",
        further("0.031", {PGD: 53.0, CW: 51.0}, findings=("E15: one answer",)),
        further("0.031", {"rays": 56.5}, distances={"rays": 0.041234}),
    )
    table = overview([one])
    assert dict(zip(table.header, table.rows[0], strict=True)) == {
        "recipe": "cifar10_trades_linf",
        "clean": "82.00",
        "autoattack": "48.00",
        CW: "50.00",
        f"{CW}@0.031": "51.00",
        "mean_distance rays@0.031": "0.0412",
        PGD: "52.00",
        f"{PGD}@0.031": "53.00",
        "rays@0.031": "56.50",
        "s/epoch": "7.00",
    }
    page = measured([one], PROTOCOLS["rat_table7"])
    assert page.header[4:] == ("clean", "PGD-20", "CW-20", "AutoAttack", "ADBD", "RayS")
    assert page.rows[0][4:] == ("82.00", "53.00", "51.00", "48.00", "0.0412", "56.50"), "theirs are at 0.031"
    told = beside(PROTOCOLS["rat_table7"], [one])
    assert told.rows[0][2:] == ("82.89 (-0.89)", "", "", "", "0.0412 (+0.0000)", "56.06 (+0.44)")
    assert costs([one], ["RAT"]).rows[0][-1] == f"{(4 * 30 + 3 * 60) / 60:.1f}"
    said = remarks([one], ["RAT"], {})[0]
    assert "- RAT best further at 0.031: E15: one answer." in said


def test_a_table_shows_further_evaluations_it_has_a_column_for(tmp_path: Path) -> None:
    more = (further("0.031", {PGD: 53.0, CW: 51.0}), further("", {"autoattack": 47.0}))
    at = row(tmp_path, "cifar10_at_linf", *more, **{"pgd-20": 52.5})
    at3 = measured([at], PROTOCOLS["awp_table3"])
    assert at3.header[4:] == ("clean", "PGD-20", "AutoAttack", CW)
    assert at3.rows[0][4:6] == ("82.00", "52.50"), "its own PGD before one at another radius"
    assert "CW-20" in measured([at], PROTOCOLS["rat_table8"]).header
    assert f"{CW}@0.031" in measured([at], PROTOCOLS["cifar10_short"]).header, "our own pages show all there is"


def test_differences_are_judged_under_them(tmp_path: Path) -> None:
    part = PROTOCOLS["rat_table4"]
    names = ("cifar10_trades_awp_linf", "cifar10_trades_awp_rat2_linf")
    rows = [
        row(tmp_path, name, further("0.031", {f"transfer-{PGD}": share, f"transfer-{CW}": share - 2}))
        for name, share in zip(names, (61.0, 62.0), strict=True)
    ]
    (line,) = claim_lines(part, rows)
    assert "transferred PGD-20 +0.77 there, +1.00 ± 0.31 here: reproduced" in line
    assert "transferred CW-20 +1.16 there, +1.00 ± 0.31 here: reproduced" in line
    assert "PGD-20 +" not in line.replace("transferred PGD-20 +", ""), "attacks on the network itself are not printed"


def test_means_of_distances_get_no_verdict(tmp_path: Path) -> None:
    """No value per sample is kept, so their chance is not known."""
    rows = [
        row(tmp_path, name, further("0.031", {"rays": share}, distances={"rays": far}))
        for name, share, far in (
            ("cifar10_trades_linf", 56.0, 0.04),
            ("cifar10_trades_rat2_linf_eta020", 57.0, 0.05),
        )
    ]
    (line,) = claim_lines(PROTOCOLS["rat_table7"], rows)
    assert "RayS +0.97 there, +1.00 ± 0.31 here: reproduced" in line and "ADBD" not in line
    adbd = Measure(name="ADBD", attacks=("mean_distance rays@0.031",))
    assert gain({0: rows[0]}, {0: rows[1]}, adbd) is None
    assert (adbd.written(0.04123), adbd.written(-0.0023, "+")) == ("0.0412", "-0.0023")


def test_ours_is_of_the_first_samples_where_theirs_is(tmp_path: Path) -> None:
    """RAT's AutoAttack is of the first 1,000 images; here there are 1,000, so of the first 500 of a shorter source."""
    part = PROTOCOLS["rat_table1"]
    name = "cifar10_trades_rat1_linf_eta005"
    made = row(tmp_path, name)
    flags = made.scores["best"].right["autoattack"]
    assert float(flags.double().mean()) == 0.48 and bool(flags[:480].all())
    (figure,) = part.rows[name].papers
    assert figure.samples == {"autoattack": 1000}
    fewer = replace(figure, samples={"autoattack": 600})
    entry = replace(part.rows[name], papers=(fewer,), claims=())
    page = beside(replace(part, rows={name: entry}), [made])
    assert page.rows[0][5] == f"48.20 ({100 * 480 / 600 - 48.2:+.2f})"
    assert beside(part, [made]).rows[0][5] == "48.20 (-0.20)", "all there are"


def test_a_subset_is_not_cut_again(tmp_path: Path) -> None:
    part, name = PROTOCOLS["rat_table8"], "cifar10_at_linf"
    made = row(tmp_path, name, further("first600", {"autoattack": 48.0}, n=600))
    one = replace(made.scores["best"], right={k: v for k, v in made.scores["best"].right.items() if k != "autoattack"})
    measure = Measure(name="AutoAttack", attacks=("autoattack@first600",))
    narrow = replace(part, measures={**part.measures, "autoattack": measure})
    page = beside(narrow, [replace(made, scores={"best": one})])
    assert page.rows[0][5] == f"47.10 ({100 * 480 / 600 - 47.1:+.2f})"


@pytest.mark.parametrize("sizes", [(N, 500)])
def test_pairs_are_of_one_name_and_so_of_one_size(tmp_path: Path, sizes: tuple[int, int]) -> None:
    a, b = (row(tmp_path / str(n), "cifar10_trades_linf", further(f"n{n}", {PGD: 50.0}, n=n)) for n in sizes)
    assert gain({0: a}, {0: b}, Measure(name="PGD-20", attacks=(f"{PGD}@n500", f"{PGD}@n1000"))) is None
    found = gain({0: a}, {0: a}, Measure(name="PGD-20", attacks=(f"{PGD}@n1000",)))
    assert found is not None and (found.mean, found.samples) == (0.0, N)
    assert torch.equal(a.scores["best"].worst, a.scores["best"].right["autoattack"])
