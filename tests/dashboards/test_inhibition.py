"""A real Alertmanager with the exported inhibition rules, in kube-prometheus-stack's default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kneewatch.dashboards.prometheus.causes import INHIBIT_FILE, inhibit_rules, inhibition_files
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.agent.notify.test_alertmanager_receiver import Manager
from tests.programs import require
from tests.waiting import until

STACK: dict[str, Any] = {
    "global": {"resolve_timeout": "5m"},
    "inhibit_rules": [
        {
            "source_matchers": ['severity = "critical"'],
            "target_matchers": ["severity =~ warning|info"],
            "equal": ["namespace", "alertname"],
        },
        {
            "source_matchers": ['severity = "warning"'],
            "target_matchers": ['severity = "info"'],
            "equal": ["namespace", "alertname"],
        },
        {
            "source_matchers": ['alertname = "InfoInhibitor"'],
            "target_matchers": ['severity = "info"'],
            "equal": ["namespace"],
        },
        {"target_matchers": ['alertname = "InfoInhibitor"']},
    ],
    "route": {
        "group_by": ["namespace"],
        "group_wait": "30s",
        "group_interval": "5m",
        "repeat_interval": "12h",
        "receiver": "null",
        "routes": [{"receiver": "null", "matchers": ['alertname = "Watchdog"']}],
    },
    "receivers": [{"name": "null"}],
}
"""The default of the chart kube-prometheus-stack."""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    own = yaml.safe_load(inhibition_files(Plan())[INHIBIT_FILE])["inhibit_rules"]
    settings = {**STACK, "inhibit_rules": [*STACK["inhibit_rules"], *own]}
    running = Manager(require("prometheus-alertmanager"), tmp_path, json.dumps(settings))
    yield running
    running.close()


def alert(name: str, pool: str, severity: str = "warning", **labels: str) -> dict[str, Any]:
    where = {"namespace": f"of-{pool}", "job": "vllm", "model_name": pool}
    return {"labels": {"alertname": name, "severity": severity, **where, **labels}}


def cause(name: str, which: str, pool: str, severity: str = "warning") -> dict[str, Any]:
    return alert(name, pool, severity, kneewatch="cause", cause=which)


def finding(name: str, rule: str, pool: str) -> dict[str, Any]:
    return alert(name, pool, kneewatch="finding", rule=rule)


def gpu(name: str, which: str, node: str) -> dict[str, Any]:
    labels = {"alertname": name, "severity": "critical", "kneewatch": "gpu", "cause": which}
    return {"labels": {**labels, "namespace": "of-broken", "Hostname": node, "gpu": "0"}}


def in_state(manager: Manager, suppressed: bool) -> list[dict[str, str]]:
    """The labels of the alerts that are muted, or of those that are not."""
    return [
        alert["labels"]
        for alert in manager.alerts()
        if (alert["status"]["state"] == "suppressed") is suppressed
    ]


def test_one_alert_for_each_root_cause_of_a_pool_is_notified(manager: Manager) -> None:
    fired = [
        cause("KneewatchCauseKvPressure", "kv_pressure", "full", "critical"),
        cause("KneewatchCauseKvPressure", "kv_pressure", "full"),
        cause("KneewatchCauseQueueSaturation", "queue_saturation", "full"),
        cause("KneewatchCauseAdmissionLimit", "admission_limit", "full"),
        finding("KneewatchKvEvict", "KV-EVICT", "full"),
        finding("KneewatchQueueGrows", "QUEUE-GROWS", "full"),
        alert("KneewatchCascadeQueueing", "full", "critical", kneewatch="stage", stage="3"),
        finding("KneewatchErrors", "ERRORS", "full"),
        # Nothing of another pool is muted.
        cause("KneewatchCauseQueueSaturation", "queue_saturation", "other"),
        finding("KneewatchQueueGrows", "QUEUE-GROWS", "third"),
        # A doubtful cause mutes nothing.
        cause("KneewatchCauseKvPressure", "kv_pressure", "doubtful", "info"),
        cause("KneewatchCauseQueueSaturation", "queue_saturation", "doubtful"),
        # Nothing mutes what is worse: other replicas may have it.
        cause("KneewatchCauseKvPressure", "kv_pressure", "two"),
        cause("KneewatchCauseQueueSaturation", "queue_saturation", "two", "critical"),
        # The replicas that are left carry the load of those that are down.
        cause("KneewatchTargetDown", "target_down", "down", "critical"),
        cause("KneewatchCauseQueueSaturation", "queue_saturation", "down"),
        cause("KneewatchCauseKvPressure", "kv_pressure", "down", "critical"),
        # The alert about the GPU names it.
        gpu("KneewatchGpuFault", "gpu_fault", "node-1"),
        cause("KneewatchCauseGpuFault", "gpu_fault", "broken", "critical"),
    ]
    manager.ask("/api/v2/alerts", fired)
    # Alertmanager takes in what mutes one alert after the other: all before this pair are in.
    marker = [
        cause("KneewatchCauseKvPressure", "kv_pressure", "marker", "critical"),
        finding("KneewatchKvEvict", "KV-EVICT", "marker"),
    ]
    manager.ask("/api/v2/alerts", marker)
    until(lambda: "marker" in {labels.get("model_name") for labels in in_state(manager, True)})
    assert len(manager.alerts()) == len(fired) + len(marker)
    active = sorted(
        (labels.get("model_name", ""), labels["alertname"])
        for labels in in_state(manager, False)
        if labels["severity"] != "info" and labels.get("model_name") != "marker"
    )
    assert active == [
        ("", "KneewatchGpuFault"),
        ("doubtful", "KneewatchCauseQueueSaturation"),
        ("down", "KneewatchCauseKvPressure"),
        ("down", "KneewatchTargetDown"),
        ("full", "KneewatchCauseKvPressure"),
        ("full", "KneewatchErrors"),
        ("other", "KneewatchCauseQueueSaturation"),
        ("third", "KneewatchQueueGrows"),
        ("two", "KneewatchCauseKvPressure"),
        ("two", "KneewatchCauseQueueSaturation"),
    ]


def test_longer_answers_mute_their_queue_and_answers_that_are_hardly_longer_mute_nothing() -> None:
    muted_by = {
        rule["source_matchers"][0]: str(rule["target_matchers"])
        for rule in inhibit_rules(Plan())
        if 'kneewatch="cause"' in rule["target_matchers"]
    }
    assert "queue_saturation" in muted_by['alertname=~"KneewatchCauseRunawayGeneration"']
    assert not any("Apart" in source for source in muted_by)
