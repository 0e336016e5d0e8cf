"""The memory budget as lines of arithmetic that users can check by hand. Pure."""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, Gpu
from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    LatentAttention,
    Recurrent,
    SlidingAttention,
    SlidingStates,
)
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.arithmetic import Sheet, Step, evaluated, gibibytes
from kneewatch.diagnose.sizing.memory.budget import (
    AVAILABLE,
    HEADROOM_HIGH_RATIO,
    HEADROOM_LOW_RATIO,
    Memory,
    kv_layout_of,
)
from kneewatch.diagnose.sizing.memory.kv_cache import (
    BLOCKS,
    SERVED,
    KvSettings,
    LayerGroup,
    row_arithmetic,
    state_arithmetic,
    token_bytes,
)
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.overhead import (
    ACTIVATION_RATIO,
    FRAMEWORK_HIGH_RATIO,
    guide_overhead,
)
from kneewatch.diagnose.sizing.memory.weights import (
    ONE_GPU,
    adapter_bytes,
    draft_weights,
    weights_per_gpu,
)
from kneewatch.rules.formatting import figure, percent

# --- The fewest GPUs of a replica by the sum of its parts: overhead model "guide" -----------------


_SUM = "({weights:GB} + {KV:GB} + {activations:GB} + {adapters:GB})"
_FREE = "({memory:GB} x (1 - {framework}))"
_FEWEST = f"ceil({_SUM} / {_FREE})"
_WITH_HEADROOM = f"ceil({_SUM} x (1 + {{headroom}}) / {_FREE})"


class PlannedMemory(Struct, frozen=True):
    """Bytes of one replica over all its GPUs; the framework takes a share of each GPU.

    `weights_bytes` includes the draft's.
    """

    gpu: Gpu
    weights_bytes: float
    kv_bytes: float
    request_bytes: float
    activation_bytes: float
    adapters_bytes: float
    sheet: Sheet

    def gpus(
        self,
        framework_ratio: float = FRAMEWORK_HIGH_RATIO,
        *,
        headroom_ratio: float = 0.0,
        title: str = "",
        sheet: Sheet | None = None,
    ) -> int:
        """The fewest GPUs, with this share of each for the framework, and headroom on the sum."""
        bytes_each = self.weights_bytes, self.kv_bytes, self.activation_bytes, self.adapters_bytes
        free = self.gpu.memory_bytes, framework_ratio
        headroom = (headroom_ratio,) if headroom_ratio else ()
        formula = _WITH_HEADROOM if headroom_ratio else _FEWEST
        sheet = Sheet() if sheet is None else sheet
        return int(
            sheet.line(title, formula, (*bytes_each, *headroom, *free), source="guide 2.4, 2.6")
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic."""
        sheet = Sheet()
        sheet.add(self.sheet)
        self.gpus(title="Fewest GPUs by memory (overhead guide)", sheet=sheet)
        for ratio in (HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO):
            title = f"Fewest GPUs with {percent(ratio)} headroom"
            self.gpus(headroom_ratio=ratio, title=title, sheet=sheet)
        return sheet.steps


def planned_memory(launch: Launch, gpu: Gpu, *, concurrency: float) -> PlannedMemory:
    """The parts for so many requests of the context's length.

    Raises:
        SizingError: the parameters cannot be counted, or the dtype is unknown.
    """
    alone = replace(launch, parallel=ONE_GPU, decode_context_parallel=1)
    request_bytes = kv_layout_of(alone).request_bytes(launch.context)
    weights, sheet = weights_per_gpu(launch.model, launch.scheme, ONE_GPU), Sheet()
    adapters = launch.adapters
    activation_bytes = guide_overhead(alone, sum(weights.values()), gpu).activation_bytes
    drafted_bytes = launch.added_bytes * launch.parallel.gpus
    if launch.draft is not None:
        drafted_bytes += sum(draft_weights(launch.draft, ONE_GPU).values())
    parts = {**weights, **({"draft": drafted_bytes} if drafted_bytes else {})}
    weights_bytes = sheet.line(
        f"Weights ({launch.scheme.id})",
        " + ".join(f"{{{name}:GB}}" for name in parts),
        (*parts.values(),),
        result="{:GB}",
        source="guide 2.1; census of the model",
    )
    kv_bytes = sheet.line(
        "KV cache",
        f"{{requests}} x {{bytes of a request:GB ({launch.context:,} tokens)}}",
        (concurrency, request_bytes),
        result="{:GB}",
        source="guide 2.2",
    )
    activation_bytes = sheet.line(
        "Activations (overhead guide)",
        "{share} x {published weights:GB}",
        (ACTIVATION_RATIO, activation_bytes / ACTIVATION_RATIO),
        result="{:GB}",
        source="guide 2.3",
    )
    return PlannedMemory(
        gpu=gpu,
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        request_bytes=request_bytes,
        activation_bytes=activation_bytes,
        adapters_bytes=adapter_bytes(launch.model, adapters, ONE_GPU) if adapters else 0.0,
        sheet=sheet,
    )


# --- The memory budget as lines of arithmetic -----------------------------------------------------


_LOADED_SOURCE = 'vLLM\'s line "Model loading took"'
_KV_SOURCE = "guide 2.2; vllm/v1/kv_cache_interface.py"
_POOL_SOURCE = "vllm/v1/core/kv_cache_utils.py"


def draft_token_bytes(answer: Memory) -> float:
    """Bytes of one more token in the draft's layers on one GPU; 0 without a draft."""
    draft, settings = answer.launch.draft, answer.layout.settings
    if draft is None:
        return 0.0
    return sum(part.count * token_bytes(part.kind, settings) for part in draft.model.layers)


def memory_steps(answer: Memory) -> tuple[Step, ...]:
    """Lines for weights, overhead, available KV, bytes per token, blocks and requests."""
    sheet, settings = Sheet(), answer.layout.settings
    available = answer.available_bytes.expected
    if answer.launch.available_kv_bytes is None:
        available = _available(sheet, answer)
    else:
        _stated(sheet, "Available KV cache on each GPU", available)
    own_layout = answer.layout
    if answer.launch.draft is not None:
        # The groups also contain the draft's layers: lay out the target alone.
        own_layout = kv_layout_of(replace(answer.launch, draft=None))
    for group in own_layout.groups:
        _token(sheet, group, settings)
    for part in () if answer.launch.draft is None else answer.launch.draft.model.layers:
        sheet.line(
            "KV cache per token, draft model",
            "{layers} x {bytes per layer}",
            (part.count, token_bytes(part.kind, settings)),
            result="{} B on each GPU",
            source="guide 6.6; vllm/v1/core/kv_cache_utils.py",
        )
    _pool(sheet, answer, available)
    return sheet.steps


def _stated(sheet: Sheet, title: str, amount_bytes: float) -> None:
    amount = gibibytes(amount_bytes)
    sheet.text(Step(title, "as stated", amount, amount, "the user"))


def _loaded(sheet: Sheet, answer: Memory) -> float:
    """Lines for the weights, the adapters' buffers and the draft, and the total loaded."""
    launch, weights = answer.launch, answer.weights
    parts: dict[str, float] = {}
    if weights is None:
        own = launch.weights_bytes or 0.0
        _stated(sheet, "Weights on each GPU", own)
        parts["weights"] = own
    else:
        offloaded = {"in host memory": launch.cpu_offload_bytes} if launch.cpu_offload_bytes else {}
        total = " + ".join(f"{{{name}:GiB}}" for name in weights)
        parts["weights"] = sheet.line(
            f"Weights on each GPU ({launch.scheme.id})",
            f"max({total} - {{in host memory:GiB}}, 0)" if offloaded else total,
            (*weights.values(), *offloaded.values()),
            result="{:GiB}",
            source=f"guide 2.1; {launch.scheme.source}",
        )
    if launch.adapters is not None and launch.adapters.each_bytes:
        parts["adapters"] = answer.adapter_bytes
        _stated(sheet, "LoRA adapters on each GPU", answer.adapter_bytes)
    elif launch.adapters is not None:
        slots, rank = launch.adapters.slots, launch.adapters.rank
        each = "bytes of an adapter for all matrices at the largest rank"
        parts["adapters"] = sheet.line(
            "LoRA adapters on each GPU",
            f"{{slots}} x {{{each}:MiB of rank {rank} in 16 bit}}",
            (slots, answer.adapter_bytes / slots),
            result="{:GiB}",
            source="guide 2.5; vllm/lora/layers (0.32)",
        )
    if launch.draft is not None:
        draft, kept = launch.draft.model, draft_weights(launch.draft, launch.parallel)
        parts["draft"] = sheet.line(
            f"Draft on each GPU ({draft.id} in {scheme(draft.quantization).id})",
            " + ".join(f"{{{name}:GiB}}" for name in kept),
            (*kept.values(),),
            result="{:GiB}",
            source="guide 6.6; vllm/config/speculative.py (0.32)",
        )
    if launch.added_bytes:
        parts["draft"] = launch.added_bytes
        _stated(sheet, "Draft on each GPU", launch.added_bytes)
    if len(parts) == 1:
        return parts["weights"]
    return sheet.line(
        "Loaded on each GPU",
        " + ".join(f"{{{name}:GiB}}" for name in parts),
        (*parts.values(),),
        result="{:GiB}",
        source=_LOADED_SOURCE,
    )


def _available(sheet: Sheet, answer: Memory) -> float:
    launch, free, taken = answer.launch, answer.available_bytes, answer.overhead
    if taken is None or launch.gpu is None:
        raise AssertionError("an available amount that was computed has an overhead and a GPU")
    loaded_bytes = _loaded(sheet, answer)
    result = f"{{:GiB}} ({gibibytes(taken.low_bytes)} to {gibibytes(taken.high_bytes)})"
    if launch.slack is not None:
        overhead_bytes = sheet.line(
            "Taken on each GPU before the weights are loaded",
            "{share} x {CUDA context and communication:GiB}",
            (launch.utilization, launch.slack.process_gib[1] * GIB),
            result=result,
            source="an assumption",
        )
    else:
        guide = launch.overhead == "guide"
        overhead_bytes = sheet.line(
            f"Overhead on each GPU ({launch.overhead})",
            "{activations:GiB} + {framework:GiB} + {CUDA graphs:GiB}",
            (taken.activation_bytes, taken.framework_bytes, taken.graphs_bytes),
            result=result,
            source="guide 2.3, 2.4" if guide else "fitted to logged start-ups of vLLM 0.6 to 0.31",
        )
    beside = answer.adapter_bytes or answer.draft_bytes or launch.added_bytes
    loaded = "loaded" if beside else "weights"
    return sheet.line(
        "Available KV cache on each GPU",
        AVAILABLE.replace("loaded", loaded),
        (launch.utilization, launch.gpu.memory_bytes, loaded_bytes, overhead_bytes),
        result=f"{{:GiB}} ({gibibytes(free.low)} to {gibibytes(free.high)})",
        source="vllm/v1/worker/gpu_worker.py" if launch.slack is None else "its memory rule",
    )


def _token(sheet: Sheet, group: LayerGroup, settings: KvSettings) -> None:
    """The line for a token's bytes in the layers of a group; of a request's state in recurrent
    layers."""
    kind, count = group.kind, group.layers
    result = "{} B on each GPU"
    if isinstance(kind, Recurrent):
        title, result = f"State per request, {count} recurrent layers", "{} B per layer"
        formula, quantities = state_arithmetic(kind, settings)
    elif isinstance(kind, CompressedAttention | SlidingStates):
        kept = "Vectors per token"
        if isinstance(kind, SlidingStates):
            kept += f", window of {kind.window_tokens:,} tokens"
            kept = kept if kind.window_tokens else "Rings of open groups, per token"
        whole = f", in whole {kind.page_bytes} B" if kind.page_bytes > 1 else ""
        title = f"{kept}, {count} caches"
        formula = f"{{pages of the caches{whole}}} / {{tokens per block}}"
        quantities = [count * group.token_bytes * group.block_tokens, group.block_tokens]
    else:
        stored = "full attention"
        if isinstance(kind, LatentAttention):
            stored = "latent attention, copied to every rank"
        elif isinstance(kind, SlidingAttention):
            stored = f"window of {kind.window_tokens:,} tokens"
        title = f"KV cache per token, {stored}"
        row, each = row_arithmetic(kind, settings)
        formula, quantities = "{layers} x " + row, [count, *each]
    held = count * group.token_bytes
    if held and not math.isclose(evaluated((formula, quantities)), held):
        # Kinds that share a group, layers in 16 bit among others.
        formula, quantities = "{layers} x {mean bytes per layer}", [count, group.token_bytes]
    sheet.line(title, formula, (*quantities,), result=result, source=_KV_SOURCE)


def _pool(sheet: Sheet, answer: Memory, available_bytes: float) -> None:
    layout, context, most = answer.layout, answer.launch.context, answer.concurrency
    growing = [g for g in layout.groups if not isinstance(g.kind, SlidingStates)]
    block_tokens = min(group.block_tokens for group in growing)
    blocks = sheet.line(
        "Blocks",
        BLOCKS,
        (available_bytes, layout.page_bytes, layout.group_layers),
        result=lambda blocks: (
            f"{figure(blocks)} blocks of {block_tokens:,} tokens, one of them reserved by vLLM"
            if blocks
            else "0 blocks"
        ),
        source=_POOL_SOURCE,
    )
    request = sheet.line(
        f"Blocks per request of {context:,} tokens",
        layout.request_formula,
        layout.request_quantities(layout.request_formula, context),
        source=_POOL_SOURCE,
    )
    sheet.line(
        "Concurrent requests",
        "{blocks} / {blocks per request}",
        (blocks, request),
        result=f"{{}} ({figure(most.low)} to {figure(most.high)})",
        source="vLLM's start-up line",
    )
    if not layout.has_windows:
        return
    decode = sheet.line(
        f"Blocks per request of {context:,} tokens in decode",
        layout.decode_formula,
        layout.request_quantities(layout.decode_formula, context),
        source="blocks outside the window are freed: vllm/v1/core/kv_cache_manager.py",
    )
    held = answer.held
    sheet.line(
        "Requests that run at once",
        SERVED,
        (blocks, request - decode, decode),
        result=f"{{}} ({figure(held.low)} to {figure(held.high)})",
        source="one in prefill, the others in decode",
    )
