"""The history of a fleet: peaks of past days, request lengths a week ago, and usual hit ratios. I/O
edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import inf, isfinite

from kneewatch.agent.fleet import queries
from kneewatch.agent.fleet.queries import AnswerLog, QueryMoment, QueryScope
from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.prometheus.responses import Piece, Sample, pieces, steps_of
from kneewatch.diagnose.fleet.inventory import (
    PAST_HOURS_S,
    STEP_S,
    Group,
    Labels,
    Past,
    Peak,
    Shape,
    Usual,
    peak_of,
    usual_of,
)
from kneewatch.diagnose.fleet.workload_drift import SIGNALS
from kneewatch.diagnose.values import Histogram

PARTS = 4
"""Number of parallel queries for a long range: a server evaluates each query on one core."""

Lengths = dict[Group, dict[str, tuple[Histogram, Histogram]]]
Recent = dict[Group, dict[str, Histogram]]


class _Groups:
    """Finds the group of a series by its labels. If labels fit several groups, the series has no
    group."""

    def __init__(self, shape: Shape, names: Sequence[str]) -> None:
        self._names = names
        groups: dict[tuple[str, ...], set[Group]] = {}
        for member in shape.members:
            groups.setdefault(self._key(member.labels), set()).add(member.group)
        self._groups = {
            key: next(iter(candidates))
            for key, candidates in groups.items()
            if len(candidates) == 1
        }

    def of(self, labels: Labels) -> Group | None:
        """The group of a series with these labels. None if no group fits, or several."""
        return self._groups.get(self._key(labels))

    def __len__(self) -> int:
        return len(self._groups)

    def _key(self, labels: Labels) -> tuple[str, ...]:
        return tuple(labels.get(name, "") for name in self._names)


def past_of(
    source: PrometheusSource,
    scope: QueryScope,
    shape: Shape,
    names: Sequence[str],
    *,
    at_s: float,
    lookback_s: float,
) -> Past:
    """The history of groups; the values of the labels `names` define a group.

    If the history is incomplete, the result contains the reason instead of peaks.
    """
    groups = _Groups(shape, names)
    if not len(groups):
        return Past()
    lengths, recent, missing = _lengths(source, scope, groups, names, at_s)
    usual, unknown = _usual(source, scope, groups, names, at_s)
    missing = missing or unknown
    query = queries.running_requests(scope, names)
    try:
        peaks = _peaks(source, query, groups, at_s=at_s, span_s=lookback_s)
    except CollectError as exc:
        return Past({}, lengths, str(exc), recent, usual)
    return Past(peaks, lengths, missing, recent, usual)


def _peaks(
    source: PrometheusSource, query: str, groups: _Groups, *, at_s: float, span_s: float
) -> dict[Group, Peak]:
    """The peak of each group.

    Raises:
        CollectError: a part of the history cannot be read.
    """
    steps = steps_of(from_s=at_s - span_s, to_s=at_s, step_s=STEP_S)
    spans = pieces(from_s=at_s - span_s, to_s=at_s, step_s=STEP_S, steps=-(-steps // PARTS))

    def part(span: tuple[float, float]) -> list[Piece]:
        ranged = source.range(
            query, from_s=span[0], to_s=span[1], step_s=STEP_S, series=len(groups)
        )
        return list(ranged)

    points: dict[Group, dict[float, float]] = {}
    with ThreadPoolExecutor(PARTS) as pool:
        for piece in chain.from_iterable(pool.map(part, spans)):
            if piece.warnings:
                raise CollectError(f"partial: {piece.warnings[0]}", kind="query", hint="")
            for track in piece.tracks:
                group = groups.of(track.labels)
                if group is not None:
                    total = points.setdefault(group, {})
                    for t_s, value in track.points:
                        total[t_s] = total.get(t_s, 0.0) + value
    peaks = {
        group: peak_of(list(total.items()), span_s=span_s, steps=steps)
        for group, total in points.items()
    }
    return {group: peak for group, peak in peaks.items() if peak is not None}


def _lengths(
    source: PrometheusSource, scope: QueryScope, groups: _Groups, names: Sequence[str], at_s: float
) -> tuple[Lengths, Recent, str]:
    """Request lengths by group, in three parts. The first has pairs of the lengths a week ago and
    now. The second has the lengths now, also for groups without a past. The third is the reason if
    the other two are empty, else ""."""
    query_by_key = {
        f"{key} {is_past}": query for (key, is_past), query in queries.lengths(scope, names).items()
    }
    answers, missing = _complete(source, query_by_key, at_s)
    if missing:
        return {}, {}, f"lengths of requests: {missing}"
    read: dict[str, Mapping[Group, Histogram]] = {
        key: _buckets(samples, groups) for key, samples in answers.items()
    }
    lengths: Lengths = {}
    recent: Recent = {}
    for key in SIGNALS.values():
        before, now = read[f"{key} True"], read[f"{key} False"]
        for group, buckets in now.items():
            recent.setdefault(group, {})[key] = buckets
            if group in before:
                lengths.setdefault(group, {})[key] = before[group], buckets
    return lengths, recent, ""


def _usual(
    source: PrometheusSource, scope: QueryScope, groups: _Groups, names: Sequence[str], at_s: float
) -> tuple[dict[Group, Usual], str]:
    """The usual hit ratio, looked-up tokens/s and TTFT of each group, from past hours.

    Groups with too little data are left out. The second value is "", or the reason if a query
    failed or was partial; then no group has values.
    """
    hours: dict[Group, dict[float, dict[str, float]]] = {}
    for age_s in PAST_HOURS_S:
        answers, missing = _complete(source, queries.hourly(scope, names), at_s - age_s)
        if missing:
            return {}, f"usual hit ratio: {missing}"
        for key, samples in answers.items():
            for sample in samples:
                group = groups.of(sample.labels)
                if group is not None and isfinite(sample.value):
                    hours.setdefault(group, {}).setdefault(age_s, {})[key] = sample.value
    usual = {group: usual_of(by_age) for group, by_age in hours.items()}
    return {group: values for group, values in usual.items() if values is not None}, ""


def _complete(
    source: PrometheusSource, queries_by_key: Mapping[str, str], at_s: float
) -> tuple[dict[str, Sequence[Sample]], str]:
    """The samples of each query, and the reason if they are incomplete, else ""."""
    log = AnswerLog()
    answers = QueryMoment(source, log, at_s).instants(queries_by_key)
    failed = next(map(str, log.failed.values()), "")
    partial = next((f"partial: {warning}" for warning in log.warnings), "")
    return answers, failed or partial


def _buckets(samples: Sequence[Sample], groups: _Groups) -> dict[Group, dict[float, float]]:
    buckets: dict[Group, dict[float, float]] = {}
    for sample in samples:
        group, edge = groups.of(sample.labels), _edge(sample.labels.get("le", ""))
        if group is not None and edge is not None:
            counts = buckets.setdefault(group, {})
            counts[edge] = counts.get(edge, 0.0) + sample.value
    return buckets


def _edge(text: str) -> float | None:
    try:
        return inf if text == "+Inf" else float(text)
    except ValueError:
        return None
