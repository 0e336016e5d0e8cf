"""Past diagnoses, intervals and signals from the store. I/O edge."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.api.responses import Problem
from kneewatch.agent.api.service import worst_first
from kneewatch.agent.store.columns import DamagedError
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Series, StoredEngine
from kneewatch.agent.store.writer import Store
from kneewatch.collector.errors import KneewatchError
from kneewatch.diagnose.change import UNWATCHED, Interval
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.lines import moment
from kneewatch.rules.formatting import clock, date, span

log = logging.getLogger(__name__)

INTERVALS_MAX = 10_000
RECENT_S = 10.0
"""Seconds after its last scrape for which an engine counts as watched, whatever its scrape
interval."""

ENGINES_READ_ALONE_MAX = 8
"""Maximum number of engines that are read one by one. For more engines, all intervals are read and
then filtered."""

Read = TypeVar("Read")


EngineInterval = tuple[StoredEngine, Interval]
"""A period in which an engine had a stage, cause or health."""


def damage_notices(damaged: Sequence[str]) -> list[str]:
    """At most one sentence: which targets have no diagnosis because their history is damaged."""
    text = f"the history is damaged at that moment: no diagnosis of {', '.join(damaged)}"
    return [text] if damaged else []


class History(Struct, frozen=True):
    """Access to the stored history. `reader` and `store` are None if no history is kept."""

    reader: Reader | None
    store: Store | None = None

    def engines(self, target: str | None) -> list[StoredEngine]:
        return self._read(lambda reader: reader.engines(target))

    def verdicts(
        self, engines: Sequence[StoredEngine], at_s: float
    ) -> tuple[list[Verdict], tuple[str, ...]]:
        """The verdicts on engines at a moment, worst first, including those that are not written to
        disk yet; and the targets whose stored history is damaged."""
        unwritten_s = self.unwritten_s
        is_unwritten = unwritten_s is not None and at_s >= unwritten_s
        waiting = self.store.waiting() if is_unwritten and self.store is not None else []

        def read(reader: Reader) -> tuple[list[Verdict], tuple[str, ...]]:
            verdicts: list[Verdict] = []
            damaged: list[str] = []
            for engine in engines:
                verdict = reader.waiting(engine, waiting, at_s) if waiting else None
                try:
                    verdict = verdict or reader.lookup(engine.id, at_s)
                except DamagedError:
                    damaged.append(engine.target)
                verdicts += [] if verdict is None else [verdict]
            return worst_first(verdicts), tuple(dict.fromkeys(damaged))

        return self._read(read)

    @property
    def unwritten_s(self) -> float | None:
        """Unix time at which writing the history began to fail. None while it works."""
        return None if self.store is None else self.store.stats().unwritten_s

    def notices(self, now_s: float) -> list[str]:
        """At most one sentence: that the history cannot be written, and since when."""
        since_s = self.unwritten_s
        if since_s is None:
            return []
        return [
            f"the history is not written since {moment(since_s, now_s)} "
            f"({span(max(0.0, now_s - since_s))}): newer data is only in memory; see the log"
        ]

    def intervals(
        self, engines: Sequence[StoredEngine], *, since_s: float, until_s: float
    ) -> list[EngineInterval]:
        """The intervals of stages, causes and health in a period, sorted by start. If there are
        more than `INTERVALS_MAX`, only the newest."""
        by_id = {engine.id: engine for engine in engines}
        ids: list[int | None] = [None] if len(engines) > ENGINES_READ_ALONE_MAX else list(by_id)

        def read(reader: Reader) -> list[Interval]:
            return [
                interval
                for engine_id in ids
                for interval in reader.intervals(from_s=since_s, to_s=until_s, engine_id=engine_id)
            ]

        rows = [
            (engine, self._as_of(interval, engine, until_s))
            for interval in self._read(read)
            if (engine := by_id.get(interval.engine_id)) is not None
        ]
        return sorted(rows, key=lambda row: row[1].start_s)[-INTERVALS_MAX:]

    def _as_of(self, interval: Interval, engine: StoredEngine, until_s: float) -> Interval:
        """The interval as it looked at `until_s`. It is open if it ended later. It ends at its last
        evaluation if the engine was no longer watched at `until_s`."""
        if interval.end_s is not None and interval.end_s > until_s:
            return replace(interval, end_s=None, ended="")
        if interval.end_s is not None or interval.last_s >= until_s:
            return interval
        if interval.last_s >= engine.last_s and (
            until_s - engine.last_s <= RECENT_S
            or self._read(lambda reader: reader.watched(engine.id, until_s))
        ):
            return interval
        return replace(interval, end_s=interval.last_s, ended=UNWATCHED)

    def signals(
        self, engine_id: int, keys: Sequence[str], *, since_s: float, until_s: float
    ) -> Series:
        return self._read(
            lambda reader: reader.signals(engine_id, keys, from_s=since_s, to_s=until_s)
        )

    def _read(self, read: Callable[[Reader], Read]) -> Read:
        if self.reader is None:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "no history is stored")
        try:
            return read(self.reader)
        except KneewatchError as exc:
            log.warning("cannot read the history error=%s", exc)
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, "the history cannot be read; see kneewatch's log"
            ) from exc


def history_reach(engines: Sequence[StoredEngine]) -> str:
    """Text with the times at which the history of these engines begins and ends, in UTC."""
    first_s = min(engine.first_s for engine in engines)
    last_s = max(engine.last_s for engine in engines)
    begins, ends = (f"{date(t_s)} {clock(t_s)} UTC" for t_s in (first_s, last_s))
    return f"the history begins at {begins} and ends at {ends}"


def interval_document(row: EngineInterval) -> dict[str, Any]:
    """An interval as a JSON document."""
    engine, interval = row
    return {
        "target": engine.target,
        "model": engine.model,
        "engine": engine.engine,
        "kind": interval.kind,
        "id": interval.id,
        "severity": interval.severity.word,
        "start": round(interval.start_s, 3),
        "end": None if interval.end_s is None else round(interval.end_s, 3),
        "last": round(interval.last_s, 3),
        "ended": interval.ended,
    }
