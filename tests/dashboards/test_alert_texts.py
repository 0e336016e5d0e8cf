"""What a firing alert says: where, and the value in its unit. Prometheus fills in the templates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kneewatch.dashboards.prometheus.alerts import finding_group
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan
from tests.programs import require

POD = {"namespace": "chat", "pod": "chat-0", "instance": "10.0.0.7:8000", "model_name": "llama"}


def texts_of(folder: Path, rule: str, values: dict[str, float], labels: dict[str, str]) -> str:
    """The description of a rule's alert, and its summary after the colon, as Prometheus writes
    them for constant signals."""
    name, alert = next(
        (one.name, one)
        for one in finding_group(Plan()).rules
        if isinstance(one, Alert) and one.labels["rule"] == rule
    )
    inner = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    test: dict[str, Any] = {
        "interval": "15s",
        "input_series": [
            {"series": f"kneewatch:{key}{{{inner}}}", "values": f"{value}x60"}
            for key, value in values.items()
        ],
        "alert_rule_test": [{"eval_time": "10m", "alertname": name, "exp_alerts": []}],
    }
    rules = {"alert": name, "expr": alert.expr, "annotations": dict(alert.annotations)}
    (folder / "rules.yml").write_text(json.dumps({"groups": [{"name": "one", "rules": [rules]}]}))
    (folder / "tests.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [test]}))
    command = [require("promtool"), "test", "rules", str(folder / "tests.yml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("rule", "values", "says"),
    [
        (
            "PREFIX-HIT",
            {"prefix_hit_ratio": 0.09, "prefix_query_per_s": 500, "prefix_hit_quiet_ratio": 0.6},
            "prefix_hit_ratio is 9% (below 30%",
        ),
        ("KV-FULL", {"kv_usage_avg_ratio": 0.951}, "kv_usage_avg_ratio is 95.1% (above 90%"),
        (
            "QUEUE-GROWS",
            {"waiting_slope_per_s": 0.25, "waiting_min": 4},
            "waiting_slope_per_s is 0.25/s (above 0.1/s",
        ),
        (
            "KV-RESIDENCY",
            {"kv_residency_s": 20.0, "block_reuse_per_s": 1.0},
            "kv_residency_s is 20s (below 60s",
        ),
    ],
)
def test_values_have_their_unit(
    rule: str, values: dict[str, float], says: str, tmp_path: Path
) -> None:
    text = texts_of(tmp_path, rule, values, POD)
    assert says in text
    assert ": chat-0 in chat, model llama" in text


def test_a_server_without_a_pod_is_named_by_its_address(tmp_path: Path) -> None:
    text = texts_of(tmp_path, "KV-FULL", {"kv_usage_avg_ratio": 0.95}, {"instance": "gpu-7:8000"})
    assert 'target band: gpu-7:8000"' in text
