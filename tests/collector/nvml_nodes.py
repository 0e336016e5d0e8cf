"""A collector over a driver of a test's own, with a clock of its own."""

from __future__ import annotations

from types import ModuleType

import pytest

from kneewatch.collector.errors import CollectError
from kneewatch.collector.gpu.nvml import NvmlCollector
from kneewatch.collector.gpu.page import GpuPage
from kneewatch.collector.names.dcgm_fields import GpuFields
from tests.collector.fake_nvml import AMPERE_VALUES, FakeDriver, FakeGpu, driver_module

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


class Node:
    """A collector over a driver, with a clock of its own."""

    def __init__(self, *gpus: FakeGpu, without: tuple[str, ...] = ()) -> None:
        self.driver = FakeDriver(*gpus)
        self.now_s = 1000.0
        self._module = driver_module(self.driver, without=without)
        self.collector = NvmlCollector(self._load, monotonic=lambda: self.now_s)

    def _load(self) -> ModuleType:
        return self._module

    def collect(self, *, times: int = 1) -> GpuPage:
        for _ in range(times - 1):
            self.collector.collect()
            self.now_s += 15
        taken = self.collector.collect()
        self.now_s += 15
        return taken


def hopper(uuid: str = "GPU-a") -> FakeGpu:
    return FakeGpu(uuid)


def ampere(uuid: str = "GPU-b") -> FakeGpu:
    return FakeGpu(uuid, name=A100, values=dict(AMPERE_VALUES), gpm=None, links=12)


def told(taken: GpuPage, gpu: GpuFields) -> dict[str, float | None]:
    """What the page says of a GPU, in the fields' units, without DCGM's prefix."""
    return {
        name.removeprefix("DCGM_FI_"): slots[0].value(taken.page.values)
        for name, slots in gpu.fields.items()
    }


def failure(node: Node) -> CollectError:
    with pytest.raises(CollectError) as caught:
        node.collect()
    assert caught.value.hint
    return caught.value
