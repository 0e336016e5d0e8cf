"""The signals that bear on the health of one GPU by itself. Pure.

Over several GPUs they would say nothing: an idle one has low clocks and is well, and it is one of
eight that is hot. The bits of the clock event mask are NVML's (nvml.h).
"""

from __future__ import annotations

from kneewatch.collector.history import Where
from kneewatch.collector.signals.catalogue import Signal
from kneewatch.collector.signals.expr import (
    BitShare,
    Count,
    Expr,
    FirstOf,
    Gauge,
    OverTime,
    Rate,
    Ratio,
    Sum,
)
from kneewatch.collector.signals.gpu import DEV, PROF

REASONS = DEV + "CLOCKS_EVENT_REASONS"
HELD_NS = REASONS.removesuffix("S") + "_{}_NS"
IDLE_BIT, SETTING_BIT, POWER_CAP_BIT = 0x1, 0x2, 0x4
HW_SLOWDOWN_BIT, HEAT_BITS, POWER_BRAKE_BIT = 0x8, 0x20 | 0x40, 0x80


def health_signals(gpu: str | None) -> tuple[Signal, ...]:
    """The signals of the GPU whose columns carry this `gpu` label; None: of each, for PromQL."""
    of: Where = () if gpu is None else (("gpu", gpu),)

    def gauge(field: str) -> Expr:
        return Gauge(DEV + field, of)

    def rate(field: str) -> Expr:
        return Rate(field, of, suffix="")

    def held(*reasons: str) -> Expr:
        return Sum(tuple(rate(HELD_NS.format(reason)) for reason in reasons))

    def links(field: str, *others: str) -> Expr:
        return FirstOf(tuple(rate(DEV + one) for one in (field, *others)))

    clock, most = DEV + "SM_CLOCK", gauge("MAX_SM_CLOCK")
    exprs: dict[str, Expr] = {
        "busy_ratio": FirstOf(
            # Whether a kernel ran is all that is asked here: it says no more of load.
            (
                OverTime(PROF + "GR_ENGINE_ACTIVE", "avg", of),
                OverTime(DEV + "GPU_UTIL", "avg", of),
            )
        ),
        "gpu_sm_clock_hz": OverTime(clock, "avg", of),
        "gpu_sm_clock_most_hz": OverTime(clock, "max", of),
        "gpu_sm_clock_max_hz": most,
        "gpu_sm_clock_ratio": Ratio(OverTime(clock, "avg", of), most),
        "gpu_power_watts": OverTime(DEV + "POWER_USAGE", "avg", of),
        "gpu_power_limit_watts": gauge("ENFORCED_POWER_LIMIT"),
        "gpu_power_limit_default_watts": gauge("POWER_MGMT_LIMIT_DEF"),
        "gpu_temperature_c": OverTime(DEV + "GPU_TEMP", "max", of),
        "gpu_memory_temperature_c": OverTime(DEV + "MEMORY_TEMP", "max", of),
        # Of seconds that were counted and of bits that were seen a driver may give either.
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
