"""A history held in memory, for tests that are not about the store."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import KINDS, Series, StoredEngine
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity

HOUR_S = 3600.0


class Remembered:
    """One hour of states that do not change; each engine was at stage 3 for a minute of it."""

    def __init__(self, *states: TargetState) -> None:
        self._found = [diagnosis for state in states for diagnosis in state.diagnoses]
        self._labels = {state.name: state.labels for state in states}

    def engines(self, target: str | None = None) -> list[StoredEngine]:
        """The engines, numbered from 1."""
        return [
            StoredEngine(number, diagnosis.target, diagnosis.model, diagnosis.engine, "",
                         self._labels[diagnosis.target], diagnosis.t_s - HOUR_S, diagnosis.t_s)
            for number, diagnosis in enumerate(self._found, 1)
            if target in (None, diagnosis.target)
        ]  # fmt: skip

    def verdict(self, engine_id: int, at_s: float) -> Verdict | None:
        """The same verdict at any moment of the hour."""
        verdict = self._found[engine_id - 1]
        if not verdict.t_s - HOUR_S <= at_s <= verdict.t_s + 60:
            return None
        return replace(verdict, t_s=min(at_s, verdict.t_s))

    def watched(self, engine_id: int, at_s: float) -> bool:
        """Whether there is one."""
        return self.verdict(engine_id, at_s) is not None

    def intervals(
        self,
        *,
        from_s: float,
        to_s: float,
        engine_id: int | None = None,
        kinds: Sequence[str] = KINDS,
    ) -> list[Interval]:
        """A stage that is over and a cause that goes on, for each engine."""
        rows: list[Interval] = []
        for number, diagnosis in enumerate(self._found, 1):
            start_s = diagnosis.t_s - HOUR_S
            rows += [
                Interval("stage", "3", Severity.CRITICAL, start_s, start_s + 60,
                         start_s + 60, "ended", number),
                Interval("cause", "kv_pressure", Severity.WARNING, diagnosis.t_s - 30,
                         diagnosis.t_s, engine_id=number),
            ]  # fmt: skip
        return [
            interval
            for interval in rows
            if engine_id in (None, interval.engine_id)
            and interval.kind in kinds
            and interval.start_s <= to_s
            and interval.last_s >= from_s
        ]

    def signals(self, engine_id: int, keys: Sequence[str], *, from_s: float, to_s: float) -> Series:
        """A value a minute."""
        end_s = self._found[engine_id - 1].t_s
        times = array("d", (end_s - HOUR_S + 60 * n for n in range(61)))
        kept = array("d", (t_s for t_s in times if from_s <= t_s <= to_s))
        return Series(kept, {key: array("d", [0.5] * len(kept)) for key in keys})


def reader(*states: TargetState) -> Reader:
    """The same as what the API asks for."""
    return cast("Reader", Remembered(*states))
