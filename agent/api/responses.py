"""What a request asks for (format, target, times), and refusals: errors are RFC 9457 problems.

Parameters are any text for FastAPI. The endpoints check the values themselves, so that an error
message can show what to write instead. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, cast
from urllib.parse import quote

import msgspec
from fastapi import Query
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Scope

from kneewatch.agent.settings.table import UNITS_S
from kneewatch.collector.spelling import did_you_mean
from kneewatch.rules.formatting import as_sentence, listed, stamp

PROBLEM_TYPE = "application/problem+json"
COMPONENTS = "#/components/schemas/"
"""The place of schemas in the OpenAPI document."""

LONGEST, LONGEST_NAME = 2000, 200
NAMES_SHOWN = 20
NO_SUCH = "no such target"


class Problem(Exception):  # noqa: N818 - the RFC's word
    """An error response to a request. `detail` is shown to the client.

    An HTML page shows `brief` instead of `detail`, with links to the targets in `target_names`.
    """

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        headers: Mapping[str, str] | None = None,
        *,
        brief: str = "",
        target_names: Sequence[str] = (),
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers or {}
        self.brief, self.target_names = brief or detail[:LONGEST], target_names


def response_of(problem: Problem) -> Response:
    """The problem as a response."""
    document = {
        "type": "about:blank",
        "title": problem.status.phrase,
        "status": problem.status.value,
        "detail": problem.detail[:LONGEST],
    }
    return Response(
        dumped(document) + b"\n",
        status_code=problem.status,
        headers=dict(problem.headers),
        media_type=PROBLEM_TYPE,
    )


def no_such_target(names: Sequence[str]) -> Problem:
    """The problem for an unknown target. It lists the valid names, URL-encoded."""
    shown = listed([quote(clean(name), safe="") for name in names], NAMES_SHOWN) or "none"
    detail = f"{NO_SUCH}; watched targets: {shown}"
    return Problem(HTTPStatus.NOT_FOUND, detail, brief=NO_SUCH, target_names=names)


def unknown_parameter(name: str, valid_names: Collection[str]) -> Problem:
    """The problem for a query parameter that the route does not have. It lists the valid names."""
    otherwise = "/docs lists the parameters"
    way_out = did_you_mean(name, valid_names, otherwise) if valid_names else "there are none here"
    detail = f"unknown parameter {clean(name[:LONGEST_NAME])!r}; {way_out}"
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail)


def dumped(document: object) -> bytes:
    """A document as JSON bytes; it may contain records. Lone surrogates, which UTF-8 cannot
    encode, become "?"."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_clean(msgspec.to_builtins(document)))


def clean(text: str) -> str:
    """The text with lone surrogates replaced by "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _clean(value: object) -> object:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return {clean(str(key)): _clean(item) for key, item in pairs.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in cast("Sequence[object]", value)]
    return value


# --- Format of an answer --------------------------------------------------------------------------


TEXT, JSON, MARKDOWN, HTML = "text", "json", "markdown", "html"

MEDIA_TYPES: Mapping[str, str] = {
    TEXT: "text/plain; charset=utf-8",
    JSON: "application/json",
    MARKDOWN: "text/markdown; charset=utf-8",
    HTML: "text/html; charset=utf-8",
}
BY_TYPE: Mapping[str, str] = {
    media_type.partition(";")[0]: form for form, media_type in MEDIA_TYPES.items()
}
BY_FAMILY: Mapping[str, str] = {"*/*": TEXT, "text/*": TEXT, "application/*": JSON}
RANGES_MAX = 32


def form_of(
    requested: str | None, accept: str | None, forms: Sequence[str] = tuple(MEDIA_TYPES)
) -> str:
    """The format of the response, one of `forms`: by `?format=`, else by the Accept header. The
    first one for clients that accept everything, such as `curl`.

    Raises:
        Problem: the format is unknown, or the client accepts none of `forms`.
    """
    if requested is not None:
        if requested not in forms:
            raise Problem(
                HTTPStatus.UNPROCESSABLE_ENTITY, f"format must be one of {', '.join(forms)}"
            )
        return requested
    if not accept or not accept.strip():
        return forms[0]
    best, best_rank = None, (0.0, 0)
    for position, part in enumerate(accept.split(",")[:RANGES_MAX]):
        media, _, parameters = part.strip().lower().partition(";")
        rank = (_quality(parameters), -position)
        form = _form(media.strip(), forms)
        if form is not None and rank[0] > 0 and (best is None or rank > best_rank):
            best, best_rank = form, rank
    if best is None:
        offered = ", ".join(MEDIA_TYPES[form].partition(";")[0] for form in forms)
        raise Problem(HTTPStatus.NOT_ACCEPTABLE, f"no acceptable format: available are {offered}")
    return best


def _form(media: str, forms: Sequence[str]) -> str | None:
    form = BY_TYPE.get(media)
    if form is None and media in BY_FAMILY:
        form = BY_FAMILY[media] if BY_FAMILY[media] in forms else None
        form = forms[0] if media == "*/*" else form
    return form if form in forms else None


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0


# --- Refusals -------------------------------------------------------------------------------------


API = "/api/"
"""Prefix of paths for programs. Their errors are always JSON, even for browsers."""

ROOT = "../"


def refused(problem: Problem, scope: Scope) -> Response:
    """The response for a problem: an HTML page for browsers, RFC 9457 JSON for other clients."""
    if scope["path"].startswith(API) or not _wants_page(scope):
        return response_of(problem)
    # Lazy: jinja2 stays out of the daemon until a browser asks.
    from kneewatch.reports.triage import page

    html = page.refusal(
        status=problem.status.value,
        title=problem.status.phrase,
        words=as_sentence(problem.brief),
        names=problem.target_names[:NAMES_SHOWN],
        more=max(0, len(problem.target_names) - NAMES_SHOWN),
        up=ROOT * (scope.get("raw_path", b"/").count(b"/") - 1),
    )
    return Response(
        clean(html),
        status_code=problem.status,
        headers=dict(problem.headers),
        media_type=MEDIA_TYPES[HTML],
    )


def _wants_page(scope: Scope) -> bool:
    accept = ",".join(
        value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"
    )
    try:
        return form_of(None, accept, (JSON, HTML)) == HTML
    except Problem:
        return False


# --- Query parameters ----------------------------------------------------------------------------


TRIAGE_FORMS = (TEXT, JSON, MARKDOWN, HTML)
Unavailable = Annotated[str | None, Query(include_in_schema=False)]
"""A parameter that an endpoint accepts only to answer why it is not available."""


class Asked(Struct, frozen=True):
    """What a request about diagnoses asks for.

    `target` is empty for all targets, `at_s` None for now, `since_s` the start of the history; None
    without one. On the page, `since` is the length of the timeline, a key of SINCE, and `notices`
    are mistakes in the parameters.
    """

    target: str
    now_s: float
    at_s: float | None
    since_s: float | None
    since: str = ""
    notices: tuple[str, ...] = ()

    @property
    def moment_s(self) -> float:
        """The moment, in Unix seconds."""
        return self.now_s if self.at_s is None else self.at_s


def asked(now_s: float, target: str, at: str | None, since: str | None) -> Asked:
    """The parameters of a request.

    Raises:
        Problem: a time is wrong.
    """
    at_s = moment("at", at, now_s=now_s) if at else None
    before_s = now_s if at_s is None else at_s
    since_s = moment("since", since, now_s=now_s, before_s=before_s) if since else None
    return Asked(target, now_s, at_s, since_s)


# --- Times: unix seconds, ISO 8601, a time of day, or a duration ago ------------------------------


SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")
AGO = re.compile(r"-?([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])")
DAY_TIME = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?Z?")
LOST_PLUS = re.compile(r"(.+[T ][0-9:.]+) ([0-9]{2}:?[0-9]{2})")
"""A time whose "+" was lost: in a query string "+" means a space unless it is encoded as %2B."""

LONGEST_TIME = 40
AHEAD_S = 60.0
"""Seconds by which a time may be in the future, because clocks differ. A later time is an error."""

SYNTAX = (
    "write unix seconds (1795219600), ISO 8601 (2026-11-21T03:07:00Z), a time of day in UTC "
    "(03:07) or how long ago (-2h; units s, m, h, d, w)"
)


def moment(name: str, text: str, *, now_s: float, before_s: float | None = None) -> float:
    """Parse a time parameter. Returns Unix seconds.

    A duration counts back from `before_s` (default: now). A time without a zone is UTC.

    Raises:
        Problem: the text is no time, or the time is in the future or after `before_s`.
    """
    end_s = now_s if before_s is None else before_s
    t_s = _parsed(text.strip(), end_s) if len(text) <= LONGEST_TIME else None
    if t_s is None:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} is not a time: {SYNTAX}")
    if t_s > now_s + AHEAD_S:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"{name} is in the future: the time here is {stamp(now_s)}; omit {name} for the "
            "present",
        )
    if before_s is not None and t_s > before_s:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} must be before the requested moment"
        )
    return t_s


def _parsed(text: str, end_s: float) -> float | None:
    if SECONDS.fullmatch(text):
        return float(text)
    if ago := AGO.fullmatch(text):
        return max(0.0, end_s - float(ago[1]) * UNITS_S[ago[2]])
    if clock := DAY_TIME.fullmatch(text):
        return _time_of_day(end_s, int(clock[1]), int(clock[2]), int(clock[3] or 0))
    lost = LOST_PLUS.fullmatch(text)
    return _iso_moment(f"{lost[1]}+{lost[2]}" if lost else text)


def _time_of_day(end_s: float, hour: int, minute: int, second: int) -> float:
    """The last time at or before `end_s` with this time of day, in Unix seconds."""
    end = datetime.fromtimestamp(end_s, tz=UTC)
    moment = end.replace(hour=hour, minute=minute, second=second, microsecond=0)
    return (moment if moment <= end else moment - timedelta(days=1)).timestamp()


def _iso_moment(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
        t_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return t_s if math.isfinite(t_s) and t_s >= 0 else None
