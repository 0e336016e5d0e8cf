"""Engines at the moment an alert began, from the history, and what is said of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kneewatch.agent.notify.message import Line
from kneewatch.collector.base import KneewatchError
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.reports import advice
from kneewatch.reports.reading import DocumentError, diagnosis_of
from kneewatch.reports.text import VERDICTS, who
from kneewatch.reports.words import moment

if TYPE_CHECKING:
    from kneewatch.agent.store.model import StoredEngine
    from kneewatch.agent.store.reader import Reader

log = logging.getLogger(__name__)

EngineName = tuple[str, str]
"""Model and engine."""

UNTOLD = "unknown, what was kept cannot be told"
RANKS = {word: n for n, word in enumerate(("ok", "info", "unknown", "warning", "critical"))}


@dataclass(frozen=True, slots=True)
class Look:
    """One engine when an alert began, and now. `why` says why there is nothing of the start."""

    target: str
    model: str
    engine: str
    start: Mapping[str, Any] | None
    now: Diagnosis | None
    why: str

    def lines(self, starts_s: float, now_s: float) -> list[Line]:
        """What to tell a person of it."""
        start = _read(self.start)
        one = self.now or start
        lines = [Line(f"at {moment(starts_s, now_s)}", _verdict(start) or self.why or UNTOLD)]
        lines.append(Line("now", _verdict(self.now) or "unknown, it is not watched any more"))
        if one is not None:
            lines[0] = Line("", f"{who(one)}: {lines[0].plain()}")
        ill = next((d for d in (self.now, start) if d is not None and d.causes), None)
        return [*lines, *_lever(ill)] if ill else lines


class Past:
    """The history as far as alerts ask for it. Without one, or where it cannot be read, it knows
    nothing and says why."""

    def __init__(self, reader: Reader | None) -> None:
        self._reader = reader
        self._why = "" if reader is not None else "no history is kept"
        self._stored: dict[str, dict[EngineName, list[StoredEngine]]] = {}
        if reader is None:
            return
        try:
            rows = reader.engines()
        except KneewatchError as exc:
            self._failed(exc)
            return
        for row in rows:
            engines = self._stored.setdefault(row.target, {})
            engines.setdefault((row.model, row.engine), []).append(row)

    def engines(self, target: str) -> AbstractSet[EngineName]:
        """The engines that a target has had."""
        return self._stored.get(target, {}).keys()

    def document(
        self, target: str, engine: EngineName, at_s: float
    ) -> tuple[dict[str, Any] | None, str]:
        """The diagnosis in force at a moment, of the worst of an engine's replicas; or why there
        is none."""
        found: list[dict[str, Any]] = []
        damaged = False
        for row in self._stored.get(target, {}).get(engine, ()):
            try:
                look = self._reader.look(row.id, at_s) if self._reader else None
            except KneewatchError as exc:
                self._failed(exc)
            else:
                damaged = damaged or (look is not None and look.damaged)
                found += [look.document] if look and look.document is not None else []
        if found:
            return max(found, key=lambda one: RANKS.get(one.get("health", ""), 0)), ""
        if damaged:
            return None, "unknown, the history is damaged there"
        return None, self._why or "unknown, it was not watched then"

    def _failed(self, error: KneewatchError) -> None:
        log.warning("alerts: the history cannot be read error=%s", error)
        self._why = "unknown, the history cannot be read"


def _read(kept: Mapping[str, Any] | None) -> Diagnosis | None:
    try:
        return None if kept is None else diagnosis_of(kept)
    except DocumentError as exc:
        log.warning("alerts: a stored diagnosis cannot be told error=%s", exc)
        return None


def _verdict(diagnosis: Diagnosis | None) -> str:
    if diagnosis is None:
        return ""
    told = VERDICTS[diagnosis.health]
    if first := diagnosis.headline:
        causes = {cause.id: f": {cause.summary}" for cause in diagnosis.causes}
        told += f" {first}{causes.get(first, '')}"
    stage = diagnosis.stage
    return f"{told} (KV cascade stage {stage.number}, {stage.name})" if stage else told


def _lever(diagnosis: Diagnosis) -> list[Line]:
    cause = diagnosis.causes[0]
    made = advice.advised(diagnosis, cause)
    if not made:
        return [Line("do first", cause.lever)]
    return [Line("do first", made[0].summary, advice.changes_words(made[0]))]
