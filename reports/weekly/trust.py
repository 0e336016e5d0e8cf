"""How far the report can be trusted: gaps, restarts, what is unknown. Values of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


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
