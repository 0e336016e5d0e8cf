"""SVG paths, and charts with axes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isnan, log10

from markupsafe import Markup

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


# --- Charts with axes: colours, widths and dashes are the stylesheet's ----------------------------


WIDTH, HEIGHT = 360, 190
"""Width and height of a chart in SVG units. On a phone, a unit is about one pixel."""

LEFT, RIGHT, TOP, BOTTOM = 0.145, 0.985, 0.93, 0.13
"""The edges of the axes, as shares of the width and of the height from the bottom."""

CENTRED, BELOW, ABOVE = 2.9, 8.4, -2.6
"""The distance in units from a place down to the baseline of the text at, below or above it: half
the height of DejaVu Sans at 11 px, the stylesheet's size, and half a line to either side."""

PATH = Markup('<path class="{}" d="{}"/>')
TEXT = Markup('<text{}{} x="{:g}" y="{:g}">{}</text>')
Edges = tuple[float, float]

Ticks = list[tuple[float, str]]
"""Labelled positions on an axis."""


class Pen:
    """Draws between axes that cover `x` and `y`. `role` is the CSS class of what is drawn. Areas
    are behind lines, and both behind texts."""

    def __init__(self, x: Edges, y: Edges, *, log: bool) -> None:
        self._scale: Callable[[float], float] = log10 if log else float
        self._x, self._y = x, (self._scale(y[0]), self._scale(y[1]))
        self._areas, self._lines, self._texts = list[Markup](), list[Markup](), list[Markup]()

    @property
    def drawn(self) -> Markup:
        """The content of an SVG element of WIDTH by HEIGHT units."""
        return Markup("").join((*self._areas, *self._lines, *self._texts))

    def line(self, x: Sequence[float], y: Sequence[float], role: str) -> None:
        """Draw a line through points. A NaN makes a gap."""
        points = zip(x, y, strict=True)
        self._line((None if isnan(b) else _place(self._across(a), self._up(b)) for a, b in points),
                   role)  # fmt: skip

    def area(self, x: Sequence[float], y: Sequence[float], role: str) -> None:
        """Draw a filled outline."""
        points = zip(x, y, strict=True)
        self._area([_place(self._across(a), self._up(b)) for a, b in points], role)

    def upright(self, x: float, height: float, role: str) -> None:
        """Draw a vertical line from the bottom to `height`, a share of the chart's height."""
        self._line([_place(self._across(x), share) for share in (0, height)], role)

    def column(self, low: float, high: float, role: str) -> None:
        """Fill the interval from `low` to `high` on the x axis, over the whole height."""
        low, high = self._across(low), self._across(high)
        self._area([_place(low, 0), _place(high, 0), _place(high, 1), _place(low, 1)], role)

    def words(self, x: float, height: float, words: str, *, left: bool, role: str) -> None:
        """Write text to the left or right of `x`, at `height`, a share of the chart's height."""
        self._text(_place(self._across(x), height), ABOVE, words, "end" if left else "", role)

    def scales(self, x_ticks: Ticks, y_ticks: Ticks) -> None:
        """Draw the grid, the horizontal axis, and the labels of both axes."""
        for value, words in y_ticks:
            up = self._up(value)
            self._line([_place(0, up), _place(1, up)], "grid")
            self._text(_place(-0.02, up), CENTRED, words, "end")
        self._line([_place(0, 0), _place(1, 0)], "axis")
        for value, words in x_ticks:
            self._text(_place(self._across(value), -0.03), BELOW, words, "middle")

    def _across(self, x: float) -> float:
        return (x - self._x[0]) / (self._x[1] - self._x[0])

    def _up(self, y: float) -> float:
        return (self._scale(y) - self._y[0]) / (self._y[1] - self._y[0])

    def _line(self, points: Iterable[Point | None], role: str) -> None:
        self._lines.append(PATH.format(role, path(points, decimals=1)))

    def _area(self, outline: Sequence[Point], role: str) -> None:
        points = outline[:-1] if outline[-1] == outline[0] else outline
        self._areas.append(PATH.format(role, run_path(points, decimals=1, closed=True)))

    def _text(self, at: Point, down: float, words: str, anchor: str, role: str = "") -> None:
        given = {"class": role, "text-anchor": anchor}
        marks = [f' {name}="{value}"' if value else "" for name, value in given.items()]
        self._texts.append(
            TEXT.format(*map(Markup, marks), round(at[0], 1), round(at[1] + down, 1), words)
        )


def _place(across: float, up: float) -> Point:
    """The units of a place that is given in shares of the axes' width and height."""
    return WIDTH * (LEFT + across * (RIGHT - LEFT)), HEIGHT * (1 - BOTTOM - up * (TOP - BOTTOM))


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
    pen = Pen(x, y, log=log)
    pen.scales(x_ticks, y_ticks)
    paint(pen)
    return pen.drawn
