"""The writer's connection: batches, upkeep, and a new start after trouble. I/O edge."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kneewatch.agent.store.database import connect, identity, is_damage, is_ours, move_aside
from kneewatch.agent.store.ledger import Ledger
from kneewatch.agent.store.packing import EngineName, PackedCycle
from kneewatch.agent.store.upkeep import Upkeep, transaction
from kneewatch.agent.store.writing import Writing

ASIDE_EVERY_S = 600.0
"""A disk that damages every new file is not filled with them."""

OLDEST_EVERY_S = 30.0


class Disk:
    """Writes to the file at a path, whichever it is by now. Used by one thread."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        upkeep: Upkeep,
        monotonic: Callable[[], float],
    ) -> None:
        self._path, self._upkeep, self._monotonic = path, upkeep, monotonic
        self._session: set[int] = set()
        self._aside_s = float("-inf")
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self.files = 0
        """How many files have been begun or found at the path."""
        self.oldest_s: float | None = None
        self._oldest_looked_s = float("-inf")
        self._take(connection)

    def write(self, cycles: Sequence[PackedCycle]) -> set[EngineName]:
        """Write cycles, all or none. Gives the engines for which there was no room.

        Raises:
            sqlite3.Error, OSError: the disk does not take them; they can be tried again.
        """
        connection = self._current()
        with transaction(connection):
            for cycle in cycles:
                self._writing.cycle(cycle)
        self._ledger.committed()
        self._look_for_oldest(connection)
        refused, self._ledger.refused = self._ledger.refused, set()
        return refused

    def tidy(self) -> bool:
        """Do one thing of the upkeep; whether there was anything to do.

        Raises:
            sqlite3.Error, OSError: the disk does not allow it.
        """
        return self._upkeep.step(self._current(), self._ledger)

    def recover(self, error: Exception) -> None:
        """Forget the connection after an error: the next use opens the file again. A damaged file
        is moved aside.

        Raises:
            OSError: it cannot be moved.
        """
        self.close()
        now_s = time.monotonic()
        if is_damage(error) and now_s - self._aside_s > ASIDE_EVERY_S and is_ours(self._path):
            self._aside_s = now_s
            move_aside(self._path, str(error))

    def close(self) -> None:
        """Close the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _current(self) -> sqlite3.Connection:
        if self._connection is not None and identity(self._path) != self._file:
            # Somebody moved or removed the file: what is written to it now, nobody would find.
            self.close()
        return self._connection or self._take(connect(self._path))

    def _take(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        file = identity(self._path)
        if self.files == 0 or file != self._file:
            self._file = file
            self._session.clear()
            self.files += 1
        self._connection = connection
        self._ledger = Ledger(connection, self._session)
        self._writing = Writing(connection, self._ledger, self._monotonic)
        return connection

    def _look_for_oldest(self, connection: sqlite3.Connection) -> None:
        if time.monotonic() - self._oldest_looked_s < OLDEST_EVERY_S:
            return
        self._oldest_looked_s = time.monotonic()
        row = connection.execute("SELECT min_s FROM chunks ORDER BY max_s LIMIT 1").fetchone()
        if row is None:
            row = connection.execute("SELECT min(t_s) FROM open_scrapes").fetchone()
        self.oldest_s = row[0]
