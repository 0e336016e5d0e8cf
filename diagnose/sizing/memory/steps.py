"""The memory's arithmetic, line by line, as a person would check it with a pencil. Pure."""

from __future__ import annotations

from dataclasses import replace

from kneewatch.diagnose.catalogue.layers import (
    FullAttention,
    LatentAttention,
    Recurrent,
    SlidingAttention,
)
from kneewatch.diagnose.sizing.memory.beside_steps import beside_steps, draft_token_steps, gib
from kneewatch.diagnose.sizing.memory.budget import Memory, kv_layout_of
from kneewatch.diagnose.sizing.memory.kv_cache import Group, KvSettings, heads_per_gpu, state_bytes
from kneewatch.diagnose.sizing.memory.kv_pages import index_bytes
from kneewatch.diagnose.sizing.memory.weights import Weights
from kneewatch.diagnose.sizing.steps import Step, figure

_KV_SOURCE = "guide 2.2; vllm/v1/kv_cache_interface.py"
_POOL_SOURCE = "vllm/v1/core/kv_cache_utils.py"


def memory_steps(answer: Memory) -> tuple[Step, ...]:
    """Weights, KV bytes per token, what is left for the cache, blocks, tokens, requests."""
    found: list[Step] = []
    if answer.setup.available_kv_bytes is None:
        found += [_weights(answer), *beside_steps(answer), _overhead(answer), _available(answer)]
    else:
        stated = gib(answer.available_bytes.expected)
        found.append(Step("Available KV on each GPU", "as stated", stated, stated, "the user"))
    found += [_tokens(group, answer.layout.settings) for group in _own_groups(answer)]
    return (*found, *draft_token_steps(answer), *_pool(answer))


def _own_groups(answer: Memory) -> tuple[Group, ...]:
    """The model's own layers, where a draft's share their groups."""
    if answer.setup.draft is None:
        return answer.layout.groups
    return kv_layout_of(replace(answer.setup, draft=None)).groups


def _weights(answer: Memory) -> Step:
    setup = answer.setup
    total_bytes = (answer.weights_bytes or 0.0) - answer.adapter_bytes - answer.draft_bytes
    if answer.weights is None:
        return Step(
            "Weights on each GPU", "as stated", gib(total_bytes), gib(total_bytes), "the user"
        )
    return Step(
        f"Weights on each GPU ({setup.scheme.id})",
        "attention + MLP + experts + tables + small + vision",
        " + ".join(gib(part) for part in _parts(answer.weights)),
        gib(total_bytes),
        f"guide 2.1; {setup.scheme.source}",
    )


def _parts(weights: Weights) -> tuple[float, ...]:
    return (
        weights.attention_bytes,
        weights.mlp_bytes,
        weights.experts_bytes,
        weights.tables_bytes,
        weights.small_bytes,
        weights.vision_bytes,
    )


def _overhead(answer: Memory) -> Step:
    taken = answer.overhead
    if taken is None:
        raise AssertionError("an available amount that was computed has an overhead")
    guide = answer.setup.overhead == "guide"
    return Step(
        f"Overhead on each GPU ({answer.setup.overhead})",
        "activations + framework + CUDA graphs",
        f"{gib(taken.activation_bytes)} + {gib(taken.framework_bytes)} + {gib(taken.graphs_bytes)}",
        f"{gib(taken.expected_bytes)} ({gib(taken.low_bytes)} to {gib(taken.high_bytes)})",
        "guide 2.3, 2.4" if guide else "fitted to logged start-ups of vLLM 0.6 to 0.31",
    )


def _available(answer: Memory) -> Step:
    setup, free, taken = answer.setup, answer.available_bytes, answer.overhead
    memory_bytes = setup.gpu.memory_bytes if setup.gpu is not None else 0
    overhead = gib(taken.expected_bytes) if taken is not None else ""
    loaded = "weights"
    if answer.adapter_bytes or answer.draft_bytes:
        loaded = "all that is loaded"
    return Step(
        "Available KV on each GPU",
        f"utilization x memory - {loaded} - overhead",
        f"{figure(setup.utilization)} x {gib(memory_bytes)} - {gib(answer.weights_bytes or 0.0)} "
        f"- {overhead}",
        f"{gib(free.expected)} ({gib(free.low)} to {gib(free.high)})",
        "vllm/v1/worker/gpu_worker.py",
    )


def _tokens(group: Group, settings: KvSettings) -> Step:
    kind, count = group.kind, group.layers
    if isinstance(kind, Recurrent):
        held = state_bytes(kind, settings)
        return Step(
            f"State of a request, {count} recurrent layers",
            "(convolution x 2 B + state x its width) / TP, each layer",
            f"({kind.conv_elements:,} x 2 + {kind.state_elements:,} x "
            f"{figure(kind.state_bytes_per_element)}) / {settings.tensor_parallel}",
            f"{figure(held)} B a layer",
            _KV_SOURCE,
        )
    each = figure(settings.element_bytes)
    if isinstance(kind, LatentAttention):
        title, formula, values = _latent(kind, count, settings)
    else:
        heads = heads_per_gpu(kind.kv_heads, settings.tensor_parallel)
        formula = "layers x KV heads on a GPU x (key + value) x bytes"
        values = f"{count} x {heads} x ({kind.key_dim} + {kind.value_dim}) x {each}"
        title = "KV of a token, full attention"
        if isinstance(kind, SlidingAttention):
            title = f"KV of a token within a window of {kind.window_tokens:,}"
    result = f"{figure(count * group.token_bytes)} B on each GPU"
    return Step(title, formula, values, result, _KV_SOURCE)


def _latent(kind: LatentAttention, count: int, settings: KvSettings) -> tuple[str, str, str]:
    row = f"({kind.latent_dim} + {kind.rope_dim}) x {figure(settings.element_bytes)}"
    formula = "(latent + rope) x bytes"
    if settings.packed_latent and kind.index_dim:
        formula = "latent + its scales + rope x 2"
        row = f"{kind.latent_dim} + {kind.latent_dim // 32} + {kind.rope_dim} x 2"
    index = index_bytes(kind)
    formula += " + indexer" if index else ""
    row += f" + {index}" if index else ""
    return (
        "KV of a token, latent attention",
        f"layers x ({formula}), the same on every rank",
        f"{count} x ({row})",
    )


def _pool(answer: Memory) -> tuple[Step, ...]:
    layout, context = answer.layout, answer.setup.context
    blocks = layout.blocks(answer.available_bytes.expected)
    request = layout.request_blocks(context)
    block_tokens = min(group.block_tokens for group in layout.groups)
    return (
        Step(
            "Blocks",
            "available KV / (page x layers of a group)",
            f"{gib(answer.available_bytes.expected)} / ({figure(layout.page_bytes)} B x "
            f"{layout.group_layers})",
            f"{blocks:,} of {block_tokens} tokens, one of them vLLM's own",
            _POOL_SOURCE,
        ),
        Step(
            f"Blocks of a request of {context:,} tokens",
            " + ".join(_group_formula(group, layout.settings) for group in layout.groups),
            "sum over the groups",
            f"{request:,}",
            _POOL_SOURCE,
        ),
        Step(
            "Requests at once",
            "blocks / blocks of a request",
            f"{blocks:,} / {request:,}",
            f"{figure(answer.concurrency.expected)} ({figure(answer.concurrency.low)} to "
            f"{figure(answer.concurrency.high)})",
            "vLLM's start-up line",
        ),
    )


def _group_formula(group: Group, settings: KvSettings) -> str:
    if isinstance(group.kind, FullAttention | LatentAttention):
        need = f"ceil(context / {group.block_tokens})"
    elif isinstance(group.kind, SlidingAttention):
        need = f"(ceil((window - 1 + tokens in flight) / {group.block_tokens}) + 1)"
    else:
        need = f"{settings.state_blocks}"
    return f"{group.groups} x {need}"
