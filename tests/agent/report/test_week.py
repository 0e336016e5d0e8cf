"""The report of a made-up week: what was planted and nothing else, figures as in the recording."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from kneewatch.agent.store.reader import Reader
from kneewatch.collector.scrape_history import Column
from kneewatch.collector.window import Buckets
from tests.agent.running import run
from tests.agent.store.snapshots import snapshots
from tests.browser import browser, papers
from tests.weeks import DAY_S, ITL_S, START_S, TTFT_S, Planted, Week

TO_S = START_S + 7 * DAY_S
ASKED = ("--to", str(TO_S), "--slo-ttft", str(TTFT_S), "--slo-itl", str(ITL_S))
NEAR_S = 150.0
"""An incident is told this near its planted start: causes take a window, stages the filling."""

__all__ = ["browser"]

Report = Mapping[str, Any]


@pytest.fixture(scope="module")
def report(made_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The week's report as JSON."""
    folder = tmp_path_factory.mktemp("report")
    done = run("report", "--store", made_store, *ASKED, "--out", "report.json", cwd=folder)
    assert (done.status, done.out) == (1, ""), done.err
    document: Report = json.loads((folder / "report.json").read_text())
    return document


def matches(incident: Report, planted: Planted) -> bool:
    """Whether an incident is a planted one."""
    start_s: float = incident["start_s"]
    named: tuple[str, str] = incident["cause"], incident["target"]
    return named == (planted.cause, planted.target) and abs(start_s - planted.start_s) <= NEAR_S


def test_every_planted_incident_is_named_and_nothing_else(report: Report, made_week: Week) -> None:
    incidents = report["incidents"]
    for planted in made_week.planted:
        assert sum(matches(incident, planted) for incident in incidents) == 1, planted
    assert len(incidents) == len(made_week.planted), [
        (incident["cause"], incident["target"]) for incident in incidents
    ]


def test_the_cascade_has_its_stages_its_lead_and_its_cost(report: Report) -> None:
    (cascade,) = [incident for incident in report["incidents"] if incident["kind"] == "cascade"]
    assert max(stage["number"] for stage in cascade["stages"]) >= 3
    assert cascade["stages"][0]["name"] == "filling"
    assert cascade["lead_s"] > 60, "eviction was seen long before TTFT left its budget"
    assert cascade["cost"]["preemptions"] > 100
    assert cascade["cost"]["late_requests"] > 100
    assert cascade["evidence"]
    assert {advice["fate"] for advice in cascade["advice"]} <= {"open", "lapsed"}
    assert cascade["advice"]
    assert any(line["signal"] == "kv_usage_ratio" for line in cascade["lines"])


def test_the_outage_and_the_restart(report: Report) -> None:
    (down,) = [incident for incident in report["incidents"] if incident["cause"] == "target_down"]
    assert down["cost"]["lost_requests"] > 100
    restarts = [change for change in report["data_quality"]["changes"] if change["restart"]]
    assert {(restart["target"], restart["what"]) for restart in restarts} == {
        ("chat-0", "restarted, configuration unchanged"),
        ("shared-0", "restarted, configuration unchanged"),
    }
    (chat,) = [
        target for target in report["data_quality"]["targets"] if target["target"] == "chat-0"
    ]
    (gap,) = chat["gaps"]
    assert "refused" in gap["why"]
    assert gap["to_s"] - gap["from_s"] == pytest.approx(240, abs=10)


def test_tiers_are_told_apart(report: Report) -> None:
    assert [tier["id"] for tier in report["tiers"]] == [
        "tiny on b200", "tiny on h100", "tiny on h200",
    ]  # fmt: skip
    by_tier = {verdict["tier"]: verdict for verdict in report["verdicts"]}
    assert by_tier["tiny on h200"]["health"] == "critical"
    assert by_tier["tiny on b200"]["health"] == "warning"
    assert by_tier["tiny on h200"]["action"]["recommendation"]


def test_engines_that_came_and_went(report: Report) -> None:
    spans = {engine["target"]: engine for tier in report["tiers"] for engine in tier["engines"]}
    assert spans["chat-0"]["watched_ratio"] > 0.99
    assert spans["shared-0"]["first_s"] == pytest.approx(START_S + 3 * DAY_S + 20 * 3600, abs=5)
    assert spans["shared-0"]["last_s"] == pytest.approx(TO_S, abs=300)
    assert spans["draft-0"]["last_s"] == pytest.approx(START_S + 2 * DAY_S + 18 * 3600, abs=300)
    assert spans["draft-0"]["watched_ratio"] == pytest.approx(29.5 / 168, abs=0.01)
    (gone,) = [
        target for target in report["data_quality"]["targets"] if target["target"] == "draft-0"
    ]
    assert gone["gap_s"] == pytest.approx(4 * DAY_S + 6 * 3600, rel=0.01)


def test_the_load_of_the_days_is_seen(report: Report) -> None:
    slo = next(objective for objective in report["slo"] if objective["tier"] == "tiny on h100")
    requests = {(cell["weekday"], cell["hour"]): cell["requests"] for cell in slo["by_weekday"]}
    assert requests[2, 16] > 4 * requests[2, 4], "day and night"
    assert requests[2, 16] > 1.3 * requests[6, 16], "weekday and weekend"
    knee = next(knee for knee in report["knees"] if knee["tier"] == "tiny on h100")
    assert knee["c_max"] is not None
    assert knee["usable_requests_per_s"]["expected"] > 5


def counted(store: Path, targets: tuple[str, ...]) -> dict[tuple[str, str], float]:
    """What engines counted over the week, from their own counters, one snapshot after another."""
    reader = Reader(store)
    total: dict[tuple[str, str], float] = {}
    for engine in reader.engines():
        if engine.target not in targets:
            continue
        kept = snapshots(store, engine.id, from_s=START_S, to_s=TO_S)
        for before, after in pairwise(kept):
            for column, value in after.values.items():
                was = before.values.get(column, 0.0)
                gained = value if value < was else value - was
                key = key_of(column)
                total[key] = total.get(key, 0.0) + gained
    reader.close()
    return total


def key_of(column: Column) -> tuple[str, str]:
    """A metric and its part; of prompt tokens by source what was computed."""
    source = dict(column.labels).get("source", "")
    return column.metric, column.part or source


@pytest.mark.parametrize(
    ("tier", "targets"),
    [("tiny on h100", ("chat-0", "shared-0")), ("tiny on h200", ("tight-0",))],
)
def test_figures_are_those_of_the_raw_counters(
    report: Report, made_store: Path, tier: str, targets: tuple[str, ...]
) -> None:
    total = counted(made_store, targets)
    slo = next(objective for objective in report["slo"] if objective["tier"] == tier)
    for latency, metric in zip(
        slo["latencies"],
        (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
        ),
        strict=False,
    ):
        bounds = sorted(float(part) for name, part in total if name == metric and is_bound(part))
        counts = [total[metric, repr(bound)] for bound in bounds]
        buckets = Buckets.of(tuple(bounds), tuple(counts))
        assert latency["observations"] == pytest.approx(counts[-1], rel=0.002)
        for percent in (50, 95, 99):
            wanted = buckets.quantile(percent / 100)
            assert latency[f"p{percent}"]["value"] == pytest.approx(wanted, rel=0.01)
        mean = total[metric, "sum"] / counts[-1]
        assert latency["mean"]["value"] == pytest.approx(mean, rel=0.002)
    rows = {
        row["subject"]: row["figures"][0]["value"]
        for tables in report["tables"]
        if tables["tier"] == tier
        for row in (*tables["monitoring"], *tables["kv"])
    }
    hits = total["prefix_cache_hits", ""] / total["prefix_cache_queries", ""]
    assert rows["Prefix cache hit rate"] == pytest.approx(hits, rel=0.01)
    saved = 1 - total["prompt_tokens_by_source", "local_compute"] / total["prompt_tokens", ""]
    assert rows["Prefix cache reuse ratio"] == pytest.approx(saved, rel=0.01, abs=0.001)
    preempted = sum(
        incident["cost"]["preemptions"]
        for incident in report["incidents"]
        if incident["tier"] == tier
    )
    assert preempted == pytest.approx(total["num_preemptions", ""], rel=0.05, abs=1)


def is_bound(part: str) -> bool:
    """Whether a part of a histogram is a bucket."""
    try:
        return not math.isnan(float(part))
    except ValueError:
        return False


def test_four_servers_are_six_pages_with_targets_and_without(
    browser: Browser, made_store: Path, tmp_path: Path
) -> None:
    for asked in (ASKED, ASKED[:2]):
        run("report", "--store", made_store, *asked, "--out", "report.html", cwd=tmp_path)
        page = browser.new_page()
        page.goto((tmp_path / "report.html").as_uri())
        assert papers(page.pdf(prefer_css_page_size=True, print_background=True)) <= 6
        page.close()
