"""The text output, as someone tired reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.verdict import Counterfactual, Verdict
from kneewatch.reports.coverage import OPTIONAL, gaps, not_in_use
from kneewatch.reports.diagnosis_text import (
    COLOURS,
    Style,
    brief_words,
    markdown,
    slo_words,
    text,
)
from kneewatch.reports.health import stage_known
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import Severity
from tests.recordings import CAPTURES, diagnoses
from tests.reports.diagnoses import (
    HEALTHY,
    NOW_S,
    NUMBERS,
    PRESSURE,
    SICK,
    UNREADABLE,
    changed,
    finding,
)

PLAIN = Style()


def as_text(diagnosis: Verdict) -> str:
    return text([diagnosis], PLAIN)


def as_markdown(diagnosis: Verdict) -> str:
    return markdown([diagnosis])


TURNING = (
    Counterfactual("waiting_by_capacity", 42.0, 29.4, above=False),
    Counterfactual("kv_usage_avg_ratio", 0.5, 0.95, above=True),
)


def test_a_newest_value_far_below_the_window_stands_beside_the_windows_mean() -> None:
    values = {**SICK.values, "kv_usage_ratio": 0.65, "kv_usage_avg_ratio": 0.98, "waiting": 0.0}
    fallen = changed(SICK, values={**values, "waiting_avg": 12.0})
    said = as_text(fallen).replace("\n  ", " ")
    assert "now: KV 65%, " in said
    assert "last 60 s: KV 98% on average, 12 waiting on average, " in said
    for other in (changed(fallen, causes=[]), changed(SICK, values={**values, "waiting_avg": 0.9,
                                                       "kv_usage_ratio": 0.9})):  # fmt: skip
        assert "on average" not in as_text(other)


def test_a_cause_that_stands_now_says_nothing_of_its_age() -> None:
    for seen_s in (NOW_S, math.nan):
        standing = replace(PRESSURE, seen_s=seen_s, unless=TURNING)
        for render in (as_text, as_markdown):
            said = render(changed(SICK, causes=[standing]))
            assert PRESSURE.summary in said
            assert "last detected" not in said


@pytest.mark.parametrize("render", [as_text, as_markdown])
def test_a_cause_that_only_lingers_says_of_when_its_numbers_are(
    render: Callable[[Verdict], str],
) -> None:
    lingering = replace(PRESSURE, seen_s=NOW_S - 8)
    said = render(changed(SICK, causes=[lingering]))
    assert f"Ending: last detected 8 s ago. It was: {PRESSURE.summary}" in said
    assert "if it returns, do first:" in said.lower().replace("*", "")
    assert "if it returns" not in render(SICK).lower()


@pytest.mark.parametrize("render", [as_text, as_markdown])
def test_causes_of_another_version_are_told(render: Callable[[Verdict], str]) -> None:
    newer = replace(PRESSURE, id="quite_new", explains=("newer_still",))
    said = render(changed(SICK, causes=[newer]))
    assert "quite_new" in said
    assert "newer_still" in said


def test_what_would_clear_a_cause_is_told_with_the_numbers_of_its_time() -> None:
    said = as_text(changed(SICK, causes=[replace(PRESSURE, seen_s=NOW_S - 8, unless=TURNING)]))
    assert (
        "clears if waiting_by_capacity drops below 29.4 (at the time: 42); not concluded if "
        "kv_usage_avg_ratio rises above 95% (at the time: 50%)"
    ) in " ".join(said.split())


def test_a_sick_engine() -> None:
    assert text([SICK], PLAIN).splitlines() == [
        "CRITICAL  kv_pressure  http://gpu-7:8000 (model llama, engine 0)",
        "what changed since quiet times is unknown",
        "KV cache: stage 3 of 4, queueing for 40 s, since 00:06:00 UTC",
        "now: KV 100%, 12 running, 9 waiting; last 60 s: 24% of running requests preempted every "
        "second, TTFT",
        "  P99 123 ms, ITL P99 21 ms",
        "symptoms: S8 P99 latency good at low load, too high at peak load (see kv_pressure)",
        "",
        "1. kv_pressure (critical, confidence 0.97) for 30 s, since 00:06:10 UTC",
        "   The KV cache is too small for this load.",
        "   + 24% are preempted a second [preemption_ratio_per_s]",
        "   + the KV cache is 99% full [kv_usage_avg_ratio]",
        "   + 9 requests queued for capacity [waiting_by_capacity]",
        "   - the cache is large [kv_capacity_tokens]",
        "   explains: queue_saturation",
        "   do first: Send less traffic to this replica, or shed load at the gateway (HTTP 429). "
        "Add a",
        "     replica if one starts in minutes. Stop batch jobs and very long prompts first.",
        "   then fix it: Give the KV cache more room: fp8 KV cache, higher "
        "--gpu-memory-utilization; or admit",
        "     less: lower --max-num-seqs; or add replicas.",
        "",
        "window 60 s; latency judged against its own baseline (no SLO configured)",
    ]


def test_a_healthy_engine_is_told_in_a_few_lines() -> None:
    assert text([HEALTHY], PLAIN).splitlines() == [
        "OK  http://gpu-7:8000 (model llama, engine 0)",
        "KV cache: fine for 90 s, since 00:05:10 UTC",
        "now: KV 46%, 12 running, 0 waiting; last 60 s: TTFT P99 123 ms, ITL P99 21 ms",
        "",
        "window 60 s; latency judged against its own baseline (no SLO configured)",
    ]


def test_a_cache_that_a_cause_is_about_is_not_called_fine() -> None:
    held = changed(HEALTHY, causes=[replace(PRESSURE, id="kv_held")])
    assert stage_known(held) == "KV cache: no request is evicted"


def test_a_page_that_cannot_be_read_says_why_once() -> None:
    rendered = text([UNREADABLE], PLAIN)
    assert rendered.startswith(
        "CRITICAL  target_down  http://gpu-7:8000 (model llama, engine 0), last tried at "
        "00:06:40 UTC\n"
    )
    assert rendered.count("connection refused") == 1
    assert "KV cache: unknown, the page could not be read" in rendered
    assert rendered.endswith("could not be judged:\n   everything: the page could not be read")
    assert "window 0 s" not in rendered


def test_a_target_that_was_never_read_has_no_engine() -> None:
    rendered = text([changed(UNREADABLE, model="", engine="")], PLAIN)
    assert rendered.startswith("CRITICAL  target_down  http://gpu-7:8000, last tried at ")
    assert "connection refused" in rendered
    assert "do first: " in rendered, "what to do, though nothing was ever measured"
    assert "None" not in rendered


def test_a_forecast() -> None:
    assert HEALTHY.stage.number is not None
    stage = replace(HEALTHY.stage, number=1, name="filling", forecast_s=240.0)
    rendered = text([changed(HEALTHY, stage=stage)], PLAIN)
    assert (
        "stage 1 of 4, filling for 90 s, since 00:05:10 UTC; KV cache full in about 4 min"
        in flat(rendered)
    )


def test_a_target_that_will_break() -> None:
    breaks = {"slo_breaks_in_s": 300.0, "slo_breaks_soonest_s": 120.0, "slo_breaks_latest_s": 900.0}
    rendered = text([changed(HEALTHY, values={**HEALTHY.values, **breaks})], PLAIN)
    assert "TTFT P99 passes its target in about 5 min (at least 2 min, at most 15 min)" in flat(
        rendered
    )
    breaks = {"slo_breaks_in_s": 0.0}
    rendered = text([changed(HEALTHY, values={**HEALTHY.values, **breaks})], PLAIN)
    assert "TTFT P99 may pass its target at any moment" in flat(rendered)
    assert not slo_words(changed(SICK, values=breaks))
    assert "target" not in slo_words(HEALTHY)


def flat(rendered: str) -> str:
    """A text without its line breaks."""
    return " ".join(rendered.split())


def test_a_note_says_what_it_is_about() -> None:
    note = finding("KV-FULL", "info", 0.93)
    rendered = text([changed(HEALTHY, health="info", findings=[note])], PLAIN)
    assert rendered.startswith("INFO  http://gpu-7:8000")
    assert "\nnotes:\n   KV-FULL: KV cache usage is above its target band" in rendered
    assert "(kv_usage_avg_ratio 93%)" in rendered


def test_findings_that_no_cause_speaks_of() -> None:
    findings = [finding("ERRORS", "critical", 0.2), finding("KV-EVICT", "critical", 0.24)]
    rendered = text([changed(SICK, findings=findings)], PLAIN)
    assert (
        "also out of bounds:\n   ERRORS: Requests end in an error (finished_error_ratio 20%)"
        in (rendered)
    )
    assert "critical. Read vLLM's log." in " ".join(rendered.split())
    assert "KV-EVICT" not in rendered, "the cause says it with its number"


@pytest.mark.parametrize(
    ("now", "more", "said"),
    [
        pytest.param(0.0, {}, "its threshold for 9 s (0%/s in the last 60 s)", id="inside"),
        pytest.param(None, {}, "no value since", id="nothing observed"),
        pytest.param(
            0.3, {"note": "not judged: the KV cache is below stage 2"},
            "30%/s in the last 60 s and not judged: the KV cache is below stage 2", id="not judged",
        ),
    ],
)  # fmt: skip
def test_what_only_a_clear_time_holds_is_told_as_over(
    now: float | None, more: dict[str, Any], said: str
) -> None:
    clearing = {"clearing_since_s": NOW_S - 9, "was": 0.41, "was_severity": Severity.CRITICAL}
    eviction = finding("KV-EVICT", "info", now, **clearing, **more)
    diagnosis = changed(HEALTHY, health="info", findings=[eviction])
    for rendered in (as_text(diagnosis), as_markdown(diagnosis)):
        whole = " ".join(rendered.replace("\\", "").split())
        assert "share of running requests preempted was 41%/s until 00:06:31 UTC" in whole
        assert said in whole
        assert rule_of(eviction).summary not in whole, "it is not so now"
        assert rule_of(eviction).advice not in whole
        assert "CRITICAL" not in whole.upper()


def test_advice_of_a_rule_has_the_limit_to_set() -> None:
    deep = finding("BREAKER", "warning", 0.9)
    rendered = [
        " ".join(as_text(changed(HEALTHY, findings=[deep], values=values)).split())
        for values in ({"queue_limit": 11.0}, {})
    ]
    assert ["Limit: 11 (queue_limit)." in words for words in rendered] == [True, False]


def test_what_keeps_a_rule_quiet_stands_beside_its_number() -> None:
    quiet = finding(
        "KV-EVICT", "ok", 0.14, note="not judged: fewer than 3 preemptions in the window"
    )
    values = {"running": 7.0, "preemption_ratio_per_s": 0.14}
    rendered = as_text(changed(HEALTHY, findings=[quiet], values=values))
    assert "preempted every second (not judged: fewer than 3 preemptions" in " ".join(
        rendered.split()
    )


def test_the_worst_engine_comes_first_and_what_all_lack_is_said_once() -> None:
    unknown = ["gpu_*: no GPU source"]
    engines = [changed(HEALTHY, engine="1", unknown=unknown), changed(SICK, unknown=unknown)]
    rendered = text(engines, PLAIN)
    assert rendered.index("CRITICAL") < rendered.index("OK")
    assert rendered.count("no GPU source") == 1
    other = text([engines[0], changed(SICK, unknown=["a: b"])], PLAIN)
    assert other.count("could not be judged:") == 2


def test_without_footers() -> None:
    rendered = text([changed(SICK, unknown=["gpu_*: no GPU source"])], PLAIN, footers=False)
    assert rendered.endswith("or add replicas.")


@pytest.mark.parametrize("health", COLOURS)
def test_colour(health: str) -> None:
    rendered = text([changed(HEALTHY, health=health)], Style(colour=True))
    assert rendered.startswith(f"\x1b[{COLOURS[health]}m{health.upper()}\x1b[0m  ")
    assert "\x1b" not in text([changed(HEALTHY, health=health)], PLAIN)


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("name", ["kv_pressure_cascade", "lora_thrash", "restart_mid_run"])
def test_lines_of_real_diagnoses_fit(name: str, width: int) -> None:
    for diagnosis in diagnoses(CAPTURES / f"{name}.jsonl.gz")[::9]:
        lines = text([diagnosis], Style(width=width)).splitlines()[1:]
        assert all(len(line) <= width or " " not in line.strip() for line in lines)
        assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("render", [as_text, as_markdown])
def test_names_of_other_machines_steer_nothing(render: Callable[[Verdict], str]) -> None:
    cause = replace(PRESSURE, summary="bad \x1b]0;name\x07")
    rendered = render(changed(SICK, target="a\x1b[2J", model="b\rc\u202e", causes=[cause]))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", rendered)


def test_gaps_of_a_real_server_are_grouped() -> None:
    gap_lines = gaps(diagnoses(CAPTURES / "healthy_light.jsonl.gz")[-1])
    assert "gpu_*: no GPU source" in gap_lines
    assert "set these for more signals: slo.ttft_p99_s, gpus, peak.flop_per_s, " in (
        "\n".join(gap_lines)
    )
    (unused,) = [line for line in gap_lines if line.startswith("not in use on this server: ")]
    features = unused.partition(": ")[2].split(", ")
    assert set(features) == {
        *("speculation", "LoRA", "KV connector", "LMCache (single-engine endpoints only)"),
        *("--kv-cache-metrics", "--enable-mfu-metrics"),
    }
    assert len(gap_lines) <= 5
    assert "XFER" not in "\n".join(gap_lines), (
        "a rule of a feature that is not in use is not missed"
    )


def test_features_of_a_page_without_them_have_names() -> None:
    bare = changed(
        SICK,
        values=dict.fromkeys(OPTIONAL),
        unknown=[f"{key}: its metric is not on the page" for key in OPTIONAL],
    )
    unused = not_in_use(bare)
    assert {"LoRA", "HTTP request counts (single-engine endpoints only)"} <= set(unused)
    assert all(unused)
    assert not [name for name in unused if ":" in name], "a name, not a reason"


@pytest.mark.parametrize(
    ("name", "used"),
    [("lora_thrash", "LoRA"), ("spec_good", "speculation"), ("prefix_churn", "--kv-cache-metrics")],
)
def test_a_feature_in_use_is_not_called_unused(name: str, used: str) -> None:
    recorded = diagnoses(CAPTURES / f"{name}.jsonl.gz")
    assert used in not_in_use(diagnoses(CAPTURES / "idle.jsonl.gz")[-1])
    assert used not in not_in_use(recorded[len(recorded) // 2])


def test_features_are_not_called_unused_on_the_first_scrape() -> None:
    first = diagnoses(CAPTURES / "spec_good.jsonl.gz")[0]
    assert "speculation" not in not_in_use(first)
    assert "rates and latencies: the window holds one scrape, they need two" in gaps(first)


def test_gaps_with_the_same_reason_share_a_line() -> None:
    unknown = [
        "ttft_p50_s: time_to_first_token_seconds is not on the page",
        "ttft_p99_s: time_to_first_token_seconds is not on the page",
        "kv_usage_ratio: kv_cache_usage_perc is not on the page",
        "waiting_deferred: num_requests_waiting_by_reason is not on the page (needs vLLM 0.20 or "
        "later)",
    ]
    assert gaps(changed(HEALTHY, unknown=unknown)) == [
        "ttft_p50_s, ttft_p99_s: time_to_first_token_seconds is not on the page",
        "kv_usage_ratio: kv_cache_usage_perc is not on the page",
        "waiting_deferred: num_requests_waiting_by_reason is not on the page (needs vLLM 0.20 or "
        "later)",
    ]


def test_many_gaps_are_cut() -> None:
    gap_lines = gaps(changed(HEALTHY, unknown=[f"signal_{n}: reason {n}" for n in range(20)]))
    assert gap_lines[5:] == ["signal_5: reason 5", "and 14 more lines (--format json)"]


def test_rules_that_are_not_judged_by_reason() -> None:
    findings = [
        finding("TTFT-TAIL", "unknown", None, note="no baseline from quiet times yet"),
        finding("OUTPUT-CAP", "unknown", None, note="no baseline from quiet times yet"),
        finding("BREAKER", "unknown", None, note="no TTFT target (slo.ttft_p99_s)"),
        finding("ERRORS", "unknown", None, missing=("request_success",)),
        finding("KV-FULL", "ok", 0.1),
    ]
    assert gaps(changed(HEALTHY, findings=findings)) == [
        "rules TTFT-TAIL, OUTPUT-CAP: no baseline from quiet times yet",
        "rule BREAKER: no TTFT target (slo.ttft_p99_s)",
    ]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (99, "KV 46%, run 12, wait 0, TTFT 123 ms, preempt 24%/s"),
        (46, "KV 46%, run 12, wait 0, TTFT 123 ms"),
        (10, "KV 46%"),
        (3, ""),
    ],
)
def test_as_many_numbers_as_fit(width: int, shown: str) -> None:
    values = {**NUMBERS, "preemption_ratio_per_s": 0.24}
    assert brief_words(changed(HEALTHY, values=values), width) == shown


def test_markdown() -> None:
    note = finding("ERRORS", "warning", 0.03)
    rendered = markdown(
        [changed(SICK, model="a|b*c", findings=[note], unknown=["gpu_*: no source"])]
    )
    assert rendered.startswith(
        "## CRITICAL kv_pressure http://gpu-7:8000 (model a\\|b\\*c, engine 0)\n"
    )
    assert rendered.endswith("\n\n2026-11-21 00:06:40 UTC.")
    assert "\nKV cache: stage 3 of 4, queueing for 40 s, since 00:06:0" in rendered
    assert "\n### 1. kv_pressure (critical, confidence 0.97) for " in rendered
    assert "\n- the KV cache is 99% full \\[kv_usage_avg_ratio\\]\n" in rendered
    assert "\n- against: the cache is large \\[kv_capacity_tokens\\]\n" in rendered
    assert "\n- then fix it: Give the KV cache more room" in rendered
    assert "\n- explains: queue_saturation\n" in rendered
    seen = "- ERRORS: Requests end in an error (finished_error_ratio 3%); warning. Read vLLM's log."
    assert f"\n### Also out of bounds\n\n{seen}" in rendered
    assert "\nCould not be judged:\n\n- gpu_\\*: no source" in rendered
    assert "not be judged" not in markdown([SICK], footers=False)
