"""`flatrock report-speed`: the page says what the files say, never more, and the one in docs/ is up to date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench_cases import fake_bench, fake_cost, store
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.costs import Bench, Estimate, read_bench
from flatrock.core.errors import ConfigError
from flatrock.recipes.load import recipe_names
from flatrock.reports.speed import speed_page, verdict
from flatrock.reports.speed_targets import Limit, read_targets

ROOT = Path(__file__).parents[2]
FILE = ROOT / "results" / "speed_targets.yaml"
TARGETS = read_targets(FILE)
STEADY = 7 * (1.0,)
LATER = "2026-11-16T12:00:00+00:00"


def page_of(**files: Bench) -> list[str]:
    return speed_page(TARGETS, {f"{name}.json": bench for name, bench in files.items()}).splitlines()


def lines_of(page: list[str], what: str, measure: str) -> list[list[str]]:
    """The last three cells of the lines of a row: ours, met?, measured with."""
    return [line.split(" | ")[-3:] for line in page if line.startswith(f"| {what} | {measure} |")]


def at(seconds: float, **changes: Any) -> Bench:
    """A file with AT at so many seconds per epoch of 391 steps."""
    about = {key: changes.pop(key) for key in ("time", "device") if key in changes}
    return fake_bench(fake_cost("cifar10_short_at", seconds / 0.391, **changes), **about)


AT = ("PreActResNet-18 AT", "s/epoch")
TRADES_AWP = ("PreActResNet-18 TRADES + AWP", "time over base")


@pytest.mark.parametrize(
    ("seconds", "rounds", "ours", "met"),
    [
        (5.5, STEADY, "5.500 (5.500 to 5.500)", "yes"),
        (5.5, (0.9, 0.95, 0.97, 1.0, 1.02, 1.05, 1.1), "5.500 (4.950 to 6.050)", "open"),
        (5.5, (1.0, 1.0), "5.500", "open"),
        (6.0001, STEADY, "6.000 (6.000 to 6.000)", "no, 0.0017 % over"),
        (6.6, STEADY, "6.600 (6.600 to 6.600)", "no, 10 % over"),
    ],
)
def test_a_time_is_met_or_not(seconds: float, rounds: tuple[float, ...], ours: str, met: str) -> None:
    (cells,) = lines_of(page_of(b=at(seconds, rounds=rounds)), *AT)
    assert cells == [ours, met, "`cifar10_short_at`, `b.json` |"]


@pytest.mark.parametrize(
    ("limit", "measure", "ours", "word"),
    [
        (Limit(target=1.05), "time_ratio", Estimate(1.05, (1.04, 1.05)), "yes"),
        (Limit(target=1.05), "time_ratio", Estimate(1.05, (1.04, 1.0500001)), "open"),
        (Limit(target=1.05), "memory_ratio", Estimate(1.05, None), "yes"),
        (Limit(target=10.0), "gigabytes", Estimate(10.000001, None), "no, 1e-05 % over"),
        (Limit(), "seconds", Estimate(1.0, (1.0, 1.0)), ""),
    ],
)
def test_verdicts_are_not_rounded(limit: Limit, measure: str, ours: Estimate, word: str) -> None:
    assert verdict(limit, measure, ours) == word


def test_memory_is_compared_in_the_unit_of_its_target() -> None:
    """9.5 GiB are more than 10 GB."""
    rat = "cifar10_trades_rat2_linf_wrn34"
    what = ("WRN-34-10 TRADES + RAT 1st+2nd", "memory, GB")
    (cells,) = lines_of(page_of(b=fake_bench(fake_cost(rat, 100.0, gib=9.5))), *what)
    assert cells[:2] == ["10.201", "no, 2 % over"]
    (cells,) = lines_of(page_of(b=fake_bench(fake_cost(rat, 100.0, gib=9.3))), *what)
    assert cells[:2] == ["9.986", "yes"]
    (cells,) = lines_of(page_of(b=fake_bench(fake_cost(rat, 100.0, gib=None))), *what)
    assert cells[:2] == ["not measured", "not measured"]


def test_ratios_are_those_of_one_file() -> None:
    base = fake_cost("cifar10_short_trades", 18.0)
    rat = fake_cost("cifar10_short_trades_rat2", 18.72, gib=2.2)
    what = "PreActResNet-18 TRADES + RAT 1st+2nd"
    together = page_of(b=fake_bench(fake_cost("cifar10_short_at", 15.0), rat, base))
    assert lines_of(together, what, "time over base")[0][:2] == ["1.040 (1.040 to 1.040)", "yes"]
    assert lines_of(together, what, "memory over base")[0][:2] == ["1.100", "no, 4.8 % over"]
    assert lines_of(together, what, "s/epoch")[0][:2] == ["7.320 (6.588 to 8.051)", ""]
    apart = page_of(b=fake_bench(rat), c=fake_bench(base))
    for measure in ("time over base", "memory over base"):
        assert lines_of(apart, what, measure)[0][:2] == ["not measured", "not measured"]


def test_methods_are_shown_over_every_base() -> None:
    names = ("at", "at_awp", "trades", "trades_awp")
    costs = [fake_cost(f"cifar10_short_{n}", ms) for n, ms in zip(names, (15.0, 18.0, 18.0, 23.4), strict=True)]
    page = page_of(b=fake_bench(*costs))
    assert lines_of(page, "PreActResNet-18 AT + AWP", "time over base")[0][:2] == ["1.200 (1.200 to 1.200)", "yes"]
    assert lines_of(page, *TRADES_AWP)[0][:2] == ["1.300 (1.300 to 1.300)", "no, 4 % over"]
    assert lines_of(page, "PreActResNet-18 TRADES + TrH", "time over base")[0][0] == "not measured"


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "NVIDIA A100"},
        {"train__batch_size": 256},
        {"attack__steps": 7},
        {"model__name": "resnet18"},
        {"flatness": ({"name": "s2o", "weight": 0.3},)},
    ],
    ids=str,
)
def test_other_measurements_do_not_count(changes: dict[str, Any]) -> None:
    assert lines_of(page_of(b=at(5.0, rounds=STEADY, **changes)), *AT)[0][0] == "not measured"


@pytest.mark.parametrize("change", [{"order": 1}, {"sigma": 0.0}, {"eta": 0.0}, {"terms": "exact"}], ids=str)
def test_half_a_method_does_not_count(change: dict[str, Any]) -> None:
    rat = fake_cost("cifar10_short_trades_rat2", 18.0)
    weak = fake_cost("cifar10_short_trades_rat2", 18.0, flatness=({**rat.flatness[0], **change},))
    more = fake_cost("cifar10_short_trades_rat2", 18.0, flatness=(*rat.flatness, {"name": "swa"}))
    base = fake_cost("cifar10_short_trades", 18.0)
    for cost in (weak, more):
        page = page_of(b=fake_bench(base, cost))
        assert lines_of(page, "PreActResNet-18 TRADES + RAT 1st+2nd", "time over base")[0][0] == "not measured"


def test_the_newer_of_two_files_counts() -> None:
    old, new = at(5.0, rounds=STEADY), at(7.0, rounds=STEADY, time=LATER)
    page = page_of(a=old, z=new)
    assert page == page_of(z=new, a=old), "the order they are named in does not matter"
    assert lines_of(page, *AT) == [["7.000 (7.000 to 7.000)", "no, 17 % over", "`cifar10_short_at`, `z.json` |"]]
    assert "## `a.json`" not in page
    assert "## `z.json`" in page


def test_an_older_file_keeps_what_only_it_measured() -> None:
    """Its base is shown with it, though a newer file has that recipe too."""
    names = ("trades", "trades_awp", "mart", "at")
    old = fake_bench(*(fake_cost(f"cifar10_short_{n}", 20.0, rounds=STEADY) for n in names))
    new = fake_bench(*(fake_cost(f"cifar10_short_{n}", 18.0, rounds=STEADY) for n in ("trades", "at")), time=LATER)
    page = page_of(old=old, new=new)
    assert lines_of(page, "PreActResNet-18 TRADES", "s/epoch")[0][2] == "`cifar10_short_trades`, `new.json` |"
    assert lines_of(page, *TRADES_AWP)[0][2] == "`cifar10_short_trades_awp`, `old.json` |"
    older = page[page.index("## `old.json`") :]
    shown = list(dict.fromkeys(line.split("`")[1] for line in older if line.startswith("| `")))
    assert shown == ["cifar10_short_trades", "cifar10_short_trades_awp", "cifar10_short_mart"]


def test_recipes_that_measure_the_same_are_all_shown() -> None:
    costs = [fake_cost(f"cifar10_{n}_at", ms, rounds=STEADY) for n, ms in (("short", 15.0), ("full", 16.0))]
    found = lines_of(page_of(b=fake_bench(*costs)), *AT)
    assert [cells[1:] for cells in found] == [
        ["yes", "`cifar10_short_at`, `b.json` |"],
        ["no, 4.3 % over", "`cifar10_full_at`, `b.json` |"],
    ]


def test_where_the_numbers_come_from_is_told() -> None:
    awp = fake_cost("cifar10_short_at_awp", 18.0, rounds=STEADY, gib=2.5, findings=("T02 it overflows",))
    page = page_of(b=fake_bench(fake_cost("cifar10_short_at", 16.0, rounds=STEADY, gib=None), awp))
    for line in (
        "NVIDIA H200, torch 2.11.0, commit abc123def456, 2026-11-15T12:00:00+00:00, 7 rounds of 10 steps; "
        "matmul ceiling 700 TFLOP/s.",
        "| `cifar10_short_at` | 16.000 (16.000 to 16.000) | 6.13 (383 steps) | 8,000 | 123 | 17.6 % |  |  | "
        "bfloat16, compile, twin |",
        "| `cifar10_short_at_awp` | 18.000 (18.000 to 18.000) | 6.89 (383 steps) | 7,111 | 123 | 17.6 % | 2.50 | "
        "1.125 (1.125 to 1.125) x `cifar10_short_at` | bfloat16, compile, twin |",
        "- `cifar10_short_at_awp`: T02 it overflows",
    ):
        assert line in page


def test_without_measurements_nothing_is_met() -> None:
    page = page_of()
    rows = [line for line in page if line.startswith(("| PreAct", "| WRN"))]
    assert len(rows) == sum(len(row.limits) for row in TARGETS.rows) == 14
    assert all("not measured" in line for line in rows)
    assert not any(f"| {word}" in line for line in rows for word in ("yes", "open", "no,"))


RAT6 = "| RAT (Jin et al. 2023) Table 6 | WRN-34-10 TRADES"


def test_what_papers_print_stands_beside_ours_of_the_same_kind() -> None:
    names = ("cifar10_trades_linf_wrn34", "cifar10_trades_rat1_linf_wrn34", "cifar10_trades_rat2_linf_wrn34")
    costs = [
        fake_cost(n, ms, gib=gib, rounds=STEADY)
        for n, ms, gib in zip(names, (100.0, 103, 105), (5, 5.5, 6), strict=True)
    ]
    page = [line for line in page_of(b=fake_bench(*costs)) if line.startswith(RAT6)]
    assert page == [
        f"{RAT6} | 1666 s | 12875 |  |  | 39.100 (39.100 to 39.100) |  |  | `{names[0]}`, `b.json` |",
        f"{RAT6} + RAT 1st | 2161 s | 20629 | 1.30 | 1.60 | 40.273 (40.273 to 40.273) | 1.030 (1.030 to 1.030) | "
        f"1.100 | `{names[1]}`, `b.json` |",
        f"{RAT6} + RAT 1st+2nd | 2362 s | 26409 | 1.42 | 2.05 | 41.055 (41.055 to 41.055) | 1.050 (1.050 to 1.050) | "
        f"1.200 | `{names[2]}`, `b.json` |",
    ]


def test_nothing_of_ours_is_made_up_beside_papers() -> None:
    lines = [line for line in page_of() if line.startswith(("| RAT", "| TrH"))]
    assert len(lines) == sum(len(part.rows) for part in TARGETS.published) == 3 + 4 + 4
    assert all(line.endswith("|  |  |  |  |") for line in lines)
    assert "| TrH (Wang et al. 2023) Table 9, 8 TPUv4 | AWP | 5.3 |  | 2.04 |  |  |  |  |  |" in lines
    other = page_of(b=at(5.0, device="NVIDIA A100"))
    assert [line for line in other if line.startswith(("| RAT", "| TrH"))] == lines, "another device does not count"


def test_targets_without_papers_have_no_such_part() -> None:
    page = speed_page(replace(TARGETS, published=()), {})
    assert "Beside what papers print" not in page


def test_published_figures_are_those_of_the_papers() -> None:
    found = {part.cite: [(row.epoch, row.megabytes) for row in part.rows] for part in TARGETS.published}
    assert found == {
        "RAT (Jin et al. 2023) Table 6": [(1666, 12875), (2161, 20629), (2362, 26409)],
        "TrH (Wang et al. 2023) Table 9, 8 TPUv4": [(2.6, None), (2.8, None), (3.9, None), (5.3, None)],
        "TrH (Wang et al. 2023) Table 9, 2 RTX": [(32.3, None), (34.2, None), (40.4, None), (48.1, None)],
    }


def test_every_row_is_of_a_recipe_of_the_library() -> None:
    """A row no recipe fits would never be measured; ratios need the base beside it."""
    names = [n for n in recipe_names() if n.startswith("cifar10_short_")]
    networks = ("preact_resnet18", "wide_resnet34_10")  # the wide one by `flatrock bench --set model.name=...`
    bench = fake_bench(*(fake_cost(name, 10.0, model__name=network) for name in names for network in networks))
    shown = [row.kind for part in TARGETS.published for row in part.rows]
    assert all(any(TARGETS.fits(row, bench, cost) for cost in bench.costs) for row in shown)
    for row in TARGETS.rows:
        fitting = [cost for cost in bench.costs if TARGETS.fits(row, bench, cost)]
        assert fitting, row.label
        assert all(TARGETS.measure(m, bench, cost) for m in row.limits for cost in fitting), row.label


def test_an_attack_in_another_mode_is_another_training() -> None:
    row = TARGETS.rows[0]
    here, there = (fake_cost("cifar10_short_at", 10.0, attack__bn_mode=mode) for mode in ("eval", "train"))
    bench = fake_bench(here, there)
    assert [TARGETS.fits(row, bench, cost) for cost in bench.costs] == [True, False]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda raw: raw.pop("device"), "device"),
        (lambda raw: raw["rows"][0].pop("label"), "label"),
        (lambda raw: raw["rows"][0].update(watts={"target": 700}), "watts"),
        (lambda raw: raw["rows"][0]["seconds"].update(goal=3), "goal"),
        (lambda raw: raw["rows"][0]["seconds"].update(target="fast"), "fast"),
        (lambda raw: raw["published"][0]["rows"][0].pop("epoch"), "epoch"),
        (lambda raw: raw["published"][0].pop("cite"), "cite"),
    ],
)
def test_faults_of_the_targets_file_are_named(tmp_path: Path, change: Any, fault: str) -> None:
    raw = yaml.safe_load(FILE.read_text())
    change(raw)
    (tmp_path / "speed_targets.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=fault):
        read_targets(tmp_path / "speed_targets.yaml")
    with pytest.raises(ConfigError, match="name it with --targets"):
        read_targets(tmp_path / "gone.yaml")


def test_the_command(tmp_path: Path) -> None:
    bench, other, out = store(tmp_path / "b.json", at(5.0)), tmp_path / "other.json", tmp_path / "page.md"
    other.write_text('{"runs": []}')
    words = ["report-speed", other, bench, "--targets", FILE, "--out", out]
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output
    assert f"left out {other}: not a file of `flatrock bench`" in done.output
    assert f"wrote {out}: 1 files of measurements" in done.output
    assert out.read_text().splitlines() == page_of(b=at(5.0))
    (tmp_path / "more").mkdir()
    again = store(tmp_path / "more" / "b.json", at(4.0))
    done = CliRunner().invoke(app, [str(w) for w in (*words, again)])
    assert done.exit_code == 2
    assert "two files are called b.json" in done.output


def test_files_of_bench_are_no_results(tmp_path: Path) -> None:
    bench = store(tmp_path / "b.json", at(5.0))
    words = ["report", bench, "--out", tmp_path / "page.md"]
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output
    assert f"left out {bench}" in done.output


def test_the_page_in_docs_is_what_the_command_writes(tmp_path: Path) -> None:
    files = sorted((ROOT / "results").glob("*.json"))
    out = tmp_path / "speed_targets.md"
    done = CliRunner().invoke(app, ["report-speed", *(str(f) for f in files), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text() == (ROOT / "docs" / "speed_targets.md").read_text(), (
        "run flatrock report-speed results/*.json --out docs/speed_targets.md"
    )
    measured = [file for file in files if read_bench(file)]
    assert ("ms/step" in out.read_text()) == bool(measured)


def test_where_the_time_of_a_step_goes() -> None:
    """Kernels by kind, what is left as waiting, and nothing for a file of a CPU."""
    gpu = fake_cost("cifar10_short_at", 20.0, kernels_ms={"convolutions": 12.0, "copies": 3.5}, attack_ms=15.0)
    page = page_of(gpu=fake_bench(gpu))
    assert "| recipe | step | convolutions | copies | waiting | of the step, the attack |" in page
    assert "| `cifar10_short_at` | 20.00 | 12.00 | 3.50 | 4.50 | 15.00 |" in page
    timed = fake_cost("cifar10_short_trades", 20.0, kernels_ms={"copies": 3.5}, attack_ms=15.0, launch_ms=8.25)
    page = page_of(gpu=fake_bench(gpu, timed))
    assert (
        "| recipe | step | convolutions | copies | waiting | of the step, the attack | processor, launching it |"
        in page
    )
    assert "| `cifar10_short_at` | 20.00 | 12.00 | 3.50 | 4.50 | 15.00 |  |" in page
    assert "| `cifar10_short_trades` | 20.00 | 0.00 | 3.50 | 16.50 | 15.00 | 8.25 |" in page
    cpu = fake_cost("cifar10_short_at", 20.0, kernels_ms={}, attack_ms=15.0)
    assert not any("waiting" in line for line in page_of(cpu=fake_bench(cpu)))
