"""What the OpenAPI document promises, asked with hundreds of requests of every shape, valid and
not, on a real socket.

That all valid requests succeed is not promised: no schema says which model is in the catalogue,
which moment is in the history, or which length a model can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks as openapi_checks

from tests.agent.api.memory_history import reader
from tests.agent.api.serving import SICK_STATE, WELL_STATE, served, service_of, settings_of

checks: Any = openapi_checks
EXAMPLES = 40
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
PLAIN = ("/healthz", "/probe", "/probe/{target}", "/metrics")
"""Nothing can be wrong with a request for these."""

OPERATIONS = (
    ("/healthz", "GET"),
    ("/probe", "GET"),
    ("/probe/{target}", "GET"),
    ("/readyz", "GET"),
    ("/metrics", "GET"),
    ("/api/v1/triage", "GET"),
    ("/api/v1/triage/{target}", "GET"),
    ("/api/v1/size", "GET"),
    ("/api/v1/size", "POST"),
    ("/api/v1/accept", "POST"),
    ("/api/v1/alerts", "POST"),
    ("/triage", "GET"),
)


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    """The schema as a server gives it."""
    service = service_of(
        SICK_STATE,
        WELL_STATE,
        reader=reader(SICK_STATE, WELL_STATE),
        settings=settings_of(http__requests_per_s=1e6),
    )
    with served(service) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_asked(api: Any) -> None:  # noqa: ANN401
    there = {
        (operation.ok().path, operation.ok().method.upper())
        for operation in api.get_all_operations()
    }
    assert there == set(OPERATIONS)


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [(*operation, POSITIVE) for operation in OPERATIONS]
    + [(*operation, NEGATIVE) for operation in OPERATIONS if operation[0] not in PLAIN],
)
def test_it_keeps_its_promises(api: Any, path: str, method: str, mode: GenerationMode) -> None:  # noqa: ANN401
    operation = api[path][method]
    # Of an alert only what is needed is looked at: the rest is Alertmanager's own affair.
    left_out = [checks.positive_data_acceptance]
    if path == "/api/v1/alerts":
        left_out.append(checks.negative_data_rejection)

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW)
    def asked(case: Any) -> None:  # noqa: ANN401 - its class is generic in something private
        case.call_and_validate(excluded_checks=left_out)

    asked()
