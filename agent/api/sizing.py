"""`/api/v1/size`: `kneewatch size` over HTTP. Requests cannot open files: a model is a catalogue
id, and flags that name files are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

import click
import orjson
from starlette.requests import Request

from kneewatch.agent.api.responses import JSON, MEDIA_TYPES, Problem
from kneewatch.agent.settings.effective import nearest
from kneewatch.agent.settings.options import SPAN
from kneewatch.agent.size.options import FLAGS, SWITCHES, Flag
from kneewatch.diagnose.catalogue.inputs import SizingError

NOT_IN_CATALOGUE = "must be a model in the catalogue"
LONGEST_TEXT = 200
LARGEST = 1e12
"""The largest number accepted; larger values are mistakes and could overflow."""

WHOLE = re.compile(r"-?[0-9]{1,15}")
BOOLEANS = {"": True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parameter(flag: str) -> str:
    """A flag's name in JSON: no leading dashes, underscores inside."""
    return flag.removeprefix("--").replace("-", "_")


FILE_FLAGS = frozenset(parameter(flag.name) for flag in FLAGS if flag.names_file)
"""Flags that name a file on the user's machine; a client must not read files of the server."""

BY_NAME: Mapping[str, Flag] = {
    parameter(flag.name): flag for flag in FLAGS if parameter(flag.name) not in FILE_FLAGS
}
SWITCH_NAMES = frozenset(parameter(name) for name, _ in SWITCHES)
DEFAULTS: Mapping[str, Any] = {
    **{parameter(flag.name): flag.default for flag in FLAGS},
    **dict.fromkeys(SWITCH_NAMES, False),
}


async def json_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        Problem: the body has another content type or is no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPES[JSON]:
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send a JSON object as content-type application/json"
        )
    try:
        document = orjson.loads(await request.body())
    except orjson.JSONDecodeError as exc:
        raise Problem(HTTPStatus.BAD_REQUEST, "the body is not valid JSON") from exc
    if not isinstance(document, dict):
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the body must be a JSON object")
    return cast("dict[str, Any]", document)


async def parameters_of(request: Request) -> dict[str, Any]:
    """The parameters of a request, from its body or its query string, underscores in the names.

    Raises:
        Problem: a parameter is given twice, or the body is no JSON object.
    """
    if request.method == "POST":
        rows = list((await json_object(request)).items())
    else:
        rows = request.query_params.multi_items()
    parameters: dict[str, Any] = {}
    for name, value in rows:
        key = name.replace("-", "_")
        if key in parameters and request.method != "POST":
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{key} is given twice")
        parameters[key] = value
    return parameters


def _value(name: str, value: object) -> object:
    """A parameter's value, converted as on the command line."""
    if name in FILE_FLAGS:
        raise _wrong(name, "requests cannot name files; use `kneewatch size`")
    if name in SWITCH_NAMES:
        return boolean(name, value)
    flag = BY_NAME.get(name)
    if flag is None:
        near = nearest(name[:LONGEST_TEXT], (*BY_NAME, *SWITCH_NAMES))
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"unknown parameter; the nearest is {near}")
    if value is None:
        return flag.default
    if flag.kind is SPAN:
        return _span(name, value)
    return _text(name, value) if flag.kind is str else _number(name, value, whole=flag.kind is int)


def boolean(name: str, value: object) -> bool:
    """A boolean parameter's value; in a query string its name alone is true.

    Raises:
        Problem: the value is no boolean.
    """
    truth = BOOLEANS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(truth, bool):
        raise _wrong(name, "must be true or false")
    return truth


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= LONGEST_TEXT:
        raise _wrong(name, f"must be text of at most {LONGEST_TEXT} characters")
    return value


def _number(name: str, value: object, *, whole: bool) -> float:
    number = _float(value, whole=whole)
    if number is None or (whole and number != int(number)):
        raise _wrong(name, f"must be a {'whole ' if whole else ''}number")
    return int(number) if whole else number


def _float(value: object, *, whole: bool) -> float | None:
    """The value as a finite number of at most `LARGEST`; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, str) and whole and not WHOLE.fullmatch(value.strip()):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def _span(name: str, value: object) -> float:
    try:
        seconds = SPAN.convert(value, None, None)
    except click.UsageError:
        seconds = math.inf
    number = _float(seconds, whole=False)
    if number is None or isinstance(value, bool):
        raise _wrong(name, "must be a duration: seconds, or with a unit such as 2s or 50ms")
    return number


def size_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document kneewatch.size/1 for parameters by name.

    Raises:
        Problem: a parameter is unknown or invalid.
    """
    given = {**DEFAULTS, **{name: _value(name, value) for name, value in parameters.items()}}
    # Imported here to save memory: most daemons never compute a size.
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
            raise SizingError(NOT_IN_CATALOGUE, name="model", choices=error.choices) from error

    if given["model"] is None:
        raise _wrong("model", NOT_IN_CATALOGUE)
    try:
        question = asked(given, None, catalogued)
        if not given["search"]:
            return size_document(size(question))
        result = search(question, choices_of(given))
        extra = {"search": document(result)}
        if result.winner is None:
            return nothing_document(extra)
        return size_document(size(question_of(question, result.winner))) | extra
    except SizingError as error:
        raise _unsized(error) from error


def _unsized(error: SizingError) -> Problem:
    choices = f"; choices: {', '.join(error.choices)}" if error.choices else ""
    return _wrong(error.name, f"{error}{choices}")


def _wrong(name: str, why: str) -> Problem:
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name}: {why}")
