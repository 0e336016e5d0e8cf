"""Targets, engines and layouts by what names them, for one connection that writes. I/O edge."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from kneewatch.agent.store.known import KnownEngine, load_engine
from kneewatch.agent.store.packing import EngineName
from kneewatch.agent.store.rows import columns_layout, keys_layout, rows_of
from kneewatch.agent.store.schema import SEQUENCE_MASK
from kneewatch.collector.history import Column

NAMES_KNOWN = 256
"""More layouts are looked up in the file again: where labels carry ids they have no end."""


@dataclass(slots=True)
class KnownTarget:
    """A target: its open scrapes, and its engines of this session."""

    id: int
    rows: int
    engines: dict[EngineName, KnownEngine] = field(
        default_factory=dict["EngineName", "KnownEngine"]
    )


class Ledger:
    """Targets, engines, layouts and the sequence of one connection."""

    def __init__(self, connection: sqlite3.Connection, session: set[int]) -> None:
        """`session` are the engines that this session has written; `fresh`, those of the present
        transaction, join them once it is committed."""
        self._connection = connection
        self.session, self.fresh = session, set[int]()
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

    def committed(self) -> None:
        """What was written is there to stay."""
        self.session |= self.fresh
        self.fresh.clear()

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
    ) -> KnownEngine:
        """An engine, made where there is none."""
        known = target.engines.get(name)
        if known is None:
            known = load_engine(self._connection, target.id, name, t_s)
            known.session = known.id in self.session
            target.engines[name] = known
        if known.labels is not labels and known.labels != labels:
            self._connection.execute(
                "UPDATE engines SET labels = ? WHERE id = ?",
                (orjson.dumps(dict(labels)).decode(), known.id),
            )
        known.labels = labels
        return known

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
