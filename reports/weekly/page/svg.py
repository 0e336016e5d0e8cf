"""SVG paths, and charts with axes that matplotlib draws and this module shortens. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from io import StringIO
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup, escape

Point = tuple[float, float]


def path(points: Iterable[Point | None], *, decimals: int = 0) -> str:
    """The path of a line. A None makes a gap; an isolated point becomes a dot."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return "".join(run_path(run, decimals=decimals) for run in runs if run)


def run_path(run: Sequence[Point], *, decimals: int, closed: bool = False) -> str:
    """The path of one line in relative coordinates. Rounding errors do not accumulate."""
    scale = 10**decimals
    steps = [(round(x * scale), round(y * scale)) for x, y in run]
    first, rest = steps[0], steps[1:]
    parts = [f"M{_short(first[0], scale)} {_short(first[1], scale)}"]
    if not rest:
        return parts[0] + "h0"
    at = first
    for number, step in enumerate(rest):
        x, y = (_short(step[axis] - at[axis], scale) for axis in (0, 1))
        parts.append(f"{'l' if number == 0 else _between(x)}{x}{_between(y)}{y}")
        at = step
    return "".join(parts) + ("z" if closed else "")


def _between(number: str) -> str:
    """The separator before a number. A minus sign needs none."""
    return "" if number.startswith("-") else " "


def _short(steps: int, scale: int) -> str:
    """The shortest decimal number for a number of steps, each of size 1/`scale`."""
    if steps % scale == 0:
        return str(steps // scale)
    return (
        f"{steps / scale:g}".replace("0.", ".", 1) if abs(steps) < scale else f"{steps / scale:g}"
    )


# --- Charts with axes, drawn by matplotlib and stripped to what a page needs. Pure ----------------
#
# Every artist carries its role in its `gid`, which becomes the class of its path: colours, widths
# and dashes are the stylesheet's, for both schemes. Nothing else of matplotlib's output is kept:
# no ids, styles, clips, dates. So the same values give the same text.


WIDTH, HEIGHT = 360, 190
"""Width and height of a chart in SVG units. On a phone, a unit is about one pixel."""

TEXT_PX = 11
SVG = "{http://www.w3.org/2000/svg}"
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
ANCHOR = re.compile(r"text-anchor: (\w+)")
ROLES = frozenset(("p99", "p50", "bars", "area", "bound", "cmax", "cmax-band", "peak", "peak-words",
                   "cmax-words", "grid", "axis", "unseen"))  # fmt: skip
"""CSS classes that parts of a chart may have."""

LEFT, RIGHT, TOP, BOTTOM = 0.145, 0.985, 0.93, 0.13

STYLE = {
    "font.size": TEXT_PX,
    "path.simplify": False,  # it would drop lone points
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.usetex": False,
}
"""Settings for matplotlib: text stays text instead of becoming paths, and dollar signs do not start
formulas."""

Edges = tuple[float, float]


Ticks = list[tuple[float, str]]
"""Labelled positions on an axis."""


class Pen:
    """Draws on matplotlib's axes. `role` becomes the CSS class of the drawn element."""

    def __init__(self, axes: Any) -> None:  # noqa: ANN401 - untyped where it matters
        self._axes = axes
        self._along = axes.get_xaxis_transform()

    def line(self, x: Sequence[float], y: Sequence[float], role: str) -> None:
        """Draw a line through points. A NaN makes a gap."""
        self._axes.plot(x, y, gid=role)

    def area(self, x: Sequence[float], y: Sequence[float], role: str) -> None:
        """Draw a filled outline."""
        self._axes.fill(x, y, gid=role)

    def upright(self, x: float, height: float, role: str) -> None:
        """Draw a vertical line from the bottom to `height`, a share of the chart's height."""
        self._axes.plot((x, x), (0, height), transform=self._along, gid=role)

    def column(self, low: float, high: float, role: str) -> None:
        """Fill the interval from `low` to `high` on the x axis, over the whole height."""
        self._axes.fill((low, high, high, low), (0, 0, 1, 1), transform=self._along, gid=role)

    def words(self, x: float, height: float, words: str, *, left: bool, role: str) -> None:
        """Write text to the left or right of `x`, at `height`, a share of the chart's height."""
        beside = "right" if left else "left"
        self._axes.text(x, height, words, transform=self._along, ha=beside, va="bottom", gid=role)


def draw(
    paint: Callable[[Pen], None],
    *,
    x: Edges,
    y: Edges,
    x_ticks: Ticks,
    y_ticks: Ticks,
    log: bool = False,
) -> Markup:
    """Draw a chart with `paint`. Returns the content of an SVG element of WIDTH by HEIGHT units."""
    # Imported here: it takes half a second and 30 MB, which only a report with charts needs.
    matplotlib = import_module("matplotlib")
    figures = import_module("matplotlib.figure")
    svg = import_module("matplotlib.backends.backend_svg")
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, frameon=False)
        canvas = svg.FigureCanvasSVG(figure)
        axes = figure.add_axes((LEFT, BOTTOM, RIGHT - LEFT, TOP - BOTTOM))
        axes.set_axis_off()
        if log:
            axes.set_yscale("log")
        axes.set_xlim(*x)
        axes.set_ylim(*y)
        _scales(axes, x_ticks, y_ticks)
        paint(Pen(axes))
        out = StringIO()
        canvas.print_svg(out, metadata={"Date": None})
    return Markup("").join(_kept(ElementTree.fromstring(out.getvalue()), ""))


def _scales(axes: Any, x_ticks: Ticks, y_ticks: Ticks) -> None:  # noqa: ANN401
    """Draw grid lines and labels. matplotlib's own axes would take longer than the charts."""
    across, along = axes.get_yaxis_transform(), axes.get_xaxis_transform()
    for value, words in y_ticks:
        axes.plot((0, 1), (value, value), transform=across, gid="grid", clip_on=False)
        axes.text(-0.02, value, words, transform=across, ha="right", va="center")
    axes.plot((0, 1), (0, 0), transform=axes.transAxes, gid="axis", clip_on=False)
    for value, words in x_ticks:
        axes.text(value, -0.03, words, transform=along, ha="center", va="top")


def _kept(node: ElementTree.Element, role: str) -> Iterator[Markup]:
    """Yields the paths and texts below an element. Each gets the role of the nearest enclosing
    element that has a role."""
    name = node.get("id", "")
    role = name if name in ROLES else role
    if node.tag == f"{SVG}path" and role:
        yield Markup('<path class="{}" d="{}"/>').format(role, _path(node.get("d", "")))
    elif node.tag == f"{SVG}text":
        yield _text(node, role)
    elif node.tag in (SVG + "g", SVG + "svg"):
        for child in node:
            yield from _kept(child, role)


def _path(drawn: str) -> str:
    """Shorten a path that matplotlib drew. Returns SVG path data, in which an isolated point
    becomes a dot."""
    parts: list[str] = []
    for part in drawn.split("M")[1:]:
        numbers = [float(match) for match in NUMBER.findall(part)]
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        parts.append(run_path(points, decimals=1, closed="z" in part))
    return "".join(parts)


def _text(node: ElementTree.Element, role: str) -> Markup:
    anchor = ANCHOR.search(node.get("style", ""))
    where = "" if anchor is None or anchor[1] == "start" else f" text-anchor={anchor[1]!r}"
    kind = f' class="{role}"' if role else ""
    x, y = (round(float(node.get(key, "0")), 1) for key in ("x", "y"))
    return Markup('<text{}{} x="{:g}" y="{:g}">{}</text>').format(
        Markup(kind), Markup(where.replace("'", '"')), x, y, escape(node.text or "")
    )  # fmt: skip
