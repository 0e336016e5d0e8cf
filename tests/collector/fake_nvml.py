# ruff: noqa: N802 - the functions have NVML's names
"""A GPU driver for tests: pynvml itself, over a library of which every C function is made here.

Structures, wrappers and errors are pynvml's own, so what is tested is what runs on a node.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from msgspec import Struct, field

SUCCESS, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 0, 3, 4, 6
INSUFFICIENT_SIZE = 7
NOT_AVAILABLE = 0xFFFF_FFFF_FFFF_FFFF
DRIVER_NOT_LOADED, TIMEOUT, LOST, MISMATCH, UNKNOWN = 9, 10, 15, 18, 999
GIB = 2**30
C = Any
"""An argument of a C function: a value or a reference, which is written through `_obj`."""

HOPPER_VALUES = {
    **{82: 62, 83: 5_000_000, 94: 3, 74: 2_500_000_000, 75: 0, 3: 7, 4: 1},
    **{142: 2, 143: 1, 144: 0, 145: 0, 230: 0},
}
"""By NVML's field ids."""

AMPERE_VALUES = {82: 55, 83: 9_000_000, 94: 0, 74: 0, 75: 0, 4: 0, 38: 12, 142: 0, 143: 0, 145: 0}
GPM = {1: 87.0, 2: 80.0, 3: 40.0, 5: 12.5, 10: 65.0, 20: 100.0, 21: 200.0, 60: 10.0, 61: 30.0}
"""By GPM's metric ids: per cent, and MiB a second."""


class FakeInstance(Struct, dict=True):
    """A MIG instance."""

    uuid: str
    number: int
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    used_bytes: int = 4 * GIB
    total_bytes: int = 10 * GIB


class FakeGpu(Struct, dict=True):
    """A GPU. `error` is what every call about it gives, `value_error` every field value, `refuses`
    single functions."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    values: dict[int, int] = field(default_factory=lambda: dict(HOPPER_VALUES))
    gpm: dict[int, float] | None = field(default_factory=lambda: dict(GPM))
    links: int = 0
    link_errors: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    linked_kib: int = 0
    used_bytes: int = 70 * GIB
    milliwatts: int = 412_500
    instances: list[FakeInstance] = field(default_factory=list[FakeInstance])
    error: int = SUCCESS
    value_error: int = SUCCESS
    refuses: dict[str, int] = field(default_factory=dict[str, int])
    opens: int = SUCCESS
    processes: dict[int, int] = field(default_factory=dict[int, int])
    """GPU instance of each process that runs on it, by its id; -1: the whole GPU."""
    held_bytes: dict[int, int] = field(default_factory=dict[int, int])
    """Memory of each process; the driver does not tell that of others."""


class FakeDriver:
    """What the library finds. `xids` are events to come: (GPU's index, code)."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.error = SUCCESS
        self.xids: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self.samples = self.ticks = 0
        self.running = 0
        self.hook: Callable[[], None] = lambda: None


def set_pointer(pointer: C, to: int) -> None:
    source = ctypes.c_void_p(to)
    ctypes.memmove(ctypes.addressof(pointer), ctypes.addressof(source), ctypes.sizeof(source))


def address(pointer: C) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def driver_module(driver: FakeDriver, *, without: tuple[str, ...] = ()) -> ModuleType:
    """A pynvml of its own that has loaded this driver; `without` some of its C functions."""
    spec_of_driver = importlib.util.find_spec("pynvml")
    assert spec_of_driver is not None
    assert spec_of_driver.origin is not None
    spec = importlib.util.spec_from_file_location("pynvml_of_a_test", spec_of_driver.origin)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up while it is loaded
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    library = Library(driver, module)
    names = [name for name in dir(library) if name.startswith("nvml") and name not in without]
    module.nvmlLib = SimpleNamespace(**{name: library.function(name) for name in names})
    return cast("ModuleType", module)


def about_gpu(call: Callable[..., int]) -> Callable[..., int]:
    """A function whose first argument is a device: it fails as the GPU does."""

    @wraps(call)
    def checked(self: Library, handle: C, *args: C) -> int:
        gpu = self.whose(handle)
        failed = gpu.error or gpu.refuses.get(call.__name__, SUCCESS)
        return failed or call(self, gpu, handle, *args)

    return checked


class Library:
    """The C functions."""

    def __init__(self, driver: FakeDriver, nv: Any) -> None:  # noqa: ANN401 - pynvml has no types
        self.driver, self.nv = driver, nv
        self.taken: dict[int, tuple[int, FakeGpu]] = {}

    def function(self, name: str) -> Callable[..., int]:
        """A function of the library, as pynvml calls it."""
        call: Callable[..., int] = getattr(self, name)

        def counted(*args: C) -> int:
            self.driver.calls.append(name)
            self.driver.hook()
            return self.driver.error or call(*args)

        return counted

    def whose(self, handle: C) -> FakeGpu:
        return self.driver.gpus[(address(handle) >> 8) - 1]

    def part(self, handle: C) -> FakeInstance | None:
        low = address(handle) & 0xFF
        return self.whose(handle).instances[low - 1] if low else None

    def nvmlInitWithFlags(self, _flags: C) -> int:
        self.driver.running += 1
        return SUCCESS

    def nvmlShutdown(self) -> int:
        self.driver.running -= 1
        return SUCCESS

    def nvmlSystemGetDriverVersion(self, text: C, _size: C) -> int:
        text.value = b"580.105.08"
        return SUCCESS

    def nvmlDeviceGetCount_v2(self, count: C) -> int:
        count._obj.value = len(self.driver.gpus)
        return SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index: C, handle: C) -> int:
        gpu = self.driver.gpus[int(index.value)]
        if gpu.error or gpu.opens:
            return gpu.error or gpu.opens
        set_pointer(handle._obj, (index.value + 1) << 8)
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetUUID(self, gpu: FakeGpu, handle: C, text: C, _size: C) -> int:
        text.value = (self.part(handle) or gpu).uuid.encode()
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetName(self, gpu: FakeGpu, handle: C, text: C, _size: C) -> int:
        text.value = (self.part(handle) or gpu).name.encode()
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetComputeRunningProcesses_v3(
        self, gpu: FakeGpu, _handle: C, count: C, rows: C
    ) -> int:
        room, count._obj.value = count._obj.value, len(gpu.processes)
        if room < len(gpu.processes):
            return INSUFFICIENT_SIZE
        for row, (pid, instance) in zip(rows or (), gpu.processes.items(), strict=False):
            row.pid, row.gpuInstanceId = pid, instance & 0xFFFF_FFFF
            row.usedGpuMemory = gpu.held_bytes.get(pid, NOT_AVAILABLE)
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetClockInfo(self, _gpu: FakeGpu, _handle: C, kind: C, clock: C) -> int:
        clock._obj.value = {1: 1755, 2: 2619}[kind.value]
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetMaxClockInfo(self, _gpu: FakeGpu, _handle: C, kind: C, clock: C) -> int:
        clock._obj.value = {1: 1980, 2: 2619}[kind.value]
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetTemperatureV(self, _gpu: FakeGpu, _handle: C, asked: C) -> int:
        asked._obj.temperature = 58
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetTemperature(self, _gpu: FakeGpu, _handle: C, _sensor: C, reading: C) -> int:
        reading._obj.value = 57
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetCurrentClocksEventReasons(self, _gpu: FakeGpu, _handle: C, bits: C) -> int:
        bits._obj.value = 4
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _gpu: FakeGpu, _handle: C, bits: C) -> int:
        bits._obj.value = 8
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu, _handle: C, milliwatts: C) -> int:
        milliwatts._obj.value = gpu.milliwatts
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetEnforcedPowerLimit(self, _gpu: FakeGpu, _handle: C, milliwatts: C) -> int:
        milliwatts._obj.value = 700_000
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu, _handle: C, rates: C) -> int:
        if gpu.instances:
            return NOT_SUPPORTED
        rates._obj.gpu, rates._obj.memory = 93, 41
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetMemoryInfo_v2(self, gpu: FakeGpu, handle: C, memory: C) -> int:
        held = self.part(handle)
        total = held.total_bytes if held else 80 * GIB
        used = held.used_bytes if held else gpu.used_bytes
        memory._obj.total, memory._obj.used, memory._obj.reserved = total, used, GIB
        memory._obj.free = total - used - GIB
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, _handle: C, memory: C) -> int:
        memory._obj.total, memory._obj.used = 80 * GIB, gpu.used_bytes + GIB
        memory._obj.free = 79 * GIB - gpu.used_bytes
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetPcieThroughput(self, _gpu: FakeGpu, _handle: C, way: C, reading: C) -> int:
        reading._obj.value = {0: 1000, 1: 2000}[way.value]
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, _handle: C, count: C, values: C) -> int:
        for at in range(count.value):
            field_value = values._obj[at]
            value_of_field: dict[tuple[int, int], int] = {
                (key, 0): v for key, v in gpu.values.items()
            }
            value_of_field |= gpu.link_errors
            if gpu.links:
                value_of_field |= {(91, 0): gpu.links, (138, 0xFFFF_FFFF): gpu.linked_kib}
                value_of_field |= {(139, 0xFFFF_FFFF): gpu.linked_kib}
            value = value_of_field.get((field_value.fieldId, field_value.scopeId))
            field_value.nvmlReturn = gpu.value_error or (
                NOT_SUPPORTED if value is None else SUCCESS
            )
            field_value.valueType = self.nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            field_value.value.ullVal = value or 0
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetMigMode(self, gpu: FakeGpu, _handle: C, now: C, pending: C) -> int:
        now._obj.value = pending._obj.value = int(bool(gpu.instances))
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, gpu: FakeGpu, handle: C, index: C, instance: C
    ) -> int:
        if index.value >= len(gpu.instances):
            return NOT_FOUND
        set_pointer(instance._obj, address(handle) | (index.value + 1))
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetGpuInstanceId(self, _gpu: FakeGpu, handle: C, number: C) -> int:
        held = self.part(handle)
        number._obj.value = held.number if held else 0
        return SUCCESS

    @about_gpu
    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu, _handle: C, support: C) -> int:
        support._obj.isSupportedDevice = int(gpu.gpm is not None)
        return SUCCESS

    def nvmlGpmSampleAlloc(self, sample: C) -> int:
        self.driver.samples += 1
        set_pointer(sample._obj, 0x10_0000 + self.driver.samples)
        return SUCCESS

    def nvmlGpmSampleFree(self, _sample: C) -> int:
        self.driver.samples -= 1
        return SUCCESS

    @about_gpu
    def nvmlGpmSampleGet(self, gpu: FakeGpu, _handle: C, sample: C) -> int:
        if gpu.instances or gpu.gpm is None:
            return NOT_SUPPORTED
        self.driver.ticks += 1
        self.taken[address(sample)] = (self.driver.ticks, gpu)
        return SUCCESS

    @about_gpu
    def nvmlGpmMigSampleGet(self, gpu: FakeGpu, _handle: C, _number: C, sample: C) -> int:
        self.driver.ticks += 1
        self.taken[address(sample)] = (self.driver.ticks, gpu)
        return SUCCESS

    def nvmlGpmMetricsGet(self, asked: C) -> int:
        get = asked._obj
        first, last = self.taken[address(get.sample1)], self.taken[address(get.sample2)]
        if get.version != 1 or not first[0] < last[0]:
            return 2
        for at in range(get.numMetrics):
            metric = get.metrics[at]
            value = (last[1].gpm or {}).get(metric.metricId)
            metric.nvmlReturn = NOT_SUPPORTED if value is None else SUCCESS
            metric.value = value if value is not None else 0.0
        return SUCCESS

    def nvmlEventSetCreate(self, events: C) -> int:
        set_pointer(events._obj, 0x20_0000)
        return SUCCESS

    def nvmlEventSetFree(self, _events: C) -> int:
        return SUCCESS

    @about_gpu
    def nvmlDeviceGetSupportedEventTypes(self, _gpu: FakeGpu, _handle: C, event_types: C) -> int:
        event_types._obj.value = 0x1F
        return SUCCESS

    @about_gpu
    def nvmlDeviceRegisterEvents(self, _gpu: FakeGpu, _handle: C, kinds: C, _events: C) -> int:
        return SUCCESS if kinds.value == self.nv.nvmlEventTypeXidCriticalError else 2

    def nvmlEventSetWait_v2(self, _events: C, event: C, timeout_ms: C) -> int:
        assert timeout_ms.value == 0
        if not self.driver.xids:
            return TIMEOUT
        index, code = self.driver.xids.pop(0)
        set_pointer(event._obj.device, (index + 1) << 8)
        event._obj.eventType, event._obj.eventData = self.nv.nvmlEventTypeXidCriticalError, code
        return SUCCESS
