"""A week of eight engines at 5 s in a store, in minutes: a made-up day, then its days repeated.

    python -m tests.full_weeks FILE [--servers 8] [--days 7] [--judged 15]

The day is judged and stored by the real program (tests/weeks.py); what the store then holds is
repeated with its times moved. Each repetition's counters begin anew, as after a restart.
"""

from __future__ import annotations

import argparse
import sqlite3
import time
from pathlib import Path

from kneewatch.agent.store.chunks import (
    ChunkBody,
    bytes_reader,
    pack_body,
    pack_times,
    unpack_times,
)
from kneewatch.agent.store.database import SEQUENCE_BITS, connect
from kneewatch.agent.store.ingest import flush_engine, flush_target
from tests.weeks import (
    CHAT,
    DAY_S,
    DRAFTING,
    SHARED,
    START_S,
    TIGHT,
    Planted,
    Server,
    Week,
    at,
    cascade,
)

KINDS = ((CHAT, "chat"), (TIGHT, "tight"), (CHAT, "chat"), (SHARED, "shared"), (CHAT, "chat"),
         (DRAFTING, "draft"), (CHAT, "chat"), (CHAT, "chat"))  # fmt: skip
TIERS = ("h100", "h200")


def day(servers: int, *, judged_s: float) -> Week:
    """A day of some servers, with a cascade on every other tight one, a queue on every third."""
    all_servers: list[Server] = []
    for place in range(servers):
        kind, name = KINDS[place % len(KINDS)]
        name = f"{name}-{place}"
        planted: list[Planted] = []
        if kind is TIGHT:
            planted = [cascade(name, at(0, 15.25))]
        elif kind is SHARED:
            planted = [Planted(name, "prefix_reuse_lost", at(0, 11), (("prefix_lost", 720.0),))]
        elif place % 3 == 0:
            planted = [Planted(name, "queue_saturation", at(0, 14), (("c128", 480.0),))]
        labels = {"tier": TIERS[place % 2], "node": f"n{place // 8}"}
        all_servers.append(Server(name, kind, labels, planted, seed=place, judged_s=judged_s))
    return Week(tuple(all_servers), START_S, START_S + DAY_S)


def repeated(path: Path, *, days: int) -> None:
    """Repeat what a store holds of a day, so that it holds so many of them."""
    connection = connect(path)
    try:
        connection.execute("BEGIN IMMEDIATE")
        for (engine,) in connection.execute("SELECT id FROM engines").fetchall():
            flush_engine(connection, engine, over=True)
        for (target,) in connection.execute("SELECT id FROM targets").fetchall():
            flush_target(connection, target)
        (last,) = connection.execute("SELECT max(last_seq) FROM chunks").fetchone()
        chunks = connection.execute(
            "SELECT kind, owner_id, step_s, first_seq, last_seq, min_s, max_s, body FROM chunks"
        ).fetchall()
        for copy in range(1, days):
            _chunks(connection, chunks, moved_s=copy * DAY_S, later=copy * (last + 1))
            _rows(connection, moved_s=copy * DAY_S, later=copy * (last + 1))
        connection.execute("UPDATE engines SET last_s = last_s + ?", ((days - 1) * DAY_S,))
        connection.execute("COMMIT")
    finally:
        connection.close()


def _chunks(
    connection: sqlite3.Connection, chunks: list[tuple[object, ...]], *, moved_s: float, later: int
) -> None:
    for kind, owner, step_s, first, last, min_s, max_s, body in chunks:
        assert isinstance(body, bytes)
        assert isinstance(first, int)
        assert isinstance(last, int)
        assert isinstance(min_s, float)
        assert isinstance(max_s, float)
        connection.execute(
            "INSERT INTO chunks (kind, owner_id, step_s, first_seq, last_seq, min_s, max_s, body)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (kind, owner, step_s, first + later, last + later, min_s + moved_s, max_s + moved_s,
             moved(body, moved_s)),
        )  # fmt: skip


def moved(data: bytes, moved_s: float) -> bytes:
    """A chunk with its times moved: the new times lie behind all else."""
    body = ChunkBody(bytes_reader(data))
    head = len(data) - len(_pieces(data))
    times = [t_s + moved_s for t_s in unpack_times(body.piece(body.directory["times"]))]
    pieces, packed = data[head:], pack_times(times)
    directory = {**body.directory, "times": (len(pieces), len(packed))}
    return pack_body(directory, [pieces, packed])


def _pieces(data: bytes) -> bytes:
    length = int.from_bytes(data[:4], "little")
    return data[4 + length :]


def _rows(connection: sqlite3.Connection, *, moved_s: float, later: int) -> None:
    before_s = START_S + DAY_S
    mask = (1 << SEQUENCE_BITS) - 1
    connection.execute(
        "INSERT INTO documents (id, engine_id, t_s, base_id, body, exact)"
        " SELECT id + ?, engine_id, t_s + ?, base_id + ?, body, exact FROM documents"
        " WHERE t_s < ? AND (id & ?) + ? <= ?",
        (later, moved_s, later, before_s, mask, later, mask),
    )
    connection.execute(
        "INSERT INTO intervals (engine_id, kind, name, severity, start_s, end_s, last_s, ended)"
        " SELECT engine_id, kind, name, severity, start_s + ?, coalesce(end_s, ?) + ?,"
        " coalesce(last_s, ?) + ?, ended FROM intervals WHERE start_s < ?",
        (moved_s, before_s, moved_s, before_s, moved_s, before_s),
    )


def main() -> None:
    """Write a week."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--judged", type=float, default=15.0)
    args = parser.parse_args()
    began_s = time.monotonic()
    written = day(args.servers, judged_s=args.judged).write(args.file, every_s=args.every)
    repeated(args.file, days=args.days)
    print(f"{args.days * written} scrapes in {time.monotonic() - began_s:.0f} s: {args.file}")


if __name__ == "__main__":
    main()
