"""The rules for VictoriaMetrics mean there what they mean to Prometheus: a real one is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from kneewatch.dashboards.prometheus.rule_files import groups, metricsql
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.collector.oracle import LOOPBACK, free_port
from tests.dashboards.playing import process
from tests.programs import require
from tests.waiting import PATIENCE_S

AGES_S = (70, 55, 40, 25, 10)
SERIES = {
    "jumped_before": (0, 100, 110, 120, 130),
    "began_anew": (500, 600, 610, 5, 15),
    "stood": (0, 7, 7, 7, 7),
}
"""Counters, a value at each age: the first one is before a window of 60 s."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A VictoriaMetrics that has the series."""
    folder, port = tmp_path_factory.mktemp("victoria"), free_port()
    at, own = f"http://{LOOPBACK}:{port}", f"-httpListenAddr={LOOPBACK}:{port}"
    command = [require("victoria-metrics"), f"-storageDataPath={folder}/data", own]
    with process(command, ready=f"{at}/health", log=Path(folder) / "log"):
        lines = [
            f"{name} {value} {NOW_MS - 1000 * age_s}"
            for name, values in SERIES.items()
            for age_s, value in zip(AGES_S, values, strict=True)
        ]
        body = "\n".join(lines).encode()
        for path, data in (("api/v1/import/prometheus", body), ("internal/force_flush", None)):
            with urlopen(f"{at}/{path}", data, timeout=PATIENCE_S) as answer:
                answer.read()
        yield at


NOW_MS = round(1000 * time.time()) - 60_000
"""Past what VictoriaMetrics hides of the newest (-search.latencyOffset)."""


def asked(url: str, expr: str) -> float | None:
    query = urlencode({"query": expr, "time": NOW_MS / 1000, "nocache": 1})
    with urlopen(f"{url}/api/v1/query?{query}", timeout=PATIENCE_S) as answer:
        result = json.loads(answer.read())["data"]["result"]
    values = [float(row["value"][1]) for row in result]
    return values[0] if values else None


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        pytest.param("rate(jumped_before[60s])", 30 / 45, id="100 to 130 in 45 s"),
        pytest.param("rate(began_anew[60s])", 25 / 45, id="10, then 5 from nothing, then 10"),
        pytest.param("rate(stood[60s])", 0.0, id="nothing within"),
        pytest.param("increase(jumped_before[60s])", 30.0, id="as it was counted"),
        pytest.param("changes(stood[60s])", 0.0, id="the change was before"),
        pytest.param("rate(jumped_before[20s])", None, id="of one sample there is no rate"),
    ],
)
def test_a_window_begins_with_the_first_sample_inside(
    expr: str, value: float | None, url: str
) -> None:
    assert asked(url, metricsql(expr)) == (None if value is None else pytest.approx(value))
    assert asked(url, expr) != pytest.approx(value if value is not None else -1.0), (
        "VictoriaMetrics's own is another"
    )


def test_every_rule_is_spelled() -> None:
    exprs = [rule.expr for group in groups(Plan()) for rule in group.rules]
    translated = [metricsql(expr) for expr in exprs]
    assert sum("rate(" in expr for expr in exprs) > 50
    for own in ("rate(", "increase(", "changes("):
        left = [
            expr
            for expr in translated
            if f" {own}" in expr or f"({own}" in expr or expr.startswith(own)
        ]
        assert left == [], own
