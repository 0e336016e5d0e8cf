"""A fleet's report from what recording rules added up: the same as from raw series, and only where
those sums are whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import pytest

from kneewatch.agent.report.series import BY_SOURCE, FAILED_REASONS, LOCAL
from kneewatch.dashboards.prometheus.rule_group import (
    SUM_STEP_S,
    SUMMED_COUNTERS,
    SUMMED_ENGINES,
    Plan,
    Record,
    hourly_group,
)
from kneewatch.reports.weekly.measures import COMPLETED, COMPUTED, FAILED
from tests.agent.fleet.test_trouble import between
from tests.agent.running import Main
from tests.collector.oracle import LOOPBACK, Prometheus, running
from tests.collector.servers import Start
from tests.fleet_replica import HOUR_S, TIERS
from tests.fleet_sums import PHASE_S
from tests.fleet_weeks import FleetWeek
from tests.programs import require

END_S = 1_795_262_400
HOURS, EVERY_S, REPLICAS = 9, 60, 10
ONLY = 'namespace="prod"'
HALF = "staging"
"""A namespace whose rules began in the middle."""

NEAR = 0.03
"""Sums may end five minutes before an hour does: so far may figures of nine hours be apart."""

Report = Mapping[str, Any]


@pytest.fixture(scope="module")
def week() -> FleetWeek:
    return made("prod", sums_from_s=0.0)


def made(namespace: str, *, sums_from_s: float) -> FleetWeek:
    return FleetWeek(
        REPLICAS, end_s=END_S, days=HOURS / 24, every_s=EVERY_S, recorded=True,
        sums_from_s=sums_from_s, tiered=True, namespace=namespace,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prometheus(week: FleetWeek) -> Iterator[Prometheus]:
    with running(require("prometheus")) as server:
        week.send(server)
        made(HALF, sums_from_s=END_S - 4 * HOUR_S).send(server)
        yield server


def asked(main: Main, url: str, *more: object, namespace: str = "prod") -> Report:
    done = main(
        "report", "--prometheus", url, "--since", f"{HOURS - 1}h", "--to", END_S, "--slo-ttft", 1,
        "--fleet-queries-per-s", 1000, "--format", "json", "--compare", "none",
        "--selector", f'namespace="{namespace}"', *more,
    )  # fmt: skip
    assert done.status in (0, 1), done.err
    document: Report = json.loads(done.out)
    return document


def url_of(server: Prometheus) -> str:
    return f"http://{LOOPBACK}:{server.port}"


def hours_of(report: Report) -> str:
    (note,) = [
        note for note in report["data_quality"]["notes"] if "counters and histograms: " in note
    ]
    return str(note)


def test_what_is_recorded_is_what_reports_read() -> None:
    assert SUMMED_COUNTERS[COMPUTED] == (BY_SOURCE, (LOCAL,))
    assert SUMMED_COUNTERS[FAILED] == (COMPLETED, (("finished_reason", "|".join(FAILED_REASONS)),))


def test_the_made_up_sums_are_those_that_the_rules_make(
    prometheus: Prometheus, week: FleetWeek
) -> None:
    moments = [incident.start_s + 400 for incident in week.planted] + [
        week.from_s + 500,
        END_S - 1000,
    ]
    compared = 0
    for moment_s in moments:
        at_ms = int(1000 * (moment_s // SUM_STEP_S * SUM_STEP_S + PHASE_S))
        for rule in hourly_group(Plan(selector=ONLY)).rules:
            assert isinstance(rule, Record)
            raw = answer(prometheus, rule.expr, at_ms)
            kept = answer(prometheus, f"{rule.name}{{{ONLY}}}", at_ms)
            assert kept == pytest.approx(raw, rel=1e-9, abs=1e-6), rule.name
            compared += len(raw)
    assert compared > 100 * len(moments)


def answer(server: Prometheus, query: str, at_ms: int) -> dict[frozenset[tuple[str, str]], float]:
    """The values of a query by their labels."""
    return {
        frozenset((name, value) for name, value in series.labels.items() if name != "__name__"): (
            series.value
        )
        for series in server.ask(query, at_ms)
    }


def figures(node: Any, path: str = "") -> Iterator[tuple[str, float]]:  # noqa: ANN401 - JSON
    """Every number of a report by its place."""
    if isinstance(node, dict):
        for name, value in cast("dict[str, Any]", node).items():
            yield from figures(value, f"{path}.{name}")
    elif isinstance(node, list):
        for at, value in enumerate(cast("Sequence[Any]", node)):
            yield from figures(value, f"{path}[{at}]")
    elif isinstance(node, float | int) and not isinstance(node, bool):
        yield path, float(node)


BY_HOUR = ("hours[", "by_weekday[", "spark.")


def of_week(node: Any) -> dict[str, float]:  # noqa: ANN401 - JSON
    """The numbers that are not of a single hour."""
    return {
        place: value for place, value in figures(node) if not any(part in place for part in BY_HOUR)
    }


def test_a_report_from_sums_is_that_from_raw_series(
    main: Main, prometheus: Prometheus, serving: Start
) -> None:
    def without(query: str, document: dict[str, Any]) -> None:
        if "tier:kneewatch" in query:
            document["data"]["result"] = []

    raw_url = serving(between(prometheus.port, without)).url.removesuffix("/metrics")
    summed, raw = asked(main, url_of(prometheus)), asked(main, raw_url)
    assert f"{HOURS - 1} of {HOURS - 1} hours from the sums" in hours_of(summed)
    assert "from raw series" in hours_of(raw)
    for section in ("verdicts", "incidents", "slo", "workloads", "money", "tables"):
        assert of_week(summed[section]) == pytest.approx(
            of_week(raw[section]), rel=NEAR, abs=NEAR
        ), section


def test_one_tier_is_read_from_its_own_sums_one_replica_is_not(
    main: Main, prometheus: Prometheus
) -> None:
    url, tier = url_of(prometheus), f"m on {TIERS[1]}"
    whole = asked(main, url)
    alone = asked(main, url, "--tier", tier)
    assert f"{HOURS - 1} of {HOURS - 1} hours from the sums" in hours_of(alone)
    (objective,) = [row for row in whole["slo"] if row["tier"] == tier]
    assert alone["slo"] == [objective]
    of_replica = asked(main, url, "--target", "chat-4")
    assert "from raw series" in hours_of(of_replica)


def test_hours_without_whole_sums_are_read_from_raw_series(
    main: Main, prometheus: Prometheus, serving: Start
) -> None:
    half = asked(main, url_of(prometheus), namespace=HALF)
    assert f"4 of {HOURS - 1} hours from the sums" in hours_of(half)
    assert "the other hours from raw series" in hours_of(half)

    def fewer(query: str, document: dict[str, Any]) -> None:
        if SUMMED_ENGINES in query:
            for row in document["data"]["result"]:
                row["values"][-1][1] = str(0.9 * float(row["values"][-1][1]))

    url = serving(between(prometheus.port, fewer)).url.removesuffix("/metrics")
    assert f"3 of {HOURS - 1} hours from the sums" in hours_of(asked(main, url, namespace=HALF))
    whole = asked(main, url_of(prometheus))
    assert of_week(half["slo"]) == pytest.approx(of_week(whole["slo"]), rel=NEAR, abs=NEAR)


def test_pools_of_several_namespaces_are_separate_tiers(main: Main, prometheus: Prometheus) -> None:
    report = asked(main, url_of(prometheus), "--selector", 'job="vllm"')
    hopper = f"m on {TIERS[0]}"
    sizes = {size["tier"]: size["replicas_present"] for size in report["sizes"]}
    assert {tier for tier in sizes if tier.startswith(hopper)} == {
        f"{hopper} (prod)", f"{hopper} (staging)",
    }  # fmt: skip
    assert sum(sizes.values()) == 2 * REPLICAS
    served = {slo["tier"]: slo["served_per_s"]["value"] for slo in report["slo"]}
    alone = asked(main, url_of(prometheus))
    (prod,) = [slo for slo in alone["slo"] if slo["tier"] == hopper]
    assert served[f"{hopper} (prod)"] == pytest.approx(prod["served_per_s"]["value"], rel=NEAR)
