"""kneewatch's own metrics: the diagnosis of each engine, and kneewatch's own state.

An unknown value has no series: a zero would look like good health. Names and units follow
Prometheus's conventions; every series of an engine has the labels target, model, engine.
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
from kneewatch.reports.triage.view_model import RANKS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE = ("target", "model", "engine")

Labels = tuple[str, str, str]


class OwnMetrics(Collector):
    """A collector that builds all metrics anew for each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        now_s = self._service.clock()
        states = self._service.board.states()
        by_labels: dict[Labels, tuple[TargetState, Diagnosis]] = {}
        for state in states:
            for diagnosis in shown(state, is_late=late(state, now_s)):
                labels = clean(state.name), clean(diagnosis.model), clean(diagnosis.engine)
                # Replicas behind one page have the same labels: export the worst.
                if labels not in by_labels or rank(diagnosis) > rank(by_labels[labels][1]):
                    by_labels[labels] = state, diagnosis
        yield from _verdicts([(labels, diagnosis) for labels, (_, diagnosis) in by_labels.items()])
        yield self._replicas(by_labels)
        yield from _cycles(states, now_s)
        yield from _sources(states)
        yield from self._itself(len(states))
        if self._service.fleet is not None:
            from kneewatch.agent.api.fleet import fleet_families  # here: few watch one

            yield from fleet_families(self._service.fleet.state, now_s)
        if self._service.notifier:
            yield from _messages(self._service.notifier.stats_by_receiver())

    def _replicas(
        self, by_labels: Mapping[Labels, tuple[TargetState, Diagnosis]]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "kneewatch_recommended_replicas",
            "Replicas that the load needs, in the unit of the setting replicas; the setting's "
            "value while no change is recommended.",
            labels=("target", "model"),
        )
        stated = {spec.name: spec.settings["replicas"] for spec in self._service.targets()}
        replicas: dict[tuple[str, str], float] = {}
        for (target, model, _), (state, diagnosis) in by_labels.items():
            count = recommended_replicas(diagnosis, stated.get(state.name))
            if count is not None:
                replicas[target, model] = max(replicas.get((target, model), 0.0), count)
        for labels, count in replicas.items():
            family.add_metric(labels, count)
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
        yield _gauge("kneewatch_start_time_seconds", "When kneewatch started.", service.started_s)
        yield _gauge("kneewatch_targets", "Targets that are configured.", len(service.targets()))
        yield _gauge("kneewatch_targets_scraped", "Targets that have had a cycle.", watched)
        if service.store is None:
            return
        stats = service.store.stats()
        yield _gauge("kneewatch_store_queued_cycles", "Cycles not yet written.", stats.queued)
        yield _counter("kneewatch_store_written_cycles", "Cycles written.", stats.written)
        yield _counter("kneewatch_store_dropped_cycles", "Cycles lost.", stats.dropped)
        yield _gauge("kneewatch_store_size_bytes", "Size of the history.", stats.bytes)
        yield _gauge(
            "kneewatch_store_working", "1 if the last write succeeded.", not stats.last_error
        )
        if stats.oldest_s is not None:
            yield _gauge(
                "kneewatch_store_oldest_timestamp_seconds", "The oldest scrape.", stats.oldest_s
            )


def recommended_replicas(diagnosis: Diagnosis, stated: int | None) -> float | None:
    """The largest recommended number of replicas, `stated` where none is recommended; None while
    the engine cannot be judged, so that nothing scales down on missing data."""
    if diagnosis.stage is None or diagnosis.health == "unknown":
        return None
    counts = [
        float(change.after)
        for recommendation in diagnosis.recommendations
        for change in recommendation.changes
        if change.flag == REPLICAS and isinstance(change.after, int | float)
    ]
    return max(counts, default=None if stated is None else float(stated))


def exposition(service: Service) -> bytes:
    """The metrics page in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(OwnMetrics(service))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _verdicts(diagnoses: Sequence[tuple[Labels, Diagnosis]]) -> Iterator[Metric]:
    causes = tuple(BY_ID)
    health = _family("kneewatch_health", "1 for the verdict's word, 0 for the others.", "health")
    stage = _family("kneewatch_stage", "Stage of the KV cascade, 0 to 4.")
    cause = _family("kneewatch_cause", "1 while a cause is concluded, else 0.", "cause")
    confidence = _family("kneewatch_cause_confidence", "Confidence of a cause, 0 to 1.", "cause")
    finding = _family(
        "kneewatch_finding_severity",
        "A rule's state: 0 ok, 1 info, 2 warning, 3 critical; no series where it is unknown.",
        "rule",
    )
    unknown = _family("kneewatch_unknown_findings", "Rules that cannot be judged.")
    missing = _family("kneewatch_unknown_signals", "Signals without a value.")
    forecast = _family(
        "kneewatch_kv_exhaustion_seconds",
        "Seconds until the KV cache is full at the present trend; no series without a trend.",
    )
    for labels, diagnosis in diagnoses:
        for word in RANKS:
            health.add_metric((*labels, word), float(diagnosis.health == word))
        is_unknown = diagnosis.health == "unknown" or diagnosis.stage is None
        active = {item.id: item.confidence for item in diagnosis.causes}
        # An unreadable page does not prove that a cause is absent.
        for name in active if is_unknown else dict.fromkeys((*causes, *active)):
            cause.add_metric((*labels, name), float(name in active))
        for name, ratio in active.items():
            confidence.add_metric((*labels, name), ratio)
        judged = [item for item in diagnosis.findings if item.state != "unknown"]
        for item in judged:
            finding.add_metric((*labels, item.rule.id), item.severity)
        unknown.add_metric(labels, len(diagnosis.findings) - len(judged))
        missing.add_metric(labels, len(diagnosis.unknown))
        if diagnosis.stage is not None and not is_unknown:
            stage.add_metric(labels, diagnosis.stage.number)
            if diagnosis.stage.forecast_s is not None:
                forecast.add_metric(labels, diagnosis.stage.forecast_s)
    yield from (health, stage, cause, confidence, finding, unknown, missing, forecast)


def _cycles(states: Sequence[TargetState], now_s: float) -> Iterator[Metric]:
    rows: Mapping[str, tuple[str, str]] = {
        "cycle_duration_seconds": (
            "Duration of the newest cycle, from request to diagnosis.",
            "cycle_s",
        ),
        "interval_seconds": ("The current scrape interval, longer during backoff.", "interval_s"),
        "failing_cycles": ("Failed cycles in a row.", "failing"),
        "last_cycle_timestamp_seconds": ("When the newest cycle was.", "t_s"),
    }
    for name, (help_text, attribute) in rows.items():
        family = GaugeMetricFamily(f"kneewatch_{name}", help_text, labels=("target",))
        for state in states:
            family.add_metric((clean(state.name),), cast("float", getattr(state, attribute)))
        yield family
    is_late = GaugeMetricFamily(
        "kneewatch_late",
        "1 if the newest cycle is too old to describe the present.",
        labels=("target",),
    )
    for state in states:
        is_late.add_metric((clean(state.name),), float(late(state, now_s)))
    yield is_late
    for name, help_text, attribute in (
        ("cycles", "Cycles since the start.", "cycles"),
        ("cycle_failures", "Cycles that failed.", "failures"),
    ):
        counted = CounterMetricFamily(f"kneewatch_{name}", help_text, labels=("target",))
        for state in states:
            counted.add_metric((clean(state.name),), cast("float", getattr(state, attribute)))
        yield counted


def _sources(states: Sequence[TargetState]) -> Iterator[Metric]:
    success = GaugeMetricFamily(
        "kneewatch_collector_success",
        "1 if the last read of a source succeeded.",
        labels=("target", "source"),
    )
    duration = GaugeMetricFamily(
        "kneewatch_collector_duration_seconds",
        "Duration of the last read of a source.",
        labels=("target", "source"),
    )
    for state in states:
        for source in state.sources:
            labels = (clean(state.name), clean(source.name))
            success.add_metric(labels, float(source.success))
            duration.add_metric(labels, source.duration_s)
    yield from (success, duration)


def _messages(stats_by_receiver: Mapping[str, NotifierStats]) -> Iterator[Metric]:
    queued = GaugeMetricFamily(
        "kneewatch_notifications_queued", "Messages waiting to be sent.", labels=("receiver",)
    )
    for receiver, stats in stats_by_receiver.items():
        queued.add_metric((clean(receiver),), stats.queued)
    yield queued
    for name, help_text, attribute in (
        ("sent", "Messages delivered.", "sent"),
        ("failures", "Failed attempts to deliver a message.", "failed"),
        ("dropped", "Messages given up.", "dropped"),
    ):
        counted = CounterMetricFamily(
            f"kneewatch_notifications_{name}", help_text, labels=("receiver",)
        )
        for receiver, stats in stats_by_receiver.items():
            counted.add_metric((clean(receiver),), cast("float", getattr(stats, attribute)))
        yield counted


def _family(name: str, help_text: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=(*ENGINE, *more))


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=float(value))


def _counter(name: str, help_text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, help_text, value=float(value))
