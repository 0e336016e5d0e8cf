"""Recommendations in the history: which were followed, and what was measured after. I/O edge."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import orjson

from kneewatch.agent.store.encoding import PackedEngine, PackedRecommendation
from kneewatch.agent.store.engine_cache import KnownEngine, ToldRow
from kneewatch.agent.store.history import read_signals
from kneewatch.agent.store.records import Series
from kneewatch.diagnose.recommend.history import config_shows
from kneewatch.diagnose.recommend.outcomes import (
    APPLIED,
    EVIDENT,
    LAPSED,
    LAPSED_S,
    OPEN,
    SETTLED_S,
    SIGNALS,
    Change,
    Means,
    outcome_of,
    signals_show_change,
)

REWRITTEN_S = 60.0
"""A recommendation's numbers follow the load: they are not written more often than this."""

START_TIME_NEAR_S = 1.0
FIRST_SEEN = ""
NEW_START = "the process has a new start time"


class Tracking:
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
    return config_shows(change["flag"], change["to"], config)


def _another_start(before_s: float | None, now_s: float | None) -> bool:
    if before_s is None or now_s is None:
        return False
    return abs(now_s - before_s) > START_TIME_NEAR_S


def _json(labels: Mapping[str, str]) -> str:
    return orjson.dumps(dict(labels)).decode()


# --- Recommendations that may have been followed, held against what was measured since. I/O edge --


MEASURED_S = 600.0
"""So much time under load is measured, before and after."""

LIKE_BEFORE_RATIO = 0.7
"""A load as it was: with less of it anything would look cured."""

STEP_MAX_S = 60.0
LATER = 1.25
"""Each look comes so much later after the restart than the one before: a load that does not come
back is not looked for a hundred times."""


class Evaluation:
    """Judges what was followed. A look reads signals: there are few of them, further and further
    apart."""

    def __init__(self) -> None:
        self._next_s: dict[int, float] = {}

    def look(self, connection: sqlite3.Connection, now_s: float) -> None:
        """Judge what can be judged by now; inside the transaction of whoever calls."""
        rows = connection.execute(
            "SELECT id, engine_id, document, fate, watched_s, last_s FROM recommendations"
            " WHERE watched_s IS NOT NULL"
        ).fetchall()
        self._next_s = {row[0]: self._next_s.get(row[0], -math.inf) for row in rows}
        read = cache(partial(_before_and_after, connection))
        for row, engine_id, document, fate, watched_s, last_s in rows:
            ready_s = watched_s + SETTLED_S + MEASURED_S
            if now_s < max(ready_s, self._next_s[row]):
                continue
            self._next_s[row] = watched_s + LATER * (now_s - watched_s)
            told_s = watched_s if last_s is None else min(last_s, watched_s)
            before, after = read(engine_id, told_s, watched_s)
            if after is not None:
                _judge(connection, row, orjson.loads(document), fate, watched_s, before, after)
            elif now_s - watched_s > LAPSED_S:
                _unwatch(connection, row)
        connection.execute(
            "UPDATE recommendations SET fate = ? WHERE fate = ? AND last_s < ?"
            " AND watched_s IS NULL",
            (LAPSED, OPEN, now_s - LAPSED_S),
        )


def _before_and_after(
    connection: sqlite3.Connection, engine_id: int, told_s: float, watched_s: float
) -> tuple[Means, Means | None]:
    """Means before a restart, and after it under a like load; no means after: not enough yet."""
    was = read_signals(connection, engine_id, SIGNALS, from_s=told_s - MEASURED_S, to_s=told_s)
    since_s, until_s = watched_s + SETTLED_S, watched_s + LAPSED_S
    now = read_signals(connection, engine_id, SIGNALS, from_s=since_s, to_s=until_s)
    return means(was), under_load(now, load(was))


def _judge(
    connection: sqlite3.Connection,
    row: int,
    document: Mapping[str, Any],
    fate: str,
    watched_s: float,
    before: Means,
    after: Means,
) -> None:
    _unwatch(connection, row)
    if fate == OPEN and not any(
        signals_show_change(one, before, after) for one in document["changes"]
    ):
        return
    found = outcome_of(document, before, after)
    measured = {} if found is None else dict(found.measured)
    connection.execute(
        "UPDATE recommendations SET fate = ?, measured = ?, applied_s = ? WHERE id = ?",
        (
            APPLIED if found is None else found.word,
            orjson.dumps(measured).decode(),
            watched_s,
            row,
        ),
    )


def _unwatch(connection: sqlite3.Connection, row: int) -> None:
    connection.execute("UPDATE recommendations SET watched_s = NULL WHERE id = ?", (row,))


def means(series: Series, rows: Sequence[int] | None = None) -> Means:
    """The mean of each signal over some rows, or over all; None where it is unknown."""
    chosen = range(len(series.times)) if rows is None else rows
    made: dict[str, float | None] = {}
    for key, column in series.values.items():
        known = [column[at] for at in chosen if not math.isnan(column[at])]
        peak = key == "running_max"
        made[key] = (max(known) if peak else math.fsum(known) / len(known)) if known else None
    return made


def load(series: Series) -> float:
    """Requests in flight, on average; 0 where that is not known."""
    found = means(series)
    return (found.get("running_avg") or 0.0) + (found.get("waiting_avg") or 0.0)


def under_load(series: Series, load_before: float) -> Means | None:
    """The means over scrapes with a load like the one before; None while there are too few."""
    running, waiting = series.values["running_avg"], series.values["waiting_avg"]
    rows: list[int] = []
    lasted_s = 0.0
    for at, t_s in enumerate(series.times):
        if running[at] + waiting[at] >= LIKE_BEFORE_RATIO * load_before:
            rows.append(at)
            step_s = t_s - series.times[at - 1] if at else 0.0
            lasted_s += min(max(step_s, 0.0), STEP_MAX_S)
    return means(series, rows) if rows and lasted_s >= MEASURED_S else None
