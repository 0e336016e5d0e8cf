"""What a firing alert says: where, and the value in its unit. Prometheus fills in the templates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kneewatch.dashboards.prometheus.alerts import finding_groups
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan
from tests.programs import require

POOL = {"namespace": "chat", "job": "vllm", "model_name": "llama"}
PODS = [POOL | {"pod": f"chat-{at}", "instance": f"10.0.0.{at}:8000"} for at in range(3)]


def texts_of(
    folder: Path, rule: str, engines: list[tuple[dict[str, str], dict[str, float]]]
) -> str:
    """The warning of a rule as Prometheus writes it, for engines with constant signals: all but
    the last have a finding in force."""
    _, alerts = finding_groups(Plan())
    name, alert = next(
        (alert.name, alert)
        for alert in alerts.rules
        if isinstance(alert, Alert)
        and (alert.labels["rule"], alert.labels["severity"]) == rule_of(rule)
    )
    series: dict[str, float] = {}
    for at, (labels, values) in enumerate(engines):
        inner = ", ".join(f'{label}="{value}"' for label, value in labels.items())
        series |= {f"kneewatch:{key}{{{inner}}}": value for key, value in values.items()}
        series[f"kneewatch:running{{{inner}}}"] = 1.0
        if at < max(1, len(engines) - 1):
            series[f'kneewatch:finding{{{inner}, rule="{alert.labels["rule"]}"}}'] = SEVERITY[
                alert.labels["severity"]
            ]
    test: dict[str, Any] = {
        "interval": "15s",
        "input_series": [{"series": key, "values": f"{v}x60"} for key, v in series.items()],
        "alert_rule_test": [{"eval_time": "10m", "alertname": name, "exp_alerts": []}],
    }
    rules = {"alert": name, "expr": alert.expr, "annotations": dict(alert.annotations)}
    (folder / "rules.yml").write_text(json.dumps({"groups": [{"name": "one", "rules": [rules]}]}))
    (folder / "tests.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [test]}))
    command = [require("promtool"), "test", "rules", str(folder / "tests.yml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


SEVERITY = {"info": 1.0, "warning": 2.0, "critical": 3.0}


def rule_of(text: str) -> tuple[str, str]:
    """A rule's id and the severity: a warning unless told."""
    rule, _, severity = text.partition(" ")
    return rule, severity or "warning"


@pytest.mark.parametrize(
    ("rule", "values", "says"),
    [
        (
            "PREFIX-HIT info",
            {"prefix_hit_ratio": 0.09, "prefix_query_per_s": 500, "prefix_hit_quiet_ratio": 0.6},
            "prefix_hit_ratio is 9% on chat-0, the worst replica (threshold: below 30%)",
        ),
        (
            "KV-FULL info",
            {"kv_usage_avg_ratio": 0.951},
            "kv_usage_avg_ratio is 95.1% on chat-0, the worst replica (threshold: above 90%)",
        ),
        (
            "QUEUE-GROWS",
            {"waiting_slope_per_s": 0.25, "waiting_min": 4},
            "waiting_slope_per_s is 0.25/s on chat-0, the worst replica (threshold: above 0.1/s)",
        ),
        (
            "KV-RESIDENCY info",
            {"kv_residency_s": 20.0, "block_reuse_per_s": 1.0},
            "kv_residency_s is 20s on chat-0, the worst replica (threshold: below 60s)",
        ),
    ],
)
def test_values_have_their_unit(
    rule: str, values: dict[str, float], says: str, tmp_path: Path
) -> None:
    text = texts_of(tmp_path, rule, [(PODS[0], values)])
    assert says in text
    assert "1 of 1 replicas of llama in chat (job vllm)" in text


def test_an_alert_counts_the_replicas_and_names_the_worst(tmp_path: Path) -> None:
    full = [(pod, {"kv_usage_avg_ratio": 0.95 + at / 100}) for at, pod in enumerate(PODS)]
    text = texts_of(tmp_path, "KV-FULL info", full)
    assert "2 of 3 replicas of llama in chat (job vllm)" in text
    assert "kv_usage_avg_ratio is 96% on" in text
    assert "on chat-1, the worst replica (threshold: above 90%)." in text
    assert "pod=" not in text.partition("Labels:")[2].partition("Annotations:")[0]


def test_a_server_without_a_pod_is_named_by_its_address(tmp_path: Path) -> None:
    server = {"instance": "gpu-7:8000"}
    text = texts_of(tmp_path, "KV-FULL info", [(server, {"kv_usage_avg_ratio": 0.95})])
    assert "on gpu-7:8000, the worst replica" in text
    assert "1 of 1 replicas of the model" in text
