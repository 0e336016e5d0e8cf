"""The input of the report: hours of the period, tiers, engines, incidents, restarts and gaps.
Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from operator import add
from zoneinfo import ZoneInfo

from msgspec import Struct, field

from kneewatch.collector.window import Buckets
from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.deployment.deployment import Stated, stated_of
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine_history import ConfigChange, PastAdvice
from kneewatch.diagnose.learned.knee import LoadPoint
from kneewatch.diagnose.sizing.plan.workload_profile import WorkloadProfile
from kneewatch.diagnose.verdict import Cause
from kneewatch.reports.weekly.figures import Method, TargetQuality
from kneewatch.rules.cascade import EVICTS
from kneewatch.rules.facts import NO_TARGETS, Targets
from kneewatch.rules.rule import DAY_S, HOUR_S, Severity

LEAST_S = 1e-3


class Slot(Struct, frozen=True):
    """One hour of the local clock, or the part of it that lies in the period.

    `weekday` is 0 for Monday. `day` is the index of a day in the period: each day begins at the
    local time of day at which the period begins.
    """

    start_s: float
    end_s: float
    weekday: int
    hour: int
    day: int


class Grid(Struct, frozen=True):
    """A period, divided into hours of the local clock. `day_starts_s` are the starts of its
    days."""

    from_s: float
    to_s: float
    timezone: str
    slots: tuple[Slot, ...]
    day_starts_s: tuple[float, ...]

    @property
    def length_s(self) -> float:
        """The length of the period in seconds."""
        return self.to_s - self.from_s

    @property
    def edges_s(self) -> tuple[float, ...]:
        """The start of each hour and the end of the last hour."""
        return (*(slot.start_s for slot in self.slots), self.to_s)

    @property
    def days(self) -> int:
        """The number of days. The last day may be partial."""
        return len(self.day_starts_s)


def earlier(t_s: float, span_s: float, zone: ZoneInfo) -> float:
    """The time `span_s` before `t_s`. Whole days are subtracted as calendar days, whose length
    varies."""
    days, rest_s = divmod(span_s, DAY_S)
    if rest_s:
        return t_s - span_s
    return _moved(datetime.fromtimestamp(t_s, zone), -int(days))


def grid(from_s: float, to_s: float, timezone: str) -> Grid:
    """The hours and days of a period.

    Raises:
        ValueError: the period is empty.
    """
    if not to_s > from_s:
        raise ValueError(f"a period from {from_s} to {to_s} is empty")
    zone = ZoneInfo(timezone)
    begin = datetime.fromtimestamp(from_s, zone)
    days = [from_s]
    while (next_s := _moved(begin, len(days))) < to_s - LEAST_S:
        days.append(next_s)
    slots: list[Slot] = []
    start_s = from_s
    while start_s < to_s - LEAST_S:
        end_s = min(_next_hour(start_s, zone), to_s)
        local = datetime.fromtimestamp(start_s, zone)
        day = bisect_right(days, start_s + LEAST_S) - 1
        slots.append(Slot(start_s, end_s, local.weekday(), local.hour, day))
        start_s = end_s
    return Grid(from_s, to_s, timezone, tuple(slots), tuple(days))


def _moved(local: datetime, days: int) -> float:
    """The same local time some days later (or earlier, if `days` is negative), in Unix seconds."""
    return (local + timedelta(days=days)).timestamp()


def _next_hour(t_s: float, zone: ZoneInfo) -> float:
    """The next full hour of the local clock, in Unix seconds. Zones may have a half-hour offset."""
    offset = datetime.fromtimestamp(t_s, zone).utcoffset() or timedelta()
    offset_s = offset.total_seconds()
    return (int((t_s + offset_s) // HOUR_S) + 1) * HOUR_S - offset_s


# --- Sums over time and engines -------------------------------------------------------------------


class Tally(Struct, frozen=True):
    """The increase of a histogram. `sum` is the sum of the observed values.

    Shapes: `bounds` and `counts` (buckets,). The counts are cumulative; the last bound is +Inf.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """The number of observations."""
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """The mean of the observations. It is exact, unlike quantiles. None without
        observations."""
        return self.sum / self.count if self.count > 0 else None

    def quantile(self, q: float) -> float | None:
        """The q-quantile, interpolated as in Prometheus. None without observations."""
        return Buckets.of(self.bounds, self.counts).quantile(q) if self.counts else None

    def within(self, bound: float) -> tuple[float, float] | None:
        """The number of observations up to the largest bucket bound that is not above `bound`.
        Returns that bucket bound too. None if `bound` is below the first bucket bound."""
        kept = [at for at, edge in enumerate(self.bounds) if edge <= bound]
        return (self.counts[kept[-1]], self.bounds[kept[-1]]) if kept else None


NO_TALLY = Tally((), (), 0.0)


def added(tallies: Iterable[Tally]) -> Tally:
    """The sum of histograms. If their bounds differ, the result has only the bounds that they have
    in common."""
    filled = [tally for tally in tallies if tally.count > 0]
    if not filled:
        return NO_TALLY
    by_bounds: dict[tuple[float, ...], list[Tally]] = {}
    for tally in filled:
        by_bounds.setdefault(tally.bounds, []).append(tally)
    sums = [Tally(bounds, _summed(same), 0.0) for bounds, same in by_bounds.items()]
    total = math.fsum(tally.sum for tally in filled)
    if len(sums) == 1:
        return Tally(sums[0].bounds, sums[0].counts, total)
    common = set[float].intersection(*(set(tally.bounds) for tally in sums))
    bounds = tuple(sorted(common))
    counts = _summed([_on(tally, bounds) for tally in sums])
    return Tally(bounds, counts, total)


def _on(tally: Tally, bounds: Sequence[float]) -> Tally:
    by_bound = dict(zip(tally.bounds, tally.counts, strict=True))
    return Tally(tuple(bounds), tuple(by_bound[bound] for bound in bounds), tally.sum)


def _summed(tallies: Sequence[Tally]) -> tuple[float, ...]:
    counts = tallies[0].counts
    for tally in tallies[1:]:
        counts = tuple(map(add, counts, tally.counts))
    return counts


# --- What engines showed over some time: counters, histograms, gauges -----------------------------


SERVING = "|serving"
"""Suffix of levels that cover only the time in which requests ran."""


class Level(Struct, frozen=True):
    """A gauge over a span: its time-weighted mean, its highest value, and the seconds in which it
    was known.

    `top` is the highest mean on one engine over one hour. It shows the hottest engine, which the
    mean of a tier hides. For a ratio, `known_s` is the denominator, such as request-seconds.
    """

    mean: float
    high: float
    known_s: float
    top: float


class Span(Struct, frozen=True):
    """The data of one or more engines over some time.

    `engine_s` are the engine-seconds for which the counters have data. `clock_s` are the seconds in
    which at least one engine has such data. `watched_s` are the engine-seconds that were scraped;
    `idle_s` is the part of `watched_s` without load. `counts` are increases of counters, `tallies`
    increases of histograms, and `levels` are gauges.
    """

    engine_s: float = 0.0
    clock_s: float = 0.0
    watched_s: float = 0.0
    idle_s: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    tallies: Mapping[str, Tally] = field(default_factory=dict[str, Tally])
    levels: Mapping[str, Level] = field(default_factory=dict[str, Level])


# --- What engines, targets and tiers showed -------------------------------------------------------


def ends_last(interval: Interval) -> tuple[bool, float]:
    """A sort key: an interval that is open ends after all others."""
    return interval.end_s is None, interval.until_s


class Episode(Struct):
    """Intervals of one engine that form one incident. `cause` is the id of the root cause. Stages
    without preemption are shown, but do not count for its start, its end and its severity; nor does
    what is below warning, which notifications leave out as well."""

    cause: str
    causes: list[Interval]
    stages: list[Interval] = field(default_factory=list[Interval])

    @property
    def kind(self) -> str:
        return "cascade" if self.stages else "cause"

    @property
    def harm(self) -> list[Interval]:
        """Its causes, and the stages in which requests are preempted: those at warning or worse, if
        there are any."""
        every = [*self.causes, *(stage for stage in self.stages if int(stage.id) >= EVICTS)]
        return [interval for interval in every if interval.severity >= Severity.WARNING] or every

    @property
    def severity(self) -> Severity:
        return max(interval.severity for interval in self.harm)

    @property
    def start_s(self) -> float:
        """Start in Unix seconds."""
        return min(interval.start_s for interval in self.harm)

    @property
    def last(self) -> Interval:
        return max(self.harm, key=ends_last)

    @property
    def last_s(self) -> float:
        """The last time at which it was observed."""
        return max(interval.last_s for interval in self.harm)

    @property
    def until_s(self) -> float:
        """End of the episode in Unix seconds. If it is open, the time at which it was last
        observed."""
        return max(interval.until_s for interval in self.harm)


class EpisodeObserved(Struct, frozen=True):
    """An episode with the observations around it.

    `cause` is the cause where it was worst; None if no verdict was stored. `during` and
    `hour_before` are the engine's counts in these times. `series` are times and values of signals
    around the episode, NaN where unknown.
    """

    tier: str
    target: str
    engine: str
    episode: Episode
    cause: Cause | None = None
    during: Span = field(default_factory=Span)
    hour_before: Span = field(default_factory=Span)
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(
        default_factory=dict[str, tuple[Sequence[float], Sequence[float]]]
    )


# The period model: filled by a source (the store, Prometheus), read by all sections of the report.


class EngineObserved(Struct, frozen=True):
    """An engine over a period. `spans` has one entry for each hour of the grid.

    `minutes` are the numbers of requests that began in each minute of the period, NaN where
    unknown. `points` are windows at all loads; if there are too many, an evenly spaced selection.
    `peak_in_flight` is the P99 of requests in flight over the windows, `peak_at_s` the time of the
    maximum. `unknown` maps signals without data to the reason.
    """

    target: str
    engine: str
    replica: str
    first_s: float
    last_s: float
    spans: Sequence[Span]
    minutes: Sequence[float] = ()
    points: Sequence[LoadPoint] = ()
    peak_in_flight: float | None = None
    peak_at_s: float | None = None
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])


class EnginesObserved(Struct):
    """The engines of a tier in one period, and what is known only as sums over them.

    `spans` has one entry per hour of the grid, or is empty: the gauges of all engines, and from
    Prometheus, which sums them itself, counters and histograms. `minutes` are then the numbers of
    requests that began in each minute.
    """

    engines: Sequence[EngineObserved] = ()
    spans: Sequence[Span] = ()
    minutes: Sequence[float] = ()


class TierStated(Struct, frozen=True):
    """The settings of a tier: by which its servers are judged (`profile`), and what the size was
    computed for (`workload`).

    `proposed` are the latency targets that all its engines met in quiet hours, where none is set.
    """

    profile: Profile = Profile()
    workload: WorkloadProfile | None = None
    proposed: Targets = NO_TARGETS

    @property
    def server(self) -> Stated:
        return stated_of(self.profile.stated)

    @property
    def price_source(self) -> str:
        """Where the price of a GPU comes from; empty if it is unknown."""
        if self.server.usd_per_gpu_hour is not None:
            return "stated (usd_per_gpu_hour)"
        gpu = self.server.gpu
        return "" if gpu is None else f"the catalogue's price of {gpu.id}"


class TierObserved(Struct, frozen=True):
    """A tier in the period, and in the period before. `program` is empty for vLLM.

    A tier of routers has no engines: `router_s` are the seconds in which one was watched.
    """

    id: str
    model: str
    gpu: str
    stated: TierStated
    now: EnginesObserved
    before: EnginesObserved
    program: str = ""
    router_s: float | None = None


class Observed(Struct, frozen=True):
    """The input of a report: the period and the period before. `before_grid` is None if there is no
    comparison.

    `notices` are shown at the top of the report, `notes` under data quality. `methods` replace the
    entries of METHODS for the same figures. `partial`: a query failed or had a partial answer, so
    nothing can be called healthy.
    """

    grid: Grid
    before_grid: Grid | None
    source: str
    tiers: Sequence[TierObserved] = ()
    episodes: Sequence[EpisodeObserved] = ()
    recommended: Sequence[PastAdvice] = ()
    configured: Sequence[ConfigChange] = ()
    targets: Sequence[TargetQuality] = ()
    filters: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ()
    partial: bool = False
