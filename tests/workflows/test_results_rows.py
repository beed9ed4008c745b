"""`flatrock results`: what is taken from a run, what is refused, and that the file says what the runs say."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from command_cases import flatrock
from results_cases import CERTIFICATE, N, fake_result, fake_run, standing
from scipy.stats import norm
from scipy.stats import t as student

from flatrock.core import rows as module
from flatrock.core.errors import StateError
from flatrock.core.files import sha256
from flatrock.core.gaps import mean_paired, paired
from flatrock.core.locks import locked
from flatrock.core.rows import SCHEMA, Row, add_rows, read_rows, write_rows
from flatrock.engine.folder import RunFolder
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.workflows.results import collect_run, protocol

NAME = "cifar10_short_trades_awp"
FOUND = {"clean": 80.0, "pgd-20": 53.0, "cw-20": 50.5, "autoattack": 49.0}


def same(a: Row, b: Row) -> bool:
    return json.dumps(a.to_dict(), sort_keys=True) == json.dumps(b.to_dict(), sort_keys=True)


def test_a_row_tells_in_how_many_epochs_others_had_the_gpu_open(tmp_path: Path) -> None:
    """Nothing of that if nobody looked; between two looks, no long time, it is as the first of them saw it."""
    path = fake_run(tmp_path, NAME, FOUND)
    assert not {"shared_epochs", "watched_epochs"} & collect_run(path).training.keys()
    run = RunFolder(path)
    for looks, shared, watched in [((None, 0, 2), 1, 2), ((2, None, 0), 2, 3), ((0, None, None), 0, 3)]:
        records = zip(run.run().records, looks, strict=True)
        run.rewrite([replace(r, neighbours=n, elapsed=10.0 * r.epoch) for r, n in records])
        training = collect_run(path).training
        assert (training["shared_epochs"], training["watched_epochs"]) == (shared, watched)
    ends = {1: 10.0, 2: 69.0, 3: 71.0}  # a minute later nobody knows any more
    run.rewrite([replace(r, neighbours=2 if r.epoch == 1 else None, elapsed=ends[r.epoch]) for r in run.run().records])
    training = collect_run(path).training
    assert (training["shared_epochs"], training["watched_epochs"]) == (2, 2)


def test_a_row_holds_what_the_run_says(tmp_path: Path) -> None:
    path = fake_run(tmp_path, NAME, FOUND, last={**FOUND, "pgd-20": 50.0}, peak_memory_bytes=3 * 2**30)
    row = collect_run(path)
    assert (row.recipe, row.recipe_hash, row.protocol) == (NAME, recipe_hash(load_recipe(NAME)), "cifar10_short")
    assert (row.status, row.changes, row.seed, row.comparable) == ("finished", (), 0, True)
    assert row.training == {
        "epochs": 3, "seconds": 74.0, "elapsed": 150.0, "seconds_per_epoch": 7.0, "peak_memory_bytes": 3 * 2**30,
    }  # fmt: skip
    assert row.selection["best"] == {"epoch": 2, "clean": 0.8, "robust": 0.52, "train_robust": pytest.approx(0.62)}
    assert (row.selection["last"]["epoch"], row.selection["last"]["robust"]) == (3, 0.48)
    assert row.selection["curve"] == {
        "epoch": [1, 2, 3],
        "clean": [0.8, 0.8, 0.8],
        "robust": [0.3, 0.52, 0.48],
        "train_robust": pytest.approx([0.4, 0.62, 0.58]),
    }
    assert row.provenance == {k: v for k, v in CERTIFICATE.items() if k != "seed"}
    best, last = row.scores["best"], row.scores["last"]
    assert best.accuracy == {name: value / 100 for name, value in FOUND.items()}
    assert (best.epoch, last.epoch, best.n, last.accuracy["pgd-20"]) == (2, 3, N, 0.5)
    assert best.seconds == {"pgd-20": 30, "cw-20": 30, "autoattack/apgd-ce": 30, "autoattack/square": 30}
    assert best.findings == ("E02: some attacks ran on few samples",)
    assert best.result == sha256((path / "result-best.json").read_text())
    assert row.main == "best"


def test_the_curve_holds_only_epochs_that_were_probed(tmp_path: Path) -> None:
    row = collect_run(fake_run(tmp_path, NAME, FOUND, probes=(None, 0.52, 0.48)))
    assert (row.selection["curve"]["epoch"], row.selection["curve"]["robust"]) == ([2, 3], [0.52, 0.48])


def test_weights_are_not_needed_and_memory_may_be_unknown(tmp_path: Path) -> None:
    path = fake_run(tmp_path, NAME, FOUND)
    assert not list(path.glob("*.safetensors"))
    assert collect_run(path).training["peak_memory_bytes"] is None


def test_averaged_weights_stand_for_the_run(tmp_path: Path) -> None:
    row = collect_run(fake_run(tmp_path, "cifar10_short_at_swa", FOUND, averages=True))
    assert row.main == "average-best"
    assert row.selection["average_best"] == {"epoch": 2, "clean": 0.81, "robust": pytest.approx(0.53)}
    assert row.selection["average_last"]["epoch"] == 3


def test_changes_of_the_recipe_are_told_but_the_seed_is_free(tmp_path: Path) -> None:
    other = collect_run(fake_run(tmp_path / "a", NAME, FOUND, overrides={"seed": 3, "engine.compile": True}))
    assert (other.changes, other.seed, other.comparable) == ((), 3, True)
    short = collect_run(fake_run(tmp_path / "b", NAME, FOUND, overrides={"train.epochs": 3, "data.limit": 500}))
    assert short.changes == ("data.limit: 500 instead of None", "train.epochs: 3 instead of 30")
    assert not short.comparable


def test_resumptions_are_told(tmp_path: Path) -> None:
    path = fake_run(tmp_path, NAME, FOUND, resumed=[{"commit": "fff"}], findings=["T01 the network is not compiled"])
    row = collect_run(path)
    assert row.provenance["resumed"] == ["fff"]
    assert row.findings == ("T01 the network is not compiled",)


def test_other_engines_and_devices_that_went_on_are_told(tmp_path: Path) -> None:
    """Those alike the first are not, nor twice the same; rows without any are as they were before there was this."""
    other = {**CERTIFICATE["engine"], "precision": "float32"}  # type: ignore[dict-item]
    went_on = [CERTIFICATE, {**CERTIFICATE, "engine": other}, {**CERTIFICATE, "engine": other}]
    went_on += [{**CERTIFICATE, "device": "cpu"}, {"commit": "fff"}]
    row = collect_run(fake_run(tmp_path / "a", NAME, FOUND, resumed=went_on))
    assert row.provenance["continued"] == [{"engine": other}, {"device": "cpu"}]
    assert len(row.provenance["resumed"]) == 5
    assert same(Row.from_dict(json.loads(json.dumps(row.to_dict()))), row)
    plain = collect_run(fake_run(tmp_path / "b", NAME, FOUND, resumed=[CERTIFICATE]))
    assert "continued" not in plain.provenance and plain.provenance["resumed"] == [CERTIFICATE["commit"]]


def test_a_failed_run_has_a_row_without_numbers(tmp_path: Path) -> None:
    row = collect_run(fake_run(tmp_path, NAME, FOUND, status="failed"))
    assert (row.status, row.scores, row.comparable) == ("failed", {}, False)


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    run = fake_run(tmp_path, NAME, FOUND, status="running")
    with pytest.raises(StateError, match=r"not finished \(its process is gone\); train on with --resume"):
        collect_run(run)
    with pytest.raises(StateError, match=r"\(a process is training it now\); wait for it$"), RunFolder(run).locked():
        collect_run(run)
    RunFolder(run).write_info(status="interrupted", reason="SIGTERM")
    with pytest.raises(StateError, match=r"\(interrupted: SIGTERM\); train on with --resume"):
        collect_run(run)


@pytest.mark.parametrize(
    ("epoch", "about", "fault"),
    [
        (1, {}, "of other weights than the run has now"),
        (2, {"recipe_hash": "0" * 16}, "of other weights than the run has now"),
        (2, {"whole_plan": False}, "not of the recipe's own attacks on the whole test set"),
    ],
)
def test_results_of_something_else_are_refused(tmp_path: Path, epoch: int, about: dict[str, Any], fault: str) -> None:
    path = fake_run(tmp_path, NAME, {})
    (path / "result-best.json").write_text(fake_result(NAME, "best", epoch, FOUND, **about).to_json())
    with pytest.raises(StateError, match=fault):
        collect_run(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cifar10_short_trades_awp", "cifar10_short"),
        ("cifar10_full_at", "cifar10_full"),
        ("cifar10_flagship", "cifar10_flagship"),
        ("digits_at", ""),
        ("cifar10_shorter_at", ""),
    ],
)
def test_protocol_of_a_name(name: str, expected: str) -> None:
    assert protocol(name) == expected


@pytest.mark.parametrize("content", [b"\xff{}", b"", b"{"])
def test_a_damaged_result_is_named(tmp_path: Path, content: bytes) -> None:
    path = fake_run(tmp_path, NAME, FOUND)
    (path / "result-best.json").write_bytes(content)
    with pytest.raises(StateError, match=r"result-best\.json "):
        collect_run(path)
    done = flatrock("compare", path / "result-best.json", path / "result-best.json")
    assert isinstance(done.exception, SystemExit) and "result-best.json" in done.output


def test_rows_come_back_from_the_file(tmp_path: Path) -> None:
    row, file = collect_run(fake_run(tmp_path, NAME, FOUND)), tmp_path / "rows.json"
    write_rows(file, [row])
    (back,) = read_rows(file) or []
    assert same(back, row)
    assert torch.equal(back.scores["best"].right["autoattack"], standing(490))
    assert file.stat().st_size < 6000


def test_damage_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    write_rows(file, [collect_run(fake_run(tmp_path, NAME, FOUND))])
    good = json.loads(file.read_text())

    def fault(change: Any) -> str:
        bad = json.loads(json.dumps(good))
        change(bad)
        file.write_text(json.dumps(bad))
        with pytest.raises(StateError) as caught:
            read_rows(file)
        return str(caught.value)

    score = ("rows", 0, "scores", "best")

    def at(content: Any) -> Any:
        for key in score:
            content = content[key]
        return content

    assert "accuracies do not follow" in fault(lambda c: at(c)["accuracy"].update({"pgd-20": 0.9}))
    assert "1000 flags for 5000" in fault(lambda c: at(c).update(n=5000))
    assert "is damaged" in fault(lambda c: c["rows"][0].pop("seed"))
    assert f"expected '{SCHEMA}'" in fault(lambda c: c.update(schema="flatrock.results/9"))
    file.write_text('{"runs": {}}')
    assert read_rows(file) is None
    file.write_text("{")
    with pytest.raises(StateError, match="not readable JSON"):
        read_rows(file)


def test_gaps_are_paired_by_sample() -> None:
    a, b = standing(600), standing(560)
    gap = paired(a, b)
    assert gap.mean == pytest.approx(0.04, abs=1e-15)
    # 40 of 1000 samples differ, all the same way: variance p (1 - p)
    assert gap.error == pytest.approx((0.04 * 0.96 / N) ** 0.5, rel=1e-12)
    assert gap.beyond_chance
    assert not replace(gap, mean=2 * gap.error).beyond_chance
    assert gap.samples == N
    with pytest.raises(StateError, match="5 and on 1000 samples"):
        paired(a, a[:5])


def test_seeds_share_the_chance_of_the_test_set_and_add_their_own() -> None:
    a, b = standing(600), standing(560)
    one, same = paired(a, b), mean_paired([(a, b)] * 3)
    assert (same.mean, same.error) == pytest.approx((one.mean, one.error), rel=1e-12), "the same again tells no more"
    # Gains of 4 and 6 points on 1,000 samples: 40 of them by 1 and 20 by a half; a spread of sqrt(2) points over seeds.
    two = mean_paired([(a, b), (standing(620), b)])
    of_samples = ((40 * 0.95**2 + 20 * 0.45**2 + (N - 60) * 0.05**2) / N) ** 0.5 / N**0.5
    of_seeds = 0.01 * 2**0.5 / 2**0.5
    assert two.mean == pytest.approx(0.05, abs=1e-12)
    assert two.error == pytest.approx((of_samples**2 + of_seeds**2) ** 0.5, rel=1e-12)
    with pytest.raises(StateError, match="5 and on 1000 samples"):
        mean_paired([(a, b), (a[:5], b[:5])])


def test_few_seeds_know_little_of_their_spread() -> None:
    """If seeds alone differ, chance reaches as far as Student's t of S - 1 freedoms; if samples alone do, 2 errors."""
    a, b = standing(600), standing(560)
    assert paired(a, b).reach == mean_paired([(a, b)] * 3).reach == 2
    everybody, nobody = torch.ones(N, dtype=torch.bool), torch.zeros(N, dtype=torch.bool)
    for seeds in (2, 3, 6):
        found = mean_paired([(everybody, nobody), *[(nobody, nobody)] * (seeds - 1)])
        assert found.reach == pytest.approx(student.ppf(norm.cdf(2), seeds - 1), rel=1e-9)
    two = mean_paired([(a, b), (standing(620), b)])
    of_seeds = 0.01
    of_samples = (two.error**2 - of_seeds**2) ** 0.5
    limit = (4 * of_samples**2 + (student.ppf(norm.cdf(2), 1) * of_seeds) ** 2) ** 0.5
    assert two.reach * two.error == pytest.approx(limit, rel=1e-9)


@pytest.mark.parametrize("spread", [0.01, 0.05])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_seeds_that_differ_are_seldom_called_methods_that_do(seeds: int, spread: float) -> None:
    """As below, but every seed has a quality of its own, far from what the samples leave to chance (0.016)."""
    gen, wrong, tries = torch.Generator().manual_seed(seeds), 0, 400
    for _ in range(tries):
        rates = torch.rand(2, N, generator=gen, dtype=torch.float64)
        luck = spread * torch.randn(seeds, 2, 1, generator=gen, dtype=torch.float64)
        found = [torch.rand(2, N, generator=gen, dtype=torch.float64) < rates + one for one in luck]
        wrong += mean_paired([(a, b) for a, b in found]).beyond_chance
    assert wrong / tries < 0.0455 + 3 * 0.0104


@pytest.mark.parametrize("seeds", [1, 2, 3, 5, 10])
def test_no_difference_is_seldom_called_one(seeds: int) -> None:
    """Two methods as good as each other, each right on an image at a rate of its own that all of its seeds share."""
    gen, wrong, tries = torch.Generator().manual_seed(seeds), 0, 400
    for _ in range(tries):
        rates = torch.rand(2, N, generator=gen, dtype=torch.float64)
        found = [[torch.rand(N, generator=gen, dtype=torch.float64) < rate for rate in rates] for _ in range(seeds)]
        wrong += mean_paired([(a, b) for a, b in found]).beyond_chance
    # 4.55 % of a normal variable; binomial error of 400 tries 1.04 %.
    assert wrong / tries < 0.0455 + 3 * 0.0104


def test_the_command_collects_adds_and_replaces(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    first = fake_run(tmp_path / "a", NAME, FOUND)
    base = fake_run(tmp_path / "a", "cifar10_short_trades", {**FOUND, "autoattack": 48})
    again = fake_run(tmp_path / "b", NAME, {**FOUND, "autoattack": 49.5})
    done = flatrock("results", first, base, "--out", out)
    assert done.exit_code == 0, done.output
    assert "49.00" in done.output
    assert flatrock("results", again, "--add", "--out", out).exit_code == 0
    rows = {row.recipe: row for row in read_rows(out) or []}
    assert len(rows) == 2
    assert rows[NAME].scores["best"].accuracy["autoattack"] == 0.495
    assert flatrock("results", again, "--out", out).exit_code == 0
    assert len(read_rows(out) or []) == 1


def test_a_changed_recipe_takes_nobodys_place(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    whole = fake_run(tmp_path / "a", NAME, FOUND)
    short, shorter = (fake_run(tmp_path / str(n), NAME, FOUND, overrides={"train.epochs": n}) for n in (3, 2))
    assert flatrock("results", whole, short, "--out", out).exit_code == 0
    assert flatrock("results", shorter, "--add", "--out", out).exit_code == 0
    assert flatrock("results", short, "--add", "--out", out).exit_code == 0
    rows = read_rows(out) or []
    assert [row.changes for row in rows] == [
        (),
        ("train.epochs: 2 instead of 30",),
        ("train.epochs: 3 instead of 30",),
    ]


def test_the_command_says_what_is_missing_or_changed(tmp_path: Path) -> None:
    bare = fake_run(tmp_path / "a", NAME, {})
    short = fake_run(tmp_path / "b", "cifar10_short_at", FOUND, overrides={"train.epochs": 3})
    done = flatrock("results", bare, short, "--out", tmp_path / "rows.json")
    assert done.exit_code == 0, done.output
    assert f"not evaluated {bare}; run `flatrock eval {bare}`, then this again" in done.output
    assert "changed cifar10_short_at: train.epochs: 3 instead of 30" in done.output


def test_the_command_refuses_two_runs_alike_and_other_files(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / part, NAME, FOUND) for part in "ab"]
    done = flatrock("results", *runs, "--out", tmp_path / "rows.json")
    assert done.exit_code == 2
    assert "same recipe and seed" in done.output
    other = tmp_path / "other.json"
    other.write_text("{}")
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    for file, words in itertools.product((other, damaged), ([], ["--add"])):
        before = file.read_text()
        done = flatrock("results", runs[0], *words, "--out", file)
        assert done.exit_code == 2
        assert f"{file} exists and is no results file; it is left alone" in done.output
        assert file.read_text() == before
    older = tmp_path / "older.json"
    older.write_text('{"schema": "flatrock.results/0", "rows": []}')
    done = flatrock("results", runs[0], "--add", "--out", older)
    assert done.exit_code == 2
    assert "expected 'flatrock.results/1'); write it again with `flatrock results`" in done.output
    assert "flatrock.results/0" in older.read_text()
    assert flatrock("results", runs[0], "--out", older).exit_code == 0, "it is written again"
    assert [row.recipe for row in read_rows(older) or []] == [NAME]
    done = flatrock("results", runs[0], "--out", tmp_path / "rows.yaml")
    assert done.exit_code == 2
    assert "rows.yaml must end in .json" in done.output


@pytest.mark.parametrize("held", [True, False])
def test_two_who_add_rows_at_once_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """The second begins when the first has read the file and not written it yet; without the lock its row is lost."""
    out = tmp_path / "rows.json"
    write_rows(out, [collect_run(fake_run(tmp_path, NAME, FOUND))])
    mine, other = (collect_run(fake_run(tmp_path, name, FOUND)) for name in ("digits_at", "digits_mart"))
    read, threads = module.read_rows, list[Thread]()

    def interrupted(path: Path) -> list[Row] | None:
        rows = read(path)
        if not threads:
            threads.append(Thread(target=add_rows, args=(out, [other])))
            threads[0].start()
            threads[0].join(0.5)
        return rows

    monkeypatch.setattr(module, "read_rows", interrupted)
    if not held:
        monkeypatch.setattr(module, "alone", lambda *words, **options: nullcontext())
    add_rows(out, [mine])
    threads[0].join()
    names = [row.recipe for row in read(out) or []]
    assert names == ([NAME, "digits_at", "digits_mart"] if held else [NAME, "digits_at"])
    assert not (tmp_path / ".rows.json.lock").exists()


def test_who_holds_a_results_file_for_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = fake_run(tmp_path, NAME, FOUND), tmp_path / "rows.json"
    monkeypatch.setattr("flatrock.core.locks.WAIT", 0.1)
    with locked(tmp_path / ".rows.json.lock", "adding rows to", out):
        done = flatrock("results", run, "--out", out, "--add")
    assert done.exit_code == 2 and not out.exists()
    assert f"process {os.getpid()} is adding rows to {out}; wait for it" in done.output
    assert flatrock("results", run, "--out", out, "--add").exit_code == 0
