"""Targets that do not answer and pools that are gone, as service discovery makes their series.

When a target leaves service discovery, its last sample stays visible for two more intervals: then
Prometheus writes a staleness marker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kneewatch.collector.signals.promql import duration
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.dashboards.test_intervals import promtool

SERVED_S, AFTER_S = 900.0, 840.0
ENDING_S, LOADING_S = 45.0, 300.0
FIRED = 'ALERTS{alertname=~"KneewatchTargetDown|KneewatchPoolVanished", alertstate="firing"}'
EVER = f"group by (alertname, namespace) (max_over_time({FIRED}[1h]))"
NOW = f"group by (alertname, namespace) ({FIRED})"
FIRES = {
    "crashed": "KneewatchTargetDown",
    "crashed-watched": "KneewatchTargetDown",
    "vanished": "KneewatchPoolVanished",
}
"""Namespaces in which something is wrong, and the alert that says so."""


def level(value: float | str, scrapes: int) -> str:
    """A value at so many scrapes; `_` is none."""
    return f"{value}x{scrapes - 1}"


class Timeline:
    """Series of namespaces that serve for `SERVED_S`; what then happens is the namespace's name."""

    def __init__(self, scrape_s: float) -> None:
        self.scrape_s = scrape_s
        self.served, self.after = self.scrapes(SERVED_S), self.scrapes(AFTER_S)

    def scrapes(self, seconds: float) -> int:
        """How many scrapes a time has."""
        return math.ceil(seconds / self.scrape_s)

    def target(
        self, namespace: str, pod: str, up: str, serving: str, instance: str = ""
    ) -> dict[str, str]:
        """A pod's `up` and load."""
        where = f'namespace="{namespace}", job="vllm", pod="{pod}", instance="{instance or pod}"'
        usage = f'vllm:kv_cache_usage_perc{{{where}, model_name="llama", engine="0"}}'
        return {f"up{{{where}}}": up, usage: serving}

    def serving(self, namespace: str, pod: str) -> dict[str, str]:
        """A pod that serves throughout."""
        always = level(1, self.served + self.after)
        return self.target(namespace, pod, always, always)

    def leaving(
        self, namespace: str, pod: str, *, failing_s: float = ENDING_S, instance: str = ""
    ) -> dict[str, str]:
        """A pod that ends: its scrapes fail until service discovery drops it."""
        failing = " 0" * self.scrapes(failing_s)
        served = level(1, self.served)
        up, serving = f"{served}{failing} _ _ stale", f"{served} stale"
        return self.target(namespace, pod, up, serving, instance)

    def starting(self, namespace: str, pod: str) -> dict[str, str]:
        """A pod that appears when the others end, and loads its model first."""
        loading = self.scrapes(LOADING_S)
        left = level(1, self.after - loading)
        up = f"{level('_', self.served)} {level(0, loading)} {left}"
        serving = f"{level('_', self.served + loading)} {left}"
        return self.target(namespace, pod, up, serving)

    def down(self, namespace: str, pod: str, *, for_s: float = AFTER_S) -> dict[str, str]:
        """A pod that stays in service discovery and does not answer for a while."""
        failing = self.scrapes(for_s)
        served = level(1, self.served)
        left = f" {level(1, self.after - failing)}" if failing < self.after else ""
        up, serving = f"{served} {level(0, failing)}{left}", f"{served} stale"
        return self.target(namespace, pod, up, serving)

    def state(self, name: str, namespace: str, labels: str, values: str) -> dict[str, str]:
        """A series of kube-state-metrics."""
        return {f'{name}{{namespace="{namespace}", {labels}}}': values}


def operations(at: Timeline) -> Iterator[Mapping[str, str]]:
    """What a living cluster does all day."""
    for replica in ("a1b2c", "d3e4f"):
        yield at.leaving("rolled", f"chat-7d9f8b6c5-{replica}")
        yield at.starting("rolled", f"chat-5c6b7a8d9-{replica}")
    yield at.leaving("scaled-in", "chat-7d9f8b6c5-a1b2c")
    yield at.serving("scaled-in", "chat-7d9f8b6c5-d3e4f")
    # A StatefulSet's pod keeps its name, and its address where that is made of the name.
    yield at.down("stateful", "chat-0", for_s=LOADING_S)
    later = at.served + 2
    created = f"{level(0, later)} {level(later * at.scrape_s, at.after)}"
    yield at.state("kube_pod_created", "stateful", 'pod="chat-0"', created)
    yield at.leaving("draining", "chat-0", failing_s=AFTER_S / 2)
    yield at.serving("draining", "chat-1")
    ends = f"{level('_', at.served)} {level(SERVED_S, at.after)}"
    yield at.state("kube_pod_deletion_timestamp", "draining", 'pod="chat-0"', ends)
    yield at.leaving("to-zero", "chat-7d9f8b6c5-a1b2c")
    wanted = f"{level(1, at.served)} {level(0, at.after)}"
    yield at.state("kube_deployment_spec_replicas", "to-zero", 'deployment="chat"', wanted)


def renamed(at: Timeline) -> Iterator[Mapping[str, str]]:
    """A Deployment whose pods are replaced by pods that serve another model."""
    yield at.leaving("renamed", "chat-7d9f8b6c5-a1b2c")
    new = at.starting("renamed", "chat-5c6b7a8d9-d3e4f")
    yield {series.replace('"llama"', '"mistral"'): values for series, values in new.items()}


def outages(at: Timeline) -> Iterator[Mapping[str, str]]:
    """What is wrong, by the namespaces of `FIRES`."""
    yield at.down("crashed", "chat-0")
    yield at.down("crashed-watched", "chat-0")
    yield at.state("kube_pod_created", "crashed-watched", 'pod="chat-0"', level(0, 2 * at.served))
    for replica in ("a1b2c", "d3e4f"):
        yield at.leaving("vanished", f"chat-7d9f8b6c5-{replica}")
    yield at.state(
        "kube_deployment_spec_replicas", "vanished", 'deployment="chat"', level(2, 2 * at.served)
    )


def is_absence(rule: Mapping[str, Any]) -> bool:
    """Whether a rule is an alert of FIRES."""
    return rule.get("alert") in FIRES.values()


@pytest.mark.parametrize(
    ("plan", "scrape_s"),
    [
        pytest.param(Plan(), 15.0, id="shipped, at 15 s"),
        pytest.param(Plan(), 30.0, id="shipped, at 30 s"),
        pytest.param(Plan(), 60.0, id="shipped, at 60 s"),
        pytest.param(Plan(scrape_s=30.0, interval_s=30.0), 30.0, id="made for 30 s"),
        pytest.param(Plan(scrape_s=60.0, interval_s=60.0), 60.0, id="made for 60 s"),
    ],
)
def test_operations_are_no_outage_and_outages_are(
    plan: Plan, scrape_s: float, tmp_path: Path
) -> None:
    at = Timeline(scrape_s)
    series: dict[str, str] = {}
    for part in (*operations(at), *renamed(at), *outages(at)):
        series |= part
    expected = [
        {"labels": f'{{alertname="{name}", namespace="{namespace}"}}', "value": 1}
        for namespace, name in FIRES.items()
    ]
    within_s = 180.0 if scrape_s <= 15.0 else 360.0
    asked = [
        {"expr": NOW, "eval_time": duration(SERVED_S + within_s), "exp_samples": expected},
        {"expr": EVER, "eval_time": duration(SERVED_S + AFTER_S), "exp_samples": expected},
    ]
    assert promtool(tmp_path, plan, series, scrape_s, asked, is_absence) == ""
