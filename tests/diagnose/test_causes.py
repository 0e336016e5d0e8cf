"""Each cause on the least that concludes it, and on what comes close and must not."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.capacity import LearnedKnee, Range
from kneewatch.diagnose.causes.bottleneck import unseen_host
from kneewatch.diagnose.causes.evidence import ReplacedProcess
from kneewatch.diagnose.causes.record import Form, cause, term
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.ranking import BY_ID, CAUSES, conclude, moved_families, ranked
from kneewatch.rules.conditions import Check, Number, nodes
from kneewatch.rules.facts import Targets
from kneewatch.rules.quantities import Live
from kneewatch.rules.rule import ITL, LOAD, TTFT, Severity
from tests.collector.name_pages import recorded
from tests.diagnose.situations import (
    CALM,
    CONCLUSIVE,
    HEAVY_PROMPTS,
    NOW_S,
    QUEUED,
    QUIET,
    Situation,
    least,
)
from tests.diagnose.streams import Target

EACH = pytest.mark.parametrize("cause_id", list(CONCLUSIVE))
NOTES = {
    "spec_acceptance_drift",
    "client_errors",
    "underused",
    "kv_overprovisioned",
    "prefix_block_too_large",
    "engine_asleep",
    "workload_drift",
    "tp_overhead",
    "engine_restarted",
}
KV, CHURN, LOST = (CONCLUSIVE[c] for c in ("kv_pressure", "prefix_churn", "prefix_reuse_lost"))
THRASH, XFER, SPEC, STALLS, STILL = (
    CONCLUSIVE[c]
    for c in (
        *("adapter_thrash", "kv_transfer_slow", "spec_decode_poor"),
        *("prefill_interference", "engine_stalled"),
    )
)
LEAK = CONCLUSIVE["kv_leak"]
BLOCK_ID = "prefix_block_too_large"
BLOCK = CONCLUSIVE[BLOCK_ID]
SWAPS = {"lora_change_per_s": 6 / 15}
RUNAWAY, KNEE, OFF = (
    CONCLUSIVE[c] for c in ("runaway_generation", "past_knee", "prefix_cache_off")
)


def test_what_must_last_is_one_condition_by_name_and_waits_for_no_other() -> None:
    lasting: dict[str, object] = {}
    for held in (node for record in CAUSES for node in nodes(record.forms)):
        if isinstance(held, Check):
            assert lasting.setdefault(held.name, held.of) == held.of
            assert not any(isinstance(node, Check) for node in nodes(held.of))
    assert len(lasting) > 5


def test_nothing_is_concluded_of_a_healthy_engine() -> None:
    assert CALM.causes() == {}
    assert replace(CALM, targets=Targets(ttft_p99_s=1.0, itl_p99_s=0.1)).causes() == {}


def test_nothing_is_concluded_of_signals_that_are_all_unknown() -> None:
    unknown = replace(CALM, values=dict.fromkeys(CALM.values), quiet={}, config={})
    assert unknown.causes() == {}
    assert replace(unknown, values={}).causes() == {}


@EACH
def test_a_cause_is_concluded_with_evidence_and_advice(cause_id: str) -> None:
    cause = CONCLUSIVE[cause_id].causes()[cause_id]
    assert cause.id == cause_id
    assert 0.6 <= cause.confidence <= 1
    assert cause.severity == (Severity.INFO if cause_id in NOTES else cause.severity)
    assert cause.severity >= (Severity.INFO if cause_id in NOTES else Severity.WARNING)
    assert cause.evidence
    assert all(evidence.text for evidence in (*cause.evidence, *cause.against))
    assert cause.summary.endswith(".")
    assert cause.lever.endswith(".")
    assert cause.guide or cause_id == "engine_restarted"


def test_a_cause_of_plain_comparisons_is_whole_in_its_module() -> None:
    files = Live("open_files")
    record = cause(
        "many_files",
        Form(
            gate=Check("many_files", files >= 5000.0, Number(40.0)),
            terms=(term(files, 5000.0, 1.2, "{value} files are open"),),
            say="The server has {open_files} files open.",
            lever="Find the client that keeps its connections open.",
        ),
        title="Too many open files",
        guide=("9.4",),
        clear_s=45.0,
    )
    concluded = record.examine(least(record).facts())
    assert (record.title, record.clear_s) == ("Too many open files", Number(45.0))
    assert concluded is not None
    assert (concluded.summary, concluded.guide) == (
        "The server has 15,000 files open.",
        ("9.4",),
    )


@EACH
def test_two_runs_say_the_same(cause_id: str) -> None:
    facts = CONCLUSIVE[cause_id].facts()
    assert conclude(facts) == conclude(facts)


NEAR_MISSES = [
    # kv_pressure
    ("kv_pressure", replace(KV, stage=1, worst=Severity.INFO), "full, nobody is evicted or waits"),
    ("kv_pressure", QUEUED, "a queue with KV half free"),
    ("kv_pressure", QUEUED.but(kv_usage_avg_ratio=0.94), "a queue with some KV free"),
    (
        "kv_pressure",
        QUEUED.but(kv_usage_avg_ratio=0.97).lasting(queued=5.0),
        "a full cache and a queue of five seconds",
    ),
    # queues
    ("queue_saturation", QUEUED.but(kv_usage_avg_ratio=0.97), "the queue is behind a full cache"),
    ("queue_saturation", replace(QUEUED, stage=2), "the queue is behind preemption"),
    ("queue_saturation", CONCLUSIVE["admission_limit"], "the batch is pinned with room left"),
    ("queue_saturation", QUEUED.lasting(queued=9.0), "a queue of nine seconds"),
    ("queue_saturation", QUEUED.but(waiting_by_capacity=1.0), "served at once"),
    ("admission_limit", replace(CONCLUSIVE["admission_limit"], stage=2), "preemption"),
    (
        "admission_limit",
        CONCLUSIVE["admission_limit"].but(itl_mean_drift_ratio=2.0),
        "steps are slow: more seats would not help",
    ),
    ("admission_limit", CONCLUSIVE["admission_limit"].but(kv_usage_avg_ratio=0.85), "KV binds"),
    (
        "admission_limit",
        CONCLUSIVE["admission_limit"].but(kv_usage_avg_ratio=None),
        "KV usage unknown: no room can be claimed",
    ),
    # prefix cache
    ("prefix_cache_off", replace(OFF, values=CALM.values), "off, and prefill is light"),
    ("prefix_cache_off", OFF.but(prefill_service_ratio=0.04), "off, and prefill takes no time"),
    ("prefix_cache_off", replace(OFF, config={"enable_prefix_caching": "True"}), "it is on"),
    ("prefix_cache_off", replace(OFF, config={}), "the page does not say"),
    ("prefix_reuse_lost", CALM.but(prefix_hit_ratio=0.0), "lost, and prefill is light"),
    ("prefix_reuse_lost", LOST.but(prefix_hit_ratio=0.31), "more than half of the hits are left"),
    (
        "prefix_reuse_lost",
        LOST.but(prefix_hit_ratio=0.01, prefix_hit_tokens_mean=118.0),
        "longer prompts with the prefix that they had: each hits as many tokens",
    ),
    (
        "prefix_churn",
        CHURN.but(prefix_hit_tokens_mean=118.0),
        "longer prompts with the prefix that they had, and a cache that turns over",
    ),
    (
        "prefix_reuse_lost",
        LOST.but(prefix_query_per_s=1_700.0, completed_per_s=0.0, running_max=4.0),
        "a prompt of 100,000 tokens is looked up, and no other",
    ),
    ("prefix_reuse_lost", LOST.but(prefix_hit_ratio=None), "no lookup in the window"),
    ("prefix_reuse_lost", replace(LOST, config={"enable_prefix_caching": "False"}), "off"),
    ("prefix_reuse_lost", CHURN, "some hits are left and the cache turns over quickly"),
    ("prefix_reuse_lost", replace(LOST, observed_s=100.0), "a new process fills its cache"),
    ("prefix_reuse_lost", LOST.but(awake_min=0.0), "a woken engine fills its cache"),
    (
        "prefix_reuse_lost",
        replace(LOST, quiet={}, observed_s=100.0),
        "never shared, as far as two minutes tell",
    ),
    ("prefix_churn", CHURN.but(kv_capacity_tokens=1e6), "the cache turns over slowly"),
    ("prefix_churn", CHURN.but(kv_capacity_tokens=None), "how fast it turns over is unknown"),
    ("prefix_churn", CHURN.but(prefix_hit_ratio=0.05), "nothing hits: reuse was lost"),
    ("prefix_churn", CHURN.but(prefix_hit_ratio=0.5), "most hits are left"),
    (
        "prefix_churn",
        replace(CHURN, recent={"prefix_hit_ratio": 0.58}),
        "the newest part of the window hits as usual: it was a cold cache",
    ),
    (
        "prefix_churn",
        replace(CHURN, quiet={}, recent={"prefix_hit_ratio": 0.9}).but(block_reuse_per_s=2.0),
        "a cold cache that has warmed up, no baseline",
    ),
    ("prefix_churn", replace(CHURN, quiet={}), "partial hits, and no reuse or mix was seen"),
    (
        "prefix_churn",
        replace(CHURN, quiet={}).but(
            prefill_hit_share=0.16, prefill_miss_share=0.62, prefix_hit_ratio=0.36
        ),
        "all hit the same short beginning, and few prompts are short",
    ),
    ("prefix_churn", CHURN.but(prompt_tokens_mean=9_000.0), "prompts are far longer than before"),
    ("prefix_reuse_lost", LOST.but(prompt_tokens_mean=9_000.0), "prompts are far longer"),
    # features
    ("adapter_thrash", THRASH.but(lora_max=None), "requests are deferred, LoRA is off"),
    ("adapter_thrash", THRASH.lasting(deferred=9.0), "deferred for a moment"),
    (
        "adapter_thrash",
        replace(THRASH, streaks_s={}),
        "nobody is held back now, and the adapters stay",
    ),
    (
        "adapter_thrash",
        replace(THRASH, streaks_s={}, recent=SWAPS).but(waiting_deferred_avg=0.3),
        "adapters take turns, and next to nobody waits",
    ),
    ("kv_transfer_slow", XFER.but(kv_transfer_mean_s=0.02), "as quick as ever"),
    (
        "kv_transfer_slow",
        replace(XFER, quiet={}).but(ttft_mean_s=1.0),
        "no quiet mean, and a small part of TTFT",
    ),
    ("kv_transfer_slow", XFER.but(kv_transfer_mean_s=None), "no connector"),
    ("spec_decode_poor", SPEC.but(spec_acceptance_ratio=0.5), "half is accepted"),
    (
        "spec_decode_poor",
        replace(SPEC, recent={"spec_acceptance_ratio": 0.46}).but(
            spec_acceptance_ratio=0.52, running_avg=1.5, arrival_per_s=0.1
        ),
        "a few requests whose drafts suit less: chance",
    ),
    (
        "spec_decode_poor",
        SPEC.but(spec_acceptance_ratio=0.45, running_avg=1.5, arrival_per_s=0.1),
        "less than half of seven requests: chance",
    ),
    ("spec_decode_poor", SPEC.but(spec_draft_tokens_per_s=4.0), "hardly anything is drafted"),
    ("spec_decode_poor", SPEC.but(spec_acceptance_ratio=None), "no speculation"),
    (
        "spec_decode_poor",
        replace(SPEC, recent={"spec_acceptance_ratio": 0.9}),
        "it pays again in the newest quarter of the window",
    ),
    # latency
    ("prefill_interference", STALLS.but(prefill_long_per_s=0.0), "stalls, and no long prefill"),
    ("prefill_interference", STALLS.but(large_step_per_s=0.0), "no step with a large prompt"),
    (
        "prefill_interference",
        STALLS.but(large_step_per_s=0.02, itl_stall_per_s=0.5),
        "large steps pause ten streams each and explain less than half of the pauses",
    ),
    (
        "prefill_interference",
        replace(STALLS.but(itl_p50_s=0.15), quiet={"itl_p50_s": 0.15}),
        "half a second is three steps of a slow machine",
    ),
    ("prefill_interference", STALLS.but(itl_stall_per_s=0.03), "two stalls in the window"),
    ("prefill_interference", STALLS.but(itl_stall_time_ratio=0.04), "little time is lost"),
    ("prefill_interference", STALLS.but(preemption_per_s=0.1), "the pauses are preemptions"),
    ("prefill_interference", replace(STALLS, stage=2), "the pauses are preemptions, stage 2"),
    (
        "prefill_interference",
        replace(CONCLUSIVE["decode_bound"]),
        "over target at every percentile",
    ),
    ("slo_conflict", CONCLUSIVE["prefill_bound"], "only TTFT is over"),
    ("slo_conflict", CONCLUSIVE["decode_bound"], "only ITL is over"),
    ("slo_conflict", replace(CONCLUSIVE["slo_conflict"], stage=2), "preemption explains both"),
    (
        "slo_conflict",
        replace(CONCLUSIVE["slo_conflict"], targets=Targets(ttft_p99_s=1.0)),
        "one target is not stated",
    ),
    ("slo_conflict", CONCLUSIVE["slo_conflict"].but(itl_p99_s=None), "ITL unknown"),
    ("prefill_bound", CONCLUSIVE["prefill_bound"].but(ttft_p99_s=1.0), "TTFT at its target"),
    ("prefill_bound", CONCLUSIVE["prefill_bound"].but(queue_mean_s=0.9), "most of it is queue"),
    (
        "prefill_bound",
        CONCLUSIVE["prefill_bound"].but(prefill_mean_s=1.0, queue_mean_s=2.0),
        "prefill at the target, and most is queue",
    ),
    ("prefill_bound", replace(CONCLUSIVE["prefill_bound"], targets=Targets()), "no target"),
    ("decode_bound", CONCLUSIVE["decode_bound"].but(itl_p50_s=0.1), "the median is at target"),
    ("decode_bound", replace(CONCLUSIVE["decode_bound"], targets=Targets()), "no target"),
    ("past_knee", KNEE.but(ttft_p99_p50_drift_ratio=1.9), "the tail follows the middle"),
    ("past_knee", KNEE.but(running_avg=14.0), "the load has not grown"),
    ("past_knee", replace(KNEE, stage=2), "preemption"),
    ("past_knee", replace(KNEE, quiet={}), "no quiet load to compare with"),
    ("past_knee", KNEE.but(ttft_p99_p50_drift_ratio=None), "no drift yet"),
    ("past_knee", replace(KNEE, targets=Targets()), "no target, and no queue shows"),
    # workload
    ("runaway_generation", replace(RUNAWAY, quiet={}), "no quiet baseline"),
    ("runaway_generation", RUNAWAY.but(finished_length_ratio=0.49), "19 points more"),
    ("runaway_generation", RUNAWAY.but(answers_moved_ratio=1.0), "a lower limit, not longer"),
    ("runaway_generation", RUNAWAY.but(completed_per_s=0.1), "six requests in the window"),
    ("underused", CALM.but(running_avg=0.0), "idle now, not for hours"),
    ("kv_overprovisioned", CALM.but(kv_usage_max_ratio=0.05), "unused now, not for hours"),
    # the engine and the observer
    ("engine_stalled", STILL.lasting(stalled=29.9), "nothing came out for less than 30 s"),
    ("engine_stalled", replace(STILL, streaks_s={}), "tokens come out"),
    ("engine_stalled", replace(STILL, scale=0.1).lasting(stalled=9.0), "too short a look"),
    ("engine_restarted", replace(CALM, restarts=(ReplacedProcess(NOW_S - 61),)), "a minute ago"),
]


@pytest.mark.parametrize(
    ("cause_id", "situation"),
    [pytest.param(cause, situation, id=f"{cause}: {why}") for cause, situation, why in NEAR_MISSES],
)
def test_a_near_miss_is_not_the_cause(cause_id: str, situation: Situation) -> None:
    assert cause_id not in situation.causes()


def test_the_same_queue_is_told_by_what_binds() -> None:
    evicting = replace(
        QUEUED.but(kv_usage_avg_ratio=0.98, preemption_ratio_per_s=0.1, preemption_per_s=1.0),
        stage=3,
        worst=Severity.WARNING,
    )
    assert set(evicting.causes()) == {"kv_pressure"}
    assert set(QUEUED.but(kv_usage_avg_ratio=0.98).causes()) == {"kv_pressure"}
    assert set(QUEUED.but(running_max=10.0).causes()) == {"admission_limit"}
    assert set(QUEUED.but(running_max=20.0).causes()) == {"queue_saturation"}
    busy = QUEUED.but(running_max=10.0, itl_mean_drift_ratio=3.0)
    assert set(busy.causes()) == {"queue_saturation"}


MEASURED = CONCLUSIVE["admission_limit"].but(
    itl_mean_drift_ratio=None, itl_p50_s=0.03, prefill_busy_ratio=0.2
)
"""A batch at its limit with short steps; no quiet step is known to compare with."""

ROOM = ("running_avg", "running_max", "kv_usage_avg_ratio")


@pytest.mark.parametrize(
    ("measured", "unknown"),
    [
        *((CONCLUSIVE["admission_limit"], key) for key in (*ROOM, "itl_mean_drift_ratio")),
        *((MEASURED, key) for key in ROOM),
        *((MEASURED, key) for key in ("itl_p50_s", "prefill_busy_ratio")),
    ],
)
def test_room_that_was_not_measured_is_not_claimed(measured: Situation, unknown: str) -> None:
    assert set(measured.causes()) == {"admission_limit"}
    (queue,) = measured.but(**{unknown: None}).causes().values()
    assert queue.id == "queue_saturation"
    texts = [queue.summary, *(each.text for each in (*queue.evidence, *queue.against))]
    assert not [text for text in texts if "room" in text or "pinned" in text]
    assert ("KV cache" in queue.lever) == (unknown != "kv_usage_avg_ratio")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("itl_p50_s", 0.1),
        ("prefill_busy_ratio", 0.75),
        ("gpu_dram_active_ratio", 0.6),
        ("gpu_tensor_active_ratio", 0.5),
        ("mbu_ratio", 0.55),
        ("mfu_ratio", 0.4),
    ],
)
def test_a_gpu_that_works_has_no_room(key: str, value: float) -> None:
    assert set(MEASURED.but(**{key: value}).causes()) == {"queue_saturation"}
    assert set(MEASURED.but(**{key: 0.99 * value}).causes()) == {"admission_limit"}


def test_few_seats_are_seen_beside_long_prompts() -> None:
    # A long prompt every few seconds lengthens the mean step and stalls all streams, yet most steps
    # are fast and the prompts leave time for more requests.
    stalls = MEASURED.but(itl_mean_s=0.12, itl_stall_time_ratio=0.27, prefill_busy_ratio=0.6)
    assert "admission_limit" in stalls.causes()


def test_how_room_was_measured_is_told() -> None:
    drift, steps = (
        situation.causes()["admission_limit"].evidence[-1].text
        for situation in (CONCLUSIVE["admission_limit"], MEASURED)
    )
    assert drift == "inter-token latency is 1.0x its quiet mean: steps are fast"
    assert steps == "ITL P50 is 30 ms and prefill runs 20% of the time: most steps are fast"
    busy = QUEUED.but(itl_mean_drift_ratio=1.6).causes()["queue_saturation"]
    assert busy.evidence[-1].text == "inter-token latency is 1.6x its quiet mean: steps are slow"


def test_a_full_cache_with_a_queue_is_told_before_anything_is_evicted() -> None:
    cause = QUEUED.but(kv_usage_avg_ratio=0.98).causes()["kv_pressure"]
    assert "none preempted yet" in cause.summary
    assert cause.severity == Severity.WARNING


@pytest.mark.parametrize(
    ("target_s", "waiting", "concluded"),
    [
        pytest.param(None, 30.0, True, id="15 s of waiting, no target"),
        pytest.param(None, 1.9, False, id="a second of waiting, no target"),
        pytest.param(60.0, 30.0, False, id="15 s of waiting, a target of a minute"),
        pytest.param(20.0, 30.0, True, id="15 s of waiting, a target of 20 s"),
        pytest.param(1.0, 1.9, True, id="a second of waiting, a target of a second"),
    ],
)
def test_a_queue_matters_where_its_wait_does(
    target_s: float | None, waiting: float, *, concluded: bool
) -> None:
    queued = replace(QUEUED, targets=Targets(ttft_p99_s=target_s))
    assert ("queue_saturation" in queued.but(waiting_by_capacity=waiting).causes()) == concluded


@pytest.mark.parametrize(
    ("target_s", "usual_s", "wait_s", "severity"),
    [
        pytest.param(None, 0.2, 19.0, Severity.WARNING, id="a burst, however quick usual TTFT is"),
        pytest.param(None, 0.2, 21.0, Severity.CRITICAL, id="a hundred times as long as usual"),
        pytest.param(None, 4.0, 39.0, Severity.WARNING, id="less than ten times as long as usual"),
        pytest.param(None, 4.0, 41.0, Severity.CRITICAL, id="ten times as long as usual"),
        pytest.param(None, None, 59.0, Severity.WARNING, id="nothing to compare with"),
        pytest.param(None, None, 61.0, Severity.WARNING, id="a steady minute, nothing known"),
        pytest.param(None, 40.0, 79.0, Severity.WARNING, id="a minute is nearly usual"),
        pytest.param(None, 40.0, 81.0, Severity.CRITICAL, id="twice as long as usual"),
        pytest.param(10.0, 0.2, 59.0, Severity.WARNING, id="a target stands above what is usual"),
        pytest.param(10.0, 40.0, 61.0, Severity.CRITICAL, id="a minute against a target of 10 s"),
        pytest.param(100.0, 0.2, 61.0, Severity.WARNING, id="within the target"),
        pytest.param(1.0, 40.0, 11.0, Severity.CRITICAL, id="ten times the target"),
    ],
)
def test_severity_follows_the_wait_against_the_target_or_the_usual(
    target_s: float | None, usual_s: float | None, wait_s: float, severity: Severity
) -> None:
    quiet = {key: value for key, value in QUEUED.quiet.items() if key != "ttft_p99_s"}
    queued = replace(
        QUEUED.but(expected_wait_s=wait_s),
        targets=Targets(ttft_p99_s=target_s),
        quiet=quiet if usual_s is None else {**quiet, "ttft_p99_s": usual_s},
    )
    assert queued.causes()["queue_saturation"].severity == severity
    pinned = replace(queued, values={**queued.values, "running_max": 10.0})
    assert pinned.causes()["admission_limit"].severity == severity


def test_a_steady_queue_is_by_design_only_while_as_many_are_served_as_ever() -> None:
    quiet = {key: value for key, value in QUEUED.quiet.items() if key != "ttft_p99_s"}
    steady = replace(QUEUED.but(expected_wait_s=61.0, demand_moved_ratio=1.0), quiet=quiet)
    assert steady.causes()["queue_saturation"].severity == Severity.WARNING
    slower = steady.but(demand_moved_ratio=0.1).causes()["queue_saturation"]
    assert slower.severity == Severity.CRITICAL


def test_a_minute_is_critical_in_a_queue_that_grows_though_nothing_usual_is_known() -> None:
    quiet = {key: value for key, value in QUEUED.quiet.items() if key != "ttft_p99_s"}
    grows = replace(QUEUED.but(expected_wait_s=61.0, waiting_slope_per_s=9.0), quiet=quiet)
    assert grows.causes()["queue_saturation"].severity == Severity.CRITICAL


def test_a_lost_prefix_is_named_while_no_request_ends() -> None:
    unended = CONCLUSIVE["prefix_reuse_lost"].but(
        prefill_service_ratio=None, prefill_busy_ratio=None, completed_per_s=0.0
    )
    assert "prefix_reuse_lost" not in unended.causes()
    stuck = unended.but(waiting_avg=8.0, waiting=8.0)
    assert "prefix_reuse_lost" in stuck.causes()
    assert "prefix_reuse_lost" not in stuck.but(generation_tokens_per_s=1e5).causes()


@pytest.mark.parametrize(
    ("per_s", "said"),
    [
        (4.3, "vLLM preempts 4.3 requests/s"),
        (0.03, "vLLM preempts 1.8 requests/min"),
        (0.0, "vLLM has preempted requests"),
    ],
)
def test_a_rate_of_preemptions_is_never_said_to_be_zero(per_s: float, said: str) -> None:
    pressed = CONCLUSIVE["kv_pressure"].but(preemption_per_s=per_s)
    cause = BY_ID["kv_pressure"].examine(pressed.facts())
    assert cause is not None
    assert said in cause.summary


def test_a_batch_that_slow_steps_enlarge_does_not_excuse_them_at_an_equal_load() -> None:
    slow = CONCLUSIVE["unexplained_latency"].but(
        ttft_p50_drift_ratio=1.0, itl_mean_drift_ratio=3.0, engine_speed_ratio=1.0
    )
    assert "unexplained_latency" not in slow.causes(), "its contexts may be longer"
    slow = slow.but(running_avg=30.0)
    assert slow.causes()["unexplained_latency"].severity == Severity.WARNING


def test_unexplained_latency_names_what_was_ruled_out_and_what_to_do() -> None:
    situation = CONCLUSIVE["unexplained_latency"].but(
        kv_usage_avg_ratio=0.4, preemption_per_s=0.0, prefix_hit_ratio=None
    )
    cause = BY_ID["unexplained_latency"].examine(situation.facts())
    assert cause is not None
    said = " ".join(each.text for each in cause.evidence)
    assert "KV cache in use 40%" in said
    assert "preemptions 0/s" in said
    assert "prefix hit ratio" not in said
    for step in ("log", "/start_profile", "`top`", "--slo-ttft"):
        assert step in cause.lever


@pytest.mark.parametrize(
    ("cause_id", "kept", "learned"),
    [("past_knee", {TTFT, LOAD}, {ITL}), ("underused", set[str](), {TTFT, ITL, LOAD})],
)
def test_a_note_stops_learning_of_what_it_moves_only(
    cause_id: str, kept: set[str], learned: set[str]
) -> None:
    facts = CONCLUSIVE[cause_id].facts()
    cause = BY_ID[cause_id].examine(facts)
    assert cause is not None
    moved = moved_families([replace(cause, severity=Severity.INFO)], facts)
    assert moved >= kept
    assert not moved & learned


def test_a_queue_that_nobody_serves_grows_critical() -> None:
    for unserved, words, grows_to in (
        (0.0, ", none finished in the window", Severity.CRITICAL),
        (None, "", Severity.WARNING),
    ):
        stuck = QUEUED.but(completed_per_s=unserved, arrival_per_s=unserved)
        cause = stuck.causes()["queue_saturation"]
        assert cause.summary == f"Requests queue for capacity: 30 requests queued{words}."
        assert cause.severity == Severity.WARNING
        assert stuck.lasting(queued=59.0).causes()["queue_saturation"] == cause
        long = stuck.lasting(queued=60.0).causes()["queue_saturation"]
        assert long.severity == grows_to


def test_first_tokens_tell_the_wait_where_nobody_waits_for_the_end() -> None:
    cut_short = QUEUED.but(completed_per_s=0.0, arrival_per_s=5.0).lasting(queued=600.0)
    cause = cut_short.causes()["queue_saturation"]
    assert cause.summary == "Requests queue for capacity: 30 requests queued, expected wait 6.0 s."
    assert cause.severity == Severity.WARNING


def test_more_requests_than_are_served_is_said_of_a_queue_that_grows() -> None:
    cause = QUEUED.but(waiting_slope_per_s=0.5).causes()["queue_saturation"]
    assert cause.summary.startswith("Overloaded:")


@pytest.mark.parametrize(
    ("situation", "leaks"),
    [
        pytest.param(LEAK, True, id="held for two minutes without a request"),
        pytest.param(LEAK.lasting(kv_held=100.0), False, id="for less than two minutes"),
        pytest.param(LEAK.but(kv_transfer_mean_s=0.02), False, id="a peer may still fetch it"),
        pytest.param(
            LEAK.but(kv_transfer_mean_s=0.02).lasting(kv_held=700.0), True, id="no peer fetched it"
        ),
    ],
)
def test_blocks_that_nobody_holds_are_a_leak(situation: Situation, leaks: bool) -> None:
    assert ("kv_leak" in situation.causes()) == leaks


def test_a_sleeping_engine_is_told_as_asleep_and_is_why_it_stalls() -> None:
    asleep = CONCLUSIVE["engine_asleep"]
    assert CALM.but(awake=1.0).causes() == {}
    (head,) = ranked(list(asleep.lasting(stalled=45.0).causes().values()))
    assert (head.id, head.explains) == ("engine_asleep", ("engine_stalled",))
    assert head.severity == Severity.CRITICAL
    assert "/wake_up" in head.lever


def test_a_sleeping_engine_is_no_healthy_one() -> None:
    body = re.sub(r'(sleep_state="awake"\}) 1.0', r"\1 0.0", recorded("0.32.0-loaded"))
    diagnosis = Target().one(body, body, body)
    assert diagnosis.health == "info"
    assert [cause.id for cause in diagnosis.causes] == ["engine_asleep"]


@pytest.mark.parametrize(
    ("capacity_tokens", "first"), [(100_000.0, "holds: new blocks"), (1_000_000.0, "version")]
)
def test_a_cache_that_keeps_no_prefix_for_a_minute_may_be_why_none_hits(
    capacity_tokens: float, first: str
) -> None:
    assert first in LOST.but(kv_capacity_tokens=capacity_tokens).causes()["prefix_reuse_lost"].lever


def test_prompts_that_never_shared_a_prefix_are_a_note_that_leaves_open_why() -> None:
    never = replace(HEAVY_PROMPTS.but(prefix_hit_ratio=0.0, prefix_hit_tokens_mean=0.0), quiet={})
    (cause,) = never.causes().values()
    assert cause.id == "prefix_reuse_lost"
    assert cause.severity == Severity.INFO
    assert cause.lever.startswith("Open: ")
    assert "router" in cause.lever


def test_prompts_that_share_only_their_first_tokens_are_told_where_they_differ() -> None:
    few = HEAVY_PROMPTS.but(prefix_hit_ratio=0.015, prefix_hit_tokens_mean=16.0)
    cause = replace(few, quiet={}).causes()["prefix_reuse_lost"]
    assert cause.summary.startswith("Prompts share only their first 16 tokens")
    assert "behind the shared part" in cause.lever


@pytest.mark.parametrize(
    ("prompt_tokens", "block_tokens", "cause_id"),
    [
        pytest.param(480.0, 528.0, "prefix_block_too_large", id="shorter than a block"),
        pytest.param(2_100.0, 528.0, "prefix_block_too_large", id="a few blocks long"),
        pytest.param(9_000.0, 528.0, "prefix_reuse_lost", id="many blocks long"),
        pytest.param(12.0, 16.0, "prefix_reuse_lost", id="blocks of attention alone"),
        pytest.param(480.0, None, "prefix_reuse_lost", id="blocks of unknown size"),
        pytest.param(None, 528.0, "prefix_reuse_lost", id="prompts of unknown length"),
    ],
)
def test_a_cache_that_cannot_hit_is_told_from_prompts_that_share_nothing(
    prompt_tokens: float | None, block_tokens: float | None, cause_id: str
) -> None:
    none_hit = BLOCK.but(prompt_tokens_p95=prompt_tokens, prefix_block_tokens=block_tokens)
    assert list(none_hit.causes()) == [cause_id]


def test_blocks_that_no_prompt_fills_head_the_slow_prompts_that_follow() -> None:
    slow = BLOCK.but(
        itl_stall_time_ratio=0.2, itl_stall_per_s=0.5, prefill_long_per_s=0.1,
        prefill_service_ratio=0.2,
    )  # fmt: skip
    (head,) = ranked(conclude(slow.facts()))
    assert (head.id, head.severity) == (BLOCK_ID, Severity.WARNING)
    assert head.explains == ("prefill_interference",)
    longer_once = replace(slow, quiet=QUIET)
    assert [cause.id for cause in ranked(conclude(longer_once.facts()))] == [BLOCK_ID]
    few = [cause.id for cause in ranked(conclude(slow.but(prompt_tokens_p95=2_100.0).facts()))]
    assert few[0] == "prefill_interference", "a guess explains nothing"


def test_giants_that_do_not_fit_beside_each_other_are_seen_between_the_steps() -> None:
    gauges = {"kv_usage_avg_ratio": 0.0, "running": 0.0, "running_avg": 0.2, "running_max": 1.0}
    queued = CONCLUSIVE["queue_saturation"].but(
        **gauges, prompt_tokens_p99=50_000.0, iteration_tokens_mean=40.0
    )
    prompts = CONCLUSIVE["prefix_cache_off"]
    both = replace(
        queued, values={**prompts.values, **queued.values}, config=prompts.config
    ).but(computed_prompt_tokens_per_s=prompts.values["computed_prompt_tokens_per_s"],
          prefill_service_ratio=0.3)  # fmt: skip
    head, *others = ranked(conclude(both.facts()))
    assert head.id == "kv_pressure"
    assert "queue_saturation" not in [cause.id for cause in others]
    assert "prefix_cache_off" in [cause.id for cause in others]
    full_steps = ranked(conclude(both.but(iteration_tokens_mean=1_500.0).facts()))
    assert full_steps[0].id == "prefix_cache_off", "the budget of a step may be what binds"
    pinned = both.but(running_avg=30.0, running_max=30.0)
    assert "kv_pressure" not in [cause.id for cause in ranked(conclude(pinned.facts()))]


def test_what_makes_a_cache_block_long_is_told() -> None:
    config = {"enable_prefix_caching": "True", "mamba_ssm_cache_dtype": "float32"}
    assert "(now float32)" in replace(BLOCK, config=config).causes()[BLOCK_ID].lever
    config["user_specified_block_size"] = "True"
    assert "--block-size" in replace(BLOCK, config=config).causes()[BLOCK_ID].lever


def test_the_size_of_a_cache_block_is_read_off_the_page() -> None:
    body = recorded("0.32.0-loaded")
    assert Target().one(body).values["prefix_block_tokens"] == 32
    hybrid = re.sub(r'(?<=[{,])block_size="\d+"', 'block_size="528"', body)
    assert Target().one(hybrid).values["prefix_block_tokens"] == 528


def test_a_loss_of_hits_shows_in_the_newest_quarter_of_the_window_first() -> None:
    lost = replace(HEAVY_PROMPTS, recent={"prefix_hit_ratio": 0.0, "prefix_hit_tokens_mean": 0.0})
    assert HEAVY_PROMPTS.causes() == {}
    assert lost.causes()["prefix_reuse_lost"].severity == Severity.WARNING


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param({"block_reuse_per_s": 2.0, "block_eviction_per_s": 10.0}, id="blocks reused"),
        pytest.param({"prefill_hit_share": 0.5, "prefill_miss_share": 0.4}, id="all or nothing"),
    ],
)
def test_churn_needs_no_baseline_where_reuse_is_seen(seen: dict[str, float]) -> None:
    assert "prefix_churn" in replace(CHURN, quiet={}).but(**seen).causes()


@pytest.mark.parametrize(
    ("values", "streaks_s"),
    [
        pytest.param({"kv_transfer_mean_s": 0.07}, {}, id="3.5 times its quiet mean"),
        pytest.param(
            {"kv_transfer_mean_s": 0.05, "ttft_mean_s": 0.1, "ttft_p50_drift_ratio": 1.5},
            {},
            id="half of a late TTFT",
        ),
        pytest.param({"kv_transfer_failed_per_s": 0.1}, {}, id="transfers fail"),
        pytest.param({"kv_fetch_waiting": 8.0}, {"fetching": 30.0}, id="requests wait for KV"),
    ],
)
def test_slow_transfers_show_in_four_ways(
    values: dict[str, float], streaks_s: dict[str, float]
) -> None:
    assert "kv_transfer_slow" in CALM.but(**values).lasting(**streaks_s).causes()


def test_a_long_transfer_is_not_slow_while_first_tokens_come_as_usual() -> None:
    long = CALM.but(kv_transfer_mean_s=0.05, ttft_mean_s=0.1, kv_transfer_drift_ratio=1.6)
    assert "kv_transfer_slow" in long.but(ttft_p50_drift_ratio=None).causes(), "nothing is known"
    assert "kv_transfer_slow" not in long.but(ttft_p50_drift_ratio=1.0).causes()


@pytest.mark.parametrize(
    ("external_hit_ratio", "is_said"),
    [
        pytest.param(0.3, True, id="prompts are found in another tier"),
        pytest.param(0.0, False, id="a connector that is never hit"),
        pytest.param(None, False, id="no look-up in the window"),
    ],
)
def test_held_back_requests_wait_for_kv_only_where_some_is_found_elsewhere(
    external_hit_ratio: float | None, *, is_said: bool
) -> None:
    held_back = CALM.but(
        waiting_deferred=15.0, waiting_deferred_avg=15.0, running_avg=10.0,
        external_hit_ratio=external_hit_ratio,
    ).lasting(deferred=30.0)  # fmt: skip
    assert ("kv_transfer_slow" in held_back.causes()) == is_said


@pytest.mark.parametrize(
    ("expected_wait_s", "queued_s", "severity"),
    [
        pytest.param(90.0, 30.0, Severity.CRITICAL, id="clients wait a minute"),
        pytest.param(90.0, 5.0, Severity.WARNING, id="a queue of 5 s"),
        pytest.param(6.0, 30.0, Severity.WARNING, id="a short wait"),
    ],
)
def test_a_long_wait_is_critical_beside_preemptions_too(
    expected_wait_s: float, queued_s: float, severity: Severity
) -> None:
    few_evicted = KV.but(waiting_by_capacity=30.0, expected_wait_s=expected_wait_s)
    few_evicted = replace(few_evicted, stage=3).lasting(queued=queued_s)
    assert few_evicted.causes()["kv_pressure"].severity == severity


def test_past_the_knee_without_a_target_is_a_note() -> None:
    knee = replace(KNEE, targets=Targets()).but(queue_share_ratio=0.3, waiting_avg=3.0)
    assert knee.causes()["past_knee"].severity == Severity.INFO
    assert KNEE.causes()["past_knee"].severity == Severity.WARNING


def test_adapters_that_take_turns_are_told_though_some_scrapes_hold_nobody_back() -> None:
    on_and_off = replace(THRASH, streaks_s={}, recent=SWAPS).but(
        waiting_deferred=0.0, waiting_deferred_avg=1.2
    )
    assert "1 request is waiting for one" in on_and_off.causes()["adapter_thrash"].summary
    steady = replace(on_and_off, recent={"lora_change_per_s": 2 / 15})
    assert "adapter_thrash" not in steady.causes()


def test_one_long_prompt_among_hundreds_stalls_decode() -> None:
    rare = STALLS.but(prefill_long_per_s=1 / 60, prefill_p99_s=0.3)
    *_, prefills = rare.causes()["prefill_interference"].evidence
    assert prefills.text == "1 of the window's prefills took 0.5 s or longer"
    assert (prefills.value, prefills.threshold) == (1 / 60, 1 / 60), "the signal's own unit"


def test_a_queue_makes_prefill_no_lighter() -> None:
    queued = LOST.but(prefill_share_ratio=0.003, queue_share_ratio=0.96)
    assert "prefix_reuse_lost" in queued.causes()


def test_prefill_that_takes_longer_than_the_target_is_told_behind_a_queue_too() -> None:
    queued = CONCLUSIVE["prefill_bound"].but(prefill_mean_s=2.0, queue_mean_s=1.5)
    assert "longer than the TTFT target" in (queued.causes()["prefill_bound"].evidence[-1].text)


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param({"prefix_hit_tokens_mean": None}, id="not now"),
        pytest.param({"prefix_hit_tokens_mean": 10.0}, id="fewer of the tokens as well"),
    ],
)
def test_hits_a_request_are_asked_where_they_are_known(gone: dict[str, float | None]) -> None:
    assert "prefix_reuse_lost" in LOST.but(prefix_hit_ratio=0.01, **gone).causes()


def test_itl_over_its_target_with_a_quick_median_is_interference() -> None:
    over = replace(
        CALM.but(itl_p99_s=0.3, itl_p50_s=0.02, prefill_long_per_s=0.1),
        targets=Targets(itl_p99_s=0.1),
    )
    assert "prefill_interference" in over.causes()
    none_prefilled = {"arrival_per_s": 0.0, "large_step_per_s": 0.0}
    assert "prefill_interference" not in over.but(**none_prefilled).causes()
    long_one = {"arrival_per_s": 0.0, "large_step_per_s": 1.0}
    assert "prefill_interference" in over.but(**long_one).causes(), (
        "its first token is still to come"
    )


def test_the_rules_that_causes_tell_exist() -> None:
    rules = {rule.id for rule in Profile(targets=Targets(1.0, 1.0)).rules}
    assert {rule for record in CAUSES for rule in record.covers} <= rules


def carries(low: float, expected: float, high: float, *, reached: bool = True) -> LearnedKnee:
    """A knee learned at so many requests in flight."""
    usable = Range(5.0, 5.5, 6.0)
    return LearnedKnee(
        Range(low, expected, high),
        usable,
        usable.expected,
        reached,
        "P99 within the targets",
        40,
        6,
    )


@pytest.mark.parametrize(
    ("knee", "concluded"),
    [
        pytest.param(None, False, id="no knee is known"),
        pytest.param(carries(14.0, 16.0, 20.0), True, id="beyond its knee"),
        pytest.param(carries(14.0, 16.0, 28.0), False, id="perhaps beyond"),
        pytest.param(carries(14.0, 16.0, 20.0, reached=False), False, id="no load past it seen"),
    ],
)
def test_the_learned_knee_tells_what_is_too_much(knee: LearnedKnee | None, concluded: bool) -> None:
    late = KNEE.but(ttft_p99_p50_drift_ratio=None)
    past_knee = BY_ID["past_knee"].examine(replace(late.facts(), knee=knee))
    assert (past_knee is not None) == concluded
    if past_knee is not None:
        assert "the knee is at 16 (14 to 20, learned from 40 windows" in past_knee.evidence[-1].text
    kept = replace(late.but(ttft_p99_s=0.5).facts(), knee=knee)
    assert BY_ID["past_knee"].examine(kept) is None, "the target is kept"


def test_a_load_short_of_the_knee_speaks_against_it() -> None:
    plain = replace(KNEE.facts(), knee=None)
    short = replace(KNEE.facts(), knee=carries(40.0, 50.0, 60.0))
    sure, doubtful = BY_ID["past_knee"].examine(plain), BY_ID["past_knee"].examine(short)
    assert sure is not None
    assert doubtful is None or doubtful.confidence < sure.confidence


def test_prompts_that_fill_the_engine_are_heavy_though_answers_take_longer() -> None:
    quick = HEAVY_PROMPTS.but(
        prefix_hit_ratio=0.0, prefix_hit_tokens_mean=0.0, prefill_service_ratio=0.025
    )
    assert "prefix_reuse_lost" not in quick.causes()
    filled = quick.but(prefill_busy_ratio=0.5).causes()["prefix_reuse_lost"]
    assert "0.5 prompts are under prefill on average" in [item.text for item in filled.evidence]
    assert "prefix_reuse_lost" not in quick.but(prefill_busy_ratio=0.2).causes()


CROWDED = CONCLUSIVE["host_contention"]


@pytest.mark.parametrize(
    ("situation", "concluded"),
    [
        pytest.param(CROWDED, True, id="tasks wait for a CPU"),
        pytest.param(CROWDED.but(host_cpu_pressure_ratio=0.05), False, id="CPUs are free"),
        pytest.param(CROWDED.but(host_cpu_pressure_ratio=None), False, id="the node is unknown"),
        pytest.param(CROWDED.but(running_avg=14.0), False, id="a larger batch"),
        pytest.param(
            CROWDED.but(running_avg=14.0, engine_speed_ratio=0.55),
            True,
            id="slow steps enlarge the batch",
        ),
        pytest.param(CROWDED.but(output_tokens_mean=400.0), False, id="longer answers"),
        pytest.param(CROWDED.but(itl_p50_drift_ratio=1.0), False, id="only some steps are slow"),
        pytest.param(replace(CROWDED, served_s=80.0), False, id="a new process warms up"),
        pytest.param(CROWDED.but(gpu_dram_active_ratio=0.9), False, id="the GPU is the limit"),
    ],
)
def test_a_host_is_blamed_only_where_it_is_seen(situation: Situation, concluded: bool) -> None:
    assert ("host_contention" in situation.causes()) == concluded


def test_slow_steps_without_a_view_of_the_node_are_said_to_be_open() -> None:
    (line,) = unseen_host(CROWDED.but(host_cpu_pressure_ratio=None).facts())
    assert "cannot be told" in line
    assert unseen_host(CROWDED.facts()) == unseen_host(CALM.facts()) == []


@pytest.mark.parametrize("cause_id", ["host_contention", "slow_steps"])
def test_a_slow_host_heads_the_targets_that_it_breaks(cause_id: str) -> None:
    slow = CONCLUSIVE[cause_id].but(
        ttft_p99_s=3.0, itl_p50_s=0.08, itl_p99_s=0.5, prefill_mean_s=0.5
    )
    missed = replace(slow, targets=Targets(ttft_p99_s=1.0, itl_p99_s=0.1))
    head, *_ = ranked(conclude(missed.facts()))
    assert head.id == cause_id
    assert "slo_conflict" in head.explains


@pytest.mark.parametrize("queue", ["queue_saturation", "admission_limit"])
@pytest.mark.parametrize(
    ("answers_ratio", "demand_ratio", "heads"),
    [
        pytest.param(2.0, 1.0, 1, id="answers twice as long make the queue"),
        pytest.param(1.2, 1.0, 2, id="answers that are hardly longer"),
        pytest.param(2.0, 2.0, 2, id="more requests are served as well"),
    ],
)
def test_answers_that_run_away_head_the_queue_that_they_make(
    queue: str, answers_ratio: float, demand_ratio: float, heads: int
) -> None:
    causes = (
        CONCLUSIVE[queue]
        .but(
            finished_length_ratio=0.9,
            completed_per_s=4.0,
            answers_moved_ratio=answers_ratio,
            demand_moved_ratio=demand_ratio,
        )
        .causes()
    )
    reported = ranked([causes["runaway_generation"], causes[queue]])
    assert len(reported) == heads
    if heads == 1:
        assert reported[0].id == "runaway_generation"
        assert reported[0].severity == causes[queue].severity


SLOW_STEPS = replace(
    CALM.but(
        itl_p50_s=0.28, itl_p99_s=0.4, ttft_p99_s=0.75, prefill_mean_s=0.31, queue_mean_s=0.15
    ),
    targets=Targets(ttft_p99_s=0.5, itl_p99_s=0.2),
)
"""Each step takes 0.28 s, a first token less than two."""


@pytest.mark.parametrize("itl_target_s", [0.2, 0.38])
def test_slow_steps_that_break_both_targets_are_no_conflict_of_them(itl_target_s: float) -> None:
    targets = Targets(ttft_p99_s=0.5, itl_p99_s=itl_target_s)
    (head,) = ranked(conclude(replace(SLOW_STEPS, targets=targets).facts()))
    assert (head.id, head.severity) == ("decode_bound", Severity.CRITICAL)


def test_idle_gpus_are_no_conflict_of_targets_though_few_prompts_are_long() -> None:
    long_prompts = SLOW_STEPS.but(ttft_p99_s=2.4, gpu_engine_active_ratio=0.55)
    assert [cause.id for cause in ranked(conclude(long_prompts.facts()))] == ["decode_bound"]
    busy = long_prompts.but(gpu_engine_active_ratio=0.95)
    assert [cause.id for cause in ranked(conclude(busy.facts()))] == ["slo_conflict"]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"prefill_mean_s": 1.5}, id="prompts take many steps"),
        pytest.param({"itl_p50_s": 0.05}, id="the tail of ITL"),
        pytest.param({"ttft_p99_s": 4.5}, id="a few long prompts"),
        pytest.param({"prefill_mean_s": None}, id="prefill is unknown"),
    ],
)
def test_a_conflict_of_targets_needs_more_than_slow_steps(values: dict[str, float | None]) -> None:
    causes = SLOW_STEPS.but(**values).causes()
    assert {"slo_conflict", "prefill_interference"} & set(causes)
    assert causes.get("decode_bound") is None or causes["decode_bound"].severity < Severity.CRITICAL


def test_prompts_that_break_both_targets_are_a_conflict_of_them() -> None:
    long_prompts = replace(
        CALM.but(
            itl_p99_s=0.3,
            itl_p50_s=0.02,
            ttft_p99_s=3.0,
            prefill_mean_s=1.5,
            prefill_long_per_s=0.1,
        ),
        targets=Targets(ttft_p99_s=1.0, itl_p99_s=0.1),
    )
    (head,) = ranked(conclude(long_prompts.facts()))
    assert (head.id, head.explains) == ("slo_conflict", ("prefill_bound",))
    behind = long_prompts.but(prefill_mean_s=0.6, queue_mean_s=0.6)
    (head,) = ranked(conclude(behind.facts()))
    assert head.id == "prefill_interference", "prompts wait behind others"


@pytest.mark.parametrize(
    ("stall_share", "moved"),
    [
        pytest.param(0.01, set[str](), id="the tail only misses its target"),
        pytest.param(0.2, {ITL, TTFT}, id="streams stall"),
    ],
)
def test_a_missed_target_keeps_no_baseline_from_being_learned(
    stall_share: float, moved: set[str]
) -> None:
    facts = replace(
        CONCLUSIVE["prefill_interference"].but(
            itl_stall_time_ratio=stall_share, itl_p99_s=0.12, itl_p50_s=0.04
        ),
        targets=Targets(itl_p99_s=0.1),
    ).facts()
    causes = conclude(facts)
    assert [cause.id for cause in causes] == ["prefill_interference"]
    assert moved_families(causes, facts) == moved


OUTSIDE = CALM.but(
    e2e_mean_s=40.0, queue_mean_s=1.0, prefill_mean_s=0.1, decode_mean_s=22.0, completed_per_s=2.0
)
"""Requests spend 16.9 s outside the engine."""


@pytest.mark.parametrize(
    ("values", "is_said"),
    [
        pytest.param({}, True, id="steps are short"),
        pytest.param({"prefill_p99_s": 18.0}, False, id="a prompt is prefilled in one long step"),
        pytest.param({"itl_stall_time_ratio": 0.9}, False, id="the engine hung for a while"),
        pytest.param({"prefill_p99_s": 5.0, "itl_stall_time_ratio": 0.3}, True, id="it is longer"),
    ],
)
def test_what_waits_for_the_end_of_a_step_does_not_wait_for_the_api_server(
    values: dict[str, float], *, is_said: bool
) -> None:
    assert ("host_contention" in OUTSIDE.but(**values).causes()) == is_said


@pytest.mark.parametrize(
    ("seats", "kv_ratio", "giant_ratio", "cause_id"),
    [
        pytest.param(1.0, 0.2, None, "admission_limit", id="one seat, four more fit"),
        pytest.param(1.0, 0.49, None, "admission_limit", id="one seat, one more fits"),
        pytest.param(1.0, 0.6, None, "kv_pressure", id="one seat, one more does not fit"),
        pytest.param(2.0, 0.64, None, "admission_limit", id="two seats, one more fits"),
        pytest.param(2.0, 0.7, None, "kv_pressure", id="two seats, one more does not fit"),
        pytest.param(1.0, 0.2, 0.9, "admission_limit", id="one seat, a giant now and then"),
        pytest.param(1.0, 0.2, 0.79, "admission_limit", id="one seat, the giant fits too"),
    ],
)
def test_the_kv_cache_is_the_limit_of_few_seats_where_one_more_request_does_not_fit(
    seats: float, kv_ratio: float, giant_ratio: float | None, cause_id: str
) -> None:
    values = {
        "running": seats,
        "running_avg": seats,
        "running_max": seats,
        "kv_usage_ratio": kv_ratio,
        "kv_usage_avg_ratio": kv_ratio,
        "kv_usage_max_ratio": kv_ratio,
        "prompt_p99_kv_share_ratio": giant_ratio,
    }
    causes = QUEUED.but(**values).causes()
    assert {"kv_pressure", "admission_limit", "queue_saturation"} & set(causes) == {cause_id}
