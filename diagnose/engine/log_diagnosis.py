"""The diagnosis of a server by its log alone: started, not started or died. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.causes.startup import failed
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.startup_log import Failure, StartupLog, title
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import Recommendation

GPU_SIZE_TOLERANCE_RATIO = 0.1
"""Driver and ECC take a few percent of a GPU's memory."""

BASIS = "nothing: a log has no metrics"


@dataclass(frozen=True, slots=True)
class LogFailure:
    """Why a server did not start or died, by its log, with the changes that would let it start."""

    cause: Cause
    recommendations: tuple[Recommendation, ...]
    unknown: tuple[str, ...]


def log_failure(log: StartupLog, stated: Stated, since_s: float) -> LogFailure | None:
    """The failure that the log ends with, first read at `since_s`; None without one.
    `stated` includes what the log says. Nothing is sized for a stated GPU of another size than the
    log's."""
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
    """A line about a stated GPU whose memory differs from the log's; empty where it does not."""
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
    """The diagnosis of a log that was read at `t_s`; `stated` includes what the log says.

    Its health is `unknown` where the log ends while the server starts.
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
    """Lines about facts that this version logs, and this log lacks, once the server has started."""
    if log.phase == "starting":
        return []
    return [f"{title(fact)}: no line in the log" for fact in log.not_logged]
