"""Diagnoses one target and its engines over time, page by page. Pure: time comes with each page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from kneewatch.collector.errors import CollectError
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.names.vllm_resolver import EngineBinding, resolve
from kneewatch.collector.page import Page
from kneewatch.collector.scrape_history import Restart
from kneewatch.diagnose.capacity import StatedServer
from kneewatch.diagnose.causes import availability as observer
from kneewatch.diagnose.deployment.server_state import NO_STATE, CanaryState, ServerState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.judge import Explain, Judge, NewAdviser, Spell
from kneewatch.diagnose.engine.reader import EngineReader
from kneewatch.diagnose.ranking import ENGINE_DIED
from kneewatch.diagnose.values import NO_GPUS, GpuReading, Values
from kneewatch.diagnose.verdict import Cause, LogFailure, Server, Verdict
from kneewatch.rules.formatting import duration
from kneewatch.rules.rule import LONG_WINDOWS

# --- Monitors one engine over time ----------------------------------------------------------------


VANISHED_KEPT_S = 3600.0
"""Seconds for which an engine is still reported after it left a readable page.

If an orchestrator names the replicas, they are forgotten sooner, because they get replaced.
"""

UNREAD = "the page could not be read"
GONE = "the engine is not on the page"
"""Reasons why an engine could not be diagnosed."""


class EngineMonitor:
    """Monitors one engine over time: `reader` reads its pages, `judge` judges what was read."""

    def __init__(self, key: EngineKey, profile: Profile, judge: Judge) -> None:
        self.key, self.profile, self.judge = key, profile, judge
        self.reader = EngineReader(profile)
        self._vanished = 0
        self._appeared_s = float("-inf")
        self.newest: Verdict | None = None
        """The last diagnosis, also of an unreadable page; None before the first."""
        self.restart: Restart | None = None
        """The restart that the newest page showed; None without one."""
        self.host: Mapping[str, float] = {}
        """Signals of the server's process on this node; empty where it runs elsewhere."""
        self.canary: CanaryState | None = None
        """What canary requests to the server showed; None where none is sent."""
        self.generated_s = float("-inf")
        """Time of the newest page that showed more generated tokens than the one before."""

    def read(
        self,
        t_s: float,
        page: Page,
        binding: EngineBinding,
        process_start: int | None,
        gpus: GpuReading,
    ) -> Values | None:
        """The values of one scrape; None if the scrape is not newer than the last one."""
        is_first = self.reader.last_s == float("-inf")
        values = self.reader.read(
            t_s, page, binding, process_start, gpus=gpus, host=self.host, canary=self.canary
        )
        if values is None:
            return None
        if values.generated:
            self.generated_s = t_s
        if self._vanished or is_first:
            self._appeared_s = t_s
        self._vanished = 0
        self.restart = self.reader.restart
        return values

    def judged(self, t_s: float, values: Values) -> Verdict:
        """The diagnosis by the values that were read at `t_s`."""
        self.newest = diagnosis = self.judge.step(t_s, values)
        return diagnosis

    def vanished(self, t_s: float, present: Collection[EngineMonitor]) -> Verdict | None:
        """The diagnosis while the page is readable but lacks this engine; None once forgotten.

        `present` are the engines that are on the page.
        """
        successor = self._successor(present)
        kept_s = VANISHED_KEPT_S
        if successor is not None:
            kept_s = self.profile.window_s
        elif self.key.replica:
            kept_s = LONG_WINDOWS * self.profile.window_s
        if t_s - self.reader.last_s > kept_s:
            return None
        self._vanished += 1
        cause = observer.vanished(
            _engine_name(self.key),
            self._vanished,
            self.reader.last_s,
            successor=None if successor is None else _engine_name(successor.key),
        )
        return self.unreadable(t_s, cause, cause.evidence[0].text, seen=GONE)

    def _successor(self, present: Collection[EngineMonitor]) -> EngineMonitor | None:
        """The engine that replaced this one; None if none did.

        It is a newer engine with the same number and replica. If all engines on the page are newer,
        it may be any of them.
        """
        newcomers = [engine for engine in present if engine._appeared_s > self.reader.last_s]
        place = self.key.engine, self.key.replica
        replacements = [
            engine for engine in newcomers if (engine.key.engine, engine.key.replica) == place
        ]
        return next(
            iter(replacements or (newcomers if len(newcomers) == len(present) else ())), None
        )

    def unreadable(
        self,
        t_s: float,
        cause: Cause,
        why: str,
        *,
        seen: str = UNREAD,
        log: LogFailure | None = None,
    ) -> Verdict:
        """The diagnosis after a scrape without data of this engine.

        `log` is the failure that the server's log shows; None if it shows none.
        """
        self.restart = None
        self.newest = self.judge.unreadable(t_s, cause, why, seen, canary=self.canary, log=log)
        return self.newest


def _engine_name(key: EngineKey) -> str:
    return f"engine {key.engine} of {key.model}"


# --- Monitors one target: reads its pages, and judges its engines and itself ----------------------


SLOW_PAGE_S = 2.0
"""Pages that take longer to fetch are reported, because scraping them costs the server time."""


ENGINES_MAX = 512
"""Most engines kept per target, including vanished ones.

Without this limit, labels that change with every scrape would use up the memory.
"""


TOO_MANY = (
    f"engines: this page has more than {ENGINES_MAX} by the labels model_name and engine; the "
    "others are ignored"
)


Compare = Callable[[float, Sequence[Verdict]], list[Verdict]]
"""Adds to the diagnoses of the engines of a page, at a time, the causes found by comparing them."""


JudgeRouter = Callable[[float, Page], Verdict | None]
"""Judges the page of a router at a time; None if it is no router's page."""


class TargetMonitor:
    """Monitors one target over time: its engines and its failed scrapes.

    Without `new_adviser`, diagnoses have no recommendations. `new_comparison` takes the profile's
    scale; without it, the engines of a page are not compared. `new_router` takes the name and the
    profile; without it, a router's page counts as unreadable. `spell`: for engines other than vLLM.
    Without `explain`, causes have no counterfactuals.
    """

    def __init__(
        self,
        name: str,
        profile: Profile,
        new_adviser: NewAdviser | None = None,
        new_comparison: Callable[[float], Compare] | None = None,
        new_router: Callable[[str, Profile], JudgeRouter] | None = None,
        spell: Spell | None = None,
        explain: Explain | None = None,
    ) -> None:
        self.name, self.profile = name, profile
        self._new_comparison, self._new_router = new_comparison, new_router
        self._of_judges = new_adviser, spell, explain
        self._judge_router: JudgeRouter | None = None
        self._engines: dict[EngineKey, EngineMonitor] = {}
        self._failures, self._failing_since_s = 0, 0.0
        self._longest_start_s = 0.0
        self._has_too_many, self._has_warned = False, False
        self._compare: Compare | None = None
        self._server: tuple[Server, StatedServer] | None = None
        self._host: Mapping[str, float] = {}
        self._usual: Mapping[str, float] = {}
        self._log_failure: LogFailure | None = None
        self.last_error: CollectError | None = None
        """Why the newest scrape failed; None where it succeeded."""

    @property
    def engines(self) -> Collection[EngineMonitor]:
        """The engines on the newest page and engines that left the page recently."""
        return self._engines.values()

    def set_server(self, facts: Server, stated: StatedServer) -> None:
        """Set the facts about the server and, in `stated`, the input of the recommendations.

        Both are used from the next page on.
        """
        self._server = facts, stated
        for engine in self._engines.values():
            engine.judge.set_server(facts, stated)

    @property
    def server(self) -> Server | None:
        """The facts about the server; None until they have been read."""
        return None if self._server is None else self._server[0]

    def set_log_failure(self, failure: LogFailure | None, *, past: bool = False) -> None:
        """Set the failure at the end of the server's log, from the next page on; None if none.

        An engine may die while its page is still readable. If the page is readable, two kinds of
        failures are ignored: a failed start, and a failure that was `past` when the log was first
        read.
        """
        self._log_failure = failure
        died = failure is not None and failure.cause.id == ENGINE_DIED and not past
        for engine in self._engines.values():
            engine.judge.died = failure.cause if failure is not None and died else None

    def set_canary(self, state: CanaryState) -> None:
        """Set the results of the canary requests, from the next page on.

        If an engine has generated tokens since the first failed request, the server is slow, not
        stalled.
        """
        generated_s = max((engine.generated_s for engine in self._engines.values()), default=0.0)
        if state.failures and generated_s >= state.since_s:
            state = replace(state, failures=0)
        for engine in self._engines.values():
            engine.canary = state

    def set_host(self, signals: Mapping[str, float]) -> None:
        """Set the signals of the server's process on this node; used from the next page on."""
        self._host = signals
        for engine in self._engines.values():
            engine.host = signals

    def set_usual(self, usual: Mapping[str, float]) -> None:
        """Set the usual values, at this hour of the week, of all engines' signals."""
        self._usual = usual
        for engine in self._engines.values():
            engine.judge.set_usual(usual)

    def _new_engine(self, key: EngineKey) -> EngineMonitor:
        judge = Judge(self.name, key, self.profile, *self._of_judges)
        engine = EngineMonitor(key, self.profile, judge)
        engine.host = self._host
        engine.judge.set_usual(self._usual)
        if self._server is not None:
            engine.judge.set_server(*self._server)
        return engine

    def page(
        self, t_s: float, page: Page, gpus: GpuReading = NO_GPUS, *, fetch_s: float | None = None
    ) -> list[Verdict]:
        """A diagnosis for each engine on the page.

        `gpus` are the signals of the target's GPUs. `fetch_s` is the duration of the page's GET;
        None if the page was not fetched now.
        """
        return self.read(t_s, page, gpus, fetch_s=fetch_s)()

    def read(
        self, t_s: float, page: Page, gpus: GpuReading, *, fetch_s: float | None = None
    ) -> Callable[[], list[Verdict]]:
        """Read a page. Returns the function that judges it, to call before the next page is read.

        Reading the pages of many targets and then judging them costs a sixth less CPU than judging
        each when it was read: the code of one step stays in the CPU's caches.
        """
        try:
            binding = resolve(page.layout)
        except CollectError as error:
            router = self._router(t_s, page)
            diagnoses = self.failed(t_s, error) if router is None else [router]
            return lambda: diagnoses
        page = binding.completed(page)
        failures, self._failures, self.last_error = self._failures, 0, None
        read: list[tuple[EngineMonitor, Values | None]] = []
        for engine in self._admitted(binding.engines):
            monitor = self._engines.get(engine.key)
            if monitor is None:
                monitor = self._engines[engine.key] = self._new_engine(engine.key)
            values = monitor.read(t_s, page, engine, binding.process_start, gpus)
            read.append((monitor, values))
        return partial(self._judge, t_s, read, failures, fetch_s)

    def _admitted(self, engines: Sequence[EngineBinding]) -> Sequence[EngineBinding]:
        """The page's engines to monitor: at most ENGINES_MAX, and first those already monitored.

        If there are too many in all, forgets the engines that left the page longest ago.
        """
        kept = self._engines
        if len(kept.keys() | {engine.key for engine in engines}) <= ENGINES_MAX:
            return engines
        self._has_too_many = True
        engines = sorted(engines, key=lambda engine: engine.key not in kept)[:ENGINES_MAX]
        present = {engine.key for engine in engines}
        gone = sorted(kept.keys() - present, key=lambda key: kept[key].reader.last_s)
        for key in gone[: len(gone) + len(present) - ENGINES_MAX]:
            del kept[key]
        return engines

    def _router(self, t_s: float, page: Page) -> Verdict | None:
        """The verdict on a router whose page this is; None if it is no router's."""
        if self._judge_router is None and self._new_router is not None:
            self._judge_router = self._new_router(self.name, self.profile)
        verdict = None if self._judge_router is None else self._judge_router(t_s, page)
        if verdict is not None:
            self._failures, self.last_error = 0, None
        return verdict

    def _judge(
        self,
        t_s: float,
        read: Sequence[tuple[EngineMonitor, Values | None]],
        failures: int,
        fetch_s: float | None,
    ) -> list[Verdict]:
        diagnoses = [engine.judged(t_s, values) for engine, values in read if values is not None]
        present = [engine for engine, _ in read]
        if failures and any(engine.restart for engine in present):
            self._longest_start_s = max(self._longest_start_s, t_s - self._failing_since_s)
        if len(diagnoses) > 1:
            diagnoses = self._compared(t_s, diagnoses, present)
        if len(present) < len(self._engines):
            diagnoses += self._vanished(t_s, present)
        return self._with_warnings(diagnoses, fetch_s)

    def _compared(
        self, t_s: float, diagnoses: list[Verdict], engines: Sequence[EngineMonitor]
    ) -> list[Verdict]:
        """The diagnoses of engines that share a page, with causes found by comparing these
        engines."""
        replicas = Counter((engine.key.model, engine.key.replica) for engine in engines)
        for engine in engines:
            engine.judge.learned.workload.set_engines(
                replicas[engine.key.model, engine.key.replica]
            )
        if self._new_comparison is None:
            return diagnoses
        if self._compare is None:
            self._compare = self._new_comparison(self.profile.scale)
        by_newest = {id(engine.newest): engine for engine in engines}
        compared = self._compare(t_s, diagnoses)
        for before, after in zip(diagnoses, compared, strict=True):
            by_newest[id(before)].newest = after
        return compared

    def _with_warnings(self, diagnoses: list[Verdict], fetch_s: float | None) -> list[Verdict]:
        """The diagnoses, with warnings added to the first one.

        The warnings are about a slow page and, once, about an exceeded engine limit.
        """
        if not diagnoses:
            return diagnoses
        lines = [TOO_MANY] if self._has_too_many and not self._has_warned else []
        self._has_warned = self._has_too_many
        if fetch_s is not None and fetch_s >= SLOW_PAGE_S:
            lines.append(
                f"scrape: the page took {duration(fetch_s)}; check the CPU of vLLM's API server, "
                "and raise interval_s"
            )
        if lines:
            diagnoses[0] = replace(diagnoses[0], unknown=[*lines, *diagnoses[0].unknown])
        return diagnoses

    def _vanished(self, t_s: float, present: Sequence[EngineMonitor]) -> list[Verdict]:
        """Diagnoses of engines that left the page. Each is reported for a while and then
        forgotten."""
        diagnoses: list[Verdict] = []
        present_keys = {engine.key for engine in present}
        for key, engine in list(self._engines.items()):
            if key in present_keys:
                continue
            diagnosis = engine.vanished(t_s, present)
            if diagnosis is None:
                del self._engines[key]
            else:
                diagnoses.append(diagnosis)
        return diagnoses

    def failed(
        self, t_s: float, error: CollectError, state: ServerState = NO_STATE
    ) -> list[Verdict]:
        """A diagnosis for each engine after a failed scrape.

        Before the first page there is one diagnosis without an engine. `state`: what else is known
        about the server.
        """
        if not self._failures:
            self._failing_since_s = t_s
        self._failures += 1
        self.last_error = error.detached()
        cause = observer.unreadable(
            error, self._failures, self._failing_since_s, state, patience_s=self._patience_s(t_s)
        )
        engines = list(self._engines.values()) or [self._new_engine(EngineKey("", ""))]
        return [
            engine.unreadable(t_s, cause, str(error), log=self._log_failure) for engine in engines
        ]

    def _patience_s(self, t_s: float) -> float:
        """Seconds for which failed scrapes may mean a planned restart.

        0 if the last pages had requests, or if scrapes have failed for longer than that.
        """
        if not self._engines or not all(engine.judge.was_idle for engine in self._engines.values()):
            return 0.0
        patience_s = observer.restart_patience_s(self._longest_start_s)
        return patience_s if t_s - self._failing_since_s < patience_s else 0.0
