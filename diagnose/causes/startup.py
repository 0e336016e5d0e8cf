"""Causes proven by vLLM's log: the server did not start, or its engine died. Pure."""

from __future__ import annotations

from kneewatch.diagnose.cause import Cause, Evidence
from kneewatch.diagnose.deployment import log_failure as log
from kneewatch.diagnose.deployment.log_failure import Failure
from kneewatch.rules.rule import Severity

CONFIDENCE = 0.95
"""Below 1, because the log may be from an earlier start than the one in question."""


ENGINE_DIED, ENGINE_RESTARTED = "engine_died", "engine_restarted"
STARTUP_FAILED = "startup_failed"


def _out_of_gpu_memory(failure: Failure) -> tuple[str, str]:
    """What happened and what to do, by who holds the memory and by the phase of the start."""
    reason = log.reasons()[log.GPU_MEMORY]
    others_gib = log.others_gpu_gib(failure)
    phase = log.phases().get(str(failure.details.get("phase")), {})
    what = f"{reason['what']} {phase.get('what', '')}".strip()
    lever: str = phase.get("lever", reason["lever"])
    first: list[str] = []
    if log.is_fragmented(failure):
        asked, cached = failure.details["asked"], failure.details["cached"]
        first.append(
            f"Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: PyTorch held {cached} "
            f"in pieces and could not allocate {asked}."
        )
    if others_gib:
        first.append(
            f"Other processes hold {others_gib:.1f} GiB of this GPU: find them with nvidia-smi, a "
            "previous vLLM may still run."
        )
    elif others_gib is None and "max_num_seqs" not in failure.details:
        first.append("Check with nvidia-smi that no other process uses the GPU.")
    if first:
        lever = f"{' '.join(reversed(first))} Else {lever[0].lower()}{lever[1:]}"
    return what, lever


def failed(failure: Failure, t_s: float) -> Cause:
    """The cause of a failure that a log proves, with the log line as evidence; it starts at
    `t_s`."""
    reason = log.reasons()[failure.kind]
    what, lever = reason["what"], reason["lever"]
    if failure.kind == log.GPU_MEMORY:
        what, lever = _out_of_gpu_memory(failure)
    who = "The engine died" if failure.served else "vLLM did not start"
    return Cause(
        id=ENGINE_DIED if failure.served else STARTUP_FAILED,
        confidence=CONFIDENCE,
        severity=Severity.CRITICAL,
        summary=f"{who}: {what}.",
        evidence=(Evidence("server_log", None, None, f"log: {failure.line}"),),
        lever=lever,
        since_s=t_s,
        seen_s=t_s,
    )
