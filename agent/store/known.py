"""What the writer knows of an engine while it writes; read from the file when first needed.
I/O edge."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import orjson

from kneewatch.agent.store.intervals import IntervalBook, Open
from kneewatch.agent.store.packing import EngineName, PackedRecommendation
from kneewatch.agent.store.rows import rows_of
from kneewatch.collector.history import Column
from kneewatch.rules.model import Severity


@dataclass(slots=True)
class ToldRow:
    """A recommendation that is being told: its row, and what was last written of it."""

    id: int
    document: bytes
    written_s: float


@dataclass(slots=True)
class Chain:
    """The documents last written of an engine: a whole one of `whole_bytes` when compressed, with
    its row and time, and the newest, `links` after one told against the whole."""

    whole_id: int
    whole: bytes
    whole_bytes: int
    whole_s: float
    last_id: int
    last: bytes
    links: int = 0


@dataclass(slots=True)
class KnownEngine:
    """An engine: what is open of it, and what was last written.

    `rows` are open scrapes; `counters_id` is the newest row of counters, of `counters_s` and with
    the layout `counters_layout`, and `counters_kept_s` the time of the newest that stays.
    """

    id: int
    last_s: float
    labels: Mapping[str, str]
    rows: int
    book: IntervalBook
    counters_id: int = 0
    counters_s: float = 0.0
    counters_kept_s: float = 0.0
    counters_layout: int = 0
    columns: tuple[Column, ...] = ()
    columns_layout: int = 0
    config: Mapping[str, str] | None = None
    started_s: float | None = None
    documents: Chain | None = None
    recommendations: tuple[PackedRecommendation, ...] = ()
    told: dict[str, ToldRow] = field(default_factory=dict[str, ToldRow])
    session: bool = False
    """Whether a cycle of this session has been written."""
    page: bool = False
    """Whether a page of this session could be read."""
    seen_s: float = 0.0
    """When the last one was, on the machine's monotonic clock."""


def load_engine(
    connection: sqlite3.Connection,
    target_id: int,
    name: EngineName,
    t_s: float,
    *,
    room: Callable[[], bool],
) -> KnownEngine | None:
    """An engine as the file knows it, made where it does not; None where there is no room to."""
    execute = connection.execute
    named = (target_id, name.model, name.engine, name.replica)
    row = execute(
        "SELECT id, last_s, labels FROM engines"
        " WHERE (target_id, model, engine, replica) = (?, ?, ?, ?)",
        named,
    ).fetchone()
    if row is None:
        if not room():
            return None
        made = execute(
            "INSERT INTO engines (target_id, model, engine, replica, labels, first_s, last_s)"
            " VALUES (?, ?, ?, ?, '{}', ?, ?)",
            (*named, t_s, t_s),
        )
        return KnownEngine(made.lastrowid or 0, t_s, {}, 0, IntervalBook())
    engine_id, last_s, labels = row
    count, newest = execute(
        "SELECT count(*), max(id) FROM open_signals WHERE id BETWEEN ? AND ?", rows_of(engine_id)
    ).fetchone()
    if newest is not None:
        (last_s,) = execute("SELECT t_s FROM open_signals WHERE id = ?", (newest,)).fetchone()
    book = IntervalBook(_open_intervals(connection, engine_id, last_s))
    known = KnownEngine(engine_id, last_s, orjson.loads(labels), count, book)
    _load_rest(connection, known)
    return known


def _load_rest(connection: sqlite3.Connection, known: KnownEngine) -> None:
    execute = connection.execute
    counters = execute(
        "SELECT id, t_s, layout_id FROM open_counters WHERE id BETWEEN ? AND ?"
        " ORDER BY id DESC LIMIT 2",
        rows_of(known.id),
    ).fetchall()
    if counters:
        known.counters_id, known.counters_s, known.counters_layout = counters[0]
        known.counters_kept_s = counters[-1][1]
    config = execute(
        "SELECT labels, started_s FROM configs WHERE engine_id = ? ORDER BY id DESC LIMIT 1",
        (known.id,),
    ).fetchone()
    if config:
        known.config, known.started_s = orjson.loads(config[0]), config[1]
    told = execute(
        "SELECT id, name, document FROM recommendations WHERE engine_id = ? AND last_s IS NULL",
        (known.id,),
    )
    known.told = {name: ToldRow(row, document, 0.0) for row, name, document in told}


def _open_intervals(connection: sqlite3.Connection, engine_id: int, last_s: float) -> list[Open]:
    rows = connection.execute(
        "SELECT kind, name, severity, start_s, last_s FROM intervals"
        " WHERE engine_id = ? AND end_s IS NULL",
        (engine_id,),
    )
    return [
        Open(
            kind,
            name,
            Severity(severity),
            start_s,
            last_s if seen_s is None else seen_s,
            paused=seen_s is not None,
        )
        for kind, name, severity, start_s, seen_s in rows
    ]
