"""A fleet at one moment, with its pools and replicas as targets of the triage page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.store.records import Cycle, EngineCycle
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.engine.diagnosis import judged_against
from kneewatch.diagnose.fleet.inventory import Observed
from kneewatch.diagnose.fleet.verdict import FleetVerdict, target_of
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.fleet_rendering import pool_facts, replica_rows
from kneewatch.reports.triage.view_model import TargetView
from kneewatch.rules.facts import Targets

Engines = Mapping[tuple[str, str], Sequence[Verdict]]
"""The verdicts on engines by pool and replica."""


class FleetMoment(Struct, frozen=True):
    """The verdict on a fleet at one moment, and its pools and replicas by their names as targets.
    `targets` are the latency targets that it was judged by."""

    verdict: FleetVerdict
    pools: Mapping[str, TargetState]
    replicas: Mapping[str, TargetState]
    targets: Targets

    @classmethod
    def of(
        cls, verdict: FleetVerdict, engines: Engines, targets: Targets, interval_s: float
    ) -> FleetMoment:
        """The moment of a verdict. `interval_s` is the time between cycles."""
        pools: dict[str, TargetState] = {}
        stated = (targets.ttft_p99_s, targets.itl_p99_s) != (None, None)
        for pool, of_pool in verdict.by_pool().items():
            if stated:
                basis = judged_against(targets, targets, has_baseline=False)
                of_pool = replace(of_pool, judged_against=basis)
            pools[of_pool.target] = state_of(verdict, {"pool": pool}, (of_pool,), interval_s)
        replicas: dict[str, TargetState] = {}
        for (pool, replica), verdicts in engines.items():
            name = target_of(pool, replica)
            named = [replace(each, target=name) for each in verdicts]
            labels = {"pool": pool, "replica": replica}
            replicas[name] = state_of(verdict, labels, named, interval_s)
        return cls(verdict, pools, replicas, targets)

    def target(self, name: str) -> TargetState | None:
        """The pool or replica with this name. None if the fleet does not have it. The name of a
        tier, as in notifications, means its pool."""
        of_tier = name.rpartition(" on ")[0]
        return self.pools.get(name) or self.replicas.get(name) or self.pools.get(of_tier)

    def shown(self, view: TargetView) -> TargetView:
        """The view of a pool with its replicas, that of a replica with its pool, others as they
        are."""
        pool = view.labels.get("pool")
        if pool is None or not view.engines:
            return view
        if view.name in self.replicas:
            return replace(view, pool=target_of(pool))
        if view.name != target_of(pool):
            return view
        rows = replica_rows(self.verdict, pool)
        facts = pool_facts(view.engines[0].diagnosis, rows, self.targets)
        return replace(view, replicas=rows, facts=facts)


def engines_of(observed: Observed) -> Engines:
    """The verdicts on the engines that were observed."""
    engines: dict[tuple[str, str], list[Verdict]] = {}
    for member in observed.shape.members:
        verdict = observed.verdicts.get(member.key)
        if verdict is not None:
            engines.setdefault((member.pool, member.replica), []).append(verdict)
    return engines


def stored(pool: TargetState) -> Cycle:
    engines = tuple(EngineCycle(verdict) for verdict in pool.diagnoses)
    return Cycle(pool.t_s, pool.name, pool.labels, engines)


def state_of(
    fleet: FleetVerdict,
    labels: Mapping[str, str],
    verdicts: Sequence[Verdict],
    interval_s: float,
) -> TargetState:
    """Verdicts on a part of a fleet as a target's state."""
    return TargetState(
        name=verdicts[0].target,
        url=fleet.source,
        labels=labels,
        t_s=fleet.t_s,
        diagnoses=tuple(verdicts),
        cycle_s=fleet.load.seconds,
        interval_s=interval_s,
    )
