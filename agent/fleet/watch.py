"""A fleet under watch: a metrics system asked again and again by the daemon. I/O edge."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kneewatch.agent.daemon.backoff import PATIENT_FAILURES, backoff_s
from kneewatch.agent.deployment import stated
from kneewatch.agent.fleet.gather import observe
from kneewatch.agent.fleet.wanted import source_settings, wanted_of
from kneewatch.agent.settings import Settings
from kneewatch.collector.base import CollectError
from kneewatch.collector.prometheus.source import PrometheusSource
from kneewatch.diagnose.fleet.diagnosing import FleetDiagnosis, diagnose
from kneewatch.reports.triage.standing import LATE_INTERVALS, LATE_S
from kneewatch.reports.words import clock, date

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""A server that does not answer is asked again after twice this, then later each time."""

PAST_S = 3600.0
"""How long the past is taken as it is, where all of it was seen: asking for days is dear."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """How the watching goes. `found` is the newest verdict, None before the first; `seen_s` is when
    it came, `error` why the newest cycle has none. `queries` and `retried` count from the start."""

    url: str
    interval_s: float
    found: FleetDiagnosis | None = None
    seen_s: float = 0.0
    past_s: float = 0.0
    cycles: int = 0
    failures: int = 0
    failing: int = 0
    error: str = ""
    queries: int = 0
    retried: int = 0

    def told(self, now_s: float) -> FleetDiagnosis | None:
        """The verdict as it may be told now: what is old or followed by a failure is lost."""
        if self.found is None:
            return None
        old = now_s - self.seen_s > max(LATE_S, LATE_INTERVALS * self.interval_s)
        if not self.failing and not old:
            return self.found
        since = f"no answer since {date(self.seen_s)} {clock(self.seen_s)} UTC"
        return replace(self.found, lost=f"{since}: {self.error}" if self.error else since)

    @property
    def queries_per_s(self) -> float:
        """The load of the newest verdict over its interval."""
        return self.found.observed.load.queries / self.interval_s if self.found else 0.0


class FleetWatch:
    """The daemon's job: one verdict an interval. Others read `state`, which is never changed."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        selector: str,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is asked yet.

        Raises:
            KneewatchError: the URL, the selector or a setting is wrong.
        """
        self._selector, self._wall = selector, wall
        self.asked = url, selector
        asking = source_settings(settings)
        self._source = PrometheusSource(url, asking)
        self._past = PrometheusSource(url, asking, pace=self._source.pace)
        self.state = FleetState(self._source.url, settings["fleet.interval_s"])
        self.adopt(settings)

    def adopt(self, settings: Settings) -> None:
        """Judge by these settings from now on.

        Raises:
            SettingsError: one of them is wrong; nothing has changed then.
        """
        profile = settings.profile(stated=stated(settings))
        profile.rules()
        self._wanted, self._profile = wanted_of(settings, self._selector), profile

    def cycle(self) -> float | None:
        """Ask once. Gives the seconds until the next time where there was no answer."""
        before, now_s = self.state, self._wall()
        known = before.found is not None and now_s - before.past_s < PAST_S
        past = before.found.observed.past if known and before.found else None
        try:
            observed = observe(self._source, replace(self._wanted, past=past))
            found = diagnose(observed, self._profile)
        except CollectError as error:
            return self._failed(str(error))
        if before.failing:
            log.info("the metrics system answers again failures=%s", before.failing)
        if before.found is None:
            log.info(
                "the fleet is watched engines=%s queries=%s interval_s=%g",
                len(found.engines),
                observed.load.queries,
                before.interval_s,
            )
        whole = past is None and not observed.past.missing
        self.state = replace(
            self._counted(),
            found=found,
            seen_s=self._wall(),
            past_s=now_s if whole else before.past_s,
            failing=0,
            error="",
        )
        return None

    def at(self, at_s: float) -> FleetDiagnosis:
        """The verdict of a past moment, by the settings of now. It is asked for beside the cycles,
        within the same limits, and changes nothing.

        Raises:
            CollectError: the metrics system does not answer, or knows no vLLM server then.
        """
        return diagnose(observe(self._past, replace(self._wanted, at_s=at_s)), self._profile)

    def crashed(self, error: Exception) -> float | None:
        """There is a bug: what was seen before says nothing of now."""
        return self._failed(f"kneewatch itself failed: {type(error).__name__}")

    def now_s(self) -> float:
        """The time."""
        return self._wall()

    def close(self) -> None:
        """Close the connections."""
        self._source.close()
        self._past.close()

    def _failed(self, why: str) -> float:
        counted = self._counted()
        state = replace(
            counted, failures=counted.failures + 1, failing=counted.failing + 1, error=why
        )
        self.state = state
        after_s = backoff_s(
            min(RETRY_S, state.interval_s),
            failing=state.failing + PATIENT_FAILURES - 1,
            luck=random.random(),
        )
        log.warning(
            "the metrics system does not answer failing=%s again_in_s=%.1f error=%s",
            state.failing,
            after_s,
            why,
        )
        return after_s

    def _counted(self) -> FleetState:
        return replace(
            self.state,
            cycles=self.state.cycles + 1,
            queries=self._source.pace.asked,
            retried=self._source.retried + self._past.retried,
        )
