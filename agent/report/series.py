"""An engine's series as numpy arrays: signals by scrape, gaps, load points. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

Floats = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]
NO_TIMES: Floats = np.empty(0)

GAP_SCRAPES = 3.0
GAP_LEAST_S = 30.0
"""Scrapes further apart than max(GAP_SCRAPES intervals, GAP_LEAST_S) have a gap between them."""


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals per scrape, oldest first. Shapes: `times` and each of `values` (scrapes,); NaN if
    unknown."""

    times: Floats
    values: dict[str, Floats]


def in_order(times: Floats) -> Truths:
    """Mask of scrapes newer than all before them: the clock may have been set back."""
    if len(times) == 0:
        return np.empty(0, dtype=np.bool_)
    newest = np.maximum.accumulate(times)
    return np.concatenate(([True], times[1:] > newest[:-1]))


def usual_step_s(times: Floats) -> float:
    """The median scrape interval in seconds; 0 with fewer than two scrapes."""
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def gap_s(times: Floats) -> float:
    """The longest distance of two scrapes in seconds that is not a gap."""
    return max(GAP_SCRAPES * usual_step_s(times), GAP_LEAST_S)


def runs(holds: Truths, *, bridged: int = 1) -> list[npt.NDArray[np.intp]]:
    """Runs of true values, as arrays of indices; runs at most `bridged` apart are merged.

    Shape: `holds` (scrapes,) or (steps,).
    """
    places = np.flatnonzero(holds)
    apart = np.flatnonzero(np.diff(places) > bridged) + 1
    return np.split(places, apart) if len(places) else []


# --- Windows of an engine at the loads that it had: the points of its latency curve ---------------


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
