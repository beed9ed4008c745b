"""How the command line looks: progress with ETA and throughput, tables, errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table as RichTable

from flatrock.core.errors import FlatrockError
from flatrock.reports.table import Table

console = Console()
errors = Console(stderr=True)
# Without a terminal (a log file, CI) a line is printed this often instead of a moving bar.
LOG_SECONDS = 10.0


class TerminalProgress:
    """A moving bar on a terminal, a line now and then elsewhere; both with ETA and throughput."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._task = ""
        self._total = self._done = self._first = 0
        self._began = self._told = 0.0

    def begin(self, task: str, total: int, done: int = 0) -> None:
        """Start a bar."""
        self.end()
        self._task, self._total, self._done, self._first = task, total, done, done
        self._began = self._told = time.monotonic()
        if console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
                transient=True,
            )
            self._bars.add_task(task, total=total, completed=done, note="", speed="")
            self._bars.start()

    def advance(self, units: int, note: str = "") -> None:
        """Move the bar."""
        self._done += units
        spent = time.monotonic() - self._began
        speed = (self._done - self._first) / max(spent, 1e-9)
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], advance=units, note=note, speed=f"{speed:.0f}/s")
        elif time.monotonic() - self._told > LOG_SECONDS:
            self._told = time.monotonic()
            left = (self._total - self._done) / max(speed, 1e-9)
            share = 100 * self._done / max(self._total, 1)
            console.print(f"{self._task}: {share:.0f}%  {speed:.0f}/s  ETA {left:.0f} s  {note}", highlight=False)

    def end(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, text: str) -> None:
        """Print above the bar."""
        console.print(escape(text), highlight=False)


def show(table: Table, title: str = "") -> None:
    """Print a table; the first column is text, the others are numbers."""
    rich = RichTable(title=title or None, title_justify="left", header_style="bold")
    for i, name in enumerate(table.header):
        rich.add_column(name, justify="left" if i == 0 else "right")
    for row in table.rows:
        rich.add_row(*[escape(cell) for cell in row])
    console.print(rich)


@contextmanager
def friendly() -> Iterator[None]:
    """Errors made for people are printed as one message and exit code 2; Ctrl-C says how to go on."""
    try:
        yield
    except FlatrockError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        errors.print("\ninterrupted; the same command with --resume continues from the last saved state")
        raise typer.Exit(130) from error
