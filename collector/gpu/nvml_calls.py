"""NVML calls, with errors sorted by scope: one field, one GPU or all of NVML. I/O edge.

The library is passed as `pynvml`; tests pass a fake with the same functions. pynvml has no types.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from kneewatch.collector.errors import CollectError

Nvml = Any
"""The module `pynvml`."""

Handle = Any
"""An NVML device handle."""

NO_VALUE = (0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF)
"""NVML's -1 as unsigned integers, which means "no value"."""

MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Which member of a field value's C union holds the value, by NVML_VALUE_TYPE."""

LOST = {
    "NVML_ERROR_GPU_IS_LOST": "has fallen off the bus (XID 79 in the kernel log)",
    "NVML_ERROR_RESET_REQUIRED": "needs a reset before it can be used",
    "NVML_ERROR_UNKNOWN": "no longer answers the driver",
}
"""Errors that mean that a GPU is lost, with the text for the user.

NVML_ERROR_UNKNOWN also occurs for single fields, so it counts only if no call succeeded.
"""

WHOLE = {
    "NVML_ERROR_UNINITIALIZED": (
        "NVML was shut down",
        "",
    ),
    "NVML_ERROR_DRIVER_NOT_LOADED": (
        "the NVIDIA kernel driver is not loaded",
        "run nvidia-smi on the node; start a container with its GPUs",
    ),
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        "NVML's library and the loaded kernel driver have different versions: the driver was"
        " updated while it was in use",
        "reload the nvidia modules or reboot the node; until then no new process gets a GPU",
    ),
    "NVML_ERROR_IRQ_ISSUE": (
        "the kernel has an interrupt problem with a GPU",
        "see dmesg on the node for which GPU",
    ),
    "NVML_ERROR_OPERATING_SYSTEM": (
        "the operating system denies NVML access to its device files",
        "start the container with its GPUs, and check its cgroup's device rules",
    ),
}
"""Errors that concern all GPUs: message and hint."""


def load_nvml() -> Nvml:
    """The module pynvml, imported on first use: it takes 4 MiB."""
    return importlib.import_module("pynvml")


class GpuLostError(Exception):
    """A GPU no longer answers; the message says why."""


class Calls:
    """NVML calls about one GPU. Each returns NVML's answer; None if there is none."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self._answered = 0
        self._unknown = False
        self.refused = False
        """Whether NVML denied a call to this user."""

    def ask(self, function: str, *args: object) -> Any:  # noqa: ANN401 - of NVML, which has no types
        """The result of a pynvml function; None if pynvml lacks the function or NVML has no answer.

        Raises:
            GpuLostError: the GPU is gone.
            CollectError: NVML as a whole fails.
        """
        call = getattr(self.nvml, function, None)
        if call is None:
            return None
        try:
            answer = call(*args)
        except self.nvml.NVMLError as error:
            self._failed(error)
            return None
        self._answered += 1
        return answer

    def number(self, function: str, *args: object) -> float | None:
        """The number that a pynvml function returns; None if there is no value."""
        answer = self.ask(function, *args)
        return None if answer is None or answer in NO_VALUE else float(answer)

    def fields(self, handle: Handle, fields: Sequence[tuple[str, int]]) -> list[float | None]:
        """Field values, read in one call; None where unsupported. Shape: (fields,).

        `fields` are pairs of a field's pynvml name and a scope.
        """
        requested = [(self.constant(name), scope) for name, scope in fields]
        supported = [field for field in requested if field[0] is not None]
        answered = self._answered
        answers = self.ask("nvmlDeviceGetFieldValues", handle, supported) or ()
        # The call succeeds also where no field does: each has an error of its own.
        self._answered = answered
        values = iter([self._value(answer) for answer in answers])
        return [None if field[0] is None else next(values, None) for field in requested]

    def _value(self, answer: Any) -> float | None:  # noqa: ANN401 - an nvmlFieldValue_t
        if answer.nvmlReturn:
            self._failed(self.nvml.NVMLError(answer.nvmlReturn))
            return None
        self._answered += 1
        kind = int(answer.valueType)
        if kind >= len(MEMBERS):
            return None
        value = getattr(answer.value, MEMBERS[kind])
        return float(value) if value not in NO_VALUE and math.isfinite(value) else None

    def constant(self, name: str) -> int | None:
        """A constant of pynvml; None if this pynvml is too old to have it."""
        return getattr(self.nvml, name, None)

    def check(self) -> None:
        """Raise an error if NVML reported an unknown error and no call succeeded.

        Raises:
            GpuLostError: the GPU is gone.
        """
        if self._unknown and not self._answered:
            raise GpuLostError(LOST["NVML_ERROR_UNKNOWN"])

    def _failed(self, error: Any) -> None:  # noqa: ANN401 - an NVMLError
        name = error_name(self.nvml, error)
        if name in WHOLE:
            raise whole_failure(self.nvml, error) from error
        if name == "NVML_ERROR_UNKNOWN":
            self._unknown = True
        elif name in LOST:
            raise GpuLostError(LOST[name]) from error
        elif name == "NVML_ERROR_NO_PERMISSION":
            self.refused = True


def error_name(nvml: Nvml, error: Any) -> str:  # noqa: ANN401 - an NVMLError
    """The name of an NVMLError's code in nvml.h; empty if the code is unknown."""
    names = (*WHOLE, *LOST, "NVML_ERROR_NO_PERMISSION", "NVML_ERROR_LIBRARY_NOT_FOUND")
    return next((name for name in names if getattr(nvml, name, None) == error.value), "")


def whole_failure(nvml: Nvml, error: Any) -> CollectError:  # noqa: ANN401 - an NVMLError
    """The error for a failure of NVML as a whole."""
    name = error_name(nvml, error)
    if name == "NVML_ERROR_LIBRARY_NOT_FOUND":
        return CollectError(
            "no NVIDIA driver library (libnvidia-ml.so.1) here",
            kind="no_gpu",
            hint="in a container, use the NVIDIA runtime with NVIDIA_DRIVER_CAPABILITIES=utility",
        )
    if name == "NVML_ERROR_NO_PERMISSION":
        why, hint = "this user may not use NVML", "grant it read and write on /dev/nvidia*"
    else:
        why, hint = WHOLE.get(name, (f"NVML reports: {error}", "run nvidia-smi on the node"))
    return CollectError(why, kind="driver", hint=hint)


# --- Which processes use which GPUs ---------------------------------------------------------------


NO_INSTANCE = 0xFFFF_FFFF
"""The GPU instance id that NVML gives for a process that uses a whole GPU."""


class NodeGpu(Struct, frozen=True):
    """A GPU of this node, and whether the given processes use it.

    `is_used`: at least one of them uses the GPU. `is_part`: at least one uses a MIG instance of the
    GPU.
    """

    index: str
    uuid: str
    name: str
    memory_bytes: int | None
    is_used: bool
    is_part: bool


def node_gpus(pids: Collection[int], load: Callable[[], Nvml] = load_nvml) -> list[NodeGpu]:
    """All GPUs that the driver lists, each with whether the processes `pids` use it.

    `pids` are process ids on the node, not inside a container.

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
    """One GPU; None if the GPU does not answer."""
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
