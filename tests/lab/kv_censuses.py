"""The layers and launches whose cache layout is recorded from vLLM: facts only, no vLLM here.

Shapes are of published models where a name says so; the others are chosen to meet one rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

GIB = 1 << 30
LayerFacts = Mapping[str, Any]

DEFAULTS: Mapping[str, Any] = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "decode_context_parallel": 1,
    "kv_cache_dtype": "auto",
    "block_tokens": 16,
    "max_model_len": 32768,
    "max_num_batched_tokens": 8192,
    "batches_in_flight": 2,
    "hybrid_pool": True,
    "mamba_cache_mode": "none",
    "layout": "LBNHC",
    "available_gib": 60.0,
}


def settings_of(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The launch's settings, those that are not stated as a plain launch has them."""
    return {**DEFAULTS, **stated}


def _full(count: int, kv_heads: int, key_dim: int, value_dim: int | None = None) -> LayerFacts:
    value = value_dim or key_dim
    return {
        "kind": "full",
        "count": count,
        "kv_heads": kv_heads,
        "key_dim": key_dim,
        "value_dim": value,
    }


def _sliding(count: int, kv_heads: int, key_dim: int, window_tokens: int) -> LayerFacts:
    shape = _full(count, kv_heads, key_dim)
    return {**shape, "kind": "sliding", "window_tokens": window_tokens}


def _latent(count: int, index_dim: int = 0) -> LayerFacts:
    return {
        "kind": "latent",
        "count": count,
        "latent_dim": 512,
        "rope_dim": 64,
        "index_dim": index_dim,
    }


def _compressed(count: int, vector_bytes: int, tokens_per_vector: int = 1) -> LayerFacts:
    return {
        "kind": "compressed",
        "count": count,
        "vector_bytes": vector_bytes,
        "tokens_per_vector": tokens_per_vector,
    }


def _states(count: int, vector_bytes: int, window_tokens: int, block_tokens: int) -> LayerFacts:
    return {
        "kind": "states",
        "count": count,
        "vector_bytes": vector_bytes,
        "window_tokens": window_tokens,
        "block_tokens": block_tokens,
    }


def _deepseek_v4(layers: int, of_4: int, of_128: int) -> Sequence[LayerFacts]:
    """Windows, compressed vectors of 4 tokens with their indexers, those of 128, and the tokens
    that the three compressors have not finished."""
    return (
        _states(layers, 584, 128, 64),
        _compressed(of_4, 584, 4),
        _states(of_4, 8192, 8, 4),
        _compressed(of_4, 132, 4),
        _states(of_4, 2048, 8, 4),
        _compressed(of_128, 584, 128),
        _states(of_128, 4096, 128, 8),
    )


def _deepseek_v41(packed_bytes: int, page_bytes: int) -> Sequence[LayerFacts]:
    """The windows of 40 layers, the vectors and keys of their four sources, and the rings of the
    three that pool two tokens."""
    paged = {"page_bytes": page_bytes}
    return (
        {**_states(40, packed_bytes, 128, 32), **paged},
        {**_compressed(3, packed_bytes, 2), **paged},
        {**_compressed(3, 132, 2), **paged},
        {**_states(3, 4096, 0, 8), "page_bytes": 1},
        {**_compressed(1, packed_bytes, 1), **paged},
        {**_compressed(1, 132, 1), **paged},
    )


def _recurrent(count: int, shape: str, state_dtype: str, **sizes: int) -> LayerFacts:
    return {
        "kind": "recurrent",
        "count": count,
        "shape": shape,
        "state_dtype": state_dtype,
        "sizes": sizes,
    }


def _delta(count: int, value_heads: int, *, key_heads: int = 16, dtype: str) -> LayerFacts:
    return _recurrent(
        count,
        "gated_delta_net_state_shape",
        dtype,
        num_k_heads=key_heads,
        num_v_heads=value_heads,
        head_k_dim=128,
        head_v_dim=128,
        conv_kernel_size=4,
    )


def _mamba2(count: int, heads: int, size: int = 64) -> LayerFacts:
    return _recurrent(
        count,
        "mamba2_state_shape",
        "float32",
        intermediate_size=heads * size,
        n_groups=8,
        num_heads=heads,
        head_dim=size,
        state_size=128,
        conv_kernel=4,
    )


def _kimi(count: int) -> LayerFacts:
    return _recurrent(count, "kda_state_shape", "float32", num_heads=32, head_dim=128)


CENSUSES: Sequence[tuple[str, Sequence[LayerFacts]]] = (
    ("llama-3.3-70b", [_full(80, 8, 128)]),
    ("full of two shapes", [_full(30, 8, 128), _full(7, 4, 64)]),
    ("keys wider than values", [_full(48, 4, 192, 128)]),
    ("all sliding", [_sliding(32, 8, 128, 4096)]),
    ("all sliding, two windows", [_sliding(16, 8, 128, 4096), _sliding(16, 8, 128, 512)]),
    ("all sliding, two shapes", [_sliding(20, 8, 128, 4096), _sliding(10, 4, 64, 4096)]),
    ("gpt-oss-120b, 1:1", [_sliding(18, 8, 64, 128), _full(18, 8, 64)]),
    ("gpt-oss-20b with a draft, 12:13", [_sliding(12, 8, 64, 128), _full(13, 8, 64)]),
    ("gemma-3-27b, 5:1", [_sliding(52, 16, 128, 1024), _full(10, 16, 128)]),
    ("3:1", [_sliding(24, 8, 128, 4096), _full(8, 8, 128)]),
    ("20:24", [_full(20, 8, 128), _sliding(24, 8, 128, 1024)]),
    ("20:30", [_full(20, 8, 128), _sliding(30, 8, 128, 1024)]),
    ("2:29", [_full(2, 8, 128), _sliding(29, 8, 128, 1024)]),
    ("gemma-4-31b, pages that divide", [_sliding(50, 16, 256, 1024), _full(10, 4, 512)]),
    ("gemma-4-26b", [_sliding(25, 8, 256, 1024), _full(5, 2, 512)]),
    ("pages that do not divide", [_sliding(24, 8, 96, 1024), _full(8, 8, 128)]),
    ("larger sliding pages, no divisor", [_sliding(24, 8, 160, 1024), _full(8, 8, 128)]),
    (
        "full and two windows",
        [_full(8, 8, 128), _sliding(8, 8, 128, 512), _sliding(24, 8, 128, 4096)],
    ),
    (
        "two full shapes and sliding",
        [_full(8, 8, 128), _full(8, 4, 128), _sliding(24, 8, 128, 1024)],
    ),
    (
        "gemma-4-31b with a draft of its own",
        [_sliding(50, 16, 256, 1024), _full(10, 4, 512), _full(1, 8, 128)],
    ),
    ("llama-3.3-70b with an eagle layer", [_full(80, 8, 128), _full(1, 8, 128)]),
    ("deepseek-r1", [_latent(61)]),
    ("deepseek-v3.2", [_latent(61, 128)]),
    ("indexer in every fourth layer", [_latent(20, 128), _latent(58)]),
    ("latent and sliding, pages that divide", [_latent(30), _sliding(30, 1, 144, 1024)]),
    ("latent and sliding, no divisor", [_latent(30), _sliding(30, 8, 128, 1024)]),
    ("latent and small sliding, no divisor", [_latent(30), _sliding(30, 1, 128, 1024)]),
    ("kimi-linear", [_kimi(20), _latent(7)]),
    ("qwen3.5-27b", [_delta(48, 48, dtype="float32"), _full(16, 4, 256)]),
    ("qwen3.5-35b-a3b", [_delta(30, 32, dtype="float32"), _full(10, 2, 256)]),
    ("qwen3-next", [_delta(36, 32, dtype="bfloat16"), _full(12, 2, 256)]),
    ("nemotron-3-nano", [_mamba2(23, 64), _full(6, 2, 128)]),
    ("nemotron-3-super", [_mamba2(40, 128), _full(8, 2, 128)]),
    ("small states", [_mamba2(30, 8, 8), _full(10, 8, 128)]),
    ("mamba, full and sliding", [_mamba2(24, 64), _full(8, 4, 128), _sliding(16, 4, 128, 1024)]),
    ("mamba and wider sliding", [_mamba2(24, 64), _full(8, 4, 128), _sliding(16, 8, 128, 1024)]),
    ("deepseek-v4-flash", _deepseek_v4(43, 21, 20)),
    ("deepseek-v4-pro", _deepseek_v4(61, 30, 31)),
    ("compressed, windows of their own", _deepseek_v4(40, 8, 12)),
    ("deepseek-v4.1-flash", _deepseek_v41(584, 576)),
    ("deepseek-v4.1-flash on Blackwell", _deepseek_v41(528, 512)),
    ("step-3.5-flash", [_full(12, 8, 128), _sliding(33, 8, 128, 512)]),
    ("minimax-m3", [_full(60, 4, 128), _compressed(57, 256)]),
    ("mimo-v2-flash", [_full(9, 4, 192, 128), {**_sliding(39, 8, 192, 128), "value_dim": 128}]),
    ("hunyuan-v4", [_latent(10, 128), _latent(24)]),
    ("qwen3.5 with an mtp layer", [_delta(30, 32, dtype="float32"), _full(11, 2, 256)]),
)


# What of the KV cache's formats the kernels of a census can keep; UltraQuant's module cannot be
# imported without a GPU.
_OF_HEADS = (
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)
_OF_LATENTS = ("fp8_per_token_head", "int4_per_token_head")
_OF_INDEXED = ("fp8_ds_mla", "nvfp4_ds_mla")


def _formats(census: Sequence[LayerFacts]) -> Sequence[str]:
    kinds = {layer["kind"] for layer in census}
    if all(layer.get("index_dim") for layer in census):
        return _OF_INDEXED
    if "latent" in kinds:
        # Beside recurrent layers the block follows the latent backend, which is not built here.
        return () if "recurrent" in kinds else _OF_LATENTS
    if any(layer.get("key_dim") != layer.get("value_dim") for layer in census):
        return _OF_HEADS[:3]
    # Which layers are first and last is not said of a census of several kinds.
    return _OF_HEADS if len(census) == 1 and kinds == {"full"} else _OF_HEADS[:4]


def _cases() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, census in CENSUSES:
        kinds = {layer["kind"] for layer in census}
        if "states" in kinds:
            yield from _packed_cases(name)
            continue
        yield name, {}
        yield name, {"max_model_len": 10_000, "available_gib": 17.3}
        yield name, {"max_model_len": 131_072, "kv_cache_dtype": "fp8", "available_gib": 101.7}
        yield name, {"block_tokens": 64, "tensor_parallel": 2}
        yield name, {"tensor_parallel": 8}
        yield name, {"hybrid_pool": False}
        if "sliding" in kinds:
            for tokens, batches in product((2048, 16_384), (1, 2)):
                yield name, {"max_num_batched_tokens": tokens, "batches_in_flight": batches}
        else:
            yield name, {"tensor_parallel": 4, "decode_context_parallel": 4}
        if "recurrent" in kinds:
            for dtype in ("auto", "fp8"):
                aligned = {"mamba_cache_mode": "align", "kv_cache_dtype": dtype}
                for parallel in (1, 2, 4):
                    yield name, {**aligned, "tensor_parallel": parallel}
                for block in (32, 64, 128):
                    yield name, {**aligned, "block_tokens": block}
        for dtype in _formats(census):
            yield name, {"kv_cache_dtype": dtype}
            yield name, {"kv_cache_dtype": dtype, "tensor_parallel": 4, "block_tokens": 64}
        for stages in (2, 4):
            yield name, {"pipeline_parallel": stages, "batches_in_flight": stages + 1}


def _packed_cases(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Launches of compressed attention, whose kernels have one block size and one layout."""
    packed = {"block_tokens": 256, "layout": "BLHNC", "kv_cache_dtype": "fp8_ds_mla"}
    yield name, packed
    yield name, {**packed, "max_model_len": 10_000, "available_gib": 17.3}
    yield name, {**packed, "max_model_len": 1_048_576, "available_gib": 101.7}
    yield name, {**packed, "tensor_parallel": 8}
    for tokens, batches in product((2048, 16_384), (1, 2)):
        yield name, {**packed, "max_num_batched_tokens": tokens, "batches_in_flight": batches}
    if "v4.1" in name:
        return  # its layers share vectors, so vLLM refuses to put them on several stages
    for stages in (2, 4):
        yield name, {**packed, "pipeline_parallel": stages, "batches_in_flight": stages + 1}


CASES: Sequence[tuple[str, Mapping[str, Any]]] = tuple(_cases())
