"""Causes proven by vLLM's log: the server did not start, or its engine died. Pure."""

from __future__ import annotations

from kneewatch.collector.engines.engine_kind import (
    MEMORY_SHARE,
    SEATS,
    STEP_TOKENS,
    TENSOR_SPLIT,
)
from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.cause import Cause, Evidence
from kneewatch.diagnose.deployment import log_failure as log
from kneewatch.diagnose.deployment.log_failure import Failure
from kneewatch.rules.rule import Severity

CONFIDENCE = 0.95
"""Below 1, because the log may be from an earlier start than the one in question."""


ENGINE_DIED, STARTUP_FAILED = "engine_died", "startup_failed"
OTHERS_LEAST_GIB = 1.0
"""A process without tensors, such as a monitor or a display, uses less GPU memory than this."""


def _gpu_lever(others_gib: float) -> str:
    """What to do about exhausted GPU memory, of which other processes use `others_gib`."""
    less = f"Lower {MEMORY_SHARE}, {SEATS} or {STEP_TOKENS}, or use more GPUs ({TENSOR_SPLIT})."
    if others_gib < OTHERS_LEAST_GIB:
        return less
    return (
        f"Other processes hold {others_gib:.1f} GiB of this GPU: find them with nvidia-smi, a "
        f"previous vLLM may still run. Else: {less[0].lower()}{less[1:]}"
    )


def failed(failure: Failure, t_s: float) -> Cause:
    """The cause of a failure that a log proves, with the log line as evidence; it starts at
    `t_s`."""
    reason = packaged_tables("collector.engines", "vllm/startup_failures.toml")[failure.kind]
    lever: str = reason["lever"]
    if failure.kind == log.GPU_MEMORY and (others_gib := log.others_gpu_gib(failure)) is not None:
        lever = _gpu_lever(others_gib)
    who = "The engine died" if failure.served else "vLLM did not start"
    return Cause(
        id=ENGINE_DIED if failure.served else STARTUP_FAILED,
        confidence=CONFIDENCE,
        severity=Severity.CRITICAL,
        summary=f"{who}: {reason['what']}.",
        evidence=(Evidence("server_log", None, None, f"log: {failure.line}"),),
        lever=lever,
        since_s=t_s,
        seen_s=t_s,
    )
