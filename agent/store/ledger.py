"""Targets, engines and layouts by what names them, for one connection that writes. I/O edge."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import orjson

from kneewatch.agent.store.known import KnownEngine, load_engine
from kneewatch.agent.store.packing import EngineName
from kneewatch.agent.store.rows import columns_layout, keys_layout, rows_of
from kneewatch.agent.store.schema import SEQUENCE_MASK
from kneewatch.collector.history import Column
from kneewatch.diagnose.room import ENGINES_MAX

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


class Ledger:
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
