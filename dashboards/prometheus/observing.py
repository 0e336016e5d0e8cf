"""Alerts about the stages, about what has vanished, and about an engine that stands still. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.findings import triage_link
from kneewatch.dashboards.prometheus.model import Alert, Group, Plan
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.facts import duration, recorded
from kneewatch.rules.model import Severity

STAGE_ADVICE = {
    1: "Nothing hurts yet: plan for more KV cache before growth does it.",
    2: "Give the KV cache more room (fp8 KV cache, --gpu-memory-utilization) or admit less.",
    3: "Take load away now: shed at the gateway or add replicas; then give the KV cache more room.",
    4: "Shed load at once; the work that is done is mostly repeated work.",
}


def stage_group(plan: Plan) -> Group:
    """An alert for each stage from 1 on and each severity that it can have."""
    alerts: list[Alert] = []
    for number_, severities in (
        (1, (Severity.INFO,)),
        (2, (Severity.INFO, Severity.WARNING, Severity.CRITICAL)),
        (3, (Severity.WARNING, Severity.CRITICAL)),
        (4, (Severity.CRITICAL,)),
    ):
        for severity in severities:
            alerts.append(_stage(plan, number_, severity))
    return Group("kneewatch-stages", tuple(alerts))


def _stage(plan: Plan, number_: int, severity: Severity) -> Alert:
    name = NAMES[number_]
    return Alert(
        name=f"KneewatchCascade{name.capitalize()}",
        expr=f"({recorded('cascade_stage')} == {number_})"
        f" and ({recorded('cascade_severity')} == {int(severity)})",
        for_s=0.0,
        keep_s=0.0,
        labels={
            "severity": severity.word,
            "kneewatch": "stage",
            "stage": str(number_),
        },
        annotations={
            "summary": f"KV memory pressure, stage {number_} ({name}): {{{{ $labels.instance }}}}",
            "description": "KV cache usage, preemptions and the queue say so; see "
            f"{recorded('cascade_evidence')}.",
            "action": STAGE_ADVICE[number_],
            "guide": "7.4",
        }
        | triage_link(plan),
    )


def vanished_group(plan: Plan) -> Group:
    """Dead-man alerts: silence is not health.

    Several API servers show load and cache from the first request on, tokens from the start: such a
    server is there, and has lost nothing, while it has had no prompt.
    """
    running = plan.dialect.series("num_requests_running")
    prompts = plan.dialect.series("prompt_tokens", "_total")
    unused = f"(sum by ({plan.process}) ({prompts}) == 0)"
    gone_s = max(5 * plan.window_s, 20 * plan.interval_s)
    return Group(
        "kneewatch-observer",
        (
            Alert(
                name="KneewatchNoMetrics",
                expr=f"absent({running}) and absent({prompts})",
                for_s=gone_s,
                keep_s=0.0,
                labels={"severity": "critical", "kneewatch": "observer"},
                annotations={
                    "summary": "No vLLM server is scraped at all",
                    "description": "Prometheus has no series of vLLM: every other alert is silent.",
                    "action": "Look at Prometheus's targets and at vLLM's /metrics.",
                    "guide": "",
                },
            ),
            Alert(
                name="KneewatchMetricsVanished",
                expr=f"sum by ({plan.process})"
                f" (max_over_time({running}[1h]) unless {running})"
                f" and on ({plan.process}) (up == 1)"
                f" unless on ({plan.process}) {unused}",
                for_s=gone_s,
                keep_s=0.0,
                labels={"severity": "warning", "kneewatch": "observer"},
                annotations={
                    "summary": "vLLM's metrics have gone from a page that answers:"
                    " {{ $labels.instance }}",
                    "description": "The page can be read and lacks series that it had an hour ago.",
                    "action": "See whether an engine died or --disable-log-stats was set.",
                    "guide": "",
                }
                | triage_link(plan),
            ),
            Alert(
                name="KneewatchTargetDown",
                expr=f"(up == 0) and on ({plan.process})"
                f" (max by ({plan.process}) (max_over_time({running}[1h])) >= 0)",
                for_s=min(60.0, 4 * plan.interval_s) * plan.scale,
                keep_s=0.0,
                labels={"severity": "critical", "kneewatch": "cause", "cause": "target_down"},
                annotations={
                    "summary": "A vLLM server does not answer: {{ $labels.instance }}",
                    "description": "It was scraped within the last hour.",
                    "action": "See whether the server runs and listens.",
                    "guide": "",
                }
                | triage_link(plan),
            ),
        ),
    )


def held(expr: str, seconds: float, plan: Plan) -> str:
    """A condition that has held at every evaluation of so many seconds (1 there, else nothing)."""
    step = duration(plan.interval_s)
    return f"(min_over_time(({expr})[{duration(seconds)}:{step}]) == 1)"
