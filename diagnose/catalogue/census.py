"""The census of a model's layers: how many of which kind keep what for a token. Pure.

Source: the model classes of vLLM (vllm/model_executor/models, 0.11 to 0.33) and the published
configurations.
"""

from __future__ import annotations

from collections import Counter

from kneewatch.diagnose.catalogue.config import Config
from kneewatch.diagnose.catalogue.families import INDEXED, refuse_unmodelled
from kneewatch.diagnose.catalogue.layers import (
    FullAttention,
    LatentAttention,
    LayerKind,
    Layers,
    SlidingAttention,
)
from kneewatch.diagnose.catalogue.order import (
    FULL,
    LINEAR,
    MAMBA,
    SLIDING,
    keeping_words,
)
from kneewatch.diagnose.catalogue.states import recurrent_layer
from kneewatch.diagnose.sizing.inputs import SizingError


def layer_kinds(config: Config) -> tuple[Layers, ...]:
    """The model's layers that keep something, whole-model sizes.

    Layers that read the cache of an earlier one are left out, for they keep nothing.

    Raises:
        SizingError: an architecture that is not modelled, or a field that is missing.
    """
    refuse_unmodelled(config)
    counts = Counter(keeping_words(config))
    if not counts[FULL] + counts[SLIDING]:
        raise SizingError(
            f"{config.name}: no layer is attention, which is not modelled", name="model"
        )
    kinds: Counter[LayerKind] = Counter()
    for word, count in counts.items():
        if word == FULL:
            kinds[_full(config)] += count
        elif word == SLIDING:
            kinds[_sliding(config)] += count
        elif word in (LINEAR, MAMBA):
            kinds[recurrent_layer(config)] += count
    return tuple(Layers(kind, count) for kind, count in kinds.items())


def head_dim(config: Config) -> int:
    """Elements of one head; the hidden size split over the heads where no field says."""
    if config.has("head_dim"):
        return config.positive("head_dim")
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    if hidden < heads:
        raise config.wrong("num_attention_heads", heads, f"{hidden} (the hidden size) or fewer")
    return hidden // heads


def kv_heads(config: Config) -> int:
    """Key and value heads; as many as query heads where no field says (MHA)."""
    # Falcon's larger models keep the switch of the smaller and don't mean it.
    grouped = config.flag("new_decoder_architecture", default=False)
    if config.flag("multi_query", default=False) and not grouped:
        return 1
    if not config.flag("multi_query_attention", default=True):
        return config.positive("num_attention_heads")
    return config.positive("num_key_value_heads", "num_attention_heads")


def _full(config: Config) -> FullAttention | LatentAttention:
    if config.has("kv_lora_rank"):
        return LatentAttention(
            latent_dim=config.positive("kv_lora_rank"),
            rope_dim=config.count("qk_rope_head_dim"),
            index_dim=config.count(
                "index_head_dim", default=None if config.model_type in INDEXED else 0
            ),
        )
    # Gemma 4 gives its global layers heads of their own.
    size = config.count("global_head_dim", default=0) or head_dim(config)
    heads = config.count("num_global_key_value_heads", default=0) or kv_heads(config)
    return FullAttention(heads, size, config.count("v_head_dim", default=0) or size)


def _sliding(config: Config) -> SlidingAttention:
    size = head_dim(config)
    return SlidingAttention(kv_heads(config), size, size, config.positive("sliding_window"))
