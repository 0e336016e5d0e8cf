"""The view model of the triage page, from the board and the store. I/O edge."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kneewatch.agent.api.responses import Asked, Problem, asked, no_such_target
from kneewatch.agent.api.service import History, Service, history_reach
from kneewatch.agent.store.records import StoredEngine
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.fleet.verdict import IN_FLEET
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


def page_view(service: Service, request: Asked, fleet: FleetMoment | None = None) -> TriageView:
    """The view for a request. `fleet` is the watched fleet at its moment, if known.

    Raises:
        Problem: the requested target does not exist.
    """
    of_fleet = None if fleet is None else fleet.target(request.target)
    page = _Page(service, request if of_fleet is None else replace(request, target=of_fleet.name))
    request, notices = page.request, page.notices
    targets = page.now() if request.at_s is None else page.then(of_fleet)
    if fleet is not None:
        notices += [as_sentence(fleet.verdict.lost)] if fleet.verdict.lost else []
        targets = [fleet.shown(target) for target in targets]
    return TriageView(
        now_s=request.now_s,
        at_s=request.at_s,
        since_s=request.since_s or 0.0,
        until_s=request.moment_s,
        refresh_s=min((state.interval_s for state in page.states), default=REFRESH_S),
        version=service.version,
        targets=targets,
        single=bool(request.target),
        since=request.since,
        notices=notices,
        others=not page.only or request.target != page.only,
        docs_url=service.settings.docs_url or "docs",
    )


class _Page:
    """The targets of a page, from the board and the store. Data that the store cannot provide is
    left out, and a notice is added. `only` is the name of the target if there is only one."""

    def __init__(self, service: Service, request: Asked) -> None:
        self._service, self.states = service, service.states()
        self._configured = {spec.name: spec for spec in service.targets()}
        self._history = History(service.reader, service.store)
        self.notices, self._engines = list(request.notices), list[StoredEngine]()
        try:
            self._engines = self._history.engines(request.target or None)
        except Problem:
            self.notices.append(NO_HISTORY)
        self.notices += map(as_sentence, self._history.notices(request.now_s))
        watched = dict.fromkeys((*(state.name for state in self.states), *self._configured))
        stored = dict.fromkeys(engine.target for engine in self._engines)
        every = watched if request.at_s is None else watched | stored
        self.only = next(iter(every)) if len(every) == 1 else ""
        self.request = request = replace(request, target=request.target or self.only)
        self._names = every if request.at_s is not None or not request.target else watched | stored
        # Several stored engines can have the same name, one after the other: use the newest.
        self._by_key = {
            _key(engine): engine for engine in sorted(self._engines, key=lambda each: each.last_s)
        }
        self._intervals: dict[Key, list[Interval]] | None = None

    def now(self) -> list[TargetView]:
        """The targets as of their newest cycles."""
        views: list[TargetView] = []
        for name in self._shown():
            state, spec = self._service.state(name), self._configured.get(name)
            if state is None:
                why = NO_MORE if spec is None else f"{NOT_YET}: {spec.pending_text}"
                views.append(self._without(name, why))
            else:
                engines = [self._engine(diagnosis) for diagnosis in state.diagnoses]
                views.append(_target(state, engines, state.t_s, sources=True))
        return views

    def then(self, of_fleet: TargetState | None) -> list[TargetView]:
        """The targets at the requested moment. `of_fleet` is the requested one of a fleet."""
        verdicts, damaged, cannot = list[Verdict](), tuple[str, ...](), ""
        try:
            verdicts, damaged = self._history.verdicts(self._engines, self.request.moment_s)
        except Problem:
            cannot = NO_PAST
        views: list[TargetView] = []
        for name in self._shown():
            then = [diagnosis for diagnosis in verdicts if diagnosis.target == name]
            if not then and of_fleet is not None:
                engines = [EngineView(verdict) for verdict in of_fleet.diagnoses]
                views.append(_target(of_fleet, engines, of_fleet.t_s, sources=False))
                continue
            if not then:
                why = DAMAGED if name in damaged else self._nothing_then(name)
                views.append(self._without(name, cannot or why))
                continue
            state, last_s = self._service.state(name), max(diagnosis.t_s for diagnosis in then)
            engines = [self._engine(diagnosis) for diagnosis in then]
            views.append(
                replace(self._without(name, ""), engines=engines, last_s=last_s)
                if state is None
                else _target(state, engines, last_s, sources=False)
            )
        return views

    def _shown(self) -> list[str]:
        target = self.request.target
        if not target:
            return list(self._names)
        in_fleet = target.startswith(IN_FLEET) and self._service.fleet is not None
        if target not in self._names and not in_fleet:
            raise no_such_target(list(self._configured))
        return [target]

    def _without(self, name: str, error: str) -> TargetView:
        spec = self._configured.get(name)
        interval_s = REFRESH_S if spec is None else spec.settings["interval_s"]
        return TargetView(name, "", spec.labels if spec else {}, (), interval_s, None, error)

    def _nothing_then(self, target: str) -> str:
        """The reason why a target has no diagnosis at the requested moment, with the times at which
        its history begins and ends."""
        engines = [engine for engine in self._engines if engine.target == target]
        return f"{NOT_THEN}; {history_reach(engines)}" if engines else NOT_THEN

    def _engine(self, diagnosis: Verdict) -> EngineView:
        """The view of an engine: its intervals and, if the page is about one target, its series."""
        key = diagnosis.target, diagnosis.model, diagnosis.engine
        intervals = self._intervals_of(key)
        stored = self._by_key.get(key)
        if stored is None or not self.request.target:
            return EngineView(diagnosis, intervals)
        with suppress(Problem):
            series = self._history.signals(
                stored.id,
                cited(diagnosis),
                since_s=self.request.since_s or 0.0,
                until_s=self.request.moment_s,
            )
            return EngineView(diagnosis, intervals, series.times, series.values)
        return EngineView(diagnosis, intervals)

    def _intervals_of(self, key: Key) -> list[Interval]:
        if self._intervals is None:
            self._intervals = {}
            with suppress(Problem):
                for engine, interval in self._history.intervals(
                    self._engines,
                    since_s=self.request.since_s or 0.0,
                    until_s=self.request.moment_s,
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
