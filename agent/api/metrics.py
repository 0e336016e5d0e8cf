"""HTTP endpoint, `/metrics`: the diagnosis of each engine, and the state of the daemon itself. I/O
edge.

A metric whose value is unknown has no series, because 0 would look healthy. Names and units follow
Prometheus's conventions. Every series of an engine has the labels target, model and engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kneewatch.agent.api.responses import clean
from kneewatch.agent.api.service import (
    GONE,
    UNKNOWN,
    Labels,
    Need,
    Recommended,
    Service,
    late,
    shown,
)
from kneewatch.agent.target_state import TargetState
from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.recommend.advice import REPLICAS
from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Verdict
from kneewatch.reports.health import RANKS, rank_of
from kneewatch.rules.library import RULES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Described = Mapping[str, tuple[str, Sequence[str]]]
"""Help text and label names of metrics, by metric name without the prefix `kneewatch_`. Names of
counters end in `_total`."""


def described(section: str) -> Described:
    rows = packaged_tables("agent.api", "metrics.toml")[section]
    return {name: (row["help"], row.get("labels", ())) for name, row in rows.items()}


class Families:
    """Metric families, to which samples are added."""

    def __init__(self, described: Described) -> None:
        self._families = {
            name: (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(
                f"kneewatch_{name}", help_text, labels=labels
            )
            for name, (help_text, labels) in described.items()
        }

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample. A value of None adds nothing."""
        if value is not None:
            self._families[name].add_metric(tuple(map(clean, labels)), float(value))

    def add_labelled(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Add a sample that has its own label names instead of those of the family."""
        self._families[name].add_sample(f"kneewatch_{name}", dict(labels), value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


ENGINES, TARGETS, ITSELF = described("engines"), described("targets"), described("itself")
STORE, RECEIVERS = described("store"), described("receivers")


class OwnMetrics(Collector):
    """A collector that builds all metrics again for each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        now_s = self._service.clock()
        states = self._service.board.states()
        yield from self._engines(states, now_s)
        yield from _targets(states, now_s)
        yield from self._itself(len(states))
        if self._service.fleet is not None:
            from kneewatch.agent.api.fleet import fleet_families  # lazy: few daemons watch a fleet

            yield from fleet_families(self._service.fleet.state, now_s)
        if self._service.notifier:
            families = Families(RECEIVERS)
            for receiver, stats in self._service.notifier.stats_by_receiver().items():
                families.add("notifications_queued", stats.queued, receiver)
                families.add("notifications_sent_total", stats.sent, receiver)
                families.add("notifications_failures_total", stats.failed, receiver)
                families.add("notifications_dropped_total", stats.dropped, receiver)
            yield from families

    def _engines(self, states: Sequence[TargetState], now_s: float) -> Families:
        engines: dict[tuple[str, str, str], tuple[TargetState, Verdict]] = {}
        for state in states:
            for diagnosis in shown(state, late=late(state, now_s)):
                labels = clean(state.name), clean(diagnosis.model), clean(diagnosis.engine)
                # Replicas behind one page have the same labels: export the worst.
                if labels not in engines or rank_of(diagnosis.health) > rank_of(
                    engines[labels][1].health
                ):
                    engines[labels] = state, diagnosis
        families = Families(ENGINES)
        stated = {spec.name: spec.settings["replicas"] for spec in self._service.targets()}
        needs: dict[Labels, Need] = {}
        for labels, (state, diagnosis) in engines.items():
            _add_verdict(families, diagnosis, labels)
            present = stated.get(state.name)
            names = (("target", labels[0]), ("model", labels[1]))
            other, _ = needs.get(names, (None, 1.0))
            count = recommended_replicas(diagnosis, present)
            counts = [each for each in (other, count) if each is not None]
            needs[names] = max(counts, default=None), float(present or 1)
        if self._service.fleet is not None:
            from kneewatch.agent.api.fleet import fleet_replicas

            needs |= fleet_replicas(self._service.fleet.state, now_s)
        self._add_replicas(families, needs, now_s)
        return families

    def _add_replicas(self, families: Families, needs: Mapping[Labels, Need], now_s: float) -> None:
        """Add the numbers of replicas, also for what has no answer now."""
        exported, most = self._service.replicas, self._service.settings["replicas_max"] or inf
        configured = {clean(spec.name) for spec in self._service.targets()}
        for names in needs.keys() | exported.keys():
            is_fleet = names[0][0] != "target"
            if names not in needs and not is_fleet and names[0][1] not in configured:
                del exported[names]
                continue
            recommended = exported.get(names, Recommended()).at(
                now_s, *needs.get(names, GONE), most
            )
            exported[names] = recommended
            if recommended.value is not None:
                families.add_labelled("recommended_replicas", recommended.value, dict(names))
                held = float(recommended.is_held)
                families.add_labelled("recommended_replicas_held", held, dict(names))

    def _itself(self, scraped: int) -> Iterator[Metric]:
        service, families = self._service, Families(ITSELF)
        families.add("build_info", 1, service.version)
        families.add("start_time_seconds", service.started_s)
        families.add("targets", len(service.targets()))
        families.add("targets_scraped", scraped)
        yield from families
        if service.store is None:
            return
        stats, families = service.store.stats(), Families(STORE)
        families.add("store_queued_cycles", stats.queued)
        families.add("store_written_cycles_total", stats.written)
        families.add("store_dropped_cycles_total", stats.dropped)
        families.add("store_size_bytes", stats.bytes)
        families.add("store_working", not stats.last_error)
        if stats.oldest_s is not None:
            families.add("store_oldest_timestamp_seconds", stats.oldest_s)
        yield from families


def recommended_replicas(diagnosis: Verdict, stated: int | None) -> float | None:
    """The largest recommended number of replicas; `stated` if no number is recommended.

    None while the engine cannot be judged, so that missing data never removes replicas.
    """
    if diagnosis.stage.number is None or diagnosis.health == "unknown":
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


def _add_verdict(families: Families, diagnosis: Verdict, labels: Sequence[str]) -> None:
    for word in RANKS:
        families.add("health", diagnosis.health == word, *labels, word)
    stage = diagnosis.stage if diagnosis.health != UNKNOWN else UNKNOWN_STAGE
    active = {cause.id: cause for cause in diagnosis.causes}
    # An unreadable page does not prove that a cause is absent.
    for cause in active if stage.number is None else dict.fromkeys((*BY_ID, *active)):
        families.add("cause", cause in active, *labels, cause)
    for cause, concluded in active.items():
        families.add("cause_severity", concluded.severity.rank, *labels, cause)
        families.add("cause_confidence", concluded.confidence, *labels, cause)
    judged = [finding for finding in diagnosis.findings if finding.state != UNKNOWN]
    for finding in judged:
        families.add("finding_severity", finding.severity.rank, *labels, finding.rule)
    for signal in filter(None, {rule.limit: None for rule in RULES}):
        families.add("gateway_limit", diagnosis.values.get(signal), *labels, signal)
    families.add("unknown_findings", len(diagnosis.findings) - len(judged), *labels)
    families.add("unknown_signals", len(diagnosis.unknown), *labels)
    if stage.number is not None:
        families.add("stage", stage.number, *labels)
        families.add("kv_exhaustion_seconds", stage.forecast_s, *labels)


def _targets(states: Sequence[TargetState], now_s: float) -> Families:
    families = Families(TARGETS)
    for state in states:
        families.add("cycle_duration_seconds", state.cycle_s, state.name)
        families.add("interval_seconds", state.interval_s, state.name)
        families.add("failing_cycles", state.failing, state.name)
        families.add("last_cycle_timestamp_seconds", state.t_s, state.name)
        families.add("late", late(state, now_s), state.name)
        families.add("cycles_total", state.cycles, state.name)
        families.add("cycle_failures_total", state.failures, state.name)
        for source in state.sources:
            families.add("collector_success", source.success, state.name, source.name)
            families.add("collector_duration_seconds", source.duration_s, state.name, source.name)
    return families
