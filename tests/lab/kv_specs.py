"""What vLLM's layers would register for their cache, built with vLLM's own classes.

Needs the lab's interpreter, as `tests.lab.kv_layout` does; vLLM is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from tests.lab.kv_censuses import LayerFacts

# vLLM is not installed where the types are checked.
Foreign = Any
# What the kernels of the default backends take multiples of.
_KERNEL_TOKENS = 16


def state_of(layer: LayerFacts, tensor_parallel: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Shapes and dtypes of a recurrent layer's state on one GPU: the convolution's, its own."""
    shapes = import_module("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator
    torch = import_module("torch")
    shape = getattr(shapes, layer["shape"])(tensor_parallel, **layer["sizes"])
    return shape, (torch.bfloat16, getattr(torch, layer["state_dtype"]))


def backend() -> type:
    """An attention backend whose kernels take any multiple of 16 tokens, as FlashAttention's do."""
    base = import_module("vllm.v1.attention.backend")

    def sizes(_spec: Foreign = None) -> list[Any]:
        return [base.MultipleOf(_KERNEL_TOKENS)]

    methods = {"get_supported_kernel_block_sizes": staticmethod(sizes)}
    return type("Backend", (base.AttentionBackend,), methods)


def layer_specs(
    config: Foreign, census: Sequence[LayerFacts], case: Mapping[str, Any]
) -> dict[str, Any]:
    """What every layer registers, kinds spread evenly over the model's depth."""
    placed = sorted(
        ((index + 0.5) / layer["count"], kind, index)
        for kind, layer in enumerate(census)
        for index in range(layer["count"])
    )
    found: dict[str, Any] = {}
    for _, kind, index in placed:
        for part, spec in enumerate(specs_of(config, census[kind], case)):
            found[f"{kind}.{index}.{part}"] = spec
    return found


def specs_of(config: Foreign, layer: LayerFacts, case: Mapping[str, Any]) -> list[Any]:
    """One specification; two where the layer has an indexer."""
    specs = import_module("vllm.v1.kv_cache_interface")
    torch = import_module("torch")
    block, kind = config.cache_config.block_size, layer["kind"]
    dtype = torch.bfloat16 if case["kv_cache_dtype"] == "auto" else torch.uint8
    if kind == "recurrent":
        shapes, dtypes = state_of(layer, case["tensor_parallel"])
        padded = config.cache_config.mamba_page_size_padded
        mode = case["mamba_cache_mode"]
        held = block if mode == "align" else case["max_model_len"]
        return [specs.MambaSpec(held, shapes, dtypes, padded, mamba_cache_mode=mode)]
    if kind == "latent":
        return _latent_specs(layer, block, dtype)
    shape = {
        "num_kv_heads": max(1, layer["kv_heads"] // case["tensor_parallel"]),
        "head_size": layer["key_dim"],
        "head_size_v": layer["value_dim"],
        "dtype": dtype,
    }
    if kind == "full":
        return [specs.FullAttentionSpec(block_size=block, **shape)]
    shape["sliding_window"] = layer["window_tokens"]
    one = specs.SlidingWindowSpec(block_size=1, **shape).page_size_bytes
    fits = import_module("vllm.model_executor.layers.attention.attention")
    tokens = fits._largest_kernel_block_within(backend(), one, one * block, block)
    return [specs.SlidingWindowSpec(block_size=tokens, **shape)]


def _latent_specs(layer: LayerFacts, block: int, dtype: Foreign) -> list[Any]:
    specs = import_module("vllm.v1.kv_cache_interface")
    row = {"block_size": block, "num_kv_heads": 1, "max_tp_shards": 1}
    width = layer["latent_dim"] + layer["rope_dim"]
    found = [specs.MLAAttentionSpec(**row, head_size=width, dtype=dtype)]
    if layer["index_dim"]:
        # 8-bit keys and a scale of 4 bytes.
        index = {"head_size": layer["index_dim"] + 4, "dtype": import_module("torch").uint8}
        role = specs.SparseCacheRole.INDEXER
        found.append(specs.MLAAttentionSpec(**row, **index, cache_role=role))
    return found
