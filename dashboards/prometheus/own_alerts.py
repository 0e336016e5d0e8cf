"""Alerts on kneewatch's own metrics, for those who run the daemon. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kneewatch.dashboards.prometheus.alerts import CRITICAL, WARNING, alert
from kneewatch.dashboards.prometheus.rule_group import Alert, Group, Plan

SILENT_S = 300.0
"""Seconds without kneewatch's metrics, or without a fresh verdict, after which an alert fires."""

ENGINE = "{{ $labels.target }} ({{ $labels.model }}, engine {{ $labels.engine }})"


SUBJECT = f"{{{{ if $labels.pool }}}}{{{{ $labels.pool }}}}{{{{ else }}}}{ENGINE}{{{{ end }}}}"
"""A template for a pool of a fleet, or for one engine."""


def own_group(plan: Plan) -> Group:
    """Alerts on the causes and stages that kneewatch concludes, and on kneewatch itself."""
    return Group("kneewatch-own", tuple(_alerts(plan)))


def _alerts(plan: Plan) -> Iterator[Alert]:
    own_alert = partial(alert, plan, kneewatch="own")
    for severity in (WARNING, CRITICAL):
        yield own_alert(
            "KneewatchCause", severity,
            f"kneewatch_cause_severity == {int(severity)}"
            f" or kneewatch_fleet_cause_severity == {int(severity)}",
            0.0,
            f"{{{{ $labels.cause }}}} on {SUBJECT}",
            f"kneewatch concludes the cause {{{{ $labels.cause }}}} for {SUBJECT}.",
            "Open the triage page: it has the evidence and what to change.",
            page="causes/{{ $labels.cause }}",
        )  # fmt: skip
    for name, stage, severity in (
        ("KneewatchCascadeQueueing", 3, WARNING),
        ("KneewatchCascadeCollapsing", 4, CRITICAL),
    ):
        yield own_alert(
            name, severity, f"kneewatch_stage == {stage}", plan.settles_s,
            f"KV memory pressure, stage {{{{ $value }}}}: {ENGINE}",
            f"The KV cache of {ENGINE} is full, running requests are preempted, and the queue"
            " grows.",
            "Reduce load now: shed requests at the gateway. Then enlarge the KV cache.",
            page="causes/kv_pressure", stage=str(stage),
        )  # fmt: skip
    yield own_alert(
        "KneewatchStale",
        WARNING,
        "kneewatch_late == 1 or kneewatch_fleet_up == 0",
        SILENT_S,
        "kneewatch has no fresh verdict{{ with $labels.target }} on {{ . }}{{ end }}",
        "kneewatch at {{ $labels.instance }} runs, but its newest verdict is too old.",
        "Read kneewatch's log: it names the target or metrics system that does not answer.",
        page="causes/metrics_missing",
    )
    yield own_alert(
        "KneewatchAbsent", WARNING,
        "absent(kneewatch_build_info) and on () max_over_time(kneewatch_build_info[1d])",
        SILENT_S,
        "kneewatch is not running, or not scraped",
        "Its metrics were there within the last day and are not there now.",
        "Check kneewatch's process and its target in Prometheus.",
        page="causes/metrics_missing",
    )  # fmt: skip
