"""A fleet that lives under the exported rules: faults during a rollout are told in time and once.

`python -m tests.dashboards.living` plays operations too, at each scrape interval.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kneewatch.dashboards.prometheus.causes import inhibit_rules
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.agent.notify.test_alertmanager_receiver import Manager
from tests.agent.notify.web import Taker
from tests.dashboards.living import Firing, fired, living
from tests.dashboards.test_inhibition import STACK
from tests.living_fleet import FAULTS_S, MIN_S, with_faults
from tests.programs import require

SCRAPE_S = 60
WITHIN_S = 6 * MIN_S
TOLD = {
    "code": "KneewatchCauseEngineStalled",
    "big": "KneewatchGpuFault",
    "rag": "KneewatchCauseKvPressure",
    "late": "KneewatchCauseQueueSaturation",
    "chat": "KneewatchTargetDown",
    "lost": "KneewatchPoolVanished",
}
"""The alert for each fault of `with_faults`, by namespace."""


def test_faults_during_a_rollout_are_one_notification_each(tmp_path: Path) -> None:
    require("promtool")
    plan = Plan(scrape_s=SCRAPE_S, interval_s=SCRAPE_S)
    firings = fired(with_faults(living(SCRAPE_S)), plan, tmp_path, to_s=27 * MIN_S)
    alerts = sorted((firing.labels["namespace"], firing.labels["alertname"]) for firing in firings)
    assert alerts == sorted(TOLD.items())
    late = [str(firing) for firing in firings if firing.begins_s - FAULTS_S[0] > WITHIN_S]
    assert late == []
    assert [str(firing) for firing in firings if firing.ends_s is None] == []
    assert notified(firings, plan, tmp_path) == Counter(
        (namespace, status) for namespace in TOLD for status in ("firing", "resolved")
    )


def notified(firings: Iterable[Firing], plan: Plan, folder: Path) -> Counter[tuple[str, str]]:
    """What a real Alertmanager in kube-prometheus-stack's default sends: the notifications with
    alerts that fire and that are resolved, by namespace. Only its waiting is shortened."""
    taker = Taker()
    settings: dict[str, Any] = {
        **STACK,
        "inhibit_rules": [*STACK["inhibit_rules"], *inhibit_rules(plan)],
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
            count += len(posted)
            taker.wait(count)
        time.sleep(1.0)  # what comes beyond them would come with the next interval of the group
    finally:
        manager.close()
        taker.close()
    return Counter(
        (post.body["commonLabels"]["namespace"], alert["status"])
        for post in taker.posts
        for alert in post.body["alerts"]
    )


def _posts(firings: Iterable[Firing]) -> list[list[dict[str, Any]]]:
    """The alerts as Prometheus posts them, in the order in which they begin and end."""
    now = datetime.now(UTC).isoformat()
    events: list[tuple[float, dict[str, Any]]] = []
    for firing in firings:
        alert = {"labels": dict(firing.labels)}
        events += [
            (firing.begins_s, alert),
            (firing.ends_s or 0.0, {**alert, "startsAt": now, "endsAt": now}),
        ]
    return [[alert] for _, alert in sorted(events, key=lambda event: event[0])]
