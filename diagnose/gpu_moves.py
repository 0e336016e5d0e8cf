"""GPUs as they would be with one of their signals elsewhere, for counterfactuals. Pure.

Evidence cites the worst GPU; a signal is moved on every GPU that is as bad as that or worse, under
all the names that exporters have for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kneewatch.diagnose.causes.gpu_clocks import BRAKES, HEATS, POWERS, full_clock_hz
from kneewatch.diagnose.gpu_health import GpuState

CLOCK = "gpu_sm_clock_ratio"
CLOCKS = ("gpu_sm_clock_hz", "gpu_sm_clock_most_hz")

NAMES = {
    "gpu_thermal_throttle_ratio": HEATS,
    "gpu_power_brake_ratio": BRAKES,
    "gpu_power_throttle_ratio": POWERS,
}
"""Evidence that is the most of several signals."""


def on_gpus(signal: str, gpus: Sequence[GpuState]) -> bool:
    """Whether a signal of evidence is read off single GPUs."""
    names = CLOCKS if signal == CLOCK else NAMES.get(signal, (signal,))
    return any(name in gpu.values for gpu in gpus for name in names)


def moved(signal: str, value: float, gpus: Sequence[GpuState]) -> tuple[GpuState, ...]:
    """The GPUs with the signal at most at a value, their clocks at least at one."""
    if signal == CLOCK:
        return tuple(_faster(gpu, value) for gpu in gpus)
    names = NAMES.get(signal, (signal,))
    return tuple(
        replace(
            gpu,
            values={
                name: min(now, value) if name in names and now is not None else now
                for name, now in gpu.values.items()
            },
        )
        for gpu in gpus
    )


def _faster(gpu: GpuState, share: float) -> GpuState:
    full_hz = full_clock_hz(gpu)
    if full_hz is None:
        return gpu
    clocks = {
        name: max(now, share * full_hz)
        for name in CLOCKS
        if (now := gpu.values.get(name)) is not None
    }
    return replace(gpu, values={**gpu.values, **clocks})
