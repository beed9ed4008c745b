"""How every figure looks: colours that colour-blind readers tell apart, plain axes, captions that say what was done."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from flatrock.core.files import write_atomic
from flatrock.core.numbers import in_levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Beyond colour: lines and marks that differ in grey, too.
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "D", "^", "v", "P", "X")
# For surfaces; rises evenly in brightness and is the same to every reader.
SURFACE = "cividis"
# What fits into a line of a caption.
LETTERS_PER_INCH = 17
DPI = 150
# More names than these would lie on the curves of their panel.
MOST_INSIDE = 6
# A line of a legend, in inches.
LINE = 0.17


def blank(width: float, height: float) -> Figure:
    """An empty figure in inches, without a window system and without global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def line_style(i: int) -> dict[str, Any]:
    """Colour and line of the i-th of several curves; the line changes when the colours are used up."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[(i // len(COLOURS)) % len(LINES)]}


def mark_of(i: int) -> str:
    """The mark of the i-th of several points; a colour comes back with another one."""
    return MARKS[(i + i // len(COLOURS)) % len(MARKS)]


def colours(count: int) -> Sequence[str]:
    """So many colours that differ: those of the palette, or if it has fewer the hues of a rainbow."""
    if count <= len(COLOURS):
        return COLOURS
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["turbo"](0.05 + 0.9 * i / (count - 1))) for i in range(count)]


def dress(axes: Axes, title: str, x: str, y: str, *, whole_x: bool = False) -> None:
    """Title and labels (with units) in one size, a faint grid, no frame."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    if whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)


def legend(*panels: Axes, title: str = "") -> None:
    """The names of what the panels show, each in its own; beside them, in a wider figure, where one has many."""

    how: dict[str, Any] = {"frameon": False, "fontsize": 8, "title": title or None, "title_fontsize": 8}
    named = [panel.get_legend_handles_labels() for panel in panels]
    if max(len(names) for _, names in named) <= MOST_INSIDE:
        for panel in panels:
            panel.legend(**how)
        return
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    how |= {"handles": [one for handles, _ in named for one in handles]}
    how |= {"labels": [name for _, names in named for name in names]}
    fit = max(1, int(figure.get_figheight() / LINE) - 2)
    beside = figure.legend(loc="outside right upper", ncols=-(-len(how["labels"]) // fit), **how)
    figure.set_figwidth(figure.get_figwidth() + beside.get_window_extent().width / figure.dpi)


def finish(figure: Figure, text: str, path: Path | str) -> Path:
    """Write the caption below a figure, and the figure to disk as its name ends: .png or .svg."""
    if text:
        caption(figure, text)
    return store(figure, path)


def caption(figure: Figure, text: str) -> None:
    """What was done, in small letters below."""
    text = fill(text, width=int(LETTERS_PER_INCH * figure.get_figwidth()))
    figure.supxlabel(text, fontsize=7.5, color="0.35", x=0.01, ha="left")


def store(figure: Figure, path: Path | str) -> Path:
    """The figure as it is; the same figure gives the same file."""
    from matplotlib import rc_context

    path = Path(path)
    kind = path.suffix.removeprefix(".")
    # An SVG says when it was made and draws names of its parts at random, unless told not to.
    dateless: Mapping[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {}
    content = BytesIO()
    with rc_context({"svg.hashsalt": "flatrock"}), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; that cannot be cured here, and the table has it.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(content, format=kind, dpi=DPI, **dateless)
    write_atomic(path, content.getvalue())
    return path


def radius(eps: float) -> str:
    """8/255 where it is that, as papers write it; but 0.2, not 51/255."""
    return in_levels(eps) or f"{eps:.4g}"
