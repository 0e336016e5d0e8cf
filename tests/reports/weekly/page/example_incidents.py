"""Made-up incidents: a cascade to its end, and a queue that goes on."""

from __future__ import annotations

import math

from msgspec.structs import replace

from kneewatch.diagnose.verdict import Evidence
from kneewatch.reports.weekly.figures import AdviceOutcome, Line, ReportedFlag
from kneewatch.reports.weekly.report import CauseSpan, Incident, IncidentCost, StageSpan

HOUR_S = 3600.0
FP8 = ReportedFlag("--kv-cache-dtype", "auto", "fp8")


def advice(at_s: float, fate: str = "kept") -> AdviceOutcome:
    """To store the KV cache in fp8; measured where its fate is known."""
    done = fate in ("kept", "missed", "worsened")
    return AdviceOutcome(
        id="kv-fp8",
        cause="kv_pressure",
        summary="Store the KV cache in fp8: twice the tokens in the same memory.",
        changes=(FP8,),
        fate=fate,
        first_s=at_s,
        last_s=at_s + HOUR_S,
        applied_s=at_s + 20 * HOUR_S if done or fate == "applied" else None,
        before={"kv_capacity_tokens": 44_500.0, "kv_usage_ratio": 0.998, "ttft_p99_s": 31.2},
        predicted={"kv_capacity_tokens": 89_000.0, "kv_usage_ratio": 0.74, "ttft_p99_s": 1.3},
        measured={"kv_capacity_tokens": 88_720.0, "kv_usage_ratio": 0.71, "ttft_p99_s": 1.5}
        if done else {},
        cost_usd_per_hour=0.0,
        risk="Answers may change: check their quality before.",
        verify=("preemptions stay at zero through the next peak",),
        guide=("7.4", "5.3"),
        suffices=True,
    )  # fmt: skip


def cascade(tier: str, at_s: float) -> Incident:
    """The KV cache fills, evicts, queues and collapses within 38 minutes."""

    def moment(minute: float) -> float:
        return at_s + 60 * minute

    times = tuple(moment(minute) for minute in range(-10, 50))
    inside = [max(0.0, math.sin((minute + 3) / 44 * math.pi)) for minute in range(-10, 50)]
    return Incident(
        id="I1",
        kind="cascade",
        tier=tier,
        target="gpu-node-3:8000",
        engine="0",
        cause="kv_pressure",
        title="The KV cache was too small for the load",
        severity="critical",
        start_s=at_s,
        end_s=moment(38),
        last_s=moment(38),
        ended="ended",
        stages=(
            StageSpan(1, "filling", "info", moment(0), moment(6)),
            StageSpan(2, "evicting", "warning", moment(6), moment(11)),
            StageSpan(3, "queueing", "critical", moment(11), moment(19)),
            StageSpan(4, "collapsing", "critical", moment(19), moment(29)),
            StageSpan(2, "evicting", "warning", moment(29), moment(38)),
        ),
        causes=(
            CauseSpan("kv_pressure", "critical", moment(6.5), moment(38)),
            CauseSpan("past_knee", "warning", moment(12), moment(25)),
        ),
        stage2_s=moment(6),
        late_s=moment(10.2),
        budget_s=2.0,
        lead_s=252.0,
        lead_text="Eviction was seen 4 min 12 s before TTFT P99 left its budget of 2 s.",
        cost=IncidentCost(1204.0, 2_061_000.0, 3110.0, 420.0),
        evidence=(
            Evidence("kv_usage_ratio", 0.998, 0.9, "The KV cache is full."),
            Evidence("preemption_ratio_per_s", 0.24, 0.05, "A quarter of the running requests "
                         "is thrown out every second."),
            Evidence("", None, None, "The queue grows while the GPUs are busy with prompts "
                         "that they had computed before."),
        ),
        against=(Evidence("generation_tokens_per_s", 910.0, 600.0, "Tokens still come out."),),
        advice=(advice(moment(7)),),
        lines=tuple(
            Line(signal, unit, times, tuple(
                None if place == 40 else low + (high - low) * share**power
                for place, share in enumerate(inside)
            ))
            for signal, unit, low, high, power in (
                ("kv_usage_ratio", "ratio", 0.7, 0.998, 0.3),
                ("preemption_ratio_per_s", "ratio_per_s", 0.0, 0.24, 2.0),
                ("ttft_p99_s", "s", 0.8, 31.2, 3.0),
                ("waiting", "", 0.0, 118.0, 2.0),
                ("generation_tokens_per_s", "tokens_per_s", 2100.0, 910.0, 1.5),
            )
        ),
        guide=("7.4", "9.3"),
        replicas=("gpu-node-3:8000",),
        replicas_present=4,
    )  # fmt: skip


def queue(tier: str, at_s: float) -> Incident:
    """More requests than the engines serve; nothing was said to do about it, and it goes on."""
    cascade_incident = cascade(tier, at_s)
    return replace(
        cascade_incident,
        id="I2",
        kind="cause",
        target="gpu-node-1:8000",
        replicas=("gpu-node-3:8000", "gpu-node-1:8000"),
        cause="queue_saturation",
        title="Requests arrived faster than they were served",
        severity="warning",
        end_s=None,
        last_s=at_s + 51 * 60,
        ended="",
        stages=(),
        causes=(CauseSpan("queue_saturation", "warning", at_s, None),),
        stage2_s=None,
        lead_s=None,
        lead_text="There was no eviction: the KV cache had room.",
        cost=IncidentCost(0.0, None, 96.0, None, ("The hour before was not watched: what it would "
                                                  "have served is not known.",)),
        against=(),
        advice=(),
        lines=cascade_incident.lines[2:4],
    )  # fmt: skip


def both(tier: str, from_s: float) -> tuple[Incident, ...]:
    """Both, on different days."""
    return cascade(tier, from_s + 38.1 * HOUR_S), queue(tier, from_s + 86 * HOUR_S)


def many(tier: str, from_s: float, count: int) -> tuple[Incident, ...]:
    """So many cascades, one after another."""
    return tuple(
        replace(cascade(tier, from_s + number * 2 * HOUR_S), id=f"I{number + 1}")
        for number in range(count)
    )
