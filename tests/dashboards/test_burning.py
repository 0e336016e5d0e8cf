"""How fast the error budget burns: promtool plays six hours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from kneewatch.dashboards.prometheus.promtool_tests import Server
from kneewatch.dashboards.prometheus.rule_files import alert_group
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan, Record
from kneewatch.rules.facts import Targets
from tests.programs import require

BURNING = {
    "a third is late": ("0+240x360", "0+360x360", True),
    "a third was late, then nobody comes": ("0+240x180 43200x180", "0+360x180 64800x180", False),
    "all is well": ("0+360x360", "0+360x360", False),
    "a third of a batch is late": ("0+240x360", "0+360x360", False),
}
"""First tokens in time and all of them, every minute for six hours; whether the alert fires."""


def test_the_budget_burns_only_with_traffic(tmp_path: Path) -> None:
    plan = Plan(targets=Targets(ttft_p99_s=1.0, itl_p99_s=None))
    series: dict[str, str] = {}
    for name, (in_time, total, _) in BURNING.items():
        server = Server(plan, name)
        goal = ['kneewatch_goal="throughput"'] if "batch" in name else []
        series[server.named("time_to_first_token_seconds_bucket", 'le="1.0"', *goal)] = in_time
        series[server.named("time_to_first_token_seconds_count", *goal)] = total
    asked = 'ALERTS{alertname="KneewatchTtftBudgetFastBurn", alertstate="firing"}'
    firing = [name for name, (_, _, fires) in BURNING.items() if fires]
    test = {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"count by (model_name) ({asked})",
                "eval_time": "5h59m",
                "exp_samples": [
                    {"labels": f'{{model_name="{model}"}}', "value": 1} for model in firing
                ],
            }
        ],
    }
    burning = [written(rule) for rule in alert_group(plan).rules if "Burn" in rule.name]
    rules = {"groups": [{"name": "burn", "rules": burning}]}
    document = {"rule_files": ["burn.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "burn.yml").write_text(json.dumps(rules))  # JSON is YAML
    (tmp_path / "tests.yml").write_text(json.dumps(document))
    command = [require("promtool"), "test", "rules", str(tmp_path / "tests.yml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def written(rule: Record | Alert) -> dict[str, Any]:
    """An alert as a file has it, without the words."""
    assert isinstance(rule, Alert)
    return {"alert": rule.name, "expr": rule.expr, "labels": dict(rule.labels)}
