"""NVML where GPUs are split, lost or another's, and where the driver goes away."""

from __future__ import annotations

import ctypes

import pytest

from kneewatch.collector.errors import CollectError
from kneewatch.collector.gpu.nvml import NvmlCollector
from kneewatch.collector.gpu.page import GPUS_LOST
from tests.collector.fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    LOST,
    MISMATCH,
    NO_PERMISSION,
    UNKNOWN,
    FakeInstance,
)
from tests.collector.nvml_nodes import Node, ampere, failure, hopper, told

# MIG


def test_mig_instances_have_their_memory_and_activity_and_the_board_the_rest() -> None:
    gpu = hopper()
    gpu.instances = [FakeInstance("MIG-one", 3), FakeInstance("MIG-two", 5, used_bytes=2 * GIB)]
    node = Node(gpu, hopper("GPU-whole"))
    taken = node.collect(times=2)
    board, first, two, whole = taken.gpus
    assert [
        (fields.key.uuid, fields.key.index, fields.key.mig) for fields in (board, first, two)
    ] == [
        ("GPU-a", "0", ""),
        ("MIG-one", "0", "3"),
        ("MIG-two", "0", "5"),
    ]
    values = told(taken, board)
    assert values["DEV_GPU_TEMP"] == 58
    assert not [name for name in values if name.startswith(("DEV_FB", "PROF", "DEV_GPU_UTIL"))]
    assert told(taken, first)["DEV_FB_USED"] == 4 * GIB
    assert told(taken, two)["DEV_FB_USED"] == 2 * GIB
    assert told(taken, two)["PROF_DRAM_ACTIVE"] == pytest.approx(0.65)
    assert "DCGM_FI_PROF_DRAM_ACTIVE" in whole.fields
    (note,) = taken.notes
    assert note.uuid == "GPU-a"
    assert "MIG" in note.text


def test_an_instance_that_is_made_anew_is_compared_with_itself_only() -> None:
    gpu = hopper()
    gpu.instances = [FakeInstance("MIG-old", 3)]
    node = Node(gpu)
    node.collect(times=2)
    held = node.driver.samples
    gpu.instances = [FakeInstance("MIG-new", 3)]
    taken = node.collect()
    (instance,) = [fields for fields in taken.gpus if fields.key.mig]
    assert instance.key.uuid == "MIG-new"
    assert "DCGM_FI_PROF_DRAM_ACTIVE" not in instance.fields
    assert node.driver.samples == held, "the old one's samples were given back"
    assert "DCGM_FI_PROF_DRAM_ACTIVE" in node.collect().gpus[1].fields


# What goes away


@pytest.mark.parametrize(
    ("error", "word"), [(LOST, "fallen off the bus"), (UNKNOWN, "no longer answers"), (16, "reset")]
)
def test_a_lost_gpu_is_said_and_the_others_are_read(error: int, word: str) -> None:
    node = Node(hopper("GPU-a"), hopper("GPU-b"))
    node.collect()
    node.driver.gpus[1].error = error
    taken = node.collect()
    assert [gpu.key.uuid for gpu in taken.gpus] == ["GPU-a"]
    (note,) = taken.notes
    assert (note.uuid, note.index, note.lost) == ("GPU-b", "1", True)
    assert word in note.text
    assert "GPU 1 (GPU-b)" in note.text
    node.driver.gpus[1].error = 0
    node.driver.calls.clear()
    again = node.collect().gpus
    assert "nvmlDeviceGetHandleByIndex_v2" in node.driver.calls, "its old handle is not trusted"
    assert [gpu.key.uuid for gpu in again] == ["GPU-a", "GPU-b"], "after a reset it is there again"
    active = ["DCGM_FI_PROF_DRAM_ACTIVE" in gpu.fields for gpu in again]
    assert active == [True, False], "what was sampled before the loss is not compared with"


def test_field_values_tell_of_a_lost_gpu_too() -> None:
    node = Node(hopper("GPU-a"), hopper("GPU-b"))
    node.collect()
    node.driver.gpus[0].value_error = LOST
    assert [note.uuid for note in node.collect().notes if note.lost] == ["GPU-a"]


def test_a_gpu_that_the_driver_no_longer_counts_is_missed() -> None:
    node = Node(hopper("GPU-a"), hopper("GPU-b"))
    node.collect()
    del node.driver.gpus[1]
    node.collector.close()
    (note,) = node.collect().notes
    assert (note.uuid, note.lost) == ("GPU-b", True)
    assert "no longer lists" in note.text


def test_when_all_gpus_are_lost_there_is_nothing_to_show() -> None:
    node = Node(hopper())
    node.collect()
    node.driver.gpus[0].error = LOST
    error = failure(node)
    assert error.kind == GPUS_LOST
    assert "GPU 0 (GPU-a) has fallen off the bus" in str(error)


def test_a_gpu_that_is_not_this_containers_is_no_fault() -> None:
    other = hopper("GPU-other")
    other.opens = NO_PERMISSION
    taken = Node(hopper(), other).collect()
    (note,) = taken.notes
    assert (note.index, note.lost) == ("1", False)
    assert "this process has no access" in note.text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DRIVER_NOT_LOADED, "kernel driver is not loaded"),
        (MISMATCH, "different versions"),
        (NO_PERMISSION, "may not use NVML"),
        (20, "Insufficient Memory"),
    ],
)
def test_a_driver_that_cannot_be_used_says_why(error: int, words: str) -> None:
    node = Node(hopper())
    node.driver.error = error
    failed = failure(node)
    assert (failed.kind, words in str(failed)) == ("driver", True)
    node.driver.error = 0
    assert len(node.collect().gpus) == 1


@pytest.mark.parametrize("error", [DRIVER_NOT_LOADED, MISMATCH])
def test_a_driver_that_is_replaced_while_we_watch(error: int) -> None:
    node = Node(hopper())
    node.collect(times=2)
    node.driver.error = error
    assert failure(node).kind == "driver"
    node.driver.error = 0
    pages = [node.collect(), node.collect()]
    active = ["DCGM_FI_PROF_DRAM_ACTIVE" in page.gpus[0].fields for page in pages]
    assert active == [False, True], "samples of the driver before are not compared with"


def test_a_node_without_gpus_is_no_fault() -> None:
    assert failure(Node()).kind == "no_gpu"


def test_the_real_pynvml_where_there_is_no_driver() -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        with pytest.raises(CollectError, match=r"libnvidia-ml\.so\.1") as caught:
            NvmlCollector().collect()
        assert caught.value.kind == "no_gpu"
        assert "NVIDIA runtime" in caught.value.hint
    else:
        pytest.skip("this machine has NVML")


def test_closing_gives_everything_back_and_reading_starts_again() -> None:
    node = Node(hopper(), ampere())
    node.collect(times=2)
    assert (node.driver.samples, node.driver.running) == (2, 1)
    node.collector.close()
    assert (node.driver.samples, node.driver.running) == (0, 0)
    node.collector.close()
    assert len(node.collect().gpus) == 2
