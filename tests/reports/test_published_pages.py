"""The page of a reproduced table: its figures beside our rows, and verdicts where both rows of a claim are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_cases import flatrock, refusal
from matplotlib.figure import Figure
from results_cases import fake_run

from flatrock.reports.claims import tally_lines
from flatrock.reports.papers import known_papers
from flatrock.reports.results_figure import draw_results
from flatrock.workflows.results import collect_run, protocol

PGD, CW = "pgd-20:step_size=0.003", "cw-20:step_size=0.003"
BASE = {"clean": 82.0, PGD: 52.0, CW: 50.0, "autoattack": 48.0}
FIRST = {"clean": 83.0, PGD: 54.0, CW: 51.0, "autoattack": 49.0}
BOTH = {"clean": 84.0, PGD: 53.9, CW: 48.0, "autoattack": 51.5}
ETA = "cifar10_trades_rat{}_linf_eta020"
PAPERS = known_papers(None, Path("nowhere"))


def page_of(folder: Path, *runs: Path) -> str:
    file, page = folder / "rows.json", folder / "page.md"
    assert flatrock("results", *runs, "--out", file).exit_code == 0
    done = flatrock("report", file, "--out", page)
    assert done.exit_code == 0, done.output
    return page.read_text()


def sections(page: str) -> list[str]:
    return [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")][:-1]


@pytest.fixture(scope="module")
def table1(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("table1")
    names = {"cifar10_trades_linf": BASE, ETA.format(1): FIRST, ETA.format(2): BOTH}
    return page_of(folder, *(fake_run(folder, name, found) for name, found in names.items()))


@pytest.mark.parametrize(
    "line",
    [
        "from results files, which flatrock makes of runs, the papers' from `reports/papers.yaml`, "
        "`reports/tables/rat.yaml` of flatrock or one of yours.",
        "| method | recipe | seed | epoch | clean | PGD-20 | CW-20 | AutoAttack |",
        "| RAT 1st, eta 0.2 | `cifar10_trades_rat1_linf_eta020` | 0 | best, 2 | 83.00 | 54.00 | 51.00 | 49.00 |",
        "| RAT 1st+2nd, eta 0.2 - RAT 1st, eta 0.2 | +1.00 ± 0.31 | -0.10 ± 0.10 | -3.00 ± 0.54 | +2.50 ± 0.49 |",
        "| method | paper | clean | PGD-20 | CW-20 | AutoAttack |",
        "| TRADES | RAT (Jin et al. 2023) Table 7, PreActResNet-18 | 82.89 (-0.89) |  |  |  |",
        "| RAT 1st+2nd, eta 0.2 | RAT (Jin et al. 2023) Table 1, PreActResNet-18 | 84.13 (-0.13) | 54.91 (-1.01) | "
        "52.53 (-4.53) | 50.30 (+1.20) |",
        "- RAT 1st, eta 0.2 minus TRADES (RAT (Jin et al. 2023) Table 1, PreActResNet-18; RAT (Jin et al. 2023) Table "
        "7, PreActResNet-18): clean +0.66 there, +1.00 ± 0.31 here: reproduced.",
        "- RAT 1st+2nd, eta 0.2 minus RAT 1st, eta 0.2 (RAT (Jin et al. 2023) Table 1, PreActResNet-18): clean +0.58 "
        "there, +1.00 ± 0.31 here: reproduced; PGD-20 +0.05 there, -0.10 ± 0.10 here: undecided, chance allows both 0 "
        "and theirs; CW-20 -0.12 there, -3.00 ± 0.54 here: the same sign, far larger; AutoAttack +1.50 there, "
        "+2.50 ± 0.49 here: reproduced.",
    ],
)
def test_table_1_of_rat_has_this_line(table1: str, line: str) -> None:
    assert line in table1.splitlines()


def test_a_table_that_is_whole_is_on_the_page_too_and_nothing_else(table1: str) -> None:
    """Both rows of Table 7 are rows of Table 1."""
    assert sections(table1) == ["RAT Table 1: order and weight of its terms", "RAT Table 7: RayS"]
    (line,) = [line for line in table1.splitlines() if line.startswith("| TRADES | RAT") and "0.0412" in line]
    assert line.endswith("| 82.89 (-0.89) |  |  |  | 0.0412 | 56.06 (-15.06) |")
    assert "How theirs were made:" in table1 and "What differs there:" not in table1
    (missing,) = [line for line in table1.splitlines() if line.startswith("Not measured yet: ")]
    assert "`cifar10_trades_rat1_linf_eta005`" in missing and "eta020" not in missing


AT, AT_LAST = {"clean": 81.0, "pgd-20": 52.0}, {"clean": 84.0, "pgd-20": 44.0}


def test_a_difference_is_judged_under_an_attack_both_rows_have(tmp_path: Path) -> None:
    """AT is attacked as AWP says, AT + RAT as RAT says and as AWP says: PGD-20 of steps of 2/255 can be compared."""
    runs = [
        fake_run(tmp_path, "cifar10_at_linf", AT, last=AT_LAST, further=False),
        fake_run(tmp_path, "cifar10_at_rat2_linf", {**BASE, PGD: 55.5, "pgd-20": 53.5}, further=False),
    ]
    page = page_of(tmp_path, *runs)
    assert sections(page) == ["RAT Table 8: RAT on AT"]
    (line,) = [line for line in page.splitlines() if line.startswith("- AT + RAT minus AT (")]
    assert "PGD-20 +1.46 there, +1.50 ± 0.38 here: reproduced" in line
    assert "CW-20" not in line and "AutoAttack" not in line
    cells = "| 83.56 (-1.56) | 54.23 (+1.27) | 52.19 (-2.19) | 48.70 (-0.70) |"
    assert f"| AT + RAT | RAT (Jin et al. 2023) Table 8, PreActResNet-18 {cells}" in page


def test_the_baseline_of_another_table_is_attacked_as_this_one_says(tmp_path: Path) -> None:
    """AT of AWP's Table 3 is that of RAT's Table 8: further evaluations measure what the latter prints."""
    at = {**AT, PGD: 54.0, CW: 50.7, "autoattack": 46.4}
    runs = [
        fake_run(tmp_path, "cifar10_at_linf", at, last=AT_LAST),
        fake_run(tmp_path, "cifar10_at_rat2_linf", {**BASE, PGD: 55.5, CW: 52.2, "pgd-20": 53.5}),
    ]
    page = page_of(tmp_path, *runs)
    (line,) = [line for line in page.splitlines() if line.startswith("- AT + RAT minus AT (")]
    assert line.count("+1.50 ± 0.38 here: reproduced") == 2 and "AutoAttack +1.60 there, +1.60 ± 0.40 here" in line
    assert "| AT | `cifar10_at_linf` | 0 | best, 2 | 81.00 | 54.00 | 50.70 | 46.40 |" in page


def test_the_last_epoch_and_spreads_of_awp(tmp_path: Path) -> None:
    """Clean accuracy that the paper prints for the best epoch is compared with nothing, that of the last one is."""
    runs = [
        fake_run(tmp_path, "cifar10_at_l2", AT, last=AT_LAST),
        fake_run(tmp_path, "cifar10_at_l2_cutout", {**AT, "pgd-20": 52.5}, last=AT),
    ]
    page = page_of(tmp_path, *runs)
    assert sections(page) == ["AWP Table 5: other regularisers, L2"]
    assert "](page-awp_table5.png)" in page
    best, last = [line for line in page.splitlines() if line.startswith("- AT + cutout minus AT (")]
    # 69.38 and 69.15, with spreads of 0.27 and 0.13 over five runs: the difference has the error 0.134
    assert "clean" not in best and "PGD-20 +0.23 there, +0.50 ± 0.22 here: no claim, it is within" in best
    assert "clean -0.95 there, -3.00 ± 0.54 here: the same sign, far larger; PGD-20 +1.75 there, +8.00 " in last
    cells = "| AT | AWP (Wu et al. 2020) Table 3, PreActResNet-18 |  | 89.57 | 69.15 (-17.15) |  |"
    assert cells in page.splitlines()


def test_two_papers_beside_one_row_and_seconds_beside_none(tmp_path: Path) -> None:
    runs = [
        fake_run(tmp_path, "cifar100_trades_awp_linf_wrn34", BASE),
        fake_run(tmp_path, "cifar100_trades_linf_wrn34", BASE),
        fake_run(tmp_path, "cifar10_atent_l2_k5", {"clean": 80.0, "pgd-10:step_size=0.25": 40.0}),
        fake_run(tmp_path, "digits_at", AT),
    ]
    page = page_of(tmp_path, *runs)
    assert sections(page) == ["ATENT Table S4: seconds per epoch", "RAT Table 2: WRN-34-10", "Other runs"]
    assert " models of its repository, WRN-34-10 | 60.17 (+21.83) |  |  | 28.80 (+19.20) |" in page
    assert "| ATENT (L2 K 5) | ATENT (Jagatap et al. 2021) Table S4, ResNet-20 |  |  |  |  | 142.47 |" in page
    assert "| ATENT (L2 K 5) | `cifar10_atent_l2_k5` | 0 | best, 2 | 80.00 | 40.00 |  |  |" in page


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("cifar10_at_linf", "awp_table3"),
        ("cifar10_trades_linf", "rat_table1"),
        ("cifar10_trades_linf cifar10_trades_rat2_linf_eta020", "rat_table7"),
        (
            "cifar10_trades_linf cifar10_trades_rat2_linf_eta020 cifar10_trades_rat1_linf_eta020",
            "rat_table1 rat_table7",
        ),
        ("cifar10_atent_linf_wrn34 cifar10_atent_l2_k5", "atent_s3 atent_s4"),
        ("cifar10_at_linf cifar10_at_awp_linf", "awp_table3"),
        ("cifar10_at_linf cifar10_at_awp_linf cifar10_at_linf_l1", "awp_table4"),
        ("cifar10_at_linf svhn_at_awp_linf cifar10_at_rat2_linf", "awp_table3 rat_table8"),
        ("cifar10_trades_awp_linf_wrn34", "awp_models"),
        ("cifar10_trades_awp_linf_wrn34 cifar10_trades_rat1_linf_wrn34", "rat_table2"),
        ("cifar10_short_at moons_at", "cifar10_short trh_moons"),
        ("digits_at mnist_at_linf", ""),
    ],
)
def test_which_tables_are_told(names: str, found: str) -> None:
    """Of a baseline that several print only those that are there for another row."""
    wanted = {name: protocol(name) for name in names.split()}
    assert list(PAPERS.concerning(wanted).protocols) == found.split()


def test_a_baseline_of_two_tables_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Figure] = []
    monkeypatch.setattr("flatrock.reports.results_figure.store", lambda figure, path: seen.append(figure))
    names = ("cifar10_at_linf", "cifar10_at_awp_linf", "cifar10_at_linf_l1", "cifar100_at_awp_linf")
    rows = [collect_run(fake_run(tmp_path, name, {**AT, "autoattack": 47.0})) for name in names]
    papers = PAPERS.concerning({row.recipe: row.protocol for row in rows})
    assert list(papers.protocols) == ["awp_table3", "awp_table4"]
    draw_results(rows, papers, tmp_path / "page.png")
    told = [text.get_text().strip() for text in seen[0].axes[1].texts]
    assert [line.partition(",")[0] for line in told if line[0].isdigit()] == [
        "1  AT (CIFAR-10 Linf)",
        "2  AT + AWP (CIFAR-10 Linf)",
        "3  AT + AWP (CIFAR-100 Linf)",
        "4  AT + L1",
    ]
    assert [len(papers.runs(key, rows)) for key in papers.protocols] == [3, 3]
    assert tally_lines(papers.protocols["awp_table4"], papers.runs("awp_table4", rows))


def test_what_reproduce_says_about_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fake_run(Path("runs"), ETA.format(1), FIRST)
    fake_run(Path("runs"), ETA.format(2), BOTH)
    fake_run(Path("runs"), "cifar10_trades_linf", BASE)
    names = [ETA.format(1), ETA.format(2)]
    ask = "name cifar10_trades_linf too for 1 more"
    plan = " ".join(flatrock("reproduce", *names, "--dry-run", "--device", "cpu").output.split())
    assert f"rat_table1: papers print figures for 2 of the rows, differences: 1; {ask}" in plan
    done = " ".join(flatrock("reproduce", *names, "--device", "cpu").output.split())
    assert "of the differences papers print, rat_table1: 2 reproduced (RAT 1st+2nd, eta 0.2 minus RAT 1st" in done
    assert f"rat_table1, differences: {ask}" in done
    whole = " ".join(flatrock("reproduce", "cifar10_trades_linf", "--device", "cpu").output.split())
    assert "3 reproduced (RAT 1st, eta 0.2 minus TRADES: clean; " in whole and ask not in whole
    plan = " ".join(flatrock("reproduce", *names, "--dry-run", "--device", "cpu").output.split())
    assert "figures for 3 of the rows, differences: 2" in plan, "the other row is in the file"
    assert "cifar10 not found" in refusal(flatrock("reproduce", "rat_table1", "--dry-run"))


def test_changed_rows_are_compared_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = flatrock("reproduce", "trh_moons", "moons_at", "train.epochs=1", "--dry-run", "--device", "cpu")
    assert "3 of them are changed by overrides, and compared with no paper" in " ".join(done.output.split())
    assert "papers print" not in done.output
