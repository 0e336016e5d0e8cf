"""Recording and alerting rules for causes, and Alertmanager's inhibition rules between causes.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from kneewatch.dashboards.prometheus.alerts import link_annotations
from kneewatch.dashboards.prometheus.cause_query import CauseQuery, Spelled, confidence, scored
from kneewatch.dashboards.prometheus.gpu_alerts import (
    ENGINE_CLOCK,
    ENGINE_HEAT,
    ENGINE_XID,
    gpu_queries,
)
from kneewatch.dashboards.prometheus.gpu_series import BOARD, OWNER
from kneewatch.dashboards.prometheus.recording_rules import Recorded
from kneewatch.dashboards.prometheus.rule_group import (
    CAUSE,
    CAUSE_SEVERITY,
    CONFIDENCE,
    POOL,
    WORST_NAME,
    Alert,
    Group,
    Lasts,
    Plan,
    Record,
    count_text,
    firing,
    in_force_records,
    met,
    worst_text,
)
from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM, DOUBTFUL_BELOW
from kneewatch.diagnose.causes.ranking import BY_ID, CAUSES, EXPLAINS
from kneewatch.diagnose.causes.record import CauseRecord, Form, Say
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.fleet.outliers import CLOCK_BELOW, PEERS_MIN, SAME_ARRIVALS, SLOWER, TERMS
from kneewatch.rules.conditions import ToPromQL, nodes
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.quantities import Held
from kneewatch.rules.rule import Severity

FEW_RATIO = 0.25
"""Maximum share of the peers that may be slow at the same time. One peer may always be slow."""

HOLDS_WINDOWS = 5.0
"""Number of windows for which the condition must hold before the alert fires. Routers take a minute
to distribute the load evenly."""

SLOW, SHARE, BEHIND = (
    recorded(key) for key in ("itl_p50_over_peers", "arrival_over_peers", "behind_peers")
)
TAIL = recorded("itl_p99_s")


def _peer_records(plan: Plan, queries: Sequence[CauseQuery]) -> tuple[Record, ...]:
    """Recording rules for each engine's signals divided by the median of its peers, and for slow
    engines (value 1).

    An engine does not count as slow if one of the causes in `queries` explains its slow tokens.
    """
    slow = (
        f"({SLOW} >= {number(SLOWER)}) and ({_over(plan, recorded('itl_mean_s'))}"
        f" >= {number(SLOWER)}) unless ({SHARE} > {number(SAME_ARRIVALS)})"
    )
    if own := [query for query in queries if query.record.slows_tokens and not query.apart]:
        slow += f" unless on ({plan.engine}) {_sure(own)}"
    behind = f"({slow}) or ({_clock_low(plan)})" if plan.gpu_join else slow
    return (
        Record(SLOW, _over(plan, recorded("itl_p50_s"))),
        Record(SHARE, _over(plan, recorded("arrival_per_s"))),
        Record(BEHIND, f"({behind}) * 0 + 1"),
    )


def bad_node(plan: Plan, queries: Sequence[CauseQuery]) -> CauseQuery:
    """The query for the cause `bad_node`. It is concluded for two kinds of servers.

    The first kind generates tokens more slowly than its peers, although it does not get more
    requests and no other cause explains the slow tokens. The second kind has a lower GPU clock than
    its peers.
    """
    pool, beside = plan.pool, _beside_peers(plan)
    peers = f"count by ({pool}) ({recorded('running')})"
    few = f"count by ({pool}) ({BEHIND}) <= clamp_min({number(FEW_RATIO)} * {peers}, 1)"
    return CauseQuery(
        BY_ID["bad_node"],
        f"{BEHIND} and on ({pool}) ({peers} >= {PEERS_MIN}) and on ({pool}) ({few})",
        tuple(term for peer_term in TERMS if (term := scored(beside, peer_term)) is not None),
        -1.0,
        ((Severity.WARNING, ""),),
        "Replica slower than its peers at the same load",
        "Take it out of the pool and check its GPU (clocks, XID, temperature, power). Replace the "
        "node if nothing is found.",
        for_s=HOLDS_WINDOWS * plan.range_s,
        needs=_peer_records(plan, queries),
    )


def _beside_peers(plan: Plan) -> Spelled:
    """The signals of diagnose/fleet/outliers.py, as PromQL expressions."""
    pool = plan.pool
    worst = f"({TAIL} == on ({pool}) group_left () max by ({pool}) ({TAIL}))"
    alone = f"count by ({pool}) {worst} == 1 and count by ({pool}) ({TAIL}) > 1"
    of_gpus = {
        "gpu_clock_over_peers": ENGINE_CLOCK,
        "gpu_clock_low_over_peers": _clock_low(plan),
        "gpu_xid": ENGINE_XID,
        "gpu_hotter_than_peers_c": _over(plan, ENGINE_HEAT, "-"),
    }
    return Spelled(
        {
            "itl_p50_over_peers": SLOW,
            "arrival_over_peers": SHARE,
            "itl_p99_worst_s": f"({worst} and on ({pool}) ({alone}))",
            **(of_gpus if plan.gpu_join else {}),
        }
    )


def _clock_low(plan: Plan) -> str:
    """A PromQL expression for the GPU clock divided by the median of the peers. It has a value only
    where the clock is low under load."""
    works = f"({recorded('running_avg')} + {recorded('waiting')}) >= 1"
    return f"({_over(plan, ENGINE_CLOCK)} <= {number(CLOCK_BELOW)}) and ({works})"


def _over(plan: Plan, series: str, sign: str = "/") -> str:
    """A PromQL expression for a series divided by the median of its peers. With `sign="-"` the
    median is subtracted instead."""
    pool = plan.pool
    middle = f"quantile by ({pool}) (0.5, {series}) > 0"
    return f"({series} {sign} on ({pool}) group_left () ({middle}))"


# --- Recording and alerting rules for the causes --------------------------------------------------
#
# Everything is derived from the records in diagnose/causes. Causes that PromQL cannot conclude are
# listed with the reason by `left_out`.


def cause_queries(plan: Plan) -> tuple[CauseQuery, ...]:
    """The queries for all forms of all causes whose signals the plan records."""
    to = Recorded(plan)
    queries = [
        query
        for record in CAUSES
        for form in record.forms
        if not (record.sidecar or form.sidecar)
        for query in _queries(to, record, form)
    ]
    of_gpus = gpu_queries(plan) if plan.gpu_join else ()
    return (*of_gpus, *queries, bad_node(plan, queries))


def left_out(plan: Plan) -> Mapping[str, str]:
    """The causes for which this plan has no rule, each with the reason."""
    concluded = {query.record.id for query in cause_queries(plan)}
    return {
        record.id: record.sidecar
        for record in CAUSES
        if record.id not in concluded and record.sidecar
    }


def _queries(spelling: Recorded, record: CauseRecord, form: Form) -> Iterator[CauseQuery]:
    """Yields up to two queries for a form of a cause: one for engines on which it explains other
    causes, and one for engines on which it does not (`apart`).

    The two have alerts of different names, because Alertmanager mutes alerts by name.
    """
    to = ToPromQL(spelling)
    gates = [(form.gate, form.name, False)]
    if form.apart is not None:
        gates = [
            (form.gate & ~form.apart.assume(unknown=False), form.name, False),
            (form.gate & form.apart, form.name or "apart", True),
        ]
    levels = [(level.severity, level.when.compile(to)) for level in form.levels]
    terms = [scored(spelling, term) for term in form.terms]
    for gate, note, apart in gates:
        if (clause := gate.compile(to)).nowhere:
            continue
        yield CauseQuery(
            record,
            clause.vector,
            tuple(term for term in terms if term is not None),
            form.start.value,
            tuple((severity, when.vector) for severity, when in levels if not when.nowhere),
            form.summary,
            form.action or _plain(form.lever),
            note,
            apart=apart,
        )


def _plain(say: Say) -> str:
    if not isinstance(say, str):
        raise TypeError("a form whose lever is a function states its alert's action")
    return say


def cause_groups(plan: Plan) -> tuple[Group, Group]:
    """Two groups: the recording rules of all causes, and their alerts."""
    to, queries = Recorded(plan), cause_queries(plan)
    flags = {
        held.name: flag
        for record in CAUSES
        for held in nodes(record.forms)
        if isinstance(held, Held) and held.flagged and (flag := held.flag(to)) is not None
    }
    records = [
        *(Record(recorded(name), flag) for name, flag in flags.items()),
        *(record for query in queries for record in _records(query)),
        *(_severity(plan, query) for query in queries),
        *(Record(met(CAUSE), _reported(plan, query, queries), {"cause": query.series})
          for query in queries),
        *in_force_records(plan, CAUSE, "cause", {q.series: _lasts(plan, q) for q in queries}),
        *((_gpu_pods(plan), _alone(queries)) if _knows_pods(plan) else ()),
    ]  # fmt: skip
    alerts = [alert for query in queries for alert in _alerts(plan, query, queries)]
    return (
        Group("kneewatch-confidence", tuple(records)),
        Group("kneewatch-causes", tuple(alerts)),
    )


def cause_name(cause: str) -> str:
    """The name of the alert for a cause: `kv_pressure` becomes `KneewatchCauseKvPressure`."""
    return "KneewatchCause" + "".join(part.capitalize() for part in cause.split("_"))


def cause_alert(query: CauseQuery) -> str:
    """The name of the alerts for a form of a cause."""
    return cause_name(query.record.id) + query.note.capitalize()


def _records(query: CauseQuery) -> Iterator[Record]:
    """Yields the recording rules of a cause: the series that its gate reads, the gate, and the
    confidence.

    Evidence is computed only where the gate is open. Otherwise the arithmetic would cost as much
    for healthy engines as for sick ones.
    """
    gate = gate_of(query)
    yield from query.needs
    yield Record(gate, f"({query.when}) < bool -Inf")  # infinity times 0 would be NaN
    sure = confidence(query.start, query.terms, gate)
    yield Record(recorded(CONFIDENCE), sure, {"cause": query.series})


def gate_of(query: CauseQuery) -> str:
    """The name of a cause's gate series. It is 0 for each engine on which the cause is possible."""
    return recorded(f"gate:{query.series}")


def _severity(plan: Plan, query: CauseQuery) -> Record:
    """The recording rule for the severity of a cause itself, while it is concluded: 1 info, 2
    warning, 3 critical."""
    series = _series(CONFIDENCE, query)
    sure = f"({series} >= {number(DOUBTFUL_BELOW)})"
    options = [
        f"(({sure}{f' and on ({plan.engine}) ({when})' if when else ''}) * 0 + {int(severity)})"
        for severity, when in query.levels
        if severity != Severity.INFO
    ]
    options.append(f"(({series} >= {number(CONCLUDED_FROM)}) * 0 + {int(Severity.INFO)})")
    return Record(recorded(CAUSE_SEVERITY), " or ".join(options), {"cause": query.series})


def _series(key: str, query: CauseQuery) -> str:
    return f'{recorded(key)}{{cause="{query.series}"}}'


def _lasts(plan: Plan, query: CauseQuery) -> Lasts:
    record = query.record
    onset_s = record.onset_s.value * plan.scale
    return Lasts(onset_s if query.for_s is None else query.for_s, record.clear_s.value * plan.scale)


def _explained(query: CauseQuery, queries: Sequence[CauseQuery]) -> list[CauseQuery]:
    """The causes that are reported as effects of this cause."""
    under = EXPLAINS.get(query.record.id, ()) if not query.apart else ()
    return [other for other in queries if other.record.id in under]


def _reported(plan: Plan, query: CauseQuery, queries: Sequence[CauseQuery]) -> str:
    """A PromQL expression for the worst severity of a cause and of the causes that it explains. It
    has no value where another cause explains this cause."""
    series, on = _series(CONFIDENCE, query), f"on ({plan.engine})"
    worst = _series(CAUSE_SEVERITY, query)
    if explained := _explained(query, queries):
        names = "|".join(other.series for other in explained)
        sure = f"({series} >= {number(DOUBTFUL_BELOW)})"
        under = f'{recorded(CAUSE_SEVERITY)}{{cause=~"{names}"}}'
        worst = f"max by ({plan.engine}) ({worst} or ({under} and {on} {sure}))"
    above = [
        other
        for other in queries
        if query.record.id in EXPLAINS.get(other.record.id, ()) and not other.apart
    ]
    return f"{worst} unless {on} {_sure(above)}" if above else worst


def _sure(queries: Sequence[CauseQuery]) -> str:
    """A PromQL expression for the confidences of these causes. Doubtful ones are left out."""
    names = "|".join(query.series for query in queries)
    return f'({recorded(CONFIDENCE)}{{cause=~"{names}"}} >= {number(DOUBTFUL_BELOW)})'


# --- Causes that the alert about a pod's GPU explains ---------------------------------------------
#
# Without `gpu_join` no engine has a GPU cause. The alert about a GPU names the pod that uses it,
# and that pod gets no second alert for what the GPU alert explains.


GPU_PODS, ALONE = recorded("gpu:pod_severity"), recorded("cause_alone")
POD = ("cluster", "namespace", "pod")


def _knows_pods(plan: Plan) -> bool:
    return not plan.gpu_join and "pod" in plan.labels


def _gpu_pods(plan: Plan) -> Record:
    """The recording rule for the severity of the worst alert about the GPUs of each pod. The
    value stays for two windows, because the causes that the alert explains may end later than
    the alert."""
    lately_s = 2 * plan.range_s
    alerts = " or ".join(
        f'(max_over_time(ALERTS{{kneewatch="gpu", pod!="", at_work!="false", alertstate="firing",'
        f' severity="{severity.word}"}}[{duration(lately_s)}]) * 0 + {int(severity)})'
        for severity in (Severity.CRITICAL, Severity.WARNING)
    )
    uses = f"on ({BOARD}, namespace, pod) ({OWNER} > time() - {number(lately_s)})"
    return Record(GPU_PODS, f"max by ({', '.join(POD)}) (({alerts}) and {uses})")


def _alone(queries: Sequence[CauseQuery]) -> Record:
    """The recording rule for active causes, except causes that a GPU alert of the same pod
    explains. A GPU alert explains a cause only if the alert is at least as severe."""
    under = {*EXPLAINS["gpu_fault"], *EXPLAINS["gpu_throttled"]}
    names = "|".join(query.series for query in queries if query.record.id in under)
    of_gpus = f'{CAUSE}{{cause=~"{names}"}} <= on ({", ".join(POD)}) group_left () {GPU_PODS}'
    return Record(ALONE, f"{CAUSE} unless ({of_gpus})")


def _alerts(plan: Plan, query: CauseQuery, queries: Sequence[CauseQuery]) -> list[Alert]:
    """The alerts of a cause, one per possible severity. They also cover the severities of causes
    that this cause explains."""
    explained = _explained(query, queries)
    levels = {severity for concluded in (query, *explained) for severity, _ in concluded.levels}
    return [
        _alert(plan, query, severity) for severity in sorted(levels | {Severity.INFO}, reverse=True)
    ]


def _alert(plan: Plan, query: CauseQuery, severity: Severity) -> Alert:
    record = query.record
    in_force = ALONE if _knows_pods(plan) else CAUSE
    sure, engines = (
        f'{series}{{cause="{query.series}", {POOL}}}' for series in (recorded(CONFIDENCE), in_force)
    )
    worst = f"{sure} and topk(1, {sure} + {engines})"
    description = (
        f"{record.id} with confidence {{{{ value $worst | humanizePercentage }}}} on {WORST_NAME}, "
        "the worst replica."
    )
    return Alert(
        name=cause_alert(query),
        expr=firing(plan, f'{in_force}{{cause="{query.series}"}}', severity),
        for_s=0.0 if severity == Severity.CRITICAL else plan.settles_s,
        labels={
            "severity": severity.word,
            "kneewatch": "cause",
            "cause": record.id,
        },
        annotations={
            "summary": f"{query.summary}: {count_text(plan)}",
            "description": worst_text(plan, worst, description),
            "action": query.lever,
        }
        | link_annotations(plan, cause_page(plan.runbooks, record.id), worst),
    )


# --- Alertmanager's inhibition rules: one notification per root cause -----------------------------
#
# At one evaluation, the rules leave out what another cause explains. Between two evaluations, and
# while a cause is kept after its condition has ended, a pool's alert and what it explains can fire
# beside each other. An alert mutes none that is more severe than itself: that one may be about
# other replicas of the pool.


INHIBIT_FILE = "alertmanager/inhibit-rules.yml"
"""Path of the file. It has its own folder, so that a pattern such as `*.yml` for rule files does
not match it."""

INHIBIT_HEAD = (
    "# Generated by `kneewatch export prometheus-rules`. Add these rules to `inhibit_rules` of\n"
    "# alertmanager.yml (kube-prometheus-stack: alertmanager.config.inhibit_rules).\n"
)
OF_SERVERS = 'kneewatch=~"cause|finding|stage|burn"'
MILDER = (("critical", "critical|warning|info"), ("warning", "warning|info"))
"""For each severity of an alert, the severities that the alert may mute. An alert at info is
doubtful and mutes nothing."""


def inhibition_files(plan: Plan) -> dict[str, str]:
    """The file with the inhibition rules: text by file name."""
    document = {"inhibit_rules": inhibit_rules(plan)}
    return {INHIBIT_FILE: INHIBIT_HEAD + yaml.safe_dump(document, sort_keys=False, width=100_000)}


def inhibit_rules(plan: Plan) -> list[dict[str, Any]]:
    """Inhibition rules for Alertmanager. Each applies within one pool."""
    gone = 'alertname=~"KneewatchTargetDown|KneewatchPoolVanished"'
    rules = [
        # What is left of a pool carries the load of replicas that are down.
        _mutes([gone, 'severity="critical"'], [OF_SERVERS, 'severity=~"warning|info"'], plan),
        *(
            _mutes([OF_SERVERS, f'severity="{word}"'],
                   [OF_SERVERS, f'severity=~"{milder.partition("|")[2]}"'], plan, "alertname")
            for word, milder in MILDER
        ),
        # The alert about a GPU names the GPU and its repair.
        {
            "source_matchers": ['kneewatch="gpu"', 'severity=~"critical|warning"'],
            "target_matchers": ['kneewatch="cause"', 'cause=~"gpu_fault|gpu_throttled"'],
            "equal": ["cluster", "namespace", "cause"],
        },
    ]  # fmt: skip
    explaining = {query.record.id: query for query in cause_queries(plan) if not query.apart}
    for cause, query in explaining.items():
        names = [cause_alert(other) for other in cause_queries(plan)
                 if other.record.id == cause and not other.apart]  # fmt: skip
        for word, milder in MILDER:
            source = [f"alertname=~{_any(names)}", f'severity="{word}"']
            muted = f"severity=~{_any([milder])}"
            if under := EXPLAINS.get(cause, ()):
                explained = ['kneewatch="cause"', f"cause=~{_any(under)}", muted]
                rules.append(_mutes(source, explained, plan))
            if covers := query.record.covers:
                covered = ['kneewatch="finding"', f"rule=~{_any(covers)}", muted]
                rules.append(_mutes(source, covered, plan))
            if cause == "kv_pressure":
                rules.append(_mutes(source, ['kneewatch="stage"', muted], plan))
    return rules


def _mutes(source: Sequence[str], target: Sequence[str], plan: Plan, *more: str) -> dict[str, Any]:
    return {
        "source_matchers": list(source),
        "target_matchers": list(target),
        "equal": [*plan.pool_labels, *more],
    }


def _any(names: Iterable[str]) -> str:
    return f'"{"|".join(dict.fromkeys(names))}"'
