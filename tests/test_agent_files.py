"""Files for agents: a HolmesGPT toolset of the documented shape, whose requests are answered."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import jsonschema
import pytest
import yaml

from tests.agent.api.memory_history import Remembered
from tests.agent.api.serving import SICK_NAME, SICK_STATE, asking, service_of

FILE = Path(__file__).parent.parent / "packaging" / "agents" / "holmesgpt.yaml"
TOOLSET: dict[str, Any] = yaml.safe_load(FILE.read_text())["toolsets"]["kneewatch"]
ENDPOINT: dict[str, Any] = TOOLSET["config"]["endpoints"][0]
REQUESTS = [
    request.replace("TARGET", quote(SICK_NAME, safe=""))
    for request in re.findall(r"GET (/[^ ,\n]+)", TOOLSET["llm_instructions"])
]

TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
BEARER = {
    "type": "object",
    "properties": {"type": {"const": "bearer"}, "token": TEXT},
    "required": ["type", "token"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "http"},
        "enabled": {"type": "boolean"},
        "llm_instructions": TEXT,
        "config": {
            "type": "object",
            "properties": {
                "endpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "hosts": TEXTS,
                            "paths": TEXTS,
                            "methods": {"type": "array", "items": {"const": "GET"}},
                            "auth": BEARER,
                        },
                        "required": ["hosts", "paths", "methods"],
                        "additionalProperties": False,
                    },
                },
                "verify_ssl": {"const": True},
                "timeout_seconds": {"type": "integer", "minimum": 1},
            },
            "required": ["endpoints"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "config"],
    "additionalProperties": False,
}
"""HTTP connectors as HolmesGPT's documentation has them, for what only reads."""


def test_the_toolset_has_the_documented_shape() -> None:
    jsonschema.validate(TOOLSET, SCHEMA)


@pytest.mark.parametrize("request_path", REQUESTS)
def test_every_request_of_the_instructions_is_allowed_and_answered(request_path: str) -> None:
    path = urlsplit(request_path).path
    assert any(fnmatchcase(path, pattern) for pattern in ENDPOINT["paths"])
    if path == "/api/v1/fleet":  # of a daemon with a metrics system: tests/agent/fleet asks it
        return
    history: Any = Remembered(SICK_STATE)
    with asking(service_of(SICK_STATE, reader=history)) as client:
        assert client.get(request_path).status_code == 200


def test_nothing_that_writes_is_allowed() -> None:
    assert not any(fnmatchcase("/api/v1/alerts", pattern) for pattern in ENDPOINT["paths"])
    assert ENDPOINT["methods"] == ["GET"]
