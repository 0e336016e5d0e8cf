"""Recommendations as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.latency_split import Changed, Restarted
from kneewatch.diagnose.ranking import BY_ID, ENGINE_RESTARTED
from kneewatch.diagnose.recommend.advice import Advice, FlagChange
from kneewatch.diagnose.verdict_json import change_words
from kneewatch.reports.advice_text import numbers_words, rows, stop_gap
from kneewatch.reports.diagnosis_text import Style, markdown, text
from kneewatch.rules.formatting import clock
from kneewatch.rules.rule import WINDOW_S, Severity
from tests.recordings import CAPTURES, diagnoses
from tests.reports.diagnoses import SICK, changed
from tests.reports.documents import document
from tests.reports.schema import problems

FP8 = Advice(
    id="kv-fp8",
    cause="kv_pressure",
    changes=(FlagChange("--kv-cache-dtype", "auto", "fp8"),),
    summary="The same memory holds 2.0 times the KV blocks in FP8.",
    before={"kv_capacity_tokens": 5088, "kv_usage_ratio": 0.99, "preemption_per_s": 4.8},
    predicted={
        "kv_capacity_tokens": 10208,
        "kv_usage_ratio": 0.8,
        "kv_demand_ratio": 0.8,
        "preemption_per_s": 0.0,
    },
    cost_usd_per_hour=0.0,
    checks=("quality on long contexts",),
    risk="Quality can suffer.",
    verify=("preemption_per_s goes to 0 within 5 minutes",),
    guide=("7.4",),
)
REPLICAS = replace(
    FP8, id="replicas", changes=(FlagChange("replicas", 1, 3),), cost_usd_per_hour=6.0,
    predicted={"kv_demand_ratio": 0.95}, suffices=False,
)  # fmt: skip
ADVISED = replace(SICK, recommendations=(FP8, REPLICAS))


def test_the_best_in_full_and_the_others_short() -> None:
    assert text([ADVISED], Style(), footers=False).splitlines()[14:] == [
        "   do first: Send less traffic to this replica, or shed load at the gateway (HTTP 429). "
        "Add a",
        "     replica if one starts in minutes. Stop batch jobs and very long prompts first.",
        "   then fix it: --kv-cache-dtype fp8 (now auto). The same memory holds 2.0 times the KV "
        "blocks in",
        "     FP8.",
        "   expected: KV tokens 5,088 -> 10,208; mean KV usage 99% -> 80%; preemptions 4.8/s "
        "-> 0/s",
        "   check before: quality on long contexts",
        "   verify: preemption_per_s goes to 0 within 5 minutes",
        "   alternatives: replicas 1 -> 3 (not enough alone, +6 USD/h)",
    ]


def test_an_alternative_names_what_it_makes_worse() -> None:
    slower = replace(REPLICAS, worsens=("Mean ITL rises from 14 ms to 37 ms",))
    lines = rows(replace(SICK, recommendations=(FP8, slower)), SICK.causes[0])
    assert lines[-1] == (
        "alternatives: replicas 1 -> 3 (not enough alone, +6 USD/h, Mean ITL rises from 14 ms to "
        "37 ms)"
    )


def test_a_latency_without_a_p99_says_why() -> None:
    for predicted, words in (
        ({"itl_s": 0.02, "ttft_s": 0.1}, "TTFT and ITL P99"),
        ({"itl_s": 0.02, "ttft_s": 0.1, "ttft_p99_s": 0.3}, "ITL P99"),
    ):
        advice = replace(FP8, predicted=predicted)
        lines = rows(replace(SICK, recommendations=(advice,)), SICK.causes[0])
        assert f"unknown: {words} after the change (too few windows of such a batch without a " in (
            "\n".join(lines)
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("num_gpu_blocks 1500 (20000 before)",), "unless the change was meant (num_gpu_blocks"),
        ((), "compare version and flags with those before it"),
    ],
)
def test_trouble_since_a_restart_leads_back_to_the_launch_before(
    changes: tuple[str, ...], words: str
) -> None:
    since = replace(ADVISED, changed=Changed(restart=Restarted(ADVISED.t_s - 60, changes)))
    first = "\n".join(rows(since, since.causes[0]))
    assert first.startswith("do first: This began with the restart at")
    assert words in first
    broke = replace(since.causes[0], id=ENGINE_RESTARTED, severity=Severity.CRITICAL)
    crashed = replace(since, causes=(*since.causes, broke))
    assert "This began" not in "\n".join(rows(crashed, crashed.causes[0]))


def test_markdown_says_the_same() -> None:
    rendered = markdown([ADVISED])
    assert "- then fix it: --kv-cache-dtype fp8 (now auto). The same memory" in rendered
    assert "- verify: preemption_per_s goes to 0" in rendered
    assert "- alternatives: replicas 1 -\\> 3" in rendered


def test_figures_before_and_after_belong_to_one_load() -> None:
    """Also while the load is gone and the cause is not: both stay those of the stated second."""
    values: dict[float, Mapping[str, float | None]] = {}
    held_s = set[float]()
    for verdict in diagnoses(CAPTURES / "prefix_churn.jsonl.gz"):
        values[verdict.t_s] = verdict.values
        for each in document(verdict)["recommendations"]:
            of_then = values[each["as_of_s"]]
            for key, signal in (("kv_usage_ratio", "kv_usage_avg_ratio"), ("itl_s", "itl_mean_s")):
                if key in each["before"]:
                    assert each["before"][key] == pytest.approx(of_then[signal], rel=1e-3)
            if (now := verdict.values["kv_usage_avg_ratio"]) and "kv_usage_ratio" in each["before"]:
                held_s.update(
                    [each["as_of_s"]] if now < 0.5 * each["before"]["kv_usage_ratio"] else []
                )
    assert held_s


def test_figures_of_a_window_from_before_the_cause_are_not_shown_beside_those_of_now() -> None:
    """Those of the newest scrape stand beside evidence of the same window."""
    told: list[tuple[float, float, str]] = []
    for verdict in diagnoses(CAPTURES / "kv_pressure_cascade.jsonl.gz", window_s=WINDOW_S):
        for cause in verdict.causes[:1]:
            expected = next((r for r in rows(verdict, cause) if r.startswith("expected: ")), "")
            is_new = verdict.recommendations[0].as_of_s == verdict.t_s if told else False
            if expected and cause.since_s is not None and not is_new:
                told.append((verdict.t_s, verdict.t_s - cause.since_s, expected))
    first_s = told[0][0]
    early = [row for t_s, _, row in told if 0 < t_s - first_s < 55]
    late = [row for t_s, _, row in told if t_s - first_s > 65]
    assert early
    assert late
    assert all("being measured, figures follow in" in row for row in early)
    assert all("KV usage 96%" in row for row in late)


def test_the_time_of_the_load_is_told_unless_it_is_the_verdicts() -> None:
    (first, second) = ADVISED.recommendations
    of_then = replace(first, as_of_s=ADVISED.t_s - 42)
    then = changed(ADVISED, recommendations=[of_then, second])
    told = text([then], Style())
    assert f" At {clock(ADVISED.t_s - 42)} UTC: " in told
    assert told.count(clock(ADVISED.t_s - 42)) == 1, "once"
    now = changed(ADVISED, recommendations=[replace(first, as_of_s=ADVISED.t_s), second])
    assert "   expected: " in text([now], Style())


def test_the_document() -> None:
    json_document = document(ADVISED)
    assert problems(json_document) == []
    first, second = json_document["recommendations"]
    assert first["changes"] == [{"flag": "--kv-cache-dtype", "from": "auto", "to": "fp8"}]
    assert first["predicted"]["kv_capacity_tokens"] == 10208
    assert second["cost_usd_per_hour"] == 6.0


def test_the_price_is_told() -> None:
    assert "expected: +6.00 USD/h" in rows(
        replace(ADVISED, recommendations=(REPLICAS,)), ADVISED.causes[0]
    )


def test_advice_without_a_change() -> None:
    plain = replace(ADVISED, recommendations=(replace(FP8, changes=(), predicted={}),))
    _, fix, *_ = rows(plain, ADVISED.causes[0])
    assert fix.startswith("then fix it: The same memory")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (FlagChange("--max-num-seqs", None, 64), "--max-num-seqs 64"),
        (
            FlagChange("--gpu-memory-utilization", 0.9, 0.95),
            "--gpu-memory-utilization 0.95 (now 0.9)",
        ),
        (FlagChange("--no-enable-prefix-caching", True, None), "drop --no-enable-prefix-caching"),
        (FlagChange("--enable-prefix-caching", False, True), "add --enable-prefix-caching"),
        (FlagChange("--speculative-config", "{}", None), "drop --speculative-config"),
    ],
)
def test_changes_as_they_are_typed(change: FlagChange, words: str) -> None:
    assert change_words(change) == words


def test_every_cause_to_act_on_has_a_stop_gap_in_plain_text() -> None:
    pages = {cause_id: stop_gap(cause_id) for cause_id in BY_ID}
    without = {cause_id for cause_id, steps in pages.items() if not steps}
    assert without == {
        "kv_overprovisioned",
        "prefix_block_too_large",
        "spec_acceptance_drift",
        "tp_overhead",
        "underused",
    }
    assert pages["kv_pressure"][1] == "Stop batch jobs and very long prompts first."
    assert not [step for steps in pages.values() for step in steps if re.search(r"[`\]]|\n", step)]
    assert stop_gap("of_another_version") == ()


def test_a_p99_is_shown_with_its_band_or_its_upper_end() -> None:
    before = {"ttft_p99_s": 9.9, "itl_p99_s": 0.2}
    band = {"ttft_p99_s": 5.7, "ttft_p99_low_s": 2.5, "ttft_p99_high_s": 7.5}
    words = numbers_words(Advice(id="x", before=before, predicted={**band, "itl_p99_high_s": 0.25}))
    assert words == "TTFT P99 9.9 s -> 5.7 s (2.5 s to 7.5 s); ITL P99 200 ms -> at most 250 ms"
    same = Advice(id="x", before=before, predicted={**band, "ttft_p99_s": 9.9})
    assert numbers_words(same) == "", "as before: no news"
