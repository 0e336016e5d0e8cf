"""Targets, engines and layouts, cached by the connection that writes them. I/O edge."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import orjson

from kneewatch.agent.store.encoding import EngineName, PackedRecommendation
from kneewatch.agent.store.schema import SEQUENCE_MASK, columns_layout, keys_layout, rows_of
from kneewatch.collector.history import Column
from kneewatch.diagnose.engine.cardinality_limit import ENGINES_MAX
from kneewatch.diagnose.intervals import IntervalBook, Open
from kneewatch.rules.rule import Severity


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


# --- Targets, engines and layouts by what names them, for one connection that writes. I/O edge ----


log = logging.getLogger(__name__)

NAMES_KNOWN = 256
"""More layouts are looked up in the file again: where labels carry ids they have no end."""

NEW_ENGINES_MAX, NEW_ENGINES_S = ENGINES_MAX, 3600.0
"""So many engines of a target that were never seen are written within so long: labels that change
with every scrape must not fill the disk. Other replicas than before are far fewer."""


@dataclass(slots=True)
class KnownTarget:
    """A target: its open scrapes, and its engines of this session. `room` is for how many new
    engines there was room at `room_of_s`; `full` whether it was told that there is none."""

    id: int
    rows: int
    room: int = 0
    room_of_s: float | None = None
    full: bool = False
    engines: dict[EngineName, KnownEngine] = field(
        default_factory=dict["EngineName", "KnownEngine"]
    )


class EngineCache:
    """Targets, engines, layouts and the sequence of one connection."""

    def __init__(self, connection: sqlite3.Connection, session: set[int]) -> None:
        """`session` are the engines that this session has written; `fresh`, those of the present
        transaction, join them once it is committed, and those that `left` a page leave them."""
        self._connection = connection
        self.session, self.fresh, self.left = session, set[int](), set[int]()
        self.refused = set[EngineName]()
        """Engines that were not written since this was last cleared: there was no room."""
        self.targets: dict[str, KnownTarget] = {}
        self._names: dict[bytes, int] = {}
        self._keys: dict[tuple[str, ...], int] = {}
        self._sequence = self._last_sequence()
        self.due_engines: dict[int, KnownEngine] = {}
        self.due_targets: dict[int, KnownTarget] = {}
        """Those with enough open rows for a chunk, by id."""

    def reload(self) -> None:
        """Others changed the tables: everything is read anew when it is needed."""
        self.targets.clear()
        self.due_engines.clear()
        self.due_targets.clear()
        self._names.clear()
        self._keys.clear()

    def drop_empty(self) -> None:
        """Forget targets without engines, but for those of which it was told that they have too
        many; what is due of them stays due."""
        kept = {name: one for name, one in self.targets.items() if one.engines or one.full}
        self.targets = kept

    def committed(self) -> None:
        """What was written is there to stay."""
        self.session |= self.fresh
        self.session -= self.left
        self.fresh.clear()
        self.left.clear()

    def next_sequence(self) -> int:
        """The number of the next cycle."""
        self._sequence += 1
        return self._sequence

    def _last_sequence(self) -> int:
        (sealed,) = self._connection.execute("SELECT max(last_seq) FROM chunks").fetchone()
        (opened,) = self._connection.execute(
            f"SELECT max(id & {SEQUENCE_MASK}) FROM open_scrapes"
        ).fetchone()
        return max(sealed or 0, opened or 0)

    def target(self, name: str) -> KnownTarget:
        """A target, made where there is none."""
        known = self.targets.get(name)
        if known is None:
            target_id = self._id("targets", "name", name)
            known = KnownTarget(target_id, self._count("open_scrapes", target_id))
            self.targets[name] = known
        return known

    def engine(
        self, target: KnownTarget, name: EngineName, t_s: float, labels: Mapping[str, str]
    ) -> KnownEngine | None:
        """An engine, made where there is none; None where there is no room for another."""
        known = target.engines.get(name)
        if known is None:
            room = partial(self._room, target, name.target, t_s)
            known = load_engine(self._connection, target.id, name, t_s, room=room)
            if known is None:
                self.refused.add(name)
                return None
            known.session = known.id in self.session
            self.left.discard(known.id)
            target.engines[name] = known
        if known.labels is not labels and known.labels != labels:
            self._connection.execute(
                "UPDATE engines SET labels = ? WHERE id = ?",
                (orjson.dumps(dict(labels)).decode(), known.id),
            )
        known.labels = labels
        return known

    def _room(self, target: KnownTarget, name: str, t_s: float) -> bool:
        """Take room for a new engine; whether there is any."""
        if target.room_of_s != t_s:
            (new,) = self._connection.execute(
                "SELECT count(*) FROM engines WHERE target_id = ? AND first_s > ?",
                (target.id, t_s - NEW_ENGINES_S),
            ).fetchone()
            target.room, target.room_of_s = NEW_ENGINES_MAX - new, t_s
            target.full = target.full and target.room <= 0
        target.room -= 1
        if target.room < 0 and not target.full:
            target.full = True
            log.warning(
                "store: too many new engines, no more are kept for now target=%s most=%s in_s=%.0f",
                name,
                NEW_ENGINES_MAX,
                NEW_ENGINES_S,
            )
        return target.room >= 0

    def _layout(self, names: bytes) -> int:
        """The id of a list of names, made where there is none."""
        found = self._names.get(names)
        if found is None:
            if len(self._names) >= NAMES_KNOWN:
                self._names.clear()
            found = self._names[names] = self._id("layouts", "names", names)
        return found

    def keys_layout(self, keys: tuple[str, ...]) -> int:
        """The id of a list of signals."""
        found = self._keys.get(keys)
        if found is None:
            found = self._keys[keys] = self._layout(keys_layout(keys))
        return found

    def columns_layout(self, known: KnownEngine, columns: tuple[Column, ...]) -> int:
        """The id of an engine's list of counters."""
        if known.columns is not columns:
            known.columns_layout = self._layout(columns_layout(columns))
            known.columns = columns
        return known.columns_layout

    def _id(self, table: str, column: str, value: str | bytes) -> int:
        """The id of a row by what is unique in it, made where there is none."""
        execute = self._connection.execute
        row = execute(f"SELECT id FROM {table} WHERE {column} = ?", (value,)).fetchone()
        if row is not None:
            return int(row[0])
        made = execute(f"INSERT INTO {table} ({column}) VALUES (?)", (value,))
        return made.lastrowid or 0

    def _count(self, table: str, owner_id: int) -> int:
        (rows,) = self._connection.execute(
            f"SELECT count(*) FROM {table} WHERE id BETWEEN ? AND ?",
            rows_of(owner_id),
        ).fetchone()
        return int(rows)
