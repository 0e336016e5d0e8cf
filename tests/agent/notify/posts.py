"""What Alertmanager posts, made by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.reports.diagnoses import NOW_S


def time_of(t_s: float) -> str:
    """A moment as Alertmanager writes it."""
    return datetime.fromtimestamp(t_s, tz=UTC).isoformat().replace("+00:00", "Z")


def alert(status: str = "firing", starts_s: float = NOW_S, **labels: str) -> dict[str, Any]:
    """One alert with these labels."""
    return {
        "status": status,
        "labels": {"alertname": "SlowFirstToken", "severity": "page", **labels},
        "annotations": {"summary": "TTFT P99 is over its target"},
        "startsAt": time_of(starts_s),
        "endsAt": time_of(starts_s + 60) if status == "resolved" else "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus:9090/graph",
        "fingerprint": f"fp-{sorted(labels.items())}",
    }


def post(*alerts: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A post of version 4."""
    return {
        "version": "4",
        "groupKey": "{}:{}",
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "kneewatch",
        "groupLabels": {},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "http://alertmanager:9093",
        "alerts": list(alerts),
        **more,
    }
