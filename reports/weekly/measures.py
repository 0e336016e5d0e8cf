"""The figures of a tier. Each is computed from a span of time; its trend shows only changes above
the noise. Pure.

Counters, histograms and gauges have the names of vLLM's current versions, without prefix.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from statistics import fmean, stdev

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.signals.table import E2E, ITL, TTFT
from kneewatch.reports.weekly.figures import DOWN, SAME, UP, Spark, Trend
from kneewatch.reports.weekly.observed import (
    NO_TALLY,
    SERVING,
    EnginesObserved,
    Grid,
    Level,
    Span,
    Tally,
    added,
)
from kneewatch.rules.rule import HOUR_S

EMPTY = Span()


def beside(spans: Sequence[Span]) -> Span:
    """Merge the spans of several engines over the same time."""
    return _merged(spans, clock_s=max((span.clock_s for span in spans), default=0.0))


def in_turn(spans: Sequence[Span]) -> Span:
    """Merge consecutive spans."""
    return _merged(spans, clock_s=fsum(span.clock_s for span in spans))


def hourly(of: EnginesObserved) -> list[Span]:
    """The hours of a tier. Empty if the tier has no engines."""
    rows = [*(engine.spans for engine in of.engines), *([of.spans] if of.spans else ())]
    return [beside(spans) for spans in zip(*rows, strict=True)]


def by_day(grid: Grid, hours: Sequence[Span]) -> list[Span]:
    """The days of a period, merged from its hours."""
    days: list[list[Span]] = [[] for _ in grid.day_starts_s]
    for slot, span in zip(grid.slots, hours, strict=True):
        days[slot.day].append(span)
    return [in_turn(day) for day in days]


def _merged(spans: Sequence[Span], *, clock_s: float) -> Span:
    if len(spans) == 1:
        return spans[0]
    return Span(
        engine_s=fsum(span.engine_s for span in spans),
        clock_s=clock_s,
        watched_s=fsum(span.watched_s for span in spans),
        idle_s=fsum(span.idle_s for span in spans),
        counts=_counts(span.counts for span in spans),
        tallies=_tallies([span.tallies for span in spans]),
        levels=merged_levels(span.levels for span in spans),
    )


def _counts(all_counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for counts in all_counts:
        for key, value in counts.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums


def _tallies(all_tallies: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    keys = dict.fromkeys(key for tallies in all_tallies for key in tallies)
    return {key: added(tallies.get(key, NO_TALLY) for tallies in all_tallies) for key in keys}


def merged_levels(all_levels: Iterable[Mapping[str, Level]]) -> dict[str, Level]:
    """The gauges of several engines over the same time, or of consecutive times."""
    merged: dict[str, Level] = {}
    for levels in all_levels:
        for key, level in levels.items():
            before = merged.get(key)
            merged[key] = level if before is None else _level(before, level)
    return merged


def _level(level: Level, other: Level) -> Level:
    known_s = level.known_s + other.known_s
    high, top = max(level.high, other.high), max(level.top, other.top)
    if known_s <= 0:
        return Level(level.mean, high, 0.0, top)
    mean = (level.mean * level.known_s + other.mean * other.known_s) / known_s
    return Level(mean, high, known_s, top)


# --- This period against the one before: an arrow only where the change is more than noise --------


NOISE_TEST = (
    "An arrow marks a change larger than the usual noise: each day is compared with the same day "
    "of the period before, as a ratio (as a difference if a value is zero). The mean change must "
    "be significant at 99% (two-sided Student's t-test over the days) and larger than 2%. With "
    "fewer than three pairs of days there is no arrow."
)
PAIRS_MIN = 3
LEAST_RATIO = 0.02
"""Minimum relative change that is shown. Smaller changes do not matter for the bill."""

MOST_LOG = 50.0
"""Maximum of the logarithm of a change, so that `exp` does not overflow."""

_FREEDOM = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 60)
_T99 = (9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.055, 2.947, 2.845, 2.750,
        2.660)  # fmt: skip
"""Two-sided 99% quantiles of Student's t-distribution, by degrees of freedom (`_FREEDOM`)."""

SPARK_STEPS_MOST = 42

NO_REQUEST = "no request in this time"
Of = Callable[[Span], float | None]


class Measure(Struct, frozen=True):
    """A figure that can be computed from any span of a tier.

    `good` is the direction that is an improvement; empty if neither direction is. `missing` says
    why the figure may be unknown, and how to enable it.
    """

    key: str
    name: str
    unit: str
    of: Of
    good: str = ""
    missing: str = NO_REQUEST


class TierPeriod(Struct, frozen=True):
    """The data of a tier over a period: by hour, by day, and in total. Empty if the tier was not
    watched."""

    grid: Grid
    hours: tuple[Span, ...]
    days: tuple[Span, ...]
    whole: Span

    def value(self, measure: Measure) -> float | None:
        """The value of a figure over the whole period. None if the tier was not watched."""
        return measure.of(self.whole) if self.hours else None

    def by_day(self, measure: Measure) -> list[float | None]:
        """The value of a figure on each day."""
        return [measure.of(day) for day in self.days]

    def spark(self, measure: Measure) -> Spark:
        """A figure over the period, in at most SPARK_STEPS_MOST steps, for a sparkline."""
        hours_each = max(1, math.ceil(len(self.hours) / SPARK_STEPS_MOST))
        values = tuple(
            measure.of(in_turn(self.hours[at : at + hours_each]))
            for at in range(0, len(self.hours), hours_each)
        )
        return Spark(self.grid.from_s, hours_each * HOUR_S, measure.unit, values)


def past(grid: Grid, of: EnginesObserved) -> TierPeriod:
    """The data of a tier over a period. Hours and days are empty if the tier had no engine."""
    if not of.engines:
        return TierPeriod(grid, (), (), EMPTY)
    hours = hourly(of)
    return TierPeriod(grid, tuple(hours), tuple(by_day(grid, hours)), in_turn(hours))


def trend(measure: Measure, now: TierPeriod, before: TierPeriod) -> Trend:
    """The value of a figure in both periods, and the direction of its change."""
    value, value_before = now.value(measure), before.value(measure)
    result = Trend(
        measure.key, measure.name, measure.unit, value, value_before,
        missing=measure.missing if value is None else "",
    )  # fmt: skip
    return judged(result, measure.good, now.by_day(measure), before.by_day(measure))


def judged(
    change: Trend,
    good: str,
    days: Sequence[float | None],
    days_before: Sequence[float | None],
) -> Trend:
    """A copy of the trend with its direction, which is computed from the values of the single
    days."""
    if change.value is None or change.before is None:
        return change
    pairs = [
        (now, before)
        for now, before in zip(days, days_before, strict=False)
        if now is not None and before is not None
    ]
    if len(pairs) < PAIRS_MIN:
        return change
    step, noise = _by_ratio(pairs, change.before) or _by_difference(pairs, change.before)
    if abs(step) <= noise or step * (change.value - change.before) <= 0:
        return replace(change, noise=noise, direction=SAME)
    direction = UP if step > 0 else DOWN
    return replace(
        change, noise=noise, direction=direction, good=None if not good else direction == good
    )


def _by_ratio(pairs: Sequence[tuple[float, float]], before: float) -> tuple[float, float] | None:
    """The mean change and its noise, both in the figure's unit. Changes are compared as ratios.
    None if a value is not positive."""
    if before <= 0 or any(now <= 0 or earlier <= 0 for now, earlier in pairs):
        return None
    steps = [math.log(now / earlier) for now, earlier in pairs]
    noise = max(_chance(steps), math.log(1 + LEAST_RATIO))
    step = fmean(steps)
    if abs(step) <= noise:
        return 0.0, before * math.expm1(min(noise, MOST_LOG))
    return before * math.expm1(min(step, MOST_LOG)), before * abs(
        math.expm1(min(math.copysign(noise, step), MOST_LOG))
    )


def _by_difference(pairs: Sequence[tuple[float, float]], before: float) -> tuple[float, float]:
    steps = [now - earlier for now, earlier in pairs]
    return fmean(steps), max(_chance(steps), LEAST_RATIO * abs(before))


def _chance(steps: Sequence[float]) -> float:
    """The largest mean change that is likely by chance alone (99%, Student's t-test)."""
    t99 = _T99[max(bisect_right(_FREEDOM, len(steps) - 1) - 1, 0)]
    return t99 * stdev(steps) / math.sqrt(len(steps))


def unknown(measure: Measure, missing: str) -> Trend:
    """A figure without a value, with the reason."""
    return Trend(measure.key, measure.name, measure.unit, None, missing=missing)


# --- Figures --------------------------------------------------------------------------------------


#
# Counters, histograms and gauges are named as vLLM's current versions do, without prefix.


COMPLETED, PREEMPTIONS = "request_success", "num_preemptions"
PROMPT, GENERATED, COMPUTED = "prompt_tokens", "generation_tokens", "computed_prompt_tokens"
FAILED = "failed"
"""Requests that finished with reason error or abort."""

RUNNING, WAITING, KV_USAGE = "running", "waiting", "kv_usage_ratio"
GPU_MEMORY, GPU_BUSY = "gpu_memory_used_ratio", "gpu_engine_active_ratio"
DEFERRED, ADAPTER_CHANGES = "waiting_deferred", "lora_change_per_s"
LEVELS = (
    RUNNING,
    WAITING,
    KV_USAGE,
    GPU_MEMORY,
    GPU_BUSY,
    DEFERRED,
    ADAPTER_CHANGES,
    "kv_capacity_tokens",
)
"""The gauges that the report reads."""

EVICTED = "preemption_ratio_per_s"
"""Preemptions per second and running request. Kept as a level, because the mean of a level is
exact."""

SERVED_ONLY = (KV_USAGE, GPU_BUSY)
"""Gauges that are aggregated twice: over the whole time, and over the time in which requests
ran."""

GPU_SOURCE = (
    "pass the DCGM exporter's URL (--gpu-metrics), run the sidecar on the GPU node, or let the "
    "metrics system scrape the exporter"
)
GPU_MISSING = f"no GPU source: {GPU_SOURCE}"
PERCENTS = (50, 95, 99)


def quantile(metric: str, q: float) -> Of:
    """A function that returns a quantile of a histogram."""
    return _of_tally(metric, lambda tally: tally.quantile(q))


def mean(metric: str) -> Of:
    """A function that returns the mean of a histogram."""
    return _of_tally(metric, lambda tally: tally.mean)


def _of_tally(metric: str, figure: Callable[[Tally], float | None]) -> Of:
    def read(span: Span) -> float | None:
        tally = span.tallies.get(metric)
        return None if tally is None else figure(tally)

    return read


def percentiles(
    key: str,
    metric: str,
    unit: str,
    now: TierPeriod,
    before: TierPeriod,
    *,
    ending: str = "",
    good: str = "",
    missing: str = NO_REQUEST,
) -> dict[str, Trend]:
    """P50, P95, P99 and mean of a histogram; the keys of the result are p50, p95, p99 and mean. The
    key of each figure starts with `key` and ends with `ending`."""
    figures = {f"p{percent}": quantile(metric, percent / 100) for percent in PERCENTS}
    return {
        name: trend(
            Measure(f"{key}_{name}{ending}", name.replace("p", "P"), unit, of, good, missing),
            now,
            before,
        )
        for name, of in {**figures, "mean": mean(metric)}.items()
    }


def per_s(count: str) -> Of:
    """A function that returns the rate of a counter per second, summed over all engines. It divides
    by the time in which at least one engine has counter data."""
    return lambda span: over(span.counts.get(count), span.clock_s)


def ratio(part: str, whole: str) -> Of:
    """A function that returns the ratio of two counters."""
    return lambda span: over(span.counts.get(part), span.counts.get(whole))


def level(key: str, *, serving: bool = False) -> Of:
    """A function that returns the time-weighted mean of a gauge over all engines. `serving`: only
    over the time in which requests ran."""
    return _of_level(key, lambda level: level.mean, serving=serving)


def top(key: str, *, serving: bool = False) -> Of:
    """A function that returns the highest hourly mean of a gauge on any engine. `serving`: only
    over the time in which requests ran."""
    return _of_level(key, lambda level: level.top, serving=serving)


def _of_level(key: str, figure: Callable[[Level], float], *, serving: bool) -> Of:
    name = key + SERVING if serving else key

    def read(span: Span) -> float | None:
        level = span.levels.get(name)
        return figure(level) if level is not None and level.known_s > 0 else None

    return read


def share_of_time(part: str) -> Of:
    """A function that returns the share of one phase in the total time of requests."""

    def read(span: Span) -> float | None:
        stage, whole = span.tallies.get(part), span.tallies.get(E2E)
        return None if stage is None or whole is None else over(stage.sum, whole.sum)

    return read


def saved(span: Span) -> float | None:
    """The share of prompt tokens that came from the prefix cache. None if unknown."""
    computed = over(span.counts.get(COMPUTED), span.counts.get(PROMPT))
    return None if computed is None else 1 - computed


def over(part: float | None, whole: float | None) -> float | None:
    """`part` / `whole`; None if either is unknown or `whole` is 0."""
    return part / whole if part is not None and whole is not None and whole > 0 else None


def within(metric: str, bound: float | None) -> Of:
    """A function that returns the share of observations within a bound. It counts up to the largest
    bucket bound that is not above `bound`."""

    def share(tally: Tally) -> float | None:
        kept = None if bound is None else tally.within(bound)
        return None if bound is None else over(0.0 if kept is None else kept[0], tally.count)

    return _of_tally(metric, share)


def goodput(ttft_target_s: float | None, itl_target_s: float | None) -> Of:
    """A function that returns the goodput: requests/s served within the targets.

    It is the rate of served requests, multiplied by the share of requests whose first token was in
    time. If an ITL target is set, the share of token gaps above that target is subtracted from this
    share. vLLM counts slow gaps, not requests with a slow gap. Slow gaps are therefore assumed to
    be spread over requests whose first token was in time.
    """
    first, gaps = within(TTFT, ttft_target_s), within(ITL, itl_target_s)
    served = per_s(COMPLETED)

    def read(span: Span) -> float | None:
        in_time, all_per_s = first(span), served(span)
        smooth = 1.0 if itl_target_s is None else gaps(span)
        if in_time is None or all_per_s is None or smooth is None:
            return None
        return max(0.0, in_time + smooth - 1) * all_per_s

    return read


def per_gpu(key: str, gpus: float | None) -> Of:
    """A function that returns the increase of a counter per second and GPU. `gpus` is the number of
    GPUs per engine. For another unit, such as GB of memory, pass the number of these units per
    engine."""

    def read(span: Span) -> float | None:
        return None if gpus is None else over(span.counts.get(key), span.engine_s * gpus)

    return read


def tokens_per_gpu_hour(gpus: int | None) -> Of:
    """A function that returns the number of generated tokens per GPU-hour, including idle hours."""
    return per_gpu(GENERATED, None if gpus is None else gpus / HOUR_S)


SERVED = Measure("served_per_s", "requests served", "per_s", per_s(COMPLETED))
