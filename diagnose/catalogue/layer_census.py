"""Counts the layers of a model by kind. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.families import (
    family_value,
    in_group,
    is_known_family,
    layer_names,
    refuse_unmodelled,
)
from kneewatch.diagnose.catalogue.hf_config import Config
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    Layers,
    SlidingAttention,
    compressed_layers,
    recurrent_layer,
)

FULL, SLIDING, LINEAR, MAMBA, NONE = "full", "sliding", "linear", "mamba", "none"

# Deeper than any model, and small enough to count through.
_MOST_LAYERS = 10_000


def depth(config: Config) -> int:
    """The number of layers; the number of attentions if each layer has two.

    Raises:
        SizingError: the number is missing or implausibly large.
    """
    # Nemotron-H may say it by its pattern alone.
    listed = len(config.word("hybrid_override_pattern")) or len(config.words("layers_block_type"))
    layers = config.positive("num_hidden_layers", default=listed or None)
    if in_group(config, "paired"):
        # Files state the pairs; transformers adds the number of attentions beside it.
        layers = 2 * config.positive("num_layers", "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise config.wrong("num_hidden_layers", layers, f"{_MOST_LAYERS} or fewer")
    return layers


def shared_layers(config: Config) -> int:
    """Number of layers at the end of the model that use an earlier layer's cache."""
    if not in_group(config, "shared_kv"):
        return 0
    shared = config.count("num_kv_shared_layers", default=0)
    if shared >= depth(config):
        raise config.wrong("num_kv_shared_layers", shared, "fewer than the layers")
    return shared


def keeping_words(config: Config) -> list[str]:
    """The kinds of those layers that have a cache or state of their own."""
    words = layer_words(config)
    shared = shared_layers(config)
    return words[: len(words) - shared] if shared else words


def layer_words(config: Config) -> list[str]:
    """FULL, SLIDING, LINEAR, MAMBA or NONE for each layer, in order.

    A layer with attention and a recurrence has two entries.

    Raises:
        SizingError: a layer's kind is unknown or not modelled.
    """
    layers = depth(config)
    if config.model_type == "falcon_h1":
        return [FULL, MAMBA] * layers
    if in_group(config, "own_blocks"):
        return [FULL if kv_heads else NONE for kv_heads, _ in own_blocks(config)]
    for key in ("layer_types", "layers_block_type"):
        if config.has(key):
            return _listed(config, key, layers)
    if config.has("layer_types_count"):
        return _counted(config, layers)
    if config.has("hybrid_layer_pattern"):
        sliding = config.counts("hybrid_layer_pattern")
        if len(sliding) < layers:
            raise config.wrong("hybrid_layer_pattern", list(sliding), "one entry for each layer")
        return [SLIDING if slides else FULL for slides in sliding[:layers]]
    pattern = config.word("hybrid_override_pattern")
    if pattern:
        key = "hybrid_override_pattern"
        return [
            word
            for letter in pattern[:layers]
            for word in _layer_words(config, key, letter, "pattern_letters")
        ]
    recurrence = family_value(config, "recurrences")
    if recurrence is not None:
        full = _full_indices(config, layers)
        other = MAMBA if recurrence.startswith("mamba") else LINEAR
        return [FULL if layer in full else other for layer in range(layers)]
    return _sliding_words(config, layers)


def _full_indices(config: Config, layers: int) -> frozenset[int]:
    """Indices of a hybrid model's full-attention layers, from the fields that older files use."""
    if config.has("full_attention_interval"):
        step = config.positive("full_attention_interval")
        return frozenset(range(step - 1, layers, step))
    if config.has("attn_layer_period"):
        offset = config.count("attn_layer_offset", default=0)
        return frozenset(range(offset, layers, config.positive("attn_layer_period")))
    if config.has("layer_group_size"):
        step = config.positive("layer_group_size")
        # Bailing V3 has no recurrence behind the last whole group.
        rest = (
            range(layers - layers % step, layers) if config.model_type == "bailing_moe_v3" else ()
        )
        return frozenset((*range(step - 1, layers, step), *rest))
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if config.has(key):
            return config.indices(key, below=layers)
    if config.has("attn_type_list"):
        kinds = config.words("attn_type_list")
        return frozenset(layer for layer, kind in enumerate(kinds[:layers]) if kind == "1")
    linear = config.section("linear_attn_config")
    if linear is not None:
        # Kimi Linear counts its layers from 1.
        return frozenset(
            layer - 1 for layer in linear.indices("full_attn_layers", below=layers + 1) if layer
        )
    raise config.missing("layer_types")


def _listed(config: Config, key: str, layers: int) -> list[str]:
    listed = config.words(key)
    if len(listed) < layers:
        raise config.wrong(key, list(listed), f"one entry for each of {layers} layers")
    # Layers beyond the last are of the draft head.
    return [word for entry in listed[:layers] for word in _layer_words(config, key, entry)]


def _counted(config: Config, layers: int) -> list[str]:
    counted = config.section("layer_types_count")
    counts = {key: counted.count(key) for key in counted.fields} if counted else {}
    if sum(counts.values()) != layers:
        raise config.wrong("layer_types_count", counts, f"{layers} layers together")
    return [
        word
        for key, count in counts.items()
        for _ in range(count)
        for word in _layer_words(config, "layer_types_count", key)
    ]


def _layer_words(
    config: Config,
    key: str,
    entry: str,
    names: Literal["layer_types", "pattern_letters"] = "layer_types",
) -> Sequence[str]:
    kinds = layer_names(names)
    if entry not in kinds:
        raise SizingError(
            f"{config.name}: {key} has {entry!r}, which is not modelled",
            name="model",
            choices=sorted(kinds),
        )
    return kinds[entry]


def _sliding_words(config: Config, layers: int) -> list[str]:
    switched_off = in_group(config, "switched_sliding") and not config.flag(
        "use_sliding_window", default=False
    )
    # Latent attention has no window even where the field is set.
    is_chunked = in_group(config, "chunked_local") and config.has("attention_chunk_size")
    slides = config.has("sliding_window") or is_chunked
    if not slides or switched_off or in_group(config, "latent"):
        return [FULL] * layers
    if in_group(config, "switched_sliding"):
        full = min(config.count("max_window_layers", default=layers), layers)
        return [FULL] * full + [SLIDING] * (layers - full)
    letters = config.fields.get("sliding_window_pattern")
    if isinstance(letters, str) and set(letters) in ({"L", "G"}, {"L"}, {"G"}):
        return [FULL if letters[i % len(letters)] == "G" else SLIDING for i in range(layers)]
    full_every = family_value(config, "full_every")
    if full_every is not None or (is_known_family(config) and letters is not None):
        step = config.positive("sliding_window_pattern", default=full_every)
        return [FULL if (layer + 1) % step == 0 else SLIDING for layer in range(layers)]
    if in_group(config, "all_sliding"):
        return [SLIDING] * layers
    raise SizingError(
        f"{config.name}: sliding_window is set, but nothing says which layers slide; "
        "add layer_types to the file",
        name="model",
    )


# --- The census of a model's layers: how many of which kind keep what for a token. Pure -----------
#
# Source: the model classes of vLLM (vllm/model_executor/models, 0.11 to 0.33) and the published
# configurations.


def layer_kinds(config: Config) -> tuple[Layers, ...]:
    """The model's layers that have a cache or state, by kind; sizes are those of the whole model.

    Layers that use an earlier layer's cache are left out.

    Raises:
        SizingError: the architecture is not modelled, or a field is missing.
    """
    refuse_unmodelled(config)
    if in_group(config, "compressed"):
        return compressed_layers(config)
    counts = Counter(keeping_words(config))
    if not counts[FULL] + counts[SLIDING]:
        raise SizingError(
            f"{config.name}: no layer is attention, which is not modelled", name="model"
        )
    kinds: Counter[LayerKind] = Counter()
    for word, count in counts.items():
        if word == FULL:
            kinds.update(_full_kinds(config, count))
        elif word == SLIDING:
            heads = sliding_heads(config)
            window = config.positive(
                "sliding_window", "sliding_window_size", "attention_chunk_size"
            )
            kinds[SlidingAttention(heads.kv, heads.key_dim, heads.value_dim, window)] += count
        elif word in (LINEAR, MAMBA):
            kinds[recurrent_layer(config)] += count
    return tuple(Layers(kind, count) for kind, count in kinds.items())


def own_blocks(config: Config) -> list[tuple[int, int]]:
    """KV heads and MLP width of each layer that `block_configs` lists, in order; 0 without
    attention or without an MLP.

    Source: vllm/model_executor/models/nemotron_nas.py (0.32).

    Raises:
        SizingError: there are fewer entries than layers, an entry replaces its layer with a linear
            map, or a field is missing.
    """
    layers, hidden = depth(config), config.positive("hidden_size")
    listed = config.sections("block_configs")
    if len(listed) < layers:
        raise config.wrong("block_configs", f"{len(listed)} entries", f"one for each of {layers}")
    blocks: list[tuple[int, int]] = []
    for entry in listed[:layers]:
        attention = entry.section("attention") or Config(config.name, {}, {})
        mlp = entry.section("ffn") or Config(config.name, {}, {})
        if attention.flag("replace_with_linear", default=False) or mlp.flag(
            "replace_with_linear", default=False
        ):
            raise SizingError(
                f"{config.name}: block_configs replaces a layer with a linear map, which vLLM "
                "does not serve",
                name="model",
            )
        kv, width = 0, 0
        if not attention.flag("no_op", default=False):
            kv = config.positive("num_attention_heads") // attention.positive("n_heads_in_group")
        if not mlp.flag("no_op", default=False):
            width = mlp.count("intermediate_size", default=0)
            # A multiple of two thirds of the hidden size, rounded up to 256.
            width = width or -(-int(2 * _multiple(mlp) * hidden / 3) // 256) * 256
        blocks.append((kv, width))
    return blocks


def _multiple(mlp: Config) -> float:
    multiple = mlp.fields.get("ffn_mult")
    if not isinstance(multiple, int | float) or not 0 < multiple < _MOST_LAYERS:
        raise mlp.wrong("ffn_mult", multiple, "a number above 0")
    return multiple


def _full_kinds(config: Config, count: int) -> Counter[LayerKind]:
    """`count` layers with full attention, by what they store per token."""
    if in_group(config, "own_blocks"):
        size = head_dim(config)
        return Counter(
            FullAttention(kv_heads, size, size) for kv_heads, _ in own_blocks(config) if kv_heads
        )
    kind = _full(config)
    if in_group(config, "block_indexed"):
        # One key a token in 16 bit; keys and values are those of plain attention.
        index = CompressedAttention(2 * index_size(config).positive("sparse_index_dim"))
        return Counter({kind: count, index: index_layers(config, count)})
    if not (isinstance(kind, LatentAttention) and kind.index_dim):
        return Counter({kind: count})
    indexed = index_layers(config, count)
    sparse = count
    if config.model_type == "hy_v4":
        # Hunyuan V4 alone says by `layer_types` which layers attend to chosen tokens.
        sparse = sum("sparse" in word for word in config.words("layer_types")[:count])
    kinds: Counter[LayerKind] = Counter({
        kind: indexed,
        replace(kind, index_dim=0, index_heads=0, shares_index=True): sparse - indexed,
        replace(kind, index_dim=0, index_heads=0): count - sparse,
    })  # fmt: skip
    return +kinds


def index_size(config: Config) -> Config:
    """The part of the configuration that describes the family's indexers.

    Raises:
        SizingError: it is missing.
    """
    section = config.section("sparse_attention_config")
    if section is None:
        raise config.missing("sparse_attention_config")
    return section


def index_layers(config: Config, layers: int) -> int:
    """Number of sparse-attention layers with an indexer; in some models, layers share one.

    Source: vllm/model_executor/models/deepseek_v2.py, vllm/models/hy_v4 and minimax_m3 (0.32):
    index_topk_freq and its pattern, indexer_types, sparse_attention_freq.
    """
    if in_group(config, "block_indexed"):
        return sum(each > 0 for each in index_size(config).counts("sparse_attention_freq")[:layers])
    if config.model_type == "hy_v4":
        words, types = config.words("layer_types")[:layers], config.words("indexer_types")
        return sum(
            "sparse" in word and (types[layer] == "full" if types else max(layer - 1, 0) % 4 == 0)
            for layer, word in enumerate(words)
        )
    pattern = config.word("index_topk_pattern")
    if pattern:
        return layers - pattern[:layers].count("S")
    every = config.count("index_topk_freq", default=1) or 1
    first = config.count("index_skip_topk_offset", default=2)
    return sum(max(layer - first + 1, 0) % every == 0 for layer in range(layers))


def head_dim(config: Config) -> int:
    """Elements of one head; by default the hidden size divided by the heads."""
    if config.has("head_dim"):
        return config.positive("head_dim")
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    if hidden < heads:
        raise config.wrong("num_attention_heads", heads, f"{hidden} (the hidden size) or fewer")
    return hidden // heads


def kv_heads(config: Config) -> int:
    """Number of key and value heads; by default as many as query heads (MHA)."""
    # Falcon's larger models keep the switch of the smaller and don't mean it.
    grouped = config.flag("new_decoder_architecture", default=False)
    if config.flag("multi_query", default=False) and not grouped:
        return 1
    if not config.flag("multi_query_attention", default=True):
        return config.positive("num_attention_heads")
    return config.positive("num_key_value_heads", "num_attention_heads")


def _full(config: Config) -> FullAttention | LatentAttention:
    if in_group(config, "expanded_latent"):
        # Values are padded to the keys' size: vllm/model_executor/models/minicpm3.py (0.32).
        size = config.positive("qk_nope_head_dim") + config.positive("qk_rope_head_dim")
        return FullAttention(config.positive("num_attention_heads"), size, size)
    if config.has("kv_lora_rank"):
        return LatentAttention(
            latent_dim=config.positive("kv_lora_rank"),
            rope_dim=config.count("qk_rope_head_dim"),
            index_dim=config.count(
                "index_head_dim", default=None if in_group(config, "indexed") else 0
            ),
            index_heads=config.count("index_n_heads", default=0),
        )
    heads = full_heads(config)
    return FullAttention(heads.kv, heads.key_dim, heads.value_dim)


class Heads(Struct, frozen=True):
    """The heads of an attention layer: of queries, of keys and values, and their elements."""

    queries: int
    kv: int
    key_dim: int
    value_dim: int


def full_heads(config: Config) -> Heads:
    """The heads of a layer with full attention; in Gemma 4 their size differs from other
    layers'."""
    size = config.count("global_head_dim", default=0) or head_dim(config)
    return Heads(
        _query_heads(config, FULL),
        config.count("num_global_key_value_heads", default=0) or kv_heads(config),
        size,
        config.count("v_head_dim", default=0) or size,
    )


def sliding_heads(config: Config) -> Heads:
    """The heads of a layer with a window; in MiMo V2 and Step 3.5 their shape differs from other
    layers'."""
    other = config.section("attention_other_setting")
    if other is not None and other.word("attention_type") == "sliding_attention":
        size, queries = other.positive("head_dim"), other.positive("num_attention_heads")
        return Heads(queries, other.positive("num_attention_groups"), size, size)
    if in_group(config, "own_sliding_heads") and config.has("swa_num_key_value_heads"):
        size = config.positive("swa_head_dim")
        return Heads(
            config.positive("swa_num_attention_heads"),
            config.positive("swa_num_key_value_heads"),
            size,
            config.count("swa_v_head_dim", default=size),
        )
    size = head_dim(config)
    return Heads(_query_heads(config, SLIDING), kv_heads(config), size, size)


def heads_by_kind(config: Config) -> frozenset[tuple[str, int]]:
    """The kinds of layers and their query heads, where the file lists these by layer (Laguna)."""
    listed = config.counts("num_attention_heads_per_layer")
    return frozenset(zip(layer_words(config), listed, strict=False)) if listed else frozenset()


def _query_heads(config: Config, word: str) -> int:
    stated = config.count("num_attention_heads", default=0)
    return max((heads for kind, heads in heads_by_kind(config) if kind == word), default=stated)
