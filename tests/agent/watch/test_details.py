"""The details of an engine: the most urgent first, every number with its bound, text only."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.agent.watch.rendering import (
    ASCII,
    TONES,
    UNICODE,
    Glyphs,
    Line,
    Screen,
    cells,
    details,
    ttft_bound_s,
)
from kneewatch.agent.watch.state import Kind, RowKey, ScreenRow, Trail
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.diagnosis_text import Style, text
from kneewatch.rules.library import slo_rules
from kneewatch.rules.rule import Finding
from tests.recordings import CAPTURES, diagnoses
from tests.reports.diagnoses import HEALTHY, NUMBERS, PRESSURE, SICK, UNREADABLE, changed, finding

CASCADE = diagnoses(CAPTURES / "kv_pressure_cascade.jsonl.gz")
QUEUEING = [
    d
    for d in CASCADE
    if d.stage.number is not None and d.stage.number == 3 and d.health == "critical"
][9]
HOSTILE = "a\x1b[31m[red]b[/red]\u202e\r\nc \x9b31m"


def row_of(diagnosis: Verdict | None, **more: object) -> ScreenRow:
    """A row of a server."""
    row = ScreenRow(RowKey("s", "s", "m", "0"), Kind.SERVER, "s", diagnosis)
    return replace(row, **more)


def frame(width: int = 80, rows: int = 3, glyphs: Glyphs = UNICODE) -> Screen:
    return Screen(width, rows, glyphs)


def text_of(lines: list[Line]) -> str:
    """Lines without their tones."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def told(diagnosis: Verdict, trail: Trail | None = None, width: int = 80) -> str:
    return text_of(details(row_of(diagnosis), trail or Trail(), frame(width)))


def trail_of(judged: list[Verdict]) -> Trail:
    trail = Trail()
    for diagnosis in judged:
        trail.add(diagnosis.t_s, diagnosis.values)
    return trail


def test_the_first_screen_of_a_cascade() -> None:
    at = CASCADE.index(QUEUEING)
    lines = told(QUEUEING, trail_of(CASCADE[: at + 1])).splitlines()
    assert lines[0].startswith("CRITICAL  kv_pressure")
    assert lines[0].endswith("UTC")
    assert lines[1].startswith("KV 100%")
    assert "≤ 90%" in lines[1]
    assert "waiting " in lines[1]
    assert "TTFT P99 " in lines[1]
    assert "█" in lines[4]
    assert "┄" in "".join(lines[2:5])
    assert "arrivals " in lines[5]
    assert "charts: " in lines[5]
    first = next(line for line in lines if line.startswith("1. "))
    assert first.startswith("1. kv_pressure (critical, confidence 0.")
    assert any(
        re.match(r"   then fix it: --num-gpu-blocks-override \d+ \(now 160\)", line)
        for line in lines
    )


def test_what_to_do_comes_before_why() -> None:
    shown = told(QUEUEING)
    places = [
        shown.index(word) for word in ("do first: ", "then fix it: --", "KV cache: ", "   + ")
    ]
    assert places == sorted(places)


def test_it_is_the_text_of_diagnose() -> None:
    shown = " ".join(told(QUEUEING).split())
    _, *lines = text([QUEUEING], Style()).splitlines()
    assert " ".join(" ".join(lines).split()) in shown


def test_a_cause_that_only_lingers_says_of_when_its_numbers_are() -> None:
    lingering = changed(SICK, causes=[replace(PRESSURE, seen_s=SICK.t_s - 8)])
    assert f"   Ending: last detected 8 s ago. It was: {PRESSURE.summary}" in told(
        lingering, width=100
    )
    assert "   if it returns, do first: Send less traffic" in told(lingering)
    assert "last detected" not in told(SICK)


def test_without_a_recommendation_the_lever() -> None:
    assert "   then fix it: Give the KV cache more room" in told(SICK)


def test_the_page_of_the_cause() -> None:
    linked = replace(frame(), docs_url="https://gpu-7:9877/docs")
    shown = text_of(details(row_of(SICK), Trail(), linked))
    assert "docs: https://gpu-7:9877/docs/causes/kv_pressure" in shown
    assert "docs:" not in told(SICK)


def test_everything_of_the_report_is_there() -> None:
    sick = changed(
        SICK,
        findings=[finding("ITL-STALL", "warning", 0.3), finding("INPUT-TAIL", "info", 4.0)],
        unknown=["gpu_dram_active_ratio: no GPU source"],
    )
    shown = told(sick)
    for words in (
        "+ 24% are preempted a second [preemption_ratio_per_s]",
        "- the cache is large [kv_capacity_tokens]",
        "explains: queue_saturation",
        "symptoms: S8 P99 latency good at low load",
        "notes:",
        "INPUT-TAIL: Prompt length P99",
        "latency judged against its own baseline",
        "could not be judged:",
    ):
        assert words in shown
    assert "ITL-STALL" not in shown, "kv_pressure tells it already"


def test_a_number_that_is_not_known_is_a_dash() -> None:
    shown = told(
        changed(HEALTHY, values={**NUMBERS, "arrival_per_s": None, "kv_usage_ratio": None})
    )
    assert "arrivals -/s" in shown
    assert "KV -" in shown


def test_a_page_that_cannot_be_read() -> None:
    shown = told(UNREADABLE)
    assert "KV cache: unknown, the page could not be read" in shown
    assert "connection refused" in shown
    assert "running" not in shown


def test_before_the_first_scrape() -> None:
    lines = text_of(details(row_of(None), Trail(), frame())).splitlines()
    assert lines == ["UNKNOWN  s", "waiting for the first scrape"]
    noted = row_of(None, note="cannot be read")
    assert "cannot be read" in text_of(details(noted, Trail(), frame()))


def test_what_is_stale_says_so() -> None:
    shown = text_of(details(row_of(HEALTHY, stale=True, quiet_s=40.0), Trail(), frame()))
    assert shown.startswith("UNKNOWN")
    assert "no data for 40 s: this state is out of date" in shown


def test_forecast() -> None:
    assert HEALTHY.stage.number is not None
    filling = replace(HEALTHY.stage, number=1, name="filling", forecast_s=130.0)
    shown = told(changed(HEALTHY, stage=filling), width=160)
    assert "full in about 2 min at this trend" in shown


@pytest.mark.parametrize(("running", "most"), [(0.0, 1), (8.0, 1), (12.0, 2), (15.0, 3), (16.0, 3)])
def test_how_many_may_wait(running: float, most: int) -> None:
    shown = told(changed(SICK, values={**NUMBERS, "running": running})).splitlines()
    assert f"≤ {most} " in shown[1]


def with_targets(ttft_s: float | None, itl_s: float | None) -> Verdict:
    """A healthy diagnosis of a server with these targets."""
    rules = slo_rules(ttft_p99_s=ttft_s, itl_p99_s=itl_s)
    ok = [
        Finding(
            rule.id,
            "ok",
            rule.signal,
            bounds={bound.severity.word: bound.threshold for bound in rule.bounds},
        )
        for rule in rules
    ]
    return changed(HEALTHY, findings=(*HEALTHY.findings, *ok))


@pytest.mark.parametrize(
    ("diagnosis", "bound_s"),
    [
        (with_targets(2.0, None), 2.0),
        (with_targets(2.0, 0.1), 2.0),
        (with_targets(1.25, None), 1.25),
        (with_targets(None, 0.1), None),
        (changed(HEALTHY, values={"ttft_p99_s": 0.4, "ttft_p99_drift_ratio": 2.0}), 0.6),
        (HEALTHY, None),
    ],
)
def test_what_ttft_is_held_against(diagnosis: Verdict, bound_s: float | None) -> None:
    held_against = ttft_bound_s(diagnosis)
    assert held_against == (None if bound_s is None else pytest.approx(bound_s))


def test_beyond_its_bound_a_number_is_marked() -> None:
    lines = details(row_of(SICK), Trail(), frame())
    tones = {text.strip(): tone for line in lines for text, tone in line}
    assert tones["KV 100%"] == "over"
    assert tones["waiting 9"] == "over"
    assert tones["TTFT P99 123 ms"] == "strong"


@pytest.mark.parametrize("width", [80, 100, 140, 200])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_lines_are_as_wide_as_the_screen(width: int, glyphs: Glyphs) -> None:
    for diagnosis in CASCADE[::5]:
        lines = details(row_of(diagnosis), trail_of(CASCADE), frame(width, 3, glyphs))
        shown = text_of(lines)
        assert max(map(cells, shown.splitlines())) <= width
        assert glyphs.unicode or shown.isascii()


@given(
    width=st.integers(1, 120),
    rows=st.integers(1, 6),
    text=st.text(max_size=40) | st.just(HOSTILE),
    diagnosis=st.sampled_from([HEALTHY, SICK, UNREADABLE, QUEUEING]),
)
def test_hostile_text_stays_text(width: int, rows: int, text: str, diagnosis: Verdict) -> None:
    cause = replace(PRESSURE, summary=text, lever=text, explains=(text,), guide=(text,))
    hostile = changed(
        diagnosis, target=text, model=text, engine=text, causes=[cause], unknown=[text],
        judged_against=text,
    )  # fmt: skip
    lines = details(row_of(hostile, name=text, note=text), trail_of([hostile]), frame(width, rows))
    assert all(piece.isprintable() for line in lines for piece, _ in line)
    assert {tone for line in lines for _, tone in line} <= TONES.keys()


def test_markup_is_shown_as_it_is() -> None:
    shown = told(changed(SICK, target="[red]x[/]", model=HOSTILE), width=200)
    assert "[red]x[/] (model a?[31m[red]b[/red]???c ?31m, engine 0)" not in shown
    shown = told(changed(SICK, target="[red]x[/]" * 20, model=HOSTILE), width=200)
    assert "[red]x[/]" in shown
    assert "a?[31m[red]b[/red]???c ?31m" in shown
