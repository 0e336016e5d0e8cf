"""Engines over time: kept apart, missed when gone, and never healthy where nothing is known."""

from __future__ import annotations

import math
import re
from random import Random

import pytest
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.signals.table import VLLM_SIGNALS
from kneewatch.diagnose.causes.availability import START_S as PATIENCE_S
from kneewatch.diagnose.deployment.server_state import NO_STATE, ServerState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.reader import BUCKETS_SHOWN
from kneewatch.diagnose.engine.target_monitor import ENGINES_MAX, VANISHED_KEPT_S, TargetMonitor
from kneewatch.diagnose.values import NO_GPUS
from kneewatch.reports.health import stage_unknown
from kneewatch.rules.rule import LONG_WINDOWS, Severity
from tests.collector.name_pages import labelled, prefixed, recorded
from tests.diagnose.streams import START_S, Target, alarming, bodies, cause_ids
from tests.pages import counted, engine_only, grown, multiprocess, with_values, without
from tests.recordings import CAPTURES, diagnoses

FIRST, NEXT = recorded("0.32.0-loaded"), recorded("0.32.0-loaded-next")
CORE_FAMILIES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
)
GAUGES = CORE_FAMILIES[:3]


# Pages of Ray


def test_a_counter_that_ray_does_not_show_yet_is_zero_and_its_first_event_counts() -> None:
    target = Target()
    first, last = (
        prefixed(without(with_values(body, {"num_requests_running": 4}), *of), "ray_vllm_")
        for body, of in ((FIRST, ["num_preemptions"]), (counted(FIRST, 30), []))
    )
    last = re.sub(r"(?m)^(ray_vllm_num_preemptions_total\{.*\}) .*$", r"\1 3", last)
    quiet = target.one(first, first)
    assert cause_ids(quiet) == []
    assert quiet.health == "ok"
    assert quiet.values["preemption_per_s"] == 0
    assert (target.one(last).values["preemption_per_s"] or 0) > 0


# Read first, judged afterwards


def test_pages_of_targets_that_are_read_before_any_is_judged_get_the_same_verdicts() -> None:
    parser = PageParser()
    overload, steady = (
        [parser.parse(body) for body in bodies(name)[:20]]
        for name in ("queue_overload", "prefix_good")
    )
    each, together = ([TargetMonitor("tiny", Profile()) for _ in range(2)] for _ in range(2))
    for at, pages in enumerate(zip(overload, steady, strict=False)):
        t_s = START_S + 2.0 * at
        alone = [monitor.page(t_s, page) for monitor, page in zip(each, pages, strict=True)]
        judges = [
            monitor.read(t_s, page, NO_GPUS) for monitor, page in zip(together, pages, strict=True)
        ]
        assert [judge() for judge in judges] == alone


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

    all_diagnoses = target.take(page(0), page(30), page(60))
    by_engine = {(d.model, d.engine): d for d in all_diagnoses}
    assert set(by_engine) == {("tiny", "0"), *others}
    assert {d.target for d in all_diagnoses} == {"tiny"}
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
        for diagnosis in target.take(mine + engine_only(labelled(other, engine="1"))):
            seen[diagnosis.engine] |= {
                name for c in diagnosis.causes for name in (c.id, *c.explains)
            }
            assert diagnosis.engine == "0" or alarming([diagnosis]) == []
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
    assert "Engine 1 of tiny is no longer on the page" in gone.causes[0].summary
    assert gone.causes[0].seen_s == gone.t_s
    assert gone.stage.number is None
    assert gone.values == {}
    (again,) = [d for d in target.take(both[1]) if d.engine == "1"]
    assert again.health == "ok"
    later = [target.take(NEXT) for _ in range(2 + int(LONG_WINDOWS * 15 / 2))]
    assert [(d.engine, d.health) for d in later[-1]][1] == ("1", "critical")
    target.now_s += VANISHED_KEPT_S
    assert [d.engine for d in target.take(NEXT)] == ["0"]


def test_another_model_in_an_engines_place_replaced_it() -> None:
    target = Target(window_s=15.0)
    target.take(FIRST, NEXT)
    pairs = [target.take(labelled(grown(NEXT, 1 + n / 9), model_name="other")) for n in range(5)]
    for here, gone in pairs:
        assert (here.model, gone.model) == ("other", "tiny")
        (note,) = gone.causes
        assert (note.id, note.severity) == ("metrics_missing", Severity.INFO)
        assert "engine 0 of other replaced it" in note.summary
        assert "fail" not in note.summary
        assert "could not be read" not in " ".join((*gone.unknown, gone.judged_against))
    target.now_s += 15.0
    assert [d.model for d in target.take(labelled(NEXT, model_name="other"))] == ["other"]


def test_a_page_whose_engines_are_all_new_replaced_the_old_ones() -> None:
    target = Target(window_s=15.0)
    target.take(FIRST, NEXT)
    all_diagnoses = target.take(*[labelled(NEXT, model_name="other", engine="7")] * 4)
    assert (all_diagnoses[-1].model, all_diagnoses[-1].severity) == ("tiny", Severity.INFO)


def test_an_engine_that_died_beside_others_is_critical_in_true_words() -> None:
    target = Target(window_s=15.0)
    second, third = (engine_only(labelled(NEXT, engine=number)) for number in "12")
    other = engine_only(labelled(NEXT, engine="2", model_name="beside"))
    target.take(*[NEXT + second + third + other] * 2)
    by_scrape = [target.take(NEXT + second + other) for _ in range(3)]
    severities = [all_diagnoses[-1].causes[0].severity for all_diagnoses in by_scrape]
    assert severities == [Severity.INFO, Severity.WARNING, Severity.CRITICAL]
    dead = by_scrape[-1][-1]
    assert (dead.model, dead.engine) == ("tiny", "2")
    assert "no longer on the page" in dead.causes[0].summary
    assert "missing from 3 scrapes" in dead.causes[0].summary


def test_labels_that_change_with_every_scrape_do_not_take_all_memory() -> None:
    target = Target(window_s=15.0)

    def page(scrape: int) -> str:
        return NEXT + "".join(
            f'vllm:num_requests_running{{engine="{n}",model_name="m{scrape}"}} 1\n'
            for n in range(300)
        )

    by_scrape = [target.take(page(n)) for n in range(4)]
    engines = target.stream.monitor.engines
    assert len(engines) == ENGINES_MAX
    kept = {engine.key.model for engine in engines}
    assert {"tiny", "m3"} <= kept, "those on the page stay"
    assert "m0" not in kept, "those that left first go first"
    lines = [
        line
        for all_diagnoses in by_scrape
        for d in all_diagnoses
        for line in d.unknown
        if "the others are ignored" in line
    ]
    assert len(lines) == 1
    assert str(ENGINES_MAX) in lines[0]


def test_of_a_page_with_too_many_engines_known_ones_are_judged() -> None:
    target = Target(window_s=15.0)
    target.take(FIRST)
    many = "".join(
        f'vllm:num_requests_running{{engine="{n}",model_name="a"}} 1\n' for n in range(ENGINES_MAX)
    )
    all_diagnoses = target.take(many + NEXT)
    assert len(all_diagnoses) == ENGINES_MAX
    assert "tiny" in {d.model for d in all_diagnoses}


# What cannot be judged


@pytest.mark.parametrize(
    "lost", [*[(gauge,) for gauge in GAUGES], GAUGES, ("num_preemptions",)], ids="+".join
)
@pytest.mark.parametrize("value", [None, math.nan, -5.0, math.inf])
def test_a_stage_that_cannot_be_judged_is_unknown_and_says_why(
    lost: tuple[str, ...], value: float | None
) -> None:
    def page(body: str) -> str:
        if value is None:
            return without(body, *lost)
        return with_values(body, {f"{name}(?:_total)?": value for name in lost})

    diagnosis = Target().one(page(FIRST), page(NEXT), page(NEXT))
    assert diagnosis.was_read
    assert diagnosis.stage.number is None
    assert diagnosis.values["cascade_stage"] is None
    (line,) = (line for line in diagnosis.unknown if line.startswith("cascade_stage: "))
    assert line.removeprefix("cascade_stage: ") == stage_unknown(diagnosis)
    assert "it needs" in stage_unknown(diagnosis)
    assert Target().one(page(FIRST), FIRST, NEXT).stage.number is not None


def test_the_first_scrape_has_no_stage() -> None:
    target = Target()
    first = target.one(FIRST)
    assert (first.stage.number, first.health) == (None, "unknown")
    assert "one scrape" in stage_unknown(first)
    second = target.one(NEXT)
    assert second.stage.number is not None
    assert stage_unknown(second) == ""


def test_evictions_that_were_seen_are_a_stage_whatever_else_is_missing() -> None:
    target = Target(window_s=15.0)
    blind = [without(body, "kv_cache_usage_perc") for body in bodies("kv_pressure_cascade")]
    stages = [
        diagnosis.stage.number
        for body in blind
        for diagnosis in target.take(body)
        if diagnosis.stage.number is not None
    ]
    assert 3 in stages
    assert min(stages) >= 2


@pytest.mark.parametrize("value", [math.nan, None, -1.0])
def test_a_page_that_says_nothing_of_load_and_cache_is_as_bad_as_an_empty_one(
    value: float | None,
) -> None:
    target = Target()
    body = (
        without(NEXT, *GAUGES) if value is None else with_values(NEXT, dict.fromkeys(GAUGES, value))
    )
    all_diagnoses = [target.one(body) for _ in range(4)]
    assert [d.health for d in all_diagnoses] == ["warning", "warning", "critical", "critical"]
    assert all_diagnoses[-1].severity == Severity.CRITICAL
    assert target.one(*[NEXT] * 10).health == "ok"
    assert target.one(body).health == "warning", "it begins anew"


@pytest.mark.parametrize(
    ("metric", "signal", "value", "words"),
    [
        ("kv_cache_usage_perc", "kv_usage_ratio", 5.0, "kv_cache_usage_perc is 5, which is imp"),
        ("kv_cache_usage_perc", "kv_usage_ratio", math.inf, "kv_cache_usage_perc is inf, which"),
        ("kv_cache_usage_perc", "kv_usage_ratio", math.nan, "kv_cache_usage_perc is NaN"),
        ("num_requests_running", "running", -5.0, "num_requests_running is -5, which is imp"),
        ("num_requests_waiting", "waiting", -math.inf, "num_requests_waiting is -inf, which"),
    ],
)
def test_a_value_that_cannot_be_is_unknown_and_named(
    metric: str, signal: str, value: float, words: str
) -> None:
    diagnosis = Target().one(FIRST, *[with_values(NEXT, {metric: value})] * 12)
    assert cause_ids(diagnosis) == ["metrics_missing"]
    assert diagnosis.causes[0].summary.startswith(words)
    assert "not on the page" not in diagnosis.causes[0].evidence[0].text
    assert not diagnosis.recommendations
    assert any(line.startswith(f"{signal}: {words}") for line in diagnosis.unknown)
    assert diagnosis.values[signal] is None
    assert all(math.isfinite(number) for number in diagnosis.values.values() if number is not None)


def test_a_share_a_little_above_one_is_full() -> None:
    diagnosis = Target().one(FIRST, with_values(NEXT, {"kv_cache_usage_perc": 1.0000001}))
    assert diagnosis.values["kv_usage_ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("value", [math.inf, -7.0, math.nan])
def test_a_counter_that_cannot_be_leaves_its_rate_to_the_other_scrapes(value: float) -> None:
    target = Target()
    pages = [counted(FIRST, 100.0 * n) for n in range(10)]
    pages[4] = with_values(pages[4], {"generation_tokens_total": value})
    assert "metrics_missing" in cause_ids(target.one(*pages[:5]))
    after = target.one(*pages[5:], *[counted(FIRST, 100.0 * n) for n in range(10, 20)])
    assert after.values["generation_tokens_per_s"] == pytest.approx(50.0)
    assert after.health == "ok"


@pytest.mark.parametrize("value", ["1e308", "1e300"])
def test_values_that_overflow_crash_nothing(value: str) -> None:
    target = Target()
    for number, body in enumerate(bodies("kv_pressure_cascade")):
        random = Random(number)
        lines = [
            line
            if line.startswith("#") or random.random() < 0.6
            else f"{line.rpartition(' ')[0]} {value}"
            for line in body.splitlines()
        ]
        assert target.take("\n".join(lines) + "\n")


def test_an_engine_that_no_request_has_reached_yet_is_unknown_and_pages_nobody() -> None:
    """Several API servers show load and cache from the first request on."""
    fresh = without(multiprocess(grown(FIRST, 0.0)), *GAUGES)
    target = Target()
    all_diagnoses = [target.one(fresh) for _ in range(6)]
    assert [d.health for d in all_diagnoses] == ["unknown"] * 6
    assert {(c.id, c.severity) for d in all_diagnoses for c in d.causes} == {
        ("metrics_missing", Severity.INFO)
    }
    assert target.one(*[counted(multiprocess(FIRST), 100.0 * n) for n in range(9)]).health == "ok"
    dark = [without(counted(multiprocess(FIRST), 1000.0 + n), *GAUGES) for n in range(3)]
    assert target.one(*dark).health == "critical", "it has served: their loss is blindness"


def test_an_unused_engine_whose_page_is_broken_is_no_note() -> None:
    odd = with_values(grown(FIRST, 0.0), dict.fromkeys(GAUGES, math.nan))
    assert Target().one(odd, odd).health == "warning"
    assert Target().one(*[without(grown(FIRST, 0.0), GAUGES[0])] * 2).health == "warning"


# What is not on the page


STANDS_IN = {"request_success": ("e2e_request_latency_seconds",)}
"""What finished requests are counted by where the core metric is missing."""


@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_a_page_without_a_core_metric_is_not_healthy(family: str) -> None:
    lacking, instead = Target(), STANDS_IN.get(family, ())
    for diagnosis in (
        lacking.one(without(FIRST, family, *instead)),
        lacking.one(without(NEXT, family, *instead)),
    ):
        assert diagnosis.health in ("unknown", "warning")
        (cause,) = (c for c in diagnosis.causes if c.id == "metrics_missing")
        assert family in cause.summary
        assert cause.evidence
        assert any(family in line for line in diagnosis.unknown)


@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_a_core_metric_that_goes_away_is_missed_at_once(family: str) -> None:
    losing, instead = Target(), STANDS_IN.get(family, ())
    assert losing.one(FIRST, NEXT).health == "ok"
    lost = losing.one(without(grown(NEXT, 1.01), family, *instead))
    assert lost.health in ("unknown", "warning")
    (cause,) = (c for c in lost.causes if c.id == "metrics_missing")
    assert family in cause.summary
    back = losing.one(*(grown(NEXT, 1.02 + n / 100) for n in range(10)))
    assert back.health == "ok"
    assert cause_ids(back) == []


@pytest.mark.parametrize("gauge", GAUGES)
def test_a_gauge_that_is_no_number_is_unknown_not_ok(gauge: str) -> None:
    broken = Target()
    diagnosis = broken.one(FIRST, NEXT, with_values(NEXT, {gauge: math.nan}))
    assert diagnosis.health in ("unknown", "warning")
    assert "metrics_missing" in cause_ids(diagnosis)
    assert any(gauge in line for line in diagnosis.unknown)
    (key,) = (s.key for s in VLLM_SIGNALS if s.core and getattr(s.expr, "metric", "") == gauge)
    assert diagnosis.values[key] is None
    healed = broken.one(*[NEXT] * 10)
    assert not any(gauge in line for line in healed.unknown)


def test_a_finding_on_a_metric_that_went_away_is_unknown() -> None:
    diagnosis = Target().one(FIRST, NEXT, without(NEXT, "kv_cache_usage_perc"))
    (full,) = (f for f in diagnosis.findings if f.rule == "KV-FULL")
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
    all_diagnoses = [target.one(body) for _ in range(4)]
    assert [d.health for d in all_diagnoses] == ["unknown", "warning", "critical", "critical"]
    assert {cause_ids(d)[0] for d in all_diagnoses} == {"metrics_missing"}
    assert all(d.stage.number is None and d.unknown for d in all_diagnoses)
    healthy = target.one(FIRST, NEXT)
    assert healthy.health == "ok"


# Failed scrapes


def test_a_failed_first_scrape_says_so_and_the_next_page_is_read() -> None:
    target = Target()
    monitor = target.stream.monitor
    refused = CollectError("connection refused", kind="refused", hint="Is it running?")
    (first,) = monitor.failed(START_S - 2, refused)
    assert (first.health, first.engine, first.stage.number) == ("unknown", "", None)
    (cause,) = first.causes
    assert (cause.id, cause.severity, cause.since_s) == ("target_down", Severity.INFO, START_S - 2)
    assert "connection refused" in cause.summary
    assert cause.lever == "Is it running?"
    diagnosis = target.one(FIRST, NEXT)
    assert (diagnosis.health, diagnosis.engine) == ("ok", "0")
    assert cause_ids(diagnosis) == []


def test_a_target_that_stays_down_grows_worse_and_begins_anew_once_it_was_up() -> None:
    monitor = TargetMonitor("tiny", Profile())
    error = CollectError("timed out", kind="timeout")
    all_diagnoses = [monitor.failed(START_S + n, error)[0] for n in range(5)]
    assert [d.health for d in all_diagnoses] == ["unknown", "warning", *["critical"] * 3]
    assert [d.causes[0].severity for d in all_diagnoses] == [
        *(Severity.INFO, Severity.WARNING), *[Severity.CRITICAL] * 3
    ]  # fmt: skip
    confidences = [d.causes[0].confidence for d in all_diagnoses]
    assert confidences == sorted(confidences)
    assert {d.causes[0].since_s for d in all_diagnoses} == {START_S}
    target = Target()
    target.stream.monitor.failed(START_S - 20, error)
    target.stream.monitor.failed(START_S - 10, error)
    target.one(FIRST)
    (again,) = target.stream.monitor.failed(START_S + 10, error)
    assert (again.causes[0].severity, again.causes[0].since_s) == (Severity.INFO, START_S + 10)


IDLE = with_values(FIRST, {"num_requests_running": 0, "num_requests_waiting": 0})
BUSY = with_values(FIRST, {"num_requests_running": 1})


def severities(
    monitor: TargetMonitor, from_s: float, until_s: float, state: ServerState = NO_STATE
) -> list[str]:
    """The severity of target_down at each failed scrape, 5 s apart."""
    error = CollectError("connection refused", kind="refused")
    return [
        monitor.failed(from_s + n, error, state)[0].causes[0].severity.word
        for n in range(0, round(until_s - from_s), 5)
    ]


def test_a_server_that_stops_without_requests_may_be_restarted() -> None:
    target = Target()
    target.take(IDLE)
    monitor = target.stream.monitor
    words = severities(monitor, START_S + 5, START_S + 5 + PATIENCE_S)
    assert words == ["info", *["warning"] * (len(words) - 1)]
    (late,) = severities(monitor, START_S + 5 + PATIENCE_S, START_S + 10 + PATIENCE_S)
    assert late == "critical"


def test_a_server_that_broke_or_had_requests_is_down_at_once() -> None:
    states: tuple[tuple[str, ServerState], ...] = (
        (BUSY, NO_STATE),
        (IDLE, ServerState(oom_kills=1)),
        (IDLE, ServerState(exit_words="vllm.service ended with exit-code")),
        (IDLE, ServerState(processes=2)),
    )
    for page, state in states:
        target = Target()
        target.take(page)
        words = severities(target.stream.monitor, START_S + 5, START_S + 20, state)
        assert words == ["info", "warning", "critical"], state


def test_every_engine_of_a_target_that_is_down_is_told_of() -> None:
    target = Target()
    target.take(FIRST + engine_only(labelled(FIRST, engine="1")))
    all_diagnoses = target.stream.take(START_S + 2, "", "", status=503)
    assert [(d.engine, cause_ids(d)) for d in all_diagnoses] == [
        *(("0", ["target_down"]), ("1", ["target_down"]))
    ]
    assert all("503" in d.causes[0].summary for d in all_diagnoses)


# Quiet servers


def test_an_idle_server_is_healthy() -> None:
    all_diagnoses = diagnoses(CAPTURES / "idle.jsonl.gz", window_s=60.0)
    assert {d.health for d in all_diagnoses[1:]} == {"ok"}
    assert all_diagnoses[0].health in ("ok", "unknown")
    assert {d.stage.number for d in all_diagnoses if d.stage.number is not None} == {0}
    assert not any(d.causes or d.symptoms for d in all_diagnoses)


@pytest.mark.parametrize("window_s", [15.0, 60.0, 300.0])
@pytest.mark.parametrize(
    "capture",
    [
        *("healthy_light", "idle", "burst", "prefix_good"),
        *("sticky_two_replicas.r0", "sticky_two_replicas.r1"),
    ],
)
def test_nothing_is_paged_where_nothing_is_wrong(capture: str, window_s: float) -> None:
    all_diagnoses = diagnoses(CAPTURES / f"{capture}.jsonl.gz", window_s=window_s)
    assert len(all_diagnoses) > 25
    assert alarming(all_diagnoses) == []


@pytest.mark.parametrize("version", ["0.8.5", "0.10.0", "0.11.2", "0.14.0", "0.17.0", "0.20.2"])
def test_two_scrapes_of_an_old_server_give_signals(version: str) -> None:
    fresh = with_values(recorded(f"{version}-rendered"), {"num_requests_running": 4})
    target = Target()
    diagnosis = target.one(fresh, counted(fresh, 10), counted(fresh, 20))
    core = [signal.key for signal in VLLM_SIGNALS if signal.core]
    assert not [key for key in core if diagnosis.values[key] is None]
    assert diagnosis.values["running"] == 4
    assert diagnosis.values["generation_tokens_per_s"] == pytest.approx(5.0)
    assert (diagnosis.values["ttft_p99_s"] or 0) > 0
    assert (diagnosis.values["itl_p99_s"] or 0) > 0
    on_page = "cache_config_info{" in fresh
    assert diagnosis.values["kv_capacity_tokens"] == (140 * 32 if on_page else None)
    assert diagnosis.health == "ok"


def test_without_a_gpu_source_gpu_signals_are_said_to_be_unknown() -> None:
    diagnosis = Target().one(FIRST, NEXT)
    assert "gpu_*: no GPU source" in diagnosis.unknown
    assert {f.state for f in diagnosis.findings if f.signal.startswith("gpu_")} == {"unknown"}


# Long stretches


def test_an_engine_that_stands_still_is_told_after_half_a_minute() -> None:
    target = Target()
    stuck = with_values(NEXT, {"num_requests_running": 3})
    target.one(FIRST, stuck)
    all_diagnoses = [target.one(stuck) for _ in range(20)]
    begun_s = all_diagnoses[0].t_s
    for diagnosis in all_diagnoses:
        assert ("engine_stalled" in cause_ids(diagnosis)) == (diagnosis.t_s - begun_s >= 30)
    assert all_diagnoses[-1].health == "critical"
    calm = target.one(*(counted(stuck, n) for n in range(1, 20)))
    assert "engine_stalled" not in cause_ids(calm)
    assert calm.health == "ok"


def test_token_counters_that_went_away_are_no_stall() -> None:
    target = Target()
    running = with_values(NEXT, {"num_requests_running": 3})
    target.one(FIRST, running)
    blind = without(running, "generation_tokens", "prompt_tokens", "request_success")
    all_diagnoses = [target.one(blind) for _ in range(30)]
    assert not [d for d in all_diagnoses if "engine_stalled" in cause_ids(d)]
    assert "metrics_missing" in cause_ids(all_diagnoses[-1])


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


@pytest.mark.parametrize("name", ["kv_pressure_cascade", "queue_overload", "prefix_lost"])
def test_buckets_that_are_only_shown_decide_nothing(name: str) -> None:
    shown = {signal.key: None for signal in VLLM_SIGNALS if signal.shown}
    buckets = re.compile(rf"(?m)^vllm:(?:{'|'.join(BUCKETS_SHOWN)})_bucket.*\n")
    whole, less = (TargetStream(name, Profile(), Limits()) for _ in range(2))
    seen = 0
    for entry in CaptureReader(CAPTURES / f"{name}.jsonl.gz"):
        body, removed = buckets.subn("", entry.body or "")
        seen += removed
        (verdict,), (other,) = whole.replay(entry), less.replay(replace(entry, body=body))
        assert other == replace(verdict, values={**verdict.values, **shown})
    assert seen
