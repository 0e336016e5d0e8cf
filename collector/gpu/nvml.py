"""The GPUs of this node through NVML, as a page of DCGM fields. I/O edge.

XIDs come from NVML events, so 0 means none since the start of this process; all other fields are
read anew each time. Fields that a GPU does not support are absent.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kneewatch.collector.errors import CollectError
from kneewatch.collector.gpu.nvml_calls import (
    Calls,
    GpuLostError,
    Handle,
    Nvml,
    load_nvml,
    whole_failure,
)
from kneewatch.collector.gpu.nvml_device import Device, Readings
from kneewatch.collector.gpu.page import GPUS_LOST, GpuNote, GpuPage, GpuResolver
from kneewatch.collector.samples import Layout, Page, Series

EVENTS_MAX = 256
"""Most XID events per reading: a storm of them must not delay it."""

XID = "DCGM_FI_DEV_XID_ERRORS"


class NvmlCollector:
    """Reads all GPUs that the driver shows to this process. Not thread-safe."""

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
        """Index by UUID of every GPU that was ever seen: one that is gone is missed."""
        self._events: Handle | None = None
        self._xids: dict[str, int] = {}
        self._layout = Layout((), {})
        self._resolver = GpuResolver()

    def collect(self) -> GpuPage:
        """The GPUs' current values.

        Raises:
            CollectError: of kind no_gpu where there is no driver or no GPU, of kind gpus_lost where
                no GPU answers that did before, else of kind driver.
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
        with suppress(CollectError, GpuLostError):  # a driver that is gone took it all with it
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
                    notes.append(_closed(index))
                    continue
                readings += device.read(now_s)
                notes += device.notes
            except GpuLostError as error:
                notes.append(self._lost(index, str(error)))
        if not readings:
            said = notes[0].text if notes else "the driver no longer lists any of its GPUs"
            gone = not notes or any(note.lost for note in notes)
            kind = GPUS_LOST if gone else "driver"
            raise CollectError(said, kind=kind, hint="drain the node, then read dmesg on it")
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
            if event is None:  # nothing came, as NVML's timeout says
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
        gpus = self._resolver.resolve(self._layout)
        return GpuPage(Page(self._layout, values), gpus, notes, "given by NVML")


def _closed(index: int) -> GpuNote:
    # A container that was given some of the GPUs counts all of them.
    return GpuNote(f"this process has no access to GPU {index}", index=str(index))


def _address(handle: Handle) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
