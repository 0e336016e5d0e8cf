"""The state over time of an engine's rules and of its cascade: since when, and until when. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.rules.cascade import (
    EMPTIED_BELOW_RATIO,
    EVICTS,
    EXIT_HOLD_S,
    FILLING_FROM_RATIO,
    NAMES,
    Stage,
    compiled_severities,
    evidence_of,
    forecast_s,
    staged,
)
from kneewatch.rules.facts import Moment, Targets
from kneewatch.rules.formatting import span
from kneewatch.rules.rule import (
    CRITICAL,
    INFO,
    OK,
    UNKNOWN,
    WARNING,
    WINDOW_S,
    Finding,
    Guard,
    Rule,
    Severity,
    State,
)
from kneewatch.rules.wire import rounded, to_ms

NO_OBSERVATION = "requests are in flight, but the window has no observation"


def _nearest_threshold(rule: Rule) -> float:
    """The threshold that a value crosses first.

    Without bounds it is infinite, so that no value crosses it.
    """
    thresholds = [bound.threshold for bound in rule.bounds]
    if rule.below:
        return max(thresholds, default=-math.inf)
    return max(0.0, min(thresholds, default=math.inf))


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
        self._bounds: Mapping[str, float | None] | None = None
        if rule.stated:
            self._bounds = {bound.severity.word: rounded(bound.threshold) for bound in rule.bounds}
        self._last_unknown: Finding | None = None
        self._last_ok: Finding | None = None
        self._ok_value: float | None = None

    def forget(self) -> None:
        """Drop the state: the process was replaced or the clock was set back."""
        self._active = OK
        self._since_s = self._calm_s = self._outside = self._inside_s = None
        self._crossed_s.clear()

    def judge(
        self,
        now_s: float,
        values: Mapping[str, float | None],
        missing: Mapping[str, tuple[str, ...]],
        notes: Mapping[str, str],
        *,
        idle: bool,
    ) -> Finding:
        """The finding at this moment.

        `missing` are the metrics that signals lack; `notes` say why signals have no value. `idle`:
        no request is in flight, so a rule whose signal has no observation is ok.
        """
        signal, rule = self._signal, self.rule
        lacking, value = missing.get(signal), values.get(signal)
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
                note = self._kept_quiet(guard, values, value)
                return self._settle(now_s, OK, OK, value, note=note)
        if value is None:
            if not idle or signal in notes:
                return self._unknown((), notes.get(signal, NO_OBSERVATION))
            return self._settle(now_s, OK, OK, value)
        level = rule.level(value)
        # The relaxed bounds apply only to an active state.
        relaxed = level if self._active is OK else rule.level(value, relax=rule.clear_ratio)
        return self._settle(now_s, level, relaxed, value)

    def _unknown(self, lacking: tuple[str, ...], note: str) -> Finding:
        # The missing metrics rarely change between scrapes: reuse the finding.
        finding = self._last_unknown
        if finding is None or finding.missing != lacking or finding.note != note:
            finding = replace(self._finding(UNKNOWN, None, note=note), missing=lacking)
            self._last_unknown = finding
        return finding

    def _kept_quiet(
        self, guard: Guard, values: Mapping[str, float | None], value: float | None
    ) -> str:
        """A note that the guard suppresses the rule.

        Empty if the value is below the rule's warning threshold anyway.
        """
        if value is None or self.rule.level(value) < WARNING:
            return ""
        if values.get(guard.signal) is None:
            return f"not judged: {guard.signal} is unknown"
        return f"not judged: {guard.words}"

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
                note = f"out of bounds, reported if that lasts {span(self._for_s)}"
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
            self.rule.id,
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


# --- The cascade ----------------------------------------------------------------------------------


FALLS_TO = 0.7
"""Throughput has fallen if tokens/s are below this share of the reference."""

GPU_IDLE_BELOW = 0.5
"""Throughput has also fallen if GPU activity is below this share of the reference."""

LOAD_HOLDS_AT = 0.8
"""The load has not dropped while it is at least this share of the reference's load."""

SAMPLES_MIN = 3

SAMPLES_KEPT = 10
"""Number of samples kept, one per half window."""


class WorkSample(Struct, frozen=True):
    """Tokens/s, requests in flight and GPU activity (None: unknown) over one window."""

    t_s: float
    tokens_per_s: float
    in_flight: float
    gpu_active: float | None


class UsefulWork:
    """An engine's recent tokens/s, used to detect a fall in throughput. `window_s` is the short
    window."""

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[WorkSample] = deque(maxlen=SAMPLES_KEPT)
        self._fallen_since_s: float | None = None

    def forget(self) -> None:
        """Reset after a restart."""
        self._samples.clear()
        self._fallen_since_s = None

    def judge(self, now_s: float, values: Mapping[str, float | None]) -> str | None:
        """A text that says why throughput counts as fallen; None if it has not fallen.

        It has not fallen if it is lower only because the load is lower.
        """
        tokens_per_s = values.get("generation_tokens_per_s")
        if tokens_per_s is None:
            return None
        in_flight = (values.get("running_avg") or 0.0) + (values.get("waiting_avg") or 0.0)
        now = WorkSample(now_s, tokens_per_s, in_flight, values.get("gpu_engine_active_ratio"))
        reason = self._reason(now)
        if reason is None:
            self._fallen_since_s = None
        elif self._fallen_since_s is None:
            self._fallen_since_s = now_s
        due = not self._samples or now_s - self._samples[-1].t_s >= self._window_s / 2
        if due and reason is None:
            # A fall is not learned: it would become the reference, and the fall would seem to be
            # over.
            self._samples.append(now)
        since_s = self._fallen_since_s
        return reason if since_s is not None and now_s - since_s >= self._window_s / 2 else None

    def _reason(self, now: WorkSample) -> str | None:
        then = [
            sample
            for sample in self._samples
            if sample.t_s <= now.t_s - self._window_s
            and 0 < LOAD_HOLDS_AT * sample.in_flight <= now.in_flight
        ]
        if len(then) < SAMPLES_MIN:
            return None
        if now.tokens_per_s < FALLS_TO * median(sample.tokens_per_s for sample in then):
            return "generation throughput falls while the load holds"
        active = [sample.gpu_active for sample in then if sample.gpu_active is not None]
        if now.gpu_active is None or len(active) < SAMPLES_MIN:
            return None
        if now.gpu_active < GPU_IDLE_BELOW * median(active):
            return "the GPU goes idle while the load holds"
        return None


class Cascade:
    """The stage of one engine over time.

    `scale` is the short window divided by its default; `evicting` is the rule KV-EVICT. With
    `may_queue` requests queue by design: a queue behind a full cache is no stage of its own.
    """

    def __init__(
        self, *, scale: float, targets: Targets, evicting: Rule, may_queue: bool = False
    ) -> None:
        self._may_queue = may_queue
        self._severity = compiled_severities(evicting)
        self._scale, self._hold_s = scale, EXIT_HOLD_S * scale
        self._targets = targets
        self._number, self._since_s = 0, float("nan")
        self._seen_s = dict.fromkeys(range(1, len(NAMES)), float("-inf"))
        self._full_since_s: float | None = None
        self._grave_s: dict[Severity, float] = {}
        self._work = UsefulWork(window_s=WINDOW_S * scale)

    def forget(self) -> None:
        """Reset after a restart: an empty cache has no stage."""
        self._number, self._since_s = 0, float("nan")
        self._full_since_s = None
        self._grave_s.clear()
        self._work.forget()
        self._seen_s = dict.fromkeys(self._seen_s, float("-inf"))

    def judge(self, now_s: float, values: Mapping[str, float | None], *, preempted: float) -> Stage:
        """The stage at `now_s`. `preempted`: number of preemptions since the previous scrape."""
        seen = dict(values)
        moment, fallen = self._moment(now_s, seen, preempted)
        evidence, reasons = evidence_of(moment)
        if evidence == len(NAMES) - 1 and fallen is not None:
            reasons.append(fallen)
        if evidence == EVICTS + 1 and self._may_queue:
            evidence = EVICTS
        for number in range(1, evidence + 1):
            self._seen_s[number] = now_s
        number = evidence
        in_flight = (values.get("running") or 0) + (values.get("waiting") or 0)
        hold_s = self._hold_s if in_flight else self._hold_s / 2
        usage = values.get("kv_usage_ratio")
        emptied = usage is not None and usage < EMPTIED_BELOW_RATIO
        for held in range(self._number, max(evidence, int(emptied)), -1):
            if now_s - self._seen_s[held] < hold_s:
                number = held
                ago_s = now_s - self._seen_s[held]
                reasons.append(f"stage {held} held: its evidence was last seen {span(ago_s)} ago")
                break
        if number != self._number or self._since_s != self._since_s:
            self._number, self._since_s = number, now_s
        seen["cascade_stage"] = float(number)
        return staged(
            number,
            self._since_s,
            self._held_severity(now_s, self._severity(moment)),
            forecast_s(values) if number < EVICTS else None,
            tuple(reasons),
        )

    def _moment(
        self, now_s: float, values: dict[str, float | None], preempted: float
    ) -> tuple[Moment, str | None]:
        """The values that the evidence reads, and why throughput has fallen (None: it has not).

        Adds the cascade's own values to `values`.
        """
        fallen = self._work.judge(now_s, values)
        usage = values.get("kv_usage_ratio")
        if usage is None or usage < FILLING_FROM_RATIO or self._number >= EVICTS:
            self._full_since_s = None
        elif self._full_since_s is None:
            self._full_since_s = now_s
        streaks_s = {} if self._full_since_s is None else {"filling": now_s - self._full_since_s}
        values["preempted_since_scrape"] = preempted
        values["work_fallen"] = float(fallen is not None)
        values["cascade_stage"] = float(self._number)
        return Moment(values, self._targets, streaks_s, scale=self._scale), fallen

    def _held_severity(self, now_s: float, severity: Severity) -> Severity:
        """The severity with hysteresis: it rises immediately and falls only after the hold time.

        Rates fluctuate around their bounds.
        """
        if severity < INFO or self._number < EVICTS:
            self._grave_s.clear()
            return severity
        self._grave_s[severity] = now_s
        return max(s for s, seen_s in self._grave_s.items() if now_s - seen_s < self._hold_s)
