"""The view model of the triage page, from the board and the store. I/O edge."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kneewatch.agent.api.parameters import Asked, asked
from kneewatch.agent.api.past import History, history_reach
from kneewatch.agent.api.responses import Problem, no_such_target
from kneewatch.agent.api.service import Service
from kneewatch.agent.store.records import StoredEngine
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.fleet.verdict import IN_FLEET
from kneewatch.diagnose.intervals import Interval
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.triage.view_model import (
    SINCE,
    SINCE_DEFAULT,
    EngineView,
    TargetView,
    TriageView,
    cited,
)
from kneewatch.rules.formatting import as_sentence

if TYPE_CHECKING:
    from kneewatch.agent.fleet.moment import FleetMoment

REFRESH_S = 5.0
NO_HISTORY = "No history is stored, or it cannot be read: timeline and charts are missing."
NO_PAST = "the history cannot be read"
DAMAGED = "the history is damaged at that moment"
NOT_THEN = "not watched at that moment"
NOT_YET = "not scraped yet"
NO_MORE = "no longer watched; its history is available"

Key = tuple[str, str, str]


def page_request(
    now_s: float, *, target: str | None = None, at: str | None = None, since: str | None = None
) -> Asked:
    """Parse the parameters of the page. An invalid parameter is ignored and adds a notice."""
    notices: list[str] = []
    timeline = SINCE_DEFAULT
    whole = Asked(target or "", now_s, None, None)
    try:
        whole = asked(now_s, whole.target, at, None)
        if since and since in SINCE:
            timeline = since
        elif since and (from_s := asked(now_s, "", at, since).since_s) is not None:
            span_s = whole.moment_s - from_s
            timeline = next((word for word, most_s in SINCE.items() if most_s >= span_s), "7d")
    except Problem as problem:
        notices.append(problem.detail)
    since_s = max(0.0, whole.moment_s - SINCE[timeline])
    return replace(whole, since_s=since_s, since=timeline, notices=tuple(notices))


class Views:
    """Builds the views of pages. Data that the store cannot provide is left out, and a notice is
    added."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._history = History(service.reader, service.store)

    def view(self, request: Asked, fleet: FleetMoment | None = None) -> TriageView:
        """The view for a request. `fleet` is the watched fleet at its moment, if known.

        Raises:
            Problem: the requested target does not exist.
        """
        of_fleet = None if fleet is None else fleet.target(request.target)
        request = request if of_fleet is None else replace(request, target=of_fleet.name)
        notices, engines = list(request.notices), self._engines(request.target)
        only = self._only(request, engines or [])
        request = replace(request, target=request.target or only)
        if engines is None:
            notices.append(NO_HISTORY)
        notices += map(as_sentence, self._history.notices(request.now_s))
        past = _Past(self._history, engines or [], request)
        targets = (
            self._then(request, past, of_fleet)
            if request.at_s is not None
            else self._now(request, past)
        )
        if fleet is not None:
            notices += [as_sentence(fleet.verdict.lost)] if fleet.verdict.lost else []
            targets = [fleet.shown(target) for target in targets]
        intervals = [state.interval_s for state in self._service.states()]
        return TriageView(
            now_s=request.now_s,
            at_s=request.at_s,
            since_s=request.since_s or 0.0,
            until_s=request.moment_s,
            refresh_s=min(intervals, default=REFRESH_S),
            version=self._service.version,
            targets=targets,
            single=bool(request.target),
            since=request.since,
            notices=notices,
            others=not only or request.target != only,
            docs_url=self._service.settings.docs_url or "docs",
        )

    def _only(self, request: Asked, engines: Sequence[StoredEngine]) -> str:
        """The name of the target if there is only one; else ""."""
        names = {state.name for state in self._service.states()}
        names.update(spec.name for spec in self._service.targets())
        if request.at_s is not None:
            names.update(engine.target for engine in engines)
        return names.pop() if len(names) == 1 else ""

    def _engines(self, target: str) -> list[StoredEngine] | None:
        try:
            return self._history.engines(target or None)
        except Problem:
            return None

    def _now(self, request: Asked, past: _Past) -> list[TargetView]:
        configured = {spec.name: spec.pending_text for spec in self._service.targets()}
        views: list[TargetView] = []
        for name in self._names(request, past):
            state = self._service.state(name)
            if state is None:
                why = f"{NOT_YET}: {configured[name]}" if name in configured else NO_MORE
                views.append(self._without(name, why))
            else:
                engines = [past.engine(diagnosis) for diagnosis in state.diagnoses]
                views.append(_target(state, engines, state.t_s, sources=True))
        return views

    def _then(self, request: Asked, past: _Past, of_fleet: TargetState | None) -> list[TargetView]:
        diagnoses = past.diagnoses()
        views: list[TargetView] = []
        for name in self._names(request, past):
            then = [diagnosis for diagnosis in diagnoses or () if diagnosis.target == name]
            if not then and of_fleet is not None:
                engines = [EngineView(verdict) for verdict in of_fleet.diagnoses]
                views.append(_target(of_fleet, engines, of_fleet.t_s, sources=False))
                continue
            if not then:
                why = DAMAGED if name in past.damaged else past.nothing_then(name)
                views.append(self._without(name, NO_PAST if diagnoses is None else why))
                continue
            state, last_s = self._service.state(name), max(diagnosis.t_s for diagnosis in then)
            engines = [past.engine(diagnosis) for diagnosis in then]
            if state is None:
                without = self._without(name, "")
                views.append(
                    TargetView(name, without.url, without.labels, engines, REFRESH_S, last_s)
                )
            else:
                views.append(_target(state, engines, last_s, sources=False))
        return views

    def _names(self, request: Asked, past: _Past) -> list[str]:
        configured = [spec.name for spec in self._service.targets()]
        watched = [state.name for state in self._service.states()]
        stored = [] if request.at_s is None and not request.target else past.targets
        names = list(dict.fromkeys((*watched, *configured, *stored)))
        if not request.target:
            return names
        in_fleet = request.target.startswith(IN_FLEET) and self._service.fleet is not None
        if request.target not in names and not in_fleet:
            raise no_such_target(configured)
        return [request.target]

    def _without(self, name: str, error: str) -> TargetView:
        for spec in self._service.targets():
            if spec.name == name:
                interval_s = spec.settings["interval_s"]
                return TargetView(name, "", spec.labels, (), interval_s, None, error)
        return TargetView(name, "", {}, (), REFRESH_S, None, error)


class _Past:
    """The stored history of the engines on a page."""

    def __init__(self, history: History, engines: Sequence[StoredEngine], request: Asked) -> None:
        self._history, self._request, self._engines = history, request, engines
        # Several stored engines can have the same name, one after the other: use the newest.
        self._by_key = {
            _key(engine): engine for engine in sorted(engines, key=lambda engine: engine.last_s)
        }
        self._intervals: dict[Key, list[Interval]] | None = None
        self.damaged: tuple[str, ...] = ()
        self.targets = list(dict.fromkeys(engine.target for engine in engines))

    def diagnoses(self) -> list[Verdict] | None:
        """The diagnoses at the requested moment. None if they cannot be read."""
        try:
            verdicts, self.damaged = self._history.verdicts(self._engines, self._request.moment_s)
        except Problem:
            return None
        return verdicts

    def nothing_then(self, target: str) -> str:
        """The reason why a target has no diagnosis at the requested moment, with the times at which
        its history begins and ends."""
        engines = [engine for engine in self._engines if engine.target == target]
        return f"{NOT_THEN}; {history_reach(engines)}" if engines else NOT_THEN

    def engine(self, diagnosis: Verdict) -> EngineView:
        """The view of an engine: its intervals and, if the page is about one target, its series."""
        key = diagnosis.target, diagnosis.model, diagnosis.engine
        intervals = self._intervals_of(key)
        stored = self._by_key.get(key)
        if stored is None or not self._request.target:
            return EngineView(diagnosis, intervals)
        with suppress(Problem):
            series = self._history.signals(
                stored.id,
                cited(diagnosis),
                since_s=self._request.since_s or 0.0,
                until_s=self._request.moment_s,
            )
            return EngineView(diagnosis, intervals, series.times, series.values)
        return EngineView(diagnosis, intervals)

    def _intervals_of(self, key: Key) -> list[Interval]:
        if self._intervals is None:
            self._intervals = {}
            with suppress(Problem):
                for engine, interval in self._history.intervals(
                    self._engines,
                    since_s=self._request.since_s or 0.0,
                    until_s=self._request.moment_s,
                ):
                    self._intervals.setdefault(_key(engine), []).append(interval)
        return self._intervals.get(key, [])


def _target(
    state: TargetState, engines: Sequence[EngineView], last_s: float, *, sources: bool
) -> TargetView:
    return TargetView(
        name=state.name,
        url=state.url,
        labels=state.labels,
        engines=engines,
        interval_s=state.interval_s,
        last_s=last_s,
        sources=state.sources if sources else (),
    )


def _key(engine: StoredEngine) -> Key:
    return engine.target, engine.model, engine.engine
