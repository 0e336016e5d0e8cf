"""All causes, which cause explains which, and their ranking. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules

from msgspec.structs import replace

from kneewatch.diagnose import causes as causes_package
from kneewatch.diagnose.cause import AnyCause, Cause
from kneewatch.diagnose.causes.evidence import DOUBTFUL_BELOW, Facts
from kneewatch.diagnose.causes.record import DECLARED, CauseRecord, cause, listed
from kneewatch.rules.cascade import EVICTS, Stage
from kneewatch.rules.conditions import Check, nodes, those_that_hold
from kneewatch.rules.rule import OK

# All causes, and what follows from their records: which cause explains which, which is reported
# under which, which baselines are learned meanwhile.


ENGINE_DIED, ENGINE_RESTARTED = "engine_died", "engine_restarted"
STARTUP_FAILED = "startup_failed"

_CODED = {
    record.id: record
    for module in iter_modules(causes_package.__path__, f"{causes_package.__name__}.")
    for record in vars(import_module(module.name)).values()
    if isinstance(record, CauseRecord)
}
BY_ID = {cause_id: cause(cause_id) for cause_id in DECLARED} | _CODED
CAUSES = tuple(BY_ID.values())

OF_LATENCY = frozenset(listed(("*of_latency",)))

WAITS_FOR = frozenset(
    record.id for record in CAUSES if record.queues or "queue_saturation" in record.explains
)
"""Causes that leave a backlog of requests."""

EXAMINED = tuple(record for record in CAUSES if record.forms or record.judge is not None)
"""Causes that can be concluded from one engine's facts; the others need logs, scrape errors or
fleets."""


def _closed(cause_id: str, explains: Sequence[str]) -> tuple[str, ...]:
    """Ids of the causes that a cause explains, directly or through another cause."""
    reached: dict[str, None] = {}
    ahead = list(explains)
    while ahead:
        other = ahead.pop(0)
        if other not in reached and other != cause_id:
            reached[other] = None
            ahead += BY_ID[other].explains
    return tuple(reached)


EXPLAINS = {record.id: _closed(record.id, record.explains) for record in CAUSES if record.explains}
"""For each cause, the causes that it explains, directly or through others.

Explained causes are reported under their cause, not beside it.
"""

ROOTS = {record.id: _closed(record.id, record.heads) for record in CAUSES if record.heads}
"""For each cause, the causes that it explains while its form is a root."""

STREAKS = those_that_hold(
    {
        held.name: held.of
        for record in CAUSES
        for held in nodes((record.forms, record.unusual))
        if isinstance(held, Check)
    }
)
"""Conditions that must hold for some time before a cause is concluded: those that hold now."""

_MAY_STAND = those_that_hold({record.id: record.gate for record in EXAMINED})
_OVER = those_that_hold({record.id: record.over for record in CAUSES if record.over is not None})


def conclude(facts: Facts) -> list[Cause]:
    """Every cause whose evidence gives enough confidence, in no particular order."""
    examined = _MAY_STAND(facts)
    concluded = [cause for each in examined if (cause := BY_ID[each].examine(facts)) is not None]
    wrong = disproved(concluded)
    return [cause for cause in concluded if cause.id not in wrong] if wrong else concluded


def disproved(causes: Sequence[Cause]) -> set[str]:
    """Ids of causes that rest on numbers that one of these causes shows to be wrong."""
    return {other for cause in causes for other in BY_ID[cause.id].disproves}


def over(facts: Facts) -> set[str]:
    """Ids of causes that have certainly ended: they end without a clear time."""
    return set(_OVER(facts))


def moved_families(causes: Sequence[Cause], facts: Facts) -> set[str]:
    """Families of signals that are not normal while these causes last."""
    return {
        family
        for cause in causes
        if BY_ID[cause.id].is_unusual(facts)
        for family in BY_ID[cause.id].moves
    }


def without_queues(causes: Sequence[Cause], stage: Stage) -> list[Cause]:
    """The causes for a server whose requests may queue by design. A full cache counts by what it
    evicts."""
    severity = (stage.severity or OK) if stage.level >= EVICTS else OK
    by_design = OF_LATENCY if severity else OF_LATENCY | {"kv_pressure"}
    return [
        replace(cause, severity=severity) if cause.id == "kv_pressure" else cause
        for cause in causes
        if cause.id not in by_design
    ]


def ranked(causes: Sequence[Cause]) -> list[Cause]:
    """Causes ordered by severity, then confidence; explained causes are folded into their root.

    A root cause takes the worst severity of the causes under it. A lost prefix that causes a queue
    is as bad as the queue, and it is what to act on. Doubtful causes and causes with `apart`
    explain nothing.
    """
    present = {cause.id: cause for cause in causes}
    under = {cause.id: _under(cause, present) for cause in causes}
    explained = {other.id for others in under.values() for other in others}
    heads = [
        with_explained(cause, under[cause.id]) for cause in causes if cause.id not in explained
    ]
    return sorted(heads, key=lambda cause: (-cause.severity, -cause.confidence))


def _under(cause: Cause, present: Mapping[str, Cause]) -> list[Cause]:
    """The causes that are reported under this one, worst first."""
    under = dict[str, Cause]()
    for other in map(present.get, explained_by(cause)):
        if other is not None and is_under(other, cause):
            nested = _under(other, present) if other.root else ()
            under |= {each.id: each for each in (other, *nested)}
    return sorted(under.values(), key=lambda other: (-other.severity, -other.confidence))


def is_under(cause: Cause, head: Cause) -> bool:
    """Whether `cause` is reported under `head` when both are concluded."""
    follows_too = cause.root and head.id in explained_by(cause)
    return cause.id in explained_by(head) and not follows_too


def explained_by(cause: Cause) -> tuple[str, ...]:
    """Ids of the causes that this cause explains; none if it is doubtful or has `apart`."""
    if not may_explain(cause):
        return ()
    return (ROOTS if cause.root else EXPLAINS).get(cause.id, ())


def may_explain(cause: Cause) -> bool:
    """Whether this cause may explain others now: it is not doubtful and does not have `apart`."""
    return not cause.apart and cause.confidence >= DOUBTFUL_BELOW


def with_explained(head: AnyCause, under: Sequence[Cause]) -> AnyCause:
    """The cause `head` with the causes `under` it; its severity becomes the worst of all."""
    if not under:
        return head
    return replace(
        head,
        severity=max(head.severity, *(cause.severity for cause in under)),
        explains=tuple(dict.fromkeys((*head.explains, *(cause.id for cause in under)))),
    )
