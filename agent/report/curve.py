"""Windows of an engine at the loads that it had: the points of its latency curve. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kneewatch.agent.report.series import Floats, Signals
from kneewatch.diagnose.learned.knee import (
    IN_FLIGHT_MIN,
    POINT_SIGNALS,
    POINTS_KEPT,
    SERVED_SIGNALS,
    Point,
    point_of,
    step_of,
)
from kneewatch.reports.weekly.knee import evenly
from kneewatch.reports.weekly.observed import InFlight


def in_flight(signals: Signals, *, window_s: float) -> InFlight | None:
    """Requests in flight over the engine's windows; None if unknown."""
    rows = _last_of_each_window(signals, window_s)
    load = _load(signals)[rows]
    present = np.flatnonzero(~np.isnan(load))
    if len(present) == 0:
        return None
    highest = present[int(np.argmax(load[present]))]
    return InFlight(
        p99=float(np.quantile(load[present], 0.99)),
        highest=float(load[highest]),
        highest_at_s=float(signals.times[rows][highest]),
    )


def points(signals: Signals, *, window_s: float) -> list[Point]:
    """Windows that show latency under load: at most POINTS_KEPT per concurrency, evenly spaced."""
    rows = _last_of_each_window(signals, window_s)
    load = _load(signals)
    useful = load[rows] >= IN_FLIGHT_MIN
    for key in SERVED_SIGNALS:
        useful &= signals.values[key][rows] > 0
    by_step: dict[int, list[int]] = {}
    for row in rows[useful].tolist():
        by_step.setdefault(step_of(float(load[row])), []).append(row)
    chosen = sorted(row for step in by_step.values() for row in evenly(step, POINTS_KEPT))
    points = (_point(signals, row, window_s) for row in chosen)
    return [point for point in points if point is not None]


def _last_of_each_window(signals: Signals, window_s: float) -> npt.NDArray[np.intp]:
    """The last scrape of each window: no observation counts twice."""
    windows = signals.times // window_s
    return np.flatnonzero(np.append(windows[1:] != windows[:-1], True)[: len(windows)])


def _load(signals: Signals) -> Floats:
    return signals.values["running_avg"] + np.nan_to_num(signals.values["waiting_avg"])


def _point(signals: Signals, row: int, window_s: float) -> Point | None:
    values = {
        key: None if np.isnan(value := signals.values[key][row]) else float(value)
        for key in POINT_SIGNALS
    }
    return point_of(float(signals.times[row]), values, window_s)
