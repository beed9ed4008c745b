"""Progress and tables, in a log file and on a terminal."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from flatrock.cli import console as module
from flatrock.cli.console import TerminalProgress, _line, show
from flatrock.core.progress import clock
from flatrock.reports.table import Table

LONG = "training cifar10_trades_linf_mobilenetv2[/b]"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """A terminal of 80 columns, and what was sent to it."""
    sent = StringIO()
    screen = Console(file=sent, force_terminal=True, width=80, markup=False, emoji=False, highlight=False)
    monkeypatch.setattr(module, "console", screen)
    return sent


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of a clock that moves by hand."""
    seconds = [0.0]
    monkeypatch.setattr("flatrock.cli.console.time.monotonic", lambda: seconds[0])
    return seconds


def test_log_names_the_task_once_and_gives_share_speed_eta_and_figures(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = TerminalProgress()
    progress.begin(LONG, 1000, 200)
    for _ in range(4):
        now[0] += 6.0
        progress.advance(30, "epoch 1/200  clean 42.0  robust 31.2")
    progress.end()
    assert capsys.readouterr().out.splitlines() == [
        f"  {LONG}",
        "   26%  5/s  ETA 0:02:28  epoch 1/200  clean 42.0  robust 31.2",
        "   32%  5/s  ETA 0:02:16  epoch 1/200  clean 42.0  robust 31.2",
    ]


def test_log_without_progress_has_no_eta(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "LOG_SECONDS", -1.0)
    progress = TerminalProgress()
    progress.begin("waiting", 10)
    progress.advance(0)
    assert "ETA unknown" in capsys.readouterr().out


def test_terminal_fits_80_columns_and_is_left_clean(terminal: StringIO) -> None:
    with pytest.raises(RuntimeError), TerminalProgress() as progress:
        progress.begin(LONG, 170_052_171)
        progress.advance(1_048_576, "epoch 1/200  clean 42.0  robust 31.2")
        progress.say("a line [/b] above")
        raise RuntimeError
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", terminal.getvalue())]
    assert max(len(line) for line in lines) <= 80
    assert any(line.strip() == f"{LONG[:41]}…  epoch 1/200  clean 42.0  robust 31.2" for line in lines)
    assert any("1048576/170052171" in line and "ETA" in line and "/s" in line for line in lines)
    assert "a line [/b] above" in [line.strip() for line in lines]
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1, "cursor is back"


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "training digits_at  epoch 3/30  clean 98.0  robust 74.3"),
        (50, "training dig…  epoch 3/30  clean 98.0  robust 74.3"),
        (36, "epoch 3/30  clean 98.0  robust 74.3"),
    ],
)
def test_figures_survive_on_narrow_terminals(width: int, line: str) -> None:
    assert _line("training digits_at", "epoch 3/30  clean 98.0  robust 74.3", width).plain == line


def test_a_dumb_terminal_gets_lines(
    now: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dumb = Console(force_terminal=True, markup=False, emoji=False, highlight=False, _environ={"TERM": "dumb"})
    monkeypatch.setattr(module, "console", dumb)
    with TerminalProgress() as progress:
        progress.begin(LONG, 100)
        now[0] += 11.0
        progress.advance(30, "robust 31.2")
    assert "30%" in capsys.readouterr().out


def test_table_shows_brackets_in_names_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    show(Table(("model", "pgd[a]"), (("x[/b]:x:", "50.00"),)), "title [/i]")
    out = capsys.readouterr().out
    for text in ("title [/i]", "pgd[a]", "x[/b]:x:", "50.00"):
        assert text in out


def rows_of(out: str) -> list[list[str]]:
    """The words of every line that holds cells."""
    return [line.split() for line in re.sub("[│┃]", " ", out).splitlines() if re.search(r"\w", line)]


def test_a_table_too_wide_is_turned(terminal: StringIO) -> None:
    attacks = [f"attack-{i}\n:steps=5" for i in range(9)]
    figures = [f"{i}0.25" for i in range(9)]
    show(Table(("model", *attacks), (("first", *figures), ("second", *["100.00"] * 9))))
    lines = rows_of(re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()))
    assert lines[0] == ["model", "first", "second"]
    assert lines[1:] == [[f"attack-{i}:steps=5", figure, "100.00"] for i, figure in enumerate(figures)]


def test_a_table_too_wide_and_too_long_is_printed_as_wide_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    names = tuple(f"attack-{i}" for i in range(20))
    rows = tuple((f"model-{i}", *["12.34"] * 20) for i in range(20))
    show(Table(("model", *names), rows))
    assert rows_of(capsys.readouterr().out) == [["model", *names], *map(list, rows)]


def test_a_table_that_fits_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show(Table(("model", "clean"), (("a", "99.60"), ("b", "8.40"))))
    assert rows_of(capsys.readouterr().out) == [["model", "clean"], ["a", "99.60"], ["b", "8.40"]]
    show(Table(("model", "clean"), ()))
    assert rows_of(capsys.readouterr().out) == [["model", "clean"]]


RUNS = [f"runs/a/very/long/way/optimizer.lr=0.{i}-objective=at-seed0" for i in (1, 2)]


def shown_on(sent: StringIO, *rows: tuple[str, ...]) -> list[list[str]]:
    show(Table(("run", "status", "clean", "more"), rows), turn=False, cut=True)
    return rows_of(re.sub(r"\x1b\[[0-9;]*m", "", sent.getvalue()))[1:]


def test_a_terminal_too_narrow_for_paths_shows_their_ends(terminal: StringIO) -> None:
    rows = [(name, "finished", "99.10", "x" * 20) for name in RUNS]
    found = shown_on(terminal, *rows)
    assert [line[0] for line in found] == [f"…{name[-33:]}" for name in RUNS], "80 less 13 of lines, 8, 5 and 20"
    assert [line[1:] for line in found] == [list(row[1:]) for row in rows]
    assert {len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()} == {80}


def test_paths_are_cut_no_further_than_tells_them_apart(terminal: StringIO) -> None:
    found = shown_on(terminal, *((name, "finished", "99.10", "x" * 60) for name in RUNS))
    assert [line[0] for line in found] == ["…1-objective=at-seed0", "…2-objective=at-seed0"]
    terminal.truncate(0)
    found = shown_on(terminal, ("runs/a/long/way/to/a", "finished", "99.10", "x" * 60))
    assert found[0][0] == "…ng/way/to/a", "no shorter than that"


def test_paths_that_fit_or_go_to_a_file_are_whole(terminal: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [name[5:] for name in RUNS]
    assert [line[0] for line in shown_on(terminal, *((name, "x", "99.10", "") for name in short))] == short
    monkeypatch.setattr(module, "console", Console(file=(sent := StringIO()), width=50))
    assert [line[0] for line in shown_on(sent, *((name, "finished", "99.10", "x" * 60) for name in RUNS))] == RUNS


def test_clock() -> None:
    assert [clock(s) for s in (0, 75.4, 7322)] == ["0:00:00", "0:01:15", "2:02:02"]


def test_a_slow_beginning_does_not_spoil_the_estimate(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Compiling comes once; what comes back, such as a probe after each 1000 units, belongs to the pace."""
    progress = TerminalProgress()
    progress.begin("training", 10_016)
    now[0] += 300.0
    progress.advance(16)
    for unit in range(2000):
        now[0] += 0.1
        progress.advance(1)
        if unit % 1000 == 999:
            now[0] += 60.0
            progress.advance(0)
    assert "  6.2/s  ETA 0:21:20" in capsys.readouterr().out.splitlines()[-1]


def test_the_first_of_many_units_says_nothing_about_the_rest(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """25 s of compiling in the first of 11,490 steps are not three days to come; one of two recipes is half of it."""
    progress = TerminalProgress()
    progress.begin("training", 11_490)
    now[0] += 25.0
    progress.advance(1)
    assert "  -/s  ETA unknown" in capsys.readouterr().out.splitlines()[-1]
    now[0] += 20.0
    progress.advance(10)
    assert "  0.5/s  ETA 6:22:38" in capsys.readouterr().out.splitlines()[-1]
    progress.begin("warming up", 2)
    now[0] += 25.0
    progress.advance(1)
    assert "   50%  0.04/s  ETA 0:00:25" in capsys.readouterr().out.splitlines()[-1]
