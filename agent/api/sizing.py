"""HTTP endpoint, `/api/v1/size`: the same as `kneewatch size`. Pure.

Requests cannot open files: a model is a catalogue id, and flags that name files are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

import click
import orjson
from starlette.requests import Request

from kneewatch.agent.api.responses import JSON, MEDIA_TYPES, Problem, unknown_parameter
from kneewatch.agent.settings.table import COUNT, KINDS, SIZE_FLAGS, SPAN
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.deployment.vllm_flags import Flag

NOT_IN_CATALOGUE = "must be a model in the catalogue"
LONGEST_TEXT = 200
LARGEST = 1e12
"""The largest number that is accepted. Larger values are mistakes and could overflow."""

BOOLEANS = {"": True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
FITTING: Mapping[object, str] = {
    bool: "true or false",
    str: f"text of at most {LONGEST_TEXT} characters",
    COUNT: "a whole number",
    float: "a number",
    SPAN: "a duration: seconds, or with a unit such as 2s or 50ms",
}
"""What a parameter of each type must be; for error messages."""

FILE_FLAGS = frozenset(flag.parameter for flag in SIZE_FLAGS if flag.names_file)
"""Flags whose value is a file. They are refused, because a client must not read files of the
server."""

BY_NAME: Mapping[str, Flag] = {flag.parameter: flag for flag in SIZE_FLAGS if not flag.names_file}


async def json_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        Problem: the body has another content type or is not a JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPES[JSON]:
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "send a JSON object with content-type: application/json",
        )
    try:
        document = orjson.loads(await request.body())
    except orjson.JSONDecodeError as exc:
        raise Problem(HTTPStatus.BAD_REQUEST, "the body is not valid JSON") from exc
    if not isinstance(document, dict):
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the body must be a JSON object")
    return cast("dict[str, Any]", document)


async def parameters_of(request: Request) -> dict[str, Any]:
    """The parameters of a request, from its body or its query string. Names have underscores
    instead of hyphens.

    Raises:
        Problem: a parameter is given twice, or the body is not a JSON object.
    """
    if request.method == "POST":
        rows = list((await json_object(request)).items())
    else:
        rows = request.query_params.multi_items()
    parameters: dict[str, Any] = {}
    for name, value in rows:
        key = name.replace("-", "_")
        if key in parameters and request.method != "POST":
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{key} is given more than once")
        parameters[key] = value
    return parameters


def _value(name: str, value: object) -> object:
    """The value of a parameter, converted in the same way as on the command line."""
    if name in FILE_FLAGS:
        raise _wrong(name, "requests cannot name files; use `kneewatch size`")
    if name not in BY_NAME:
        raise unknown_parameter(name, BY_NAME)
    flag = BY_NAME[name]
    return flag.default if value is None else converted(name, KINDS[flag.kind], value)


def converted(name: str, kind: object, value: object) -> object:
    """Convert the value of a parameter to its type, one of those in FITTING.

    Raises:
        Problem: the value has another type, cannot be parsed, or is too large.
    """
    try:
        return _converted(kind, value)
    except (ValueError, OverflowError, KeyError, click.UsageError) as exc:
        raise _wrong(name, f"must be {FITTING[kind]}") from exc


def _converted(kind: object, value: object) -> object:
    if kind is bool:
        if isinstance(value, bool | str):
            return value if isinstance(value, bool) else BOOLEANS[value.lower()]
    elif kind is str:
        if isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST_TEXT:
            return value
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        number = _number(kind, value)
        if abs(number) <= LARGEST and (kind is not COUNT or number == int(number)):
            return int(number) if kind is COUNT else number
    raise ValueError


def _number(kind: object, value: str | float) -> float:
    if kind is SPAN:
        return cast("float", SPAN.convert(value, None, None))
    if kind is COUNT and isinstance(value, str):
        return COUNT.convert(value, None, None)
    return float(value)


def size_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document kneewatch.size/1 for the given parameters.

    Raises:
        Problem: a parameter is unknown or invalid.
    """
    given = {flag.parameter: flag.default for flag in SIZE_FLAGS}
    given |= {name: _value(name, value) for name, value in parameters.items()}
    # Imported here to save memory: most daemons never compute a size.
    from kneewatch.agent.size_command import sized
    from kneewatch.diagnose.catalogue.models import Model, model

    def catalogued(name: str) -> Model:
        try:
            return model(name)
        except SizingError as error:
            raise SizingError(NOT_IN_CATALOGUE, name="model", choices=error.choices) from error

    if given["model"] is None and given["launch"] is None:
        raise _wrong("model", NOT_IN_CATALOGUE)
    try:
        return sized(given, catalogued).document()
    except SizingError as error:
        choices = f"; choices: {', '.join(error.choices)}" if error.choices else ""
        raise _wrong(error.name, f"{error}{choices}") from error


def _wrong(name: str, why: str) -> Problem:
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name}: {why}")
