"""Runs of scrapes or steps, and how a target was scraped."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.report.reader import target_quality
from kneewatch.agent.report.series import runs
from kneewatch.agent.store.records import Scrapes
from kneewatch.reports.weekly.observed import grid


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 3))
def test_two_places_are_of_one_run_where_no_longer_pause_is_between(
    holds: list[bool], bridged: int
) -> None:
    places = [run.tolist() for run in runs(np.array(holds, dtype=np.bool_), bridged=bridged)]
    assert [place for run in places for place in run] == [i for i, yes in enumerate(holds) if yes]
    run_of = {place: at for at, run in enumerate(places) for place in run}
    for first in run_of:
        for last in (place for place in run_of if place > first):
            between = holds[first : last + 1]
            pause = any(
                not any(between[at : at + bridged]) for at in range(len(between) - bridged + 1)
            )
            assert (run_of[first] == run_of[last]) == (not pause)


def test_failures_in_a_row_are_one_time_with_the_first_reason() -> None:
    times = [0.0, 5.0, 10.0, 15.0, 20.0, 100.0, 105.0]
    scrapes = Scrapes(array("d", times), {1: "refused", 2: "timeout", 6: "reset"})
    observed = target_quality("a", scrapes, grid(0.0, 110.0, "UTC"), 0.0)
    assert [(span.from_s, span.to_s, span.why) for span in observed.gaps] == [
        (5.0, 15.0, "refused"), (20.0, 100.0, "not watched"), (105.0, 110.0, "reset"),
    ]  # fmt: skip
    assert (observed.scrapes, observed.failed, observed.interval_s) == (7, 3, 5.0)
    assert observed.watched_ratio == (110 - 10 - 80 - 5) / 110
