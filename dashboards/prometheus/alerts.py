"""Alerting rules for findings, cascade stages and error budgets. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kneewatch.collector.signals.vllm import ARRIVALS, within_ttft
from kneewatch.dashboards.prometheus.recording_rules import FOUND, derived, inexpressible
from kneewatch.dashboards.prometheus.rule_group import SUBJECT, Alert, Group, Plan, Record
from kneewatch.diagnose.doc_links import cause_page, rule_page
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.rule import Bound, Guard, Rule, Severity

STAGE = "cascade_stage"

SEEN_ELSEWHERE = {"lora_max": "lora_requests_info"}
"""Guards on a number inside a label; in PromQL the presence of the metric stands for it."""


def expressible(plan: Plan) -> tuple[list[Rule], list[tuple[Rule, str]]]:
    """Rules that PromQL can evaluate, and the others with the first signal that they lack."""
    known = {s.key for s in plan.signals()} - set(inexpressible(plan))
    known |= set(derived(plan)) | {STAGE} | set(SEEN_ELSEWHERE)
    known |= set(FOUND) if plan.gpu_join else set()
    can: list[Rule] = []
    cannot: list[tuple[Rule, str]] = []
    for rule in plan.rules():
        lacking = [s for s in (rule.signal, *(g.signal for g in rule.guards)) if s not in known]
        if lacking:
            cannot.append((rule, lacking[0]))
        else:
            can.append(rule)
    return can, cannot


def finding_group(plan: Plan) -> Group:
    """An alert for each bound of each rule."""
    rules, _ = expressible(plan)
    return Group("kneewatch-findings", tuple(_alerts(plan, rules)))


def _alerts(plan: Plan, rules: Iterable[Rule]) -> Iterable[Alert]:
    for rule in rules:
        ends = any(guard.ends for guard in rule.guards)
        for bound in rule.bounds:
            yield Alert(
                name=alert_name(rule.id),
                expr=_expr(plan, rule, bound),
                for_s=rule.for_s * plan.scale,
                keep_s=0.0 if ends else rule.clear_s * plan.scale,
                labels={
                    "severity": bound.severity.word,
                    "kneewatch": "finding",
                    "rule": rule.id,
                },
                annotations=_annotations(plan, rule, bound),
            )


def alert_name(rule_id: str) -> str:
    """An alert's name: `KV-EVICT` is `KneewatchKvEvict`."""
    return "Kneewatch" + "".join(part.capitalize() for part in rule_id.split("-"))


def _expr(plan: Plan, rule: Rule, bound: Bound) -> str:
    """Fires beyond the threshold; once firing, until the value is back inside by `clear_ratio`."""
    signal, sign = recorded(rule.signal), "<" if rule.below else ">"
    margin = abs(bound.threshold) * rule.clear_ratio
    relaxed = bound.threshold + margin if rule.below else bound.threshold - margin
    crossed = f"{signal} {sign} {number(bound.threshold)}"
    if margin:
        firing = firing_of(alert_name(rule.id), bound.severity.word)
        crossed = (
            f"({crossed}) or (({signal} {sign} {number(relaxed)}) and on ({plan.engine}) {firing})"
        )
    if not rule.below and bound.threshold - margin <= 0:
        crossed = f"({crossed}) > 0"
    guards = "".join(f" and {_guard(plan, guard)}" for guard in rule.guards)
    return f"({crossed}){guards}" if guards else crossed


def firing_of(alert: str, severity: str) -> str:
    """Selector of the ALERTS series that exists while an alert fires."""
    return f'ALERTS{{alertname="{alert}", severity="{severity}", alertstate="firing"}}'


def _guard(plan: Plan, guard: Guard) -> str:
    if guard.signal in SEEN_ELSEWHERE:
        series = plan.dialect.series(SEEN_ELSEWHERE[guard.signal])
        return f"on ({plan.process}) {series}"
    sign = "<=" if guard.below else ">="
    return f"({recorded(guard.signal)} {sign} {number(guard.value)})"


def _annotations(plan: Plan, rule: Rule, bound: Bound) -> dict[str, str]:
    sign, unit = "below" if rule.below else "above", unit_of(rule.signal)
    annotations = {
        "summary": f"{rule.summary}: {SUBJECT}",
        "description": f"{rule.signal} is {unit.value} ({sign} "
        f"{unit.threshold(bound.threshold)}: {bound.source}).",
        "action": rule.advice,
        "guide": ", ".join(rule.guide),
    }
    return annotations | link_annotations(plan, rule_page(plan.runbooks, rule.id))


@dataclass(frozen=True, slots=True)
class Unit:
    """How a signal's value is written in an annotation: as a template, and as a number."""

    value: str
    scale: float = 1.0
    symbol: str = ""

    def threshold(self, bound: float) -> str:
        """A bound of the signal with its unit."""
        return f"{self.scale * bound:g}{self.symbol}"


UNITS: tuple[tuple[tuple[str, ...], Unit], ...] = (
    (("_drift_ratio", "_tail_ratio"), Unit('{{ printf "%.1f" $value }}x', symbol="x")),
    (("_ratio_per_s",), Unit("{{ $value | humanizePercentage }}/s", 100.0, "%/s")),
    (("_ratio", "_points"), Unit("{{ $value | humanizePercentage }}", 100.0, "%")),
    (("_per_s",), Unit('{{ printf "%.3g" $value }}/s', symbol="/s")),
    (("_s",), Unit("{{ $value | humanizeDuration }}", symbol="s")),
)
"""Units by the end of a signal's name, the longer ends first."""

PLAIN = Unit('{{ printf "%.3g" $value }}')


def unit_of(signal: str) -> Unit:
    """The unit of a signal, by the end of its name."""
    return next((unit for ends, unit in UNITS if signal.endswith(ends)), PLAIN)


def link_annotations(plan: Plan, runbook: str) -> dict[str, str]:
    """Links of an alert about an engine to the runbook, the triage page and the replica's
    dashboard, as far as their addresses are set."""
    triage = f"{plan.triage_url.rstrip('/')}/{{{{ $labels.instance }}}}" if plan.triage_url else ""
    return (
        runbook_annotation(runbook)
        | ({"triage": triage} if triage else {})
        | dashboard_annotation(plan, "kneewatch-replica", replica="instance")
    )


def dashboard_annotation(plan: Plan, board: str, **variables: str) -> dict[str, str]:
    """The link to a dashboard as an annotation, its `variables` set from the alert's labels; empty
    without Grafana's address."""
    if not plan.grafana_url:
        return {}
    chosen = "&".join(
        f"var-{name}={{{{ $labels.{label} | urlquery }}}}" for name, label in variables.items()
    )
    return {"dashboard_url": f"{plan.grafana_url.rstrip('/')}/d/{board}?{chosen}"}


def runbook_annotation(runbook: str) -> dict[str, str]:
    """The runbook link as an annotation; empty without a runbook address."""
    return {"runbook_url": runbook} if runbook else {}


# --- Multi-window burn-rate alerts for the TTFT error budget --------------------------------------
#
# The budget is 1 minus the objective: 1% of requests at 99%. Alerts need current traffic, so that a
# quiet night does not burn, and both windows, so that they resolve soon after the problem ends. A
# stalled engine sends no first token and burns no budget: KneewatchCauseEngineStalled covers it.


WINDOWS_S = (300.0, 1800.0, 3600.0, 21600.0)
SPEEDS = (
    ("KneewatchTtftBudgetFastBurn", "critical", 14.4, 3600.0, 300.0, "two days"),
    ("KneewatchTtftBudgetSlowBurn", "warning", 6.0, 21600.0, 1800.0, "five days"),
)
"""Name, severity, burn from, long and short window, and when a month's budget is gone at that
speed. Source: Google, The Site Reliability Workbook, chapter 5, table 5-8."""

TRAFFIC_S = 300.0


def burn_groups(plan: Plan) -> tuple[Group, ...]:
    """Recording rules for the error ratios and their alerts; empty without a TTFT target."""
    within = within_ttft(plan.targets.ttft_p99_s)
    if within is None:
        return ()
    rules: list[Record | Alert] = []
    for window_s in WINDOWS_S:
        share = within.promql(replace(plan.dialect, range_s=window_s))
        rules.append(Record(error_ratio(window_s), f"1 - ({share})"))
    traffic = ARRIVALS.promql(replace(plan.dialect, range_s=TRAFFIC_S))
    rules.append(Record(recorded("arrival_per_s:5m"), traffic or ""))
    return (Group("kneewatch-burn", (*rules, *_burn_rate_alerts(plan))),)


def error_ratio(window_s: float) -> str:
    """Recorded series: share of requests in the window that exceeded the TTFT target."""
    minutes = round(window_s / 60)
    window = f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}m"
    return recorded(f"ttft_error_ratio:{window}")


def _burn_rate_alerts(plan: Plan) -> list[Alert]:
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
                    "summary": f"TTFT error budget is burning: {SUBJECT}",
                    "description": "{{ $value | humanizePercentage }} of requests in the last "
                    f"{duration(long_s)} exceeded the TTFT target. At this rate a month's error "
                    f"budget is used up in {gone}.",
                    "action": "Check the triage page and the cause alerts for the root cause.",
                    "guide": "9.3",
                }
                | link_annotations(plan, rule_page(plan.runbooks, "TTFT-P99")),
            )
        )
    return alerts


# --- Alerts for cascade stages --------------------------------------------------------------------


STAGE_ADVICE = {
    1: "No action needed yet. Plan for more KV cache before the load grows.",
    2: "Enlarge the KV cache (fp8 KV cache, --gpu-memory-utilization) or admit fewer requests.",
    3: "Reduce load now: shed requests at the gateway or add replicas. Then enlarge the KV cache.",
    4: "Shed load at once: most of the work is recomputation of preempted requests.",
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
            "summary": f"KV memory pressure, stage {number_} ({name}): {SUBJECT}",
            "description": "From KV cache usage, preemptions and the queue; evidence in "
            f"{recorded('cascade_evidence')}.",
            "action": STAGE_ADVICE[number_],
            "guide": "7.4",
        }
        | link_annotations(plan, cause_page(plan.runbooks, "kv_pressure")),
    )
