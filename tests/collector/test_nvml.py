"""NVML as a page of DCGM's fields, of two generations of GPUs."""

from __future__ import annotations

import pytest

from kneewatch.collector.names.dcgm_fields import field_table
from kneewatch.collector.signals.table import GPU_SIGNALS
from tests.collector.fake_nvml import (
    GIB,
    NO_PERMISSION,
    NOT_AVAILABLE,
    NOT_SUPPORTED,
    UNKNOWN,
)
from tests.collector.nvml_nodes import A100, H100, Node, ampere, hopper, told

NO_VALUE = 2**64 - 1


# Two generations


def test_hopper_tells_everything_that_a_signal_wants() -> None:
    gpu = hopper()
    gpu.processes, gpu.held_bytes = {4711: -1}, {4711: 70 * GIB}
    gpu.links, gpu.link_errors = 2, {(163, 0): 5, (163, 1): 6, (161, 1): 1}
    node = Node(gpu)
    taken = node.collect(times=2)
    (gpu_fields,) = taken.gpus
    assert (gpu_fields.key.uuid, gpu_fields.key.index, gpu_fields.key.model_name) == (
        "GPU-a",
        "0",
        H100,
    )
    assert told(taken, gpu_fields) == {
        "DEV_SM_CLOCK": 1.755e9,
        "DEV_MEM_CLOCK": 2.619e9,
        "DEV_MAX_SM_CLOCK": 1.98e9,
        "DEV_MAX_MEM_CLOCK": 2.619e9,
        "DEV_GPU_TEMP": 58,
        "DEV_MEMORY_TEMP": 62,
        "DEV_CLOCKS_EVENT_REASONS": 4,
        "DEV_POWER_USAGE": pytest.approx(412.5),
        "DEV_ENFORCED_POWER_LIMIT": pytest.approx(700),
        "DEV_TOTAL_ENERGY_CONSUMPTION": pytest.approx(5000),
        "DEV_POWER_VIOLATION": pytest.approx(2.5),
        "DEV_THERMAL_VIOLATION": 0,
        "DEV_GPU_UTIL": pytest.approx(0.93),
        "DEV_MEM_COPY_UTIL": pytest.approx(0.41),
        "DEV_FB_TOTAL": 80 * GIB,
        "DEV_FB_USED": 70 * GIB,
        "DEV_FB_FREE": 9 * GIB,
        "DEV_FB_RESERVED": GIB,
        "NVML_NEIGHBOUR_MEMORY_BYTES": 0,
        "DEV_PCIE_REPLAY_COUNTER": 3,
        "DEV_ECC_SBE_VOL_TOTAL": 7,
        "DEV_ECC_DBE_VOL_TOTAL": 1,
        "DEV_CORRECTABLE_REMAPPED_ROWS": 2,
        "DEV_UNCORRECTABLE_REMAPPED_ROWS": 1,
        "DEV_ROW_REMAP_PENDING": 0,
        "DEV_ROW_REMAP_FAILURE": 0,
        "DEV_GPU_RECOVERY_ACTION": 0,
        "DEV_XID_ERRORS": 0,
        "DEV_NVLINK_ERROR_DL_CRC": 11,
        "DEV_NVLINK_ERROR_DL_REPLAY": 1,
        "PROF_GR_ENGINE_ACTIVE": pytest.approx(0.87),
        "PROF_SM_ACTIVE": pytest.approx(0.8),
        "PROF_SM_OCCUPANCY": pytest.approx(0.4),
        "PROF_PIPE_TENSOR_ACTIVE": pytest.approx(0.125),
        "PROF_DRAM_ACTIVE": pytest.approx(0.65),
        "PROF_PCIE_TX_BYTES": 100 * 2**20,
        "PROF_PCIE_RX_BYTES": 200 * 2**20,
        "PROF_NVLINK_TX_BYTES": 30 * 2**20,
        "PROF_NVLINK_RX_BYTES": 10 * 2**20,
        "DEV_NVLINK_BANDWIDTH_TOTAL": 40 * 2**20,
    }
    assert taken.notes == []
    present = gpu_fields.fields.__contains__
    lacking = [signal.key for signal in GPU_SIGNALS if signal.expr.lacking(present)]
    assert lacking == [], "the signals' fields have the same names from NVML as from DCGM"


@pytest.mark.parametrize(
    ("held_bytes", "neighbours_bytes"),
    [
        pytest.param({4711: 60 * GIB, 12: 3 * GIB, 13: GIB}, 4 * GIB, id="two beside the server"),
        pytest.param({4711: 60 * GIB}, 0, id="the server alone"),
        pytest.param({4711: 60 * GIB, 12: NOT_AVAILABLE}, None, id="a process without a size"),
        pytest.param({}, None, id="none listed, as in a container"),
    ],
)
def test_memory_of_other_processes_is_known_where_the_driver_lists_them(
    held_bytes: dict[int, int], neighbours_bytes: int | None
) -> None:
    gpu = hopper()
    gpu.processes, gpu.held_bytes = dict.fromkeys(held_bytes, -1), held_bytes
    taken = Node(gpu).collect()
    values = told(taken, taken.gpus[0])
    assert values.get("NVML_NEIGHBOUR_MEMORY_BYTES") == neighbours_bytes


def test_ampere_has_no_gpm_and_says_what_that_hides() -> None:
    gpu = ampere()
    node = Node(gpu)
    first = node.collect()
    gpu.linked_kib += 15 * 1024
    taken = node.collect()
    (gpu_fields,) = taken.gpus
    values = told(taken, gpu_fields)
    assert not [name for name in values if name.startswith("PROF_") and "PCIE" not in name]
    assert values["PROF_PCIE_TX_BYTES"] == 1000 * 1024
    assert values["DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"] == 12
    assert values["DEV_NVLINK_BANDWIDTH_TOTAL"] == 2 * 2**20, "MiB a second, sent and received"
    assert "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL" not in first.gpus[0].fields
    (note,) = taken.notes
    assert (note.uuid, note.lost) == ("GPU-b", False)
    assert f"{A100} has no GPM" in note.text
    assert "DCGM exporter" in note.text


def test_the_first_reading_has_no_activity_and_the_layout_is_kept_after_the_second() -> None:
    node = Node(hopper())
    pages = [node.collect() for _ in range(3)]
    active = ["DCGM_FI_PROF_DRAM_ACTIVE" in page.gpus[0].fields for page in pages]
    assert active == [False, True, True]
    assert pages[0].page.layout is not pages[1].page.layout
    assert pages[1].page.layout is pages[2].page.layout
    assert pages[1].gpus is pages[2].gpus


def test_samples_closer_than_nvml_wants_are_not_compared() -> None:
    node = Node(hopper())
    node.collect(times=2)
    node.now_s -= 14.95
    taken = node.collect()
    assert "DCGM_FI_PROF_DRAM_ACTIVE" not in taken.gpus[0].fields


def test_an_older_driver_is_asked_by_older_functions() -> None:
    newer = (
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetMigMode",
        "nvmlEventSetCreate",
        "nvmlGpmQueryDeviceSupport",
    )
    taken = Node(hopper(), without=newer).collect(times=2)
    values = told(taken, taken.gpus[0])
    assert (values["DEV_GPU_TEMP"], values["DEV_CLOCKS_EVENT_REASONS"]) == (57, 8)
    assert values["DEV_FB_USED"] == 71 * GIB, "with what the driver keeps"
    assert "DEV_FB_RESERVED" not in values
    assert "DEV_XID_ERRORS" not in values, "no events: that none came is not known"


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"])
@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN])
def test_a_field_without_an_answer_is_unknown_and_stops_nothing(function: str, error: int) -> None:
    gpu = hopper()
    gpu.refuses = {function: error}
    taken = Node(gpu).collect()
    values = told(taken, taken.gpus[0])
    gone = {"nvmlDeviceGetPowerUsage": "DEV_POWER_USAGE"}.get(function, "DEV_GPU_UTIL")
    assert gone not in values
    assert values["DEV_SM_CLOCK"] == 1.755e9
    assert not [note for note in taken.notes if note.lost]


def test_minus_one_is_no_value() -> None:
    gpu = hopper()
    gpu.values |= {83: NO_VALUE, 94: 2**32 - 1}
    gpu.milliwatts = 2**32 - 1
    values = told(taken := Node(gpu).collect(), taken.gpus[0])
    assert "DEV_TOTAL_ENERGY_CONSUMPTION" not in values
    assert "DEV_PCIE_REPLAY_COUNTER" not in values
    assert "DEV_POWER_USAGE" not in values


def test_gpm_that_is_denied_is_said_with_the_way_out() -> None:
    gpu = hopper()
    gpu.refuses = {"nvmlGpmSampleGet": NO_PERMISSION}
    taken = Node(gpu).collect(times=2)
    (note,) = taken.notes
    assert "may not read GPM" in note.text
    assert "root" in note.text
    assert told(taken, taken.gpus[0])["PROF_PCIE_TX_BYTES"] == 1000 * 1024


# XIDs


def test_the_last_xid_of_each_gpu() -> None:
    node = Node(hopper("GPU-a"), hopper("GPU-b"))

    def xids() -> list[float | None]:
        taken = node.collect()
        return [told(taken, gpu)["DEV_XID_ERRORS"] for gpu in taken.gpus]

    assert xids() == [0, 0]
    node.driver.xids = [(1, 31), (1, 79)]
    assert xids() == [0, 79]
    assert xids() == [0, 79], "it stays, as in DCGM"


def test_a_storm_of_xids_does_not_hold_a_reading_up() -> None:
    node = Node(hopper())
    node.driver.xids = [(0, 31)] * 5000
    node.collect()
    assert len(node.driver.xids) > 4000


# All of it


def test_every_field_is_known_to_the_table_by_the_name_given() -> None:
    gpu = ampere()
    gpu.values |= {29: 1, 30: 2, 31: 0, 45: 0, 52: 0, 59: 0, 77: 0, 79: 0}
    node = Node(gpu, hopper())
    taken = node.collect(times=2)
    unknown = {series.name for series in taken.page.layout.series} - field_table().names.keys()
    assert not unknown
    assert "DCGM_FI_DEV_RETIRED_DBE" in taken.gpus[0].fields


def test_a_reading_makes_few_calls() -> None:
    node = Node(*(hopper(f"GPU-{at}") for at in range(8)))
    node.collect(times=2)
    node.driver.calls.clear()
    node.collect()
    assert len(node.driver.calls) <= 8 * 20
