"""What an engine looks like at an hour of the week, as rules: rules/seasons.py in PromQL. Pure.

Once an hour, within five minutes of its beginning: the medians of the hour that has ended, and what
the hour that begins came to in the weeks before. A server that keeps 15 days has two weeks of them.
"""

from __future__ import annotations

from kneewatch.dashboards.prometheus.model import Group, Plan, Record
from kneewatch.diagnose.causes import CAUSES
from kneewatch.rules.baseline import DRIFTS, MORE_IS_BETTER
from kneewatch.rules.conditions import nodes
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.quantities import Usually
from kneewatch.rules.seasons import HOUR_S, SCRAPES_MIN, SPREAD_MAX, WEEK_S, WEEKS, WEEKS_MIN

STEP_S = 300.0
"""How often is looked whether an hour has begun."""

NEW_HOUR = f"(minute() < {round(STEP_S / 60)})"
"""True at the first evaluation in an hour: groups are evaluated at some second of their interval,
which is not the hour's own."""

USUALLY = tuple(
    dict.fromkeys(
        node.key
        for record in CAUSES
        for form in record.forms
        if not (record.sidecar or form.sidecar)
        for node in nodes((form.gate, form.terms, form.levels))
        if isinstance(node, Usually)
    )
)
"""Signals that causes compare with their normal values."""

COMPARED = tuple(
    dict.fromkeys(
        (*(of for _, of in DRIFTS), "kv_transfer_mean_s", "finished_length_ratio", *USUALLY)
    )
)
"""Signals that a rule holds against what they were."""

SEASON = "season"
"""A label that only what is usual has, so that it stands beside the quiet median."""


def season_group(plan: Plan) -> Group:
    """The medians of each hour, and what is usual at the hour that begins."""
    hours = [Record(recorded(f"{key}:hour"), _hour(recorded(key))) for key in COMPARED]
    usual = [
        Record(recorded(f"{key}:usual"), _usual(plan, recorded(f"{key}:hour")), {SEASON: "week"})
        for key in COMPARED
    ]
    return Group("kneewatch-seasons", (*hours, *usual), interval_s=STEP_S)


def held_against(plan: Plan, key: str) -> str:
    """What a signal is to be held against: its quiet median, or what is usual at this hour of the
    week where that is worse; either where there is no other."""
    worse = "min" if key in MORE_IS_BETTER else "max"
    usual = f"last_over_time({recorded(f'{key}:usual')}[{duration(HOUR_S + STEP_S)}])"
    return f"{worse} by ({plan.engine}) ({recorded(f'{key}:quiet')} or {usual})"


def _hour(series: str) -> str:
    ended = f"{series}[{duration(HOUR_S)}]"
    enough = f"count_over_time({ended}) >= {SCRAPES_MIN}"
    return f"(quantile_over_time(0.5, {ended}) and {enough}) and on () {NEW_HOUR}"


def _usual(plan: Plan, hour: str) -> str:
    """The median of the weeks, where there are enough that agree."""
    each = " or ".join(_week(hour, week) for week in range(1, WEEKS + 1))
    middle = f"quantile by ({plan.engine}) (0.5, {each})"
    apart = f"abs(({each}) - on ({plan.engine}) group_left () ({middle}))"
    agree = f"quantile by ({plan.engine}) (0.5, {apart}) <= {number(SPREAD_MAX)} * abs({middle})"
    enough = f"count by ({plan.engine}) ({each}) >= {WEEKS_MIN}"
    return f"({middle}) and ({agree}) and ({enough}) and on () {NEW_HOUR}"


def _week(hour: str, week: int) -> str:
    """The hour that begins, so many weeks ago: it was recorded at its end, at some second of a
    step that may have been another then."""
    ago_s = week * WEEK_S - HOUR_S
    around = f"{hour}[{duration(2 * STEP_S)}] offset {duration(ago_s - STEP_S)}"
    return f'label_replace(last_over_time({around}), "week", "{week}", "", "")'
