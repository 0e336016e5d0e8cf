"""The roofline: hand-worked steps, what must hold for any load, and real servers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.arithmetic import Sheet
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.overhead import kind_of
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.speed.performance import (
    Drafting,
    Load,
    StepTime,
    closed_loop,
    performance,
    step_model,
)
from kneewatch.diagnose.sizing.speed.roofline_inputs import (
    DEFAULT,
    SOURCE,
    Costs,
    Efficiency,
    busiest_ratio,
    costs,
    measured_class,
    measured_ratios,
    on_gpu,
    touched_ratio,
    with_shares,
)
from kneewatch.diagnose.sizing.speed.slo_capacity import performance_lines
from kneewatch.diagnose.sizing.speed.wave import wave
from tests import throughput, throughput_2026
from tests.effort import calls
from tests.examples import examples
from tests.kvtruth import cases
from tests.kvtruth_2026 import within

H100 = gpu("h100-sxm")
IDEAL = Efficiency(
    mfu_ratio=1.0,
    attention_mfu_ratio=1.0,
    mbu_ratio=1.0,
    expert_mfu_ratio=1.0,
    expert_row_passes=0.0,
    link_ratio=1.0,
    allreduce_latency_s=0.0,
    expert_s=0.0,
    layer_s=0.0,
    expert_layer_s=0.0,
    sequence_s=0.0,
    host_s=0.0,
    prompt_step_s=0.0,
    request_s=0.0,
    prompt_token_s=0.0,
    microbatches_per_stage=math.inf,
)
DENSE = "meta-llama/Llama-3.3-70B-Instruct"
SMALL = "meta-llama/Llama-3.1-8B-Instruct"
MIXTURE = "openai/gpt-oss-120b"
LATENT = "deepseek-ai/DeepSeek-R1"


def costs_of(
    name: str = DENSE,
    gpu_id: str = "h100-sxm",
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    data_parallel: int = 1,
    expert_parallel: bool = False,
    **given_: str,
) -> Costs:
    split = Parallel(tensor_parallel, pipeline_parallel, data_parallel, expert_parallel)
    fields: dict[str, Any] = {**given_}
    return costs(Launch(model(name), gpu(gpu_id), split, **fields))


CHAT = Load(input_tokens=1000, output_tokens=250, concurrency=32)
LOADS = st.builds(
    Load,
    input_tokens=st.floats(1, 100_000),
    output_tokens=st.floats(1, 4000),
    concurrency=st.floats(1, 1000),
    max_running=st.floats(1, 1000),
    max_num_batched_tokens=st.sampled_from([2048, 8192, 16384]),
    prefix_hit_ratio=st.floats(0, 1),
)
COSTS = st.sampled_from(
    [
        costs_of(SMALL),
        costs_of(DENSE, tensor_parallel=4),
        costs_of(DENSE, tensor_parallel=2, pipeline_parallel=2),
        costs_of(MIXTURE, tensor_parallel=2),
        costs_of(LATENT, tensor_parallel=8),
    ]
)


def test_weights_of_70b_are_read_once_a_step_without_the_embedding_table() -> None:
    cost = costs_of(tensor_parallel=4)
    # 70.55e9 parameters less 128,256 x 8,192 of the table, 2 bytes each, over 4 GPUs
    assert cost.weights_bytes == pytest.approx(2 * (70.55e9 - 128_256 * 8192) / 4, rel=0.001)


@pytest.mark.parametrize(
    ("name", "degree", "element_bytes", "expected_bytes"),
    [
        pytest.param(DENSE, 1, 2.0, 327_680, id="70B: 2 x 80 x 8 x 128 x 2"),
        pytest.param(DENSE, 8, 2.0, 40_960, id="one KV head on each of 8 GPUs"),
        pytest.param(DENSE, 16, 2.0, 40_960, id="16 GPUs: the heads are replicated"),
        pytest.param(DENSE, 8, 1.0, 20_480, id="fp8 cache: half"),
        pytest.param(LATENT, 8, 2.0, 70_272, id="MLA: (512 + 64) x 61 x 2 on every rank"),
        pytest.param(MIXTURE, 1, 2.0, 36_864, id="gpt-oss: 18 full layers x 2 x 8 x 64 x 2"),
    ],
)
def test_kv_bytes_read_per_token(
    name: str, degree: int, element_bytes: float, expected_bytes: float
) -> None:
    cost = costs_of(
        name, tensor_parallel=degree, kv_cache_dtype="fp8" if element_bytes == 1 else "auto"
    )
    assert cost.kv_bytes_per_token == expected_bytes


def test_sliding_layers_read_their_window_and_no_more() -> None:
    cost = costs_of(MIXTURE)
    (window,) = cost.windows
    assert (window.tokens, window.kv_bytes_per_token) == (128, 36_864)

    def read_s(context: float) -> float:
        return step_model(
            cost, IDEAL, context_tokens=context, prompt_context_tokens=0
        ).sequence_read_s

    bandwidth = H100.memory_bandwidth_bytes_per_s
    assert read_s(100) == pytest.approx(100 * 2 * 36_864 / bandwidth)
    assert read_s(1000) == pytest.approx((1000 + 128) * 36_864 / bandwidth)


def test_an_ideal_decode_step_is_bytes_over_bandwidth() -> None:
    cost = costs_of(tensor_parallel=4)
    step = step_model(cost, IDEAL, context_tokens=1000, prompt_context_tokens=0).parts(10)
    expected_s = (cost.weights_bytes + 10 * 1000 * 81_920) / 3.35e12
    assert step.memory_s == pytest.approx(expected_s)
    # 160 all-reduces of 10 x 8192 x 2 bytes, 2 x 3/4 of it sent, over 450 GB/s
    assert step.interconnect_s == pytest.approx(160 * 1.5 * 163_840 / 450e9)
    assert step.total_s == pytest.approx(step.memory_s + step.interconnect_s)
    assert step.binding == "memory"


def test_an_ideal_prefill_step_is_flop_over_peak() -> None:
    cost = costs_of(SMALL)
    step = step_model(cost, IDEAL, context_tokens=1, prompt_context_tokens=4096).parts(0, 8192)
    # 2 x 6.98e9 parameters without tables a token; attention 4 x 32 x 32 x 128 a pair
    body = 2 * (8.030e9 - 2 * 128_256 * 4096) * 8192
    pairs = 4 * 32 * 32 * 128 * 4096 * 8192
    assert step.computes_s[0] == pytest.approx(body / 989.4e12, rel=0.001)
    assert step.computes_s[2] == pytest.approx(pairs / 989.4e12, rel=0.001)
    assert step.binding == "compute"


@pytest.mark.parametrize(
    ("tokens", "expected_ratio"),
    [
        pytest.param(1, 4 / 128, id="one token: 4 of 128"),
        pytest.param(32, 1 - (124 / 128) / (1 + 31 * 4 / 128), id="31 more: less than 1 - e^-1"),
    ],
)
def test_a_step_reads_the_experts_that_its_tokens_touch(tokens: int, expected_ratio: float) -> None:
    cost = costs_of(MIXTURE)
    read = step_model(cost, IDEAL, context_tokens=0, prompt_context_tokens=0)
    touched_s = read.parts(tokens).memory_s - cost.weights_bytes / 3.35e12
    assert touched_s == pytest.approx(expected_ratio * cost.experts_bytes / 3.35e12)


def test_tensor_parallelism_does_not_split_the_order_of_routed_tokens() -> None:
    """Five passes over the hidden states of 4 copies of a token in each of 36 layers."""
    for degree in (1, 2):
        cost = costs_of(MIXTURE, tensor_parallel=degree)
        step = step_model(cost, DEFAULT, context_tokens=0, prompt_context_tokens=0)
        rows_bytes = 5 * 36 * 4 * 2880 * 2
        assert step.token_rows_s == pytest.approx(rows_bytes / (0.95 * 3.35e12))
        assert step.parts(1000).total_s == pytest.approx(step.total_s(1000))


def test_one_gpu_has_no_collective() -> None:
    speed = performance(costs_of(SMALL), CHAT)
    assert speed.decode_step.interconnect_s == 0
    assert speed.prefill_step.interconnect_s == 0


def test_a_request_alone_is_not_slowed_by_its_own_prompt() -> None:
    speed = performance(costs_of(SMALL), replace(CHAT, concurrency=1))
    assert speed.prefill_step_ratio == 0
    assert speed.itl_s == speed.decode_step.total_s


def test_int8_products_are_twice_as_fast_where_activations_are_int8_too() -> None:
    plain, weights, both = (
        costs_of(SMALL, "a100-80gb", quantization=scheme) for scheme in ("bf16", "int8", "w8a8")
    )
    assert both.flop_per_s == 2 * plain.flop_per_s == 2 * weights.flop_per_s
    assert both.weights_bytes == weights.weights_bytes < plain.weights_bytes


def test_pcie_costs_more_than_nvlink() -> None:
    bridged = costs_of(SMALL, tensor_parallel=2)
    pcie = replace(bridged, link="PCIe", link_bytes_per_s=H100.pcie_bytes_per_s)
    assert costs_of(SMALL, "l40s", tensor_parallel=2).link == "PCIe"
    assert bridged.link == "NVLink"
    assert performance(pcie, CHAT).itl_s > performance(bridged, CHAT).itl_s


@pytest.mark.parametrize(
    ("card", "gpus", "gb_per_s"),
    [("rtx-4090", 2, 32), ("rtx-4090", 4, 25), ("rtx-4090", 8, 12.5), ("rtx-pro-6000", 8, 64)],
)
def test_geforce_cards_share_the_hosts_memory(card: str, gpus: int, gb_per_s: float) -> None:
    """None reads another's memory: 100 GB/s for all, where other cards have their link each."""
    card_costs = costs_of(SMALL, card, tensor_parallel=gpus)
    assert card_costs.link_bytes_per_s == gb_per_s * 1e9


def test_eight_geforce_cards_prefill_as_measured() -> None:
    rows = {row.case["case_id"]: row for row in throughput_2026.rows(throughput_2026.FOURTH)}
    for ends in ("1k/256 c1", "3k/512 c8"):
        ttft = rows[f"q38-27b bf16 8x4090 TP8 {ends}"].ratios["TTFT"]
        assert ttft == pytest.approx(1.0, abs=0.15)


def test_all_reduces_over_pcie_and_between_nodes_have_a_latency_of_their_own() -> None:
    """Per all-reduce NCCL's ring takes 6.6 us, and 1 us for each of 2 x 7 hops over PCIe."""
    pcie = costs_of(SMALL, "rtx-pro-6000", tensor_parallel=8)
    assert pcie.link_latency_s == pytest.approx(20.6e-6)
    nodes = costs_of(DENSE, "h200", tensor_parallel=16)
    assert (nodes.link, nodes.nodes) == ("infiniband-ndr", 2)
    assert 3 * pcie.link_latency_s < nodes.link_latency_s < 7 * pcie.link_latency_s
    assert nodes.link_bytes_per_s > pcie.link_bytes_per_s
    assert costs_of(DENSE, "h200", tensor_parallel=8).link_latency_s == 0
    # A GB10 is a node of its own.
    sparks = costs_of(SMALL, "gb10", tensor_parallel=4, network="roce-400")
    assert (sparks.link, sparks.nodes) == ("roce-400", 4)
    assert sparks.link_latency_s > 1.5 * nodes.link_latency_s


def test_a_sparse_layers_indexer_grows_with_the_prompt_and_is_not_split() -> None:
    """Each rank scores every token of the context, and computes 64 heads of full windows."""
    sparse = costs_of("deepseek-ai/DeepSeek-V3.2", "h200", tensor_parallel=8)
    halved = costs_of("deepseek-ai/DeepSeek-V3.2", "h200", tensor_parallel=4)
    assert sparse.prefill_flop_per_pair == halved.prefill_flop_per_pair == 61 * 64 * 128
    (window,) = sparse.windows
    assert window.computed(10) == window.computed(5000) == 2 * 64 * 61 * 1088 * 2048
    assert sparse.added_layers == 1.5 * 61


def test_pipeline_stages_add_throughput_but_no_speed() -> None:
    alone = performance(costs_of(DENSE, tensor_parallel=4), replace(CHAT, concurrency=1))
    staged_costs = costs_of(DENSE, tensor_parallel=4, pipeline_parallel=2)
    staged = performance(staged_costs, replace(CHAT, concurrency=1))
    assert staged.itl_s >= alone.itl_s
    many = replace(CHAT, concurrency=256)
    unstaged = performance(costs_of(DENSE, tensor_parallel=4), many)
    # Stages wait for each other: two are never twice as fast.
    gain = performance(staged_costs, many).requests_per_s / unstaged.requests_per_s
    assert 1.2 < gain < 1.6


def test_two_stages_against_two_tensor_ranks_as_published() -> None:
    """gpt-oss-120b on two H100: 5,338 tokens/s with PP 2, 7,649 with TP 2."""
    pair = [
        point
        for point in throughput.points()
        if point.model == MIXTURE
        and "Parallelism" in point.workload
        and point.tensor_parallel * point.pipeline_parallel == 2
    ]
    assert sorted(point.pipeline_parallel for point in pair) == [1, 2]
    for point in pair:
        predicted = throughput.estimate(point).output_tokens_per_s
        assert predicted == pytest.approx(point.output_tokens_per_s, rel=0.1)


def test_drafts_help_when_accepted_and_hurt_when_not() -> None:
    plain = performance(costs_of(tensor_parallel=4), CHAT)

    def with_drafts(acceptance_ratio: float) -> float:
        drafting = Drafting(tokens=3, acceptance_ratio=acceptance_ratio, cost_ratio=0.05)
        return performance(costs_of(tensor_parallel=4), replace(CHAT, drafting=drafting)).itl_s

    assert with_drafts(0.8) < plain.itl_s < with_drafts(0.0)


def test_weights_in_a_format_that_the_gpu_lacks_are_computed_in_16_bit() -> None:
    ampere = costs_of(SMALL, "a100-80gb", quantization="fp8")
    assert ampere.flop_per_s == gpu("a100-80gb").bf16_flop_per_s
    assert costs_of(SMALL, quantization="fp8").flop_per_s == H100.fp8_flop_per_s


def test_more_requests_than_places_wait_and_gain_nothing() -> None:
    full = replace(CHAT, concurrency=64, max_running=32)
    at, beyond = performance(costs_of(SMALL), CHAT), performance(costs_of(SMALL), full)
    assert beyond.queueing
    assert not at.queueing
    assert beyond.requests_per_s == pytest.approx(at.requests_per_s)
    assert beyond.ttft_s > at.ttft_s + 0.9 * 32 / at.requests_per_s


@given(COSTS, LOADS)
@examples(150)
def test_results_are_finite_positive_and_obey_littles_law(cost: Costs, load: Load) -> None:
    speed = performance(cost, load)
    for field in ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s", "itl_s"):
        value = getattr(speed, field)
        assert math.isfinite(value)
        assert value > 0
    passed_s = speed.ttft_s + (load.output_tokens - 1) * speed.itl_s
    assert speed.requests_per_s * passed_s == pytest.approx(load.concurrency, rel=0.01)
    assert speed.running <= min(load.concurrency, load.max_running) * 1.001
    assert speed.binding in {"memory", "compute", "interconnect", "host"}


@given(COSTS, LOADS, st.sampled_from(["bandwidth_bytes_per_s", "flop_per_s", "link_bytes_per_s"]))
@examples(150)
def test_a_faster_gpu_is_never_slower(cost: Costs, load: Load, field: str) -> None:
    faster = replace(cost, **{field: 1.5 * getattr(cost, field)})
    slow, fast = performance(cost, load), performance(faster, load)
    assert fast.decode_tokens_per_s >= slow.decode_tokens_per_s * 0.999
    assert fast.prefill_tokens_per_s >= slow.prefill_tokens_per_s * 0.999


@given(
    COSTS,
    st.floats(1, 2000),
    st.floats(1.001, 10),
    st.floats(1, 100_000),
)
@examples(150)
def test_a_larger_decode_batch_never_yields_fewer_tokens(
    cost: Costs, batch: float, factor: float, context: float
) -> None:
    step = step_model(cost, DEFAULT, context_tokens=context, prompt_context_tokens=0)
    larger = batch * factor
    assert larger / step.total_s(larger) >= batch / step.total_s(batch) * (1 - 1e-9)
    assert step.total_s(larger) >= step.total_s(batch)
    assert step.parts(larger).total_s == pytest.approx(step.total_s(larger), rel=1e-12)


# A prompt's tokens all cost what its mean token costs. The cache removes the first ones, which are
# the cheapest: in a step whose reads take longer than they, they cost nothing.
MEAN_CONTEXT_ERROR = 0.02


@given(COSTS, LOADS)
@example(
    costs_of(SMALL),
    Load(
        input_tokens=81_921.0,
        output_tokens=3881.0,
        concurrency=197.0,
        max_running=197.0,
        max_num_batched_tokens=8192,
        prefix_hit_ratio=0.25,
    ),
)
@example(
    costs_of(SMALL),
    Load(
        input_tokens=71_829.0,
        output_tokens=4000.0,
        concurrency=777.0,
        max_running=1000.0,
        max_num_batched_tokens=16_384,
        prefix_hit_ratio=0.3875,
    ),
)
@examples(100)
def test_cached_prefixes_never_slow_a_server(cost: Costs, load: Load) -> None:
    cold = performance(cost, replace(load, prefix_hit_ratio=0.0))
    warm = performance(cost, load)
    assert warm.decode_tokens_per_s >= cold.decode_tokens_per_s * (1 - MEAN_CONTEXT_ERROR)


def test_a_token_beyond_the_budget_costs_a_token_and_not_a_step() -> None:
    load = Load(
        input_tokens=16_384, output_tokens=2946, concurrency=837, max_num_batched_tokens=16_384
    )
    whole = performance(costs_of(SMALL), load)
    beyond = performance(costs_of(SMALL), replace(load, input_tokens=16_385))
    assert beyond.decode_tokens_per_s == pytest.approx(whole.decode_tokens_per_s, rel=1e-3)


def test_the_arithmetic_is_shown() -> None:
    cost = costs_of(tensor_parallel=4)
    speed = performance(cost, CHAT)
    sheet = Sheet()
    performance_lines(sheet, speed)
    steps = sheet.steps
    assert [step.title for step in steps] == [
        "Weight reads per step",
        "Decode step",
        f"Step with {speed.chunk_tokens:,.0f} prompt tokens",
        "Time per output token",
        "Time to first token",
        "Output tokens per second",
    ]
    assert all(step.source for step in steps)
    assert steps[0].values == "34.75 GB / (3.35 TB/s x 0.95)"
    assert f"{speed.itl_s * 1000:.4g} ms" in steps[3].result


def test_products_reach_more_of_a_lower_peak_and_routed_experts_do_not() -> None:
    reached = {name: on_gpu(gpu(name)) for name in ("a100-80gb", "h100-sxm", "h200", "mi300x")}
    shares = [each.mfu_ratio for each in reached.values()]
    assert shares == [0.55, DEFAULT.mfu_ratio, DEFAULT.mfu_ratio, pytest.approx(0.324, abs=2e-3)]
    assert {each.expert_mfu_ratio for each in reached.values()} == {DEFAULT.expert_mfu_ratio}
    assert on_gpu(None) == DEFAULT
    assert [each.mbu_ratio for each in reached.values()] == [*[DEFAULT.mbu_ratio] * 3, 0.7]
    assert on_gpu(gpu("a100-80gb"), replace(DEFAULT, mfu_ratio=0.6)).mfu_ratio == 0.6


@pytest.mark.parametrize(
    ("name", "halved"),
    [("rtx-3090", True), ("rtx-4090", True), ("rtx-5090", True), ("l40s", False), ("gb10", False)],
)
def test_products_reach_nearly_all_of_a_rate_that_sums_halve(name: str, halved: bool) -> None:
    reached = on_gpu(gpu(name))
    shares = (reached.mfu_ratio, reached.expert_mfu_ratio, reached.attention_mfu_ratio)
    assert shares == ((0.9, 0.48, 0.9) if halved else (0.55, 0.24, 0.58))


def test_a_stated_share_is_cited_as_stated() -> None:
    cost = costs_of(tensor_parallel=4)
    for stated, first, second in (
        (DEFAULT, SOURCE, SOURCE),
        (with_shares(DEFAULT, mbu_ratio=0.5), "MBU as stated", "MBU as stated, the rest"),
        (with_shares(DEFAULT, mfu_ratio=0.5), SOURCE, "MFU as stated, the rest"),
    ):
        speed = performance(cost, CHAT, stated)
        sheet = Sheet()
        performance_lines(sheet, speed)
        steps = sheet.steps
        assert first in steps[0].source
        assert second in steps[1].source
        assert (SOURCE in steps[0].source) == (first == SOURCE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_tokens", 0),
        ("output_tokens", 0.5),
        ("concurrency", -1),
        ("max_running", 0.5),
        ("prefix_hit_ratio", 1.1),
        ("max_num_batched_tokens", 0),
    ],
)
def test_an_absurd_load_names_its_input(field: str, value: float) -> None:
    with pytest.raises(SizingError) as caught:
        performance(costs_of(SMALL), replace(CHAT, **{field: value}))
    assert caught.value.name == field


def test_a_model_without_a_count_of_parameters_is_refused() -> None:
    unknown = replace(model(SMALL), parameters=None)
    with pytest.raises(SizingError, match=r"config\.json") as caught:
        costs(Launch(unknown, H100))
    assert caught.value.name == "model"


def test_the_largest_part_of_a_step_binds() -> None:
    none, read, computed = (0.0, 0.0), (1.0, 0.2), (0.5, 2.0)

    def binding(*kernels: tuple[float, float], rest_s: tuple[float, float, float]) -> str:
        reads_s, computes_s = zip(*kernels, strict=True)
        return StepTime(reads_s, computes_s, *rest_s).binding

    assert binding(read, none, computed, rest_s=(0.5, 0.1, 0.2)) == "compute"
    assert binding(read, read, none, rest_s=(0.5, 0.1, 0.2)) == "memory"
    assert binding(read, none, computed, rest_s=(2.5, 0.1, 0.2)) == "interconnect"
    assert binding(read, none, none, rest_s=(0.5, 0.6, 0.6)) == "host"


def test_kernels_that_read_and_kernels_that_compute_follow_one_another() -> None:
    """KV that decodes read is no less because the same step computes a prompt."""
    ideal = step_model(costs_of(SMALL), IDEAL, context_tokens=4000, prompt_context_tokens=0)
    step = ideal.parts(100, 8192)
    assert step.computes_s[0] > step.reads_s[0]
    assert step.reads_s[2] > step.computes_s[2]
    assert step.total_s == pytest.approx(step.computes_s[0] + step.reads_s[2])


def test_each_expert_that_a_step_touches_costs_beside_its_bytes() -> None:
    """Two servers read as much: one large experts, one many small ones."""
    cost = costs_of(MIXTURE)
    small = replace(cost, experts=4 * cost.experts)
    times_s = [
        step_model(each, DEFAULT, context_tokens=0, prompt_context_tokens=0).total_s(1000)
        for each in (cost, small)
    ]
    touched = touched_ratio(cost.touched_ratio, 1000)
    assert times_s[1] - times_s[0] == pytest.approx(touched * 3 * 36 * 128 * DEFAULT.expert_s)


def test_layers_with_routed_experts_take_more_at_any_batch() -> None:
    """The router and what puts tokens in the experts' order."""
    cost = costs_of(MIXTURE)
    dense = replace(cost, expert_layers=0)
    for sequences in (1, 1000):
        times_s = [
            step_model(each, DEFAULT, context_tokens=0, prompt_context_tokens=0).total_s(sequences)
            for each in (dense, cost)
        ]
        assert times_s[1] - times_s[0] == pytest.approx(36 * DEFAULT.expert_layer_s)


MEASURED = packaged_tables("diagnose.sizing.speed", "measured.toml")


def test_measured_kinds_are_those_of_the_benchmarks() -> None:
    names = {point.model for point in throughput.trusted()}
    names |= {case["model"] for file in throughput_2026.RECORDED for case in cases(file)}
    by_kind = Counter(kind_of(model(name)) for name in names)
    assert sorted(kind for kind, count in by_kind.items() if count >= 8) == MEASURED["kinds"]


def test_ranges_are_those_of_the_benchmarks() -> None:
    """Narrow enough to say something, and right for models that were not among them."""
    found = throughput_2026.ratios()
    for kind, ranges in throughput_2026.calibrated(found).items():
        for figure, bounds in ranges.items():
            stated = MEASURED[kind]["ITL" if figure == "TPOT" else figure]
            assert bounds == pytest.approx(stated, abs=0.03), (kind, figure)
    for kind, words in MEASURED["like"].items():
        alike = [ratio for ratio in found if ratio.kind == kind]
        most = max(Counter(ratio.figure for ratio in alike).values())
        assert words.endswith(f"({most}, of {len({ratio.model for ratio in alike})} models)")
    for figure, share in throughput_2026.covered(found).items():
        assert 0.85 <= share <= 0.96, figure
    for figure, share in throughput_2026.covered(found, left_out=True).items():
        assert 0.82 <= share <= 0.95, figure


@pytest.mark.parametrize(
    ("name", "gpu_id", "changes", "kind"),
    [
        ("Qwen/Qwen3.5-27B", "h200", {}, ("data-centre", "")),
        ("Qwen/Qwen3.5-27B", "gb10", {}, ("gb10", "")),
        ("Qwen/Qwen3.5-27B", "b200", {}, ("few", "on b200")),
        ("Qwen/Qwen3.5-27B", "h200", {"enforce_eager": True}, ("few", "without CUDA graphs")),
        ("deepseek-ai/DeepSeek-V3.2", "h200", {}, ("few", "of models with such attention")),
        ("Qwen/Qwen3-30B-A3B", "b200", {"parallel": Parallel(2, experts=True)}, ("experts", "")),
        ("Qwen/Qwen3-30B-A3B", "h200", {"parallel": Parallel(16)}, ("few", "over several nodes")),
    ],
)
def test_the_range_is_that_of_the_class(
    name: str, gpu_id: str, changes: Mapping[str, Any], kind: tuple[str, str]
) -> None:
    setup = Launch(model(name), gpu(gpu_id), **changes)
    assert measured_class(setup) == kind
    assert measured_ratios(setup) == MEASURED[kind[0]]
    few = MEASURED["few"]
    for figure, (low, high) in measured_ratios(setup).items():
        assert few[figure][0] <= low < 1 < high <= few[figure][1] or kind[0] == "experts"


def test_without_cuda_graphs_a_step_is_at_least_the_cpus_launches() -> None:
    """Small batches take as long as the launches, and large ones no longer than with graphs."""
    cost = costs_of(MIXTURE)
    graphs, eager = (
        step_model(each, DEFAULT, context_tokens=0, prompt_context_tokens=0)
        for each in (cost, replace(cost, has_graphs=False))
    )
    launches_s = DEFAULT.eager_ratio * graphs.layers_s
    assert eager.total_s(1) == pytest.approx(launches_s + DEFAULT.host_s)
    assert eager.total_s(2) == pytest.approx(eager.total_s(1))
    assert eager.total_s(1) > 2 * graphs.total_s(1)
    assert eager.parts(1).binding == "host"
    assert eager.total_s(0, 200_000) == pytest.approx(graphs.total_s(0, 200_000))


def test_steps_without_cuda_graphs_are_as_measured() -> None:
    """A new server within a tenth; an A100 of 2025, whose CPU is slower, twice as slow at most."""
    rows = {row.case["case_id"]: row for row in throughput_2026.rows(throughput_2026.PUBLIC)}
    newer = rows["qwen3-30b 4xRTX4090D 3.5k/1.5k c8 eager"].ratios
    older = rows["qwen3-14b awq A100 16k/200 c1 eager"].ratios
    assert newer["TPOT"] == pytest.approx(1.0, abs=0.1)
    assert 1.0 < (older["TPOT"] or 0.0) < 2.0


def test_a_layer_that_is_a_mixer_or_an_mlp_is_half_of_one() -> None:
    """Nemotron-3-Nano's 52 layers are 23 of Mamba, 6 of attention and 23 of experts."""
    cost = costs_of("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", tensor_parallel=2)
    assert cost.layers == 26
    whole = costs_of("Qwen/Qwen3.5-35B-A3B", tensor_parallel=2)
    assert whole.layers == 40


def test_a_mixture_at_a_few_requests_is_as_measured() -> None:
    rows = [
        point
        for point in throughput.trusted()
        if point.regime == "1 to 8 in flight" and point.model == MIXTURE
    ]
    assert len(rows) == 2
    errors = throughput.errors(rows)
    assert max(abs(error.output_tokens_per_s) for error in errors) < 0.15
    assert max(abs(error.tpot_s) for error in errors) < 0.1


def test_a_configuration_is_little_work() -> None:
    """The search tries ten thousand."""
    cost = costs_of(MIXTURE, tensor_parallel=2)
    assert calls(lambda: performance(cost, CHAT)) < 200


def test_published_benchmarks() -> None:
    chosen = throughput.trusted()
    recorded_errors = throughput.errors(chosen)
    assert len(chosen) == 131
    columns = {
        "output tokens/s": [error.output_tokens_per_s for error in recorded_errors],
        "ITL": [error.tpot_s for error in recorded_errors],
        "TTFT": [error.ttft_s for error in recorded_errors],
    }
    most = {"output tokens/s": 0.10, "ITL": 0.20, "TTFT": 0.20}
    for name, errors in columns.items():
        assert throughput.median_error_ratio(errors) <= most[name], name


def test_no_family_of_models_is_beyond_two_fifths() -> None:
    for name, error in throughput.family_median_errors(throughput.trusted()).items():
        assert abs(error) <= 0.4, name


@pytest.mark.parametrize(
    ("file", "without", "shares"),
    [
        (throughput_2026.GIVEN, (), {"output tokens/s": 0.75, "TPOT": 0.75, "TTFT": 0.75}),
        # Prompts of 1,024 tokens wait 40 to 140 ms that are not in the steps.
        (throughput_2026.PUBLIC, (), {"output tokens/s": 0.9, "TPOT": 0.85, "TTFT": 0.8}),
        # L4 holds half of its peak at 72 W; prompts of Nemotron 3 wait longer for each other.
        (throughput_2026.UNSEEN, (), {"output tokens/s": 0.66, "TPOT": 0.75, "TTFT": 0.75}),
        # H20 computes long prompts at more of its small peak.
        (throughput_2026.THIRD, (), {"output tokens/s": 0.8, "TTFT": 0.66}),
        # Eight RTX 4090 wait longer for each other's prompts; of one sweep the TTFT is 1.6 times.
        (throughput_2026.FOURTH, (), {"output tokens/s": 0.8, "TPOT": 0.7}),
        # Without the GPUs whose shares of peak only these points show.
        (
            throughput_2026.PUBLIC,
            ("mi300x", "rtx-5090", "b200", "rtx-4090"),
            {"output tokens/s": 0.95},
        ),
    ],
)
def test_benchmarks_of_2026(file: str, without: Sequence[str], shares: Mapping[str, float]) -> None:
    judged = [row for row in throughput_2026.rows(file) if row.case["gpu"] not in without]
    for name, share in shares.items():
        errors = throughput_2026.counted(judged, name)
        hits, count = within(errors, throughput_2026.AIMS[name])
        assert hits >= share * count, name
        banded = [inside for row in judged if (inside := row.is_in_band(name)) is not None]
        most = 0.95 if file == throughput_2026.GIVEN else 1.0
        assert 0.85 * len(banded) <= sum(banded) <= most * len(banded), name


@pytest.mark.parametrize(
    ("concurrency", "stages", "waited_steps"), [(1, 1, 0.0), (10, 1, 0.675), (10, 2, 0.0)]
)
def test_a_prompt_waits_for_the_step_that_is_scheduled_already(
    concurrency: int, stages: int, waited_steps: float
) -> None:
    """From vLLM 0.14 on; none is while no other request runs."""
    plain = Launch(model("Qwen/Qwen3-14B"), gpu("l40s"), parallel=Parallel(pipeline=stages))
    load = Load(input_tokens=233, output_tokens=221, concurrency=concurrency, max_running=256)
    before, since = (
        closed_loop(costs(replace(plain, version=version)), load, DEFAULT).at(concurrency)
        for version in ((0, 13, 0), (0, 14, 0))
    )

    waited_s = since.ttft_s - before.ttft_s
    assert waited_s == pytest.approx(waited_steps * since.itl_s, rel=0.02, abs=1e-9)


def test_requests_of_a_long_benchmark_fall_out_of_step() -> None:
    """In the first round each of 8 prompts is followed by 3.5 others in the mean, later by more."""
    cost = costs_of("Qwen/Qwen3-8B")
    load = Load(input_tokens=16_384, output_tokens=256, concurrency=8, max_running=256)
    loop = closed_loop(cost, load, DEFAULT)
    first, many = wave(loop, 8), wave(loop, 8, 10)
    assert first is not None
    assert many is not None
    alone_s = loop.step.total_s(0, 8192) * 2
    steady = loop.at(8)
    assert first.ttft_s == pytest.approx(4.5 * alone_s, rel=0.1)
    assert steady.ttft_s < many.ttft_s < 0.8 * first.ttft_s
    assert 1.2 * first.itl_s < many.itl_s < steady.itl_s
    # Parsing a prompt keeps its client's next request back, so that others' prompts meet it.
    quick = replace(DEFAULT, prompt_token_s=0.0)
    apart = wave(closed_loop(cost, load, quick), 8, 10)
    assert apart is not None
    assert apart.ttft_s < many.ttft_s


def test_sparse_kernels_compute_sixty_four_heads() -> None:
    """The attention of DeepSeek V4 does not become less by a split over 8 GPUs."""
    split = [costs_of("deepseek-ai/DeepSeek-V4-Flash", tensor_parallel=gpus) for gpus in (1, 8)]
    flops = [[window.flop_per_pair for window in cost.windows] for cost in split]
    assert flops[0] == flops[1]
    assert split[0].prefill_flop_per_pair == split[1].prefill_flop_per_pair


def test_prompts_skip_layers_that_read_an_earlier_ones_states() -> None:
    """DeepSeek V4.1 from vLLM 0.31 on: 21 of 40 layers compute all of a prompt."""
    newer, older = (
        costs(Launch(model("deepseek-ai/DeepSeek-V4.1-Flash"), gpu("h200"), version=version))
        for version in ((0, 31, 0), (0, 30, 0))
    )
    assert newer.prompt_layer_ratio == pytest.approx(21 / 40)
    assert older.prompt_layer_ratio == 1.0
    lengths = {"context_tokens": 8192.0, "prompt_context_tokens": 4096.0}
    faster, slower = (step_model(cost, DEFAULT, **lengths) for cost in (newer, older))
    assert faster.total_s(8) == slower.total_s(8)
    assert faster.total_s(8, 8192) < 0.7 * slower.total_s(8, 8192)
    assert faster.parts(8, 8192).total_s == pytest.approx(faster.total_s(8, 8192))


def test_kernels_that_unpack_experts_are_slower() -> None:
    """MXFP4 beside FP8, on GPUs that do not compute in FP4."""
    for name, ratio in (("h200", 0.65), ("b200", 1.0)):
        assert costs_of("deepseek-ai/DeepSeek-V4-Flash", name).expert_kernel_ratio == ratio


def test_the_busiest_gpu_has_more_of_the_few_experts_that_a_step_uses() -> None:
    """One token's 8 of 256 experts lie on 8 GPUs as 8 balls in 8 boxes: 3 in the fullest."""
    lengths = {"context_tokens": 1000.0, "prompt_context_tokens": 0.0}
    name = "MiniMaxAI/MiniMax-M2.5"
    split, whole = (
        step_model(
            costs_of(name, "h200", tensor_parallel=8, expert_parallel=apart), IDEAL, **lengths
        )
        for apart in (False, True)
    )

    def read_ratio(tokens: float) -> float:
        return whole.parts(tokens).reads_s[1] / split.parts(tokens).reads_s[1]

    assert read_ratio(1) == pytest.approx(3, rel=0.02)
    assert 1.3 < read_ratio(32) < read_ratio(8) < 2
    assert read_ratio(1e6) == pytest.approx(1, rel=0.01)


def test_data_parallel_engines_share_the_experts() -> None:
    """Each of 8 GPUs reads an eighth of the experts, for the tokens of all engines."""
    name = "deepseek-ai/DeepSeek-V3"
    alone = costs_of(name, "h200")
    apart = costs_of(name, "h200", data_parallel=8, expert_parallel=True)
    busiest = busiest_ratio(256, 8)
    assert apart.experts_bytes * 8 == pytest.approx(alone.experts_bytes)
    assert apart.experts_flop_per_token == pytest.approx(alone.experts_flop_per_token * busiest)
    for tokens in (1, 16, 200):
        shared = touched_ratio(apart.touched_ratio, tokens)
        assert shared == pytest.approx(touched_ratio(alone.touched_ratio, 8 * tokens))
    # There and back: 58 layers x 8 experts x 7,168 x 2 bytes, of which 7 of 8 leave the GPU.
    sent = 2 * 58 * 8 * 7168 * 2 * 7 / 8
    assert apart.token_exchange_s == pytest.approx(sent / 450e9)
    assert alone.token_exchange_s == 0.0
    without = costs_of(name, "h200", data_parallel=8)
    assert without == alone
