"""The diagnosis of one engine from its pages or its log, and its causes over time. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.causes.bottleneck import FEW_REQUESTS, has_spare_compute
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.causes.startup import failed
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.log_failure import Failure
from kneewatch.diagnose.deployment.startup_log import StartupLog, title
from kneewatch.diagnose.ranking import BY_ID, EXPLAINS
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.verdict import SYMPTOMS, Cause, Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import duration
from kneewatch.rules.rule import WARNING, Severity, State
from kneewatch.rules.wire import to_ms

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
    these times are multiplied by it.
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
            onset_s = self._records[cause.id].onset_s.value * self._scale
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


# --- The diagnosis of a server by its log alone: started, not started or died ---------------------


GPU_SIZE_TOLERANCE_RATIO = 0.1
"""The driver and ECC use a few percent of a GPU's memory."""

BASIS = "nothing: a log has no metrics"


class LogFailure(Struct, frozen=True):
    """Why a server did not start or died, according to its log, and changes that would let it
    start."""

    cause: Cause
    recommendations: tuple[Recommendation, ...]
    unknown: tuple[str, ...]


def log_failure(log: StartupLog, stated: Stated, since_s: float) -> LogFailure | None:
    """The failure at the end of the log, first read at `since_s`; None if there is none.

    `stated` includes the log's facts. If its GPU has another memory size than the log's GPU, no
    sizes are recommended.
    """
    if log.failure is None:
        return None
    # Imported here: most servers start, and this import is slow.
    from kneewatch.diagnose.recommend.startup import Remedies

    problem = _gpu_problem(log, log.failure, stated)
    remedies = Remedies(log.failure, log, replace(stated, gpu=None) if problem else stated)
    return LogFailure(
        failed(log.failure, since_s),
        tuple(remedies.all()),
        (problem,) if problem else tuple(remedies.missing()),
    )


def _gpu_problem(log: StartupLog, failure: Failure, stated: Stated) -> str:
    """A line about a stated GPU whose memory differs from the log's; empty if it does not
    differ."""
    logged = failure.details.get("gpu_memory_gib", log.number("gpu_memory_gib"))
    if stated.gpu is None or not isinstance(logged, int | float):
        return ""
    stated_gib = stated.gpu.memory_bytes / GIB
    if abs(logged / stated_gib - 1) <= GPU_SIZE_TOLERANCE_RATIO:
        return ""
    return (
        f"what fits on these GPUs: {stated.gpu.id} has {stated_gib:.1f} GiB, and the log says that "
        f"the GPU has {logged:.1f} GiB; check --gpu"
    )


def log_diagnosis(log: StartupLog, stated: Stated, *, target: str, t_s: float) -> Verdict:
    """The diagnosis from a log that was read at `t_s`; `stated` includes the log's facts.

    Its health is `unknown` if the log ends while the server is still starting.
    """
    failure = log_failure(log, stated, t_s)
    model = log.facts.get("model")
    running = log.phase in ("serving", "stopped")
    return Verdict(
        t_s=to_ms(t_s),
        target=target,
        model=str(model.value) if model else "",
        health="critical" if failure else "ok" if running else "unknown",
        # When it happened is unknown: the lines have no year and no time zone.
        causes=[replace(failure.cause, since_s=None).rounded()] if failure else [],
        unknown=[*_lacking(log), *(failure.unknown if failure else ())],
        judged_against=BASIS,
        recommendations=failure.recommendations if failure else (),
    )


def _lacking(log: StartupLog) -> list[str]:
    """Lines about facts that this version usually logs but this log lacks; none while the server
    starts."""
    if log.phase == "starting":
        return []
    return [f"{title(fact)}: no line in the log" for fact in log.not_logged]
