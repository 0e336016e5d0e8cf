"""Recommendations that may have been followed, held against what was measured since. I/O edge."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import orjson

from kneewatch.agent.store.fates import (
    APPLIED,
    LAPSED,
    LAPSED_S,
    OPEN,
    SETTLED_S,
    SIGNALS,
    Means,
    evident,
    judged,
)
from kneewatch.agent.store.history import read_signals
from kneewatch.agent.store.model import Series

MEASURED_S = 600.0
"""So much time under load is measured, before and after."""

LIKE_BEFORE_RATIO = 0.7
"""A load as it was: with less of it anything would look cured."""

STEP_MAX_S = 60.0
LATER = 1.25
"""Each look comes so much later after the restart than the one before: a load that does not come
back is not looked for a hundred times."""


class Judging:
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
    if fate == OPEN and not any(evident(one, before, after) for one in document["changes"]):
        return
    found = judged(document, before, after)
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
