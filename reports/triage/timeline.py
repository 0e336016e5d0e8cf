"""The triage timeline: a lane per stage and cause, and a health strip per target. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf

from kneewatch.reports.formatting import moment, percent, span
from kneewatch.reports.triage.charts import Axis
from kneewatch.reports.triage.verdict import RANKS
from kneewatch.reports.triage.view_model import IntervalView
from kneewatch.rules.cascade import NAMES

NEAR = 0.4
"""Bars less than this apart, in percent of the width, are drawn as one."""

GAP_SEEN = 0.5
CAUSE_LANES = 8
DOWN = "target_down"
"""The cause that says that there is no page."""

TOLD = 12


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch in a lane; `x` and `width` in percent, `kind` a severity's word."""

    x: float
    width: float
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane with its name; `current` where it holds at the moment shown."""

    name: str
    current: bool
    bars: tuple[Bar, ...]
    desc: str = ""


@dataclass(frozen=True, slots=True)
class Lanes:
    """A timeline of one engine: stages from the worst down, causes, and what is not known."""

    stages: tuple[Lane, ...]
    causes: tuple[Lane, ...]
    more_causes: int
    gaps: tuple[Bar, ...]
    desc: str


def lanes(intervals: Iterable[IntervalView], axis: Axis, moment_s: float) -> Lanes:
    """The lanes of an engine's intervals."""
    seen = sorted(
        (one for one in intervals if _end(one, axis) > axis.since_s and one.start_s < axis.until_s),
        key=lambda one: one.start_s,
    )
    stages = [one for one in seen if one.kind == "stage" and one.id.isdecimal()]
    causes: dict[str, list[IntervalView]] = {}
    for one in seen:
        if one.kind == "cause":
            causes.setdefault(one.id, []).append(one)
    gaps = _gaps(stages, [one for one in seen if one.kind == "health"], causes.get(DOWN, []), axis)
    shown = sorted(causes, key=lambda name: -causes[name][-1].start_s)[:CAUSE_LANES]
    return Lanes(
        tuple(
            _lane(f"{number} {name}", [s for s in stages if s.id == str(number)], axis, moment_s)
            for number, name in reversed(tuple(enumerate(NAMES)))
        ),
        tuple(_lane(name, causes[name], axis, moment_s) for name in shown),
        len(causes) - len(shown),
        tuple(gaps),
        _told(stages, gaps, moment_s),
    )


def holds(one: IntervalView, moment_s: float) -> bool:
    """Whether an interval holds at a moment."""
    return one.start_s <= moment_s and (one.end_s is None or one.end_s > moment_s)


def interval_name(one: IntervalView) -> str:
    """What an interval is of, in words."""
    if one.kind != "stage":
        return one.id
    known = one.id.isdecimal() and int(one.id) < len(NAMES)
    return f"stage {one.id} ({NAMES[int(one.id)]})" if known else f"stage {one.id}"


def lasted(one: IntervalView, moment_s: float) -> str:
    """From when until when, and how long."""
    start = moment(one.start_s, moment_s)
    if one.end_s is None:
        return f"since {start}"
    return f"{start} to {moment(one.end_s, moment_s)}, {span(one.end_s - one.start_s)}"


def _lane(name: str, seen: Sequence[IntervalView], axis: Axis, moment_s: float) -> Lane:
    told = "; ".join(lasted(one, moment_s) for one in seen[-TOLD:])
    return Lane(
        name,
        any(holds(one, moment_s) for one in seen),
        tuple(_bar(group, axis, moment_s) for group in _near(seen, axis)),
        f"{told}." if told else "Not in this time.",
    )


def _near(seen: Sequence[IntervalView], axis: Axis) -> list[list[IntervalView]]:
    """Intervals in groups that lie so near to each other that they look like one."""
    groups: list[list[IntervalView]] = []
    end = -inf
    for one in seen:
        x, width = axis.spread(one.start_s, one.end_s)
        if groups and x - end < NEAR:
            groups[-1].append(one)
        else:
            groups.append([one])
        end = max(end, x + width)
    return groups


def _bar(group: Sequence[IntervalView], axis: Axis, moment_s: float) -> Bar:
    """One bar for intervals near to each other, with the worst severity of them."""
    ends = [one.end_s for one in group]
    last_s = None if None in ends else max(end_s for end_s in ends if end_s is not None)
    whole = replace(group[0], end_s=last_s)
    often = f", {len(group)} times" if len(group) > 1 else ""
    words = f"{interval_name(whole)}: {lasted(whole, moment_s)}{often}"
    kinds = [one.severity if one.severity in RANKS else "unknown" for one in group]
    x, width = axis.spread(whole.start_s, last_s)
    return Bar(x, width, max(kinds, key=lambda word: RANKS[word]), words)


def _gaps(
    stages: Sequence[IntervalView],
    health: Sequence[IntervalView],
    down: Sequence[IntervalView],
    axis: Axis,
) -> list[Bar]:
    """Where no stage is known: the target was down, its page told too little, or nobody looked."""
    watched = _union(_stretches(health, axis))
    # The outage is known from its first failed scrape, the stage to the last one before it.
    lost = _union((a - GAP_SEEN, b + GAP_SEEN) for a, b in _stretches(down, axis))
    found: list[Bar] = []
    for start, end in _between(_union(_stretches(stages, axis))):
        unseen = _between(_within(watched, start, end), start=start, end=end)
        found += [Bar(a, b - a, "unseen", "not watched") for a, b in unseen]
        for first, last in _within(watched, start, end):
            unread = _within(lost, first, last)
            found += [Bar(a, b - a, "unread", "the page could not be read") for a, b in unread]
            unjudged = _between(unread, start=first, end=last)
            found += [
                Bar(a, b - a, "unjudged", "the stage could not be judged") for a, b in unjudged
            ]
    return sorted((bar for bar in found if bar.width >= GAP_SEEN), key=lambda bar: bar.x)


def _within(
    stretches: Iterable[tuple[float, float]], start: float, end: float
) -> list[tuple[float, float]]:
    """The parts of stretches that lie between two edges."""
    return [(max(start, a), min(end, b)) for a, b in stretches if a < end and b > start]


def _stretches(seen: Iterable[IntervalView], axis: Axis) -> list[tuple[float, float]]:
    return [(x, x + wide) for x, wide in (axis.spread(one.start_s, one.end_s) for one in seen)]


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _between(
    stretches: Sequence[tuple[float, float]], *, start: float = 0.0, end: float = 100.0
) -> list[tuple[float, float]]:
    """What stretches in order leave free."""
    edges = [start, *(edge for stretch in stretches for edge in stretch), end]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(a, b) for a, b in pairs if b > a]


def _end(one: IntervalView, axis: Axis) -> float:
    return axis.until_s if one.end_s is None else one.end_s


def _told(stages: Sequence[IntervalView], gaps: Sequence[Bar], moment_s: float) -> str:
    """The timeline for those who do not see it."""
    if not stages:
        return "No stage is known in this time."
    said = [f"{interval_name(one)} {lasted(one, moment_s)}" for one in stages[-TOLD:]]
    more = f"{len(stages) - TOLD} earlier; " if len(stages) > TOLD else ""
    lost = f" {len(gaps)} gaps in which no stage is known." if gaps else ""
    return f"{more}{'; '.join(said)}.{lost}"


# --- A target's past in one strip: the worst health of each moment, as tall as it is bad. Pure ----
#
# What is unknown for a moment (an engine's first scrape) counts only where nothing else is known.


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
    return Strip(_paths(columns), _strip_words(columns))


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


def _strip_words(columns: Sequence[int]) -> str:
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
