"""Watches a fleet for the daemon: queries Prometheus and notifies receivers. I/O edge."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.daemon.periodic_jobs import Job
from kneewatch.agent.fleet.engines import FleetEngines
from kneewatch.agent.fleet.snapshot import fleet_config, observe, source_settings
from kneewatch.agent.notify.message import FLEET
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.target_state import FAILURES_BEFORE_BACKOFF, TargetState, backoff_s
from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.fleet.comparisons import Comparisons
from kneewatch.diagnose.fleet.diagnosis import FleetDiagnosis, diagnose
from kneewatch.diagnose.fleet.tier import FleetCause
from kneewatch.diagnose.verdict import Cause, Evidence, Verdict
from kneewatch.reports.triage.view_model import LATE_INTERVALS, LATE_S
from kneewatch.rules.cascade import NAMES, Stage, staged
from kneewatch.rules.formatting import clock, date
from kneewatch.rules.rule import Severity
from kneewatch.rules.wire import to_ms

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Half of the first backoff, in seconds, when a metrics system does not answer."""

PAST_S = 3600.0
"""Seconds for which a complete history is reused: queries over days are expensive."""


class FleetState(Struct, frozen=True):
    """The state of a watched fleet.

    `diagnosis` is the newest diagnosis, None before the first; `seen_s` is its Unix time. `error`
    is the reason why the newest cycle failed, else "". `queries` and `retried` are totals since the
    start.
    """

    url: str
    interval_s: float
    diagnosis: FleetDiagnosis | None = None
    seen_s: float = 0.0
    past_s: float = 0.0
    cycles: int = 0
    failures: int = 0
    failing: int = 0
    error: str = ""
    queries: int = 0
    retried: int = 0

    def current_diagnosis(self, now_s: float) -> FleetDiagnosis | None:
        """The newest diagnosis; marked as lost if it is old or a later cycle failed."""
        if self.diagnosis is None:
            return None
        old = now_s - self.seen_s > max(LATE_S, LATE_INTERVALS * self.interval_s)
        if not self.failing and not old:
            return self.diagnosis
        since = f"no answer since {date(self.seen_s)} {clock(self.seen_s)} UTC"
        return replace(self.diagnosis, lost=f"{since}: {self.error}" if self.error else since)

    @property
    def queries_per_s(self) -> float:
        """Queries per second in the newest cycle."""
        return self.diagnosis.observed.load.queries / self.interval_s if self.diagnosis else 0.0


class FleetWatch(Job):
    """Diagnoses a fleet once per interval and notifies receivers.

    Other threads read `state`, which is immutable. `names` are the target names of the fleet for
    the receivers.
    """

    def __init__(self, url: str, settings: Settings, selector: str) -> None:
        """Check the URL, the selector and the settings. No query is sent yet.

        Raises:
            KneewatchError: the URL, the selector or a setting is wrong.
        """
        self.url_and_selector = url, selector
        query_settings = source_settings(settings)
        self._source = PrometheusSource(url, query_settings)
        self._past = PrometheusSource(url, query_settings, pace=self._source.pace)
        self.state = FleetState(self._source.url, settings["fleet.interval_s"])
        self.names: frozenset[str] = frozenset()
        self._notifier: Notifier | None = None
        self._on_names: Callable[[], None] = lambda: None
        self._config = fleet_config(settings, selector)
        self._engines = FleetEngines(self._config.profile)
        self._comparisons = Comparisons(scale=self._config.profile.scale)

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
        before, now_s = self.state, time.time()
        is_past_fresh = before.diagnosis is not None and now_s - before.past_s < PAST_S
        past = before.diagnosis.observed.past if is_past_fresh and before.diagnosis else None
        try:
            observed = observe(self._source, replace(self._config, past=past), self._engines)
            diagnosis = diagnose(observed, self._config.profile, self._comparisons)
        except CollectError as error:
            return self._failed(str(error))
        if before.failing:
            log.info("metrics system answers again failures=%s", before.failing)
        if before.diagnosis is None:
            log.info(
                "watching the fleet engines=%s queries=%s interval_s=%g",
                len(diagnosis.engines),
                observed.load.queries,
                before.interval_s,
            )
        is_past_complete = past is None and not observed.past.missing
        self.state = replace(
            self._with_counts(),
            diagnosis=diagnosis,
            seen_s=time.time(),
            past_s=now_s if is_past_complete else before.past_s,
            failing=0,
            error="",
        )
        return None

    def at(self, at_s: float) -> FleetDiagnosis:
        """The diagnosis of a past moment under the present settings. Its queries count towards the
        same limits as the cycles. `state` does not change.

        Raises:
            CollectError: the metrics system does not answer, or has no series of vLLM then.
        """
        return diagnose(observe(self._past, replace(self._config, at_s=at_s)), self._config.profile)

    def close(self) -> None:
        """Close the connections."""
        self._source.close()
        self._past.close()

    def _failed(self, why: str) -> float:
        state = self._with_counts()
        state = replace(state, failures=state.failures + 1, failing=state.failing + 1, error=why)
        self.state = state
        after_s = backoff_s(
            min(RETRY_S, state.interval_s),
            failing=state.failing + FAILURES_BEFORE_BACKOFF - 1,
            jitter=random.random(),
        )
        log.warning(
            "metrics system does not answer failing=%s retry_s=%.1f error=%s",
            state.failing,
            after_s,
            why,
        )
        return after_s

    def _notify(self) -> None:
        if not self._notifier:
            return
        state = self.state
        if state.failing:
            lost = lost_state(state.url, state.error, t_s=time.time(), interval_s=state.interval_s)
            self._notifier.offer(lost)
        elif state.diagnosis is not None:
            states = states_of(state.diagnosis, interval_s=state.interval_s)
            names = names_of(states, state.diagnosis, self.names)
            if names != self.names:
                self.names = names
                self._on_names()
            for target_state in states:
                self._notifier.offer(target_state)

    def _with_counts(self) -> FleetState:
        return replace(
            self.state,
            cycles=self.state.cycles + 1,
            queries=self._source.pace.asked,
            retried=self._source.retried + self._past.retried,
        )


# --- A fleet's diagnosis as states of targets, for the notifier -----------------------------------
#
# `fleet` is the metrics system itself, `fleet/POOL` and `fleet/POOL on TIER` have the causes of a
# pool's and a tier's replicas: one notification for a cause, whatever the number of replicas.


SYSTEM_DOWN = "metrics_system_down"


def states_of(diagnosis: FleetDiagnosis, *, interval_s: float) -> list[TargetState]:
    """The diagnosis as target states for the notifier. A problem that is missing from a partial
    answer is not treated as resolved."""
    states = [_state(FLEET, {}, diagnosis, [_diagnosis_of(diagnosis, FLEET)], interval_s)]
    # A pool stays a target while nothing is wrong with it, and while all of its replicas are gone:
    # otherwise the end of its problems would not be reported.
    groups = dict.fromkeys([(tier.pool, "") for tier in diagnosis.tiers])
    groups |= dict.fromkeys([(tier.pool, tier.tier) for tier in diagnosis.tiers])
    groups |= dict.fromkeys([(cause.pool, cause.tier) for cause in diagnosis.causes])
    groups |= dict.fromkeys([(replica.pool, "") for replica in diagnosis.observed.gone])
    for pool, tier in groups:
        name = f"{FLEET}/{pool or '?'}" + (f" on {tier}" if tier else "")
        shown = [cause for cause in diagnosis.causes if (cause.pool, cause.tier) == (pool, tier)]
        tier_diagnosis = _diagnosis_of(
            diagnosis,
            name,
            causes=[_dated(c.cause, diagnosis.observed.t_s) for c in shown],
            cascade=_cascade(diagnosis, pool, tier, shown),
            is_unknown=diagnosis.partial,
        )
        labels = {"pool": pool, "tier": tier}
        states.append(_state(name, labels, diagnosis, [tier_diagnosis], interval_s))
    return states


def _dated(cause: Cause, t_s: float) -> Cause:
    """The cause with its start time; `t_s` if that is unknown."""
    return replace(cause, since_s=t_s) if cause.since_s is None else cause


def names_of(
    states: Sequence[TargetState], diagnosis: FleetDiagnosis, before: frozenset[str]
) -> frozenset[str]:
    """The names of the fleet's targets after a diagnosis. `before` are the names until then.

    While a pool has no replicas, its tiers keep their names: their problems are neither resolved
    nor unwatched. If the answer is partial, all earlier names are kept.
    """
    if diagnosis.partial:
        return before | {state.name for state in states}
    serving = {tier.pool for tier in diagnosis.tiers}
    empty = {replica.pool for replica in diagnosis.observed.gone} - serving
    waiting = {name for name in before for pool in empty if name.startswith(f"{FLEET}/{pool} on ")}
    return frozenset({state.name for state in states} | waiting)


def lost_state(url: str, why: str, *, t_s: float, interval_s: float) -> TargetState:
    """The fleet's target state while the metrics system does not answer."""
    cause = Cause(
        id=SYSTEM_DOWN,
        confidence=1.0,
        severity=Severity.CRITICAL,
        summary=f"Metrics system does not answer: the fleet's state is unknown ({why})",
        evidence=(Evidence("fleet_up", 0.0, None, why),),
        lever="Check the metrics system and the network path to it.",
        since_s=t_s,
    )
    diagnosis = Verdict(
        t_s=t_s,
        target=FLEET,
        health="unknown",
        causes=(cause,),
        unknown=(why,),
        judged_against=f"nothing: {why}",
    )
    return TargetState(FLEET, url, {}, t_s, (diagnosis,), 0.0, interval_s, 0, 0, 1)


def _cascade(
    diagnosis: FleetDiagnosis, pool: str, tier: str, causes: Sequence[FleetCause]
) -> Stage:
    """The worst stage among the tier's engines, ignoring engines with a reported cause."""
    explained = {
        name for c in causes if c.cause.severity >= Severity.WARNING for name in c.replicas
    }
    worst = max(
        (
            engine
            for engine in diagnosis.engines
            if (engine.member.pool, engine.member.tier) == (pool, tier)
            and engine.member.name not in explained
        ),
        key=lambda engine: (engine.stage_severity, engine.stage or 0),
        default=None,
    )
    if worst is None or not worst.stage:
        return staged(0, diagnosis.observed.t_s, Severity.OK, None, ())
    reasons = (f"{worst.member.name}: {NAMES[worst.stage]}",)
    severity = worst.stage_severity
    # A snapshot has no history: the receiver's alert state keeps when a stage began.
    return staged(worst.stage, diagnosis.observed.t_s, severity, None, reasons)


def _diagnosis_of(
    diagnosis: FleetDiagnosis,
    name: str,
    *,
    causes: Sequence[Cause] = (),
    cascade: Stage | None = None,
    is_unknown: bool = False,
) -> Verdict:
    observed = diagnosis.observed
    steady = cascade or staged(0, observed.t_s, Severity.OK, None, ())
    health = "unknown" if is_unknown or steady.severity is None else steady.severity.word
    return Verdict(
        t_s=to_ms(observed.t_s),
        target=name,
        health=health,
        stage=steady,
        causes=[cause.rounded() for cause in causes],
        window_s=observed.window_s,
        judged_against="its peers",
    )


def _state(
    name: str,
    labels: Mapping[str, str],
    diagnosis: FleetDiagnosis,
    diagnoses: Sequence[Verdict],
    interval_s: float,
) -> TargetState:
    observed = diagnosis.observed
    return TargetState(
        name, observed.source, labels, observed.t_s, tuple(diagnoses), observed.load.seconds,
        interval_s, 0, 0, 0,
    )  # fmt: skip
