"""Finds time spans with signs of trouble in the steps of a period. I/O edge.

The suspect spans of engines are later replayed from their samples. Suspect spans of the fleet (a
pool without replicas, a replica slower than its peers) are judged by fleet mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.fleet.presence import DEFAULT_PATIENCE_S, PATIENCE_S
from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.inventory import ReportedFleet, TargetScrapes, TierEngine
from kneewatch.agent.report.prometheus.period import PeriodData
from kneewatch.agent.report.prometheus.queries import (
    BEGUN,
    ERRORS,
    GENERATED_TOKENS,
    LATE,
    OPEN,
    PREEMPTED,
    Ranges,
    Rows,
    Steps,
)
from kneewatch.agent.report.series import Floats, Truths, runs
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.causes.availability import CRASH_LOOP_S
from kneewatch.diagnose.causes.clients import FAILED_FROM
from kneewatch.diagnose.fleet.absence import HELD_S, OF_A_POOL, late_causes, vanished_causes
from kneewatch.diagnose.fleet.diagnosis import diagnose
from kneewatch.diagnose.fleet.inventory import Key, Observed, Past
from kneewatch.diagnose.fleet.outliers import PEERS_MIN, SAME_ARRIVALS, SLOWER, TAKES_ALL
from kneewatch.diagnose.fleet.tier import FleetCause
from kneewatch.diagnose.learned.derived_signals import OPEN_MIN
from kneewatch.diagnose.ranking import ENGINE_RESTARTED
from kneewatch.diagnose.verdict import Cause
from kneewatch.reports.weekly.measures import RUNNING, WAITING
from kneewatch.rules.cascade import PREEMPTIONS_MIN, QUEUE_SHARE_OF_RUNNING
from kneewatch.rules.rule import HOUR_S, QUEUED_MIN

DOWN, FAILING, PREEMPTING, STALLED, HIDDEN, QUEUED, TOO_LATE = (
    "scrapes fail",
    "requests fail",
    "requests are preempted",
    "no tokens are generated",
    "calls stay open and no tokens are generated",
    "requests are queued",
    "first tokens are late",
)
ORDER = (DOWN, STALLED, HIDDEN, FAILING, PREEMPTING, TOO_LATE, QUEUED)
"""Signs of trouble, the most urgent first."""

CAUSES: Mapping[str, str] = {
    DOWN: "target_down", STALLED: "engine_stalled", PREEMPTING: "kv_pressure",
}  # fmt: skip
"""The cause that a sign proves without further evidence, by sign."""

LATE_SHARE, LATE_MIN = 0.1, 5.0
"""Minimum share and minimum number of late requests in a step that are a sign of trouble. 1% of
requests are late by definition. Of failed requests, the minimum share is FAILED_FROM."""

BRIDGED_STEPS = 2


class SuspectSpan(Struct, frozen=True):
    """A time span with a sign of trouble.

    `steps` is the number of steps that show the sign. `harm_requests` is the number of requests
    that were late, failed, preempted, queued or not served, estimated from the steps.
    """

    why: str
    from_s: float
    to_s: float
    steps: int
    harm_requests: float = 0.0


def suspect_spans(
    values: Mapping[str, Floats], at: Steps, scrapes: TargetScrapes | None
) -> list[SuspectSpan]:
    """The spans in which one engine shows signs of trouble. Overlapping spans are merged.
    Each array has the shape (steps,): one item per step of the range query."""
    signs = _signs(values, at, scrapes)
    suspects: list[SuspectSpan] = []
    for why in ORDER:
        if why in signs:
            suspects += _runs(why, signs[why], at)
    return [
        replace(suspect, harm_requests=_harm_requests(suspect, values, signs, at, scrapes))
        for suspect in _merged(suspects)
    ]


def worst_spans(spans: Sequence[SuspectSpan], *, most: int) -> list[int]:
    """Indices of the spans to replay, at most `most`; those with the most harm come first.

    Half of them are reserved for signs that do not prove a cause. Outages and stalls prove theirs,
    so they are reported even without a replay.
    """
    order = sorted(
        range(len(spans)),
        key=lambda at: (-spans[at].harm_requests, ORDER.index(spans[at].why), -spans[at].steps),
    )
    reserved = {*[at for at in order if spans[at].why not in CAUSES][: most // 2]}
    others = [at for at in order if at not in reserved][: most - len(reserved)]
    chosen = reserved.union(others)
    return [at for at in order if at in chosen]


def _harm_requests(
    suspect: SuspectSpan,
    values: Mapping[str, Floats],
    signs: Mapping[str, Truths],
    at: Steps,
    scrapes: TargetScrapes | None,
) -> float:
    inside = (at.begins_s >= suspect.from_s) & (at.begins_s < suspect.to_s)
    nothing = np.full(at.count, np.nan)
    begun = values.get(BEGUN, nothing)
    late = np.nansum(np.maximum(begun - values.get(LATE, nothing), 0)[inside])
    preempted = np.nansum(values.get(PREEMPTED, nothing)[inside])
    failed = np.nansum(values.get(ERRORS, nothing)[inside]) * at.step_s
    queued = np.nan_to_num(values.get(WAITING, nothing)[inside]).max(initial=0.0)
    usual = float(np.nanmean(begun)) if not np.isnan(begun).all() else 0.0
    missed = np.zeros(at.count)
    if DOWN in signs and scrapes is not None:
        missed = np.where(signs[DOWN], 1 - scrapes.up, 0.0)
    for sign in (STALLED, HIDDEN):
        missed = np.maximum(missed, signs.get(sign, False))
    return float(late + failed + preempted + queued + usual * missed[inside].sum())


def _signs(
    values: Mapping[str, Floats], at: Steps, scrapes: TargetScrapes | None
) -> dict[str, Truths]:
    """For each sign of trouble, a mask of the steps that show it. Shape: (steps,). A comparison
    with NaN is false."""
    signs: dict[str, Truths] = {}
    running, waiting = values.get(RUNNING), values.get(WAITING)
    if scrapes is not None:
        signs[DOWN] = scrapes.down(at)
    if PREEMPTED in values:
        signs[PREEMPTING] = values[PREEMPTED] >= PREEMPTIONS_MIN
    if running is not None and GENERATED_TOKENS in values:
        signs[STALLED] = (running >= 1) & (values[GENERATED_TOKENS] == 0)
        if OPEN in values:  # the gauges of an engine that hangs may show no request
            idle = values[GENERATED_TOKENS] == 0
            beside = values[OPEN] - running - np.nan_to_num(values.get(WAITING, running * 0))
            level = np.nanmedian(beside[~idle]) if (~idle & ~np.isnan(beside)).any() else np.inf
            signs[HIDDEN] = idle & (beside - level >= OPEN_MIN)
    if running is not None and waiting is not None:
        signs[QUEUED] = waiting >= np.maximum(QUEUED_MIN, QUEUE_SHARE_OF_RUNNING * running)
    if LATE in values and BEGUN in values:
        late = values[BEGUN] - values[LATE]
        signs[TOO_LATE] = (late >= LATE_MIN) & (late > LATE_SHARE * values[BEGUN])
    if ERRORS in values and BEGUN in values:
        errors = values[ERRORS] * at.step_s
        signs[FAILING] = (errors >= LATE_MIN) & (errors > FAILED_FROM * values[BEGUN])
    return signs


def _runs(why: str, holds: Truths, at: Steps) -> list[SuspectSpan]:
    begins_s = at.begins_s
    return [
        SuspectSpan(why, float(begins_s[run[0]]), float(begins_s[run[-1]]) + at.step_s, len(run))
        for run in runs(holds, bridged=BRIDGED_STEPS)
    ]


def _merged(suspects: Sequence[SuspectSpan]) -> list[SuspectSpan]:
    """Merge overlapping spans. The merged span has the worst sign. The input must be sorted by
    sign, the worst first."""
    kept: list[SuspectSpan] = []
    for suspect in suspects:
        over = next((k for k, other in enumerate(kept) if _overlap(suspect, other)), None)
        if over is None:
            kept.append(suspect)
            continue
        other = kept[over]
        kept[over] = SuspectSpan(
            other.why,
            min(suspect.from_s, other.from_s),
            max(suspect.to_s, other.to_s),
            max(suspect.steps, other.steps),
        )
    return sorted(kept, key=lambda suspect: suspect.from_s)


def _overlap(suspect: SuspectSpan, other: SuspectSpan) -> bool:
    return suspect.from_s <= other.to_s and suspect.to_s >= other.from_s


# --- Pools without replicas, and slow replicas ----------------------------------------------------

MOMENTS_MOST = 10
"""Maximum number of moments at which fleet mode judges spans, those with the longest spans. Each
costs about 30 queries."""

JUDGED_AFTER_S = 2700.0
"""Maximum seconds between the end of a pool's last replica and the moment at which fleet mode
judges the pool. Fleet mode looks back an hour."""


SLOW_CAUSES = ("gpu_fault", "gpu_throttled", "bad_node")
"""Causes that make a replica slower than its peers, root causes first."""


class FleetSpan(Struct, frozen=True):
    """A time span, in Unix seconds, in which a pool lost all its replicas or a target that it is
    named after never answered (`engine` is None), or in which `engine` generated tokens more slowly
    than its peers, got all their requests, or started anew as others did. One of `causes` may make
    it so.

    `goes_on`: the span lasts to the end of the period. `judged_s` are the first and the last moment
    at which fleet mode can judge the span.
    """

    pool: str
    engine: TierEngine | None
    from_s: float
    to_s: float
    goes_on: bool
    judged_s: tuple[float, float]
    causes: tuple[str, ...] = SLOW_CAUSES


def empty_spans(pools: Mapping[str, Sequence[Key]], running: Rows, at: Steps) -> list[FleetSpan]:
    """The spans in which a pool has no engine for whole steps. `pools` has the engines of each
    pool. A row of `running` has a value in the steps in which the engine has series."""
    spans: list[FleetSpan] = []
    for pool, keys in pools.items():
        rows = [~np.isnan(running[key]) for key in keys if key in running]
        serving = np.logical_or.reduce(rows) if rows else np.zeros(at.count, dtype=bool)
        if not serving.any():
            continue
        empty = ~serving
        empty[: int(np.argmax(serving))] = False
        for run in runs(empty):
            from_s = float(at.begins_s[run[0]])
            to_s = float(at.begins_s[run[-1]]) + at.step_s
            latest_s = min(to_s, from_s + JUDGED_AFTER_S)
            judged_s = min(latest_s, from_s + 2 * HELD_S), latest_s
            goes_on = bool(run[-1] == at.count - 1)
            spans.append(FleetSpan(pool, None, from_s, to_s, goes_on, judged_s))
    return spans


NEVER = (OF_A_POOL,)
"""The cause of a target that never answered."""


def silent_spans(up: Rows, at: Steps) -> Iterator[FleetSpan]:
    """Yields the spans in which targets existed that never answered, for longer than any start may
    take at least. `up` is the share of successful scrapes by target."""
    for target, row in up.items():
        seen = np.flatnonzero(~np.isnan(row))
        if not len(seen) or row[seen].any():
            continue
        from_s, last_s = float(at.begins_s[seen[0]]), float(at.begins_s[seen[-1]])
        if last_s - from_s >= PATIENCE_S[0]:
            latest_s = min(last_s, from_s + HOUR_S - at.step_s)
            judged_s = min(latest_s, from_s + DEFAULT_PATIENCE_S + at.step_s), latest_s
            goes_on = bool(seen[-1] == at.count - 1)
            name, to_s = " ".join(target), last_s + at.step_s
            yield FleetSpan(name, None, from_s, to_s, goes_on, judged_s, NEVER)


SLOW_LASTS_S = 300.0
"""Minimum seconds for which a replica must be slower than its peers, as in the exported alert."""

SLOW_JUDGED_AFTER_S = 600.0
BUSY_PER_S = 1.0
"""Least requests/s of an engine that gets nearly all requests of its tier."""


def slow_spans(
    engines: Sequence[TierEngine], itl_s: Rows, begun: Rows, at: Steps
) -> list[FleetSpan]:
    """The spans in which single engines of a tier are slower than the others at the same load, or
    get nearly all requests. The bounds are those of the causes `bad_node` and `replica_imbalance`.

    For each step, `itl_s` has the mean ITL in seconds and `begun` the number of requests.
    """
    measured = [engine for engine in engines if engine.key in itl_s]
    if len(measured) < PEERS_MIN:
        return []
    nothing = np.full(at.count, np.nan)
    means_s = np.array([itl_s[engine.key] for engine in measured])
    arrivals = np.array([begun.get(engine.key, nothing) for engine in measured])
    compared = (~np.isnan(means_s)).sum(axis=0) >= PEERS_MIN
    busier = arrivals > SAME_ARRIVALS * _middle(arrivals)
    slow = compared & (means_s >= SLOWER * _middle(means_s)) & ~busier
    most = np.maximum(TAKES_ALL * np.nansum(arrivals, axis=0), BUSY_PER_S * at.step_s)
    signs = ((slow, SLOW_CAUSES), (arrivals >= most, ("replica_imbalance",)))
    spans: list[FleetSpan] = []
    rows = ((engine, holds[i], of) for holds, of in signs for i, engine in enumerate(measured))
    for engine, holds, causes in rows:
        for run in runs(holds, bridged=BRIDGED_STEPS):
            from_s = float(at.begins_s[run[0]])
            to_s = float(at.begins_s[run[-1]]) + at.step_s
            if to_s - from_s >= SLOW_LASTS_S:
                goes_on = bool(run[-1] == at.count - 1)
                longest_s = min(to_s - from_s, 2 * SLOW_JUDGED_AFTER_S)
                judged_s = from_s + longest_s / 2, from_s + 0.75 * longest_s
                pool = engine.member.pool
                spans.append(FleetSpan(pool, engine, from_s, to_s, goes_on, judged_s, causes))
    return spans


def _middle(rows: Floats) -> Floats:
    """The median of each step over all rows. NaN where no row has a value."""
    has_value = ~np.isnan(rows).all(axis=0)
    return np.where(has_value, np.nanmedian(np.where(has_value, rows, 0.0), axis=0), np.nan)


RESTARTED_S = 60.0, 240.0
"""The least and the most seconds between the last restart in a span and the moment at which fleet
mode judges it."""


def restart_spans(starts: Sequence[tuple[float, TierEngine]]) -> Iterator[FleetSpan]:
    """Yields the spans in which engines of one pool start anew again and again or one after the
    other, for each such engine. `starts` are sorted by time, in Unix seconds."""
    together: list[tuple[float, TierEngine]] = []
    for at, start in enumerate(starts, 1):
        together.append(start)
        last_s = start[0]
        if at < len(starts) and starts[at][0] - last_s <= CRASH_LOOP_S:
            continue
        judged_s = last_s + RESTARTED_S[0], last_s + RESTARTED_S[1]
        for engine in {engine.key: engine for _, engine in together if len(together) > 1}.values():
            to_s = last_s + RESTARTED_S[0]
            pool, from_s = engine.member.pool, together[0][0]
            yield FleetSpan(pool, engine, from_s, to_s, False, judged_s, (ENGINE_RESTARTED,))
        together.clear()


def moments(spans: Iterable[FleetSpan]) -> list[tuple[float, list[FleetSpan]]]:
    """The fewest moments at which fleet mode can judge all spans, each with its spans."""
    rows: list[tuple[float, list[FleetSpan]]] = []
    for span in sorted(spans, key=lambda span: span.judged_s[1]):
        if not rows or span.judged_s[0] > rows[-1][0]:
            rows.append((span.judged_s[1], []))
        rows[-1][1].append(span)
    return rows


class KnownCause(Struct, frozen=True):
    """A cause that is known without a replay, and when it was present, in Unix seconds. `goes_on`:
    it lasts to the end of the period."""

    from_s: float
    to_s: float
    cause: Cause
    goes_on: bool = False

    def holds(self, t_s: float) -> bool:
        """Whether the cause was present at a time."""
        return self.from_s <= t_s < self.to_s or (self.goes_on and t_s >= self.from_s)

    def is_among(self, others: Iterable[KnownCause]) -> bool:
        """Whether one of the others is this cause and was present when this one began."""
        return any(row.cause.id == self.cause.id and row.holds(self.from_s) for row in others)


class FleetIncidents:
    """The causes in a period that fleet mode concludes.

    `outages` are those of whole pools and of targets that never answered, by pool; `known` those of
    engines that differ from their peers or restart. `left_out` is the number of suspect spans that
    were not judged.
    """

    def __init__(self, ranges: Ranges, config: FleetConfig, fleet: ReportedFleet) -> None:
        self._ranges, self._config, self._fleet = ranges, config, fleet
        self.outages: dict[str, list[KnownCause]] = {}
        self.known: dict[Key, list[KnownCause]] = {}
        self.left_out = 0

    def look(self, now: PeriodData) -> None:
        """Let fleet mode judge the spans, at the moments with the longest ones."""
        jobs = {engine.member.labels.get("job") for engine in self._fleet.members}
        silent = silent_spans({t: row for t, row in now.up.items() if t[0] in jobs}, now.at)
        rows = moments([*self._empty(now), *silent, *self._behind(now), *self._restarted(now)])
        rows.sort(key=lambda row: -sum(span.to_s - span.from_s for span in row[1]))
        self.left_out = sum(len(spans) for _, spans in rows[MOMENTS_MOST:])
        for judged_s, spans in rows[:MOMENTS_MOST]:
            observed = self._observed(judged_s, spans[0])
            if observed is not None:
                self._judge(observed, spans)

    def _judge(self, observed: Observed, spans: Sequence[FleetSpan]) -> None:
        vanished = vanished_causes(observed)
        of_fleet = diagnose(observed, self._config.profile).causes
        silent = [span for span in spans if span.causes is NEVER]
        for late in late_causes(observed) if silent else ():
            since_s = late.since_s or 0.0
            span = min(silent, key=lambda span: abs(span.from_s - since_s))
            known = _known(span, late, span.from_s)
            of_pool = self.outages.setdefault(late.pool, [])
            of_pool += [] if known.is_among(of_pool) else [known]
        for span in spans:
            if span.causes is NEVER:
                continue
            if span.engine is None:
                self.outages.setdefault(span.pool, []).extend(
                    _known(span, cause, _last_seen_s(span, observed))
                    for cause in vanished
                    if cause.pool == span.pool
                )
            elif (cause := _why(span.engine, span.causes, of_fleet)) is not None:
                known = _known(span, cause, span.from_s)
                self.known.setdefault(span.engine.key, []).append(known)

    def _empty(self, now: PeriodData) -> list[FleetSpan]:
        fleet_pools = {engine.member.pool for engine in self._fleet.members}
        pools: dict[str, list[Key]] = {}
        for member in self._fleet.shape.members:
            if member.pool in fleet_pools:
                pools.setdefault(member.pool, []).append(member.key)
        return empty_spans(pools, now.gauges[RUNNING], now.at)

    def _behind(self, now: PeriodData) -> Iterator[FleetSpan]:
        itl_s, begun = now.signs[queries.ITL_MEAN], now.signs[queries.BEGUN]
        for tier in self._fleet.tiers():
            yield from slow_spans(self._fleet.of(tier), itl_s, begun, now.at)

    def _restarted(self, now: PeriodData) -> Iterator[FleetSpan]:
        pools: dict[str, list[tuple[float, TierEngine]]] = {}
        for engine in self._fleet.members:
            starts = [(t_s, engine) for t_s in now.process_starts(engine.member)]
            pools.setdefault(engine.member.pool, []).extend(starts)
        for starts in pools.values():
            yield from restart_spans(sorted(starts, key=lambda start: start[0]))

    def _observed(self, judged_s: float, span: FleetSpan) -> Observed | None:
        """The state of the fleet at a moment, for a span. None if it cannot be read."""
        config = replace(self._config, at_s=judged_s, past=Past())
        try:
            return observe(self._ranges.source, config)
        except CollectError as exc:
            name = span.pool if span.engine is None else span.engine.target
            self._ranges.problems.fail(f"replicas of {name}", exc)
            return None


def _why(engine: TierEngine, ids: Sequence[str], causes: Sequence[FleetCause]) -> Cause | None:
    """The first of some causes that fleet mode found on a replica. None if it found none."""
    names = {engine.member.name, engine.target}
    own = {row.id: row for row in causes if not names.isdisjoint(row.replicas)}
    return next((own[cause_id] for cause_id in ids if cause_id in own), None)


def _known(span: FleetSpan, cause: Cause, from_s: float) -> KnownCause:
    return KnownCause(from_s, span.to_s, replace(cause, since_s=from_s), span.goes_on)


def _last_seen_s(span: FleetSpan, observed: Observed) -> float:
    """Unix time of the last sample of a pool."""
    last_seen_s = [
        row.seen_s for row in observed.gone if row.pool == span.pool and row.seen_s is not None
    ]
    return max(last_seen_s, default=span.from_s)
