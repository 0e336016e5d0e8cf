"""Maintenance of the store between batches: flushes chunks, downsamples, deletes old data, and
evaluates recommendations. I/O edge."""

from __future__ import annotations

import math
import sqlite3
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import orjson

from kneewatch.agent.store.chunks import (
    DamagedError,
    SignalChunk,
    bytes_reader,
    concat_scrapes,
    downsample_scrapes,
    pack_scrapes,
    pack_signals,
    unpack_scrapes,
)
from kneewatch.agent.store.database import (
    COUNTERS,
    SCRAPES,
    SEQUENCE_BITS,
    SIGNALS,
    find_file_damage,
    rows_of,
)
from kneewatch.agent.store.engine_cache import EngineCache
from kneewatch.agent.store.ingest import BATCH_BYTES, CycleWriter, flush_engine, flush_target
from kneewatch.agent.store.outcomes import Evaluation
from kneewatch.agent.store.records import Retention, Scrapes
from kneewatch.agent.store.stored_series import ChunkRow, insert_chunk, log_damage
from kneewatch.diagnose.change import BRIDGED_S, UNWATCHED
from kneewatch.rules.rule import DAY_S

COARSE_S = 60.0
Fold = Callable[[Sequence[float]], float]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def fold_of(key: str) -> Fold:
    """The function that downsamples a minute of a signal to one value: the maximum for maxima and
    upper quantiles, the minimum for minima, else the mean."""
    if any(part in key for part in ("_max", "_p95", "_p99")) or key == "cascade_stage":
        return max
    return min if key.endswith("_min") else mean


def downsample(
    connection: sqlite3.Connection, kind: int, owner_id: int, chunks: Sequence[ChunkRow]
) -> None:
    """Replace chunks of signals or scrapes of one owner by a single chunk with one value per
    minute."""
    marks = ", ".join("?" * len(chunks))
    ids = [chunk.id for chunk in chunks]
    bodies = connection.execute(
        f"SELECT id, body FROM chunks WHERE id IN ({marks}) ORDER BY first_seq", ids
    ).fetchall()
    merged = _signals(bodies) if kind == SIGNALS else _scrapes(bodies)
    if merged is not None:
        sequence = chunks[0].first_seq, chunks[-1].last_seq
        insert_chunk(connection, (kind, owner_id, COARSE_S), sequence, *merged)
    connection.execute(f"DELETE FROM chunks WHERE id IN ({marks})", ids)


def _signals(bodies: Sequence[tuple[int, bytes]]) -> tuple[Sequence[float], bytes] | None:
    chunks: list[SignalChunk] = []
    times: array[float] = array("d")
    keys: dict[str, None] = {}
    for row, body in bodies:
        try:
            chunk = SignalChunk(bytes_reader(body))
            times.extend(chunk.times())
        except DamagedError as error:
            log_damage("chunk", row, error)
            continue
        chunks.append(chunk)
        keys.update(dict.fromkeys(chunk.keys))
    if not times:
        return None
    parts = list(minutes(times))
    kept: list[float] = [times[part.stop - 1] for part in parts]
    # One column at a time: all of them decoded would take tens of megabytes.
    return kept, pack_signals(kept, {key: _folded(chunks, key, parts) for key in keys})


def _folded(chunks: Sequence[SignalChunk], key: str, parts: Sequence[slice]) -> array[float]:
    fold, column = fold_of(key), array("d")
    for chunk in chunks:
        try:
            column.extend(chunk.column(key))
        except DamagedError as error:
            log_damage("column", key, error)
            column.extend([math.nan] * chunk.rows)
    folded = array("d")
    for part in parts:
        values = [value for value in column[part] if value == value]
        folded.append(fold(values) if values else math.nan)
    return folded


def _scrapes(bodies: Sequence[tuple[int, bytes]]) -> tuple[Sequence[float], bytes] | None:
    parts: list[Scrapes] = []
    for row, body in bodies:
        try:
            parts.append(unpack_scrapes(bytes_reader(body)))
        except DamagedError as error:
            log_damage("scrapes", row, error)
    kept = downsample_scrapes(concat_scrapes(parts), step_s=COARSE_S)
    return (kept.times, pack_scrapes(kept)) if kept.times else None


def minutes(times: Sequence[float]) -> Iterator[slice]:
    """Yields a slice for each run of scrapes in the same minute."""
    first = 0
    for at in range(1, len(times) + 1):
        if at == len(times) or times[at] // COARSE_S != times[first] // COARSE_S:
            yield slice(first, at)
            first = at


# --- Maintenance between batches: chunk flush, downsampling, deletion, evaluation. I/O edge -------


DOWNSAMPLED_CHUNKS = 6
DELETED_AT_LEAST, DELETED_SHARE = 16, 100
"""Number of chunks to delete at once when the store is too large: the first value, plus the number
of all chunks divided by the second."""

LAYOUTS_MAX = 200
CHUNKS_BEFORE = "kind = ? AND owner_id = ? AND max_s < ?"
ROW_BYTES = 60
"""What a row takes beside its content."""

OWN_ROWS = f"id BETWEEN owner << {SEQUENCE_BITS} AND ((owner + 1) << {SEQUENCE_BITS}) - 1"
ENGINE_BYTES = "".join(
    f" + (SELECT ifnull(sum(length({what}) + {ROW_BYTES}), 0) FROM {table} WHERE {which})"
    for what, table, which in (
        ("body", "chunks", f"owner_id = owner AND kind IN ({SIGNALS}, {COUNTERS})"),
        ("body", "open_signals", OWN_ROWS),
        ("body", "open_counters", OWN_ROWS),
        ("body", "documents", OWN_ROWS),
        ("labels", "configs", OWN_ROWS),
        ("document", "recommendations", "engine_id = owner"),
    )
)
TARGET_BYTES = f"""
WITH by_engine (target_id, bytes) AS (
  SELECT target_id, 0 {ENGINE_BYTES} FROM (SELECT target_id, id AS owner FROM engines)
)
SELECT owner, (SELECT ifnull(sum(bytes), 0) FROM by_engine WHERE target_id = owner)
  + (SELECT ifnull(sum(length(body)), 0) FROM chunks WHERE owner_id = owner AND kind = {SCRAPES}),
  EXISTS (SELECT 1 FROM open_scrapes WHERE {OWN_ROWS})
FROM (SELECT id AS owner FROM targets)
"""
"""The bytes of each target, and whether it is still scraped."""

OLDEST_CHUNKS = """
WITH chosen (id) AS (SELECT value FROM json_each(?1)),
  owners (id) AS (SELECT engines.id FROM engines JOIN chosen ON target_id = chosen.id),
  own (max_s) AS (SELECT max_s FROM chunks
    WHERE owner_id IN (SELECT id FROM chosen) AND kind = ?2
      OR owner_id IN (SELECT id FROM owners) AND kind != ?2)
SELECT max_s FROM own ORDER BY max_s LIMIT (SELECT ?3 + count(*) / ?4 FROM own)
"""


def downsample_due(connection: sqlite3.Connection, *, before_s: float) -> bool:
    """Downsample chunks that end before `before_s`, of one owner (an engine or a target). Returns
    whether any chunk was downsampled.

    An owner is skipped while it has fewer than DOWNSAMPLED_CHUNKS such chunks, because small
    downsampled chunks waste space. It is no longer skipped once one of them ended more than a day
    before `before_s`.
    """
    row = connection.execute(
        "SELECT kind, owner_id FROM chunks WHERE kind IN (?, ?) AND step_s = 0 AND max_s < ?"
        " GROUP BY kind, owner_id HAVING count(*) >= ? OR min(max_s) < ? LIMIT 1",
        (SIGNALS, SCRAPES, before_s, DOWNSAMPLED_CHUNKS, before_s - DAY_S),
    ).fetchone()
    if row is None:
        return False
    kind, owner_id = row
    chunks = connection.execute(
        "SELECT id, step_s, first_seq, last_seq, min_s, max_s FROM chunks"
        " WHERE kind = ? AND owner_id = ? AND step_s = 0 AND max_s < ?"
        " ORDER BY first_seq LIMIT ?",
        (kind, owner_id, before_s, DOWNSAMPLED_CHUNKS),
    ).fetchall()
    downsample(connection, kind, owner_id, [ChunkRow(*chunk) for chunk in chunks])
    return True


def delete_before(
    connection: sqlite3.Connection, *, before_s: float, targets: Sequence[int] | None = None
) -> bool:
    """Delete all data of some targets (None: of all) that ended before a time. Returns whether an
    engine was deleted.

    An engine with open rows stays until its rows are flushed into a chunk.
    """
    execute, deleted = connection.execute, False
    if targets is None:
        targets = [target_id for (target_id,) in execute("SELECT id FROM targets").fetchall()]
    for target_id in targets:
        execute(f"DELETE FROM chunks WHERE {CHUNKS_BEFORE}", (SCRAPES, target_id, before_s))
        engines = execute("SELECT id FROM engines WHERE target_id = ?", (target_id,)).fetchall()
        for (engine_id,) in engines:
            deleted |= _delete_engine_before(connection, engine_id, before_s)
    execute(
        "DELETE FROM targets WHERE id NOT IN (SELECT target_id FROM engines) AND id NOT IN"
        " (SELECT owner_id FROM chunks WHERE kind = ?) AND NOT EXISTS (SELECT 1 FROM open_scrapes"
        " WHERE open_scrapes.id BETWEEN targets.id << ? AND ((targets.id + 1) << ?) - 1)",
        (SCRAPES, SEQUENCE_BITS, SEQUENCE_BITS),
    )
    return deleted


def _delete_engine_before(connection: sqlite3.Connection, engine_id: int, before_s: float) -> bool:
    """Delete what an engine has from before a time, and the engine if nothing is left."""
    execute = connection.execute
    for kind in (SIGNALS, COUNTERS):
        execute(f"DELETE FROM chunks WHERE {CHUNKS_BEFORE}", (kind, engine_id, before_s))
    execute("DELETE FROM intervals WHERE engine_id = ? AND end_s < ?", (engine_id, before_s))
    execute("DELETE FROM recommendations WHERE engine_id = ? AND last_s < ?", (engine_id, before_s))
    _delete_versions(connection, engine_id, before_s)
    gone = execute(
        "DELETE FROM engines WHERE id = ? AND last_s < ? AND NOT EXISTS (SELECT 1 FROM chunks"
        " WHERE kind != ? AND owner_id = engines.id) AND NOT EXISTS (SELECT 1 FROM open_signals"
        " WHERE open_signals.id BETWEEN ? AND ?)",
        (engine_id, before_s, SCRAPES, *rows_of(engine_id)),
    ).rowcount
    if gone:
        for table in ("documents", "intervals", "recommendations", "configs"):
            execute(f"DELETE FROM {table} WHERE engine_id = ?", (engine_id,))
        execute("DELETE FROM open_counters WHERE id BETWEEN ? AND ?", rows_of(engine_id))
    return bool(gone)


def _delete_versions(connection: sqlite3.Connection, engine_id: int, before_s: float) -> None:
    """Delete documents and configurations from before a time. The document and the configuration
    that were valid at that time stay. All documents that are needed to decode a remaining delta
    stay too."""
    execute = connection.execute
    (whole,) = execute(
        "WITH RECURSIVE chain (id, base_id) AS ("
        " SELECT * FROM (SELECT id, base_id FROM documents WHERE engine_id = ? AND t_s < ?"
        " ORDER BY t_s DESC, id DESC LIMIT 1)"
        " UNION SELECT d.id, d.base_id FROM documents d JOIN chain ON d.id = chain.base_id)"
        " SELECT min(id) FROM chain",
        (engine_id, before_s),
    ).fetchone()
    if whole is not None:
        # Later documents are deltas to this one or to a later one.
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
    """Bytes of the store's content, without free pages."""
    pages, free, page_bytes = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * page_bytes)


def delete_oldest(connection: sqlite3.Connection, *, max_bytes: float) -> bool:
    """If the content exceeds `max_bytes`, delete the oldest data of the targets that have more than
    their share, or are not scraped any more. Returns whether data was deleted.

    The share is `max_bytes` divided by the targets that are scraped: what one target writes deletes
    no history of another that has less.
    """
    if used_bytes(connection) <= max_bytes:
        return False
    execute = connection.execute
    sizes = execute(TARGET_BYTES).fetchall()
    scraped = [row for row in sizes if row[2]]
    fair_bytes = min(max_bytes, sum(row[1] for row in scraped)) / max(1, len(scraped))
    targets = [row[0] for row in sizes if not row[2] or row[1] >= fair_bytes]
    chosen = (orjson.dumps(targets).decode(), SCRAPES, DELETED_AT_LEAST, DELETED_SHARE)
    oldest = execute(OLDEST_CHUNKS, chosen).fetchall()
    if len(oldest) < DELETED_AT_LEAST:  # their data is in open rows
        for target_id in targets:
            flush_target(connection, target_id)
            for (engine_id,) in execute("SELECT id FROM engines WHERE target_id = ?", (target_id,)):
                flush_engine(connection, engine_id)
        oldest = execute(OLDEST_CHUNKS, chosen).fetchall()
    if not oldest:
        return False
    # The cut is a moment later, so that the last of these chunks is deleted too.
    (last_s,) = oldest[-1]
    delete_before(connection, before_s=last_s + 1e-3, targets=targets)
    drop_layouts(connection, most=0)
    return True


def drop_layouts(connection: sqlite3.Connection, *, most: int = LAYOUTS_MAX) -> bool:
    """If there are more than `most` layouts, delete those that no open row uses. Returns whether
    the limit was exceeded."""
    (layouts,) = connection.execute("SELECT count(*) FROM layouts").fetchone()
    if layouts <= most:
        return False
    connection.execute(
        "DELETE FROM layouts WHERE id NOT IN (SELECT layout_id FROM open_signals)"
        " AND id NOT IN (SELECT layout_id FROM open_counters)"
    )
    return True


# --- The jobs between batches, one small transaction at a time ------------------------------------


ROUND_INTERVAL_S = 60.0
DELETE_INTERVAL_S = 3600.0
FLUSH_IDLE_AFTER_S = 2 * 3600.0
"""Seconds without a scrape after which the open rows of an engine or target are flushed."""

FREE_RATIO = 0.1
"""Maximum share of free pages in the file. New rows use free pages again."""

VACUUM_PAGES = 500
WAL_MAX_BYTES, BATCHES_BYTES = 32 * 1024 * 1024, 2 * BATCH_BYTES
"""The parts of the limit on the files' size that are for the write-ahead log, and for what is
written before data is deleted; together at most half of the limit."""

JUMP_S = 30 * DAY_S


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """A write transaction: committed at the end, rolled back if an exception is raised."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class Maintenance:
    """Runs maintenance jobs. Each step runs one small job, so that cycles do not wait long."""

    def __init__(
        self,
        retention: Retention,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retention, self._clock, self._monotonic = retention, clock, monotonic
        side_bytes = min(WAL_MAX_BYTES + BATCHES_BYTES, retention.max_bytes // 2)
        self._max_bytes = retention.max_bytes - side_bytes
        self.wal_max_bytes = max(side_bytes - BATCHES_BYTES, side_bytes // 2)
        """Size of the WAL at which writing stops. It is written over once no reader needs it: a
        reader that keeps its snapshot would let it grow without limit."""
        self._full_until_s = -math.inf
        self._evaluation = Evaluation()
        self._since_s = monotonic()
        self._round_s = self._deleted_s = -math.inf
        self._checked_s = clock()
        self._jobs: list[Callable[[sqlite3.Connection, EngineCache], bool]] = []

    def check_soon(self) -> None:
        """Check the file for damage in the next round. Thread-safe."""
        self._checked_s = -math.inf

    def step(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        """Run the next job that is due. Returns whether a job was due."""
        for due, flush in ((cache.due_engines, flush_engine), (cache.due_targets, flush_target)):
            if due:
                row_id, full = due.popitem()
                with transaction(connection):
                    flush(connection, row_id)
                full.rows = 0
                return True
        if used_bytes(connection) > self._max_bytes and self._limit_size(connection, cache):
            return True
        return self._round(connection, cache)

    def _round(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        now_s = self._clock()
        if not self._jobs:
            if 0 <= now_s - self._round_s < ROUND_INTERVAL_S:
                return False
            self._round_s = now_s
            self._jobs = [
                self._vacuum,
                self._downsample,
                self._evaluate,
                self._close,
            ]
            if not 0 <= now_s - self._deleted_s < DELETE_INTERVAL_S:
                self._deleted_s = now_s
                self._jobs += [self._delete_expired, self._flush_idle]
            if not 0 <= now_s - self._checked_s < DAY_S:
                self._checked_s = now_s
                self._jobs.append(self._check)
        job = self._jobs.pop()
        if job(connection, cache):
            self._jobs.append(job)
        return True

    def _newest_s(self, connection: sqlite3.Connection) -> float:
        """The present time, or the time of the newest scrape if that is earlier. Scrapes after a
        gap of `JUMP_S` count after a day of them. Otherwise a clock that was set ahead would delete
        data."""
        newest = "SELECT max(max_s) FROM chunks WHERE max_s < ?"
        (newest_s,) = connection.execute(newest, (math.inf,)).fetchone()
        (before_s,) = connection.execute(newest, ((newest_s or 0.0) - DAY_S,)).fetchone()
        if before_s is not None and newest_s - before_s > JUMP_S:
            newest_s = before_s
        return min(self._clock(), math.inf if newest_s is None else newest_s)

    def _close(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        """Close the intervals of engines that are no longer scraped, and drop these engines from
        the cache."""
        now_s = self._monotonic()
        writer = CycleWriter(connection, cache, self._monotonic)
        gone = [
            (target, name, engine)
            for target in cache.targets.values()
            for name, engine in target.engines.items()
            if engine.session and now_s - engine.seen_s > BRIDGED_S
        ]
        with transaction(connection):
            for _, _, engine in gone:
                writer.close(engine)
            if now_s - self._since_s > BRIDGED_S:
                self._close_unseen(connection, cache.session)
        for target, name, engine in gone:
            del target.engines[name]
            cache.session.discard(engine.id)
        cache.drop_empty()
        return False

    def _close_unseen(self, connection: sqlite3.Connection, session: set[int]) -> None:
        opened = connection.execute(
            "SELECT DISTINCT engine_id, engines.last_s FROM intervals"
            " JOIN engines ON engines.id = engine_id WHERE end_s IS NULL"
        ).fetchall()
        for engine_id, last_s in opened:
            if engine_id not in session:
                connection.execute(
                    "UPDATE intervals SET end_s = max(start_s, coalesce(last_s, ?)),"
                    " last_s = coalesce(last_s, ?), ended = ?"
                    " WHERE engine_id = ? AND end_s IS NULL",
                    (last_s, last_s, UNWATCHED, engine_id),
                )
                connection.execute(
                    "UPDATE recommendations SET last_s = ? WHERE engine_id = ? AND last_s IS NULL",
                    (last_s, engine_id),
                )

    def _flush_idle(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        """Flush the open rows of engines and targets that are no longer scraped."""
        before_s = self._clock() - FLUSH_IDLE_AFTER_S
        for table, owners, flush in (
            ("open_signals", "engines", partial(flush_engine, over=True)),
            ("open_scrapes", "targets", flush_target),
        ):
            for (owner_id,) in connection.execute(f"SELECT id FROM {owners}").fetchall():
                newest = connection.execute(
                    f"SELECT t_s FROM {table} WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1",
                    rows_of(owner_id),
                ).fetchone()
                if newest is not None and newest[0] < before_s:
                    with transaction(connection):
                        flush(connection, owner_id)
        return False

    def _evaluate(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        with transaction(connection):
            self._evaluation.run(connection, self._clock())
        return False

    def _downsample(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        before_s = self._newest_s(connection) - self._retention.keep_s
        with transaction(connection):
            return downsample_due(connection, before_s=before_s)

    def _delete_expired(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        before_s = self._newest_s(connection) - self._retention.keep_coarse_s
        with transaction(connection):
            deleted = delete_before(connection, before_s=before_s) | drop_layouts(connection)
        if deleted:
            cache.reload()
        return False

    def _limit_size(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        now_s = self._monotonic()
        if now_s < self._full_until_s:
            return False
        with transaction(connection):
            deleted = delete_oldest(connection, max_bytes=self._max_bytes)
        cache.reload()
        if not deleted:
            self._full_until_s = now_s + ROUND_INTERVAL_S
        return deleted

    def _check(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        """Check the whole file for damage, including pages that no query has read."""
        damage = find_file_damage(connection)
        if damage:
            raise DamagedError(damage)
        return False

    def _vacuum(self, connection: sqlite3.Connection, cache: EngineCache) -> bool:
        """Return free pages to the file system, a few hundred per call."""
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        if free <= FREE_RATIO * pages + VACUUM_PAGES:
            return False
        connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        return True
