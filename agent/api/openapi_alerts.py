"""What Alertmanager posts and what it is answered, for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any

from kneewatch.agent.api import examples

Json = dict[str, Any]

TEXTS: Json = {"type": "object", "additionalProperties": {"type": "string"}}
STATUS: Json = {"enum": ["firing", "resolved"]}
ALERTS: Json = {
    "type": "object",
    "required": ["version", "status", "alerts"],
    "properties": {
        "version": {"const": "4"},
        "status": STATUS,
        "truncatedAlerts": {"type": "integer", "minimum": 0},
        "alerts": {
            "type": "array",
            "maxItems": 1000,
            "items": {
                "type": "object",
                "required": ["status", "labels", "startsAt"],
                "properties": {
                    "status": STATUS,
                    "labels": TEXTS,
                    "annotations": TEXTS,
                    "startsAt": {"type": "string", "format": "date-time"},
                    "endsAt": {"type": "string", "format": "date-time"},
                    "fingerprint": {"type": "string"},
                },
            },
        },
    },
}
ALERTS_EXAMPLE: Json = {
    "version": "4",
    "status": "firing",
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "SlowFirstToken", "instance": "gpu-7:8000"},
            "annotations": {"summary": "TTFT P99 is over its target"},
            "startsAt": "2026-11-21T00:05:00Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "fingerprint": "c1f0ffee00c1f0ff",
        }
    ],
}
ANSWER: Json = {
    "type": "object",
    "required": ["schema", "t", "alerts"],
    "properties": {
        "schema": {"const": "kneewatch.alerts/1"},
        "t": {"type": "number"},
        "text": {"type": "string"},
        "alerts": {"type": "array", "items": {"type": "object"}},
    },
}
ANSWER_EXAMPLE: Json = {
    "schema": "kneewatch.alerts/1",
    "t": examples.NOW_S,
    "status": "firing",
    "text": "1 alert, 1 of them about a watched target",
    "alerts": [
        {
            "fingerprint": "c1f0ffee00c1f0ff",
            "status": "firing",
            "text": f"matched {examples.TARGET} by instance=gpu-7:8000",
        }
    ],
    "sent": None,
}
