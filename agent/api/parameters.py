"""The types of path and query parameters, for the signatures of endpoints.

FastAPI documents them and passes any text on: the endpoints check it, because their errors say what
to write instead.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import WithJsonSchema

from kneewatch.agent.api.responses import HTML, JSON, MARKDOWN, TEXT
from kneewatch.agent.api.sizing import BOOLEANS

TRIAGE_FORMS = (TEXT, JSON, MARKDOWN, HTML)
FLEET_FORMS = (TEXT, JSON, MARKDOWN)
TARGET_EXAMPLE = "http://gpu-7:8000"
AT_EXAMPLES = ("03:07", "2026-11-21T03:07:00Z", "1795219620", "-2h")


def _documented(description: str, *examples: str) -> Any:  # noqa: ANN401 - as FastAPI's Query
    return Query(description=description, openapi_examples=_examples(*examples) or None)


def _examples(*values: str) -> dict[str, Any]:
    return {value: {"value": value} for value in values}


Text = Annotated[str | None, WithJsonSchema({"type": "string"})]
Time = Annotated[str | None, WithJsonSchema({"type": "string", "maxLength": 40})]

TargetPath = Annotated[
    str,
    Path(
        description="A target's name, %-encoded.",
        json_schema_extra={"minLength": 1},
        openapi_examples=_examples(TARGET_EXAMPLE),
    ),
]
At = Annotated[
    Time,
    _documented(
        "A past moment: unix seconds, ISO 8601 (UTC without a zone), a time of day in UTC, or how "
        "long ago. Default: now.",
        *AT_EXAMPLES,
    ),
]
Since = Annotated[
    Time,
    _documented(
        "Adds the stages, causes and health from this time to the moment; a duration counts back "
        "from `at`.",
        "-2h",
        "01:00",
    ),
]
TriageFormat = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "enum": TRIAGE_FORMS}),
    _documented(
        "Overrides the Accept header. Clients that accept anything get text; html redirects to the "
        "page.",
        JSON,
    ),
]
FleetFormat = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "enum": FLEET_FORMS}),
    _documented("Overrides the Accept header. Clients that accept anything get text.", JSON),
]
Unavailable = Annotated[str | None, Query(include_in_schema=False)]
"""A parameter that is accepted only to explain why it is refused."""

Strict = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "enum": list(BOOLEANS)}),
    _documented("Ready only if every source works: for alerts, not for a readiness probe."),
]
PageTarget = Annotated[Text, _documented("A target's name. Default: all targets.", TARGET_EXAMPLE)]
PageAt = Annotated[
    Text, _documented("A past moment; the page shows an error if it is invalid.", *AT_EXAMPLES)
]
PageSince = Annotated[Text, _documented("Length of the timeline.", "3h", "24h")]
