"""Compares output lengths with those of quiet times (two-sample test) and with stated percentiles
(one-sample test). Pure.

One window's histogram is kept a window while all is quiet, so that no answer counts twice. Where a
minute holds few answers the test looks at the longest window that the history has.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from math import inf

from kneewatch.collector.scrape_history import History
from kneewatch.collector.window import Window
from kneewatch.diagnose.learned.length_drift import Departure, Drift, Point, departure, drift

METRIC = "request_generation_tokens"
WINDOWS_MAX = 60
"""Quiet windows that are remembered: an hour at the default window."""

ANSWERS_MIN = 40.0
"""Fewer quiet answers are no distribution."""

FEW = 150.0
"""With fewer answers than this the longest window is tested too: the band is too wide."""

FALSE_ALARM = 1e-3
"""The chance, at most, that a comparison of independent answers calls one distribution two."""

LOOKS = 2
"""At the window, which shows at once what is plain, and at the longest one, which holds enough for
what is not but also what was before: each may err half as often."""

ALIKE = 1.0
"""Each answer counts as independent: causes use this only where many more answers than before end
at their limit."""

ENDLESS = 2.0
"""Answers longer than this many times the stated P99 count as endless."""


class OutputLengths:
    """One engine's answers. `window_s` is the short window, `longest_s` what its history holds,
    `stated` are the percentiles that a size was computed for, empty without them."""

    def __init__(self, *, window_s: float, longest_s: float, stated: Sequence[Point] = ()) -> None:
        self._window_s, self._longest_s = window_s, longest_s
        self._endless = tuple(
            Point(point.ratio, point.least, ENDLESS * point.most) for point in stated[-1:]
        )
        self._bounds: tuple[float, ...] = ()
        self._quiet: deque[array[float]] = deque(maxlen=WINDOWS_MAX)
        self._last_s = float("-inf")

    def learn(self, now_s: float, window: Window) -> None:
        """Take a quiet window, at most one a window."""
        if 0 <= now_s - self._last_s < self._window_s:
            return
        buckets = window.buckets(METRIC)
        if buckets is None:
            return
        self._last_s = now_s
        if buckets.bounds != self._bounds:
            self._bounds = buckets.bounds
            self._quiet.clear()
        self._quiet.append(array("d", [rate * window.range_s for rate in buckets.lifted]))

    def drift(self, history: History, window: Window) -> Drift | None:
        """How far the answers of the window are from the quiet ones; None where too few are known
        to say."""
        before = [sum(counts) for counts in zip(*self._quiet, strict=True)]
        if not before or before[-1] < ANSWERS_MIN:
            return None
        quiet = dict(zip(self._bounds, before, strict=True))
        looks = [
            drift(quiet, now, false_alarm=FALSE_ALARM / LOOKS, alike=ALIKE)
            for now in self._looks(history, window)
            if tuple(now) == self._bounds
        ]
        return max(filter(None, looks), key=_margin_ratio, default=None)

    def endless(self, history: History, window: Window) -> Departure | None:
        """How many more answers than are stated go far beyond what is stated; None where nothing is
        stated, or there is no answer."""
        looks = self._looks(history, window) if self._endless else []
        if not looks:
            return None
        return departure(self._endless, looks[-1], false_alarm=FALSE_ALARM, alike=ALIKE)

    def _looks(self, history: History, window: Window) -> list[dict[float, float]]:
        """The answers of the window by upper bound, and of the longest one where these are few."""
        looks = [_answers(window)]
        if looks[0] is not None and looks[0][inf] < FEW:
            longest = Window(history, now_s=window.now_s, range_s=self._longest_s)
            looks.append(_answers(longest))
        return [now for now in looks if now is not None]


def _answers(window: Window) -> dict[float, float] | None:
    """How many answers the window holds up to each bound."""
    buckets = window.buckets(METRIC)
    if buckets is None:
        return None
    counts = (rate * window.range_s for rate in buckets.lifted)
    return dict(zip(buckets.bounds, counts, strict=True))


def _margin_ratio(shift: Drift) -> float:
    return abs(shift.shift_ratio) - shift.chance_ratio
