"""Types of records that the store writes and returns. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.scrape_history import Column, Restart
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import DAY_S

if TYPE_CHECKING:
    from kneewatch.diagnose.engine.target_monitor import EngineMonitor, TargetMonitor

KINDS = ("stage", "cause", "health")


class Retention(Struct, frozen=True):
    """Seconds for which every scrape is kept, seconds for which downsampled values are kept, and
    the maximum size of the file."""

    keep_s: float = 15 * DAY_S
    keep_coarse_s: float = 400 * DAY_S
    max_bytes: int = 4 * 1024**3


class StoreStats(Struct, frozen=True):
    """State of the store.

    `queued`, `written` and `dropped` are numbers of cycles. `bytes` is the total size of the files.
    `oldest_s` is the time of the oldest scrape. While writing fails, `last_error` is the error and
    `unwritten_s` the time of the first cycle that was not written; otherwise they are "" and None.
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
    """The scrapes of a target, in order of arrival.

    Shape: `times` (scrapes,). `failed` maps the positions of failed scrapes to their errors.
    """

    times: array[float]
    failed: Mapping[int, str]


class Series(Struct, frozen=True):
    """Signals over time, in order of scrapes.

    Shapes: `times` and each of `values` (scrapes,). NaN where a signal is unknown. Times are
    ascending, except where the clock was set back.
    """

    times: array[float]
    values: Mapping[str, array[float]]


# --- Input: one cycle of one target ---------------------------------------------------------------


class EngineCycle(Struct, frozen=True):
    """The state of one engine after a scrape.

    `columns` and `counters` are the counters on its page with their values, including parts of
    histograms: NaN if the page lacks the series, none if the page could not be read. `columns` is
    the same object as long as the page has the same series. Shapes: (counters,).

    `config` are the labels of cache_config_info. `started_s` is the start time of the process, None
    if the page lacks it. `restart` is a restart that was detected at this scrape. `replica`
    distinguishes copies of an engine on the same page (`EngineKey.replica`).
    """

    diagnosis: Verdict
    columns: tuple[Column, ...] = ()
    counters: Sequence[float] = ()
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    started_s: float | None = None
    restart: Restart | None = None
    replica: str = ""


class Cycle(Struct, frozen=True):
    """The state of one target after a scrape. `error` is None if the scrape succeeded."""

    t_s: float
    target: str
    labels: Mapping[str, str]
    engines: tuple[EngineCycle, ...]
    error: str | None = None


def engine_cycles(
    diagnoses: Sequence[Verdict],
    tiered: Sequence[Verdict],
    monitor: TargetMonitor,
    restart: Restart | None,
) -> tuple[EngineCycle, ...]:
    """The cycles of all engines, in the form that is stored.

    `tiered` are the same diagnoses with their tiers added. `restart` is a restart that the metrics
    pages do not show; else None.
    """
    by_diagnosis = {id(engine.newest): engine for engine in monitor.engines}
    return tuple(
        engine_cycle(last, by_diagnosis.get(id(plain)), restart)
        for plain, last in zip(diagnoses, tiered, strict=True)
    )


def engine_cycle(
    diagnosis: Verdict, engine: EngineMonitor | None, restart: Restart | None
) -> EngineCycle:
    """The cycle of one engine, in the form that is stored. `engine` is None if no metrics page
    contained it yet."""
    replica = engine.key.replica if engine else ""
    if engine is None or not diagnosis.was_read:
        return EngineCycle(diagnosis, replica=replica)
    return EngineCycle(
        diagnosis,
        *engine.reader.counters(),
        engine.reader.config,
        engine.reader.history.started_s,
        engine.restart or restart,
        replica,
    )
