"""The diagnosis of a server by its log alone: started, not started or died. Pure."""

from __future__ import annotations

from kneewatch.diagnose.causes.evidence import Cause
from kneewatch.diagnose.causes.startup import failed
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.startup_log import StartupLog
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.startup import Remedies

BASIS = "nothing: a log has no metrics"


def log_diagnosis(log: StartupLog, stated: Stated, *, target: str, t_s: float) -> Diagnosis:
    """The diagnosis of a log that was read at `t_s`; `stated` includes what the log says.

    Its health is `unknown` where the log ends while the server starts.
    """
    failure = log.failure
    model = log.facts.get("model")
    causes: list[Cause] = []
    recommendations: list[Recommendation] = []
    unknown = _lacking(log)
    if failure is not None:
        causes.append(failed(failure, t_s))
        remedies = Remedies(failure, log, stated)
        recommendations += remedies.all()
        unknown += remedies.missing()
    running = log.phase in ("serving", "stopped")
    return Diagnosis(
        t_s=t_s,
        target=target,
        engine="",
        model=str(model.value) if model else "",
        tier=None,
        health="critical" if causes else "ok" if running else "unknown",
        stage=None,
        causes=causes,
        symptoms=(),
        findings=(),
        values={},
        unknown=unknown,
        window_s=0.0,
        judged_against=BASIS,
        recommendations=recommendations,
    )


def _lacking(log: StartupLog) -> list[str]:
    """Lines about facts that this version logs, and this log lacks, once the server has started."""
    if log.phase == "starting":
        return []
    return [f"{fact}: no line in the log" for fact in log.not_logged]
