"""What is drawn: paths that keep their points, sparklines, fields, strips, charts with axes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.reports.templates import environment
from kneewatch.reports.weekly.figures import Period, Spark
from kneewatch.reports.weekly.page import charts as plots
from kneewatch.reports.weekly.page.charts import (
    LEVELS,
    TABLE_ROWS,
    TALL,
    WIDE,
    alternative_text,
    axis_of,
    charts,
    heat_level,
    heat_words,
    path,
    placed,
    run_path,
    signal_rows,
    spark_line,
)
from kneewatch.reports.weekly.page.formatting import Calendar
from kneewatch.reports.weekly.page.html import FILTERS, GLOBALS, read_template, render
from tests.reports.triage.html_tree import Node, tree
from tests.reports.weekly.page import (
    example_incidents,
    example_service,
    examples,
)

CALENDAR = Calendar(examples.ZONE, Period(examples.FROM_S, examples.TO_S, 1.0, 7))
NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?")
places = st.floats(-1000, 1000)


def points_of(drawn: str) -> list[list[tuple[float, float]]]:
    """The points of a path: M, then steps; a dot's step of nothing is left out."""
    runs: list[list[tuple[float, float]]] = []
    for part in drawn.split("M")[1:]:
        numbers = [float(number) for number in NUMBER.findall(part.replace("h0", ""))]
        x, y = numbers[:2]
        run = [(x, y)]
        for dx, dy in zip(numbers[2::2], numbers[3::2], strict=True):
            x, y = x + dx, y + dy
            run.append((x, y))
        runs.append(run)
    return runs


@given(st.lists(st.tuples(places, places), min_size=1, max_size=60), st.integers(0, 2))
def test_a_path_keeps_its_points_without_drift(
    points: list[tuple[float, float]], decimals: int
) -> None:
    (path_points,) = points_of(run_path(points, decimals=decimals))
    least = 0.5 * 10**-decimals + 1e-6
    assert len(path_points) == len(points)
    for point, other in zip(path_points, points, strict=True):
        assert point == pytest.approx(other, abs=least)


def test_a_gap_is_a_gap_and_a_lone_point_a_dot() -> None:
    assert path([(0, 0), (1, -2), None, (5, 5), None, (7, 7), (8, 7)]) == "M0 0l1-2M5 5h0M7 7l1 0"
    assert run_path([(0, 0), (0.5, 0.25)], decimals=2) == "M0 0l.5 .25"
    assert path([None, None]) == ""


def test_a_sparkline_stands_on_nothing_and_in_its_band() -> None:
    drawn = spark_line(Spark(0.0, 1.0, "ratio", (0.5, None, 1.0)), low=0.75, high=0.9)
    assert drawn is not None
    (first,), (last,) = points_of(drawn.path)
    assert first[0] == 0
    assert last[0] == WIDE
    per_unit = TALL / 1.05
    assert first[1] == pytest.approx(TALL - 0.5 * per_unit, abs=0.5)
    assert drawn.band == pytest.approx((TALL - 0.9 * per_unit, 0.15 * per_unit))
    assert drawn.desc == "From 50% to 100%."


@pytest.mark.parametrize("values", [(), (None,), (float("nan"),)])
def test_nothing_known_is_nothing_drawn(values: tuple[float | None, ...]) -> None:
    assert spark_line(Spark(0.0, 1.0, "s", values), low=None, high=None) is None


def test_values_of_nothing_are_drawn() -> None:
    drawn = spark_line(Spark(0.0, 1.0, "s", (0.0, 0.0)), low=None, high=None)
    assert drawn is not None
    assert drawn.path == f"M0 {TALL}l{WIDE} 0"


def drawn_bar(parts: Sequence[tuple[str, float, str]], whole: float) -> Node:
    template = environment(read_template, FILTERS, GLOBALS).get_template("bits.html.j2")
    macros: Any = template.make_module({"calendar": CALENDAR})
    return tree(str(macros.bar("b", parts, whole, "k")))


def test_parts_fill_a_bar_and_never_more() -> None:
    root = drawn_bar([("a", 60.0, "60"), ("b", 50.0, "50"), ("c", 1.0, "1")], whole=100.0)
    ground, *parts = root.every("rect")
    assert ground.attributes["width"] == "100%"
    assert [(part.attributes["x"], part.attributes["width"]) for part in parts] == [
        ("0.00%", "60.00%"), ("60.00%", "40.00%"), ("100.00%", "0.00%")
    ]  # fmt: skip
    assert [letter.text for letter in root.every("text")] == ["a", "b"]


@pytest.fixture(scope="module")
def fleet() -> Node:
    return tree(render(examples.fleet()))


def test_the_field_of_hours_tells_each_hour_once(fleet: Node) -> None:
    field, *_ = fleet.every("svg", css="heat")
    names = [path.attributes["class"] for path in field.every("path")]
    assert len(names) == 7 * 24
    assert names.count("heat-4") == 3
    assert names.count("heat-unseen") == 1
    assert "Tue 14:00 at 31x the budget" in field.one("desc").text
    (rows,) = [
        [[cell.text for cell in row.children] for row in table.one("tbody").children]
        for table in fleet.every("table", css="numbers")
        if "Burn rate" in table.text
    ][:1]
    assert len(rows) == 24
    assert rows[2] == ["02:00", *["0.0241"] * 5, "0.00842", "?"]


@pytest.mark.parametrize(
    ("requests", "burn", "name"),
    [(None, None, "heat-unseen"), (0.0, None, "heat-none"), (5.0, None, "heat-unseen"),
     (5.0, 0.0, "heat-0"), (5.0, 1.0, "heat-1"), (5.0, 1.1, "heat-2"), (5.0, 14.5, "heat-4")],
)  # fmt: skip
def test_an_hour_that_nobody_watched_is_not_a_good_one(
    requests: float | None, burn: float | None, name: str
) -> None:
    slo = example_service.slo("t", examples.FROM_S, 0)
    cell = replace(slo.by_weekday[5], requests=requests, burn=burn)
    assert heat_level(cell)[0] == name
    words = "" if burn is None else f"{burn:g}"
    assert heat_words(cell) == {"heat-unseen": "?", "heat-none": "-"}.get(name, words)
    assert [side for *_, side in LEVELS] == sorted(side for *_, side in LEVELS)


def test_an_incident_draws_stages_as_steps_on_one_ground(fleet: Node) -> None:
    article, *_ = fleet.every("article", css="incident")
    strip, *small = (figure.one("svg") for figure in article.every("figure"))
    sizes = [
        {name: float(rect.attributes[name].rstrip("%")) for name in ("x", "y", "width", "height")}
        for rect in strip.every("rect")
    ]
    steps = [size for size in sizes if size["height"] != 5]
    heights = [step["height"] for step in steps]
    assert heights[3] == max(heights)
    assert heights[1] == heights[4]
    assert len({step["y"] + step["height"] for step in steps}) == 1
    assert all(size["x"] >= 0 and size["x"] + size["width"] <= 100 for size in sizes)
    words = [text.text for text in strip.every("text")]
    for shown in ("14:00", "14:20", "14:40", "preemption starts", "TTFT P99 over target"):
        assert shown in words
    assert [word for word in words if "_" in word] == ["kv_pressure", "past_knee"]
    (late,) = [chart for chart in small if "target" in chart.one("desc").text]
    assert "From 800 ms to 31 s" in late.one("desc").text
    assert "target 2.0 s" in late.one("desc").text


def test_the_numbers_of_an_incident_are_few() -> None:
    incident = example_incidents.cascade("t", examples.FROM_S + 38.1 * 3600)
    rows = signal_rows(incident.lines)
    assert len(rows) <= TABLE_ROWS < len(incident.lines[0].times_s)
    assert rows[0][1] == ["70%", "0%/s", "800 ms", "0", "2,100/s"]


def test_an_incident_that_is_a_moment_or_has_no_lines() -> None:
    incident = example_incidents.queue("t", examples.FROM_S)
    moment = replace(incident, end_s=incident.start_s, last_s=incident.start_s, lines=(), causes=())
    x, width = placed(axis_of(moment), moment)
    assert 0 <= x <= 100 - width
    assert width > 0
    assert signal_rows(moment.lines) == []
    assert alternative_text(moment, CALENDAR) == moment.title


def test_a_chart_has_only_styled_roles_and_no_ids() -> None:
    slo = example_service.slo("t", examples.FROM_S, 0)
    knee = example_service.knee("t", examples.FROM_S, 0)
    drawn = charts(slo, knee, CALENDAR)
    assert len(drawn) == 4
    for plot in drawn.values():
        assert plot is not None
        for role in re.findall(r'class="([^"]*)"', plot.inside):
            assert f".{role}" in read_template("report.css")
        assert not re.search(r"\bid=|style=|url\(|http", plot.inside)
        assert plot.desc.endswith(".")
    latency = drawn["latency"]
    assert latency is not None
    words = re.findall(r"<text[^>]*>([^<]*)</text>", latency.inside)
    assert words == ["100 ms", "500 ms", "2.0 s", "10 s", "50 s", "Mon 9", "Tue 10", "Wed 11",
                     "Thu 12", "Fri 13", "Sat 14", "Sun 15"]  # fmt: skip
    assert latency.desc == "P99 from 438 ms to 31 s; target 2.0 s."


def test_an_hour_between_two_that_nobody_watched_is_a_dot() -> None:
    hours = example_service.slo("t", examples.FROM_S, 0).hours
    lone = [replace(hour, ttft_p99_s=None) if at in (9, 11) else hour
            for at, hour in enumerate(hours)]  # fmt: skip
    drawn = plots.latency_by_hour(lone, CALENDAR, None)
    assert drawn is not None
    (line,) = re.findall(r'class="p99" d="([^"]*)"', drawn.inside)
    # A long line is thinned where it is straight: it must not lose its lone points.
    assert [len(run) for run in points_of(line)] == [9, 1, 134, 21]
    assert "h0" in line


def test_hours_without_anything_known_are_not_drawn() -> None:
    hours = [replace(hour, requests=None, ttft_p99_s=None)
             for hour in example_service.slo("t", examples.FROM_S, 0).hours]  # fmt: skip
    assert plots.latency_by_hour(hours, CALENDAR, 2.0) is None
    assert plots.requests_by_hour(hours, CALENDAR) is None
    assert plots.latency_by_hour([], CALENDAR, 2.0) is None


@given(st.floats(1e-4, 1e3), st.floats(1.0, 1e4))
def test_scales_of_powers_hold_their_values(least: float, times: float) -> None:
    ticks = [at for at, _ in plots.log_ticks(least, least * times, str)]
    assert ticks[0] <= least
    assert ticks[-1] > least * times
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 8


@given(st.floats(1e-6, 1e9))
def test_scales_hold_their_values(most: float) -> None:
    ticks = [at for at, _ in plots.linear_ticks(most, str)]
    assert ticks[0] == 0
    assert ticks[-1] >= most * (1 - 1e-6)
    assert 3 <= len(ticks) <= 6
