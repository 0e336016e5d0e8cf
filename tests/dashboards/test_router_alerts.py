"""The exported alerts about routers, played by promtool: whose engines could serve."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from kneewatch.collector.page import Series
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, alert_group, rule_files
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan
from tests.dashboards.promtool import evaluate
from tests.programs import require

IN = 'namespace="prod"'
ENGINE = f'{{{IN},pod="r0",model_name="m",engine="0"}}'
IDLE = {
    f"vllm:num_requests_waiting{ENGINE}": "0x40",
    f"vllm:kv_cache_usage_perc{ENGINE}": "0x40",
    f"vllm:generation_tokens_total{ENGINE}": "5x40",
}
READY, QUEUE = f'llm_d_epp_ready_endpoints{{{IN},name="pool"}}', "llm_d_epp_flow_control_queue_size"
ERRORS = f"llm_d_epp_datalayer_poll_errors_total{{{IN}}}"


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        pytest.param({READY: "0x40"}, "KneewatchRouterUnready", id="no endpoint"),
        pytest.param({READY: "2x40"}, "", id="endpoints"),
        pytest.param({READY: "0x40", f"vllm:generation_tokens_total{ENGINE}": "0+15x40"}, "",
                     id="served another way"),
        pytest.param({f"{QUEUE}{{{IN}}}": "5x40"}, "KneewatchRouterHolds", id="held"),
        pytest.param({f"ray_serve_deployment_queued_queries{{{IN}}}": "5x40"},
                     "KneewatchRouterHolds", id="held by Ray"),
        pytest.param({f"{QUEUE}{{{IN}}}": "5x40", f"vllm:num_requests_waiting{ENGINE}": "3x40"}, "",
                     id="the engine has a queue"),
        pytest.param({f"{QUEUE}{{{IN}}}": "5x40", f"vllm:kv_cache_usage_perc{ENGINE}": "0.9x40"},
                     "", id="the engine is full"),
        pytest.param({f'{QUEUE}{{namespace="other"}}': "5x40"}, "", id="another namespace"),
        pytest.param({ERRORS: "0+3x40"}, "KneewatchRouterStale", id="errors go on"),
        pytest.param({ERRORS: "0x20 9x20"}, "", id="errors once"),
    ],
)  # fmt: skip
def test_an_alert_fires_where_engines_could_serve(
    series: Mapping[str, str], fires: str, tmp_path: Path
) -> None:
    alerts = [
        rule
        for rule in alert_group(Plan()).rules
        if isinstance(rule, Alert) and rule.name.startswith("KneewatchRouter")
    ]
    rules = [
        {"alert": rule.name, "expr": rule.expr, "for": f"{rule.for_s:g}s", "labels": rule.labels}
        for rule in alerts
    ]
    test = {
        "interval": "15s",
        "input_series": [
            {"series": name, "values": values} for name, values in {**IDLE, **series}.items()
        ],
        "alert_rule_test": [
            {
                "eval_time": "10m",
                "alertname": rule.name,
                "exp_alerts": [{"exp_labels": {**rule.labels, "namespace": "prod"}}]
                if rule.name == fires
                else [],
            }
            for rule in alerts
        ],
    }
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}
    groups = [{"name": "routers", "rules": rules}]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": groups}))  # JSON is YAML
    (tmp_path / "tests.yml").write_text(json.dumps(document))
    command = [require("promtool"), "test", "rules", str(tmp_path / "tests.yml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_what_a_router_counts_of_its_servers_is_no_engine(tmp_path: Path) -> None:
    require("promtool")
    rules = rule_files(Plan())[RULES_FILE]
    engine = (("job", "vllm"), ("instance", "r0"), ("engine", "0"), ("model_name", "llama"))
    router = (("job", "router"), ("instance", "router"))
    steps = 80
    series = {
        Series("up", (("instance", "router"), ("job", "router"))): f"1x{steps}",
        Series("vllm:num_requests_running", tuple(sorted(engine))): f"1x{steps}",
        # One of its servers leaves.
        Series("vllm:num_requests_running", (*router, ("server", "http://r1"))): "2x9 stale",
    }
    running, firing = "kneewatch:running", 'ALERTS{alertstate="firing"}'
    answers = evaluate(tmp_path, rules, series, [running, firing], step_s=15.0, steps=steps)
    assert all(len(now) == 1 and 'model_name="llama"' in now[0].labels for now in answers[running])
    assert not any(answers[firing])
