"""The diagnosis of one engine from its pages or its log, and its causes over time. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.causes.bottleneck import FEW_REQUESTS, has_spare_compute
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.ranking import BY_ID, EXPLAINS
from kneewatch.diagnose.verdict import SYMPTOMS, Cause
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import duration
from kneewatch.rules.rule import WARNING, Severity, State

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
    shown = {symptom for cause in present for symptom in BY_ID[cause].symptoms}
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


def judged_against(targets: Targets, *, has_baseline: bool) -> str:
    """A text that says what latencies were compared with."""
    stated = [
        f"{name} P99 {duration(target_s)}"
        for name, target_s in (("TTFT", targets.ttft_p99_s), ("ITL", targets.itl_p99_s))
        if target_s is not None
    ]
    if stated:
        return "targets: " + ", ".join(stated)
    if has_baseline:
        return "its own baseline (no SLO configured)"
    return "nothing: no SLO configured, no baseline yet"


OUTLASTS_S = 60.0
"""A cause that is no longer concluded still stays this long while its effect is concluded."""


class TrackedCause(Struct):
    """A cause as last concluded. `reported`: its onset time has passed."""

    cause: Cause
    since_s: float
    seen_s: float
    reported: bool


class CauseTracker:
    """The causes of one engine over time.

    `records` define onset and clear times. `scale` is the short window divided by its default;
    these times are multiplied by it, but a longer window is no reason to wait longer for a cause.
    """

    def __init__(self, *, scale: float, records: Mapping[str, CauseRecord] = BY_ID) -> None:
        self._scale, self._records = scale, records
        self._tracked: dict[str, TrackedCause] = {}

    def __bool__(self) -> bool:
        """Whether any cause was concluded and has not ended."""
        return bool(self._tracked)

    def forget(self) -> None:
        """Drop all causes after a restart: they belong to the old process."""
        self._tracked.clear()

    def update(
        self, now_s: float, concluded: Sequence[Cause], over: Collection[str] = ()
    ) -> list[Cause]:
        """The causes to report at `now_s`, each with its start time.

        `over` are ids of causes that end without a clear time.
        """
        for cause in concluded:
            tracked = self._tracked.get(cause.id)
            if tracked is None:
                tracked = TrackedCause(cause, now_s, now_s, reported=False)
                self._tracked[cause.id] = tracked
            tracked.cause, tracked.seen_s = cause, now_s
            onset_s = self._records[cause.id].onset_s.value * min(1.0, self._scale)
            tracked.reported = tracked.reported or now_s - tracked.since_s >= onset_s
        current = {cause.id for cause in concluded}
        for cause_id, tracked in list(self._tracked.items()):
            record = self._records[cause_id]
            clear_s = record.clear_s.value
            if record.outlasts and not current.isdisjoint(EXPLAINS[cause_id]):
                clear_s = OUTLASTS_S
            cleared = cause_id in over or now_s - tracked.seen_s >= clear_s * self._scale
            if cause_id not in current and (cleared or not tracked.reported):
                del self._tracked[cause_id]
        return [
            replace(tracked.cause, since_s=tracked.since_s, seen_s=tracked.seen_s)
            for tracked in self._tracked.values()
            if tracked.reported
        ]
