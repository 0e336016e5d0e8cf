"""Diagnoses made by hand: one healthy engine, and what tests change about it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Cause, Evidence, Verdict
from kneewatch.rules.cascade import staged
from kneewatch.rules.library import RULES
from kneewatch.rules.rule import Finding, Severity, State

NOW_S = 1795219600.0
"""2026-11-21 00:06:40 UTC."""

NUMBERS = {
    "kv_usage_ratio": 0.4567,
    "running": 12.0,
    "waiting": 0.0,
    "preemption_ratio_per_s": 0.0,
    "ttft_p99_s": 0.1234,
    "itl_p99_s": 0.0211,
    "generation_tokens_per_s": 1234.5,
}
PRESSURE = Cause(
    id="kv_pressure",
    confidence=0.97,
    severity=Severity.CRITICAL,
    summary="The KV cache is too small for this load.",
    evidence=(
        Evidence("preemption_ratio_per_s", 0.24, 0.05, "24% are preempted a second"),
        Evidence("kv_usage_avg_ratio", 0.99, 0.9, "the KV cache is 99% full"),
        Evidence("waiting_by_capacity", 9.0, 1.0, "9 requests queued for capacity"),
        Evidence("itl_stall_time_ratio", 0.2, None, "a fourth number, too many for a night"),
    ),
    against=(Evidence("kv_capacity_tokens", 5.0, None, "the cache is large"),),
    guide=("7.4", "9.3"),
    lever="Give the KV cache more room: fp8 KV cache, higher --gpu-memory-utilization; or admit "
    "less: lower --max-num-seqs; or add replicas.",
    since_s=NOW_S - 30,
    explains=("queue_saturation",),
)
HEALTHY = Verdict(
    t_s=NOW_S,
    target="http://gpu-7:8000",
    engine="0",
    model="llama",
    tier=None,
    health="ok",
    stage=staged(0, NOW_S - 90, Severity.OK, None, ()),
    causes=[],
    symptoms=[],
    findings=[],
    values=NUMBERS,
    unknown=[],
    window_s=60.0,
    judged_against="its own baseline (no SLO configured)",
)
SICK = replace(
    HEALTHY,
    health="critical",
    stage=staged(3, NOW_S - 40, Severity.WARNING, None, ("requests queue",)),
    causes=[PRESSURE],
    symptoms=["S8"],
    symptom_actions={"S8": "see kv_pressure"},
    values={**NUMBERS, "kv_usage_ratio": 0.998, "waiting": 9.0, "preemption_ratio_per_s": 0.241},
)
REFUSED = "http://gpu-7:8000/metrics: connection refused"
UNREADABLE = replace(
    HEALTHY,
    health="critical",
    stage=UNKNOWN_STAGE,
    causes=[
        replace(
            PRESSURE,
            id="target_down",
            summary=f"3 scrapes in a row failed: {REFUSED}",
            evidence=(Evidence("scrape_failures", 3.0, None, REFUSED),),
            against=(),
            guide=(),
            lever="See whether the server runs and listens.",
            explains=(),
        )
    ],
    values={},
    unknown=[f"every signal: {REFUSED}"],
    window_s=0.0,
    judged_against="nothing: the page could not be read",
)


def changed(diagnosis: Verdict, **fields: Any) -> Verdict:  # noqa: ANN401
    """A diagnosis with other fields."""
    return replace(diagnosis, **fields)


def finding(rule_id: str, state: State, value: float | None, **more: Any) -> Finding:  # noqa: ANN401
    """A rule of the library in some state."""
    (rule,) = [rule for rule in RULES if rule.id == rule_id]
    fields: dict[str, Any] = {"missing": (), "since_s": NOW_S - 10} | more
    return Finding(rule.id, state, rule.signal, value, **fields)
