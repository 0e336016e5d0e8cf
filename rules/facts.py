"""What conditions are read from: facts in Python, recorded series in PromQL. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

PREFIX = "kneewatch:"
"""What the names of recorded series begin with."""


def recorded(key: str) -> str:
    """The recorded series of a signal."""
    return PREFIX + key


def number(value: float) -> str:
    """A number as PromQL writes it."""
    return f"{value:.12g}"


def duration(seconds: float) -> str:
    """A PromQL duration, in whole milliseconds."""
    millis = max(1, round(1000 * seconds))
    return f"{millis // 1000}s" if millis % 1000 == 0 else f"{millis}ms"


SCRAPES_PER_RANGE = 4
"""Scrapes that a range of counters must hold: a rate needs two, and scrapes fail or come late."""

SAMPLES_PER_SPAN = 1.5
"""Scrape intervals that a condition must hold for: two scrapes see it, one alone may be chance."""

WIDE_RANGE_S = 240.0
"""Range that holds four scrapes of a minute; read where the range for the stated scrape interval
holds no two scrapes."""


def range_s(least_s: float, scrape_s: float) -> float:
    """Seconds of a range over scraped counters: at least `least_s`, and four scrapes."""
    return max(least_s, SCRAPES_PER_RANGE * scrape_s)


def span_s(least_s: float, sample_s: float) -> float:
    """Seconds for which a condition must hold, of a gauge that gets a sample each `sample_s`."""
    return max(least_s, SAMPLES_PER_SPAN * sample_s)


class Targets(Protocol):
    """Latency targets in seconds; None where none is stated."""

    @property
    def ttft_p99_s(self) -> float | None:
        """P99 of the time to first token."""
        ...

    @property
    def itl_p99_s(self) -> float | None:
        """P99 of the inter-token latency."""
        ...


class Quiet(Protocol):
    """Signals in quiet times."""

    def get(self, key: str) -> float | None:
        """What a signal is compared with; None where that is not known."""
        ...


class Facts(Protocol):
    """What Python reads quantities and conditions from: one engine at one moment."""

    @property
    def values(self) -> Mapping[str, float | None]:
        """Signals and derived signals."""
        ...

    @property
    def recent(self) -> Mapping[str, float | None]:
        """Some signals on the newest part of the window."""
        ...

    @property
    def baseline(self) -> Quiet:
        """Signals in quiet times."""
        ...

    @property
    def streaks_s(self) -> Mapping[str, float]:
        """Seconds that named conditions have held; those that do not hold are left out."""
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
        """The short window."""
        ...

    @property
    def observed_s(self) -> float:
        """How long this process has been watched."""
        ...

    @property
    def scale(self) -> float:
        """The short window over its default: durations stretch with it."""
        ...


class Spelling(Protocol):
    """What PromQL is written for."""

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
        """Labels that all engines of a process share."""
        ...

    @property
    def everywhere(self) -> str:
        """A series that every engine has."""
        ...

    def series(self, key: str) -> str | None:
        """The recorded series of a signal; None where there is none."""
        ...

    def raw(self, metric: str, suffix: str = "", extra: str = "") -> str:
        """vLLM's own series of a metric."""
        ...

    def summed(self, expr: str) -> str:
        """An expression over vLLM's own series, summed by engine."""
        ...

    def last_rate(self, metric: str) -> str:
        """The rate of a counter between its last two scrapes, by engine."""
        ...


class _NoBaseline:
    """Nothing is known of quiet times."""

    def get(self, key: str) -> float | None:
        """None: no signal has a normal value."""
        del key
        return None


NO_BASELINE = _NoBaseline()


@dataclass(frozen=True, slots=True)
class Moment:
    """Signals at one moment, where there is nothing else to read a condition from."""

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
"""A quantity, and a condition, as functions of facts."""

EVERYWHERE = recorded("running")
"""A recorded series that every engine has."""
