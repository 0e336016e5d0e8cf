"""What the store takes of disk, on servers under load made from recorded pages.

`python -m tests.agent.store.week` writes a whole week, and prints the CPU time.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from kneewatch.agent.store.database import open_checked
from kneewatch.agent.store.downsampling_and_retention import Maintenance
from kneewatch.agent.store.encoding import Packer
from kneewatch.agent.store.ingest import FLUSH_ROWS
from kneewatch.agent.store.records import Retention
from kneewatch.agent.store.writer import StoreFile
from tests.agent.store.factories import START_S, STEP_S
from tests.agent.store.load import FLEET, Server

A_WEEK = 8 * 7 * 24 * 3600 / STEP_S
BUDGET_BYTES = 400e6 / A_WEEK
IN_TROUBLE = 1.25
"""An engine that is in trouble all week says something else at nearly every scrape."""

CHUNKS = 2
NOON_S = START_S - START_S % 86400 + 43200


@pytest.mark.parametrize(
    ("kind", "share"),
    [(0, 1.0), (5, IN_TROUBLE), (6, IN_TROUBLE)],
    ids=["healthy", "kv pressure", "two causes"],
)
def test_an_engine_stays_within_its_share_of_a_week(
    kind: int, share: float, tmp_path: Path
) -> None:
    server, packer = Server("a", FLEET[kind], seed=3, start_s=NOON_S), Packer()
    now_s, path = NOON_S, tmp_path / "store.db"
    upkeep = Maintenance(Retention(), clock=lambda: now_s)
    disk = StoreFile(path, open_checked(path), upkeep, time.monotonic)
    scrapes = CHUNKS * FLUSH_ROWS
    for at in range(scrapes):
        now_s = NOON_S + STEP_S * at
        cycle = server.cycle(now_s)
        disk.write([packer.pack(cycle)], {})
        while disk.maintain():
            pass
    disk.close()
    with closing(sqlite3.connect(path)) as connection:
        (chunks,) = connection.execute("SELECT sum(length(body)) FROM chunks").fetchone()
        (said,) = connection.execute("SELECT sum(length(body)) FROM documents").fetchone()
        (rows,) = connection.execute("SELECT count(*) FROM intervals").fetchone()
    taken_bytes = (chunks + said + 100 * rows) / scrapes
    # 0.95 since each figure of a sentence of advice is a key as well; 0.92 before.
    assert taken_bytes < 0.95 * share * BUDGET_BYTES, "the rest is left for what lies open"
