"""One cycle of a target: scrape, diagnose, log changes, publish. I/O edge."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import TypeVar, cast

from msgspec import Struct, field

from kneewatch.agent.daemon.baselines import Exchange
from kneewatch.agent.daemon.discovery import with_tier
from kneewatch.agent.daemon.gpu_sources import GpuSources
from kneewatch.agent.daemon.node_gpus import GpuClaim
from kneewatch.agent.daemon.periodic_jobs import OWN_CLOCK, Job, Steps
from kneewatch.agent.daemon.scraping import (
    Canary,
    LivePages,
    PlayedPages,
)
from kneewatch.agent.server.watch import WATCH_SETTINGS, ServerWatch, server_watch
from kneewatch.agent.store.records import Cycle, engine_cycles
from kneewatch.agent.stream import (
    AcceptRequest,
    EngineAcceptance,
    TargetStream,
    accept,
    finished,
    no_gpus,
)
from kneewatch.agent.target_state import Board, TargetState, backoff_s
from kneewatch.agent.targets import TargetSpec
from kneewatch.collector.errors import CollectError
from kneewatch.collector.scrape_history import Restart
from kneewatch.diagnose.account_signals import SILENT
from kneewatch.diagnose.change import ENDED, RESTARTED, TARGET_DOWN, IntervalBook, conditions_of
from kneewatch.diagnose.deployment.server_facts import GPU_UUIDS
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.target_monitor import ENGINES_MAX
from kneewatch.diagnose.values import NO_GPUS, GpuReading
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.reports.health import SourceState
from kneewatch.rules.cascade import Stage
from kneewatch.rules.rule import Severity

log = logging.getLogger(__name__)

GROWTH_FACTOR = 1.3
"""While a target is down, a longer interval is logged only if it grew by this factor. Smaller
changes are jitter."""

LINES_MAX, LINES_S = 100, 600.0
"""Maximum number of log lines per target in a period of `LINES_S` seconds: labels that change with
every scrape must not fill the disk. Further lines are counted instead of written."""

Key = tuple[str, str]
ENDED_WORDS: Mapping[str, str] = {ENDED: "resolved", RESTARTED: "gone with a restart"}
T = TypeVar("T")


class ChangeLog:
    """Logs the changes of one target, at a limited rate: when it goes up or down, and changes of
    its engines' stages and causes.

    A cause is logged when it begins, when its severity exceeds all earlier ones, and when it ends;
    one that nobody could see for a while, only if it does not continue.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._up: bool | None = None
        self._interval_s = 0.0
        self._failed = 0
        self._books: dict[Key, IntervalBook] = {}
        self._stages: dict[Key, int] = {}
        """Each engine's intervals, and the stage that was logged last."""
        self._since_s = 0.0
        self._written = self._suppressed = 0

    def scraped(self, error: CollectError | None, interval_s: float) -> None:
        """Record a scrape; log it if the target went up or down. `error` is None for a successful
        scrape, `interval_s` is the time to the next scrape."""
        if error is None:
            if self._up is False:
                log.info("target up again target=%s failed_scrapes=%s", self._name, self._failed)
            elif self._up is None:
                log.info("target up target=%s", self._name)
            self._up, self._failed, self._interval_s = True, 0, interval_s
            return
        self._failed += 1
        if self._up is not False:
            log.warning("target down target=%s error=%s hint=%s", self._name, error, error.hint)
            self._interval_s = interval_s
        elif interval_s > GROWTH_FACTOR * self._interval_s:
            log.info(
                "target still down, backing off target=%s interval_s=%.1f failed_scrapes=%s",
                self._name,
                interval_s,
                self._failed,
            )
            self._interval_s = interval_s
        self._up = False

    def diagnosed(
        self, diagnoses: Sequence[Verdict], restarted: Collection[Key] = frozenset()
    ) -> None:
        """Log changes of stages and causes. Critical changes have the level WARNING. `restarted`:
        model and engine of each process that was replaced."""
        if diagnoses:
            self._begin(diagnoses[0].t_s)
        self._forget(diagnoses)
        for diagnosis in diagnoses:
            key, causes = (diagnosis.model, diagnosis.engine), {c.id: c for c in diagnosis.causes}
            changes = self._books.setdefault(key, IntervalBook()).take(
                diagnosis.t_s,
                conditions_of(diagnosis),
                read=diagnosis.was_read,
                restarted=key in restarted,
            )
            for interval, what in changes:
                if interval.kind == "stage" and what == "began":
                    self._stage(key, diagnosis.stage)
                if interval.kind != "cause" or interval.id == TARGET_DOWN:
                    continue  # health follows from the rest; the failed scrape was logged already
                if what in ("began", "worsened"):
                    self._cause(what, key, causes[interval.id])
                elif what == "ended":
                    how = ENDED_WORDS.get(interval.ended, interval.ended)
                    words = f"cause {how} target=%s model=%s engine=%s cause=%s"
                    self._write(Severity.INFO, words, self._name, *key, interval.id)

    def _begin(self, t_s: float) -> None:
        """Start a cycle at `t_s`. If a new period begins, log how many lines were suppressed in the
        last period."""
        if 0 <= t_s - self._since_s < LINES_S:
            return
        if self._suppressed:
            log.warning("log lines suppressed target=%s lines=%s", self._name, self._suppressed)
        self._since_s, self._written, self._suppressed = t_s, 0, 0

    def _write(self, severity: Severity, message: str, *args: object) -> None:
        """Log a line, or only count it when the limit is reached. A critical line has the level
        WARNING, all others INFO."""
        if self._written < LINES_MAX:
            self._written += 1
            level = logging.WARNING if severity is Severity.CRITICAL else logging.INFO
            log.log(level, message, *args)
            return
        if not self._suppressed:
            log.warning(
                "too many changes, suppressing further log lines target=%s limit=%s per_s=%.0f",
                self._name,
                LINES_MAX,
                LINES_S,
            )
        self._suppressed += 1

    def _cause(self, what: str, key: Key, cause: Cause) -> None:
        self._write(
            cause.severity,
            f"cause {what} target=%s model=%s engine=%s cause=%s severity=%s confidence=%s"
            " summary=%s",
            self._name,
            *key,
            cause.id,
            cause.severity.word,
            cause.confidence,
            cause.summary,
        )

    def _forget(self, diagnoses: Sequence[Verdict]) -> None:
        """When more engines are recorded than a target may have, drop those without a diagnosis."""
        if len(self._books) > ENGINES_MAX:
            present = {(diagnosis.model, diagnosis.engine) for diagnosis in diagnoses}
            self._books = {key: book for key, book in self._books.items() if key in present}
            self._stages = {key: last for key, last in self._stages.items() if key in present}

    def _stage(self, key: Key, stage: Stage) -> None:
        before = self._stages.get(key, 0)
        self._stages[key] = stage.level
        if stage.level != before and stage.severity is not None:
            self._write(
                stage.severity,
                "stage changed target=%s model=%s engine=%s before=%s now=%s name=%s severity=%s",
                self._name,
                *key,
                before,
                stage.level,
                stage.name,
                stage.severity.word,
            )


# --- The cycle ------------------------------------------------------------------------------------


PAGE = "page"
"""Name of the target's metrics page in the list of its sources."""

CPU_SHARE, CPU_FREE_S = 0.25, 0.3
"""Share of one core that all targets with heavy cycles may take together, and CPU seconds that a
cycle may take before it counts as heavy. Targets with heavy cycles are scraped less often, so that
they delay no other."""

STARTED_OVER = "the recording starts over"


CANARY_ON = "canary.interval_s", "canary.on_silence"
CANARY = *CANARY_ON, "canary.timeout_s", "canary.model", "canary.bearer_token_file"
"""Settings that switch canary requests on, and all of them."""


class Sinks(Struct, frozen=True):
    """Where a cycle publishes its results (`board`, `store`, `notify`), where it gets GPU signals,
    and what each engine exchanges with the history after it. `store` and `notify` never block and
    never raise."""

    board: Board
    store: Callable[[Cycle], None] = lambda _: None
    notify: Callable[[TargetState], None] = lambda _: None
    gpus: GpuSources | None = None
    exchanges: Sequence[Exchange] = ()
    heavy: set[str] = field(default_factory=set[str])
    """Names of the targets whose newest cycle was heavy."""


class TargetWatch(Job):
    """Watches one target. Its cycles run one at a time, in any thread.

    Pages are parsed within the context `computing`.

    Raises:
        CaptureError: the target is a capture that cannot be played.
    """

    def __init__(
        self,
        spec: TargetSpec,
        profile: Profile,
        sinks: Sinks,
        *,
        wall: Callable[[], float] = OWN_CLOCK,
        jitter: Callable[[], float] = random.random,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.spec, self.profile = spec, profile
        self._sinks, self._wall, self._jitter = sinks, wall, jitter
        self._pages, self._shown_address = _pages(spec), spec.shown_address
        self._stream = TargetStream(spec.name, profile, spec.settings.limits(), sinks.board.beside)
        self._stream.gpus, self._stream.computing = self.reading, computing
        self._stream.server = _server_watch(spec)
        self._canary = _canary(spec)
        self._changes = ChangeLog(spec.name)
        self._cycle_lock, self._publish_lock = Lock(), Lock()
        self._retired = False
        self._next_spec: TargetSpec | None = None
        self._spent_s = self._cpu_s = 0.0
        self._diagnoses: tuple[Verdict, ...] = ()
        self._claimed_by: object = None
        self.cycles = self._failures = self._failing = 0

    def adopt(self, spec: TargetSpec) -> None:
        """Use a new configuration from the next cycle on. Learned values are kept."""
        self._next_spec = spec

    def accept(self, request: AcceptRequest) -> list[EngineAcceptance]:
        """Make the present values of this target's engines the usual ones. Thread-safe."""
        with self._cycle_lock:
            return accept(self._stream.monitor, self._wall(), request)

    def retire(self) -> None:
        """Stop publishing. The result of a cycle that is still running is dropped."""
        with self._publish_lock:
            self._retired = True
        self._sinks.heavy.discard(self.spec.name)
        if self._cycle_lock.acquire(blocking=False):
            self._release()
            self._cycle_lock.release()

    def reading(self, now_s: float) -> GpuReading:
        """The newest reading of the target's GPUs."""
        return self._sinks.gpus.reading(self.spec, now_s) if self._sinks.gpus else NO_GPUS

    def cycle(self) -> float | None:
        """Run one cycle. Returns the seconds until the next one; None for the usual interval."""
        return finished(self.steps())

    def steps(self) -> Steps:
        """Run one cycle: fetch the page and parse it; read it, judge it and publish, which only
        need the CPU; then ask the server for what is due."""
        with self._cycle_lock:
            next_s = None if self._retired else (yield from self._scrape())
        if self._retired:
            self._release()
        return next_s

    def _scrape(self) -> Steps:
        self._apply_spec()
        t_s, before = self._wall(), self._stream.monitor
        diagnoses = yield from self._timed(self._judged(t_s))
        if self._stream.monitor.last_error is None:
            yield True
        self._send_canary(t_s, diagnoses)
        # A recording that starts over must not learn from its own past rounds.
        for exchange in () if self.spec.played else self._sinks.exchanges:
            for engine in self._stream.monitor.engines:
                exchange(self.spec.name, engine, t_s)
        restart = Restart(t_s, STARTED_OVER) if self._stream.monitor is not before else None
        next_s = self._publish(t_s, diagnoses, restart)
        server, engines = self._stream.server, self._stream.monitor.engines
        if server is not None and server.is_due(t_s, engines):
            yield False
        self._stream.update(t_s)
        self._claim_gpus()
        return next_s

    def _judged(self, t_s: float) -> Generator[bool, None, list[Verdict]]:
        page = self._pages.take(self._stream, t_s)
        if self._canary is not None:
            self._stream.monitor.set_canary(self._canary.state)
        return (yield from self._stream.steps(t_s, page))

    def _timed(self, steps: Generator[bool, None, T]) -> Generator[bool, None, T]:
        """The same steps; notes the time that they take."""
        self._spent_s = self._cpu_s = 0.0
        while True:
            began_s, cpu_began_s = time.perf_counter(), time.thread_time()
            try:
                computes = next(steps)
            except StopIteration as end:
                return cast("T", end.value)
            finally:
                self._spent_s += time.perf_counter() - began_s
                self._cpu_s += time.thread_time() - cpu_began_s
            yield computes

    def _send_canary(self, t_s: float, diagnoses: Sequence[Verdict]) -> None:
        """Send a canary request if canaries are on, one is due, and the metrics page shows that the
        server is awake."""
        if self._canary is None or not diagnoses:
            return
        if any(not diagnosis.was_read for diagnosis in diagnoses):
            self._canary.withhold("the engine's metrics were not read")
        elif any(diagnosis.values.get("awake") == 0.0 for diagnosis in diagnoses):
            self._canary.withhold("the server is asleep")
        else:
            models = sorted({diagnosis.model for diagnosis in diagnoses if diagnosis.model})
            silent = any(diagnosis.values.get(SILENT) for diagnosis in diagnoses)
            self._canary.poll(t_s, models[0] if models else "", silent=silent)

    def _claim_gpus(self) -> None:
        """Pass the GPUs that the server's process uses to the GPU sources, if they have changed."""
        server = self._stream.monitor.server
        if self._sinks.gpus is not None and server is not None and server is not self._claimed_by:
            self._claimed_by = server
            uuids = str(server.value(GPU_UUIDS) or "").split()
            namespace, _, pod = str(server.value("pod") or "").partition("/")
            used = GpuClaim(tuple(uuids), pod=pod, namespace=namespace)
            self._sinks.gpus.set_used(self.spec.name, used)

    def crashed(self, error: Exception) -> float | None:
        """Publish that the target's state is unknown because its cycle crashed."""
        bug = CollectError(
            f"internal error: {type(error).__name__}: {error}",
            kind="internal",
            hint="This is a bug in kneewatch: please report it with the traceback in its log.",
        )
        with self._cycle_lock:
            t_s, self._cpu_s = self._wall(), 0.0
            return self._publish(t_s, self._stream.monitor.failed(t_s, bug), None)

    def _release(self) -> None:
        self._pages.close()
        self._stream.gpus = no_gpus  # breaks a reference cycle that would keep the target's memory

    def _apply_spec(self) -> None:
        spec, self._next_spec = self._next_spec, None
        if spec is None:
            return
        same_fetch = spec.settings.fetch() == self.spec.settings.fetch()
        if not spec.played and not same_fetch:
            self._pages.close()
            self._pages = _pages(spec)
        same_watch = all(spec.settings[key] == self.spec.settings[key] for key in WATCH_SETTINGS)
        if not same_fetch or not same_watch or spec.pod != self.spec.pod:
            self._stream.server = _server_watch(spec)
        if not same_fetch or any(spec.settings[k] != self.spec.settings[k] for k in CANARY):
            self._canary = _canary(spec)
        self.spec = spec

    def _publish(
        self, t_s: float, diagnoses: Sequence[Verdict], restart: Restart | None
    ) -> float | None:
        error = self._stream.monitor.last_error
        tiered = tuple(with_tier(diagnosis, self.spec, self.profile) for diagnosis in diagnoses)
        engines = engine_cycles(diagnoses, tiered, self._stream.monitor, restart)
        self.cycles += 1
        self._failures += error is not None
        self._failing = self._failing + 1 if error is not None else 0
        # No diagnoses: the page is not newer than the last one, so the last diagnoses still hold.
        self._diagnoses = tiered or self._diagnoses
        usual_s = float(self.spec.settings["interval_s"])
        next_s = self._pages.due_in_s()
        # No backoff while the server starts: it is back soon, and a long pause would hide that.
        if next_s is None and error is not None and not self._stream.server_state.is_starting:
            next_s = backoff_s(usual_s, failing=self._failing, jitter=self._jitter())
        heavy, name = self._sinks.heavy, self.spec.name
        if self._cpu_s > max(CPU_SHARE * usual_s, CPU_FREE_S) and not self.spec.played:
            heavy.add(name)
            next_s = max(next_s or usual_s, self._cpu_s * len(heavy) / CPU_SHARE)
        else:
            heavy.discard(name)
        state = self._state(t_s, usual_s if next_s is None else next_s, self._spent_s)
        with self._publish_lock:
            if self._retired:
                return None
            message = None if error is None else str(error)
            cycle = Cycle(t_s, self.spec.name, self.spec.labels, engines, message)
            self._sinks.board.put(state)
            self._sinks.store(cycle)
            self._sinks.notify(state)
        self._changes.scraped(error, state.interval_s)
        restarted = {(e.diagnosis.model, e.diagnosis.engine) for e in engines if e.restart}
        self._changes.diagnosed(diagnoses, restarted)
        return next_s

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


def _pages(spec: TargetSpec) -> LivePages | PlayedPages:
    return PlayedPages(spec.address, spec.name) if spec.played else LivePages(spec)


def _canary(spec: TargetSpec) -> Canary | None:
    is_on = any(spec.settings[key] for key in CANARY_ON)
    return Canary(spec.address, spec.settings) if is_on and not spec.played else None


def _server_watch(spec: TargetSpec) -> ServerWatch | None:
    return None if spec.played else server_watch(spec.address, spec.settings, spec.pod)
