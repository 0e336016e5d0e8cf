"""Records that the store writes and returns. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.scrape_history import Column, Restart
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.rules.rule import Severity

KINDS = ("stage", "cause", "health")
DAY_S = 24 * 3600.0


class Retention(Struct, frozen=True):
    """How long every scrape is kept, how long downsampled values are kept, and the largest file
    size."""

    keep_s: float = 15 * DAY_S
    keep_coarse_s: float = 400 * DAY_S
    max_bytes: int = 4 * 1024**3


class StoreStats(Struct, frozen=True):
    """State of the store.

    `queued`, `written` and `dropped` count cycles, `bytes` is the size of the files, `oldest_s` the
    time of the oldest scrape. `last_error` is empty while writing works; otherwise `unwritten_s` is
    the time of the first cycle not written.
    """

    queued: int
    written: int
    dropped: int
    last_error: str
    bytes: int
    oldest_s: float | None
    unwritten_s: float | None = None


class StoredEngine(Struct, frozen=True):
    """An engine in the store. `labels` are the newest labels of its target."""

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
        """The engine's identity on metrics pages."""
        return EngineKey(self.model, self.engine, self.replica)


class Scrapes(Struct, frozen=True):
    """Scrapes of a target, in order of arrival. Shape: `times` (scrapes,); `failed` maps positions
    of failed scrapes to their errors."""

    times: array[float]
    failed: Mapping[int, str]


class Series(Struct, frozen=True):
    """Signals over time, in scrape order.

    Shapes: `times` and each of `values` (scrapes,); NaN where a signal is unknown. Times decrease
    only where the clock was set back.
    """

    times: array[float]
    values: Mapping[str, array[float]]


class Interval(Struct, frozen=True):
    """The time during which an engine had a stage, a cause or a health.

    `kind` is stage, cause or health; `id` is the stage's number as text, the cause's id or the
    health's word; `severity` is its worst. `end_s` is None while it is open; `last_s` is when it
    was last seen. `ended` is "ended", "restarted" (the engine was replaced), "unwatched" (not
    scraped, or the page could not be read), or "" while it is open.
    """

    engine_id: int
    kind: str
    id: str
    severity: Severity
    start_s: float
    end_s: float | None
    last_s: float
    ended: str


class DiagnosisLookup(Struct, frozen=True):
    """The diagnosis in force at a time.

    `document` is None if the engine was not watched then, or if the stored data is `damaged`.
    """

    document: dict[str, Any] | None
    damaged: bool = False


class StoredRecommendation(Struct, frozen=True):
    """A recommendation and its outcome.

    `outcome` is "open" (active, not seen to be applied), "applied" (the engine runs with it, not
    yet measured), "kept", "missed" or "worsened" (measured against the prediction), or "lapsed" (no
    longer active, never applied). `predicted` and `measured` are signals by key: expected from the
    change, and seen after it.
    """

    engine_id: int
    document: Mapping[str, Any]
    first_s: float
    last_s: float
    outcome: str
    applied_s: float | None
    predicted: Mapping[str, float]
    measured: Mapping[str, float]


class ConfigChange(Struct, frozen=True):
    """A start of the engine or a change of its configuration.

    `before` is empty for the first configuration seen; `restart` states how the restart was
    detected.
    """

    t_s: float
    before: Mapping[str, str]
    after: Mapping[str, str]
    restart: str


# --- Input: one cycle of one target ---------------------------------------------------------------


class RawCounters(Struct, frozen=True):
    """An engine's counters from its page, including histogram parts.

    Shapes: `columns` and `values` (counters,). `columns` stays the same object while the page's
    series are the same. NaN: the page lacks the series.
    """

    columns: tuple[Column, ...]
    values: tuple[float, ...]


class EngineCycle(Struct, frozen=True):
    """One engine after a scrape. `raw` is None if the page could not be read.

    `config` holds the labels of cache_config_info, `started_s` the process's start time if the page
    has it, `restart` a restart detected at this scrape. `replica` distinguishes copies of an engine
    on one page (`EngineKey.replica`).
    """

    diagnosis: Diagnosis
    raw: RawCounters | None = None
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    started_s: float | None = None
    restart: Restart | None = None
    replica: str = ""


class Cycle(Struct, frozen=True):
    """One target after a scrape, with its labels; `error` is None if it succeeded."""

    t_s: float
    target: str
    labels: Mapping[str, str]
    engines: tuple[EngineCycle, ...]
    error: str | None = None
