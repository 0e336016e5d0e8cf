"""Gauges by the hour: time-weighted, gaps left out, restarts and idle time told."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.report.series import POINT_SIGNALS, Signals, gap_s, signal_spans
from kneewatch.reports.weekly.measures import KV_USAGE, LEVELS
from kneewatch.reports.weekly.observed import SERVING
from tests.examples import examples


def signals(times: list[float], **values: list[float]) -> Signals:
    """Signals, those not given unknown."""
    keys = dict.fromkeys((*LEVELS, *POINT_SIGNALS))
    return Signals(
        np.array(times),
        {key: np.array(values.get(key, [math.nan] * len(times))) for key in keys},
    )


def every(step_s: float, until_s: float) -> list[float]:
    """Scrapes at an interval."""
    return [step_s * at for at in range(round(until_s / step_s))]


def test_means_are_weighted_with_time() -> None:
    times = [*every(5, 3600), *(3600 + t_s for t_s in every(15, 3600))]
    kv = [0.2] * 720 + [0.8] * 240
    spans = signal_spans(signals(times, kv_usage_ratio=kv), np.array([0.0, 7200.0]))
    level = spans[0].levels[KV_USAGE]
    assert level.mean == pytest.approx(0.5, abs=0.002)
    assert level.high == 0.8
    assert level.top == pytest.approx(level.mean)
    assert spans[0].watched_s == pytest.approx(7200, abs=15)


def test_a_gap_is_not_watched() -> None:
    times = [t_s for t_s in every(5, 7200) if not 600 <= t_s < 6000]
    spans = signal_spans(
        signals(times, running=[4.0] * len(times)), np.array([0.0, 3600.0, 7200.0])
    )
    assert [span.watched_s for span in spans] == [pytest.approx(600), pytest.approx(1200)]


def test_an_hour_without_a_scrape_has_no_levels() -> None:
    times = every(5, 3600)
    spans = signal_spans(signals(times, running=[4.0] * 720), np.array([0.0, 3600.0, 7200.0]))
    assert spans[1].watched_s == 0
    assert not spans[1].levels


def test_levels_of_the_time_that_served() -> None:
    times = every(10, 3600)
    busy = [1.0 if t_s < 900 else 0.0 for t_s in times]
    kv = [0.8 if t_s < 900 else 0.0 for t_s in times]
    spans = signal_spans(
        signals(times, kv_usage_ratio=kv, running_avg=busy, waiting=[0.0] * 360),
        np.array([0.0, 3600.0]),
    )
    assert spans[0].levels[KV_USAGE].mean == pytest.approx(0.2)
    assert spans[0].levels[KV_USAGE + SERVING].mean == pytest.approx(0.8)
    assert spans[0].idle_s == pytest.approx(2700)


def test_who_waits_is_not_idle() -> None:
    times = every(10, 3600)
    spans = signal_spans(
        signals(times, running_avg=[0.0] * 360, waiting=[3.0] * 360), np.array([0.0, 3600.0])
    )
    assert spans[0].idle_s == 0


@examples(30)
@given(
    st.lists(st.floats(min_value=0.1, max_value=20.0), min_size=2, max_size=80),
    st.integers(min_value=1, max_value=6),
)
def test_every_second_is_watched_once(steps: list[float], spans: int) -> None:
    times = list(accumulate(steps))
    edges = np.array([at * (times[-1] + 1000.0) / spans for at in range(spans + 1)])
    hourly = signal_spans(signals(times, running=[1.0] * len(times)), edges)
    assert gap_s(np.array(times)) >= 30.0
    usual_s = float(np.median(np.diff(times)))
    assert sum(span.watched_s for span in hourly) == pytest.approx(times[-1] - times[0] + usual_s)
