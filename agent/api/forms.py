"""In which form an answer is wanted: `?format=`, else the Accept header. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from kneewatch.agent.api.problems import Problem

TEXT, JSON, MARKDOWN, HTML = "text", "json", "markdown", "html"

MEDIA_TYPES: Mapping[str, str] = {
    TEXT: "text/plain; charset=utf-8",
    JSON: "application/json",
    MARKDOWN: "text/markdown; charset=utf-8",
    HTML: "text/html; charset=utf-8",
}
BY_TYPE: Mapping[str, str] = {told.partition(";")[0]: form for form, told in MEDIA_TYPES.items()}
BY_FAMILY: Mapping[str, str] = {"*/*": TEXT, "text/*": TEXT, "application/*": JSON}
MOST_RANGES = 32


def form_of(
    wanted: str | None, accept: str | None, forms: Sequence[str] = tuple(MEDIA_TYPES)
) -> str:
    """One of `forms`. Whoever takes anything, as curl does, gets the first of them.

    Raises:
        Problem: there is no such form, or none that is accepted.
    """
    if wanted is not None:
        if wanted not in forms:
            raise Problem(
                HTTPStatus.UNPROCESSABLE_ENTITY, f"format must be one of {', '.join(forms)}"
            )
        return wanted
    if not accept or not accept.strip():
        return forms[0]
    best, best_rank = None, (0.0, 0)
    for place, told in enumerate(accept.split(",")[:MOST_RANGES]):
        media, _, parameters = told.strip().lower().partition(";")
        rank = (_quality(parameters), -place)
        form = _form(media.strip(), forms)
        if form is not None and rank[0] > 0 and (best is None or rank > best_rank):
            best, best_rank = form, rank
    if best is None:
        offered = ", ".join(MEDIA_TYPES[form].partition(";")[0] for form in forms)
        raise Problem(HTTPStatus.NOT_ACCEPTABLE, f"this can be had as {offered}")
    return best


def _form(media: str, forms: Sequence[str]) -> str | None:
    form = BY_TYPE.get(media)
    if form is None and media in BY_FAMILY:
        form = BY_FAMILY[media] if BY_FAMILY[media] in forms else None
        form = forms[0] if media == "*/*" else form
    return form if form in forms else None


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, told = parameter.strip().partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(told)))
            except ValueError:
                return 0.0
    return 1.0
