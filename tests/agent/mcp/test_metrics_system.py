"""`kneewatch mcp --prometheus`: a real Prometheus with a recording of the KV cascade, and pages of
SGLang."""

from __future__ import annotations

from collections.abc import Iterator

import jsonschema
import pytest

from kneewatch.agent.mcp.backends import MetricsSystem
from kneewatch.agent.mcp.server import metrics_system_tools
from kneewatch.agent.settings.effective import load
from tests.collector.oracle import LOOPBACK, running
from tests.collector.oracle_targets import captured, paged
from tests.programs import require
from tests.recordings import phases

NAME, SGLANG, WINDOW_S = "kv_pressure_cascade", "sglang", 30.0
(WORST_S,) = [
    phase.to_s
    for phase in phases()
    if phase.capture.name.startswith(f"{NAME}.") and phase.name == "queue_growth"
]


@pytest.fixture(scope="module")
def system() -> Iterator[MetricsSystem]:
    """A metrics system that scraped the recording's server."""
    with running(require("prometheus")) as server:
        pages = ["sglang-0.5.23-rendered.txt.gz"] * 3
        server.load([captured(NAME), paged(SGLANG, pages, start_ms=round(1000 * WORST_S) - 20_000)])
        settings = load(file=None, environ={}, flags={"window_s": WINDOW_S})
        yield MetricsSystem(f"http://{LOOPBACK}:{server.port}", settings)


def test_the_fleet_at_its_worst(system: MetricsSystem) -> None:
    (fleet,) = [tool for tool in metrics_system_tools(system) if tool.name == "fleet"]
    text, document = fleet.answer({"at": f"{WORST_S:.0f}"})
    assert fleet.listed.output_schema is not None
    jsonschema.validate(document, fleet.listed.output_schema)
    assert document["causes"][0]["id"] == "kv_pressure"
    assert "kv_pressure" in text


def test_the_values_of_a_target(system: MetricsSystem) -> None:
    times_s = [WORST_S - 86400, WORST_S - 43200, WORST_S]
    assert system.history("gpu-99:8000", ["running"], times_s) == []
    (row,) = system.history(NAME, ["kv_usage_ratio"], times_s)
    *names, values = row
    assert names == ["tiny", "0", "kv_usage_ratio"]
    assert values[:2] == [None, None]
    assert values[2] is not None
    assert values[2] > 0.5


def test_the_values_of_a_target_of_another_engine(system: MetricsSystem) -> None:
    (row,) = system.history(SGLANG, ["running"], [WORST_S - 86400, WORST_S])
    assert row == ("tiny", "", "running", [None, 0.0])
