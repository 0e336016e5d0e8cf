"""The bytes of weights on one GPU: the model, its LoRA adapters and its draft model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf

from msgspec import Struct

from kneewatch.diagnose.catalogue.inputs import SizingError, positive, within
from kneewatch.diagnose.catalogue.layers import FullAttention, Layers, SlidingAttention
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.catalogue.parameters import Parameters
from kneewatch.diagnose.catalogue.quantization import FULL_BITS, Scheme, scheme
from kneewatch.diagnose.sizing.memory.kv_cache import heads_per_gpu

_BITS = 8
_GATED_MATRICES = 3
# vLLM pads MXFP4 experts to what its kernels take.
_MXFP4_HIDDEN, _MXFP4_WIDTH = 256, 64
# Experts without a gate are padded to this width on each rank in FP8 and NVFP4 (vLLM 0.32,
# vllm/model_executor/layers/quantization/utils/flashinfer_utils.py and flashinfer_fp4_moe.py).
_UNGATED_WIDTH = 128
# Those with a gate in NVFP4 to this one.
_GATED_NVFP4_WIDTH = 64
_UNGATED_SCHEMES = frozenset({"fp8", "nvfp4"})
# On ROCm, rows of 16-bit experts of a multiple of 512 bytes get 256 more, so that they start in
# different channels of the memory (vLLM 0.32, unquantized_fused_moe_method.py).
_ROCM_ROW_BYTES, _ROCM_PADDING_BYTES = 512, 256


class Parallel(Struct, frozen=True):
    """How a replica is split over GPUs. `experts` is True with `--enable-expert-parallel`."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of one replica, including all data-parallel engines."""
        return self.tensor * self.pipeline * self.data


ONE_GPU = Parallel()


def splits(
    tensors: Sequence[int],
    *,
    stages: Sequence[int] = (1,),
    engines: Sequence[int] = (1,),
    experts: bool = False,
    most_gpus: float = inf,
) -> Iterator[Parallel]:
    """Every split of these sizes. Several engines share their experts, on `most_gpus` at most."""
    for tensor in tensors:
        for data in engines:
            for pipeline in stages:
                split = Parallel(tensor, pipeline, data, experts or data > 1)
                if data == 1 or split.gpus <= most_gpus:
                    yield split


ATTENTION, _SMALL = "attention", "norms, routers and positions"


def parameters_of(model: Model) -> Parameters:
    """The model's parameter counts.

    Raises:
        SizingError: its configuration is not enough to count them.
    """
    if model.parameters is None:
        raise SizingError(
            f"{model.id}: the configuration lacks fields to count the parameters; set the size of "
            "the weights",
            name="weights_gib",
        )
    return model.parameters


def weights_per_gpu(
    model: Model, scheme: Scheme, parallel: Parallel, *, vendor: str = "nvidia"
) -> Mapping[str, float]:
    """Bytes of weights on the fullest GPU, by the kind's name in the arithmetic.

    - Projections, experts, tables and most vision towers are split over the tensor-parallel group;
      KV projections are split over the KV heads at most.
    - MLA's down-projections, norms, routers, other towers and tables of positions are on every GPU.
    - Each pipeline stage has a share of the layers.
    - Experts are padded to the sizes that the kernels of the GPU's `vendor` need.

    Raises:
        SizingError: the parameters cannot be counted.
    """
    parameters = parameters_of(model)
    tp, stage = parallel.tensor, ceil(model.depth / parallel.pipeline) / model.depth
    attention_bits = scheme.attention_bits_of(mixture=bool(model.experts.count))
    ranks = tp * parallel.data if parallel.experts else tp
    head = parameters.head * scheme.head_bits / scheme.full_bits
    tower_ranks = tp if model.tower is not None and not model.tower.whole else 1
    tables = (parameters.embedding + head) / tp
    if parallel.pipeline > 1:
        # The first stage holds the input table, the last the output projection.
        tables = max(parameters.embedding, head) / tp
    padding = _padding_ratio(model, scheme, tensor=1 if parallel.experts else tp, vendor=vendor)
    bits = {
        ATTENTION: attention_parameters(model, parameters, tp) * stage * attention_bits,
        "MLP": parameters.mlp * stage / tp * scheme.linear_bits,
        "experts": parameters.experts * padding * stage / ranks * scheme.expert_bits,
        "embeddings": tables * scheme.full_bits,
        _SMALL: (parameters.small * stage + parameters.rotary) * scheme.full_bits,
        "vision": parameters.vision / tower_ranks * scheme.full_bits,
    }
    return {name: part_bits / _BITS for name, part_bits in bits.items() if part_bits}


def attention_parameters(model: Model, parameters: Parameters, tensor_parallel: int) -> float:
    """Attention parameters on one GPU; KV projections are split over the KV heads at most."""
    split = (parameters.attention - parameters.kv) / tensor_parallel
    kv = parameters.kv / min(tensor_parallel, fewest_kv_heads(model))
    return split + kv + parameters.replicated


def _padding_ratio(model: Model, scheme: Scheme, *, tensor: int, vendor: str) -> float:
    """Bytes of the routed experts on a GPU, divided by those of the checkpoint.

    `tensor` is the number of ranks that each expert is split over.
    """
    if not model.expert_width or not model.hidden_size:
        return 1.0
    width, hidden = model.expert_width / tensor, model.hidden_size
    if scheme.id == "mxfp4":
        return _rounded_up(width, _MXFP4_WIDTH) * _rounded_up(hidden, _MXFP4_HIDDEN)
    ungated = model.expert_matrices < _GATED_MATRICES
    if vendor == "nvidia" and ungated and scheme.id in _UNGATED_SCHEMES:
        return _rounded_up(width, _UNGATED_WIDTH)
    if vendor == "nvidia" and scheme.id == "nvfp4":
        return _rounded_up(width, _GATED_NVFP4_WIDTH)
    if vendor == "amd" and scheme.expert_bits == FULL_BITS:
        down = 1 / model.expert_matrices
        return (1 - down) * _rocm_ratio(hidden) + down * _rocm_ratio(width)
    return 1.0


def _rounded_up(size: float, multiple: int) -> float:
    return ceil(size / multiple) * multiple / size


def _rocm_ratio(row_elements: float) -> float:
    row_bytes = row_elements * FULL_BITS / _BITS
    return 1.0 if row_bytes % _ROCM_ROW_BYTES else 1 + _ROCM_PADDING_BYTES / row_bytes


def fewest_kv_heads(model: Model) -> int:
    """The smallest number of KV heads of any layer; 1 if no attention layer has KV heads."""
    heads = [
        part.kind.kv_heads
        for part in model.layers
        if isinstance(part.kind, FullAttention | SlidingAttention)
    ]
    return min(heads, default=1)


# --- LoRA adapters on one GPU: buffers for the adapters of one batch ------------------------------
#
# vLLM reserves them at start, at the largest rank and for every matrix that may be adapted,
# whether or not an adapter is loaded and whatever it adapts. Source: vllm/lora/model_manager.py
# and vllm/lora/layers (0.32); guide 2.5.


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Valid values of `--max-lora-rank` (vllm/config/lora.py, 0.32)."""

DEFAULT_RANK = 16
_ELEMENT_BYTES = 2
_MOST_SLOTS = 4096
# vllm/lora/layers/logits_processor.py: more are refused where the output projection is adapted.
_LARGEST_VOCABULARY = 258_048


class Adapters(Struct, frozen=True):
    """The most LoRA adapters per batch, and their largest rank or the stated bytes of one."""

    slots: int
    rank: int = DEFAULT_RANK
    each_bytes: float = 0.0


def check_adapters(adapters: Adapters, model: Model) -> None:
    """Check that vLLM would accept these adapters.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    positive("max_loras", adapters.slots)
    within("max_loras", adapters.slots, low=1, high=_MOST_SLOTS)
    if adapters.rank not in RANKS:
        raise SizingError(
            f"vLLM does not support adapters of rank {adapters.rank}",
            name="max_lora_rank",
            choices=tuple(str(rank) for rank in RANKS),
        )
    shape = model.adapters
    if adapters.each_bytes:
        return
    if shape is None:
        raise SizingError(
            f"{model.id}: the configuration lacks fields to size adapters",
            name="max_loras",
        )
    if shape.head and model.vocab_size > _LARGEST_VOCABULARY:
        raise SizingError(
            f"vLLM refuses adapters for {model.id}: its vocabulary of {model.vocab_size:,} tokens "
            f"exceeds {_LARGEST_VOCABULARY:,}",
            name="max_loras",
        )


def adapter_bytes(model: Model, adapters: Adapters, parallel: Parallel) -> float:
    """Bytes of the adapter buffers on the fullest GPU; 0 if the model's LoRA shape is unknown.

    slots x rank x elements per unit of rank x 2. `catalogue.parameters` defines which elements are
    split over the ranks.
    """
    shape = model.adapters
    if adapters.each_bytes:
        return adapters.slots * adapters.each_bytes / parallel.gpus
    if shape is None:
        return 0.0
    tp, stage = parallel.tensor, ceil(model.depth / parallel.pipeline) / model.depth
    heads = fewest_kv_heads(model)
    kv = shape.kv / heads * heads_per_gpu(heads, tp)
    # An expert is whole on its rank where experts are dealt out, else each is split.
    holders = tp * parallel.data if parallel.experts else 1
    experts = shape.experts_whole / holders + shape.experts_split / max(holders, tp)
    elements = (shape.whole + shape.split / tp + kv + experts) * stage + shape.tables
    return adapters.slots * adapters.rank * elements * _ELEMENT_BYTES


# --- A draft for speculative decoding on its target's GPUs: weights and KV cache ------------------
#
# vLLM splits the draft over the same tensor-parallel ranks, keeps all of it on the last pipeline
# stage, and puts its layers into the target's KV pool. Source: vllm/config/speculative.py,
# vllm/v1/worker/gpu_model_runner.py (0.32); guide 6.6.


MOST_TOKENS = 64


class Draft(Struct, frozen=True):
    """A draft model, or the target's own prediction layers, and the number of tokens per draft."""

    model: Model
    tokens: int


def check_draft(draft: Draft, target: Model, parallel: Parallel) -> None:
    """Check that vLLM would accept this draft.

    Raises:
        SizingError: an input is invalid; the error has its name.
    """
    positive("num_speculative_tokens", draft.tokens)
    within("num_speculative_tokens", draft.tokens, low=1, high=MOST_TOKENS)
    model = draft.model
    if model.parameters is None:
        raise SizingError(
            f"{model.id}: the number of its parameters is unknown", name="draft_model"
        )
    hidden_size = model.target_hidden_size
    if hidden_size and hidden_size != target.hidden_size:
        raise SizingError(
            f"{model.id} drafts for models with hidden size {hidden_size:,}; that of {target.id} "
            f"is {target.hidden_size:,}",
            name="draft_model",
        )
    if model.attention_heads and model.attention_heads % parallel.tensor:
        raise SizingError(
            f"tensor parallel {parallel.tensor} does not divide the {model.attention_heads} "
            f"attention heads of the draft {model.id}, which vLLM splits like its target",
            name="draft_model",
        )


def draft_weights(draft: Draft, parallel: Parallel) -> Mapping[str, float]:
    """The draft's weights on the fullest GPU, in the checkpoint's precision.

    Without tables of positions: a draft has those of its target.
    """
    spread = Parallel(parallel.tensor, 1, parallel.data, parallel.experts)
    weights = dict(weights_per_gpu(draft.model, scheme(draft.model.quantization), spread))
    weights[_SMALL] -= parameters_of(draft.model).rotary * FULL_BITS / _BITS
    return weights


def draft_layers(draft: Draft, parallel: Parallel) -> tuple[Layers, ...]:
    """The draft's layers, with their count multiplied by the number of pipeline stages.

    The last pipeline stage holds the whole draft. The KV layout divides every layer count by the
    number of stages, and the multiplication cancels that division.
    """
    stages = parallel.pipeline
    return tuple(Layers(part.kind, part.count * stages) for part in draft.model.layers)
