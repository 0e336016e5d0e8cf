"""Which GPUs of a page are a target's: stated, by pod, by number, or a guess that is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.daemon.node_gpus import GpuClaim, claim_of
from kneewatch.diagnose.gpu import GpuChoice, GpuMonitor
from tests.collector.dcgm_pages import Pages, body, labels, node
from tests.collector.fake_nvml import GIB, FakeInstance
from tests.collector.nvml_nodes import Node, hopper

MIG = {labels(0, mig=number): {"DEV_FB_USED": 1000.0 * number} for number in (1, 2)}


def chosen(text: str, /, **stated: str) -> GpuChoice:
    """What a target with these labels takes of a page."""
    return claim_of(stated, count=None).choose(Pages()(text).gpus)


def names(choice: GpuChoice) -> list[str]:
    return [f"{gpu.key.index}/{gpu.key.mig}".removesuffix("/") for gpu in choice.gpus]


def sure(choice: GpuChoice) -> bool:
    return not choice.guess and not choice.missing


# Stated


def test_by_uuid() -> None:
    choice = chosen(node(4), gpu_uuids="GPU-gpu-node-1-3, GPU-gpu-node-1-1")
    assert names(choice) == ["1", "3"]
    assert sure(choice)
    assert choice.joined == "by UUID: GPU 1, 3"


@pytest.mark.parametrize("text", ["0,2", "0, 2", "2 0 2"])
def test_by_index(text: str) -> None:
    choice = chosen(node(4), gpu_indexes=text)
    assert (names(choice), choice.joined) == (["0", "2"], "by index: GPU 0, 2")
    assert sure(choice)


def test_what_is_stated_and_not_there_is_said_and_not_replaced() -> None:
    choice = chosen(node(2), gpu_indexes="7", pod="vllm-0")
    assert (names(choice), choice.guess) == ([], False)
    assert choice.missing == ["GPU 7 is not on the page, and its index was stated"]
    half = chosen(node(2), gpu_uuids="GPU-gpu-node-1-0,GPU-gone")
    assert names(half) == ["0"]
    assert half.missing == ["GPU GPU-gone is not on the page, and its UUID was stated"]


def test_a_uuid_says_more_than_a_pod_and_a_pod_more_than_an_index() -> None:
    text = body({labels(0, pod="vllm-0"): {}, labels(1): {}, labels(2): {}})
    stated = {"pod": "vllm-0", "namespace": "llm", "gpu_indexes": "1"}
    assert names(chosen(text, **stated)) == ["0"]
    assert names(chosen(text, **stated, gpu_uuids="GPU-gpu-node-1-2")) == ["2"]
    assert names(chosen(text, **{**stated, "pod": "another"})) == ["1"]


def test_more_gpus_than_can_be_read_are_counted() -> None:
    choice = chosen(node(16), gpu_indexes=",".join(map(str, range(10))))
    assert choice.joined == "by index: 10 GPUs"


# Pods


@pytest.mark.parametrize("exported", [False, True])
def test_by_pod(exported: bool) -> None:
    text = body(
        {
            labels(0, pod="vllm-0", exported=exported): {},
            labels(1, pod="vllm-1", exported=exported): {},
            labels(2, pod="vllm-0", exported=exported): {},
            labels(3, exported=exported): {},
        }
    )
    choice = chosen(text, pod="vllm-0", namespace="llm")
    assert (names(choice), choice.joined) == (["0", "2"], "by pod: GPU 0, 2")
    assert sure(choice)
    assert names(chosen(text, pod="vllm-1")) == ["1"], "one namespace has such a pod"


def test_a_pod_that_has_no_gpu_on_the_page() -> None:
    text = body({labels(0, pod="vllm-0"): {}, labels(1, pod="vllm-1", namespace="dev"): {}})
    choice = chosen(text, pod="vllm-1", namespace="llm")
    assert names(choice) == []
    assert choice.missing == ("no GPU on the page is assigned to pod llm/vllm-1",)


def test_a_pod_name_of_two_namespaces_is_a_guess() -> None:
    text = body(
        {labels(0, pod="vllm-0"): {}, labels(1, pod="vllm-0", namespace="dev"): {}, labels(2): {}}
    )
    choice = chosen(text, pod="vllm-0")
    assert (names(choice), choice.guess) == (["0", "1"], True)
    assert "namespaces dev, llm" in choice.missing[0]
    assert sure(chosen(text, pod="vllm-0", namespace="dev"))


def test_an_exporter_that_knows_no_pods_leaves_the_pod_out() -> None:
    choice = chosen(node(2), pod="vllm-0", namespace="llm")
    assert (names(choice), choice.guess) == (["0", "1"], True)


# Nodes


def test_of_a_page_of_several_nodes_the_targets_node_counts() -> None:
    text = body({labels(at, host=host): {} for host in ("a.dc1", "b.dc1") for at in (0, 1)})
    choice = chosen(text, node="B", gpu_indexes="0")
    assert [gpu.key.hostname for gpu in choice.gpus] == ["b.dc1"]
    assert sure(choice)
    unsaid = chosen(text, gpu_indexes="0")
    assert (len(unsaid.gpus), unsaid.guess) == (2, True)
    assert "label node" in unsaid.missing[0]
    nowhere = chosen(text, node="c")
    assert (names(nowhere), nowhere.missing) == ([], ("node c has no GPU on the page",))


def test_the_page_of_one_node_is_that_nodes_whatever_it_is_called() -> None:
    assert names(chosen(node(1), node="ip-10-0-0-7")) == ["0"], "an exporter shows its pod's name"


# Number


def test_the_only_gpu() -> None:
    choice = chosen(node(1))
    assert (names(choice), choice.joined) == (["0"], "the only GPU on the page")
    assert sure(choice)


def test_as_many_gpus_as_the_target_has_are_likely_its() -> None:
    choice = claim_of({}, count=4).choose(Pages()(node(4)).gpus)
    assert "likely" in choice.joined
    assert sure(choice)


@pytest.mark.parametrize(("count", "alone"), [(None, True), (2, True), (4, False)])
def test_anything_else_is_a_guess_and_says_how_to_state_it(count: int | None, alone: bool) -> None:
    choice = GpuClaim(count=count, alone=alone).choose(Pages()(node(4)).gpus)
    assert (len(choice.gpus), choice.guess) == (4, True)
    (why,) = choice.missing
    assert "guess" in why
    assert "gpu_uuids" in why
    assert "pod and namespace" in why


@given(st.dictionaries(st.sampled_from(["gpu_uuids", "gpu_indexes", "pod", "node"]), st.text()))
def test_a_label_may_hold_anything(stated: dict[str, str]) -> None:
    pages = Pages()
    for text in (node(2), body({labels(0, pod="vllm-0"): {}, **MIG})):
        choice = claim_of(stated, count=None).choose(pages(text).gpus)
        assert choice.gpus or choice.missing, "no GPU without a reason"
        assert not choice.guess or choice.missing, "no guess that is not told"
        assert set(names(choice)) <= {"0", "1", "0/1", "0/2"}


# MIG


def test_a_mig_instance_by_its_gpu_and_number() -> None:
    text = body({**MIG, labels(1): {}})
    for stated in ({"gpu_indexes": "0/2"}, {"gpu_uuids": "GPU-gpu-node-1-0/2"}):
        assert names(chosen(text, **stated)) == ["0/2"]
    assert names(chosen(text, gpu_indexes="0")) == ["0/1", "0/2"]


def test_a_mig_instance_of_nvml_by_its_own_uuid_brings_what_only_its_board_tells() -> None:
    gpu = hopper("GPU-split")
    gpu.instances = [FakeInstance("MIG-one", 3), FakeInstance("MIG-two", 5, used_bytes=2 * GIB)]
    there = Node(gpu, hopper("GPU-whole"))
    monitor = GpuMonitor(window_s=60, choose=claim_of({"gpu_uuids": "MIG-two"}, count=1).choose)
    for at in range(2):
        monitor.take(1e9 + 15 * at, there.collect())
    reading = monitor.reading(1e9 + 15)
    assert reading.joined == "by UUID: GPU 0/5"
    assert reading.values["gpu_memory_used_ratio"] == pytest.approx(2 / 9, abs=0.01)
    assert reading.values["gpu_temperature_c"] == 58
    assert reading.values["gpu_power_watts"] == pytest.approx(412.5)
    assert reading.values["gpu_dram_active_ratio"] == pytest.approx(0.65)
    by_board = claim_of({"gpu_uuids": "GPU-split/5"}, count=1).choose(there.collect().gpus)
    assert [gpu.key.uuid for gpu in by_board.gpus] == ["MIG-two", "GPU-split"]
