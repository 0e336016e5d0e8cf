"""What a model's layers store per token or per request, by kind of layer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from msgspec import Struct

from kneewatch.diagnose.catalogue.families import family_value, recurrent_families
from kneewatch.diagnose.catalogue.hf_config import Config
from kneewatch.diagnose.catalogue.inputs import SizingError


class FullAttention(Struct, frozen=True):
    """Keys and values of every token (MHA, GQA, MQA)."""

    kv_heads: int
    key_dim: int
    value_dim: int


class SlidingAttention(Struct, frozen=True):
    """Keys and values of the last `window_tokens` tokens."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int


class LatentAttention(Struct, frozen=True):
    """One compressed vector per token (MLA), copied to every tensor-parallel rank.

    `index_dim` is the key size of a sparse-attention indexer with `index_heads`; 0 without an
    indexer. `shares_index`: the layer uses the selection of an earlier layer's indexer.
    """

    latent_dim: int
    rope_dim: int
    index_dim: int = 0
    index_heads: int = 0
    shares_index: bool = False

    @property
    def is_sparse(self) -> bool:
        """Whether attention reads selected tokens only."""
        return self.index_dim > 0 or self.shares_index


class Recurrent(Struct, frozen=True):
    """State of constant size per request: the convolution's and the recurrence's.

    The `conv_elements` have the cache's dtype unless the model says otherwise. The `state_elements`
    take `state_bytes_per_element` each. `conv_channels` are the elements of one position more: a
    draft needs as many positions more as it proposes tokens.
    """

    conv_elements: int
    state_elements: int
    state_bytes_per_element: float
    conv_channels: int = 0


PAGE_BYTES, MXFP8_PAGE_BYTES = 576, 512
"""Compressed attention's cache pages are multiples of these bytes.

The first is for DeepSeek V4's packed format, the second for V4.1's format on GPUs of compute
capability 10.
"""


class CompressedAttention(Struct, frozen=True):
    """One vector per `tokens_per_vector` tokens, copied to every rank.

    The vectors are compressed attention states, or the keys of an indexer that works beside another
    attention.

    - `vector_dim`: elements of the vector that a query is multiplied with; 0 for an indexer.
    - `chosen_vectors`: number of vectors that a query attends to; 0 for all.
    - `readers`: number of layers that attend to the vectors of one layer.
    - `index_width`: an indexer's heads x elements of each, which are multiplied with a vector.
    - `page_bytes`: a page's size is a multiple of this.
    - `mxfp8_bytes`: size of a vector on GPUs of compute capability 10; 0 if it is the same there.
    """

    vector_bytes: int
    tokens_per_vector: int = 1
    vector_dim: int = 0
    chosen_vectors: int = 0
    readers: int = 1
    index_width: int = 0
    page_bytes: int = PAGE_BYTES
    mxfp8_bytes: int = 0


class SlidingStates(Struct, frozen=True):
    """One vector for each of the last `window_tokens` tokens, copied to every rank.

    The vectors are the window beside compressed attention, or tokens that a compressor has not
    compressed yet; in the second case `vector_dim` is 0. They are stored in blocks of
    `block_tokens`. A window of 0 means a ring: one block per request. For the other fields see
    `CompressedAttention`.
    """

    vector_bytes: int
    window_tokens: int
    block_tokens: int
    vector_dim: int = 0
    page_bytes: int = PAGE_BYTES
    mxfp8_bytes: int = 0


LayerKind = (
    FullAttention
    | SlidingAttention
    | LatentAttention
    | Recurrent
    | CompressedAttention
    | SlidingStates
)


class Layers(Struct, frozen=True):
    """A kind of layer, and how many layers of this kind there are."""

    kind: LayerKind
    count: int


# --- Layers that keep a state of constant size a request: its shape and their parameters. Pure ----
#
# Source: vllm/model_executor/layers/mamba/mamba_utils.py (0.32) and the model classes that call
# it. A convolution keeps one position fewer than its kernel is wide.


_FLOAT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def recurrent_layer(config: Config) -> Recurrent:
    """The state of one recurrent layer of the family.

    Raises:
        SizingError: the family has no recurrence that is modelled, or a field is missing.
    """
    return _reader(config)(config, config.count("hidden_size", default=0))[0]


def recurrent_parameters(config: Config) -> float:
    """Number of parameters in the projections of one recurrent layer of the family.

    Raises:
        SizingError: the family has no recurrence that is modelled, or a field is missing.
    """
    return _reader(config)(config, config.positive("hidden_size"))[1]


def state_bytes(config: Config) -> float:
    """Bytes of one element of the recurrent state: as configured, otherwise 2.

    Raises:
        SizingError: the dtype is unknown.
    """
    word = config.word("mamba_ssm_dtype") or config.word(
        "mamba_ssm_cache_dtype", default="bfloat16"
    )
    if word not in _FLOAT_BYTES:
        raise SizingError(
            f"{config.name}: the state's dtype is {word!r}",
            name="model",
            choices=sorted(_FLOAT_BYTES),
        )
    return _FLOAT_BYTES[word]


def _gated_delta(config: Config, hidden: int) -> tuple[Recurrent, float]:
    key_dim = config.positive("linear_key_head_dim")
    value_dim = config.positive("linear_value_head_dim")
    value_heads = config.positive("linear_num_value_heads")
    tail = config.positive("linear_conv_kernel_dim") - 1
    keys, values = config.positive("linear_num_key_heads") * key_dim, value_heads * value_dim
    state = value_heads * key_dim * value_dim
    parameters = hidden * (2.0 * keys + 3.0 * values + 2.0 * value_heads)
    channels = 2 * keys + values
    return Recurrent(channels * tail, state, state_bytes(config), channels), parameters


def _kimi_delta(config: Config, hidden: int) -> tuple[Recurrent, float]:
    section = config.section("linear_attn_config")
    if section is not None:
        heads, size = section.positive("num_heads"), section.positive("head_dim")
        kernel = section.positive("short_conv_kernel_size")
    else:
        # Older files keep the sizes at the top level.
        heads, size = config.positive("linear_num_heads"), config.positive("linear_head_dim")
        kernel = config.positive("linear_conv_kernel_dim")
    # Query, key, value and output; low-rank gates and decays through one head's width.
    parameters = 4.0 * hidden * heads * size + 2.0 * (hidden + heads * size) * size + hidden * heads
    channels = 3 * heads * size
    return Recurrent(channels * (kernel - 1), heads * size * size, 4.0, channels), parameters


def _bailing_delta(config: Config, hidden: int) -> tuple[Recurrent, float]:
    heads, size = config.positive("num_attention_heads"), config.positive("head_dim")
    tail = config.positive("short_conv_kernel_size") - 1
    # Kimi's recurrence with whole gates and decays in place of low-rank ones.
    parameters = 6.0 * hidden * heads * size + hidden * heads
    channels = 3 * heads * size
    return Recurrent(channels * tail, heads * size * size, 4.0, channels), parameters


def _lightning(config: Config, hidden: int) -> tuple[Recurrent, float]:
    heads = config.positive("num_attention_heads")
    size = config.count("head_dim", default=0) or config.positive("hidden_size") // heads
    # Query, key, value, output gate and output.
    return Recurrent(0, heads * size * size, state_bytes(config)), 5.0 * hidden * heads * size


def _mamba2(config: Config, hidden: int) -> tuple[Recurrent, float]:
    heads = config.positive("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    state = config.positive("ssm_state_size", "mamba_d_state")
    groups = config.positive("n_groups", "mamba_n_groups", "mamba_ngroups")
    if config.fields.get("mamba_d_head") == "auto":
        # Bamba and Granite write "auto" for the inner width split over the heads.
        size = config.positive("mamba_expand") * config.positive("hidden_size") // heads
    else:
        size = config.positive("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    tail = config.positive("conv_kernel", "mamba_d_conv") - 1
    channels = heads * size + 2 * groups * state
    parameters = hidden * (3.0 * heads * size + 2.0 * groups * state + heads)
    held = Recurrent(channels * tail, heads * size * state, state_bytes(config), channels)
    return held, parameters


def _mamba1(config: Config, hidden: int) -> tuple[Recurrent, float]:
    inner = config.positive("mamba_expand") * config.positive("hidden_size")
    tail, state = config.positive("mamba_d_conv") - 1, config.positive("mamba_d_state")
    # "auto" is a sixteenth of the hidden size, rounded up.
    auto = config.fields.get("mamba_dt_rank") == "auto"
    rank = -(-hidden // 16) if auto else config.positive("mamba_dt_rank")
    parameters = inner * (3.0 * hidden + 2.0 * rank + 3.0 * state)
    return Recurrent(inner * tail, inner * state, state_bytes(config)), parameters


def _short_conv(config: Config, hidden: int) -> tuple[Recurrent, float]:
    width = config.count("conv_dim", default=0) or config.positive("hidden_size")
    # Three ways in, one out.
    tail = config.positive("conv_L_cache") - 1
    return Recurrent(width * tail, 0, 2.0, width), 4.0 * hidden * width


_READERS: Mapping[str, Callable[[Config, int], tuple[Recurrent, float]]] = {
    "bailing_delta": _bailing_delta,
    "gated_delta": _gated_delta,
    "kimi_delta": _kimi_delta,
    "lightning": _lightning,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "short_conv": _short_conv,
}
"""The state and the parameters of a recurrent layer, by the kind of recurrence."""


def _reader(config: Config) -> Callable[[Config, int], tuple[Recurrent, float]]:
    kind = family_value(config, "recurrences")
    if kind is None:
        family = config.model_type or "this model"
        raise SizingError(
            f"{config.name}: the recurrent layers of {family} are not modelled",
            name="model",
            choices=recurrent_families(),
        )
    return _READERS[kind]


# --- DeepSeek V4's attention: windows, compressed states, compressors and their indexers. Pure ----
#
# Every layer keeps a window. Most keep a vector for every 4 or 128 tokens as well, and the tokens
# that their compressor has not finished; those of 4 tokens choose vectors with an indexer, whose
# keys are compressed in the same way. Source: vllm/models/deepseek_v4 (0.32).


# A vector in fp8_ds_mla: 448 elements in FP8, 64 in 16 bit, 8 scales; an indexer's key has one.
_PACKED_DIM, _PACKED_BYTES = 512, 584
INDEX_SCALE_BYTES = 4
"""Bytes of the scale of one indexer key; the key's elements have 8 bits."""
_STATE_BYTES = 4
_WINDOW_BLOCK_TOKENS = 64
# Tokens of a compressor's block, by the tokens that it makes one vector of.
_COMPRESSOR_BLOCK_TOKENS = {4: 4, 128: 8}
_INDEXED_RATIO = 4


def _ratios(config: Config) -> tuple[int, ...]:
    """Tokens per vector of each layer; 0 for a layer that has only its window."""
    depth = config.positive("num_hidden_layers")
    ratios = config.counts("compress_ratios")[:depth]
    if len(ratios) < depth:
        raise config.wrong("compress_ratios", list(ratios), "one entry for each layer")
    if config.model_type == "deepseek_v41":
        fitting, expected = {0, 1, 2} >= set(ratios), "0, 1 and 2"
    else:
        # Prediction layers have windows alone.
        indexed = _INDEXED_RATIO in ratios or not any(ratios)
        fitting = {0, *_COMPRESSOR_BLOCK_TOKENS} >= set(ratios) and indexed
        expected = "4, with 0 or 128 beside it"
    if not fitting:
        raise config.wrong("compress_ratios", sorted(set(ratios)), expected)
    if config.positive("head_dim") != _PACKED_DIM:
        raise config.wrong("head_dim", config.positive("head_dim"), f"{_PACKED_DIM}")
    return ratios


def _overlap(ratio: int) -> int:
    """How many windows a compressor keeps at once: 2 for windows of 4 tokens, which overlap, else
    1."""
    return 2 if ratio == _INDEXED_RATIO else 1


def compressed_layers(config: Config) -> tuple[Layers, ...]:
    """What the layers of DeepSeek V4 and V4.1 store, by kind.

    Raises:
        SizingError: a field is missing, or vLLM has no compressor for a ratio.
    """
    if config.model_type == "deepseek_v41":
        return _shared_compressed_layers(config)
    ratios, index_dim = _ratios(config), config.positive("index_head_dim")
    size, window = config.positive("head_dim"), config.positive("sliding_window")
    kinds = [Layers(SlidingStates(_PACKED_BYTES, window, _WINDOW_BLOCK_TOKENS, size), len(ratios))]
    for ratio in sorted(set(ratios) - {0}):
        count = ratios.count(ratio)
        chosen = config.positive("index_topk") if ratio == _INDEXED_RATIO else 0
        kinds.append(Layers(CompressedAttention(_PACKED_BYTES, ratio, size, chosen), count))
        kinds.append(Layers(_compressor(ratio, size), count))
        if ratio == _INDEXED_RATIO:
            key_bytes = index_dim + INDEX_SCALE_BYTES
            keys = CompressedAttention(key_bytes, ratio, index_width=_index_width(config))
            kinds.append(Layers(keys, count))
            kinds.append(Layers(_compressor(ratio, index_dim), count))
    return tuple(kinds)


def _index_width(config: Config) -> int:
    return config.positive("index_n_heads") * config.positive("index_head_dim")


def _compressor(ratio: int, size: int) -> SlidingStates:
    # A state and its score for each of the tokens that are not finished, in float32.
    windows = _overlap(ratio)
    return SlidingStates(
        2 * windows * size * _STATE_BYTES, windows * ratio, _COMPRESSOR_BLOCK_TOKENS[ratio]
    )


# V4.1: layers read the vectors of the last source before them, a source's compressor keeps a ring
# of the group that is open, and n-grams are looked up in tables. Source: vllm/models/deepseek_v41
# (0.32).


_MXFP8_BYTES = 528
_SHARED_WINDOW_BLOCK_TOKENS, _RING_TOKENS = 32, 8


def _sources(config: Config) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Tokens per vector for each layer; the layers that own vectors; the layers that have an
    indexer."""
    ratios = _ratios(config)
    owners = tuple(sorted(config.counts("kv_source_layer_ids")))
    if not owners or any(layer >= len(ratios) or not ratios[layer] for layer in owners):
        raise config.wrong("kv_source_layer_ids", list(owners), "layers with a ratio above 0")
    return ratios, owners, tuple(sorted(config.counts("index_source_layer_ids")))


def _shared_compressed_layers(config: Config) -> tuple[Layers, ...]:
    ratios, owners, indexers = _sources(config)
    size, index_dim = config.positive("head_dim"), config.positive("index_head_dim")
    window = SlidingStates(
        _PACKED_BYTES,
        config.positive("sliding_window"),
        _SHARED_WINDOW_BLOCK_TOKENS,
        size,
        mxfp8_bytes=_MXFP8_BYTES,
    )
    kinds: Counter[LayerKind] = Counter({window: len(ratios)})
    key_bytes = index_dim + INDEX_SCALE_BYTES
    for owner, after in zip(owners, (*owners[1:], len(ratios)), strict=True):
        ratio = ratios[owner]
        vectors = CompressedAttention(
            _PACKED_BYTES,
            ratio,
            size,
            config.positive("index_topk"),
            readers=sum(map(bool, ratios[owner:after])),
            mxfp8_bytes=_MXFP8_BYTES,
        )
        # An indexer after the one that picks candidates scores fewer keys; it counts as all.
        own = sum(owner <= layer < after for layer in indexers)
        keys = CompressedAttention(
            key_bytes,
            ratio,
            readers=own,
            index_width=_index_width(config),
            mxfp8_bytes=key_bytes,
        )
        kinds.update((vectors, keys))
        if ratio > 1:
            kinds[SlidingStates(2 * size * _STATE_BYTES, 0, _RING_TOKENS, page_bytes=1)] += 1
    return tuple(Layers(kind, count) for kind, count in kinds.items())


def ngram_table_bytes(config: Config) -> float:
    """Bytes of the n-gram tables, which vLLM keeps in host memory; 0 if there are none.

    A row has 8-bit elements, and one byte of scale per 32 elements.
    """
    if not config.has("engram_num_embeddings"):
        return 0.0
    rows = sum(config.counts("engram_num_embeddings"))
    return rows * config.positive("engram_head_dim") * (1 + 1 / 32)


def compressed_parameters(config: Config) -> tuple[float, float, float]:
    """Attention parameters of DeepSeek V4 and V4.1.

    Returns three counts: split over ranks, copied to every rank, and copied in 16 bit.
    """
    hidden, size = config.positive("hidden_size"), config.positive("head_dim")
    heads, query_rank = config.positive("num_attention_heads"), config.positive("q_lora_rank")
    groups, out_rank = config.positive("o_groups"), config.positive("o_lora_rank")
    index_heads, index_dim = config.positive("index_n_heads"), config.positive("index_head_dim")
    ratios, plain = _ratios(config), 0.0
    split = query_rank * heads * size + heads * size * out_rank + groups * out_rank * hidden
    split *= len(ratios)
    if config.model_type == "deepseek_v41":
        _, owners, sources = _sources(config)
        indexers = len(sources)
        plain += len(owners) * size * index_dim
        plain += sum(hidden * size * (2 if ratios[owner] > 1 else 1) for owner in owners)
        # The rows that an n-gram's hashes found become a key for each residual stream and a value.
        tables = len(config.counts("engram_layer_ids"))
        if tables:
            grams = config.positive("engram_max_ngram_size") - 1
            width = grams * config.positive("engram_n_heads") * config.positive("engram_head_dim")
            split += tables * width * hidden * (config.positive("hc_mult") + 1)
    else:
        indexers = ratios.count(_INDEXED_RATIO)
        for ratio in filter(None, ratios):
            # A compressor is two projections, of states and scores, with a row for each position.
            rows, dim = 2 * hidden + ratio, size + (index_dim if ratio == _INDEXED_RATIO else 0)
            plain += rows * _overlap(ratio) * dim
    copied = len(ratios) * hidden * (query_rank + size)
    copied += indexers * query_rank * index_heads * index_dim
    return float(split), float(copied), float(plain + indexers * hidden * index_heads)
