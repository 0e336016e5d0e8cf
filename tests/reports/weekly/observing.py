"""What might have been observed of a fleet: engines that serve at a constant pace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from msgspec.structs import replace

from kneewatch.collector.signals.table import (
    DECODE,
    E2E,
    ITL,
    OUTPUT_LENGTH,
    PREFILL,
    PROMPT_LENGTH,
    QUEUE,
    TTFT,
)
from kneewatch.diagnose.learned.knee import LoadPoint
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.observed import (
    SERVING,
    EngineObserved,
    EnginesObserved,
    Grid,
    Level,
    Observed,
    Slot,
    Span,
    Tally,
    TierObserved,
    TierStated,
    grid,
)
from kneewatch.rules.rule import DAY_S

TO_S = datetime(2026, 11, 16, tzinfo=UTC).timestamp()
WEEK = grid(TO_S - 7 * DAY_S, TO_S, "UTC")
BEFORE = grid(TO_S - 14 * DAY_S, TO_S - 7 * DAY_S, "UTC")

EDGES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf)
LENGTHS = (100.0, 500.0, 1000.0, 5000.0, math.inf)

Busy = Callable[[Slot], float]
"""Requests a second in an hour."""


def tally(edges: Sequence[float], shares: Mapping[float, float], count: float) -> Tally:
    """A histogram: values and the shares of observations that have them."""
    counts = tuple(
        count * sum(share for value, share in shares.items() if value <= edge) for edge in edges
    )
    total = count * sum(value * share for value, share in shares.items())
    return Tally(tuple(edges), counts, total)


def level(mean: float, known_s: float) -> Level:
    """A gauge that stood still."""
    return Level(mean, mean, known_s, mean)


def span(
    slot: Slot, per_s: float, *, late_ratio: float = 0.0, preempted_per_s: float = 0.0
) -> Span:
    """An hour of an engine that serves so many requests a second, a share of them late."""
    lasted_s = slot.end_s - slot.start_s
    count, running = per_s * lasted_s, 2.0 * per_s
    ttft = {0.2: 1 - late_ratio, 4.0: late_ratio}
    return Span(
        engine_s=lasted_s,
        clock_s=lasted_s,
        watched_s=lasted_s,
        idle_s=0.0 if per_s > 0.1 else lasted_s,
        counts={
            m.COMPLETED: count,
            m.PREEMPTIONS: preempted_per_s * lasted_s,
            m.PROMPT: 400 * count,
            m.COMPUTED: 100 * count,
            m.GENERATED: 150 * count,
            "prefix_cache_queries": 400 * count,
            "prefix_cache_hits": 300 * count,
        },
        tallies={
            TTFT: tally(EDGES, ttft, count),
            ITL: tally(EDGES, {0.05: 1.0}, 149 * count),
            E2E: tally(EDGES, {2.0: 1.0}, count),
            QUEUE: tally(EDGES, {0.2: 1.0}, count),
            PREFILL: tally(EDGES, {0.2: 1.0}, count),
            DECODE: tally(EDGES, {1.5: 1.0}, count),
            PROMPT_LENGTH: tally(LENGTHS, {400.0: 1.0}, count),
            OUTPUT_LENGTH: tally(LENGTHS, {150.0: 1.0}, count),
        },
        levels={
            m.RUNNING: level(running, lasted_s),
            m.WAITING: level(0.0, lasted_s),
            m.KV_USAGE: level(0.8, lasted_s),
            m.KV_USAGE + SERVING: level(0.8, lasted_s),
            m.EVICTED: level(preempted_per_s / max(running, 1e-9), running * lasted_s),
            "kv_capacity_tokens": level(100_000.0, lasted_s),
        },
    )  # fmt: skip


def points(most: float = 32.0) -> list[LoadPoint]:
    """Windows at loads up to so many requests in flight, later the more there are."""
    all_points: list[LoadPoint] = []
    load = 1.0
    while load <= most:
        served = 4.0 * load / (1 + load / 12)
        all_points += [
            LoadPoint(TO_S - 3600.0 + at, load, served, 150 * served, load / served / 150,
                  0.1 + 0.02 * load * load / 8, 0.02)
            for at in range(4)
        ]  # fmt: skip
        load *= 2
    return all_points


def engine(
    name: str, where: Grid = WEEK, busy: Busy = lambda _slot: 2.0, **more: float
) -> EngineObserved:
    """An engine that was watched all the time."""
    minutes = [60 * busy(slot) for slot in where.slots for _ in range(60)]
    return EngineObserved(
        target=name,
        engine="0",
        replica="",
        first_s=where.from_s,
        last_s=where.to_s,
        spans=[span(slot, busy(slot), **more) for slot in where.slots],
        minutes=minutes,
        points=points(),
        peak_in_flight=24.0,
        peak_at_s=where.from_s + 1000.0,
    )


def tier(
    name: str,
    engines: Sequence[EngineObserved],
    before: Sequence[EngineObserved] = (),
    stated: TierStated | None = None,
) -> TierObserved:
    """A tier."""
    return TierObserved(
        name,
        "m",
        "h100-sxm",
        TierStated() if stated is None else stated,
        EnginesObserved(engines),
        EnginesObserved(before),
    )


def observed(*tiers: TierObserved, **more: object) -> Observed:
    """A week, compared with the one before."""
    observations = Observed(grid=WEEK, before_grid=BEFORE, source="a test", tiers=tiers)
    return replace(observations, **more)
