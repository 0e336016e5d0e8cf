"""The KV cache's layout against what vLLM logged, and the arithmetic behind it."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    FullAttention,
    LatentAttention,
    Layers,
    Recurrent,
    SlidingAttention,
)
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of, memory
from kneewatch.diagnose.sizing.memory.kv_cache import (
    KvSettings,
    group_size,
    heads_per_gpu,
    kv_layout,
)
from kneewatch.diagnose.sizing.memory.kv_formats import kv_format
from kneewatch.diagnose.sizing.memory.launch import Launch, defaults, parse_version
from kneewatch.diagnose.sizing.memory.weights import Parallel

LLAMA_70B = (Layers(FullAttention(8, 128, 128), 80),)
GPT_OSS_120B = (
    Layers(SlidingAttention(8, 64, 64, 128), 18),
    Layers(FullAttention(8, 64, 64), 18),
)


@pytest.mark.parametrize(
    ("layers", "settings", "expected_bytes"),
    [
        pytest.param(LLAMA_70B, KvSettings(), 327_680, id="70B: 80 x 8 x (128 + 128) x 2"),
        pytest.param(
            LLAMA_70B, KvSettings(kv_format=kv_format("fp8")), 163_840, id="fp8 halves it"
        ),
        pytest.param(LLAMA_70B, KvSettings(tensor_parallel=8), 40_960, id="TP 8: a head each"),
        pytest.param(LLAMA_70B, KvSettings(tensor_parallel=16), 40_960, id="TP 16: replicated"),
        pytest.param(
            (Layers(LatentAttention(512, 64), 61),),
            KvSettings(tensor_parallel=8),
            70_272,
            id="R1: 61 x 576 x 2 on every rank",
        ),
        pytest.param(
            (Layers(LatentAttention(512, 64, 128), 61),),
            KvSettings(kv_format=kv_format("fp8")),
            43_188,
            id="V3.2 fp8: 61 x (576 + 132)",
        ),
        pytest.param(
            (Layers(LatentAttention(512, 64), 61),),
            KvSettings(padded_latent=True),
            78_080,
            id="0.7: 61 x 640 x 2",
        ),
        pytest.param(GPT_OSS_120B, KvSettings(), 36_864, id="gpt-oss grows in its 18 full layers"),
    ],
)
def test_bytes_of_one_more_token(
    layers: tuple[Layers, ...], settings: KvSettings, expected_bytes: int
) -> None:
    assert kv_layout(layers, settings).token_bytes == expected_bytes


@pytest.mark.parametrize("tensor_parallel", [4, 8])
def test_four_kv_heads_cost_the_same_at_tp_4_and_8(tensor_parallel: int) -> None:
    layers = model("Qwen/Qwen3-235B-A22B-FP8").layers
    layout = kv_layout(layers, KvSettings(tensor_parallel=tensor_parallel))
    assert layout.token_bytes == 48_128


def test_gpt_oss_holds_what_vllm_logged() -> None:
    """A100 TP 4, 16k, 2,048 batched tokens, 45.32 GiB: 284.25 requests; naive would say 161."""
    layout = kv_layout(GPT_OSS_120B, KvSettings(tensor_parallel=4, in_flight_tokens=2048))
    assert layout.request_blocks(16_384) == 1024 + 137
    assert layout.concurrency(45.32 * GIB, 16_384) == pytest.approx(284.25, rel=1e-4)
    logged = layout.tokens_of_blocks(45.32 * GIB)
    assert logged == pytest.approx(2_640_144, rel=1e-4)


def test_recurrent_layers_share_pages_with_attention() -> None:
    """GB300, 23 + 69 layers: block 1,056, 46.5 GiB hold 394,633 tokens of 10,240 each."""
    layout = kv_layout(model("srt-slurm/GDN-92L-fp4").layers, KvSettings())
    assert {group.block_tokens for group in layout.groups} == {1056}
    assert layout.request_blocks(10_240) == 10 + 3
    assert int(layout.concurrency(46.5 * GIB, 10_240) * 10_240) == 394_633


def test_latent_pages_are_whole_blocks_of_64() -> None:
    """RTX 3090 TP 2: 2.3 GiB hold 75,840 tokens as 0.11 counts them."""
    layers = model("moonshotai/Kimi-Linear-48B-A3B-Instruct").layers
    layout = kv_layout(layers, KvSettings(tensor_parallel=2))
    assert layout.tokens_of_blocks(2.3 * GIB) == 75_840


def test_smaller_tokens_get_larger_blocks() -> None:
    """Gemma 4 31B: 16 x 256 sliding, 4 x 512 global: blocks of 16 and of 32 tokens, one page."""
    layout = kv_layout(model("google/gemma-4-31B-it").layers, KvSettings())
    blocks = {type(group.kind): group.block_tokens for group in layout.groups}
    assert blocks == {SlidingAttention: 16, FullAttention: 32}


def test_without_a_shared_pool_sliding_layers_keep_everything() -> None:
    """MI325X with a connector: 10.79 GiB hold 157,200 tokens in all 36 layers."""
    layout = kv_layout(GPT_OSS_120B, KvSettings(hybrid_pool=False))
    capacity_tokens = layout.tokens_of_blocks(10.79 * GIB)
    assert capacity_tokens == pytest.approx(157_200, rel=1e-3)


def test_context_parallel_ranks_multiply_capacity() -> None:
    """Kimi K2 on H200: 46.8 GiB hold 715,072 tokens, eight ranks eight times as many."""
    layers = (Layers(LatentAttention(512, 64), 61),)
    free_bytes = 46.8 * GIB
    single = kv_layout(layers, KvSettings(tensor_parallel=8))
    eight = kv_layout(layers, KvSettings(tensor_parallel=8, decode_context_parallel=8))
    assert single.tokens_of_blocks(free_bytes) == 715_072
    assert eight.tokens_of_blocks(free_bytes) == 8 * 715_072


@pytest.mark.parametrize(
    ("state_blocks", "expected"),
    [
        pytest.param(1, 42 + 3 * 1, id="27B, 32k: ceil(32768 / 784) + 3 groups of one state"),
        pytest.param(2, 42 + 3 * 2, id="prefixes cached: 3 groups of two states"),
        pytest.param(4, 42 + 3 * 4, id="and two draft tokens: 3 groups of four"),
    ],
)
def test_a_request_keeps_as_many_states_as_its_mode_wants(state_blocks: int, expected: int) -> None:
    layers = model("Qwen/Qwen3.5-27B").layers
    assert kv_layout(layers, KvSettings(state_blocks=state_blocks)).request_blocks(32_768) == (
        expected
    )


@pytest.mark.parametrize(
    ("multiple", "expected"),
    [
        pytest.param(64, 1920, id="64 x 30: 2,170,880 B of state over 1,152 B a token is 1,885"),
        pytest.param(128, 1920, id="128 x 15"),
        pytest.param(512, 2048, id="512 x 4"),
    ],
)
def test_latent_blocks_beside_states_are_whole_multiples(multiple: int, expected: int) -> None:
    layers = model("moonshotai/Kimi-Linear-48B-A3B-Instruct").layers
    layout = kv_layout(layers, KvSettings(latent_hybrid_tokens=multiple))
    assert {group.block_tokens for group in layout.groups} == {expected}


def test_pipeline_stages_share_the_groups_of_the_whole_model() -> None:
    """Gemma 3 27B: 10 full and 52 sliding layers are 1 + 6 groups of 10; a stage of 4 holds 3."""
    layers = model("google/gemma-3-27b-it").layers
    whole = kv_layout(layers, KvSettings())
    stage = kv_layout(layers, KvSettings(pipeline_parallel=4))
    assert sum(group.groups for group in whole.groups) == 1 + 6
    assert sum(group.groups for group in stage.groups) == 1 + 6
    assert (whole.group_layers, stage.group_layers) == (10, 3)


def test_shapes_that_a_gpu_cannot_tell_apart_are_one_kind() -> None:
    """8 and 4 KV heads over 8 GPUs are one head each: 16 full layers, 24 sliding: 24 // 16 + 1."""
    layers = (
        Layers(FullAttention(8, 128, 128), 8),
        Layers(FullAttention(4, 128, 128), 8),
        Layers(SlidingAttention(8, 128, 128, 1024), 24),
    )
    split = kv_layout(layers, KvSettings(tensor_parallel=8))
    assert [group.groups for group in split.groups] == [1, 2]
    assert [group.groups for group in kv_layout(layers, KvSettings()).groups] == [1, 1, 3]


def test_windows_of_one_length_are_kept_without_a_shared_pool() -> None:
    layers = (Layers(SlidingAttention(8, 128, 128, 4096), 32),)
    alone = kv_layout(layers, KvSettings(hybrid_pool=False))
    assert alone.request_blocks(32_768) == kv_layout(layers, KvSettings()).request_blocks(32_768)
    assert alone.request_blocks(32_768) == ceil((4095 + 8192) / 16) + 1


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(model("Qwen/Qwen3.5-27B").layers, id="states"),
        pytest.param(
            (
                Layers(SlidingAttention(8, 128, 128, 512), 8),
                Layers(SlidingAttention(8, 128, 128, 4096), 8),
                Layers(FullAttention(8, 128, 128), 8),
            ),
            id="two windows",
        ),
    ],
)
def test_what_cannot_keep_a_whole_context_is_refused(layers: tuple[Layers, ...]) -> None:
    with pytest.raises(SizingError, match="whole context") as caught:
        kv_layout(layers, KvSettings(hybrid_pool=False))
    assert caught.value.name == "hybrid_pool"


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.27.1", (1, 64)), ("0.28.0", (2, 64)), ("0.32.0", (2, 128))],
)
def test_hybrids_changed_with_the_version(version: str, expected: tuple[int, int]) -> None:
    engine_defaults = defaults(parse_version(version), None)
    assert (engine_defaults.state_blocks, engine_defaults.latent_hybrid_tokens) == expected


def test_two_batches_in_flight_cost_capacity() -> None:
    single = kv_layout(GPT_OSS_120B, KvSettings(in_flight_tokens=8192))
    two = kv_layout(GPT_OSS_120B, KvSettings(in_flight_tokens=16_384))
    assert two.concurrency(40 * GIB, 65_536) < single.concurrency(40 * GIB, 65_536)


@pytest.mark.parametrize(
    ("kv_heads", "tensor_parallel", "expected"), [(8, 4, 2), (8, 16, 1), (2, 4, 1), (10, 5, 2)]
)
def test_heads_are_split_then_copied(kv_heads: int, tensor_parallel: int, expected: int) -> None:
    assert heads_per_gpu(kv_heads, tensor_parallel) == expected


def test_heads_that_cannot_be_split_name_what_can() -> None:
    with pytest.raises(SizingError, match="10 KV heads") as caught:
        heads_per_gpu(10, 4)
    assert caught.value.name == "tensor_parallel"
    assert caught.value.choices == ("1", "2", "5", "10")


def test_an_unknown_dtype_names_the_known() -> None:
    with pytest.raises(SizingError, match="fp6") as caught:
        kv_format("fp6")
    assert "fp8" in caught.value.choices


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((18, 18), 18), ((5, 29), 5), ((12, 13), 13), ((20, 30), 20), ((7, 20), 7)],
)
def test_groups_are_as_large_as_the_rarest_kind(counts: tuple[int, int], expected: int) -> None:
    assert group_size(counts) == expected


KINDS = st.one_of(
    st.builds(FullAttention, st.sampled_from([1, 2, 4, 8]), st.just(128), st.just(128)),
    st.builds(SlidingAttention, st.sampled_from([2, 8]), st.just(64), st.just(64), st.just(1024)),
    st.builds(Recurrent, st.integers(1, 10**5), st.integers(1, 10**7), st.sampled_from([2.0, 4.0])),
)


@pytest.mark.parametrize(
    ("dtype", "expected_bytes"),
    [
        pytest.param("fp8_per_token_head", 128 + 128 + 8, id="a float32 scale for each side"),
        pytest.param("int4_per_token_head", 64 + 64 + 8, id="two elements a byte"),
        pytest.param("nvfp4", 2 * (64 + 8), id="a scale of 8 bits for 16 elements"),
        pytest.param("turboquant_k8v4", 128 + 64 + 4, id="keys in FP8, values in 4 bits"),
        pytest.param("turboquant_3bit_nc", 48 + 2 + 48 + 4, id="norm, scale and zero point"),
        pytest.param("ultraquant_4bit", 2 * (64 + 4), id="a scale for 32 elements"),
    ],
)
def test_a_head_takes_its_elements_and_scales(dtype: str, expected_bytes: int) -> None:
    assert kv_format(dtype).head_bytes(128, 128) == expected_bytes


@pytest.mark.parametrize(
    ("gpu_id", "dtype", "latent_bytes"),
    [
        pytest.param("rtx-pro-6000", "auto", 656, id="capability 12 has no other kernel"),
        pytest.param("rtx-pro-6000", "fp8", 656, id="capability 12, FP8"),
        pytest.param("gb10", "fp8", 656, id="capability 12.1"),
        pytest.param("h200", "fp8", 656, id="Hopper, FP8"),
        pytest.param("h200", "auto", 1152, id="Hopper, 16 bit"),
        pytest.param("b200", "fp8", 576, id="capability 10 packs nothing"),
        pytest.param("mi300x", "fp8", 576, id="AMD packs nothing"),
    ],
)
def test_kernels_of_an_indexed_layer_store_a_token_in_rows_of_656_bytes(
    gpu_id: str, dtype: str, latent_bytes: int
) -> None:
    """512 elements in FP8 with 4 scales, 64 in 16 bit; the indexer's key adds 132 bytes."""
    launch = Launch(
        model("zai-org/GLM-5.1-FP8"), gpu(gpu_id), Parallel(tensor=8), kv_cache_dtype=dtype
    )
    assert kv_layout_of(launch).token_bytes == 78 * (latent_bytes + 132)


def test_nvfp4_is_refused_where_vllm_has_no_kernel() -> None:
    llama = model("meta-llama/Llama-3.3-70B-Instruct")
    for name, card, dtype in (
        (llama, "mi300x", "nvfp4"),
        (llama, "h100-sxm", "nvfp4_4over6"),
        (llama, "b200", "nvfp4_ds_mla"),
        (model("deepseek-ai/DeepSeek-V3"), "b200", "nvfp4"),
    ):
        with pytest.raises(SizingError) as caught:
            memory(Launch(name, gpu(card), Parallel(tensor=8), kv_cache_dtype=dtype))
        assert caught.value.name == "kv_cache_dtype"


def test_nvfp4_holds_3_6_times_the_requests_of_16_bit() -> None:
    plain = Launch(model("meta-llama/Llama-3.3-70B-Instruct"), gpu("b200"))
    packed = memory(replace(plain, kv_cache_dtype="nvfp4"))
    ratio = packed.concurrency.expected / memory(plain).concurrency.expected
    assert ratio == pytest.approx(256 * 2 / 144, rel=0.01)


@given(
    kinds=st.lists(st.tuples(KINDS, st.integers(1, 64)), min_size=1, max_size=3),
    free_gib=st.floats(0.5, 200),
    context_tokens=st.integers(1, 200_000),
)
def test_more_memory_never_holds_less(
    kinds: list[tuple[FullAttention, int]], free_gib: float, context_tokens: int
) -> None:
    layout = kv_layout([Layers(kind, count) for kind, count in kinds], KvSettings())
    less = layout.concurrency(free_gib * GIB, context_tokens)
    assert less <= layout.concurrency(2 * free_gib * GIB, context_tokens)
    assert layout.request_blocks(context_tokens) <= layout.request_blocks(2 * context_tokens)
    assert layout.blocks(free_gib * GIB) * layout.block_bytes <= free_gib * GIB


@given(
    layers=st.integers(1, 200),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    context_tokens=st.integers(1, 10**6),
)
def test_full_attention_is_the_formula(
    layers: int, kv_heads: int, tensor_parallel: int, context_tokens: int
) -> None:
    layout = kv_layout(
        (Layers(FullAttention(kv_heads, 128, 128), layers),),
        KvSettings(tensor_parallel=tensor_parallel),
    )
    heads = max(1, kv_heads // tensor_parallel)
    assert layout.token_bytes == 2 * layers * heads * 128 * 2
    assert layout.request_bytes(context_tokens) == (
        ceil(context_tokens / 16) * 16 * layout.token_bytes
    )


def test_layers_of_local_chunks_hold_their_chunk() -> None:
    """Llama 4: 12 full layers and 3 groups of 12 that reserve a chunk and two batches.

    Source: ChunkedLocalAttentionSpec.max_admission_blocks_per_request (vLLM 0.32).
    """
    scout = model("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    launch = Launch(
        scout, gpu("h200"), Parallel(tensor=8), max_model_len=131_072, max_num_batched_tokens=8192
    )
    whole, chunk = 131_072 // 16, (8192 + 2 * 8192) // 16
    blocks = kv_layout_of(launch).request_blocks(131_072)
    assert blocks == pytest.approx(whole + 3 * chunk, rel=0.001)
    variable = ("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "0")
    for other in (
        replace(launch, version=parse_version("0.13.0")),
        replace(launch, other_flags=(variable,)),
    ):
        layout = kv_layout_of(other)
        whole_bytes = 48 * 131_072 * 2 * 128 * 2
        assert layout.request_bytes(131_072) == pytest.approx(whole_bytes, rel=0.001)
