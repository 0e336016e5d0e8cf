"""Figures, trends, sparklines and data-quality records: the report's basic values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UP, DOWN, SAME, UNKNOWN = "up", "down", "same", "unknown"
"""Directions of a trend. `same`: the change is within the noise, or there is none."""


@dataclass(frozen=True, slots=True)
class Period:
    """A stretch of time that the report is about. `to_s` is not part of it.

    `covered_s` is how much of it any target was watched, `days` its calendar days in the report's
    time zone (a day with a clock change counts as one).
    """

    from_s: float
    to_s: float
    covered_s: float
    days: int


@dataclass(frozen=True, slots=True)
class Trend:
    """A figure of this period and of the one before it.

    `direction` is up, down or same, and unknown where either value is. It is up or down only where
    the difference is more than `noise`, which is in the figure's own unit: what the same figure
    differs by chance, judged by its spread from day to day. `good` says whether the direction is a
    good one; None where it is neither, or not known.
    """

    key: str
    name: str
    unit: str
    value: float | None
    before: float | None = None
    noise: float | None = None
    direction: str = UNKNOWN
    good: bool | None = None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Spark:
    """A figure over the period in steps of equal length, for a small chart.

    Shapes: `values` (steps,); None where a step has none. The first step begins at `from_s`.
    """

    from_s: float
    step_s: float
    unit: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A signal around an incident, thinned to what a chart can show.

    Shapes: `times_s` and `values` (points,); None where it is unknown.
    """

    signal: str
    unit: str
    times_s: tuple[float, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure with what it may be at least and at most."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    """What speaks for (or against) a cause: a signal's value against a bound, in words too."""

    signal: str
    value: float | None
    threshold: float | None
    text: str


@dataclass(frozen=True, slots=True)
class FlagChange:
    """A flag of the server and its new value."""

    flag: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation and its fate.

    `fate`: open (told, not seen to be followed), applied (followed, not yet measured), kept, missed
    or worsened (measured against what was predicted), lapsed (never followed, not told any more),
    unknown (a metrics system does not tell).
    `predicted` and `measured` are signals by key. `cost_usd_per_hour` is negative where it saves.
    """

    id: str
    cause: str
    summary: str
    changes: tuple[FlagChange, ...]
    fate: str
    first_s: float
    last_s: float
    applied_s: float | None
    before: Mapping[str, float]
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    cost_usd_per_hour: float | None
    risk: str
    verify: tuple[str, ...]
    guide: tuple[str, ...]


# --- How far the report can be trusted: gaps, restarts, what is unknown. Values of it -------------


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a target was not watched, or could not be read; `why` is what was said."""

    from_s: float
    to_s: float
    why: str


@dataclass(frozen=True, slots=True)
class TargetQuality:
    """How well a target was watched. `gaps` are the longest ones, by their start."""

    target: str
    scrapes: int
    failed: int
    interval_s: float | None
    watched_ratio: float
    gap_s: float
    gaps: tuple[Gap, ...]
    gaps_left_out: int


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """A value of an engine's configuration that changed."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class EngineChange:
    """A start of an engine, or a change of its configuration. `restart` says what showed it."""

    t_s: float
    target: str
    engine: str
    what: str
    restart: str
    differences: tuple[ConfigDifference, ...]


@dataclass(frozen=True, slots=True)
class UnknownSignal:
    """A signal that some engines never had in the period, and why."""

    signal: str
    why: str
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """How a figure of the report is computed, with the guide's section."""

    figure: str
    how: str
    guide: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DataQuality:
    """How far the report can be trusted."""

    targets: tuple[TargetQuality, ...]
    changes: tuple[EngineChange, ...]
    unknown: tuple[UnknownSignal, ...]
    notes: tuple[str, ...]
    methods: tuple[Method, ...]
