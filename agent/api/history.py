"""How things were, from the store. I/O edge: it reads the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from kneewatch.agent.api.problems import Problem
from kneewatch.agent.api.telling import Stretch
from kneewatch.agent.store.model import Interval, Series, StoredEngine
from kneewatch.agent.store.reader import Reader
from kneewatch.collector.base import KneewatchError
from kneewatch.reports.triage.standing import RANKS

log = logging.getLogger(__name__)

MOST_STRETCHES = 10_000
FEW = 8

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class History:
    """The store's reader, or None where no history is kept."""

    reader: Reader | None

    def engines(self, target: str | None) -> list[StoredEngine]:
        """The engines of a target, or of all of them, that the store knows."""
        return self._read(lambda reader: reader.engines(target))

    def documents(self, engines: Sequence[StoredEngine], at_s: float) -> list[dict[str, Any]]:
        """The diagnoses in force at a moment, worst first."""

        def read(reader: Reader) -> list[dict[str, Any]]:
            found = (reader.document(engine.id, at_s) for engine in engines)
            return [document for document in found if document is not None]

        return sorted(self._read(read), key=_worst_first)

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

        rows = [(by_id[one.engine_id], one) for one in self._read(read) if one.engine_id in by_id]
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
