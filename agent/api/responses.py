"""Response formats, chosen by `?format=` or the Accept header, and errors as RFC 9457 problems."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import cast
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from kneewatch.collector.spelling import did_you_mean
from kneewatch.rules.formatting import as_sentence, listed

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
