"""The stages of the KV memory-pressure cascade: their evidence, severity and forecast. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct, field

from kneewatch.rules.conditions import Check, Condition, Number, first_of, those_that_hold
from kneewatch.rules.facts import Moment
from kneewatch.rules.quantities import Live, Target
from kneewatch.rules.rule import CRITICAL, INFO, OK, WARNING, Rule, Severity
from kneewatch.rules.wire import Figure, UnixTime, to_ms

# --- Stages ---------------------------------------------------------------------------------------
#
# Guide 7.4: the cache fills (1), running requests are preempted (2), requests queue (3), throughput
# falls (4). vLLM's V1 engine recomputes what it preempts, so stage 4 shows as falling generation
# throughput on a busy GPU; an engine that swaps shows it as an idle GPU. Both count. vLLM counts a
# preemption only when the request yields a token again (0.32, scheduler): while preempted requests
# are stuck in the queue of a full cache the counter stands still, and the stage holds.

NAMES = ("steady", "filling", "evicting", "queueing", "collapsing")
EVICTS = 2
"""The first stage in which requests are delayed: vLLM preempts."""

FILLING_FROM_RATIO = 0.90
"""Upper end of the guide's target band for KV usage (9.3: 75-90%)."""

EMPTIED_BELOW_RATIO = 0.75
"""Lower end of the guide's target band: a cache below it is no longer filling."""

EVICT_WARNING_PER_S = 0.05
EVICT_CRITICAL_PER_S = 0.20
"""Preemptions per second and running request (guide 9.3; 7.4 has 5-10%, 7.7 has 10%)."""

PREEMPTIONS_MIN = 3.0
"""Fewer preemptions in the window are single events, not a rate, and stay at `info`."""

FULL_FROM_RATIO = 0.97
"""From this KV usage on, a preempted request may be stuck in the queue."""

QUEUE_SHARE_OF_RUNNING = 0.25
"""Stage 3: the queue for capacity is at least this share of the running requests, and at least
2."""

QUEUED_FROM = 0.5
"""Stage 3 by TTFT needs this mean of queued requests in the window, and at least one queued now."""

TTFT_DRIFT = 3.0
"""Stage 3 without an SLO: TTFT P99 divided by its quiet baseline is above this."""

EXIT_HOLD_S = 30.0
"""A stage ends after its evidence has been absent for this long.

If no request is in flight, half of this time is enough.
"""

NEEDED = ("kv_usage_ratio", "running", "waiting", "preemption_per_s")
"""If one of these signals is missing, the stage is unknown."""

STAGE = Live("cascade_stage")
SEVERITY = Live("cascade_severity")
KV_USAGE, WAITING = Live("kv_usage_ratio"), Live("waiting")
QUEUE = Live("waiting_by_capacity")
PREEMPTED = Live("preempted_since_scrape") > 0.0

STUCK = (KV_USAGE >= FULL_FROM_RATIO) & (QUEUE >= 1.0) & (STAGE >= 2.0)
"""Preempted requests may be stuck in the queue behind a full cache. vLLM does not count them."""

BEHIND = QUEUE >= (QUEUE_SHARE_OF_RUNNING * Live("running").otherwise(0.0)).at_least(2.0)
OVER_TARGET = Live("ttft_p99_s") > Target("ttft_p99_s")
LEFT_BASELINE = ~Target("ttft_p99_s").known & (Live("ttft_p99_drift_ratio") > TTFT_DRIFT)
QUEUED = (WAITING >= 1.0) & (Live("waiting_avg") >= QUEUED_FROM)
"""Requests queued during the window, and at least one is queued now.

A higher TTFT is not enough: longer prompts also raise it, and so does a past incident that is still
inside the window.
"""

RISING = Live("kv_usage_slope_per_s") > 0.0
FULL = KV_USAGE >= FILLING_FROM_RATIO
FILLED = Check("filling", FULL, Number(EXIT_HOLD_S))
EVICTING = PREEMPTED | STUCK
QUEUEING = EVICTING & (BEHIND | ((OVER_TARGET | LEFT_BASELINE) & QUEUED))

EVIDENCE: tuple[tuple[int, Condition], ...] = (
    (4, QUEUEING & (Live("work_fallen") > 0.0)),
    (3, QUEUEING),
    (2, EVICTING),
    (1, FULL & (RISING | FILLED)),
)
"""The evidence for each stage, worst first. The stage is 0 if there is no evidence."""

REASONS: tuple[tuple[int, Condition, str], ...] = (
    (2, PREEMPTED, "vLLM preempted running requests"),
    (2, STUCK & ~PREEMPTED, "the KV cache is still full and requests are queued for it"),
    (2, BEHIND, "requests queue behind the full KV cache"),
    (2, OVER_TARGET & QUEUED, "TTFT P99 is over its target"),
    (2, LEFT_BASELINE & QUEUED, "TTFT P99 is above its quiet baseline"),
    (1, RISING, "KV usage is above its band and rising"),
    (1, ~RISING.assume(unknown=False), "KV usage is above its band"),
)
"""The stage, condition and text of each piece of evidence. Stage 2 stands for stages 2 and
above."""


@lru_cache(maxsize=8)
def compiled_severities(evicting: Rule) -> Callable[[Moment], Severity]:
    """A function that returns the severity of a moment's stage, shared by all engines whose rule
    KV-EVICT has the same bounds."""
    ratio = Live(evicting.signal)
    many = (Live("preempted_in_window") >= PREEMPTIONS_MIN).assume(unknown=True)

    def over(severity: Severity) -> Condition:
        bound = evicting.threshold(severity) or 0.0
        return (STAGE >= 2.0) & many & (ratio > bound)

    worst_first = (
        (CRITICAL, (STAGE >= 4.0) | over(CRITICAL)),
        (WARNING, (STAGE >= 3.0) | over(WARNING)),
        (INFO, STAGE >= 1.0),
    )
    return first_of(worst_first, OK)


FORECAST = "kv_exhausted_in_s"
"""The derived signal: seconds until demand reaches the KV cache's capacity."""


class Stage(Struct, frozen=True):
    """A stage of the KV memory-pressure cascade. All is null if the stage is unknown.

    - `number`: 0 to 4.
    - `name`: the stage's name.
    - `since_s`: when the stage began.
    - `forecast_s`: seconds until the KV cache is full if the trend continues; null without a trend,
      and from stage 2 on.
    - `severity`: how bad the stage is.
    - `reasons`: the measured values that the stage is concluded from; during the stage's hold time,
      when they were last seen. Empty at stage 0.
    """

    number: Annotated[int, Meta(ge=0, lt=len(NAMES))] | None = None
    name: Annotated[str, Meta(extra_json_schema={"enum": [*NAMES, "unknown"]})] = "unknown"
    since_s: UnixTime | None = field(default=None, name="since")
    forecast_s: Figure | None = None
    severity: Severity | None = None
    reasons: tuple[str, ...] = ()

    @property
    def level(self) -> int:
        """The stage's number; 0 if it is unknown."""
        return self.number or 0


def staged(
    number: int,
    since_s: float,
    severity: Severity,
    left_s: float | None,
    reasons: tuple[str, ...],
) -> Stage:
    """A known stage; `left_s` is its forecast."""
    forecast = None if left_s is None else round(left_s, 1)
    return Stage(number, NAMES[number], to_ms(since_s), forecast, severity, reasons)


_STAGE_OF = first_of(EVIDENCE, 0)
_REASONS = those_that_hold({text: when for _, when, text in REASONS})


def evidence_of(moment: Moment) -> tuple[int, list[str]]:
    """The highest stage for which there is evidence now, and the texts of that evidence."""
    stage = _STAGE_OF(moment)
    if stage == 0:
        return stage, []
    kind = min(stage, EVICTS)
    holds = _REASONS(moment)
    return stage, [text for least, _, text in REASONS if least == kind and text in holds]


def lacking(stage: Stage, values: Mapping[str, float | None]) -> tuple[str, ...]:
    """Missing signals without which the stage is unknown.

    Empty from stage 2 on, because observed preemptions prove the stage.
    """
    if stage.level >= EVICTS:
        return ()
    return tuple(signal for signal in NEEDED if values.get(signal) is None)


def forecast_s(values: Mapping[str, float | None]) -> float | None:
    """Seconds until the KV cache is full if the trend continues; None without a trend."""
    return values.get(FORECAST)
