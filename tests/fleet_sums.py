"""What the group kneewatch-hourly records of made-up engines, without a week of evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kneewatch.dashboards.prometheus.rule_group import (
    COUNTED_BY,
    POOL_LABELS,
    SUM_STEP_S,
    SUMMED_COUNTERS,
    SUMMED_ENGINES,
    SUMMED_HISTOGRAMS,
    summed_series,
)

Floats = npt.NDArray[np.float64]
Labels = Mapping[str, str]
Key = tuple[str, tuple[tuple[str, str], ...]]

PHASE_S = 100.0
"""Prometheus evaluates each group at its own distance from full five minutes."""

NEAR = 1.1
"""Of the mean distance of samples: so far a series is taken to go on (promql, extrapolatedRate)."""


class Sums:
    """Adds engines up. `times` are those of all scrapes."""

    def __init__(self, times: Floats) -> None:
        self._times = times
        first_s = times[0] // SUM_STEP_S * SUM_STEP_S + PHASE_S
        self.evals: Floats = np.arange(first_s, times[-1] + 1, SUM_STEP_S)
        self._sums: dict[Key, Floats] = {}

    def add(
        self,
        labels: Labels,
        there: npt.NDArray[np.bool_],
        series: Iterable[tuple[str, Labels, Floats]],
    ) -> None:
        """Add what an engine's series gained; `there` are the scrapes that it answered."""
        windows = _Windows(self._times[there], self.evals)
        for name, own, values in series:
            for key in _kept_as(name.removeprefix("vllm:"), own):
                gained = windows.increase(values[there])
                self._add(key, own, gained)
                if key == summed_series(COUNTED_BY):
                    self._add(SUMMED_ENGINES, labels, np.where(np.isnan(gained), np.nan, 1.0))

    def _add(self, name: str, labels: Labels, values: Floats) -> None:
        kept_labels = {
            name_of_label: labels[name_of_label]
            for name_of_label in (*POOL_LABELS, "le")
            if labels.get(name_of_label)
        }
        key = name, tuple(kept_labels.items())
        before = self._sums.get(key, np.full(len(values), np.nan))
        nobody = np.isnan(before) & np.isnan(values)
        self._sums[key] = np.where(nobody, np.nan, np.nan_to_num(before) + np.nan_to_num(values))

    def recorded_series(self) -> Iterator[tuple[Floats, str, Labels, Floats]]:
        """The recorded series: times, name, labels, values; NaN where there is none."""
        for (name, labels), values in self._sums.items():
            yield self.evals, name, dict(labels), values


class _Windows:
    """The window before each evaluation, on one engine's scrapes."""

    def __init__(self, times: Floats, evals: Floats) -> None:
        self._times, self._evals = times, evals
        self._first = np.searchsorted(times, evals - SUM_STEP_S, side="left")
        self._last = np.searchsorted(times, evals, side="right") - 1
        self._enough = self._last > self._first

    def increase(self, values: Floats) -> Floats:
        """`increase()` of a counter, as Prometheus extrapolates it; NaN with one sample or none."""
        increases = np.full(len(self._evals), np.nan)
        first, last = self._first[self._enough], self._last[self._enough]
        steps = np.diff(values, prepend=values[:1])
        fell = np.where(steps < 0, np.append(0.0, values[:-1]), 0.0)
        lost = np.cumsum(fell)
        gained = values[last] - values[first] + lost[last] - lost[first]
        begin_s, end_s = self._times[first], self._times[last]
        sampled_s = end_s - begin_s
        evals = self._evals[self._enough]
        before_s, after_s = begin_s - (evals - SUM_STEP_S), evals - end_s
        with np.errstate(divide="ignore", invalid="ignore"):
            zero_s = np.where(gained > 0, sampled_s * values[first] / gained, np.inf)
        mean_s = sampled_s / (last - first)
        before_s = np.minimum(before_s, zero_s)
        whole_s = sampled_s + sum(
            np.where(gap_s < NEAR * mean_s, gap_s, mean_s / 2) for gap_s in (before_s, after_s)
        )
        increases[self._enough] = gained * whole_s / sampled_s
        return increases


def _kept_as(name: str, labels: Labels) -> Iterator[str]:
    """The recorded sums that a series is in."""
    for metric in SUMMED_HISTOGRAMS:
        for part in ("bucket", "sum"):
            if name == f"{metric}_{part}":
                yield summed_series(metric, part)
    for key, (metric, where) in SUMMED_COUNTERS.items():
        fits = all(labels.get(label) in value.split("|") for label, value in where)
        if name == f"{metric}_total" and fits:
            yield summed_series(key)
