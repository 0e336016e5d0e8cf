"""What was learned about each engine, one row per engine, in the store. I/O edge."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from kneewatch.agent.store.database import connect
from kneewatch.agent.store.downsampling_and_retention import transaction
from kneewatch.collector.names.vllm_metrics import EngineKey

KEPT_S = 30 * 86_400.0
"""Engines that were last seen more than this many seconds ago are forgotten."""


def read_learned(file: Path) -> dict[tuple[str, EngineKey], bytes]:
    """The stored states by target and engine.

    Raises:
        sqlite3.Error, StoreError, OSError: the file cannot be read.
    """
    with closing(connect(file)) as connection:
        rows = connection.execute("SELECT target, model, engine, replica, body FROM learned")
        return {(target, EngineKey(*key)): body for target, *key, body in rows}


def write_learned(file: Path, states: Mapping[tuple[str, EngineKey], tuple[float, bytes]]) -> None:
    """Store states with the times that they belong to.

    Raises:
        sqlite3.Error, StoreError, OSError: the file cannot be written.
    """
    rows = [
        (target, key.model, key.engine, key.replica, t_s, body)
        for (target, key), (t_s, body) in states.items()
    ]
    with closing(connect(file)) as connection, transaction(connection):
        connection.executemany("INSERT OR REPLACE INTO learned VALUES (?, ?, ?, ?, ?, ?)", rows)
        connection.execute("DELETE FROM learned WHERE t_s < ?", (max(r[4] for r in rows) - KEPT_S,))
