"""Plays a living fleet to the fleet daemon's own code, cycle by cycle, at simulated time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from kneewatch.agent.fleet.engines import FleetEngines
from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.agent.fleet.watch import names_of, states_of
from kneewatch.agent.notify.alert_state import AlertState
from kneewatch.agent.notify.events import Event
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import Comparisons, diagnose
from kneewatch.diagnose.fleet.inventory import LabelMap, Observed, Past
from kneewatch.diagnose.fleet.verdict import FleetAdvice, FleetVerdict
from kneewatch.rules.rule import Severity
from tests.agent.fleet.prometheus_fleet import QUICK
from tests.agent.notify.factories import receiver
from tests.collector.oracle import LOOPBACK, Prometheus
from tests.living_fleet import LivingFleet

PROFILE = Profile(window_s=60.0)
HOLD_S = 120.0
HOOK = f'kind = "webhook"\nurl = "http://127.0.0.1:1/"\nseverity = "warning"\nhold_s = {HOLD_S}'


Follow = Callable[[Observed, FleetVerdict], None]
"""What each cycle calls."""


def unfollowed(_observed: Observed, _verdict: FleetVerdict) -> None:
    """Nobody follows."""


class Told(Struct, frozen=True):
    """What a receiver gets, and when, in seconds of the fleet's life."""

    kind: str
    target: str
    id: str
    t_s: float
    how: str
    event: Event
    verdict: FleetVerdict
    """The fleet then."""

    @property
    def summary(self) -> str:
        """The cause in a sentence; empty for its end."""
        return self.event.cause.summary if self.event.cause else ""


class Said(Struct, frozen=True):
    """The first cause of a pool at a moment."""

    t_s: float
    pool: str
    id: str
    severity: Severity
    summary: str


class Player:
    """Diagnoses a fleet again and again, as `run --prometheus` does."""

    def __init__(
        self,
        fleet: LivingFleet,
        server: Prometheus,
        folder: Path,
        *,
        cycle_s: float = 60.0,
        profile: Profile = PROFILE,
        follow: Follow = unfollowed,
    ) -> None:
        self._follow = follow
        self._fleet, self._port, self._cycle_s, self._profile = fleet, server.port, cycle_s, profile
        self._ledger = AlertState(receiver(folder, HOOK))
        self._engines = FleetEngines(profile)
        self._comparisons = Comparisons(scale=profile.scale)
        self._past: Past | None = None
        self.said: list[Said] = []
        self.advised: list[tuple[float, FleetAdvice]] = []

    def play(self, from_s: float, to_s: float) -> list[Told]:
        """What a receiver gets between two moments of the fleet's life."""
        messages: list[Told] = []
        names: frozenset[str] = frozenset()
        with PrometheusSource(f"http://{LOOPBACK}:{self._port}", QUICK) as source:
            t_s = from_s
            while t_s <= to_s:
                at_s = self._fleet.epoch_s + t_s
                config = FleetConfig("", LabelMap(), at_s, past=self._past, profile=self._profile)
                observed = observe(source, config, self._engines)
                self._past = observed.past
                newest = diagnose(observed, self._profile, self._comparisons)
                self._note(t_s, newest)
                self._follow(observed, newest)
                states = states_of(newest, interval_s=self._cycle_s)
                new_names = names_of(newest, states, names)
                events = [
                    event
                    for name in sorted(names - new_names)
                    for event in self._ledger.drop(name, at_s)
                ]
                names = new_names
                events += [event for state in states for event in self._ledger.update(state)]
                messages += [self._delivered(event, t_s, newest) for event in events]
                t_s += self._cycle_s
        return messages

    def _note(self, t_s: float, diagnosis: FleetVerdict) -> None:
        self.advised += [(t_s, advice) for advice in diagnosis.advice]
        pools = set[str]()
        for cause in diagnosis.causes:
            if cause.pool not in pools:
                pools.add(cause.pool)
                said = Said(t_s, cause.pool, cause.id, cause.severity, cause.summary)
                self.said.append(said)

    def _delivered(self, event: Event, t_s: float, verdict: FleetVerdict) -> Told:
        self._ledger.sent(event)
        self._ledger.delivered(event)
        return Told(event.kind, event.key.target, event.key.id, t_s, event.how, event, verdict)
