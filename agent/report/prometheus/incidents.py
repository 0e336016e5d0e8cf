"""Finds incidents in Prometheus: replays the samples of suspect spans, scrape by scrape, through
the sidecar's monitor, and writes its verdicts into a store. I/O edge.

A metrics system stores every sample, so the scraped pages can be rebuilt. Stages, causes and
recommendations are therefore those that a sidecar would have stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.fleet.engines import read_ahead
from kneewatch.agent.fleet.queries import QueryMoment
from kneewatch.agent.fleet.snapshot import faulty_gpus_at
from kneewatch.agent.report.history import ReportRequest
from kneewatch.agent.report.prometheus import queries
from kneewatch.agent.report.prometheus.inventory import ReportedFleet, TierEngine
from kneewatch.agent.report.prometheus.period import PeriodData
from kneewatch.agent.report.prometheus.queries import Ranges
from kneewatch.agent.report.prometheus.suspect_spans import (
    CAUSES,
    KnownCause,
    SuspectSpan,
    suspect_spans,
    worst_spans,
)
from kneewatch.agent.store.encoding import EngineName
from kneewatch.agent.store.ingest import StoreFill
from kneewatch.agent.store.records import EngineCycle, engine_cycle
from kneewatch.agent.stream import target_monitor
from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.responses import RawSeries
from kneewatch.collector.prometheus.scraped_pages import TARGET_LABELS, ScrapedPages, target_of
from kneewatch.diagnose.causes.availability import RESTART_NOTED_S
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.fleet.inventory import Key, Member
from kneewatch.diagnose.fleet.outliers import SLOWS_TOKENS
from kneewatch.diagnose.ranking import is_under, with_explained
from kneewatch.diagnose.values import NO_GPUS, GpuReading
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.reports.weekly.measures import RUNNING
from kneewatch.rules.rule import Severity
from kneewatch.rules.wire import to_ms


def replay_samples(
    samples: Sequence[RawSeries],
    member: Member,
    monitor: TargetMonitor,
    lived_s: tuple[float, float],
    gpus: GpuReading = NO_GPUS,
    span: SuspectSpan | None = None,
) -> Iterator[EngineCycle]:
    """Yields the verdicts on one engine of a target, from the target's samples.

    Failed scrapes outside `lived_s` are left out: the pod was loading or terminating then. `gpus`
    are the engine's GPUs during `span`.
    """
    rebuilt = ScrapedPages()
    rebuilt.add(samples)
    for t_s, page in rebuilt.pages(target_of(member.labels)):
        if page is None and not lived_s[0] <= t_s <= lived_s[1]:
            continue
        diagnoses = (
            monitor.page(t_s, page, gpus if span and span.from_s <= t_s <= span.to_s else NO_GPUS)
            if page is not None
            else monitor.failed(t_s, CollectError("the scrape failed (up is 0)", kind="refused"))
        )
        diagnosis = next((diagnosis for diagnosis in diagnoses if _is(diagnosis, member)), None)
        if diagnosis is not None:
            engines = (e for e in monitor.engines if e.key.engine == diagnosis.engine)
            yield engine_cycle(diagnosis, next(engines, None), None)


def _is(diagnosis: Verdict, member: Member) -> bool:
    engine, model = member.labels.get("engine"), member.labels.get("model_name")
    return diagnosis.engine in (engine or diagnosis.engine, "") and diagnosis.model in (
        model or diagnosis.model,
        "",
    )


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

CARRIED = 4
"""Number of times at which the last verdict of a replay is repeated until its span ends."""

READ_AHEAD = 3
"""Maximum number of spans whose samples are in memory."""


class ReplayWindow(Struct, frozen=True):
    """A time window of one engine whose samples are replayed, and its suspect span."""

    engine: TierEngine
    span: SuspectSpan
    from_s: float
    to_s: float

    @property
    def until_s(self) -> float:
        """The end of the suspect span, or of the window if that is later."""
        return max(self.span.to_s, self.to_s)

    @property
    def known(self) -> list[KnownCause]:
        """The cause that the sign of the span proves without a replay."""
        if self.span.why not in CAUSES:
            return []
        cause = bare_cause(CAUSES[self.span.why], Severity.WARNING, self.span.from_s, self.span.why)
        return [KnownCause(self.span.from_s, self.span.to_s, cause)]


def bare_cause(name: str, severity: Severity, since_s: float, summary: str) -> Cause:
    """A cause without evidence, for what is known only from the steps."""
    return Cause(
        id=name,
        confidence=1.0,
        severity=severity,
        summary=summary,
        since_s=since_s,
        seen_s=since_s,
    )


def verdict(t_s: float, causes: Sequence[Cause]) -> Verdict:
    """A verdict on an engine whose page was read, of which only the causes are known."""
    worst = max((cause.severity for cause in causes), default=Severity.OK)
    return Verdict(
        t_s=to_ms(t_s),
        target="",
        health=worst.word,
        causes=[cause.rounded() for cause in causes],
        values={RUNNING: None},
        judged_against="",
    )


class IncidentSearch:
    """Finds the incidents of a fleet in a period, and writes them into a store.

    Counts of suspect spans: `replayed` were replayed from samples, `coarse` are reported from the
    steps alone, `left_out` were not analysed, and `unread` have samples that could not be read.
    `windows` are the replayed ones of each engine.
    """

    def __init__(
        self,
        ranges: Ranges,
        fleet: ReportedFleet,
        now: PeriodData,
        profile: Profile,
        request: ReportRequest,
    ) -> None:
        self._ranges, self._fleet, self._now = ranges, fleet, now
        self._profile, self._wanted = profile, request
        self._profiles: dict[tuple[str, bool], Profile] = {}
        self.windows: dict[Key, list[ReplayWindow]] = {}
        self.replayed = 0
        self.coarse = 0
        self.left_out = 0
        self.unread = 0

    def look(
        self,
        fill: StoreFill,
        names: Mapping[Key, EngineName],
        of_fleet: Mapping[Key, Sequence[KnownCause]],
    ) -> None:
        """Replay the worst windows and write the verdicts, engine by engine. `of_fleet` are the
        causes that fleet mode concluded."""
        every = [window for engine in self._fleet.members for window in self._windows(engine)]
        worst = {*worst_spans([window.span for window in every], most=REPLAYED_MOST)}
        chosen = _apart([window for at, window in enumerate(every) if at in worst])
        rest = [window for at, window in enumerate(every) if at not in worst]
        self.left_out = sum(window.span.why not in CAUSES for window in rest)
        self.coarse = len(rest) - self.left_out
        self._ranges.expect(len(chosen))
        with ThreadPoolExecutor(READ_AHEAD - 1) as pool:
            pieces = read_ahead(pool, self._samples, chosen, most=READ_AHEAD)
            for engine in self._fleet.members:
                own = [window for window in chosen if window.engine is engine]
                judged = of_fleet.get(engine.key, ())
                known = [
                    *judged,
                    *(row for row in self._restarts(engine) if not row.is_among(judged)),
                    *chain.from_iterable(w.known for w in rest if w.engine is engine),
                ]
                if own or known:
                    timeline = self.timeline(fill, names[engine.key], known)
                    for window in own:
                        self._replay(timeline, window, next(pieces))
                    timeline.finish()

    def timeline(self, fill: StoreFill, name: EngineName, known: Sequence[KnownCause]) -> Timeline:
        """A timeline that writes to `fill`."""
        now = self._now
        return Timeline(fill, name, known, end_s=now.grid.to_s, step_s=now.at.step_s)

    def _replay(
        self, timeline: Timeline, window: ReplayWindow, samples: Sequence[RawSeries] | None
    ) -> None:
        """Replay a window. If its samples cannot be read, only what its sign proves is written."""
        engine = window.engine
        cycles: Iterable[EngineCycle] = ()
        if samples is not None:
            monitor = target_monitor(engine.target, self._profile_of(engine))
            scrapes = self._now.scrapes_of(engine.member.labels)
            lived = (-np.inf, np.inf) if scrapes is None else scrapes.lived_s(self._now.at)
            gpus = self._gpus(window)
            cycles = replay_samples(samples, engine.member, monitor, lived, gpus, window.span)
        if timeline.replay(window, cycles):
            self.replayed += 1
            self.windows.setdefault(engine.key, []).append(window)
        else:
            self.unread += 1

    def _restarts(self, engine: TierEngine) -> Iterator[KnownCause]:
        for t_s in self._now.process_starts(engine.member):
            cause = bare_cause("engine_restarted", Severity.INFO, t_s, "the process was replaced")
            yield KnownCause(t_s, t_s + RESTART_NOTED_S, cause)

    def _windows(self, engine: TierEngine) -> list[ReplayWindow]:
        values = self._now.engine(engine.key)
        scrapes = self._now.scrapes_of(engine.member.labels)
        return [
            ReplayWindow(
                engine,
                span,
                span.from_s - BEFORE_S,
                min(span.to_s + AFTER_S, span.from_s + REPLAYED_S, self._now.grid.to_s),
            )
            for span in suspect_spans(values, self._now.at, scrapes)
        ]

    def _samples(self, window: ReplayWindow) -> Sequence[RawSeries] | None:
        member, problems = window.engine.member, self._ranges.problems
        labels = {name: member.labels[name] for name in TARGET_LABELS if member.labels.get(name)}
        text = queries.pages(
            self._fleet.asking, labels or member.labels, window.to_s - window.from_s
        )
        try:
            samples, warnings = self._ranges.source.series(text, window.to_s)
        except CollectError as exc:
            problems.fail(f"samples of {window.engine.target}", exc)
            return None
        finally:
            self._ranges.count()
        problems.warn(warnings)
        return samples

    def _gpus(self, window: ReplayWindow) -> GpuReading:
        """The GPUs of the window's engine that report an XID amid its suspect span."""
        span, problems = window.span, self._ranges.problems
        moment = QueryMoment(self._ranges.source, problems, (span.from_s + span.to_s) / 2)
        readings = faulty_gpus_at(moment, self._fleet.asking, self._fleet.shape)
        return readings.get(window.engine.key, NO_GPUS)

    def _profile_of(self, engine: TierEngine) -> Profile:
        goal = engine.member.throughput_only
        if (engine.tier, goal) not in self._profiles:
            stated = self._wanted.stated(engine.target)
            profile = replace(
                self._profile,
                targets=stated.profile.targets,
                gpus=stated.server.engine_gpus,
                stated=stated.server,
            )
            self._profiles[engine.tier, goal] = profile.for_throughput() if goal else profile
        return self._profiles[engine.tier, goal]


def _apart(windows: Sequence[ReplayWindow]) -> list[ReplayWindow]:
    """The windows of each engine in order of time, cut so that they do not overlap. A window that
    lies within another one is left out."""
    apart: list[ReplayWindow] = []
    for window in windows:
        before = apart[-1] if apart and apart[-1].engine is window.engine else None
        from_s = window.from_s if before is None else max(window.from_s, before.until_s)
        if from_s < window.to_s:
            apart.append(replace(window, from_s=from_s))
    return apart


class Timeline:
    """Writes the verdicts on one engine in order of time.

    `known` are causes that are known without a replay: a replayed verdict includes them, and
    between replays they are written when they begin and end.
    """

    def __init__(
        self,
        fill: StoreFill,
        name: EngineName,
        known: Sequence[KnownCause],
        *,
        end_s: float,
        step_s: float,
    ) -> None:
        """The period ends at `end_s`; `step_s` is the length of the steps."""
        self._fill, self._name, self._known = fill, name, known
        self._end_s, self._step_s = end_s, step_s
        self._marks = deque(sorted({t_s for row in known for t_s in (row.from_s, row.to_s)}))
        self._goes_on = False

    def replay(self, window: ReplayWindow, cycles: Iterable[EngineCycle]) -> bool:
        """Write the verdicts of a window. Returns whether there were any.

        A condition that is present at the end of the window lasts until its span ends.
        """
        self._write_marks(window.from_s)
        last: EngineCycle | None = None
        for last in cycles:
            self._fill.write(self._name, self._with_known(last))
        if last is None:
            self._known = (*self._known, *window.known)
            marks = (t_s for row in window.known for t_s in (row.from_s, row.to_s))
            self._marks = deque(sorted({*self._marks, *marks}))
            return False
        is_cut = window.span.to_s > window.to_s
        until_s = min(window.span.to_s, self._end_s) if is_cut else last.diagnosis.t_s
        # The steps are too coarse to tell whether it ended before the period did.
        self._goes_on = until_s >= self._end_s - 2 * self._step_s
        self._carry(last.diagnosis, self._end_s if self._goes_on else until_s)
        if not self._goes_on:
            self._mark(until_s)
        while self._marks and self._marks[0] <= until_s:
            self._marks.popleft()
        return True

    def finish(self) -> None:
        """Write what is known after the last replay."""
        self._write_marks(np.inf)
        if not self._goes_on and not any(row.goes_on for row in self._known):
            self._fill.end(self._name, self._end_s)

    def _carry(self, last: Verdict, until_s: float) -> None:
        """Repeat the last verdict of a replay, without its signals, until its span ends."""
        unknown = dict.fromkeys(last.values)
        for t_s in np.linspace(last.t_s, until_s, CARRIED + 1)[1:].tolist():
            if t_s > last.t_s:
                carried = replace(last, t_s=t_s, values=unknown)
                self._fill.write(self._name, EngineCycle(carried), any_time=True)

    def _write_marks(self, before_s: float) -> None:
        while self._marks and self._marks[0] < before_s:
            self._mark(self._marks.popleft())

    def _mark(self, t_s: float) -> None:
        causes = [row.cause for row in self._known if row.holds(t_s)]
        self._fill.write(self._name, EngineCycle(verdict(t_s, causes)), any_time=True)

    def _with_known(self, cycle: EngineCycle) -> EngineCycle:
        """The verdict with the causes that are known without a replay, where they are worse than in
        the verdict. They explain others as in fleet mode. `bad_node` is left out if another cause
        explains slow tokens."""
        diagnosis = cycle.diagnosis
        present = {cause.id: cause.severity for cause in diagnosis.causes}
        more = [
            row.cause
            for row in self._known
            if row.holds(diagnosis.t_s)
            and row.cause.severity > present.get(row.cause.id, Severity.OK)
            and (row.cause.id != "bad_node" or SLOWS_TOKENS.isdisjoint(present))
        ]
        if not more:
            return cycle
        under = {id(head): [c for c in diagnosis.causes if is_under(c, head)] for head in more}
        explained = {id(cause) for causes in under.values() for cause in causes}
        worse = {cause.id for cause in more}
        causes = [c for c in diagnosis.causes if id(c) not in explained and c.id not in worse]
        causes += [with_explained(head, under[id(head)]) for head in more]
        return replace(cycle, diagnosis=replace(diagnosis, causes=causes))
