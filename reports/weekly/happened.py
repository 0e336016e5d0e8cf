"""What happened in a period: incidents, recommendations, restarts, gaps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kneewatch.reports.weekly.spans import Span
from kneewatch.rules.model import Severity


@dataclass(frozen=True, slots=True)
class Held:
    """How long a stage, a cause or a health held: `kind`, `id` and `ended` as the store has them.

    `end_s` is None where it goes on.
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
    """Intervals of one engine that belong together. `cause` is told first, `kind` is cascade or
    cause; `stages` and `causes` are in order of their start."""

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
    """A time in which a target was not scraped, or its page could not be read; `why` is what was
    said, empty where nobody looked."""

    from_s: float
    to_s: float
    why: str


@dataclass(frozen=True, slots=True)
class TargetObserved:
    """A target's scrapes over the period. `interval_s` is their usual distance."""

    target: str
    scrapes: int
    failed: int
    interval_s: float | None
    watched_s: float
    unread: Sequence[Unread] = ()
