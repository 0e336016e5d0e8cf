"""GPM: how busy the parts of a GPU were between two samples, Hopper and later. I/O edge."""

from __future__ import annotations

import math

from kneewatch.collector.nvml_calls import Calls, Handle

APART_S = 0.1
"""NVML wants two samples to be at least so far apart."""

MIB = 1024 * 1024
METRICS = {
    "NVML_GPM_METRIC_GRAPHICS_UTIL": ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.01),
    "NVML_GPM_METRIC_SM_UTIL": ("DCGM_FI_PROF_SM_ACTIVE", 0.01),
    "NVML_GPM_METRIC_SM_OCCUPANCY": ("DCGM_FI_PROF_SM_OCCUPANCY", 0.01),
    "NVML_GPM_METRIC_ANY_TENSOR_UTIL": ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.01),
    "NVML_GPM_METRIC_DRAM_BW_UTIL": ("DCGM_FI_PROF_DRAM_ACTIVE", 0.01),
    "NVML_GPM_METRIC_PCIE_TX_PER_SEC": ("DCGM_FI_PROF_PCIE_TX_BYTES", MIB),
    "NVML_GPM_METRIC_PCIE_RX_PER_SEC": ("DCGM_FI_PROF_PCIE_RX_BYTES", MIB),
    "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC": ("DCGM_FI_PROF_NVLINK_TX_BYTES", MIB),
    "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC": ("DCGM_FI_PROF_NVLINK_RX_BYTES", MIB),
}
"""DCGM's field for each metric, and what a unit of the metric is in the field's."""


class Gpm:
    """The samples of one GPU, or of one of its MIG instances."""

    def __init__(self, calls: Calls, handle: Handle, instance: int | None = None) -> None:
        self._handle, self._instance = handle, instance
        self._samples: list[Handle] = []
        self._taken_s: float | None = None
        support = calls.ask("nvmlGpmQueryDeviceSupport", handle)
        self.supported = support is not None and bool(support.isSupportedDevice)

    def fields(self, calls: Calls, now_s: float) -> dict[str, float]:
        """What was between the sample before and one taken now, by DCGM's name of the field.

        Nothing at the first time.
        """
        if not self.supported or (self._taken_s is not None and now_s - self._taken_s < APART_S):
            return {}
        while len(self._samples) < 2:
            sample = calls.ask("nvmlGpmSampleAlloc")
            if sample is None:
                return {}
            self._samples.append(sample)
        if not self._sample(calls):
            self._taken_s = None
            return {}
        first, self._taken_s = self._taken_s is None, now_s
        self._samples.reverse()  # the newest first
        return {} if first else self._compared(calls)

    def close(self, calls: Calls) -> None:
        """Give the samples' memory back."""
        for sample in self._samples:
            calls.ask("nvmlGpmSampleFree", sample)
        self._samples.clear()
        self._taken_s = None

    def _sample(self, calls: Calls) -> bool:
        """Overwrites the older sample. Returns whether that could be done."""
        if self._instance is None:
            return calls.ask("nvmlGpmSampleGet", self._handle, self._samples[1]) is not None
        asked = ("nvmlGpmMigSampleGet", self._handle, self._instance, self._samples[1])
        return calls.ask(*asked) is not None

    def _compared(self, calls: Calls) -> dict[str, float]:
        known = {calls.constant(name): field for name, field in METRICS.items()}
        wanted = [one for one in known if one is not None]
        asked = calls.nvml.c_nvmlGpmMetricsGet_t()
        asked.version = calls.nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(wanted)
        asked.sample1, asked.sample2 = self._samples[1], self._samples[0]
        for at, metric in enumerate(wanted):
            asked.metrics[at].metricId = metric
        answer = calls.ask("nvmlGpmMetricsGet", asked)
        if answer is None:
            return {}
        told = [answer.metrics[at] for at in range(len(wanted))]
        return {
            known[metric.metricId][0]: metric.value * known[metric.metricId][1]
            for metric in told
            if metric.nvmlReturn == 0 and math.isfinite(metric.value)
        }
