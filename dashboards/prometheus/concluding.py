"""Causes as recording and alerting rules: confidence recorded, severities and folding alerted.
Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes import cause_queries
from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.causes.nodes import peer_records
from kneewatch.dashboards.prometheus.findings import triage_link
from kneewatch.dashboards.prometheus.model import Alert, Group, Plan, Record, number, recorded
from kneewatch.dashboards.prometheus.odds import confidence
from kneewatch.dashboards.prometheus.recording import CONFIDENCE
from kneewatch.diagnose.case import CONCLUDED_FROM, DOUBTFUL_BELOW
from kneewatch.diagnose.causes import EXPLAINS
from kneewatch.diagnose.derived import QUEUED_MIN, QUEUED_SHARE_OF_RUNNING
from kneewatch.diagnose.tracker import AT_ONCE, CLEAR_S, ENDS_AT_ONCE, LINGERS, ONSET_S
from kneewatch.rules.model import Severity


def cause_groups(plan: Plan) -> tuple[Group, Group]:
    """The recording rules of all causes, and their alerts."""
    queries = cause_queries(plan)
    waiting, running = recorded("waiting_by_capacity"), recorded("running")
    queued = (
        f"{waiting} >= bool clamp_min({number(QUEUED_SHARE_OF_RUNNING)} * {running},"
        f" {number(QUEUED_MIN)})"
    )
    records = [
        Record(recorded("queued"), queued),
        *peer_records(plan),
        *(_record(query) for query in queries),
    ]
    alerts = [alert for query in queries for alert in _alerts(plan, query)]
    return (
        Group("kneewatch-confidence", tuple(records)),
        Group("kneewatch-causes", tuple(alerts)),
    )


def cause_name(cause: str) -> str:
    """An alert's name: `kv_pressure` is `KneewatchCauseKvPressure`."""
    return "KneewatchCause" + "".join(part.capitalize() for part in cause.split("_"))


def _record(query: CauseQuery) -> Record:
    sure = confidence(query.start, query.terms)
    return Record(recorded(CONFIDENCE), f"({sure}) and ({query.when})", {"cause": query.series})


def _alerts(plan: Plan, query: CauseQuery) -> list[Alert]:
    series = f'{recorded(CONFIDENCE)}{{cause="{query.series}"}}'
    explained = "|".join(cause for cause, others in EXPLAINS.items() if query.id in others)
    told = (
        f' unless on ({plan.engine}) ({recorded(CONFIDENCE)}{{cause=~"{explained}"}}'
        f" >= {number(CONCLUDED_FROM)})"
        if explained
        else ""
    )
    sure = f"({series} >= {number(DOUBTFUL_BELOW)})"
    doubtful = f"({series} >= {number(CONCLUDED_FROM)} < {number(DOUBTFUL_BELOW)})"
    alerts: list[Alert] = []
    above: list[str] = []
    for severity, when in query.levels:
        expr = sure + (f" and on ({plan.engine}) ({when})" if when else "")
        expr += "".join(f" unless on ({plan.engine}) ({worse})" for worse in above)
        if severity == Severity.INFO:
            expr = f"({expr}) or {doubtful}"
        alerts.append(_alert(plan, query, severity, f"({expr}){told}"))
        above.append(when)
    if query.levels[-1][0] != Severity.INFO:
        alerts.append(_alert(plan, query, Severity.INFO, f"{doubtful}{told}"))
    return alerts


def _alert(plan: Plan, query: CauseQuery, severity: Severity, expr: str) -> Alert:
    at_once, ends = query.id in AT_ONCE, query.id in ENDS_AT_ONCE
    onset_s = 0.0 if at_once else ONSET_S * plan.scale
    keep_s = CLEAR_S * (3 if query.id in LINGERS else 1) * plan.scale
    return Alert(
        name=cause_name(query.id) + query.note.capitalize(),
        expr=expr,
        for_s=onset_s if query.for_s is None else query.for_s,
        keep_s=0.0 if ends else keep_s,
        labels={
            "severity": severity.word,
            "kneewatch": "cause",
            "cause": query.id,
        },
        annotations={
            "summary": f"{query.summary}: {{{{ $labels.instance }}}}",
            "description": f"{query.id}, confidence {{{{ $value | humanizePercentage }}}}.",
            "action": query.lever,
            "guide": ", ".join(query.guide),
        }
        | triage_link(plan),
    )
