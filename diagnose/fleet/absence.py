"""Replicas that do not serve: down, gone, loading or terminating. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec import Struct

from kneewatch.diagnose.causes.availability import TARGET_DOWN
from kneewatch.diagnose.fleet.inventory import Gone, Loading, Observed, Why
from kneewatch.diagnose.fleet.tier import FleetCause
from kneewatch.diagnose.verdict import Evidence
from kneewatch.rules.formatting import span
from kneewatch.rules.rule import Severity

OF_A_POOL = TARGET_DOWN.id
"""This cause is reported for a pool, not for a tier: a replica that is down has no tier label."""

DOWN_SCRAPES, DOWN_S = 3, 60.0
"""A target is down after this many failed scrapes in a row, over at least this many seconds."""

HELD_S = 60.0
"""Seconds without a replica before a pool is reported; by then Prometheus scrapes its new pods."""

UNSERVED_S = 600.0
"""Longest time, in seconds, that a pool may have no replica while new ones load."""

TOGETHER_S = 300.0
"""Replicas that left up to this many seconds before a pool's last one count as the pool's
replicas."""

SHOWN = 3

CHECK_SERVER = "Check that the server runs and listens on this address."
CHECK_START = "Check the pod's state and vLLM's start-up log."
TELL_KNEEWATCH = (
    "Check why the pods are gone. If intended, silence the alert; where Prometheus scrapes "
    "kube-state-metrics, kneewatch recognises a workload that is scaled to zero."
)


def is_down(failed: int, over_s: float) -> bool:
    """Whether a target is down after `failed` scrapes in a row over `over_s` seconds."""
    return failed >= DOWN_SCRAPES and over_s >= DOWN_S


class _Pool(Struct, frozen=True):
    """The missing and loading replicas of a pool.

    `serving`: the pool has a running replica. `is_scaled_to_zero`: None if unknown.
    """

    name: str
    serving: bool
    gone: Sequence[Gone]
    loading: Sequence[Loading]
    is_scaled_to_zero: bool | None
    now_s: float
    renamed: str = ""
    """The pool that the same workload serves now; empty if it serves none."""

    def gone_because(self, *reasons: Why) -> list[Gone]:
        """Replicas that are gone for one of these reasons."""
        return [replica for replica in self.gone if replica.why in reasons]

    @property
    def late(self) -> list[Loading]:
        """Loading targets that should have answered by now."""
        return [row for row in self.loading if self.now_s - row.since_s > row.patience_s]

    @property
    def seen_s(self) -> float | None:
        """Unix time of the pool's last series."""
        return max((row.seen_s for row in self.gone if row.seen_s is not None), default=None)

    @property
    def unserved_s(self) -> float:
        """Seconds for which the pool has had no series; 0 if unknown."""
        return 0.0 if self.seen_s is None else self.now_s - self.seen_s

    @property
    def is_vanished(self) -> bool:
        """Whether all replicas have left the pool.

        False if one of them is down or has only just stopped answering.
        """
        left = self.gone_because(Why.LEFT, Why.TERMINATING)
        return not self.serving and bool(left) and len(left) == len(self.gone)

    @property
    def is_replaced(self) -> bool:
        """Whether new replicas are loading and not late."""
        return bool(self.loading) and not self.late and self.unserved_s < UNSERVED_S


def _pools(observed: Observed) -> list[_Pool]:
    """The pools that miss a replica or have one that is loading."""
    serving = {member.pool for member in observed.shape.members}
    names = {row.pool for row in observed.gone} | {row.pool for row in observed.loading}
    zero = observed.scaled_to_zero
    return [
        _Pool(
            name,
            name in serving,
            [row for row in observed.gone if row.pool == name],
            [row for row in observed.loading if row.pool == name],
            None if zero is None else name in zero,
            observed.t_s,
            observed.renamed.get(name, ""),
        )
        for name in sorted(names)
    ]


def absence_causes(observed: Observed) -> list[FleetCause]:
    """A cause for each pool whose replicas are down, late or all gone."""
    causes: list[FleetCause] = []
    for pool in _pools(observed):
        down, late = pool.gone_because(Why.DOWN), pool.late
        if _is_missed(pool, observed):
            causes += _vanished(pool)
        elif down:
            causes.append(_down(pool, down))
        elif late:
            causes.append(_late(pool, late))
    return causes


def vanished_causes(observed: Observed) -> list[FleetCause]:
    """A cause for each pool whose replicas have all left."""
    missed = [pool for pool in _pools(observed) if _is_missed(pool, observed)]
    return [cause for pool in missed for cause in _vanished(pool)]


def _is_missed(pool: _Pool, observed: Observed) -> bool:
    """Whether a pool has been without replicas for long enough, as far as Prometheus shows."""
    return pool.is_vanished and pool.unserved_s >= HELD_S and observed.is_scraping


def _down(pool: _Pool, down: Sequence[Gone]) -> FleetCause:
    names = sorted(row.replica for row in down)
    verb = "replica is" if len(names) == 1 else "replicas are"
    text = f"{len(names)} {verb} down (scrapes fail): {_listed(names)}."
    evidence = Evidence("up", 0.0, 1.0, "up is 0: Prometheus cannot scrape the replica")
    return _cause(pool, names, Severity.CRITICAL, text, evidence, CHECK_SERVER)


def _late(pool: _Pool, late: Sequence[Loading]) -> FleetCause:
    names = sorted(row.replica for row in late)
    since_s = min(row.since_s for row in late)
    patience_s = max(row.patience_s for row in late)
    verb = "replica has" if len(names) == 1 else "replicas have"
    text = f"{len(names)} {verb} not answered since {_clock(since_s)}: {_listed(names)}."
    evidence = Evidence(
        "up",
        0.0,
        1.0,
        f"up has been 0 for {span(pool.now_s - since_s)}; a start may take {span(patience_s)}",
    )
    return _cause(pool, names, Severity.CRITICAL, text, evidence, CHECK_START)


def _vanished(pool: _Pool) -> list[FleetCause]:
    """The cause for a pool without replicas.

    None if its workload is scaled to zero or serves another model now.
    """
    seen_s = pool.seen_s
    if pool.is_scaled_to_zero or pool.renamed or seen_s is None:
        return []
    names = sorted(
        row.replica
        for row in pool.gone
        if row.seen_s is not None and seen_s - row.seen_s <= TOGETHER_S
    )
    what = "the replica" if len(names) == 1 else f"all {len(names)} replicas"
    verb = "is" if len(names) == 1 else "are"
    text = f"{what} of {pool.name} {verb} gone since {_clock(seen_s)}: the model is not served"
    severity, action = Severity.CRITICAL, TELL_KNEEWATCH
    if pool.is_replaced:
        severity, action = Severity.INFO, CHECK_START
        text += f"; {_count(len(pool.loading))} loading in its place"
    elif pool.loading:
        action = CHECK_START
        text += f"; {_count(len(pool.loading))} loading since {_clock(_first(pool.loading))}"
    evidence = Evidence("up", None, None, "no target of the pool has series now")
    return [_cause(pool, names, severity, f"{text[0].upper()}{text[1:]}.", evidence, action)]


def _cause(
    pool: _Pool,
    replicas: Sequence[str],
    severity: Severity,
    summary: str,
    evidence: Evidence,
    action: str,
) -> FleetCause:
    return FleetCause(
        id=OF_A_POOL,
        confidence=0.95,
        severity=severity,
        summary=summary,
        evidence=(evidence,),
        lever=action,
        pool=pool.name,
        tier="",
        replicas=tuple(replicas),
    )


def absence_notes(observed: Observed) -> list[str]:
    """A line for each group of replicas that do not serve, although this is no problem."""
    notes: list[str] = []
    for pool in _pools(observed):
        for row in pool.gone_because(Why.FAILING):
            ago = "" if row.seen_s is None else f" {span(observed.t_s - row.seen_s)} ago"
            notes.append(f"{row.replica} ({pool.name}) stopped answering{ago}")
        notes += _counted(pool.gone_because(Why.TERMINATING), "terminating")
        starting = [row for row in pool.loading if row not in pool.late]
        if starting:
            for_s = observed.t_s - _first(starting)
            notes.append(
                f"{_count(len(starting))} of {pool.name} loading for up to {span(for_s)}: "
                f"{_listed([row.replica for row in starting])}"
            )
        if pool.is_vanished and pool.is_scaled_to_zero:
            notes.append(f"{pool.name} is scaled to zero")
        elif pool.is_vanished and pool.renamed:
            notes.append(f"{pool.name} is no longer served: its workload now serves {pool.renamed}")
        elif pool.is_vanished and not observed.is_scraping:
            notes.append(
                f"{pool.name}: no series now, but Prometheus has hardly scraped anything in the "
                "last 5 min; whether its replicas are gone is unknown"
            )
    loading = {row.replica for row in observed.loading}
    left = [row for row in observed.gone if row.why is Why.LEFT and row.replica not in loading]
    notes += _counted(left, "no longer scraped (scaled down or renamed)", " of the last hour")
    return notes


def _counted(gone: Sequence[Gone], what: str, when: str = "") -> list[str]:
    if not gone:
        return []
    return [f"{_count(len(gone))}{when} {what}: {_listed([row.replica for row in gone])}"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:SHOWN]) + (" and others" if len(names) > SHOWN else "")


def _count(replicas: int) -> str:
    return f"{replicas} replica{'' if replicas == 1 else 's'}"


def _first(loading: Sequence[Loading]) -> float:
    return min(row.since_s for row in loading)


def _clock(t_s: float) -> str:
    return datetime.fromtimestamp(t_s, tz=UTC).strftime("%H:%M UTC")
