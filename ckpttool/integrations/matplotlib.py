"""Matplotlib: pictures of bars, heat maps, lines and runs as SVG or PNG, or as HTML with a table below.

The same numbers give the same bytes.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from ckpttool.core.errors import MissingPackage, UsageError
from ckpttool.core.plugins import install_command
from ckpttool.core.text import amount, printable, without_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from ckpttool.runs.listing import ListedCheckpoint

KINDS = ("svg", "png", "html")
MARK = "ckpttool picture"
"""Mark among a picture's first bytes: only a file with it is ever replaced by a picture."""
_LONGEST_NAME = 60
_WIDTH = 10.0  # inches
_ROW = 0.22
_LINES_HEIGHT = 2.4
_MARGIN = 1.0
_DPI = 100
_MOST_TICKS, _MOST_ROWS = 60, 120
_MOST_WRITTEN = 12  # columns whose fields have room for their values
_SHORT_LABELS = 80  # characters that fit beside one another
_COLOUR, _MAP = "#3465a4", "viridis"
_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }
svg { max-width: 100%; height: auto }
table { border-collapse: collapse }
th, td { padding: .15em .8em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
"""


class Drawing(ABC):
    """A panel of a picture."""

    title: str

    @property
    @abstractmethod
    def height(self) -> float:
        """Return its height in inches."""

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw on axes that have their title."""


def kind_of(path: str) -> str:
    """Return the kind of picture of a file's suffix.

    Raises:
        UsageError: It has another suffix.
    """
    kind = os.path.splitext(path)[1].lower().removeprefix(".")
    if kind not in KINDS:
        raise UsageError(f"--plot {path}: expected a name that ends in .svg, .png or .html")
    return kind


def check_can_draw(path: str) -> None:
    """Require Matplotlib, before anything long begins.

    Raises:
        MissingPackage: It is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - only tests the import
    except ImportError as error:
        raise MissingPackage(path, "plots need matplotlib", expected=install_command("plot")) from error


def picture(kind: str, title: str, drawings: Sequence[Drawing], table: Sequence[Sequence[str]] = ()) -> bytes:
    """Return the bytes of a picture: drawings below one another, and a title above them.

    Args:
        kind: ``svg``, ``png`` or ``html``.
        title: Title of the picture.
        drawings: At least one.
        table: Rows of the table below an HTML page's picture; the first has the headings.
    """
    if kind == "html":
        return _page(title, _figure("svg", "", drawings), table)
    return _figure(kind, title, drawings)


def _page(title: str, svg: bytes, table: Sequence[Sequence[str]]) -> bytes:
    heading = escape(printable(title))
    inline = svg[svg.index(b"<svg") :].decode()  # HTML allows no XML declaration inside
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="{MARK}">',
        f"<title>{heading}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{heading}</h1>",
        inline.rstrip(),
    ]
    if table:
        parts.append("<table>")
        for number, cells in enumerate(table):
            tag = "td" if number else "th"
            row = "".join(f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells)
            parts.append(f"<tr>{row}</tr>")
        parts.append("</table>")
    parts.append("</body></html>\n")
    return "\n".join(parts).encode()


# matplotlib -----------------------------------------------------------------------------------------


def _figure(kind: str, title: str, drawings: Sequence[Drawing]) -> bytes:
    from matplotlib.figure import Figure

    with _own_settings():
        heights = [one.height for one in drawings]
        figure = Figure(
            figsize=(_WIDTH, sum(heights) + 0.2 * len(_title(title).splitlines())), layout="constrained"
        )
        if title:
            figure.suptitle(_title(title))
        axes = figure.subplots(len(drawings), 1, squeeze=False, height_ratios=heights)[:, 0]
        for one, place in zip(drawings, axes, strict=True):
            place.set_title(label(one.title, 2 * _LONGEST_NAME))
            one.draw(place)
        out = io.BytesIO()
        metadata = {"Creator": MARK, "Date": None} if kind == "svg" else {"Software": MARK}
        figure.savefig(out, format=kind, dpi=_DPI, metadata=metadata)
        return out.getvalue()


@contextmanager
def _own_settings() -> Iterator[None]:
    """Use settings that give the same picture on each machine, with names as they are."""
    # A user's ``matplotlibrc`` is ignored. A fixed salt makes the identifiers in an SVG reproducible, and
    # texts aren't drawn as outlines. A ``$`` in a name doesn't begin a formula.
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.hashsalt": MARK,
                "svg.fonttype": "none",
                "text.parse_math": False,
                "font.size": 9,
                "axes.titlelocation": "left",
            }
        )
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
        yield


# Drawings -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bars(Drawing):
    """A bar for each name, top down; None draws no bar."""

    title: str
    names: Sequence[str]
    values: Sequence[float | None]

    @property
    def height(self) -> float:
        return _height_of_rows(len(self.names))

    def draw(self, axes: Axes) -> None:
        """Draw the bars, and in words those that have no length."""
        lengths = [0.0 if value is None or not math.isfinite(value) else value for value in self.values]
        axes.barh(range(len(lengths)), lengths, color=_COLOUR)
        axes.set_yticks(range(len(lengths)), [label(name) for name in self.names])
        axes.set_ylim(len(lengths) - 0.4, -0.6)
        axes.grid(axis="x", alpha=0.3)
        left = axes.get_yaxis_transform()
        for at, value in enumerate(self.values):
            if value is not None and not math.isfinite(value):
                axes.text(0.01, at, str(value), transform=left, va="center", color="#a40000")


@dataclass(frozen=True, slots=True)
class HeatMap(Drawing):
    """Heat map: a field for each row and column, with its value if it fits; None is left empty.

    With a logarithmic scale, each power of ten has the same range of colours.

    Attributes:
        first_column: The position of the first column on the axis, which lines below may share.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    is_logarithmic: bool = False
    first_column: int = 0

    @property
    def height(self) -> float:
        return _height_of_rows(len(self.rows))

    def draw(self, axes: Axes) -> None:
        """Draw the fields, and the scale of their colours."""
        from matplotlib.colors import LogNorm
        from matplotlib.ticker import FuncFormatter, NullFormatter

        values = [[_gap(value) for value in row] for row in self.values] or [[math.nan]]
        positive = [value for row in values for value in row if value > 0]
        is_wide = bool(positive) and max(positive) > 10 * min(positive)
        norm = LogNorm(min(positive), max(positive)) if self.is_logarithmic and is_wide else None
        last = self.first_column + len(values[0])
        image = axes.imshow(
            values,
            aspect="auto",
            interpolation="nearest",
            cmap=_MAP,
            norm=norm,
            extent=(self.first_column - 0.5, last - 0.5, len(values) - 0.5, -0.5),
        )
        axes.set_xlim(-0.5, last - 0.5)
        every = max(1, math.ceil(len(self.rows) / _MOST_ROWS))
        axes.set_yticks(range(0, len(self.rows), every), [label(name) for name in self.rows[::every]])
        _name_points(axes, self.columns, self.first_column)
        if len(self.columns) <= _MOST_WRITTEN and every == 1:
            self._write(axes, image)
        # The scale is inset, so that lines in a panel below have the same width as the map.
        place = axes.inset_axes((1.01, 0, 0.015, 1))
        scale = axes.figure.colorbar(
            image, cax=place, format=FuncFormatter(lambda value, position: amount(value))
        )
        scale.ax.yaxis.set_minor_formatter(NullFormatter())

    def _write(self, axes: Axes, image: AxesImage) -> None:
        """Write each value into its field, dark on light or light on dark."""
        for y, row in enumerate(self.values):
            for x, value in enumerate(row):
                if value is not None:
                    is_light = image.norm(_gap(value)) > 0.6
                    colour = "black" if is_light else "white"
                    place = (x + self.first_column, y)
                    axes.text(*place, amount(value), ha="center", va="center", color=colour, fontsize=7)


@dataclass(frozen=True, slots=True)
class Lines(Drawing):
    """Series over the same points; None leaves a gap."""

    title: str
    points: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    axis: str = ""

    @property
    def height(self) -> float:
        return _LINES_HEIGHT

    def draw(self, axes: Axes) -> None:
        """Draw a line for each series, with a legend for several."""
        for name, values in self.series.items():
            axes.plot(range(len(values)), [_gap(value) for value in values], marker=".", label=label(name))
        axes.set_xlim(-0.5, max(len(self.points), 1) - 0.5)
        _name_points(axes, self.points)
        axes.set_xlabel(label(self.axis))
        axes.grid(alpha=0.3)
        if len(self.series) > 1:
            axes.legend()


# Runs -----------------------------------------------------------------------------------------------

_HEIGHT = 4.2  # inches
_COLOURS = ("#3465a4", "#c17d11", "#75507b", "#4e9a06", "#a40000", "#06989a")
_BAD = "#cc0000"
_LOGARITHMIC_FROM = 20.0
"""A metric whose largest value is that many times its smallest has a logarithmic scale."""
_LABEL_LENGTH = 32
_LABEL_ROOM = 0.045
"""Smallest distance between two labels, as a fraction of the height of the axes."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """A line of a picture: one series, in the order of the axis.

    Attributes:
        name: Name at its end.
        points: Position, value and checkpoint of each that has both.
        faults: Positions of those that are damaged or incomplete.
    """

    name: str
    points: Sequence[tuple[float, float, ListedCheckpoint]]
    faults: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class RunsPanel(Drawing):
    """A metric of all runs, with their names at the lines; checkpoints that a policy removes are hollow."""

    title: str
    axis: str
    runs: Sequence[RunLine]
    height: float = _HEIGHT

    def draw(self, axes: Axes) -> None:
        """Draw a line a run, a mark a checkpoint, and a legend if marks differ."""
        values = [y for run in self.runs for _, y, _ in run.points]
        if min(values) > 0 and max(values) > _LOGARITHMIC_FROM * min(values):
            axes.set_yscale("log")
        for at, run in enumerate(self.runs):
            self._draw_run(axes, run, _COLOURS[at % len(_COLOURS)])
        axes.set_xlabel(self.axis)
        axes.grid(alpha=0.3)
        axes.margins(x=0.02)
        handles, names = axes.get_legend_handles_labels()
        if names:
            axes.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
            axes.set_title("")
            axes.set_ylabel(label(self.title))
        self._name_runs(axes)

    def _draw_run(self, axes: Axes, run: RunLine, colour: str) -> None:
        axes.plot([x for x, _, _ in run.points], [y for _, y, _ in run.points], color=colour, linewidth=1.2)
        has_policy = any(row.kept is not None for _, _, row in run.points)
        known = {*axes.get_legend_handles_labels()[1]}
        marks = {
            "keep": ([one for one in run.points if one[2].kept != ()], "o", colour, colour, 4),
            "remove": ([one for one in run.points if one[2].kept == ()], "o", "white", colour, 4),
            "best": ([one for one in run.points if one[2].is_best], "*", "#f5c211", "black", 12),
        }
        for name, (points, marker, face, edge, size) in marks.items():
            # One legend for all runs: each kind of mark is labelled once, "keep" only if a policy decides.
            has_label = (name != "keep" or has_policy) and name not in known
            if points:
                axes.plot(
                    [x for x, _, _ in points],
                    [y for _, y, _ in points],
                    marker,
                    markerfacecolor=face,
                    markeredgecolor=edge,
                    markeredgewidth=0.8,
                    markersize=size,
                    label=name if has_label else None,
                )
        if run.faults:  # at the foot, where each has a position
            foot = axes.get_xaxis_transform()
            fault_label = None if "damaged or incomplete" in known else "damaged or incomplete"
            axes.plot(
                run.faults,
                [0.0] * len(run.faults),
                "x",
                color=_BAD,
                transform=foot,
                clip_on=False,
                label=fault_label,
            )

    def _name_runs(self, axes: Axes) -> None:
        """Label each run at the end of its line, without overlaps."""
        # From the lowest end up, each label is moved just above the one below it. Heights are compared as
        # fractions of the axes, since the distance of two values depends on the scale, which may be
        # logarithmic.
        axes.autoscale_view()
        inside = axes.transScale + axes.transLimits  # from values to fractions of the axes
        ends = [(inside.transform(run.points[-1][:2])[1], place) for place, run in enumerate(self.runs)]
        lowest = -math.inf
        for height, at in sorted(ends):
            lowest = max(height, lowest + _LABEL_ROOM)
            axes.text(
                1.01,
                lowest,
                label(self.runs[at].name, _LABEL_LENGTH),
                transform=axes.transAxes,
                va="center",
                color=_COLOURS[at % len(_COLOURS)],
            )


# Axes and names -------------------------------------------------------------------------------------


def _height_of_rows(count: int) -> float:
    return _MARGIN + _ROW * min(max(count, 1), _MOST_ROWS)


def _name_points(axes: Axes, names: Sequence[str], first: int = 0) -> None:
    every = max(1, math.ceil(len(names) / _MOST_TICKS))
    labels = [label(name) for name in names[::every]]
    is_short = max(map(len, labels), default=0) * len(labels) <= _SHORT_LABELS
    turned: dict[str, Any] = {} if is_short else {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(first, first + len(names), every), labels, **turned)


def _gap(value: Any) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _title(text: str) -> str:
    """Return a title in as many lines as it needs; only an endless one is cut."""
    return "\n".join(wrap(printable(text), 2 * _LONGEST_NAME, max_lines=3, placeholder=" …"))


def label(name: str, room: int = _LONGEST_NAME) -> str:
    """Return a name out of a file as a picture shows it: printable, and without its middle if it is long."""
    return without_middle(printable(name), room, _columns)


def _columns(text: str) -> int:
    """Return the width of a text in characters; a Chinese, Japanese or Korean one counts as two."""
    return sum(1 + (east_asian_width(character) in "FW") for character in text)
