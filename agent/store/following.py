"""Configurations as they change, recommendations as they are told and followed. I/O edge."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

import orjson

from kneewatch.agent.store.fates import APPLIED, EVIDENT, LAPSED_S, OPEN, Change
from kneewatch.agent.store.known import KnownEngine, ToldRow
from kneewatch.agent.store.packing import PackedEngine, PackedRecommendation
from kneewatch.diagnose.recommend.shown import shown

REWRITTEN_S = 60.0
"""A recommendation's numbers follow the load: they are not written more often than this."""

START_TIME_NEAR_S = 1.0
FIRST_SEEN = ""
NEW_START = "the process has a new start time"


class Following:
    """Writes configurations and recommendations."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def take(self, known: KnownEngine, row: int, engine: PackedEngine) -> None:
        """What changes with a scrape."""
        if engine.columns:
            self._config(known, row, engine)
        self.told(known, engine.recommendations, engine.t_s)

    def told(self, known: KnownEngine, made: tuple[PackedRecommendation, ...], t_s: float) -> None:
        """These recommendations are told now, and no others."""
        if known.recommendations is made and not (known.told and not made):
            return
        known.recommendations = made
        names = {one.name for one in made}
        for name in [name for name in known.told if name not in names]:
            self._execute(
                "UPDATE recommendations SET last_s = ? WHERE id = ?",
                (known.last_s, known.told.pop(name).id),
            )
        for one in made:
            row = known.told.get(one.name)
            if row is None:
                known.told[one.name] = self._begin(known, one, t_s)
            elif row.document != one.document and abs(t_s - row.written_s) >= REWRITTEN_S:
                self._rewrite(row.id, one)
                row.document, row.written_s = one.document, t_s

    def _begin(self, known: KnownEngine, one: PackedRecommendation, t_s: float) -> ToldRow:
        before = self._execute(
            "SELECT id FROM recommendations WHERE engine_id = ? AND name = ? AND fate = ?"
            " AND last_s > ? ORDER BY id DESC LIMIT 1",
            (known.id, one.name, OPEN, t_s - LAPSED_S),
        ).fetchone()
        if before is not None:
            self._rewrite(before[0], one)
            return ToldRow(before[0], one.document, t_s)
        made = self._execute(
            "INSERT INTO recommendations (engine_id, name, document, first_s) VALUES (?, ?, ?, ?)",
            (known.id, one.name, one.document, t_s),
        )
        return ToldRow(made.lastrowid or 0, one.document, t_s)

    def _rewrite(self, row: int, one: PackedRecommendation) -> None:
        self._execute(
            "UPDATE recommendations SET document = ?, last_s = NULL WHERE id = ?",
            (one.document, row),
        )

    def _config(self, known: KnownEngine, row: int, engine: PackedEngine) -> None:
        config, started_s = engine.config, engine.started_s
        first = known.config is None
        how = FIRST_SEEN if engine.restart is None else engine.restart.how
        if not known.page and not how and _another_start(known.started_s, started_s):
            # It happened while nobody looked.
            how = NEW_START
        known.page = True
        same = config is known.config or not config or config == known.config
        if known.config is not None and same and not how:
            known.config = config or known.config
            return
        self._execute(
            "INSERT OR REPLACE INTO configs (id, engine_id, t_s, labels, started_s, restart)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (row, known.id, engine.t_s, _json(config), started_s, how),
        )
        if not first:
            self._followed(known.id, engine.t_s, known.config or {}, config)
        known.config, known.started_s = config, started_s

    def _followed(
        self, engine_id: int, t_s: float, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None:
        """Mark what the new configuration follows, and what only its load can tell."""
        rows = self._execute(
            "SELECT id, document, fate FROM recommendations WHERE engine_id = ?"
            " AND (fate = ? AND coalesce(last_s, ?) > ? OR fate = ?)",
            (engine_id, OPEN, t_s, t_s - LAPSED_S, APPLIED),
        ).fetchall()
        for row, document, fate in rows:
            changes = orjson.loads(document)["changes"]
            seen = [change for change in changes if _shown(change, after) is not None]
            if not all(_shown(change, after) for change in seen):
                if fate == APPLIED:
                    self._taken_back(row)
            elif fate == APPLIED:
                continue
            elif not all(_shown(change, before) for change in seen):
                self._execute(
                    "UPDATE recommendations SET fate = ?, applied_s = ?, watched_s = ?"
                    " WHERE id = ?",
                    (APPLIED, t_s, t_s, row),
                )
            elif not seen and any(change["flag"] in EVIDENT for change in changes):
                self._execute("UPDATE recommendations SET watched_s = ? WHERE id = ?", (t_s, row))

    def _taken_back(self, row: int) -> None:
        self._execute(
            "UPDATE recommendations SET fate = ?, applied_s = NULL, watched_s = NULL WHERE id = ?",
            (OPEN, row),
        )


def _shown(change: Change, config: Mapping[str, str]) -> bool | None:
    return shown(change["flag"], change["to"], config)


def _another_start(before_s: float | None, now_s: float | None) -> bool:
    if before_s is None or now_s is None:
        return False
    return abs(now_s - before_s) > START_TIME_NEAR_S


def _json(labels: Mapping[str, str]) -> str:
    return orjson.dumps(dict(labels)).decode()
