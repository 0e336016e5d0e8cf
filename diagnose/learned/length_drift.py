"""How far request lengths have moved from earlier lengths, or from a stated workload. Pure.

The measure is the greatest distance between two cumulative distributions (Kolmogorov, Smirnov). For
n observations of any distribution and any buckets, the observed shares lie within sqrt(ln(2 / a) /
2n) of the true ones, with a probability of at least 1 - a (Dvoretzky, Kiefer, Wolfowitz 1956;
Massart's constant, 1990). So two samples of one distribution are further apart than the sum of
their bands with a probability below 2 a.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf, isfinite, log, sqrt

from msgspec import Struct

from kneewatch.diagnose.values import Histogram, Values

FALSE_ALARM = 1e-4
"""Upper bound on the probability that unchanged lengths are reported as changed."""

SHIFT_MIN = 0.15
"""The workload counts as changed if the lengths of at least this share of the requests changed."""

TAIL_SHIFT_MIN = 0.1
"""The same for percentiles with less than SHIFT_MIN of the requests above them.

For a stated P95: 0.15 of the requests are above it instead of 0.05.
"""

ALIKE = 10.0
"""Requests of one session or job have similar lengths: this many count as one independent
request."""


class Drift(Struct, frozen=True):
    """The distance between two distributions.

    `shift_ratio`: share of the requests that moved to the other side of `edge`; positive if
    requests are longer now. `chance_ratio`: the largest shift that chance explains.
    """

    shift_ratio: float
    edge: float
    chance_ratio: float

    @property
    def real(self) -> bool:
        """Whether the shift is more than chance, and large enough to be another workload."""
        return abs(self.shift_ratio) > max(self.chance_ratio, SHIFT_MIN)


def drift(
    before: Histogram, now: Histogram, *, false_alarm: float = FALSE_ALARM, alike: float = ALIKE
) -> Drift | None:
    """The distance of `now` from `before`.

    None if either is empty or not a histogram, or if their edges differ. `alike` observations count
    as one independent observation.
    """
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
    """A stated point of a distribution.

    At most the share `ratio` of observations is below `least`, and at most the rest is above
    `most`. For a known percentile, `least` and `most` are both its value.
    """

    ratio: float
    least: float
    most: float


class Departure(Struct, frozen=True):
    """The greatest difference of observations from a stated distribution, which is at `point`.

    - `shift_ratio`: share of observations that are certainly beyond the point, minus the share that
      may be. Positive if observations are longer, negative if shorter, 0 if none is certainly
      beyond.
    - `edge`: the bucket bound used for the point; the share `seen_ratio` of observations is beyond
      it.
    - `chance_ratio`: the largest shift that chance explains.
    """

    shift_ratio: float
    point: Point
    edge: float
    seen_ratio: float
    chance_ratio: float

    @property
    def may_ratio(self) -> float:
        """The stated share that may be beyond the point, on the side of the shift."""
        return 1 - self.point.ratio if self.shift_ratio > 0 else self.point.ratio

    @property
    def least_ratio(self) -> float:
        """The smallest shift that is reported."""
        matters = SHIFT_MIN if self.may_ratio >= SHIFT_MIN else TAIL_SHIFT_MIN
        return max(self.chance_ratio, matters)

    @property
    def real(self) -> bool:
        """Whether the shift is more than chance, and large enough to be another workload."""
        return abs(self.shift_ratio) > self.least_ratio


def departure(
    points: Sequence[Point],
    now: Histogram,
    *,
    false_alarm: float = FALSE_ALARM,
    alike: float = ALIKE,
) -> Departure | None:
    """How far the histogram `now` differs from the stated points.

    None if no point is stated, or if the histogram is empty or lacks its last bucket. `alike`
    observations count as one independent observation.

    If the observations are as stated, a shift is reported as real with a probability of at most
    `false_alarm`. This is for all points and both sides together, because the band covers all
    cumulative shares at once. Observations between a stated value and the next bucket bound are not
    counted.
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
    point: Point, now: Histogram, edges: Sequence[float], chance: float
) -> tuple[Departure, Departure]:
    """The departures above and below the point.

    Only observations that are certainly beyond the point count.
    """
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
    """Whether `count` arrivals are more than chance explains if `expected` arrivals are expected.

    Requests arrive independently, in groups of `alike`. Then n or more arrivals instead of m have a
    probability below exp(-(n ln(n / m) - n + m) / alike) (Chernoff's bound for a Poisson count).
    """
    if not count > expected > 0:
        return False
    return (count * log(count / expected) - count + expected) / alike > log(1 / false_alarm)


def _band(count: float, chance: float) -> float:
    """Half the width of a band around the cumulative shares.

    The true shares leave this band with a probability of at most `chance`.
    """
    return sqrt(log(2 / chance) / (2 * count))


PROMPTS, ANSWERS = "prompt_tokens", "output_tokens"
WORDS: Mapping[str, str] = {PROMPTS: "prompts", ANSWERS: "answers"}
"""The two lengths of a request, and their names in texts."""

METRICS: Mapping[str, str] = {
    PROMPTS: "request_prompt_tokens",
    ANSWERS: "request_generation_tokens",
}
KEYS: Mapping[str, str] = {PROMPTS: "input", ANSWERS: "output"}
"""The prefix of a profile's keys for each length; lengths are named by vLLM's histogram."""

RATE_MIN = 1.2
"""From this ratio of the rate to the stated peak on, the workload differs.

Every size includes at least 20% headroom (guide 8.3).
"""


class Part(Struct, frozen=True):
    """A profile's length percentiles for the requests of one launch."""

    name: str
    model: str
    gpus: tuple[str, ...]
    lengths: Mapping[str, tuple[Point, ...]]


class StatedWorkload(Struct, frozen=True):
    """A profile's figures. `origin` is its file.

    `peak_requests_per_s` is the whole fleet's peak, including growth; None for a batch, and if
    tiers share it. `grown`: the profile states only a session's first call, so later lengths are
    derived.
    """

    origin: str
    parts: tuple[Part, ...]
    peak_requests_per_s: float | None
    grown: bool = False

    def lengths(self, model: str | None, gpu: str | None) -> Mapping[str, tuple[Point, ...]]:
        """The stated lengths for a model and a GPU (None: unknown).

        If several parts match, only the lengths that all of them state. If the profile has one
        part, it matches any model and GPU.
        """
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
"""Fewer quiet answers than this are not a distribution."""

LENGTH_POINTS = 0.2
"""From this share of answers that end at their limit on, lengths are compared."""

FEW = 150.0
"""With fewer answers than this the band is too wide, so the longest window is tested as well."""

OUTPUT_FALSE_ALARM = 1e-3
"""Upper bound on the probability that unchanged, independent answers are reported as changed."""

LOOKS = 2
"""Number of comparisons; each may cause half of the false alarms.

The window shows a large change at once. The longest window has enough answers for a small change,
but also includes older answers.
"""

OUTPUTS_ALIKE = 1.0
"""Each answer counts as independent. Causes use this only if many more answers end at their
limit."""

ENDLESS = 2.0
"""Answers longer than this many times the stated P99 count as endless."""


class OutputLengths:
    """The lengths of one engine's answers.

    `window_s` is the short window. `stated` are percentiles that a size was computed for; empty if
    there are none.
    """

    def __init__(self, *, window_s: float, stated: Sequence[Point] = ()) -> None:
        self._window_s = window_s
        self._endless = tuple(
            Point(point.ratio, point.least, ENDLESS * point.most) for point in stated[-1:]
        )
        self._bounds: tuple[float, ...] = ()
        self._quiet: deque[array[float]] = deque(maxlen=WINDOWS_MAX)
        self._last_s = float("-inf")

    def learn(self, now_s: float, answers: Histogram | None) -> None:
        """Add a quiet window; at most one per window's length."""
        if 0 <= now_s - self._last_s < self._window_s or answers is None:
            return
        self._last_s = now_s
        bounds = tuple(answers)
        if bounds != self._bounds:
            self._bounds = bounds
            self._quiet.clear()
        self._quiet.append(array("d", answers.values()))

    def drift(self, values: Values) -> Drift | None:
        """The distance of the window's answers from quiet answers; None if too few are known."""
        before = [sum(counts) for counts in zip(*self._quiet, strict=True)]
        if not before or before[-1] < ANSWERS_MIN:
            return None
        quiet = dict(zip(self._bounds, before, strict=True))
        looks = [
            drift(quiet, now, false_alarm=OUTPUT_FALSE_ALARM / LOOKS, alike=OUTPUTS_ALIKE)
            for now in _looks(values)
            if tuple(now) == self._bounds
        ]
        return max(filter(None, looks), key=_margin_ratio, default=None)

    def endless(self, values: Values) -> Departure | None:
        """How far the share of very long answers exceeds the stated share.

        None if nothing is stated or no request was answered.
        """
        looks = _looks(values) if self._endless else []
        if not looks:
            return None
        return departure(
            self._endless, looks[-1], false_alarm=OUTPUT_FALSE_ALARM, alike=OUTPUTS_ALIKE
        )


def _looks(values: Values) -> list[Histogram]:
    """Answers by upper bound, in the window and, if it has few answers, in the longest window."""
    return [now for now in (values.answers, values.more_answers) if now is not None]


def _margin_ratio(shift: Drift) -> float:
    return abs(shift.shift_ratio) - shift.chance_ratio
