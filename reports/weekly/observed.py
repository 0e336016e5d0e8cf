"""What was observed of a fleet over a period and the one before: what the report is made of. Pure.

Whoever has a history (the store, Prometheus) fills these in; the sections take nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kneewatch.diagnose.case import Targets
from kneewatch.diagnose.knee import Point
from kneewatch.diagnose.recommend.deployment import NOTHING, Stated
from kneewatch.reports.weekly.grid import Grid
from kneewatch.reports.weekly.happened import (
    Configured,
    EpisodeObserved,
    Recommended,
    TargetObserved,
)
from kneewatch.reports.weekly.spans import Span
from kneewatch.reports.weekly.trust import Method
from kneewatch.rules.library import RULES
from kneewatch.rules.model import Rule


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests in flight on an engine, over its windows: their P99, the highest, and when."""

    p99: float
    highest: float
    highest_at_s: float


@dataclass(frozen=True, slots=True)
class EngineObserved:
    """An engine over a period. `spans` has one for each of the grid's hours.

    `minutes` are the requests that began in each minute from the period's start on, NaN where
    nothing is known. `points` are windows at all loads that it had, thinned evenly. `unknown` says
    of signals that were never known why.
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
class Together:
    """What is known of a tier's engines in sum only, beside what is known of each: a metrics system
    adds up histograms itself. `spans` are one for each of the grid's hours, or none; `minutes` are
    as an engine's."""

    spans: Sequence[Span] = ()
    minutes: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class WorkloadStated:
    """The workload that the size was computed for; None: not stated."""

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

    `safety` is the factor that a fleet is sized with, `objective_ratio` the share of requests that
    must be in time, `rules` have the user's thresholds.
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
    """A tier's engines in the period and, as far as they were there, in the one before."""

    id: str
    model: str
    gpu: str
    stated: TierStated
    engines: Sequence[EngineObserved]
    before: Sequence[EngineObserved] = ()
    together: Together = Together()
    together_before: Together = Together()


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything. `before_grid` is None where nothing is compared with.

    `notices` are said first in the report, `notes` with the data's quality; `methods` are those
    that take the place of METHODS of the same figures. `partial`: something that was asked had no
    whole answer, so that nothing can be called healthy.
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
