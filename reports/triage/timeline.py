"""The timeline of the triage page: a lane for each stage and cause, and a health strip for each
target. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.change import Interval
from kneewatch.reports.health import RANKS, WORST_FIRST, rank_of
from kneewatch.reports.lines import moment
from kneewatch.reports.triage.charts import Axis
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.formatting import percent, plural, span

NEAR = 0.4
"""Bars that are closer than this are drawn as one bar, in percent of the width."""

GAP_SEEN = 0.5
CAUSE_LANES = 8
DOWN = "target_down"
"""Id of the cause that a target's page cannot be read."""

DESCRIBED = 12
"""Maximum number of intervals that a text description lists, the newest ones."""


class Bar(Struct, frozen=True):
    """A bar in a lane. `x` and `width` are in percent. `kind` is a health state or the kind of a
    gap."""

    x: float
    width: float
    kind: str
    words: str


class Lane(Struct, frozen=True):
    """A lane with its name. `current`: the stage or cause is active at the moment shown."""

    name: str
    current: bool
    bars: tuple[Bar, ...]
    desc: str = ""


class Lanes(Struct, frozen=True):
    """The timeline of one engine: the stages (worst first), causes, and gaps."""

    stages: tuple[Lane, ...]
    causes: tuple[Lane, ...]
    more_causes: int
    gaps: tuple[Bar, ...]
    desc: str


def lanes(intervals: Iterable[Interval], axis: Axis, moment_s: float) -> Lanes:
    """The lanes of an engine's intervals."""
    visible = sorted(
        (interval for interval in intervals if _visible(interval, axis)),
        key=lambda interval: interval.start_s,
    )
    stages = [
        interval for interval in visible if interval.kind == "stage" and interval.id.isdecimal()
    ]
    health = [interval for interval in visible if interval.kind == "health"]
    causes: dict[str, list[Interval]] = {}
    for interval in visible:
        if interval.kind == "cause":
            causes.setdefault(interval.id, []).append(interval)
    gaps = _gaps(stages, health, causes.get(DOWN, []), axis)
    shown = sorted(causes, key=lambda name: -causes[name][-1].start_s)[:CAUSE_LANES]
    return Lanes(
        tuple(
            _lane(f"{number} {name}", [s for s in stages if s.id == str(number)], axis, moment_s)
            for number, name in reversed(tuple(enumerate(NAMES)))
        ),
        tuple(_lane(name, causes[name], axis, moment_s) for name in shown),
        len(causes) - len(shown),
        tuple(gaps),
        _description(stages, gaps, moment_s),
    )


def holds(interval: Interval, moment_s: float) -> bool:
    started = interval.start_s <= moment_s
    return started and (interval.end_s is None or interval.end_s > moment_s)


def interval_name(interval: Interval) -> str:
    """A name for an interval: the stage's number and name, the cause's id, or the health state."""
    if interval.kind != "stage":
        return interval.id
    number = interval.id
    is_stage = number.isdecimal() and int(number) < len(NAMES)
    return f"stage {number} ({NAMES[int(number)]})" if is_stage else f"stage {number}"


def lasted(interval: Interval, moment_s: float) -> str:
    """The start, end and length of an interval as text."""
    start, end_s = moment(interval.start_s, moment_s), interval.end_s
    if end_s is None:
        return f"since {start}"
    return f"{start} to {moment(end_s, moment_s)}, {span(end_s - interval.start_s)}"


def _lane(name: str, intervals: Sequence[Interval], axis: Axis, moment_s: float) -> Lane:
    listed = "; ".join(lasted(interval, moment_s) for interval in intervals[-DESCRIBED:])
    return Lane(
        name,
        any(holds(interval, moment_s) for interval in intervals),
        tuple(_bar(group, axis, moment_s) for group in _near(intervals, axis)),
        f"{listed}." if listed else "Not in this time range.",
    )


def _near(intervals: Sequence[Interval], axis: Axis) -> list[list[Interval]]:
    """The intervals in groups. A group has intervals that are too close to be drawn separately."""
    groups: list[list[Interval]] = []
    end = -inf
    for interval in intervals:
        x, width = axis.spread(interval.start_s, interval.end_s)
        if groups and x - end < NEAR:
            groups[-1].append(interval)
        else:
            groups.append([interval])
        end = max(end, x + width)
    return groups


def _bar(group: Sequence[Interval], axis: Axis, moment_s: float) -> Bar:
    """One bar for a group of intervals. It has the worst severity of the group."""
    ends = [interval.end_s for interval in group]
    last_s = None if None in ends else max(end_s for end_s in ends if end_s is not None)
    whole = replace(group[0], end_s=last_s)
    often = f", {len(group)} times" if len(group) > 1 else ""
    words = f"{interval_name(whole)}: {lasted(whole, moment_s)}{often}"
    x, width = axis.spread(whole.start_s, last_s)
    return Bar(x, width, max(interval.severity for interval in group).word, words)


def _gaps(
    stages: Sequence[Interval],
    health: Sequence[Interval],
    down: Sequence[Interval],
    axis: Axis,
) -> list[Bar]:
    """Bars for the times in which the stage is unknown: the target was down, its page lacked the
    needed metrics, or it was not watched."""
    watched = _union(_stretches(health, axis))
    # A stage ends at the last good scrape, the outage starts at the first failed one.
    lost = _union((a - GAP_SEEN, b + GAP_SEEN) for a, b in _stretches(down, axis))
    bars: list[Bar] = []
    for start, end in _between(_union(_stretches(stages, axis))):
        unseen = _between(_within(watched, start, end), start=start, end=end)
        bars += [Bar(a, b - a, "unseen", "not watched") for a, b in unseen]
        for first, last in _within(watched, start, end):
            unread = _within(lost, first, last)
            bars += [Bar(a, b - a, "unread", "the page could not be read") for a, b in unread]
            unjudged = _between(unread, start=first, end=last)
            bars += [
                Bar(a, b - a, "unjudged", "the stage could not be judged") for a, b in unjudged
            ]
    return sorted((bar for bar in bars if bar.width >= GAP_SEEN), key=lambda bar: bar.x)


def _within(
    stretches: Iterable[tuple[float, float]], start: float, end: float
) -> list[tuple[float, float]]:
    """The parts of stretches that lie between `start` and `end`. A stretch is a pair of start and
    end, in percent of the width."""
    return [(max(start, a), min(end, b)) for a, b in stretches if a < end and b > start]


def _stretches(intervals: Iterable[Interval], axis: Axis) -> list[tuple[float, float]]:
    """Intervals as pairs of start and end, in percent of the width."""
    placed = (axis.spread(interval.start_s, interval.end_s) for interval in intervals)
    return [(x, x + width) for x, width in placed]


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The stretches in order. Stretches that overlap are merged."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _between(
    stretches: Sequence[tuple[float, float]], *, start: float = 0.0, end: float = 100.0
) -> list[tuple[float, float]]:
    """The gaps between stretches, which must be in order."""
    edges = [start, *(edge for stretch in stretches for edge in stretch), end]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(a, b) for a, b in pairs if b > a]


def _visible(interval: Interval, axis: Axis) -> bool:
    """Whether a part of the interval lies within the time of the axis."""
    end_s = axis.until_s if interval.end_s is None else interval.end_s
    return end_s > axis.since_s and interval.start_s < axis.until_s


def _description(stages: Sequence[Interval], gaps: Sequence[Bar], moment_s: float) -> str:
    """A text that describes the timeline for screen readers."""
    if not stages:
        return "The stage is unknown in this time range."
    newest = [f"{interval_name(stage)} {lasted(stage, moment_s)}" for stage in stages[-DESCRIBED:]]
    more = f"{len(stages) - DESCRIBED} earlier; " if len(stages) > DESCRIBED else ""
    unknown = f" {plural(len(gaps), 'gap')} in which the stage is unknown." if gaps else ""
    return f"{more}{'; '.join(newest)}.{unknown}"


# --- The strip of a target's past: the worst health at each time, taller when worse ---------------

COLUMNS = 120
TALL = 24
HEIGHTS = {"ok": 5, "info": 9, "unknown": 13, "warning": 18, "critical": TALL}
STATES = WORST_FIRST[::-1]


def strip(engines: Iterable[Sequence[Interval]], axis: Axis) -> tuple[Mapping[str, str], str]:
    """The health strip of a target, from the intervals of all its engines: SVG paths by health
    state, in COLUMNS by TALL units, and a text alternative."""
    columns = [-1] * COLUMNS
    brief: list[range] = []
    # Without health states, the severities of all intervals are used instead.
    shown = (
        [interval for interval in engine if interval.kind == "health"] or engine
        for engine in engines
    )
    for interval in chain.from_iterable(shown):
        word = interval.id if interval.kind == "health" else interval.severity.word
        rank = rank_of(word)
        x, width = axis.spread(interval.start_s, interval.end_s)
        if not width and not axis.since_s <= interval.start_s <= axis.until_s:
            continue
        place = min(COLUMNS - 1, int(x * COLUMNS / 100))
        covered = range(place, max(place + 1, min(COLUMNS, round((x + width) * COLUMNS / 100))))
        # Briefly unknown (an engine's first scrape) counts only where nothing else is known.
        if rank == RANKS["unknown"] and width < 100 / COLUMNS:
            brief.append(covered)
            continue
        for column in covered:
            columns[column] = max(columns[column], rank)
    for column in (column for covered in brief for column in covered):
        if columns[column] < 0:
            columns[column] = RANKS["unknown"]
    return _paths(columns), _strip_words(columns)


def _paths(columns: Sequence[int]) -> dict[str, str]:
    """For each health state a path, with one bar for each run of equal columns."""
    paths: dict[str, str] = {}
    start = 0
    for rank, run in groupby(columns):
        wide = len(list(run))
        if rank >= 0:
            tall = HEIGHTS[STATES[rank]]
            bar = f"M{start} {TALL - tall}h{wide}v{tall}h-{wide}z"
            paths[STATES[rank]] = paths.get(STATES[rank], "") + bar
        start += wide
    return paths


def _strip_words(columns: Sequence[int]) -> str:
    """The share of time in each health state as text, worst first."""
    shares = [
        f"{percent(columns.count(rank) / COLUMNS)} {word}"
        for word in WORST_FIRST
        if (rank := RANKS[word]) in columns
    ]
    unseen = columns.count(-1)
    if unseen:
        shares.append(f"{percent(unseen / COLUMNS)} not watched")
    return ", ".join(shares) + "."
