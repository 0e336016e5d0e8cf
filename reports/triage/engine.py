"""An engine on the triage page: a lane for each stage and cause, the health strip, evidence,
findings and recommended changes. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from math import inf, isclose
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.engine.wording import spoken
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.verdict import Cause, Evidence, Verdict
from kneewatch.diagnose.verdict_json import changes_words
from kneewatch.reports.advice_text import restart_words
from kneewatch.reports.diagnosis_text import (
    GAUGES,
    advice_words,
    clearing_words,
    fallen,
    notable,
    quiet_notes,
)
from kneewatch.reports.health import RANKS, WORST_FIRST, rank_of
from kneewatch.reports.lines import moment
from kneewatch.reports.triage.charts import Axis, Bound, Chart, chart
from kneewatch.reports.triage.view_model import CASCADE_SIGNALS, EngineView, Standing
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.formatting import percent, plural, quantity, span
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import Finding, Severity

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


def title(recommendation: Advice) -> str:
    """All changes in one line. Without changes: the advice."""
    return changes_words(recommendation).replace(" -> ", " → ") or recommendation.summary


def cost(recommendation: Advice) -> str:
    """The extra cost of a change, and whether it needs a restart."""
    usd_per_hour = recommendation.cost_usd_per_hour
    if usd_per_hour is None:
        price = "price unknown"
    else:
        price = f"{usd_per_hour:+,.2f} USD/h" if usd_per_hour else "no change in price"
    return "; ".join(filter(None, (price, restart_words(recommendation))))


# --- An engine in full: evidence, vital signs and findings, each with its chart -------------------


SAME = 1e-4
NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]")
LABELS = dict(
    zip(
        CASCADE_SIGNALS,
        ("KV cache used", "running", "waiting", "preempted every second", "TTFT P99", "ITL P99"),
        strict=True,
    )
)


class EnginePart(Struct, frozen=True):
    """An engine that is shown in full."""

    number: int
    standing: Standing
    engine: EngineView
    axis: Axis
    moment_s: float

    @property
    def diagnosis(self) -> Verdict:
        return self.engine.diagnosis

    @property
    def title(self) -> str:
        """The name of the engine, which distinguishes it from other engines of its target."""
        return self.standing.who or "unknown engine"

    @property
    def seen(self) -> bool:
        """Whether at least one vital sign has a value or a chart."""
        return bool(self.diagnosis.values) or any(drawn for *_, drawn in self.vitals())

    @property
    def has_cache(self) -> bool:
        """Whether it may have a KV cache: a router has none."""
        return not self.diagnosis.values or CASCADE_SIGNALS[0] in self.diagnosis.values

    def lanes(self) -> Lanes:
        return lanes(self.standing.intervals, self.axis, self.moment_s)

    def log(self) -> list[Interval]:
        """The intervals, newest first."""
        return sorted(self.standing.intervals, key=lambda part: (-part.start_s, part.kind))

    def vitals(self) -> list[tuple[str, str, str, str, Chart | None]]:
        """Each of CASCADE_SIGNALS: label, value, whether the value is from one scrape or from the
        window, the chart, and before it a note: the window's mean if the newest value is far below
        it, or the reason if its rule is ok although the value is out of bounds."""
        window = f"last {span(self.diagnosis.window_s)}"
        means = {key: f"{words}, {window}" for key, words in fallen(self.diagnosis).items()}
        notes = means | quiet_notes(self.diagnosis)
        return [
            (
                spoken(self.diagnosis, LABELS[key]),
                quantity(key, self.diagnosis.values.get(key)).removesuffix("/s"),
                "last scrape" if key in GAUGES else window,
                notes.get(key, ""),
                self._chart(key, self._rule_bounds(key)),
            )
            for key in CASCADE_SIGNALS
            if self.has_cache or self.diagnosis.values.get(key) is not None
        ]

    def findings(self, *states: str) -> list[tuple[Finding, str, str, str, Chart | None]]:
        """The findings whose state is one of `states` and that no cause covers: what is, or was,
        out of bounds, the value, what to do about what still is, and the chart."""
        return [
            (
                finding,
                clearing_words(finding, self.diagnosis)
                or spoken(self.diagnosis, rule_of(finding).summary),
                "" if finding.clearing_since_s else quantity(finding.signal, finding.value),
                "" if finding.clearing_since_s else advice_words(finding, self.diagnosis),
                self._chart(
                    finding.signal,
                    _bounds(finding),
                    since_s=finding.since_s,
                    until_s=finding.clearing_since_s,
                ),
            )
            for finding in notable(self.diagnosis, *states)
        ]

    def fine(self) -> list[tuple[str, str]]:
        """What was checked and is fine: the words of each rule that no cause covers and whose
        value is inside its bounds, and the value."""
        return [
            (spoken(self.diagnosis, rule.fine), quantity(finding.signal, finding.value))
            for finding in notable(self.diagnosis, "ok")
            if (rule := rule_of(finding)).fine
            if finding.value is not None and rule.level(finding.value) is Severity.OK
        ]

    def evidence(self, cause: Cause) -> list[tuple[bool, Evidence, str, Chart | None]]:
        """A cause's evidence: whether it is for the cause, the evidence, the value, and the chart.

        Where the text is about another moment, a share or the growth of the signal, the value is
        what the signal is now.
        """
        rows: list[tuple[bool, Evidence, str, Chart | None]] = []
        for supports, items in ((True, cause.evidence), (False, cause.against)):
            for item in items:
                if item.signal not in self.engine.series and item.text in cause.summary:
                    continue
                same = _same_quantity(item, self.diagnosis)
                bounds = [(item.threshold, "bound")] if same and item.threshold is not None else []
                is_fleet = bool(self.standing.target.replicas)
                value = value_words(item, self.diagnosis, same=same, is_fleet=is_fleet)
                drawn = self._chart(item.signal, bounds, since_s=cause.since_s)
                rows.append((supports, item, value, drawn))
        return rows

    def _chart(
        self,
        key: str,
        bounds: Sequence[Bound],
        *,
        since_s: float | None = None,
        until_s: float | None = None,
    ) -> Chart | None:
        times, values = _with_newest(self.engine, key)
        return chart(
            key,
            times,
            values,
            self.axis,
            bounds=bounds,
            held=None if since_s is None else (since_s, until_s or self.moment_s),
            moment_s=self.moment_s,
        )

    def _rule_bounds(self, key: str) -> list[Bound]:
        findings = [finding for finding in self.diagnosis.findings if finding.signal == key]
        return [bound for finding in findings for bound in _bounds(finding)]


def _with_newest(engine: EngineView, key: str) -> tuple[Sequence[float], Sequence[float]]:
    """A signal's stored series with the diagnosis's value, which the page shows beside the chart.
    The store gets it later, and once downsampled has a minute's mean instead."""
    times, values = engine.times, engine.series.get(key, ())
    t_s, value = engine.diagnosis.t_s, engine.diagnosis.values.get(key)
    place = bisect_left(times, t_s)
    if value is None or not values or (place < len(times) and times[place] == t_s):
        return times, values
    return [*times[:place], t_s, *times[place:]], [*values[:place], value, *values[place:]]


def keyed(items: Sequence[Any]) -> list[tuple[str, Any]]:
    """Things that have an id, each with an HTML element id."""
    return list(zip(unique([item.id for item in items]), items, strict=True))


def unique(words: Sequence[str]) -> list[str]:
    """Unique parts of HTML element ids, one for each word: letters, digits, "_" and "-".

    Other characters are removed. If the rest is empty or taken already, "-" and the word's index
    are appended.
    """
    ids: list[str] = []
    for word in words:
        plain = NOT_PLAIN.sub("", word)
        ids.append(plain if plain and plain not in ids else f"{plain}-{len(ids)}")
    return ids


def _bounds(finding: Finding) -> list[Bound]:
    """The bounds of a finding's rule that are drawn. A bound of 0 means any value and is not
    drawn."""
    return [
        (bound.threshold, bound.severity.word)
        for bound in rule_of(finding).bounds
        if bound.threshold and bound.severity > Severity.OK
    ]


PROCESS_START = "process_start"
"""Evidence about a moment, which has no value of its own."""


def value_words(item: Evidence, diagnosis: Verdict, *, same: bool, is_fleet: bool) -> str:
    """The value of an evidence's signal. Empty for a signal that is a point in time, for words
    without a value, and for a signal that a fleet has no value of: its text compares engines."""
    if item.signal in diagnosis.values and not same:
        now = diagnosis.values[item.signal]
        return "now unknown" if now is None else f"now {quantity(item.signal, now)}"
    if is_fleet or item.signal == PROCESS_START or item.value is None:
        return ""
    return quantity(item.signal, item.value)


def _same_quantity(item: Evidence, diagnosis: Verdict) -> bool:
    """Whether the value of the evidence is the value of its signal. Some evidence is about a share
    or the growth of the signal; the threshold for that must not be drawn in the signal's chart."""
    value = diagnosis.values.get(item.signal)
    return value is not None and item.value is not None and isclose(value, item.value, rel_tol=SAME)
