"""Recording rules for signals, derived quantities and cascade stages. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from kneewatch.collector.signals.expr import Dialect, HereOnly, InfoChanges, Ratio
from kneewatch.collector.signals.signal import Signal
from kneewatch.collector.signals.vllm import ONE_ENGINE
from kneewatch.dashboards.prometheus.baseline_rules import (
    BASELINED,
    COMPARED,
    compared_with,
    quiet_median,
    slow_series,
    usual_now,
)
from kneewatch.dashboards.prometheus.cause_query import Spelled
from kneewatch.dashboards.prometheus.rule_group import Group, Plan, Record
from kneewatch.diagnose.causes.ranking import CAUSES
from kneewatch.diagnose.learned.derived_signals import (
    DERIVED,
    OF_REQUESTS,
    RECENT_REQUESTS_MIN,
    RECENT_SCRAPES,
    RECENT_SHARE,
)
from kneewatch.diagnose.learned.slow_trends import SLOW, SPEC_ACCEPTED
from kneewatch.rules.cascade import (
    EVIDENCE,
    EXIT_HOLD_S,
    FALLS_TO,
    LOAD_HOLDS_AT,
    SAMPLES_KEPT,
    severities,
)
from kneewatch.rules.conditions import ToPromQL, nodes
from kneewatch.rules.facts import (
    EVERYWHERE,
    WIDE_RANGE_S,
    Spelling,
    duration,
    number,
    range_s,
    recorded,
    span_s,
)
from kneewatch.rules.quantities import RECENT, BaselineValue, Named, UsualValue

NAMED = tuple(
    dict.fromkeys(
        node for record in CAUSES for node in nodes(record.forms) if isinstance(node, Named)
    )
)
"""Named quantities that several causes use. Each has its own recorded series if PromQL can compute
it."""


# --- Recording rules: every signal that PromQL can express, and what is derived from several ------


REACHING = (
    "completed_per_s",
    "expected_wait_s",
    "generation_tokens_per_s",
    "preemption_per_s",
    "preemption_ratio_per_s",
)
"""Rates that stages and queues depend on. They have a value even if servers are scraped less often
than the rules were exported for. Histograms are not included, because computing their rates twice
would cost too much."""

CASCADE = ("cascade_stage", "cascade_severity", "work_fallen")
FOUND = ("gpu_memory_used_ratio", "gpu_engine_active_ratio")
"""GPU signals of an engine that findings judge, if labels assign GPUs to engines."""


def inexpressible(plan: Plan) -> list[Signal]:
    """The signals that PromQL cannot express."""
    return [signal for signal in plan.signals() if signal.expr.promql(plan.dialect) is None]


def why_inexpressible(signal: Signal) -> str:
    """A text with the reason why PromQL cannot express a signal."""
    of_engine = not isinstance(signal.expr, HereOnly) and signal.needs != ONE_ENGINE
    return "a number inside a label" if of_engine else "its metric has no engine label"


class Recorded(Spelling):
    """Spells conditions with the series that the rules of a plan record. `keys` are the signals and
    derived signals that are recorded for each engine."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            plan.dialect,
            targets=plan.targets,
            scale=plan.scale,
            interval_s=plan.interval_s,
            scrape_s=plan.scrape_s,
        )
        self._plan = plan
        of_gpus = FOUND if plan.gpu_join else ()
        slow = {key for slow in SLOW for key in slow_series(plan, slow)}
        self.keys = frozenset({*_recorded_signals(plan), *derived(plan), *slow, *CASCADE, *of_gpus})

    def series(self, key: str) -> str | None:
        """The recorded series of a signal. None if there is none."""
        return recorded(key) if key in self.keys else None

    def last_rate(self, metric: str) -> str:
        """A PromQL expression for the rate of a counter between its last two scrapes, by engine."""
        series = self.raw(metric, "_total")
        return _reaching(
            self._plan, lambda dialect: self.dialect.sum(f"irate({series}[{dialect.range}])")
        )


SHARED_FROM = 5
"""Minimum number of times that signals read the rate of a counter for the rate to be recorded
separately."""


def signal_group(plan: Plan) -> Group:
    """Recording rules with a series for each signal, per engine. If a rule sees the results of
    earlier rules at the same moment (`plan.ordered`), a rate that several signals read is computed
    only once."""
    queries = {s: query for s in plan.signals() if (query := _query(plan, s)) is not None}
    shared = _shared_rates(plan, queries.values()) if plan.ordered else {}
    rules = [Record(name, rate) for rate, name in shared.items()]
    before: dict[str, str] = {}
    for signal, query in queries.items():
        for rate, name in shared.items():
            query = query.replace(rate, name)
        if isinstance(signal.expr, Ratio):
            for part, name in before.items():
                query = query.replace(f"({part})", name)
        rules.append(Record(recorded(signal.key), _spread(plan, signal, query)))
        if plan.ordered:
            before[rules[-1].expr] = rules[-1].name
    return Group("kneewatch-signals", tuple(rules))


def _shared_rates(plan: Plan, queries: Iterable[str]) -> dict[str, str]:
    """Maps PromQL expressions to names of recorded series, for the rates over the window that are
    recorded separately.

    Such a rate includes all label sets of its counter, and `queries` contain it at least
    SHARED_FROM times.
    """
    selector = re.escape(f"{{{plan.selector}}}" if plan.selector else "")
    prefix, window = re.escape(plan.prefix), re.escape(plan.dialect.range)
    rate = re.compile(
        rf"sum by \([^()]*\) \(rate\({prefix}(\w+_(?:total|sum|count)){selector}\[{window}\]\)\)"
    )
    reads = Counter(match.group(0, 1) for query in queries for match in rate.finditer(query))
    return {
        expr: recorded(f"{counter}:rate")
        for (expr, counter), times in reads.items()
        if times >= SHARED_FROM
    }


def _query(plan: Plan, signal: Signal) -> str | None:
    if signal.key in REACHING:
        return _reaching(plan, lambda dialect: signal.expr.promql(dialect) or "")
    return signal.expr.promql(plan.dialect)


def _reaching(plan: Plan, query: Callable[[Dialect], str]) -> str:
    """A PromQL expression for `query` that also works if targets are scraped only once a minute.

    If the window contains fewer than two scrapes, the expression uses a range of WIDE_RANGE_S
    instead, which contains four scrapes at one-minute intervals. The wide range would still return
    engines that no longer exist, so these are removed.
    """
    near = query(plan.dialect)
    if plan.range_s >= WIDE_RANGE_S:
        return near
    wide = query(replace(plan.dialect, range_s=WIDE_RANGE_S))
    return f"({near} or ({wide} and {EVERYWHERE}))"


def _spread(plan: Plan, signal: Signal, query: str) -> str:
    """The query for a signal, per engine. If a page has the signal only once for all engines (the
    running adapters), the value is copied to each engine."""
    if not isinstance(signal.expr, InfoChanges):
        return query
    per_engine = f"({recorded('running')} * 0 + 1)"
    return f"{per_engine} * on ({plan.process}) group_left () ({query})"


def derived_group(plan: Plan) -> Group:
    """Recording rules for derived signals: counts in the window, quiet medians, and drifts from
    these medians."""
    return Group(
        "kneewatch-derived",
        tuple(Record(recorded(key), expr) for key, expr in derived(plan).items()),
    )


def derived(plan: Plan) -> Mapping[str, str]:
    """The PromQL of each derived signal by key. A signal comes after the signals that it reads."""
    to = _inputs_of_derived(plan)
    exprs = _recent(plan)
    for key in COMPARED:
        exprs[f"{key}:quiet"] = quiet_median(plan, key)
    for signal in DERIVED:
        expr = None if signal.of is None else signal.of.promql(to)
        if expr is not None:
            exprs[signal.key] = expr
    for key in BASELINED:
        exprs[BaselineValue(key).name] = compared_with(plan, key)
    return exprs


def _inputs_of_derived(plan: Plan) -> Spelled:
    """The recorded signals that derived signals read, and the baselines with which these are
    compared."""
    usual = SPEC_ACCEPTED.signal
    return Spelled(
        {
            **{key: recorded(key) for key in _recorded_signals(plan)},
            **{BaselineValue(key).name: f"({compared_with(plan, key)})" for key in COMPARED},
            UsualValue(usual).name: f"max by ({plan.engine}) ({usual_now(usual)})",
        },
        plan.dialect,
        plan.targets,
    )


def _recorded_signals(plan: Plan) -> frozenset[str]:
    """The keys of signals that have a recorded series for each engine."""
    return frozenset(s.key for s in plan.signals() if s.expr.promql(plan.dialect) is not None)


def _recent(plan: Plan) -> dict[str, str]:
    """PromQL by key for signals over the newest part of the window (`recent` in
    derived_signals.py), and for quantities that causes compute from these signals."""
    quarter_s = max(RECENT_SHARE * plan.range_s, RECENT_SCRAPES * plan.scrape_s)
    quarter = _within(plan, quarter_s)
    half = _within(plan, max(quarter_s, 2 * RECENT_SHARE * plan.range_s))
    exprs: dict[str, str] = {}
    for key, name in RECENT.items():
        signal = _signal(plan, key)
        options = [
            f"(({signal.expr.promql(dialect)}) and"
            f" {number(dialect.range_s)} * ({arrivals}) >= {number(RECENT_REQUESTS_MIN)})"
            for dialect in (quarter, half)
            if (arrivals := _signal(plan, "arrival_per_s").expr.promql(dialect))
        ]
        exprs[name] = (
            " or ".join(dict.fromkeys(options))
            if key in OF_REQUESTS
            else _spread(plan, signal, signal.expr.promql(quarter) or "")
        )
    to = Spelled({key: recorded(key) for key in (*_recorded_signals(plan), *exprs)})
    combined = {named.key: named.of.promql(to) for named in NAMED}
    return exprs | {key: expr for key, expr in combined.items() if expr is not None}


def _within(plan: Plan, range_s: float) -> Dialect:
    return replace(plan.dialect, range_s=min(range_s, plan.range_s))


def _signal(plan: Plan, key: str) -> Signal:
    return next(signal for signal in plan.signals() if signal.key == key)


# --- The stages of the KV memory-pressure cascade -------------------------------------------------
#
# The same conditions as rules/cascade.py. A stage holds while its evidence was seen within the
# hold; a restarted process has nothing to hold.


def stage_group(plan: Plan) -> Group:
    """Recording rules for the evidence, the stage and its severity; each has its own series."""
    to, none = ToPromQL(Recorded(plan)), f"{recorded('kv_usage_ratio')} * 0"
    stages = [f"(({when.compile(to).vector}) * 0 + {stage})" for stage, when in EVIDENCE]
    return Group(
        "kneewatch-cascade",
        (
            Record(recorded("in_flight_avg"), _sum("running_avg", "waiting_avg")),
            Record(recorded("work_fallen"), _work_fallen(plan)),
            Record(recorded("cascade_evidence"), f"{' or '.join(stages)} or ({none})"),
            Record(recorded("cascade_stage"), _held(plan, "cascade_evidence")),
            Record(recorded("cascade_severity_evidence"), _severity(plan, to)),
            Record(
                recorded("cascade_severity"),
                f"(({_held(plan, 'cascade_severity_evidence')}) and"
                f" {recorded('cascade_stage')} >= 2) or {recorded('cascade_severity_evidence')}",
            ),
        ),
    )


def _work_fallen(plan: Plan) -> str:
    """A PromQL expression that is 1 if throughput has fallen: for half a window, tokens/s were
    below their median of earlier windows, while the load stayed."""
    generated, load = recorded("generation_tokens_per_s"), recorded("in_flight_avg")
    half = plan.range_s / 2
    earlier = f"[{duration(SAMPLES_KEPT * half)}] offset {duration(plan.range_s)}"
    fallen = (
        f"({generated} < bool {number(FALLS_TO)} * quantile_over_time(0.5, {generated}{earlier}))"
        f" * ({load} >= bool {number(LOAD_HOLDS_AT)} * quantile_over_time(0.5, {load}{earlier}))"
    )
    return f"min_over_time(({fallen})[{duration(half)}:{duration(plan.interval_s)}])"


def _severity(plan: Plan, to: ToPromQL) -> str:
    """A PromQL expression for the severity of the stage: 0 ok, 1 info, 2 warning, 3 critical. It is
    the severity at this moment; `_held` then keeps it for a while."""
    evicting = next(rule for rule in plan.rules() if rule.id == "KV-EVICT")
    levels = [
        f"(({when.compile(to).vector or recorded('cascade_stage')}) * 0 + {int(severity)})"
        for severity, when in severities(evicting)
    ]
    return " or ".join(levels)


def _held(plan: Plan, key: str) -> str:
    """A PromQL expression for the maximum of a series within the hold time. If no request is in
    flight, half the hold time is used."""
    series, hold_s = recorded(key), span_s(EXIT_HOLD_S * plan.scale, plan.sample_s)
    selector = f"{{{plan.selector}}}" if plan.selector else ""
    seen_s = range_s(hold_s, plan.scrape_s)
    restarted = f"(changes(process_start_time_seconds{selector}[{duration(seen_s)}]) > 0)"
    busy = f"({_sum('running', 'waiting')} > 0)"
    unheld = f"unless on ({plan.process}) {restarted}"
    return (
        f"((max_over_time({series}[{duration(hold_s)}]) and {busy})"
        f" or max_over_time({series}[{duration(hold_s / 2)}])) {unheld} or {series}"
    )


def _sum(left: str, right: str) -> str:
    return f"({recorded(left)} + {recorded(right)})"
