"""What is asked of one GPU through NVML, by the name that DCGM gives each field. I/O edge.

NVML counts in the units of DCGM's names up to 4.7 (MHz, ns, mJ), so these are the names used; where
it counts in another unit, the name of that unit is (collector/names/dcgm_metrics.toml has both).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kneewatch.collector.nvml_calls import NO_VALUE, Calls, Handle

DEV = "DCGM_FI_DEV_"
ALL_LINKS = 0xFFFF_FFFF
"""The scope that means the sum over all NVLinks."""

LINKS_MAX = 72
"""As many NVLinks as NVML has names for; a greater count is a misreading."""


@dataclass(frozen=True, slots=True)
class Query:
    """One call with an argument of pynvml's constants: its answer times `scale` is the field's."""

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
"""NVML's field values, all asked for in one call."""

LINK_VALUES = {
    "NVML_FI_DEV_NVLINK_ERROR_DL_CRC": "NVLINK_ERROR_DL_CRC",
    "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY": "NVLINK_ERROR_DL_REPLAY",
    "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY": "NVLINK_ERROR_DL_RECOVERY",
}
"""Those that NVML counts by link, since Hopper; they are summed."""

SENT, RECEIVED = "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"
"""KiB over all links since the driver was loaded."""


def device_fields(calls: Calls, handle: Handle, links: int) -> dict[str, float]:
    """What NVML says of a GPU, by DCGM's name of the field."""
    found: dict[str, float] = {}
    for query in QUERIES:
        if DEV + query.field in found:
            continue
        extra = () if not query.constant else (calls.constant(query.constant),)
        value = calls.number(query.function, handle, *extra)
        if value is not None:
            found[DEV + query.field] = value * query.scale
    found |= _utilization(calls, handle)
    for name, value in _values(calls, handle, links):
        found[DEV + name] = found.get(DEV + name, 0.0) + value
    return found


def memory_fields(calls: Calls, handle: Handle) -> dict[str, float]:
    """The memory of a GPU or of a MIG instance; what the driver keeps apart where it is told."""
    memory = calls.ask("nvmlDeviceGetMemoryInfo", handle, calls.constant("nvmlMemory_v2"))
    if memory is None:
        memory = calls.ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return {}
    found = {
        "FB_CAPACITY_BYTES": memory.total,
        "FB_FREE_BYTES": memory.free,
        "FB_USED_BYTES": memory.used,
        "FB_RESERVED_BYTES": getattr(memory, "reserved", None),
    }
    return {
        DEV + name: float(value)
        for name, value in found.items()
        if value is not None and value not in NO_VALUE
    }


def pcie_fields(calls: Calls, handle: Handle) -> dict[str, float]:
    """PCIe bytes a second; NVML watches 20 ms for each, so GPM's are taken where there are any."""
    found: dict[str, float] = {}
    for way in ("TX", "RX"):
        kib_per_s = calls.number(
            "nvmlDeviceGetPcieThroughput", handle, calls.constant(f"NVML_PCIE_UTIL_{way}_BYTES")
        )
        if kib_per_s is not None:
            found[f"DCGM_FI_PROF_PCIE_{way}_BYTES"] = kib_per_s * 1024
    return found


def link_count(calls: Calls, handle: Handle) -> int:
    """NVLinks of a GPU; 0 where there are none or nobody knows."""
    (count,) = calls.fields(handle, [("NVML_FI_DEV_NVLINK_LINK_COUNT", 0)])
    return int(count) if count is not None and 0 < count <= LINKS_MAX else 0


def linked_bytes(calls: Calls, handle: Handle) -> float | None:
    """Bytes over all NVLinks, both ways, since the driver was loaded; None where it is not told."""
    sent, received = calls.fields(handle, [(name, ALL_LINKS) for name in (SENT, RECEIVED)])
    return None if sent is None or received is None else (sent + received) * 1024


def _utilization(calls: Calls, handle: Handle) -> dict[str, float]:
    rates = calls.ask("nvmlDeviceGetUtilizationRates", handle)
    if rates is None:
        return {}
    both = {"GPU_UTIL": rates.gpu, "MEM_COPY_UTIL": rates.memory}
    return {DEV + name: float(value) for name, value in both.items() if value not in NO_VALUE}


def _values(calls: Calls, handle: Handle, links: int) -> Iterator[tuple[str, float]]:
    wanted = [(name, 0, field) for name, field in VALUES.items()]
    wanted += [(name, link, field) for name, field in LINK_VALUES.items() for link in range(links)]
    answers = calls.fields(handle, [(name, scope) for name, scope, _ in wanted])
    for (_, _, field), value in zip(wanted, answers, strict=True):
        if value is not None:
            yield field, value
