"""One GPU through NVML, and its MIG instances. I/O edge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kneewatch.collector.gpu_pages import GpuNote
from kneewatch.collector.nvml_calls import Calls, Handle, Nvml
from kneewatch.collector.nvml_fields import (
    device_fields,
    link_count,
    linked_bytes,
    memory_fields,
    pcie_fields,
)
from kneewatch.collector.nvml_gpm import Gpm

LINKED_RATE = "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND"
INSTANCES_MAX = 16
"""More MIG instances than any GPU has."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Readings:
    """The fields of a GPU or MIG instance, and the labels that tell whose they are."""

    labels: Labels
    fields: dict[str, float]


class Device:
    """A GPU as it was found; when it was lost or its driver was loaded anew, it is found anew."""

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
        """What the newest reading did not see."""

    def read(self, now_s: float) -> list[Readings]:
        """The GPU as it is now, and each of its MIG instances.

        Raises:
            GpuLostError: it no longer answers.
            CollectError: nothing can be had of NVML at all.
        """
        calls, gpm_calls = Calls(self._nvml), Calls(self._nvml)
        own = device_fields(calls, self.handle, self._links)
        parts = list(self._parts(calls, gpm_calls, now_s)) if self._is_split(calls) else []
        activity: dict[str, float] = {}
        if not parts:
            own |= memory_fields(calls, self.handle)
            activity = self._gpm.fields(gpm_calls, now_s)
            if "DCGM_FI_PROF_PCIE_TX_BYTES" not in activity:
                own |= pcie_fields(calls, self.handle)
        own |= activity | self._linked_rate(calls, activity, now_s)
        calls.check()
        self._note(split=bool(parts), refused=gpm_calls.refused)
        labels = (("UUID", self.uuid), ("gpu", self.index), ("modelName", self.name))
        return [Readings(labels, own), *parts]

    def close(self) -> None:
        """Give back what GPM holds."""
        calls = Calls(self._nvml)
        for gpm in (self._gpm, *self._instances.values()):
            gpm.close(calls)

    def _is_split(self, calls: Calls) -> bool:
        mode = calls.ask("nvmlDeviceGetMigMode", self.handle)
        return mode is not None and mode[0] == calls.constant("NVML_DEVICE_MIG_ENABLE")

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
            _, _, profile = str(calls.ask("nvmlDeviceGetName", handle) or "").partition(" MIG ")
            labels = {
                "GPU_I_ID": str(instance),
                "GPU_I_PROFILE": profile,
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
        known = [rate for rate in ways if rate is not None]
        if len(known) == len(ways):
            return {LINKED_RATE: sum(known)}
        moved_bytes = linked_bytes(calls, self.handle) if self._links else None
        before, self._linked = self._linked, None
        if moved_bytes is None:
            return {}
        self._linked = (now_s, moved_bytes)
        if before is None or now_s <= before[0] or moved_bytes < before[1]:
            return {}
        return {LINKED_RATE: (moved_bytes - before[1]) / (now_s - before[0])}

    def _note(self, *, split: bool, refused: bool) -> None:
        """The same words for GPUs of one kind: they are said once."""
        why = ""
        if split:
            why = f"{self.name} in MIG mode: of its use only what its instances tell is seen"
        elif not self._gpm.supported:
            why = (
                f"{self.name} has no GPM, which came with Hopper: how busy its memory, tensor pipes"
                " and SMs are takes a DCGM exporter"
            )
        elif refused:
            why = (
                f"this user may not read GPM of {self.name}: for how busy memory and tensor pipes "
                "are, run as root or allow profiling to all (NVreg_RestrictProfilingToAdminUsers=0)"
            )
        self.notes = [GpuNote(why, self.uuid, self.index)] if why else []
