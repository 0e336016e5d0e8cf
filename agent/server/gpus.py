"""The GPUs that a server's process on this node uses. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kneewatch.agent.server.process import namespace
from kneewatch.collector.errors import CollectError
from kneewatch.collector.gpu.nvml_calls import NodeGpu, Nvml, load_nvml, node_gpus
from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.deployment.server_facts import (
    GPU_UUIDS,
    GPUS,
    SERVER_GPUS,
    SourceReading,
    Value,
    models_reading,
)

NODE_PIDS = "pid:[4026531836]"
"""The process-id namespace of the node itself (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""

OTHER_PIDS = (
    "cannot tell which GPUs the server uses: the driver reports process ids of the node, which "
    "kneewatch's container does not see; set hostPID: true, or the setting gpu"
)
PARTS = "the server uses MIG instances: set gpu"


def read_gpus(
    pid: int, now_s: float, *, load: Callable[[], Nvml] = load_nvml, pids: str | None = None
) -> SourceReading:
    """The GPUs of a server's process and those that it started. Without a driver there is no fact
    and no note.

    Where its GPUs are unknown but all GPUs of the node are of one model, the model is a fact.
    `pids` is kneewatch's own process-id namespace; None: read it.
    """
    comparable = (namespace("self", "pid") if pids is None else pids) == NODE_PIDS
    try:
        gpus = node_gpus(_family(pid) if comparable else (), load)
    except CollectError as error:
        notes = () if error.kind == "no_gpu" else (f"GPUs of the server: {error}",)
        return SourceReading(GPUS, now_s, notes=notes)
    if not gpus:
        return SourceReading(GPUS, now_s)
    used = [gpu for gpu in gpus if gpu.is_used]
    if any(gpu.is_part for gpu in used):
        return SourceReading(GPUS, now_s, notes=(PARTS,))
    values = _model(used if comparable else gpus)
    if used:
        values[SERVER_GPUS] = len(used)
        values[GPU_UUIDS] = " ".join(gpu.uuid for gpu in used)
    return SourceReading(GPUS, now_s, values, notes=() if comparable else (OTHER_PIDS,))


def _model(gpus: Collection[NodeGpu]) -> dict[str, Value]:
    """The model and memory of GPUs that are all alike; nothing where they differ."""
    values = dict(models_reading([gpu.name for gpu in gpus], 0.0).values)
    values.pop(SERVER_GPUS, None)
    if "gpu_name" not in values:
        return {}
    bytes_each = {gpu.memory_bytes for gpu in gpus}
    least_bytes = min((size for size in bytes_each if size is not None), default=None)
    if least_bytes is not None:
        values["gpu_memory_gib"] = round(least_bytes / GIB, 2)
    return values


def _family(pid: int) -> set[int]:
    """A process and all that it started."""
    import psutil

    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return {pid}
