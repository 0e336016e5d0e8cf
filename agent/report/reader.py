"""Builds the input of a report from a history: one engine after another, so that memory holds the
numbers of one engine at a time. I/O edge.

The history is the daemon's store, or one that was filled from a metrics system. The conclusions are
drawn here for both: which intervals form one incident, which incidents get evidence, and which
engines form a tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from msgspec.structs import replace

from kneewatch.agent.report.history import (
    UNNAMED,
    EngineHistory,
    History,
    Member,
    ReportProgress,
    ReportRequest,
    seen,
)
from kneewatch.agent.report.series import gap_s, in_order, runs, spans_of, usual_step_s
from kneewatch.agent.store.records import Scrapes
from kneewatch.diagnose.change import BRIDGED_S
from kneewatch.diagnose.engine_history import ConfigChange, PastAdvice
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.reports.weekly.figures import Gap, TargetQuality
from kneewatch.reports.weekly.incidents import episodes
from kneewatch.reports.weekly.measures import merged_levels
from kneewatch.reports.weekly.observed import (
    EngineObserved,
    EnginesObserved,
    Episode,
    EpisodeObserved,
    Grid,
    Observed,
    Span,
    TierObserved,
)
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import HOUR_S

AROUND_S = 600.0
"""Seconds before and after an incident for which its signals are shown."""

SHOWN = ("ttft_p99_s", "kv_usage_ratio", "waiting", "running")
SHOWN_MOST = 4
CITED_MOST = 2
"""Number of signals that are shown for an incident. They are the first ones that its cause cites,
then the usual ones."""

GAPS_SHOWN = 12
NOTHING_READ = "every signal"

LOOKS = (0.5, 0.25, 0.75, 0.05, 0.95)
"""Positions within an incident (0-1) at which the stored diagnosis is looked up."""

DETAILED_MOST = 200
"""Maximum number of incidents per engine for which the diagnosis is read; the worst ones are
chosen."""


def _add(engines: EnginesObserved, engine: EngineObserved) -> None:
    """Add an engine to those of its tier. Its gauges are merged at once: those of a thousand
    engines would fill the memory."""
    spans = engines.spans or [Span(levels={}) for _ in engine.spans]
    engines.spans = [
        replace(sums, levels=merged_levels((sums.levels, span.levels)))
        for sums, span in zip(spans, engine.spans, strict=True)
    ]
    own = replace(engine, spans=[replace(span, levels={}) for span in engine.spans])
    engines.engines = [*engines.engines, own]


class PeriodReader:
    """Reads the data of a report from a history."""

    def __init__(self, history: History, request: ReportRequest, progress: ReportProgress) -> None:
        """Find the requested engines.

        Raises:
            SettingsError: a requested target or tier does not exist.
        """
        self._history, self._request, self._progress = history, request, progress
        self._members = history.members(request)
        self._targets = [*dict.fromkeys(member.engine.target for member in self._members)]
        self._steps = len(self._members) + len(self._targets)
        self._tiers: dict[str, list[Member]] = {}
        self._now: dict[str, EnginesObserved] = {}
        self._before: dict[str, EnginesObserved] = {}
        self._incidents: list[EpisodeObserved] = []
        self._recommended: list[PastAdvice] = []
        self._configured: list[ConfigChange] = []

    def read(self) -> Observed:
        """The data of both periods.

        Raises:
            KneewatchError: the history cannot be read.
        """
        for done, member in enumerate(self._members):
            self._progress(done, self._steps)
            self._engine(member)
        targets = list(self._scraped())
        request = self._request
        observed = Observed(
            grid=request.grid,
            before_grid=request.before,
            source=self._history.name,
            tiers=[self._tier(name, targets) for name in sorted(self._tiers)],
            episodes=sorted(self._incidents, key=lambda incident: incident.episode.start_s),
            recommended=sorted(self._recommended, key=lambda advice: advice.first_s),
            configured=sorted(self._configured, key=lambda change: change.t_s),
            targets=targets,
            filters=(
                *(f"target {name}" for name in request.targets),
                *(f"tier {name}" for name in request.tiers),
            ),
        )
        return self._history.with_remarks(observed)

    def _engine(self, member: Member) -> None:
        """Read one engine in both periods: its figures, incidents, advice and configurations."""
        history, engine, request = self._history, member.engine, self._request
        self._tiers.setdefault(member.tier, []).append(member)
        now = self._now.setdefault(member.tier, EnginesObserved())
        past = self._before.setdefault(member.tier, EnginesObserved())
        grid, before = request.grid, request.before
        if member.counts and before is not None and seen(engine, before.from_s, before.to_s):
            numbers = history.numbers(engine, before, request.window_s)
            _add(past, numbers.observed({}, {}, curve=False))
        if not seen(engine, grid.from_s, grid.to_s):
            return
        numbers = history.numbers(engine, grid, request.window_s)
        changes = history.configs(engine.id, from_s=-1e18, to_s=grid.to_s)
        if member.counts:
            config: Mapping[str, str] = changes[-1].after if changes else {}
            _add(now, numbers.observed(config, unknown_of(member.verdict), curve=True))
        self._incidents += self._episodes(member, numbers)
        self._recommended += _recommended(history, member, grid)
        self._configured += [
            replace(change, target=engine.target, engine=engine.engine)
            for change in changes
            if change.t_s >= grid.from_s
        ]

    def _episodes(self, member: Member, numbers: EngineHistory) -> list[EpisodeObserved]:
        """The incidents of an engine. The worst DETAILED_MOST of them include their diagnosis."""
        grid = self._request.grid
        intervals = self._history.intervals(
            from_s=grid.from_s - BRIDGED_S,
            to_s=grid.to_s,
            engine_id=member.engine.id,
            kinds=("stage", "cause"),
        )
        incidents = episodes(intervals, from_s=grid.from_s, to_s=grid.to_s)
        worst = sorted(
            incidents, key=lambda episode: (-episode.severity, episode.start_s - episode.until_s)
        )
        detailed = {id(episode) for episode in worst[:DETAILED_MOST]}
        return [
            self._observed(member, numbers, episode, detailed=id(episode) in detailed)
            for episode in incidents
        ]

    def _observed(
        self, member: Member, numbers: EngineHistory, episode: Episode, *, detailed: bool
    ) -> EpisodeObserved:
        """An incident with its signals, and counts during the incident and in the hour before.
        With `detailed`, it includes its diagnosis."""
        history, engine, grid = self._history, member.engine, self._request.grid
        cause = _worst(history, engine.id, episode) if detailed else None
        start_s, until_s = episode.start_s, max(episode.until_s, episode.start_s + 1.0)
        edges_s = np.array([start_s - HOUR_S, start_s, until_s])
        hour_before, during = spans_of(numbers.signals, numbers.increases, edges_s)
        closely = history.closely(numbers, episode)
        if closely is not numbers:
            (during,) = spans_of(closely.signals, closely.increases, edges_s[1:])
        around = history.signal_arrays(
            engine.id,
            shown(episode, cause),
            from_s=max(start_s - AROUND_S, grid.from_s),
            to_s=min(until_s + AROUND_S, grid.to_s),
        )
        return EpisodeObserved(
            tier=member.tier,
            target=engine.target,
            engine=engine.engine,
            episode=episode,
            cause=cause,
            during=during,
            hour_before=hour_before,
            series={
                key: (around.times.tolist(), values.tolist())
                for key, values in around.values.items()
            },
        )

    def _scraped(self) -> Iterator[TargetQuality]:
        """The scrapes, failures and gaps of each target since it was first seen."""
        grid = self._request.grid
        for done, target in enumerate(self._targets, len(self._members)):
            self._progress(done, self._steps)
            firsts_s = (m.engine.first_s for m in self._members if m.engine.target == target)
            from_s = max(grid.from_s, min(firsts_s))
            if from_s < grid.to_s:
                scrapes = self._history.scrapes(target, from_s=from_s, to_s=grid.to_s)
                yield target_quality(target, scrapes, grid, from_s)
        self._progress(self._steps, self._steps)

    def _tier(self, name: str, targets: list[TargetQuality]) -> TierObserved:
        members, periods = self._tiers[name], (self._now[name], self._before[name])
        for of, totals in zip(periods, self._history.totals(name), strict=True):
            of.minutes = totals.minutes
            if totals.spans:
                levels = of.spans or [Span() for _ in totals.spans]
                of.spans = [
                    replace(span, levels=sums.levels)
                    for span, sums in zip(totals.spans, levels, strict=True)
                ]
        first, grid = members[0], self._request.grid
        proposed = [
            each.verdict.proposed
            for each in members
            if each.counts and each.verdict is not None and each.verdict.proposed
            if seen(each.engine, grid.from_s, grid.to_s)
        ]
        own = {member.engine.target for member in members}
        watched = [target.watched_ratio for target in targets if target.target in own]
        return TierObserved(
            id=name,
            model=first.engine.model or UNNAMED,
            gpu=first.gpu,
            program=first.program,
            stated=replace(
                self._request.stated(first.engine.target),
                # The targets that every engine met.
                proposed=Targets(
                    *(max((each[key] for each in proposed), default=None) for key in LATENCIES)
                ),
            ),
            now=periods[0],
            before=periods[1],
            router_s=max(watched, default=0.0) * grid.length_s if first.is_router else None,
        )


LATENCIES = ("ttft_p99_s", "itl_p99_s")


def _worst(history: History, engine_id: int, episode: Episode) -> Cause | None:
    """The cause of the incident from the stored verdict in which it is worst. None if no verdict
    was stored."""
    best: Cause | None = None
    own = [interval for interval in episode.causes if interval.id == episode.cause] or [
        *episode.stages
    ]
    longest = max(
        own, key=lambda interval: (interval.severity, interval.until_s - interval.start_s)
    )
    for look in LOOKS:
        at_s = longest.start_s + look * (longest.until_s - longest.start_s)
        verdict = history.verdict(engine_id, at_s)
        for cause in verdict.causes if verdict else ():
            if cause.id == episode.cause and (best is None or cause.badness > best.badness):
                best = cause
        if best is not None and best.severity >= longest.severity:
            break
    return best


def _recommended(history: History, member: Member, grid: Grid) -> list[PastAdvice]:
    engine = member.engine
    rows = history.recommendations(from_s=grid.from_s, to_s=grid.to_s, engine_id=engine.id)
    return [
        replace(row, tier=member.tier, target=engine.target, engine=engine.engine) for row in rows
    ]


def shown(episode: Episode, cause: Cause | None) -> tuple[str, ...]:
    """The signals to show for an incident. TTFT is always shown, because it determines which
    requests were late."""
    cited: list[str] = []
    if cause is not None and episode.kind != "cascade":
        cited = [item.signal for item in cause.evidence[:CITED_MOST]]
    return tuple(dict.fromkeys((SHOWN[0], *cited, *SHOWN)))[:SHOWN_MOST]


def unknown_of(verdict: Verdict | None) -> dict[str, str]:
    """The signals that a verdict lacks, each with the reason."""
    pairs = (line.partition(": ") for line in (verdict.unknown if verdict else ()))
    return {key: why for key, _, why in pairs if why and key != NOTHING_READ}


# --- Scrapes of a target: failures and gaps -------------------------------------------------------


def target_quality(target: str, scrapes: Scrapes, grid: Grid, from_s: float) -> TargetQuality:
    """The scrapes, failures and gaps of a target.

    `from_s` is the start of the period. If the target was first scraped later, `from_s` is the time
    of that scrape, so that the time before it is no gap.
    """
    to_s = grid.to_s
    times = np.asarray(scrapes.times)
    places = np.flatnonzero(in_order(times))
    times, failed = times[places], np.isin(places, list(scrapes.failed))
    usual_s, gap = usual_step_s(times), gap_s(times)
    # A failure lasts until the next scrape; a row of failures has the reason of the first.
    ends = np.append(times[1:], times[-1:] + usual_s)
    unread = [
        Gap(float(times[run[0]]), float(ends[run[-1]]), scrapes.failed[int(places[run[0]])])
        for run in runs(failed)
    ]
    bounds = np.concatenate(([from_s], times, [to_s]))
    for at in np.flatnonzero(np.diff(bounds) > gap).tolist():
        unread.append(Gap(float(bounds[at]), float(bounds[at + 1]), "not watched"))
    lost_s = sum(gap.to_s - gap.from_s for gap in unread)
    longest = sorted(unread, key=lambda gap: gap.from_s - gap.to_s)[:GAPS_SHOWN]
    return TargetQuality(
        target=target,
        scrapes=len(times),
        failed=int(failed.sum()),
        interval_s=usual_s or None,
        watched_ratio=max(to_s - from_s - lost_s, 0.0) / grid.length_s if len(times) else 0.0,
        gap_s=lost_s,
        gaps=tuple(sorted(longest, key=lambda gap: gap.from_s)),
        gaps_left_out=len(unread) - len(longest),
    )
