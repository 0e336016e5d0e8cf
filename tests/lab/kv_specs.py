"""What vLLM's layers would register for their cache, built with vLLM's own classes.

Needs the lab's interpreter, as `tests.lab.kv_layout` does; vLLM is imported when it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from unittest import mock

from tests.lab.kv_censuses import LayerFacts

# vLLM is not installed where the types are checked.
Foreign = Any
# What the kernels of the default backends take multiples of.
_KERNEL_TOKENS = 16
# Bytes that vLLM's layer of sparse latent attention states itself.
_PACKED_ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_BACKENDS = (
    ("nvfp4", "vllm.v1.attention.backends.flashinfer", "FlashInferBackend"),
    ("turboquant", "vllm.v1.attention.backends.turboquant_attn", "TurboQuantAttentionBackend"),
    ("", "vllm.v1.attention.backends.triton_attn", "TritonAttentionBackend"),
)


def state_of(layer: LayerFacts, tensor_parallel: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Shapes and dtypes of a recurrent layer's state on one GPU: the convolution's, its own."""
    shapes = import_module("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator
    torch = import_module("torch")
    shape = getattr(shapes, layer["shape"])(tensor_parallel, **layer["sizes"])
    return shape, (torch.bfloat16, getattr(torch, layer["state_dtype"]))


def quantizes(case: Mapping[str, Any]) -> bool:
    """Whether the case's KV cache has a format of its own, so that a backend packs it."""
    return case["kv_cache_dtype"] not in ("auto", "fp8")


def packing(case: Mapping[str, Any]) -> type:
    """The backend that packs heads in the case's format."""
    # The format's arithmetic needs none of FlashInfer's kernels.
    for absent in ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils"):
        sys.modules.setdefault(absent, mock.MagicMock())
    module, name = next(
        place for prefix, *place in _BACKENDS if case["kv_cache_dtype"].startswith(prefix)
    )
    packing_type: type = getattr(import_module(module), name)
    return packing_type


def backend(case: Mapping[str, Any]) -> type:
    """An attention backend that packs heads as the case's format has it, with kernels for any
    multiple of 16 tokens, as FlashAttention's are."""
    base = import_module("vllm.v1.attention.backend")
    parent = packing(case) if quantizes(case) else base.AttentionBackend

    def sizes(_spec: Foreign = None) -> list[Any]:
        return [base.MultipleOf(_KERNEL_TOKENS)]

    methods = {"get_supported_kernel_block_sizes": staticmethod(sizes)}
    return type("Backend", (parent,), methods)


def layer_specs(
    config: Foreign, census: Sequence[LayerFacts], case: Mapping[str, Any]
) -> dict[str, Any]:
    """What every layer registers, kinds spread evenly over the model's depth, the first and last
    in 16 bit where vLLM leaves them."""
    plain = {**case, "kv_cache_dtype": "auto"}
    spared = set(config.cache_config.kv_cache_dtype_skip_layers)
    placed = sorted(
        ((index + 0.5) / layer["count"], kind, index)
        for kind, layer in enumerate(census)
        for index in range(layer["count"])
    )
    spec_of_part: dict[str, Any] = {}
    deepest = max(layer["count"] for layer in census)
    for place, kind, index in placed:
        own = plain if str(index) in spared else case
        # The caches of compressed attention are several to a layer, which is on one stage.
        several = any(layer["kind"] == "states" for layer in census)
        layer_name = f"{int(place * deepest)}" if several else f"{kind}.{index}"
        for part, spec in enumerate(specs_of(config, census[kind], own)):
            spec_of_part[f"{layer_name}.{kind}-{part}"] = spec
    return spec_of_part


def specs_of(config: Foreign, layer: LayerFacts, case: Mapping[str, Any]) -> list[Any]:
    """One specification; two where the layer has an indexer."""
    specs = import_module("vllm.v1.kv_cache_interface")
    torch = import_module("torch")
    block, kind = config.cache_config.block_size, layer["kind"]
    mode = specs.get_kv_quant_mode(case["kv_cache_dtype"])
    dtype = torch.bfloat16 if case["kv_cache_dtype"] == "auto" else torch.uint8
    if kind == "recurrent":
        shapes, dtypes = state_of(layer, case["tensor_parallel"])
        padded = config.cache_config.mamba_page_size_padded
        mode = case["mamba_cache_mode"]
        held = block if mode == "align" else case["max_model_len"]
        return [specs.MambaSpec(held, shapes, dtypes, padded, mamba_cache_mode=mode)]
    if kind == "latent":
        return _latent_specs(layer, block, dtype, case)
    if kind in ("compressed", "states"):
        return [_vector_spec(layer, block, case)]
    shape = {
        "num_kv_heads": max(1, layer["kv_heads"] // case["tensor_parallel"]),
        "head_size": layer["key_dim"],
        "head_size_v": layer["value_dim"],
        "dtype": dtype,
        "kv_quant_mode": mode,
    }
    if kind == "full":
        return [packed(specs.FullAttentionSpec(block_size=block, **shape), case)]
    shape["sliding_window"] = layer["window_tokens"]
    token_bytes = packed(specs.SlidingWindowSpec(block_size=1, **shape), case).page_size_bytes
    fits = import_module("vllm.model_executor.layers.attention.attention")
    tokens = fits._largest_kernel_block_within(
        backend(case), token_bytes, token_bytes * block, block
    )
    return [packed(specs.SlidingWindowSpec(block_size=tokens, **shape), case)]


def packed(spec: Foreign, case: Mapping[str, Any]) -> Foreign:
    """The specification as the backend of the case's format packs it."""
    if not quantizes(case):
        return spec
    return import_module("vllm.v1.worker.utils").customize_attention_spec(packing(case), spec)


def _vector_spec(layer: LayerFacts, block: int, case: Mapping[str, Any]) -> Foreign:
    """What DeepSeek V4's caches register, or an indexer beside plain attention in 16 bit."""
    specs = import_module("vllm.v1.kv_cache_interface")
    torch = import_module("torch")
    shape = {
        "num_kv_heads": 1,
        "max_tp_shards": 1,
        "head_size": layer["vector_bytes"],
        "dtype": torch.uint8,
    }
    packed_case = case["kv_cache_dtype"] == "fp8_ds_mla"
    packing_bytes = layer.get("page_bytes", 576) if packed_case else None
    if layer["kind"] == "states" and not layer["window_tokens"]:
        ring = {**shape, "head_size_v": 0}
        return specs.CircularBufferSpec(block_size=layer["block_tokens"], **ring)
    if layer["kind"] == "states":
        return specs.SlidingWindowMLASpec(
            block_size=layer["block_tokens"],
            sliding_window=layer["window_tokens"],
            alignment=packing_bytes,
            **shape,
        )
    return specs.MLAAttentionSpec(
        block_size=block,
        tokens_per_state=layer["tokens_per_vector"],
        alignment=packing_bytes,
        **shape,
    )


def _latent_specs(
    layer: LayerFacts, block: int, dtype: Foreign, case: Mapping[str, Any]
) -> list[Any]:
    specs = import_module("vllm.v1.kv_cache_interface")
    row = {"block_size": block, "num_kv_heads": 1, "max_tp_shards": 1}
    width = layer["latent_dim"] + layer["rope_dim"]
    stated = case["kv_cache_dtype"]
    latent = specs.MLAAttentionSpec(
        **row,
        head_size=width,
        dtype=dtype,
        kv_quant_mode=specs.get_kv_quant_mode(stated),
        state_content_bytes=_PACKED_ROW_BYTES.get(stated),
    )
    if quantizes(case):
        common = import_module("vllm.model_executor.layers.attention.mla_attention")
        latent = common.MLACommonBackend.customize_spec(latent)
    latent_specs = [latent]
    if layer["index_dim"]:
        # 8-bit keys and a scale of 4 bytes.
        index = {"head_size": layer["index_dim"] + 4, "dtype": import_module("torch").uint8}
        role = specs.SparseCacheRole.INDEXER
        latent_specs.append(specs.MLAAttentionSpec(**row, **index, cache_role=role))
    return latent_specs
