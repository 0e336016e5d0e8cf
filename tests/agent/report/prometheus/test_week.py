"""The report of a made-up fleet in a real Prometheus: what was planted, figures as they were made,
what is partial said."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from kneewatch.agent.report.prometheus.fill import METHODS
from kneewatch.agent.report.schedule import ReportJob
from kneewatch.agent.settings.effective import load
from kneewatch.agent.store.database import connect
from kneewatch.reports.json_schemas import schema as schema_of
from kneewatch.reports.weekly.observed import Tally
from tests.agent.fleet.test_trouble import between
from tests.agent.running import Ended, Main
from tests.collector.oracle import LOOPBACK, Prometheus, running
from tests.collector.prometheus.replies import failed
from tests.collector.servers import Start
from tests.fleet_replica import (
    ARRIVAL_PER_S,
    BUSY,
    GPU_MEMORY_RATIO,
    GPUS,
    HISTOGRAMS,
    INCIDENT_S,
    USUAL_SHARE,
)
from tests.fleet_weeks import FleetWeek
from tests.programs import require

REPLICAS, DAYS, EVERY_S = 10, 0.5, 60
END_S = 1_795_262_400
NEAR_S = 150.0
HOPPER, AMPERE = (f"m on {gpu}" for gpu in GPUS)
TTFT = "time_to_first_token_seconds"

Report = Mapping[str, Any]


@pytest.fixture(scope="module")
def week() -> FleetWeek:
    return FleetWeek(REPLICAS, end_s=END_S, days=DAYS, every_s=EVERY_S, recorded=True)


@pytest.fixture(scope="module")
def prometheus(week: FleetWeek) -> Iterator[Prometheus]:
    with running(require("prometheus")) as server:
        week.send(server)
        yield server


def asked(main: Main, url: str, *more: object) -> Ended:
    return main(
        "report", "--prometheus", url, "--since", "12h", "--to", END_S, "--slo-ttft", 1,
        "--fleet-queries-per-s", 1000, "--format", "json", *more,
    )  # fmt: skip


def url_of(server: Prometheus) -> str:
    return f"http://{LOOPBACK}:{server.port}"


@pytest.fixture
def report(main: Main, prometheus: Prometheus) -> Report:
    done = asked(main, url_of(prometheus), "--compare", "none")
    assert done.status == 1, done.err
    document: Report = json.loads(done.out)
    return document


def of_tier(rows: Any, tier: str) -> Any:  # noqa: ANN401 - JSON
    (row,) = [tier_row for tier_row in rows if tier_row["tier"] == tier]
    return row


def test_the_planted_is_named_and_nothing_else_and_the_figures_are_those_made(
    report: Report, week: FleetWeek
) -> None:
    pairs = [(incident["cause"], incident["target"]) for incident in report["incidents"]]
    assert sorted(pairs) == sorted((incident.cause, incident.pod) for incident in week.planted)
    for planted in week.planted:
        (reported,) = [
            incident for incident in report["incidents"] if incident["target"] == planted.pod
        ]
        assert reported["start_s"] == pytest.approx(planted.start_s, abs=NEAR_S)
    (cascade,) = [incident for incident in report["incidents"] if incident["kind"] == "cascade"]
    assert cascade["stages"][-1]["number"] >= 3
    assert cascade["end_s"] - cascade["start_s"] == pytest.approx(INCIDENT_S, abs=NEAR_S)
    assert cascade["cost"]["preemptions"] == pytest.approx(4 * INCIDENT_S, rel=0.15)
    assert cascade["cost"]["late_requests"] == pytest.approx(ARRIVAL_PER_S * INCIDENT_S, rel=0.15)
    assert cascade["evidence"]
    assert {advised["fate"] for advised in cascade["advice"]} == {"unknown"}
    assert report["track_record"]["unknown"] == report["track_record"]["made"] > 0

    slo = of_tier(report["slo"], HOPPER)
    tally = made_tally(week, [at for at in range(REPLICAS) if at % 5 != 4])
    ttft = slo["latencies"][0]
    assert ttft["observations"] == pytest.approx(tally.count, rel=0.01)
    for percent in (50, 95, 99):
        assert ttft[f"p{percent}"]["value"] == pytest.approx(
            tally.quantile(percent / 100), rel=0.02
        )
    assert slo["budget"]["bad_requests"] == pytest.approx(ARRIVAL_PER_S * INCIDENT_S, rel=0.1)
    hits = [
        row["figures"][0]["value"]
        for row in of_tier(report["tables"], AMPERE)["monitoring"]
        if row["subject"] == "Prefix cache hit rate"
    ]
    assert hits == [pytest.approx(0.7)]
    rows = {row["subject"]: row for row in of_tier(report["tables"], HOPPER)["monitoring"]}
    memory, busy = rows["GPU memory utilization"], rows["GPU compute utilization"]
    load = np.mean([load_of(week, at) for at in range(REPLICAS) if at % 5 != 4])
    assert memory["figures"][0]["value"] == pytest.approx(GPU_MEMORY_RATIO)
    assert busy["figures"][0]["value"] == pytest.approx(BUSY * float(load), rel=0.02)
    knee = of_tier(report["knees"], HOPPER)
    assert knee["peak_in_flight"] == pytest.approx(24 + 12), "in the cascade"
    assert of_tier(report["workloads"], AMPERE)["prompt"]["mean"]["value"] == pytest.approx(1200)

    gaps = {target["target"]: target["gap_s"] for target in report["data_quality"]["targets"]}
    (down,) = [incident.pod for incident in week.planted if incident.cause == "target_down"]
    assert gaps.pop(down) == pytest.approx(INCIDENT_S, abs=120)
    assert set(gaps.values()) == {0}
    (change,) = report["data_quality"]["changes"]
    assert change["what"] == "restarted, configuration unchanged"
    methods = {method["figure"]: method["how"] for method in report["data_quality"]["methods"]}
    assert methods["incidents"].startswith("Each engine's steps are searched")
    assert {method.figure for method in METHODS} <= methods.keys()
    notes = " ".join(report["data_quality"]["notes"])
    assert "GPU figures of 10 of 10 engines" in notes
    assert "scrapes every 60 s" in notes
    assert "gauges as means of 2 min" in notes

    schema = schema_of("report")
    validator: Any = Draft202012Validator(schema)  # its stubs leave an argument untyped
    assert [error.message for error in validator.iter_errors(report)] == []


def load_of(week: FleetWeek, at: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What an engine usually has to do, by scrape."""
    hour = (week.times % 86_400) / 3600
    return np.maximum(0.05, 0.55 + 0.45 * np.sin((hour - 9 + at % 3) * math.pi / 12))


def made_tally(week: FleetWeek, replicas: Sequence[int]) -> Tally:
    """What a tier's TTFT histogram gained over the time, from the engines' own load."""
    spread = HISTOGRAMS[TTFT]
    bounds = (*spread.bounds, math.inf)
    counts = np.zeros(len(bounds))
    for at in replicas:
        begun = ARRIVAL_PER_S * load_of(week, at) * week.every_s
        pressed = np.zeros(len(begun), dtype=np.bool_)
        for incident in week.planted:
            if incident.replica == at and incident.cause == "kv_pressure":
                pressed = (week.times >= incident.start_s) & (
                    week.times < incident.start_s + INCIDENT_S
                )
        parts = (
            (float(begun[~pressed].sum()), spread.usual),
            (ARRIVAL_PER_S * week.every_s * int(pressed.sum()), spread.pressed),
        )
        for requests, (most, rest) in parts:
            counts += [
                requests * (USUAL_SHARE * (most <= le) + (1 - USUAL_SHARE) * (rest <= le))
                for le in bounds
            ]
    return Tally(bounds, tuple(counts.tolist()), 0.0)


def test_a_tier_and_a_target_are_told_alone(main: Main, prometheus: Prometheus) -> None:
    alone = ("--compare", "none")
    quiet = asked(main, url_of(prometheus), "--tier", AMPERE, *alone)
    assert quiet.status == 0, quiet.err
    document = json.loads(quiet.out)
    assert [tier["id"] for tier in document["tiers"]] == [AMPERE]
    assert document["incidents"] == []
    whole = document["slo"][0]["latencies"][0]["observations"]
    answer = json.loads(asked(main, url_of(prometheus), "--target", "chat-4", *alone).out)
    (tier,) = answer["tiers"]
    assert [engine["target"] for engine in tier["engines"]] == ["chat-4"]
    observed = answer["slo"][0]["latencies"][0]["observations"]
    assert observed == pytest.approx(whole / 2, rel=0.1)


def test_before_there_was_anything_nothing_is_compared(
    main: Main, prometheus: Prometheus, tmp_path: Path
) -> None:
    page = tmp_path / "week.html"
    done = main(
        "report", "--prometheus", url_of(prometheus), "--since", "6h", "--to", END_S, "--tier",
        AMPERE, "--fleet-queries-per-s", 1000, "--out", page,
    )  # fmt: skip
    assert done.status == 0, done.err
    text = page.read_text()
    assert "Prefix cache hit rate" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.http", text)


def test_what_has_no_answer_is_unknown_and_said(
    main: Main, prometheus: Prometheus, serving: Start
) -> None:
    def broken(query: str, document: dict[str, object]) -> bytes | None:
        if f"{TTFT}_bucket" in query:
            return failed("400 Bad Request", "no such thing")
        if "kv_cache_usage_perc" in query:
            document["warnings"] = ["shard 3 is down"]
        return None

    server = serving(between(prometheus.port, broken))
    done = asked(main, server.url.removesuffix("/metrics"), "--tier", AMPERE, "--compare", "none")
    assert done.status == 2, "nothing worse is seen, and not all was seen"
    document = json.loads(done.out)
    assert [verdict["health"] for verdict in document["verdicts"]] == ["unknown"]
    notices = " ".join(document["notices"])
    assert "shard 3 is down" in notices
    assert "no such thing" in notices
    assert document["slo"][0]["latencies"][0]["p99"]["value"] is None
    assert document["slo"][0]["latencies"][2]["p99"]["value"] is not None


def test_a_daemon_without_targets_of_its_own_reports_its_fleet(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    (tmp_path / "kneewatch.toml").write_text(
        "slo.ttft_p99_s = 1.0\nfleet.queries_per_s = 1000\n"
        '[report]\ncron = "0 6 * * mon"\nsince_s = 21600.0\ntimezone = "Asia/Kathmandu"\n'
    )
    settings = load(file=tmp_path / "kneewatch.toml", environ={}, flags={})
    connect(tmp_path / "history.db").close()
    job = ReportJob(
        settings,
        tmp_path / "history.db",
        clock=lambda: END_S + 1799.0,
        fleet=(url_of(prometheus), 'namespace="prod"'),
    )
    job.due_s = END_S + 1799.0
    job.cycle()
    (page,) = (tmp_path / "reports").glob("report-*.json")
    report = json.loads(page.read_text())
    assert report["filters"] == ['selector namespace="prod"']
    assert {tier["id"] for tier in report["tiers"]} == {HOPPER, AMPERE}
    assert (report["period"]["from_s"], report["period"]["to_s"]) == (END_S - 21600, END_S)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--selector", 'namespace="none"'), "no series of vLLM servers that match"),
        (("--selector", "up{"), "--selector"),
        (("--target", "nobody"), "no such target in this period; it has chat-0"),
        (("--fleet-label", "rack=x"), "no part 'rack'"),
        (("--to", str(END_S - 30 * 86_400)), "no series of vLLM servers"),
    ],
)
def test_what_cannot_be_is_said(
    main: Main, prometheus: Prometheus, more: tuple[str, ...], said: str
) -> None:
    done = asked(main, url_of(prometheus), *more)
    assert (done.status, done.out) == (2, "")
    assert said in done.err


def test_no_server_and_no_prometheus(main: Main) -> None:
    done = asked(main, "http://127.0.0.1:9")
    assert (done.status, done.out) == (2, "")
    assert "Prometheus runs there" in done.err
    done = main("report", "--selector", 'a="b"')
    assert done.status == 2
    assert "--selector needs --prometheus" in done.err
