"""Values that the store takes and returns. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kneewatch.collector.history import Column, Restart
from kneewatch.collector.names.vllm_series import EngineKey
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.rules.rule import Severity

KINDS = ("stage", "cause", "health")
DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long every scrape is kept, how long a value a minute, and what the file may take."""

    keep_s: float = 15 * DAY_S
    keep_coarse_s: float = 400 * DAY_S
    max_bytes: int = 4 * 1024**3


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How the store does. `queued`, `written` and `dropped` are cycles, `bytes` is what the files
    take, `oldest_s` the time of the oldest scrape kept; `last_error` is empty while all is well,
    else nothing is written since `unwritten_s`."""

    queued: int
    written: int
    dropped: int
    last_error: str
    bytes: int
    oldest_s: float | None
    unwritten_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoredEngine:
    """One engine that the store knows. `labels` are its target's, the newest ones."""

    id: int
    target: str
    model: str
    engine: str
    replica: str
    labels: Mapping[str, str]
    first_s: float
    last_s: float

    @property
    def key(self) -> EngineKey:
        """What pages call it."""
        return EngineKey(self.model, self.engine, self.replica)


@dataclass(frozen=True, slots=True)
class Scrapes:
    """Scrapes of a target, in order of arrival. Shape: `times` (scrapes,); `failed` are the places
    of those that failed, and why."""

    times: array[float]
    failed: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Series:
    """Signals over time, in the order in which they were scraped.

    Shapes: `times` (scrapes,), each of `values` (scrapes,); NaN where a signal is unknown. Times
    go back only where the clock was set back.
    """

    times: array[float]
    values: Mapping[str, array[float]]


@dataclass(frozen=True, slots=True)
class Interval:
    """How long a stage, a cause or a health lasted.

    `kind` is stage, cause or health; `id` the stage's number as text, the cause's id, the health's
    word; `severity` the worst of it. `end_s` is None while it goes on, `last_s` is when it was
    last seen. `ended` says how: "ended", "restarted" (the engine was replaced), "unwatched"
    (nobody looked, or the page could not be read), or "" while it goes on.
    """

    engine_id: int
    kind: str
    id: str
    severity: Severity
    start_s: float
    end_s: float | None
    last_s: float
    ended: str


@dataclass(frozen=True, slots=True)
class Look:
    """The diagnosis in force at a moment, or None: the engine was not watched then, or what was
    written of it is `damaged`."""

    document: dict[str, Any] | None
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class StoredRecommendation:
    """A recommendation and what became of it.

    `fate`: "open" (told, not seen to be followed), "applied" (the engine's configuration is what
    was recommended, not yet measured), "kept", "missed" or "worsened" (measured against what was
    predicted), "lapsed" (not told any more, never followed). `predicted` are the signals that were
    predicted, `measured` those of them that were measured afterwards.
    """

    engine_id: int
    document: Mapping[str, Any]
    first_s: float
    last_s: float
    fate: str
    applied_s: float | None
    predicted: Mapping[str, float]
    measured: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A start of the engine or a change of its configuration.

    `before` is empty for the first one that was seen. `started_s` is the process's start time where
    the page tells it, `restart` says what showed that the process was replaced.
    """

    t_s: float
    before: Mapping[str, str]
    after: Mapping[str, str]
    started_s: float | None
    restart: str


# --- What one cycle of one target leaves for the store --------------------------------------------


@dataclass(frozen=True, slots=True)
class Raw:
    """An engine's counters as its page had them, histogram parts among them.

    Shapes: `columns` and `values` (counters,). `columns` is the same object as long as the page's
    series are the same; NaN stands for a series that this page lacks.
    """

    columns: tuple[Column, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EngineCycle:
    """One engine after a scrape. `raw` is None where the page could not be read.

    `config` are the labels of cache_config_info, `started_s` the process's start time where the
    page tells it, `restart` a restart that this scrape showed, `replica` tells engines apart that
    one page has several copies of (`EngineKey.replica`).
    """

    diagnosis: Diagnosis
    raw: Raw | None = None
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    started_s: float | None = None
    restart: Restart | None = None
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Cycle:
    """One target after a scrape that succeeded (`error` is None) or failed.

    `duration_s` is the whole cycle's, `labels` are the target's own.
    """

    t_s: float
    target: str
    labels: Mapping[str, str]
    engines: tuple[EngineCycle, ...]
    duration_s: float
    error: str | None = None
