"""A recording as a timeline."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.diagnosis_text import Style
from kneewatch.reports.diagnosis_timeline import Timeline, progress
from kneewatch.rules.rule import Severity
from tests.recordings import CAPTURES, diagnoses
from tests.reports.diagnoses import HEALTHY, NOW_S, PRESSURE, SICK, UNREADABLE, changed


def rendered(moment: Sequence[Verdict], full: bool) -> str:
    return f"<{[d.health for d in moment]} {full}>"


def told(*moments: Verdict, named: bool = False, style: Style | None = None) -> list[str]:
    """The lines for diagnoses two seconds apart, without the day's."""
    timeline = Timeline(style or Style(), named=named)
    lines = [
        line
        for at, diagnosis in enumerate(moments)
        for line in timeline.lines([replace(diagnosis, t_s=NOW_S + 2 * at)])
    ]
    assert lines[0] == "--- 2026-11-21, times are UTC"
    return lines[1:]


def test_a_line_for_each_change() -> None:
    assert told(HEALTHY, HEALTHY, SICK, SICK, HEALTHY) == [
        "00:06:40 OK       stage 0 -                     "
        "KV 46%, run 12, wait 0, TTFT 123 ms",
        "00:06:44 CRITICAL stage 3 kv_pressure           "
        "KV 100%, run 12, wait 9, TTFT 123 ms, preempt 24%/s",
        "00:06:48 OK       stage 0 -                     "
        "KV 46%, run 12, wait 0, TTFT 123 ms",
    ]  # fmt: skip


def test_a_first_scrape_that_cannot_be_judged_yet_is_no_line() -> None:
    early = changed(HEALTHY, health="unknown")
    assert [line[:17] for line in told(early, HEALTHY, early)] == [
        "00:06:42 OK      ",
        "00:06:44 UNKNOWN ",
    ]
    timeline = Timeline(Style(), named=False)
    assert timeline.lines([early]) == []
    assert timeline.close(rendered).endswith("<['unknown'] True>")


def test_more_causes_are_counted() -> None:
    both = changed(SICK, causes=[PRESSURE, replace(PRESSURE, id="adapter_thrash")])
    assert " kv_pressure +1        KV " in told(both)[0]


def test_a_page_that_cannot_be_read() -> None:
    (line,) = told(UNREADABLE)
    assert line.startswith(
        "00:06:40 CRITICAL stage ? target_down           3 scrapes in a row fail"
    )
    assert len(line) == 100
    assert line.endswith("…")


def test_a_new_day_has_a_line() -> None:
    timeline = Timeline(Style(), named=False)
    timeline.lines([HEALTHY])
    later = timeline.lines([changed(SICK, t_s=NOW_S + 86_400)])
    assert later[0] == "--- 2026-11-22, times are UTC"
    assert later[1].startswith("00:06:40 CRITICAL")


def test_names_where_there_are_several() -> None:
    assert told(HEALTHY, named=True)[0].endswith("TTFT 123 ms")
    assert told(HEALTHY, named=True)[1] == "         [http://gpu-7:8000, engine 0]"
    (line,) = told(changed(HEALTHY, target="r0", values={}), named=True)
    assert line.endswith("  [r0, engine 0]")
    timeline = Timeline(Style(), named=False)
    lines = timeline.lines([changed(HEALTHY, target="r0", engine=engine) for engine in "01"])
    assert [line[-11:] for line in lines[1:]] == [", engine 0]", ", engine 1]"]


def test_colour() -> None:
    (line,) = told(SICK, style=Style(colour=True))
    assert line.startswith("00:06:40 \x1b[31;1mCRITICAL\x1b[0m stage 3 ")


def test_the_worst_moment_and_the_end() -> None:
    timeline = Timeline(Style(), named=False)
    worse = changed(SICK, values={**SICK.values, "waiting": 99.0}, t_s=NOW_S + 2)
    for diagnosis in (SICK, worse, changed(SICK, t_s=NOW_S + 4), changed(HEALTHY, t_s=NOW_S + 6)):
        timeline.lines([diagnosis])
    assert timeline.worst == Severity.CRITICAL
    assert timeline.close(rendered).splitlines() == [
        "",
        "--- at its worst, 2026-11-21 00:06:42 UTC",
        "",
        "<['critical'] False>",
        "",
        "--- at the end, 2026-11-21 00:06:46 UTC",
        "",
        "<['ok'] True>",
    ]


@pytest.mark.parametrize(
    "moments", [[HEALTHY], [SICK], [HEALTHY, SICK], [UNREADABLE]], ids=lambda m: str(len(m))
)
def test_what_holds_at_the_end_is_told_once(moments: list[Verdict]) -> None:
    timeline = Timeline(Style(), named=False)
    for moment in moments:
        timeline.lines([moment])
    closed = timeline.close(rendered, mark="#")
    assert closed.startswith("\n# at the end, 2026-11-21 00:06:40 UTC\n\n<")
    assert closed.count("<") == 1


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("name", ["kv_pressure_cascade", "restart_mid_run", "queue_overload"])
def test_real_timelines_fit(name: str, width: int) -> None:
    timeline = Timeline(Style(width=width), named=True)
    lines = [
        line
        for diagnosis in diagnoses(CAPTURES / f"{name}.jsonl.gz")
        for line in timeline.lines([diagnosis])
    ]
    assert 3 <= len(lines) <= 40
    assert max(map(len, lines)) <= width


def test_progress() -> None:
    assert progress([HEALTHY, SICK], 12.3, 30.0, 79) == (
        "watching 12 of 30 s  CRITICAL  kv_pressure  KV 100%, run 12, wait 9"
    )
    assert progress([HEALTHY], 0.0, 300.0, 40) == "watching 0 of 5 min  OK  KV 46%, run 12"
    assert len(progress([SICK], 0.0, 300.0, 20)) == 20
