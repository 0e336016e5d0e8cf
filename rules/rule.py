"""A rule (signal, bounds, durations, advice, section of the guide) and its state over time.
Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from kneewatch.collector.errors import SettingsError
from kneewatch.collector.spelling import did_you_mean
from kneewatch.rules.formatting import span
from kneewatch.rules.wire import Figure, UnixTime, rounded, to_ms, written

WINDOW_S = 60.0
"""The short window that durations are stated for; a profile with another window scales them."""

LONG_WINDOWS = 5.0
"""History kept, in short windows: the guide's second window is 5 minutes."""

QUEUE_RULES = ("QUEUE-GROWS", "QUEUE-SHARE", "TTFT-TAIL", "BREAKER")
"""Ids of the rules whose findings only report that there is a queue."""


Word = Literal["ok", "info", "warning", "critical"]
State = Literal["ok", "info", "warning", "critical", "unknown"]


class Severity(Enum):
    """How bad a state is; `ok` where nothing is wrong. Severities are ordered, and only `ok` is
    false; `int`, `float` and `-` take a severity's rank, from 0 for `ok` to 3 for `critical`."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    def __init__(self, word: Word) -> None:
        self.word: Word = word
        """The severity in lower case, as in the JSON."""
        self.rank = len(type(self).__members__)

    def __bool__(self) -> bool:
        return self.rank > 0

    def __lt__(self, other: Severity) -> bool:
        return self.rank < other.rank

    def __le__(self, other: Severity) -> bool:
        return self.rank <= other.rank

    def __gt__(self, other: Severity) -> bool:
        return self.rank > other.rank

    def __ge__(self, other: Severity) -> bool:
        return self.rank >= other.rank

    def __int__(self) -> int:
        return self.rank

    def __float__(self) -> float:
        return float(self.rank)

    def __neg__(self) -> int:
        return -self.rank


SEVERITIES: tuple[Severity, ...] = tuple(Severity)
OK, INFO, WARNING, CRITICAL = SEVERITIES
"""The members by name: in Python 3.11, `Severity.OK` takes ten times as long as `OK`."""

WORDS = {severity: severity.word for severity in SEVERITIES}
BY_WORD: Mapping[str, Severity] = {severity.word: severity for severity in SEVERITIES}


class Bound(Struct, frozen=True, forbid_unknown_fields=True):
    """From this value upwards (downwards with Rule.below) the state is `severity`.

    `source` says who set the bound.
    """

    severity: Severity
    threshold: float
    source: str


class Guard(Struct, frozen=True, forbid_unknown_fields=True):
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


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """Defines when a signal's value is bad.

    A state begins after its bound has been crossed for `for_s`. It ends after the value has been
    inside the bound for `clear_s`, by a margin of `clear_ratio` of the bound. Both times are scaled
    with the short window. While the rule is at warning or worse, the signals of the families
    `moves` (rules/baseline) are not normal. `stated`: its bounds are the user's. `setting` gives
    the threshold, times `times` plus `plus`. `fine`: the state inside the bounds in words.
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
    stated: bool = False
    setting: str = ""
    times: float = 1.0
    plus: float = 0.0
    fine: str = ""

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
    bounds = {bound.severity: bound for bound in rule.bounds}
    for word, threshold in thresholds.items():
        bounds[BY_WORD[word]] = Bound(BY_WORD[word], threshold, origin)
    return replace(rule, bounds=tuple(bounds[severity] for severity in sorted(bounds)), stated=True)


# --- A rule's state over time ---------------------------------------------------------------------


UNKNOWN: Literal["unknown"] = "unknown"
NO_OBSERVATION = "requests are in flight, but the window has no observation"


IN_BOUNDS: tuple[State, ...] = ("ok", UNKNOWN)
STATES: Mapping[str, Severity] = {**BY_WORD, UNKNOWN: OK}
"""The severity of each state."""


class Finding(Struct, frozen=True, omit_defaults=True):
    """A rule's current state. `library.rule_of` returns the rule.

    - `rule`: the rule's id.
    - `state`: the state after the rule's durations. It is info during the rule's clear time.
    - `signal`: the key of the signal that is judged.
    - `value`: the signal's value, in the unit that ends its key.
    - `missing`: the metrics or signals that an unknown finding lacks, by their newest names.
    - `since_s`: when the state began; only if it is info or worse.
    - `note`: another reason why the rule is not judged, or why a value out of bounds is not
      reported.
    - `clearing_since_s`: since when the value is inside every bound, or is not judged; only during
      the clear time.
    - `was`: the last value out of bounds; only during the clear time.
    - `was_severity`: the severity before the clear time; an alert with the same clear time still
      fires with it.
    - `bounds`: the rule's thresholds by severity, if they are not those of the rule library.
    """

    rule: Annotated[str, Meta(extra_json_schema={"pattern": "^[A-Z][A-Z0-9]*(-[A-Z0-9]+)*$"})]
    state: State
    signal: str = written("")
    value: Figure | None = written(None)
    missing: tuple[str, ...] = written(())
    since_s: UnixTime | None = field(default=None, name="since")
    note: str = ""
    clearing_since_s: UnixTime | None = None
    was: Figure | None = None
    was_severity: Severity | None = field(default=None, name="held")
    bounds: Mapping[str, Figure | None] | None = None

    @property
    def severity(self) -> Severity:
        """The severity of the state; ok if it is unknown."""
        return STATES[self.state]

    @property
    def held(self) -> Severity:
        """The severity; during the clear time, the severity before it.

        An alert with the same hysteresis would show this severity.
        """
        return self.severity if self.was_severity is None else self.was_severity


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
        self._id = rule.id
        self._bounds: Mapping[str, float | None] | None = None
        if rule.stated:
            self._bounds = {bound.severity.word: rounded(bound.threshold) for bound in rule.bounds}
        self._last_unknown: Finding | None = None
        self._last_ok: Finding | None = None
        self._ok_value: float | None = None

    def forget(self) -> None:
        """Drop the state: the process was replaced or the clock was set back."""
        self._active, self._since_s, self._calm_s = OK, None, None
        self._outside, self._inside_s = None, None
        self._crossed_s.clear()

    def judge(self, now: Judged) -> Finding:
        """The finding at this moment."""
        values, signal, rule = now.values, self._signal, self.rule
        lacking, value = now.missing.get(signal), values.get(signal)
        if lacking is not None or (value is None and signal not in values):
            return self._unknown(lacking or (signal,), "")
        if value is not None and self._active is OK and not self._crossed_s:
            inside = value >= self._nearest if rule.below else value <= self._nearest
            if inside:  # most rules at most scrapes; the guards would change nothing
                return self._ok(value)
        for guard in rule.guards:
            if not guard.holds(values):
                if guard.ends:
                    self.forget()
                return self._settle(now.now_s, OK, OK, value, note=self._kept_quiet(guard, value))
        if value is None:
            if not now.idle or signal in now.notes:
                return self._unknown((), now.notes.get(signal, NO_OBSERVATION))
            return self._settle(now.now_s, OK, OK, value)
        level = rule.level(value)
        # The relaxed bounds apply only to an active state.
        relaxed = level if self._active is OK else rule.level(value, relax=rule.clear_ratio)
        return self._settle(now.now_s, level, relaxed, value)

    def _unknown(self, lacking: tuple[str, ...], note: str) -> Finding:
        # The missing metrics rarely change between scrapes: reuse the finding.
        finding = self._last_unknown
        if finding is None or finding.missing != lacking or finding.note != note:
            finding = replace(self._finding(UNKNOWN, None, note=note), missing=lacking)
            self._last_unknown = finding
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
        if level is OK and self._active is OK and not self._crossed_s:
            return self._ok(value, note)
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
        return self._reported(now_s, level, relaxed, value, note)

    def _reported(
        self, now_s: float, level: Severity, relaxed: Severity, value: float | None, note: str
    ) -> Finding:
        active = self._active
        if active is OK:
            self._outside, self._inside_s = None, None
            if level >= WARNING:
                note = f"reported after {span(self._for_s)} out of bounds"
            return self._finding("ok", value, note=note)
        if relaxed:
            self._outside, self._inside_s = value, None
            return self._finding(active.word, value, since_s=self._since_s)
        if self._inside_s is None:
            self._inside_s = now_s
        return self._finding(
            "info",
            value,
            note=note,
            since_s=self._since_s,
            clearing_since_s=self._inside_s,
            was=rounded(self._outside),
            was_severity=active,
        )

    def _ok(self, value: float | None, note: str = "") -> Finding:
        if self._last_ok is None or value != self._ok_value or note != self._last_ok.note:
            self._last_ok, self._ok_value = self._finding("ok", value, note=note), value
        return self._last_ok

    def _finding(
        self,
        state: State,
        value: float | None,
        *,
        note: str = "",
        since_s: float | None = None,
        clearing_since_s: float | None = None,
        was: float | None = None,
        was_severity: Severity | None = None,
    ) -> Finding:
        return Finding(
            self._id,
            state,
            self._signal,
            rounded(value),
            (),
            None if since_s is None else to_ms(since_s),
            note,
            None if clearing_since_s is None else to_ms(clearing_since_s),
            was,
            was_severity,
            self._bounds,
        )


class RuleBook:
    """All rules of one engine over time."""

    def __init__(self, rules: Sequence[Rule], *, scale: float) -> None:
        self._states = {rule.id: RuleState(rule, scale=scale) for rule in rules}

    def forget(self) -> None:
        """Drop all states: the process was replaced, or the clock was set back."""
        for state in self._states.values():
            state.forget()

    def judge(
        self,
        now_s: float,
        values: Mapping[str, float | None],
        missing: Mapping[str, tuple[str, ...]],
        notes: Mapping[str, str],
        *,
        idle: bool,
    ) -> dict[str, Finding]:
        """Each rule's finding by id, in the rules' order; the arguments are those of `Judged`."""
        now = Judged(now_s, values, missing, notes, idle)
        return {rule: state.judge(now) for rule, state in self._states.items()}
