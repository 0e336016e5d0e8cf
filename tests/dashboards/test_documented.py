"""What the documentation gives to the Prometheus operator has the fields that its kinds require."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
ENDPOINTS = {"PodMonitor": "podMetricsEndpoints", "ServiceMonitor": "endpoints"}


def monitors() -> list[dict[str, Any]]:
    """Every monitor in the documentation, indented ones included."""
    documents: list[dict[str, Any]] = []
    for name in ("alerting.md", "fleet.md"):
        text = (DOCS / name).read_text()
        for block in re.findall(r"^( *)```yaml\n(.*?)^\1```", text, re.M | re.S):
            lines = [line.removeprefix(block[0]) for line in block[1].splitlines()]
            document = yaml.safe_load("\n".join(lines))
            if document.get("apiVersion") == "monitoring.coreos.com/v1":
                documents.append(document)
    return documents


def test_both_kinds_are_shown() -> None:
    assert {monitor["kind"] for monitor in monitors()} == set(ENDPOINTS)


@pytest.mark.parametrize("monitor", monitors(), ids=lambda monitor: monitor["kind"])
def test_a_monitor_has_what_its_kind_requires(monitor: dict[str, Any]) -> None:
    assert set(monitor) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(monitor["metadata"]) <= {"name", "namespace", "labels"}
    endpoints = ENDPOINTS[monitor["kind"]]
    assert set(monitor["spec"]) == {"selector", endpoints}
    assert set(monitor["spec"]["selector"]) == {"matchLabels"}
    for endpoint in monitor["spec"][endpoints]:
        assert set(endpoint) == {"port", "path", "interval"}
        assert isinstance(endpoint["port"], str), "a port's name: numbers go in another field"
