"""Recording rules for baselines (by hour of the week, and of quiet times), and for trends over
hours. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.rule_group import CONFIDENCE, FINDING, Group, Plan, Record
from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM
from kneewatch.diagnose.causes.ranking import CAUSES
from kneewatch.diagnose.learned.derived_signals import DERIVED
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
from kneewatch.rules.cascade import EVICTS
from kneewatch.rules.conditions import nodes
from kneewatch.rules.facts import EVERYWHERE, duration, number, recorded
from kneewatch.rules.quantities import BaselineValue
from kneewatch.rules.rule import Severity

STEP_S = 300.0
"""Seconds between two checks whether an hour has begun."""

NEW_HOUR = f"(minute() < {round(STEP_S / 60)})"
"""A PromQL condition that is true at the first evaluation in an hour. Groups are not evaluated
exactly at the start of the hour."""

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
"""Signals for which causes read the baseline."""

_EXPRESSIONS = tuple(signal.of for signal in DERIVED)

COMPARED = tuple(
    dict.fromkeys(
        (*(node.key for node in nodes(_EXPRESSIONS) if isinstance(node, BaselineValue)), *BASELINED)
    )
)
"""Signals that are compared with a baseline."""

SEASONAL = tuple(dict.fromkeys((*COMPARED, SPEC_ACCEPTED.signal)))
"""Signals for which the usual value at this hour of the week is recorded."""

SEASON = "season"
"""A label that only usual values have. It keeps `or` from dropping them in favour of the quiet
median."""


def season_group(plan: Plan) -> Group:
    """Recording rules for the median of each hour, and for the usual value of the hour that
    begins."""
    hours = [Record(recorded(f"{key}:hour"), _hour(recorded(key))) for key in SEASONAL]
    usual = [
        Record(recorded(f"{key}:usual"), _usual(plan, recorded(f"{key}:hour")), {SEASON: "week"})
        for key in SEASONAL
    ]
    return Group("kneewatch-seasons", (*hours, *usual), interval_s=STEP_S)


def compared_with(plan: Plan, key: str) -> str:
    """A PromQL expression for the baseline of a signal: its quiet median or its usual value at this
    hour of the week, whichever is worse. If one of them is missing, the other is used."""
    worse = "min" if key in MORE_IS_BETTER else "max"
    return f"{worse} by ({plan.engine}) ({recorded(f'{key}:quiet')} or {usual_now(key)})"


def usual_now(key: str) -> str:
    return f"last_over_time({recorded(f'{key}:usual')}[{duration(HOUR_S + STEP_S)}])"


def _hour(series: str) -> str:
    ended = f"{series}[{duration(HOUR_S)}]"
    enough = f"count_over_time({ended}) >= {SCRAPES_MIN}"
    return f"(quantile_over_time(0.5, {ended}) and {enough}) and on () {NEW_HOUR}"


def _usual(plan: Plan, hour: str) -> str:
    """A PromQL expression for the usual value of the hour of the week that begins now.

    The value is the median of the recorded series `hour` for this hour in the past weeks. There is
    no value if fewer than WEEKS_MIN weeks have data, or if the weeks differ too much. The
    expression has a value only in the first STEP_S seconds of an hour.
    """
    weeks = " or ".join(_week(hour, week) for week in range(1, WEEKS + 1))
    middle = f"quantile by ({plan.engine}) (0.5, {weeks})"
    apart = f"abs(({weeks}) - on ({plan.engine}) group_left () ({middle}))"
    agree = f"quantile by ({plan.engine}) (0.5, {apart}) <= {number(SPREAD_MAX)} * abs({middle})"
    enough = f"count by ({plan.engine}) ({weeks}) >= {WEEKS_MIN}"
    return f"({middle}) and ({agree}) and ({enough}) and on () {NEW_HOUR}"


def _week(hour: str, week: int) -> str:
    """A PromQL expression for the value, `week` weeks ago, of the hour that begins now. The
    range is wider than a step, because the evaluations in that week were at another second of
    the step."""
    ago_s = week * WEEK_S - HOUR_S
    around = f"{hour}[{duration(2 * STEP_S)}] offset {duration(ago_s - STEP_S)}"
    return f'label_replace(last_over_time({around}), "week", "{week}", "", "")'


# --- Trends over hours ----------------------------------------------------------------------------

SLOW_STEP_S = 120.0
"""Seconds between two evaluations of trends over hours. It is short enough for an instant query to
find a value."""


def slow_group(plan: Plan) -> Group:
    """Recording rules for the levels of slow quantities, and for the trend lines through these
    levels over hours (diagnose/learned/slow_trends.py)."""
    rules = tuple(
        Record(recorded(key), expr)
        for slow in SLOW
        for key, expr in slow_series(plan, slow).items()
    )
    return Group("kneewatch-slow", rules, interval_s=SLOW_STEP_S)


def slow_series(plan: Plan, slow: SlowQuantity) -> dict[str, str]:
    level, growth = recorded(slow.level), recorded(slow.growth)
    span, whole = duration(slow.span_s), duration(STEPS * slow.span_s)
    seen = f"and ({level} offset {whole})"
    signal = recorded(slow.signal)
    unrecorded = {WORK.signal: _work(), HOST_MEMORY.signal: _host_memory(plan)}
    source = unrecorded.get(slow.signal)
    return ({slow.signal: source} if source else {}) | {
        slow.level: f"{slow.fold}_over_time({signal}[{span}])",
        slow.growth: f"(deriv({level}[{whole}]) * {number(STEPS * slow.span_s)}) {seen}",
        slow.before: f"avg_over_time({level}[{whole}]) - {growth} / 2",
        slow.straight: f"{growth} * {growth} / 12 / (stdvar_over_time({level}[{whole}]) > 0)",
        slow.late: f"({level} - ({level} offset {span})) * {STEPS} / ({growth} != 0)",
    }


def _work() -> str:
    """A PromQL expression for the tokens of the running requests. It is 0 if no request runs,
    because the request lengths are then unknown."""
    running = recorded("running_avg")
    lengths = f"({recorded('prompt_tokens_mean')} + {recorded('output_tokens_mean')})"
    return f"({running} == 0) or ({running} * {lengths})"


def _host_memory(plan: Plan) -> str:
    """A PromQL expression for the resident memory of a process, once for each of its engines."""
    selector = f"{{{plan.selector}}}" if plan.selector else ""
    resident = f"max by ({plan.process}) (process_resident_memory_bytes{selector})"
    return f"({EVERYWHERE} * 0 + 1) * on ({plan.process}) group_left () {resident}"


FAMILY_SERIES = ("disturbed", "sampled")


def calm_group(plan: Plan) -> Group:
    """Recording rules for quiet values, of which the quiet medians are computed. A value is quiet
    if nothing disturbed the signal's family at its scrape.

    The group is evaluated after the alerts, because a scrape with a finding at warning is not
    quiet.
    """
    seen, arrivals = map(recorded, ("seen", "arrival_per_s"))
    half, window = duration(plan.range_s / 2), duration(plan.range_s)
    rules = [
        # A target that has just appeared has no quiet scrapes yet.
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
    """A PromQL expression for engines on which something disturbs a family of signals: a cause, a
    finding at warning, the cascade, or a queue."""
    causes = "|".join(record.id for record in CAUSES if family in record.moves)
    rules = "|".join(rule.id for rule in plan.rules() if family in rule.moves)
    concluded = f'{recorded(CONFIDENCE)}{{cause=~"({causes})(:.*)?"}} >= {number(CONCLUDED_FROM)}'
    warned = f'{FINDING}{{rule=~"{rules}"}} >= {int(Severity.WARNING)}'
    parts = [f"(max by ({plan.engine}) ({concluded}))"]
    # A lean plan has no findings, so a disturbance that only a finding shows is not seen.
    parts += [f"(max by ({plan.engine}) ({warned}))"] if rules and not plan.lean else []
    if family in STAGE_MOVES:
        parts.append(f"({recorded('cascade_stage')} >= {EVICTS})")
    if family in QUEUE_MOVES:
        parts.append(f"({recorded('waiting_avg')} >= {number(QUIET_WAITING)})")
    return " or ".join(parts)


def quiet_median(plan: Plan, key: str) -> str:
    """A PromQL expression for the median of quiet values. Outside quiet times it is the last known
    median."""
    remembered_s = SAMPLES_MAX * plan.range_s / 2
    calm = f"{recorded(f'{key}:calm')}[{duration(remembered_s)}]"
    dense = plan.range_s / 2 / plan.interval_s
    enough = SAMPLES_MIN if plan.ordered else max(1, round(SAMPLES_MIN * dense))
    return (
        f"(quantile_over_time(0.5, {calm}) and count_over_time({calm}) >= {enough})"
        f" or {recorded(f'{key}:quiet')}"
    )
