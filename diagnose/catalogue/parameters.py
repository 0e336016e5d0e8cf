"""How many parameters a model has, by what becomes of them when it is split or quantized. Pure.

Source: the published architectures; a test holds the totals against the published ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kneewatch.diagnose.catalogue.census import head_dim, kv_heads
from kneewatch.diagnose.catalogue.config import Config
from kneewatch.diagnose.catalogue.experts import Experts, expert_census, shared_width
from kneewatch.diagnose.catalogue.mlp import dense_layers, dense_widths, matrices
from kneewatch.diagnose.catalogue.order import (
    FULL,
    LINEAR,
    MAMBA,
    SLIDING,
    depth,
    keeping_words,
    layer_words,
)
from kneewatch.diagnose.catalogue.states import recurrent_parameters

__all__ = ["Experts", "Parameters", "expert_census", "parameter_census"]

# Families whose full-attention layers carry an output gate as wide as the queries.
GATED_ATTENTION = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"})
# Families with a table of learned positions, and the rows in front of the first.
_LEARNED_POSITIONS = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}
# Families that tie the output to the embedding where the file says nothing.
_TIED = frozenset(
    {"bloom", "cohere", "cohere2", "falcon", "gpt2", "gpt_bigcode", "opt", "lfm2", "lfm2_moe"}
)
# Gemma 3n keeps this many residual streams unless it says otherwise.
_STREAMS = 4


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts by kind.

    attention   projections of attention and recurrent layers, split by tensor parallelism
    kv          the part of `attention` that makes keys and values: split no further than the
                KV heads go
    replicated  projections that every rank holds whole (the down-projections of MLA)
    mlp         dense MLPs and shared experts
    experts     routed experts, all of them
    embedding, head   the input table and the output projection; a tied head counts 0
    small       norms, routers, convolutions: 16 bit always, on every rank
    vision      towers and projectors of a multimodal model: 16 bit, on every rank
    """

    attention: float
    kv: float
    replicated: float
    mlp: float
    experts: float
    embedding: float
    head: float
    small: float
    vision: float = 0.0

    @property
    def total(self) -> float:
        """Parameters that vLLM loads to serve without speculation."""
        return (
            self.attention
            + self.replicated
            + self.mlp
            + self.experts
            + self.embedding
            + self.head
            + self.small
            + self.vision
        )


def parameter_census(config: Config, *, experts: Experts, vision: float = 0.0) -> Parameters:
    """The parameters of the language model, and `vision` beside it.

    Raises:
        SizingError: a field that is missing.
    """
    hidden = config.positive("hidden_size")
    vocab = config.positive("vocab_size")
    keeping, every = Counter(keeping_words(config)), Counter(layer_words(config))
    attention, kv, replicated = _attention(config, hidden)
    full_attention, full_kv = attention, kv
    if config.has("global_head_dim"):
        full_attention, full_kv = _global_attention(config, hidden)
    recurrent = every[LINEAR] + every[MAMBA]
    table = float(vocab * config.count("word_embed_proj_dim", default=hidden))
    tied = config.flag("tie_word_embeddings", default=_ties(config))
    # A layer that reads an earlier one's cache has queries and no keys or values.
    shared_kv = (every[FULL] - keeping[FULL]) * full_kv + (every[SLIDING] - keeping[SLIDING]) * kv
    return Parameters(
        attention=every[FULL] * full_attention
        + every[SLIDING] * attention
        - shared_kv
        + (recurrent * recurrent_parameters(config) if recurrent else 0.0),
        kv=keeping[FULL] * full_kv + keeping[SLIDING] * kv,
        replicated=every[FULL] * replicated,
        mlp=_dense_mlp(config, hidden, experts),
        experts=_routed(config, hidden, experts),
        embedding=table + _layer_tables(config),
        head=0.0 if tied else table,
        small=_small(config, hidden, experts),
        vision=vision,
    )


def _ties(config: Config) -> bool:
    # Gemma's configurations leave out the field because its default there is true.
    return config.model_type in _TIED or config.model_type.startswith("gemma")


def _attention(config: Config, hidden: int) -> tuple[float, float, float]:
    """Split projections of a layer, the KV part of them, and what every rank holds."""
    heads = config.positive("num_attention_heads")
    if config.has("kv_lora_rank"):
        return _latent(config, hidden, heads)
    size = head_dim(config)
    gated = config.flag("attn_output_gate", default=config.model_type in GATED_ATTENTION)
    query = hidden * heads * size * (2 if gated else 1)
    kv = 2.0 * hidden * kv_heads(config) * size
    return query + heads * size * hidden + kv, kv, 0.0


def _global_attention(config: Config, hidden: int) -> tuple[float, float]:
    heads = config.positive("num_attention_heads")
    size = config.positive("global_head_dim")
    # Gemma 4 takes the values of its global layers from their keys.
    shared = config.flag("attention_k_eq_v", default=False)
    global_heads = config.count("num_global_key_value_heads", default=0) or kv_heads(config)
    kv = (1.0 if shared else 2.0) * hidden * global_heads * size
    return 2.0 * hidden * heads * size + kv, kv


def _latent(config: Config, hidden: int, heads: int) -> tuple[float, float, float]:
    rank = config.positive("kv_lora_rank")
    rope = config.count("qk_rope_head_dim")
    nope, value = config.positive("qk_nope_head_dim"), config.positive("v_head_dim")
    query_rank = config.count("q_lora_rank", default=0)
    split = float((query_rank or hidden) * heads * (nope + rope))
    split += rank * heads * (nope + value) + heads * value * hidden
    replicated = float(hidden * query_rank + hidden * (rank + rope))
    index = config.count("index_head_dim", default=0)
    if index:
        index_heads = config.positive("index_n_heads")
        replicated += query_rank * index_heads * index + hidden * index + hidden * index_heads
    return split, 0.0, replicated


def _dense_mlp(config: Config, hidden: int, experts: Experts) -> float:
    count = matrices(config)
    widths = dense_widths(config, dense_layers(config, experts), hidden)
    return float(count * hidden * (shared_width(config) * experts.layers + widths))


def _routed(config: Config, hidden: int, experts: Experts) -> float:
    if not experts.count:
        return 0.0
    width = config.positive("moe_intermediate_size", "intermediate_size")
    # Nemotron 3 Super computes its experts in a narrower space.
    latent = config.count("moe_latent_size", default=0) or hidden
    return float(experts.layers * experts.count * matrices(config) * latent * width)


def _layer_tables(config: Config) -> float:
    """Gemma 3n and 4: a narrow embedding for every layer."""
    width = config.count("hidden_size_per_layer_input", default=0)
    rows = config.count("vocab_size_per_layer_input", default=0)
    return float(rows * depth(config) * width)


def _small(config: Config, hidden: int, experts: Experts) -> float:
    layers = depth(config)
    small = 2.0 * layers * hidden + experts.layers * experts.count * hidden
    ahead = _LEARNED_POSITIONS.get(config.model_type)
    if ahead is not None:
        small += (config.count("max_position_embeddings", default=0) + ahead) * hidden
    narrow = config.count("hidden_size_per_layer_input", default=0)
    # Into the narrow embeddings, and in each layer there and back.
    small += 3.0 * layers * narrow * hidden
    if config.has("laurel_rank"):
        small += 2.0 * layers * hidden * config.count("laurel_rank")
        streams = config.positive("altup_num_inputs", default=_STREAMS)
        small += 2.0 * (streams - 1) * hidden * hidden
    return small
