"""Recording rules for signals, hour-of-week baselines, cascade stages and hourly totals. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kneewatch.collector.signals.expr import Dialect, HereOnly, InfoChanges, Ratio
from kneewatch.collector.signals.signal import Signal
from kneewatch.collector.signals.vllm import (
    DECODE,
    E2E,
    ITL,
    ONE_ENGINE,
    OUTPUT_LENGTH,
    PREFILL,
    PROMPT_LENGTH,
    QUEUE,
    TTFT,
    XFER,
)
from kneewatch.dashboards.prometheus.cause_query import Spelled
from kneewatch.dashboards.prometheus.rule_group import FINDING, POOL_LABELS, Group, Plan, Record
from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM
from kneewatch.diagnose.causes.ranking import CAUSES
from kneewatch.diagnose.learned.derived_signals import (
    DERIVED,
    OF_REQUESTS,
    RECENT_REQUESTS_MIN,
    RECENT_SCRAPES,
    RECENT_SHARE,
)
from kneewatch.diagnose.learned.slow_trends import (
    HOST_MEMORY,
    SLOW,
    SPEC_ACCEPTED,
    STEPS,
    WORK,
    SlowQuantity,
)
from kneewatch.rules.baseline import (
    FAMILIES,
    HOUR_S,
    MORE_IS_BETTER,
    QUEUE_MOVES,
    QUIET_WAITING,
    SAMPLES_MAX,
    SAMPLES_MIN,
    SCRAPES_MIN,
    SPREAD_MAX,
    STAGE_MOVES,
    TRACKED,
    WEEK_S,
    WEEKS,
    WEEKS_MIN,
)
from kneewatch.rules.cascade import (
    EVICTS,
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
from kneewatch.rules.rule import Severity

STEP_S = 300.0
"""How often the rules check whether an hour has begun."""

NEW_HOUR = f"(minute() < {round(STEP_S / 60)})"
"""True at the first evaluation in an hour: groups are evaluated at some second of their interval,
which is not the hour's own."""

BASELINED = tuple(
    dict.fromkeys(
        node.key
        for record in CAUSES
        for form in record.forms
        if not (record.sidecar or form.sidecar)
        for node in nodes((form.gate, form.apart, form.terms, form.levels))
        if isinstance(node, BaselineValue)
    )
)
"""Signals that causes compare with their normal values."""

_EXPRESSIONS = tuple(signal.of for signal in DERIVED)

COMPARED = tuple(
    dict.fromkeys(
        (*(node.key for node in nodes(_EXPRESSIONS) if isinstance(node, BaselineValue)), *BASELINED)
    )
)
"""Signals that are compared with their baselines."""

NAMED = tuple(
    dict.fromkeys(
        node for record in CAUSES for node in nodes(record.forms) if isinstance(node, Named)
    )
)
"""Quantities of several causes that have a recorded series of their own, where PromQL can."""

SEASONAL = tuple(dict.fromkeys((*COMPARED, SPEC_ACCEPTED.signal)))
"""Signals whose usual value at this hour of the week is recorded."""

SEASON = "season"
"""A label of usual values only, so that `or` keeps them beside the quiet median."""


def season_group(plan: Plan) -> Group:
    """Rules for the median of each hour, and for the usual value of the hour that begins."""
    hours = [Record(recorded(f"{key}:hour"), _hour(recorded(key))) for key in SEASONAL]
    usual = [
        Record(recorded(f"{key}:usual"), _usual(plan, recorded(f"{key}:hour")), {SEASON: "week"})
        for key in SEASONAL
    ]
    return Group("kneewatch-seasons", (*hours, *usual), interval_s=STEP_S)


def compared_with(plan: Plan, key: str) -> str:
    """What a signal is compared with: its quiet median or the usual value at this hour of the week,
    whichever is worse; the other where one is missing."""
    worse = "min" if key in MORE_IS_BETTER else "max"
    return f"{worse} by ({plan.engine}) ({recorded(f'{key}:quiet')} or {_usual_now(key)})"


def _usual_now(key: str) -> str:
    return f"last_over_time({recorded(f'{key}:usual')}[{duration(HOUR_S + STEP_S)}])"


def _hour(series: str) -> str:
    ended = f"{series}[{duration(HOUR_S)}]"
    enough = f"count_over_time({ended}) >= {SCRAPES_MIN}"
    return f"(quantile_over_time(0.5, {ended}) and {enough}) and on () {NEW_HOUR}"


def _usual(plan: Plan, hour: str) -> str:
    """The median of the weeks, where there are enough that agree."""
    weeks = " or ".join(_week(hour, week) for week in range(1, WEEKS + 1))
    middle = f"quantile by ({plan.engine}) (0.5, {weeks})"
    apart = f"abs(({weeks}) - on ({plan.engine}) group_left () ({middle}))"
    agree = f"quantile by ({plan.engine}) (0.5, {apart}) <= {number(SPREAD_MAX)} * abs({middle})"
    enough = f"count by ({plan.engine}) ({weeks}) >= {WEEKS_MIN}"
    return f"({middle}) and ({agree}) and ({enough}) and on () {NEW_HOUR}"


def _week(hour: str, week: int) -> str:
    """The hour that begins now, `week` weeks ago. It was recorded at its end, at another second of
    the step than today's."""
    ago_s = week * WEEK_S - HOUR_S
    around = f"{hour}[{duration(2 * STEP_S)}] offset {duration(ago_s - STEP_S)}"
    return f'label_replace(last_over_time({around}), "week", "{week}", "", "")'


# --- Trends over hours ----------------------------------------------------------------------------

SLOW_STEP_S = 120.0
"""How often trends over hours are computed: often enough for an instant query to find them."""


def slow_group(plan: Plan) -> Group:
    """The levels of slow quantities, and the line through those of some hours
    (diagnose/learned/slow_trends.py)."""
    rules = tuple(
        Record(recorded(key), expr) for slow in SLOW for key, expr in _slow(plan, slow).items()
    )
    return Group("kneewatch-slow", rules, interval_s=SLOW_STEP_S)


def _slow(plan: Plan, slow: SlowQuantity) -> dict[str, str]:
    level, growth = recorded(slow.level), recorded(slow.growth)
    span, whole = duration(slow.span_s), duration(STEPS * slow.span_s)
    seen = f"and ({level} offset {whole})"
    source = _SOURCES.get(slow.signal)
    signal = recorded(slow.signal)
    exprs = {} if source is None else {slow.signal: source(plan)}
    return exprs | {
        slow.level: f"{slow.fold}_over_time({signal}[{span}])",
        slow.growth: f"(deriv({level}[{whole}]) * {number(STEPS * slow.span_s)}) {seen}",
        slow.before: f"avg_over_time({level}[{whole}]) - {growth} / 2",
        slow.straight: f"{growth} * {growth} / 12 / (stdvar_over_time({level}[{whole}]) > 0)",
        slow.late: f"({level} - ({level} offset {span})) * {STEPS} / ({growth} != 0)",
    }


def _work(plan: Plan) -> str:
    """Tokens of the running requests; 0 where none runs, because the lengths are unknown then."""
    del plan
    running = recorded("running_avg")
    lengths = f"({recorded('prompt_tokens_mean')} + {recorded('output_tokens_mean')})"
    return f"({running} == 0) or ({running} * {lengths})"


def _host_memory(plan: Plan) -> str:
    """The process's resident memory, for each of its engines."""
    selector = f"{{{plan.selector}}}" if plan.selector else ""
    resident = f"max by ({plan.process}) (process_resident_memory_bytes{selector})"
    return f"({EVERYWHERE} * 0 + 1) * on ({plan.process}) group_left () {resident}"


_SOURCES: Mapping[str, Callable[[Plan], str]] = {
    WORK.signal: _work,
    HOST_MEMORY.signal: _host_memory,
}
"""Slow quantities that are not recorded signals."""


# --- Recording rules: every signal that PromQL can express, and what is derived from several ------


CONFIDENCE, CAUSE_SEVERITY = "cause_confidence", "cause_severity"
FAMILY_SERIES = ("disturbed", "sampled")

REACHING = (
    "completed_per_s",
    "expected_wait_s",
    "generation_tokens_per_s",
    "preemption_per_s",
    "preemption_ratio_per_s",
)
"""Rates that stages and queues are concluded from: they also have a value where servers are scraped
less often than the rules were exported for. Computing a histogram's rates twice would cost too
much."""

CASCADE = ("cascade_stage", "cascade_severity", "work_fallen")
FOUND = ("gpu_memory_used_ratio", "gpu_engine_active_ratio")
"""Signals of an engine's GPUs that findings judge, where labels join them."""


def inexpressible(plan: Plan) -> list[Signal]:
    """Signals that PromQL cannot express."""
    return [signal for signal in plan.signals() if signal.expr.promql(plan.dialect) is None]


def why_inexpressible(signal: Signal) -> str:
    """Why PromQL cannot express a signal, as text."""
    of_engine = not isinstance(signal.expr, HereOnly) and signal.needs != ONE_ENGINE
    return "a number inside a label" if of_engine else "its metric has no engine label"


class Recorded(Spelling):
    """Spells conditions with the series that a plan's rules record. `keys` are the signals and
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
        slow = {key for slow in SLOW for key in _slow(plan, slow)}
        self.keys = frozenset({*_recorded_signals(plan), *derived(plan), *slow, *CASCADE, *of_gpus})

    def series(self, key: str) -> str | None:
        """The recorded series of a signal; None where there is none."""
        return recorded(key) if key in self.keys else None

    def last_rate(self, metric: str) -> str:
        """The rate of a counter between its last two scrapes, by engine."""
        series = self.raw(metric, "_total")
        return _reaching(
            self._plan, lambda dialect: self.dialect.sum(f"irate({series}[{dialect.range}])")
        )


SHARED_FROM = 5
"""A counter's rate that is read this often is recorded once."""


def signal_group(plan: Plan) -> Group:
    """A series for each signal, per engine. What several read is computed once, where a rule sees
    what others recorded at the same moment."""
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
    """The rates of whole counters over the window that several queries read, with the names they
    are recorded under."""
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
    """A query on the window, or where no two scrapes are in it on a range that holds four scrapes
    of a minute; not for an engine that is gone."""
    near = query(plan.dialect)
    if plan.range_s >= WIDE_RANGE_S:
        return near
    wide = query(replace(plan.dialect, range_s=WIDE_RANGE_S))
    return f"({near} or ({wide} and {EVERYWHERE}))"


def _spread(plan: Plan, signal: Signal, query: str) -> str:
    """A signal that a page has once for all its engines (the running adapters), per engine."""
    if not isinstance(signal.expr, InfoChanges):
        return query
    per_engine = f"({recorded('running')} * 0 + 1)"
    return f"{per_engine} * on ({plan.process}) group_left () ({query})"


def derived_group(plan: Plan) -> Group:
    """Derived signals: counts in the window, quiet medians, and drifts against them."""
    return Group(
        "kneewatch-derived",
        tuple(Record(recorded(key), expr) for key, expr in derived(plan).items()),
    )


def derived(plan: Plan) -> Mapping[str, str]:
    """The PromQL of each derived signal by key, inputs before the signals that read them."""
    to = _inputs_of_derived(plan)
    exprs = _recent(plan)
    for key in COMPARED:
        exprs[f"{key}:quiet"] = _quiet(plan, key)
    for signal in DERIVED:
        expr = None if signal.of is None else signal.of.promql(to)
        if expr is not None:
            exprs[signal.key] = expr
    for key in BASELINED:
        exprs[BaselineValue(key).name] = compared_with(plan, key)
    return exprs


def _inputs_of_derived(plan: Plan) -> Spelled:
    """The recorded signals that derived signals read, and the baselines they are compared with."""
    usual = SPEC_ACCEPTED.signal
    return Spelled(
        {
            **{key: recorded(key) for key in _recorded_signals(plan)},
            **{BaselineValue(key).name: f"({compared_with(plan, key)})" for key in COMPARED},
            UsualValue(usual).name: f"max by ({plan.engine}) ({_usual_now(usual)})",
        },
        plan.dialect,
        plan.targets,
    )


def _recorded_signals(plan: Plan) -> frozenset[str]:
    """Keys of the signals that have a recorded series for each engine."""
    return frozenset(s.key for s in plan.signals() if s.expr.promql(plan.dialect) is not None)


def _recent(plan: Plan) -> dict[str, str]:
    """Signals on the window's newest part (`recent` in derived_signals.py), and the quantities that
    causes compute from them."""
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


def calm_group(plan: Plan) -> Group:
    """Rules for the values that quiet medians are taken of: those of scrapes in which nothing moved
    their family. Evaluated after the alerts, because a scrape with a finding at warning is not
    quiet.

    Evaluated after the alerts, for a finding at warning is not quiet.
    """
    seen, arrivals = map(recorded, ("seen", "arrival_per_s"))
    half, window = duration(plan.range_s / 2), duration(plan.range_s)
    rules = [
        # A target that has just appeared has no quiet yet.
        Record(seen, f"({arrivals} > 0) and ({recorded('running')} offset {half})"),
    ]
    for family in FAMILIES:
        label = {"family": family}
        disturbed, sampled = (f'{recorded(key)}{{family="{family}"}}' for key in FAMILY_SERIES)
        on = f"unless on ({plan.engine})"
        calm = f"{seen} {on} max_over_time({disturbed}[{window}])"
        if plan.ordered:  # one sample each half window, as the sidecar takes them
            spaced = duration((plan.range_s - plan.interval_s) / 2)
            calm = f"({calm}) {on} last_over_time({sampled}[{spaced}])"
        rules.append(Record(recorded("disturbed"), _disturbed(plan, family), label))
        rules.append(Record(recorded("sampled"), calm, label))
        rules += [
            Record(recorded(f"{key}:calm"), f"{recorded(key)} and on ({plan.engine}) {sampled}")
            for key in TRACKED[family]
            if key in COMPARED
        ]
    return Group("kneewatch-calm", tuple(rules))


def _disturbed(plan: Plan, family: str) -> str:
    """Where something moves a family of signals: a cause, a finding at warning, the cascade or a
    queue."""
    causes = "|".join(record.id for record in CAUSES if family in record.moves)
    rules = "|".join(rule.id for rule in plan.rules() if family in rule.moves)
    concluded = f'{recorded(CONFIDENCE)}{{cause=~"({causes})(:.*)?"}} >= {number(CONCLUDED_FROM)}'
    warned = f'{FINDING}{{rule=~"{rules}"}} >= {int(Severity.WARNING)}'
    parts = [f"(max by ({plan.engine}) ({concluded}))"]
    # Without findings a plan is lean: what they alone show is then no disturbance.
    parts += [f"(max by ({plan.engine}) ({warned}))"] if rules and not plan.lean else []
    if family in STAGE_MOVES:
        parts.append(f"({recorded('cascade_stage')} >= {EVICTS})")
    if family in QUEUE_MOVES:
        parts.append(f"({recorded('waiting_avg')} >= {number(QUIET_WAITING)})")
    return " or ".join(parts)


def _quiet(plan: Plan, key: str) -> str:
    """The median of quiet values; outside quiet times the last known median."""
    remembered_s = SAMPLES_MAX * plan.range_s / 2
    calm = f"{recorded(f'{key}:calm')}[{duration(remembered_s)}]"
    dense = plan.range_s / 2 / plan.interval_s
    enough = SAMPLES_MIN if plan.ordered else max(1, round(SAMPLES_MIN * dense))
    return (
        f"(quantile_over_time(0.5, {calm}) and count_over_time({calm}) >= {enough})"
        f" or {recorded(f'{key}:quiet')}"
    )


# --- The stages of the KV memory-pressure cascade -------------------------------------------------
#
# The same conditions as rules/cascade.py. A stage holds while its evidence was seen within the
# hold; a restarted process has nothing to hold.


def stage_group(plan: Plan) -> Group:
    """Evidence, stage and severity, a series each."""
    return Group(
        "kneewatch-cascade",
        (
            Record(recorded("in_flight_avg"), _sum("running_avg", "waiting_avg")),
            Record(recorded("work_fallen"), _work_fallen(plan)),
            Record(recorded("cascade_evidence"), _evidence(plan)),
            Record(recorded("cascade_stage"), _held(plan, "cascade_evidence")),
            Record(recorded("cascade_severity_evidence"), _severity(plan)),
            Record(
                recorded("cascade_severity"),
                f"(({_held(plan, 'cascade_severity_evidence')}) and"
                f" {recorded('cascade_stage')} >= 2) or {recorded('cascade_severity_evidence')}",
            ),
        ),
    )


def _evidence(plan: Plan) -> str:
    """The stage that the evidence of this moment shows: the conditions of rules/cascade.py."""
    to = ToPromQL(Recorded(plan))
    stages = [f"(({when.compile(to).vector}) * 0 + {stage})" for stage, when in EVIDENCE]
    return f"{' or '.join(stages)} or ({recorded('kv_usage_ratio')} * 0)"


def _work_fallen(plan: Plan) -> str:
    """1 where tokens have been below their median of earlier windows for half a window while the
    load holds."""
    generated, load = recorded("generation_tokens_per_s"), recorded("in_flight_avg")
    half = plan.range_s / 2
    earlier = f"[{duration(SAMPLES_KEPT * half)}] offset {duration(plan.range_s)}"
    fallen = (
        f"({generated} < bool {number(FALLS_TO)} * quantile_over_time(0.5, {generated}{earlier}))"
        f" * ({load} >= bool {number(LOAD_HOLDS_AT)} * quantile_over_time(0.5, {load}{earlier}))"
    )
    return f"min_over_time(({fallen})[{duration(half)}:{duration(plan.interval_s)}])"


def _severity(plan: Plan) -> str:
    """0 ok, 1 info, 2 warning, 3 critical, before the hold."""
    to = ToPromQL(Recorded(plan))
    evicting = next(rule for rule in plan.rules() if rule.id == "KV-EVICT")
    levels = [
        f"(({when.compile(to).vector or recorded('cascade_stage')}) * 0 + {int(severity)})"
        for severity, when in severities(evicting)
    ]
    return " or ".join(levels)


def _held(plan: Plan, key: str) -> str:
    """The highest of a series within the hold; half of it once no request is left."""
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


# --- What counters and histograms gained, summed over each tier's engines, for long reports -------
#
# A week of a large fleet's histograms is billions of scraped samples; these are a few hundred
# series with a sample every five minutes. Reports add them up by the hour.

SUM_STEP_S = 300.0
"""How often it is recorded, and over how long: needs a scrape every 150 s at least."""

SUMMED_COUNTERS: Mapping[str, tuple[str, str]] = {
    **{
        name: (name, "")
        for name in (
            "request_success",
            "num_preemptions",
            "prompt_tokens",
            "generation_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "admission_rejections",
        )
    },
    "computed_prompt_tokens": ("prompt_tokens_by_source", 'source="local_compute"'),
    "failed": ("request_success", 'finished_reason=~"error|abort"'),
}
"""Counters by what reports call them: metric, and which of its series."""

SUMMED_HISTOGRAMS = (TTFT, ITL, E2E, QUEUE, PREFILL, DECODE, PROMPT_LENGTH, OUTPUT_LENGTH,
              "kv_block_lifetime_seconds", XFER)  # fmt: skip

SUMMED_ENGINES = "tier:kneewatch_engines:count5m"
"""Number of engines in the sums: shows where they are complete."""

COUNTED_BY = "generation_tokens"


def increase(dialect: Dialect, key: str, part: str, by: Sequence[str]) -> str:
    """The increase of a counter, or of a histogram's `bucket`s, `sum` or `count`, summed by the
    labels `by`."""
    series = _summed(dialect, key, part)
    return f"sum by ({', '.join(by)}) (increase({series}[{dialect.range}]))"


def summed_series(key: str, part: str = "") -> str:
    """The name of the recorded series for `increase`."""
    ending = f"_{part}" if part else ""
    return f"tier:kneewatch_{key}{ending}:increase{round(SUM_STEP_S / 60)}m"


def hourly_group(plan: Plan) -> Group:
    """The sums, each over the time since the one before."""
    dialect = Dialect(SUM_STEP_S, POOL_LABELS, plan.selector, {}, plan.prefix)
    totals = [(key, "", POOL_LABELS) for key in SUMMED_COUNTERS]
    for metric in SUMMED_HISTOGRAMS:
        totals += [(metric, "bucket", (*POOL_LABELS, "le")), (metric, "sum", POOL_LABELS)]
    rules = [
        Record(summed_series(key, part), increase(dialect, key, part, by))
        for key, part, by in totals
    ]
    counted = f"increase({_summed(dialect, COUNTED_BY, '')}[{dialect.range}])"
    engines = f"count by ({', '.join(POOL_LABELS)}) ({counted})"
    return Group(
        "kneewatch-hourly", (Record(SUMMED_ENGINES, engines), *rules), interval_s=SUM_STEP_S
    )


def _summed(dialect: Dialect, key: str, part: str) -> str:
    if part:
        return dialect.series(key, f"_{part}")
    metric, only = SUMMED_COUNTERS[key]
    return dialect.series(metric, "_total", extra=only)
