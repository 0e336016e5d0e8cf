"""What a rule is: a signal, bounds, durations, advice and the guide's section. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from kneewatch.collector.errors import SettingsError

WINDOW_S = 60.0
"""The short window that durations are stated for; a profile with another one stretches them."""

LONG_WINDOWS = 5.0
"""History kept, in short windows: the guide's second window is 5 minutes."""


class Severity(IntEnum):
    """How bad; `ok` when nothing is."""

    OK = 0
    INFO = 1
    WARNING = 2
    CRITICAL = 3

    @property
    def word(self) -> str:
        """The lower-case word of the JSON."""
        return WORDS[self]


WORDS = {
    Severity.OK: "ok",
    Severity.INFO: "info",
    Severity.WARNING: "warning",
    Severity.CRITICAL: "critical",
}


@dataclass(frozen=True, slots=True)
class Bound:
    """From this value on (or down, see Rule.below) the state is `severity`. `source` says who set
    it."""

    severity: Severity
    threshold: float
    source: str


@dataclass(frozen=True, slots=True)
class Guard:
    """A rule is judged only while this signal is at least (or, with `below`, at most) the value.

    A guard on an unknown signal does not hold: without traffic there is nothing to judge. With
    `ends` the state ends at once with the guard, which then has a hysteresis of its own.
    """

    signal: str
    value: float
    below: bool = False
    ends: bool = False

    def holds(self, values: Mapping[str, float | None]) -> bool:
        """Whether the rule may be judged."""
        value = values.get(self.signal)
        if value is None:
            return False
        return value <= self.value if self.below else value >= self.value


@dataclass(frozen=True, slots=True)
class Rule:
    """When a number is bad.

    A state begins once its bound has been crossed for `for_s`, and ends once the value has been
    back inside the bound, by a tenth of it (`clear_ratio`), for `clear_s`. `scale` of the short
    window against its default stretches both. `moves` are the families of signals (rules/baseline)
    that are not normal while it is at warning or worse.
    """

    id: str
    signal: str
    bounds: tuple[Bound, ...]
    summary: str
    advice: str
    guide: tuple[str, ...]
    below: bool = False
    for_s: float = 0.0
    clear_s: float = 30.0
    clear_ratio: float = 0.1
    guards: tuple[Guard, ...] = ()
    moves: tuple[str, ...] = ()

    def level(self, value: float, *, relax: float = 0.0) -> Severity:
        """The worst severity whose bound the value crosses; `relax` moves the bounds back by a
        share."""
        worst = Severity.OK
        if value <= 0 and not self.below:
            return worst
        for bound in self.bounds:
            margin = abs(bound.threshold) * relax
            crossed = (
                value < bound.threshold + margin if self.below else value > bound.threshold - margin
            )
            if crossed:
                worst = max(worst, bound.severity)
        return worst

    def threshold(self, severity: Severity) -> float | None:
        """The bound of a severity, or that of the mildest one."""
        for bound in self.bounds:
            if bound.severity == severity:
                return bound.threshold
        return self.bounds[0].threshold if self.bounds else None


def with_thresholds(
    rules: tuple[Rule, ...], thresholds: Mapping[str, Mapping[str, float]], origin: str
) -> tuple[Rule, ...]:
    """Rules with the user's bounds in place of the defaults: {rule id: {severity word: threshold}}.

    Raises:
        SettingsError: no such rule or severity; the message names the nearest rules.
    """
    by_id = {rule.id: rule for rule in rules}
    for rule_id in thresholds:
        if rule_id not in by_id:
            raise SettingsError(f"{origin}: no rule {rule_id!r}; there are {', '.join(by_id)}")
    return tuple(_with_bounds(rule, thresholds.get(rule.id, {}), origin) for rule in rules)


def _with_bounds(rule: Rule, wanted: Mapping[str, float], origin: str) -> Rule:
    if not wanted:
        return rule
    by_word = {word: severity for severity, word in WORDS.items() if severity}
    bounds = {bound.severity: bound for bound in rule.bounds}
    for word, threshold in wanted.items():
        if word not in by_word:
            raise SettingsError(
                f"{origin}: rule {rule.id} has no severity {word!r}; use {', '.join(by_word)}"
            )
        bounds[by_word[word]] = Bound(by_word[word], threshold, origin)
    return replace(rule, bounds=tuple(bounds[severity] for severity in sorted(bounds)))
