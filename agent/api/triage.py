"""HTTP endpoint, `/api/v1/triage`: the diagnoses of targets, now or at any time in the store, as
text, JSON and Markdown, and the view of the triage page. I/O edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from msgspec.structs import replace
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kneewatch.agent.api.responses import (
    HTML,
    JSON,
    MARKDOWN,
    MEDIA_TYPES,
    TEXT,
    TRIAGE_FORMS,
    Asked,
    Problem,
    asked,
    clean,
    dumped,
    form_of,
    no_such_target,
)
from kneewatch.agent.api.service import (
    EngineInterval,
    History,
    Service,
    history_reach,
    interval_document,
    late,
    shown,
    worst_first,
)
from kneewatch.agent.store.records import StoredEngine
from kneewatch.agent.target_state import TargetState, watching
from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.doc_links import OWN_DOCS, linked
from kneewatch.diagnose.fleet.verdict import IN_FLEET
from kneewatch.diagnose.verdict import Verdict
from kneewatch.diagnose.verdict_json import documented
from kneewatch.reports.advice_text import first_step
from kneewatch.reports.diagnosis_text import (
    Style,
    brief_words,
    escaped,
    markdown,
    notable,
    text,
    who,
)
from kneewatch.reports.health import RANKS, counted_words, rank_of, stage_unknown
from kneewatch.reports.lines import WIDTH, cut, moment, printable, wrapped
from kneewatch.reports.triage.view_model import (
    SINCE,
    SINCE_DEFAULT,
    EngineView,
    TargetView,
    TriageView,
    cited,
)
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.formatting import as_sentence, clock, date, plural, span

if TYPE_CHECKING:
    from kneewatch.agent.fleet.watch import FleetMoment

SCHEMA = "kneewatch.triage/1"
FLEET_NOTICE = "no single target is configured, only a fleet: see /api/v1/fleet for its diagnosis"


class Triage:
    """Answers triage requests from the board and the store."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._docs_url = service.settings.docs_url or OWN_DOCS
        self._history = History(service.reader, service.store)

    async def __call__(
        self,
        request: Request,
        target: str = "",
        *,
        at: str | None,
        since: str | None,
        form: str | None,
    ) -> Response:
        """The answer to a request. `form` overrides the Accept header of the request.

        Raises:
            Problem: the target is unknown, a parameter is wrong, or the history cannot be read.
        """
        form = form_of(form, request.headers.get("accept"), TRIAGE_FORMS)
        query = asked(self._service.clock(), target, at, since)
        if form == HTML:
            return to_page(request, target)
        rendered = await run_in_threadpool(self._answer, query, form)
        return Response(rendered, media_type=MEDIA_TYPES[form])

    def _answer(self, query: Asked, form: str) -> bytes:
        """The rendered answer, from the board for now, and from the store for a past moment."""
        is_past, moment_s, history = query.at_s is not None, query.moment_s, self._history
        notices = history.notices(query.now_s)
        intervals: list[EngineInterval] | None = None
        stored: list[StoredEngine] = []
        if is_past or query.since_s is not None:
            stored = self._stored(query.target)
        if query.since_s is not None:
            intervals = history.intervals(stored, since_s=query.since_s, until_s=moment_s)
        states, pending = ([], {}) if is_past else self._present(query.target)
        late_s = {
            state.name: query.now_s - state.t_s for state in states if late(state, query.now_s)
        }
        if is_past:
            verdicts = history.verdicts(stored, moment_s)
            if not verdicts and not intervals:
                raise _nothing_then(stored, notices)
        else:
            each = (shown(state, late=state.name in late_s) for state in states)
            verdicts = worst_first(chain.from_iterable(each))
            notices += [FLEET_NOTICE] if self._service.only_fleet else []
        if form == JSON:
            document: dict[str, Any] = {"schema": SCHEMA, "t": round(moment_s, 3)}
            document |= {"pending": list(pending), **({"notices": notices} if notices else {})}
            if intervals is not None:
                document["since"] = round(query.since_s or 0.0, 3)
                document["intervals"] = [interval_document(row) for row in intervals]
            document["targets"] = [documented(linked(each, self._docs_url)) for each in verdicts]
            document["watching"] = [watching(each, late=each.name in late_s) for each in states]
            return dumped(document) + b"\n"
        blocks = [
            head(form, verdicts, t_s=moment_s, past=is_past, late=list(late_s.items()),
                 pending=pending, notices=notices),
            body(form, verdicts, alone=bool(query.target), docs_url=self._docs_url),
        ]  # fmt: skip
        if intervals is not None:
            blocks.append(past(form, intervals, since_s=query.since_s or 0.0, t_s=moment_s))
        blocks += [HINT] if form == TEXT else []
        return (clean("\n\n".join(filter(None, blocks))) + "\n").encode()

    def _present(self, target: str) -> tuple[list[TargetState], dict[str, str]]:
        """The newest states of the targets, and for each target without a state the reason."""
        service = self._service
        configured = {spec.name: spec.pending_text for spec in service.targets()}
        if not target:
            states = service.states()
            names = {state.name for state in states if state.diagnoses}
            return states, {name: configured[name] for name in sorted(configured.keys() - names)}
        state = service.state(target)
        if state is None and target not in configured:
            raise no_such_target(list(configured))
        states = [] if state is None else [state]
        if state is not None and state.diagnoses:
            return states, {}
        return states, {target: configured.get(target, "no longer watched")}

    def _stored(self, target: str) -> list[StoredEngine]:
        """The stored engines of a target, or of all."""
        engines = self._history.engines(target or None)
        if target and not engines and self._service.state(target) is None:
            configured = [spec.name for spec in self._service.targets()]
            if target not in configured:
                raise no_such_target(configured)
        return engines


def to_page(request: Request, target: str) -> Response:
    """A redirect to the triage page, with the same parameters. The address is relative, for proxies
    with a path prefix."""
    up = "../" * (request.scope["raw_path"].count(b"/") - 1)
    return redirect(f"{up or './'}triage", request, ("at", "since"), target=target)


def redirect(path: str, request: Request, names: Sequence[str], *, target: str = "") -> Response:
    """A redirect to `path`. It keeps those parameters of the request that are listed in `names`."""
    query, given = {"target": target} if target else {}, request.query_params
    query |= {name: given[name] for name in names if name in given}
    suffix = f"?{urlencode(query)}" if query else ""
    return RedirectResponse(f"{path}{suffix}", HTTPStatus.TEMPORARY_REDIRECT)


def _nothing_then(engines: Sequence[StoredEngine], notices: Sequence[str]) -> Problem:
    lines = [NOT_THEN, history_reach(engines)] if engines else ["nothing is stored yet"]
    return Problem(HTTPStatus.NOT_FOUND, "; ".join([*lines, *notices]))


# --- Diagnoses of several targets as text and Markdown --------------------------------------------


INDENT = " " * 9
"""Spaces before the text column, which follows the column with the health."""

LINES = 200
"""Maximum number of history lines in text and Markdown."""

PROBLEM_FROM_RANK = RANKS["unknown"]
"""Engines whose health has at least this rank are problems. Problems are listed first."""

FULL_MAX = 2
"""Maximum number of problems that the text shows in full. With more problems, only the worst is
shown in full and the others in two lines each: ten then fit a screen and a model's context."""

FULL_CHARS = 3_000
"""Maximum number of characters of problems shown in full, if other targets follow."""

HINT = (
    "more: /api/v1/triage/TARGET for one target in full; ?since=-2h for the history; ?at=03:07 or\n"
    "  -2h for a past moment; /docs/causes/CAUSE about a cause; ?format=json or markdown;\n"
    "  /triage for browsers"
)


def body(form: str, diagnoses: Sequence[Verdict], *, alone: bool, docs_url: str = OWN_DOCS) -> str:
    """The diagnoses as text, in the given order. `alone`: there is one target, which is shown in
    full."""
    render = partial(markdown if form == MARKDOWN else _text, docs_url=docs_url)
    if alone or len(diagnoses) <= 1:
        return render(diagnoses)
    trouble = [each for each in diagnoses if rank_of(each.health) >= PROBLEM_FROM_RANK]
    healthy = [each for each in diagnoses if rank_of(each.health) < PROBLEM_FROM_RANK]
    in_full = trouble if form == MARKDOWN or len(trouble) <= FULL_MAX else trouble[:1]
    full = render(in_full)
    if form != MARKDOWN and len(full) > FULL_CHARS and len(diagnoses) > FULL_MAX:
        in_full = trouble[:1]
        full = render(in_full)
    parts = [full] if full else []
    if in_short := trouble[len(in_full) :]:
        pairs = ((_brief(diagnosis), *_first_step(diagnosis)) for diagnosis in in_short)
        parts.append("\n".join(chain.from_iterable(pairs)))
    if healthy:
        lines = [_brief(diagnosis) for diagnosis in healthy]
        if form == MARKDOWN:
            lines = ["## OK", "", *(f"- {escaped(line)}" for line in lines)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def head(
    form: str,
    diagnoses: Sequence[Verdict],
    *,
    t_s: float,
    past: bool,
    late: Sequence[tuple[str, float]],
    pending: Mapping[str, str],
    notices: Sequence[str] = (),
) -> str:
    """The first lines: the time, the number of engines by health, and targets without data.

    `late` are names of targets with the seconds since their newest scrape. `pending` maps targets
    without a scrape to the reason. `notices` are problems of kneewatch itself.
    """
    tally = counted_words(diagnosis.health for diagnosis in diagnoses)
    when = f"{date(t_s)} {clock(t_s)} UTC{' (the past)' if past else ''}"
    lines = [f"{when}: {tally or _nothing(len(pending), past=past)}"]
    lines += [f"no scrape of {name} for {span(age_s)}: its last state may be out of date; "
              "durations end at that scrape"
              for name, age_s in late]  # fmt: skip
    lines += notices
    lines += [
        f"not scraped yet, so its state is unknown: {name}; {awaited}"
        for name, awaited in pending.items()
    ]
    if form == MARKDOWN:
        return "\n\n".join([f"# {lines[0]}", *(escaped(line) for line in lines[1:])])
    return "\n".join(part for line in lines for part in wrapped(line))


def _nothing(pending: int, *, past: bool) -> str:
    if past:
        return "no data"
    if not pending:
        return "no target is watched"
    return f"waiting for the first scrape of {plural(pending, 'target')}"


def past(form: str, intervals: Sequence[EngineInterval], *, since_s: float, t_s: float) -> str:
    """The history as text: the newest intervals of stages, causes and health, oldest first."""
    rows = [_interval(row, t_s) for row in intervals[-LINES:]]
    title = f"since {moment(since_s, t_s)}"
    if not rows:
        rows = ["no stored data of that time"]
    if len(intervals) > LINES:
        rows.insert(0, f"{len(intervals) - LINES} earlier rows are not shown (?format=json)")
    if form == MARKDOWN:
        return "\n".join([f"## {title.capitalize()}", "", *(f"- {escaped(row)}" for row in rows)])
    return "\n".join([f"{title}:", *(part for row in rows for part in wrapped(row, indent=3))])


def _text(diagnoses: Sequence[Verdict], *, docs_url: str) -> str:
    # `text` sorts by severity, which does not rank unknown above ok.
    groups: dict[int, list[Verdict]] = {}
    for diagnosis in diagnoses:
        groups.setdefault(rank_of(diagnosis.health), []).append(diagnosis)
    return "\n\n".join(text(group, Style(docs_url=docs_url)) for group in groups.values())


def _brief(diagnosis: Verdict) -> str:
    number = diagnosis.stage.number
    stage = "stage ?" if number is None else f"stage {number}"
    causes = [cause.id for cause in diagnosis.causes]
    notes = [finding.rule for finding in notable(diagnosis, "info")]
    line = f"{diagnosis.health.upper():8} {stage}  {who(diagnosis)}  "
    line += f"{', '.join(causes + notes)}  " if causes or notes else ""
    return cut(line + brief_words(diagnosis, WIDTH - len(line))).rstrip()


def _first_step(diagnosis: Verdict) -> list[str]:
    """One line: the first step against the engine's first cause, or why /metrics was not read.

    The line is cut to WIDTH characters. The list is empty if the engine was read and has no cause.
    """
    if not diagnosis.was_read:
        why = diagnosis.causes[0].summary if diagnosis.causes else stage_unknown(diagnosis)
        return [cut(f"{INDENT}{why}")]
    if not diagnosis.causes:
        return []
    return [cut(f"{INDENT}{first_step(diagnosis, diagnosis.causes[0])}")]


def _interval(row: EngineInterval, t_s: float) -> str:
    engine, interval = row
    end = "now" if interval.end_s is None else moment(interval.end_s, t_s)
    what = interval.id if interval.kind == "cause" else f"{interval.kind} {interval.id}"
    if interval.kind == "stage" and interval.id.isdecimal() and int(interval.id) < len(NAMES):
        what += f" {NAMES[int(interval.id)]}"
    word = interval.severity.word
    severity = f" ({word})" if word not in ("ok", interval.id) else ""
    how = {"restarted": "; the engine was restarted", "unwatched": "; then it was not watched"}
    lasted = span((t_s if interval.end_s is None else interval.end_s) - interval.start_s)
    return printable(
        f"{moment(interval.start_s, t_s)} to {end} ({lasted}): {what}{severity}, {engine.target} "
        f"engine {engine.engine or '?'}{how.get(interval.ended, '')}"
    )


# --- The view model of the triage page, from the board and the store ------------------------------


REFRESH_S = 5.0
NO_HISTORY = "No history is stored, or it cannot be read: timeline and charts are missing."
NO_PAST = "the history cannot be read"
NOT_THEN = "nothing is stored of that moment"
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
        verdicts, cannot = list[Verdict](), ""
        try:
            verdicts = self._history.verdicts(self._engines, self.request.moment_s)
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
                views.append(self._without(name, cannot or self._nothing_then(name)))
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
