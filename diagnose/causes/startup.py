"""Causes proven by vLLM's log: the server did not start, or its engine died. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.diagnose.cause import Cause, Evidence
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.deployment import log_failure as log
from kneewatch.diagnose.deployment.log_failure import Failure
from kneewatch.rules.conditions import Number
from kneewatch.rules.rule import Severity

CONFIDENCE = 0.95
"""Below 1, because the log may be from an earlier start than the one in question."""


REASONS: Mapping[str, tuple[str, str]] = {
    log.KV_NONE: (
        "no GPU memory is left for the KV cache after weights and activations",
        "Use more GPUs (--tensor-parallel-size), a higher --gpu-memory-utilization or a smaller "
        "quantization.",
    ),
    log.KV_SMALL: (
        "the KV cache is smaller than one request of --max-model-len",
        "Lower --max-model-len, or raise --gpu-memory-utilization.",
    ),
    log.FREE_MEMORY: (
        "other processes use the GPU memory that --gpu-memory-utilization asks for",
        "Find the processes on the GPU with nvidia-smi: a previous vLLM may still hold memory. "
        "Else lower --gpu-memory-utilization.",
    ),
    log.GPU_MEMORY: (
        "the GPU ran out of memory",
        "Check with nvidia-smi that no other process uses the GPU. Else lower --max-num-seqs or "
        "--max-num-batched-tokens, or use more GPUs (--tensor-parallel-size).",
    ),
    log.HOST_MEMORY: (
        "the process was killed (SIGKILL, exit code 137), which is what the kernel does when host "
        "memory is exhausted",
        "Check the kernel log (dmesg) and the container's memory limit; raise the limit, or lower "
        "the CPU memory that vLLM uses (--kv-offloading-size, --max-cpu-loras).",
    ),
    log.MODEL_LEN: (
        "--max-model-len is longer than the model allows",
        "Lower --max-model-len to the length in the model's config.json.",
    ),
    log.FLAG: (
        "vLLM does not accept an argument",
        "Compare the argument with `vllm serve --help` of the installed version.",
    ),
    log.QUANTIZATION: (
        "this vLLM or this GPU does not support the model's quantization",
        "Use a checkpoint with a quantization that the GPU supports.",
    ),
    log.NCCL: (
        "the GPUs could not communicate (NCCL)",
        "Start with NCCL_DEBUG=INFO and read its first error; check /dev/shm, the network "
        "interface (NCCL_SOCKET_IFNAME) and that all GPUs answer in nvidia-smi.",
    ),
    log.PORT: (
        "another process listens on the port",
        "Find the process with `ss -ltnp`: a previous vLLM may still run. Else set another --port.",
    ),
    log.HOST_MEMORY_IN_USE: (
        "less host memory is free than vLLM on a CPU is set to use",
        "Free memory of the node, or lower VLLM_CPU_KVCACHE_SPACE, --kv-cache-memory-bytes or "
        "--gpu-memory-utilization.",
    ),
    log.MODEL_PATH: (
        "the model is neither a folder nor an id that could be loaded",
        "Check the model's path as the server's user and container see it, or the id and its "
        "access token.",
    ),
    log.OTHER: (
        "the log ends with an error",
        "Read the log from its first error line on.",
    ),
}
"""What happened and what to do, by kind of failure."""

STARTUP_FAILED = CauseRecord(
    id="startup_failed",
    title="Start-up failed",
    means="vLLM's log shows why the server did not start.",
    explains=("target_down", "metrics_missing", "engine_restarted"),
    onset_s=Number(0.0),
    clear_s=Number(0.0),
)
ENGINE_DIED = CauseRecord(
    id="engine_died",
    title="Engine died",
    means="vLLM's log shows why the engine died after the server had started.",
    explains=("target_down", "metrics_missing", "engine_stalled", "engine_restarted"),
    onset_s=Number(0.0),
    clear_s=Number(0.0),
)
"""Concluded where the log is read (`failed`), not from `Facts`."""


OTHERS_LEAST_GIB = 1.0
"""A process without tensors, such as a monitor or a display, uses less GPU memory than this."""


def _gpu_lever(others_gib: float) -> str:
    """What to do about exhausted GPU memory, of which other processes use `others_gib`."""
    less = (
        "Lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens, or use more "
        "GPUs (--tensor-parallel-size)."
    )
    if others_gib < OTHERS_LEAST_GIB:
        return less
    return (
        f"Other processes hold {others_gib:.1f} GiB of this GPU: find them with nvidia-smi, a "
        f"previous vLLM may still run. Else: {less[0].lower()}{less[1:]}"
    )


def failed(failure: Failure, t_s: float) -> Cause:
    """The cause of a failure that a log proves, with the log line as evidence; it starts at
    `t_s`."""
    record = ENGINE_DIED if failure.served else STARTUP_FAILED
    what, lever = REASONS[failure.kind]
    if failure.kind == log.GPU_MEMORY and (others_gib := log.others_gpu_gib(failure)) is not None:
        lever = _gpu_lever(others_gib)
    who = "The engine died" if failure.served else "vLLM did not start"
    return Cause(
        id=record.id,
        confidence=CONFIDENCE,
        severity=Severity.CRITICAL,
        summary=f"{who}: {what}.",
        evidence=(Evidence("server_log", None, None, f"log: {failure.line}"),),
        lever=lever,
        since_s=t_s,
        seen_s=t_s,
    )
