"""One engine of a fleet at one moment: findings and stage from the rules' bounds. Pure.

A moment has no past: rules that must have held for longer than the window, and stage 4, are judged
by the recording rules or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kneewatch.collector.signals.catalogue import Signal
from kneewatch.diagnose.fleet.observed import Observed, Values
from kneewatch.diagnose.fleet.shape import Labels, Member
from kneewatch.rules.cascade import (
    EVICT_CRITICAL_PER_S,
    EVICT_WARNING_PER_S,
    FILLING_FROM_RATIO,
    NAMES,
    PREEMPTIONS_MIN,
    QUEUE_SHARE_OF_RUNNING,
)
from kneewatch.rules.model import WINDOW_S, Rule, Severity

MOMENT_S = WINDOW_S
"""Rules that must hold for longer than this are not judged on one moment."""

SIGNALS = (
    "running",
    "running_avg",
    "waiting",
    "waiting_by_capacity",
    "waiting_min",
    "arrival_per_s",
    "generation_tokens_per_s",
    "computed_prompt_tokens_per_s",
    "kv_usage_ratio",
    "kv_usage_avg_ratio",
    "preemption_per_s",
    "preemption_ratio_per_s",
    "prefix_hit_ratio",
    "prefix_query_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p50_s",
    "itl_p99_s",
    "itl_mean_s",
    "prompt_tokens_p50",
    "queue_share_ratio",
    "finished_error_ratio",
)
"""The signals that a fleet is asked for: one query each."""

REMEMBERED = (
    "cascade_stage",
    "cascade_severity",
    "prefix_hit_quiet_ratio",
    "preempted_in_window",
    "errors_in_window",
)
"""What only recording rules know."""


@dataclass(frozen=True, slots=True)
class Found:
    """A rule whose bound a value crosses."""

    rule: Rule
    severity: Severity
    value: float


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's verdict. `stage` is None where no metric tells it."""

    member: Member
    values: Values
    gpus: Values
    config: Labels
    stage: int | None
    severity: Severity
    findings: tuple[Found, ...]

    @property
    def health(self) -> str:
        """One word; what cannot be read is never ok."""
        if self.stage is None and self.severity < Severity.WARNING:
            return "unknown"
        return self.severity.word

    @property
    def stage_name(self) -> str:
        """The stage's word."""
        return "unknown" if self.stage is None else NAMES[self.stage]

    def get(self, signal: str) -> float | None:
        """A signal's value; None where it has none."""
        return self.values.get(signal)

    @property
    def in_flight(self) -> float | None:
        """Requests that run and wait; the mean of the window where it is known."""
        running = self.values.get("running_avg", self.values.get("running"))
        return None if running is None else running + self.values.get("waiting", 0.0)


def engines_of(observed: Observed, rules: Sequence[Rule]) -> list[Engine]:
    """Every engine's verdict."""
    judged = judgeable(rules)
    return [
        _judged(
            member,
            observed.values.get(member.key, {}),
            observed.gpus.get(member.key, {}),
            observed.configs.get(member.key, {}),
            judged,
            observed.window_s,
        )
        for member in observed.shape.members
    ]


def judgeable(rules: Iterable[Rule]) -> list[Rule]:
    """The rules that one moment can judge."""
    known = {*SIGNALS, *REMEMBERED}
    return [
        rule
        for rule in rules
        if rule.signal in known
        and rule.for_s <= MOMENT_S
        and all(guard.signal in known for guard in rule.guards)
    ]


def left_to_rules(rules: Iterable[Rule], signals: Iterable[Signal]) -> list[str]:
    """Rules on known signals that need more than a moment."""
    known = {signal.key for signal in signals}
    return [r.id for r in rules if r.signal in known and r.for_s > MOMENT_S]


def _judged(
    member: Member,
    values: Values,
    gpus: Values,
    config: Labels,
    rules: Iterable[Rule],
    window_s: float,
) -> Engine:
    stage = stage_of(values)
    known = dict(values)
    if stage is not None:
        known["cascade_stage"] = float(stage)
    for count, per_s in (
        ("preempted_in_window", "preemption_per_s"),
        ("errors_in_window", "finished_error_per_s"),
    ):
        if per_s in values:
            known.setdefault(count, values[per_s] * window_s)
    found = tuple(one for rule in rules if (one := _finding(rule, known)) is not None)
    worst = max((one.severity for one in found), default=Severity.OK)
    severity = max(worst, stage_severity(stage, known))
    return Engine(member, known, gpus, config, stage, severity, found)


def stage_of(values: Values) -> int | None:
    """The cascade's stage: the recording rules' where there are any, else that of this moment.

    Collapse (4) shows over time only, so that a moment tells 3 at most.
    """
    recorded = values.get("cascade_stage")
    if recorded is not None:
        return int(recorded)
    usage, preempted = values.get("kv_usage_ratio"), values.get("preemption_per_s")
    if usage is None or preempted is None or "running" not in values:
        return None
    if preempted:
        waiting = values.get("waiting_by_capacity", 0.0)
        behind = waiting >= max(2.0, QUEUE_SHARE_OF_RUNNING * values["running"])
        return 3 if behind else 2
    return 1 if usage >= FILLING_FROM_RATIO else 0


def stage_severity(stage: int | None, values: Mapping[str, float]) -> Severity:
    """The severity of a stage (rules/cascade.py)."""
    recorded = values.get("cascade_severity")
    if recorded is not None:
        return Severity(int(recorded))
    if not stage:
        return Severity.OK
    ratio = values.get("preemption_ratio_per_s", 0.0)
    many = values.get("preempted_in_window", 0.0) >= PREEMPTIONS_MIN
    if stage == 4 or (stage >= 2 and many and ratio > EVICT_CRITICAL_PER_S):
        return Severity.CRITICAL
    if stage == 3 or (stage >= 2 and many and ratio > EVICT_WARNING_PER_S):
        return Severity.WARNING
    return Severity.INFO


def _finding(rule: Rule, values: Values) -> Found | None:
    value = values.get(rule.signal)
    if value is None or not all(guard.holds(values) for guard in rule.guards):
        return None
    severity = rule.level(value)
    return Found(rule, severity, value) if severity else None
