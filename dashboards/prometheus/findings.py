"""Findings as alerting rules: the sidecar's bounds, durations, guards and hysteresis. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kneewatch.dashboards.prometheus.model import Alert, Group, Plan
from kneewatch.dashboards.prometheus.recording import FOUND, derived, inexpressible
from kneewatch.rules.facts import number, recorded
from kneewatch.rules.model import Bound, Guard, Rule

STAGE = "cascade_stage"

SEEN_ELSEWHERE = {"lora_max": "lora_requests_info"}
"""Guards on a number inside a label: the metric's being there at all says as much."""


def expressible(plan: Plan) -> tuple[list[Rule], list[tuple[Rule, str]]]:
    """The rules that PromQL can judge from vLLM's own series, and the others with the signal that
    it lacks."""
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
    """Over the bound; once firing, until it is back inside by the rule's margin."""
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
    """The series that Prometheus keeps while an alert fires."""
    return f'ALERTS{{alertname="{alert}", severity="{severity}", alertstate="firing"}}'


def _guard(plan: Plan, guard: Guard) -> str:
    if guard.signal in SEEN_ELSEWHERE:
        series = plan.dialect.series(SEEN_ELSEWHERE[guard.signal])
        return f"on ({plan.process}) {series}"
    sign = "<=" if guard.below else ">="
    return f"({recorded(guard.signal)} {sign} {number(guard.value)})"


def _annotations(plan: Plan, rule: Rule, bound: Bound) -> dict[str, str]:
    sign = "below" if rule.below else "above"
    told = {
        "summary": f"{rule.summary} on {{{{ $labels.instance }}}}",
        "description": f"{rule.signal} is {{{{ $value | humanize }}}} ({sign} "
        f"{number(bound.threshold)}: {bound.source}).",
        "action": rule.advice,
        "guide": ", ".join(rule.guide),
    }
    return told | triage_link(plan)


def triage_link(plan: Plan) -> dict[str, str]:
    """The annotation that leads to the triage page, where one is stated."""
    if not plan.triage_url:
        return {}
    return {"triage": f"{plan.triage_url.rstrip('/')}/{{{{ $labels.instance }}}}"}
