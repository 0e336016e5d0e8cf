"""Causes as recording and alerting rules: confidence recorded, severities and folding alerted.
Pure.

Everything here is derived from the records in diagnose/causes. What PromQL cannot conclude is left
out with the record's own reason (`left_out`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.dashboards.prometheus.findings import triage_link
from kneewatch.dashboards.prometheus.gpus.engine import gpu_queries
from kneewatch.dashboards.prometheus.model import Alert, Group, Plan, Record
from kneewatch.dashboards.prometheus.nodes import bad_node, peer_records
from kneewatch.dashboards.prometheus.query import CauseQuery, confidence, scored
from kneewatch.dashboards.prometheus.recording import CONFIDENCE, Recorded
from kneewatch.diagnose.case import CONCLUDED_FROM, DOUBTFUL_BELOW
from kneewatch.diagnose.causes import CAUSES, EXPLAINS
from kneewatch.diagnose.causes.record import CauseRecord, Form, Say
from kneewatch.rules.conditions import ToPromQL, nodes
from kneewatch.rules.facts import number, recorded
from kneewatch.rules.model import Severity
from kneewatch.rules.quantities import Held

SEVERITY = "cause_severity"


def cause_queries(plan: Plan) -> tuple[CauseQuery, ...]:
    """Every form of every cause that a plan's series can show."""
    to = Recorded(plan)
    made = [
        query
        for record in CAUSES
        for form in record.forms
        if not (record.sidecar or form.sidecar) and (query := _query(to, record, form)) is not None
    ]
    of_gpus = gpu_queries(plan) if plan.gpu_join else ()
    return (*of_gpus, *made, bad_node(plan))


def left_out(plan: Plan) -> Mapping[str, str]:
    """The causes that a plan's rules do not conclude, and why."""
    concluded = {query.record.id for query in cause_queries(plan)}
    return {
        record.id: record.sidecar
        for record in CAUSES
        if record.id not in concluded and record.sidecar
    }


def _query(spelling: Recorded, record: CauseRecord, form: Form) -> CauseQuery | None:
    to = ToPromQL(spelling)
    gate = form.gate.compile(to)
    if gate.nowhere:
        return None
    levels = [(level.severity, level.when.compile(to)) for level in form.levels]
    return CauseQuery(
        record,
        gate.vector,
        tuple(made for term in form.terms if (made := scored(spelling, term)) is not None),
        form.start.value,
        tuple((severity, when.vector) for severity, when in levels if not when.nowhere),
        form.summary,
        form.action or _plain(form.lever),
        form.guide,
        form.name,
        apart=form.apart is not None,
    )


def _plain(say: Say) -> str:
    if not isinstance(say, str):
        raise TypeError("a form whose lever is a function states its alert's action")
    return say


def cause_groups(plan: Plan) -> tuple[Group, Group]:
    """The recording rules of all causes, and their alerts."""
    to, queries = Recorded(plan), cause_queries(plan)
    flags = {
        held.name: flag
        for record in CAUSES
        for held in nodes(record.forms)
        if isinstance(held, Held) and held.flagged and (flag := held.flag(to)) is not None
    }
    records = [
        *(Record(recorded(name), flag) for name, flag in flags.items()),
        *peer_records(plan),
        *(_record(query) for query in queries),
        *(_severity(plan, query) for query in queries),
    ]
    alerts = [alert for query in queries for alert in _alerts(plan, query, queries)]
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


def _severity(plan: Plan, query: CauseQuery) -> Record:
    """The severity of a cause by itself: 1 info, 2 warning, 3 critical, while it is concluded."""
    series = _series(CONFIDENCE, query)
    sure = f"({series} >= {number(DOUBTFUL_BELOW)})"
    options = [
        f"(({sure}{f' and on ({plan.engine}) ({when})' if when else ''}) * 0 + {int(severity)})"
        for severity, when in query.levels
        if severity != Severity.INFO
    ]
    options.append(f"(({series} >= {number(CONCLUDED_FROM)}) * 0 + {int(Severity.INFO)})")
    return Record(recorded(SEVERITY), " or ".join(options), {"cause": query.series})


def _series(key: str, query: CauseQuery) -> str:
    return f'{recorded(key)}{{cause="{query.series}"}}'


def _alerts(plan: Plan, query: CauseQuery, queries: Sequence[CauseQuery]) -> list[Alert]:
    """An alert for each severity that a cause may have, by itself or by what it explains; none
    while something else explains it."""
    series, on = _series(CONFIDENCE, query), f"on ({plan.engine})"
    above = [cause for cause, others in EXPLAINS.items() if query.record.id in others]
    under = EXPLAINS.get(query.record.id, ()) if not query.apart else ()
    explained = [other for other in queries if other.record.id in under]
    worst = _series(SEVERITY, query)
    if explained:
        names = "|".join(other.series for other in explained)
        sure = f"({series} >= {number(DOUBTFUL_BELOW)})"
        worst = (
            f"max by ({plan.engine}) ({worst} or"
            f' ({recorded(SEVERITY)}{{cause=~"{names}"}} and {on} {sure}))'
        )
    told = ""
    if above:
        names = "|".join(other.series for other in queries
                         if other.record.id in above and not other.apart)  # fmt: skip
        told = f' unless {on} ({recorded(CONFIDENCE)}{{cause=~"{names}"}}'
        told += f" >= {number(DOUBTFUL_BELOW)})"
    levels = {severity for each in (query, *explained) for severity, _ in each.levels}
    return [
        _alert(plan, query, severity, f"({series} and {on} ({worst} == {int(severity)})){told}")
        for severity in sorted(levels | {Severity.INFO}, reverse=True)
    ]


def _alert(plan: Plan, query: CauseQuery, severity: Severity, expr: str) -> Alert:
    record = query.record
    onset_s = record.onset_s.value * plan.scale
    return Alert(
        name=cause_name(record.id) + query.note.capitalize(),
        expr=expr,
        for_s=onset_s if query.for_s is None else query.for_s,
        keep_s=record.clear_s.value * plan.scale,
        labels={
            "severity": severity.word,
            "kneewatch": "cause",
            "cause": record.id,
        },
        annotations={
            "summary": f"{query.summary}: {{{{ $labels.instance }}}}",
            "description": f"{record.id}, confidence {{{{ $value | humanizePercentage }}}}.",
            "action": query.lever,
            "guide": ", ".join(query.guide),
        }
        | triage_link(plan),
    )
