"""How things were, from the store. I/O edge: it reads the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, TypeVar

from kneewatch.agent.api.formatting import Stretch
from kneewatch.agent.api.responses import Problem
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Interval, Series, StoredEngine
from kneewatch.agent.store.writer import Store
from kneewatch.collector.errors import KneewatchError
from kneewatch.diagnose.intervals import UNWATCHED
from kneewatch.reports.formatting import moment, span
from kneewatch.reports.triage.verdict import RANKS

log = logging.getLogger(__name__)

MOST_STRETCHES = 10_000
SURELY_S = 10.0
"""An engine whose last scrape is no older is watched, however often it is scraped."""

FEW = 8

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Then:
    """Engines at a moment, worst first; `damaged` are targets whose history is damaged there."""

    documents: Sequence[dict[str, Any]]
    damaged: tuple[str, ...] = ()

    def notices(self) -> list[str]:
        """What of the moment cannot be told, in words."""
        if not self.damaged:
            return []
        return [
            f"the history is damaged at that moment: how {', '.join(self.damaged)} was then "
            "cannot be told"
        ]


@dataclass(frozen=True, slots=True)
class History:
    """The store's reader and the store itself, or None where no history is kept."""

    reader: Reader | None
    store: Store | None = None

    def engines(self, target: str | None) -> list[StoredEngine]:
        """The engines of a target, or of all of them, that the store knows."""
        return self._read(lambda reader: reader.engines(target))

    def then(self, engines: Sequence[StoredEngine], at_s: float) -> Then:
        """How engines were at a moment, written or waiting to be."""
        unwritten_s = self.unwritten_s
        late = unwritten_s is not None and at_s >= unwritten_s
        waiting = self.store.waiting() if late and self.store is not None else []

        def read(reader: Reader) -> Then:
            documents: list[dict[str, Any]] = []
            damaged: list[str] = []
            for engine in engines:
                found = reader.waiting(engine, waiting, at_s) if waiting else None
                if found is None:
                    look = reader.lookup(engine.id, at_s)
                    found = look.document
                    damaged += [engine.target] if look.damaged else []
                documents += [] if found is None else [found]
            documents.sort(key=_worst_first)
            return Then(documents, tuple(dict.fromkeys(damaged)))

        return self._read(read)

    @property
    def unwritten_s(self) -> float | None:
        """Since when the history cannot be written; None while it can."""
        return None if self.store is None else self.store.stats().unwritten_s

    def notices(self, now_s: float) -> list[str]:
        """What is wrong with the history itself, in words."""
        since_s = self.unwritten_s
        if since_s is None:
            return []
        return [
            f"the history cannot be written since {moment(since_s, now_s)} "
            f"({span(max(0.0, now_s - since_s))}): what happened since then is remembered only "
            "while kneewatch runs, and its log says why"
        ]

    def stretches(
        self, engines: Sequence[StoredEngine], *, since_s: float, until_s: float
    ) -> list[Stretch]:
        """Stages, causes and healths of a time, by their start; the newest where there are too
        many."""
        by_id = {engine.id: engine for engine in engines}
        few: list[int | None] = [None] if len(engines) > FEW else list(by_id)

        def read(reader: Reader) -> list[Interval]:
            return [
                one
                for engine_id in few
                for one in reader.intervals(from_s=since_s, to_s=until_s, engine_id=engine_id)
            ]

        rows = [
            (by_id[one.engine_id], self._as_known(one, by_id[one.engine_id], until_s))
            for one in self._read(read)
            if one.engine_id in by_id
        ]
        rows.sort(key=lambda row: row[1].start_s)
        return [
            Stretch(
                target=engine.target,
                model=engine.model,
                engine=engine.engine,
                kind=one.kind,
                id=one.id,
                severity=one.severity.word,
                start_s=one.start_s,
                # What ended later went on then.
                end_s=None if one.end_s is None or one.end_s > until_s else one.end_s,
                last_s=one.last_s,
                ended="" if one.end_s is None or one.end_s > until_s else one.ended,
            )
            for engine, one in rows[-MOST_STRETCHES:]
        ]

    def _as_known(self, one: Interval, engine: StoredEngine, until_s: float) -> Interval:
        """An interval that ends where it was told last, unless it is known to go on."""
        if one.end_s is not None or one.last_s >= until_s:
            return one
        if one.last_s >= engine.last_s and self._watched(engine, until_s):
            return one
        return replace(one, end_s=one.last_s, ended=UNWATCHED)

    def _watched(self, engine: StoredEngine, at_s: float) -> bool:
        recent = at_s - engine.last_s <= SURELY_S
        return recent or self._read(lambda reader: reader.watched(engine.id, at_s))

    def signals(
        self, engine_id: int, keys: Sequence[str], *, since_s: float, until_s: float
    ) -> Series:
        """Signals of an engine over a time."""
        return self._read(
            lambda reader: reader.signals(engine_id, keys, from_s=since_s, to_s=until_s)
        )

    def _read(self, read: Callable[[Reader], Read]) -> Read:
        if self.reader is None:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "no history is kept here")
        try:
            return read(self.reader)
        except KneewatchError as exc:
            log.warning("the history cannot be read error=%s", exc)
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the history cannot be read now; the log of kneewatch says why",
            ) from exc


def stretch_document(one: Stretch) -> dict[str, Any]:
    """A stretch for JSON."""
    return {
        "target": one.target,
        "model": one.model,
        "engine": one.engine,
        "kind": one.kind,
        "id": one.id,
        "severity": one.severity,
        "start": round(one.start_s, 3),
        "end": None if one.end_s is None else round(one.end_s, 3),
        "last": round(one.last_s, 3),
        "ended": one.ended,
    }


def _worst_first(document: dict[str, Any]) -> tuple[int, str, str, str]:
    rank = RANKS.get(document["health"], RANKS["unknown"])
    return -rank, document["target"], document["model"], document["engine"]
