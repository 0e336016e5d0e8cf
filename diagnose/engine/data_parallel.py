"""The fleet's replica_imbalance and bad_node, for the engines of one page. Guide 3.5, 9.3. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kneewatch.diagnose.engine.diagnosis import CauseTracker, as_severe, health
from kneewatch.diagnose.fleet.inventory import Member
from kneewatch.diagnose.fleet.outliers import bad_nodes, replica_imbalance
from kneewatch.diagnose.fleet.tier import Tier, engine_of
from kneewatch.diagnose.ranking import ranked
from kneewatch.diagnose.verdict import Cause, Verdict, worst_of


class DataParallelEngines:
    """The engines of one page over time.

    `scale` is the short window divided by its default; durations are multiplied by it.
    """

    def __init__(self, *, scale: float) -> None:
        self._tracker = CauseTracker[Cause](scale=scale)
        self._of: dict[str, tuple[str, ...]] = {}

    def compared(self, t_s: float, diagnoses: Sequence[Verdict]) -> list[Verdict]:
        """The diagnoses; engines with far more load than the others get the cause
        replica_imbalance, the slowest of those that are far slower bad_node."""
        tier = _tier(diagnoses) if _are_peers(diagnoses) else None
        of_tier = () if tier is None else (*bad_nodes(tier)[:1], replica_imbalance(tier))
        concluded = [cause for cause in of_tier if cause is not None]
        self._of |= {cause.id: cause.replicas for cause in concluded}
        causes = self._tracker.update(t_s, [cause.of_server() for cause in concluded])
        return [
            _with(diagnosis, own)
            if (own := [each for each in causes if _member(diagnosis).name in self._of[each.id]])
            else diagnosis
            for diagnosis in diagnoses
        ]


def _are_peers(diagnoses: Sequence[Verdict]) -> bool:
    """Whether these are data-parallel engines of one model: their numbers differ and all were
    read."""
    alike = len({diagnosis.model for diagnosis in diagnoses}) == 1
    apart = len({diagnosis.engine for diagnosis in diagnoses}) == len(diagnoses) > 1
    return alike and apart and all(diagnosis.was_read for diagnosis in diagnoses)


def _tier(diagnoses: Sequence[Verdict]) -> Tier:
    """A tier of one replica with these engines."""
    engines = tuple(engine_of(_member(diagnosis), diagnosis) for diagnosis in diagnoses)
    return Tier(diagnoses[0].target, "", "", engines)


def _member(diagnosis: Verdict) -> Member:
    return Member((), diagnosis.target, diagnosis.engine, diagnosis.model, diagnosis.target)


def _with(diagnosis: Verdict, more: Sequence[Cause]) -> Verdict:
    """The diagnosis with additional causes.

    Causes that the new ones explain are reported under them, and their recommendations are dropped.
    """
    causes = ranked([*diagnosis.causes, *more])
    heads = {cause.id for cause in causes}
    readable = diagnosis.health != "unknown"
    severity = worst_of(causes, diagnosis.stage, diagnosis.findings)
    return replace(
        diagnosis,
        causes=as_severe(causes, severity, diagnosis.findings),
        health=health(severity, readable=readable),
        recommendations=[each for each in diagnosis.recommendations if each.cause in heads],
    )
