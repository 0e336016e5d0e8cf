"""Finds incidents in Prometheus: replays the samples of suspect spans, scrape by scrape, through
the sidecar's monitor. I/O edge.

A metrics system stores every sample, so the scraped pages can be rebuilt. Stages, causes and
recommendations are therefore those that a sidecar would have reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.agent.report.period_source import ReportProgress, ReportRequest
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.inventory import FleetEngines, TierEngine
from kneewatch.agent.report.prometheus.period import Configs, PeriodData
from kneewatch.agent.report.prometheus.queries import Ranges
from kneewatch.agent.report.prometheus.suspect_spans import (
    CAUSES,
    SuspectSpan,
    suspect_spans,
    worst_spans,
)
from kneewatch.agent.report.series import METRICS, Counted, Floats, Increases, Signals, spans_of
from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.responses import Track
from kneewatch.collector.samples import Layout, Page, Series
from kneewatch.collector.scrape_history import Column
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.judge import Catalogue
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.fleet.inventory import Key, Member
from kneewatch.diagnose.intervals import UNWATCHED, IntervalBook, Open, Verdict, verdict_of
from kneewatch.reports.diagnosis_json import document
from kneewatch.reports.weekly.measures import LEVELS, PREEMPTIONS
from kneewatch.reports.weekly.observed import (
    HOUR_S,
    Episode,
    EpisodeObserved,
    Held,
    Recommended,
    Span,
)
from kneewatch.rules.rule import Severity

OWN = frozenset({"model_name", "engine"})
"""Labels that come from the metrics page, not from the scrape configuration."""

SHOWN = ("ttft_p99_s", "kv_usage_ratio", "waiting", "running", "itl_p99_s", "preemption_per_s")
KEPT = tuple(dict.fromkeys((*LEVELS, *SHOWN, "running_avg")))


class Replay(Struct):
    """The result of a replay.

    `held` are the intervals of stages and causes. `documents` has the worst diagnosis of each
    cause, `recommended` the recommendations with the Unix times at which they were first and last
    made.
    """

    held: list[Held] = field(default_factory=list[Held])
    documents: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    recommended: dict[str, tuple[Mapping[str, Any], float, float]] = field(
        default_factory=dict[str, tuple[Mapping[str, Any], float, float]]
    )
    signals: Signals = field(default_factory=lambda: Signals(np.empty(0), {}))
    increases: Increases | None = None
    scrapes: int = 0


def replay_samples(
    tracks: Sequence[Track],
    member: Member,
    profile: Profile,
    catalogue: Catalogue,
    name: str,
    lived_s: tuple[float, float],
) -> Replay:
    """Replay the samples of a target, in order. `catalogue` belongs to `profile`.

    Failed scrapes outside `lived_s` are left out: the pod was loading or terminating then.
    """
    monitor = TargetMonitor(name, profile, catalogue)
    recorder = _Recorder()
    for t_s, page in _pages(tracks, member):
        if page is None and not lived_s[0] <= t_s <= lived_s[1]:
            continue
        diagnoses = (
            monitor.page(t_s, page)
            if page is not None
            else monitor.failed(t_s, CollectError("the scrape failed (up is 0)", kind="refused"))
        )
        diagnosis = next((diagnosis for diagnosis in diagnoses if _is(diagnosis, member)), None)
        if diagnosis is None:
            continue
        engine = next(
            (
                candidate
                for candidate in monitor.engines
                if candidate.key.engine == diagnosis.engine
            ),
            None,
        )
        read = engine if page is not None else None
        recorder.take(
            verdict_of(diagnosis, restarted=read is not None and read.restart is not None),
            diagnosis,
            read.reader.counters() if read is not None else None,
        )
    return recorder.finish()


class _Recorder:
    """Collects diagnoses in order of time and makes a Replay of them."""

    def __init__(self) -> None:
        self._book = IntervalBook()
        self._ranks: dict[str, tuple[int, float]] = {}
        self._times: list[float] = []
        self._values: dict[str, list[float]] = {key: [] for key in KEPT}
        self._counted: list[tuple[tuple[Column, ...], list[float], list[tuple[float, ...]]]] = []
        self._replay = Replay()

    def take(
        self,
        seen: Verdict,
        diagnosis: Diagnosis,
        counters: tuple[tuple[Column, ...], tuple[float, ...]] | None,
    ) -> None:
        for change in self._book.take(seen):
            if change.ended:
                self._hold(change.interval, change.end_s, change.ended)
        self._keep(diagnosis)
        self._replay.scrapes += 1
        self._times.append(diagnosis.t_s)
        for signal, column in self._values.items():
            value = diagnosis.values.get(signal)
            column.append(math.nan if value is None else value)
        if counters is not None:
            self._count(diagnosis.t_s, *counters)

    def _keep(self, diagnosis: Diagnosis) -> None:
        stored: dict[str, Any] | None = None
        for cause in diagnosis.causes:
            rank = int(cause.severity), cause.confidence
            if rank > self._ranks.get(cause.id, (-1, 0.0)):
                stored = stored or document(diagnosis)
                self._ranks[cause.id], self._replay.documents[cause.id] = rank, stored
        for recommendation in diagnosis.recommendations:
            before = self._replay.recommended.get(recommendation.id)
            if before is None:
                stored = stored or document(diagnosis)
                (row_found,) = [
                    row for row in stored["recommendations"] if row["id"] == recommendation.id
                ]
                self._replay.recommended[recommendation.id] = (
                    row_found,
                    diagnosis.t_s,
                    diagnosis.t_s,
                )
            else:
                self._replay.recommended[recommendation.id] = before[0], before[1], diagnosis.t_s

    def _count(self, t_s: float, columns: tuple[Column, ...], values: tuple[float, ...]) -> None:
        if not self._counted or self._counted[-1][0] is not columns:
            self._counted.append((columns, [], []))
        self._counted[-1][1].append(t_s)
        self._counted[-1][2].append(values)

    def _hold(self, interval: Open, end_s: float | None, ended: str) -> None:
        if interval.kind != "health":
            self._replay.held.append(
                Held(
                    interval.kind,
                    interval.id,
                    interval.severity,
                    interval.start_s,
                    end_s,
                    interval.last_s,
                    ended,
                )
            )

    def finish(self) -> Replay:
        for interval in self._book.opened:
            if interval.paused:
                self._hold(interval, interval.last_s, UNWATCHED)
            else:
                self._hold(interval, None, "")
        result = self._replay
        result.signals = Signals(
            np.array(self._times), {key: np.array(row) for key, row in self._values.items()}
        )
        metrics = frozenset(METRICS)
        parts: list[Counted] = []
        for columns, times, rows in self._counted:
            places = [at for at, column in enumerate(columns) if column.metric in metrics]
            whole: Floats = np.array(rows, dtype=np.float64)[:, places].T
            parts.append(Counted(np.array(times), tuple(columns[at] for at in places), whole))
        result.increases = Increases(parts, restarts_s=()) if parts else None
        return result


def _is(diagnosis: Diagnosis, member: Member) -> bool:
    engine, model = member.labels.get("engine"), member.labels.get("model_name")
    return diagnosis.engine in (engine or diagnosis.engine, "") and diagnosis.model in (
        model or diagnosis.model,
        "",
    )


def _pages(tracks: Sequence[Track], member: Member) -> list[tuple[float, Page | None]]:
    """The rebuilt pages in order of time; None for a failed scrape. They include the series of
    other engines on the page."""
    target = {name for name in member.labels if name not in OWN and name != "__name__"}
    series: list[Series] = []
    scraped: dict[float, dict[int, float]] = {}
    works: dict[float, float] = {}
    for track in tracks:
        name = track.labels.get("__name__", "")
        if name == "up":
            works.update(track.points)
            continue
        labels = sorted(
            (key, value)
            for key, value in track.labels.items()
            if key != "__name__" and (key not in target or key == "le")
        )
        place = len(series)
        series.append(Series(name, tuple(labels)))
        for t_s, value in track.points:
            scraped.setdefault(t_s, {})[place] = value
    layouts: dict[frozenset[int], tuple[list[int], Layout]] = {}
    pages: list[tuple[float, Page | None]] = []
    for t_s, row in scraped.items():
        key = frozenset(row)
        if key not in layouts:
            places = sorted(key)
            layouts[key] = places, Layout(tuple(series[place] for place in places), {})
        places, layout = layouts[key]
        pages.append((t_s, Page(layout, [row[place] for place in places])))
    pages += [(t_s, None) for t_s, worked in works.items() if worked == 0 and t_s not in scraped]
    return sorted(pages, key=lambda pair: pair[0])


# --- The search: replays the worst suspect spans --------------------------------------------------


REPLAYED_MOST = 60
"""Maximum number of spans that are replayed sample by sample. Those with the most harm are
chosen."""

REPLAYED_S = 2400.0
"""Maximum seconds of a span that are replayed. For a longer span, the end is known from the
steps."""

BEFORE_S, AFTER_S = 600.0, 300.0
"""Seconds by which a replay starts before the span (for a baseline) and ends after it (for the
recovery)."""

RESTART_NOTED_S = 60.0
UNKNOWN_OUTCOME = "unknown"
TARGET = ("cluster", "namespace", "job", "pod", "instance")
"""Labels of a target. All series of a scrape have them."""


class QueryProgress:
    """Counts queries, and reports how many of the expected ones are done."""

    def __init__(self, progress: ReportProgress, expected: int) -> None:
        self._progress, self._done, self._expected = progress, 0, expected

    def more(self, queries: int) -> None:
        """Set the number of queries that are still to come."""
        self._expected = self._done + queries

    def __call__(self, _name: str) -> None:
        """Count one finished query."""
        self._done += 1
        self._progress(min(self._done, self._expected - 1), self._expected)


class _ReplayWindow(Struct, frozen=True):
    """A time window of one engine, and its replay; None until the samples were read."""

    engine: TierEngine
    span: SuspectSpan
    from_s: float
    to_s: float
    replay: Replay | None = None

    @property
    def cut(self) -> bool:
        """Whether the suspect span ends after the replayed window."""
        return self.span.to_s > self.to_s

    def held(self, until_s: float) -> list[Held]:
        """The intervals of stages and causes in the window. An interval that is open at the
        window's end lasts until the end of the suspect span."""
        if self.replay is None:
            cause = CAUSES.get(self.span.why)
            if cause is None:
                return []
            end_s = min(self.span.to_s, until_s)
            return [Held("cause", cause, Severity.WARNING, self.span.from_s, end_s, end_s, "ended")]
        intervals: list[Held] = []
        for interval in self.replay.held:
            if interval.end_s is not None:
                intervals.append(interval)
                continue
            last_s = self.span.to_s if self.cut else interval.last_s
            if last_s >= until_s - 2 * self.span_step_s:
                # The steps are too coarse to tell whether it ended before the period did.
                intervals.append(replace(interval, last_s=until_s))
            else:
                intervals.append(replace(interval, last_s=last_s, end_s=last_s, ended="ended"))
        return intervals

    @property
    def span_step_s(self) -> float:
        """Seconds per step of the span: the precision of its end."""
        return (self.span.to_s - self.span.from_s) / max(self.span.steps, 1)


class IncidentSearch:
    """Finds the incidents of a fleet in a period.

    Counts of suspect spans: `replayed` were replayed from samples, `coarse` are reported from the
    steps alone, `left_out` were not analysed, and `unread` have samples that could not be read.
    """

    def __init__(
        self,
        ranges: Ranges,
        fleet: FleetEngines,
        now: PeriodData,
        configs: Configs,
        profile: Profile,
        request: ReportRequest,
    ) -> None:
        self._ranges, self._fleet, self._now, self._configs = ranges, fleet, now, configs
        self._profile, self._wanted = profile, request
        self._catalogues: dict[str, tuple[Profile, Catalogue]] = {}
        self._by_key: dict[Key, list[_ReplayWindow]] = {}
        self.replayed = 0
        self.coarse = 0
        self.left_out = 0
        self.unread = 0

    def look(self, progress: QueryProgress) -> None:
        """Replay the worst windows. Reports each query to `progress`."""
        windows = [window for engine in self._fleet.members for window in self._windows(engine)]
        worst = worst_spans([window.span for window in windows], most=REPLAYED_MOST)
        chosen = [windows[at] for at in worst]
        rest = [windows[at] for at in sorted({*range(len(windows))} - {*worst})]
        progress.more(len(chosen))
        with ThreadPoolExecutor(2) as pool:
            read = list(pool.map(partial(self._read, progress), chosen))
        self.replayed = sum(window.replay is not None for window in read)
        self.unread = len(read) - self.replayed
        self.left_out = sum(window.span.why not in CAUSES for window in rest)
        self.coarse = len(rest) - self.left_out
        for window in (*read, *rest):
            self._by_key.setdefault(window.engine.key, []).append(window)

    def held(self, engine: TierEngine) -> list[Held]:
        """The intervals of an engine's stages and causes, and its restarts."""
        held = [row for window in self._of(engine) for row in window.held(self._now.grid.to_s)]
        for t_s in self._configs.starts(engine.member):
            end_s = t_s + RESTART_NOTED_S
            held.append(
                Held("cause", "engine_restarted", Severity.INFO, t_s, end_s, end_s, "ended")
            )
        return held

    def evidence_of(self, engine: TierEngine) -> Callable[[Episode, bool], EpisodeObserved]:
        """A function that returns an incident of this engine with its evidence. The diagnosis is
        always included, because a replay contains it."""
        return lambda episode, _detailed: self._observed(engine, episode, self._of(engine))

    def _of(self, engine: TierEngine) -> Sequence[_ReplayWindow]:
        return self._by_key.get(engine.key, ())

    def _windows(self, engine: TierEngine) -> list[_ReplayWindow]:
        values = self._now.engine(engine.key)
        scrapes = self._now.scrapes_of(engine.member.labels)
        return [
            _ReplayWindow(
                engine,
                span,
                span.from_s - BEFORE_S,
                min(span.to_s + AFTER_S, span.from_s + REPLAYED_S, self._now.grid.to_s),
            )
            for span in suspect_spans(values, self._now.at, scrapes)
        ]

    def _read(self, progress: QueryProgress, window: _ReplayWindow) -> _ReplayWindow:
        member = window.engine.member
        labels = {name: member.labels[name] for name in TARGET if member.labels.get(name)}
        text = queries.pages(
            self._fleet.asking, labels or member.labels, window.to_s - window.from_s
        )
        try:
            piece = self._ranges.source.samples(text, window.to_s)
        except CollectError as exc:
            with self._ranges.problems.lock:
                self._ranges.problems.failed[f"samples of {window.engine.target}"] = exc
            return window
        finally:
            progress("samples")
        with self._ranges.problems.lock:
            self._ranges.problems.warnings.update(dict.fromkeys(piece.warnings))
        profile, catalogue = self._profile_of(window.engine)
        scrapes = self._now.scrapes_of(member.labels)
        lived = (-np.inf, np.inf) if scrapes is None else scrapes.lived_s(self._now.at)
        replay = replay_samples(
            piece.tracks, member, profile, catalogue, window.engine.target, lived
        )
        return replace(window, replay=replay) if replay.scrapes else window

    def _profile_of(self, engine: TierEngine) -> tuple[Profile, Catalogue]:
        if engine.tier not in self._catalogues:
            stated = self._wanted.stated(engine.target)
            profile = replace(
                self._profile, targets=stated.targets, gpus=stated.gpus, stated=stated.stated
            )
            self._catalogues[engine.tier] = profile, Catalogue.of(profile)
        return self._catalogues[engine.tier]

    def _observed(
        self, engine: TierEngine, episode: Episode, windows: Sequence[_ReplayWindow]
    ) -> EpisodeObserved:
        window = max(
            (
                window
                for window in windows
                if window.replay is not None and _shared_s(window, episode) >= 0
            ),
            key=lambda window: _shared_s(window, episode),
            default=None,
        )
        if window is None or window.replay is None:
            return EpisodeObserved(
                engine.tier,
                engine.target,
                engine.engine,
                episode,
                during=self._coarsely(engine, episode),
            )
        replay = window.replay
        during, hour_before = Span(), Span()
        if replay.increases is not None:
            until_s = max(episode.until_s, episode.start_s + 1.0)
            edges_s = np.array([episode.start_s - HOUR_S, episode.start_s, until_s])
            hour_before, during = spans_of(replay.signals, replay.increases, edges_s)
        if episode.until_s > window.to_s:
            during = self._coarsely(engine, episode)
        signals = replay.signals
        return EpisodeObserved(
            tier=engine.tier,
            target=engine.target,
            engine=engine.engine,
            episode=episode,
            document=replay.documents.get(episode.cause),
            during=during,
            hour_before=hour_before,
            series={
                key: (signals.times.tolist(), signals.values[key].tolist()) for key in SHOWN[:4]
            },
        )

    def _coarsely(self, engine: TierEngine, episode: Episode) -> Span:
        """The preemptions during an incident that was not replayed to its end. They are computed
        from the steps."""
        row = self._now.signs[queries.PREEMPTED].get(engine.key)
        if row is None:
            return Span()
        begins_s = self._now.at.begins_s
        inside = (begins_s + self._now.at.step_s > episode.start_s) & (begins_s < episode.until_s)
        return Span(counts={PREEMPTIONS: float(np.nansum(row[inside]))})

    def recommended(self, engine: TierEngine) -> list[Recommended]:
        """The recommendations from the replays of an engine, without duplicates."""
        advice: dict[str, tuple[Mapping[str, Any], float, float]] = {}
        for window in self._of(engine):
            for key, (recommendation, first_s, last_s) in (
                window.replay.recommended.items() if window.replay is not None else ()
            ):
                before = advice.get(key, (recommendation, first_s, last_s))
                advice[key] = before[0], min(before[1], first_s), max(before[2], last_s)
        return [
            Recommended(
                tier=engine.tier,
                target=engine.target,
                engine=engine.engine,
                document=recommendation,
                outcome=UNKNOWN_OUTCOME,
                first_s=first_s,
                last_s=last_s,
                applied_s=None,
                predicted=recommendation.get("predicted", {}),
                measured={},
            )
            for recommendation, first_s, last_s in advice.values()
        ]


def _shared_s(window: _ReplayWindow, episode: Episode) -> float:
    """Seconds for which a window and an incident overlap. Negative if they do not overlap."""
    return min(window.to_s, episode.until_s) - max(window.from_s, episode.start_s)
