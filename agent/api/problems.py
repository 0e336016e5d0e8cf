"""What is wrong with a request, as RFC 9457's JSON: a title, what to do about it, and nothing of
how kneewatch is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import cast
from urllib.parse import quote

import orjson
from starlette.responses import Response

PROBLEM_TYPE = "application/problem+json"
LONGEST = 2000
NAMES_SHOWN = 20
NO_SUCH = "there is no such target"


class Problem(Exception):  # noqa: N818 - the RFC's word
    """A request that is refused. `detail` is for the person who made it, and is shown to them;
    where that is in names that would have done, a page shows `brief` and links to the `known`."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        headers: Mapping[str, str] | None = None,
        *,
        brief: str = "",
        known: Sequence[str] = (),
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers or {}
        self.brief, self.known = brief or detail[:LONGEST], known


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
    """The problem of a target that is not known, with those that are as they stand in addresses."""
    known = ", ".join(quote(clean(name), safe="") for name in names[:NAMES_SHOWN]) or "none"
    more = len(names) - NAMES_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    told = f"{NO_SUCH}; there are: {known}{rest}"
    return Problem(HTTPStatus.NOT_FOUND, told, brief=NO_SUCH, known=names)


def dumped(document: object) -> bytes:
    """JSON of a document, whose texts may hold what UTF-8 cannot: half a surrogate pair."""
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError:
        return orjson.dumps(_clean(document))


def clean(text: str) -> str:
    """Text that UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _clean(value: object) -> object:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return {clean(str(key)): _clean(told) for key, told in pairs.items()}
    if isinstance(value, list | tuple):
        return [_clean(told) for told in cast("Sequence[object]", value)]
    return value
