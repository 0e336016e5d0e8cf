"""Alerts for missing series, unreachable targets, routers, and pools that have disappeared.
Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.alerts import (
    dashboard_annotation,
    link_annotations,
    runbook_annotation,
)
from kneewatch.dashboards.prometheus.rule_group import (
    POOL,
    WHERE,
    WORST_NAME,
    Alert,
    Group,
    Plan,
    Record,
    affected,
    count_text,
    worst_text,
)
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.fleet.routers import IDLE_KV, PLACE, QUEUED_MIN, any_router
from kneewatch.rules.facts import (
    EVERYWHERE,
    SCRAPES_PER_RANGE,
    WIDE_RANGE_S,
    duration,
    number,
    recorded,
)

# Where kube-state-metrics is scraped, its series distinguish starting and ending pods from pods
# that are down, and pools scaled to zero from pools that vanished. The rules work without it.


DOWN_FAILURES = 3
"""Number of scrapes of a target that must fail in a row, as in the sidecar."""

POOL_SEEN_S = 600.0
"""Minimum seconds within the last hour for which a pool must have served before it can count as
vanished."""

POOL_LOADING_S = 900.0
"""Seconds for which a pool may have no engine while its workload still has targets. A replaced pod
needs this time to load its model."""

UNREACHABLE_SINCE = recorded("unreachable_since_s")
DOWN_SINCE = recorded("target_down_since_s")
"""The recorded series with the Unix time since which a server is unreachable although it should
serve. It has the label of the server's model."""

POOL_ENGINES = recorded("pool_engines")

POD = "cluster, namespace, pod"
WORKLOAD = "cluster, namespace, workload"
POD_NAMES = ("(.+)-[0-9]+", "(.+)-[a-z0-9]+-[a-z0-9]{5}")
"""Patterns for the names of a StatefulSet's and a Deployment's pods. The first group is the name of
the workload."""

SCALED_TO_ZERO = (
    ("kube_statefulset_replicas", "statefulset"),
    ("kube_deployment_spec_replicas", "deployment"),
)


def observer_group(plan: Plan) -> Group:
    """Alerts on what Prometheus itself observes of the servers: their scrapes and series."""
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
            }
            | link_annotations(plan, cause_page(plan.runbooks, "router_fault")),
        )
        for name, expr, severity, summary, action in rows
    )


def _missing(plan: Plan) -> tuple[Alert, Alert]:
    """Alerts for missing metrics.

    With several API servers, vLLM exports load and cache series only after the first request. A
    server without any prompt tokens is therefore unused; its metrics are not missing.
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
            }
            | link_annotations(plan, cause_page(plan.runbooks, "metrics_missing")),
        ),
    )


def _unreachable_since(plan: Plan) -> str:
    """A PromQL expression for the Unix time at which the scrapes of a server began to fail. It has
    a value only for servers that served within the last hour.

    A pod that was never scraped successfully does not count. When a target leaves service
    discovery, its series `up` ends.
    """
    served = f"(max by ({plan.process}) ({_served(plan)}) >= 0)"
    down = f"(max by ({plan.process}) (up) == 0 and on ({plan.process}) {served})"
    return f"({UNREACHABLE_SINCE} and on ({plan.process}) {down}) or ({down} * 0 + time())"


def _served(plan: Plan) -> str:
    """A PromQL expression for the engines that were present within the last hour."""
    return f"max_over_time({plan.dialect.series('num_requests_running')}[1h])"


def _down_since(plan: Plan) -> str:
    """A PromQL expression for servers whose newest scrapes have all failed. Pods count only while
    they should serve.

    Two kinds of pods should not serve. A pod with a deletion timestamp is terminating. A pod that
    was created after the failures began is the next pod of a StatefulSet at the same address, and
    is still loading.
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
    """An alert that fires when servers of a pool have been down for one scrape interval."""
    longest = f"topk(1, time() - {DOWN_SINCE}{{{POOL}}})"
    description = (
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
            "description": worst_text(plan, longest, description),
            "action": "Check the vLLM process and its log, then `curl` its /metrics.",
        }
        | link_annotations(plan, cause_page(plan.runbooks, "target_down"), longest),
    )


def _pool_vanished(plan: Plan) -> tuple[Alert, Alert]:
    """Alerts for a pool that served within the last hour and has no engine left.

    The first alert is for pools whose workload has no target either. The second is for pools whose
    pods are all being replaced; it fires when they should have finished loading.
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
        }
        | runbook_annotation(cause_page(plan.runbooks, "target_down"))
        | dashboard_annotation(plan, "kneewatch-fleet", model="model_name"),
    )


def _workload(series: str) -> str:
    """Adds the label `workload` to a series: the name of the Deployment or StatefulSet of its
    pod."""
    for pattern in POD_NAMES:
        series = f'label_replace({series}, "workload", "$1", "pod", "{pattern}")'
    return series
