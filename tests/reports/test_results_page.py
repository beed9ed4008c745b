"""`flatrock report`: the page says what the files and the papers say, and the one in docs/ is up to date."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_cases import flatrock
from results_cases import fake_run

from flatrock.core.errors import ConfigError
from flatrock.core.gaps import Gap
from flatrock.core.rows import read_rows
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.reports.claims import Verdict, tally_lines, verdicts
from flatrock.reports.papers import OWN as PAPERS
from flatrock.reports.papers import Figure, read_papers
from flatrock.workflows.results import collect_run, protocol

ROOT = Path(__file__).parents[2]
TRADES = {"clean": 80.0, "pgd-20": 51.0, "cw-20": 49.0, "autoattack": 48.0}
AWP = {"clean": 79.0, "pgd-20": 53.2, "cw-20": 49.1, "autoattack": 50.1}


def page_of(folder: Path, *runs: Path) -> str:
    file, page = folder / "rows.json", folder / "page.md"
    done = flatrock("results", *runs, "--out", file)
    assert done.exit_code == 0, done.output
    done = flatrock("report", file, "--papers", PAPERS, "--out", page)
    assert done.exit_code == 0, done.output
    assert f"wrote {page}: {len(runs)} runs" in done.output
    assert f"drew {page.with_suffix('.png')}" in done.output
    assert "](page.png)\n" in page.read_text()
    return page.read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of runs of every kind."""
    folder = tmp_path_factory.mktemp("page")
    awp_last = {**AWP, "pgd-20": 52.0}
    runs = [
        fake_run(folder, "cifar10_short_trades_awp", AWP, peak_memory_bytes=5 * 2**29),
        fake_run(folder, "cifar10_short_trades", TRADES),
        fake_run(folder, "cifar10_short_at", TRADES, overrides={"train.epochs": 3}),
        fake_run(folder, "cifar10_short_mart", {}, status="failed"),
        fake_run(folder, "cifar10_short_trades_swa", TRADES, averages=True),
        fake_run(folder, "cifar10_full_at", TRADES, last={**TRADES, "pgd-20": 44.0}),
        fake_run(folder, "cifar10_full_at_awp", AWP, last=awp_last),
        fake_run(folder, "cifar10_flagship", {**AWP, "clean": 84.0, "autoattack": 52.0}),
        fake_run(folder, "digits_at", TRADES),
    ]
    return page_of(folder, *runs)


@pytest.mark.parametrize(
    "line",
    [
        "| TRADES + AWP | `cifar10_short_trades_awp` | 0 | best, 2 | 79.00 | 53.20 | 49.10 | 50.10 |",
        "| TRADES + SWA | `cifar10_short_trades_swa` | 0 | average best, 2 | 80.00 | 51.00 | 49.00 | 48.00 |",
        "| TRADES + AWP | 52.00 (2) | 48.00 (3) | 7.00 | 1.2 | 2.5 | 2.50 | 2.0 |",
        "| TRADES | 52.00 (2) | 48.00 (3) | 7.00 | 1.2 | 2.5 | not recorded | 2.0 |",
        "| MART | `cifar10_short_mart` | 0 | FAILED |  |  |  |  |",
        "- MART (seed 0): failed; not compared.",
        "- AT (seed 0): changed, train.epochs: 3 instead of 30; not compared.",
        # 1000 samples, nested: a gain of p has the standard error sqrt(p (1 - p) / 1000).
        "| TRADES + AWP - TRADES | -1.00 ± 0.31 | +2.20 ± 0.46 | +0.10 ± 0.10 | +2.10 ± 0.45 |",
        "| TRADES | RAT (Jin et al. 2023) Table 7, PreActResNet-18 | 82.89 (-2.89) |  |  |  |",
        "| TRADES + AWP | RAT (Jin et al. 2023) Table 2, WRN-34-10 | 85.17 | 59.64 | 57.33 | 56.20 |",
        "| AT | AWP (Wu et al. 2020) Table 3, PreActResNet-18, last epoch | 84.56 (-4.56) | 44.44 (-0.44) |  |  |",
        "| AT | +0.00 ± 0.00 | -7.00 ± 0.81 | +0.00 ± 0.00 | +0.00 ± 0.00 |",
        "Accuracies are of 1,000 test images.",
        "| digits_at | 80.00 | 48.00 | 49.00 | 51.00 | 7.00 |",
        "Results in `rows.json`.",
        "![accuracy under attack, epoch by epoch](page-cifar10_full.png)",
    ],
)
def test_the_page_has_this_line(page: str, line: str) -> None:
    assert line in page.splitlines()


def sentence(page: str, start: str) -> str:
    (line,) = [line for line in page.splitlines() if line.startswith(f"- {start} (")]
    return line


def test_the_papers_differences_are_judged(page: str) -> None:
    line = sentence(page, "TRADES + AWP minus TRADES")
    assert "(RAT (Jin et al. 2023) Table 2, WRN-34-10)" in line
    assert "clean +0.52 there, -1.00 ± 0.31 here: contradicted" in line
    assert "PGD-20 +2.96 there, +2.20 ± 0.46 here: reproduced" in line
    assert "CW-20 +2.84 there, +0.10 ± 0.10 here: not reproduced, no difference beyond chance" in line
    assert "AutoAttack +3.20 there, +2.10 ± 0.45 here: reproduced" in line


def test_robust_overfitting_is_judged_at_the_last_epoch(page: str) -> None:
    assert "PGD-20 -8.35 there, -7.00 ± 0.81 here: reproduced" in sentence(page, "AT, last epoch minus best")
    best, last = [line for line in page.splitlines() if line.startswith("- AT + AWP minus AT (")]
    assert "PGD-20 +2.60 there, +2.20 ± 0.46 here: reproduced" in best
    assert "last epoch" in last
    assert "PGD-20 +10.29 there, +8.00 ± 0.86 here: reproduced" in last
    assert "PGD-20 -0.66 there, -1.20 ± 0.34 here: reproduced" in sentence(page, "AT + AWP, last epoch minus best")


def test_targets_are_judged(page: str) -> None:
    reached, missed = [line for line in page.splitlines() if " against the best " in line]
    # standard errors of 1,000 samples: sqrt(0.84 * 0.16 / 1000), sqrt(0.52 * 0.48 / 1000)
    had, near = "clean 84.00 ± 1.16 and AutoAttack 52.00 ± 1.58", "(clean and AutoAttack within two standard errors)."
    assert f"clean 83.00 and AutoAttack 51.62: {had}, reached {near}" in reached
    assert f"clean 85.71 and AutoAttack 52.48: {had}, missed in clean and AutoAttack {near}" in missed


def test_changed_and_failed_runs_are_not_compared(page: str) -> None:
    assert "AT + AWP - AT |" in page, "the full rows"
    short = page[page.index("## `short`") : page.index("## `full`")]
    assert "| AT | AWP" not in short
    assert "| MART | MART" not in short


def test_what_is_missing_is_named(page: str) -> None:
    (short,) = [line for line in page.splitlines() if line.startswith("Not measured yet: ")]
    assert "`cifar10_short_standard`" in short
    assert "`cifar10_short_trades`" not in short


def test_a_last_epoch_that_papers_print_is_missed(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, "cifar10_full_at", TRADES, last=TRADES), fake_run(tmp_path, "cifar10_full_at_awp", AWP)]
    assert "Not measured yet: the last epoch of `cifar10_full_at_awp`." in page_of(tmp_path, *runs).splitlines()


def test_differences_of_seeds_are_averaged(tmp_path: Path) -> None:
    runs = []
    for seed, autoattack in enumerate((50.0, 51.0)):
        for name, found in (("trades", 48.0), ("trades_awp", autoattack)):
            keys = {"seed": seed}
            runs.append(
                fake_run(tmp_path / str(seed), f"cifar10_short_{name}", {**TRADES, "autoattack": found}, overrides=keys)
            )
    text = page_of(tmp_path, *runs)
    # Gains of 2 and 3 points: 20 of 1000 images by 1 and 10 by a half, a standard error of 0.468; of the seeds 0.5.
    assert "| TRADES + AWP - TRADES | +0.00 ± 0.00 | +0.00 ± 0.00 | +0.00 ± 0.00 | +2.50 ± 0.68 |" in text


@pytest.mark.parametrize(
    ("theirs", "ours", "word"),
    [
        (2.0, Gap(0.02, 0.005), "reproduced"),
        (-2.0, Gap(-0.02, 0.005), "reproduced"),
        (2.0, Gap(-0.02, 0.005), "contradicted"),
        (2.0, Gap(0.02, 0.01), "undecided, chance allows both 0 and theirs"),
        (0.3, Gap(0.003, 0.004), "undecided, chance allows both 0 and theirs"),
        (-2.0, Gap(0.0, 0.01), "undecided, chance allows both 0 and theirs"),  # -2 to 2
        (-2.0, Gap(0.001, 0.01), "not reproduced, no difference beyond chance"),  # -1.9 to 2.1
        (-0.5, Gap(-0.07, 0.003), "the same sign, far larger"),
        (2.0, Gap(0.049, 0.005), "reproduced"),  # 3.9 to 5.9
        (2.0, Gap(0.051, 0.005), "the same sign, far larger"),  # 4.1 to 6.1
        (10.0, Gap(0.041, 0.005), "reproduced"),  # 3.1 to 5.1
        (-10.0, Gap(-0.039, 0.005), "the same sign, far smaller"),  # 2.9 to 4.9
        (-2.0, Gap(0.09, 0.005), "contradicted"),
    ],
)
def test_words(theirs: float, ours: Gap, word: str) -> None:
    assert Verdict("clean", theirs, ours, doubtful=False).word == word


def test_a_papers_own_error_is_told(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, f"cifar10_short_{n}", TRADES) for n in ("trades", "trades_trh")]
    line = sentence(page_of(tmp_path, *runs), "TRADES + TrH minus TRADES")
    assert "AutoAttack +0.30 there, +0.00 ± 0.00 here: no claim, it is within the paper's own error" in line
    assert Verdict("clean", -0.1, Gap(0.09, 0.005), doubtful=True).word.startswith("no claim")


@pytest.mark.parametrize(
    ("samples", "theirs", "doubtful"),
    [
        # Ours has an error of 0.3 points on 10,000 samples: 0.95 on 1,000.
        ((1000, 1000), 1.8, True),
        ((1000, 1000), 2.0, False),
        ((0, 1000), 1.8, False),  # not alike: how they are paired is not known
        ((10_000, 10_000), 0.5, True),
        ((10_000, 10_000), 0.7, False),
        ((0, 0), 0.0, True),
    ],
)
def test_a_difference_on_few_images_is_as_uncertain_as_ours_would_be(
    samples: tuple[int, int], theirs: float, doubtful: bool
) -> None:
    about = {"cite": "", "differs": "", "network": ""}
    one, other = (
        Figure(**about, values={"autoattack": value}, samples={"autoattack": n} if n else {})
        for value, n in zip((50 + theirs, 50.0), samples, strict=True)
    )
    (verdict,) = verdicts((one, other), {"autoattack": Gap(0.01, 0.003, 10_000)})
    assert verdict.doubtful == doubtful


def test_no_results_are_said_to_be_none(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"runs": []}')
    shutil.copy(PAPERS, tmp_path)
    done = flatrock("report", other, "--out", tmp_path / "page.md")
    assert done.exit_code == 0, done.output
    assert f"left out {other}" in done.output
    text = (tmp_path / "page.md").read_text()
    assert "There are no results yet" in text
    for name in ("cifar10_short_at", "cifar10_full_at_awp", "cifar10_flagship"):
        assert f"`{name}`" in text


def test_a_run_in_two_files_is_refused(tmp_path: Path) -> None:
    run = fake_run(tmp_path, "cifar10_short_at", TRADES)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        flatrock("results", run, "--out", file)
    done = flatrock("report", *files, "--papers", PAPERS, "--out", tmp_path / "page.md")
    assert done.exit_code == 2
    assert "cifar10_short_at with seed 0 is in the files twice" in done.output


def test_the_page_in_docs_is_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    files = sorted(Path("results").glob("*.json"))
    done = flatrock("report", *files, "--out", "docs/results.md")
    assert done.exit_code == 0, done.output
    written = Path("docs/results.md").read_text()
    assert written == (ROOT / "docs" / "results.md").read_text(), (
        "run flatrock report results/*.json --out docs/results.md"
    )
    measured = [row for file in files for row in read_rows(file) or []]
    assert ("There are no results yet" in written) == (not measured)


def test_the_papers_file_knows_every_recipe_of_a_protocol() -> None:
    papers = read_papers(PAPERS)
    for key, part in papers.protocols.items():
        assert sorted(part.rows) == sorted(n for n in recipe_names() if protocol(n) == key)
        for name in part.rows:
            assert set(load_recipe(name).evaluate.attacks) | {"clean"} == set(part.measures)
    assert {protocol(n) for n in recipe_names()} == {"", *papers.protocols}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda raw: raw["figures"]["known"].update({"pgd-50": 1.0}), "'pgd-50' is not among the measures"),
        (lambda raw: raw["figures"]["known"].update(end="first"), "best or the last epoch, got 'first'"),
        (lambda raw: raw["figures"]["known"].update(source="nowhere"), "nowhere"),
        (lambda raw: raw["figures"]["known"].pop("network"), "network"),
        (lambda raw: raw["protocols"]["cifar10_short"].update(measures=["pgd-50"]), "pgd-50"),
        (lambda raw: _rows(raw)["cifar10_short_alp"].update(papers=["rat9_at"]), "rat9_at"),
        (lambda raw: _rows(raw)["cifar10_short_alp"].update(over="cifar10_full_at"), "no row of its protocol"),
        (lambda raw: _rows(raw)["cifar10_short_alp"].update(beat=1), "a row has no 'beat'"),
    ],
)
def test_faults_of_the_papers_file_are_named(tmp_path: Path, change: Any, fault: str) -> None:
    raw = yaml.safe_load(PAPERS.read_text())
    change(raw)
    (tmp_path / "papers.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=fault):
        read_papers(tmp_path / "papers.yaml")
    with pytest.raises(ConfigError, match="name it with --papers"):
        read_papers(tmp_path / "gone.yaml")


def _rows(raw: Any) -> Any:
    return raw["protocols"]["cifar10_short"]["rows"]


def test_a_page_of_ones_own_needs_no_papers(tmp_path: Path) -> None:
    """Papers that come with flatrock are told where there is a row of their protocol, and nowhere else."""
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    runs = [fake_run(tmp_path, "digits_at", TRADES), fake_run(tmp_path, "digits_mart", {}, status="failed")]
    assert flatrock("results", *runs, "--out", file).exit_code == 0
    done = flatrock("report", file, "--out", page)
    assert done.exit_code == 0, done.output
    assert [line for line in page.read_text().splitlines() if line.startswith("## ")] == [
        "## Other runs",
        "## Making this page again",
    ]
    command = f"flatrock report {file} --out {page}"
    assert f"Written by `{command}`; no number" in page.read_text()
    assert page.read_text().endswith(f"```sh\n{command}\n```\n")
    assert "| digits_at | 80.00 | 48.00 | 49.00 | 51.00 |" in page.read_text()
    assert "| digits_mart FAILED |" in page.read_text()
    assert not page.with_suffix(".png").exists()
    assert "](page-other.png)" in page.read_text()
    assert (tmp_path / "page-other.png").read_bytes()[:4] == b"\x89PNG"
    short = fake_run(tmp_path, "cifar10_short_trades", TRADES)
    assert flatrock("results", short, "--add", "--out", file).exit_code == 0
    assert flatrock("report", file, "--out", page).exit_code == 0
    assert "RAT (Jin et al. 2023) Table 7" in page.read_text()
    assert "cifar10_full" not in page.read_text()
    done = flatrock("report", file, "--papers", tmp_path / "none.yaml", "--out", page)
    assert "name it with --papers" in " ".join(done.output.split())


def test_differences_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    papers = read_papers(PAPERS)
    last = {**AWP, "pgd-20": 52.0}
    rows = [
        collect_run(fake_run(tmp_path, "cifar10_full_at", TRADES, last={**TRADES, "pgd-20": 44.0})),
        collect_run(fake_run(tmp_path, "cifar10_full_at_awp", AWP, last=last)),
    ]
    assert tally_lines(papers.protocols["cifar10_full"], rows) == [
        "5 reproduced (AT, last epoch minus best: PGD-20; AT + AWP minus AT: clean, PGD-20; AT + AWP minus AT, last "
        "epoch: PGD-20; AT + AWP, last epoch minus best: PGD-20)",
        "1 the same sign, far smaller (AT + AWP minus AT, last epoch: clean)",
        "2 not reproduced, no difference beyond chance (AT, last epoch minus best: clean; AT + AWP, last epoch minus "
        "best: clean)",
    ]
    assert tally_lines(papers.protocols["cifar10_short"], rows) == []
    assert papers.last_epochs == {"cifar10_full_at", "cifar10_full_at_awp"}
