"""The GPU signals of a DCGM page, and the health signals of each GPU. Pure."""

from __future__ import annotations

from kneewatch.collector.scrape_history import Where
from kneewatch.collector.signals.expr import (
    BitShare,
    Count,
    Expr,
    FirstOf,
    Gauge,
    OverTime,
    Rate,
    ratio,
    total,
)
from kneewatch.collector.signals.signal import Signal

CSV = "dcgm-exporter etc/default-counters.csv"
RECOMMENDED = "the recommended list of DCGM fields (kneewatch export dcgm)"
PROFILING = "DCGM profiling metrics"
DEV = "DCGM_FI_DEV_"
PROF = "DCGM_FI_PROF_"


def _all(field: str) -> Expr:
    return Gauge(field, fold="sum")


def _rates(*fields: str) -> Expr:
    return FirstOf(tuple(Rate(DEV + field, suffix="") for field in fields))


def _default(key: str, expr: Expr, text: str, *, needs: str = "") -> Signal:
    """A signal of fields that are in dcgm-exporter's default list."""
    return Signal(key, expr, text, CSV, needs)


def _recommended(key: str, expr: Expr, text: str) -> Signal:
    """A signal of fields that `kneewatch export dcgm` adds to dcgm-exporter's default list."""
    return Signal(key, expr, text, "dcgm-exporter, recommended fields", RECOMMENDED, optional=True)


GPU_SIGNALS: tuple[Signal, ...] = (
    _default(
        "gpu_engine_active_ratio",
        Gauge(PROF + "GR_ENGINE_ACTIVE", fold="avg"),
        "Share of time that the GPUs' compute engines were busy, mean over GPUs.",
        needs=PROFILING,
    ),
    _default(
        "gpu_engine_active_min_ratio",
        Gauge(PROF + "GR_ENGINE_ACTIVE", fold="min"),
        "Share of time that the least busy GPU's compute engines were busy.",
        needs=PROFILING,
    ),
    _recommended(
        "gpu_sm_active_ratio",
        Gauge(PROF + "SM_ACTIVE", fold="avg"),
        "Share of time that an SM had a warp, mean over SMs and GPUs.",
    ),
    _recommended(
        "gpu_sm_occupancy_ratio",
        Gauge(PROF + "SM_OCCUPANCY", fold="avg"),
        "Resident warps as a share of the SMs' maximum, mean over GPUs.",
    ),
    _default(
        "gpu_tensor_active_ratio",
        Gauge(PROF + "PIPE_TENSOR_ACTIVE", fold="avg"),
        "Share of cycles that the tensor pipes were busy: high in prefill.",
        needs=PROFILING,
    ),
    _default(
        "gpu_dram_active_ratio",
        Gauge(PROF + "DRAM_ACTIVE", fold="avg"),
        "Share of cycles that device memory moved data: high in decode.",
        needs=PROFILING,
    ),
    _default(
        "gpu_memory_used_ratio",
        ratio(_all(DEV + "FB_USED"), total(_all(DEV + "FB_USED"), _all(DEV + "FB_FREE"))),
        "Share of device memory in use; vLLM allocates its pool at start-up: this is not KV usage.",
    ),
    Signal(
        "gpu_neighbour_memory_ratio",
        ratio(
            _all("NVML_NEIGHBOUR_MEMORY_BYTES"), total(_all(DEV + "FB_USED"), _all(DEV + "FB_FREE"))
        ),
        "Share of device memory held by processes other than the largest of each GPU.",
        "NVML's list of compute processes; DCGM has none",
        "NVML on the server's node, and its process ids",
        optional=True,
    ),
    _default("gpu_sm_clock_hz", Gauge(DEV + "SM_CLOCK", fold="min"), "SM clock, slowest GPU."),
    _recommended(
        "gpu_sm_clock_ratio",
        ratio(Gauge(DEV + "SM_CLOCK", fold="min"), Gauge(DEV + "MAX_SM_CLOCK", fold="max")),
        "SM clock of the slowest GPU against the maximum.",
    ),
    _default("gpu_power_watts", _all(DEV + "POWER_USAGE"), "Power, all GPUs."),
    _default("gpu_temperature_c", Gauge(DEV + "GPU_TEMP", fold="max"), "Hottest GPU."),
    _default(
        "gpu_memory_temperature_c",
        Gauge(DEV + "MEMORY_TEMP", fold="max"),
        "Hottest device memory; not all GPUs report it.",
    ),
    _recommended(
        "gpu_power_throttle_ratio",
        _rates("POWER_VIOLATION"),
        "Share of time that the power limit held clocks down, summed over GPUs.",
    ),
    _recommended(
        "gpu_thermal_throttle_ratio",
        _rates("THERMAL_VIOLATION"),
        "Share of time that heat held clocks down, summed over GPUs.",
    ),
    _default(
        "gpu_xid_last",
        Gauge(DEV + "XID_ERRORS", fold="max"),
        "The newest XID code, the greatest over GPUs; it stays after the event.",
    ),
    _recommended(
        "gpu_ecc_uncorrectable",
        Count(DEV + "ECC_DBE_VOL_TOTAL", suffix=""),
        "Uncorrectable ECC errors since the driver was loaded.",
    ),
    _default(
        "gpu_remapped_rows_uncorrectable",
        Count(DEV + "UNCORRECTABLE_REMAPPED_ROWS", suffix=""),
        "Memory rows remapped for uncorrectable errors.",
    ),
    _default(
        "gpu_row_remap_failures",
        _all(DEV + "ROW_REMAP_FAILURE"),
        "GPUs whose row remapping failed: to be replaced.",
    ),
    _recommended(
        "gpu_nvlink_error_per_s",
        _rates("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLINK_ERROR_DL_CRC"),
        "NVLink CRC errors/s.",
    ),
    _default(
        "gpu_pcie_tx_bytes_per_s",
        _all(PROF + "PCIE_TX_BYTES"),
        "PCIe bytes/s from the GPUs.",
        needs=PROFILING,
    ),
    _default(
        "gpu_pcie_rx_bytes_per_s",
        _all(PROF + "PCIE_RX_BYTES"),
        "PCIe bytes/s to the GPUs.",
        needs=PROFILING,
    ),
    _default("gpu_pcie_replay_per_s", _rates("PCIE_REPLAY_COUNTER"), "PCIe retransmissions/s."),
    _default(
        "gpu_nvlink_bytes_per_s",
        _all(DEV + "NVLINK_BANDWIDTH_TOTAL"),
        "NVLink bytes/s, both ways, all GPUs; despite its name the field is a rate.",
    ),
)


# --- Health signals of a single GPU ---------------------------------------------------------------
#
# Each GPU is judged by itself: an idle one has low clocks and is healthy, and only one of eight may
# be hot. The bits of the clock event mask are NVML's (nvml.h).


REASONS = DEV + "CLOCKS_EVENT_REASONS"
HELD_NS = REASONS.removesuffix("S") + "_{}_NS"
IDLE_BIT, SETTING_BIT, POWER_CAP_BIT = 0x1, 0x2, 0x4
HW_SLOWDOWN_BIT, HEAT_BITS, POWER_BRAKE_BIT = 0x8, 0x20 | 0x40, 0x80


def health_signals(gpu: str | None) -> tuple[Signal, ...]:
    """The health signals of the GPU with this `gpu` label; None selects all GPUs, for PromQL."""
    of: Where = () if gpu is None else (("gpu", gpu),)

    def gauge(field: str) -> Expr:
        return Gauge(DEV + field, of)

    def rate(field: str) -> Expr:
        return Rate(field, of, suffix="")

    def held(*reasons: str) -> Expr:
        return total(*(rate(HELD_NS.format(reason)) for reason in reasons))

    def links(field: str, *others: str) -> Expr:
        return FirstOf(tuple(rate(DEV + name) for name in (field, *others)))

    clock, most = DEV + "SM_CLOCK", gauge("MAX_SM_CLOCK")
    exprs: dict[str, Expr] = {
        "busy_ratio": FirstOf(
            # Only whether a kernel ran: these fields do not measure load.
            (
                OverTime(PROF + "GR_ENGINE_ACTIVE", "avg", of),
                OverTime(DEV + "GPU_UTIL", "avg", of),
            )
        ),
        "gpu_sm_clock_hz": OverTime(clock, "avg", of),
        "gpu_sm_clock_most_hz": OverTime(clock, "max", of),
        "gpu_sm_clock_max_hz": most,
        "gpu_sm_clock_ratio": ratio(OverTime(clock, "avg", of), most),
        "gpu_power_watts": OverTime(DEV + "POWER_USAGE", "avg", of),
        "gpu_power_limit_watts": gauge("ENFORCED_POWER_LIMIT"),
        "gpu_power_limit_default_watts": gauge("POWER_MGMT_LIMIT_DEF"),
        "gpu_temperature_c": OverTime(DEV + "GPU_TEMP", "max", of),
        "gpu_memory_temperature_c": OverTime(DEV + "MEMORY_TEMP", "max", of),
        # A driver may report counted seconds, or the bits of the moment.
        "gpu_thermal_throttle_ratio": FirstOf(
            (rate(DEV + "THERMAL_VIOLATION"), held("SW_THERM_SLOWDOWN", "HW_THERM_SLOWDOWN"))
        ),
        "gpu_heat_bit_ratio": BitShare(REASONS, HEAT_BITS, of),
        "gpu_power_throttle_ratio": FirstOf((rate(DEV + "POWER_VIOLATION"), held("SW_POWER_CAP"))),
        "gpu_power_bit_ratio": BitShare(REASONS, POWER_CAP_BIT, of),
        "gpu_power_brake_ratio": held("HW_POWER_BRAKE_SLOWDOWN"),
        "gpu_power_brake_bit_ratio": BitShare(REASONS, POWER_BRAKE_BIT, of),
        "gpu_board_limit_ratio": rate(DEV + "BOARD_LIMIT_VIOLATION"),
        "gpu_hw_slowdown_ratio": BitShare(REASONS, HW_SLOWDOWN_BIT, of),
        "gpu_clock_setting_ratio": BitShare(REASONS, SETTING_BIT, of),
        "gpu_idle_ratio": BitShare(REASONS, IDLE_BIT, of),
        "gpu_ecc_uncorrectable": Count(DEV + "ECC_DBE_VOL_TOTAL", of, suffix=""),
        "gpu_ecc_uncorrectable_per_s": rate(DEV + "ECC_DBE_VOL_TOTAL"),
        "gpu_row_remap_failures": gauge("ROW_REMAP_FAILURE"),
        "gpu_row_remap_pending": FirstOf((gauge("ROW_REMAP_PENDING"), gauge("RETIRED_PENDING"))),
        "gpu_recovery_action": gauge("GPU_RECOVERY_ACTION"),
        "gpu_nvlink_error_per_s": links("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLINK_ERROR_DL_CRC"),
        "gpu_nvlink_recovery_per_s": links(
            "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
            "NVLINK_ERROR_DL_RECOVERY",
            "NVLINK_RECOVERY_EVENT_TOTAL",
        ),
        "gpu_nvlink_recovery_failed_per_s": rate(DEV + "NVLINK_RECOVERY_FAILED_TOTAL"),
        "gpu_pcie_replay_per_s": rate(DEV + "PCIE_REPLAY_COUNTER"),
    }
    return tuple(Signal(key, expr, "", "") for key, expr in exprs.items())
