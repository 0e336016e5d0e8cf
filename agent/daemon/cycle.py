"""One cycle of a target: scrape, diagnose, log changes, publish. I/O edge."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from kneewatch.agent.backoff import backoff_s
from kneewatch.agent.daemon.pages import pages_of
from kneewatch.agent.daemon.target_profile import TargetProfile, with_tier
from kneewatch.agent.store.records import Cycle, EngineCycle, Raw
from kneewatch.agent.stream import TargetStream
from kneewatch.agent.target_state import Board, SourceState, TargetState
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CollectError
from kneewatch.collector.history import Restart
from kneewatch.collector.names.vllm_series import EngineKey
from kneewatch.diagnose.engine.cardinality_limit import ENGINES_MAX
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import EngineMonitor
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.gpu.monitor import NO_GPUS, GpuReading

log = logging.getLogger(__name__)

LONGER = 1.3
"""By so much a wait has grown and not only varied."""

LINES_MAX, LINES_S = 100, 600.0
"""So many lines about a target's engines are written within so long: labels that change with every
scrape must not fill a disk with them. What is left out is counted."""

Key = tuple[str, str]


class Lines:
    """What the log takes of one target's engines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since_s = 0.0
        self._written = self._left_out = 0

    def begin(self, t_s: float) -> None:
        """A cycle begins at `t_s`; a while that is over ends with the number of lines left out."""
        if 0 <= t_s - self._since_s < LINES_S:
            return
        if self._left_out:
            log.warning(
                "changes were left out of the log target=%s lines=%s", self._name, self._left_out
            )
        self._since_s, self._written, self._left_out = t_s, 0, 0

    def say(self, message: str, *args: object) -> None:
        """Write a line, or count it."""
        if self._written < LINES_MAX:
            self._written += 1
            log.info(message, *args)
            return
        if not self._left_out:
            log.warning(
                "too many changes for the log, more are only counted target=%s most=%s in_s=%.0f",
                self._name,
                LINES_MAX,
                LINES_S,
            )
        self._left_out += 1


class Changes:
    """What was last told of one target: up or down, stage and causes of each engine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._answers: bool | None = None
        self._interval_s = 0.0
        self._failed = 0
        self._told: dict[Key, tuple[int | None, frozenset[str]]] = {}
        self._lines = Lines(name)

    def scraped(self, error: CollectError | None, interval_s: float) -> None:
        """A scrape gave a page (`error` is None) or none; the next one follows in `interval_s`."""
        if error is None:
            if self._answers is False:
                log.info("target answers again target=%s failed=%s", self._name, self._failed)
            elif self._answers is None:
                log.info("target answers target=%s", self._name)
            self._answers, self._failed, self._interval_s = True, 0, interval_s
            return
        self._failed += 1
        if self._answers is not False:
            log.warning(
                "target does not answer target=%s error=%s try=%s", self._name, error, error.hint
            )
            self._interval_s = interval_s
        elif interval_s > LONGER * self._interval_s:
            log.info(
                "target is left alone for longer target=%s interval_s=%.1f failed=%s",
                self._name,
                interval_s,
                self._failed,
            )
            self._interval_s = interval_s
        self._answers = False

    def judged(self, diagnoses: Sequence[Diagnosis]) -> None:
        """What is said of each engine now."""
        if diagnoses:
            self._lines.begin(diagnoses[0].t_s)
        self._forget(diagnoses)
        for diagnosis in diagnoses:
            if not diagnosis.was_read:
                continue  # that it cannot be read was said already
            key = diagnosis.model, diagnosis.engine
            causes = frozenset(cause.id for cause in diagnosis.causes)
            was_stage, was_causes = self._told.get(key, (0, frozenset[str]()))
            number = was_stage if diagnosis.stage is None else diagnosis.stage.number
            self._told[key] = number, causes
            if number != was_stage:
                self._stage(diagnosis, was_stage)
            for cause in diagnosis.causes:
                if cause.id not in was_causes:
                    self._lines.say(
                        "cause begins target=%s model=%s engine=%s cause=%s severity=%s "
                        "confidence=%s summary=%s",
                        self._name,
                        *key,
                        cause.id,
                        cause.severity.word,
                        cause.confidence,
                        cause.summary,
                    )
            for gone in sorted(was_causes - causes):
                self._lines.say(
                    "cause ends target=%s model=%s engine=%s cause=%s", self._name, *key, gone
                )

    def _forget(self, diagnoses: Sequence[Diagnosis]) -> None:
        """Keep no more engines than a target may have: first those that nothing is said of."""
        if len(self._told) > ENGINES_MAX:
            now = {(one.model, one.engine) for one in diagnoses}
            self._told = {key: told for key, told in self._told.items() if key in now}

    def _stage(self, diagnosis: Diagnosis, before: int | None) -> None:
        stage = diagnosis.stage
        if stage is not None:
            self._lines.say(
                "stage changes target=%s model=%s engine=%s before=%s now=%s name=%s severity=%s",
                self._name,
                diagnosis.model,
                diagnosis.engine,
                before,
                stage.number,
                stage.name,
                stage.severity.word,
            )


# --- One target's cycle: a page, its diagnoses, and everybody who wants to know. I/O edge ---------


PAGE = "page"
"""What the target's own page is called among its sources."""

STARTED_OVER = "the recording starts over"


class TakesCycles(Protocol):
    """The store, as a cycle sees it: it never blocks and never raises."""

    def put(self, cycle: Cycle) -> None:
        """Take a cycle."""
        ...


class TakesStates(Protocol):
    """The notifier, as a cycle sees it: it never blocks and never raises."""

    def offer(self, state: TargetState) -> None:
        """Take a target's newest state."""
        ...


class GpuReadings(Protocol):
    """The GPU sources, as a cycle sees them: what they last found, without waiting."""

    def reading(self, spec: TargetSpec, t_s: float) -> GpuReading:
        """What the GPUs of a target say."""
        ...

    def states(self, spec: TargetSpec) -> Sequence[SourceState]:
        """How the target's sources do."""
        ...


class KnowsPeaks(Protocol):
    """The history of a week, as a cycle sees it."""

    def peak_requests(self, target: str, key: EngineKey) -> float | None:
        """The most requests of an engine within the last week; None where it is not known."""
        ...


class KnowsSeasons(Protocol):
    """The history of weeks, as a cycle sees it."""

    def usual(self, target: str, key: EngineKey, t_s: float) -> Mapping[str, float]:
        """Signals of an engine as they usually are at this hour of the week."""
        ...


class KnowsKnees(Protocol):
    """The history of loads, as a cycle sees it: it never waits."""

    def ask(self, target: str, engine: EngineMonitor) -> None:
        """Have an engine's knee told what was seen of it before."""
        ...


@dataclass(frozen=True, slots=True)
class Sinks:
    """Where the results of cycles go, and where GPU signals and what was seen before come from."""

    board: Board
    store: TakesCycles | None = None
    notifier: TakesStates | None = None
    gpus: GpuReadings | None = None
    peaks: KnowsPeaks | None = None
    seasons: KnowsSeasons | None = None
    knees: KnowsKnees | None = None


class Watch:
    """One target under watch. Its cycles run one at a time, in any thread.

    Raises:
        CaptureError: it is a capture that cannot be played.
    """

    def __init__(
        self,
        spec: TargetSpec,
        basis: TargetProfile,
        sinks: Sinks,
        *,
        wall: Callable[[], float] = time.time,
        luck: Callable[[], float] = random.random,
    ) -> None:
        self.spec, self.basis = spec, basis
        self._sinks, self._wall, self._luck = sinks, wall, luck
        self._pages, self._shown_address = pages_of(spec), spec.shown_address
        self._stream = TargetStream(spec.name, basis.profile, basis.limits, basis.catalogue)
        self._stream.gpus = self
        self._changes = Changes(spec.name)
        self._turn, self._telling = Lock(), Lock()
        self._retired = False
        self._wanted: TargetSpec | None = None
        self._diagnoses: tuple[Diagnosis, ...] = ()
        self.cycles = self._failures = self._failing = 0

    def adopt(self, spec: TargetSpec) -> None:
        """From the next cycle on the target is as configured now; what was seen of it is kept."""
        self._wanted = spec

    def retire(self) -> None:
        """Tell nobody any more, not even of a cycle under way."""
        with self._telling:
            self._retired = True
        if self._turn.acquire(blocking=False):
            self._let_go()
            self._turn.release()

    def reading(self, now_s: float) -> GpuReading:
        """What the target's GPUs say."""
        return self._sinks.gpus.reading(self.spec, now_s) if self._sinks.gpus else NO_GPUS

    def cycle(self) -> float | None:
        """One cycle. Gives the seconds until the next, None: at the target's usual time."""
        with self._turn:
            next_s = None if self._retired else self._scrape()
        if self._retired:
            self._let_go()
        return next_s

    def _scrape(self) -> float | None:
        self._take_over()
        began_s, t_s = time.perf_counter(), self._wall()
        before = self._stream.monitor
        if self._sinks.peaks:
            for engine in before.engines:
                engine.knows_week(self._sinks.peaks.peak_requests(self.spec.name, engine.key))
        if self._sinks.seasons:
            for engine in before.engines:
                engine.knows_season(self._sinks.seasons.usual(self.spec.name, engine.key, t_s))
        page = self._pages.take(self._stream, t_s)
        diagnoses = self._stream.judge(t_s, page)
        # A recording that starts over is not the server that it shows, back again.
        if self._sinks.knees and not self.spec.played:
            for engine in self._stream.monitor.engines:
                if not engine.learned.knee.asked:
                    self._sinks.knees.ask(self.spec.name, engine)
        over = Restart(t_s, STARTED_OVER) if self._stream.monitor is not before else None
        return self._tell(t_s, diagnoses, began_s, over)

    def crashed(self, error: Exception) -> float | None:
        """A cycle did not come to its end: of the target nothing is known."""
        bug = CollectError(
            f"internal error: {type(error).__name__}: {error}",
            kind="internal",
            hint="This is a bug in kneewatch: please report it with the traceback in its log.",
        )
        with self._turn:
            began_s, t_s = time.perf_counter(), self._wall()
            return self._tell(t_s, self._stream.monitor.failed(t_s, bug), began_s, None)

    def _let_go(self) -> None:
        self._pages.close()
        self._stream.gpus = None  # a circle of references would keep all that was seen

    def _take_over(self) -> None:
        spec, self._wanted = self._wanted, None
        if spec is None:
            return
        if not spec.played and spec.settings.fetch() != self.spec.settings.fetch():
            self._pages.close()
            self._pages = pages_of(spec)
        self.spec = spec

    def _tell(
        self, t_s: float, diagnoses: Sequence[Diagnosis], began_s: float, over: Restart | None
    ) -> float | None:
        error = self._stream.monitor.last_error
        tiered = tuple(with_tier(one, self.spec, self.basis) for one in diagnoses)
        engines = engine_cycles(diagnoses, tiered, self._stream.monitor, over)
        self.cycles += 1
        self._failures += error is not None
        self._failing = self._failing + 1 if error is not None else 0
        # None of them: the scrape was not newer than the last one, which still holds.
        self._diagnoses = tiered or self._diagnoses
        usual_s = float(self.spec.settings["interval_s"])
        next_s = self._pages.due_in_s()
        if next_s is None and error is not None:
            next_s = backoff_s(usual_s, failing=self._failing, luck=self._luck())
        spent_s = time.perf_counter() - began_s
        state = self._state(t_s, usual_s if next_s is None else next_s, spent_s)
        with self._telling:
            if self._retired:
                return None
            said = None if error is None else str(error)
            self._hand_out(
                Cycle(t_s, self.spec.name, self.spec.labels, engines, spent_s, said), state
            )
        self._changes.scraped(error, state.interval_s)
        self._changes.judged(diagnoses)
        return next_s

    def _hand_out(self, cycle: Cycle, state: TargetState) -> None:
        self._sinks.board.put(state)
        if self._sinks.store:
            self._sinks.store.put(cycle)
        if self._sinks.notifier:
            self._sinks.notifier.offer(state)

    def _state(self, t_s: float, interval_s: float, spent_s: float) -> TargetState:
        error = self._stream.monitor.last_error
        page = SourceState(PAGE, t_s, error is None, spent_s, "" if error is None else str(error))
        gpus = self._sinks.gpus.states(self.spec) if self._sinks.gpus else ()
        return TargetState(
            name=self.spec.name,
            url=self._shown_address,
            labels=self.spec.labels,
            t_s=t_s,
            diagnoses=self._diagnoses,
            cycle_s=spent_s,
            interval_s=interval_s,
            cycles=self.cycles,
            failures=self._failures,
            failing=self._failing,
            sources=(page, *gpus),
        )


def engine_cycles(
    diagnoses: Sequence[Diagnosis],
    tiered: Sequence[Diagnosis],
    monitor: TargetMonitor,
    over: Restart | None,
) -> tuple[EngineCycle, ...]:
    """What each engine leaves for the store; `tiered` are its diagnoses with their tiers, `over`
    is a restart that pages do not show."""
    by_diagnosis = {id(engine.newest): engine for engine in monitor.engines}
    return tuple(
        engine_cycle(told, by_diagnosis.get(id(plain)), over)
        for plain, told in zip(diagnoses, tiered, strict=True)
    )


def engine_cycle(
    diagnosis: Diagnosis, engine: EngineMonitor | None, over: Restart | None
) -> EngineCycle:
    """The same for one engine; `engine` is None where none has been seen on a page yet."""
    replica = engine.key.replica if engine else ""
    if engine is None or not diagnosis.was_read:
        return EngineCycle(diagnosis, replica=replica)
    return EngineCycle(
        diagnosis,
        Raw(*engine.counters()),
        engine.config,
        engine.history.started_s,
        engine.restart or over,
        replica,
    )
