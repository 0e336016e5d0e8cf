"""The input of the report: tiers, engines, incidents, restarts and gaps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kneewatch.diagnose.causes.evidence import Targets
from kneewatch.diagnose.deployment.deployment import NOTHING, Stated
from kneewatch.diagnose.learned.knee import Point
from kneewatch.reports.weekly.aggregation import Span
from kneewatch.reports.weekly.figures import Method
from kneewatch.reports.weekly.hours import Grid
from kneewatch.rules.library import RULES
from kneewatch.rules.rule import Rule, Severity


@dataclass(frozen=True, slots=True)
class Held:
    """An interval of a stage, cause or health: `kind`, `id` and `ended` as in the store.

    `end_s` is None while it is open.
    """

    kind: str
    id: str
    severity: Severity
    start_s: float
    end_s: float | None
    last_s: float
    ended: str

    @property
    def until_s(self) -> float:
        """Its end, or when it was last seen."""
        return self.last_s if self.end_s is None else self.end_s


@dataclass(frozen=True, slots=True)
class Episode:
    """Intervals of one engine that form one incident. `cause` is its root cause, `kind` is cascade
    or cause; `stages` and `causes` are ordered by start."""

    kind: str
    cause: str
    severity: Severity
    start_s: float
    end_s: float | None
    last_s: float
    ended: str
    stages: tuple[Held, ...]
    causes: tuple[Held, ...]

    @property
    def until_s(self) -> float:
        """Its end, or when it was last seen."""
        return self.last_s if self.end_s is None else self.end_s


@dataclass(frozen=True, slots=True)
class EpisodeObserved:
    """An episode with what was observed around it.

    `document` is the diagnosis at its worst (kneewatch.diagnosis/1), `during` and `hour_before`
    what the engine counted, `series` times and values of signals around it, NaN where unknown.
    """

    tier: str
    target: str
    engine: str
    episode: Episode
    document: Mapping[str, Any] | None = None
    during: Span = field(default_factory=Span)
    hour_before: Span = field(default_factory=Span)
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(
        default_factory=dict[str, tuple[Sequence[float], Sequence[float]]]
    )


@dataclass(frozen=True, slots=True)
class Recommended:
    """A recommendation of an engine as the store has it; `document` is that of the diagnosis."""

    tier: str
    target: str
    engine: str
    document: Mapping[str, Any]
    fate: str
    first_s: float
    last_s: float
    applied_s: float | None
    predicted: Mapping[str, float]
    measured: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Configured:
    """A start of an engine or a change of its configuration; `before` is empty for the first."""

    t_s: float
    target: str
    engine: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    restart: str


@dataclass(frozen=True, slots=True)
class Unread:
    """A gap in which a target was not scraped or a scrape failed; `why` is the error, empty if
    there was no scrape."""

    from_s: float
    to_s: float
    why: str


@dataclass(frozen=True, slots=True)
class TargetObserved:
    """A target's scrapes over the period. `interval_s` is the usual scrape interval."""

    target: str
    scrapes: int
    failed: int
    interval_s: float | None
    watched_s: float
    unread: Sequence[Unread] = ()


# The period model: filled by a source (the store, Prometheus), read by all sections of the report.


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests in flight on an engine over its windows: P99, maximum, time of the maximum."""

    p99: float
    highest: float
    highest_at_s: float


@dataclass(frozen=True, slots=True)
class EngineObserved:
    """An engine over a period. `spans` has one for each of the grid's hours.

    `minutes` are the requests that began in each minute of the period, NaN where unknown. `points`
    are windows at all loads, thinned evenly. `unknown` maps signals without data to the reason.
    """

    target: str
    engine: str
    replica: str
    first_s: float
    last_s: float
    spans: Sequence[Span]
    minutes: Sequence[float] = ()
    points: Sequence[Point] = ()
    in_flight: InFlight | None = None
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class TierTotals:
    """What is known only in sum over a tier's engines: Prometheus adds up histograms itself.
    `spans` has one entry per hour of the grid, or none; `minutes` as for an engine."""

    spans: Sequence[Span] = ()
    minutes: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class WorkloadStated:
    """The workload that the size was computed for; None where not stated."""

    origin: str
    input_mean_tokens: float | None = None
    input_p95_tokens: float | None = None
    output_mean_tokens: float | None = None
    output_p95_tokens: float | None = None
    average_requests_per_s: float | None = None
    peak_requests_per_s: float | None = None
    archetype: str = ""


@dataclass(frozen=True, slots=True)
class TierStated:
    """What the settings say about a tier. `gpus` are those of one engine.

    `safety` is the sizing margin as a factor, `objective_ratio` the share of requests that must be
    in time, `rules` have the user's thresholds.
    """

    targets: Targets = field(default_factory=Targets)
    gpus: int | None = None
    usd_per_gpu_hour: float | None = None
    price_source: str = ""
    benchmark_ttft_p99_s: float | None = None
    benchmark_gpu_ratio: float | None = None
    stated: Stated = NOTHING
    workload: WorkloadStated | None = None
    rules: tuple[Rule, ...] = RULES
    safety: float = 1.3
    objective_ratio: float = 0.99


@dataclass(frozen=True, slots=True)
class TierObserved:
    """A tier's engines in the period and in the one before."""

    id: str
    model: str
    gpu: str
    stated: TierStated
    engines: Sequence[EngineObserved]
    before: Sequence[EngineObserved] = ()
    totals: TierTotals = TierTotals()
    totals_before: TierTotals = TierTotals()


@dataclass(frozen=True, slots=True)
class Observed:
    """A report's input: the period and the one before; `before_grid` is None without comparison.

    `notices` are shown at the top of the report, `notes` under data quality; `methods` replace
    METHODS of the same figures. `partial`: a query failed or had a partial answer, so that nothing
    can be called healthy.
    """

    grid: Grid
    before_grid: Grid | None
    source: str
    tiers: Sequence[TierObserved] = ()
    episodes: Sequence[EpisodeObserved] = ()
    recommended: Sequence[Recommended] = ()
    configured: Sequence[Configured] = ()
    targets: Sequence[TargetObserved] = ()
    filters: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ()
    partial: bool = False
