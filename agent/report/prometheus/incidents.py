"""Incidents from Prometheus: finds suspect spans in the steps and replays them. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kneewatch.agent.report.period_source import ReportProgress, ReportRequest
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.inventory import FleetEngines, TargetScrapes, TierEngine
from kneewatch.agent.report.prometheus.period import Configs, PeriodData
from kneewatch.agent.report.prometheus.queries import (
    BEGUN,
    CONFIDENCE,
    GENERATED_TOKENS,
    LATE,
    PREEMPTED,
    STAGE_SEVERITY,
    Ranges,
    Steps,
)
from kneewatch.agent.report.prometheus.replay import SHOWN, Replay, replay_samples
from kneewatch.agent.report.series import Floats, Truths, runs, spans_of
from kneewatch.collector.errors import CollectError
from kneewatch.diagnose.causes.common_conditions import QUEUED_MIN
from kneewatch.diagnose.causes.evidence import DOUBTFUL_BELOW
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.engine_monitor import Catalogue
from kneewatch.diagnose.fleet.inventory import Key
from kneewatch.reports.weekly.figures import Gap
from kneewatch.reports.weekly.hours import HOUR_S
from kneewatch.reports.weekly.measures import PREEMPTIONS, RUNNING, WAITING
from kneewatch.reports.weekly.observed import (
    Episode,
    EpisodeObserved,
    Held,
    Recommended,
    Span,
    TargetObserved,
)
from kneewatch.rules.cascade import PREEMPTIONS_MIN, QUEUE_SHARE_OF_RUNNING
from kneewatch.rules.rule import Severity

DOWN, PREEMPTING, STALLED, CONCLUDED, QUEUED, TOO_LATE = (
    "scrapes fail",
    "requests are preempted",
    "no tokens are generated",
    "recording rules conclude a cause",
    "requests are queued",
    "first tokens are late",
)
ORDER = (DOWN, STALLED, PREEMPTING, CONCLUDED, TOO_LATE, QUEUED)
"""Signs of trouble, the most urgent first."""

CAUSES: Mapping[str, str] = {
    DOWN: "target_down", STALLED: "engine_stalled", PREEMPTING: "kv_pressure",
}  # fmt: skip
"""Signs that prove a cause by themselves."""

LATE_SHARE, LATE_MIN = 0.1, 5.0
"""Share and number of late requests per step that count as a sign: 1% is late by definition."""

BRIDGED_STEPS = 2
FAILED = "the scrape failed (up is 0)"


@dataclass(frozen=True, slots=True)
class SuspectSpan:
    """A span of time with a sign of trouble. `steps`: how many steps show it; `harm_requests`: the
    requests that were late, preempted, queued or not served in it, as far as the steps show."""

    why: str
    from_s: float
    to_s: float
    steps: int
    harm_requests: float = 0.0


def suspect_spans(
    values: Mapping[str, Floats], at: Steps, scrapes: TargetScrapes | None
) -> list[SuspectSpan]:
    """Spans with signs of trouble of one engine, overlapping ones merged. Shapes: (steps,)."""
    signs = _signs(values, at, scrapes)
    suspects: list[SuspectSpan] = []
    for why in ORDER:
        if why in signs:
            suspects += _runs(why, signs[why], at)
    return [
        replace(suspect, harm_requests=_harm_requests(suspect, values, signs, at, scrapes))
        for suspect in _merged(suspects)
    ]


def worst_spans(spans: Sequence[SuspectSpan], *, most: int) -> list[int]:
    """Indices of the at most `most` spans to replay, those with most harm first.

    Half of them are reserved for signs that the steps alone do not explain: outages and stalls are
    reported without a replay, too.
    """
    order = sorted(
        range(len(spans)),
        key=lambda at: (-spans[at].harm_requests, ORDER.index(spans[at].why), -spans[at].steps),
    )
    reserved = {*[at for at in order if spans[at].why not in CAUSES][: most // 2]}
    others = [at for at in order if at not in reserved][: most - len(reserved)]
    chosen = reserved.union(others)
    return [at for at in order if at in chosen]


def _harm_requests(
    suspect: SuspectSpan,
    values: Mapping[str, Floats],
    signs: Mapping[str, Truths],
    at: Steps,
    scrapes: TargetScrapes | None,
) -> float:
    inside = (at.begins_s >= suspect.from_s) & (at.begins_s < suspect.to_s)
    nothing = np.full(at.count, np.nan)
    begun = values.get(BEGUN, nothing)
    late = np.nansum(np.maximum(begun - values.get(LATE, nothing), 0)[inside])
    preempted = np.nansum(values.get(PREEMPTED, nothing)[inside])
    queued = np.nan_to_num(values.get(WAITING, nothing)[inside]).max(initial=0.0)
    usual = float(np.nanmean(begun)) if not np.isnan(begun).all() else 0.0
    missed = np.zeros(at.count)
    if DOWN in signs and scrapes is not None:
        missed = np.where(signs[DOWN], 1 - scrapes.up, 0.0)
    if STALLED in signs:
        missed = np.maximum(missed, signs[STALLED])
    return float(late + preempted + queued + usual * missed[inside].sum())


def _signs(
    values: Mapping[str, Floats], at: Steps, scrapes: TargetScrapes | None
) -> dict[str, Truths]:
    """The steps that show each sign. Shape: (steps,). Comparisons with NaN are false."""
    signs: dict[str, Truths] = {}
    running, waiting = values.get(RUNNING), values.get(WAITING)
    if scrapes is not None:
        signs[DOWN] = scrapes.down(at)
    if PREEMPTED in values:
        signs[PREEMPTING] = values[PREEMPTED] >= PREEMPTIONS_MIN
    if running is not None and GENERATED_TOKENS in values:
        signs[STALLED] = (running >= 1) & (values[GENERATED_TOKENS] == 0)
    if running is not None and waiting is not None:
        signs[QUEUED] = waiting >= np.maximum(QUEUED_MIN, QUEUE_SHARE_OF_RUNNING * running)
    if LATE in values and BEGUN in values:
        late = values[BEGUN] - values[LATE]
        signs[TOO_LATE] = (late >= LATE_MIN) & (late > LATE_SHARE * values[BEGUN])
    concluded = [
        row >= bound
        for key, bound in ((STAGE_SEVERITY, float(Severity.WARNING)), (CONFIDENCE, DOUBTFUL_BELOW))
        if (row := values.get(key)) is not None
    ]
    if concluded:
        signs[CONCLUDED] = np.logical_or.reduce(concluded)
    return signs


def _runs(why: str, holds: Truths, at: Steps) -> list[SuspectSpan]:
    begins_s = at.begins_s
    return [
        SuspectSpan(why, float(begins_s[run[0]]), float(begins_s[run[-1]]) + at.step_s, len(run))
        for run in runs(holds, bridged=BRIDGED_STEPS)
    ]


def _merged(suspects: Sequence[SuspectSpan]) -> list[SuspectSpan]:
    """Overlapping spans merged under the worst sign, which comes first in the input."""
    kept: list[SuspectSpan] = []
    for suspect in suspects:
        over = next((k for k, other in enumerate(kept) if _overlap(suspect, other)), None)
        if over is None:
            kept.append(suspect)
            continue
        other = kept[over]
        kept[over] = SuspectSpan(
            other.why,
            min(suspect.from_s, other.from_s),
            max(suspect.to_s, other.to_s),
            max(suspect.steps, other.steps),
        )
    return sorted(kept, key=lambda suspect: suspect.from_s)


def _overlap(suspect: SuspectSpan, other: SuspectSpan) -> bool:
    return suspect.from_s <= other.to_s and suspect.to_s >= other.from_s


def targets(fleet: FleetEngines, now: PeriodData) -> list[TargetObserved]:
    """Scrapes, failures and gaps of each replica, derived from the steps."""
    by_target: dict[str, TargetObserved] = {}
    running = now.gauges[RUNNING]
    for engine in fleet.members:
        if engine.target in by_target or not now.has(engine.key):
            continue
        by_target[engine.target] = _target(
            engine, running[engine.key], now.scrapes_of(engine.member.labels), fleet, now
        )
    return list(by_target.values())


def _target(
    engine: TierEngine,
    row: Floats,
    scrapes: TargetScrapes | None,
    fleet: FleetEngines,
    now: PeriodData,
) -> TargetObserved:
    at, scrape_s = now.at, fleet.scrape_s
    there = ~np.isnan(row)
    missed = np.zeros(at.count)
    if scrapes is not None:
        missed = np.where(scrapes.down(at), np.nan_to_num(1 - scrapes.up), 0.0)
    lost: Floats = np.where(there, missed, 1.0)
    lost[: int(np.flatnonzero(there)[0])] = 0.0
    scrapes_per_step = at.step_s / scrape_s
    watched = float((1 - lost)[int(np.flatnonzero(there)[0]) :].sum())
    return TargetObserved(
        target=engine.target,
        scrapes=round(watched * scrapes_per_step),
        failed=round(float(missed.sum()) * scrapes_per_step),
        interval_s=scrape_s,
        watched_s=watched * at.step_s,
        unread=_unread(lost, missed, at),
    )


def _unread(lost: Floats, failed: Floats, at: Steps) -> list[Gap]:
    """Gaps: runs of steps without scrapes. First and last step count by the share lost."""
    gaps: list[Gap] = []
    for run in runs(lost > 0):
        first, last = int(run[0]), int(run[-1])
        from_s = float(at.begins_s[first])
        to_s = float(at.begins_s[last]) + float(lost[last]) * at.step_s
        if last > first:
            from_s += (1 - float(lost[first])) * at.step_s
        gaps.append(Gap(from_s, to_s, FAILED if failed[run].any() else ""))
    return gaps


# --- Replay: the samples of suspect spans through the sidecar's monitor --------------------------


REPLAYED_MOST = 60
"""At most this many spans, those with most harm, are replayed sample by sample."""

REPLAYED_S = 2400.0
"""Only the first seconds of a long span are replayed; its end is known from the steps."""

BEFORE_S, AFTER_S = 600.0, 300.0
"""Replay starts before the span (for a baseline) and ends after it (for the recovery)."""

RESTART_NOTED_S = 60.0
UNKNOWN_OUTCOME = "unknown"
TARGET = ("cluster", "namespace", "job", "pod", "instance")
"""Target labels, which all series of a scrape carry."""


class QueryProgress:
    """Counts queries, and reports how many of the expected ones are done."""

    def __init__(self, progress: ReportProgress, expected: int) -> None:
        self._progress, self._done, self._expected = progress, 0, expected

    def more(self, queries: int) -> None:
        """Set the number of queries left."""
        self._expected = self._done + queries

    def __call__(self, _name: str) -> None:
        """Count one finished query."""
        self._done += 1
        self._progress(min(self._done, self._expected - 1), self._expected)


@dataclass(frozen=True, slots=True)
class _ReplayWindow:
    """A time window of one engine to replay, and the replay once it was read."""

    engine: TierEngine
    stretch: SuspectSpan
    from_s: float
    to_s: float
    replay: Replay | None = None

    @property
    def cut(self) -> bool:
        """Whether the trouble lasts longer than the replayed window."""
        return self.stretch.to_s > self.to_s

    def held(self, until_s: float) -> list[Held]:
        """Its intervals; those still open at the window's end last until the span ends."""
        if self.replay is None:
            cause = CAUSES.get(self.stretch.why)
            if cause is None:
                return []
            end_s = min(self.stretch.to_s, until_s)
            return [
                Held("cause", cause, Severity.WARNING, self.stretch.from_s, end_s, end_s, "ended")
            ]
        intervals: list[Held] = []
        for interval in self.replay.held:
            if interval.end_s is not None:
                intervals.append(interval)
                continue
            last_s = self.stretch.to_s if self.cut else interval.last_s
            goes_on = last_s >= until_s - 2 * self.stretch_step_s
            intervals.append(
                replace(
                    interval,
                    last_s=last_s,
                    end_s=None if goes_on else last_s,
                    ended="" if goes_on else "ended",
                )
            )
        return intervals

    @property
    def stretch_step_s(self) -> float:
        """Resolution of the span's end in seconds."""
        return (self.stretch.to_s - self.stretch.from_s) / max(self.stretch.steps, 1)


class IncidentSearch:
    """Finds the incidents of a fleet in a period.

    Counts of suspect spans: `replayed` from samples, `coarse` reported from the steps alone,
    `left_out` not analysed, `unread` whose samples could not be read.
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
        """Replay the worst windows; counts queries in `progress`."""
        windows = [window for engine in self._fleet.members for window in self._windows(engine)]
        worst = worst_spans([window.stretch for window in windows], most=REPLAYED_MOST)
        chosen = [windows[at] for at in worst]
        rest = [windows[at] for at in sorted({*range(len(windows))} - {*worst})]
        progress.more(len(chosen))
        with ThreadPoolExecutor(2) as pool:
            read = list(pool.map(partial(self._read, progress), chosen))
        self.replayed = sum(window.replay is not None for window in read)
        self.unread = len(read) - self.replayed
        self.left_out = sum(window.stretch.why not in CAUSES for window in rest)
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
        """Adds the evidence to an engine's incidents; a replay always has the diagnosis."""
        return lambda episode, _detailed: self._observed(engine, episode, self._of(engine))

    def _of(self, engine: TierEngine) -> Sequence[_ReplayWindow]:
        return self._by_key.get(engine.key, ())

    def _windows(self, engine: TierEngine) -> list[_ReplayWindow]:
        values = self._now.engine(engine.key)
        scrapes = self._now.scrapes_of(engine.member.labels)
        return [
            _ReplayWindow(
                engine,
                stretch,
                stretch.from_s - BEFORE_S,
                min(stretch.to_s + AFTER_S, stretch.from_s + REPLAYED_S, self._now.grid.to_s),
            )
            for stretch in suspect_spans(values, self._now.at, scrapes)
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
        """Preemptions from the steps, for an incident that was not replayed to its end."""
        row = self._now.signs[queries.PREEMPTED].get(engine.key)
        if row is None:
            return Span()
        begins_s = self._now.at.begins_s
        inside = (begins_s + self._now.at.step_s > episode.start_s) & (begins_s < episode.until_s)
        return Span(counts={PREEMPTIONS: float(np.nansum(row[inside]))})

    def recommended(self, engine: TierEngine) -> list[Recommended]:
        """The recommendations that the replays of an engine made, each once."""
        advice: dict[str, tuple[Mapping[str, Any], float, float]] = {}
        for window in self._of(engine):
            for key, (document, first_s, last_s) in (
                window.replay.recommended.items() if window.replay is not None else ()
            ):
                before = advice.get(key, (document, first_s, last_s))
                advice[key] = before[0], min(before[1], first_s), max(before[2], last_s)
        return [
            Recommended(
                tier=engine.tier,
                target=engine.target,
                engine=engine.engine,
                document=document,
                outcome=UNKNOWN_OUTCOME,
                first_s=first_s,
                last_s=last_s,
                applied_s=None,
                predicted=document.get("predicted", {}),
                measured={},
            )
            for document, first_s, last_s in advice.values()
        ]


def _shared_s(window: _ReplayWindow, episode: Episode) -> float:
    """Overlap of a window and an incident in seconds; negative if they do not overlap."""
    return min(window.to_s, episode.until_s) - max(window.from_s, episode.start_s)
