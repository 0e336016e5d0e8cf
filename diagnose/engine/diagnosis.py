"""The diagnosis of one engine from its pages or its log, and its causes over time. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from math import inf
from typing import Generic

from msgspec.structs import replace

from kneewatch.diagnose.account_signals import SILENT
from kneewatch.diagnose.cause import AnyCause, Cause, Evidence
from kneewatch.diagnose.causes.bottleneck import FEW_REQUESTS, has_spare_compute
from kneewatch.diagnose.causes.common_conditions import VERY_LATE_FROM, VERY_LATE_S
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.deployment.server_state import CanaryState
from kneewatch.diagnose.ranking import BY_ID, EXPLAINS, OF_LATENCY, WAITS_FOR
from kneewatch.diagnose.verdict import NO_STAGE, SYMPTOMS
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import duration, quantity, span, stated_duration
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import WARNING, Finding, Severity, State

SLOW_DRIFT = 3.0


def symptoms(facts: Facts, causes: Iterable[Cause]) -> list[str]:
    """Ids of the symptoms that show, in the guide's order.

    "Too high" means over the target; without a target, over three times the quiet baseline.
    """
    present = {cause.id for cause in causes}
    present |= {other for cause in causes for other in cause.explains}
    few = facts.get("running_avg") < FEW_REQUESTS
    slow_first = _too_high(facts, "ttft", facts.targets.ttft_p99_s)
    slow_steps = _too_high(facts, "itl", facts.targets.itl_p99_s)
    queued = any(BY_ID[cause].queues for cause in present)
    shown = {each for each, symptom in SYMPTOMS.items() if present.intersection(symptom.causes)}
    if few and slow_first and not queued and "S7" not in shown:
        shown.add("S1")
    if slow_steps and has_spare_compute(facts):
        shown.add("S6")
    if queued and slow_first:
        shown.add("S8")
    return [symptom for symptom in SYMPTOMS if symptom in shown]


def _too_high(facts: Facts, name: str, target_s: float | None) -> bool:
    value = facts.values.get(f"{name}_p99_s")
    if target_s is not None:
        return value is not None and value > target_s
    return (facts.values.get(f"{name}_p99_drift_ratio") or 0.0) >= SLOW_DRIFT


def health(severity: Severity, *, readable: bool) -> State:
    """ok, info, warning, critical or unknown. An unreadable page is never ok or info."""
    if not readable and severity < WARNING:
        return "unknown"
    return severity.word


def as_severe(causes: list[Cause], severity: Severity, findings: Iterable[Finding]) -> list[Cause]:
    """The causes of a verdict with this severity: the first takes it, as it is what to act on, and
    the rules that are so severe head its evidence. A note stays a note."""
    if not causes or not WARNING <= causes[0].severity < severity:
        return causes
    evidence = list[Evidence]()
    for finding in findings:
        if finding.severity == severity:
            rule, signal, value = rule_of(finding), finding.signal, finding.value
            text = f"{rule.summary}: {quantity(signal, value)}"
            evidence.append(Evidence(signal, value, rule.threshold(severity), text))
    evidence += causes[0].evidence
    return [replace(causes[0], severity=severity, evidence=tuple(evidence)), *causes[1:]]


def judged_against(targets: Targets, proposed: Targets, *, has_baseline: bool) -> str:
    """A text that says what latencies were compared with, and which targets are proposed."""
    stated = [
        f"{name} P99 {stated_duration(target_s)}"
        for name, target_s in (("TTFT", targets.ttft_p99_s), ("ITL", targets.itl_p99_s))
        if target_s is not None
    ]
    if stated:
        return "targets: " + ", ".join(stated)
    if has_baseline:
        return f"its own baseline (no SLO configured{_proposal(proposed)})"
    return "nothing: no SLO configured, no baseline yet"


def _proposal(proposed: Targets) -> str:
    """The proposed targets, how to accept them, and what is critical without; "" without any."""
    ttft_s, itl_s = proposed.ttft_p99_s, proposed.itl_p99_s
    if ttft_s is None or itl_s is None:
        return ""
    return (
        f"; quiet hours suggest TTFT P99 {duration(ttft_s)}, ITL P99 {duration(itl_s)}: accept "
        f"with --slo-ttft {ttft_s:g} --slo-itl {itl_s:g}. Until then slow first tokens are "
        f"critical only from {VERY_LATE_FROM:g}x their usual time and {duration(VERY_LATE_S)} on"
    )


def proposed_document(proposed: Targets) -> dict[str, float] | None:
    """The proposed targets by signal; None without any."""
    ttft_s, itl_s = proposed.ttft_p99_s, proposed.itl_p99_s
    if ttft_s is None or itl_s is None:
        return None
    return {"ttft_p99_s": ttft_s, "itl_p99_s": itl_s}


GROWS_BY, GROWN_SCRAPES = 2.0, 2
"""A backlog does not drain if it exceeds its lowest level by more requests in so many scrapes."""

OUTLASTS_S = 60.0
"""A cause that is no longer concluded still stays this long while its effect is concluded."""


class Aftermath:
    """The time in which a backlog drains that a cause has left, which has ended.

    Requests still wait then, and what waits looks like a new problem. It ends once the queue has
    not been shorter than before for a window: such a queue is a problem. The same holds while the
    engine makes no progress: requests pile up, and it is the stall that will be reported.
    """

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}
        self._problems: frozenset[str] = frozenset()
        self._left: float | None = None
        self._grown = 0
        self._until_s = float("-inf")

    @property
    def drains(self) -> bool:
        """Whether requests that an ended cause has left in the queue are served now."""
        return self._left is not None

    def forget(self) -> None:
        """Reset after a restart: the requests are gone with the process."""
        self._reported.clear()
        self._problems, self._left = frozenset(), None

    def without(self, facts: Facts, causes: list[Cause]) -> list[Cause]:
        """The causes, without those that only say that requests wait, if they follow from what has
        ended and were not reported within a window."""
        waiting = facts.values.get("waiting") or 0.0
        present = (each.id for each in causes if each.severity >= WARNING and not each.apart)
        if self._problems and self._problems.isdisjoint(present):
            self._left, self._grown = waiting, 0
            self._until_s = facts.now_s + facts.window_s
        elif self._left is not None:
            self._grown = self._grown + 1 if waiting > self._left + GROWS_BY else 0
            if waiting < self._left:
                self._left = waiting
                self._until_s = facts.now_s + facts.window_s
        if facts.now_s > self._until_s or self._grown >= GROWN_SCRAPES:
            self._left = None
        if not self.drains and not facts.streaks_s.get("stalled"):
            return causes
        from_s, reported = facts.now_s - facts.window_s, self._reported
        return [
            each
            for each in causes
            if reported.get(each.id, -inf) >= from_s or each.id not in OF_LATENCY
        ]

    def reported(self, now_s: float, causes: Sequence[Cause]) -> None:
        """Remember the causes that are reported now. A limit that another one explains is reported
        with it, and may be reported alone once it is nearer."""
        for cause in causes:
            limits = [
                each for each in cause.explains if BY_ID[cause.id].queues and BY_ID[each].queues
            ]
            self._reported |= dict.fromkeys((cause.id, *limits), now_s)
        self._problems = frozenset(
            cause.id
            for cause in causes
            if cause.severity >= WARNING
            and not cause.apart
            and not WAITS_FOR.isdisjoint((cause.id, *cause.explains))
        )


class CauseTracker(Generic[AnyCause]):
    """The causes of one engine over time.

    `records` define onset and clear times. `scale` is the short window divided by its default;
    these times are multiplied by it, but a longer window is no reason to wait longer for a cause.
    """

    def __init__(self, *, scale: float, records: Mapping[str, CauseRecord] = BY_ID) -> None:
        self._scale, self._records = scale, records
        self._tracked: dict[str, AnyCause] = {}
        self._reported = set[str]()

    def __bool__(self) -> bool:
        """Whether any cause was concluded and has not ended."""
        return bool(self._tracked)

    @property
    def causes(self) -> list[AnyCause]:
        """The causes that are reported, as last concluded."""
        return [cause for cause in self._tracked.values() if cause.id in self._reported]

    def forget(self) -> None:
        """Drop all causes after a restart: they belong to the old process."""
        self._tracked.clear()
        self._reported.clear()

    def update(
        self,
        now_s: float,
        concluded: Sequence[AnyCause],
        over: Collection[str] = (),
        beside: Collection[str] = (),
        developed: Collection[str] = (),
        lasting: Collection[str] = (),
    ) -> list[AnyCause]:
        """The causes to report at `now_s`, each with its start time.

        `over` are ids of causes that end without a clear time, `developed` of those that begin
        without an onset time. `beside` are ids of causes that others conclude about the same,
        `lasting` of those whose effect on latency is as it was.
        """
        for cause in concluded:
            tracked = self._tracked.get(cause.id)
            since_s = now_s if tracked is None or tracked.since_s is None else tracked.since_s
            self._tracked[cause.id] = replace(cause, since_s=since_s, seen_s=now_s)
            onset_s = self._records[cause.id].onset_s.value * min(1.0, self._scale)
            if now_s - since_s >= onset_s or cause.id in developed:
                self._reported.add(cause.id)
        concluded_ids = {cause.id for cause in concluded}
        current = concluded_ids.union(beside)
        for cause_id in self._tracked.keys() - concluded_ids:
            if cause_id not in self._reported or self._has_cleared(
                cause_id, now_s, current, over, lasting
            ):
                del self._tracked[cause_id]
                self._reported.discard(cause_id)
        return self.causes

    def _has_cleared(
        self,
        cause_id: str,
        now_s: float,
        current: Set[str],
        over: Collection[str],
        lasting: Collection[str],
    ) -> bool:
        record, seen_s = self._records[cause_id], self._tracked[cause_id].seen_s or 0.0
        clear_s = record.clear_s.value
        effect_stays = record.outlasts and not current.isdisjoint(EXPLAINS[cause_id])
        if effect_stays or cause_id in lasting:
            clear_s = OUTLASTS_S
        return cause_id in over or now_s - seen_s >= clear_s * self._scale


def canary_words(canary: CanaryState | None) -> list[str]:
    refused = "" if canary is None else canary.refused
    return [f"canary: {refused}"] if refused else []


def silence_words(facts: Facts) -> list[str]:
    """A note if traffic ended at once on a server that is not idle otherwise; empty if not."""
    silent_s = facts.values.get(SILENT)
    if silent_s is None:
        return []
    return [
        f"traffic: it ended from one scrape to the next {span(silent_s)} ago, and the server was "
        "not idle for so long within the last hour. The router or network may have cut it off, or "
        "the engine hangs while its gauges read 0: send it one request (canary.on_silence does so)"
    ]


def without_stage(unjudged: Sequence[str], scrapes: int) -> list[str]:
    """A line with the reason for an unknown stage; none if the stage is known."""
    if not unjudged:
        return []
    if scrapes < 2:
        return [f"{NO_STAGE}the window holds one scrape, it needs two"]
    return [f"{NO_STAGE}it needs {', '.join(unjudged)}"]
