"""A report's inputs from Prometheus, as the settings describe it. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kneewatch.agent.deployment import stated
from kneewatch.agent.fleet.config import source_settings
from kneewatch.agent.fleet.queries import checked_selector
from kneewatch.agent.fleet.snapshot import capacity_tokens
from kneewatch.agent.report.engine import in_flight, points
from kneewatch.agent.report.history import Signals
from kneewatch.agent.report.inventory import Wanted
from kneewatch.agent.report.prometheus.aggregation import Gauges, spans
from kneewatch.agent.report.prometheus.incidents import Trouble, targets
from kneewatch.agent.report.prometheus.inventory import Roll, Rolled, roll
from kneewatch.agent.report.prometheus.notes import METHODS, notes_of, notices_of
from kneewatch.agent.report.prometheus.period import Configs, Read, Reading, process_names
from kneewatch.agent.report.prometheus.queries import Ranges
from kneewatch.agent.report.prometheus.resolution import Floats, resolution
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import LabelMap, label_map
from kneewatch.reports.weekly.aggregation import Span
from kneewatch.reports.weekly.measures import RUNNING, WAITING
from kneewatch.reports.weekly.observed import (
    Configured,
    EngineObserved,
    Observed,
    TierObserved,
    Together,
)

NOTHING: Mapping[str, float] = {}

Tell = Callable[[int, int], None]
"""Is told how much of the work is done, and how much there is."""

QUERIES = 60
"""About so many queries a period takes."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which series, what their labels mean, what the monitor judges by, how many queries at
    once."""

    selector: str
    names: LabelMap
    profile: Profile
    at_once: int


def gather(
    source: PrometheusSource, wanted: Wanted, asked: Asked, tell: Tell = lambda _done, _all: None
) -> Observed:
    """What a metrics system knows of the period and of the one before; partial where some of it
    is missing, by the server's own word or because a query failed.

    Raises:
        CollectError: it does not answer, or knew no vLLM server in that time.
    """
    progress = _Progress(tell, QUERIES * (1 if wanted.before is None else 2))
    ranges = Ranges(source, at_once=asked.at_once, tell=progress)
    known = roll(ranges, wanted, asked.selector, asked.names)
    found = resolution(
        wanted.grid,
        engines=len(known.shape.members),
        scrape_s=known.scrape_s,
        window_s=wanted.window_s,
    )
    reading = Reading(ranges, known, found)
    late_s = min(
        (
            target_s
            for one in known.members
            if (target_s := wanted.stated(one.target).targets.ttft_p99_s) is not None
        ),
        default=None,
    )
    now = reading.period(wanted.grid, late_s=late_s, closely=True)
    before = (
        reading.period(wanted.before, late_s=None, closely=False)
        if wanted.before is not None
        else None
    )
    configs = Configs(now, process_names(known.asking.by))
    trouble = Trouble(ranges, known, now, configs, asked.profile, wanted)
    trouble.look(progress)
    tiers = [_tier(tier, known, wanted, now, before, configs) for tier in known.tiers()]
    tell(1, 1)
    return Observed(
        grid=wanted.grid,
        before_grid=wanted.before,
        source=source.url,
        tiers=tiers,
        episodes=trouble.episodes,
        recommended=trouble.recommended,
        configured=_configured(known, now, configs),
        targets=targets(known, now),
        filters=(
            *(f"target {name}" for name in wanted.targets),
            *(f"tier {name}" for name in wanted.tiers),
            *([f"selector {asked.selector}"] if asked.selector else []),
        ),
        notices=notices_of(ranges.told, trouble),
        notes=notes_of(known, found, now, source, trouble),
        methods=METHODS,
        partial=bool(ranges.told.warnings or ranges.told.failed),
    )


class _Progress:
    """Counts queries."""

    def __init__(self, tell: Tell, expected: int) -> None:
        self._tell, self._done, self._expected = tell, 0, expected

    def more(self, queries: int) -> None:
        self._expected = self._done + queries

    def __call__(self, _name: str) -> None:
        self._done += 1
        self._tell(min(self._done, self._expected - 1), self._expected)


def _tier(
    tier: str, known: Roll, wanted: Wanted, now: Read, before: Read | None, configs: Configs
) -> TierObserved:
    members = known.of(tier)
    engines, together = _engines(members, known, now, configs)
    was, together_was = ([], Together()) if before is None else _engines(members, known, before)
    return TierObserved(
        id=tier,
        model=members[0].member.model,
        gpu=members[0].gpu,
        stated=wanted.stated(members[0].target),
        engines=engines,
        before=was,
        together=together,
        together_before=together_was,
    )


def _engines(
    members: Sequence[Rolled], known: Roll, read: Read, configs: Configs | None = None
) -> tuple[list[EngineObserved], Together]:
    """A tier's engines in a period, and what is known of them in sum; those that were not there
    are left out."""
    running = read.gauges[RUNNING]
    there = [one for one in members if one.key in running and not np.isnan(running[one.key]).all()]
    if not there:
        return [], Together()
    gauges = Gauges.of(read.grid, read.at, [one.key for one in there], read.gauges)
    idle_s = gauges.idle_s()
    engines = [
        _engine(one, read, gauges.watched_s[at], idle_s[at], configs)
        for at, one in enumerate(there)
    ]
    groups = [*{known.group(one) for one in there}]
    nothing = np.full(len(read.grid.slots), np.nan)
    preempted = np.array([read.preempted.get(one.key, nothing) for one in there])
    capacities = [
        tokens
        for one in there
        if configs is not None and (tokens := capacity_tokens(configs.last(one.member)))
    ]
    together = Together(
        spans=spans(
            gauges,
            read.counted(groups),
            read.tallies(groups),
            preempted if read.preempted else None,
            sum(capacities) / len(capacities) if capacities else None,
        ),
        minutes=read.minutes(groups),
    )
    return engines, together


def _engine(
    one: Rolled, read: Read, watched_s: Floats, idle_s: Floats, configs: Configs | None
) -> EngineObserved:
    at = read.at
    known = np.flatnonzero(~np.isnan(read.gauges[RUNNING][one.key]))
    times = at.begins_s + at.step_s
    curve = read.curve.get(one.key)
    nothing = np.full(at.count, np.nan)
    load = Signals(
        times,
        {
            "running_avg": read.gauges[RUNNING][one.key],
            "waiting_avg": read.gauges[WAITING].get(one.key, nothing),
        },
    )
    return EngineObserved(
        target=one.target,
        engine=one.engine,
        replica=one.target,
        first_s=float(at.begins_s[known[0]]),
        last_s=float(times[known[-1]]),
        spans=[
            Span(
                engine_s=seconds, clock_s=seconds, watched_s=seconds, idle_s=idle,
                counts=NOTHING, tallies={}, levels={},
            )
            for seconds, idle in zip(watched_s.tolist(), idle_s.tolist(), strict=True)
        ],
        points=points(curve, window_s=at.step_s) if curve is not None else (),
        in_flight=in_flight(load, window_s=at.step_s) if configs is not None else None,
        config=configs.last(one.member) if configs is not None else {},
    )  # fmt: skip


def _configured(known: Roll, now: Read, configs: Configs) -> list[Configured]:
    """Starts and changes of configurations, by the processes' own start times."""
    found: list[Configured] = []
    for one in known.members:
        for t_s in configs.starts(one.member):
            was, then = configs.around(one.member, t_s)
            found.append(
                Configured(t_s, one.target, one.engine, was, then, "process_start_time_seconds")
            )
    return sorted(found, key=lambda one: one.t_s)


# --- What a report is made of, from a metrics system as the settings describe it. I/O edge --------


def made_of(url: str, settings: Settings, selector: str, wanted: Wanted, tell: Tell) -> Observed:
    """What a metrics system knows.

    Raises:
        CollectError: it does not answer, or knew no vLLM server in that time.
        SettingsError: the selector or a label's meaning cannot be.
    """
    asked = Asked(
        checked_selector(selector, "--selector"),
        label_map(settings["fleet.labels"] or {}, settings.origin("fleet.labels")),
        settings.profile(stated=stated(settings)),
        settings["fleet.queries_at_once"],
    )
    with PrometheusSource(url, source_settings(settings)) as source:
        return gather(source, wanted, asked, tell)
