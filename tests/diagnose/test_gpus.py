"""GPU signals over time: what is stale, stuck, repeated or another's."""

from __future__ import annotations

import pytest

from kneewatch.collector.gpu.page import GpuNote
from kneewatch.collector.names.dcgm_fields import Gpus
from kneewatch.diagnose.gpu import GpuChoice, GpuMonitor
from kneewatch.diagnose.values import GpuReading
from tests.collector.dcgm_pages import Pages, body, labels, node

T_S = 1_800_000_000.0


def watched(monitor: GpuMonitor, texts: list[str], *, every_s: float = 15.0) -> GpuReading:
    """The reading after these pages."""
    pages = Pages()
    for at, text in enumerate(texts):
        monitor.take(T_S + at * every_s, pages(text))
    return monitor.reading(T_S + (len(texts) - 1) * every_s)


def energy(joules: float, count: int = 1) -> str:
    return node(count, DEV_TOTAL_ENERGY_CONSUMPTION=joules * 1000)


def test_one_gpu_is_no_guess_and_several_are() -> None:
    reading = watched(GpuMonitor(window_s=60), [node(1)])
    assert (reading.guess, reading.joined) == (False, "the page's only GPU")
    assert not [line for line in reading.unknown if line.startswith("gpu_*")]
    several = watched(GpuMonitor(window_s=60), [node(4)])
    assert several.guess
    assert "guess" in several.joined
    assert [line for line in several.unknown if line.startswith("gpu_*")] == [
        "gpu_*: assuming that all 4 GPUs on the page belong to this server"
    ]
    assert several.values["gpu_engine_active_ratio"] == pytest.approx(0.25)
    assert several.values["gpu_power_watts"] == pytest.approx(4 * 412.5)


def test_what_the_page_lacks_is_told_by_field() -> None:
    reading = watched(GpuMonitor(window_s=60), [node(1)])
    assert reading.values["gpu_tensor_active_ratio"] is None
    assert (
        "gpu_tensor_active_ratio: DCGM_FI_PROF_PIPE_TENSOR_ACTIVE is not on the GPU page"
        in reading.unknown
    )


def test_a_reading_ages() -> None:
    monitor = GpuMonitor(window_s=60)
    watched(monitor, [node(1)])
    assert monitor.reading(T_S + 89).values
    old = monitor.reading(T_S + 91)
    assert (old.values, old.joined) == ({}, "the page's only GPU")
    assert old.unknown == ("gpu_*: the newest GPU page is 91 s old",)


def test_rare_readings_are_not_stale_between_two() -> None:
    monitor = GpuMonitor(window_s=60, interval_s=60)
    watched(monitor, [node(1)])
    assert monitor.reading(T_S + 170).values
    assert not monitor.reading(T_S + 181).values


def test_a_failure_leaves_nothing() -> None:
    monitor = GpuMonitor(window_s=60)
    watched(monitor, [node(1)])
    monitor.failed("http://node:9400/metrics: connection refused")
    reading = monitor.reading(T_S + 1)
    assert reading.values == {}
    assert reading.unknown == ("gpu_*: http://node:9400/metrics: connection refused",)


def test_a_page_that_is_served_and_not_read_anew_says_nothing() -> None:
    monitor = GpuMonitor(window_s=60)
    assert watched(monitor, [energy(5)] * 21).values, "idle GPUs of a slow exporter"
    stuck = watched(GpuMonitor(window_s=60), [energy(5)] * 22)
    assert stuck.values == {}
    assert stuck.unknown == ("gpu_*: energy counter unchanged for 5 min: check the GPU exporter",)
    assert watched(GpuMonitor(window_s=60), [energy(5)] * 30 + [energy(6)]).values, "it recovers"


def test_a_page_without_energy_is_not_called_stuck() -> None:
    blank = 9223372036854775794
    assert watched(GpuMonitor(window_s=60), [energy(blank / 1000)] * 40).values
    text = "".join(line for line in node(1).splitlines(keepends=True) if "ENERGY" not in line)
    assert watched(GpuMonitor(window_s=60), [text] * 40).values


def test_one_stuck_gpu_of_several_is_not_a_stuck_page() -> None:
    def page(at: int) -> str:
        first, other = labels(0), labels(1)
        return body(
            {
                first: {"DEV_TOTAL_ENERGY_CONSUMPTION": 7},
                other: {"DEV_TOTAL_ENERGY_CONSUMPTION": at + 1},
            }
        )

    assert watched(GpuMonitor(window_s=60), [page(at) for at in range(40)]).values


def test_rates_where_readings_are_rarer_than_the_window() -> None:
    texts = [node(1, DEV_POWER_VIOLATION=at * 3e9) for at in range(4)]
    reading = watched(GpuMonitor(window_s=10), texts, every_s=15)
    assert reading.values["gpu_power_throttle_ratio"] == pytest.approx(0.2)


def test_what_a_gpu_has_counted_is_the_newest_pages() -> None:
    counted = {"DEV_ECC_DBE_VOL_TOTAL": 2, "DEV_UNCORRECTABLE_REMAPPED_ROWS": 1}
    reading = watched(GpuMonitor(window_s=60), [node(2), node(2, **counted)])
    assert reading.values["gpu_ecc_uncorrectable"] == 4
    assert reading.values["gpu_remapped_rows_uncorrectable"] == 2


def test_what_belongs_to_a_board_counts_once_for_all_its_instances() -> None:
    parts = {
        labels(0, mig=number): {"DEV_FB_USED": 9_000, "DEV_FB_FREE": 1_000} for number in (1, 2, 5)
    }
    text = body({**parts, labels(1): {}, labels(0, host="node-2"): {}})
    reading = watched(GpuMonitor(window_s=60), [text, text])
    assert reading.values["gpu_power_watts"] == pytest.approx(3 * 412.5)
    used, free = 3 * 9_000 + 2 * 70_000, 3 * 1_000 + 2 * 10_000
    assert reading.values["gpu_memory_used_ratio"] == pytest.approx(used / (used + free))


def test_notes_of_the_targets_gpus_come_first_and_those_of_others_not_at_all() -> None:
    def first(gpus: Gpus) -> GpuChoice:
        return GpuChoice(gpus[:1], "by index: GPU 0", names=frozenset({"0"}))

    notes = (
        GpuNote("GPU 1 is in MIG mode", index="1"),
        GpuNote("it has no GPM", index="0"),
        GpuNote("it has no GPM", index="0"),
        GpuNote("GPU 0 is lost: drain the node", index="0", lost=True),
        GpuNote("the driver is old"),
    )
    monitor = GpuMonitor(window_s=60, choose=first)
    monitor.take(T_S, Pages()(node(2), *notes))
    reading = monitor.reading(T_S)
    assert [line for line in reading.unknown if line.startswith("gpu_*")] == [
        "gpu_*: GPU 0 is lost: drain the node",
        "gpu_*: it has no GPM",
        "gpu_*: the driver is old",
    ]


def test_a_target_none_of_whose_gpus_are_there_has_no_signals() -> None:
    def none(_gpus: Gpus) -> GpuChoice:
        return GpuChoice((), "", missing=("GPU 7 is not on the page",))

    reading = watched(GpuMonitor(window_s=60, choose=none), [node(2)])
    assert (reading.values, reading.unknown) == ({}, ("gpu_*: GPU 7 is not on the page",))
