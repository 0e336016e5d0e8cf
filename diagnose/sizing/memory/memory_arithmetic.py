"""The memory budget as lines of arithmetic that users can check by hand. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    Recurrent,
    SlidingAttention,
    SlidingStates,
)
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.arithmetic import Step
from kneewatch.diagnose.sizing.memory.budget import Memory, kv_layout_of
from kneewatch.diagnose.sizing.memory.kv_cache import (
    Group,
    KvSettings,
    blocks_of,
    heads_per_gpu,
    index_bytes,
    state_bytes,
    token_bytes,
)
from kneewatch.diagnose.sizing.memory.kv_formats import KvFormat
from kneewatch.diagnose.sizing.memory.weights import Weights
from kneewatch.rules.formatting import figure

_MEBI = 1 << 20


def gib(amount_bytes: float) -> str:
    """Bytes as text in GiB with two decimals."""
    return f"{amount_bytes / GIB:,.2f} GiB"


def beside_steps(answer: Memory) -> Iterator[Step]:
    """Lines for the adapters' buffers, the draft's weights, and the total loaded."""
    setup = answer.setup
    if setup.adapters is not None:
        slots, rank = setup.adapters.slots, setup.adapters.rank
        bytes_per_slot = answer.adapter_bytes / slots
        yield Step(
            "LoRA adapters on each GPU",
            "slots x bytes of an adapter for all matrices at the largest rank",
            f"{slots} x {figure(bytes_per_slot / _MEBI)} MiB of rank {rank} in 16 bit",
            gib(answer.adapter_bytes),
            "guide 2.5; vllm/lora/layers (0.32)",
        )
    if setup.draft is not None:
        draft = setup.draft.model
        parameters = draft.parameters.total if draft.parameters is not None else 0.0
        yield Step(
            f"Draft on each GPU ({scheme(draft.quantization).id})",
            f"parameters of {draft.id} / TP",
            f"{figure(parameters / 1e9)} billion parameters / {setup.parallel.tensor}",
            gib(answer.draft_bytes),
            "guide 6.6; vllm/config/speculative.py (0.32)",
        )
    if setup.adapters is not None or setup.draft is not None:
        own = (answer.weights_bytes or 0.0) - answer.adapter_bytes - answer.draft_bytes
        parts = {"weights": own}
        parts |= {"adapters": answer.adapter_bytes} if setup.adapters is not None else {}
        parts |= {"draft": answer.draft_bytes} if setup.draft is not None else {}
        yield Step(
            "Loaded on each GPU",
            " + ".join(parts),
            " + ".join(gib(part_bytes) for part_bytes in parts.values()),
            gib(answer.weights_bytes or 0.0),
            'vLLM\'s line "Model loading took"',
        )


def draft_token_steps(answer: Memory) -> Iterator[Step]:
    """Lines for a token's bytes in the draft's layers, which share the target's blocks."""
    draft, settings = answer.setup.draft, answer.layout.settings
    for part in draft.model.layers if draft is not None else ():
        layer_bytes = token_bytes(part.kind, settings)
        yield Step(
            "KV cache per token, draft model",
            "layers x bytes per layer",
            f"{part.count} x {figure(layer_bytes)}",
            f"{figure(part.count * layer_bytes)} B on each GPU",
            "guide 6.6; vllm/v1/core/kv_cache_utils.py",
        )


def draft_token_bytes(answer: Memory) -> float:
    """Bytes of one more token in the draft's layers on one GPU; 0 without a draft."""
    draft, settings = answer.setup.draft, answer.layout.settings
    if draft is None:
        return 0.0
    return sum(part.count * token_bytes(part.kind, settings) for part in draft.model.layers)


# --- The steps of the memory budget ---------------------------------------------------------------


_KV_SOURCE = "guide 2.2; vllm/v1/kv_cache_interface.py"
_POOL_SOURCE = "vllm/v1/core/kv_cache_utils.py"


def memory_steps(answer: Memory) -> tuple[Step, ...]:
    """Lines for weights, overhead, available KV, bytes per token, blocks and requests."""
    lines: list[Step] = []
    if answer.setup.available_kv_bytes is None:
        lines += [_weights(answer), *beside_steps(answer), _overhead(answer), _available(answer)]
    else:
        stated = gib(answer.available_bytes.expected)
        lines.append(
            Step("Available KV cache on each GPU", "as stated", stated, stated, "the user")
        )
    own_layout = answer.layout
    if answer.setup.draft is not None:
        # The groups also contain the draft's layers: lay out the target alone.
        own_layout = kv_layout_of(replace(answer.setup, draft=None))
    lines += [_tokens(group, answer.layout.settings) for group in own_layout.groups]
    return (*lines, *draft_token_steps(answer), *_pool(answer))


def _weights(answer: Memory) -> Step:
    setup = answer.setup
    total_bytes = (answer.weights_bytes or 0.0) - answer.adapter_bytes - answer.draft_bytes
    if answer.weights is None:
        return Step(
            "Weights on each GPU", "as stated", gib(total_bytes), gib(total_bytes), "the user"
        )
    parts = _parts(answer.weights)
    return Step(
        f"Weights on each GPU ({setup.scheme.id})",
        " + ".join(parts),
        " + ".join(gib(part_bytes) for part_bytes in parts.values()),
        gib(total_bytes),
        f"guide 2.1; {setup.scheme.source}",
    )


def _parts(weights: Weights) -> dict[str, float]:
    """Bytes of each part; parts below 5 MiB are left out."""
    parts = {
        "attention": weights.attention_bytes,
        "MLP": weights.mlp_bytes,
        "experts": weights.experts_bytes,
        "embeddings": weights.tables_bytes,
        "norms and routers": weights.small_bytes,
        "vision": weights.vision_bytes,
    }
    return {name: part_bytes for name, part_bytes in parts.items() if part_bytes >= 5 * _MEBI}


def _overhead(answer: Memory) -> Step:
    taken = answer.overhead
    if taken is None:
        raise AssertionError("an available amount that was computed has an overhead")
    slack, guide = answer.setup.slack, answer.setup.overhead == "guide"
    if slack is not None:
        return Step(
            "Taken on each GPU before the weights are loaded",
            "share x (CUDA context and communication)",
            f"{figure(answer.setup.utilization)} x {gib(slack.process_gib[1] * GIB)}",
            f"{gib(taken.expected_bytes)} ({gib(taken.low_bytes)} to {gib(taken.high_bytes)})",
            "an assumption",
        )
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
    loaded = "loaded" if answer.adapter_bytes or answer.draft_bytes else "weights"
    return Step(
        "Available KV cache on each GPU",
        f"utilization x memory - {loaded} - overhead",
        f"{figure(setup.utilization)} x {gib(memory_bytes)} - {gib(answer.weights_bytes or 0.0)} "
        f"- {overhead}",
        f"{gib(free.expected)} ({gib(free.low)} to {gib(free.high)})",
        "vllm/v1/worker/gpu_worker.py" if setup.slack is None else "its memory rule",
    )


def _tokens(group: Group, settings: KvSettings) -> Step:
    kind, count = group.kind, group.layers
    if isinstance(kind, Recurrent):
        held = state_bytes(kind, settings)
        return Step(
            f"State per request, {count} recurrent layers",
            "(convolution elements x 2 B + state elements x bytes) / TP, per layer",
            f"({kind.conv_elements:,} x 2 + {kind.state_elements:,} x "
            f"{figure(kind.state_bytes_per_element)}) / {settings.tensor_parallel}",
            f"{figure(held)} B per layer",
            _KV_SOURCE,
        )
    if isinstance(kind, CompressedAttention | SlidingStates):
        return _vectors(group, kind)
    if isinstance(kind, LatentAttention):
        title, formula, values = _latent(kind, count, settings)
    else:
        heads = heads_per_gpu(kind.kv_heads, settings.tensor_parallel)
        formula = "layers x KV heads per GPU x (key + value) in bytes"
        values = f"{count} x {heads} x {_head(kind, settings.kv_format)}"
        title = "KV cache per token, full attention"
        if isinstance(kind, SlidingAttention):
            title = f"KV cache per token, window of {kind.window_tokens:,} tokens"
    result = f"{figure(count * group.token_bytes)} B on each GPU"
    return Step(title, formula, values, result, _KV_SOURCE)


def _vectors(group: Group, kind: CompressedAttention | SlidingStates) -> Step:
    kept = "Vectors per token"
    if isinstance(kind, SlidingStates):
        kept += f", window of {kind.window_tokens:,} tokens"
        kept = kept if kind.window_tokens else "Rings of open groups, per token"
    whole = f", in whole {kind.page_bytes} B" if kind.page_bytes > 1 else ""
    return Step(
        f"{kept}, {group.layers} caches",
        f"pages of the caches{whole} / tokens per block",
        f"{figure(group.layers * group.token_bytes * group.block_tokens)} / {group.block_tokens}",
        f"{figure(group.layers * group.token_bytes)} B on each GPU",
        _KV_SOURCE,
    )


def _head(kind: FullAttention | SlidingAttention, kept: KvFormat) -> str:
    """The bytes of one token in one head, including the format's scales, as a formula."""
    if kept.key_bits == kept.value_bits and not kept.key_bytes:
        return f"({kind.key_dim} + {kind.value_dim}) x {figure(kept.key_bits / 8)}"
    keys = f"{kind.key_dim} x {figure(kept.key_bits / 8)} + {kept.key_bytes}"
    values = f"{kind.value_dim} x {figure(kept.value_bits / 8)} + {kept.value_bytes}"
    return f"({keys} + {values})"


def _latent(kind: LatentAttention, count: int, settings: KvSettings) -> tuple[str, str, str]:
    kept = (settings.indexed_format if kind.is_sparse else None) or settings.kv_format
    element_bytes = kept.key_bits / 8
    rope_bytes = element_bytes if kept.rope_bytes is None else kept.rope_bytes
    formula = "latent and rope in bytes"
    row = f"{kind.latent_dim} x {figure(element_bytes)} + {kind.rope_dim} x {figure(rope_bytes)}"
    for name, added in (("scales", kept.latent_bytes), ("indexer", index_bytes(kind))):
        if added:
            formula += f" + {name}"
            row += f" + {added}"
    return (
        "KV cache per token, latent attention",
        f"layers x ({formula}), copied to every rank",
        f"{count} x ({row})",
    )


def _pool(answer: Memory) -> tuple[Step, ...]:
    layout, context = answer.layout, answer.setup.context
    blocks = layout.blocks(answer.available_bytes.expected)
    request = layout.request_blocks(context)
    growing = [g for g in layout.groups if not isinstance(g.kind, SlidingStates)]
    block_tokens = min(group.block_tokens for group in growing)
    return (
        Step(
            "Blocks",
            "available KV cache / (page x layers per group)",
            f"{gib(answer.available_bytes.expected)} / ({figure(layout.page_bytes)} B x "
            f"{layout.group_layers})",
            f"{blocks:,} blocks of {block_tokens:,} tokens, one of them reserved by vLLM"
            if blocks
            else "0 blocks",
            _POOL_SOURCE,
        ),
        Step(
            f"Blocks per request of {context:,} tokens",
            " + ".join(_group_formula(group, layout.settings) for group in layout.groups),
            " + ".join(
                f"{group.groups} x {blocks_of(group, context, layout.settings):,}"
                for group in layout.groups
            ),
            f"{request:,}",
            _POOL_SOURCE,
        ),
        Step(
            "Concurrent requests",
            "blocks / blocks per request",
            f"{blocks:,} / {request:,}",
            f"{figure(answer.concurrency.expected)} ({figure(answer.concurrency.low)} to "
            f"{figure(answer.concurrency.high)})",
            "vLLM's start-up line",
        ),
    )


def _group_formula(group: Group, settings: KvSettings) -> str:
    if isinstance(group.kind, FullAttention | LatentAttention | CompressedAttention):
        need = f"ceil(context / {group.block_tokens * settings.decode_context_parallel})"
    elif isinstance(group.kind, SlidingStates) and not group.kind.window_tokens:
        need = "1"
    elif isinstance(group.kind, SlidingAttention | SlidingStates):
        need = f"(ceil(min(window - 1 + tokens in flight, context) / {group.block_tokens}) + 1)"
    else:
        need = f"{settings.state_blocks}"
    return f"{group.groups} x {need}"
