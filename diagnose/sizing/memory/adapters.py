"""The memory of LoRA adapters on one GPU: buffers for as many as may be in one batch. Pure.

vLLM reserves them at start, at the largest rank and for every matrix that may be adapted, whether
or not an adapter is loaded and whatever it adapts.
Source: vllm/lora/model_manager.py and vllm/lora/layers (0.32); guide 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.sizing.inputs import SizingError, positive, within
from kneewatch.diagnose.sizing.memory.kv_pages import heads_per_gpu
from kneewatch.diagnose.sizing.memory.weights import Parallel, fewest_kv_heads

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` takes (vllm/config/lora.py, 0.32)."""

DEFAULT_RANK = 16
_ELEMENT_BYTES = 2
_MOST_SLOTS = 4096
# vllm/lora/layers/logits_processor.py: more are refused where the output projection is adapted.
_LARGEST_VOCABULARY = 258_048


@dataclass(frozen=True, slots=True)
class Adapters:
    """`--max-loras` and `--max-lora-rank`: how many in one batch, and of what rank at most."""

    slots: int
    rank: int = DEFAULT_RANK


def check_adapters(adapters: Adapters, model: Model) -> None:
    """Refuse what vLLM would refuse.

    Raises:
        SizingError: with the input's name.
    """
    positive("max_loras", adapters.slots)
    within("max_loras", adapters.slots, low=1, high=_MOST_SLOTS)
    if adapters.rank not in RANKS:
        raise SizingError(
            f"vLLM takes no adapters of rank {adapters.rank}",
            name="max_lora_rank",
            choices=tuple(str(rank) for rank in RANKS),
        )
    shape = model.adapters
    if shape is None:
        raise SizingError(
            f"{model.id}: the configuration does not say enough to size adapters",
            name="max_loras",
        )
    if shape.head and model.vocab_size > _LARGEST_VOCABULARY:
        raise SizingError(
            f"vLLM refuses adapters of {model.id}: its {model.vocab_size:,} tokens are more than "
            f"{_LARGEST_VOCABULARY:,}",
            name="max_loras",
        )


def adapter_bytes(model: Model, adapters: Adapters, parallel: Parallel) -> float:
    """Bytes that the buffers take on the fullest GPU; 0 where the model's shape is not known.

    slots x rank x elements a unit of rank x 2: see `catalogue.adapters` for which of them are
    split over the ranks.
    """
    shape = model.adapters
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
