"""A tier's service level: percentiles, goodput, error budget, by hour and weekday. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from kneewatch.collector.signals.vllm import DECODE, E2E, ITL, PREFILL, QUEUE, TTFT
from kneewatch.reports.formatting import duration
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import DOWN, UP
from kneewatch.reports.weekly.hours import Slot
from kneewatch.reports.weekly.observed import Span, Tally, TierStated
from kneewatch.reports.weekly.tier_sections import ErrorBudget, Hour, Latency, TierSlo, WeekdayHour
from kneewatch.reports.weekly.trends import Measure, TierPeriod, in_turn, trend

NO_TARGET = "no TTFT target set (slo.ttft_p99_s): late requests are unknown"
LATENCIES = (
    ("ttft", TTFT),
    ("itl", ITL),
    ("e2e", E2E),
    ("queue", QUEUE),
    ("prefill", PREFILL),
    ("decode", DECODE),
)


def slo(
    tier: str, stated: TierStated, now: TierPeriod | None, before: TierPeriod | None
) -> TierSlo:
    """The tier's service level over the period."""
    target_s = stated.targets.ttft_p99_s
    missing = NO_TARGET if target_s is None else "no requests in this period"
    in_time = m.goodput(target_s, stated.targets.itl_p99_s)
    goodput = Measure("goodput_per_s", "goodput", "per_s", in_time, UP, missing=missing)
    whole = now.whole if now is not None else Span()
    shares = [m.share_of_time(part)(whole) for part in (QUEUE, PREFILL, DECODE)]
    present = [share for share in shares if share is not None]
    return TierSlo(
        tier=tier,
        latencies=tuple(_latency(name, metric, stated, now, before) for name, metric in LATENCIES),
        served_per_s=trend(m.SERVED, now, before),
        goodput_per_s=trend(goodput, now, before),
        budget=_budget(stated, whole),
        hours=_hours(stated, now) if now is not None else (),
        by_weekday=_by_weekday(stated, now) if now is not None else (),
        queue_ratio=shares[0],
        prefill_ratio=shares[1],
        decode_ratio=shares[2],
        other_ratio=max(0.0, 1 - sum(present)) if len(present) == len(shares) else None,
        missing="" if now is not None else "the tier was not watched in this period",
    )


def _latency(
    name: str, metric: str, stated: TierStated, now: TierPeriod | None, before: TierPeriod | None
) -> Latency:
    budget_s = {"ttft": stated.targets.ttft_p99_s, "itl": stated.targets.itl_p99_s}.get(name)
    figures = m.percentiles(name, metric, "s", now, before, ending="_s", good=DOWN)
    p50, p99 = figures["p50"], figures["p99"]
    tally = now.whole.tallies.get(metric) if now is not None else None
    kept = None if tally is None or budget_s is None else tally.within(budget_s)
    state = "unknown"
    if budget_s is not None and p99.value is not None and p50.value is not None:
        state = "ok" if p99.value <= budget_s else "warning"
        state = "critical" if p50.value > budget_s else state
    whole = now.whole if now is not None else Span()
    return Latency(
        name=name,
        **figures,
        observations=0.0 if tally is None else tally.count,
        budget_s=budget_s,
        within_ratio=m.within(metric, budget_s)(whole),
        judged_at_s=None if kept is None else kept[1],
        state=state,
        missing=_coarse(tally),
    )


def _coarse(tally: Tally | None) -> str:
    """A note if the percentile is in the lowest bucket: it may be anywhere below its bound."""
    if tally is None or not tally.count:
        return "no samples"
    lowest_s, below = tally.bounds[0], tally.counts[0] / tally.count
    inside = [f"P{percent}" for percent in m.PERCENTS if below >= percent / 100]
    if not inside or not 0 < lowest_s < math.inf:
        return ""
    return f"{', '.join(inside)}: below {duration(lowest_s)}, the lowest bucket"


def _budget(stated: TierStated, whole: Span) -> ErrorBudget:
    """The error budget: late first tokens compared with the share that the objective allows."""
    tally, target_s = whole.tallies.get(TTFT), stated.targets.ttft_p99_s
    requests = 0.0 if tally is None else tally.count
    kept = m.within(TTFT, target_s)(whole)
    bad = None if kept is None else 1 - kept
    missing = NO_TARGET if target_s is None else "" if requests else "no requests in this period"
    return ErrorBudget(
        objective_ratio=stated.objective_ratio,
        requests=requests,
        bad_requests=None if bad is None else bad * requests,
        bad_ratio=bad,
        spent_ratio=None if bad is None else bad / (1 - stated.objective_ratio),
        missing=missing,
    )


def _hours(stated: TierStated, now: TierPeriod) -> tuple[Hour, ...]:
    return tuple(
        _hour(stated, slot, span) for slot, span in zip(now.grid.slots, now.hours, strict=True)
    )


def _hour(stated: TierStated, slot: Slot, span: Span) -> Hour:
    bad, burn = _burn(stated, span)
    running = m.level(m.RUNNING)(span)
    waiting = m.level(m.WAITING)(span)
    return Hour(
        start_s=slot.start_s,
        weekday=slot.weekday,
        hour=slot.hour,
        watched_ratio=min(1.0, span.clock_s / (slot.end_s - slot.start_s)),
        requests=_requests(span),
        tokens=span.counts.get(m.GENERATED),
        ttft_p50_s=m.quantile(TTFT, 0.5)(span),
        ttft_p99_s=m.quantile(TTFT, 0.99)(span),
        itl_p99_s=m.quantile(ITL, 0.99)(span),
        in_flight=None if running is None else running + (waiting or 0.0),
        bad_ratio=bad,
        burn=burn,
    )


def _burn(stated: TierStated, span: Span) -> tuple[float | None, float | None]:
    """The share of late requests, and its ratio to the allowed share (burn rate)."""
    kept = m.within(TTFT, stated.targets.ttft_p99_s)(span)
    if kept is None:
        return None, None
    return 1 - kept, (1 - kept) / (1 - stated.objective_ratio)


def _requests(span: Span) -> float | None:
    tally = span.tallies.get(TTFT)
    return None if tally is None else tally.count


def _by_weekday(stated: TierStated, now: TierPeriod) -> tuple[WeekdayHour, ...]:
    """All 168 hours of a week, including hours without data."""
    cells: dict[tuple[int, int], list[Span]] = {}
    for slot, span in zip(now.grid.slots, now.hours, strict=True):
        cells.setdefault((slot.weekday, slot.hour), []).append(span)
    return tuple(
        _weekday_hour(stated, weekday, hour, cells.get((weekday, hour), []))
        for weekday, hour in product(range(7), range(24))
    )


def _weekday_hour(
    stated: TierStated, weekday: int, hour: int, spans: Sequence[Span]
) -> WeekdayHour:
    span = in_turn(spans)
    bad, burn = _burn(stated, span)
    return WeekdayHour(weekday, hour, _requests(span), bad, burn, m.quantile(TTFT, 0.99)(span))
