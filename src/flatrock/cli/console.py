"""How the command line looks: progress with ETA and throughput, tables, errors."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table as RichTable
from rich.text import Text

from flatrock.core.errors import FlatrockError
from flatrock.core.processes import Terminated, terminable
from flatrock.core.progress import clock
from flatrock.reports.table import Table

# Paths, names and messages are shown as they are: brackets and colons in them are not markup.
console = Console(markup=False, emoji=False, highlight=False)
errors = Console(markup=False, emoji=False, highlight=False, stderr=True)
# A line to be printed: texts, or texts and their styles.
Line = tuple[str | tuple[str, str], ...]
# Without a terminal (a log file, CI) a line is printed this often instead of a moving bar.
LOG_SECONDS = 10.0
# Work of many units often begins with something slow that does not come back: after the first unit (what is compiled)
# and after so many (what is tuned) the clock starts anew.
WARM = 16
# The shortest that paths are cut to, the ellipsis included.
SHORTEST = 12
# Wider than any table.
UNBOUNDED = 10_000


def say(*parts: str | tuple[str, str], to: Console | None = None) -> None:
    """Print a line as it is, without breaking it; a part is text, or text and its style."""
    (to or console).print(Text.assemble(*parts), soft_wrap=True)


class _TwoLines(Bars):
    """What is done and the current figures, and below them the bar: one line would be wider than many terminals."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn."""
        for task in self.tasks:
            yield _line(task.description, task.fields["note"], self.console.width)
        yield self.make_tasks_table(self.tasks)


def _line(task: str, note: str, width: int) -> Text:
    """The task and its figures; where both are too wide the name of the task is cut short, which is known anyway."""
    name, room = Text(task), width - cell_len(note) - 2
    name.truncate(max(room, 1), overflow="ellipsis")
    parts = (name, f"  {note}") if room > 3 else (note,)
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


class TerminalProgress:
    """A moving bar on a terminal, a line now and then elsewhere; both with ETA and throughput.

    Used as a context manager it removes its bar however the work ends.
    """

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._task = ""
        self._named = False
        self._total = self._done = 0
        self._told = 0.0
        self._mark = (0.0, 0)  # since when the pace is measured, and how much was done then
        self._anew: list[int] = []  # how much is done when that is set anew

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def begin(self, task: str, total: int, done: int = 0) -> None:
        """Start a bar."""
        self.end()
        self._task, self._named, self._total, self._done = task, False, total, done
        self._told = time.monotonic()
        self._mark, self._anew = (self._told, done), [done + 1, done + WARM] if total - done > WARM else []
        if console.is_terminal and not console.is_dumb_terminal:  # rich draws no bar on a dumb one
            self._bars = _TwoLines(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]}", markup=False),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._bars.add_task(task, total=total, completed=done, note="", speed="")
            self._bars.start()

    def advance(self, units: int, note: str = "") -> None:
        """Move the bar."""
        self._done += units
        now = time.monotonic()
        speed = self._speed(now)
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], advance=units, note=note, speed=_rate(speed))
        elif now - self._told > LOG_SECONDS:
            self._told = now
            if not self._named:
                say(f"  {self._task}")
                self._named = True
            left = (self._total - self._done) / speed if speed > 0 else math.inf
            say(f"  {100 * self._done / max(self._total, 1):3.0f}%  {_rate(speed)}  ETA {clock(left)}  {note}")

    def _speed(self, now: float) -> float:
        """Units per second; 0: not known yet."""
        begun, before = self._mark
        passed = [done for done in self._anew if before < done <= self._done]
        if passed:
            self._mark = now, self._done
        if passed and passed == self._anew[:1]:  # one unit, and all that came before it
            return 0.0
        return (self._done - before) / max(now - begun, 1e-9)

    def end(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, text: str) -> None:
        """Print above the bar."""
        say(text)


def _rate(speed: float) -> str:
    if speed == 0:
        return "-/s"
    return f"{speed:.0f}/s" if speed >= 10 else f"{speed:.2g}/s"


def human(seconds: float) -> str:
    """5400 -> '1.5 hours': of estimates."""
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1):.0f} s"


def show(table: Table, title: str = "", *, turn: bool = True, cut: bool = False) -> None:
    """Print a table; the first column is text, the others are numbers, of which no digit is ever cut off.

    One too wide is turned, so that columns become lines; if that does not help, or is not wanted because there are many
    lines, it is printed as wide as it is. With `cut`, paths in the first column lose their beginnings on a terminal,
    where wide lines break; a file or a program that reads gets them whole.
    """
    rich = _drawn(table, title)
    if cut and console.is_terminal and (more := _width(rich) - console.width) > 0:
        rich = _drawn(_cut(table, more), title)
    if turn and _width(rich) > console.width:
        turned = _drawn(_turned(table), title)
        rich = turned if _width(turned) <= console.width else rich
    rich.width = _width(rich)
    console.print(rich, crop=False)


def _drawn(table: Table, title: str) -> RichTable:
    rich = RichTable(title=title or None, title_justify="left", header_style="bold")
    for i, name in enumerate(table.header):
        rich.add_column(name, justify="left" if i == 0 else "right")
    for row in table.rows:
        rich.add_row(*row)
    return rich


def _width(rich: RichTable) -> int:
    """Columns of the screen it takes with every cell in full."""
    return rich.__rich_measure__(console, console.options.update(width=UNBOUNDED)).maximum


def _cut(table: Table, more: int) -> Table:
    """The first column narrower by so much, or by as much as leaves ends that tell the paths apart."""
    names = [row[0] for row in table.rows]
    longest = max(map(len, names))
    ends = ([_end(name, room) for name in names] for room in range(max(longest - more, SHORTEST), longest))
    chosen = next((cut for cut in ends if len(set(cut)) == len(set(names))), names)
    return Table(table.header, tuple((name, *row[1:]) for name, row in zip(chosen, table.rows, strict=True)))


def _end(name: str, room: int) -> str:
    return name if len(name) <= room else f"…{name[1 - room :]}"


def _turned(table: Table) -> Table:
    """Lines become columns; names that were broken to be narrow come in one piece."""
    columns = zip(table.header, *table.rows, strict=True)
    first, *others = [tuple(cell.replace("\n", "") for cell in column) for column in columns]
    return Table(first, tuple(others))


@contextmanager
def friendly(after_interrupt: str = "") -> Iterator[None]:
    """Errors made for people, and of the disk, are one message and exit code 2; Ctrl-C and SIGTERM say how to go on."""
    try:
        with terminable():
            yield
    except FlatrockError as error:
        _fail(str(error))
        raise typer.Exit(2) from error
    except BrokenPipeError:
        raise  # the reader of our output has gone (`flatrock ls | head`): there is no one to tell
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; free space or check the path and its permissions, then try again")
        raise typer.Exit(2) from error
    except (KeyboardInterrupt, Terminated) as error:
        asked = isinstance(error, Terminated)
        word = "interrupted by SIGTERM" if asked else "interrupted"
        say(f"\n{word}{'; ' if after_interrupt else ''}{after_interrupt}", to=errors)
        raise typer.Exit(143 if asked else 130) from error


def _fail(text: str) -> None:
    say(("error: ", "bold red"), text, to=errors)
