"""What counters gained: over restarts, gaps, and series that come and go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.report.history import arrivals
from kneewatch.agent.report.series import Counted, Floats, Increases, Signals
from kneewatch.collector.scrape_history import Column
from kneewatch.collector.signals.table import TTFT
from kneewatch.reports.weekly.measures import COMPLETED, COMPUTED, FAILED, WAITING
from kneewatch.reports.weekly.observed import Grid, Tally

NAN = math.nan
TOTAL = Column("num_preemptions", ())


def increases(
    times: Sequence[float],
    columns: Mapping[Column, Sequence[float]],
    *,
    restarts_s: Sequence[float] = (),
    cut: int = 0,
) -> Increases:
    """Increases of snapshots; with `cut` they come in two parts."""
    parts = [slice(0, cut), slice(cut, None)] if cut else [slice(None)]
    counted = [
        Counted(
            np.array(times[part], dtype=np.float64),
            tuple(columns),
            np.array([list(values)[part] for values in columns.values()], dtype=np.float64),
        )
        for part in parts
    ]
    return Increases(counted, restarts_s=restarts_s)


def gained(rises: Increases, *edges_s: float) -> list[float]:
    """What the plain counter gained between some times."""
    gains = rises.between((TOTAL.metric, ""), np.array(edges_s))
    assert gains is not None
    return [float(value) for value in gains]


def test_a_counter_that_rises() -> None:
    rises = increases([0, 60, 120], {TOTAL: [10, 16, 40]})
    assert gained(rises, 0, 60, 120) == [6, 24]
    assert gained(rises, 30, 90) == [pytest.approx(3 + 12)]
    assert gained(rises, -500, 500) == [30]


def test_a_counter_that_went_back_began_at_nothing() -> None:
    rises = increases([0, 60, 120], {TOTAL: [10, 3, 5]})
    assert gained(rises, 0, 120) == [5]


def test_a_restart_that_hides_in_a_rise() -> None:
    times, values = [0, 60, 120], {TOTAL: [10.0, 12.0, 15.0]}
    assert gained(increases(times, values), 0, 120) == [5]
    assert gained(increases(times, values, restarts_s=[58.0]), 0, 120) == [12 + 3]


def test_a_series_that_is_born_while_watched_counts_from_nothing() -> None:
    rises = increases([0, 60, 120, 180], {TOTAL: [NAN, NAN, 4, 6]})
    assert gained(rises, 0, 180) == [6]
    assert gained(rises, 0, 60, 120, 180) == [0, 4, 2]


def test_a_series_that_was_there_from_the_first_is_not_born() -> None:
    assert gained(increases([0, 60], {TOTAL: [1000, 1001]}), 0, 60) == [1]
    assert gained(increases([0], {TOTAL: [1000]}), 0, 60) == [0]


def test_a_page_that_lacks_a_series_for_a_while() -> None:
    rises = increases([0, 60, 120, 180], {TOTAL: [10, NAN, NAN, 40]})
    assert gained(rises, 0, 180) == [30]
    assert gained(rises, 0, 90, 180) == [15, 15]


def test_what_happened_in_a_gap_is_spread_over_it() -> None:
    rises = increases([0, 60, 7260, 7320], {TOTAL: [0, 6, 726, 732]})
    assert gained(rises, 0, 3660, 7320) == [pytest.approx(366), pytest.approx(366)]
    covered = rises.covered(np.array([0.0, 3660.0, 7320.0]), gap_s=90.0)
    assert covered.tolist() == [3660, 3660]


def test_a_process_that_was_replaced_in_a_gap() -> None:
    rises = increases([0, 60, 7260, 7320], {TOTAL: [0, 600, 8, 14]}, restarts_s=[7260.0])
    assert gained(rises, 0, 7320) == [600 + 8 + 6]
    covered = rises.covered(np.array([0.0, 7320.0]), gap_s=90.0)
    assert covered.tolist() == [120], "of the gap nothing is known"


def test_a_clock_that_was_set_back_counts_nothing_twice() -> None:
    rises = increases([0, 60, 30, 120], {TOTAL: [0, 6, 7, 12]})
    assert gained(rises, 0, 120) == [12]


def test_labels_are_added_up_and_parts_taken_out() -> None:
    reasons = [
        Column(COMPLETED, (("finished_reason", reason),)) for reason in ("stop", "error", "abort")
    ]
    sources = [
        Column("prompt_tokens_by_source", (("source", source),))
        for source in ("local_compute", "local_cache_hit")
    ]
    values = {column: [0.0, 5.0 if column in reasons else 7.0] for column in (*reasons, *sources)}
    rises = increases([0, 60], values)
    edges = np.array([0.0, 60.0])
    for part, total in ((COMPLETED, 15), (FAILED, 10), (COMPUTED, 7)):
        gains = rises.between((part, ""), edges)
        assert gains is not None
        assert gains.tolist() == [total]
    assert rises.between(("unknown", ""), edges) is None


def part(bound: str) -> Column:
    """A part of a histogram."""
    return Column(TTFT, (), bound)


def test_a_histogram_whose_buckets_change_with_a_version() -> None:
    rises = increases(
        [0, 60, 120, 180, 240],
        {
            part("0.5"): [0, 2, 4, 1, 3],
            part("1.0"): [0, 3, 6, NAN, NAN],
            part("2.0"): [NAN, NAN, NAN, 2, 6],
            part("inf"): [0, 4, 8, 2, 8],
        },
        restarts_s=[180.0],
    )
    old, straddling, new = rises.tallies(TTFT, np.array([0.0, 120.0, 180.0, 240.0]))
    assert (old, new) == (
        Tally((0.5, 1.0, math.inf), (4, 6, 8), 0.0),
        Tally((0.5, 2.0, math.inf), (2, 4, 6), 0.0),
    )
    assert straddling == Tally((0.5, 2.0, math.inf), (1, 2, 2), 0.0), "the new process counted it"
    whole = rises.tallies(TTFT, np.array([0.0, 240.0]))
    assert whole == [Tally((0.5, math.inf), (7, 16), 0.0)]


def test_a_version_that_was_taken_back() -> None:
    rises = increases(
        [0, 60, 120, 180],
        {part("1.0"): [5, NAN, NAN, 1], part("2.0"): [NAN, 2, 4, NAN], part("inf"): [9, 3, 7, 2]},
        restarts_s=[60.0, 180.0],
    )
    (middle,) = rises.tallies(TTFT, np.array([60.0, 120.0]))
    assert middle == Tally((2.0, math.inf), (2, 4), 0.0)


def test_a_histogram_that_comes_with_use() -> None:
    rises = increases([0, 60, 120], {part("1.0"): [NAN, NAN, 2], part("inf"): [NAN, NAN, 3]})
    assert rises.tallies(TTFT, np.array([0.0, 120.0])) == [Tally((1.0, math.inf), (2, 3), 0.0)]


def test_a_histogram_is_counted_bucket_by_bucket() -> None:
    old = increases([0, 60], {part("1.0"): [0, 3], part("inf"): [0, 4], part("sum"): [0, 9]})
    (tally,) = old.tallies(TTFT, np.array([0.0, 60.0]))
    assert tally is not None
    assert tally.bounds == (1.0, math.inf)
    assert tally.counts == (3, 4)
    assert tally.sum == 9
    assert old.tallies("unknown", np.array([0.0, 60.0])) == [None]


@st.composite
def processes(draw: st.DrawFn) -> list[list[float]]:
    """Counters of processes that follow each other: rises from nothing."""
    steps = st.lists(st.integers(min_value=0, max_value=50), min_size=1, max_size=12)
    runs = draw(st.lists(steps, min_size=1, max_size=5))
    columns: list[list[float]] = []
    for run in runs:
        total, values = 0, list[float]()
        for step in run:
            total += step
            values.append(float(total))
        columns.append(values)
    return columns


@given(processes(), st.integers(min_value=0, max_value=20))
def test_any_number_of_restarts_adds_up(runs: list[list[float]], cut: int) -> None:
    values = [value for run in runs for value in run]
    times = [60.0 * at for at in range(len(values))]
    starts = [60.0 * sum(len(run) for run in runs[:at]) for at in range(1, len(runs))]
    rises = increases(times, {TOTAL: values}, restarts_s=starts, cut=min(cut, len(values) - 1))
    wanted = runs[0][-1] - runs[0][0] + sum(run[-1] for run in runs[1:])
    assert gained(rises, -60, times[-1] + 60) == [pytest.approx(wanted)]
    edges = np.linspace(0.0, max(times[-1], 1.0), 7)
    parts = rises.between((TOTAL.metric, ""), edges)
    assert parts is not None
    assert parts.sum() == pytest.approx(wanted)
    assert (parts >= 0).all()


@pytest.mark.parametrize("queued", [[0.0, 60.0, 180.0, 0.0, 0.0], [NAN] * 5])
def test_requests_arrive_when_they_queue_and_not_when_the_queue_drains(queued: list[float]) -> None:
    times: Floats = np.array([0.0, 60.0, 120.0, 180.0, 240.0])
    begun = increases(times.tolist(), {Column(TTFT, (), "count"): [0, 120, 180, 540, 660]})
    came = arrivals(begun, Signals(times, {WAITING: np.array(queued)}), Grid(0, 240, "UTC", (), ()))
    assert came == ([180, 180, 180, 120] if queued[1] > 0 else [120, 60, 360, 120])
