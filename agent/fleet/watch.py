"""Watches a fleet for the daemon: queries Prometheus and notifies receivers. I/O edge."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.daemon.periodic_jobs import OWN_CLOCK, Job
from kneewatch.agent.fleet.engines import FleetEngines
from kneewatch.agent.fleet.snapshot import fleet_config, observe, source_settings
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.store.records import Cycle, EngineCycle
from kneewatch.agent.stream import AcceptRequest, EngineAcceptance
from kneewatch.agent.target_state import FAILURES_BEFORE_BACKOFF, TargetState, backoff_s
from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.engine.diagnosis import judged_against
from kneewatch.diagnose.fleet.diagnosis import Comparisons, diagnose
from kneewatch.diagnose.fleet.inventory import Observed, Past
from kneewatch.diagnose.fleet.verdict import FLEET, FleetVerdict, Watching, target_of
from kneewatch.diagnose.verdict import Cause, Evidence, Verdict
from kneewatch.reports.fleet_rendering import pool_facts, replica_rows
from kneewatch.reports.health import is_late
from kneewatch.reports.triage.view_model import TargetView
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import clock, date
from kneewatch.rules.rule import Severity
from kneewatch.rules.wire import to_ms

if TYPE_CHECKING:
    from kneewatch.agent.daemon.baselines import LearnedStates

# --- A fleet at one moment, with its pools and replicas as targets of the triage page -------------


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


# --- Watches a fleet ------------------------------------------------------------------------------


log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Half of the first backoff, in seconds, when a metrics system does not answer."""

PAST_S = 3600.0
"""Seconds for which a complete history is reused: queries over days are expensive."""


OTHERS_WAIT_S = 900.0
"""Of daemons that share a fleet, the others than the first report after this many seconds that the
metrics system does not answer: by then the fault may be their own connection."""


class FleetState(Struct, frozen=True):
    """The state of a watched fleet.

    `watching` are its queries so far, since `began_s`. `moment` is the newest one, None before the
    first. `past` has the past values that it used; they were complete at `past_s`.
    """

    url: str
    watching: Watching
    began_s: float
    moment: FleetMoment | None = None
    past: Past | None = None
    past_s: float = 0.0

    @property
    def verdict(self) -> FleetVerdict | None:
        """The newest verdict. None before the first."""
        return None if self.moment is None else self.moment.verdict

    def current(self, now_s: float) -> FleetVerdict | None:
        """The newest verdict; marked as lost if it is old or a later cycle failed."""
        if self.verdict is None:
            return None
        seen_s, error = self.watching.seen_s, self.watching.error
        old = is_late(now_s - seen_s, self.watching.interval_s)
        if not self.watching.failing and not old:
            return self.verdict
        since = f"no answer since {date(seen_s)} {clock(seen_s)} UTC"
        why = f"{since}: {error}" if error else since
        return replace(self.verdict, lost=why, health="unknown")

    def why_unknown(self, now_s: float) -> str:
        """The reason why the fleet's present state is unknown; empty if it is known."""
        current, error = self.current(now_s), self.watching.error
        if current is not None:
            return current.lost or ""
        if not error:
            return "the metrics system has not been queried yet"
        return (
            f"no answer since the start at {date(self.began_s)} {clock(self.began_s)} UTC: {error}"
        )

    def unanswered(self, now_s: float) -> TargetState | None:
        """The fleet as a target whose state is unknown; None after the first answer."""
        if self.moment is not None:
            return None
        why, interval_s = self.why_unknown(now_s), self.watching.interval_s
        state = lost_state(self.url, why, t_s=now_s, interval_s=interval_s, since_s=self.began_s)
        if self.watching.error:
            return state
        return replace(state, diagnoses=(replace(state.diagnoses[0], causes=()),), failing=0)

    def moment_at(self, now_s: float) -> FleetMoment | None:
        """The newest moment, with the verdict marked as lost like that of `current`."""
        current = self.current(now_s)
        if self.moment is None or current is None:
            return None
        return replace(self.moment, verdict=current)


class FleetWatch(Job):
    """Diagnoses a fleet once per interval and notifies receivers.

    Other threads read `state`, which is immutable. `names` are the target names of the fleet for
    the receivers.
    """

    first_in_s = 0.0

    def __init__(self, url: str, settings: Settings, selector: str) -> None:
        """Check the URL, the selector and the settings. No query is sent yet.

        Raises:
            KneewatchError: the URL, the selector or a setting is wrong.
        """
        self.url_and_selector = url, selector
        query_settings = source_settings(settings)
        self._source = PrometheusSource(url, query_settings)
        self._past = PrometheusSource(url, query_settings, pace=self._source.pace)
        self.every_s: float = settings["fleet.interval_s"]
        none = Watching(self.every_s, 0.0, 0, 0, 0, "", 0, 0, 0.0)
        self.state = FleetState(self._source.url, none, OWN_CLOCK())
        self.names: frozenset[str] = frozenset()
        self._notifier: Notifier | None = None
        self._judging = Lock()
        self.learned: LearnedStates | None = None
        """Keeps what was learned about engines across restarts of the daemon."""
        self._on_names: Callable[[], None] = lambda: None
        self._store: Callable[[Cycle], None] = lambda _cycle: None
        self._config = fleet_config(settings, selector)
        self._engines = FleetEngines(self._config.profile)
        self._comparisons = Comparisons(scale=self._config.profile.scale)

    def store_through(self, store: Callable[[Cycle], None]) -> None:
        """Keep the history of the pools through `store` from now on."""
        self._store = store

    def notify_through(self, notifier: Notifier, on_names: Callable[[], None]) -> None:
        """Notify the receivers of `notifier` from now on. `on_names` is called when `names`
        change."""
        self._notifier, self._on_names = notifier, on_names
        # Until the first answer, problems from before a restart count as still active.
        self.names = frozenset(
            name for name in notifier.active_targets() if name.split("/")[0] == FLEET
        )

    def adopt(self, settings: Settings) -> None:
        """Use these settings from now on.

        Raises:
            SettingsError: a setting is wrong; then nothing changes.
        """
        config = fleet_config(settings, self.url_and_selector[1])
        self._engines.adopt(config.profile)
        if config.profile.scale != self._config.profile.scale:
            self._comparisons = Comparisons(scale=config.profile.scale)
        self._config = config

    def cycle(self) -> float | None:
        """Run one cycle and notify receivers. Returns None, or after a failure the seconds until
        the retry."""
        after_s = self._diagnose()
        self._notify()
        return after_s

    def crashed(self, error: Exception) -> float | None:
        """Count a cycle that raised an exception, which is a bug. The fleet's state is then
        unknown."""
        after_s = self._failed(f"bug in kneewatch: {type(error).__name__}; see the log")
        self._notify()
        return after_s

    def _diagnose(self) -> float | None:
        before, now_s = self.state, OWN_CLOCK()
        past = before.past if now_s - before.past_s < PAST_S else None
        try:
            with self._judging:
                observed = observe(self._source, replace(self._config, past=past), self._engines)
                if self.learned is not None:
                    for target, engine in self._engines.monitored():
                        self.learned.exchange(target, engine, observed.t_s)
            now = self._judged(observed, self._comparisons)
        except CollectError as error:
            return self._failed(str(error))
        if before.watching.failing:
            log.info("metrics system answers again failures=%s", before.watching.failing)
        if before.verdict is None:
            log.info(
                "watching the fleet engines=%s queries=%s interval_s=%g",
                len(now.verdict.engines),
                observed.load.queries,
                self.every_s,
            )
        is_past_complete = past is None and not observed.past.missing
        self.state = replace(
            before,
            watching=replace(
                self._counted(),
                seen_s=to_ms(OWN_CLOCK()),
                failing=0,
                error="",
                queries_per_s=round(observed.load.queries / self.every_s, 3),
            ),
            moment=now,
            past=observed.past,
            past_s=now_s if is_past_complete else before.past_s,
        )
        for pool in now.pools.values():
            self._store(stored(pool))
        return None

    def _judged(self, observed: Observed, comparisons: Comparisons | None = None) -> FleetMoment:
        profile = self._config.profile
        verdict = diagnose(observed, profile, comparisons)
        engines = engines_of(observed)
        return FleetMoment.of(verdict, engines, profile.targets, self.every_s)

    def accept(self, request: AcceptRequest) -> list[EngineAcceptance]:
        """Make the present values of a replica's engines the usual ones. Thread-safe."""
        with self._judging:
            return self._engines.accept(OWN_CLOCK(), request)

    def at(self, at_s: float) -> FleetMoment:
        """A past moment as judged under the present settings. Its queries count towards the
        same limits as the cycles. `state` does not change.

        Raises:
            CollectError: the metrics system does not answer, or has no series of vLLM then.
        """
        return self._judged(observe(self._past, replace(self._config, at_s=at_s)))

    def close(self) -> None:
        self._source.close()
        self._past.close()

    def _failed(self, why: str) -> float:
        counted = self._counted()
        failing = counted.failing + 1
        now = replace(counted, failures=counted.failures + 1, failing=failing, error=why)
        self.state = replace(self.state, watching=now)
        after_s = backoff_s(
            min(RETRY_S, self.every_s),
            failing=failing + FAILURES_BEFORE_BACKOFF - 1,
            jitter=random.random(),
        )
        log.warning(
            "metrics system does not answer failing=%s retry_s=%.1f error=%s",
            failing,
            after_s,
            why,
        )
        return after_s

    def _notify(self) -> None:
        if not self._notifier:
            return
        watching, verdict, now_s = self.state.watching, self.state.verdict, OWN_CLOCK()
        if watching.failing:
            silent_s = now_s - max(self.state.began_s, watching.seen_s)
            if self._config.shard.index == 0 or silent_s > OTHERS_WAIT_S:
                url, why = self.state.url, watching.error
                lost = lost_state(url, why, t_s=now_s, interval_s=self.every_s)
                self._notifier.offer(lost)
        elif verdict is not None:
            states = states_of(verdict, interval_s=self.every_s)
            names = names_of(verdict, states, self.names)
            if names != self.names:
                self.names = names
                self._on_names()
            for target_state in states:
                self._notifier.offer(target_state)

    def _counted(self) -> Watching:
        return replace(
            self.state.watching,
            cycles=self.state.watching.cycles + 1,
            queries=self._source.pace.asked,
            retried=self._source.retried + self._past.retried,
        )


# --- A fleet's verdict as states of targets, for the notifier -----------------------------------
#
# `fleet` is the metrics system itself, `fleet/POOL` and `fleet/POOL on TIER` have the causes of a
# pool's and a tier's replicas: one notification for a cause, whatever the number of replicas.


SYSTEM_DOWN = "metrics_system_down"


def states_of(verdict: FleetVerdict, *, interval_s: float) -> list[TargetState]:
    """The verdict as target states for the notifier. A problem that is missing from a partial
    answer is not treated as resolved."""
    system = state_of(verdict, {}, [verdict.as_target(FLEET)], interval_s)
    places = [
        state_of(verdict, {"pool": pool, "tier": tier or ""}, [of_place], interval_s)
        for (pool, tier), of_place in verdict.by_place().items()
    ]
    return [system, *places]


def names_of(
    verdict: FleetVerdict, states: Iterable[TargetState], before: frozenset[str]
) -> frozenset[str]:
    """The names of the fleet's targets after a verdict. `before` are the names until then.

    While a pool has no replicas, its tiers keep their names: their problems are neither resolved
    nor unwatched. If the answer is partial, all earlier names are kept.
    """
    if verdict.partial:
        return before | {state.name for state in states}
    serving = {tier.pool for tier in verdict.tiers}
    empty = {replica.pool for replica in verdict.gone} - serving
    tiers = tuple(f"{target_of(pool)} on " for pool in empty)
    waiting = {name for name in before if name.startswith(tiers)}
    return frozenset({state.name for state in states} | waiting)


def lost_state(
    url: str, why: str, *, t_s: float, interval_s: float, since_s: float | None = None
) -> TargetState:
    """The fleet's target state while the metrics system does not answer: since `since_s` or now."""
    cause = Cause(
        id=SYSTEM_DOWN,
        confidence=1.0,
        severity=Severity.CRITICAL,
        summary=f"Metrics system does not answer: the fleet's state is unknown ({why})",
        evidence=(Evidence("fleet_up", 0.0, None, why),),
        lever="Check the metrics system and the network path to it.",
        since_s=t_s if since_s is None else since_s,
    )
    verdict = Verdict(
        t_s=t_s,
        target=FLEET,
        health="unknown",
        causes=(cause,),
        unknown=(why,),
        judged_against=f"nothing: {why}",
    )
    return TargetState(FLEET, url, {}, t_s, (verdict,), 0.0, interval_s, failing=1)
