"""Figures, trends, sparklines and data-quality records: the report's basic values. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

UP, DOWN, SAME, UNKNOWN = "up", "down", "same", "unknown"
"""Directions of a trend. `same`: the change is within the noise, or there is none."""


class Period(Struct, frozen=True):
    """A period of the report, without its end `to_s`.

    `covered_s`: seconds in which at least one target was watched; `days`: calendar days in the
    report's time zone (a day with a clock change counts as one).
    """

    from_s: float
    to_s: float
    covered_s: float
    days: int


class Trend(Struct, frozen=True):
    """A figure of this period and of the one before it.

    `direction` is up, down, same or, if a value is unknown, unknown. It is up or down only if the
    difference is larger than `noise`: the change by chance, in the figure's own unit, estimated
    from the differences between days. `good`: whether the direction is an improvement; None if it
    is neither, or unknown.
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


class Spark(Struct, frozen=True):
    """A figure over the period in steps of equal length, for a sparkline.

    Shapes: `values` (steps,); None where unknown. The first step begins at `from_s`.
    """

    from_s: float
    step_s: float
    unit: str
    values: tuple[float | None, ...]


class Line(Struct, frozen=True):
    """A signal around an incident, thinned to what a chart can show.

    Shapes: `times_s` and `values` (points,); None where it is unknown.
    """

    signal: str
    unit: str
    times_s: tuple[float, ...]
    values: tuple[float | None, ...]


class FlagChange(Struct, frozen=True):
    """A flag of the server and its new value."""

    flag: str
    before: str
    after: str


class Advice(Struct, frozen=True):
    """A recommendation with its outcome.

    `fate` is the outcome: open (not applied yet), applied (not measured yet), kept, missed or
    worsened (measured against the prediction), lapsed (never applied, no longer recommended),
    unknown (a metrics system has no record of it). `predicted` and `measured` are signals by key.
    `cost_usd_per_hour` is negative for savings.
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


# --- Data quality: gaps, restarts, unknown signals -----------------------------------------------


class Gap(Struct, frozen=True):
    """A time in which a target was not scraped or scrapes failed. `why` is the error; without one
    the target was not watched."""

    from_s: float
    to_s: float
    why: str


class TargetQuality(Struct, frozen=True):
    """How completely a target was scraped. `gaps` are the longest ones, ordered by start."""

    target: str
    scrapes: int
    failed: int
    interval_s: float | None
    watched_ratio: float
    gap_s: float
    gaps: tuple[Gap, ...]
    gaps_left_out: int


class ConfigDifference(Struct, frozen=True):
    """A value of an engine's configuration that changed."""

    key: str
    before: str
    after: str


class EngineChange(Struct, frozen=True):
    """A start of an engine or a change of its configuration. `restart`: how it was detected."""

    t_s: float
    target: str
    engine: str
    what: str
    restart: str
    differences: tuple[ConfigDifference, ...]


class UnknownSignal(Struct, frozen=True):
    """A signal without data on some engines in the period, and the reason."""

    signal: str
    why: str
    engines: tuple[str, ...]


class Method(Struct, frozen=True):
    """How a figure of the report is computed."""

    figure: str
    how: str
    guide: tuple[str, ...]


class DataQuality(Struct, frozen=True):
    """How far the report can be trusted."""

    targets: tuple[TargetQuality, ...]
    changes: tuple[EngineChange, ...]
    unknown: tuple[UnknownSignal, ...]
    notes: tuple[str, ...]
    methods: tuple[Method, ...]
