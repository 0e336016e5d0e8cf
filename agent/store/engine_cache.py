"""A cache of targets, engines and layouts in memory, for the connection that writes. I/O edge."""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Mapping

import orjson
from msgspec import Struct, field

from kneewatch.agent.store.database import SEQUENCE_MASK, columns_layout, keys_layout, rows_of
from kneewatch.agent.store.encoding import EngineName
from kneewatch.collector.scrape_history import Column
from kneewatch.diagnose.change import Interval, IntervalBook
from kneewatch.diagnose.engine.target_monitor import ENGINES_MAX
from kneewatch.rules.rule import SEVERITIES


class AdviceRow(Struct):
    """An active recommendation: its row id, and the document that was written last."""

    id: int
    document: bytes
    written_s: float


class DocumentChain(Struct):
    """The last documents of an engine.

    `whole` is the newest document that was stored whole, with its row id, compressed size in bytes
    and time. `last` is the newest document. It is `links` deltas away from a document that is a
    delta to the whole one.
    """

    whole_id: int
    whole: bytes
    whole_bytes: int
    whole_s: float
    last_id: int
    last: bytes
    links: int = 0


TEXTS_MAX_BYTES, TEXTS_S = 2 * 1024 * 1024, 3600.0
"""Maximum bytes of new layouts and configurations of a target that are stored, and the time in
seconds for which it applies. Labels that change with every scrape must not fill the disk."""


class TextBudget(Struct):
    """The bytes of layouts and configurations that a target may still store in this hour."""

    hour: float = 0.0
    left: int = TEXTS_MAX_BYTES

    def take(self, t_s: float, count: int) -> bool:
        """Whether so many bytes may be stored."""
        hour = t_s // TEXTS_S
        if hour != self.hour:
            self.hour, self.left = hour, TEXTS_MAX_BYTES
        self.left -= count
        return self.left >= 0


class CachedEngine(Struct):
    """Data of an engine: its open intervals and recommendations, and the rows that were written
    last.

    `rows` is the number of open scrapes. `counters_id`, `counters_s` and `counters_layout` are the
    id, time and layout of the newest row of counters, which may still be replaced.
    `counters_kept_s` is the time of the newest row that stays.
    """

    id: int
    last_s: float
    labels: Mapping[str, str]
    rows: int
    book: IntervalBook
    texts: TextBudget
    counters_id: int = 0
    counters_s: float = 0.0
    counters_kept_s: float = 0.0
    counters_layout: int = 0
    columns: tuple[Column, ...] = ()
    columns_layout: int = 0
    config: Mapping[str, str] | None = None
    started_s: float | None = None
    documents: DocumentChain | None = None
    recommendations: Mapping[str, bytes] = {}
    active: dict[str, AdviceRow] = field(default_factory=dict[str, AdviceRow])
    session: bool = False
    """Whether this process has written a cycle of this engine."""
    page_read: bool = False
    """Whether this process has read a metrics page with this engine."""
    seen_s: float = 0.0
    """Monotonic time of the engine's last cycle."""


def _load_rest(connection: sqlite3.Connection, engine: CachedEngine) -> None:
    execute = connection.execute
    counters = execute(
        "SELECT id, t_s, layout_id FROM open_counters WHERE id BETWEEN ? AND ?"
        " ORDER BY id DESC LIMIT 2",
        rows_of(engine.id),
    ).fetchall()
    if counters:
        engine.counters_id, engine.counters_s, engine.counters_layout = counters[0]
        engine.counters_kept_s = counters[-1][1]
    config = execute(
        "SELECT labels, started_s FROM configs WHERE engine_id = ? ORDER BY id DESC LIMIT 1",
        (engine.id,),
    ).fetchone()
    if config:
        engine.config, engine.started_s = orjson.loads(config[0]), config[1]
    active = execute(
        "SELECT id, name, document FROM recommendations WHERE engine_id = ? AND last_s IS NULL",
        (engine.id,),
    )
    engine.active = {name: AdviceRow(row, document, 0.0) for row, name, document in active}


def _open_intervals(
    connection: sqlite3.Connection, engine_id: int, last_s: float
) -> list[Interval]:
    rows = connection.execute(
        "SELECT kind, name, severity, start_s, last_s FROM intervals"
        " WHERE engine_id = ? AND end_s IS NULL",
        (engine_id,),
    )
    return [
        Interval(
            kind,
            name,
            SEVERITIES[int(severity)],
            start_s,
            last_s if seen_s is None else seen_s,
            paused=seen_s is not None,
        )
        for kind, name, severity, start_s, seen_s in rows
    ]


# --- The cache ------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

LAYOUTS_CACHED = 256
"""Maximum number of layouts in the cache. Labels that contain ids create new layouts without
end."""

NEW_ENGINES_MAX, NEW_ENGINES_S = ENGINES_MAX, 3600.0
"""Maximum number of new engines per target, and the time in seconds for which it applies. Labels
that change with every scrape must not fill the disk; real replacements of replicas are far
fewer."""


class CachedTarget(Struct):
    """Data of a target: the number of its open scrapes, and those of its engines that this process
    has seen.

    `new_engines_left` is the number of new engines that were allowed at `left_counted_s`. `full`:
    the log has a message that the limit was reached.
    """

    id: int
    rows: int
    texts: TextBudget
    new_engines_left: int = 0
    left_counted_s: float | None = None
    full: bool = False
    engines: dict[EngineName, CachedEngine] = field(
        default_factory=dict["EngineName", "CachedEngine"]
    )


class EngineCache:
    """Targets, engines, layouts and the cycle sequence of one connection."""

    def __init__(self, connection: sqlite3.Connection, session: set[int]) -> None:
        """`session` holds the ids of engines that this process has written. On commit, `fresh` is
        added to `session`, and `left` (engines that disappeared from their page) is removed."""
        self._connection = connection
        self.session, self.fresh, self.left = session, set[int](), set[int]()
        self.refused = set[EngineName]()
        """Engines that were not written because of the limit on new engines, since this set was
        last cleared."""
        self.targets: dict[str, CachedTarget] = {}
        self._texts: defaultdict[str, TextBudget] = defaultdict(TextBudget)
        self._names: dict[bytes, int] = {}
        self._keys: dict[tuple[str, ...], int] = {}
        self._sequence = self._last_sequence()
        self.due_engines: dict[int, CachedEngine] = {}
        self.due_targets: dict[int, CachedTarget] = {}
        """Engines and targets that have enough open rows for a chunk, by id."""

    def reload(self) -> None:
        """Empty the cache after rows were deleted. Entries are read again when they are needed."""
        self.targets.clear()
        self.due_engines.clear()
        self.due_targets.clear()
        self._names.clear()
        self._keys.clear()

    def drop_empty(self) -> None:
        """Drop targets without engines. Targets that reached the limit on new engines stay, and so
        do pending flushes."""
        self.targets = {
            name: target for name, target in self.targets.items() if target.engines or target.full
        }
        for name in self._texts.keys() - self.targets.keys():
            del self._texts[name]

    def committed(self) -> None:
        """Update `session` after a transaction was committed."""
        self.session |= self.fresh
        self.session -= self.left
        self.fresh.clear()
        self.left.clear()

    def next_sequence(self) -> int:
        """The sequence number of the next cycle."""
        self._sequence += 1
        return self._sequence

    def _last_sequence(self) -> int:
        (sealed,) = self._connection.execute("SELECT max(last_seq) FROM chunks").fetchone()
        (opened,) = self._connection.execute(
            f"SELECT max(id & {SEQUENCE_MASK}) FROM open_scrapes"
        ).fetchone()
        return max(sealed or 0, opened or 0)

    def target(self, name: str) -> CachedTarget:
        """The target with this name. It is inserted if it does not exist."""
        target = self.targets.get(name)
        if target is None:
            target_id = self._id("targets", "name", name)
            rows = self._count("open_scrapes", target_id)
            target = CachedTarget(target_id, rows, self._texts[name])
            self.targets[name] = target
        return target

    def engine(
        self, target: CachedTarget, name: EngineName, t_s: float, labels: Mapping[str, str]
    ) -> CachedEngine | None:
        """The engine with this name. It is inserted if it does not exist; None if the limit on new
        engines is reached."""
        engine = target.engines.get(name)
        if engine is None:
            engine = self._load(target, name, t_s)
            if engine is None:
                self.refused.add(name)
                return None
            engine.session = engine.id in self.session
            self.left.discard(engine.id)
            target.engines[name] = engine
        if engine.labels is not labels and engine.labels != labels:
            self._connection.execute(
                "UPDATE engines SET labels = ? WHERE id = ?",
                (orjson.dumps(dict(labels)).decode(), engine.id),
            )
        engine.labels = labels
        return engine

    def _load(self, target: CachedTarget, name: EngineName, t_s: float) -> CachedEngine | None:
        """Read an engine from the file. It is inserted if it does not exist; None if the limit on
        new engines is reached."""
        execute = self._connection.execute
        named = (target.id, name.model, name.engine, name.replica)
        row = execute(
            "SELECT id, last_s, labels FROM engines"
            " WHERE (target_id, model, engine, replica) = (?, ?, ?, ?)",
            named,
        ).fetchone()
        if row is None:
            if not self._admits(target, name.target, t_s):
                return None
            inserted = execute(
                "INSERT INTO engines (target_id, model, engine, replica, labels, first_s, last_s)"
                " VALUES (?, ?, ?, ?, '{}', ?, ?)",
                (*named, t_s, t_s),
            )
            return CachedEngine(inserted.lastrowid or 0, t_s, {}, 0, IntervalBook(), target.texts)
        engine_id, last_s, labels = row
        count, newest = execute(
            "SELECT count(*), max(id) FROM open_signals WHERE id BETWEEN ? AND ?",
            rows_of(engine_id),
        ).fetchone()
        if newest is not None:
            (last_s,) = execute("SELECT t_s FROM open_signals WHERE id = ?", (newest,)).fetchone()
        book = IntervalBook(_open_intervals(self._connection, engine_id, last_s))
        engine = CachedEngine(engine_id, last_s, orjson.loads(labels), count, book, target.texts)
        _load_rest(self._connection, engine)
        return engine

    def _admits(self, target: CachedTarget, name: str, t_s: float) -> bool:
        """Count a new engine. Returns whether the limit on new engines allows it."""
        if target.left_counted_s != t_s:
            (count,) = self._connection.execute(
                "SELECT count(*) FROM engines WHERE target_id = ? AND first_s > ?",
                (target.id, t_s - NEW_ENGINES_S),
            ).fetchone()
            target.new_engines_left, target.left_counted_s = NEW_ENGINES_MAX - count, t_s
            target.full = target.full and target.new_engines_left <= 0
        target.new_engines_left -= 1
        if target.new_engines_left < 0 and not target.full:
            target.full = True
            log.warning(
                "too many new engines, not storing more for now target=%s limit=%s per_s=%.0f",
                name,
                NEW_ENGINES_MAX,
                NEW_ENGINES_S,
            )
        return target.new_engines_left >= 0

    def _layout(self, names: bytes) -> int:
        """The id of an encoded list of names. The list is inserted if it does not exist."""
        layout_id = self._names.get(names)
        if layout_id is None:
            if len(self._names) >= LAYOUTS_CACHED:
                self._names.clear()
            layout_id = self._names[names] = self._id("layouts", "names", names)
        return layout_id

    def keys_layout(self, keys: tuple[str, ...]) -> int:
        """The id of the layout for a list of signals."""
        layout_id = self._keys.get(keys)
        if layout_id is None:
            layout_id = self._keys[keys] = self._layout(keys_layout(keys))
        return layout_id

    def columns_layout(
        self, engine: CachedEngine, columns: tuple[Column, ...], t_s: float
    ) -> int | None:
        """The id of the layout for an engine's list of counters. None if it is new and the target
        has stored too many."""
        if engine.columns is not columns:
            names = columns_layout(columns)
            is_new = names not in self._names and self._find("layouts", "names", names) is None
            if is_new and not engine.texts.take(t_s, len(names)):
                return None
            engine.columns_layout, engine.columns = self._layout(names), columns
        return engine.columns_layout

    def _id(self, table: str, column: str, value: str | bytes) -> int:
        """The id of the row that has `value` in a unique column. The row is inserted if it does not
        exist."""
        row_id = self._find(table, column, value)
        if row_id is not None:
            return row_id
        inserted = self._connection.execute(f"INSERT INTO {table} ({column}) VALUES (?)", (value,))
        return inserted.lastrowid or 0

    def _find(self, table: str, column: str, value: str | bytes) -> int | None:
        row = self._connection.execute(
            f"SELECT id FROM {table} WHERE {column} = ?", (value,)
        ).fetchone()
        return None if row is None else int(row[0])

    def _count(self, table: str, owner_id: int) -> int:
        (rows,) = self._connection.execute(
            f"SELECT count(*) FROM {table} WHERE id BETWEEN ? AND ?",
            rows_of(owner_id),
        ).fetchone()
        return int(rows)
