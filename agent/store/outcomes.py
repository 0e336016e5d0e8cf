"""Outcomes of recommendations: detects which ones were applied, and measures their effect. I/O
edge."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import orjson

from kneewatch.agent.store.encoding import PackedEngine
from kneewatch.agent.store.engine_cache import AdviceRow, CachedEngine
from kneewatch.agent.store.records import Series
from kneewatch.agent.store.stored_series import read_signals
from kneewatch.diagnose.recommend.past_advice import (
    APPLIED,
    EVIDENT,
    LAPSED,
    LAPSED_S,
    OPEN,
    SETTLED_S,
    SIGNALS,
    ChangeDocument,
    Means,
    config_shows,
    outcome_of,
    signals_show_change,
)

REWRITE_INTERVAL_S = 60.0
"""Minimum seconds between two writes of the same recommendation. Its numbers change with the
load."""

START_TIME_TOLERANCE_S = 1.0
FIRST_SEEN = ""
NEW_START = "the process has a new start time"


class Tracking:
    """Writes configurations and recommendations, and detects when a recommendation was applied."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def update(self, engine: CachedEngine, row: int, packed: PackedEngine) -> None:
        """Write the changes that one scrape shows."""
        if packed.columns:
            self._config(engine, row, packed)
        self.set_active(engine, packed.recommendations, packed.t_s)

    def set_active(self, engine: CachedEngine, current: Mapping[str, bytes], t_s: float) -> None:
        """Set the active recommendations of an engine: new ones begin, and those that are not in
        `current` end. `current` are their documents by name."""
        if engine.recommendations is current and not (engine.active and not current):
            return
        engine.recommendations = current
        for name in [name for name in engine.active if name not in current]:
            self._execute(
                "UPDATE recommendations SET last_s = ? WHERE id = ?",
                (engine.last_s, engine.active.pop(name).id),
            )
        for name, document in current.items():
            row = engine.active.get(name)
            if row is None:
                engine.active[name] = self._begin(engine, name, document, t_s)
            elif row.document != document and abs(t_s - row.written_s) >= REWRITE_INTERVAL_S:
                self._rewrite(row.id, document)
                row.document, row.written_s = document, t_s

    def _begin(self, engine: CachedEngine, name: str, document: bytes, t_s: float) -> AdviceRow:
        before = self._execute(
            "SELECT id FROM recommendations WHERE engine_id = ? AND name = ? AND fate = ?"
            " AND last_s > ? ORDER BY id DESC LIMIT 1",
            (engine.id, name, OPEN, t_s - LAPSED_S),
        ).fetchone()
        if before is not None:
            self._rewrite(before[0], document)
            return AdviceRow(before[0], document, t_s)
        inserted = self._execute(
            "INSERT INTO recommendations (engine_id, name, document, first_s) VALUES (?, ?, ?, ?)",
            (engine.id, name, document, t_s),
        )
        return AdviceRow(inserted.lastrowid or 0, document, t_s)

    def _rewrite(self, row: int, document: bytes) -> None:
        self._execute(
            "UPDATE recommendations SET document = ?, last_s = NULL WHERE id = ?",
            (document, row),
        )

    def _config(self, engine: CachedEngine, row: int, packed: PackedEngine) -> None:
        config, started_s = packed.config, packed.started_s
        if config is not engine.config:
            config = _bounded(config)
        first = engine.config is None
        restart = FIRST_SEEN if packed.restart is None else packed.restart.how
        if (
            not engine.page_read
            and not restart
            and _start_time_changed(engine.started_s, started_s)
        ):
            # The restart happened while kneewatch was not scraping.
            restart = NEW_START
        engine.page_read = True
        same = config is engine.config or not config or config == engine.config
        if engine.config is not None and same and not restart:
            engine.config = config or engine.config
            return
        text = orjson.dumps(dict(config)).decode()
        if not engine.texts.take(packed.t_s, len(text)):
            return
        self._execute(
            "INSERT OR REPLACE INTO configs (id, engine_id, t_s, labels, started_s, restart)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (row, engine.id, packed.t_s, text, started_s, restart),
        )
        if not first:
            self._mark_applied(engine.id, packed.t_s, engine.config or {}, config)
        engine.config, engine.started_s = config, started_s

    def _mark_applied(
        self, engine_id: int, t_s: float, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None:
        """Mark the recommendations that the new configuration applies. A recommendation whose
        change the configuration does not show is watched: only measured signals can confirm it."""
        rows = self._execute(
            "SELECT id, document, fate FROM recommendations WHERE engine_id = ?"
            " AND (fate = ? AND coalesce(last_s, ?) > ? OR fate = ?)",
            (engine_id, OPEN, t_s, t_s - LAPSED_S, APPLIED),
        ).fetchall()
        for row, document, fate in rows:
            changes = orjson.loads(document)["changes"]
            visible = [change for change in changes if _shown(change, after) is not None]
            if not all(_shown(change, after) for change in visible):
                if fate == APPLIED:
                    self._execute(
                        "UPDATE recommendations SET fate = ?, applied_s = NULL, watched_s = NULL"
                        " WHERE id = ?",
                        (OPEN, row),
                    )
            elif fate == APPLIED:
                continue
            elif not all(_shown(change, before) for change in visible):
                self._execute(
                    "UPDATE recommendations SET fate = ?, applied_s = ?, watched_s = ?"
                    " WHERE id = ?",
                    (APPLIED, t_s, t_s, row),
                )
            elif not visible and any(change["flag"] in EVIDENT for change in changes):
                self._execute("UPDATE recommendations SET watched_s = ? WHERE id = ?", (t_s, row))


CONFIG_MAX_CHARS = 16_384
"""Most characters of a configuration that are stored. vLLM's has about 1,000."""


def _bounded(config: Mapping[str, str]) -> Mapping[str, str]:
    """The configuration, without the labels that exceed the limit."""
    left, bounded = CONFIG_MAX_CHARS, dict[str, str]()
    for label, value in config.items():
        left -= len(label) + len(value)
        if left >= 0:
            bounded[label] = value
    return config if left >= 0 else bounded


def _shown(change: ChangeDocument, config: Mapping[str, str]) -> bool | None:
    return config_shows(change["flag"], change["to"], config)


def _start_time_changed(before_s: float | None, now_s: float | None) -> bool:
    if before_s is None or now_s is None:
        return False
    return abs(now_s - before_s) > START_TIME_TOLERANCE_S


# --- Evaluation -----------------------------------------------------------------------------------


MEASURE_S = 600.0
"""Seconds under load that are measured, both before and after a change."""

LOAD_RATIO_MIN = 0.7
"""Minimum load after a change, as a share of the load before the change. Under less load, any
change seems to help."""

STEP_MAX_S = 60.0
RETRY_FACTOR = 1.25
"""Factor by which the time between two evaluations of a change grows. If the load never returns,
the number of evaluations stays small."""


class Evaluation:
    """Evaluates recommendations that may have been applied.

    An evaluation reads up to days of signals. The time between two evaluations of a change
    therefore grows.
    """

    def __init__(self) -> None:
        self._next_s: dict[int, float] = {}

    def run(self, connection: sqlite3.Connection, now_s: float) -> None:
        """Evaluate each change after which enough data was measured. Runs in the caller's
        transaction."""
        rows = connection.execute(
            "SELECT id, engine_id, document, fate, watched_s, last_s FROM recommendations"
            " WHERE watched_s IS NOT NULL"
        ).fetchall()
        self._next_s = {row[0]: self._next_s.get(row[0], -math.inf) for row in rows}
        read = cache(partial(_before_and_after, connection))
        for row, engine_id, document, fate, watched_s, last_s in rows:
            ready_s = watched_s + SETTLED_S + MEASURE_S
            if now_s < max(ready_s, self._next_s[row]):
                continue
            self._next_s[row] = watched_s + RETRY_FACTOR * (now_s - watched_s)
            active_s = watched_s if last_s is None else min(last_s, watched_s)
            before, after = read(engine_id, active_s, watched_s)
            if after is not None:
                _evaluate(connection, row, orjson.loads(document), fate, watched_s, before, after)
            elif now_s - watched_s > LAPSED_S:
                _stop_watching(connection, row)
        connection.execute(
            "UPDATE recommendations SET fate = ? WHERE fate = ? AND last_s < ?"
            " AND watched_s IS NULL",
            (LAPSED, OPEN, now_s - LAPSED_S),
        )


def _before_and_after(
    connection: sqlite3.Connection, engine_id: int, active_s: float, watched_s: float
) -> tuple[Means, Means | None]:
    """The means of signals before a restart, and after it under a similar load.

    The second value is None until enough data was measured after the restart.
    """
    before = read_signals(
        connection, engine_id, SIGNALS, from_s=active_s - MEASURE_S, to_s=active_s
    )
    since_s, until_s = watched_s + SETTLED_S, watched_s + LAPSED_S
    after = read_signals(connection, engine_id, SIGNALS, from_s=since_s, to_s=until_s)
    return means(before), means_under_load(after, mean_in_flight(before))


def _evaluate(
    connection: sqlite3.Connection,
    row: int,
    document: Mapping[str, Any],
    fate: str,
    watched_s: float,
    before: Means,
    after: Means,
) -> None:
    _stop_watching(connection, row)
    if fate == OPEN and not any(
        signals_show_change(change, before, after) for change in document["changes"]
    ):
        return
    word, measured = outcome_of(document, before, after)
    connection.execute(
        "UPDATE recommendations SET fate = ?, measured = ?, applied_s = ? WHERE id = ?",
        (word, orjson.dumps(measured).decode(), watched_s, row),
    )


def _stop_watching(connection: sqlite3.Connection, row: int) -> None:
    connection.execute("UPDATE recommendations SET watched_s = NULL WHERE id = ?", (row,))


def means(series: Series, rows: Sequence[int] | None = None) -> Means:
    """The mean of each signal over the scrapes at the positions `rows`; over all scrapes by
    default. None if the signal is unknown.

    For `running_max` it is the maximum instead.
    """
    chosen = range(len(series.times)) if rows is None else rows
    result: dict[str, float | None] = {}
    for key, column in series.values.items():
        numbers = [column[at] for at in chosen if not math.isnan(column[at])]
        peak = key == "running_max"
        if numbers:
            result[key] = max(numbers) if peak else math.fsum(numbers) / len(numbers)
        else:
            result[key] = None
    return result


def mean_in_flight(series: Series) -> float:
    """Mean number of requests in flight. 0 if unknown."""
    averages = means(series)
    return (averages.get("running_avg") or 0.0) + (averages.get("waiting_avg") or 0.0)


def means_under_load(series: Series, load_before: float) -> Means | None:
    """The means over the scrapes with at least LOAD_RATIO_MIN times `load_before`.

    The load is the number of requests running or queued. None if these scrapes cover less than
    `MEASURE_S` seconds.
    """
    running, waiting = series.values["running_avg"], series.values["waiting_avg"]
    rows: list[int] = []
    duration_s = 0.0
    for at, t_s in enumerate(series.times):
        if running[at] + waiting[at] >= LOAD_RATIO_MIN * load_before:
            rows.append(at)
            step_s = t_s - series.times[at - 1] if at else 0.0
            duration_s += min(max(step_s, 0.0), STEP_MAX_S)
    return means(series, rows) if rows and duration_s >= MEASURE_S else None
