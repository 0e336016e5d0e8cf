"""What kneewatch's own metrics say of a fleet. No series where something is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kneewatch.agent.api.problems import clean
from kneewatch.diagnose.fleet.diagnosing import FLEET_CAUSES, OF_A_POOL, FleetDiagnosis
from kneewatch.diagnose.fleet.verdict import Tier

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetState

HEALTHS = ("ok", "info", "warning", "critical", "unknown")
TIER = ("pool", "tier", "role")


def fleet_replicas(state: FleetState, now_s: float) -> Iterator[tuple[dict[str, str], float]]:
    """The replicas that each tier needs; none of what cannot be judged, so that nobody scales down
    on blindness."""
    found = state.told(now_s)
    for size in found.sizes if found is not None and not found.lost else ():
        if size.needed is not None:
            model = clean(size.tier.engines[0].member.model)
            yield {**dict(zip(TIER, _labels(size.tier), strict=True)), "model": model}, size.needed


def fleet_families(state: FleetState, now_s: float) -> Iterator[Metric]:
    """The families: how the asking goes, and what was found."""
    found = state.told(now_s)
    current = found if found is not None and not found.lost else None
    yield from _asking(state, up=current is not None)
    health = GaugeMetricFamily(
        "kneewatch_fleet_health", "1 for the verdict's word, 0 for the others.", labels=("health",)
    )
    for word in HEALTHS:
        health.add_metric((word,), float(word == (current.health if current else "unknown")))
    yield health
    if current is not None:
        yield from _tiers(current)
        yield _causes(current)


def _tiers(found: FleetDiagnosis) -> Iterator[Metric]:
    engines = GaugeMetricFamily(
        "kneewatch_fleet_engines", "Engines of a tier by health.", labels=(*TIER, "health")
    )
    stages = GaugeMetricFamily(
        "kneewatch_fleet_stage_engines",
        "Engines of a tier by stage of the KV cascade; those whose stage is not known in none.",
        labels=(*TIER, "stage"),
    )
    replicas = GaugeMetricFamily(
        "kneewatch_fleet_replicas", "Replicas that a tier has.", labels=TIER
    )
    for tier in found.tiers:
        labels = _labels(tier)
        healths = Counter(engine.health for engine in tier.engines)
        staged = Counter(engine.stage for engine in tier.engines)
        for word in HEALTHS:
            engines.add_metric((*labels, word), healths[word])
        for stage in range(5):
            stages.add_metric((*labels, str(stage)), staged[stage])
        replicas.add_metric(labels, tier.replicas)
    yield from (engines, stages, replicas)


def _causes(found: FleetDiagnosis) -> Metric:
    family = GaugeMetricFamily(
        "kneewatch_fleet_cause",
        "1 while a cause is concluded, else 0; without a tier of a whole pool.",
        labels=("pool", "tier", "cause"),
    )
    active = {(clean(one.pool), clean(one.tier), one.cause.id) for one in found.causes}
    # A partial answer does not say that a cause is not there.
    known = set(active)
    for tier in () if found.partial else found.tiers:
        pool, name, _ = _labels(tier)
        known |= {(pool, "" if cause == OF_A_POOL else name, cause) for cause in FLEET_CAUSES}
    for row in sorted(known):
        family.add_metric(row, float(row in active))
    return family


def _asking(state: FleetState, *, up: bool) -> Iterator[Metric]:
    gauges = (
        ("up", "1 while the metrics system answers.", float(up)),
        ("interval_seconds", "Time between diagnoses.", state.interval_s),
        ("failing_cycles", "Failed cycles in a row.", state.failing),
        ("last_answer_timestamp_seconds", "When it last answered; 0: never.", state.seen_s),
    )
    for name, told, value in gauges:
        yield GaugeMetricFamily(f"kneewatch_fleet_{name}", told, value=value)
    counters = (
        ("cycles", "Cycles since the start.", state.cycles),
        ("cycle_failures", "Cycles without an answer.", state.failures),
        ("queries", "Queries sent to the metrics system.", state.queries),
        ("queries_retried", "Queries that were sent again.", state.retried),
    )
    for name, told, count in counters:
        yield CounterMetricFamily(f"kneewatch_fleet_{name}", told, value=count)


def _labels(tier: Tier) -> tuple[str, str, str]:
    return clean(tier.pool), clean(tier.tier), tier.role
