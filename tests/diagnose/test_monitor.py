"""Engines over time: kept apart, missed when gone, and never healthy where nothing is known."""

from __future__ import annotations

import math

import pytest

from kneewatch.collector.base import CollectError
from kneewatch.collector.signals.vllm import VLLM_SIGNALS
from kneewatch.diagnose.monitor import VANISHED_KEPT_S, TargetMonitor
from kneewatch.diagnose.profile import LONG_WINDOWS, Profile
from kneewatch.rules.model import Severity
from tests.collector.name_pages import labelled, recorded
from tests.diagnose.streams import START_S, Target, alarming, bodies, cause_ids
from tests.pages import counted, engine_only, grown, with_values, without
from tests.recordings import CAPTURES, diagnoses

FIRST, NEXT = recorded("0.32.0-loaded"), recorded("0.32.0-loaded-next")
CORE_FAMILIES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
)
GAUGES = CORE_FAMILIES[:3]


# Several engines


def test_engines_and_models_of_one_page_are_kept_apart() -> None:
    target = Target()
    others = {("tiny", "1"): 2.0, ("big", "0"): 5.0}

    def page(count: float) -> str:
        body = counted(with_values(FIRST, {"num_requests_running": 1}), count)
        for (model, engine), factor in others.items():
            mine = with_values(FIRST, {"num_requests_running": factor})
            body += engine_only(
                labelled(counted(mine, count * factor), model_name=model, engine=engine)
            )
        return body

    told = target.take(page(0), page(30), page(60))
    by_engine = {(d.model, d.engine): d for d in told}
    assert set(by_engine) == {("tiny", "0"), *others}
    assert {d.target for d in told} == {"tiny"}
    for key, factor in {("tiny", "0"): 1.0, **others}.items():
        values = by_engine[key].values
        assert values["running"] == factor
        assert values["generation_tokens_per_s"] == pytest.approx(15 * factor)
        assert by_engine[key].health == "ok"


def test_what_is_wrong_with_one_engine_is_not_said_of_another() -> None:
    target = Target(window_s=15.0)
    sick, well = bodies("kv_pressure_cascade"), bodies("healthy_light")
    seen: dict[str, set[str]] = {"0": set(), "1": set()}
    for mine, other in zip(sick, well, strict=False):
        for told in target.take(mine + engine_only(labelled(other, engine="1"))):
            seen[told.engine] |= {cause.id for cause in told.causes}
            assert told.engine == "0" or alarming([told]) == []
    assert "kv_pressure" in seen["0"]
    assert "kv_pressure" not in seen["1"]


def test_an_engine_that_vanishes_is_missed_and_not_forgotten_soon() -> None:
    target = Target(window_s=15.0)
    both = [body + engine_only(labelled(body, engine="1")) for body in (FIRST, NEXT)]
    assert [d.engine for d in target.take(*both)] == ["0", "1"]
    still, gone = target.take(NEXT)
    assert (still.engine, still.health) == ("0", "ok")
    assert (gone.engine, gone.model) == ("1", "tiny")
    assert gone.health == "unknown", "one page may be a torn one"
    assert cause_ids(gone) == ["metrics_missing"]
    assert "engine 1" in gone.causes[0].summary
    assert gone.stage is None
    assert gone.values == {}
    (again,) = [d for d in target.take(both[1]) if d.engine == "1"]
    assert again.health == "ok"
    later = [target.take(NEXT) for _ in range(2 + int(LONG_WINDOWS * 15 / 2))]
    assert [(d.engine, d.health) for d in later[-1]][1] == ("1", "critical")
    target.now_s += VANISHED_KEPT_S
    assert [d.engine for d in target.take(NEXT)] == ["0"]


# What is not on the page


@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_a_page_without_a_core_metric_is_not_healthy(family: str) -> None:
    lacking = Target()
    for told in (lacking.one(without(FIRST, family)), lacking.one(without(NEXT, family))):
        assert told.health in ("unknown", "warning")
        (cause,) = (c for c in told.causes if c.id == "metrics_missing")
        assert family in cause.summary
        assert cause.evidence
        assert any(family in line for line in told.unknown)


@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_a_core_metric_that_goes_away_is_missed_at_once(family: str) -> None:
    losing = Target()
    assert losing.one(FIRST, NEXT).health == "ok"
    lost = losing.one(without(grown(NEXT, 1.01), family))
    assert lost.health in ("unknown", "warning")
    (cause,) = (c for c in lost.causes if c.id == "metrics_missing")
    assert family in cause.summary
    back = losing.one(*(grown(NEXT, 1.02 + n / 100) for n in range(10)))
    assert back.health == "ok"
    assert cause_ids(back) == []


@pytest.mark.parametrize("gauge", GAUGES)
def test_a_gauge_that_is_no_number_is_unknown_not_ok(gauge: str) -> None:
    broken = Target()
    told = broken.one(FIRST, NEXT, with_values(NEXT, {gauge: math.nan}))
    assert told.health in ("unknown", "warning")
    assert "metrics_missing" in cause_ids(told)
    assert any(gauge in line for line in told.unknown)
    (key,) = (s.key for s in VLLM_SIGNALS if s.core and getattr(s.expr, "metric", "") == gauge)
    assert told.values[key] is None
    healed = broken.one(*[NEXT] * 10)
    assert not any(gauge in line for line in healed.unknown)


def test_a_finding_on_a_metric_that_went_away_is_unknown() -> None:
    told = Target().one(FIRST, NEXT, without(NEXT, "kv_cache_usage_perc"))
    (full,) = (f for f in told.findings if f.rule.id == "KV-FULL")
    assert (full.state, full.missing) == ("unknown", ("kv_cache_usage_perc",))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("# TYPE up gauge\nup 1\n", id="another program's page"),
        pytest.param("", id="an empty page"),
        pytest.param("<html>hello</html>\n", id="no metrics page"),
        pytest.param(
            "# TYPE vllm:num_requests_running gauge\n", id="vLLM's names and no sample yet"
        ),
    ],
)
def test_a_page_without_vllm_is_never_healthy(body: str) -> None:
    target = Target()
    told = [target.one(body) for _ in range(4)]
    assert [d.health for d in told] == ["unknown", "warning", "critical", "critical"]
    assert {cause_ids(d)[0] for d in told} == {"metrics_missing"}
    assert all(d.stage is None and d.unknown for d in told)
    healthy = target.one(FIRST, NEXT)
    assert healthy.health == "ok"


# Failed scrapes


def test_a_failed_first_scrape_says_so_and_the_next_page_is_read() -> None:
    target = Target()
    monitor = target.stream.monitor
    refused = CollectError("connection refused", kind="refused", hint="Is it running?")
    (first,) = monitor.failed(START_S - 2, refused)
    assert (first.health, first.engine, first.stage) == ("unknown", "", None)
    (cause,) = first.causes
    assert (cause.id, cause.severity, cause.since_s) == ("target_down", Severity.INFO, START_S - 2)
    assert "connection refused" in cause.summary
    assert cause.lever == "Is it running?"
    told = target.one(FIRST, NEXT)
    assert (told.health, told.engine) == ("ok", "0")
    assert cause_ids(told) == []


def test_a_target_that_stays_down_grows_worse_and_begins_anew_once_it_was_up() -> None:
    monitor = TargetMonitor("tiny", Profile())
    error = CollectError("timed out", kind="timeout")
    told = [monitor.failed(START_S + n, error)[0] for n in range(5)]
    assert [d.health for d in told] == ["unknown", "warning", *["critical"] * 3]
    assert [d.causes[0].severity for d in told] == [
        *(Severity.INFO, Severity.WARNING), *[Severity.CRITICAL] * 3
    ]  # fmt: skip
    confidences = [d.causes[0].confidence for d in told]
    assert confidences == sorted(confidences)
    assert {d.causes[0].since_s for d in told} == {START_S}
    target = Target()
    target.stream.monitor.failed(START_S - 20, error)
    target.stream.monitor.failed(START_S - 10, error)
    target.one(FIRST)
    (again,) = target.stream.monitor.failed(START_S + 10, error)
    assert (again.causes[0].severity, again.causes[0].since_s) == (Severity.INFO, START_S + 10)


def test_every_engine_of_a_target_that_is_down_is_told_of() -> None:
    target = Target()
    target.take(FIRST + engine_only(labelled(FIRST, engine="1")))
    told = target.stream.take(START_S + 2, "", "", status=503)
    assert [(d.engine, cause_ids(d)) for d in told] == [
        *(("0", ["target_down"]), ("1", ["target_down"]))
    ]
    assert all("503" in d.causes[0].summary for d in told)


# Quiet servers


def test_an_idle_server_is_healthy() -> None:
    told = diagnoses(CAPTURES / "idle.jsonl.gz", window_s=60.0)
    assert {d.health for d in told[1:]} == {"ok"}
    assert told[0].health in ("ok", "unknown")
    assert {d.stage.number for d in told if d.stage} == {0}
    assert not any(d.causes or d.symptoms for d in told)


@pytest.mark.parametrize("window_s", [15.0, 60.0, 300.0])
@pytest.mark.parametrize(
    "capture",
    [
        *("healthy_light", "idle", "burst", "prefix_good"),
        *("sticky_two_replicas.r0", "sticky_two_replicas.r1"),
    ],
)
def test_nothing_is_paged_where_nothing_is_wrong(capture: str, window_s: float) -> None:
    told = diagnoses(CAPTURES / f"{capture}.jsonl.gz", window_s=window_s)
    assert len(told) > 25
    assert alarming(told) == []


@pytest.mark.parametrize("version", ["0.8.5", "0.10.0", "0.11.2", "0.14.0", "0.17.0", "0.20.2"])
def test_two_scrapes_of_an_old_server_give_signals(version: str) -> None:
    fresh = with_values(recorded(f"{version}-rendered"), {"num_requests_running": 4})
    target = Target()
    told = target.one(fresh, counted(fresh, 10), counted(fresh, 20))
    core = [signal.key for signal in VLLM_SIGNALS if signal.core]
    assert not [key for key in core if told.values[key] is None]
    assert told.values["running"] == 4
    assert told.values["generation_tokens_per_s"] == pytest.approx(5.0)
    assert (told.values["ttft_p99_s"] or 0) > 0
    assert (told.values["itl_p99_s"] or 0) > 0
    on_page = "cache_config_info{" in fresh
    assert told.values["kv_capacity_tokens"] == (140 * 32 if on_page else None)
    assert told.health == "ok"


def test_without_a_gpu_source_gpu_signals_are_said_to_be_unknown() -> None:
    told = Target().one(FIRST, NEXT)
    assert "gpu_*: no GPU source" in told.unknown
    assert {f.state for f in told.findings if f.rule.signal.startswith("gpu_")} == {"unknown"}


# Long stretches


def test_an_engine_that_stands_still_is_told_after_half_a_minute() -> None:
    target = Target()
    stuck = with_values(NEXT, {"num_requests_running": 3})
    target.one(FIRST, stuck)
    told = [target.one(stuck) for _ in range(20)]
    begun_s = told[0].t_s
    for diagnosis in told:
        assert ("engine_stalled" in cause_ids(diagnosis)) == (diagnosis.t_s - begun_s >= 30)
    assert told[-1].health == "critical"
    calm = target.one(*(counted(stuck, n) for n in range(1, 20)))
    assert "engine_stalled" not in cause_ids(calm)
    assert calm.health == "ok"


def test_token_counters_that_went_away_are_no_stall() -> None:
    target = Target()
    running = with_values(NEXT, {"num_requests_running": 3})
    target.one(FIRST, running)
    blind = without(running, "generation_tokens", "prompt_tokens", "request_success")
    told = [target.one(blind) for _ in range(30)]
    assert not [d for d in told if "engine_stalled" in cause_ids(d)]
    assert "metrics_missing" in cause_ids(told[-1])


def test_an_idle_server_is_underused_only_after_hours() -> None:
    target = Target()
    idle = with_values(NEXT, {"num_requests_running": 0})
    seen = [target.one(idle, every_s=60.0) for _ in range(5 * 60)]
    begun_s = next(d.t_s for d in seen if "underused" in cause_ids(d)) - START_S
    assert begun_s == pytest.approx(4 * 3600, abs=180)
    assert alarming(seen) == []
    assert seen[-1].health == "info"


def test_a_scrape_that_is_not_newer_is_no_news() -> None:
    target = Target()
    assert target.take(FIRST)
    assert target.stream.take(target.now_s, NEXT, "") == []
    assert target.take(NEXT)
