"""The catalogue of GPU signals, over all GPUs of one DCGM exporter page. Pure.

Fields are DCGM's in SI units (collector/names/dcgm_metrics.toml scales them). Framebuffer use says
how much memory vLLM has taken, never how full its KV cache is.
"""

from __future__ import annotations

from kneewatch.collector.signals.catalogue import Signal
from kneewatch.collector.signals.expr import Across, Count, Expr, FirstOf, Rate, Ratio, Sum

CSV = "dcgm-exporter etc/default-counters.csv"
FULLER = "a fuller CSV than dcgm-exporter's default"
DEV = "DCGM_FI_DEV_"
PROF = "DCGM_FI_PROF_"


def _all(field: str) -> Expr:
    return Across(field, "sum")


def _rates(*fields: str) -> Expr:
    return FirstOf(tuple(Rate(DEV + field, suffix="") for field in fields))


GPU_SIGNALS: tuple[Signal, ...] = (
    Signal(
        "gpu_engine_active_ratio",
        Across(PROF + "GR_ENGINE_ACTIVE", "avg"),
        "Share of time that the GPUs' compute engines were busy, mean over GPUs.",
        "guide 9.3; " + CSV,
        needs="DCGM profiling metrics",
    ),
    Signal(
        "gpu_engine_active_min_ratio",
        Across(PROF + "GR_ENGINE_ACTIVE", "min"),
        "The same for the least busy GPU.",
        CSV,
        needs="DCGM profiling metrics",
    ),
    Signal(
        "gpu_sm_active_ratio",
        Across(PROF + "SM_ACTIVE", "avg"),
        "Share of time that an SM had a warp, mean over SMs and GPUs.",
        "dcgm-exporter, fuller CSV",
        needs=FULLER,
        optional=True,
    ),
    Signal(
        "gpu_sm_occupancy_ratio",
        Across(PROF + "SM_OCCUPANCY", "avg"),
        "Resident warps as a share of the most that SMs hold, mean over GPUs.",
        "dcgm-exporter, fuller CSV",
        needs=FULLER,
        optional=True,
    ),
    Signal(
        "gpu_tensor_active_ratio",
        Across(PROF + "PIPE_TENSOR_ACTIVE", "avg"),
        "Share of cycles that the tensor pipes were busy: high in prefill.",
        "guide 3.2; " + CSV,
        needs="DCGM profiling metrics",
    ),
    Signal(
        "gpu_dram_active_ratio",
        Across(PROF + "DRAM_ACTIVE", "avg"),
        "Share of cycles that device memory moved data: high in decode.",
        "guide 3.3; " + CSV,
        needs="DCGM profiling metrics",
    ),
    Signal(
        "gpu_memory_used_ratio",
        Ratio(_all(DEV + "FB_USED"), Sum((_all(DEV + "FB_USED"), _all(DEV + "FB_FREE")))),
        "Share of device memory in use; vLLM takes its pool at the start, so this is no KV figure.",
        "guide 9.3; " + CSV,
    ),
    Signal("gpu_sm_clock_hz", Across(DEV + "SM_CLOCK", "min"), "SM clock, slowest GPU.", CSV),
    Signal(
        "gpu_sm_clock_ratio",
        Ratio(Across(DEV + "SM_CLOCK", "min"), Across(DEV + "MAX_SM_CLOCK", "max")),
        "SM clock of the slowest GPU against the maximum.",
        "dcgm-exporter, fuller CSV",
        needs=FULLER,
        optional=True,
    ),
    Signal("gpu_power_watts", _all(DEV + "POWER_USAGE"), "Power, all GPUs.", CSV),
    Signal("gpu_temperature_c", Across(DEV + "GPU_TEMP", "max"), "Hottest GPU.", CSV),
    Signal(
        "gpu_memory_temperature_c",
        Across(DEV + "MEMORY_TEMP", "max"),
        "Hottest device memory; some GPUs do not tell.",
        CSV,
    ),
    Signal(
        "gpu_power_throttle_ratio",
        _rates("POWER_VIOLATION"),
        "Seconds a second that the power limit held clocks down, summed over GPUs.",
        "dcgm-exporter, fuller CSV",
        needs=FULLER,
        optional=True,
    ),
    Signal(
        "gpu_thermal_throttle_ratio",
        _rates("THERMAL_VIOLATION"),
        "Seconds a second that heat held clocks down, summed over GPUs.",
        "dcgm-exporter, fuller CSV",
        needs=FULLER,
        optional=True,
    ),
    Signal(
        "gpu_xid_last",
        Across(DEV + "XID_ERRORS", "max"),
        "The last XID code seen, greatest over GPUs; it stays after the event.",
        CSV,
    ),
    Signal(
        "gpu_ecc_uncorrectable",
        Count(DEV + "ECC_DBE_VOL_TOTAL", suffix=""),
        "Uncorrectable ECC errors since the driver was loaded.",
        "dcgm-exporter, fuller CSV",
        needs=FULLER,
        optional=True,
    ),
    Signal(
        "gpu_remapped_rows_uncorrectable",
        Count(DEV + "UNCORRECTABLE_REMAPPED_ROWS", suffix=""),
        "Memory rows remapped for uncorrectable errors.",
        CSV,
    ),
    Signal(
        "gpu_row_remap_failures",
        _all(DEV + "ROW_REMAP_FAILURE"),
        "GPUs whose row remapping failed: to be replaced.",
        CSV,
    ),
    Signal(
        "gpu_nvlink_error_per_s",
        _rates("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLINK_ERROR_DL_CRC"),
        "NVLink CRC errors a second.",
        "dcgm-exporter, fuller CSV",
        needs=FULLER,
        optional=True,
    ),
    Signal(
        "gpu_pcie_tx_bytes_per_s",
        _all(PROF + "PCIE_TX_BYTES"),
        "PCIe bytes a second from the GPUs.",
        CSV,
        needs="DCGM profiling metrics",
    ),
    Signal(
        "gpu_pcie_rx_bytes_per_s",
        _all(PROF + "PCIE_RX_BYTES"),
        "PCIe bytes a second to the GPUs.",
        CSV,
        needs="DCGM profiling metrics",
    ),
    Signal(
        "gpu_pcie_replay_per_s",
        _rates("PCIE_REPLAY_COUNTER"),
        "PCIe retransmissions a second.",
        CSV,
    ),
    Signal(
        "gpu_nvlink_bytes_per_s",
        _all(DEV + "NVLINK_BANDWIDTH_TOTAL"),
        "NVLink bytes a second, both ways, all GPUs; in spite of its name the field is a rate.",
        CSV,
    ),
)
