"""More incidents than are read sample by sample, and longer ones than are read to their end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kneewatch.agent.fleet.queries import AnswerLog
from kneewatch.agent.report.prometheus.fill import notices_of
from kneewatch.agent.report.prometheus.incidents import REPLAYED_MOST, REPLAYED_S
from tests.agent.running import Main
from tests.collector.oracle import LOOPBACK, running
from tests.fleet_replica import ARRIVAL_PER_S, PREEMPTION_PER_S
from tests.fleet_weeks import FleetWeek
from tests.programs import require

END_S = 1_795_262_400
HOURS, EVERY_S, NEAR_S = 12, 120, 310.0
"""Known to a step of five minutes."""

SETS, LONG_S = 33, 4500


def reported(main: Main, week: FleetWeek) -> Mapping[str, Any]:
    with running(require("prometheus")) as server:
        week.send(server)
        done = main(
            "report", "--prometheus", f"http://{LOOPBACK}:{server.port}", "--since", f"{HOURS}h",
            "--to", END_S, "--compare", "none", "--slo-ttft", 1, "--fleet-queries-per-s", 1000,
            "--format", "json",
        )  # fmt: skip
    assert done.status == 1, done.err
    document: Mapping[str, Any] = json.loads(done.out)
    return document


def test_more_than_are_read_are_all_named_and_nothing_else(main: Main) -> None:
    week = FleetWeek(10, end_s=END_S, days=HOURS / 24, every_s=EVERY_S, sets=SETS)
    report = reported(main, week)
    reported_pairs = [
        (pod, incident["cause"]) for incident in report["incidents"] for pod in incident["replicas"]
    ]
    assert sorted(reported_pairs) == sorted(
        (incident.pod, incident.cause) for incident in week.planted
    )
    begun = {(incident["start_s"], incident["cause"]) for incident in report["incidents"]}
    firsts = {(incident.start_s, incident.cause) for incident in week.planted}
    for start_s, cause in begun:
        assert any(cause == of and start_s == pytest.approx(s, abs=NEAR_S) for s, of in firsts)
    looks = 2 * SETS
    notes = " ".join(report["data_quality"]["notes"])
    assert f"{REPLAYED_MOST} suspect periods" in notes
    assert f"{looks - REPLAYED_MOST} more suspect periods reported from the steps alone" in notes
    bare = [
        incident
        for incident in report["incidents"]
        if not incident["evidence"] and incident["cause"] in CLOSELY
    ]
    assert 0 < len(bare) <= looks - REPLAYED_MOST
    assert report["notices"] == [], "what is told from the steps is not left out"


CLOSELY = ("kv_pressure", "target_down")


def test_a_long_one_is_told_to_its_end(main: Main) -> None:
    assert LONG_S > REPLAYED_S
    week = FleetWeek(
        10, end_s=END_S, days=HOURS / 24, every_s=EVERY_S, sets=1, incident_s=LONG_S
    )  # fmt: skip
    report = reported(main, week)
    by_cause = {incident["cause"]: incident for incident in report["incidents"]}
    assert sorted(by_cause) == sorted(incident.cause for incident in week.planted)
    for cause in CLOSELY:
        lasted_s = by_cause[cause]["end_s"] - by_cause[cause]["start_s"]
        assert lasted_s == pytest.approx(LONG_S, abs=NEAR_S), cause
    cascade = by_cause["kv_pressure"]
    assert cascade["cost"]["preemptions"] == pytest.approx(PREEMPTION_PER_S * LONG_S, rel=0.1)
    assert cascade["evidence"]
    late = sum(tier["budget"]["bad_requests"] for tier in report["slo"])
    assert late == pytest.approx(ARRIVAL_PER_S * LONG_S, rel=0.1)


def test_spans_left_out_are_a_notice() -> None:
    (notice,) = notices_of(AnswerLog(), 3)
    assert "3 more suspect periods not analysed" in notice
    assert "incomplete" in notice
    assert notices_of(AnswerLog(), 0) == ()
