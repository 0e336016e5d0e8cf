"""The KV memory-pressure cascade: which stage an engine is in, since when, and what comes next.
Pure.

Guide 7.4: the cache fills (1), running requests are evicted (2), requests queue behind their own
evicted state (3), useful work falls (4). vLLM's V1 engine recomputes what it evicts, so stage 4
shows as generated tokens falling while the GPU is busy; an engine that swaps shows it as an idle
GPU. Both count. vLLM counts a preemption only when the request yields a token again (0.32,
scheduler): while preempted requests are stuck in the queue of a full cache the counter stands
still, and the stage holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kneewatch.rules.model import WINDOW_S, Severity
from kneewatch.rules.work import UsefulWork

NAMES = ("steady", "filling", "evicting", "queueing", "collapsing")

FILLING_FROM_RATIO = 0.90
"""Upper end of the guide's target band for KV usage (9.3: 75-90 %)."""

FULL_FROM_RATIO = 0.97
"""So full that a preempted request may be stuck behind it."""

EVICT_WARNING_PER_S = 0.05
EVICT_CRITICAL_PER_S = 0.20
"""Preemptions per second and running request (guide 9.3; 7.4 has 5-10 %, 7.7 has 10 %)."""

PREEMPTIONS_MIN = 3.0
"""Fewer in the window are an event, not a rate: they are noted."""

QUEUE_SHARE_OF_RUNNING = 0.25
"""Stage 3: the queue by capacity is at least this share of the batch, and at least two requests."""

QUEUED_FROM = 0.5
"""Stage 3 by TTFT: so many wait in the window's mean, and one at least waits now."""

TTFT_DRIFT = 3.0
"""Stage 3 without an SLO: TTFT P99 this many times its quiet baseline."""

EXIT_HOLD_S = 30.0
"""How long the evidence of a stage must be gone; half of it once no request is left."""

NEEDED = ("kv_usage_ratio", "running", "waiting", "preemption_per_s")
"""Without one of these nobody can say that requests are not being evicted, or will not be soon."""

FORECAST = "kv_exhausted_in_s"
"""The derived signal that says when demand reaches the cache's capacity."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the cascade. `forecast_s`: seconds until the KV cache is full at the present
    trend."""

    number: int
    since_s: float
    severity: Severity
    forecast_s: float | None
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        """The stage's word."""
        return NAMES[self.number]


class Cascade:
    """The stage of one engine over time. `scale` is the short window against its default."""

    def __init__(
        self,
        *,
        scale: float,
        ttft_slo_s: float | None,
        warning_per_s: float = EVICT_WARNING_PER_S,
        critical_per_s: float = EVICT_CRITICAL_PER_S,
    ) -> None:
        self._warning_per_s, self._critical_per_s = warning_per_s, critical_per_s
        self._hold_s = EXIT_HOLD_S * scale
        self._ttft_slo_s = ttft_slo_s
        self._number, self._since_s = 0, float("nan")
        self._seen_s = {1: float("-inf"), 2: float("-inf"), 3: float("-inf"), 4: float("-inf")}
        self._filling_since_s: float | None = None
        self._grave_s: dict[Severity, float] = {}
        self._work = UsefulWork(window_s=WINDOW_S * scale)

    def forget(self) -> None:
        """The process was replaced: an empty cache has no stage to hold."""
        self._number, self._since_s = 0, float("nan")
        self._filling_since_s = None
        self._grave_s.clear()
        self._work.forget()
        self._seen_s = dict.fromkeys(self._seen_s, float("-inf"))

    def judge(self, now_s: float, values: Mapping[str, float | None], *, preempted: float) -> Stage:
        """The stage at `now_s`. `preempted`: preemptions counted since the scrape before."""
        reasons: list[str] = []
        fallen = self._work.judge(now_s, values)
        evidence = self._evidence(now_s, values, preempted, reasons)
        if evidence == 3 and fallen is not None:
            evidence = 4
            reasons.append(fallen)
        for number in range(1, evidence + 1):
            self._seen_s[number] = now_s
        number = evidence
        in_flight = (values.get("running") or 0) + (values.get("waiting") or 0)
        hold_s = self._hold_s if in_flight else self._hold_s / 2
        for held in range(self._number, evidence, -1):
            if now_s - self._seen_s[held] < hold_s:
                number = held
                ago_s = now_s - self._seen_s[held]
                reasons.append(f"stage {held} is held: its evidence was seen {ago_s:.0f} s ago")
                break
        if number != self._number or self._since_s != self._since_s:
            self._number, self._since_s = number, now_s
        return Stage(
            number,
            self._since_s,
            self._held_severity(now_s, self._severity(number, values)),
            forecast_s(values) if number < 2 else None,
            tuple(reasons),
        )

    def _evidence(
        self,
        now_s: float,
        values: Mapping[str, float | None],
        preempted: float,
        reasons: list[str],
    ) -> int:
        usage = values.get("kv_usage_ratio")
        stuck = (
            self._number >= 2
            and usage is not None
            and usage >= FULL_FROM_RATIO
            and (values.get("waiting_by_capacity") or 0) >= 1
        )
        if preempted > 0:
            reasons.append("running requests were preempted")
        elif stuck:
            reasons.append("the cache is still full with requests waiting for it")
        else:
            return 0 if usage is None else self._filling(now_s, usage, values, reasons)
        self._filling_since_s = None
        return 3 if self._queueing(values, reasons) else 2

    def _filling(
        self,
        now_s: float,
        usage: float,
        values: Mapping[str, float | None],
        reasons: list[str],
    ) -> int:
        if usage < FILLING_FROM_RATIO:
            self._filling_since_s = None
            return 0
        if self._filling_since_s is None:
            self._filling_since_s = now_s
        rising = (values.get("kv_usage_slope_per_s") or 0) > 0
        if not rising and now_s - self._filling_since_s < self._hold_s:
            return 0
        reasons.append("KV usage is above its band" + (" and rising" if rising else ""))
        return 1

    def _queueing(self, values: Mapping[str, float | None], reasons: list[str]) -> bool:
        waiting = values.get("waiting_by_capacity") or 0.0
        running = values.get("running") or 0.0
        if waiting >= max(2.0, QUEUE_SHARE_OF_RUNNING * running):
            reasons.append("requests queue behind the full cache")
        if not self._queue_is_there(values):
            return len(reasons) > 1
        ttft_s, drift = values.get("ttft_p99_s"), values.get("ttft_p99_drift_ratio")
        if self._ttft_slo_s is not None:
            if ttft_s is not None and ttft_s > self._ttft_slo_s:
                reasons.append("TTFT P99 is over its target")
        elif drift is not None and drift > TTFT_DRIFT:
            reasons.append("TTFT P99 has left its quiet baseline")
        return len(reasons) > 1

    @staticmethod
    def _queue_is_there(values: Mapping[str, float | None]) -> bool:
        # A slower first token alone may be longer prompts, or an incident that the window still
        # holds; behind evictions it must have queued, and somebody must wait now.
        waiting, waiting_avg = values.get("waiting") or 0.0, values.get("waiting_avg") or 0.0
        return waiting >= 1 and waiting_avg >= QUEUED_FROM

    def _severity(self, number: int, values: Mapping[str, float | None]) -> Severity:
        if number < 2:
            return Severity.INFO if number else Severity.OK
        ratio = values.get("preemption_ratio_per_s") or 0.0
        counted = values.get("preempted_in_window")
        few = counted is not None and counted < PREEMPTIONS_MIN
        if number == 4 or (ratio > self._critical_per_s and not few):
            return Severity.CRITICAL
        if number == 3 or (ratio > self._warning_per_s and not few):
            return Severity.WARNING
        return Severity.INFO

    def _held_severity(self, now_s: float, severity: Severity) -> Severity:
        """A severity that rises at once and falls only after the hold: a rate swings about its
        bound."""
        if severity < Severity.INFO or self._number < 2:
            self._grave_s.clear()
            return severity
        self._grave_s[severity] = now_s
        return max(s for s, seen_s in self._grave_s.items() if now_s - seen_s < self._hold_s)


def lacking(stage: Stage, values: Mapping[str, float | None]) -> tuple[str, ...]:
    """Signals without which a stage cannot be told; from evicting on it stands on what was seen."""
    if stage.number >= 2:
        return ()
    return tuple(signal for signal in NEEDED if values.get(signal) is None)


def forecast_s(values: Mapping[str, float | None]) -> float | None:
    """Seconds until the KV cache is exhausted at the present trend; None without a trend."""
    return values.get(FORECAST)
