"""The input of conditions: an engine's values at one moment, or recorded series in PromQL. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from msgspec import Struct, field

from kneewatch.collector.signals.expr import ENGINE_LABELS, Dialect

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


EVERYWHERE = recorded("running")
"""A recorded series that exists for every engine."""

SCRAPES_PER_RANGE = 4
"""Scrapes that a counter's range must cover. A rate needs two, and scrapes can fail or be late."""

SAMPLES_PER_SPAN = 1.5
"""A condition must hold for this many scrape intervals, so that two scrapes confirm it."""

WIDE_RANGE_S = 240.0
"""Four scrapes at one-minute intervals: a range for targets scraped less often than configured."""


def range_s(least_s: float, scrape_s: float) -> float:
    """Length in seconds of a range over scraped counters: at least `least_s` and at least four
    scrapes."""
    return max(least_s, SCRAPES_PER_RANGE * scrape_s)


def span_s(least_s: float, sample_s: float) -> float:
    """Seconds for which a condition on a gauge must hold; `sample_s` is the gauge's sample
    interval."""
    return max(least_s, SAMPLES_PER_SPAN * sample_s)


@dataclass(frozen=True, slots=True)
class Targets:
    """The user's latency targets (P99) in seconds; None if not set."""

    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether any target is set."""
        return self.ttft_p99_s is not None or self.itl_p99_s is not None

    def beside(self, ttft_s: float, itl_s: float) -> Iterator[tuple[str, float, float]]:
        """For each latency with a target: its name, the latency and the target, both in seconds."""
        if self.ttft_p99_s is not None:
            yield "TTFT", ttft_s, self.ttft_p99_s
        if self.itl_p99_s is not None:
            yield "ITL", itl_s, self.itl_p99_s


NO_TARGETS = Targets()


class Baselines:
    """The baselines of an engine that has none; subclasses return learned baselines."""

    __slots__ = ()

    def get(self, key: str) -> float | None:
        """A signal's baseline; None if unknown."""
        del key
        return None

    def usual(self, key: str) -> float | None:
        """A signal's usual value at this hour of the week; None if unknown."""
        del key
        return None


NO_BASELINE = Baselines()


class Moment(Struct, frozen=True):
    """One engine at one moment: the input of quantities and conditions.

    - `values`: signals and derived signals; None for unknown.
    - `recent`: some of them over the newest part of the window; None for unknown.
    - `streaks_s`: seconds for which named conditions have held; absent if one does not hold.
    - `config`: the labels of cache_config_info.
    - `baseline`: the baselines of signals.
    - `window_s`: the short window.
    - `scale`: the short window divided by its default; durations are multiplied by it.
    - `observed_s`: seconds since the first scrape of this process.
    """

    values: Mapping[str, float | None]
    targets: Targets = NO_TARGETS
    streaks_s: Mapping[str, float] = field(default_factory=dict[str, float])
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    recent: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    baseline: Baselines = NO_BASELINE
    window_s: float = 0.0
    observed_s: float = 0.0
    scale: float = 1.0


Read = Callable[[Moment], float | None]
Holds = Callable[[Moment], bool]
"""Functions that records compile to: `Read` for quantities (None: unknown), `Holds` for
conditions."""


class Spelling:
    """How quantities and conditions are written in PromQL.

    Subclasses define which signals have a series. `dialect` has the names of vLLM's own series and
    the window. `scale` is the short window divided by its default.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        targets: Targets = NO_TARGETS,
        scale: float = 1.0,
        interval_s: float = 0.0,
        scrape_s: float = 0.0,
    ) -> None:
        self.dialect, self.targets, self.scale = dialect, targets, scale
        self.window_s, self.interval_s, self.scrape_s = dialect.range_s, interval_s, scrape_s
        self.process = ", ".join(name for name in dialect.by if name not in ENGINE_LABELS)
        """The labels that all engines of a process share."""

    def series(self, key: str) -> str | None:
        """A signal's PromQL expression, with one value per engine; None if PromQL cannot express
        the signal."""
        raise NotImplementedError

    @property
    def everywhere(self) -> str:
        """A series that exists for every engine."""
        return self.series("running") or EVERYWHERE

    def raw(self, metric: str, suffix: str = "", extra: str = "") -> str:
        """A selector for a metric's series as vLLM exports them."""
        return self.dialect.series(metric, suffix, extra=extra)

    def last_rate(self, metric: str) -> str:
        """The rate of a counter between its last two scrapes, by engine."""
        return self.dialect.sum(f"irate({self.raw(metric, '_total')}[{self.dialect.range}])")
