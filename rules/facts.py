"""The inputs of conditions: facts in Python, recorded series in PromQL. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

PREFIX = "kneewatch:"
"""The prefix of recorded series' names."""


def recorded(key: str) -> str:
    """The name of a signal's recorded series."""
    return PREFIX + key


def number(value: float) -> str:
    """A number in PromQL syntax."""
    return f"{value:.12g}"


def duration(seconds: float) -> str:
    """A PromQL duration in whole milliseconds."""
    millis = max(1, round(1000 * seconds))
    return f"{millis // 1000}s" if millis % 1000 == 0 else f"{millis}ms"


SCRAPES_PER_RANGE = 4
"""Scrapes that a counter's range must cover: a rate needs two, and scrapes fail or are late."""

SAMPLES_PER_SPAN = 1.5
"""Scrape intervals that a condition must hold for, so that two scrapes confirm it."""

WIDE_RANGE_S = 240.0
"""A range with four scrapes at one-minute intervals, for scrape intervals longer than stated."""


def range_s(least_s: float, scrape_s: float) -> float:
    """Seconds of a range over scraped counters: at least `least_s`, and at least four scrapes."""
    return max(least_s, SCRAPES_PER_RANGE * scrape_s)


def span_s(least_s: float, sample_s: float) -> float:
    """Seconds for which a condition on a gauge must hold; `sample_s` is the gauge's sample
    interval."""
    return max(least_s, SAMPLES_PER_SPAN * sample_s)


class Targets(Protocol):
    """Latency targets in seconds; None if not configured."""

    @property
    def ttft_p99_s(self) -> float | None:
        """Target for TTFT P99."""
        ...

    @property
    def itl_p99_s(self) -> float | None:
        """Target for ITL P99."""
        ...


class Quiet(Protocol):
    """Baselines of signals."""

    def get(self, key: str) -> float | None:
        """A signal's baseline; None if unknown."""
        ...

    def usual(self, key: str) -> float | None:
        """A signal's usual value at this hour of the week; None if unknown."""
        ...


class Facts(Protocol):
    """The inputs of quantities and conditions in Python: one engine at one moment."""

    @property
    def values(self) -> Mapping[str, float | None]:
        """Signals and derived signals; None for unknown."""
        ...

    @property
    def recent(self) -> Mapping[str, float | None]:
        """Some signals over the newest part of the window."""
        ...

    @property
    def baseline(self) -> Quiet:
        """Baselines of signals."""
        ...

    @property
    def streaks_s(self) -> Mapping[str, float]:
        """Seconds for which named conditions have held; those that do not hold are absent."""
        ...

    @property
    def config(self) -> Mapping[str, str]:
        """Labels of cache_config_info."""
        ...

    @property
    def targets(self) -> Targets:
        """Latency targets."""
        ...

    @property
    def window_s(self) -> float:
        """Seconds of the short window."""
        ...

    @property
    def observed_s(self) -> float:
        """Seconds since the first scrape of this process."""
        ...

    @property
    def scale(self) -> float:
        """The short window over its default; durations are multiplied by it."""
        ...


class Spelling(Protocol):
    """The parameters of compilation to PromQL."""

    @property
    def window_s(self) -> float:
        """The window, in seconds."""
        ...

    @property
    def interval_s(self) -> float:
        """Seconds between evaluations."""
        ...

    @property
    def scrape_s(self) -> float:
        """Seconds between scrapes."""
        ...

    @property
    def targets(self) -> Targets:
        """Latency targets."""
        ...

    @property
    def scale(self) -> float:
        """The short window over its default."""
        ...

    @property
    def process(self) -> str:
        """Labels common to all engines of a process."""
        ...

    @property
    def everywhere(self) -> str:
        """A series that exists for every engine."""
        ...

    def series(self, key: str) -> str | None:
        """A signal's recorded series; None if there is none."""
        ...

    def raw(self, metric: str, suffix: str = "", extra: str = "") -> str:
        """vLLM's own series of a metric, as a selector."""
        ...

    def summed(self, expr: str) -> str:
        """An expression over vLLM's own series, summed per engine."""
        ...

    def last_rate(self, metric: str) -> str:
        """The rate of a counter between its last two scrapes, by engine."""
        ...


class _NoBaseline:
    """Baselines of an engine without any."""

    def get(self, key: str) -> float | None:
        """None: no signal has a baseline."""
        del key
        return None

    usual = get


NO_BASELINE = _NoBaseline()


@dataclass(frozen=True, slots=True)
class Moment:
    """Facts of one moment: its signals; everything else is empty unless given."""

    values: Mapping[str, float | None]
    targets: Targets
    streaks_s: Mapping[str, float] = field(default_factory=dict[str, float])
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    recent: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    baseline: Quiet = NO_BASELINE
    window_s: float = 0.0
    observed_s: float = 0.0
    scale: float = 1.0


Read = Callable[[Facts], float | None]
Holds = Callable[[Facts], bool]
"""Compiled conditions and quantities: functions of facts."""

EVERYWHERE = recorded("running")
"""A recorded series that exists for every engine."""
