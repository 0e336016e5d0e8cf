"""When a condition of an engine counts: after it has held for a while, and for a while after. Pure.

A severity (1 info, 2 warning, 3 critical) goes through three series for each engine: since when it
or a worse one has held, whether it has held for long enough, and what is in force, which stays for
a while after it has ended. Alerts could keep that time themselves, but a pool has one alert, and in
a rollout its replicas would fill that time one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kneewatch.dashboards.prometheus.rule_group import Plan, Record
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.rule import Severity

FINDING, CAUSE = recorded("finding"), recorded("cause")
"""What is in force for each engine: the severity of a finding (label `rule`) or of a cause (label
`cause`, with the form's name behind a colon where a cause has several)."""

WORST_FIRST = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)


class Lasts(NamedTuple):
    """For how long a condition must hold, and how long it then stays in force without holding."""

    for_s: float
    keep_s: float


def met(kind: str) -> str:
    """The series of the severities whose conditions are met at this moment."""
    return f"{kind}_met"


def in_force_records(plan: Plan, kind: str, label: str, lasts: Mapping[str, Lasts]) -> list[Record]:
    """Records of what is in force (`kind`: FINDING or CAUSE), from the conditions that are met, for
    each value of `label`. What is still in force needs no duration when it is met again."""
    now, since, held = met(kind), f"{kind}_since_s", f"{kind}_held"
    long_enough = " or ".join(
        f'((time() - {since}{{{only}, severity="{severity.word}"}} >= {number(for_s)}) * 0'
        f" + {int(severity)})"
        for for_s, only in _alike(label, {key: last.for_s for key, last in lasts.items()})
        for severity in WORST_FIRST
    )
    again = " or ".join(
        f"((({now} >= {int(severity)}) and {kind} >= {int(severity)}) * 0 + {int(severity)})"
        for severity in WORST_FIRST
    )
    kept = " or ".join(
        # The last evaluation that had it is one before the first that lacks it.
        f"max_over_time({held}{{{only}}}[{duration(keep_s + plan.interval_s / 2)}])"
        if keep_s
        else f"{held}{{{only}}}"
        for keep_s, only in _alike(label, {key: last.keep_s for key, last in lasts.items()})
    )
    return [
        *(_since(now, since, severity) for severity in WORST_FIRST),
        Record(held, f"max without (severity) ({long_enough} or {again})"),
        Record(kind, kept),
    ]


def _since(now: str, since: str, severity: Severity) -> Record:
    """Since when, in Unix seconds, this severity or a worse one has been met."""
    own = {"severity": severity.word}
    before = f'max without (severity) ({since}{{severity="{severity.word}"}})'
    holds = f"({now} >= {int(severity)})"
    return Record(since, f"({before} and {holds}) or ({holds} * 0 + time())", own)


def _alike(label: str, seconds: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """Each time in seconds, with the matcher of all names that have it."""
    names: dict[float, list[str]] = defaultdict(list)
    for name, time_s in seconds.items():
        names[time_s].append(name)
    for time_s, alike in names.items():
        yield time_s, f'{label}=~"{"|".join(alike)}"'
