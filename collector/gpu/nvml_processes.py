"""Which GPUs of this node some processes use, through NVML. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from kneewatch.collector.errors import CollectError
from kneewatch.collector.gpu.nvml_calls import (
    Calls,
    GpuLostError,
    Nvml,
    load_nvml,
    whole_failure,
)

NO_INSTANCE = 0xFFFF_FFFF
"""NVML's GPU instance of a process that uses a whole GPU."""


@dataclass(frozen=True, slots=True)
class NodeGpu:
    """A GPU of this node. `is_used`: by one of the processes; `is_part`: through a MIG instance."""

    index: str
    uuid: str
    name: str
    memory_bytes: int | None
    is_used: bool
    is_part: bool


def node_gpus(pids: Collection[int], load: Callable[[], Nvml] = load_nvml) -> list[NodeGpu]:
    """All GPUs that the driver shows, and whether those processes use each; process ids are the
    node's own.

    Raises:
        CollectError: there is no driver, or it does not answer.
    """
    nvml = load()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise whole_failure(nvml, error) from error
    calls = Calls(nvml)
    try:
        count = int(calls.number("nvmlDeviceGetCount") or 0)
        gpus = [_gpu(nvml, index, pids) for index in range(count)]
        return [gpu for gpu in gpus if gpu is not None]
    finally:
        with suppress(CollectError, GpuLostError):
            calls.ask("nvmlShutdown")


def _gpu(nvml: Nvml, index: int, pids: Collection[int]) -> NodeGpu | None:
    """One GPU; None where it does not answer."""
    calls = Calls(nvml)
    try:
        handle = calls.ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return None
        running = calls.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        memory = calls.ask("nvmlDeviceGetMemoryInfo", handle)
        used = [process for process in running if process.pid in pids]
        return NodeGpu(
            index=str(index),
            uuid=str(calls.ask("nvmlDeviceGetUUID", handle) or ""),
            name=str(calls.ask("nvmlDeviceGetName", handle) or ""),
            memory_bytes=None if memory is None else int(memory.total),
            is_used=bool(used),
            is_part=any(_instance(process) is not None for process in used),
        )
    except GpuLostError:
        return None


def _instance(process: object) -> int | None:
    instance: int | None = getattr(process, "gpuInstanceId", None)
    return None if instance == NO_INSTANCE else instance
