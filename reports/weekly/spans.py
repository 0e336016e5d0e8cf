"""What engines showed over some time: counters, histograms, gauges. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kneewatch.reports.weekly.tally import Tally

SERVING = "|serving"
"""Ends the name of a level that is of the time in which requests ran only."""


@dataclass(frozen=True, slots=True)
class Level:
    """A gauge over a span: time-weighted mean, highest value, seconds in which it was known.

    `top` is the highest mean of one engine over one hour: a tier's mean hides its hottest engine.
    Of a ratio `known_s` is what it is divided by.
    """

    mean: float
    high: float
    known_s: float
    top: float


@dataclass(frozen=True, slots=True)
class Span:
    """What engines showed over some time.

    `engine_s` are the engines' seconds that the counters cover, added up; `clock_s` the seconds in
    which at least one was covered; `watched_s` and `idle_s` the engines' seconds that were scraped,
    and those of them with hardly a request running. `counts` are increases of counters, `tallies`
    of histograms, `levels` gauges.
    """

    engine_s: float = 0.0
    clock_s: float = 0.0
    watched_s: float = 0.0
    idle_s: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    tallies: Mapping[str, Tally] = field(default_factory=dict[str, Tally])
    levels: Mapping[str, Level] = field(default_factory=dict[str, Level])
