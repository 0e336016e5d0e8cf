"""kneewatch's own metrics: what it says of each engine, and how it does itself.

What is not known has no series: no series is never a zero that looks like health. Names and units
follow Prometheus's conventions; every series of an engine has the labels target, model, engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kneewatch.agent.api.responses import clean
from kneewatch.agent.api.service import Service, late, rank, shown
from kneewatch.agent.notify.channel import NotifierStats
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.causes.ranking import BY_ID
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import REPLICAS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HEALTHS = ("ok", "info", "warning", "critical", "unknown")
ENGINE = ("target", "model", "engine")

Labels = tuple[str, str, str]


class OwnMetrics(Collector):
    """Everything at one moment, made anew for each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """The families."""
        now_s = self._service.clock()
        states = self._service.board.states()
        told: dict[Labels, tuple[TargetState, Diagnosis]] = {}
        for state in states:
            for one in shown(state, is_late=late(state, now_s)):
                labels = clean(state.name), clean(one.model), clean(one.engine)
                # Replicas behind one page have the same labels: the worst of them is told.
                if labels not in told or rank(one) > rank(told[labels][1]):
                    told[labels] = state, one
        yield from _verdicts([(labels, one) for labels, (_, one) in told.items()])
        yield self._replicas(told)
        yield from _cycles(states, now_s)
        yield from _sources(states)
        yield from self._itself(len(states))
        if self._service.fleet is not None:
            from kneewatch.agent.api.fleet import fleet_families  # here: few watch one

            yield from fleet_families(self._service.fleet.state, now_s)
        if self._service.notifier:
            yield from _messages(self._service.notifier.stats_by_receiver())

    def _replicas(self, told: Mapping[Labels, tuple[TargetState, Diagnosis]]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "kneewatch_recommended_replicas",
            "Copies of the server that its load needs, counted as the setting replicas counts "
            "them; the stated number while none is recommended.",
            labels=("target", "model"),
        )
        stated = {spec.name: spec.settings["replicas"] for spec in self._service.targets()}
        found: dict[tuple[str, str], float] = {}
        for (target, model, _), (state, diagnosis) in told.items():
            wanted = recommended_replicas(diagnosis, stated.get(state.name))
            if wanted is not None:
                found[target, model] = max(found.get((target, model), 0.0), wanted)
        for labels, wanted in found.items():
            family.add_metric(labels, wanted)
        if self._service.fleet is not None:
            from kneewatch.agent.api.fleet import fleet_replicas

            fleet, now_s = self._service.fleet.state, self._service.clock()
            for names, needed in fleet_replicas(fleet, now_s):
                family.add_sample(family.name, names, needed)
        return family

    def _itself(self, watched: int) -> Iterator[Metric]:
        service = self._service
        info = GaugeMetricFamily(
            "kneewatch_build_info", "1, with the version as a label.", labels=("version",)
        )
        info.add_metric((service.version,), 1)
        yield info
        yield _gauge("kneewatch_start_time_seconds", "When it started.", service.started_s)
        yield _gauge("kneewatch_targets", "Targets that are configured.", len(service.targets()))
        yield _gauge("kneewatch_targets_scraped", "Targets that have had a cycle.", watched)
        if service.store is None:
            return
        stats = service.store.stats()
        yield _gauge("kneewatch_store_queued_cycles", "Cycles not yet written.", stats.queued)
        yield _counter("kneewatch_store_written_cycles", "Cycles written.", stats.written)
        yield _counter("kneewatch_store_dropped_cycles", "Cycles lost.", stats.dropped)
        yield _gauge("kneewatch_store_size_bytes", "What the history takes.", stats.bytes)
        yield _gauge(
            "kneewatch_store_working", "Whether the last write went well.", not stats.last_error
        )
        if stats.oldest_s is not None:
            yield _gauge(
                "kneewatch_store_oldest_timestamp_seconds", "The oldest scrape.", stats.oldest_s
            )


def recommended_replicas(diagnosis: Diagnosis, stated: int | None) -> float | None:
    """The most replicas that are recommended for an engine, the stated ones where none are; None
    while it cannot be judged, so that nobody scales down on blindness."""
    if diagnosis.stage is None or diagnosis.health == "unknown":
        return None
    wanted = [
        float(change.after)
        for made in diagnosis.recommendations
        for change in made.changes
        if change.flag == REPLICAS and isinstance(change.after, int | float)
    ]
    return max(wanted, default=None if stated is None else float(stated))


def exposition(service: Service) -> bytes:
    """The page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(OwnMetrics(service))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _verdicts(told: Sequence[tuple[Labels, Diagnosis]]) -> Iterator[Metric]:
    causes = tuple(BY_ID)
    health = _family("kneewatch_health", "1 for the verdict's word, 0 for the others.", "health")
    stage = _family("kneewatch_stage", "Stage of the KV cascade, 0 to 4.")
    cause = _family("kneewatch_cause", "1 while a cause is concluded, else 0.", "cause")
    confidence = _family("kneewatch_cause_confidence", "How sure a cause is, 0 to 1.", "cause")
    finding = _family(
        "kneewatch_finding_severity",
        "A rule's state: 0 ok, 1 info, 2 warning, 3 critical; none where it is unknown.",
        "rule",
    )
    unknown = _family("kneewatch_unknown_findings", "Rules that cannot be judged.")
    missing = _family("kneewatch_unknown_signals", "Signals that cannot be had.")
    forecast = _family(
        "kneewatch_kv_exhaustion_seconds",
        "Seconds until the KV cache is full at the present trend; none without a trend.",
    )
    for labels, diagnosis in told:
        for word in HEALTHS:
            health.add_metric((*labels, word), float(diagnosis.health == word))
        blind = diagnosis.health == "unknown" or diagnosis.stage is None
        active = {one.id: one.confidence for one in diagnosis.causes}
        # A page that cannot be read does not say that nothing is wrong.
        for name in active if blind else dict.fromkeys((*causes, *active)):
            cause.add_metric((*labels, name), float(name in active))
        for name, sure in active.items():
            confidence.add_metric((*labels, name), sure)
        judged = [one for one in diagnosis.findings if one.state != "unknown"]
        for one in judged:
            finding.add_metric((*labels, one.rule.id), one.severity)
        unknown.add_metric(labels, len(diagnosis.findings) - len(judged))
        missing.add_metric(labels, len(diagnosis.unknown))
        if diagnosis.stage is not None and not blind:
            stage.add_metric(labels, diagnosis.stage.number)
            if diagnosis.stage.forecast_s is not None:
                forecast.add_metric(labels, diagnosis.stage.forecast_s)
    yield from (health, stage, cause, confidence, finding, unknown, missing, forecast)


def _cycles(states: Sequence[TargetState], now_s: float) -> Iterator[Metric]:
    rows: Mapping[str, tuple[str, str]] = {
        "cycle_duration_seconds": ("The newest cycle, from request to verdict.", "cycle_s"),
        "interval_seconds": ("The interval in force, longer while backed off.", "interval_s"),
        "failing_cycles": ("Failed cycles in a row.", "failing"),
        "last_cycle_timestamp_seconds": ("When the newest cycle was.", "t_s"),
    }
    for name, (told, attribute) in rows.items():
        family = GaugeMetricFamily(f"kneewatch_{name}", told, labels=("target",))
        for state in states:
            family.add_metric((clean(state.name),), cast("float", getattr(state, attribute)))
        yield family
    is_late = GaugeMetricFamily(
        "kneewatch_late", "1 where the newest cycle is too old to tell of now.", labels=("target",)
    )
    for state in states:
        is_late.add_metric((clean(state.name),), float(late(state, now_s)))
    yield is_late
    for name, told, attribute in (
        ("cycles", "Cycles since the start.", "cycles"),
        ("cycle_failures", "Cycles that failed.", "failures"),
    ):
        counted = CounterMetricFamily(f"kneewatch_{name}", told, labels=("target",))
        for state in states:
            counted.add_metric((clean(state.name),), cast("float", getattr(state, attribute)))
        yield counted


def _sources(states: Sequence[TargetState]) -> Iterator[Metric]:
    success = GaugeMetricFamily(
        "kneewatch_collector_success",
        "Whether a source could be read at its last run.",
        labels=("target", "source"),
    )
    duration = GaugeMetricFamily(
        "kneewatch_collector_duration_seconds",
        "How long a source's last run took.",
        labels=("target", "source"),
    )
    for state in states:
        for source in state.sources:
            labels = (clean(state.name), clean(source.name))
            success.add_metric(labels, float(source.success))
            duration.add_metric(labels, source.duration_s)
    yield from (success, duration)


def _messages(told: Mapping[str, NotifierStats]) -> Iterator[Metric]:
    queued = GaugeMetricFamily(
        "kneewatch_notifications_queued", "Messages that wait to be sent.", labels=("receiver",)
    )
    for receiver, stats in told.items():
        queued.add_metric((clean(receiver),), stats.queued)
    yield queued
    for name, what, attribute in (
        ("sent", "Messages delivered.", "sent"),
        ("failures", "Tries to deliver a message that failed.", "failed"),
        ("dropped", "Messages given up.", "dropped"),
    ):
        counted = CounterMetricFamily(f"kneewatch_notifications_{name}", what, labels=("receiver",))
        for receiver, stats in told.items():
            counted.add_metric((clean(receiver),), cast("float", getattr(stats, attribute)))
        yield counted


def _family(name: str, told: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, labels=(*ENGINE, *more))


def _gauge(name: str, told: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, value=float(value))


def _counter(name: str, told: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, told, value=float(value))
