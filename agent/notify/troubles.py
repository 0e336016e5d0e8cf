"""What is wrong in a target's state, as far as it is worth telling. Pure.

A trouble is a cause of an engine, or the KV cascade: its stage and the cause `kv_pressure` are two
views of one thing and are told as one. What could not be judged is neither wrong nor over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kneewatch.agent.board import TargetState
from kneewatch.diagnose.case import Cause
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.rules.model import Severity

What = Literal["began", "worse", "still", "ended"]
CASCADE = "kv_pressure"
BLIND = "metrics_missing"
"""With this cause core signals lack: that no other is concluded then says nothing."""


class Key(NamedTuple):
    """What a trouble is known by, also over a restart. Model and engine are empty for what
    concerns the whole target."""

    target: str
    model: str
    engine: str
    id: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something wrong now. `stage` is the cascade's number, 0 for what is no part of it; `cause`
    is None for a stage without its cause."""

    key: Key
    severity: Severity
    stage: int
    since_s: float
    diagnosis: Diagnosis
    cause: Cause | None

    @property
    def badness(self) -> tuple[Severity, int, float]:
        """Grows with how bad it is."""
        return self.severity, self.stage, self.cause.confidence if self.cause else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell. `diagnosis` and `cause` are those of the moment, None for an end.

    `before` is the severity told before, for what got worse. `ended_s` is when an end began to
    hold, `how` how it ended where it did not simply pass. `serial` tells a trouble from a later one
    of the same key. `left` are the other troubles that go on there when one ends.
    """

    what: What
    key: Key
    severity: Severity
    stage: int
    since_s: float
    t_s: float
    before: Severity | None = None
    diagnosis: Diagnosis | None = None
    cause: Cause | None = None
    ended_s: float | None = None
    how: str = ""
    left: tuple[str, ...] = ()
    serial: int = 0


def troubles(state: TargetState, floor: Severity) -> dict[Key, Trouble]:
    """What is at least as bad as `floor` in a target's state."""
    found: dict[Key, Trouble] = {}
    wide = not any(diagnosis.was_read for diagnosis in state.diagnoses)
    for diagnosis in state.diagnoses:
        for trouble in _of_engine(state.name, diagnosis, wide=wide):
            other = found.get(trouble.key)
            if trouble.severity >= floor and (other is None or other.badness < trouble.badness):
                found[trouble.key] = trouble
    return found


def _of_engine(target: str, diagnosis: Diagnosis, *, wide: bool) -> list[Trouble]:
    engine = ("", "") if wide else (diagnosis.model, diagnosis.engine)
    found: list[Trouble] = []
    stage, pressure = diagnosis.stage, None
    for cause in diagnosis.causes:
        if cause.id == CASCADE:
            pressure = cause
            continue
        since_s = _moment(cause.since_s, diagnosis.t_s)
        key = Key(target, *engine, cause.id)
        found.append(Trouble(key, cause.severity, 0, since_s, diagnosis, cause))
    if pressure is not None or (stage is not None and stage.number):
        severity = max(
            stage.severity if stage else Severity.OK, pressure.severity if pressure else Severity.OK
        )
        since_s = min(
            _moment(stage.since_s if stage else math.nan, diagnosis.t_s),
            _moment(pressure.since_s if pressure else math.nan, diagnosis.t_s),
        )
        number = stage.number if stage else 0
        key = Key(target, *engine, CASCADE)
        found.append(Trouble(key, severity, number, since_s, diagnosis, pressure))
    return found


def is_over(key: Key, diagnoses: Sequence[Diagnosis]) -> bool:
    """Whether a target's newest diagnoses, which lack a trouble, say that it is over.

    They do not where its engine could not be read or judged, nor where a graver cause explains it.
    """
    judged = [diagnosis for diagnosis in diagnoses if _is_judged(diagnosis)]
    if not (key.model or key.engine):
        return bool(judged)
    own = [d for d in diagnoses if (d.model, d.engine) == (key.model, key.engine)]
    if not own:  # the engine has left a page that can be read
        return bool(judged)
    return all(
        _is_judged(diagnosis) and not any(key.id in cause.explains for cause in diagnosis.causes)
        for diagnosis in own
    )


def _is_judged(diagnosis: Diagnosis) -> bool:
    lacks = any(cause.id == BLIND for cause in diagnosis.causes)
    return diagnosis.stage is not None and diagnosis.health != "unknown" and not lacks


def _moment(since_s: float, t_s: float) -> float:
    return since_s if math.isfinite(since_s) else t_s
