"""Judges one engine over time: from its values and what was learned to its diagnosis. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from sys import intern
from typing import Protocol

import msgspec
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind
from kneewatch.collector.names.vllm_metrics import EngineKey
from kneewatch.diagnose import account_signals as account
from kneewatch.diagnose.capacity import StatedServer
from kneewatch.diagnose.causes import availability as observer
from kneewatch.diagnose.causes.bottleneck import unseen_host
from kneewatch.diagnose.causes.evidence import Facts, ReplacedProcess
from kneewatch.diagnose.causes.unexplained import Explained
from kneewatch.diagnose.deployment.server_state import CanaryState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import (
    Aftermath,
    CauseTracker,
    as_severe,
    canary_words,
    health,
    judged_against,
    proposed_document,
    silence_words,
    symptoms,
    without_stage,
)
from kneewatch.diagnose.engine.learning import Learned
from kneewatch.diagnose.latency_split import Changed, Restarted, changed, launch_changes
from kneewatch.diagnose.learned.acceptance import Deviation
from kneewatch.diagnose.learned.derived_signals import Streaks, derive
from kneewatch.diagnose.learned.knee import CurveLearner, capacity_used
from kneewatch.diagnose.learned.work import KvBalance
from kneewatch.diagnose.lengths import LiveWorkload
from kneewatch.diagnose.ranking import (
    BY_ID,
    STREAKS,
    conclude,
    disproved,
    over,
    ranked,
    without_queues,
)
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.values import Values
from kneewatch.diagnose.verdict import (
    UNKNOWN_STAGE,
    Cause,
    Evidence,
    LogFailure,
    Server,
    Verdict,
    worst_of,
)
from kneewatch.rules.cascade import lacking
from kneewatch.rules.facts import NO_TARGETS
from kneewatch.rules.formatting import quantity
from kneewatch.rules.lifecycle import Cascade, RuleState
from kneewatch.rules.rule import IN_BOUNDS, ITL, OK, TTFT, WARNING, Finding, is_queued
from kneewatch.rules.wire import to_ms

# --- A server's processes -------------------------------------------------------------------------


RESTARTS_KEPT = 16
LAST_PAGE = (("running", "{} running"), ("waiting", "{} waiting"), ("kv_usage_ratio", "KV {}"))
"""Signals of a process's last page that are kept after the process was replaced."""


def replaced(t_s: float, started_s: float | None, newest: Verdict | None) -> ReplacedProcess:
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
        t_s,
        uptime_s,
        ", ".join([*numbers, *problems(newest)]),
        broke_off=broke_off(newest),
        away_s=t_s - newest.t_s,
    )


def launch_of(server: Server | None, labels: Mapping[str, str]) -> Mapping[str, object]:
    """Version, flags and the page's labels of a process, as far as they are known."""
    return {**labels, **((server and server.launch) or {})}


def compared(cause: Cause, what: Changed) -> Cause:
    """The cause, with the restart since which latency is off as evidence."""
    restart = what.restart
    if restart is None or {TTFT, ITL}.isdisjoint(BY_ID[cause.id].moves):
        return cause
    words = f"{restart.words()}: {what.stream_words() or 'slower than before'}"
    return replace(
        cause, evidence=(*cause.evidence, Evidence("process_start", restart.t_s, None, words))
    )


def problems(diagnosis: Verdict) -> list[str]:
    return [cause.id for cause in diagnosis.causes if cause.severity >= WARNING]


def broke_off(last: Verdict) -> bool:
    """Whether a process that ended after this diagnosis had requests or a problem.

    If so, it was not drained on purpose.
    """
    in_flight = (last.values.get("running") or 0.0) + (last.values.get("waiting") or 0.0)
    return in_flight >= 1 or bool(problems(last))


# --- The judge ------------------------------------------------------------------------------------


class Adviser(Protocol):
    """Recommends changes against the causes of one engine."""

    weekly_peak_requests: float | None

    def set_stated(self, stated: StatedServer) -> None:
        """Set what is known about the server; used from the next scrape on."""
        ...

    def restarted(self) -> None:
        """Note that the process restarted."""
        ...

    def advise(
        self, facts: Facts, causes: Sequence[Cause], curve: CurveLearner | None = None
    ) -> tuple[Advice, ...]:
        """The recommendations for these causes now."""
        ...


NewAdviser = Callable[[StatedServer], Adviser]
"""Makes the adviser of one engine. The first cause of an engine calls it."""

Spell = Callable[[Verdict, EngineKind], Verdict]
"""Puts a verdict, which is in vLLM's words, in those of another engine."""

Explain = Callable[[Facts, Cause, Cause | None], Cause]
"""Adds counterfactuals to the first cause; the last one is that of an earlier scrape, with its
own."""


class Judge:
    """Judges one engine over time. It reads only values, never a page.

    Without `new_adviser`, verdicts have no recommendations; without `spell`, vLLM's words; without
    `explain`, no counterfactuals.
    """

    def __init__(
        self,
        target: str,
        key: EngineKey,
        profile: Profile,
        new_adviser: NewAdviser | None = None,
        spell: Spell | None = None,
        explain: Explain | None = None,
    ) -> None:
        self._target, self._key, self._profile = target, key, profile
        self._rules = [RuleState(rule, scale=profile.scale) for rule in profile.rules]
        evicting = next(rule for rule in profile.rules if rule.id == "KV-EVICT")
        self._cascade = Cascade(
            scale=profile.scale,
            targets=profile.targets,
            evicting=evicting,
            may_queue=profile.throughput_only,
        )
        self.learned = Learned(profile)
        self._streaks = Streaks(STREAKS)
        self._kv_balance = KvBalance()
        self._tracker = CauseTracker[Cause](scale=profile.scale)
        self._explained, self._aftermath = Explained(BY_ID), Aftermath()
        self._adviser: Adviser | None = None
        self._new_adviser, self._spell, self._explain = new_adviser, spell, explain
        self._stated = profile.stated
        self.weekly_peak_requests: float | None = None
        """The most requests that ran or waited at once within the last week; None if unknown."""
        self._first: Cause | None = None
        self._restarts: deque[ReplacedProcess] = deque(maxlen=RESTARTS_KEPT)
        self._newest_read: Verdict | None = None
        self._started_s: float | None = None
        self._drains = False
        self._serves: tuple[Server | None, Mapping[str, str]] = (None, {})
        self._served_before: tuple[Server | None, Mapping[str, str]] = self._serves
        """Facts and labels while the newest process, and the one before, generated tokens."""
        self._blind = 0
        self._unknown: tuple[Mapping[str, tuple[str, ...]], list[str]] = ({}, [])
        self.stored: bytes | None = None
        """What was learned before a restart of the daemon; taken up at the next step."""
        self.died: Cause | None = None
        """Why the engine died, by the server's log; None again after a token or a restart."""
        self._server: Server | None = None
        self._kind = VLLM
        self._server_gpus = profile.stated.server_gpus

    def set_server(self, facts: Server, stated: StatedServer) -> None:
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

    @property
    def restarts(self) -> Sequence[ReplacedProcess]:
        """The processes that were replaced, oldest first."""
        return self._restarts

    @property
    def was_idle(self) -> bool:
        """Whether the newest readable page showed no problem, and no requests or a drain: those in
        flight became fewer, and no new ones came."""
        newest = self._newest_read
        if newest is None or problems(newest):
            return False
        return self._drains or (newest.values.get("running") == 0 and not broke_off(newest))

    def step(self, t_s: float, values: Values) -> Verdict:
        """The diagnosis at `t_s`, which is after that of the step before."""
        if self.stored is not None:
            self._restore(self.stored)
        before = 0.0 if self._newest_read is None else self._newest_read.values.get("running")
        self._drains = values.arrivals == 0.0 and (values.signals.get("running") or 0.0) < (
            before or 0.0
        )
        if values.starts_over:
            self._start_over(t_s, values)
        self._started_s = values.started_s
        if values.generated:
            self._serves = self._server, values.config
        if self.died is not None and (values.restarted or self._works_since(self.died, values)):
            self.died = None
        facts, missing = self._facts(t_s, values)
        findings = list(facts.findings.values())
        crossed = [finding for finding in findings if finding.state not in IN_BOUNDS]
        causes, lacks_core = self._causes(facts, values, crossed)
        stage = UNKNOWN_STAGE if missing else facts.stage
        severity = worst_of(causes, stage, crossed)
        causes = as_severe(causes, severity, findings)
        readable = not lacks_core and values.scrapes > 1
        targets, canary, drains = self._profile.targets, values.canary, self._aftermath.drains
        moved = facts.values.get(account.MOVED_FOR) is not None
        what = changed(facts.values, t_s, self._restarted() if moved else None)
        if what is not None and causes:
            causes[0] = compared(causes[0], what)
        self._kind = values.kind
        proposed = NO_TARGETS if targets.are_set else self.learned.baseline.proposed()
        verdict = Verdict(
            t_s=to_ms(t_s),
            target=self._target,
            engine=self._key.engine,
            model=self._key.model,
            health=health(severity, readable=readable),
            stage=stage,
            causes=causes,
            symptoms=symptoms(facts, causes),
            changed=what,
            findings=findings,
            values={**facts.values, account.DRAINS: 1.0} if drains else facts.values,
            unknown=[
                *without_stage(missing, values.scrapes),
                *canary_words(canary),
                *self.learned.account.unknown(t_s),
                *unseen_host(facts),
                *silence_words(facts),
                *self._unknowns(values),
                *values.gpus.unknown,
            ],
            window_s=to_ms(values.window_s),
            judged_against=judged_against(
                targets, proposed, has_baseline=facts.baseline.get("ttft_p99_s") is not None
            ),
            proposed=proposed_document(proposed),
            recommendations=self._advised(facts, causes),
            server=None if self._server is None else self._server.at(t_s),
        )
        self._newest_read = self._spelled(verdict)
        return self._newest_read

    def unreadable(
        self,
        t_s: float,
        cause: Cause,
        why: str,
        seen: str,
        *,
        canary: CanaryState | None,
        log: LogFailure | None = None,
    ) -> Verdict:
        """The diagnosis after a scrape without data of this engine.

        `log` is the failure that the server's log shows; None if it shows none.
        """
        concluded = [cause] if log is None else [cause, log.cause]
        causes = ranked([replace(cause, seen_s=t_s).rounded() for cause in concluded])
        verdict = Verdict(
            t_s=to_ms(t_s),
            target=self._target,
            engine=self._key.engine,
            model=self._key.model,
            health=health(causes[0].severity, readable=False),
            causes=causes,
            unknown=[f"every signal: {why}", *canary_words(canary), *(log.unknown if log else ())],
            judged_against=f"nothing: {seen}",
            recommendations=log.recommendations if log else (),
            server=None if self._server is None else self._server.at(t_s),
        )
        return self._spelled(verdict)

    def _spelled(self, verdict: Verdict) -> Verdict:
        return verdict if self._spell is None else self._spell(verdict, self._kind)

    def accept(
        self, t_s: float, why: str, families: Collection[str] = (), *, dry_run: bool = False
    ) -> Sequence[Deviation]:
        """Make present values that deviate the usual ones. Returns what deviated.

        `families`: only of these, if any are given. `dry_run`: nothing changes.
        """
        newest = self._newest_read
        values: Mapping[str, float | None] = newest.values if newest is not None else {}
        kept_apart = self.learned.kept_apart
        deviations = kept_apart.deviations(values, families)
        if not dry_run:
            kept_apart.accept(t_s, values, why, families)
        return deviations

    def _restarted(self) -> Restarted | None:
        """The last restart of the server, and how its launch differs from the one before."""
        if not self._restarts:
            return None
        changes = launch_changes(
            launch_of(*self._served_before), launch_of(self._server, self.learned.launch)
        )
        return Restarted(to_ms(self._restarts[-1].t_s), changes)

    def _restore(self, body: bytes) -> None:
        self.stored = None
        with suppress(msgspec.DecodeError):
            self.learned.restore(body)

    def _works_since(self, died: Cause, values: Values) -> bool:
        """Whether the engine generated a token between two scrapes after it was said to have
        died."""
        last, since_s = self._newest_read, died.since_s
        if last is None or since_s is None:
            return False
        return last.t_s >= to_ms(since_s) and bool(values.generated)

    def _start_over(self, t_s: float, values: Values) -> None:
        """Forget trends and durations: the process was replaced or the clock was set back."""
        if values.restarted:
            self._served_before = self._serves
            self._restarts.append(replaced(t_s, self._started_s, self._newest_read))
        for rule in self._rules:
            rule.forget()
        self._cascade.forget()
        self._streaks.forget()
        self._tracker.forget()
        self._aftermath.forget()
        if self._adviser is not None:
            self._adviser.restarted()
        self.learned.reset(t_s)

    def _signals(
        self, t_s: float, values: Values
    ) -> tuple[dict[str, float | None], dict[str, str], LiveWorkload | None]:
        """All signals at this moment: those of the values, and those learned over time.

        Also returns why some are unknown, and the comparison with the stated workload.
        """
        learned = self.learned
        learned.set_launch(values.config)
        signals, notes = derive(values, learned.baseline, self._profile.targets)
        if is_queued(signals.get("waiting_by_capacity"), signals.get("running") or 0.0):
            notes["kv_demand_ahead_ratio"] = "requests queue already"
        workload = learned.workload.update(t_s, values.request_counts)
        signals |= learned.forecasts(t_s, values)
        signals |= values.gpus.values
        signals |= workload.values() if workload else {}
        if values.canary is not None:
            signals["canary_s"] = values.canary.latency_s
        signals |= values.host
        signals |= learned.slow_trends.update(t_s, signals)
        learned.account.update(t_s, values)
        signals |= learned.account.values
        return signals, notes, workload

    def _facts(self, t_s: float, values: Values) -> tuple[Facts, tuple[str, ...]]:
        """What causes are concluded from, and the signals that are missing to judge the stage."""
        profile, learned = self._profile, self.learned
        signals, notes, workload = self._signals(t_s, values)
        idle = not (signals.get("running_max") or signals.get("waiting"))
        stage = self._cascade.judge(t_s, signals, preempted=values.preempted or 0.0)
        missing = lacking(stage, signals)
        signals["cascade_stage"] = None if missing else float(stage.level)
        signals["cascade_severity"] = None if missing else float(stage.severity or OK)
        signals[account.KV_UNACCOUNTED] = self._kv_balance.unaccounted(values, signals)
        gpus = values.gpus
        facts = Facts(
            now_s=t_s,
            window_s=values.window_s,
            scale=profile.scale,
            observed_s=values.observed_s,
            served_s=values.served_s,
            values=signals,
            recent=values.recent,
            missing=values.missing,
            stage=stage,
            baseline=learned.baseline,
            config=values.config,
            targets=profile.targets,
            restarts=self._restarts,
            gpus=gpus.states,
            gpus_guessed=gpus.guess and len(gpus.states) != self._server_gpus,
            gpus_lost=gpus.lost,
            adapters=values.adapters,
            split=self._profile.split,
            endless=learned.endless_outputs(values),
            workload=workload,
        )
        streaks_s = self._streaks.update(t_s, values, facts)
        progress = self._streaks.progress
        signals |= {key: value for key, value in progress.open_calls.values.items() if value}
        signals[account.STALL] = streaks_s.get("stalled", 0.0)
        signals[account.PREFILL_SILENCE] = progress.prefill_silence_s(values, signals)
        knee = learned.knee(t_s, signals)
        signals[account.CAPACITY_USED] = capacity_used(signals, knee)
        notes[account.CAPACITY_USED] = "no GPU source, and C_max is not learned yet"
        findings = {
            state.rule.id: state.judge(t_s, signals, values.missing, notes, idle=idle)
            for state in self._rules
        }
        return replace(facts, streaks_s=streaks_s, findings=findings, knee=knee), missing

    def _causes(
        self, facts: Facts, values: Values, crossed: Sequence[Finding]
    ) -> tuple[list[Cause], bool]:
        """The causes, ranked, and whether core metrics are missing.

        `crossed` are the findings out of bounds.
        """
        concluded = conclude(facts)
        if self._profile.throughput_only:
            concluded = without_queues(concluded, facts.stage)
        if self.died is not None:
            concluded.append(self.died)
        unanswered = None if values.canary is None else observer.unanswered(values.canary, facts)
        if unanswered is not None and all(cause.id != unanswered.id for cause in concluded):
            concluded.append(unanswered)
        self._blind = self._blind + 1 if observer.is_blind(facts) else 0
        accepted = self.learned.kept_apart.acceptance
        if accepted is not None and (told := accepted.cause(facts.now_s)) is not None:
            concluded.append(told)
        kind, unread = values.kind, values.missing
        missing = observer.metrics_missing(
            facts,
            tuple(key for key in self._profile.core if kind.expects(unread.get(key, ()))),
            values.impossible,
            switch_on=kind.switch_on,
            blind=self._blind,
            unused=self._blind > 0 and values.unused,
        )
        if missing is not None:
            concluded.append(missing)
        ended = over(facts) | disproved(concluded)
        lasting = self._explained.lasting(concluded, facts)
        tracked = self._tracker.update(facts.now_s, concluded, ended, lasting=lasting)
        tracked = self._aftermath.without(facts, tracked)
        causes = ranked(self._explained.without(tracked, facts))
        self._aftermath.reported(facts.now_s, causes)
        if causes and self._explain is not None:
            self._first = self._explain(facts, causes[0], self._first)
            causes[0] = self._first
        # Learn last: the counterfactuals need the baseline that the causes were concluded from.
        self.learned.learn(facts, concluded, crossed)
        return [cause.rounded() for cause in causes], missing is not None

    def _advised(self, facts: Facts, causes: list[Cause]) -> tuple[Advice, ...]:
        """The recommendations for these causes."""
        if self._new_adviser is None:
            return ()
        if self._adviser is None:
            if not causes and not facts.get("waiting"):
                return ()
            self._adviser = self._new_adviser(self._stated)
        self._adviser.weekly_peak_requests = self.weekly_peak_requests
        return self._adviser.advise(facts, causes, self.learned.curve)

    def _unknowns(self, values: Values) -> list[str]:
        if self._unknown[0] is not values.missing:
            needs = {s.key: s.needs and f" (needs {s.needs})" for s in self._profile.signals}
            lines = [
                f"{key}: {observer.lack_words(metrics, values.impossible)}{needs[key]}"
                if values.kind is VLLM
                else f"{key}: {values.kind.lacks(metrics)}"
                for key, metrics in values.missing.items()
            ]
            lines += [f"{key}: {why}" for key, why in self._profile.unstated.items()]
            self._unknown = (values.missing, [intern(line) for line in lines])
        return self._unknown[1]
