"""Terminal view: the state of all engines on the screen. The feeds write it, the screen reads it.
Pure, thread-safe."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from threading import Lock
from typing import NamedTuple

from msgspec import Struct, field

from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.health import RANKS, shown_health

CHARTED = ("kv_usage_ratio", "waiting", "ttft_p99_s")
"""Signals whose history is stored for the charts."""

KEPT = 1800
"""Maximum number of scrapes in the history of an engine: an hour at a 2 s interval, in 58 kB."""

NAN = float("nan")


class Kind(Enum):
    """The kind of a source."""

    SERVER = "server"
    RECORDING = "recording"
    DAEMON = "daemon"
    GPUS = "gpus"


class RowKey(NamedTuple):
    """Identifies an engine of a target from one source."""

    source: str
    target: str
    model: str
    engine: str


class Trail:
    """An engine's recent history, oldest first; NaN where a signal had no value."""

    def __init__(self) -> None:
        self.times_s = array("d")
        self.values = {key: array("d") for key in CHARTED}

    def add(self, t_s: float, values: Mapping[str, float | None]) -> None:
        """Add the values of a scrape. If the clock was set back, the history starts again."""
        columns = (self.times_s, *self.values.values())
        if self.times_s and t_s <= self.times_s[-1]:
            for column in columns:
                del column[:]
        if len(self.times_s) >= 2 * KEPT:
            for column in columns:
                del column[:KEPT]
        self.times_s.append(t_s)
        for key, column in self.values.items():
            value = values.get(key)
            column.append(NAN if value is None else value)

    def copy(self) -> Trail:
        """A copy of the history, for use by another thread."""
        copy = Trail()
        copy.times_s = self.times_s[-KEPT:]
        copy.values = {key: column[-KEPT:] for key, column in self.values.items()}
        return copy


class ScreenRow(Struct, frozen=True):
    """A row of the screen: one engine, or a source that has no engines yet.

    `quiet_s` is the number of seconds since the newest data. `stale`: this is too long. `note` is a
    message from its source (an error, or the end of a recording).
    """

    key: RowKey
    kind: Kind
    name: str
    diagnosis: Verdict | None
    quiet_s: float = 0.0
    stale: bool = False
    note: str = ""

    @property
    def health(self) -> str:
        """The health to show; unknown without an engine."""
        health = "unknown" if self.diagnosis is None else self.diagnosis.health
        return shown_health(health, late=self.stale)


class _Engine(Struct):
    diagnosis: Verdict
    trail: Trail
    behind_s: float
    late: bool


class _Source(Struct):
    kind: Kind
    patience_s: float
    updated_s: float | None = None
    note: str = ""
    pending: Sequence[str] = ()
    engines: dict[RowKey, _Engine] = field(default_factory=dict[RowKey, _Engine])


class ScreenState:
    """The newest state of all engines. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._sources: dict[str, _Source] = {}

    def expect(self, source: str, kind: Kind, *, patience_s: float) -> None:
        """Add a source that has not sent data yet. Its engines count as stale after `patience_s`
        seconds without data."""
        with self._lock:
            self._sources[source] = _Source(kind, patience_s)

    def put(
        self,
        source: str,
        diagnoses: Sequence[Verdict],
        *,
        now_s: float,
        late: Collection[str] = (),
        pending: Sequence[str] = (),
    ) -> None:
        """Replace the engines of a source by those in `diagnoses`.

        `now_s` is the time on the source's clock. `late` are targets whose data is old, `pending`
        targets without a scrape.
        """
        with self._lock:
            state = self._sources[source]
            state.updated_s, state.note, state.pending = self._clock(), "", pending
            engines: dict[RowKey, _Engine] = {}
            for diagnosis in diagnoses:
                key = RowKey(source, diagnosis.target, diagnosis.model, diagnosis.engine)
                while key in engines:  # a replica: diagnoses do not name it
                    key = key._replace(engine=f"{key.engine}'")
                before = state.engines.get(key)
                trail = before.trail if before else Trail()
                if before is None or before.diagnosis.t_s != diagnosis.t_s:
                    trail.add(diagnosis.t_s, diagnosis.values)
                behind_s = max(0.0, now_s - diagnosis.t_s)
                engines[key] = _Engine(diagnosis, trail, behind_s, key.target in late)
            state.engines = engines

    def set_note(self, source: str, note: str) -> None:
        """Set the message of a source: why it has no data, or that it has ended."""
        with self._lock:
            self._sources[source].note = note

    def daemon_notes(self) -> list[str]:
        """The messages of daemons. They are shown separately, because they belong to no engine."""
        with self._lock:
            daemons = [source for source in self._sources.values() if source.kind is Kind.DAEMON]
            return [daemon.note for daemon in daemons if daemon.note]

    def rows(self) -> list[ScreenRow]:
        """The rows of all engines, worst first."""
        now_s = self._clock()
        with self._lock:
            rows = [row for name in self._sources for row in self._rows(name, now_s)]
        return sorted(rows, key=_order)

    def trail(self, key: RowKey) -> Trail:
        """The history of an engine. Empty if the engine is unknown."""
        with self._lock:
            source = self._sources.get(key.source)
            engine = source.engines.get(key) if source else None
            return engine.trail.copy() if engine else Trail()

    def _rows(self, name: str, now_s: float) -> list[ScreenRow]:
        source = self._sources[name]
        if source.kind is Kind.GPUS:
            return []
        if source.updated_s is None or (not source.engines and source.kind is not Kind.DAEMON):
            return [
                ScreenRow(RowKey(name, name, "", ""), source.kind, name, None, note=source.note)
            ]
        live = source.kind is not Kind.RECORDING
        silent_s = now_s - source.updated_s if live else 0.0
        note = "" if source.kind is Kind.DAEMON else source.note
        rows = [
            ScreenRow(RowKey(name, target, "", ""), source.kind, target, None)
            for target in source.pending
        ]
        by_target: dict[str, list[RowKey]] = {}
        for key in source.engines:
            by_target.setdefault(key.target, []).append(key)
        for key, engine in source.engines.items():
            stale = live and (engine.late or silent_s > source.patience_s)
            quiet_s = silent_s + engine.behind_s if live else 0.0
            shown_name = _shown_name(key, by_target[key.target])
            rows.append(
                ScreenRow(key, source.kind, shown_name, engine.diagnosis, quiet_s, stale, note)
            )
        return rows


def _shown_name(key: RowKey, engines: Sequence[RowKey]) -> str:
    """The name of an engine in the list: its target; with model and engine if the target has
    several engines."""
    if len(engines) == 1:
        return key.target
    model = f" {key.model}" if any(other.model != key.model for other in engines) else ""
    return f"{key.target}{model} engine {key.engine}"


def _order(row: ScreenRow) -> tuple[int, int, str, RowKey]:
    stage = row.diagnosis.stage.level if row.diagnosis else 0
    return -RANKS[row.health], -stage, row.name, row.key
