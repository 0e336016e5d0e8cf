"""Reads this node's GPUs and MIG instances with NVML into a page of DCGM fields. I/O edge.

XIDs come from NVML events: 0 means no XID since this process started. All other fields are read
anew each time. Fields that a GPU does not support are absent.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from msgspec import Struct

from kneewatch.collector.errors import CollectError
from kneewatch.collector.gpu.nvml_calls import (
    NO_VALUE,
    Calls,
    GpuLostError,
    Handle,
    Nvml,
    load_nvml,
    whole_failure,
)
from kneewatch.collector.gpu.page import GPUS_LOST, GpuNote, GpuPage
from kneewatch.collector.names.dcgm_fields import resolve_gpus
from kneewatch.collector.page import Layout, Page, Series

DEV = "DCGM_FI_DEV_"
ALL_LINKS = 0xFFFF_FFFF
"""The field scope that selects the sum over all NVLinks."""

LINKS_MAX = 72
"""Number of NVLinks that NVML has names for; a higher count is a reading error."""


class Query(Struct, frozen=True):
    """A pynvml function called with a pynvml constant. The field's value is the result times
    `scale`."""

    field: str
    function: str
    constant: str = ""
    scale: float = 1.0


QUERIES = (
    Query("SM_CLOCK", "nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
    Query("MEM_CLOCK", "nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
    Query("MAX_SM_CLOCK", "nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
    Query("MAX_MEM_CLOCK", "nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
    # The second of a pair is the older driver's; the first that answers counts.
    Query("GPU_TEMP", "nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
    Query("GPU_TEMP", "nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
    Query("CLOCKS_EVENT_REASONS", "nvmlDeviceGetCurrentClocksEventReasons"),
    Query("CLOCKS_EVENT_REASONS", "nvmlDeviceGetCurrentClocksThrottleReasons"),
    Query("POWER_USAGE", "nvmlDeviceGetPowerUsage", scale=1e-3),
    Query("ENFORCED_POWER_LIMIT", "nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
)

VALUES = {
    "NVML_FI_DEV_MEMORY_TEMP": "MEMORY_TEMP",
    "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "TOTAL_ENERGY_CONSUMPTION",
    "NVML_FI_DEV_PCIE_REPLAY_COUNTER": "PCIE_REPLAY_COUNTER",
    "NVML_FI_DEV_PERF_POLICY_POWER": "POWER_VIOLATION",
    "NVML_FI_DEV_PERF_POLICY_THERMAL": "THERMAL_VIOLATION",
    "NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT": "BOARD_LIMIT_VIOLATION",
    "NVML_FI_DEV_PERF_POLICY_RELIABILITY": "RELIABILITY_VIOLATION",
    "NVML_FI_DEV_ECC_SBE_VOL_TOTAL": "ECC_SBE_VOL_TOTAL",
    "NVML_FI_DEV_ECC_DBE_VOL_TOTAL": "ECC_DBE_VOL_TOTAL",
    "NVML_FI_DEV_RETIRED_SBE": "RETIRED_SBE",
    "NVML_FI_DEV_RETIRED_DBE": "RETIRED_DBE",
    "NVML_FI_DEV_RETIRED_PENDING": "RETIRED_PENDING",
    "NVML_FI_DEV_REMAPPED_COR": "CORRECTABLE_REMAPPED_ROWS",
    "NVML_FI_DEV_REMAPPED_UNC": "UNCORRECTABLE_REMAPPED_ROWS",
    "NVML_FI_DEV_REMAPPED_PENDING": "ROW_REMAP_PENDING",
    "NVML_FI_DEV_REMAPPED_FAILURE": "ROW_REMAP_FAILURE",
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": "GPU_RECOVERY_ACTION",
}
"""NVML field values, read in one call."""

LINK_VALUES = {
    "NVML_FI_DEV_NVLINK_ERROR_DL_CRC": "NVLINK_ERROR_DL_CRC",
    "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY": "NVLINK_ERROR_DL_REPLAY",
    "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY": "NVLINK_ERROR_DL_RECOVERY",
}
"""Field values that NVML counts per link, since Hopper; they are summed."""

SENT, RECEIVED = "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"
"""KiB over all links since the driver was loaded."""


NEIGHBOURS = "NVML_NEIGHBOUR_MEMORY_BYTES"
"""kneewatch's own field, not one of DCGM's: DCGM lists no processes."""


def device_fields(calls: Calls, handle: Handle, links: int) -> dict[str, float]:
    """A GPU's values from NVML, by DCGM field name."""
    fields: dict[str, float] = {}
    for query in QUERIES:
        if DEV + query.field in fields:
            continue
        extra = () if not query.constant else (calls.constant(query.constant),)
        value = calls.number(query.function, handle, *extra)
        if value is not None:
            fields[DEV + query.field] = value * query.scale
    fields |= _utilization(calls, handle)
    for name, value in _values(calls, handle, links):
        fields[DEV + name] = fields.get(DEV + name, 0.0) + value
    return fields


def memory_fields(calls: Calls, handle: Handle) -> dict[str, float]:
    """Memory sizes in bytes of a GPU or MIG instance, by DCGM field name; `FB_RESERVED` only if the
    driver reports it."""
    memory = calls.ask("nvmlDeviceGetMemoryInfo", handle, calls.constant("nvmlMemory_v2"))
    if memory is None:
        memory = calls.ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return {}
    amounts = {
        "FB_CAPACITY_BYTES": memory.total,
        "FB_FREE_BYTES": memory.free,
        "FB_USED_BYTES": memory.used,
        "FB_RESERVED_BYTES": getattr(memory, "reserved", None),
    }
    return {
        DEV + name: float(value)
        for name, value in amounts.items()
        if value is not None and value not in NO_VALUE
    }


def neighbour_fields(calls: Calls, handle: Handle) -> dict[str, float]:
    """GPU memory, in bytes, that compute processes other than the largest use; by field name.

    vLLM uses one process per GPU, which holds most of the memory. Empty if the driver lists no
    process, or does not report the memory of every process (for example in a container with its own
    process ids).
    """
    running = calls.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    held_bytes = [process.usedGpuMemory for process in running]
    if not held_bytes or None in held_bytes:
        return {}
    return {NEIGHBOURS: float(sum(held_bytes) - max(held_bytes))}


def pcie_fields(calls: Calls, handle: Handle) -> dict[str, float]:
    """PCIe bytes/s by DCGM field name. Each NVML reading takes 20 ms, so GPM is preferred if
    available."""
    fields: dict[str, float] = {}
    for way in ("TX", "RX"):
        kib_per_s = calls.number(
            "nvmlDeviceGetPcieThroughput", handle, calls.constant(f"NVML_PCIE_UTIL_{way}_BYTES")
        )
        if kib_per_s is not None:
            fields[f"DCGM_FI_PROF_PCIE_{way}_BYTES"] = kib_per_s * 1024
    return fields


def link_count(calls: Calls, handle: Handle) -> int:
    """Number of NVLinks of a GPU; 0 if there are none or it is unknown."""
    (count,) = calls.fields(handle, [("NVML_FI_DEV_NVLINK_LINK_COUNT", 0)])
    return int(count) if count is not None and 0 < count <= LINKS_MAX else 0


def linked_bytes(calls: Calls, handle: Handle) -> float | None:
    """Bytes sent and received over all NVLinks since the driver was loaded; None if not
    reported."""
    sent, received = calls.fields(handle, [(name, ALL_LINKS) for name in (SENT, RECEIVED)])
    return None if sent is None or received is None else (sent + received) * 1024


def _utilization(calls: Calls, handle: Handle) -> dict[str, float]:
    rates = calls.ask("nvmlDeviceGetUtilizationRates", handle)
    if rates is None:
        return {}
    both = {"GPU_UTIL": rates.gpu, "MEM_COPY_UTIL": rates.memory}
    return {DEV + name: float(value) for name, value in both.items() if value not in NO_VALUE}


def _values(calls: Calls, handle: Handle, links: int) -> Iterator[tuple[str, float]]:
    requests = [(name, 0, field) for name, field in VALUES.items()]
    requests += [
        (name, link, field) for name, field in LINK_VALUES.items() for link in range(links)
    ]
    answers = calls.fields(handle, [(name, scope) for name, scope, _ in requests])
    for (_, _, field), value in zip(requests, answers, strict=True):
        if value is not None:
            yield field, value


# --- GPM: how busy the parts of a GPU were between two samples, Hopper and later. I/O edge --------


APART_S = 0.1
"""Minimum seconds between two GPM samples."""

MIB = 1024 * 1024
METRICS = {
    "NVML_GPM_METRIC_GRAPHICS_UTIL": ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.01),
    "NVML_GPM_METRIC_SM_UTIL": ("DCGM_FI_PROF_SM_ACTIVE", 0.01),
    "NVML_GPM_METRIC_SM_OCCUPANCY": ("DCGM_FI_PROF_SM_OCCUPANCY", 0.01),
    "NVML_GPM_METRIC_ANY_TENSOR_UTIL": ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.01),
    "NVML_GPM_METRIC_DRAM_BW_UTIL": ("DCGM_FI_PROF_DRAM_ACTIVE", 0.01),
    "NVML_GPM_METRIC_PCIE_TX_PER_SEC": ("DCGM_FI_PROF_PCIE_TX_BYTES", MIB),
    "NVML_GPM_METRIC_PCIE_RX_PER_SEC": ("DCGM_FI_PROF_PCIE_RX_BYTES", MIB),
    "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC": ("DCGM_FI_PROF_NVLINK_TX_BYTES", MIB),
    "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC": ("DCGM_FI_PROF_NVLINK_RX_BYTES", MIB),
}
"""The DCGM field of each GPM metric, and the factor that converts the metric to the field's
unit."""


class Gpm:
    """The GPM samples of one GPU or MIG instance."""

    def __init__(self, calls: Calls, handle: Handle, instance: int | None = None) -> None:
        self._handle, self._instance = handle, instance
        self._samples: list[Handle] = []
        self._taken_s: float | None = None
        support = calls.ask("nvmlGpmQueryDeviceSupport", handle)
        self.supported = support is not None and bool(support.isSupportedDevice)

    def fields(self, calls: Calls, now_s: float) -> dict[str, float]:
        """Activity between the previous sample and now, by DCGM field name; empty on the first
        call."""
        if not self.supported or (self._taken_s is not None and now_s - self._taken_s < APART_S):
            return {}
        while len(self._samples) < 2:
            sample = calls.ask("nvmlGpmSampleAlloc")
            if sample is None:
                return {}
            self._samples.append(sample)
        if not self._sample(calls):
            self._taken_s = None
            return {}
        first, self._taken_s = self._taken_s is None, now_s
        self._samples.reverse()  # the newest first
        return {} if first else self._compared(calls)

    def close(self, calls: Calls) -> None:
        """Free the samples' memory."""
        for sample in self._samples:
            calls.ask("nvmlGpmSampleFree", sample)
        self._samples.clear()
        self._taken_s = None

    def _sample(self, calls: Calls) -> bool:
        """Overwrite the older sample. Returns whether that succeeded."""
        if self._instance is None:
            return calls.ask("nvmlGpmSampleGet", self._handle, self._samples[1]) is not None
        call = ("nvmlGpmMigSampleGet", self._handle, self._instance, self._samples[1])
        return calls.ask(*call) is not None

    def _compared(self, calls: Calls) -> dict[str, float]:
        fields_by_metric = {calls.constant(name): field for name, field in METRICS.items()}
        metric_ids = [metric_id for metric_id in fields_by_metric if metric_id is not None]
        query = calls.nvml.c_nvmlGpmMetricsGet_t()
        query.version = calls.nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(metric_ids)
        query.sample1, query.sample2 = self._samples[1], self._samples[0]
        for at, metric in enumerate(metric_ids):
            query.metrics[at].metricId = metric
        answer = calls.ask("nvmlGpmMetricsGet", query)
        if answer is None:
            return {}
        answers = [answer.metrics[at] for at in range(len(metric_ids))]
        return {
            fields_by_metric[metric.metricId][0]: metric.value
            * fields_by_metric[metric.metricId][1]
            for metric in answers
            if metric.nvmlReturn == 0 and math.isfinite(metric.value)
        }


# --- One GPU through NVML, and its MIG instances. I/O edge ----------------------------------------


LINKED_RATE = "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND"
INSTANCES_MAX = 16
"""Upper limit for MIG instances; no GPU has as many."""

Labels = tuple[tuple[str, str], ...]


class Readings(Struct, frozen=True):
    """The fields of a GPU or MIG instance, and the labels that identify it."""

    labels: Labels
    fields: dict[str, float]


class Device:
    """An open GPU. After a GPU is lost or its driver reloaded, a new Device replaces this one."""

    def __init__(self, nvml: Nvml, index: int, handle: Handle) -> None:
        calls = Calls(nvml)
        self.handle, self.index = handle, str(index)
        self.uuid = str(calls.ask("nvmlDeviceGetUUID", handle) or "")
        self.name = str(calls.ask("nvmlDeviceGetName", handle) or "")
        calls.check()
        self._nvml = nvml
        self._links = link_count(calls, handle)
        self._gpm = Gpm(calls, handle)
        self._instances: dict[str, Gpm] = {}
        self._linked: tuple[float, float] | None = None
        self.notes: list[GpuNote] = []
        """What the newest reading lacks, and why."""

    def read(self, now_s: float) -> list[Readings]:
        """The current values of the GPU and of each of its MIG instances.

        Raises:
            GpuLostError: the GPU no longer answers.
            CollectError: NVML as a whole fails.
        """
        calls, gpm_calls = Calls(self._nvml), Calls(self._nvml)
        own = device_fields(calls, self.handle, self._links)
        mode = calls.ask("nvmlDeviceGetMigMode", self.handle)
        is_split = mode is not None and mode[0] == calls.constant("NVML_DEVICE_MIG_ENABLE")
        parts = list(self._parts(calls, gpm_calls, now_s)) if is_split else []
        activity: dict[str, float] = {}
        if not parts:
            own |= memory_fields(calls, self.handle) | neighbour_fields(calls, self.handle)
            activity = self._gpm.fields(gpm_calls, now_s)
            if "DCGM_FI_PROF_PCIE_TX_BYTES" not in activity:
                own |= pcie_fields(calls, self.handle)
        own |= activity | self._linked_rate(calls, activity, now_s)
        calls.check()
        self._note(split=bool(parts), refused=gpm_calls.refused)
        labels = (("UUID", self.uuid), ("gpu", self.index), ("modelName", self.name))
        return [Readings(labels, own), *parts]

    def close(self) -> None:
        """Free GPM's samples."""
        calls = Calls(self._nvml)
        for gpm in (self._gpm, *self._instances.values()):
            gpm.close(calls)

    def _parts(self, calls: Calls, gpm_calls: Calls, now_s: float) -> Iterator[Readings]:
        seen: set[str] = set()
        for at in range(INSTANCES_MAX):
            handle = calls.ask("nvmlDeviceGetMigDeviceHandleByIndex", self.handle, at)
            instance = None if handle is None else calls.ask("nvmlDeviceGetGpuInstanceId", handle)
            if handle is None or instance is None:
                continue
            uuid = str(calls.ask("nvmlDeviceGetUUID", handle) or f"{self.uuid}/{instance}")
            # By UUID: an instance that is made anew gets an old number and a new UUID.
            if uuid not in self._instances:
                self._instances[uuid] = Gpm(calls, self.handle, int(instance))
            seen.add(uuid)
            activity = self._instances[uuid].fields(gpm_calls, now_s)
            labels = {
                "GPU_I_ID": str(instance),
                "UUID": uuid,
                "gpu": self.index,
                "modelName": self.name,
            }
            yield Readings(tuple(labels.items()), memory_fields(calls, handle) | activity)
        for uuid in self._instances.keys() - seen:
            self._instances.pop(uuid).close(calls)

    def _linked_rate(
        self, calls: Calls, activity: dict[str, float], now_s: float
    ) -> dict[str, float]:
        ways = [activity.get(f"DCGM_FI_PROF_NVLINK_{way}_BYTES") for way in ("TX", "RX")]
        rates = [rate for rate in ways if rate is not None]
        if len(rates) == len(ways):
            return {LINKED_RATE: sum(rates)}
        moved_bytes = linked_bytes(calls, self.handle) if self._links else None
        before, self._linked = self._linked, None
        if moved_bytes is None:
            return {}
        self._linked = (now_s, moved_bytes)
        if before is None or now_s <= before[0] or moved_bytes < before[1]:
            return {}
        return {LINKED_RATE: (moved_bytes - before[1]) / (now_s - before[0])}

    def _note(self, *, split: bool, refused: bool) -> None:
        """Set `notes`. GPUs of the same model get the same text, so that their notes can be
        merged."""
        why = ""
        if split:
            why = f"{self.name} is in MIG mode: only its instances report how busy they are"
        elif not self._gpm.supported:
            why = (
                f"{self.name} has no GPM (Hopper and later): use a DCGM exporter to see how busy"
                " its memory, tensor pipes and SMs are"
            )
        elif refused:
            why = (
                f"this user may not read GPM of {self.name} (how busy memory and tensor pipes are):"
                " run as root, or set NVreg_RestrictProfilingToAdminUsers=0"
            )
        self.notes = [GpuNote(why, self.uuid, self.index)] if why else []


# --- All GPUs of the node as one page -------------------------------------------------------------

EVENTS_MAX = 256
"""Most XID events handled per reading, so that a storm of events does not delay the reading."""

XID = "DCGM_FI_DEV_XID_ERRORS"


class NvmlCollector:
    """Reads all GPUs that the driver makes visible to this process. Not thread-safe."""

    name = "nvml"

    def __init__(
        self,
        load: Callable[[], Nvml] = load_nvml,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load, self._monotonic = load, monotonic
        self._nvml: Nvml | None = None
        self._devices: dict[int, Device] = {}
        self._known: dict[str, str] = {}
        """Index by UUID of every GPU ever seen, so that a missing GPU is noticed."""
        self._events: Handle | None = None
        self._xids: dict[str, int] = {}
        self._layout = Layout((), {})

    def collect(self) -> GpuPage:
        """The GPUs' current values.

        Raises:
            CollectError: of kind `no_gpu` if there is no driver or no GPU; `gpus_lost` if GPUs
                answered before and none does now; `driver` for any other failure.
        """
        try:
            nvml = self._nvml or self._open()
            return self._read(nvml)
        except CollectError:
            self.close()
            raise

    def close(self) -> None:
        """Shut NVML down; the next `collect` starts it again."""
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        devices, self._devices = self._devices, {}
        events, self._events = self._events, None
        calls = Calls(nvml)
        with suppress(CollectError, GpuLostError):  # an unloaded driver has freed all
            for device in devices.values():
                device.close()
            if events is not None:
                calls.ask("nvmlEventSetFree", events)
            calls.ask("nvmlShutdown")

    def _open(self) -> Nvml:
        nvml = self._load()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise whole_failure(nvml, error) from error
        self._nvml = nvml
        calls = Calls(nvml)
        self._events = calls.ask("nvmlEventSetCreate")
        return nvml

    def _read(self, nvml: Nvml) -> GpuPage:
        calls = Calls(nvml)
        count = int(calls.number("nvmlDeviceGetCount") or 0)
        if not count and not self._known:
            raise CollectError(
                "the NVIDIA driver shows no GPU",
                kind="no_gpu",
                hint="start the container with its GPUs",
            )
        now_s = self._monotonic()
        readings: list[Readings] = []
        notes: list[GpuNote] = []
        for index in range(count):
            try:
                device = self._devices.get(index) or self._find(nvml, index)
                if device is None:
                    # A container that was given some of the GPUs counts all of them.
                    denied = f"this process has no access to GPU {index}"
                    notes.append(GpuNote(denied, index=str(index)))
                    continue
                readings += device.read(now_s)
                notes += device.notes
            except GpuLostError as error:
                notes.append(self._lost(index, str(error)))
        if not readings:
            reason = notes[0].text if notes else "the driver no longer lists any of its GPUs"
            gone = not notes or any(note.lost for note in notes)
            kind = GPUS_LOST if gone else "driver"
            raise CollectError(reason, kind=kind, hint="drain the node, then read dmesg on it")
        notes += self._missed(notes)
        self._watch_xids(calls)
        return self._page(readings, notes)

    def _find(self, nvml: Nvml, index: int) -> Device | None:
        calls = Calls(nvml)
        handle = calls.ask("nvmlDeviceGetHandleByIndex", index)
        calls.check()
        if handle is None:
            return None
        device = Device(nvml, index, handle)
        self._devices[index] = device
        self._known[device.uuid] = device.index
        xid_events = calls.constant("nvmlEventTypeXidCriticalError") or 0
        can = int(calls.number("nvmlDeviceGetSupportedEventTypes", handle) or 0)
        if self._events is not None and can & xid_events:
            calls.ask("nvmlDeviceRegisterEvents", handle, xid_events, self._events)
            self._xids.setdefault(device.uuid, 0)
        return device

    def _lost(self, index: int, why: str) -> GpuNote:
        device = self._devices.pop(index, None)
        if device is not None:
            with suppress(GpuLostError):
                device.close()
        uuid = next((known_uuid for known_uuid, at in self._known.items() if at == str(index)), "")
        who = f"GPU {index} ({uuid})" if uuid else f"GPU {index}"
        return GpuNote(f"{who} {why}: drain the node", uuid, str(index), lost=True)

    def _missed(self, notes: Sequence[GpuNote]) -> list[GpuNote]:
        """Notes about GPUs that the driver listed earlier and no longer lists."""
        there = {device.uuid for device in self._devices.values()} | {note.uuid for note in notes}
        return [
            GpuNote(
                f"the driver no longer lists GPU {index} ({uuid}): drain the node",
                uuid,
                index,
                True,
            )
            for uuid, index in self._known.items()
            if uuid not in there
        ]

    def _watch_xids(self, calls: Calls) -> None:
        if self._events is None or not self._xids:
            return
        by_address = {_address(device.handle): device for device in self._devices.values()}
        for _ in range(EVENTS_MAX):
            try:
                event = calls.ask("nvmlEventSetWait_v2", self._events, 0)
            except GpuLostError:
                return
            if event is None:  # NVML timed out: no event came
                return
            device = by_address.get(_address(event.device))
            if device is not None:
                self._xids[device.uuid] = int(event.eventData)

    def _page(self, readings: Sequence[Readings], notes: Sequence[GpuNote]) -> GpuPage:
        series: list[Series] = []
        values: list[float] = []
        for reading in readings:
            labels = tuple(sorted(reading.labels))
            fields = dict(reading.fields)
            uuid = dict(reading.labels)["UUID"]
            if uuid in self._xids:
                fields[XID] = float(self._xids[uuid])
            series += [Series(name, labels) for name in fields]
            values += fields.values()
        if tuple(series) != self._layout.series:
            self._layout = Layout(tuple(series), {})
        page = Page(self._layout, values)
        return GpuPage(page, resolve_gpus(self._layout), notes, "given by NVML")


def _address(handle: Handle) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
