"""How far request lengths are from earlier ones or from a stated workload, as records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

from msgspec import Struct

PROMPTS, ANSWERS = "prompt_tokens", "output_tokens"
WORDS: Mapping[str, str] = {PROMPTS: "prompts", ANSWERS: "answers"}
"""The two lengths of a request, and their names in texts."""

METRICS: Mapping[str, str] = {
    PROMPTS: "request_prompt_tokens",
    ANSWERS: "request_generation_tokens",
}
KEYS: Mapping[str, str] = {PROMPTS: "input", ANSWERS: "output"}
"""The prefix of a profile's keys for each length; lengths are named by vLLM's histogram."""

SHORT_PROMPT_TOKENS = 500
"""Shorter prompts are better prefilled on the server that decodes them (guide 6.5)."""

RATE_MIN = 1.2
"""From this ratio of the rate to the stated peak on, the workload differs.

Every size includes at least 20% headroom (guide 8.3).
"""

SHIFTS = {side: f"{side}_shift_ratio" for side in WORDS}
RATE = "arrival_peak_ratio"

LENGTH_POINTS = 0.2
"""From this share of answers that end at their limit on, lengths are compared."""

ENDLESS = 2.0
"""Answers longer than this many times the stated P99 count as endless."""

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


class StatedPoint(Struct, frozen=True):
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
    point: StatedPoint
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


class ProfilePart(Struct, frozen=True):
    """A profile's length percentiles for the requests of one launch."""

    name: str
    model: str
    gpus: tuple[str, ...]
    lengths: Mapping[str, tuple[StatedPoint, ...]]


class StatedWorkload(Struct, frozen=True):
    """A profile's figures. `origin` is its file.

    `peak_requests_per_s` is the whole fleet's peak, including growth; None for a batch, and if
    tiers share it. `grown`: the profile states only a session's first call, so later lengths are
    derived.
    """

    origin: str
    parts: tuple[ProfilePart, ...]
    peak_requests_per_s: float | None
    grown: bool = False

    def lengths(self, model: str | None, gpu: str | None) -> Mapping[str, tuple[StatedPoint, ...]]:
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


def _may(part: ProfilePart, model: str | None, gpu: str | None) -> bool:
    return model in (None, part.model) and (gpu is None or gpu in part.gpus)


class LiveWorkload(Struct, frozen=True):
    """Requests of the last `span_s`, compared with the stated workload.

    - `origin` and `grown`: those of the stated workload.
    - `lengths`: the departures by side (`length_drift.WORDS`).
    - `live`: P50, P95 and P99 of the requests; None beyond the histogram's last finite bound.
    - `expected`: requests at this engine's share of the stated peak. 0 if that share is unknown or
      too little time has passed.
    """

    origin: str
    grown: bool
    span_s: float
    lengths: Mapping[str, Departure]
    live: Mapping[str, tuple[float | None, ...]]
    requests: float
    expected: float

    def values(self) -> dict[str, float | None]:
        """The derived signals by key: shifts in length, and arrivals divided by the stated peak."""
        values: dict[str, float | None] = {
            SHIFTS[side]: abs(length_departure.shift_ratio)
            for side, length_departure in self.lengths.items()
        }
        if self.expected:
            values[RATE] = self.requests / self.expected
        return values


def more_than_chance(
    count: float, expected: float, *, false_alarm: float = FALSE_ALARM, alike: float = ALIKE
) -> bool:
    """Whether `count` arrivals are more than chance explains if `expected` arrivals are expected.

    Requests arrive independently, in groups of `alike`. Then n or more arrivals instead of m have a
    probability below exp(-(n ln(n / m) - n + m) / alike) (Chernoff's bound for a Poisson count).
    """
    if not count > expected > 0:
        return False
    return (count * log(count / expected) - count + expected) / alike > log(1 / false_alarm)
