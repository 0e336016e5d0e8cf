"""Parameter counts of a model: attention, MLPs, experts, vision tower, LoRA adapter. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import astuple, replace

from kneewatch.diagnose.catalogue.families import family_value, in_group
from kneewatch.diagnose.catalogue.hf_config import Config
from kneewatch.diagnose.catalogue.layer_census import (
    FULL,
    LINEAR,
    MAMBA,
    SLIDING,
    depth,
    full_heads,
    head_dim,
    index_layers,
    index_size,
    keeping_words,
    kv_heads,
    layer_words,
    own_blocks,
    shared_layers,
    sliding_heads,
)
from kneewatch.diagnose.catalogue.layers import compressed_parameters, recurrent_parameters


class Experts(Struct, frozen=True):
    """Routed experts: `count` in each of `layers` layers; each token uses `per_token` of them.

    `gelu`: their activation is GELU, which not every kernel has.
    """

    count: int = 0
    per_token: int = 0
    layers: int = 0
    gelu: bool = False


def expert_census(config: Config) -> Experts:
    """The model's routed experts; all fields are 0 for a dense model.

    Raises:
        SizingError: the model has experts, but the number that a token uses is missing.
    """
    count = config.count("n_routed_experts", default=0)
    if count <= 1 or not config.flag("enable_moe_block", default=True):
        return Experts()
    per_token = config.positive("num_experts_per_tok")
    if per_token > count:
        raise config.wrong("num_experts_per_tok", per_token, f"{count} (the experts) or fewer")
    # LongCat's router may choose experts that do nothing: all are taken to be chosen alike.
    idle = config.count("zero_expert_num", default=0)
    computed = round(per_token * count / (count + idle))
    return Experts(count, computed, _expert_layers(config), in_group(config, "gelu_experts"))


def _expert_layers(config: Config) -> int:
    pattern = config.word("hybrid_override_pattern")
    if pattern:
        return pattern.count("E")
    layers = depth(config)
    if in_group(config, "paired"):
        return layers // 2
    for key in ("layers_block_type", "mlp_layer_types"):
        kinds = config.words(key)[:layers]
        if "moe" in kinds or "sparse" in kinds:
            return sum(kind in ("moe", "sparse", "hash_moe") for kind in kinds)
    if isinstance(config.fields.get("moe_layer_freq"), list):
        return sum(each > 0 for each in config.counts("moe_layer_freq")[:layers])
    listed = config.word("moe_layers_enum")
    if listed:
        return len({part for part in listed.split(",") if int(part) < layers})
    if config.has("expert_layer_period"):
        offset = config.count("expert_layer_offset", default=0)
        return len(range(offset, layers, config.positive("expert_layer_period")))
    first = config.count("first_k_dense_replace", "num_dense_layers", default=0)
    first = config.count("moe_layer_start_index", default=first)
    # Llama 4 puts experts into every second layer of its larger model.
    step = config.positive(
        "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval", default=1
    )
    dense = config.indices("mlp_only_layers", below=layers)
    return max(0, (layers - first) // step - len(dense))


def shared_width(config: Config) -> int:
    """The total width of a layer's shared experts; 0 if there are none."""
    stated = config.count(
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        default=0,
    )
    if stated:
        return stated
    each = config.count("moe_shared_expert_intermediate_size", default=0)
    if each:
        return each * config.positive("n_shared_experts", default=1)
    # Llama 4 has one shared expert and no field for it.
    if config.model_type == "llama4":
        return config.positive("intermediate_size")
    shared = config.count("n_shared_experts", default=0)
    return shared * config.positive("moe_intermediate_size", "intermediate_size") if shared else 0


# --- The dense MLPs of a model: how many matrices, layers, and how wide. Pure ---------------------
#
# Source: the published configurations and the model classes of vLLM that read them.


def matrices(config: Config) -> int:
    """Number of matrices in an MLP or expert: 3 (up, down, gate), or 2 without a gate."""
    return 2 if in_group(config, "ungated_mlp") else 3


def dense_layers(config: Config, experts: Experts) -> int:
    """Number of layers with a dense MLP."""
    # Nemotron-H counts its MLPs as layers of their own.
    pattern = config.word("hybrid_override_pattern")
    if pattern:
        return pattern.count("-")
    if config.model_type == "nemotron_h":
        return config.words("layers_block_type").count("mlp")
    # Gemma 4's expert layers keep their dense MLP beside the experts, LongCat's keep two.
    if config.model_type.startswith("gemma") or in_group(config, "paired"):
        return depth(config)
    return depth(config) - experts.layers


def layer_widths(config: Config) -> tuple[int, ...]:
    """The width of each layer's MLP, from an `intermediate_size` that is a list (as for Gemma 3n).

    Raises:
        SizingError: the list does not have one width per layer.
    """
    widths = config.counts("intermediate_size")
    if len(widths) < depth(config):
        raise config.wrong("intermediate_size", list(widths), "a width for every layer")
    return widths


def dense_widths(config: Config, layers: int, hidden: int) -> int:
    """The sum of the dense MLPs' widths."""
    if not layers:
        return 0
    if in_group(config, "own_blocks"):
        return sum(width for _, width in own_blocks(config))
    if config.model_type == "granitemoehybrid":
        return layers * config.positive("shared_intermediate_size")
    if isinstance(config.fields.get("intermediate_size"), list):
        return sum(layer_widths(config)[:layers])
    fourfold = 4 * hidden if in_group(config, "fourfold_mlp") else None
    width = config.positive(
        "intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", default=fourfold
    )
    if config.model_type == "lfm2" and config.flag("block_auto_adjust_ff_dim", default=True):
        # LFM2's stated width is reduced to two thirds and rounded up to its block.
        block = config.positive("block_multiple_of", default=256)
        width = -(-(2 * width // 3) // block) * block
    # Gemma 4's small models widen the layers that save on keys and values.
    doubled = config.flag("use_double_wide_mlp", default=False)
    return width * (layers + (shared_layers(config) if doubled else 0))


# --- The parameters of the vision tower that a configuration describes. Pure ----------------------
#
# Source: the vision transformers of transformers and vLLM: attention of four square projections,
# an MLP, a projection of the patches, and what carries the result into the language model.


def vision_parameters(config: Config) -> float | None:
    """Parameters of the vision tower and its projector, from the file's `vision_config`.

    None if there is no tower, or if its fields are unusual.

    Raises:
        SizingError: a usual field has an unusual value.
    """
    whole = Config(config.name, config.outer, config.outer)
    tower = whole.section("vision_config")
    if tower is None:
        return None
    # Qwen2-VL calls its output `hidden_size` and its own width `embed_dim`.
    width = tower.count("embed_dim", "vt_hidden_size", "hidden_size", default=0)
    layers = tower.count("depth", "vt_num_hidden_layers", "num_hidden_layers", default=0)
    patch = tower.count("patch_size", default=0)
    ratio = tower.count("mlp_ratio", default=0) if "embed_dim" in tower.fields else 0
    inner = tower.count("vt_intermediate_size", "intermediate_size", default=ratio * width)
    if not (width and layers and patch and inner):
        return None
    gated = in_group(tower, "gated_tower") or in_group(config, "gated_tower")
    blocks = layers * (4.0 * width * width + (3 if gated else 2) * width * inner)
    frames = tower.count("temporal_patch_size", default=1)
    patches = float(tower.count("in_channels", "num_channels", default=3))
    patches *= frames * patch * patch * width
    positions = tower.count("num_position_embeddings", default=0) * width
    return blocks + patches + positions + _projector(tower, width, config)


def _projector(tower: Config, width: int, config: Config) -> float:
    text = config.count("hidden_size", default=width)
    # Kimi lists both sides of its merge kernel.
    sides = tower.counts("merge_kernel_size")
    merge = tower.count("spatial_merge_size", default=sides[0] if sides else 0)
    if not merge:
        return float(width * text + text * text)
    # Neighbouring patches are joined, mixed once, and brought to the language model's width.
    joined = width * merge * merge
    taps = len(tower.words("deepstack_visual_indexes"))
    out = tower.count("out_hidden_size", default=text)
    return (1.0 + taps) * (joined * joined + joined * out)


# Parameter counts of a model, by how they are split over GPUs and quantized. Pure.
#
# Source: the published architectures; a test holds the totals against the published ones.


# Gemma 3n keeps this many residual streams unless it says otherwise.
_STREAMS = 4


class Parameters(Struct, frozen=True):
    """Parameter counts by kind.

    - `attention`: projections of attention and recurrent layers, split by tensor parallelism.
    - `kv`: the part of `attention` for keys and values, split over the KV heads at most.
    - `replicated`: projections that are copied to every rank (the down-projections of MLA).
    - `mlp`: dense MLPs and shared experts.
    - `experts`: all routed experts.
    - `embedding`, `head`: the input table and the output projection; a tied head counts 0.
    - `small`: norms, routers, convolutions: always 16 bit, on every rank.
    - `vision`: towers and projectors of a multimodal model: 16 bit, on every rank.
    - `rotary`: elements of the tables of rotary positions, which are loaded and not parameters: 16
      bit, on every rank.
    """

    attention: float
    kv: float
    replicated: float
    small: float = 0.0
    mlp: float = 0.0
    experts: float = 0.0
    embedding: float = 0.0
    head: float = 0.0
    vision: float = 0.0
    rotary: float = 0.0

    @property
    def total(self) -> float:
        """Parameters that vLLM loads to serve without speculation."""
        return float(sum(astuple(self))) - self.kv - self.rotary


def parameter_census(config: Config, *, experts: Experts, vision: float = 0.0) -> Parameters:
    """The language model's parameters, with `vision` added.

    Raises:
        SizingError: a field is missing.
    """
    hidden = config.positive("hidden_size")
    vocab = config.positive("vocab_size")
    mixers = _mixers(config, hidden)
    widths = dense_widths(config, dense_layers(config, experts), hidden)
    widths += shared_width(config) * experts.layers
    table = float(vocab * config.count("word_embed_proj_dim", default=hidden))
    # Gemma's configurations leave out the field because its default there is true.
    ties = in_group(config, "tied") or config.model_type.startswith("gemma")
    tied = config.flag("tie_word_embeddings", default=ties)
    # Gemma 3n and 4 have narrow embeddings in each layer.
    narrow = config.count("hidden_size_per_layer_input", default=0)
    rows = config.count("vocab_size_per_layer_input", default=0)
    neighbours, projected = _ngram_tables(config, hidden, vocab)
    return replace(
        mixers,
        mlp=float(matrices(config) * hidden * widths),
        experts=_routed(config, hidden, experts),
        embedding=table + float(rows * depth(config) * narrow) + neighbours,
        head=0.0 if tied else table,
        small=_small(config, hidden, experts) + mixers.small + projected,
        vision=vision,
        rotary=_rotary(config),
    )


def _rotary(config: Config) -> float:
    """Source: vllm/model_executor/layers/rotary_embedding (0.32)."""
    turned: Mapping[str, float] = family_value(config, "rotary") or {}
    size = config.count("qk_rope_head_dim", default=0) or full_heads(config).key_dim
    sizes = turned.get("share", 1.0) * size
    sizes += turned.get("window", 0.0) * sliding_heads(config).key_dim
    positions = config.count("max_position_embeddings", default=0)
    return float(turned.get("times", 1) * positions * sizes)


def _ngram_tables(config: Config, hidden: int, vocab: int) -> tuple[float, float]:
    """Elements of LongCat's n-gram embedding tables, and of the projections after them.

    Source: vllm/model_executor/models/longcat_flash_ngram.py (0.32).
    """
    ratio = config.count("ngram_vocab_size_ratio", default=0)
    if not ratio:
        return 0.0, 0.0
    tables = config.positive("emb_split_num") * (config.positive("emb_neighbor_num") - 1)
    rows = tables * ratio * vocab + tables * tables
    return float(rows * (hidden // tables)), float(tables * (hidden // tables) * hidden)


def _mixers(config: Config, hidden: int) -> Parameters:
    """The parameters of all attention and recurrent layers."""
    if in_group(config, "compressed"):
        split, copied, plain = compressed_parameters(config)
        return Parameters(split, 0.0, copied, small=plain)
    if in_group(config, "own_blocks"):
        return _own_mixers(config, hidden)
    keeping, every = Counter(keeping_words(config)), Counter(layer_words(config))
    full, full_kv, replicated = _attention(config, hidden, full=True)
    sliding, sliding_kv = 0.0, 0.0
    if every[SLIDING]:
        sliding, sliding_kv, _ = _attention(config, hidden, full=False)
    recurrent = every[LINEAR] + every[MAMBA]
    # A layer that reads an earlier one's cache has queries and no keys or values.
    shared_kv = (every[FULL] - keeping[FULL]) * full_kv
    shared_kv += (every[SLIDING] - keeping[SLIDING]) * sliding_kv
    indexed, index_queries, index_copied = _indexers(config, hidden, every[FULL])
    values = _routed_values(config, hidden)
    return Parameters(
        attention=every[FULL] * full
        + every[SLIDING] * sliding
        - shared_kv
        + indexed * index_queries
        + values
        + (recurrent * recurrent_parameters(config) if recurrent else 0.0),
        kv=keeping[FULL] * full_kv
        + keeping[SLIDING] * sliding_kv
        + indexed * index_queries
        + values,
        replicated=every[FULL] * replicated + indexed * index_copied,
    )


def _routed_values(config: Config, hidden: int) -> float:
    """Parameters of K2 Horizon's additional value projections.

    Its layers with experts have several value projections, of which each token uses a few.
    """
    choice = config.count("mova_num_experts", default=0)
    if not choice:
        return 0.0
    heads = full_heads(config)
    return float(_expert_layers(config) * (choice - 1) * hidden * heads.kv * heads.value_dim)


def _own_mixers(config: Config, hidden: int) -> Parameters:
    heads = [kv_heads for kv_heads, _ in own_blocks(config) if kv_heads]
    kv = 2.0 * hidden * sum(heads) * head_dim(config)
    queries = config.positive("num_attention_heads") * head_dim(config)
    return Parameters(2.0 * len(heads) * hidden * queries + kv, kv, 0.0)


def _attention(config: Config, hidden: int, *, full: bool) -> tuple[float, float, float]:
    """Parameters of one attention layer's projections.

    Returns the split ones, those for keys and values among them, and the replicated ones.
    """
    config.positive("num_attention_heads")
    if config.has("kv_lora_rank"):
        return _latent(config, hidden, config.positive("num_attention_heads"))
    heads = full_heads(config) if full else sliding_heads(config)
    gated = config.flag("attn_output_gate", default=in_group(config, "gated_attention"))
    query = hidden * heads.queries * heads.key_dim * (2 if gated else 1)
    # Laguna's gate is one for a head, or one for each of its elements.
    gating = config.fields.get("gating")
    if config.flag("use_head_wise_attn_gate", default=gating in (True, "per-head")):
        query += hidden * heads.queries
    elif gating == "per-element":
        query += hidden * heads.queries * heads.value_dim
    if config.word("attention_gate_func"):
        query += hidden * heads.queries * heads.value_dim
    out = heads.queries * heads.value_dim * hidden
    # Gemma 4 takes the values of its global layers from their keys.
    shared = config.has("global_head_dim") and config.flag("attention_k_eq_v", default=False)
    values = 0 if full and shared else heads.value_dim
    kv = float(hidden * heads.kv * (heads.key_dim + values))
    return query + out + kv, kv, 0.0


def _latent(config: Config, hidden: int, heads: int) -> tuple[float, float, float]:
    rank = config.positive("kv_lora_rank")
    rope = config.count("qk_rope_head_dim")
    nope, value = config.positive("qk_nope_head_dim"), config.positive("v_head_dim")
    query_rank = config.count("q_lora_rank", default=0)
    split = float((query_rank or hidden) * heads * (nope + rope))
    split += rank * heads * (nope + value) + heads * value * hidden
    if config.flag("gated_mla", default=config.model_type == "hy_v4"):
        headwise = config.word("gating_type") == "headwise"
        split += hidden * heads * (1 if headwise else value)
    replicated = float(hidden * query_rank + hidden * (rank + rope))
    return split, 0.0, replicated


def _indexers(config: Config, hidden: int, layers: int) -> tuple[int, float, float]:
    """The number of sparse attention's indexers, and the parameters of each indexer.

    The parameters are two numbers: those split like KV heads, and those copied to every rank.
    """
    if in_group(config, "block_indexed"):
        section = index_size(config)
        index, heads = (
            section.positive("sparse_index_dim"),
            section.positive("sparse_num_index_heads"),
        )
        return index_layers(config, layers), float(hidden * heads * index), float(hidden * index)
    index = config.count("index_head_dim", default=0)
    if not index or not config.has("kv_lora_rank"):
        return 0, 0.0, 0.0
    heads, query_rank = config.positive("index_n_heads"), config.count("q_lora_rank", default=0)
    each = query_rank * heads * index + hidden * index + hidden * heads
    return index_layers(config, layers), 0.0, float(each)


def _routed(config: Config, hidden: int, experts: Experts) -> float:
    if not experts.count:
        return 0.0
    width = config.positive("moe_intermediate_size", "intermediate_size")
    # Nemotron 3 Super computes its experts in a narrower space.
    latent = config.count("moe_latent_size", default=0) or hidden
    return float(experts.layers * experts.count * matrices(config) * latent * width)


def _small(config: Config, hidden: int, experts: Experts) -> float:
    layers = depth(config)
    routed = experts.count + config.count("zero_expert_num", default=0)
    small = 2.0 * layers * hidden + experts.layers * routed * hidden
    streams = config.count("hc_mult", default=0)
    if streams:
        # Two mixes of the residual streams in each layer, and one at the end.
        mixed = streams * (2 if config.model_type == "hy_v4" else 2 + streams)
        small += (2.0 * layers * mixed + streams) * streams * hidden
    ahead = family_value(config, "learned_positions")
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


# --- The matrices that vLLM keeps LoRA buffers for ------------------------------------------------
#
# For a matrix, an adapter of rank r has r x (inputs + outputs) elements. vLLM splits one of the two
# factors over the tensor-parallel ranks and copies the other to each rank: the input factor is
# copied if the matrix is split by outputs, and the reverse. Source: vllm/lora/layers (0.32), whose
# buffers are recorded in tests/fixtures/adapters; guide 2.5.

# Projections into a recurrent layer, more or less: queries to gates, and the convolution.
_RECURRENT_INPUTS = 4


class AdapterShape(Struct, frozen=True):
    """Elements of one adapter per unit of rank, by how they are placed on GPUs.

    - `whole`: copied to every tensor-parallel rank.
    - `split`: split over the ranks.
    - `kv`: split over the ranks, but over the KV heads at most.
    - `experts_whole`: of routed experts; copied to every rank that has the expert.
    - `experts_split`: of routed experts; split over the ranks.
    - `tables`: of embedding and output projection; copied to every rank.
    - `head`: whether the output projection has an adapter.
    """

    whole: float
    split: float
    kv: float
    experts_whole: float
    experts_split: float
    tables: float
    head: bool


def adapter_shape(config: Config, experts: Experts) -> AdapterShape:
    """The shape of an adapter for all adaptable matrices of the language model.

    Raises:
        SizingError: a field is missing.
    """
    hidden, words = config.positive("hidden_size"), layer_words(config)
    attentions = words.count(FULL) + words.count(SLIDING)
    whole, split, kv = (float(attentions * size) for size in _adapted_attention(config, hidden))
    recurrent = words.count(LINEAR) + words.count(MAMBA)
    if recurrent:
        whole += recurrent * (_RECURRENT_INPUTS + 1) * hidden
        split += recurrent * recurrent_parameters(config) / hidden
    mlps = dense_layers(config, experts)
    gates = _gates(config, fused=in_group(config, "fused_gate"))
    shared = shared_width(config)
    whole += (mlps + (experts.layers if shared else 0)) * (gates + 1) * hidden
    split += matrices(config) * (dense_widths(config, mlps, hidden) + shared * experts.layers)
    # The router is adapted as well.
    whole += experts.layers * (hidden + experts.count)
    experts_whole, experts_split = _adapted_experts(config, hidden, experts)
    vocab = config.positive("vocab_size")
    head = in_group(config, "lora_tables")
    tables = head + in_group(config, "lora_tables", "lora_input_table")
    return AdapterShape(
        whole=whole,
        split=split,
        kv=kv,
        experts_whole=experts_whole,
        experts_split=experts_split,
        tables=float(tables * (vocab + hidden)),
        head=head,
    )


def _adapted_attention(config: Config, hidden: int) -> tuple[int, int, int]:
    """Adapter elements per unit of rank in one attention layer.

    Returns the copied ones, the split ones, and those split over the KV heads at most.
    """
    heads = config.positive("num_attention_heads")
    if config.has("kv_lora_rank"):
        return *_adapted_latent(config, hidden, heads), 0
    size = head_dim(config)
    gated = config.flag("attn_output_gate", default=in_group(config, "gated_attention"))
    inputs = 1 if in_group(config, "fused_attention") else 3
    queries = heads * size * (2 if gated else 1)
    return (inputs + 1) * hidden, queries + heads * size, 2 * kv_heads(config) * size


def _adapted_latent(config: Config, hidden: int, heads: int) -> tuple[int, int]:
    rank, rope = config.positive("kv_lora_rank"), config.count("qk_rope_head_dim")
    nope, value = config.positive("qk_nope_head_dim"), config.positive("v_head_dim")
    query_rank = config.count("q_lora_rank", default=0)
    # Down to the ranks on every GPU, up from them over the heads, and out.
    whole = hidden + rank + rope + rank + hidden
    whole += hidden + 2 * query_rank if query_rank else hidden
    split = heads * (nope + rope) + heads * (nope + value) + heads * value
    return whole, split


def _gates(config: Config, *, fused: bool) -> int:
    """Number of matrices from the hidden state into an MLP, as the checkpoint stores them."""
    return 1 if fused else matrices(config) - 1


def _adapted_experts(config: Config, hidden: int, experts: Experts) -> tuple[float, float]:
    if not experts.count:
        return 0.0, 0.0
    width = config.positive("moe_intermediate_size", "intermediate_size")
    latent = config.count("moe_latent_size", default=0) or hidden
    inputs = _gates(config, fused=in_group(config, "fused_experts"))
    all_experts = experts.layers * experts.count
    return float(all_experts * (inputs + 1) * latent), float(all_experts * matrices(config) * width)
