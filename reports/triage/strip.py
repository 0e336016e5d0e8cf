"""A target's past in one strip: the worst health of each moment, as tall as it is bad. Pure.

What is unknown for a moment (an engine's first scrape) counts only where nothing else is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kneewatch.reports.triage.axis import Axis
from kneewatch.reports.triage.standing import RANKS
from kneewatch.reports.triage.view import IntervalView
from kneewatch.reports.words import percent

COLUMNS = 120
TALL = 24
HEIGHTS = {"ok": 5, "info": 9, "unknown": 13, "warning": 18, "critical": TALL}
WORDS = sorted(RANKS, key=lambda word: RANKS[word])


@dataclass(frozen=True, slots=True)
class Strip:
    """Paths by health word, in COLUMNS by TALL, and the same in words."""

    paths: tuple[tuple[str, str], ...]
    desc: str


def strip(engines: Iterable[Sequence[IntervalView]], axis: Axis) -> Strip:
    """The strip of the intervals of all engines of a target."""
    columns = [-1] * COLUMNS
    brief: list[range] = []
    for one in (one for intervals in engines for one in _of_health(intervals)):
        rank = RANKS.get(one.id if one.kind == "health" else one.severity, RANKS["unknown"])
        x, width = axis.spread(one.start_s, one.end_s)
        if not width and not axis.since_s <= one.start_s <= axis.until_s:
            continue
        place = min(COLUMNS - 1, int(x * COLUMNS / 100))
        covered = range(place, max(place + 1, min(COLUMNS, round((x + width) * COLUMNS / 100))))
        if rank == RANKS["unknown"] and width < 100 / COLUMNS:
            brief.append(covered)
            continue
        for column in covered:
            columns[column] = max(columns[column], rank)
    for column in (column for covered in brief for column in covered):
        if columns[column] < 0:
            columns[column] = RANKS["unknown"]
    return Strip(_paths(columns), _told(columns))


def _paths(columns: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """A path for each health word, of a bar for each run of columns alike."""
    paths: dict[str, list[str]] = {}
    start = 0
    for rank, run in groupby(columns):
        wide = len(list(run))
        if rank >= 0:
            tall = HEIGHTS[WORDS[rank]]
            paths.setdefault(WORDS[rank], []).append(
                f"M{start} {TALL - tall}h{wide}v{tall}h-{wide}z"
            )
        start += wide
    return tuple((word, "".join(parts)) for word, parts in paths.items())


def _of_health(intervals: Sequence[IntervalView]) -> Sequence[IntervalView]:
    """The intervals of health; where there are none, what they would be made of."""
    return [one for one in intervals if one.kind == "health"] or intervals


def _told(columns: Sequence[int]) -> str:
    """How much of the time was how, worst first."""
    shares = [
        f"{percent(columns.count(rank) / COLUMNS)} {word}"
        for word, rank in sorted(RANKS.items(), key=lambda item: -item[1])
        if rank in columns
    ]
    unseen = columns.count(-1)
    if unseen:
        shares.append(f"{percent(unseen / COLUMNS)} not watched")
    return ", ".join(shares) + "."
