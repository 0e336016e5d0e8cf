"""GPUs for the promtool tests: trouble, and what only looks like it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kneewatch.dashboards.prometheus.model import Plan
from kneewatch.rules.facts import number

NO_VALUE = 9223372036854775794.0
"""DCGM's way to say that it has none."""

BUSY = {
    "DEV_SM_CLOCK": 1755,
    "DEV_GPU_TEMP": 58,
    "DEV_POWER_USAGE": 412.5,
    "DEV_FB_USED": 70_000,
    "DEV_FB_FREE": 10_000,
    "DEV_XID_ERRORS": 0,
    "DEV_PCIE_REPLAY_COUNTER": 7,
    "DEV_ROW_REMAP_FAILURE": 0,
    "PROF_GR_ENGINE_ACTIVE": 0.87,
}
BLANK = ("DEV_XID_ERRORS", "DEV_PCIE_REPLAY_COUNTER", "DEV_ROW_REMAP_FAILURE", "DEV_GPU_TEMP",
         "DEV_ECC_DBE_VOL_TOTAL")  # fmt: skip

WELL, LOST, HOT = "GPUs that are well", "a GPU falls off the bus", "heat holds a GPU down"

Series = Mapping[str, str]


class GpuScenario(NamedTuple):
    """A server's GPUs, each on a node of its own that is called by the scenario's name and what it
    is like, and the alerts that fire."""

    name: str
    series: Series
    fires: frozenset[tuple[str, str]] = frozenset()


def gpu_scenarios(plan: Plan, steps: int) -> tuple[GpuScenario, ...]:
    """GPUs of a server that serves, over so many evaluations."""
    half, interval_s = steps // 2, plan.interval_s

    def level(value: float) -> str:
        return f"{number(value)}x{steps}"

    def gpu(like: str = "", mig: str = "", *, of: str = WELL, **fields: str) -> Series:
        """A busy H100 of the default fields."""
        shown = {name: level(value) for name, value in BUSY.items()} | fields
        node = f"{of}: {like}" if like else of
        labels = {"gpu": "0", "UUID": node, "modelName": "NVIDIA H100 80GB HBM3", "Hostname": node}
        labels |= {"GPU_I_ID": mig} if mig else {}
        labels |= {other: of for _, other in plan.gpu_join}
        inner = ", ".join(f'{name}="{value}"' for name, value in labels.items())
        return {f"DCGM_FI_{name}{{{inner}}}": told for name, told in shown.items()}

    replays = f"5000+{number(interval_s)}x{half} 0x{steps - half}"
    harmless = {
        **gpu("works"),
        **gpu("has no values", **dict.fromkeys(BLANK, level(NO_VALUE))),
        **gpu("XID of a program", DEV_XID_ERRORS=f"0x{half} 43x{half}"),
        **gpu("began anew", DEV_PCIE_REPLAY_COUNTER=replays, DEV_ECC_DBE_VOL_TOTAL=level(0)),
        **gpu("idle", PROF_GR_ENGINE_ACTIVE=level(0.01), DEV_SM_CLOCK=level(345)),
        **gpu("MIG", "1"),
        **gpu("MIG", "2"),
    }
    lost = gpu(of=LOST, DEV_XID_ERRORS=f"0x{half} 79x{half}")
    held_ns = f"0+{number(0.4e9 * interval_s)}x{steps}"
    hot = gpu(of=HOT, DEV_SM_CLOCK=level(990), DEV_THERMAL_VIOLATION=held_ns)
    return (
        GpuScenario(WELL, harmless),
        GpuScenario(LOST, lost, _fires(plan, "Fault", "critical")),
        GpuScenario(HOT, hot, _fires(plan, "Throttled", "warning")),
    )


def _fires(plan: Plan, cause: str, severity: str) -> frozenset[tuple[str, str]]:
    """The alert about the GPU, and that about the engine which it is joined to."""
    names = [f"KneewatchGpu{cause}", *([f"KneewatchCauseGpu{cause}"] if plan.gpu_join else [])]
    return frozenset((name, severity) for name in names)
