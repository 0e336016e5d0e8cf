"""The past of a tier: its load over days, and the lengths of its requests a week ago. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from kneewatch.diagnose.drift import Buckets
from kneewatch.diagnose.fleet.shape import Group

STEP_S = 300.0
"""Prometheus looks back so far for a value: every moment of the look-back is covered."""

HOUR_S = 3600.0
WEEK_S = 7 * 24 * 3600.0
SEEN_MIN = 0.95


@dataclass(frozen=True, slots=True)
class Peak:
    """Requests that ran or waited on all of a tier: the most at one moment `t_s`, and the mean.

    `span_s` is how far back was looked, `seen_ratio` the share of its moments that have a value.
    """

    requests: float
    t_s: float
    mean_requests: float
    span_s: float
    seen_ratio: float

    @property
    def weekly(self) -> bool:
        """Whether it is the peak of a week or more, seen nearly whole: no less says what a fleet
        may lose."""
        return self.span_s >= WEEK_S and self.seen_ratio >= SEEN_MIN


def peak_of(points: Sequence[tuple[float, float]], *, span_s: float, steps: int) -> Peak | None:
    """The peak of (unix seconds, requests); None where no point has a value."""
    known = [(value, t_s) for t_s, value in points if isfinite(value)]
    if not known:
        return None
    most, t_s = max(known)
    mean = sum(value for value, _ in known) / len(known)
    return Peak(most, t_s, mean, span_s, min(1.0, len(known) / max(steps, 1)))


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of the past by group; `missing` says why some of it is not.

    `lengths` are the tokens of the last hour's requests and of the same hour a week ago, by
    signal: (before, now). `recent` are those of the last hour, also where no week ago is known.
    """

    peaks: Mapping[Group, Peak] = field(default_factory=dict[Group, Peak])
    lengths: Mapping[Group, Mapping[str, tuple[Buckets, Buckets]]] = field(
        default_factory=dict[Group, Mapping[str, tuple[Buckets, Buckets]]]
    )
    missing: str = ""
    recent: Mapping[Group, Mapping[str, Buckets]] = field(
        default_factory=dict[Group, Mapping[str, Buckets]]
    )
