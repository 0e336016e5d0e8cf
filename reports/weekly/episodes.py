"""Intervals of an engine put together to incidents: a cascade with its causes, a cause alone. Pure.

What follows from a cause is told with it (diagnose/causes, EXPLAINS): a queue that begins half a
minute before the preemptions that make it is no incident of its own. Notes are none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kneewatch.diagnose.causes import EXPLAINS
from kneewatch.reports.weekly.happened import Episode, Held
from kneewatch.rules.model import Severity

BRIDGED_S = 900.0
"""The same cause again within this long is the same incident."""

CASCADE_BRIDGED_S = 300.0
NEAR_S = 180.0
"""An explained cause may begin so much before what explains it, or end so much after."""

FILLING_SHOWN_S = 1800.0
"""Of the filling before a cascade no more is shown."""

EVICTING = 2
NOTED = frozenset({"engine_restarted"})
"""Causes that are told also as notes."""

CASCADE_CAUSE = "kv_pressure"


def _ranks() -> dict[str, int]:
    """Causes in an order in which each comes after all that explain it."""
    order: list[str] = []
    left = list(dict.fromkeys((*EXPLAINS, *(one for after in EXPLAINS.values() for one in after))))
    while left:
        first = next(
            one for one in left if not any(one in EXPLAINS.get(other, ()) for other in left)
        )
        order.append(first)
        left.remove(first)
    return {cause: at for at, cause in enumerate(order)}


RANK = _ranks()


@dataclass(slots=True)
class _Group:
    """Intervals that are one incident."""

    cause: str
    held: list[Held]
    stages: list[Held] = field(default_factory=list[Held])

    @property
    def start_s(self) -> float:
        first = (*self.held, *(one for one in self.stages if int(one.id) >= EVICTING))
        return min(one.start_s for one in first)

    @property
    def until_s(self) -> float:
        return max(one.until_s for one in (*self.held, *self.stages))

    @property
    def severity(self) -> Severity:
        return max(one.severity for one in (*self.held, *self.stages))


def episodes(intervals: Sequence[Held], *, from_s: float, to_s: float) -> list[Episode]:
    """The incidents of one engine that reach into a time, by their start."""
    stages = sorted((one for one in intervals if one.kind == "stage"), key=_by_start)
    causes = sorted((one for one in intervals if one.kind == "cause"), key=_by_start)
    groups = sorted([*_cascades(stages), *_causes(causes)], key=lambda group: group.start_s)
    found = [_episode(group, stages) for group in _folded(groups) if _is_told(group)]
    inside = [one for one in found if one.start_s < to_s and one.until_s >= from_s]
    return sorted(inside, key=lambda one: (one.start_s, one.cause))


def _cascades(stages: Sequence[Held]) -> list[_Group]:
    """Stretches of eviction; short pauses do not end one."""
    groups: list[_Group] = []
    for one in stages:
        if int(one.id) < EVICTING:
            continue
        if groups and one.start_s - groups[-1].until_s <= CASCADE_BRIDGED_S:
            groups[-1].stages.append(one)
        else:
            groups.append(_Group(CASCADE_CAUSE, [], [one]))
    return groups


def _causes(causes: Sequence[Held]) -> list[_Group]:
    """Each cause's intervals; repeats within a while are one."""
    newest: dict[str, _Group] = {}
    groups: list[_Group] = []
    for one in causes:
        group = newest.get(one.id)
        if group is not None and one.start_s - group.until_s <= BRIDGED_S:
            group.held.append(one)
        else:
            newest[one.id] = group = _Group(one.id, [one])
            groups.append(group)
    return groups


def _folded(groups: Sequence[_Group]) -> list[_Group]:
    """Groups with those that follow from them. What explains comes before what it explains."""
    kept: list[_Group] = []
    for group in sorted(groups, key=lambda one: RANK.get(one.cause, len(RANK))):
        owner = next((other for other in kept if _belongs(group, other)), None)
        if owner is None:
            kept.append(group)
        else:
            owner.held += group.held
            owner.stages += group.stages
            owner.stages.sort(key=_by_start)
    return kept


def _belongs(group: _Group, other: _Group) -> bool:
    """Whether a group is told with another one; a note does not hide what is worse."""
    near = group.start_s <= other.until_s + NEAR_S and group.until_s >= other.start_s - NEAR_S
    if not near or (other.severity < Severity.WARNING <= group.severity):
        return False
    if group.cause == other.cause:
        return True
    if group.cause not in EXPLAINS.get(other.cause, ()):
        return False
    apart_s = max(0.0, other.start_s - group.start_s) + max(0.0, group.until_s - other.until_s)
    return apart_s <= max(2 * NEAR_S, 0.5 * (group.until_s - group.start_s))


def _is_told(group: _Group) -> bool:
    return group.severity >= Severity.WARNING or group.cause in NOTED


def _episode(group: _Group, stages: Sequence[Held]) -> Episode:
    kind = "cascade" if group.stages else "cause"
    last = max((*group.held, *group.stages), key=lambda one: (one.end_s is None, one.until_s))
    return Episode(
        kind=kind,
        cause=group.cause,
        severity=group.severity,
        start_s=group.start_s,
        end_s=last.end_s,
        last_s=max(one.last_s for one in (*group.held, *group.stages)),
        ended=last.ended,
        stages=_strip(group, stages) if kind == "cascade" else (),
        causes=tuple(sorted(group.held, key=_by_start)),
    )


def _strip(group: _Group, stages: Sequence[Held]) -> tuple[Held, ...]:
    """The stages of a cascade: the filling right before it, and all in it."""
    evicting = [one for one in group.stages if int(one.id) >= EVICTING]
    start_s = min(one.start_s for one in evicting)
    until_s = max(one.until_s for one in evicting)
    strip = [one for one in stages if one.start_s < until_s and one.until_s > start_s]
    filling = [
        one for one in stages if one.id == "1" and 0 <= start_s - one.until_s <= 1 and one.end_s
    ]
    shown = [replace(one, start_s=max(one.start_s, start_s - FILLING_SHOWN_S)) for one in filling]
    return tuple(sorted([*shown, *strip], key=_by_start))


def _by_start(one: Held) -> float:
    return one.start_s
