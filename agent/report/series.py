"""An engine's series as numpy arrays: signals by scrape, gaps, runs of scrapes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
