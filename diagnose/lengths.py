"""How long answers are, against those of quiet times: whole histograms, held by a two-sample test.
Pure.

One window's histogram is kept a window while all is quiet, so that no answer counts twice. Where a
minute holds few answers the test looks at the longest window that the history has.
"""

from __future__ import annotations

from array import array
from collections import deque

from kneewatch.collector.buckets import Buckets
from kneewatch.collector.history import History
from kneewatch.collector.window import Window
from kneewatch.diagnose.drift import Drift, drift

METRIC = "request_generation_tokens"
WINDOWS_MAX = 60
"""Quiet windows that are remembered: an hour at the default window."""

ANSWERS_MIN = 40.0
"""Fewer quiet answers are no distribution."""

FEW = 150.0
"""Of fewer answers the band is wider than most shifts: a longer window is looked at."""

FALSE_ALARM = 1e-3
"""The chance, at most, that a comparison of independent answers calls one distribution two."""

ALIKE = 1.0
"""Each answer counts: a cause hangs on what is told here only where many more answers than before
end at their limit, and not on this alone."""


class OutputLengths:
    """One engine's answers. `window_s` is the short window, `longest_s` what its history holds."""

    def __init__(self, *, window_s: float, longest_s: float) -> None:
        self._window_s, self._longest_s = window_s, longest_s
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
        now = window.buckets(METRIC)
        if now is not None and now.lifted[-1] * window.range_s < FEW:
            longest = Window(history, now_s=window.now_s, range_s=self._longest_s)
            window, now = longest, longest.buckets(METRIC)
        if now is None or now.bounds != self._bounds:
            return None
        quiet = dict(zip(self._bounds, before, strict=True))
        return drift(quiet, _counts(now, window.range_s), false_alarm=FALSE_ALARM, alike=ALIKE)


def _counts(buckets: Buckets, range_s: float) -> dict[float, float]:
    return {le: rate * range_s for le, rate in zip(buckets.bounds, buckets.lifted, strict=True)}
