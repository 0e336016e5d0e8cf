"""GPU signals beside an engine's: one DCGM exporter page over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kneewatch.collector.history import NAN, History
from kneewatch.collector.names.gpu_table import field_table
from kneewatch.collector.names.gpus import GpuBinding, GpuSlot, resolve_gpus
from kneewatch.collector.names.resolver import EngineBinding, EngineKey, Slot
from kneewatch.collector.samples import Layout, Page
from kneewatch.collector.signals.catalogue import SignalSet
from kneewatch.collector.signals.gpu import GPU_SIGNALS
from kneewatch.collector.window import Window
from kneewatch.diagnose.profile import LONG_WINDOWS

STALE_AFTER_S = 90.0
"""A GPU page older than this says nothing: dcgm-exporter collects every 30 s by default."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """GPU signals now. `unknown` has a line for each that could not be had."""

    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    unknown: tuple[str, ...] = ("gpu_*: no GPU source",)


NO_GPUS = GpuReading()


class GpuMonitor:
    """All GPUs of one page taken together: that they are the target's is a guess."""

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._history = History(keep_s=LONG_WINDOWS * window_s)
        self._signals = SignalSet(GPU_SIGNALS, self._history)
        self._bound: tuple[Layout, EngineBinding, list[GpuSlot]] | None = None
        self._reading, self._taken_s = NO_GPUS, float("-inf")

    def page(self, t_s: float, page: Page) -> None:
        """Take a DCGM exporter page.

        Raises:
            CollectError: the page holds no DCGM fields.
        """
        if self._bound is None or self._bound[0] is not page.layout:
            self._bound = (page.layout, *engine_binding(resolve_gpus(page.layout)))
        _, binding, slots = self._bound
        scaled = [NAN if (v := slot.value(page.values)) is None else v for slot in slots]
        self._history.append(t_s, Page(page.layout, scaled), binding, None)
        range_s = max(min(self._window_s, t_s - self._history.first_s), 1e-3)
        reading = self._signals.read(Window(self._history, now_s=t_s, range_s=range_s))
        unknown = tuple(
            f"{key}: {', '.join(fields)} is not on the GPU page"
            for key, fields in reading.missing.items()
        )
        self._reading, self._taken_s = GpuReading(reading.values, unknown), t_s

    def failed(self, why: str) -> None:
        """The page could not be had: what was known no longer counts."""
        self._reading, self._taken_s = GpuReading({}, (f"gpu_*: {why}",)), float("-inf")

    def reading(self, now_s: float) -> GpuReading:
        """The newest GPU signals, unless they are stale."""
        if self._reading.values and now_s - self._taken_s > STALE_AFTER_S:
            return GpuReading({}, (f"gpu_*: no GPU page for {now_s - self._taken_s:.0f} s",))
        return self._reading


def engine_binding(gpus: GpuBinding) -> tuple[EngineBinding, list[GpuSlot]]:
    """The GPUs' fields as columns of one binding, and the slots in the order of its positions."""
    slots: list[GpuSlot] = []
    gauges: dict[str, tuple[Slot, ...]] = {}
    counters: dict[str, tuple[Slot, ...]] = {}
    known = field_table().fields
    for gpu in gpus.gpus:
        who = (("gpu", gpu.key.uuid or gpu.key.index), ("mig", gpu.key.mig))
        for name, places in gpu.fields.items():
            side = counters if known[name].kind == "counter" else gauges
            for place in places:
                column = Slot(len(slots), tuple(sorted((*who, *place.labels))))
                side[name] = (*side.get(name, ()), column)
                slots.append(place)
    binding = EngineBinding(EngineKey("", "gpus"), gauges, counters, {}, {}, (), frozenset())
    return binding, slots
