"""TP, PP and DP on the worked examples of the guide and of text 003."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.memory.planning_formulas import min_gpus
from kneewatch.diagnose.sizing.speed.model_parallelism import (
    TP_OVERHEAD_RATIO,
    Split,
    allreduce_bytes,
    allreduce_s,
    check_tensor_parallel,
    lowest_split,
    micro_batches_for_bubble,
    overhead_ratio,
    pipeline_bubble_ratio,
    planned_overhead_ratio,
    replicas_per_node,
    tensor_parallel_choices,
    tensor_parallel_speedup,
)

NVLINK_TO_PCIE = 900 / 128


def llama_70b(*, min_gpus: int, domain_gpus: int = 8) -> Split:
    return lowest_split(
        min_gpus=min_gpus, attention_heads=64, kv_heads=8, layers=80, domain_gpus=domain_gpus
    )


@pytest.mark.parametrize(
    ("attention_heads", "kv_heads", "domain_gpus", "expected"),
    [
        pytest.param(64, 8, 8, (1, 2, 4, 8), id="Llama-3 70B on a node of 8: no TP 3, 5, 6 or 7"),
        pytest.param(64, 4, 8, (1, 2, 4, 8), id="4 KV heads are replicated at 8"),
        pytest.param(28, 4, 8, (1, 2, 4), id="28 heads: 7 divides them, not the KV heads"),
        pytest.param(40, 8, 8, (1, 2, 4, 8), id="40 heads: 5 does not fit 8 KV heads"),
        pytest.param(64, 8, 2, (1, 2), id="two GPUs on NVLink"),
        pytest.param(12, 3, 8, (1, 3, 6), id="three KV heads"),
        pytest.param(128, 1, 72, (1, 2, 4, 8, 16, 32, 64), id="a domain of 72"),
    ],
)
def test_tensor_parallel_choices(
    attention_heads: int, kv_heads: int, domain_gpus: int, expected: tuple[int, ...]
) -> None:
    choices = tensor_parallel_choices(
        attention_heads=attention_heads, kv_heads=kv_heads, domain_gpus=domain_gpus
    )
    assert choices == expected


@pytest.mark.parametrize(
    ("degree", "message"),
    [
        pytest.param(3, "does not divide 28 attention heads; choose one of 1, 2, 4$", id="heads"),
        pytest.param(7, "4 KV heads neither divide by it nor into it", id="KV heads"),
        pytest.param(16, "one NVLink domain has 8 GPUs", id="beyond the node"),
        pytest.param(0, "must be 1 or more", id="zero"),
        pytest.param(-2, "must be 1 or more", id="negative"),
    ],
)
def test_a_degree_that_cannot_be_is_refused_with_the_choices(degree: int, message: str) -> None:
    with pytest.raises(SizingError, match=message) as refused:
        check_tensor_parallel(tensor_parallel=degree, attention_heads=28, kv_heads=4, domain_gpus=8)
    assert refused.value.name == "tensor_parallel"
    assert refused.value.choices == ("1", "2", "4")


def test_a_degree_that_can_be_passes() -> None:
    check_tensor_parallel(tensor_parallel=4, attention_heads=28, kv_heads=4, domain_gpus=8)


@pytest.mark.parametrize(
    ("needed_gb", "expected"),
    [
        pytest.param(287, Split(4), id="guide 2.6: FP16 needs 4"),
        pytest.param(165, Split(4), id="guide 2.6: FP8 needs 3, and TP 3 does not exist"),
        pytest.param(70, Split(1), id="guide 4.1: FP8 weights on one"),
        pytest.param(287 * 1.5, Split(8), id="guide 2.6: 6 with headroom, and TP 6 does not exist"),
        pytest.param(700, Split(8, 2), id="guide 5.5: beyond one node, PP over nodes"),
    ],
)
def test_lowest_split_that_fits(needed_gb: float, expected: Split) -> None:
    assert llama_70b(min_gpus=min_gpus(needed_bytes=needed_gb, vram_bytes=80)) == expected


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(SizingError, match="80 layers over TP 8 end at 640 GPUs"):
        llama_70b(min_gpus=641)


@pytest.mark.parametrize(
    ("split", "weights_gb", "expected_gb"),
    [
        pytest.param(Split(4), 140, 35, id="guide 5.1: 140 / 4, figure 5.1 also says 17.5"),
        pytest.param(Split(4), 70, 17.5, id="17.5 GB is FP8"),
        pytest.param(Split(1, 4), 140, 35, id="guide 5.2: PP 4 holds a quarter"),
    ],
)
def test_weights_per_gpu(split: Split, weights_gb: float, expected_gb: float) -> None:
    assert weights_gb / split.gpus == expected_gb


@pytest.mark.parametrize(
    ("degree", "expected"), [(4, 2), (8, 1), (1, 8), (16, 0)], ids=lambda value: str(value)
)
def test_replicas_on_a_node_of_8(degree: int, expected: int) -> None:
    assert replicas_per_node(node_gpus=8, gpus_per_replica=degree) == expected  # guide 5.1


def test_allreduce_message_of_text_003() -> None:
    # 2BD bytes in FP16; a ring sends 2 (N - 1) / N of it from each GPU
    message_bytes = 2 * 64 * 8192
    assert allreduce_bytes(tokens=64, hidden_size=8192, gpus=2) == message_bytes
    assert allreduce_bytes(tokens=64, hidden_size=8192, gpus=8) == 1.75 * message_bytes
    assert allreduce_bytes(tokens=64, hidden_size=8192, gpus=1) == 0


def test_allreduce_of_a_decode_step_on_nvlink_and_pcie() -> None:
    def once_s(bandwidth: float, latency_s: float = 0.0) -> float:
        return allreduce_s(
            tokens=64,
            hidden_size=8192,
            layers=80,
            gpus=4,
            bandwidth_bytes_per_s=bandwidth,
            latency_s=latency_s,
        )

    assert once_s(64e9) == pytest.approx(160 * 1.5 * 2 * 64 * 8192 / 64e9)
    assert once_s(64e9) / once_s(450e9) == pytest.approx(NVLINK_TO_PCIE)  # guide 5.6: 7x
    assert once_s(32e9) / once_s(450e9) == pytest.approx(14, abs=0.1)  # text 003: PCIe 4.0
    assert once_s(450e9, 10e-6) - once_s(450e9) == pytest.approx(160 * 10e-6)


def test_one_gpu_communicates_nothing() -> None:
    alone_s = allreduce_s(
        tokens=1, hidden_size=1, layers=80, gpus=1, bandwidth_bytes_per_s=1, latency_s=1
    )
    assert alone_s == 0


@pytest.mark.parametrize(
    ("gpus", "pcie_says", "nvlink_says"),
    [(2, 0.08, 0.02), (4, 0.25, 0.04), (8, 0.38, 0.09)],
    ids=["guide 5.6: TP 2", "guide 5.6: TP 4", "guide 5.6: TP 8"],
)
def test_a_ring_explains_the_guides_overheads(
    gpus: int, pcie_says: float, nvlink_says: float
) -> None:
    # anchored at 8 % on PCIe at TP 2; the rest follows from 2 (N - 1) / N bytes and 1 / N compute
    pcie_message_s = 0.08 / 0.92 / 2
    for says, faster in ((pcie_says, 1.0), (nvlink_says, NVLINK_TO_PCIE)):
        ring_s = 2 * (gpus - 1) / gpus * pcie_message_s / faster
        ratio = overhead_ratio(compute_s=1 / gpus, communication_s=ring_s)
        assert ratio == pytest.approx(says, abs=0.045)
    assert planned_overhead_ratio(link="pcie", tensor_parallel=gpus) == pcie_says
    assert planned_overhead_ratio(link="nvlink", tensor_parallel=gpus) == nvlink_says


@pytest.mark.parametrize("link", list(TP_OVERHEAD_RATIO))
def test_planned_overhead_rises_with_every_gpu_and_the_step_gets_faster(link: str) -> None:
    planned = [planned_overhead_ratio(link=link, tensor_parallel=n) for n in range(1, 33)]
    assert planned == sorted(set(planned))
    assert planned[0] == 0
    assert planned[-1] < 1
    speedups = [
        tensor_parallel_speedup(tensor_parallel=n, overhead_ratio=ratio)
        for n, ratio in enumerate(planned, start=1)
    ]
    assert speedups == sorted(speedups)


def test_an_unknown_link_lists_the_choices() -> None:
    with pytest.raises(SizingError, match="link is 'wifi'; choose one of nvlink, pcie"):
        planned_overhead_ratio(link="wifi", tensor_parallel=2)


def test_tp_8_on_pcie_is_still_the_fastest_by_the_guides_own_figures() -> None:
    # 5.6 says that 38 % "negates" the benefit and 5 that TP 4 on PCIe can lose to TP 2 on NVLink
    def speedup(link: str, degree: int) -> float:
        return tensor_parallel_speedup(
            tensor_parallel=degree,
            overhead_ratio=planned_overhead_ratio(link=link, tensor_parallel=degree),
        )

    assert speedup("pcie", 8) == pytest.approx(4.96)
    assert speedup("pcie", 8) > speedup("pcie", 4) > speedup("pcie", 2)
    assert speedup("pcie", 4) == pytest.approx(3.0)
    assert speedup("nvlink", 2) == pytest.approx(1.96)
    # what is true: a GPU does a third less work than in TP 2
    assert speedup("pcie", 8) / 8 / (speedup("pcie", 2) / 2) == pytest.approx(0.674, abs=1e-3)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "expected"),
    [
        pytest.param(4, 1, 0.75, id="guide 5.2: one request idles 3 of 4"),
        pytest.param(4, 4, 3 / 7, id="guide 5.2: 43 %"),
        pytest.param(1, 1, 0, id="one stage has no bubble"),
    ],
)
def test_pipeline_bubble(stages: int, micro_batches: int, expected: float) -> None:
    assert pipeline_bubble_ratio(stages=stages, micro_batches=micro_batches) == expected


@pytest.mark.parametrize(
    ("micro_batches", "needed"),
    [
        pytest.param(1, 5, id="from 1 to 5"),
        pytest.param(4, 11, id="guide 5.2 says about double; from 4 it takes 11"),
        pytest.param(32, 67, id="from 32 to 67, nearly double"),
    ],
)
def test_halving_the_bubble_takes_more_than_twice_the_micro_batches(
    micro_batches: int, needed: int
) -> None:
    bubble = pipeline_bubble_ratio(stages=4, micro_batches=micro_batches)
    assert micro_batches_for_bubble(stages=4, bubble_ratio=bubble / 2) == needed


@given(stages=st.integers(1, 64), micro_batches=st.integers(1, 500))
def test_the_bubble_and_its_inverse_agree(stages: int, micro_batches: int) -> None:
    bubble = pipeline_bubble_ratio(stages=stages, micro_batches=micro_batches)
    assert 0 <= bubble < 1
    assert pipeline_bubble_ratio(stages=stages, micro_batches=micro_batches + 1) <= bubble
    if stages > 1:
        assert micro_batches_for_bubble(stages=stages, bubble_ratio=bubble) == micro_batches


@given(
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 16),
    domain=st.integers(1, 16),
    wanted=st.integers(1, 64),
)
def test_every_split_is_valid_and_large_enough(
    kv_heads: int, group: int, domain: int, wanted: int
) -> None:
    heads = kv_heads * group
    split = lowest_split(
        min_gpus=wanted, attention_heads=heads, kv_heads=kv_heads, layers=64, domain_gpus=domain
    )
    check_tensor_parallel(
        tensor_parallel=split.tensor_parallel,
        attention_heads=heads,
        kv_heads=kv_heads,
        domain_gpus=domain,
    )
    assert split.gpus >= wanted
    assert heads % split.tensor_parallel == 0
