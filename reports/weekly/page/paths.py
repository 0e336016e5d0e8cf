"""SVG paths in few letters: a report holds thousands of points. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Point = tuple[float, float]


def path(points: Iterable[Point | None], *, decimals: int = 0) -> str:
    """A line with a gap at each None; a lone point is a dot."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return "".join(run_path(run, decimals=decimals) for run in runs if run)


def run_path(run: Sequence[Point], *, decimals: int, closed: bool = False) -> str:
    """One line through its points, each relative to the one before, rounded without drift."""
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
    """What separates a number from the one before: a minus does so by itself."""
    return "" if number.startswith("-") else " "


def _short(steps: int, scale: int) -> str:
    """A number of steps as a decimal number without what can be left out."""
    if steps % scale == 0:
        return str(steps // scale)
    return (
        f"{steps / scale:g}".replace("0.", ".", 1) if abs(steps) < scale else f"{steps / scale:g}"
    )
