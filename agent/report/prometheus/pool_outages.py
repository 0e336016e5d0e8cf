"""Pools that had no replica for a while, as fleet mode concludes it at such a moment. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.agent.report.period_source import EnginePeriod
from kneewatch.agent.report.prometheus.inventory import FleetEngines
from kneewatch.agent.report.prometheus.period import PeriodData
from kneewatch.agent.report.prometheus.queries import Ranges
from kneewatch.agent.report.prometheus.resolution import Rows, Steps
from kneewatch.agent.report.series import runs
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.fleet.absence import vanished_causes
from kneewatch.diagnose.fleet.inventory import Key, LabelMap
from kneewatch.diagnose.fleet.observed import Observed, Past
from kneewatch.diagnose.fleet.tier import FleetCause
from kneewatch.reports.diagnosis_json import cause_document
from kneewatch.reports.weekly.measures import RUNNING
from kneewatch.reports.weekly.observed import Episode, EpisodeObserved, Held

JUDGED_MOST = 10
"""At most this many times without replicas, the longest, are judged: each costs some 30 queries."""

JUDGED_AFTER_S = 2700.0
"""A pool is judged at the latest this long after its last replica: fleet mode looks back an
hour."""


@dataclass(frozen=True, slots=True)
class EmptySpan:
    """A time, in Unix seconds, in which a pool that had replicas has none. `goes_on`: to the end of
    the period."""

    pool: str
    from_s: float
    to_s: float
    goes_on: bool

    @property
    def judged_s(self) -> float:
        """The moment at which fleet mode judges it: as late as it remembers the replicas."""
        return min(self.to_s, self.from_s + JUDGED_AFTER_S)


def empty_spans(pools: Mapping[str, Sequence[Key]], running: Rows, at: Steps) -> list[EmptySpan]:
    """The spans of whole steps without any engine of a pool. `pools`: the engines of each;
    `running` has a value in the steps in which an engine has series."""
    spans: list[EmptySpan] = []
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
            spans.append(EmptySpan(pool, from_s, to_s, bool(run[-1] == at.count - 1)))
    return spans


class PoolOutages:
    """The times in which pools of a report were not served. `left_out`: how many such times were
    not judged."""

    def __init__(self, ranges: Ranges, selector: str, names: LabelMap, fleet: FleetEngines) -> None:
        self._ranges, self._selector, self._names = ranges, selector, names
        self._fleet = fleet
        self._outages: list[tuple[EmptySpan, Observed, FleetCause]] = []
        self.left_out = 0

    def look(self, now: PeriodData) -> None:
        """Judge the longest times without replicas."""
        wanted = {engine.member.pool for engine in self._fleet.members}
        pools: dict[str, list[Key]] = {}
        for member in self._fleet.shape.members:
            if member.pool in wanted:
                pools.setdefault(member.pool, []).append(member.key)
        spans = empty_spans(pools, now.gauges[RUNNING], now.at)
        spans.sort(key=lambda span: span.from_s - span.to_s)
        self.left_out = len(spans[JUDGED_MOST:])
        for span in spans[:JUDGED_MOST]:
            observed = self._observed(span)
            causes = [] if observed is None else vanished_causes(observed)
            self._outages += [
                (span, observed, cause)
                for cause in causes
                if observed is not None and cause.pool == span.pool
            ]

    def _observed(self, span: EmptySpan) -> Observed | None:
        """The fleet while a pool is empty; None if it cannot be read."""
        window_s = self._fleet.asking.window_s
        config = FleetConfig(self._selector, self._names, window_s, at_s=span.judged_s, past=Past())
        try:
            return observe(self._ranges.source, config)
        except CollectError as exc:
            with self._ranges.problems.lock:
                self._ranges.problems.failed[f"replicas of {span.pool}"] = exc
            return None

    def engines(self) -> Iterator[EnginePeriod]:
        """Each outage, as an incident of its pool."""
        for span, observed, cause in self._outages:
            engine = next(e for e in self._fleet.members if e.member.pool == span.pool)
            yield EnginePeriod(
                target=span.pool,
                model=engine.member.model,
                tier=engine.tier,
                gpu=engine.gpu,
                evidence=_evidence(engine.tier, cause),
                held=[_held(span, observed, cause)],
            )


def _held(span: EmptySpan, observed: Observed, cause: FleetCause) -> Held:
    """The interval from the last series of the pool to the first new one."""
    last_seen_s = [
        row.seen_s for row in observed.gone if row.pool == span.pool and row.seen_s is not None
    ]
    return Held(
        "cause",
        cause.cause.id,
        cause.cause.severity,
        max(last_seen_s, default=span.from_s),
        None if span.goes_on else span.to_s,
        span.to_s,
        "" if span.goes_on else "ended",
    )


def _evidence(tier: str, cause: FleetCause) -> Callable[[Episode, bool], EpisodeObserved]:
    """The incident of a pool, with fleet mode's cause."""
    document = {"causes": [cause_document(cause.cause)]}
    return lambda episode, _detailed: EpisodeObserved(tier, cause.pool, "", episode, document)
