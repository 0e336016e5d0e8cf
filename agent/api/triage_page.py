"""The triage page's view, gathered from the board and the store. I/O edge: it reads the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kneewatch.agent.api.formatting import Stretch
from kneewatch.agent.api.history import History
from kneewatch.agent.api.responses import Problem, no_such_target
from kneewatch.agent.api.service import Service
from kneewatch.agent.api.time_parameter import moment
from kneewatch.agent.store.records import StoredEngine
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.diagnosis_json import DocumentError, diagnosis_of
from kneewatch.reports.triage.verdict import sentence
from kneewatch.reports.triage.view_model import (
    SINCE,
    SINCE_DEFAULT,
    EngineView,
    IntervalView,
    SeriesView,
    SourceView,
    TargetView,
    TriageView,
    cited,
)

REFRESH_S = 5.0
NO_HISTORY = "No history is kept or it cannot be read: the past and the charts are missing."
NO_PAST = "the history cannot be read"
DAMAGED = "the history is damaged at that moment"
NOT_THEN = "not watched at that moment"
NOT_YET = "not scraped yet"
NO_MORE = "not watched any more; its past can be looked at"

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Shown:
    """What the page is asked to show. `notices` say what of it could not be understood."""

    target: str
    now_s: float
    at_s: float | None
    since: str
    notices: tuple[str, ...]

    @property
    def until_s(self) -> float:
        """Where the timeline ends."""
        return self.now_s if self.at_s is None else self.at_s

    @property
    def since_s(self) -> float:
        """Where it begins."""
        return max(0.0, self.until_s - SINCE[self.since])


def shown(query: Mapping[str, str], now_s: float) -> Shown:
    """What the page's parameters ask for. What is wrong is said on the page, which shows now."""
    notices: list[str] = []
    at_s: float | None = None
    since, told = SINCE_DEFAULT, query.get("since", "")
    try:
        at_s = moment("at", query["at"], now_s=now_s) if query.get("at") else None
        until_s = now_s if at_s is None else at_s
        if told in SINCE:
            since = told
        elif told:
            span_s = until_s - moment("since", told, now_s=now_s, before_s=until_s)
            since = next((word for word, most_s in SINCE.items() if most_s >= span_s), "7d")
    except Problem as problem:
        notices.append(problem.detail)
    return Shown(query.get("target", ""), now_s, at_s, since, tuple(notices))


class Views:
    """Makes views. What the store cannot give is left out and said."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._history = History(service.reader, service.store)

    def view(self, asked: Shown) -> TriageView:
        """The page's view.

        Raises:
            Problem: there is no such target.
        """
        notices, engines = list(asked.notices), self._engines(asked.target)
        only = self._only(asked, engines or [])
        asked = replace(asked, target=asked.target or only)
        if engines is None:
            notices.append(NO_HISTORY)
        notices += map(sentence, self._history.notices(asked.now_s))
        past = _Past(self._history, engines or [], asked)
        targets = self._then(asked, past) if asked.at_s is not None else self._now(asked, past)
        intervals = [one.interval_s for one in self._service.board.states()]
        return TriageView(
            now_s=asked.now_s,
            at_s=asked.at_s,
            since_s=asked.since_s,
            until_s=asked.until_s,
            refresh_s=min(intervals, default=REFRESH_S),
            version=self._service.version,
            targets=targets,
            single=bool(asked.target),
            since=asked.since,
            notices=notices,
            others=not only or asked.target != only,
            docs_url=self._service.settings.docs_url or "docs",
        )

    def _only(self, asked: Shown, engines: Sequence[StoredEngine]) -> str:
        """The target, where there is only one; else nothing."""
        known = {state.name for state in self._service.board.states()}
        known.update(spec.name for spec in self._service.targets())
        if asked.at_s is not None:
            known.update(one.target for one in engines)
        return known.pop() if len(known) == 1 else ""

    def _engines(self, target: str) -> list[StoredEngine] | None:
        try:
            return self._history.engines(target or None)
        except Problem:
            return None

    def _now(self, asked: Shown, past: _Past) -> list[TargetView]:
        board = self._service.board
        configured = {spec.name: spec.awaited for spec in self._service.targets()}
        found: list[TargetView] = []
        for name in self._names(asked, past):
            state = board.get(name)
            if state is None:
                why = f"{NOT_YET}: {configured[name]}" if name in configured else NO_MORE
                found.append(self._without(name, why))
            else:
                engines = [past.engine(one) for one in state.diagnoses]
                found.append(_target(state, engines, state.t_s, sources=True))
        return found

    def _then(self, asked: Shown, past: _Past) -> list[TargetView]:
        told = past.diagnoses()
        found: list[TargetView] = []
        for name in self._names(asked, past):
            then = [one for one in told or () if one.target == name]
            if not then:
                why = DAMAGED if name in past.damaged else NOT_THEN
                found.append(self._without(name, NO_PAST if told is None else why))
                continue
            state, last_s = self._service.board.get(name), max(one.t_s for one in then)
            engines = [past.engine(one) for one in then]
            if state is None:
                without = self._without(name, "")
                found.append(
                    TargetView(name, without.url, without.labels, engines, REFRESH_S, last_s)
                )
            else:
                found.append(_target(state, engines, last_s, sources=False))
        return found

    def _names(self, asked: Shown, past: _Past) -> list[str]:
        configured = [spec.name for spec in self._service.targets()]
        watched = [state.name for state in self._service.board.states()]
        stored = [] if asked.at_s is None and not asked.target else past.targets
        known = list(dict.fromkeys((*watched, *configured, *stored)))
        if not asked.target:
            return known
        if asked.target not in known:
            raise no_such_target(configured)
        return [asked.target]

    def _without(self, name: str, error: str) -> TargetView:
        for spec in self._service.targets():
            if spec.name == name:
                interval_s = spec.settings["interval_s"]
                return TargetView(name, "", spec.labels, (), interval_s, None, error)
        return TargetView(name, "", {}, (), REFRESH_S, None, error)


class _Past:
    """What the store has of the engines on a page."""

    def __init__(self, history: History, engines: Sequence[StoredEngine], asked: Shown) -> None:
        self._history, self._asked, self._engines = history, asked, engines
        # Of engines that were one after the other under the same name, the newest.
        self._by_key = {_key(one): one for one in sorted(engines, key=lambda one: one.last_s)}
        self._stretches: dict[Key, list[Stretch]] | None = None
        self.damaged: tuple[str, ...] = ()
        self.targets = list(dict.fromkeys(one.target for one in engines))

    def diagnoses(self) -> list[Diagnosis] | None:
        """The diagnoses at the moment shown; None where they cannot be read."""
        try:
            then = self._history.then(self._engines, self._asked.until_s)
            self.damaged = then.damaged
            return [diagnosis_of(document) for document in then.documents]
        except (Problem, DocumentError):
            return None

    def engine(self, diagnosis: Diagnosis) -> EngineView:
        """An engine with its intervals, and on the page of one target with its series."""
        key = diagnosis.target, diagnosis.model, diagnosis.engine
        intervals = [
            IntervalView(one.kind, one.id, one.severity, one.start_s, one.end_s)
            for one in self._of(key)
        ]
        stored = self._by_key.get(key)
        if stored is None or not self._asked.target:
            return EngineView(diagnosis, intervals)
        return EngineView(diagnosis, intervals, self._series(stored.id, cited(diagnosis)))

    def _of(self, key: Key) -> list[Stretch]:
        if self._stretches is None:
            self._stretches = {}
            for one in self._read_stretches():
                self._stretches.setdefault((one.target, one.model, one.engine), []).append(one)
        return self._stretches.get(key, [])

    def _read_stretches(self) -> list[Stretch]:
        asked = self._asked
        try:
            return self._history.stretches(
                self._engines, since_s=asked.since_s, until_s=asked.until_s
            )
        except Problem:
            return []

    def _series(self, engine_id: int, keys: Sequence[str]) -> dict[str, SeriesView]:
        asked = self._asked
        try:
            found = self._history.signals(
                engine_id, keys, since_s=asked.since_s, until_s=asked.until_s
            )
        except Problem:
            return {}
        return {key: SeriesView(found.times, values) for key, values in found.values.items()}


def _target(
    state: TargetState, engines: Sequence[EngineView], last_s: float, *, sources: bool
) -> TargetView:
    rows = [
        SourceView(one.name, one.t_s, one.success, one.error, one.joined) for one in state.sources
    ]
    return TargetView(
        name=state.name,
        url=state.url,
        labels=state.labels,
        engines=engines,
        interval_s=state.interval_s,
        last_s=last_s,
        sources=rows if sources else (),
    )


def _key(engine: StoredEngine) -> Key:
    return engine.target, engine.model, engine.engine
