"""What is old is thinned, then deleted, inside the transaction of whoever calls. I/O edge."""

from __future__ import annotations

import sqlite3

from kneewatch.agent.store.coarsening import coarsen
from kneewatch.agent.store.history import ChunkRow
from kneewatch.agent.store.model import DAY_S
from kneewatch.agent.store.rows import rows_of
from kneewatch.agent.store.schema import SCRAPES, SEQUENCE_BITS, SIGNALS

COARSENED_AT_ONCE = 6
DELETED_AT_LEAST, DELETED_SHARE = 16, 100
"""The oldest chunks that go at once, for a store that is too large: some, and a hundredth."""

LAYOUTS_MAX = 200


def thin(connection: sqlite3.Connection, *, before_s: float) -> bool:
    """Make one coarse chunk of an owner's chunks from before a time; whether there was one to
    make. Owners wait until a few chunks are due, for a small coarse chunk wastes space."""
    row = connection.execute(
        "SELECT kind, owner_id FROM chunks WHERE kind IN (?, ?) AND step_s = 0 AND max_s < ?"
        " GROUP BY kind, owner_id HAVING count(*) >= ? OR min(max_s) < ? LIMIT 1",
        (SIGNALS, SCRAPES, before_s, COARSENED_AT_ONCE, before_s - DAY_S),
    ).fetchone()
    if row is None:
        return False
    kind, owner_id = row
    chunks = connection.execute(
        "SELECT id, step_s, first_seq, last_seq, min_s, max_s FROM chunks"
        " WHERE kind = ? AND owner_id = ? AND step_s = 0 AND max_s < ?"
        " ORDER BY first_seq LIMIT ?",
        (kind, owner_id, before_s, COARSENED_AT_ONCE),
    ).fetchall()
    coarsen(connection, kind, owner_id, [ChunkRow(*chunk) for chunk in chunks])
    return True


def forget(connection: sqlite3.Connection, *, before_s: float) -> bool:
    """Delete what ended before a time; whether an engine went with it. Open rows are sealed
    first."""
    execute = connection.execute
    execute("DELETE FROM chunks WHERE max_s < ?", (before_s,))
    execute("DELETE FROM intervals WHERE end_s < ?", (before_s,))
    execute("DELETE FROM recommendations WHERE last_s < ?", (before_s,))
    for (engine_id,) in execute("SELECT id FROM engines").fetchall():
        _forget_versions(connection, engine_id, before_s)
    gone = execute(
        "SELECT id FROM engines WHERE last_s < ? AND NOT EXISTS (SELECT 1 FROM chunks"
        " WHERE kind != ? AND owner_id = engines.id) AND NOT EXISTS (SELECT 1 FROM open_signals"
        " WHERE open_signals.id BETWEEN engines.id << ? AND ((engines.id + 1) << ?) - 1)",
        (before_s, SCRAPES, SEQUENCE_BITS, SEQUENCE_BITS),
    ).fetchall()
    for (engine_id,) in gone:
        for table in ("documents", "intervals", "recommendations", "configs"):
            execute(f"DELETE FROM {table} WHERE engine_id = ?", (engine_id,))
        execute("DELETE FROM open_counters WHERE id BETWEEN ? AND ?", rows_of(engine_id))
        execute("DELETE FROM engines WHERE id = ?", (engine_id,))
    execute(
        "DELETE FROM targets WHERE id NOT IN (SELECT target_id FROM engines) AND id NOT IN"
        " (SELECT owner_id FROM chunks WHERE kind = ?) AND NOT EXISTS (SELECT 1 FROM open_scrapes"
        " WHERE open_scrapes.id BETWEEN targets.id << ? AND ((targets.id + 1) << ?) - 1)",
        (SCRAPES, SEQUENCE_BITS, SEQUENCE_BITS),
    )
    return bool(gone)


def _forget_versions(connection: sqlite3.Connection, engine_id: int, before_s: float) -> None:
    """Documents and configurations from before a time, but for those still in force then, and
    what a document is told against."""
    execute = connection.execute
    (whole,) = execute(
        "WITH RECURSIVE told (id, base_id) AS ("
        " SELECT * FROM (SELECT id, base_id FROM documents WHERE engine_id = ? AND t_s < ?"
        " ORDER BY t_s DESC, id DESC LIMIT 1)"
        " UNION SELECT d.id, d.base_id FROM documents d JOIN told ON d.id = told.base_id)"
        " SELECT min(id) FROM told",
        (engine_id, before_s),
    ).fetchone()
    if whole is not None:
        # Later documents are told against this one or a later one.
        execute(
            "DELETE FROM documents WHERE engine_id = ? AND t_s < ? AND id < ?",
            (engine_id, before_s, whole),
        )
    execute(
        "DELETE FROM configs WHERE engine_id = ? AND t_s < ? AND id <"
        " (SELECT max(id) FROM configs WHERE engine_id = ? AND t_s < ?)",
        (engine_id, before_s, engine_id, before_s),
    )


def used_bytes(connection: sqlite3.Connection) -> int:
    """What the store's content takes, without pages that are free."""
    pages, free, page_bytes = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * page_bytes)


def shrink(connection: sqlite3.Connection, *, max_bytes: float) -> bool:
    """Delete the oldest of everything where the content takes more; whether that deleted any."""
    if used_bytes(connection) <= max_bytes:
        return False
    oldest = connection.execute(
        "SELECT max_s FROM chunks ORDER BY max_s LIMIT (SELECT ? + count(*) / ? FROM chunks)",
        (DELETED_AT_LEAST, DELETED_SHARE),
    ).fetchall()
    if not oldest:
        return False
    # The last of them goes too: a moment later is the first that stays.
    (last_s,) = oldest[-1]
    forget(connection, before_s=last_s + 1e-3)
    return True


def drop_layouts(connection: sqlite3.Connection) -> bool:
    """Delete layouts that no open row has, where there are many; whether any was deleted."""
    (layouts,) = connection.execute("SELECT count(*) FROM layouts").fetchone()
    if layouts <= LAYOUTS_MAX:
        return False
    connection.execute(
        "DELETE FROM layouts WHERE id NOT IN (SELECT layout_id FROM open_signals)"
        " AND id NOT IN (SELECT layout_id FROM open_counters)"
    )
    return True
