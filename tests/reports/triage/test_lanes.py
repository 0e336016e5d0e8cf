"""The timeline: bars in lanes, what is not known, and many intervals drawn as few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.change import Interval
from kneewatch.reports.triage.charts import Axis
from kneewatch.reports.triage.engine import CAUSE_LANES, NEAR, Lanes, lanes
from kneewatch.rules.rule import BY_WORD, CRITICAL, OK, WARNING
from tests.reports.triage.views import interval

AXIS = Axis(0.0, 1000.0)


def stage(number: int, start_s: float, end_s: float | None, word: str = "ok") -> Interval:
    return interval("stage", str(number), BY_WORD[word], start_s, end_s)


def made(*intervals: Interval, moment_s: float = 1000.0) -> Lanes:
    return lanes(intervals, AXIS, moment_s)


def test_a_cascade_climbs_the_lanes() -> None:
    drawn = made(stage(0, 0, 400), stage(2, 400, 700, "info"), stage(3, 700, None, "critical"))
    shown = [(lane.name, lane.current, [(b.x, b.width, b.kind) for b in lane.bars])
            for lane in drawn.stages]  # fmt: skip
    assert shown == [
        ("4 collapsing", False, []),
        ("3 queueing", True, [(70.0, 30.0, "critical")]),
        ("2 evicting", False, [(40.0, 30.0, "info")]),
        ("1 filling", False, []),
        ("0 steady", False, [(0.0, 40.0, "ok")]),
    ]
    assert drawn.gaps == ()
    assert drawn.desc == (
        "stage 0 (steady) 00:00:00 UTC to 00:06:40 UTC, 7 min; "
        "stage 2 (evicting) 00:06:40 UTC to 00:11:40 UTC, 5 min; "
        "stage 3 (queueing) since 00:11:40 UTC."
    )


def test_what_is_current_is_what_holds_at_the_moment_shown() -> None:
    drawn = made(stage(0, 0, 400), stage(3, 400, None), moment_s=200.0)
    assert [lane.name for lane in drawn.stages if lane.current] == ["0 steady"]


def test_gaps_are_told_apart() -> None:
    health = interval("health", "critical", CRITICAL, 300, 600)
    down = interval("cause", "target_down", CRITICAL, 304, 500)
    drawn = made(stage(0, 100, 300), health, down, stage(0, 600, None))
    assert [(gap.kind, gap.x, gap.width, gap.words) for gap in drawn.gaps] == [
        ("unseen", 0.0, 10.0, "not watched"),
        ("unread", 30.0, 20.5, "the page could not be read"),
        ("unjudged", 50.5, 9.5, "the stage could not be judged"),
    ]
    assert drawn.desc.endswith("3 gaps in which the stage is unknown.")


def test_a_page_that_was_read_is_not_told_as_unreadable() -> None:
    health = interval("health", "unknown", OK, 300, 600)
    lacks = interval("cause", "metrics_missing", WARNING, 300, 600)
    drawn = made(stage(0, 0, 300), health, lacks, stage(0, 600, None))
    assert [gap.words for gap in drawn.gaps] == ["the stage could not be judged"]


def test_nothing_known() -> None:
    drawn = made()
    assert drawn.desc == "The stage is unknown in this time range."
    assert [(gap.kind, gap.width) for gap in drawn.gaps] == [("unseen", 100.0)]


def test_what_lies_outside_is_left_out() -> None:
    drawn = made(stage(4, -200, -100), stage(0, 1100, None), stage(1, -50, 100))
    assert [len(lane.bars) for lane in drawn.stages] == [0, 0, 0, 1, 0]


def test_causes_newest_first_and_the_rest_counted() -> None:
    causes = [interval("cause", f"c{n}", WARNING, 50.0 * n, 50.0 * n + 20) for n in range(11)]
    drawn = made(*causes)
    assert [lane.name for lane in drawn.causes] == [
        f"c{n}" for n in range(10, 10 - CAUSE_LANES, -1)
    ]
    assert drawn.more_causes == 11 - CAUSE_LANES


def test_a_flapping_stage_is_drawn_as_few_bars_of_the_worst_severity() -> None:
    flaps = [stage(2, n, n + 0.5, "critical" if n == 500 else "info") for n in range(1000)]
    lane = made(*flaps).stages[2]
    assert len(lane.bars) == 1
    assert lane.bars[0].kind == "critical"


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(-100, 1100), st.floats(0, 500) | st.none()),
        max_size=60,
    )
)
def test_bars_and_gaps_lie_on_the_axis(rows: list[tuple[int, float, float | None]]) -> None:
    intervals = [stage(n, start, None if d is None else start + d) for n, start, d in rows]
    drawn = made(*intervals)
    for lane in drawn.stages:
        assert all(b.x >= 0 and b.x + b.width <= 100 + 1e-9 for b in lane.bars)
        for before, after in zip(lane.bars, lane.bars[1:], strict=False):
            assert after.x - before.x - before.width >= NEAR - 1e-9
    for gap in drawn.gaps:
        middle_s = 10 * (gap.x + gap.width / 2)
        assert not any(
            interval.start_s < middle_s < (interval.end_s if interval.end_s is not None else 1e9)
            for interval in intervals
        )
