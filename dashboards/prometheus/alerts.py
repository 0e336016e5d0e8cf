"""Alerting rules for findings, stages and error budgets, with their links. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.signals.vllm import ARRIVALS, within_ttft
from kneewatch.dashboards.prometheus.recording_rules import Recorded
from kneewatch.dashboards.prometheus.rule_group import (
    CAUSE,
    CAUSE_SEVERITY,
    FINDING,
    POOL,
    WHERE,
    WORST_NAME,
    Alert,
    Group,
    Lasts,
    Plan,
    Record,
    affected,
    count_text,
    firing,
    in_force_records,
    met,
    worst_text,
)
from kneewatch.diagnose.causes.ranking import CAUSES
from kneewatch.diagnose.doc_links import cause_page, rule_page
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.rule import Bound, Guard, Rule, Severity

STAGE = "cascade_stage"

SEEN_ELSEWHERE = {"lora_max": "lora_requests_info"}
"""Guards on a number inside a label, which PromQL cannot read. Instead, the rule checks that this
metric exists."""


def expressible(plan: Plan) -> tuple[list[Rule], list[tuple[Rule, str]]]:
    """The rules that PromQL can evaluate; then the other rules, each with the first signal that the
    plan lacks."""
    recorded_keys = Recorded(plan).keys | SEEN_ELSEWHERE.keys()
    can: list[Rule] = []
    cannot: list[tuple[Rule, str]] = []
    for rule in plan.rules():
        lacking = [
            s for s in (rule.signal, *(g.signal for g in rule.guards)) if s not in recorded_keys
        ]
        if lacking:
            cannot.append((rule, lacking[0]))
        else:
            can.append(rule)
    return can, cannot


def finding_groups(plan: Plan) -> tuple[Group, Group]:
    """Two groups: the recording rules for active findings per engine, and an alert for each
    severity of each rule."""
    rules, _ = expressible(plan)
    lasts = {rule.id: _lasts(plan, rule) for rule in rules}
    records = (
        *(Record(met(FINDING), _met(plan, rule), {"rule": rule.id}) for rule in rules),
        *in_force_records(plan, FINDING, "rule", lasts),
    )
    alerts = tuple(_alert(plan, rule, bound) for rule in rules for bound in rule.bounds)
    return Group("kneewatch-findings", records), Group("kneewatch-finding-alerts", alerts)


def _lasts(plan: Plan, rule: Rule) -> Lasts:
    ends = any(guard.ends for guard in rule.guards)
    return Lasts(rule.for_s * plan.scale, 0.0 if ends else rule.clear_s * plan.scale)


def finding_of(rule: Rule) -> str:
    """A selector for the recorded series of a rule's active findings."""
    return f'{FINDING}{{rule="{rule.id}"}}'


def _met(plan: Plan, rule: Rule) -> str:
    """A PromQL expression for the severity of the worst bound that is crossed. An active finding
    keeps its severity until the value is back inside the bound by a margin, `clear_ratio`."""
    worst_first = sorted(rule.bounds, key=lambda bound: bound.severity, reverse=True)
    levels = " or ".join(
        f"(({_crossed(plan, rule, bound)}) * 0 + {int(bound.severity)})" for bound in worst_first
    )
    guards = "".join(f" and {_guard(plan, guard)}" for guard in rule.guards)
    return f"({levels}){guards}" if guards else levels


def _crossed(plan: Plan, rule: Rule, bound: Bound) -> str:
    signal, sign = recorded(rule.signal), "<" if rule.below else ">"
    margin = abs(bound.threshold) * rule.clear_ratio
    relaxed = bound.threshold + margin if rule.below else bound.threshold - margin
    crossed = f"{signal} {sign} {number(bound.threshold)}"
    if margin:
        in_force = f"({finding_of(rule)} >= {int(bound.severity)})"
        crossed = (
            f"({crossed}) or (({signal} {sign} {number(relaxed)}) and on ({plan.engine})"
            f" {in_force})"
        )
    if not rule.below and bound.threshold - margin <= 0:
        crossed = f"({crossed}) > 0"
    return crossed


def _guard(plan: Plan, guard: Guard) -> str:
    if guard.signal in SEEN_ELSEWHERE:
        series = plan.dialect.series(SEEN_ELSEWHERE[guard.signal])
        return f"on ({plan.process}) {series}"
    sign = "<=" if guard.below else ">="
    return f"on ({plan.engine}) ({recorded(guard.signal)} {sign} {number(guard.value)})"


def _alert(plan: Plan, rule: Rule, bound: Bound) -> Alert:
    covering = [record.id for record in CAUSES if rule.id in record.covers]
    return Alert(
        name=alert_name(rule.id),
        expr=uncovered(plan, finding_of(rule), bound.severity, covering),
        for_s=plan.settles_s if covering or bound.severity < Severity.CRITICAL else 0.0,
        labels={"severity": bound.severity.word, "kneewatch": "finding", "rule": rule.id},
        annotations=_annotations(plan, rule, bound),
    )


def uncovered(plan: Plan, in_force: str, severity: Severity, covering: Sequence[str]) -> str:
    """A PromQL expression for the number of a pool's replicas at this severity that have none of
    the causes in `covering`.

    It has no value if a replica of the pool has such a cause and the cause is at least as severe.
    """
    if not covering:
        return firing(plan, in_force, severity)
    causes = _lately_concluded(plan, covering)
    alone = f"({in_force} unless on ({plan.engine}) ({causes} >= {int(Severity.WARNING)}))"
    as_bad = f"({causes} >= {int(max(severity, Severity.WARNING))})"
    return f"({firing(plan, alone, severity)}) unless on ({plan.pool}) {as_bad}"


def _lately_concluded(plan: Plan, causes: Sequence[str]) -> str:
    """A PromQL expression for the severities of causes within the last two windows. The time is
    that long because a finding may last longer than the cause that covers it."""
    series = f'{recorded(CAUSE_SEVERITY)}{{cause=~"({"|".join(causes)})(:.*)?"}}'
    return f"max_over_time({series}[{duration(2 * plan.range_s)}])"


def alert_name(rule_id: str) -> str:
    """The name of the alert for a rule: `KV-EVICT` becomes `KneewatchKvEvict`."""
    return "Kneewatch" + "".join(part.capitalize() for part in rule_id.split("-"))


def firing_of(alert: str, severity: str) -> str:
    """A selector for the series of ALERTS that exists while an alert fires."""
    return f'ALERTS{{alertname="{alert}", severity="{severity}", alertstate="firing"}}'


def _annotations(plan: Plan, rule: Rule, bound: Bound) -> dict[str, str]:
    sign, unit = "below" if rule.below else "above", unit_of(rule.signal)
    pick = "bottomk" if rule.below else "topk"
    engines = f'{FINDING}{{rule="{rule.id}", {POOL}}}'
    worst = f"{pick}(1, {recorded(rule.signal)}{{{POOL}}} and on ({plan.engine}) {engines})"
    description = (
        f"{rule.signal} is {unit.text('value $worst')} on {WORST_NAME}, the worst replica "
        f"(threshold: {sign} {unit.threshold(bound.threshold)})."
    )
    annotations = {
        "summary": f"{rule.summary}: {count_text(plan)}",
        "description": worst_text(plan, worst, description),
        "action": rule.advice,
    }
    return annotations | link_annotations(plan, rule_page(plan.runbooks, rule.id), worst)


class Unit(Struct, frozen=True):
    """How alerts print the value of a signal.

    A value is passed through `functions` of Go templates and followed by `after`. A bound is
    printed as a number, multiplied by `scale` and followed by `symbol`.
    """

    functions: str
    after: str = ""
    scale: float = 1.0
    symbol: str = ""

    def text(self, value: str) -> str:
        """A template for a value with its unit."""
        return f"{{{{ {value} | {self.functions} }}}}{self.after}"

    def threshold(self, bound: float) -> str:
        """A bound of a signal with its unit."""
        return f"{self.scale * bound:g}{self.symbol}"


UNITS: tuple[tuple[tuple[str, ...], Unit], ...] = (
    (("_drift_ratio", "_tail_ratio"), Unit('printf "%.1f"', "x", symbol="x")),
    (("_ratio_per_s",), Unit("humanizePercentage", "/s", 100.0, "%/s")),
    (("_ratio", "_points"), Unit("humanizePercentage", "", 100.0, "%")),
    (("_per_s",), Unit('printf "%.3g"', "/s", symbol="/s")),
    (("_s",), Unit("humanizeDuration", symbol="s")),
)
"""Units by the suffix of a signal's name. Longer suffixes come first."""

PLAIN = Unit('printf "%.3g"')


def unit_of(signal: str) -> Unit:
    """The unit of a signal, according to the suffix of its name."""
    return next((unit for ends, unit in UNITS if signal.endswith(ends)), PLAIN)


def link_annotations(plan: Plan, runbook: str, worst: str = "") -> dict[str, str]:
    """The links of an alert about a pool: to the runbook, the triage page and the dashboard. A link
    is left out if its address is not set.

    `worst` is a query for the replica that the triage page and the dashboard should show. Without
    `worst` they show all replicas.
    """
    links = runbook_annotation(runbook)
    if plan.triage_url:
        page = worst_text(plan, worst, '{{ label "instance" $worst }}') if worst else ""
        links["triage"] = f"{plan.triage_url.rstrip('/')}{'/' if page else ''}{page}"
    if plan.grafana_url and worst:
        chosen = worst_text(plan, worst, '{{ label "instance" $worst | urlquery }}')
        links["dashboard_url"] = dashboard_of(plan, f"kneewatch-replica?var-replica={chosen}")
        return links
    return links | dashboard_annotation(plan, "kneewatch-fleet", model="model_name")


def dashboard_annotation(plan: Plan, board: str, **variables: str) -> dict[str, str]:
    """An annotation with the link to a dashboard. The dashboard's `variables` are set from labels
    of the alert. Empty if Grafana's address is not set."""
    if not plan.grafana_url:
        return {}
    chosen = "&".join(
        f"var-{name}={{{{ $labels.{label} | urlquery }}}}" for name, label in variables.items()
    )
    return {"dashboard_url": dashboard_of(plan, f"{board}?{chosen}")}


def dashboard_of(plan: Plan, board: str) -> str:
    """The address of a dashboard."""
    return f"{plan.grafana_url.rstrip('/')}/d/{board}"


def runbook_annotation(runbook: str) -> dict[str, str]:
    """An annotation with the link to the runbook. Empty without an address."""
    return {"runbook_url": runbook} if runbook else {}


# --- Multi-window burn-rate alerts for the TTFT error budget --------------------------------------
#
# The budget is 1 minus the objective: 1% of requests at 99%. Alerts need current traffic, so that a
# quiet night does not burn, and both windows, so that they resolve soon after the problem ends. A
# stalled engine sends no first token and burns no budget: KneewatchCauseEngineStalled covers it.


WINDOWS_S = (300.0, 1800.0, 3600.0, 21600.0)
SPEEDS = (
    ("KneewatchTtftBudgetFastBurn", Severity.CRITICAL, 14.4, 3600.0, 300.0, "two days"),
    ("KneewatchTtftBudgetSlowBurn", Severity.WARNING, 6.0, 21600.0, 1800.0, "five days"),
)
"""For each burn-rate alert: its name, severity, minimum burn rate, long and short window in
seconds, and the time after which a month's budget is used up at that burn rate.

Source: Google, The Site Reliability Workbook, chapter 5, table 5-8.
"""

TRAFFIC_S = 300.0


def burn_groups(plan: Plan) -> tuple[Group, ...]:
    """Recording rules for the error ratios of pools, and alerts on them. Empty without a TTFT
    target."""
    within = within_ttft(plan.targets.ttft_p99_s)
    if within is None:
        return ()
    of_pools = replace(plan.dialect, by=plan.pool_labels)
    rules: list[Record | Alert] = []
    for window_s in WINDOWS_S:
        share = within.promql(replace(of_pools, range_s=window_s))
        rules.append(Record(error_ratio(window_s), f"1 - ({share})"))
    traffic = ARRIVALS.promql(replace(of_pools, range_s=TRAFFIC_S))
    rules.append(Record(recorded("arrival_per_s:5m"), traffic or ""))
    return (Group("kneewatch-burn", (*rules, *_burn_rate_alerts(plan))),)


def error_ratio(window_s: float) -> str:
    """The name of the recorded series for the share of a pool's requests in the window that
    exceeded the TTFT target."""
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
                f" and ({recorded('arrival_per_s:5m')} > 0)"
                f" unless on ({plan.pool}) ({CAUSE} >= {int(severity)})",
                for_s=0.0,
                labels={"severity": severity.word, "kneewatch": "burn"},
                annotations={
                    "summary": f"TTFT error budget is burning: {WHERE}",
                    "description": "{{ $value | humanizePercentage }} of requests in the last "
                    f"{duration(long_s)} exceeded the TTFT target. At this rate a month's error "
                    f"budget is used up in {gone}.",
                    "action": "Find the replicas above the TTFT target on the triage page.",
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
    """A recording rule for the worst stage of each pool, and the alerts about it.

    There is one alert for each stage above 0 and each severity that the stage can have. At most one
    of them fires for a pool.
    """
    alerts = [
        _stage(plan, number_, severity)
        for number_, severities in (
            (1, (Severity.INFO,)),
            (2, (Severity.INFO, Severity.WARNING, Severity.CRITICAL)),
            (3, (Severity.WARNING, Severity.CRITICAL)),
            (4, (Severity.CRITICAL,)),
        )
        for severity in severities
    ]
    return Group("kneewatch-stages", (Record(POOL_STAGE, _pool_stage(plan)), *alerts))


POOL_STAGE = recorded("pool_cascade")
"""The recorded series for the worst stage of a pool: ten times its severity plus its number.
Engines with the cause kv_pressure do not count."""


def _pool_stage(plan: Plan) -> str:
    stage = recorded(STAGE)
    covered = f"({_lately_concluded(plan, ['kv_pressure'])} >= {int(Severity.WARNING)})"
    engines = f"(10 * {recorded('cascade_severity')} + ({stage} > 0))"
    return f"max by ({plan.pool}) ({engines} unless on ({plan.engine}) {covered})"


def _stage(plan: Plan, number_: int, severity: Severity) -> Alert:
    name, stage = NAMES[number_], recorded(STAGE)
    usage = f"{recorded('kv_usage_ratio')}{{{POOL}}}"
    worst = f"topk(1, {usage} and on ({plan.engine}) {stage}{{{POOL}}} == {number_})"
    return Alert(
        name=f"KneewatchCascade{name.capitalize()}",
        expr=f"{affected(plan, f'{stage} >= {number_}')}"
        f" and on ({plan.pool}) ({POOL_STAGE} == {10 * int(severity) + number_})",
        for_s=plan.settles_s,
        labels={
            "severity": severity.word,
            "kneewatch": "stage",
            "stage": str(number_),
        },
        annotations={
            "summary": f"KV memory pressure, stage {number_} ({name}): {count_text(plan)}",
            "description": worst_text(
                plan,
                worst,
                f"The KV cache of {WORST_NAME} is "
                "{{ value $worst | humanizePercentage }} full, the fullest at this stage. Stages "
                "are concluded from KV cache usage, preemptions and the queue.",
            ),
            "action": STAGE_ADVICE[number_],
        }
        | link_annotations(plan, cause_page(plan.runbooks, "kv_pressure"), worst),
    )
