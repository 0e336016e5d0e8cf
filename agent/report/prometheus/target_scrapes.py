"""When a target was down, by its scrapes over a period. Pure.

A pod that is born fails its scrapes while it loads, one that is deleted while it terminates:
neither is an outage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kneewatch.agent.report.prometheus.resolution import Steps
from kneewatch.agent.report.series import Floats, Truths
from kneewatch.diagnose.fleet.absence import is_down

LOADING_S = 1800.0
"""A pod may load this long before its failed scrapes count as an outage."""


@dataclass(frozen=True, slots=True)
class TargetScrapes:
    """The scrapes of one target by step: the share that succeeded (0-1, NaN while it was no target)
    and how many failed. `scrape_s`: seconds between scrapes. `deleted` has a value in the steps in
    which Kubernetes deletes the pod; None where that is unknown. Shapes: (steps,)."""

    up: Floats
    failed: Floats
    scrape_s: float
    deleted: Floats | None = None

    def lived_s(self, at: Steps) -> tuple[float, float]:
        """Unix times between which a failed scrape of the target is an outage.

        A target that appears in the period and fails until its first good step was loading, unless
        that lasts longer than LOADING_S; one that has no good step may have lived for less than
        one. The failed scrapes after its last good step are an outage
        if fleet mode calls the target down for them, until Kubernetes deletes the pod.
        """
        seen, good = np.flatnonzero(~np.isnan(self.up)), np.flatnonzero(self.up >= 1)
        born_s, gone_s = -np.inf, np.inf
        if len(good) == 0:
            failed_s = float(np.nansum(self.failed)) * self.scrape_s
            return (np.inf if 0 < seen[0] and failed_s <= LOADING_S else born_s), gone_s
        if 0 < seen[0] and (good[0] - seen[0]) * at.step_s <= LOADING_S:
            born_s = float(at.begins_s[good[0]])
        end = self._deleted_from(int(good[-1]), at)
        failed = round(float(np.nansum(self.failed[good[-1] + 1 : end])))
        if not is_down(failed, (failed - 1) * self.scrape_s):
            gone_s = float(at.begins_s[good[-1]]) + at.step_s
        elif end < at.count:
            gone_s = float(at.begins_s[end])
        return born_s, gone_s

    def down(self, at: Steps) -> Truths:
        """The steps with failed scrapes while the target should have served. Shape: (steps,)."""
        born_s, gone_s = self.lived_s(at)
        return np.asarray((self.up < 1) & (at.begins_s >= born_s) & (at.begins_s < gone_s))

    def _deleted_from(self, step: int, at: Steps) -> int:
        """The first step from `step` on in which the pod is deleted; the number of steps if none
        is."""
        if self.deleted is None:
            return at.count
        deleted = np.flatnonzero(~np.isnan(self.deleted[step:]))
        return step + int(deleted[0]) if len(deleted) else at.count
