"""`/metrics`: what promtool thinks of it, and that nothing unknown looks like health."""

from __future__ import annotations

import subprocess

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kneewatch.agent.api.metrics import CONTENT_TYPE, exposition
from kneewatch.agent.api.service import Service
from kneewatch.agent.notify.notifier import NotifierStats
from kneewatch.agent.store.records import StoreStats
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.recommend.advice import REPLICAS, Advice, FlagChange
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.health import SourceState
from kneewatch.rules.cascade import staged
from kneewatch.rules.rule import Severity
from tests.agent.api.serving import (
    SICK_NAME,
    SICK_STATE,
    WELL_STATE,
    asking,
    service_of,
    settings_of,
    state_of,
)
from tests.agent.api.test_triage import HOSTILE
from tests.programs import require
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK, UNREADABLE, finding


def samples(service: Service, name: str) -> list[Sample]:
    """The series of one metric."""
    page = exposition(service).decode()
    return [
        sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"kneewatch_{name}"
    ]


def values(service: Service, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The same by some labels."""
    matching = samples(service, name)
    by_labels = {
        tuple(sample.labels[label] for label in labels): sample.value for sample in matching
    }
    assert len(by_labels) == len(matching)
    return by_labels


def resized(wanted: float, diagnosis: Verdict = SICK) -> Verdict:
    """A diagnosis that recommends so many replicas."""
    recommendation = Advice(
        id=REPLICAS, cause="kv_pressure", changes=(FlagChange(REPLICAS, 2.0, wanted),), summary="",
        predicted={}, cost_usd_per_hour=None, checks=(), risk="", verify=(), guide=(),
    )  # fmt: skip
    return replace(diagnosis, recommendations=(*diagnosis.recommendations, recommendation))


class Stats:
    """A store as far as metrics ask it."""

    def __init__(self, last_error: str = "") -> None:
        unwritten_s = NOW_S - 60 if last_error else None
        self._stats = StoreStats(1, 20, 3, last_error, 4096, NOW_S - 100, unwritten_s)

    def stats(self) -> StoreStats:
        """How it does."""
        return self._stats


@pytest.mark.parametrize("store", [None, Stats(), Stats("disk full")])
def test_promtool_finds_nothing_wrong(store: Stats | None) -> None:
    forecast = replace(HEALTHY, stage=staged(1, NOW_S, Severity.INFO, 120.5, ()))
    findings = [finding("KV-EVICT", "critical", 0.2), finding("TTFT-TAIL", "unknown", None)]
    states = (
        state_of("r1", replace(SICK, findings=findings)),
        state_of("r2", forecast, replace(forecast, engine="1")),
        state_of("r3", UNREADABLE),
        *(state_of(name, replace(HEALTHY, model=name)) for name in HOSTILE),
    )
    page = exposition(service_of(*states, names=["r9"], store=store))
    checked = subprocess.run(
        [require("promtool"), "check", "metrics"], input=page, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr.decode()
    assert checked.stdout.strip() == checked.stderr.strip() == b""


def test_it_is_the_text_format() -> None:
    with asking(service_of(SICK_STATE)) as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert b"kneewatch_build_info" in answer.content
    assert b"process_resident_memory_bytes" in answer.content


def test_the_verdict_of_each_engine() -> None:
    service = service_of(SICK_STATE, WELL_STATE)
    health = values(service, "health", "target", "model", "engine", "health")
    assert health[SICK_NAME, "llama", "0", "critical"] == 1
    assert health[SICK_NAME, "llama", "0", "ok"] == 0
    assert health["r1", "llama", "0", "ok"] == 1
    assert health["r1", "llama", "0", "unknown"] == 0
    assert values(service, "stage", "target") == {(SICK_NAME,): 3, ("r1",): 0}
    causes = values(service, "cause", "target", "cause")
    assert causes[SICK_NAME, "kv_pressure"] == 1
    assert causes[SICK_NAME, "queue_saturation"] == 0
    assert causes["r1", "kv_pressure"] == 0
    assert values(service, "cause_confidence", "target", "cause") == {
        (SICK_NAME, "kv_pressure"): 0.97
    }


def test_findings_and_what_is_unknown() -> None:
    findings = [
        finding("KV-EVICT", "critical", 0.2),
        finding("KV-FULL", "ok", 0.2),
        finding("TTFT-TAIL", "unknown", None),
    ]
    sick = replace(SICK, findings=findings, unknown=["a: is not there", "b: neither"])
    service = service_of(state_of("r1", sick))
    severities = values(service, "finding_severity", "rule")
    assert severities == {("KV-EVICT",): 3, ("KV-FULL",): 0}
    assert values(service, "unknown_findings", "target") == {("r1",): 1}
    assert values(service, "unknown_signals", "target") == {("r1",): 2}


def test_the_limits_for_the_gateway_are_there_as_far_as_they_are_known() -> None:
    limited = replace(HEALTHY, values={**HEALTHY.values, "input_limit_tokens": 12_000.0})
    service = service_of(state_of("r1", limited))
    assert values(service, "gateway_limit", "signal") == {("input_limit_tokens",): 12_000.0}


def test_the_forecast_is_there_only_with_a_trend() -> None:
    rising = replace(HEALTHY, stage=staged(1, NOW_S, Severity.INFO, 120.0, ()))
    service = service_of(state_of("r1", rising), state_of("r2", HEALTHY))
    assert values(service, "kv_exhaustion_seconds", "target") == {("r1",): 120.0}


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(state_of("r1", UNREADABLE), id="the page cannot be read"),
        pytest.param(state_of("r1", replace(HEALTHY, health="unknown")), id="one scrape so far"),
        pytest.param(state_of("r1", HEALTHY, t_s=NOW_S - 100), id="no news"),
    ],
)
def test_what_cannot_be_judged_has_no_zero_that_looks_like_health(state: TargetState) -> None:
    service = service_of(state, settings=settings_of(replicas=4))
    assert samples(service, "stage") == []
    assert samples(service, "recommended_replicas") == []
    assert all(sample.value == 1 for sample in samples(service, "cause"))
    assert values(service, "health", "health")[("ok",)] == 0


def test_a_target_without_a_cycle_has_no_verdict() -> None:
    service = service_of(names=["r9"])
    assert samples(service, "health") == []
    assert samples(service, "targets")[0].value == 1
    assert samples(service, "targets_scraped")[0].value == 0


@pytest.mark.parametrize(
    ("diagnoses", "stated", "expected"),
    [
        pytest.param([HEALTHY], None, None, id="neither stated nor recommended: not known"),
        pytest.param([HEALTHY], 4, 4, id="the stated number while none is recommended"),
        pytest.param([resized(6.0)], 4, 6, id="what is recommended"),
        pytest.param([resized(2.0)], 4, 2, id="also where it is less"),
        pytest.param([resized(6.0)], None, 3, id="at most twice the one replica and one more"),
        pytest.param([resized(6.0, resized(9.0))], 4, 9, id="the most of several"),
        pytest.param(
            [resized(6.0), replace(resized(8.0), engine="1")], 4, 8, id="the largest over engines"
        ),
        pytest.param(
            [resized(2.0), replace(HEALTHY, engine="1")], 4, 4, id="an engine that needs them all"
        ),
    ],
)
def test_recommended_replicas(
    diagnoses: list[Verdict], stated: int | None, expected: float | None
) -> None:
    service = service_of(state_of("r1", *diagnoses), settings=settings_of(replicas=stated))
    replicas = values(service, "recommended_replicas", "target", "model")
    assert replicas == ({} if expected is None else {("r1", "llama"): expected})


def test_an_unknown_need_holds_the_last_number_and_says_so() -> None:
    service = service_of(state_of("r1", resized(6.0)), settings=settings_of(replicas=4))
    assert values(service, "recommended_replicas", "target") == {("r1",): 6}
    assert values(service, "recommended_replicas_held", "target") == {("r1",): 0}
    silent = replace(service_of(state_of("r1", UNREADABLE)), replicas=service.replicas)
    assert values(silent, "recommended_replicas", "target") == {("r1",): 6}
    assert values(silent, "recommended_replicas_held", "target") == {("r1",): 1}


def test_a_maximum_bounds_the_replicas() -> None:
    settings = settings_of(replicas=4, replicas_max=5)
    service = service_of(state_of("r1", resized(8.0)), settings=settings)
    assert values(service, "recommended_replicas", "target") == {("r1",): 5}


def test_cycles_and_sources() -> None:
    gpus = SourceState("dcgm", NOW_S, success=False, duration_s=1.5, error="refused")
    sources = (SourceState("page", NOW_S, success=True, duration_s=0.01), gpus)
    service = service_of(state_of("r1", HEALTHY, sources=sources, failing=2, interval_s=10.0))
    success = values(service, "collector_success", "target", "source")
    assert success == {("r1", "page"): 1, ("r1", "dcgm"): 0}
    durations = values(service, "collector_duration_seconds", "target", "source")
    assert durations == {("r1", "page"): 0.01, ("r1", "dcgm"): 1.5}
    assert values(service, "cycles_total", "target") == {("r1",): 12}
    assert values(service, "cycle_failures_total", "target") == {("r1",): 1}
    assert values(service, "failing_cycles", "target") == {("r1",): 2}
    assert values(service, "interval_seconds", "target") == {("r1",): 10}
    assert values(service, "cycle_duration_seconds", "target") == {("r1",): 0.004}
    assert values(service, "last_cycle_timestamp_seconds", "target") == {("r1",): NOW_S}
    assert values(service, "late", "target") == {("r1",): 0}


def test_the_store() -> None:
    service = service_of(store=Stats())
    assert samples(service, "store_queued_cycles")[0].value == 1
    assert samples(service, "store_written_cycles_total")[0].value == 20
    assert samples(service, "store_dropped_cycles_total")[0].value == 3
    assert samples(service, "store_size_bytes")[0].value == 4096
    assert samples(service, "store_working")[0].value == 1
    assert samples(service, "store_oldest_timestamp_seconds")[0].value == NOW_S - 100
    assert samples(service_of(store=Stats("disk full")), "store_working")[0].value == 0
    assert samples(service_of(), "store_working") == []


class Told:
    """A notifier as far as metrics ask it."""

    def stats_by_receiver(self) -> dict[str, NotifierStats]:
        """How each receiver does."""
        return {"on-call": NotifierStats(sent=5, failed=2, queued=1, dropped=0)}


def test_messages_by_receiver() -> None:
    service = service_of(notifier=Told())
    counted = {
        name: values(service, f"notifications_{name}", "receiver")
        for name in ("sent_total", "failures_total", "queued", "dropped_total")
    }
    assert counted == {
        "sent_total": {("on-call",): 5},
        "failures_total": {("on-call",): 2},
        "queued": {("on-call",): 1},
        "dropped_total": {("on-call",): 0},
    }
    page = exposition(service)
    checked = subprocess.run(
        [require("promtool"), "check", "metrics"], input=page, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr.decode()
    assert samples(service_of(), "notifications_queued") == []


def test_replicas_behind_one_page_do_not_give_the_same_series_twice() -> None:
    service = service_of(state_of("r1", HEALTHY, SICK, HEALTHY))
    assert values(service, "stage", "target", "model", "engine") == {("r1", "llama", "0"): 3}


@pytest.mark.parametrize("name", HOSTILE)
def test_label_values_come_back_as_they_were(name: str) -> None:
    service = service_of(state_of("r1", replace(HEALTHY, model=name)))
    (labels_of,) = values(service, "stage", "model")
    assert labels_of[0] == name.replace("\ud800", "?")
