"""A fleet that lives under the exported alerts: faults during a rollout are told in time and once,
with the replica's name, and operations are not told.

`python -m tests.dashboards.living` plays operations too, at each scrape interval.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, rule_files
from kneewatch.dashboards.prometheus.rule_group import Plan
from kneewatch.rules.facts import Targets
from tests.agent.notify.test_alertmanager_receiver import Manager
from tests.agent.notify.web import Taker
from tests.dashboards.living import Firing, alerted, fired, living
from tests.living_faults import FAULTS
from tests.living_fleet import FAULTS_S, MIN_S, LivingFleet, operated, with_faults
from tests.programs import require

SCRAPE_S = 60
SHOWN_S = FAULTS_S[0] + SCRAPE_S
"""The first scrape that shows a fault: a page is of what its engine has done until then."""

WITHIN_S = 6 * MIN_S
TOLD = {
    "code": ["KneewatchCauseEngineStalled"],
    "big": ["KneewatchGpuFault", "KneewatchCauseEngineStalled"],
    "rag": ["KneewatchKvEvict"],
    "late": ["KneewatchQueueGrows"],
    "chat": ["KneewatchTargetDown"],
    "lost": ["KneewatchPoolVanished"],
}
"""The alerts for each fault of `with_faults`, by namespace, first one first. The GPU that fails
hangs its engine, and each alert stands alone: DCGM's series and vLLM's share no label."""

STACK: dict[str, Any] = {
    "inhibit_rules": [
        {
            "source_matchers": ['severity = "critical"'],
            "target_matchers": ['severity =~ "warning|info"'],
            "equal": ["namespace", "alertname"],
        }
    ]
}
"""What kube-prometheus-stack mutes by default."""


def test_faults_during_a_rollout_are_one_notification_each(tmp_path: Path) -> None:
    require("promtool")
    fleet = with_faults(living(SCRAPE_S))
    plan = Plan(scrape_s=SCRAPE_S, interval_s=SCRAPE_S)
    firings = [placed(firing, fleet) for firing in fired(fleet, plan, tmp_path, to_s=27 * MIN_S)]
    told = [
        (firing.labels["namespace"], firing.labels.get("pod", ""), firing.labels["alertname"])
        for firing in firings
    ]
    assert sorted(told) == sorted(
        (namespace, pod, name) for namespace, pod in afflicted(fleet) for name in TOLD[namespace]
    )
    late = [str(firing) for firing in firings if firing.begins_s - SHOWN_S > WITHIN_S]
    assert late == []
    assert [str(firing) for firing in firings if firing.ends_s is None] == []
    assert notified(firings, tmp_path) == Counter(
        (namespace, status)
        for namespace, names in TOLD.items()
        for status in (*(["firing"] * len(names)), "resolved")
    )


def test_symptoms_are_told_of_the_right_replicas(tmp_path: Path) -> None:
    require("promtool")
    from_s, to_s = 20.0 * MIN_S, 30.0 * MIN_S
    fleet = living(30)
    uneven, prefix, full, late = (
        fleet.pool("Deployment", name, 4) for name in ("uneven", "prefix", "full", "late")
    )
    for pod in uneven.pods:
        pod.ails(from_s, to_s, arrival_per_s=0.01)
    uneven.pods[0].ails(from_s, to_s, arrival_per_s=8.0)
    prefix.overload(from_s, to_s, hit_share=0.1)
    full.pods[0].ails(from_s, to_s, capacity_tokens=103_000.0, backlog=57.0)
    late.pods[0].ails(from_s, to_s, prefill_tokens_per_s=112.0, itl_s=0.3, output_tokens=20.0)
    plan = Plan(scrape_s=30, interval_s=30, targets=Targets(2.0, 0.1))
    firings = fired(fleet, plan, tmp_path, to_s=40 * MIN_S)
    told = {(firing.labels["alertname"], firing.labels["pod"]) for firing in firings}
    assert told == {
        ("KneewatchReplicaImbalance", uneven.pods[0].name),
        *(("KneewatchPrefixHitFell", pod.name) for pod in prefix.pods),
        ("KneewatchKvFull", full.pods[0].name),
        ("KneewatchTtftP99", late.pods[0].name),
        ("KneewatchTtftBudgetFastBurn", late.pods[0].name),
        ("KneewatchTtftBudgetSlowBurn", late.pods[0].name),
        ("KneewatchItlP99", late.pods[0].name),
        ("KneewatchReplicaSlow", late.pods[0].name),
    }
    quick = [f for f in firings if "Burn" not in f.labels["alertname"]]
    assert [str(firing) for firing in quick if firing.begins_s - from_s > 5 * MIN_S] == []


def test_a_router_that_uses_one_replica_is_no_lack_of_replicas(tmp_path: Path) -> None:
    require("promtool")
    (fault,) = (each for each in FAULTS if each.name == "one-takes-all")
    first = next(iter(alerted(fault, tmp_path, scrape_s=60)))
    assert first == "KneewatchReplicaImbalance"
    assert "add replicas" not in rule_files(Plan())[RULES_FILE].lower()


@pytest.mark.parametrize("scrape_s", [15, 60])
def test_operations_fire_nothing(scrape_s: int, tmp_path: Path) -> None:
    require("promtool")
    plan = Plan(scrape_s=scrape_s, interval_s=scrape_s)
    firings = fired(operated(living(scrape_s)), plan, tmp_path, to_s=50 * MIN_S)
    assert [str(firing) for firing in firings] == []


def placed(firing: Firing, fleet: LivingFleet) -> Firing:
    """An alert about a GPU with the namespace and pod of its node."""
    pods = {pod.node: (pool, pod) for pool in fleet.pools for pod in pool.pods}
    node = firing.labels.get("Hostname")
    if node is None:
        return firing
    pool, pod = pods[node]
    return replace(firing, labels={**firing.labels, "namespace": pool.namespace, "pod": pod.name})


def afflicted(fleet: LivingFleet) -> Iterator[tuple[str, str]]:
    """Yields the namespace and pod of each planted fault; of a lost pool, no pod."""
    for pool in fleet.pools:
        if pool.namespace == "lost":
            yield pool.namespace, ""
        for pod in pool.pods:
            crashed = pool.namespace == "chat" and pod.silent_s == FAULTS_S[0]
            if pod.faults or crashed:
                yield pool.namespace, pod.name


def notified(firings: Iterable[Firing], folder: Path) -> Counter[tuple[str, str]]:
    """What a real Alertmanager in kube-prometheus-stack's default sends: the messages about alerts
    that fire and that are resolved, by namespace. Only its waiting is shortened."""
    taker = Taker()
    settings: dict[str, Any] = {
        **STACK,
        "route": {
            "group_by": ["namespace"],
            "receiver": "hook",
            "group_wait": "100ms",
            "group_interval": "200ms",
        },
        "receivers": [{"name": "hook", "webhook_configs": [{"url": taker.url}]}],
    }
    manager = Manager(require("prometheus-alertmanager"), folder, json.dumps(settings))
    try:
        count = 0
        for posted in _posts(firings):
            manager.ask("/api/v2/alerts", posted)
            count += len({alert["labels"]["namespace"] for alert in posted})
            taker.wait(count)
        time.sleep(1.0)  # what comes beyond them would come with the next interval of the group
    finally:
        manager.close()
        taker.close()
    return Counter(
        (post.body["commonLabels"]["namespace"], post.body["status"]) for post in taker.posts
    )


def _posts(firings: Iterable[Firing]) -> list[list[dict[str, Any]]]:
    """The alerts as Prometheus posts them: those that begin or end at the same moment together."""
    now = datetime.now(UTC).isoformat()
    posts: dict[float, list[dict[str, Any]]] = {}
    for firing in firings:
        begun = {"labels": dict(firing.labels)}
        posts.setdefault(firing.begins_s, []).append(begun)
        ended = {**begun, "startsAt": now, "endsAt": now}
        posts.setdefault(firing.ends_s or 0.0, []).append(ended)
    return [posts[at_s] for at_s in sorted(posts)]
