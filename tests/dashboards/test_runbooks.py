"""Exported alerts link to the page about their cause or rule."""

from __future__ import annotations

from dataclasses import replace

from kneewatch.dashboards.prometheus.rule_files import groups
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan


def test_every_alert_about_a_cause_or_rule_links_to_its_page() -> None:
    plan = Plan(triage_url="https://gpu-7:9877/triage", gpu_join=(("pod", "pod"),))
    for base, of in (
        ("https://gpu-7:9877/docs", plan),
        ("https://wiki/kneewatch", replace(plan, docs_url="https://wiki/kneewatch")),
    ):
        alerts = [rule for group in groups(of) for rule in group.rules if isinstance(rule, Alert)]
        for alert in alerts:
            cause = alert.labels.get("cause")
            link = alert.annotations.get("runbook_url", "")
            if cause:
                assert link == f"{base}/causes/{cause}", alert.name
            elif alert.name != "KneewatchNoMetrics":
                assert link.startswith(base), alert.name
    unlinked = [rule for group in groups(Plan()) for rule in group.rules if isinstance(rule, Alert)]
    assert not any("runbook_url" in alert.annotations for alert in unlinked)
