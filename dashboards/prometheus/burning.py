"""Error budgets of the TTFT target: how fast they burn, on two windows at once. Pure.

A budget is what the objective leaves: 1 % of the requests at 99 %. Alerts need traffic now, so that
a quiet night does not burn, and both windows, so that they end soon after the trouble does. A total
stall yields no first token and so no burn: KneewatchCauseEngineStalled is there for that.
"""

from __future__ import annotations

from dataclasses import replace

from kneewatch.collector.signals.vllm import ARRIVALS, within_ttft
from kneewatch.dashboards.prometheus.findings import triage_link
from kneewatch.dashboards.prometheus.model import Alert, Group, Plan, Record
from kneewatch.rules.facts import duration, number, recorded

WINDOWS_S = (300.0, 1800.0, 3600.0, 21600.0)
SPEEDS = (
    ("KneewatchTtftBudgetFastBurn", "critical", 14.4, 3600.0, 300.0, "two days"),
    ("KneewatchTtftBudgetSlowBurn", "warning", 6.0, 21600.0, 1800.0, "five days"),
)
"""Name, severity, burn from, long and short window, and when a month's budget is gone at that
speed. Source: Google, The Site Reliability Workbook, chapter 5, table 5-8."""

TRAFFIC_S = 300.0


def burn_groups(plan: Plan) -> tuple[Group, ...]:
    """The error ratios and their alerts; nothing without a TTFT target."""
    within = within_ttft(plan.targets.ttft_p99_s)
    if within is None:
        return ()
    rules: list[Record | Alert] = []
    for window_s in WINDOWS_S:
        share = within.promql(replace(plan.dialect, range_s=window_s))
        rules.append(Record(error_ratio(window_s), f"1 - ({share})"))
    traffic = ARRIVALS.promql(replace(plan.dialect, range_s=TRAFFIC_S))
    rules.append(Record(recorded("arrival_per_s:5m"), traffic or ""))
    return (Group("kneewatch-burn", (*rules, *_alerts(plan))),)


def error_ratio(window_s: float) -> str:
    """The recorded share of requests whose first token came late."""
    minutes = round(window_s / 60)
    told = f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}m"
    return recorded(f"ttft_error_ratio:{told}")


def _alerts(plan: Plan) -> list[Alert]:
    budget = 1 - plan.objective_ratio
    alerts: list[Alert] = []
    for name, severity, speed, long_s, short_s, gone in SPEEDS:
        bound = number(min(0.999, speed * budget))
        alerts.append(
            Alert(
                name=name,
                expr=f"({error_ratio(long_s)} > {bound}) and ({error_ratio(short_s)} > {bound})"
                f" and ({recorded('arrival_per_s:5m')} > 0)",
                for_s=0.0,
                keep_s=0.0,
                labels={"severity": severity, "kneewatch": "burn"},
                annotations={
                    "summary": "TTFT's error budget burns: {{ $labels.instance }}",
                    "description": "{{ $value | humanizePercentage }} of the requests of the last "
                    f"{duration(long_s)} waited too long for their first token: a month's budget "
                    f"would be gone in {gone}.",
                    "action": "See which cause stands: the triage page and the cause alerts.",
                    "guide": "9.3",
                }
                | triage_link(plan),
            )
        )
    return alerts
