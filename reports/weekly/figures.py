"""The basic values of the report: figures, trends, sparklines and data quality. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables

UP, DOWN, SAME, UNKNOWN = "up", "down", "same", "unknown"
"""Directions of a trend. `same`: the value did not change, or changed less than the noise."""


class Period(Struct, frozen=True):
    """A period of the report: from `from_s` up to, but not including, `to_s`.

    `covered_s` is the number of seconds in which at least one target was watched. `days` is the
    number of calendar days in the report's time zone; a day on which clocks change counts as one.
    """

    from_s: float
    to_s: float
    covered_s: float
    days: int


class Trend(Struct, frozen=True):
    """A figure of this period and of the period before.

    `direction` is up, down, same or unknown; it is unknown if one of the two values is unknown. It
    is up or down only if the change is larger than `noise`. `noise` is the change that chance alone
    can cause, in the figure's unit; it is estimated from differences between days. `good`: whether
    the change is an improvement; None if it is neither good nor bad, or unknown.
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
    """A figure in steps of equal length, for a sparkline. The first step begins at `from_s`.

    Shapes: `values` (steps,); None where unknown.
    """

    from_s: float
    step_s: float
    unit: str
    values: tuple[float | None, ...]


class Line(Struct, frozen=True):
    """A signal around the time of an incident. It has only as many points as a chart can show.

    Shapes: `times_s` and `values` (points,); None where the signal is unknown.
    """

    signal: str
    unit: str
    times_s: tuple[float, ...]
    values: tuple[float | None, ...]


class ReportedFlag(Struct, frozen=True):
    """A change of one flag of the server: its old and its new value."""

    flag: str
    before: str
    after: str


class AdviceOutcome(Struct, frozen=True):
    """A recommendation with its outcome.

    `fate` is the outcome: open (not applied yet), applied (not measured yet), kept, missed or
    worsened (measured, compared with the prediction), lapsed (never applied and no longer
    recommended), or unknown (a metrics system does not record it). `before`, `predicted` and
    `measured` are signals by key. `cost_usd_per_hour` is negative for savings. `suffices`: whether
    the change alone removes its cause; None if unknown.
    """

    id: str
    cause: str
    summary: str
    changes: tuple[ReportedFlag, ...]
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
    suffices: bool | None


# --- Data quality: gaps, restarts, unknown signals -----------------------------------------------


class Gap(Struct, frozen=True):
    """A time in which a target was not scraped, or in which its scrapes failed. `why` is the error,
    or that it was not watched."""

    from_s: float
    to_s: float
    why: str


class TargetQuality(Struct, frozen=True):
    """How completely a target was scraped. `interval_s` is the usual scrape interval,
    `watched_ratio` the share of the period, `gap_s` the length of all gaps. `gaps` are the longest
    ones, sorted by start."""

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
    """A start of an engine, or a change of its configuration. `restart` is the way in which a
    restart was detected."""

    t_s: float
    target: str
    engine: str
    what: str
    restart: str
    differences: tuple[ConfigDifference, ...]


class UnknownSignal(Struct, frozen=True):
    """A signal that had no data in the period, on the engines `engines`, and the reason."""

    signal: str
    why: str
    engines: tuple[str, ...]


class Method(Struct, frozen=True):
    """The method by which a figure of the report is computed."""

    figure: str
    how: str
    guide: tuple[str, ...]


def methods(section: str, **numbers: object) -> tuple[Method, ...]:
    """The methods of a section of methods.toml, with these numbers in their texts."""
    rows = packaged_tables("reports.weekly", "methods.toml")[section]
    return tuple(
        Method(figure, row["how"].format(**numbers), tuple(row.get("guide", ())))
        for figure, row in rows.items()
    )


class DataQuality(Struct, frozen=True):
    """Information on how far the report can be trusted."""

    targets: tuple[TargetQuality, ...]
    changes: tuple[EngineChange, ...]
    unknown: tuple[UnknownSignal, ...]
    notes: tuple[str, ...]
    methods: tuple[Method, ...]
