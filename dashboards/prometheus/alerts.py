"""Alerting rules for findings, stages, error budgets, missing series and targets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kneewatch.collector.signals.vllm import ARRIVALS, within_ttft
from kneewatch.dashboards.prometheus.recording_rules import (
    CAUSE_SEVERITY,
    FOUND,
    derived,
    inexpressible,
)
from kneewatch.dashboards.prometheus.rule_group import (
    CAUSE,
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
from kneewatch.diagnose.fleet.routers import IDLE_KV, PLACE, QUEUED_MIN, any_router
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.facts import (
    EVERYWHERE,
    SCRAPES_PER_RANGE,
    WIDE_RANGE_S,
    duration,
    number,
    recorded,
)
from kneewatch.rules.rule import Bound, Guard, Rule, Severity

STAGE = "cascade_stage"

SEEN_ELSEWHERE = {"lora_max": "lora_requests_info"}
"""Guards on a number inside a label; in PromQL the presence of the metric stands for it."""


def expressible(plan: Plan) -> tuple[list[Rule], list[tuple[Rule, str]]]:
    """Rules that PromQL can evaluate, and the others with the first signal that they lack."""
    recorded_keys = {s.key for s in plan.signals()} - {s.key for s in inexpressible(plan)}
    recorded_keys |= set(derived(plan)) | {STAGE} | set(SEEN_ELSEWHERE)
    recorded_keys |= set(FOUND) if plan.gpu_join else set()
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
    """The findings in force for each engine, and an alert for each severity of each rule."""
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
    """The series of a rule's findings in force."""
    return f'{FINDING}{{rule="{rule.id}"}}'


def _met(plan: Plan, rule: Rule) -> str:
    """The severity of the worst bound that is crossed; one in force until the value is back inside
    by `clear_ratio`."""
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
    """The number of a pool's replicas at this severity that have none of the causes in `covering`.
    No value where a replica of the pool has such a cause that is at least as severe."""
    if not covering:
        return firing(plan, in_force, severity)
    causes = _lately_concluded(plan, covering)
    alone = f"({in_force} unless on ({plan.engine}) ({causes} >= {int(Severity.WARNING)}))"
    as_bad = f"({causes} >= {int(max(severity, Severity.WARNING))})"
    return f"({firing(plan, alone, severity)}) unless on ({plan.pool}) {as_bad}"


def _lately_concluded(plan: Plan, causes: Sequence[str]) -> str:
    """The severities of causes within the last two windows: the findings that they cover may end
    after them."""
    series = f'{recorded(CAUSE_SEVERITY)}{{cause=~"({"|".join(causes)})(:.*)?"}}'
    return f"max_over_time({series}[{duration(2 * plan.range_s)}])"


def alert_name(rule_id: str) -> str:
    """An alert's name: `KV-EVICT` is `KneewatchKvEvict`."""
    return "Kneewatch" + "".join(part.capitalize() for part in rule_id.split("-"))


def firing_of(alert: str, severity: str) -> str:
    """Selector of the ALERTS series that exists while an alert fires."""
    return f'ALERTS{{alertname="{alert}", severity="{severity}", alertstate="firing"}}'


def _annotations(plan: Plan, rule: Rule, bound: Bound) -> dict[str, str]:
    sign, unit = "below" if rule.below else "above", unit_of(rule.signal)
    pick = "bottomk" if rule.below else "topk"
    engines = f'{FINDING}{{rule="{rule.id}", {POOL}}}'
    worst = f"{pick}(1, {recorded(rule.signal)}{{{POOL}}} and on ({plan.engine}) {engines})"
    said = (
        f"{rule.signal} is {unit.text('value $worst')} on {WORST_NAME}, the worst replica "
        f"(threshold: {sign} {unit.threshold(bound.threshold)})."
    )
    annotations = {
        "summary": f"{rule.summary}: {count_text(plan)}",
        "description": worst_text(plan, worst, said),
        "action": rule.advice,
        "guide": ", ".join(rule.guide),
    }
    return annotations | link_annotations(plan, rule_page(plan.runbooks, rule.id), worst)


@dataclass(frozen=True, slots=True)
class Unit:
    """How a signal's value is written: a template's functions, and what follows the number. A bound
    is a number of its own, with `scale` and `symbol`."""

    functions: str
    after: str = ""
    scale: float = 1.0
    symbol: str = ""

    def text(self, value: str) -> str:
        """A template's value with its unit."""
        return f"{{{{ {value} | {self.functions} }}}}{self.after}"

    def threshold(self, bound: float) -> str:
        """A bound of the signal with its unit."""
        return f"{self.scale * bound:g}{self.symbol}"


UNITS: tuple[tuple[tuple[str, ...], Unit], ...] = (
    (("_drift_ratio", "_tail_ratio"), Unit('printf "%.1f"', "x", symbol="x")),
    (("_ratio_per_s",), Unit("humanizePercentage", "/s", 100.0, "%/s")),
    (("_ratio", "_points"), Unit("humanizePercentage", "", 100.0, "%")),
    (("_per_s",), Unit('printf "%.3g"', "/s", symbol="/s")),
    (("_s",), Unit("humanizeDuration", symbol="s")),
)
"""Units by the end of a signal's name, the longer ends first."""

PLAIN = Unit('printf "%.3g"')


def unit_of(signal: str) -> Unit:
    """The unit of a signal, by the end of its name."""
    return next((unit for ends, unit in UNITS if signal.endswith(ends)), PLAIN)


def link_annotations(plan: Plan, runbook: str, worst: str = "") -> dict[str, str]:
    """Links of an alert about a pool to the runbook, and to the triage page and the dashboard of
    the replica that a query finds (without one, of all), as far as their addresses are set."""
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
    """The link to a dashboard as an annotation, its `variables` set from the alert's labels; empty
    without Grafana's address."""
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
    """The runbook link as an annotation; empty without a runbook address."""
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
"""Name, severity, burn from, long and short window, and when a month's budget is gone at that
speed. Source: Google, The Site Reliability Workbook, chapter 5, table 5-8."""

TRAFFIC_S = 300.0


def burn_groups(plan: Plan) -> tuple[Group, ...]:
    """Recording rules for the pools' error ratios and their alerts; empty without a TTFT target."""
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
    """Recorded series: share of a pool's requests in the window that exceeded the TTFT target."""
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
    """The worst stage of each pool as a recorded series, and the alerts about it.

    There is one alert for each stage above 0 and each severity that it can have; a pool fires at
    most one of them.
    """
    alerts: list[Alert] = []
    for number_, severities in (
        (1, (Severity.INFO,)),
        (2, (Severity.INFO, Severity.WARNING, Severity.CRITICAL)),
        (3, (Severity.WARNING, Severity.CRITICAL)),
        (4, (Severity.CRITICAL,)),
    ):
        for severity in severities:
            alerts.append(_stage(plan, number_, severity))
    return Group("kneewatch-stages", (Record(POOL_STAGE, _pool_stage(plan)), *alerts))


POOL_STAGE = recorded("pool_cascade")
"""Ten times the severity plus the stage of a pool's worst engine without the cause kv_pressure."""


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
            "guide": "7.4",
        }
        | link_annotations(plan, cause_page(plan.runbooks, "kv_pressure"), worst),
    )


# --- Alerts for missing series, targets that do not answer and pools that are gone ----------------
#
# Where kube-state-metrics is scraped, its series distinguish starting and ending pods from pods
# that are down, and pools scaled to zero from pools that vanished. The rules work without it.


DOWN_FAILURES = 3
"""Scrapes of a target that must have failed in a row, as in the sidecar."""

POOL_SEEN_S = 600.0
"""A pool must have been served for this long within the last hour before it can vanish."""

POOL_LOADING_S = 900.0
"""How long a pool may be without an engine while its workload still has targets: a replaced pod
loads its model."""

UNREACHABLE_SINCE = recorded("unreachable_since_s")
DOWN_SINCE = recorded("target_down_since_s")
"""Since when, in Unix seconds, a server that should serve is unreachable, with its model."""

POOL_ENGINES = recorded("pool_engines")

POD = "cluster, namespace, pod"
WORKLOAD = "cluster, namespace, workload"
POD_NAMES = ("(.+)-[0-9]+", "(.+)-[a-z0-9]+-[a-z0-9]{5}")
"""Names of a StatefulSet's and a Deployment's pods; the workload's name is in parentheses."""

SCALED_TO_ZERO = (
    ("kube_statefulset_replicas", "statefulset"),
    ("kube_deployment_spec_replicas", "deployment"),
)


def observer_group(plan: Plan) -> Group:
    """Alerts from Prometheus's own view of the servers: their scrapes and series."""
    return Group(
        "kneewatch-observer",
        (
            *_missing(plan),
            Record(UNREACHABLE_SINCE, _unreachable_since(plan)),
            Record(DOWN_SINCE, _down_since(plan)),
            _target_down(plan),
            Record(POOL_ENGINES, f"count by ({plan.pool}, workload) ({_workload(EVERYWHERE)})"),
            *_pool_vanished(plan),
            *_routers(plan),
        ),
    )


def _routers(plan: Plan) -> tuple[Alert, ...]:
    """Alerts for a router that does not use the engines of its namespace."""
    place = ", ".join(PLACE)
    here = f"and on ({place}) (count by ({place}) ({EVERYWHERE}))"
    served = f"sum by ({place}) ({recorded('arrival_per_s')}) > 0"
    queued = f"max by ({place}) ({recorded('waiting')}) > 0"
    filled = f"max by ({place}) ({recorded('kv_usage_ratio')}) >= {number(IDLE_KV)}"
    held = f"({any_router('queue', plan.prefix)} >= {number(QUEUED_MIN)}) {here}"
    rows = (
        (
            "KneewatchRouterUnready",
            f"({any_router('ready', plan.prefix)} == 0) {here} unless on ({place}) ({served})",
            "critical",
            "Router has no ready endpoint, while engines can be scraped",
            "Check the selector and port of the InferencePool or of the router's discovery.",
        ),
        (
            "KneewatchRouterHolds",
            f"{held} unless on ({place}) (({queued}) or ({filled}))",
            "warning",
            'Router holds {{ printf "%.0f" $value }} requests while engines are idle',
            "Compare the router's limits with the engines' queues and KV usage; restart the router "
            "if its data is stale.",
        ),
        (
            "KneewatchRouterStale",
            f"({any_router('errors', plan.prefix)} > 0) {here}",
            "warning",
            "Router cannot read its endpoints' metrics",
            "Read the router's log: metrics port or path, TLS, network policy.",
        ),
    )
    return tuple(
        Alert(
            name=name,
            expr=expr,
            for_s=plan.settles_s,
            labels={"severity": severity, "kneewatch": "observer"},
            annotations={
                "summary": f"{summary}{{{{ with $labels.namespace }}}} in {{{{ . }}}}{{{{ end }}}}",
                "description": "Read from the router's own metrics and its namespace's engines.",
                "action": action,
                "guide": "7.3",
            }
            | link_annotations(plan, cause_page(plan.runbooks, "router_fault")),
        )
        for name, expr, severity, summary, action in rows
    )


def _missing(plan: Plan) -> tuple[Alert, Alert]:
    """Alerts for missing metrics.

    With several API servers, vLLM exports load and cache series only after the first request. A
    server without any prompt tokens is therefore unused and has not lost its metrics.
    """
    running = plan.dialect.series("num_requests_running")
    prompts = plan.dialect.series("prompt_tokens", "_total")
    unused = f"(sum by ({plan.process}) ({prompts}) == 0)"
    gone_s = max(5 * plan.range_s, 20 * plan.interval_s)
    return (
        Alert(
            name="KneewatchNoMetrics",
            expr=f"absent({running}) and absent({prompts})",
            for_s=gone_s,
            labels={"severity": "critical", "kneewatch": "observer"},
            annotations={
                "summary": "No vLLM server is scraped",
                "description": "Prometheus has no vLLM series, so no other alert can fire.",
                "action": "Check the Prometheus targets page and vLLM's /metrics.",
                "guide": "",
            },
        ),
        Alert(
            name="KneewatchMetricsVanished",
            expr=affected(
                plan,
                f"(max_over_time({running}[1h]) unless {running})"
                f" and on ({plan.process}) (up == 1) unless on ({plan.process}) {unused}",
            ),
            for_s=gone_s,
            labels={"severity": "warning", "kneewatch": "observer"},
            annotations={
                "summary": "vLLM metrics missing from reachable pages: "
                f'{{{{ printf "%.0f" $value }}}} of {WHERE}',
                "description": "The page answers, but lacks series of the last hour.",
                "action": "Check whether an engine died or --disable-log-stats was set.",
                "guide": "",
            }
            | link_annotations(plan, cause_page(plan.runbooks, "metrics_missing")),
        ),
    )


def _unreachable_since(plan: Plan) -> str:
    """Unix time at which the scrapes of a server of the last hour began to fail.

    A pod that was never scraped successfully does not count. A target that leaves
    service discovery has no `up` from then on.
    """
    served = f"(max by ({plan.process}) ({_served(plan)}) >= 0)"
    down = f"(max by ({plan.process}) (up) == 0 and on ({plan.process}) {served})"
    return f"({UNREACHABLE_SINCE} and on ({plan.process}) {down}) or ({down} * 0 + time())"


def _served(plan: Plan) -> str:
    """The engines of the last hour."""
    return f"max_over_time({plan.dialect.series('num_requests_running')}[1h])"


def _down_since(plan: Plan) -> str:
    """Servers whose last scrapes have all failed; pods only while they should serve.

    A pod with a deletion timestamp is ending; one that was created after the failures began is a
    StatefulSet's next pod at the same address, which loads.
    """
    near_s = SCRAPES_PER_RANGE * plan.scrape_s
    failed = " or ".join(
        f"((max_over_time(up[{duration(span_s)}]) == 0)"
        f" and (count_over_time(up[{duration(span_s)}]) >= {DOWN_FAILURES}))"
        for span_s in dict.fromkeys((near_s, max(near_s, WIDE_RANGE_S)))
    )
    created = f"max by ({POD}) (kube_pod_created)"
    starts = f"({UNREACHABLE_SINCE} < on ({POD}) group_left () ({created}))"
    down = (
        f"{UNREACHABLE_SINCE} and on ({plan.process}) (up == 0)"
        f" and on ({plan.process}) ({failed})"
        f" unless on ({POD}) kube_pod_deletion_timestamp unless on ({plan.process}) {starts}"
    )
    models = f"max by ({plan.replica}) ({_served(plan)})"
    return f"{models} * 0 + on ({plan.process}) group_left () ({down})"


def _target_down(plan: Plan) -> Alert:
    """Fires once servers of a pool have been down for a scrape."""
    longest = f"topk(1, time() - {DOWN_SINCE}{{{POOL}}})"
    said = (
        f"The scrapes of {WORST_NAME} have failed for "
        "{{ value $worst | humanizeDuration }}, the longest."
    )
    return Alert(
        name="KneewatchTargetDown",
        expr=affected(plan, DOWN_SINCE),
        for_s=plan.scrape_s,
        labels={"severity": "critical", "kneewatch": "cause", "cause": "target_down"},
        annotations={
            "summary": f"vLLM servers are not reachable: {count_text(plan, also=DOWN_SINCE)}",
            "description": worst_text(plan, longest, said),
            "action": "Check the vLLM process and its log, then `curl` its /metrics.",
            "guide": "",
        }
        | link_annotations(plan, cause_page(plan.runbooks, "target_down"), longest),
    )


def _pool_vanished(plan: Plan) -> tuple[Alert, Alert]:
    """Alerts for a pool that served within the last hour and has no engine left.

    The first is for pools whose workload has no target either. The second is for pools whose pods
    are all being replaced; it comes once loading should be over.
    """
    samples = POOL_SEEN_S / plan.interval_s
    served = f"(count_over_time({POOL_ENGINES}[1h]) >= {number(samples)})"
    zero = " or ".join(
        f'label_replace({series} == 0, "workload", "$1", "{label}", "(.+)")'
        for series, label in SCALED_TO_ZERO
    )
    # A workload that serves under another name now was renamed.
    renamed = f'{POOL_ENGINES}{{workload!=""}}'
    gone = (
        f"(last_over_time({POOL_ENGINES}[1h]) and {served}) unless on ({plan.pool}) {POOL_ENGINES}"
        f" unless on ({WORKLOAD}) ({zero}) unless on ({plan.pool}) {DOWN_SINCE}"
        f" unless on (job, {WORKLOAD}) {renamed}"
        " and on () count(up)"  # a ruler that outlives its Prometheus sees no target at all
    )
    loading = f"on (job, {WORKLOAD}) {_workload('up')}"
    # Once it fires, it ends when the model is served again, not when its next pods begin to load.
    firing = 'ALERTS{alertname="KneewatchPoolVanished", how="gone", alertstate="firing"}'
    no_targets = f"({gone} unless {loading}) or ({gone} and on ({plan.pool}) {firing})"
    return (
        _vanished(plan, f"sum by ({plan.pool}) ({no_targets})", 2 * plan.scrape_s, "gone"),
        _vanished(
            plan,
            f"sum by ({plan.pool}) ({gone}) unless on ({plan.pool}) {firing}",
            POOL_LOADING_S,
            "replaced",
        ),
    )


def _vanished(plan: Plan, expr: str, for_s: float, how: str) -> Alert:
    return Alert(
        name="KneewatchPoolVanished",
        expr=expr,
        for_s=for_s,
        labels={"severity": "critical", "kneewatch": "observer", "how": how},
        annotations={
            "summary": "No replica serves {{ $labels.model_name }} in {{ $labels.namespace }} "
            "({{ $labels.job }})",
            "description": "It had {{ $value }} engines within the last hour and has none now. "
            "Deployments and StatefulSets that were scaled to zero do not count.",
            "action": "Check the workload's pods and events, and the monitor that selects them.",
            "guide": "",
        }
        | runbook_annotation(cause_page(plan.runbooks, "target_down"))
        | dashboard_annotation(plan, "kneewatch-fleet", model="model_name"),
    )


def _workload(series: str) -> str:
    """Series with a label `workload`: the name of the Deployment or StatefulSet of their pod."""
    for pattern in POD_NAMES:
        series = f'label_replace({series}, "workload", "$1", "pod", "{pattern}")'
    return series
