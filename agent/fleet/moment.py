"""A fleet at one moment, with its pools and replicas as targets of the triage page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.store.records import Cycle, EngineCycle
from kneewatch.agent.target_state import TargetState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import Comparisons, diagnose
from kneewatch.diagnose.fleet.inventory import Observed
from kneewatch.diagnose.fleet.verdict import FLEET, FleetVerdict
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets

IN_FLEET = f"{FLEET}/"
"""The first characters of the names of a fleet's targets."""


class Replica(NamedTuple):
    """A replica of a pool; `name` is empty for the pool as a whole."""

    pool: str
    name: str = ""

    @property
    def target(self) -> str:
        """The name as a target of the triage page."""
        return f"{IN_FLEET}{self.pool}/{self.name}" if self.name else f"{IN_FLEET}{self.pool}"


class FleetMoment(Struct, frozen=True):
    """The verdict on a fleet at one moment, and the verdicts on the engines of its replicas.
    `targets` are the latency targets that it was judged by."""

    verdict: FleetVerdict
    engines: Mapping[Replica, Sequence[Verdict]]
    targets: Targets = Targets()

    @classmethod
    def of(
        cls, observed: Observed, profile: Profile, comparisons: Comparisons | None = None
    ) -> FleetMoment:
        """Judge what was observed, as `diagnose` does."""
        engines: dict[Replica, list[Verdict]] = {}
        for member in observed.shape.members:
            verdict = observed.verdicts.get(member.key)
            if verdict is not None:
                replica = Replica(member.pool, member.replica)
                engines.setdefault(replica, []).append(replace(verdict, target=replica.target))
        return cls(diagnose(observed, profile, comparisons), engines, profile.targets)

    def pools(self, interval_s: float) -> list[TargetState]:
        """The pools as targets, each with one verdict. `interval_s` is the time between cycles."""
        return [
            self._state(Replica(pool), (verdict,), interval_s)
            for pool, verdict in self.verdict.by_pool().items()
        ]

    def target(self, name: str, interval_s: float) -> TargetState | None:
        """The pool or replica with this name. None if the fleet does not have it. The name of a
        tier, as in notifications, means its pool."""
        for replica, verdicts in self.engines.items():
            if replica.target == name:
                return self._state(replica, verdicts, interval_s)
        pools = self.pools(interval_s)
        same = (pool for pool in pools if name == pool.name or name.startswith(f"{pool.name} on "))
        return max(same, key=lambda pool: len(pool.name), default=None)

    def _state(
        self, replica: Replica, verdicts: Sequence[Verdict], interval_s: float
    ) -> TargetState:
        labels = {"pool": replica.pool} | ({"replica": replica.name} if replica.name else {})
        return TargetState(
            name=replica.target,
            url=self.verdict.source,
            labels=labels,
            t_s=self.verdict.t_s,
            diagnoses=tuple(verdicts),
            cycle_s=self.verdict.load.seconds,
            interval_s=interval_s,
            cycles=0,
            failures=0,
            failing=0,
        )


def stored(pool: TargetState) -> Cycle:
    """A pool's state in the form that is stored."""
    engines = tuple(EngineCycle(verdict) for verdict in pool.diagnoses)
    return Cycle(pool.t_s, pool.name, pool.labels, engines)
