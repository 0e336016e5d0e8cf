"""The OpenAPI document and the page made of it."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from kneewatch.agent.api.app import make_app
from kneewatch.collector.packaged import packaged_tables
from tests.agent.api.serving import SICK_STATE, asking, service_of

HIDDEN = {
    "/",
    "/triage/{target:path}",
    "/openapi.json",
    "/docs",
    "/docs/reference.css",
    "/docs/glossary",
    "/docs/{folder}/{name}",
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The document as it is served."""
    with asking(service_of(SICK_STATE)) as client:
        return cast("dict[str, Any]", client.get("/openapi.json").json())


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every operation with its name."""
    return [
        (f"{method} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_route_is_in_it_or_hidden_on_purpose(document: dict[str, Any]) -> None:
    routes = [route for route in make_app(service_of()).routes if isinstance(route, APIRoute)]
    there = {
        (route.path_format, method.lower())
        for route in routes
        if route.path not in HIDDEN
        for method in route.methods or ()
    }
    documented = {
        (path, method) for path, methods in document["paths"].items() for method in methods
    }
    assert documented == there


def test_every_endpoint_of_the_table_is_served(document: dict[str, Any]) -> None:
    stated = packaged_tables("agent.api", "endpoints.toml").keys() - {"parameters"}
    # The fleet's is served where a fleet is watched.
    assert stated - {"path_parameters", "/api/v1/fleet"} == document["paths"].keys()


def test_every_body_and_answer_has_an_example_that_matches_its_schema(
    document: dict[str, Any],
) -> None:
    for name, operation in operations(document):
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for body in (*bodies, operation["responses"]["200"]):
            assert body["content"], name
            for kind, content in body["content"].items():
                if kind == "text/html":
                    continue
                schema = {**content["schema"], "components": document["components"]}
                Draft202012Validator.check_schema(schema)
                validator: Any = Draft202012Validator(schema)
                errors = [error.message for error in validator.iter_errors(content["example"])]
                assert errors == [], name


def test_every_refusal_is_a_problem_document(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        for status, answer in operation["responses"].items():
            if status in ("200", "307") or (status == "503" and "/api/" not in name):
                continue
            schema = answer["content"]["application/problem+json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Problem"}, (name, status)
            assert ("text/html" in answer["content"]) == ("/api/" not in name), (name, status)


def test_every_operation_and_parameter_says_what_it_is(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, operation in operations(document)]
    assert len(ids) == len(set(ids))
    for name, operation in operations(document):
        assert operation["description"], name
        assert "default" in operation["responses"], name
        for parameter in operation.get("parameters", []):
            assert parameter["description"], parameter["name"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = set(re.findall(r"'\$ref': '([^']+)'", str(document)))
    assert len(names) > 5
    for name in names:
        place: Any = document
        for part in name.removeprefix("#/").split("/"):
            place = place[part]
        assert place


def test_the_page_needs_nothing_from_elsewhere() -> None:
    with asking(service_of(SICK_STATE)) as client:
        page = client.get("/docs")
        style = client.get("/docs/reference.css")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert style.headers["content-type"] == "text/css; charset=utf-8"
    assert "<script" not in page.text
    assert "style=" not in page.text
    links = re.findall(r'(?:href|src)="([^"]*)"', page.text)
    pages = ["docs/causes/index", "docs/reference.css", "docs/rules/index"]
    assert sorted(links) == ["data:,", *pages, "openapi.json", "triage"]
    assert "url(" not in style.text
    for path in ("/api/v1/triage/{target}", "/api/v1/size", "/api/v1/alerts", "/metrics"):
        assert path in page.text
