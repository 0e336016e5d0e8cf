"""HTTP endpoint, `/api/v1/triage`: the diagnoses of targets, now or at any time in the store, as
text, JSON and Markdown. I/O edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Any
from urllib.parse import urlencode

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
    damage_notices,
    history_reach,
    interval_document,
    late,
    shown,
    worst_first,
)
from kneewatch.agent.store.records import StoredEngine
from kneewatch.agent.target_state import TargetState, watching
from kneewatch.diagnose.doc_links import OWN_DOCS, linked
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
from kneewatch.rules.cascade import NAMES
from kneewatch.rules.formatting import clock, date, plural, span

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
            verdicts, damaged = history.verdicts(stored, moment_s)
            notices = [*damage_notices(damaged), *notices]
            if not verdicts and not intervals:
                raise _nothing_then(stored, damaged, notices)
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


def _nothing_then(
    engines: Sequence[StoredEngine], damaged: Sequence[str], notices: Sequence[str]
) -> Problem:
    if not engines:
        return Problem(HTTPStatus.NOT_FOUND, "; ".join(["nothing is stored yet", *notices]))
    if damaged:
        lines = [*notices, history_reach(engines)]
    elif notices:
        lines = ["no data at that moment", history_reach(engines), *notices]
    else:
        lines = ["nothing was watched at that moment", history_reach(engines)]
    return Problem(HTTPStatus.NOT_FOUND, "; ".join(lines))


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
