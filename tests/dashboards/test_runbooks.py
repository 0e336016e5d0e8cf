"""Exported alerts link to the page about their cause or rule."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from msgspec.structs import replace

from kneewatch.dashboards.grafana.boards import BOARDS
from kneewatch.dashboards.grafana.build import VARIABLES
from kneewatch.dashboards.prometheus.rule_files import groups
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan


def alerts_of(plan: Plan) -> list[Alert]:
    """All alerts of a plan."""
    return [rule for group in groups(plan) for rule in group.rules if isinstance(rule, Alert)]


def test_every_alert_links_to_its_dashboard() -> None:
    plan = Plan(grafana_url="https://grafana/", gpu_join=(("pod", "pod"),))
    variables = {board.uid: {name for name, *_ in VARIABLES} for board in BOARDS}
    for alert in alerts_of(plan):
        if alert.name == "KneewatchNoMetrics":
            continue
        link = urlsplit(alert.annotations["dashboard_url"])
        board, chosen = link.path.removeprefix("/d/"), parse_qs(link.query)
        assert {name.removeprefix("var-") for name in chosen} <= variables[board], alert.name
        assert chosen, "it opens with the alert's replica, node or model"
    assert not any("dashboard_url" in alert.annotations for alert in alerts_of(Plan()))


def test_every_alert_about_a_cause_or_rule_links_to_its_page() -> None:
    plan = Plan(triage_url="https://gpu-7:9877/triage", gpu_join=(("pod", "pod"),))
    for base, of in (
        ("https://gpu-7:9877/docs", plan),
        ("https://wiki/kneewatch", replace(plan, docs_url="https://wiki/kneewatch")),
    ):
        for alert in alerts_of(of):
            cause = alert.labels.get("cause")
            link = alert.annotations.get("runbook_url", "")
            if cause:
                assert link == f"{base}/causes/{cause}", alert.name
            elif alert.name != "KneewatchNoMetrics":
                assert link.startswith(base), alert.name
    assert not any("runbook_url" in alert.annotations for alert in alerts_of(Plan()))
