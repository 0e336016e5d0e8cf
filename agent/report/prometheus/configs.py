"""Configurations of engines and the starts of their processes over a period. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kneewatch.agent.report.prometheus.read import Read
from kneewatch.agent.report.prometheus.resolution import Floats
from kneewatch.diagnose.fleet.shape import Key, Labels, Member


class Configs:
    """The labels of cache_config_info and the starts of processes, over a period."""

    def __init__(self, read: Read, names: Sequence[str]) -> None:
        self._read, self._names = read, names
        self._rows: dict[Key, list[tuple[dict[str, str], Floats]]] = {}
        for key, row in read.configs.items():
            labels: dict[str, str] = dict(key)
            self._rows.setdefault(self._process(labels), []).append((labels, row))

    def _process(self, labels: Labels) -> Key:
        return tuple(labels.get(name, "") for name in self._names)

    def last(self, member: Member) -> dict[str, str]:
        """The newest configuration; empty where none is known."""
        return self._at(member, len(self._read.grid.slots) - 1, step=-1)

    def around(self, member: Member, t_s: float) -> tuple[dict[str, str], dict[str, str]]:
        """The configurations before and after a time."""
        hour = int(np.searchsorted(np.array(self._read.grid.edges_s), t_s, side="right")) - 1
        return self._at(member, hour - 1, step=-1), self._at(member, hour + 1, step=1)

    def starts(self, member: Member) -> list[float]:
        """When its process was replaced in the period."""
        row = self._read.starts.get(self._process(member.labels))
        if row is None:
            return []
        known = row[~np.isnan(row)]
        grid = self._read.grid
        return [
            then
            for was, then in pairwise(known.tolist())
            if then > was and grid.from_s <= then < grid.to_s
        ]

    def _at(self, member: Member, hour: int, *, step: int) -> dict[str, str]:
        """The configuration of an hour, or of the nearest one further on in a direction."""
        rows = self._rows.get(self._process(member.labels), ())
        own = member.labels.get("engine")
        hours = len(self._read.grid.slots)
        for at in range(min(max(hour, 0), hours - 1), -1 if step < 0 else hours, step):
            for labels, row in rows:
                if not np.isnan(row[at]) and labels.get("engine") in (own, None):
                    return {k: v for k, v in labels.items() if k not in member.labels}
        return {}
