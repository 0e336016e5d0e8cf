"""One engine of the history over a period, and its incidents, as the report takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kneewatch.agent.report.counting import BY_SOURCE, Increases
from kneewatch.agent.report.history import Floats, History, Signals
from kneewatch.agent.report.levels import hours
from kneewatch.agent.report.scraping import gap_s
from kneewatch.agent.report.windows import in_flight, points
from kneewatch.agent.store.model import StoredEngine
from kneewatch.collector.signals.vllm import TTFT
from kneewatch.diagnose.knee import POINT_SIGNALS
from kneewatch.reports.weekly.grid import HOUR_S, Grid
from kneewatch.reports.weekly.happened import Episode, EpisodeObserved
from kneewatch.reports.weekly.measures import (
    COMPUTED,
    COUNTS,
    EVICTED,
    FAILED,
    LEVELS,
    PREEMPTIONS,
    RUNNING,
    TALLIES,
)
from kneewatch.reports.weekly.observed import EngineObserved
from kneewatch.reports.weekly.spans import Level, Span
from kneewatch.rules.model import WINDOW_S

MARGIN_S = 120.0
"""Counters are kept once a minute: those around the period's bounds are needed as well."""

MINUTE_S = 60.0
AROUND_S = 600.0
"""Before and after an incident its signals are shown for so long."""

SHOWN = ("ttft_p99_s", "kv_usage_ratio", "waiting", "running")
SHOWN_MOST = 4
CITED_MOST = 2
"""Signals shown of an incident: what its cause cites first, then the usual ones."""

METRICS = (*COUNTS, *TALLIES, BY_SOURCE)
PARTS = (*COUNTS, COMPUTED, FAILED)
NOTHING_READ = "every signal"


@dataclass(frozen=True, slots=True)
class EngineHistory:
    """An engine's numbers over a period."""

    engine: StoredEngine
    grid: Grid
    signals: Signals
    increases: Increases
    window_s: float = WINDOW_S

    @classmethod
    def read(
        cls, history: History, engine: StoredEngine, grid: Grid, window_s: float
    ) -> EngineHistory:
        """Reads them."""
        span = {"from_s": grid.from_s - MARGIN_S, "to_s": grid.to_s + MARGIN_S}
        keys = tuple(dict.fromkeys((*LEVELS, *POINT_SIGNALS)))
        changes = history.configs(engine.id, **span)
        increases = Increases(
            history.counter_arrays(engine.id, METRICS, **span),
            restarts_s=[change.t_s for change in changes if change.restart],
        )
        signals = history.signal_arrays(engine.id, keys, from_s=grid.from_s, to_s=grid.to_s)
        return cls(engine, grid, signals, increases, window_s)

    def observed(
        self, config: Mapping[str, str], unknown: Mapping[str, str], *, curve: bool
    ) -> EngineObserved:
        """The engine over the period; with `curve` its windows too."""
        engine, signals = self.engine, self.signals
        return EngineObserved(
            target=engine.target,
            engine=engine.engine,
            replica=engine.replica,
            first_s=max(engine.first_s, self.grid.from_s),
            last_s=min(engine.last_s, self.grid.to_s),
            spans=self.spans(np.array(self.grid.edges_s)),
            minutes=self._minutes(),
            points=points(signals, window_s=self.window_s) if curve else (),
            in_flight=in_flight(signals, window_s=self.window_s) if curve else None,
            config=config,
            unknown=unknown,
        )

    def spans(self, edges_s: Floats) -> list[Span]:
        """What it showed between each two neighbouring times."""
        return spans_of(self.signals, self.increases, edges_s)

    def _minutes(self) -> list[float]:
        """Requests that began in each minute; NaN where the counters do not tell."""
        edges_s = np.arange(self.grid.from_s, self.grid.to_s + MINUTE_S, MINUTE_S)
        begun = self.increases.between((TTFT, "count"), edges_s)
        if begun is None:
            return []
        covered = self.increases.covered(edges_s, gap_s=0.0)
        known: list[float] = np.where(covered > 0.5 * MINUTE_S, begun, np.nan).tolist()
        return known

    def episode(
        self,
        history: History,
        episode: Episode,
        document: Mapping[str, Any] | None,
        tier: str,
    ) -> EpisodeObserved:
        """An incident with what was counted and seen around it."""
        start_s, until_s = episode.start_s, max(episode.until_s, episode.start_s + 1.0)
        hour_before, during = self.spans(np.array([start_s - HOUR_S, start_s, until_s]))
        seen = history.signal_arrays(
            self.engine.id,
            shown(episode, document),
            from_s=max(start_s - AROUND_S, self.grid.from_s),
            to_s=min(until_s + AROUND_S, self.grid.to_s),
        )
        return EpisodeObserved(
            tier=tier,
            target=self.engine.target,
            engine=self.engine.engine,
            episode=episode,
            document=document,
            during=during,
            hour_before=hour_before,
            series={
                key: (seen.times.tolist(), values.tolist()) for key, values in seen.values.items()
            },
        )


def spans_of(signals: Signals, increases: Increases, edges_s: Floats) -> list[Span]:
    """What an engine showed between each two neighbouring times."""
    levels = hours(signals, edges_s)
    covered = increases.covered(edges_s, gap_s=gap_s(signals.times) + MINUTE_S).tolist()
    counts = {
        part: gained.tolist()
        for part in PARTS
        if (gained := increases.between((part, ""), edges_s)) is not None
    }
    tallies = {metric: increases.tallies(metric, edges_s) for metric in TALLIES}
    return [
        Span(
            engine_s=covered[at],
            clock_s=covered[at],
            watched_s=float(levels.watched_s[at]),
            idle_s=float(levels.idle_s[at]),
            counts={part: gained[at] for part, gained in counts.items()} if covered[at] else {},
            tallies={
                metric: tally
                for metric, found in tallies.items()
                if covered[at] and (tally := found[at]) is not None
            },
            levels=with_eviction(
                levels.levels[at], counts[PREEMPTIONS][at] if PREEMPTIONS in counts else None
            ),
        )
        for at in range(len(edges_s) - 1)
    ]


def shown(episode: Episode, document: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The signals to show: TTFT always, for it tells who was late."""
    causes: Sequence[Mapping[str, Any]] = document["causes"] if document else ()
    cited = [
        str(item["signal"])
        for cause in causes
        if cause["id"] == episode.cause and episode.kind != "cascade"
        for item in cause["evidence"][:CITED_MOST]
    ]
    return tuple(dict.fromkeys((SHOWN[0], *cited, *SHOWN)))[:SHOWN_MOST]


def with_eviction(levels: Mapping[str, Level], preempted: float | None) -> dict[str, Level]:
    """The levels with preemptions over running requests and seconds."""
    made, running = dict(levels), levels.get(RUNNING)
    running_s = running.mean * running.known_s if running is not None else 0.0
    if preempted is not None and running_s > 0:
        ratio = preempted / running_s
        made[EVICTED] = Level(ratio, ratio, running_s, ratio)
    return made


def unknown_of(document: Mapping[str, Any] | None) -> dict[str, str]:
    """Signals that a diagnosis could not have, and why."""
    lines: Sequence[str] = document["unknown"] if document else ()
    pairs = (line.partition(": ") for line in lines)
    return {key: why for key, _, why in pairs if why and key != NOTHING_READ}
