"""Diagnoses one engine over time from its pages and its learned baselines. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.samples import Page
from kneewatch.collector.scrape_history import Column, History, Restart
from kneewatch.collector.signals.signal import Reading, Signal, SignalSet, metrics_of
from kneewatch.collector.signals.vllm import VLLM_SIGNALS
from kneewatch.collector.window import Window
from kneewatch.diagnose.causes import availability as observer
from kneewatch.diagnose.causes.bottleneck import unseen_host
from kneewatch.diagnose.causes.evidence import Cause, Counterfactual, Facts, ReplacedProcess
from kneewatch.diagnose.causes.lora_adapters import LORA_INFO, adapters_seen
from kneewatch.diagnose.causes.ranking import BY_ID, STREAKS, conclude, moved_families, over, ranked
from kneewatch.diagnose.causes.workload import LENGTH_POINTS
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.server_facts import CanaryState, ServerFacts
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.counterfactual import counterfactuals
from kneewatch.diagnose.engine.diagnosis import (
    NO_STAGE,
    CauseTracker,
    Diagnosis,
    LogFailure,
    health,
    judged_against,
    symptoms,
    worst_of,
)
from kneewatch.diagnose.gpu import GpuReading
from kneewatch.diagnose.learned.derived_signals import (
    PREFILL_SILENCE,
    STALL,
    Streaks,
    arrivals_since_last,
    derive,
    increase_since_last,
    recent,
    unused,
)
from kneewatch.diagnose.learned.knee import LiveKnee, same_launch
from kneewatch.diagnose.learned.kv_forecast import KvForecaster
from kneewatch.diagnose.learned.length_drift import ANSWERS, Departure, Drift, OutputLengths
from kneewatch.diagnose.learned.live_workload import WorkloadWatch
from kneewatch.diagnose.learned.slo_forecast import SloForecaster
from kneewatch.diagnose.learned.slow_trends import SlowTrends
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.sizing.benchmark.operating_point import Comparison
from kneewatch.rules.baseline import (
    FAMILIES,
    LENGTHS,
    QUEUE_MOVES,
    QUIET_WAITING,
    STAGE_MOVES,
    Baseline,
)
from kneewatch.rules.cascade import EVICTS, Cascade, lacking
from kneewatch.rules.formatting import quantity
from kneewatch.rules.rule import LONG_WINDOWS, WARNING, Finding, Rule, RuleBook

if TYPE_CHECKING:
    from kneewatch.diagnose.recommend.adviser import Adviser

Values = Mapping[str, float | None]

METRICS_READ = metrics_of(VLLM_SIGNALS) | {LORA_INFO}
"""Metrics that signals are computed from; a quarter of a page's counters belong to other
metrics."""


class Learned:
    """What was learned about one engine: baselines, knee, output lengths, forecasts.

    Baselines and the knee survive a restart of the server. A changed launch configuration resets
    the knee.
    """

    def __init__(self, profile: Profile) -> None:
        window_s = profile.window_s
        self._profile = profile
        expected = profile.expected_prefix_hit_ratio
        self.baseline = Baseline(
            window_s=window_s, stated={} if expected is None else {"prefix_hit_ratio": expected}
        )
        self.workload = WorkloadWatch(profile.stated, window_s=window_s)
        self.knee = self._new_knee()
        self._launch: Mapping[str, str] = {}
        self.slow_trends = SlowTrends()
        self._lengths = OutputLengths(
            window_s=window_s,
            longest_s=LONG_WINDOWS * window_s,
            stated=self.workload.points.get(ANSWERS, ()),
        )
        self._forecaster = KvForecaster(window_s=window_s, ahead_s=profile.kv_horizon_s)
        self._slo_forecaster = SloForecaster(
            window_s=window_s, ttft_p99_s=profile.targets.ttft_p99_s, seats=profile.stated.seats
        )

    def _new_knee(self) -> LiveKnee:
        return LiveKnee(window_s=self._profile.window_s, targets=self._profile.targets)

    def forecasts(
        self, t_s: float, values: Values, *, arrivals: float | None
    ) -> dict[str, float | None]:
        """The forecast signals after a scrape with these values.

        `arrivals`: number of requests that arrived since the previous scrape.
        """
        exhausted = self._forecaster.update(t_s, values, arrivals=arrivals)
        return exhausted | self._slo_forecaster.update(t_s, values)

    def set_seats(self, seats: float | None) -> None:
        """Set the launch's limit on running requests; None if unknown."""
        self._slo_forecaster.seats = seats

    def output_drift(self, history: History, window: Window, values: Values) -> Drift | None:
        """How far output lengths moved from quiet times; None unless more outputs end at their
        limit."""
        points = values.get("finished_length_drift_points") or 0.0
        return self._lengths.drift(history, window) if points >= LENGTH_POINTS else None

    def endless_outputs(self, history: History, window: Window, values: Values) -> Departure | None:
        """How many outputs far exceed the stated lengths; None unless many outputs end at their
        limit."""
        at_limit = values.get("finished_length_ratio") or 0.0
        return self._lengths.endless(history, window) if at_limit >= LENGTH_POINTS else None

    def learn(self, t_s: float, values: Values, window: Window, families: Collection[str]) -> None:
        """Add a scrape during which nothing disturbs these families of signals."""
        self.baseline.learn(t_s, values, families)
        if LENGTHS in families:
            self._lengths.learn(t_s, window)

    def set_launch(self, config: Mapping[str, str]) -> None:
        """Set the launch configuration that the server exports; if it changed, the knee is
        reset."""
        if config == self._launch:
            return
        if config and self._launch and not same_launch(config, self._launch):
            self.knee = self._new_knee()
        self._launch = config or self._launch

    def reset(self) -> None:
        """Forget trends and durations, because the process was replaced or the clock was set
        back."""
        self._forecaster.forget()
        self._slo_forecaster.forget()
        self.slow_trends.forget()
        self.workload.forget()


# --- Diagnosing one engine ------------------------------------------------------------------------


RESTARTS_KEPT = 16
LAST_PAGE = (
    ("running", "{} running"),
    ("waiting", "{} waiting"),
    ("kv_usage_ratio", "KV {}"),
)
"""Signals of a process's last page that are kept after the process was replaced."""

SCRAPES_IN_WINDOW = 2.2
"""The window is at least this many scrape intervals long, so it always contains two scrapes."""

VANISHED_KEPT_S = 3600.0
"""Seconds for which an engine is still reported after it left a readable page.

If an orchestrator names the replicas, they are forgotten sooner, because they get replaced.
"""

UNREAD = "the page could not be read"
GONE = "the engine is not on the page"
"""Reasons why an engine could not be diagnosed."""


class Catalogue(Struct, frozen=True):
    """The signals and rules of a profile, built once and shared by all engines."""

    signals: tuple[Signal, ...]
    rules: tuple[Rule, ...]
    core: tuple[str, ...]
    unstated: Mapping[str, str]
    split: Comparison | None = None

    @classmethod
    def of(cls, profile: Profile) -> Catalogue:
        """The catalogue of a profile."""
        signals = profile.signals()
        core = tuple(signal.key for signal in signals if signal.core)
        return cls(signals, profile.rules(), core, profile.unstated(), profile.split())


class EngineMonitor:
    """Monitors one engine over time."""

    def __init__(self, target: str, key: EngineKey, profile: Profile, catalogue: Catalogue) -> None:
        self.target, self.key, self.profile = target, key, profile
        self._catalogue = catalogue
        self.history = History(keep_s=LONG_WINDOWS * profile.window_s, metrics=METRICS_READ)
        self._signals = SignalSet(catalogue.signals, self.history)
        self._rules = RuleBook(catalogue.rules, scale=profile.scale)
        evicting = next(rule for rule in catalogue.rules if rule.id == "KV-EVICT")
        self._cascade = Cascade(scale=profile.scale, targets=profile.targets, evicting=evicting)
        self.learned = Learned(profile)
        self._streaks = Streaks(STREAKS, profile.targets)
        self._tracker = CauseTracker(scale=profile.scale)
        self._adviser: Adviser | None = None
        self._stated: Stated = profile.stated
        self._weekly_peak_requests: float | None = None
        self._unless: tuple[str, tuple[Counterfactual, ...]] = ("", ())
        self._restarts: deque[ReplacedProcess] = deque(maxlen=RESTARTS_KEPT)
        self._newest_read: Diagnosis | None = None
        self._vanished, self._blind = 0, 0
        self._appeared_s = float("-inf")
        self._disturbed_s = dict.fromkeys(FAMILIES, float("-inf"))
        self._unknown: tuple[Mapping[str, tuple[str, ...]], list[str]] = ({}, [])
        self.newest: Diagnosis | None = None
        """The last diagnosis, also of an unreadable page; None before the first."""
        self.restart: Restart | None = None
        """The restart that the newest page showed; None without one."""
        self.died: Cause | None = None
        """Why the engine died, by the server's log; None again after a token or a restart."""
        self.host: Mapping[str, float] = {}
        """Signals of the server's process on this node; empty where it runs elsewhere."""
        self.canary: CanaryState | None = None
        """What canary requests to the server showed; None where none is sent."""
        self.generated_s = float("-inf")
        """Time of the newest page that showed more generated tokens than the one before."""
        self._server: ServerFacts | None = None
        self._server_gpus = profile.stated.server_gpus

    def set_weekly_peak(self, peak_requests: float | None) -> None:
        """Set the most requests that ran or waited at once within the last week; None if
        unknown."""
        self._weekly_peak_requests = peak_requests

    def set_server(self, facts: ServerFacts, stated: Stated) -> None:
        """Set the facts about the server; used from the next page on."""
        self._server = facts
        self._stated = stated
        if self._adviser is not None:
            self._adviser.set_stated(stated)
        self._server_gpus = stated.server_gpus
        self.learned.set_seats(stated.seats)

    def set_usual(self, usual: Mapping[str, float]) -> None:
        """Set the usual values, at this hour of the week, of the signals with a baseline."""
        self.learned.baseline.season = usual

    def page(
        self,
        t_s: float,
        page: Page,
        binding: EngineBinding,
        process_start: int | None,
        gpus: GpuReading,
    ) -> Diagnosis | None:
        """The diagnosis after one scrape; None if the scrape is not newer than the last one."""
        steps = self.history.clock_steps
        before = len(self.history.times), self.history.times[-1:]
        started_s = self.history.started_s
        restart = self.history.append(t_s, page, binding, process_start)
        if (len(self.history.times), self.history.times[-1:]) == before:
            return None
        if restart is not None or self.history.clock_steps != steps:
            self._reset(t_s, restart, started_s)
        if self.died is not None and (restart is not None or self._works_since(self.died.since_s)):
            self.died = None
        if increase_since_last(self.history, "generation_tokens"):
            self.generated_s = t_s
        if self._vanished or before[0] == 0:
            self._appeared_s = t_s
        self._vanished = 0
        window = Window(self.history, now_s=t_s, range_s=self._range_s(t_s))
        reading = self._signals.read(window)
        self.newest, self.restart = self._judge(t_s, window, reading, gpus), restart
        self._newest_read = self.newest
        return self.newest

    def _works_since(self, since_s: float) -> bool:
        """Whether the engine generated a token between two scrapes after this time."""
        between = self.history.times[-2:-1] >= [since_s]
        return between and bool(increase_since_last(self.history, "generation_tokens"))

    def counters(self) -> tuple[tuple[Column, ...], tuple[float, ...]]:
        """The counter columns, including histogram parts, and their values on the newest page.

        Shapes: both (counters,). Values that the page lacks are NaN. The tuple of columns is the
        same object until a column is added.
        """
        newest = self.history.frames[-1].counters if self.history.frames else ()
        return self.history.counters.names, tuple(newest)

    @property
    def config(self) -> Mapping[str, str]:
        """The labels of cache_config_info on the newest page."""
        return self.history.info.get("cache_config_info", {})

    def _range_s(self, t_s: float) -> float:
        """The window in seconds. It is shorter until a whole window was seen, and longer if scrapes
        are rare."""
        times = self.history.times
        window_s = self.profile.window_s
        if len(times) < 2:
            return window_s
        rare_s = min(SCRAPES_IN_WINDOW * (times[-1] - times[-2]), LONG_WINDOWS * window_s)
        return min(max(window_s, rare_s), t_s - times[0])

    @property
    def last_s(self) -> float:
        """Time of the newest page that had this engine; -inf before the first."""
        return self.history.times[-1] if self.history.times else float("-inf")

    def vanished(self, t_s: float, present: Collection[EngineMonitor]) -> Diagnosis | None:
        """The diagnosis while the page is readable but lacks this engine; None once forgotten.

        `present` are the engines that are on the page.
        """
        successor = self._successor(present)
        kept_s = VANISHED_KEPT_S
        if successor is not None:
            kept_s = self.profile.window_s
        elif self.key.replica:
            kept_s = LONG_WINDOWS * self.profile.window_s
        if t_s - self.last_s > kept_s:
            return None
        self._vanished += 1
        cause = observer.vanished(
            _engine_name(self.key),
            self._vanished,
            self.last_s,
            successor=None if successor is None else _engine_name(successor.key),
        )
        return self.unreadable(t_s, cause, cause.evidence[0].text, GONE)

    def _successor(self, present: Collection[EngineMonitor]) -> EngineMonitor | None:
        """The engine that replaced this one; None if none did.

        It is a newer engine with the same number and replica. If all engines on the page are newer,
        it may be any of them.
        """
        newcomers = [engine for engine in present if engine._appeared_s > self.last_s]
        place = self.key.engine, self.key.replica
        replacements = [
            engine for engine in newcomers if (engine.key.engine, engine.key.replica) == place
        ]
        return next(
            iter(replacements or (newcomers if len(newcomers) == len(present) else ())), None
        )

    @property
    def was_idle(self) -> bool:
        """Whether the newest readable page showed no requests and no problem."""
        newest = self._newest_read
        return newest is not None and newest.values.get("running") == 0 and not _broke_off(newest)

    def unreadable(
        self,
        t_s: float,
        cause: Cause,
        why: str,
        seen: str = UNREAD,
        log: LogFailure | None = None,
    ) -> Diagnosis:
        """The diagnosis after a scrape without data of this engine.

        `log` is the failure that the server's log shows; None if it shows none.
        """
        self.restart = None
        concluded = [cause] if log is None else [cause, log.cause]
        causes = ranked([replace(concluded_, seen_s=t_s) for concluded_ in concluded])
        self.newest = Diagnosis(
            t_s, self.target, self.key.engine, self.key.model, None,
            health(causes[0].severity, readable=False), None, causes, [], [], {},
            [f"every signal: {why}", *self._canary_words(), *(log.unknown if log else ())],
            0.0, f"nothing: {seen}",
            recommendations=log.recommendations if log else (), server=self._server,
        )  # fmt: skip
        return self.newest

    def _reset(self, t_s: float, restart: Restart | None, started_s: float | None) -> None:
        """Forget trends and durations: the process was replaced or the clock was set back.

        `started_s` is when the earlier process had started.
        """
        if restart is not None:
            self._restarts.append(_replaced(restart.t_s, started_s, self._newest_read))
        self._disturbed_s = dict.fromkeys(FAMILIES, t_s)
        self._rules.forget()
        self._cascade.forget()
        self._streaks.forget()
        self._tracker.forget()
        if self._adviser is not None:
            self._adviser.restarted()
        self.learned.reset()

    def _judge(self, t_s: float, window: Window, reading: Reading, gpus: GpuReading) -> Diagnosis:
        profile, learned, config = self.profile, self.learned, self.config
        learned.set_launch(config)
        derived, notes = derive(reading.values, window, learned.baseline, profile.targets)
        arrivals = arrivals_since_last(self.history)
        forecasts = learned.forecasts(t_s, reading.values, arrivals=arrivals)
        workload = learned.workload.update(t_s, self.history)
        values = {**reading.values, **derived, **forecasts, **gpus.values}
        values |= workload.values() if workload else {}
        if self.canary is not None:
            values["canary_s"] = self.canary.latency_s
        values |= self.host
        values |= learned.slow_trends.update(t_s, values)
        idle = not (values.get("running_max") or values.get("waiting"))
        stage = self._cascade.judge(
            t_s, values, preempted=increase_since_last(self.history, "num_preemptions")
        )
        unjudged = lacking(stage, values)
        values["cascade_stage"] = None if unjudged else float(stage.number)
        values["cascade_severity"] = None if unjudged else float(stage.severity)
        streaks_s = self._streaks.update(t_s, self.history, values)
        values[STALL] = streaks_s.get("stalled", 0.0)
        values[PREFILL_SILENCE] = self._streaks.prefill_silence_s(self.history, values)
        findings = self._rules.judge(t_s, values, reading.missing, notes, idle=idle)
        facts = Facts(
            now_s=t_s,
            window_s=window.range_s,
            scale=profile.scale,
            observed_s=t_s - self.history.first_s,
            values=values,
            recent=recent(self.history, t_s, window.range_s),
            streaks_s=streaks_s,
            missing=reading.missing,
            findings={finding.rule.id: finding for finding in findings},
            stage=stage,
            baseline=learned.baseline,
            config=config,
            targets=profile.targets,
            restarts=self._restarts,
            gpus=gpus.states,
            gpus_guessed=gpus.guess and len(gpus.states) != self._server_gpus,
            gpus_lost=gpus.lost,
            adapters=adapters_seen(window) if values.get("waiting_deferred") else (),
            knee=learned.knee.update(t_s, values),
            curve=learned.knee.curve,
            split=self._catalogue.split,
            lengths=learned.output_drift(self.history, window, values),
            endless=learned.endless_outputs(self.history, window, values),
            workload=workload,
        )
        causes, lacks_core = self._causes(facts, findings, reading, window)
        known_stage = None if unjudged else stage
        readable = not lacks_core and window.scrapes > 1
        return Diagnosis(
            t_s=t_s,
            target=self.target,
            engine=self.key.engine,
            model=self.key.model,
            tier=None,
            health=health(worst_of(causes, known_stage, findings), readable=readable),
            stage=known_stage,
            causes=causes,
            symptoms=symptoms(facts, causes),
            findings=findings,
            values=values,
            unknown=[
                *_without_stage(unjudged, window.scrapes),
                *self._canary_words(),
                *unseen_host(facts),
                *self._unknowns(reading),
                *gpus.unknown,
            ],
            window_s=window.range_s,
            judged_against=judged_against(
                profile.targets, has_baseline=learned.baseline.get("ttft_p99_s") is not None
            ),
            recommendations=self._advised(facts, causes) if causes else (),
            server=self._server,
        )

    def _causes(
        self, facts: Facts, findings: list[Finding], reading: Reading, window: Window
    ) -> tuple[list[Cause], bool]:
        concluded = conclude(facts)
        if self.died is not None:
            concluded.append(self.died)
        unanswered = None if self.canary is None else observer.unanswered(self.canary, facts)
        if unanswered is not None and all(cause.id != unanswered.id for cause in concluded):
            concluded.append(unanswered)
        self._blind = self._blind + 1 if observer.is_blind(facts) else 0
        missing = observer.metrics_missing(
            facts,
            self._catalogue.core,
            reading.impossible,
            blind=self._blind,
            unused=self._blind > 0 and unused(self.history),
        )
        if missing is not None:
            concluded.append(missing)
        causes = ranked(self._tracker.update(facts.now_s, concluded, over(facts)))
        if causes:
            causes[0] = replace(causes[0], unless=self._turning_points(facts, causes[0]))
        # Learn last: the counterfactuals need the baseline that the causes were concluded from.
        self._learn(facts, concluded, findings, window)
        return causes, missing is not None

    def _turning_points(self, facts: Facts, first: Cause) -> tuple[Counterfactual, ...]:
        """Counterfactuals of the first cause.

        During its clear time, those of the last scrape at which the cause was concluded.
        """
        cause, last_points = self._unless
        points = last_points if cause == first.id else ()
        if first.seen_s == facts.now_s:
            points = counterfactuals(BY_ID[first.id].stands, facts, first, points)
        self._unless = (first.id, points)
        return points

    def _learn(
        self, facts: Facts, concluded: list[Cause], findings: list[Finding], window: Window
    ) -> None:
        """Add the scrape to the baselines of the families that no recent problem disturbed."""
        disturbed = moved_families(concluded, facts)
        disturbed.update(
            family
            for finding in findings
            if finding.severity and finding.held >= WARNING
            for family in finding.rule.moves
        )
        if facts.stage.number >= EVICTS:
            disturbed.update(STAGE_MOVES)
        if facts.get("waiting_avg") >= QUIET_WAITING:
            disturbed.update(QUEUE_MOVES)
        for family in disturbed:
            self._disturbed_s[family] = facts.now_s
        if facts.observed_s < self.profile.window_s / 2 or not facts.get("arrival_per_s"):
            return
        settled_s = facts.now_s - facts.window_s
        families = [family for family, t_s in self._disturbed_s.items() if t_s < settled_s]
        if families:
            self.learned.learn(facts.now_s, facts.values, window, families)

    def _advised(self, facts: Facts, causes: list[Cause]) -> tuple[Recommendation, ...]:
        """The recommendations for these causes."""
        if self._adviser is None:
            # Imported here: most servers need no advice, and this import is slow.
            from kneewatch.diagnose.recommend.adviser import Adviser

            self._adviser = Adviser(self._stated)
        self._adviser.weekly_peak_requests = self._weekly_peak_requests
        return self._adviser.advise(facts, causes)

    def _canary_words(self) -> list[str]:
        refused = "" if self.canary is None else self.canary.refused
        return [f"canary: {refused}"] if refused else []

    def _unknowns(self, reading: Reading) -> list[str]:
        if self._unknown[0] is not reading.missing:
            signals = {s.key: s for s in self._catalogue.signals}
            lines = [
                f"{key}: {observer.lack_words(metrics, reading.impossible)}"
                + (f" (needs {signals[key].needs})" if signals[key].needs else "")
                for key, metrics in reading.missing.items()
            ]
            lines += [f"{key}: {why}" for key, why in self._catalogue.unstated.items()]
            self._unknown = (reading.missing, lines)
        return self._unknown[1]


def _replaced(t_s: float, started_s: float | None, newest: Diagnosis | None) -> ReplacedProcess:
    """A description of the replaced process, from its last diagnosis.

    `t_s` is when the next process was first seen.
    """
    if newest is None:
        return ReplacedProcess(t_s)
    numbers = [
        words.format(quantity(key, value))
        for key, words in LAST_PAGE
        if (value := newest.values.get(key)) is not None
    ]
    uptime_s = None if started_s is None else max(0.0, newest.t_s - started_s)
    return ReplacedProcess(
        t_s, uptime_s, ", ".join([*numbers, *_problems(newest)]), broke_off=_broke_off(newest)
    )


def _problems(diagnosis: Diagnosis) -> list[str]:
    return [cause.id for cause in diagnosis.causes if cause.severity >= WARNING]


def _broke_off(last: Diagnosis) -> bool:
    """Whether a process that ended after this diagnosis had requests or a problem.

    If so, it was not drained on purpose.
    """
    in_flight = (last.values.get("running") or 0.0) + (last.values.get("waiting") or 0.0)
    return in_flight >= 1 or bool(_problems(last))


def _engine_name(key: EngineKey) -> str:
    return f"engine {key.engine} of {key.model}"


def _without_stage(unjudged: Sequence[str], scrapes: int) -> list[str]:
    """A line with the reason for an unknown stage; none if the stage is known."""
    if not unjudged:
        return []
    if scrapes < 2:
        return [f"{NO_STAGE}the window holds one scrape, it needs two"]
    return [f"{NO_STAGE}it needs {', '.join(unjudged)}"]
