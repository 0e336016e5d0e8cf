"""A rule (signal, bounds, durations, advice, section of the guide) and its state over time.
Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.errors import SettingsError
from kneewatch.collector.spelling import did_you_mean
from kneewatch.rules.formatting import span

WINDOW_S = 60.0
"""The short window that durations are stated for; a profile with another window scales them."""

LONG_WINDOWS = 5.0
"""History kept, in short windows: the guide's second window is 5 minutes."""


class Severity(IntEnum):
    """How bad a state is; `ok` where nothing is wrong."""

    OK = 0
    INFO = 1
    WARNING = 2
    CRITICAL = 3

    @property
    def word(self) -> str:
        """The severity in lower case, as in the JSON."""
        return _IN_WORDS[self]


OK, INFO, WARNING, CRITICAL = Severity
"""The members by name: in Python 3.11, `Severity.OK` takes ten times as long as `OK`."""

WORDS = {OK: "ok", INFO: "info", WARNING: "warning", CRITICAL: "critical"}
_IN_WORDS = tuple(WORDS.values())  # a member as a key is hashed in Python, as an index it is not


class Bound(Struct, frozen=True):
    """From this value upwards (downwards with Rule.below) the state is `severity`.

    `source` says who set the bound.
    """

    severity: Severity
    threshold: float
    source: str


class Guard(Struct, frozen=True):
    """A rule is judged only while this signal is at least the value; with `below`, at most.

    If the signal is unknown, the rule is not judged: without traffic there is nothing to judge.
    With `ends`, the state ends as soon as the guard fails; the guard's signal then has its own
    hysteresis.
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


class Rule(Struct, frozen=True):
    """Defines when a signal's value is bad.

    A state begins after its bound has been crossed for `for_s`. It ends after the value has been
    inside the bound for `clear_s`, by a margin of `clear_ratio` of the bound. Both times are scaled
    with the short window. While the rule is at warning or worse, the signals of the families
    `moves` (rules/baseline) are not normal.
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
        """The worst severity whose bound the value crosses.

        `relax` is the share by which the bounds are moved back first.
        """
        worst = OK
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
        """The threshold for a severity; None if the rule has no bounds.

        If no bound has this severity, the first bound's threshold.
        """
        for bound in self.bounds:
            if bound.severity == severity:
                return bound.threshold
        return self.bounds[0].threshold if self.bounds else None


def with_thresholds(
    rules: tuple[Rule, ...], thresholds: Mapping[str, Mapping[str, float]], origin: str
) -> tuple[Rule, ...]:
    """The rules with the user's thresholds in place of the defaults.

    `thresholds` is {rule id: {severity word: threshold}}; `origin` says where they were set.

    Raises:
        SettingsError: a rule or severity does not exist; each message lists the valid ones.
    """
    ids = [rule.id for rule in rules]
    mistakes = [
        f"{origin}: no rule {rule_id!r}; {did_you_mean(rule_id, ids)}"
        for rule_id in thresholds
        if rule_id not in ids
    ]
    words = [word for severity, word in WORDS.items() if severity]
    mistakes += [
        f"{origin}: rule {rule_id} has no severity {word!r}; use {', '.join(words)}"
        for rule_id, bounds in thresholds.items()
        if rule_id in ids
        for word in bounds
        if word not in words
    ]
    if mistakes:
        raise SettingsError(*mistakes)
    return tuple(_with_bounds(rule, thresholds.get(rule.id, {}), origin) for rule in rules)


def _with_bounds(rule: Rule, thresholds: Mapping[str, float], origin: str) -> Rule:
    if not thresholds:
        return rule
    by_word = {word: severity for severity, word in WORDS.items() if severity}
    bounds = {bound.severity: bound for bound in rule.bounds}
    for word, threshold in thresholds.items():
        bounds[by_word[word]] = Bound(by_word[word], threshold, origin)
    return replace(rule, bounds=tuple(bounds[severity] for severity in sorted(bounds)))


# --- A rule's state over time ---------------------------------------------------------------------


UNKNOWN = "unknown"
NO_OBSERVATION = "requests are in flight, but the window has no observation"


class Clearing(Struct, frozen=True):
    """A state in its clear time: since `since_s` the value is inside every bound, or is not judged.

    `was` is the last value out of bounds. `severity` is the state's severity before that.
    """

    since_s: float
    was: float | None
    severity: Severity


class Finding(Struct, frozen=True):
    """A rule's current state, since `since_s`: ok, info, warning, critical or unknown.

    A state in its clear time is reported as info. `missing` names the metrics that an unknown
    finding lacks. `note` gives another reason why the rule is not judged, or why a value out of
    bounds is not reported.
    """

    rule: Rule
    state: str
    severity: Severity
    value: float | None
    since_s: float | None
    missing: tuple[str, ...] = ()
    note: str = ""
    clearing: Clearing | None = None

    @property
    def held(self) -> Severity:
        """The severity; during the clear time, the severity before it.

        An alert with the same hysteresis would show this severity.
        """
        return self.severity if self.clearing is None else self.clearing.severity


def _nearest_threshold(rule: Rule) -> float:
    """The threshold that a value crosses first.

    Without bounds it is infinite, so that no value crosses it.
    """
    thresholds = [bound.threshold for bound in rule.bounds]
    if rule.below:
        return max(thresholds, default=-math.inf)
    return max(0.0, min(thresholds, default=math.inf))


class Judged(Struct, frozen=True):
    """The values by which rules are judged at one moment.

    `missing` are the metrics that signals lack; `notes` say why signals have no value. `idle`: no
    request is in flight, so a rule whose signal has no observation is ok.
    """

    now_s: float
    values: Mapping[str, float | None]
    missing: Mapping[str, tuple[str, ...]]
    notes: Mapping[str, str]
    idle: bool


class RuleState:
    """One rule over time."""

    def __init__(self, rule: Rule, *, scale: float) -> None:
        self.rule, self._signal = rule, rule.signal
        self._for_s, self._clear_s = rule.for_s * scale, rule.clear_s * scale
        self._nearest = _nearest_threshold(rule)
        self._active = OK
        self._since_s: float | None = None
        self._crossed_s: dict[Severity, float] = {}
        self._calm_s: float | None = None
        self._outside: float | None = None
        self._inside_s: float | None = None
        self._unjudged = Finding(rule, UNKNOWN, OK, None, None)

    def forget(self) -> None:
        """Drop the state: the process was replaced or the clock was set back."""
        self._active, self._since_s, self._calm_s = OK, None, None
        self._outside, self._inside_s = None, None
        self._crossed_s.clear()

    def judge(self, now: Judged) -> Finding:
        """The finding at this moment."""
        rule, signal = self.rule, self._signal
        values, now_s = now.values, now.now_s
        lacking = now.missing.get(signal)
        if lacking is not None or signal not in values:
            return self._unknown(lacking or (signal,), "")
        value = values[signal]
        if value is not None and not self._active and not self._crossed_s:
            inside = value >= self._nearest if rule.below else value <= self._nearest
            if inside:  # most rules at most scrapes; the guards would change nothing
                return Finding(rule, "ok", OK, value, None)
        for guard in rule.guards:
            if not guard.holds(values):
                if guard.ends:
                    self.forget()
                return self._settle(now_s, OK, OK, value, note=self._kept_quiet(guard, value))
        if value is None:
            if not now.idle or signal in now.notes:
                return self._unknown((), now.notes.get(signal, NO_OBSERVATION))
            return self._settle(now_s, OK, OK, value)
        level = rule.level(value)
        # The relaxed bounds apply only to an active state.
        relaxed = rule.level(value, relax=rule.clear_ratio) if self._active else level
        return self._settle(now_s, level, relaxed, value)

    def _unknown(self, lacking: tuple[str, ...], note: str) -> Finding:
        # The missing metrics rarely change between scrapes: reuse the finding.
        finding = self._unjudged
        if finding.missing != lacking or finding.note != note:
            finding = self._unjudged = replace(finding, missing=lacking, note=note)
        return finding

    def _kept_quiet(self, guard: Guard, value: float | None) -> str:
        """A note that the guard suppresses the rule.

        Empty if the value is below the rule's warning threshold anyway.
        """
        if value is None or self.rule.level(value) < WARNING:
            return ""
        side = "above" if guard.below else "below"
        return f"not judged: {guard.signal} is {side} {guard.value:g}"

    def _settle(
        self,
        now_s: float,
        level: Severity,
        relaxed: Severity,
        value: float | None,
        *,
        note: str = "",
    ) -> Finding:
        if not (level or self._active or self._crossed_s):
            return Finding(self.rule, "ok", OK, value, None, (), note)
        for severity in (INFO, WARNING, CRITICAL):
            if level >= severity:
                self._crossed_s.setdefault(severity, now_s)
            else:
                self._crossed_s.pop(severity, None)
        held = max(
            (s for s, since_s in self._crossed_s.items() if now_s - since_s >= self._for_s),
            default=OK,
        )
        if held > self._active:
            if self._active == OK:
                self._since_s = self._crossed_s[held]
            self._active, self._calm_s = held, None
        elif relaxed < self._active:
            self._calm_s = now_s if self._calm_s is None else self._calm_s
            if now_s - self._calm_s >= self._clear_s:
                self._active, self._calm_s = max(held, relaxed), None
                self._since_s = self._since_s if self._active else None
        else:
            self._calm_s = None
        return self._finding(now_s, level, relaxed, value, note)

    def _finding(
        self, now_s: float, level: Severity, relaxed: Severity, value: float | None, note: str
    ) -> Finding:
        active = self._active
        if not active:
            self._outside, self._inside_s = None, None
            if level >= WARNING:
                note = f"reported after {span(self._for_s)} out of bounds"
            return Finding(self.rule, "ok", OK, value, None, (), note)
        if relaxed:
            self._outside, self._inside_s = value, None
            return Finding(self.rule, active.word, active, value, self._since_s)
        if self._inside_s is None:
            self._inside_s = now_s
        clearing = Clearing(self._inside_s, self._outside, active)
        return Finding(self.rule, INFO.word, INFO, value, self._since_s, (), note, clearing)


class RuleBook:
    """All rules of one engine over time."""

    def __init__(self, rules: Sequence[Rule], *, scale: float) -> None:
        self._states = [RuleState(rule, scale=scale) for rule in rules]

    def forget(self) -> None:
        """Drop all states: the process was replaced, or the clock was set back."""
        for state in self._states:
            state.forget()

    def judge(
        self,
        now_s: float,
        values: Mapping[str, float | None],
        missing: Mapping[str, tuple[str, ...]],
        notes: Mapping[str, str],
        *,
        idle: bool,
    ) -> list[Finding]:
        """Every rule's finding, in the rules' order; the arguments are those of `Judged`."""
        now = Judged(now_s, values, missing, notes, idle)
        return [state.judge(now) for state in self._states]
