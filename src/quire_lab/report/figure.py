"""Plots with one palette that is safe for colour-blind readers and legible in grey."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench.serve_report import plain_log as plain_log
from quire.core.errors import ConfigError
from quire_lab.report.interval import Interval

DPI = 160
GREY = "#595959"  # of second importance: grids, notes
LIGHT = "#d9d9d9"


@dataclass(frozen=True, slots=True)
class Picture:
    """`draw` fills an empty matplotlib figure; title and take-away are set above it."""

    name: str  # of the file, without its ending; the experiment's own name for its first picture
    title: str
    take_away: str  # one line
    draw: Callable[[Any], None]
    width: float = 9.0  # inches: it is read at this size when printed
    height: float = 4.2


class Look(NamedTuple):
    """The style of one series: distinct by colour, and in a grey print by marker, line and hatching."""

    color: str
    marker: str
    line: str
    hatch: str


# Okabe and Ito's colours, in an order whose greys differ as well
LOOKS = (
    Look("#0072B2", "o", "-", ""),  # blue
    Look("#D55E00", "s", "--", "///"),  # vermilion
    Look("#009E73", "^", "-.", "..."),  # green
    Look("#E69F00", "D", ":", "xxx"),  # orange
    Look("#CC79A7", "v", (0, (5, 1, 1, 1, 1, 1)), "\\\\\\"),  # type: ignore[arg-type] # purple
    Look("#56B4E9", "P", (0, (1, 1)), "ooo"),  # type: ignore[arg-type] # sky blue
    Look("#000000", "X", "-", "++"),
    Look("#F0E442", "*", "--", "**"),  # yellow: last, it is faint on paper
)
# the same thing looks the same in every picture
NAMED = {
    "paged": 0, "max": 1, "pow2": 3, "oracle": 2,
    "continuous": 0, "static": 1, "dynamic": 2, "none": 3, "ft": 4,
    "swap": 1, "recompute": 0, "auto": 2,
}  # fmt: skip
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
}


def look(series: int | str) -> Look:
    """Of a series by its number, or of one of NAMED."""
    return LOOKS[(NAMED[series] if isinstance(series, str) else series) % len(LOOKS)]


def line_style(series: int | str) -> dict[str, Any]:
    """For `axis.plot`."""
    style = look(series)
    return {"color": style.color, "marker": style.marker, "linestyle": style.line}


def bar_style(series: int | str) -> dict[str, Any]:
    """For `axis.bar`: hatched, so that a grey print tells bars apart."""
    style = look(series)
    return {"color": style.color, "hatch": style.hatch, "edgecolor": "white", "linewidth": 0.5}


def error_bars(intervals: Sequence[Interval]) -> list[list[float]]:
    """For `yerr=`: from each median down and up to the ends of its interval."""
    ends = [interval.ends_or_median() for interval in intervals]
    down = [interval.median - low for interval, (low, _) in zip(intervals, ends, strict=True)]
    up = [high - interval.median for interval, (_, high) in zip(intervals, ends, strict=True)]
    return [down, up]


def check_matplotlib() -> None:
    """ConfigError if matplotlib is missing, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("the laboratory draws with matplotlib: pip install 'quire[bench]'") from None


def write_picture(picture: Picture, folder: Path, ending: str = ".png") -> Path:
    """As a file named after it; its ending says the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = folder / f"{picture.name}{ending}"
    with _styled():
        figure = Figure(figsize=(picture.width, picture.height), layout="constrained")
        FigureCanvasAgg(figure)  # files only: no display is needed
        picture.draw(figure)
        # the empty second line is the take-away's
        figure.suptitle(f"{picture.title}\n", x=0.01, ha="left", fontsize=11, fontweight="bold")
        _subtitle(figure, picture)
        try:
            figure.savefig(path, dpi=DPI)
        except OSError as error:
            raise ConfigError(f"{path}: the picture cannot be written ({error})") from error
    return path


def _subtitle(figure: Any, picture: Picture) -> None:
    """Under the title, in the line that it left free: 11 points of title in a line of 1.2."""
    points_down = 1.55 * 11 + 3
    figure.text(
        0.01,
        1 - points_down / 72 / picture.height,
        picture.take_away,
        ha="left",
        va="top",
        fontsize=9,
        color=GREY,
    )


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield
