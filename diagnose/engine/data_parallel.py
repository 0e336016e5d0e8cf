"""Engines of one page beside each other: which data-parallel one carries more than its share. Pure.

Guide 3.5, 9.3. It is the fleet's own judgement, on one server: what is harmed is told by the
engine's own causes, so here it is a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.engine.cause_tracker import CauseTracker
from kneewatch.diagnose.engine.diagnosis import Diagnosis, health, worst_of
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.inventory import Member
from kneewatch.diagnose.fleet.outliers import replica_imbalance
from kneewatch.diagnose.fleet.tier import Tier
from kneewatch.rules.rule import Severity


class Beside:
    """The engines of one page over time. `scale` stretches durations with the window."""

    def __init__(self, *, scale: float) -> None:
        self._tracker = CauseTracker(scale=scale)
        self._hot: tuple[str, ...] = ()

    def told(self, t_s: float, found: Sequence[Diagnosis]) -> list[Diagnosis]:
        """The diagnoses, those of engines that carry far more than the others with the cause."""
        unlike = replica_imbalance(_tier(found)) if _are_peers(found) else None
        if unlike is not None:
            self._hot = unlike.replicas
        causes = self._tracker.update(t_s, [] if unlike is None else [_note(unlike.cause)])
        if not causes:
            return list(found)
        return [_with(one, causes) if _member(one).name in self._hot else one for one in found]


def _are_peers(found: Sequence[Diagnosis]) -> bool:
    """Whether all are read, of one model, and told apart by their number: data-parallel ones."""
    alike = len({one.model for one in found}) == 1
    apart = len({one.engine for one in found}) == len(found) > 1
    return alike and apart and all(one.was_read for one in found)


def _tier(found: Sequence[Diagnosis]) -> Tier:
    """The engines as those of one replica."""
    return Tier(found[0].target, "", "", tuple(_engine(one) for one in found), ())


def _member(one: Diagnosis) -> Member:
    return Member(
        key=(),
        replica=one.target,
        engine=one.engine,
        model=one.model,
        namespace="",
        pool=one.target,
        tier="",
        role="",
        node="",
        labels={},
    )


def _engine(one: Diagnosis) -> Engine:
    values = {key: value for key, value in one.values.items() if value is not None}
    stage = None if one.stage is None else one.stage.number
    return Engine(_member(one), values, {}, {}, stage, one.severity, ())


def _note(cause: Cause) -> Cause:
    return replace(cause, severity=Severity.INFO)


def _with(one: Diagnosis, more: Sequence[Cause]) -> Diagnosis:
    causes = sorted([*one.causes, *more], key=lambda cause: (-cause.severity, -cause.confidence))
    readable = one.health != "unknown"
    severity = worst_of(causes, one.stage, one.findings)
    return replace(one, causes=causes, health=health(severity, readable=readable))
