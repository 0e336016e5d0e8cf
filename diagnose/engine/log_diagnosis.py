"""The diagnosis of a server by its log alone: started, not started or died. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.causes.startup import failed
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.startup_log import StartupLog
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.startup import Remedies

BASIS = "nothing: a log has no metrics"


@dataclass(frozen=True, slots=True)
class LogFailure:
    """Why a server did not start or died, by its log, with the changes that would let it start."""

    cause: Cause
    recommendations: tuple[Recommendation, ...]
    unknown: tuple[str, ...]


def log_failure(log: StartupLog, stated: Stated, since_s: float) -> LogFailure | None:
    """The failure that the log ends with, first read at `since_s`; None without one. `stated`
    includes what the log says."""
    if log.failure is None:
        return None
    remedies = Remedies(log.failure, log, stated)
    return LogFailure(
        failed(log.failure, since_s), tuple(remedies.all()), tuple(remedies.missing())
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
        causes=[failure.cause] if failure else [],
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
    return [f"{fact}: no line in the log" for fact in log.not_logged]
