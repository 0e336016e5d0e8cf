"""The knee of one engine as it is learned while it is watched. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kneewatch.diagnose.case import Targets
from kneewatch.diagnose.knee import CurveLearner, LearnedKnee, Point

POINTS_KEPT = 12
"""Windows of each concurrency that are remembered: there are many engines in one daemon."""


class LiveKnee:
    """One engine's knee; worked out anew once a window. `window_s` is the short window."""

    def __init__(self, *, window_s: float, targets: Targets) -> None:
        self._window_s, self._targets = window_s, targets
        self._curve = CurveLearner(window_s=window_s, kept=POINTS_KEPT)
        self._knee: LearnedKnee | None = None
        self._made_s = float("-inf")
        self._recalled: Sequence[Point] = ()
        self.first_s: float | None = None
        """When it was first scraped; None before that."""
        self.asked = False
        """Whether the history was asked what came before; whoever asks sets it."""

    def recall(self, points: Sequence[Point]) -> None:
        """Take windows from before the first scrape, oldest first: the next knee counts them.
        Another thread may call it, once."""
        self._recalled = points

    def update(self, now_s: float, values: Mapping[str, float | None]) -> LearnedKnee | None:
        """The knee after a scrape; None where too few loads have been seen."""
        if self.first_s is None:
            self.first_s = now_s
        if self._recalled:
            points, self._recalled = self._recalled, ()
            self._curve.recall(points)
            self._made_s = float("-inf")
        self._curve.learn(now_s, values)
        if not 0 <= now_s - self._made_s < self._window_s:
            self._knee, self._made_s = self._curve.knee(now_s, self._targets), now_s
        return self._knee
