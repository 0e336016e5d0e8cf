"""`/api/v1/size`: the question of `kneewatch size`, asked by request. Nothing that a request names
is opened: a model is a catalogue id, and flags that name files are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, cast

import click
import orjson
from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.responses import Response

from kneewatch.agent.api.responses import JSON, MEDIA_TYPES, Problem, dumped
from kneewatch.agent.settings.options import SPAN
from kneewatch.agent.size.options import FLAGS, SWITCHES, Flag
from kneewatch.diagnose.catalogue.inputs import SizingError

NOT_KNOWN = "must be a model of the catalogue"
LONGEST_TEXT = 200
LARGEST = 1e12
"""More of anything is a slip of the pen, and would only show where floats end."""

WHOLE = re.compile(r"-?[0-9]{1,15}")
TRUTHS = {"": True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parameter(flag: str) -> str:
    """A flag's name in JSON: without dashes in front, with underscores within."""
    return flag.removeprefix("--").replace("-", "_")


FILES = frozenset(parameter(flag.name) for flag in FLAGS if flag.names_file)
"""Flags that name a file of the user's; a request's user is another one."""

BY_NAME: Mapping[str, Flag] = {
    parameter(flag.name): flag for flag in FLAGS if parameter(flag.name) not in FILES
}
SWITCH_NAMES = frozenset(parameter(name) for name, _ in SWITCHES)
DEFAULTS: Mapping[str, Any] = {
    **{parameter(flag.name): flag.default for flag in FLAGS},
    **dict.fromkeys(SWITCH_NAMES, False),
}


class Sizes:
    """Answers, one at a time: a search is a third of a second's arithmetic."""

    def __init__(self) -> None:
        self._one = CapacityLimiter(1)

    async def __call__(self, request: Request) -> Response:
        """The answer to a request.

        Raises:
            Problem: a parameter that is not known or cannot be, or a body that is no JSON object.
        """
        if request.method == "POST":
            given = await _body(request)
        else:
            given = _query(request)
        told = await to_thread.run_sync(size_of, given, limiter=self._one)
        return Response(dumped(told), media_type=MEDIA_TYPES[JSON])


async def json_object(request: Request) -> dict[str, Any]:
    """The JSON object that a request carries.

    Raises:
        Problem: it is of another type, or no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPES[JSON]:
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send a JSON object as content-type application/json"
        )
    try:
        found = orjson.loads(await request.body())
    except orjson.JSONDecodeError as exc:
        raise Problem(HTTPStatus.BAD_REQUEST, "the body is no JSON") from exc
    if not isinstance(found, dict):
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the body must be a JSON object")
    return cast("dict[str, Any]", found)


async def _body(request: Request) -> dict[str, Any]:
    return {name.replace("-", "_"): told for name, told in (await json_object(request)).items()}


def _query(request: Request) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, told in request.query_params.multi_items():
        key = name.replace("-", "_")
        if key in given:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{key} is given twice")
        given[key] = told
    return given


def _value(name: str, told: object) -> object:
    """A parameter's value, as the command line would have it."""
    if name in FILES:
        raise _wrong(name, "names a file, which requests may not; use `kneewatch size`")
    if name in SWITCH_NAMES:
        truth = TRUTHS.get(told.lower()) if isinstance(told, str) else told
        if not isinstance(truth, bool):
            raise _wrong(name, "must be true or false")
        return truth
    flag = BY_NAME.get(name)
    if flag is None:
        near = get_close_matches(name[:LONGEST_TEXT], (*BY_NAME, *SWITCH_NAMES), n=1, cutoff=0.0)
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"there is no such parameter; the nearest is {near[0]}"
        )
    if told is None:
        return flag.default
    if flag.kind is SPAN:
        return _span(name, told)
    return _text(name, told) if flag.kind is str else _number(name, told, whole=flag.kind is int)


def _text(name: str, told: object) -> str:
    if not isinstance(told, str) or not told.isprintable() or not 0 < len(told) <= LONGEST_TEXT:
        raise _wrong(name, f"must be text of at most {LONGEST_TEXT} characters")
    return told


def _number(name: str, told: object, *, whole: bool) -> float:
    number = _float(told, whole=whole)
    if number is None or (whole and number != int(number)):
        raise _wrong(name, f"must be a {'whole ' if whole else ''}number")
    return int(number) if whole else number


def _float(told: object, *, whole: bool) -> float | None:
    """The number that was meant, if one was and it is no larger than any can be."""
    if isinstance(told, bool) or not isinstance(told, str | int | float):
        return None
    if isinstance(told, str) and whole and not WHOLE.fullmatch(told.strip()):
        return None
    try:
        number = float(told)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def _span(name: str, told: object) -> float:
    try:
        seconds = SPAN.convert(told, None, None)
    except click.UsageError:
        seconds = math.inf
    found = _float(seconds, whole=False)
    if found is None or isinstance(told, bool):
        raise _wrong(name, "must be a duration: seconds, or such as 2s or 50ms")
    return found


def size_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document kneewatch.size/1 for parameters by name.

    Raises:
        Problem: one is not known or cannot be.
    """
    given = {**DEFAULTS, **{name: _value(name, told) for name, told in parameters.items()}}
    # Here, so that a daemon that nobody asks does not carry the arithmetic.
    from kneewatch.agent.size.inputs import asked, choices_of
    from kneewatch.diagnose.catalogue.models import Model, model
    from kneewatch.diagnose.sizing.configuration_search import search
    from kneewatch.diagnose.sizing.search_results import document, question_of
    from kneewatch.diagnose.sizing.size import size
    from kneewatch.reports.size_json import nothing_document, size_document

    def catalogued(name: str) -> Model:
        try:
            return model(name)
        except SizingError as error:
            raise SizingError(NOT_KNOWN, name="model", choices=error.choices) from error

    if given["model"] is None:
        raise _wrong("model", NOT_KNOWN)
    try:
        question = asked(given, None, catalogued)
        if not given["search"]:
            return size_document(size(question))
        found = search(question, choices_of(given))
        extra = {"search": document(found)}
        if found.winner is None:
            return nothing_document(extra)
        return size_document(size(question_of(question, found.winner))) | extra
    except SizingError as error:
        raise _unsized(error) from error


def _unsized(error: SizingError) -> Problem:
    choices = f"; choices: {', '.join(error.choices)}" if error.choices else ""
    return _wrong(error.name, f"{error}{choices}")


def _wrong(name: str, why: str) -> Problem:
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name}: {why}")
