"""What one cycle of one target leaves for the store. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kneewatch.collector.history import Column, Restart
from kneewatch.diagnose.diagnosis import Diagnosis


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
