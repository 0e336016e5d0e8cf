"""Replicas that do not serve: down, gone, loading, terminating, or restarting again and again.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.causes.availability import (
    CRASH_LOOP_S,
    CRASHES_WARNING,
    RESTARTS_SHOWN,
    how_ended,
)
from kneewatch.diagnose.change import TARGET_DOWN
from kneewatch.diagnose.fleet.inventory import Gone, Loading, Observed, RestartedReplica, Why
from kneewatch.diagnose.fleet.tier import FleetCause
from kneewatch.diagnose.ranking import ENGINE_RESTARTED
from kneewatch.diagnose.verdict import Evidence
from kneewatch.rules.formatting import clock, listed, plural, span
from kneewatch.rules.rule import Severity

OF_A_POOL = TARGET_DOWN
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

LOOPS_FROM = 2
"""Restarts of one replica within CRASH_LOOP_S that make a crash loop."""

CRASHED_FROM = 3
"""Replicas of a large pool that crash once within CRASH_LOOP_S, from which this is a cause. Of a
small pool: half of them, at least two; or its only one."""

OUTLIVED_S, OUTLIVED_RATIO = 300.0, 3.0
"""A crash loop is over when the process has run this long, and this many times as long as any that
was seen to end."""

CHECK_SERVER = "Check that the process runs and listens on the address that Prometheus scrapes."
CHECK_RELEASE = (
    "Read the log of the process that ended (kubectl logs --previous) and its exit code; if a new "
    "version or setting was rolled out, roll it back."
)
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

    `serving`: the pool has a running replica. `is_scaled_to_zero`: None if unknown. `size`: number
    of replicas that serve or have stopped answering.
    """

    name: str
    serving: bool
    gone: Sequence[Gone]
    loading: Sequence[Loading]
    is_scaled_to_zero: bool | None
    now_s: float
    size: int
    restarted: Sequence[RestartedReplica] = ()
    renamed: str = ""
    """The pool that the same workload serves now; empty if it serves none."""
    scrape_s: float = 0.0

    def gone_because(self, *reasons: Why) -> list[Gone]:
        return [replica for replica in self.gone if replica.why in reasons]

    @property
    def late(self) -> list[Loading]:
        """Loading targets that should have answered by now."""
        return [row for row in self.loading if self.now_s - row.since_s > row.patience_s]

    @property
    def loops(self) -> list[RestartedReplica]:
        """Replicas whose processes end again and again."""
        return [row for row in self.restarted if _loops(row, self.now_s)]

    @property
    def crashed(self) -> list[RestartedReplica]:
        """Replicas whose process ended within the last minutes while it had requests.

        Those that were away for long were reported as down.
        """
        down_s = max(2 * DOWN_S, (DOWN_SCRAPES + 1) * self.scrape_s)
        return [
            row
            for row in self.restarted
            if any(
                p.broke_off and p.away_s < down_s and self.now_s - p.t_s <= CRASH_LOOP_S
                for p in row.processes
            )
        ]

    @property
    def is_settled(self) -> bool:
        """Whether all processes have run for a while."""
        newest_s = max((row.processes[-1].t_s for row in self.restarted), default=0.0)
        return self.now_s - newest_s >= OUTLIVED_S

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
    """The pools that miss a replica, or have one that is loading or has restarted."""
    serving = {member.pool for member in observed.shape.members}
    names = {row.pool for row in observed.gone} | {row.pool for row in observed.loading}
    names |= {row.pool for row in observed.restarted}
    zero = observed.scaled_to_zero
    counted = {(member.pool, member.replica) for member in observed.shape.members}
    counted |= {(row.pool, row.replica) for row in observed.gone if row.why is not Why.LEFT}
    size = Counter(pool for pool, _ in counted)
    return [
        _Pool(
            name,
            name in serving,
            [row for row in observed.gone if row.pool == name],
            [row for row in observed.loading if row.pool == name],
            None if zero is None else name in zero,
            observed.t_s,
            size[name],
            [row for row in observed.restarted if row.pool == name],
            observed.renamed.get(name, ""),
            observed.scrape_interval_s or 0.0,
        )
        for name in sorted(names)
    ]


def absence_causes(observed: Observed) -> list[FleetCause]:
    """The causes of each pool whose replicas are down, late, all gone or restarting."""
    causes: list[FleetCause] = []
    for pool in _pools(observed):
        loops = {row.replica for row in pool.loops}
        down = [row for row in pool.gone_because(Why.DOWN) if row.replica not in loops]
        if _is_missed(pool, observed):
            causes += _vanished(pool)
        else:
            causes += _unserved(pool, down)
        if (restarts := _restarts(pool)) is not None:
            causes.append(restarts)
    return causes


def _loops(row: RestartedReplica, now_s: float) -> bool:
    recent = [each for each in row.processes if now_s - each.t_s <= CRASH_LOOP_S]
    crashes = sum(each.broke_off for each in row.processes)
    longest_s = max((each.uptime_s or 0.0 for each in row.processes[1:]), default=0.0)
    is_over = now_s - row.processes[-1].t_s >= max(OUTLIVED_S, OUTLIVED_RATIO * longest_s)
    return not is_over and (len(recent) >= LOOPS_FROM or crashes >= CRASHES_WARNING)


def _restarts(pool: _Pool) -> FleetCause | None:
    """The cause for a pool with a crash loop, or several of whose replicas crashed once; None if
    neither."""
    loops, crashed = pool.loops, pool.crashed
    rows = loops or crashed
    least = min(CRASHED_FROM, max(2, pool.size / 2), max(1, pool.size))
    if not loops and (pool.is_settled or len(crashed) < least):
        return None
    names = sorted(row.replica for row in rows)
    worst = max(rows, key=lambda row: (len(row.processes), row.replica))
    last = worst.processes[-1]
    of = f"{len(rows)} of {plural(pool.size, 'replica')}"
    if loops:
        ran = "" if last.uptime_s is None else f", the last process ran {span(last.uptime_s)}"
        text = (
            f"{of} of {pool.name} {'restart' if len(rows) > 1 else 'restarts'} again and again: "
            f"{worst.replica} {len(worst.processes)} times within the hour{ran}."
        )
    else:
        text = (
            f"{of} of {pool.name} crashed under load within {span(CRASH_LOOP_S)}: {_listed(names)}."
        )
    evidence = [
        Evidence("process_start", each.uptime_s, None, how_ended(each))
        for each in worst.processes[: -RESTARTS_SHOWN - 1 : -1]
    ]
    most_loop = 2 * len(loops) >= pool.size
    severity = Severity.CRITICAL if most_loop or len(crashed) >= least else Severity.WARNING
    since_s = min(
        each.t_s - max(0.0, each.away_s - pool.scrape_s) for row in rows for each in row.processes
    )
    cause = _cause(pool, names, severity, text, evidence[0], CHECK_RELEASE, since_s)
    return replace(cause, id=ENGINE_RESTARTED, evidence=tuple(evidence))


def vanished_causes(observed: Observed) -> list[FleetCause]:
    """A cause for each pool whose replicas have all left."""
    missed = [pool for pool in _pools(observed) if _is_missed(pool, observed)]
    return [cause for pool in missed for cause in _vanished(pool)]


def late_causes(observed: Observed) -> list[FleetCause]:
    """A cause for each pool with targets that never answered and should serve by now."""
    return [_loading(pool, pool.late) for pool in _pools(observed) if pool.late]


def _is_missed(pool: _Pool, observed: Observed) -> bool:
    """Whether a pool has been without replicas for long enough, as far as Prometheus shows."""
    return pool.is_vanished and pool.unserved_s >= HELD_S and observed.is_scraping


def _unserved(pool: _Pool, down: Sequence[Gone]) -> list[FleetCause]:
    """The cause for replicas that do not answer: down, late, or both; else for those that load."""
    causes = [_down(pool, down)] if down else []
    if pool.late or (pool.loading and not down):
        causes.append(_loading(pool, pool.late or pool.loading))
    if len(causes) < 2:
        return causes
    first, second = causes
    return [
        replace(
            first,
            summary=f"{first.summary} {second.summary}",
            evidence=(*first.evidence, *second.evidence),
            replicas=(*first.replicas, *second.replicas),
        )
    ]


def _down(pool: _Pool, down: Sequence[Gone]) -> FleetCause:
    names = sorted(row.replica for row in down)
    verb, of = "is" if len(names) == 1 else "are", plural(pool.size, "replica")
    text = f"{len(names)} of {of} {verb} down (scrapes fail): {_listed(names)}."
    if not pool.serving and len(names) == pool.size:
        text += " The model is not served."
    evidence = Evidence("up", 0.0, 1.0, "up is 0: Prometheus cannot scrape the replica")
    since_s = min((row.seen_s for row in down if row.seen_s is not None), default=None)
    return _cause(pool, names, Severity.CRITICAL, text, evidence, CHECK_SERVER, since_s)


def _loading(pool: _Pool, loading: Sequence[Loading]) -> FleetCause:
    """The cause for replicas that have never answered: critical once a start may not take so
    long."""
    names = sorted(row.replica for row in loading)
    since_s = min(row.since_s for row in loading)
    patience_s = max(row.patience_s for row in loading)
    verb = "replica has" if len(names) == 1 else "replicas have"
    text = f"{len(names)} {verb} not answered since {_clock(since_s)}: {_listed(names)}"
    text += "." if pool.late else f"; should serve by {_clock(since_s + patience_s)}."
    severity = Severity.CRITICAL if pool.late else Severity.INFO
    evidence = Evidence(
        "up",
        0.0,
        1.0,
        f"up has been 0 since {_clock(since_s)}; a start may take {span(patience_s)}",
    )
    return _cause(pool, names, severity, text, evidence, CHECK_START, since_s)


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
        text += f"; {plural(len(pool.loading), 'replica')} loading in its place"
    elif pool.loading:
        action, first_s = CHECK_START, min(row.since_s for row in pool.loading)
        text += f"; {plural(len(pool.loading), 'replica')} loading since {_clock(first_s)}"
    evidence = Evidence("up", None, None, "no target of the pool has series now")
    text = f"{text[0].upper()}{text[1:]}."
    return [_cause(pool, names, severity, text, evidence, action, seen_s)]


def _cause(
    pool: _Pool,
    replicas: Sequence[str],
    severity: Severity,
    summary: str,
    evidence: Evidence,
    action: str,
    since_s: float | None,
) -> FleetCause:
    return FleetCause(
        id=OF_A_POOL,
        confidence=0.95,
        severity=severity,
        summary=summary,
        evidence=(evidence,),
        lever=action,
        since_s=since_s,
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
    return [f"{plural(len(gone), 'replica')}{when} {what}: {_listed(row.replica for row in gone)}"]


def _listed(names: Iterable[str]) -> str:
    return listed(sorted(names), SHOWN)


def _clock(t_s: float) -> str:
    return f"{clock(t_s)[:5]} UTC"
