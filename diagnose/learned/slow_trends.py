"""Trends over hours: slow, steady climbs or falls, such as leaks. Pure.

A quantity's level is its minimum or mean over half an hour or an hour. The growth is the slope of a
line through seven levels. The line's straightness, and whether the newest step follows it,
distinguish a leak from noise, from a single step, and from a warm-up that ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import correlation, linear_regression

from kneewatch.diagnose.slow_quantities import (
    HOST_MEMORY_USED,
    LEVELS,
    SLOW,
    STEPS,
    WORK_TOKENS,
    SlowQuantity,
)
from kneewatch.diagnose.values import Signals


def work_tokens(values: Signals) -> float | None:
    """Tokens of the running requests if they have the mean lengths of the finished ones."""
    running = values.get("running_avg")
    prompt, answer = values.get("prompt_tokens_mean"), values.get("output_tokens_mean")
    if not running:
        return running
    return None if prompt is None or answer is None else running * (prompt + answer)


class SlowTrends:
    """The slow trends of one engine process."""

    def __init__(self) -> None:
        self._trends = tuple(_LevelTrend(slow) for slow in SLOW)

    def forget(self) -> None:
        """Drop the trends: the process was replaced, or the clock was set back."""
        for trend in self._trends:
            trend.forget()

    def update(self, now_s: float, values: Signals) -> dict[str, float | None]:
        """The derived signals after a scrape with these values; None before seven spans have
        passed."""
        used_bytes = values.get(HOST_MEMORY_USED)
        derived: dict[str, float | None] = {
            HOST_MEMORY_USED: values.get("host_process_bytes") if used_bytes is None else used_bytes
        }
        computed = {**derived, WORK_TOKENS: work_tokens(values)}
        for trend in self._trends:
            followed = computed if trend.slow.signal in computed else values
            derived |= trend.update(now_s, followed.get(trend.slow.signal))
        return derived


class _LevelTrend:
    """The last levels of one quantity."""

    def __init__(self, slow: SlowQuantity) -> None:
        self.slow = slow
        self._levels: deque[float] = deque(maxlen=LEVELS)
        self._scrapes, self._total, self._lowest = 0, 0.0, 0.0
        self._began_s = self._last_s = 0.0
        self._derived: dict[str, float | None] = dict.fromkeys(slow.keys)

    def forget(self) -> None:
        self._levels.clear()
        self._scrapes = 0
        self._derived = dict.fromkeys(self.slow.keys)

    def update(self, now_s: float, value: float | None) -> Mapping[str, float | None]:
        if value is None:
            return self._derived
        span_s = self.slow.span_s
        if self._scrapes and not 0 <= now_s - self._last_s < span_s:
            self.forget()  # a gap between scrapes breaks the line
        if not self._scrapes:
            self._began_s = now_s
        elif now_s - self._began_s >= span_s:
            mean = self._total / self._scrapes
            self._levels.append(self._lowest if self.slow.fold == "min" else mean)
            self._scrapes, self._began_s = 0, self._began_s + span_s
            self._derived = self._fitted()
        begins = self._scrapes == 0
        self._lowest = value if begins else min(self._lowest, value)
        self._total = value if begins else self._total + value
        self._scrapes, self._last_s = self._scrapes + 1, now_s
        return self._derived

    def _fitted(self) -> dict[str, float | None]:
        """The derived signals from seven levels; with fewer levels, only the newest level."""
        slow, levels = self.slow, list(self._levels)
        derived: dict[str, float | None] = dict.fromkeys(slow.keys)
        derived[slow.level] = levels[-1]
        if len(levels) < LEVELS:
            return derived
        slope, derived[slow.before] = linear_regression(range(LEVELS), levels)
        derived[slow.growth] = STEPS * slope
        moves = max(levels) > min(levels)
        derived[slow.straight] = correlation(range(LEVELS), levels) ** 2 if moves else None
        derived[slow.late] = (levels[-1] - levels[-2]) / slope if slope else None
        return derived
