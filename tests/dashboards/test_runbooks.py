"""Exported alerts link to the page about their cause or rule."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from msgspec.structs import replace

from kneewatch.agent.settings.table import BY_KEY
from kneewatch.dashboards.prometheus.rule_files import groups
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan
from kneewatch.rules.facts import Targets
from tests.dashboards.boards import BOARDS
from tests.dashboards.grafana_boards import VARIABLES

DOCS = Path(__file__).parents[2] / "docs"
TARGETS = Targets(2.0, 0.1)


def alerts_of(plan: Plan) -> list[Alert]:
    """All alerts of a plan."""
    return [rule for group in groups(plan) for rule in group.rules if isinstance(rule, Alert)]


def test_every_alert_links_to_its_dashboard() -> None:
    plan = Plan(grafana_url="https://grafana/", targets=TARGETS)
    variables = {board.uid: {name for name, *_ in VARIABLES} for board in BOARDS}
    for alert in alerts_of(plan):
        link = urlsplit(alert.annotations["dashboard_url"])
        board, chosen = link.path.removeprefix("/d/"), parse_qs(link.query)
        assert {name.removeprefix("var-") for name in chosen} <= variables[board], alert.name
        assert chosen, "it opens with the alert's replica, node or model"
    assert not any("dashboard_url" in alert.annotations for alert in alerts_of(Plan()))


def test_every_alert_links_to_a_page_that_exists() -> None:
    plan = Plan(targets=TARGETS)
    daemon = replace(plan, triage_url="https://gpu-7:9877/triage")
    default = f"http://{BY_KEY['listen'].default}/docs"
    for base, of in (
        (default, plan),
        ("https://gpu-7:9877/docs", daemon),
        ("https://wiki/kneewatch", replace(daemon, docs_url="https://wiki/kneewatch")),
    ):
        for alert in alerts_of(of):
            page = alert.annotations["runbook_url"].removeprefix(f"{base}/")
            if "{{" not in page:
                assert (DOCS / f"{page}.md").exists(), alert.name


def test_an_alert_about_a_replica_links_to_its_triage_page() -> None:
    plan = Plan(triage_url="https://gpu-7:9877/triage", targets=TARGETS)
    for alert in alerts_of(plan):
        if alert.labels["kneewatch"] in ("cause", "finding"):
            link = alert.annotations["triage"]
            assert link == "https://gpu-7:9877/triage/{{ $labels.instance }}", alert.name
