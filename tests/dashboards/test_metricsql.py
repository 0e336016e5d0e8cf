"""The rules for VictoriaMetrics mean there what they mean to Prometheus: a real one is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from kneewatch.dashboards.prometheus.files import groups
from kneewatch.dashboards.prometheus.metricsql import metricsql
from kneewatch.dashboards.prometheus.model import Plan, Record
from kneewatch.dashboards.prometheus.seasons import held_against, season_group
from kneewatch.rules.seasons import HOUR_S, WEEK_S, hour_start_s
from tests.collector.oracle import LOOPBACK, free_port
from tests.dashboards.playing import process
from tests.programs import require

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
        lines += [
            f"kneewatch:{TAIL}:hour{ENGINE} {value} {HOUR_MS - round(1000 * ago_s)}"
            for value, ago_s in ((4.0, WEEK_S - HOUR_S), (5.0, 2 * WEEK_S - HOUR_S))
        ]
        lines.append(f"kneewatch:{TAIL}:quiet{ENGINE} 2 {HOUR_MS}")
        lines.append(f'kneewatch:{TAIL}:usual{{season="week",{ENGINE[1:]} 4.5 {HOUR_MS}')
        body = "\n".join(lines).encode()
        for path, data in (("api/v1/import/prometheus", body), ("internal/force_flush", None)):
            with urlopen(f"{at}/{path}", data, timeout=30) as answer:
                answer.read()
        yield at


NOW_MS = round(1000 * time.time()) - 60_000
"""Past what VictoriaMetrics hides of the newest (-search.latencyOffset)."""


PLAN = Plan(ordered=False)
HOUR_MS = round(1000 * (hour_start_s(NOW_MS / 1000) - 2 * HOUR_S))
TAIL, ENGINE = "ttft_p99_p50_ratio", '{instance="a:8000",model_name="m"}'


def asked(url: str, expr: str, at_s: float = NOW_MS / 1000) -> float | None:
    query = urlencode({"query": expr, "time": at_s, "nocache": 1})
    with urlopen(f"{url}/api/v1/query?{query}", timeout=30) as answer:
        result = json.loads(answer.read())["data"]["result"]
    return float(result[0]["value"][1]) if result else None


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


@pytest.mark.parametrize(
    ("minutes", "usual"), [(0, 4.5), (4, 4.5), pytest.param(30, None, id="told once an hour")]
)
def test_weeks_are_told_as_prometheus_tells_them(
    minutes: float, usual: float | None, url: str
) -> None:
    name = f"kneewatch:{TAIL}:usual"
    (rule,) = (r for r in season_group(PLAN).rules if isinstance(r, Record) and r.name == name)
    assert asked(url, metricsql(rule.expr), HOUR_MS / 1000 + 60 * minutes) == usual


@pytest.mark.parametrize(("minutes", "worse"), [(0, 4.5), (59, 4.5), (66, None)])
def test_what_is_usual_holds_for_its_hour(minutes: float, worse: float | None, url: str) -> None:
    held = metricsql(held_against(PLAN, TAIL))
    assert asked(url, held, HOUR_MS / 1000 + 60 * minutes) == worse


def test_every_rule_is_spelled() -> None:
    exprs = [rule.expr for group in groups(Plan(ordered=False)) for rule in group.rules]
    told = [metricsql(expr) for expr in exprs]
    assert sum("rate(" in expr for expr in exprs) > 50
    for own in ("rate(", "increase(", "changes("):
        left = [one for one in told if f" {own}" in one or f"({own}" in one or one.startswith(own)]
        assert left == [], own
