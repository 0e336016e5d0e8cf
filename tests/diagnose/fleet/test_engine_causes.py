"""Causes of single engines in fleet mode: by the sidecar's records, counted by pool."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kneewatch.agent.notify.events import action_lines
from kneewatch.diagnose.fleet.tier import of_fleet
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.reports.diagnosis_text import Style
from kneewatch.reports.fleet_rendering import engine_words, text, worst_engines
from kneewatch.rules.rule import Finding, Severity
from tests.diagnose.fleet.example_fleets import T_S, Row, causes, fleet, pod, verdict
from tests.reports.diagnoses import PRESSURE

OVERLOADED: Mapping[str, float] = {
    "running": 26.0,
    "running_avg": 26.0,
    "running_max": 26.0,
    "waiting": 230.0,
    "waiting_by_capacity": 230.0,
    "waiting_avg": 225.0,
    "completed_per_s": 3.0,
    "expected_wait_s": 75.0,
    "itl_mean_s": 0.2,
    "e2e_mean_s": 20.0,
}
STUCK: Mapping[str, float] = {
    "running": 26.0,
    "running_avg": 26.0,
    "generation_tokens_per_s": 0.0,
    "computed_prompt_tokens_per_s": 0.0,
    "completed_per_s": 0.0,
    "arrival_per_s": 0.0,
}
QUEUED = {"queued": 60.0}
STALLED = {"stalled": 30.0}


def pool(count: int, own: Mapping[str, float]) -> list[Row]:
    return [(pod(f"r{at}"), own) for at in range(count)]


def held(
    rows: list[Row], streaks_s: Mapping[str, float], since_s: float | None = None
) -> FleetVerdict:
    """The verdict where these conditions have held on every engine that is not as usual."""
    by_pod = {labels["pod"]: streaks_s for labels, own in rows if own}
    return verdict(*rows, streaks_s=by_pod, since_s=since_s)


def test_an_overloaded_pool_is_one_cause_with_all_its_replicas() -> None:
    diagnosis = held(pool(8, OVERLOADED), QUEUED)
    assert sorted(causes(diagnosis)["queue_saturation"]) == [f"r{at}" for at in range(8)]
    first = diagnosis.causes[0]
    assert first.id == "queue_saturation"
    assert first.severity == Severity.CRITICAL, "each request waits for over a minute"
    assert first.summary.startswith(
        "8 of 8 engines, worst r0: Requests queue for capacity: 230 requests"
    )
    assert diagnosis.health == "critical"


def test_trouble_comes_first_and_a_healthy_pool_is_a_line() -> None:
    first = [(pod(f"a{at}", namespace="alpha"), OVERLOADED) for at in range(8)]
    well: list[Row] = [(pod(f"b{at}", namespace="beta"), {}) for at in range(4)]
    second = [(pod(f"c{at}", namespace="gamma"), OVERLOADED) for at in range(3)]
    diagnosis = held([*first, *well, *second], QUEUED)
    lines = text(diagnosis, Style()).splitlines()
    assert lines[4].startswith("1. queue_saturation (critical")
    assert sum("do first: Add replicas" in line for line in lines) == 1, "the same advice once"
    assert sum(line.strip().startswith("ok: beta/m: 4 replicas") for line in lines) == 1
    assert not any(line.startswith("CRITICAL a") for line in lines), "named by the cause"
    advised = {advice.pool: advice.changes[0].after for advice in diagnosis.advice}
    assert advised == {"alpha/m": 11, "gamma/m": 4}, "also without a past"
    kv = diagnosis.advice[0].predicted["kv_demand_ratio"]
    assert kv < 0.5, "the queue is no part of what runs at once"


@pytest.mark.parametrize(("hours", "is_proposed"), [(23.0, False), (25.0, True)])
def test_a_queue_that_lasts_for_a_day_may_be_intended(hours: float, is_proposed: bool) -> None:
    diagnosis = held(pool(8, OVERLOADED), QUEUED, since_s=T_S - 3600 * hours)
    (queue,) = (cause for cause in diagnosis.causes if cause.id == "queue_saturation")
    assert ("fleet.throughput_pools" in queue.lever) == is_proposed


def test_a_queue_of_one_moment_is_no_cause() -> None:
    assert "queue_saturation" not in causes(held(pool(8, OVERLOADED), {}))


def test_a_stuck_replica_is_critical_among_healthy_ones() -> None:
    diagnosis = held([*fleet(7), (pod("stuck"), STUCK)], STALLED)
    assert causes(diagnosis)["engine_stalled"] == ("stuck",)
    assert diagnosis.health == "critical"
    engine = next(e for e in diagnosis.engines if e.replica == "stuck")
    assert engine.health == "critical"
    assert engine.causes == ["engine_stalled"]


def test_the_text_says_first_what_a_message_says_first() -> None:
    diagnosis = held([*fleet(7), (pod("stuck"), STUCK)], STALLED)
    (cause,) = diagnosis.causes
    stop_gap, fix = action_lines(diagnosis.by_place()[cause.pool, cause.tier], cause)
    words = " ".join(text(diagnosis, Style()).split())
    assert words.index(stop_gap.plain()) < words.index(fix.plain())
    assert stop_gap.label == "do first"


@pytest.mark.parametrize(
    ("stuck", "goal"),
    [
        pytest.param(STUCK, "", id="one of two replicas hangs"),
        pytest.param(OVERLOADED, "throughput", id="requests queue by design"),
        pytest.param(OVERLOADED, "", id="the other of two has room"),
    ],
)
def test_no_replicas_are_bought_for_a_fault_or_a_queue_by_design(
    stuck: Mapping[str, float], goal: str
) -> None:
    queue = {"waiting": 300.0, "waiting_min": 300.0, "waiting_by_capacity": 300.0}
    labels = {"kneewatch_goal": goal} if goal else {}
    other = {**OVERLOADED, **queue} if goal else {}
    rows: list[Row] = [(pod("a", **labels), {**stuck, **queue}), (pod("b", **labels), other)]
    diagnosis = held(rows, STALLED if stuck is STUCK else QUEUED)
    if stuck is STUCK or goal:
        assert diagnosis.advice == []
    assert [advice.id for advice in diagnosis.advice if advice.id == "replicas"] == []
    assert diagnosis.tiers[0].size.needed in (None, 2)


def test_what_follows_from_a_full_cache_is_told_under_it() -> None:
    full = {
        **OVERLOADED,
        "kv_usage_ratio": 0.99,
        "kv_usage_avg_ratio": 0.98,
        "preemption_per_s": 4.0,
        "preemption_ratio_per_s": 0.2,
    }
    diagnosis = held(pool(4, full), QUEUED)
    assert sorted(causes(diagnosis)) == ["kv_pressure"]


def test_a_queue_on_the_one_replica_that_gets_the_requests_follows_from_the_imbalance() -> None:
    hot = {**OVERLOADED, "arrival_per_s": 5.0}
    diagnosis = held([*fleet(3), (pod("hot"), hot)], QUEUED)
    (head,) = (c for c in diagnosis.causes if c.severity >= Severity.WARNING)
    assert (head.id, head.replicas) == ("replica_imbalance", ("hot",))
    assert "queue_saturation" in head.explains
    assert head.severity == Severity.CRITICAL, "as bad as the queue that it makes"


@pytest.mark.parametrize("lacking", ["expected_wait_s", "running_max", "itl_mean_s"])
def test_a_claim_needs_its_measurement(lacking: str) -> None:
    own = {key: value for key, value in OVERLOADED.items() if key != lacking}
    diagnosis = held(pool(4, own), QUEUED)
    assert "admission_limit" not in causes(diagnosis), "nothing says that the GPU has room"


def test_an_engine_graver_than_its_cause_is_listed_with_what_makes_it_so() -> None:
    hot = {"waiting": 0.0, "preemption_per_s": 0.0}
    found = verdict(*fleet(3), (pod("graver"), hot))
    (graver,) = [engine for engine in found.engines if engine.replica == "graver"]
    imbalance = replace(PRESSURE, id="replica_imbalance", severity=Severity.WARNING)
    cause = of_fleet(imbalance, graver.pool, "m", ["graver"])
    finding = Finding("KV-EVICT", "critical", "preemption_ratio_per_s", 0.24)
    for health, findings in (("critical", (finding,)), ("warning", ())):
        ill = replace(graver, health=health, findings=findings)
        engines = [ill if engine is graver else engine for engine in found.engines]
        listed = worst_engines(replace(found, engines=engines, causes=[cause]))
        assert [each.name for each in listed] == ["graver"] * (health == "critical")
        assert all("KV-EVICT critical" in engine_words(each) for each in listed)
