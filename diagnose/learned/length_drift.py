"""How far the lengths of requests have moved: from earlier ones, and from a stated workload. Pure.

The measure is the greatest distance between two cumulative distributions (Kolmogorov, Smirnov).
With a probability of at least 1 - a, the cumulative shares of n observations lie within
sqrt(ln(2 / a) / 2n) of their distribution's (Dvoretzky, Kiefer, Wolfowitz 1956; Massart's constant,
1990), for any distribution and any buckets. So two samples of one distribution are further apart
than both bands with a probability below 2 a.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf, isfinite, log, sqrt

from msgspec import Struct

from kneewatch.collector.scrape_history import History
from kneewatch.collector.window import Window

FALSE_ALARM = 1e-4
"""Upper bound on the probability that a comparison of unchanged lengths reports a change."""

SHIFT_MIN = 0.15
"""If at least this share of the requests changed in length, the workload counts as changed."""

TAIL_SHIFT_MIN = 0.1
"""The same for a percentile that leaves less than SHIFT_MIN above it: 0.15 instead of 0.05 of the
requests above the stated P95."""

ALIKE = 10.0
"""Requests of one session or job are alike: this many count as one independent request."""

Buckets = Mapping[float, float]
"""Observations up to each upper edge, as Prometheus counts them; `inf` has all."""


class Drift(Struct, frozen=True):
    """How far two distributions are apart.

    `shift_ratio` is the share of the requests that moved to the other side of `edge`, positive if
    they are longer now; `chance_ratio` is the largest shift that chance explains.
    """

    shift_ratio: float
    edge: float
    chance_ratio: float

    @property
    def real(self) -> bool:
        """Whether it is more than chance, and enough to be another workload."""
        return abs(self.shift_ratio) > max(self.chance_ratio, SHIFT_MIN)


def drift(
    before: Buckets, now: Buckets, *, false_alarm: float = FALSE_ALARM, alike: float = ALIKE
) -> Drift | None:
    """How far `now` is from `before`; None where one of them is empty or is no histogram, or where
    their edges differ. `alike` observations count as one independent one."""
    edges = sorted(before)
    if edges != sorted(now) or not edges or edges[-1] != inf:
        return None
    counts = before[inf], now[inf]
    if (
        not all(isfinite(shift_at) for shift_at in (*before.values(), *now.values()))
        or min(counts) <= 0
    ):
        return None
    shifts = [(before[edge] / counts[0] - now[edge] / counts[1], edge) for edge in edges]
    shift, edge = max(shifts, key=lambda shift_at: abs(shift_at[0]))
    return Drift(shift, edge, sum(_band(count / alike, false_alarm / 2) for count in counts))


class Point(Struct, frozen=True):
    """A stated point of a distribution: at most the share `ratio` is below `least`, and at most the
    rest is above `most`. For a known percentile both are its value."""

    ratio: float
    least: float
    most: float


class Departure(Struct, frozen=True):
    """How far observations are from a stated distribution, at its `point` that they left furthest.

    `shift_ratio` is the share of observations that certainly lies beyond the point minus the share
    that may; positive where they are longer, negative where shorter, 0 where none is certainly
    beyond. `edge` is the bucket bound beyond which `seen_ratio` of them lie. `chance_ratio` is the
    largest shift that chance explains.
    """

    shift_ratio: float
    point: Point
    edge: float
    seen_ratio: float
    chance_ratio: float

    @property
    def may_ratio(self) -> float:
        """The share that may be beyond the point on this side."""
        return 1 - self.point.ratio if self.shift_ratio > 0 else self.point.ratio

    @property
    def least_ratio(self) -> float:
        """The smallest shift that is reported."""
        matters = SHIFT_MIN if self.may_ratio >= SHIFT_MIN else TAIL_SHIFT_MIN
        return max(self.chance_ratio, matters)

    @property
    def real(self) -> bool:
        """Whether it is more than chance, and enough to be another workload."""
        return abs(self.shift_ratio) > self.least_ratio


def departure(
    points: Sequence[Point],
    now: Buckets,
    *,
    false_alarm: float = FALSE_ALARM,
    alike: float = ALIKE,
) -> Departure | None:
    """How far the histogram `now` is from the stated points; None where no point is stated, or the
    histogram is empty or lacks its last bucket. `alike` observations count as one independent one.

    If the observations are as stated, a shift beyond chance is reported with a probability of at
    most `false_alarm`, for all points and both sides together: the band holds all cumulative shares
    at once, and observations between a stated value and the next bucket bound are not counted.
    """
    edges = sorted(now)
    if not points or not edges or edges[-1] != inf:
        return None
    count = now[inf]
    if not all(isfinite(candidate) for candidate in now.values()) or count <= 0:
        return None
    chance = _band(count / alike, false_alarm)
    departures = [side for point in points for side in _sides(point, now, edges, chance)]
    return max(departures, key=lambda candidate: abs(candidate.shift_ratio) / candidate.least_ratio)


def _sides(
    point: Point, now: Buckets, edges: Sequence[float], chance: float
) -> tuple[Departure, Departure]:
    """The shares certainly above and certainly below the point."""
    count = now[inf]
    high = edges[bisect_left(edges, point.most)]
    above = 1 - now[high] / count
    # The percentile itself is not below it, and a bucket holds its own bound.
    at = bisect_left(edges, point.least) - 1
    low = edges[at] if at >= 0 else 0.0
    below = now[low] / count if at >= 0 else 0.0
    longer = max(0.0, above - (1 - point.ratio))
    shorter = max(0.0, below - point.ratio)
    return (
        Departure(longer, point, high, above, chance),
        Departure(-shorter, point, low, below, chance),
    )


def more_than_chance(
    count: float,
    expected: float,
    *,
    false_alarm: float = FALSE_ALARM,
    alike: float = ALIKE,
) -> bool:
    """Whether `count` arrivals are more than chance explains where `expected` are expected.

    Arrivals that are independent of each other, in bunches of `alike`, are n or more of m expected
    with a probability below exp(-(n ln(n / m) - n + m) / alike) (Chernoff's bound of a Poisson
    count).
    """
    if not count > expected > 0:
        return False
    return (count * log(count / expected) - count + expected) / alike > log(1 / false_alarm)


def _band(count: float, chance: float) -> float:
    """Half width of the band around the cumulative shares, exceeded with probability `chance`."""
    return sqrt(log(2 / chance) / (2 * count))


PROMPTS, ANSWERS = "prompt_tokens", "output_tokens"
WORDS: Mapping[str, str] = {PROMPTS: "prompts", ANSWERS: "answers"}
"""Both lengths of a request, and how they are called."""

METRICS: Mapping[str, str] = {
    PROMPTS: "request_prompt_tokens",
    ANSWERS: "request_generation_tokens",
}
KEYS: Mapping[str, str] = {PROMPTS: "input", ANSWERS: "output"}
"""The prefix of a profile's keys for each length, by vLLM's histogram of it."""

RATE_MIN = 1.2
"""Ratio of rate to peak that counts as another workload: every size includes 20% headroom or more
(guide 8.3)."""


class Part(Struct, frozen=True):
    """What a profile says of the requests of one launch: percentiles of their lengths."""

    name: str
    model: str
    gpus: tuple[str, ...]
    lengths: Mapping[str, tuple[Point, ...]]


class StatedWorkload(Struct, frozen=True):
    """A profile's figures. `origin` is its file.

    `peak_requests_per_s` is the whole fleet's, with its growth; None for a batch, and where tiers
    share it. `grown`: lengths are derived, because the profile states a session's first call.
    """

    origin: str
    parts: tuple[Part, ...]
    peak_requests_per_s: float | None
    grown: bool = False

    def lengths(self, model: str | None, gpu: str | None) -> Mapping[str, tuple[Point, ...]]:
        """What is stated for a model and a GPU (None: not known). If several parts match, only what
        all of them state; a profile of one part matches any model and GPU."""
        meant = [part for part in self.parts if len(self.parts) == 1 or _may(part, model, gpu)]
        if not meant:
            return {}
        return {
            key: points
            for key, points in meant[0].lengths.items()
            if all(part.lengths[key] == points for part in meant)
        }


def _may(part: Part, model: str | None, gpu: str | None) -> bool:
    return model in (None, part.model) and (gpu is None or gpu in part.gpus)


# --- An engine's output lengths against those of quiet times and against stated percentiles -------
#
# One window's histogram is kept a window while all is quiet, so that no answer counts twice. Where
# a minute holds few answers the longest window of the history is tested too.


METRIC = "request_generation_tokens"
WINDOWS_MAX = 60
"""Quiet windows that are remembered: an hour at the default window."""

ANSWERS_MIN = 40.0
"""Fewer quiet answers are no distribution."""

FEW = 150.0
"""With fewer answers than this the longest window is tested too: the band is too wide."""

OUTPUT_FALSE_ALARM = 1e-3
"""Upper bound on the probability that a comparison of unchanged, independent answers reports a
change."""

LOOKS = 2
"""Number of comparisons: the window, which shows a large change at once, and the longest window,
which holds enough answers for a small change but also older ones. Each may err half as often."""

OUTPUTS_ALIKE = 1.0
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
        buckets = window.buckets(METRICS[ANSWERS])
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
            drift(quiet, now, false_alarm=OUTPUT_FALSE_ALARM / LOOKS, alike=OUTPUTS_ALIKE)
            for now in self._looks(history, window)
            if tuple(now) == self._bounds
        ]
        return max(filter(None, looks), key=_margin_ratio, default=None)

    def endless(self, history: History, window: Window) -> Departure | None:
        """How many more answers than stated are far longer than stated; None where nothing is
        stated or no request was answered."""
        looks = self._looks(history, window) if self._endless else []
        if not looks:
            return None
        return departure(
            self._endless, looks[-1], false_alarm=OUTPUT_FALSE_ALARM, alike=OUTPUTS_ALIKE
        )

    def _looks(self, history: History, window: Window) -> list[dict[float, float]]:
        """Answers by upper bound: those of the window and, if they are few, of the longest
        window."""
        looks = [_answers(window)]
        if looks[0] is not None and looks[0][inf] < FEW:
            longest = Window(history, now_s=window.now_s, range_s=self._longest_s, few=True)
            looks.append(_answers(longest))
        return [now for now in looks if now is not None]


def _answers(window: Window) -> dict[float, float] | None:
    """Number of the window's answers up to each bound, in tokens; None if unknown."""
    buckets = window.buckets(METRICS[ANSWERS])
    if buckets is None:
        return None
    counts = (rate * window.range_s for rate in buckets.lifted)
    return dict(zip(buckets.bounds, counts, strict=True))


def _margin_ratio(shift: Drift) -> float:
    return abs(shift.shift_ratio) - shift.chance_ratio
