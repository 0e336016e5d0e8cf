"""GPU figures by engine, of DCGM's series: its pod's GPUs, else all of its node. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kneewatch.agent.fleet.gpus import Place, places, places_of
from kneewatch.agent.report.prometheus.resolution import Floats, Rows
from kneewatch.diagnose.fleet.shape import Member


def by_engine(rows: Rows, members: Iterable[Member]) -> Rows:
    """The mean of the rows that are of an engine's GPUs; `rows` by all their labels. Engines of
    whose GPUs nothing is known are left out."""
    by_place: dict[Place, list[Floats]] = {}
    for labels, row in rows.items():
        for place in places(dict(labels)):
            by_place.setdefault(place, []).append(row)
    means = {place: _mean(found) for place, found in by_place.items()}
    made: Rows = {}
    for member in members:
        at = next((place for place in places_of(member) if place in means), None)
        if at is not None:
            made[member.key] = means[at]
    return made


def _mean(rows: list[Floats]) -> Floats:
    if len(rows) == 1:
        return rows[0]
    whole = np.array(rows)
    known = (~np.isnan(whole)).sum(axis=0)
    return np.where(known > 0, np.nansum(whole, axis=0) / np.maximum(known, 1), np.nan)
