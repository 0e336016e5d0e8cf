"""Finds time spans with signs of trouble in the steps of a period. I/O edge.

The suspect spans of engines are later replayed from their samples. Suspect spans of the fleet (a
pool without replicas, a replica slower than its peers) are judged by fleet mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.inventory import FleetEngines, TargetScrapes, TierEngine
from kneewatch.agent.report.prometheus.period import PeriodData
from kneewatch.agent.report.prometheus.queries import (
    BEGUN,
    GENERATED_TOKENS,
    LATE,
    PREEMPTED,
    Ranges,
    Rows,
    Steps,
)
from kneewatch.agent.report.series import Floats, Truths, runs
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.fleet.absence import vanished_causes
from kneewatch.diagnose.fleet.diagnosis import diagnose
from kneewatch.diagnose.fleet.inventory import Key, Observed, Past
from kneewatch.diagnose.fleet.outliers import PEERS_MIN, SAME_ARRIVALS, SLOWER, TAKES_ALL
from kneewatch.diagnose.verdict import Cause
from kneewatch.reports.weekly.measures import RUNNING, WAITING
from kneewatch.rules.baseline import QUEUED_MIN
from kneewatch.rules.cascade import PREEMPTIONS_MIN, QUEUE_SHARE_OF_RUNNING

DOWN, PREEMPTING, STALLED, QUEUED, TOO_LATE = (
    "scrapes fail",
    "requests are preempted",
    "no tokens are generated",
    "requests are queued",
    "first tokens are late",
)
ORDER = (DOWN, STALLED, PREEMPTING, TOO_LATE, QUEUED)
"""Signs of trouble, the most urgent first."""

CAUSES: Mapping[str, str] = {
    DOWN: "target_down", STALLED: "engine_stalled", PREEMPTING: "kv_pressure",
}  # fmt: skip
"""The cause that a sign proves without further evidence, by sign."""

LATE_SHARE, LATE_MIN = 0.1, 5.0
"""Minimum share and minimum number of late requests in a step that are a sign of trouble. 1% of
requests are late by definition."""

BRIDGED_STEPS = 2


class SuspectSpan(Struct, frozen=True):
    """A time span with a sign of trouble.

    `steps` is the number of steps that show the sign. `harm_requests` is the number of requests
    that were late, preempted, queued or not served, estimated from the steps.
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
    queued = np.nan_to_num(values.get(WAITING, nothing)[inside]).max(initial=0.0)
    usual = float(np.nanmean(begun)) if not np.isnan(begun).all() else 0.0
    missed = np.zeros(at.count)
    if DOWN in signs and scrapes is not None:
        missed = np.where(signs[DOWN], 1 - scrapes.up, 0.0)
    if STALLED in signs:
        missed = np.maximum(missed, signs[STALLED])
    return float(late + preempted + queued + usual * missed[inside].sum())


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
    if running is not None and waiting is not None:
        signs[QUEUED] = waiting >= np.maximum(QUEUED_MIN, QUEUE_SHARE_OF_RUNNING * running)
    if LATE in values and BEGUN in values:
        late = values[BEGUN] - values[LATE]
        signs[TOO_LATE] = (late >= LATE_MIN) & (late > LATE_SHARE * values[BEGUN])
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

JUDGED_MOST = 10
"""Maximum number of spans that fleet mode judges, the longest ones. Each costs about 30 queries."""

JUDGED_AFTER_S = 2700.0
"""Maximum seconds between the end of a pool's last replica and the moment at which fleet mode
judges the pool. Fleet mode looks back an hour."""


SLOW_CAUSES = ("gpu_fault", "gpu_throttled", "bad_node")
"""Causes that make a replica slower than its peers, root causes first."""


class FleetSpan(Struct, frozen=True):
    """A time span, in Unix seconds, in which a pool lost all its replicas (`engine` is None), or in
    which `engine` generated tokens more slowly than its peers or got all their requests. One of
    `causes` may make it so.

    `goes_on`: the span lasts to the end of the period. `judged_s` is the moment at which fleet mode
    judges the span.
    """

    pool: str
    engine: TierEngine | None
    from_s: float
    to_s: float
    goes_on: bool
    judged_s: float
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
            goes_on, judged_s = bool(run[-1] == at.count - 1), min(to_s, from_s + JUDGED_AFTER_S)
            spans.append(FleetSpan(pool, None, from_s, to_s, goes_on, judged_s))
    return spans


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
                judged_s = min((from_s + to_s) / 2, from_s + SLOW_JUDGED_AFTER_S)
                pool = engine.member.pool
                spans.append(FleetSpan(pool, engine, from_s, to_s, goes_on, judged_s, causes))
    return spans


def _middle(rows: Floats) -> Floats:
    """The median of each step over all rows. NaN where no row has a value."""
    has_value = ~np.isnan(rows).all(axis=0)
    return np.where(has_value, np.nanmedian(np.where(has_value, rows, 0.0), axis=0), np.nan)


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


class FleetIncidents:
    """The causes in a period that fleet mode concludes.

    `outages` are those of whole pools, by pool; `slow` those of engines that are slower than their
    peers. `left_out` is the number of suspect spans that were not judged.
    """

    def __init__(self, ranges: Ranges, config: FleetConfig, fleet: FleetEngines) -> None:
        self._ranges, self._config, self._fleet = ranges, config, fleet
        self.outages: dict[str, list[KnownCause]] = {}
        self.slow: dict[Key, list[KnownCause]] = {}
        self.left_out = 0

    def look(self, now: PeriodData) -> None:
        """Let fleet mode judge the longest spans."""
        spans = [*self._empty(now), *self._behind(now)]
        spans.sort(key=lambda span: span.from_s - span.to_s)
        self.left_out = len(spans[JUDGED_MOST:])
        for span in spans[:JUDGED_MOST]:
            observed = self._observed(span)
            if observed is None:
                continue
            if span.engine is None:
                causes = (row for row in vanished_causes(observed) if row.pool == span.pool)
                self.outages.setdefault(span.pool, []).extend(
                    _known(span, cause, _last_seen_s(span, observed)) for cause in causes
                )
            elif (cause := self._why(span.engine, span.causes, observed)) is not None:
                known = _known(span, cause, span.from_s)
                self.slow.setdefault(span.engine.key, []).append(known)

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

    def _observed(self, span: FleetSpan) -> Observed | None:
        """The state of the fleet at the moment at which a span is judged. None if it cannot be
        read."""
        config = replace(self._config, at_s=span.judged_s, past=Past())
        try:
            return observe(self._ranges.source, config)
        except CollectError as exc:
            name = span.pool if span.engine is None else span.engine.target
            with self._ranges.problems.lock:
                self._ranges.problems.failed[f"replicas of {name}"] = exc
            return None

    def _why(self, engine: TierEngine, of: Sequence[str], observed: Observed) -> Cause | None:
        """The first of some causes that fleet mode finds on a replica. None if it finds none."""
        name = engine.member.name
        causes = {
            row.id: row
            for row in diagnose(observed, self._config.profile).causes
            if name in row.replicas
        }
        return next((causes[cause] for cause in of if cause in causes), None)


def _known(span: FleetSpan, cause: Cause, from_s: float) -> KnownCause:
    return KnownCause(from_s, span.to_s, replace(cause, since_s=from_s), span.goes_on)


def _last_seen_s(span: FleetSpan, observed: Observed) -> float:
    """Unix time of the last sample of a pool."""
    last_seen_s = [
        row.seen_s for row in observed.gone if row.pool == span.pool and row.seen_s is not None
    ]
    return max(last_seen_s, default=span.from_s)
