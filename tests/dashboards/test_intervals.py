"""Rules at the scrape intervals that servers have: the same alerts at 15, 30 and 60 s."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from kneewatch.collector.signals.promql import duration
from kneewatch.dashboards.prometheus.promtool_tests import Server
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, rule_files
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.programs import require

HEALTHY_S, TROUBLED_S = 300.0, 600.0
"""Five minutes of service, then ten of what the server is named after."""

ASKED = (
    "group by (model_name, alertname)"
    ' (ALERTS{alertstate="firing", severity=~"warning|critical", model_name!=""})'
)
SHIPPED = Plan()


def after(
    healthy: Mapping[str, str], troubled: Mapping[str, str], scrape_s: float
) -> dict[str, str]:
    """Series that are one server's and then go on as another's; counters never go back."""
    at, more = round(HEALTHY_S / scrape_s), round(TROUBLED_S / scrape_s)
    return {
        series: f"{_scrapes(values, at)} {_scrapes(troubled[series], more, _last(values, at))}"
        for series, values in healthy.items()
    }


def _scrapes(values: str, count: int, begin: float = 0.0) -> str:
    if "+" not in values:
        return f"{values.partition('x')[0]}x{count - 1}"
    first, step = map(float, re.split(r"[+x]", values)[:2])
    return f"{first + begin + step}+{step}x{count - 1}"


def _last(values: str, count: int) -> float:
    if "+" not in values:
        return 0.0
    first, step = map(float, re.split(r"[+x]", values)[:2])
    return first + step * count


def servers(plan: Plan) -> dict[str, str]:
    """A healthy server and three that get into trouble, scraped as `plan` says."""

    def server(name: str) -> Server:
        return Server(plan, name)

    healthy = {name: server(name).busy(running=16, usage=0.6) for name in ALERTS}
    stuck, over, cascade = server("stuck"), server("overloaded"), server("cascade")
    troubled = {
        "healthy": healthy["healthy"],
        "stuck": stuck.busy(running=26, usage=0.6, served_per_s=0.0, tokens_per_s=0.0),
        "overloaded": over.busy(running=16, usage=0.85, waiting=over.level(60)),
        "cascade": cascade.busy(
            running=16, usage=0.99, preempted_per_s=5.0, waiting=cascade.level(30)
        ),
    }
    return {
        series: values
        for name, served in healthy.items()
        for series, values in after(served, troubled[name], plan.scrape_s).items()
    }


ALERTS = {
    "healthy": "",
    "stuck": "KneewatchCauseEngineStalled",
    "overloaded": "KneewatchQueueGrows",
    "cascade": "KneewatchKvEvict",
}


@pytest.mark.parametrize(
    ("plan", "scrape_s"),
    [
        pytest.param(SHIPPED, 15.0, id="shipped, at 15 s"),
        pytest.param(SHIPPED, 30.0, id="shipped, at 30 s"),
        pytest.param(SHIPPED, 60.0, id="shipped, at 60 s"),
        pytest.param(Plan(scrape_s=30.0, interval_s=30.0), 30.0, id="made for 30 s"),
        pytest.param(Plan(scrape_s=60.0, interval_s=60.0), 60.0, id="made for 60 s"),
    ],
)
def test_each_alert_fires_at_each_scrape_interval(
    plan: Plan, scrape_s: float, tmp_path: Path
) -> None:
    expected = [
        {"labels": f'{{model_name="{name}", alertname="{alert}"}}', "value": 1}
        for name, alert in ALERTS.items()
        if alert
    ]
    series = servers(replace(plan, scrape_s=scrape_s))
    # The first alert within 3 minutes at 15 s, within 6 at 60 s; all of them until the end.
    told_s = HEALTHY_S + (180.0 if scrape_s <= 15.0 else 360.0)
    asked = [
        {"expr": ASKED, "eval_time": duration(at_s), "exp_samples": samples}
        for at_s, samples in (
            (HEALTHY_S - scrape_s, []),
            (told_s, expected),
            (HEALTHY_S + TROUBLED_S - scrape_s, expected),
        )
    ]
    wanted = ALERTS.values()
    told = promtool(tmp_path, plan, series, scrape_s, asked, lambda rule: rule["alert"] in wanted)
    assert told == ""


def promtool(
    folder: Path,
    plan: Plan,
    series: Mapping[str, str],
    scrape_s: float,
    asked: list[Any],
    wanted: Callable[[Mapping[str, Any]], bool],
) -> str:
    """What promtool has against the expectations of the wanted rules; nothing where they hold."""
    document = yaml.load(rule_files(replace(plan, lean=True))[RULES_FILE], yaml.CSafeLoader)
    rules = [rule for group in document["groups"] for rule in group["rules"] if wanted(rule)]
    groups = [{"name": "wanted", "rules": rules}]
    (folder / RULES_FILE).write_text(json.dumps({"groups": groups}))  # JSON is YAML
    test = {
        "interval": duration(scrape_s),
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": asked,
    }
    tests = {
        "rule_files": [RULES_FILE],
        "evaluation_interval": duration(plan.interval_s),
        "tests": [test],
    }
    (folder / "tests.yml").write_text(json.dumps(tests))
    command = [require("promtool"), "test", "rules", str(folder / "tests.yml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr
