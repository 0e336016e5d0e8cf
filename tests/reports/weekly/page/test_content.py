"""What the HTML says: verdicts, incidents, rows that are unknown, words beside every arrow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.reports.weekly.figures import Period
from kneewatch.reports.weekly.page.formatting import Calendar
from kneewatch.reports.weekly.page.html import ending as ended_how
from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.report import TableRow, WeeklyReport
from tests.reports.triage.html_tree import Node, tree
from tests.reports.weekly.page import examples
from tests.reports.weekly.page.example_service import figure


def page(report: WeeklyReport) -> Node:
    return tree(render(report))


def section(root: Node, name: str) -> Node:
    return next(
        node for node in root.every("section") if node.attributes["aria-labelledby"] == name
    )


@pytest.fixture(scope="module")
def fleet() -> Node:
    return page(examples.fleet())


def test_the_verdict_is_the_first_actions_and_a_line_per_tier(fleet: Node) -> None:
    verdict = section(fleet, "verdict")
    assert verdict.one("p", css="headline").text == "2 tiers: 1 critical, 1 healthy."
    sick, calm = verdict.every("tr", css="line")
    cells = [cell.text for cell in sick.children]
    assert cells[0] == f"{examples.CHAT} 4 engines, 8 GPUs"
    assert cells[1].startswith("Critical The KV cache was too small")
    assert cells[1].endswith("In incidents for 89 min.")
    assert cells[2].startswith("Too small. 12 GPUs needed, 8 present")
    assert cells[3] == "2,688 USD, 1.84 USD per million tokens at 46% utilization."
    assert [cell.text for cell in calm.children][1] == "Healthy No incident, every target kept."
    first, second = verdict.one("table", css="steps").one("tbody").children
    what, whose, takes, at_stake = (cell.text for cell in first.children)
    assert what.startswith(
        "1. Set --kv-cache-dtype fp8 (now auto). llama-3.1-70b on H100: Store the"
    )
    assert first.one("strong").text == "1. Set --kv-cache-dtype fp8 (now auto).", "what to do"
    assert (whose, takes) == ("who runs the engines", "A restart of 4 engines.")
    assert at_stake == "saves 8,760 USD a month"
    assert second.one("strong").text == "2. Run 1 replica instead of 2."
    assert second.children[1].text == "who owns the GPUs"


def test_arrows_stand_with_words_and_only_where_there_is_a_change(fleet: Node) -> None:
    listed = section(fleet, "verdict").one("ul", css="plain")
    assert [item.text for item in listed.every("li")] == [
        f"▲ {examples.CHAT}: TTFT P99 4.2 s, up from 1.3 s, worse",
        f"▼ {examples.CHAT}: Cost 1.84 USD per million tokens, down from 2.31 USD per million "
        "tokens, better",
    ]
    for changed in fleet.every("span", css="change"):
        words = changed.text + (changed.parent.text if changed.parent else "")
        assert ("up" in words or "from" in words) if "▲" in words else True
        assert ("down" in words or "from" in words) if "▼" in words else True


def test_the_worst_tier_stands_first() -> None:
    report = examples.fleet()
    report = replace(report, tiers=report.tiers[::-1], verdicts=report.verdicts[::-1])
    names = [
        line.one("bdi").text for line in section(page(report), "verdict").every("tr", css="line")
    ]
    assert names == [examples.CHAT, examples.CODE]


def test_an_empty_week_says_so_and_nothing_is_healthy() -> None:
    root = page(examples.empty())
    assert section(root, "verdict").one("p", css="headline").text == (
        "No target was watched in this period: health unknown."
    )
    assert "No target was watched in this period." in root.one("main").text
    assert "incidents are unknown" in section(root, "incidents").text
    assert "ealthy" not in root.one("main").text.replace("its health", "")
    for name in ("tables", "slo", "knee", "workload", "size", "money"):
        assert section(root, name).text.endswith("Nothing was watched.")


def test_an_incident_is_told_in_full(fleet: Node) -> None:
    incidents_section = section(fleet, "incidents")
    cascade, queue = incidents_section.every("article")
    assert "Tue 10 Nov, 14:06 to 14:44 (38 min), ended" in cascade.text
    assert "Eviction was seen 4 min 12 s before TTFT P99 left its budget of 2 s." in cascade.text
    assert cascade.one("table", css="cost").one("tbody").text == (
        "1,204 requestsat least 2,061,000 tokens3,110 requests420 requests"
    )
    assert "Applied: worked as predicted" in cascade.one(css="advice").text
    assert "no data after Thu 12 Nov, 14:51; still active then" in queue.text
    assert "No change was recommended." in queue.text
    assert "unknown" in queue.one("table", css="cost").text
    steps = list(cascade.one("figure", css="strip").every("rect"))
    assert [step.attributes["class"] for step in steps] == [
        "fill-info", "fill-warning", "fill-critical", "fill-critical", "fill-warning",
        "fill-critical", "fill-warning",
    ]  # fmt: skip


def test_what_else_was_advised_folds() -> None:
    report = examples.fleet()
    cascade, *others = report.incidents
    more = replace(cascade.advice[0], id="replicas")
    report = replace(report, incidents=(replace(cascade, advice=(*cascade.advice, more)), *others))
    first, *rest = section(page(report), "incidents").one("article").every(css="advice")
    assert not list(first.every("details"))
    assert all("Risk" in incident.one("details").text for incident in rest)
    assert all(incident.one("details").attributes["class"] == "behind" for incident in rest)


def test_a_tier_that_was_not_watched_stands_in_the_verdict_alone() -> None:
    report = examples.fleet()
    chat, code = report.tiers
    root = page(replace(report, tiers=(chat, replace(code, engines=()))))
    assert code.id in section(root, "verdict").text
    assert "tiers that were not watched" in section(root, "verdict").text
    for name in ("tables", "slo", "knee", "workload", "size", "money"):
        assert chat.id in section(root, name).text
        assert code.id not in section(root, name).text


def test_how_to_have_it_is_not_said_twice() -> None:
    report = examples.one()
    (tables,) = report.tables
    row = replace(tables.monitoring[0], state="unknown", enable="name it",
                  missing="no source: name it")  # fmt: skip
    report = replace(report, tables=(replace(tables, monitoring=(row,)),))
    (note,) = section(page(report), "tables").one("ul", css="plain").every("li")
    assert note.text.endswith(": No source: name it.")


def test_every_incident_is_named_though_only_the_worst_are_told_in_full() -> None:
    incidents_section = section(page(examples.many(1, incidents=30)), "incidents")
    assert len(list(incidents_section.one("table", css="index").one("tbody").children)) == 30
    assert len(list(incidents_section.every("article"))) == 20


def rows_of(report: WeeklyReport) -> list[TableRow]:
    return [row for table in report.tables for row in (*table.monitoring, *table.kv)]


def test_every_row_of_the_guides_tables_is_there(fleet: Node) -> None:
    tables = section(fleet, "tables")
    shown = [
        line.children[0].text
        for table in tables.every("table", css="monitoring")
        for line in table.one("tbody").children
        if line.attributes.get("class") != "note"
    ]
    empty = [item.text.partition(":")[0] for item in tables.every("li")]
    rows = rows_of(examples.fleet())
    has_data = [any(figure.value is not None for figure in row.figures) for row in rows]
    assert shown == [row.subject for row, data in zip(rows, has_data, strict=True) if data]
    assert len(empty) == len(rows) - len(shown)


def test_a_row_without_data_says_what_is_missing_and_how_to_have_it(fleet: Node) -> None:
    lines = [item.text for item in section(fleet, "tables").every("li")]
    assert all("To enable it:" in line for line in lines if "not in use" not in line)
    (residency,) = {line for line in lines if "residency" in line}
    assert residency.endswith(
        ": vllm:kv_block_lifetime_seconds is not on the page. To enable it: Start vLLM with "
        "--kv-cache-metrics (0.11 or newer)."
    )


@pytest.mark.parametrize(
    ("state", "shown"), [("trend", "no target"), ("warning", "warning"), ("nonsense", "unknown")]
)
def test_states(state: str, shown: str) -> None:
    report = examples.one()
    row = replace(report.tables[0].monitoring[0], state=state, figures=(figure("", "s", 1.0),))
    report = replace(report, tables=(replace(report.tables[0], monitoring=(row,), kv=()),))
    line, *_ = section(page(report), "tables").one("table", css="monitoring").one("tbody").children
    assert line.children[3].text == shown


def test_figures_of_a_tier_are_those_of_the_model(fleet: Node) -> None:
    slo = section(fleet, "slo").text
    assert "220% spent: exhausted" in slo
    assert "Objective: the first token of 99% of requests within the TTFT target." in slo
    assert "Late: 17,872 of 812,345 requests (2.2%)." in slo
    knee = section(fleet, "knee").text
    assert "41 (37 to 46) requests in flight" in knee
    assert "past the knee, at 127% of C_max" in knee
    assert "at least 15 requests in flight" in knee
    assert "+283%" in knee
    size = section(fleet, "size").text
    assert "none: 29% short of the peak; safety factor 1.3" in size
    assert "saves 12.00 USD/h" in size
    assert "costs 12.00 USD/h" in size
    money = section(fleet, "money").text
    assert "121 GPU-hours, 242 USD" in money
    assert "costs 8,760 USD" in money
    track = section(fleet, "track-record").text
    assert (
        "6 recommendations made: 1 worked as predicted, 1 helped less than predicted, "
        "1 made things worse, 1 applied and not measured yet, 1 not applied yet"
    ) in track
    assert "\N{MINUS SIGN}4%" in track
    quality = section(fleet, "data-quality").text
    assert "Sun 15 Nov, 02:00 to 03:30" in quality
    assert "99.1%" in quality
    assert "kv_cache_dtype auto → fp8" in quality
    assert "Student's t" in quality


def test_in_a_crowd_every_tier_stands_in_every_section() -> None:
    report = examples.many(14)
    root = page(report)
    assert "14 tiers in one file" in root.one("main").text
    for name in ("verdict", "tables", "slo", "knee", "workload", "size", "money"):
        named_section = section(root, name)
        for tier in report.tiers:
            assert tier.id in named_section.text, name
    assert len(list(section(root, "slo").every("table", css="latencies"))) == 8
    (rest,) = section(root, "slo").every("table", css="rest")
    assert len(rest.one("tbody").children) == 6


def test_another_period_than_a_week_is_not_called_one() -> None:
    day = Period(
        examples.FROM_S,
        examples.FROM_S + examples.DAY_S,
        examples.DAY_S,
        1,
    )
    report = replace(examples.one(), period=day, compared=None)
    root = page(report)
    assert root.one("h1").text == "Health report Mon 9 Nov 2026 (Europe/Berlin time)"
    assert "compared with" not in root.one("header").text
    assert "This period" in section(root, "tables").text
    assert "week" not in section(root, "tables").one("thead").text


@pytest.mark.parametrize(
    ("ended", "open_at_s", "ending"),
    [
        ("restarted", None, "ended by a restart"),
        ("", examples.TO_S - 10, "ongoing at the end of the period"),
        (
            "",
            examples.TO_S - examples.DAY_S,
            "no data after Sun 15 Nov, 00:00; still active then",
        ),
    ],
)
def test_an_incident_whose_data_ended_is_not_called_ongoing(
    ended: str, open_at_s: float | None, ending: str
) -> None:
    report = examples.fleet()
    incident = report.incidents[0]
    changed = replace(
        incident,
        ended=ended,
        end_s=incident.end_s if open_at_s is None else None,
        last_s=open_at_s or incident.last_s,
    )
    period = Period(examples.FROM_S, examples.TO_S, 7 * examples.DAY_S, 7)
    assert ended_how(changed, Calendar("Europe/Berlin", period)) == ending
