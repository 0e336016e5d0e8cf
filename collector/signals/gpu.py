"""The GPU signals of a DCGM page, and the health signals of each GPU. Pure."""

from __future__ import annotations

from kneewatch.collector.packaged import packaged_tables
from kneewatch.collector.scrape_history import Where
from kneewatch.collector.signals.catalogue import expression, signals
from kneewatch.collector.signals.signal import Signal

DEV = "DCGM_FI_DEV_"
PROF = "DCGM_FI_PROF_"

_GROUPS = dict(packaged_tables("collector.signals", "gpu.toml"))
_HEALTH = _GROUPS.pop("health")
RECOMMENDED = str(_GROUPS["recommended"]["needs"])
GPU_SIGNALS = tuple(signals(_GROUPS, {}))


def health_signals(gpu: str) -> tuple[Signal, ...]:
    """The health signals of the GPU with this `gpu` label."""
    of: Where = (("gpu", gpu),)
    return tuple(Signal(key, expression(text, {}, of), "", "") for key, text in _HEALTH.items())
