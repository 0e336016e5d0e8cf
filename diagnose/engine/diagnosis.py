"""The diagnosis of one engine from its pages or its log, and its causes over time. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.causes.bottleneck import FEW_REQUESTS, has_spare_compute
from kneewatch.diagnose.causes.evidence import Cause, Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.causes.startup import failed
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.log_failure import Failure
from kneewatch.diagnose.deployment.server_facts import ServerFacts
from kneewatch.diagnose.deployment.startup_log import StartupLog, title
from kneewatch.diagnose.ranking import BY_ID, EXPLAINS
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.rules.cascade import Stage
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import duration
from kneewatch.rules.rule import OK, WARNING, Finding, Severity


class Symptom(NamedTuple):
    """A row of the guide's list of symptoms: what users see, and what to do first."""

    words: str
    action: str

    def __str__(self) -> str:
        return f"{self.words} ({self.action})"


SYMPTOMS = {
    "S1": Symptom(
        "TTFT too high at low concurrency",
        "check the prefix hit ratio first, then the tensor-parallel degree",
    ),
    "S2": Symptom("ITL spikes under mixed load", "chunked prefill first"),
    "S3": Symptom(
        "throughput plateau too low",
        "raise a limit that binds, then quantize weights and KV cache, before adding hardware",
    ),
    "S4": Symptom(
        "TTFT and ITL targets cannot both be met",
        "P/D disaggregation, after what helps without new servers",
    ),
    "S5": Symptom(
        "throughput per GPU falls as tensor parallelism grows",
        "lower the tensor-parallel degree and add replicas",
    ),
    "S6": Symptom(
        "ITL too high at low concurrency while the GPU has spare compute",
        "speculative decoding before more hardware",
    ),
    "S7": Symptom(
        "TTFT spikes for some tenants, unrelated to prompt length",
        "check how often LoRA adapters are swapped",
    ),
    "S8": Symptom(
        "P99 latency good at low load, too high at peak load",
        "add replicas or quantize before the next peak",
    ),
}

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


NO_STAGE = "cascade_stage: "
"""Prefix of the line in `unknown` that says why the stage is unknown."""


class Diagnosis(Struct, frozen=True):
    """The verdict on one engine at one moment.

    `stage` is None if unknown; `unknown` says why. `judged_against` says what latencies were
    compared with. `window_s` is the time that the window really covers; it is shorter after a start
    or restart. `server` has the facts about the server; None if only its page was read.
    """

    t_s: float
    target: str
    engine: str
    model: str
    tier: str | None
    health: str
    stage: Stage | None
    causes: Sequence[Cause]
    symptoms: Sequence[str]
    findings: Sequence[Finding]
    values: Mapping[str, float | None]
    unknown: Sequence[str]
    window_s: float
    judged_against: str
    recommendations: Sequence[Recommendation] = ()
    server: ServerFacts | None = None

    @property
    def was_read(self) -> bool:
        """Whether the engine was on a page that could be read; its stage may still be unknown."""
        return self.stage is not None or bool(self.values)

    @property
    def stage_unknown(self) -> str:
        """Why the stage is unknown, as text; empty if it is known."""
        if self.stage is not None:
            return ""
        if not self.was_read:
            return self.judged_against.removeprefix("nothing: ")
        return next(
            (line.removeprefix(NO_STAGE) for line in self.unknown if line.startswith(NO_STAGE)),
            "required signals are unknown",
        )

    @property
    def headline(self) -> str:
        """The id that decides the verdict; empty if there is no cause.

        Usually the first cause. If that is only info and a finding is worse, the rule of the worst
        finding.
        """
        if not self.causes:
            return ""
        if self.causes[0].severity >= min(self.severity, WARNING):
            return self.causes[0].id
        worst = max(self.findings, key=lambda finding: finding.severity, default=None)
        graver = worst is not None and worst.severity >= WARNING
        return worst.rule.id if worst is not None and graver else ""

    @property
    def severity(self) -> Severity:
        """The worst severity of causes, stage and findings."""
        return worst_of(self.causes, self.stage, self.findings)


def worst_of(causes: Sequence[Cause], stage: Stage | None, findings: Sequence[Finding]) -> Severity:
    """The worst of the severities of causes, stage and findings; ok if there are none."""
    staged = stage.severity if stage else OK
    return max([staged, *[c.severity for c in causes], *[f.severity for f in findings]])


def health(severity: Severity, *, readable: bool) -> str:
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


def log_diagnosis(log: StartupLog, stated: Stated, *, target: str, t_s: float) -> Diagnosis:
    """The diagnosis from a log that was read at `t_s`; `stated` includes the log's facts.

    Its health is `unknown` if the log ends while the server is still starting.
    """
    failure = log_failure(log, stated, t_s)
    model = log.facts.get("model")
    running = log.phase in ("serving", "stopped")
    return Diagnosis(
        t_s=t_s,
        target=target,
        engine="",
        model=str(model.value) if model else "",
        tier=None,
        health="critical" if failure else "ok" if running else "unknown",
        stage=None,
        # When it happened is unknown: the lines have no year and no time zone.
        causes=[replace(failure.cause, since_s=math.nan)] if failure else [],
        symptoms=(),
        findings=(),
        values={},
        unknown=[*_lacking(log), *(failure.unknown if failure else ())],
        window_s=0.0,
        judged_against=BASIS,
        recommendations=failure.recommendations if failure else (),
    )


def _lacking(log: StartupLog) -> list[str]:
    """Lines about facts that this version usually logs but this log lacks; none while the server
    starts."""
    if log.phase == "starting":
        return []
    return [f"{title(fact)}: no line in the log" for fact in log.not_logged]
