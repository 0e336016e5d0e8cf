"""The layout of vLLM's KV cache: bytes per token, pages, groups of layers, blocks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    INDEX_SCALE_BYTES,
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    Layers,
    Recurrent,
    SlidingAttention,
    SlidingStates,
)
from kneewatch.diagnose.sizing.memory.kv_formats import KvFormat, kv_format

# vLLM 0.7 pads a latent row to whole 256 bytes.
_LATENT_ROW_BYTES = 256
# Bytes per element of a recurrent layer's convolution state, kept in the model's 16-bit dtype.
_CONVOLUTION_BYTES = 2
_BLOCK_TOKENS = 16
PLAIN = kv_format("auto")
# Kernels for latent attention read blocks of 64 tokens.
_LATENT_BLOCK_TOKENS = 64
# Kernels that attend to chosen blocks of keys read blocks of 128 tokens, those of compressed
# states 256, in pages of whole 576 bytes.
_CHOSEN_BLOCK_TOKENS, _COMPRESSED_BLOCK_TOKENS = 128, 256
_TENSOR_SIZES = (1, 2, 4, 5, 8, 10, 16)


class KvSettings(Struct, frozen=True):
    """The settings of a launch that decide the cache's layout.

    `block_tokens` None means vLLM's own choice. `in_flight_tokens` is the token budget times the
    batches in flight. `hybrid_pool` False gives every layer the whole context
    (`--disable-hybrid-kv-cache-manager`, and versions before the shared pool). `state_blocks` is
    the number of blocks of a recurrent layer per request: 1, or 2 with prefix caching
    (`--mamba-cache-mode align`), plus one per draft token. `latent_hybrid_tokens`: blocks of latent
    attention beside recurrent layers are multiples of it. `indexed_format` is the format of latent
    vectors with an indexer, where it is not `kv_format`.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    kv_format: KvFormat = PLAIN
    block_tokens: int | None = None
    in_flight_tokens: int = 8192
    hybrid_pool: bool = True
    padded_latent: bool = False
    indexed_format: KvFormat | None = None
    state_blocks: int = 1
    latent_hybrid_tokens: int = _LATENT_BLOCK_TOKENS


def token_bytes(kind: LayerKind, settings: KvSettings) -> float:
    """Bytes of one token in one layer on one GPU; 0 for a recurrent state.

    KV heads are copied, not split, once tensor parallelism exceeds them; a latent vector is copied
    to every rank.

    Raises:
        SizingError: the KV heads cannot be split over that many GPUs.
    """
    if isinstance(kind, Recurrent):
        return 0.0
    if isinstance(kind, CompressedAttention):
        return kind.vector_bytes / kind.tokens_per_vector
    if isinstance(kind, SlidingStates):
        return kind.vector_bytes
    if isinstance(kind, LatentAttention):
        return latent_row_bytes(kind, settings) + index_bytes(kind)
    heads = heads_per_gpu(kind.kv_heads, settings.tensor_parallel)
    return heads * settings.kv_format.head_bytes(kind.key_dim, kind.value_dim)


def latent_row_bytes(kind: LatentAttention, settings: KvSettings) -> float:
    """Bytes of a token's latent vector in one layer, the same on every rank."""
    kept = settings.indexed_format if kind.is_sparse else None
    row = (kept or settings.kv_format).latent_row_bytes(kind.latent_dim, kind.rope_dim)
    if settings.padded_latent:
        row = ceil(row / _LATENT_ROW_BYTES) * _LATENT_ROW_BYTES
    return row


def index_bytes(kind: LatentAttention) -> int:
    """Bytes of a token's key in one layer's indexer; 0 without one."""
    return kind.index_dim + INDEX_SCALE_BYTES if kind.index_dim else 0


def heads_per_gpu(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads per GPU of a tensor-parallel group.

    Raises:
        SizingError: neither number divides the other, which vLLM refuses.
    """
    larger, smaller = max(kv_heads, tensor_parallel), min(kv_heads, tensor_parallel)
    if larger % smaller:
        fitting = [
            str(size) for size in _TENSOR_SIZES if not max(kv_heads, size) % min(kv_heads, size)
        ]
        raise SizingError(
            f"tensor parallel {tensor_parallel} does not divide {kv_heads} KV heads",
            name="tensor_parallel",
            choices=fitting,
        )
    return max(1, kv_heads // tensor_parallel)


def state_bytes(kind: Recurrent, settings: KvSettings) -> float:
    """Bytes of one request's state in one layer on one GPU, split by tensor parallelism."""
    whole = (
        kind.conv_elements * _CONVOLUTION_BYTES + kind.state_elements * kind.state_bytes_per_element
    )
    return whole / settings.tensor_parallel


def default_block_tokens(kinds: Sequence[Layers], settings: KvSettings) -> int:
    """Tokens per block: as stated, else by the attention kernels of those layers."""
    if settings.block_tokens is not None:
        return settings.block_tokens
    if any(isinstance(part.kind, CompressedAttention) for part in kinds):
        return _COMPRESSED_BLOCK_TOKENS if _has_states(kinds) else _CHOSEN_BLOCK_TOKENS
    latent = any(isinstance(part.kind, LatentAttention) for part in kinds)
    return _LATENT_BLOCK_TOKENS if latent and not settings.padded_latent else _BLOCK_TOKENS


def _has_states(kinds: Sequence[Layers]) -> bool:
    return any(isinstance(part.kind, SlidingStates) for part in kinds)


def shared_page(kinds: Sequence[Layers], settings: KvSettings) -> tuple[float, list[int]] | None:
    """The common page size in bytes and the tokens per block of each kind; None if there is no
    common page.

    A smaller page holds more tokens if it divides the largest, else it is padded. A page of latent
    vectors cannot be padded, nor can one with an indexer's keys.
    """
    block = _aligned_block(kinds, settings)
    costs = [token_bytes(part.kind, settings) for part in kinds]
    states = [
        state_bytes(part.kind, settings) for part in kinds if isinstance(part.kind, Recurrent)
    ]
    page = max([block * max(costs), *states])
    tokens: list[int] = []
    for part, cost in zip(kinds, costs, strict=True):
        ratio = page / (block * cost) if cost else 1.0
        if isinstance(part.kind, LatentAttention) and (ratio % 1 or part.kind.index_dim):
            return None
        tokens.append(block if ratio % 1 else block * int(ratio))
    return page, tokens


def _aligned_block(kinds: Sequence[Layers], settings: KvSettings) -> int:
    """Tokens of a block whose page holds the largest recurrent state, if there are states."""
    block = default_block_tokens(kinds, settings)
    states = [
        state_bytes(part.kind, settings) for part in kinds if isinstance(part.kind, Recurrent)
    ]
    # vLLM computes with the model's own heads, which are those of its full layers.
    attention = sorted(
        (part.kind for part in kinds if not isinstance(part.kind, Recurrent)),
        key=lambda kind: not isinstance(kind, FullAttention | LatentAttention),
    )
    if not states or not attention:
        return block
    unit = block
    if isinstance(attention[0], LatentAttention):
        unit = max(block, settings.latent_hybrid_tokens)
    return max(ceil(max(states) / (unit * token_bytes(attention[0], settings))) * unit, block)


# --- The layout of vLLM's KV cache: pages, groups of layers, blocks, requests ---------------------
#
# vLLM keeps one pool of blocks. Layers are put into groups of equally many layers of one kind; a
# block of the pool is one page in each layer of a group, so a block of any group weighs the same.
# A request takes blocks of every group: for its whole context where attention is full, for the
# window and the tokens in flight where it slides, one state where it is recurrent.
#
# Source: vllm/v1/core/kv_cache_utils.py and vllm/v1/kv_cache_interface.py (0.32), whose outcomes
# are recorded in tests/fixtures/kvlayout; guide 2.2, 7.1.


# Kinds of which a request keeps every token.
_GROWING = (FullAttention, LatentAttention, CompressedAttention)
# Kinds that differ by less than half in their number of layers share one group size.
_SIMILAR_COUNTS = 1.5


class Group(Struct, frozen=True):
    """Layers of one kind in the pool: `groups` groups of the layout's common size.

    `layers` are those of one pipeline stage. `token_bytes` is per token and layer on one GPU, 0 for
    a recurrent state.
    """

    kind: LayerKind
    layers: int
    groups: int
    block_tokens: int
    token_bytes: float


class KvLayout(Struct, frozen=True):
    """The division of one GPU's KV memory into blocks.

    `block_bytes` is one block of the pool on one GPU (`group_layers` pages of `page_bytes`).
    `token_bytes` is one more token of context, without sliding windows and states unless the model
    has nothing else.
    """

    groups: tuple[Group, ...]
    group_layers: int
    page_bytes: float
    settings: KvSettings

    @property
    def block_bytes(self) -> float:
        """Bytes of one block on one GPU."""
        return self.page_bytes * self.group_layers

    @property
    def token_bytes(self) -> float:
        """Bytes of one more token of context on one GPU."""
        growing = [g for g in self.groups if isinstance(g.kind, _GROWING)]
        kept = growing or [g for g in self.groups if isinstance(g.kind, SlidingAttention)]
        return sum(group.layers * group.token_bytes for group in kept)

    def blocks(self, available_bytes: float) -> int:
        """Number of blocks that fit; vLLM keeps one for itself (the null block)."""
        return max(int(available_bytes // self.block_bytes), 0)

    def request_blocks(self, context_tokens: int) -> int:
        """The largest number of KV blocks that a request of this length occupies."""
        return sum(
            group.groups * blocks_of(group, context_tokens, self.settings) for group in self.groups
        )

    def request_bytes(self, context_tokens: int) -> float:
        """The largest number of bytes that a request of this length occupies on one GPU."""
        return self.request_blocks(context_tokens) * self.block_bytes

    def concurrency(self, available_bytes: float, context_tokens: int) -> float:
        """How many requests of this length fit at once, as vLLM logs it at start-up."""
        return self.blocks(available_bytes) / self.request_blocks(context_tokens)

    def tokens_of_blocks(self, available_bytes: float) -> int:
        """The tokens in the line "GPU KV cache size" of vLLM before 0.20.2: blocks over groups.

        That is no capacity for models with several kinds of layers; newer versions log requests
        times their length.
        """
        groups = sum(group.groups for group in self.groups)
        block = min(group.block_tokens for group in self.groups)
        parallel = self.settings.decode_context_parallel
        return self.blocks(available_bytes) // groups * block * parallel


def blocks_of(group: Group, context_tokens: int, settings: KvSettings) -> int:
    """The largest number of blocks that a request of this length occupies in one group."""
    kind = group.kind
    if isinstance(kind, Recurrent):
        return settings.state_blocks
    if isinstance(kind, SlidingStates) and not kind.window_tokens:
        return 1
    if isinstance(kind, SlidingAttention | SlidingStates):
        held = min(kind.window_tokens - 1 + settings.in_flight_tokens, context_tokens)
        # A window rarely starts where a block does: one block more.
        return ceil(held / group.block_tokens) + 1
    return ceil(context_tokens / (group.block_tokens * settings.decode_context_parallel))


def kv_layout(layers: Sequence[Layers], settings: KvSettings) -> KvLayout:
    """The cache layout of a model under these settings.

    Groups are those of the whole model; a pipeline stage holds a share of each. The largest stage
    is used, because the smallest number of blocks limits all stages.

    Raises:
        SizingError: the model has no cache, its heads cannot be split, or vLLM has no layout for
    its kinds of layers.
    """
    if not layers:
        raise SizingError("the model has no layer that keeps a KV cache", name="model")
    if _has_states(layers):
        return _packed_layout(layers, settings)
    if settings.kv_format.plain_layers:
        settings = _with_plain_ends(layers, settings)
    kinds = list(layers) if settings.hybrid_pool or _alike(layers) else _unified(layers)
    if _alike(kinds):
        return _one_group(kinds, settings)
    kinds = _merged(kinds, settings)
    shared = shared_page(kinds, settings)
    if shared is None:
        return _one_group(_unified(kinds), settings)
    page_bytes, blocks = shared
    size = group_size([part.count for part in kinds])
    groups = tuple(
        Group(
            part.kind,
            ceil(part.count / settings.pipeline_parallel),
            ceil(part.count / size),
            block,
            token_bytes(part.kind, settings),
        )
        for part, block in zip(kinds, blocks, strict=True)
    )
    return KvLayout(groups, ceil(size / settings.pipeline_parallel), page_bytes, settings)


def _packed_layout(layers: Sequence[Layers], settings: KvSettings) -> KvLayout:
    """The layout of compressed attention: pages of several sizes lie side by side in a block, as
    many as the widest group has.

    Raises:
        SizingError: a KV cache format that vLLM refuses for it.
    """
    if settings.kv_format.id not in _COMPRESSED_FORMATS:
        raise SizingError(
            f"vLLM has no kernel for compressed attention with a KV cache in "
            f"{settings.kv_format.id}",
            name="kv_cache_dtype",
            choices=_COMPRESSED_FORMATS,
        )
    buckets = _buckets(layers, default_block_tokens(layers, settings))
    # Buckets with equally many layers of every page size can be dealt out over several groups.
    dealt = [bucket for bucket in buckets if len(set(bucket.pages.values())) == 1]
    fewest = max((bucket.deepest for bucket in dealt if len(bucket.pages) > 1), default=0)
    repeats = _least_padding([b.deepest for b in dealt], fewest) if fewest else None
    # A bucket that can be split down to one layer a group never widens a block that others fill.
    narrow = [bucket for bucket in buckets if bucket.narrows(dealt=repeats is not None)]
    widths = [
        bucket.width_bytes(
            bucket.layers
            if bucket in narrow
            else ceil(bucket.deepest / repeats)
            if repeats and bucket in dealt
            else 1
        )
        for bucket in buckets
    ]
    groups: list[Group] = []
    block_bytes = 0
    for bucket in buckets:
        split = ceil(bucket.deepest / repeats) if repeats and bucket in dealt else 1
        if bucket in narrow:
            split = max(split, ceil(bucket.layers / max(max(widths) // max(bucket.pages), 1)))
        block_bytes = max(
            block_bytes,
            sum(
                ceil(ceil(count / split) / settings.pipeline_parallel) * page
                for page, count in bucket.pages.items()
            ),
        )
        held = sum(page * count for page, count in bucket.pages.items())
        layer_bytes = held / bucket.layers / bucket.block_tokens
        stage = ceil(bucket.layers / settings.pipeline_parallel)
        groups.append(Group(bucket.kind, stage, split, bucket.block_tokens, layer_bytes))
    return KvLayout(tuple(groups), 1, block_bytes, settings)


_COMPRESSED_FORMATS = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")


class _Bucket(Struct, frozen=True):
    """Layers whose blocks hold the same tokens: the number of layers by page bytes."""

    kind: LayerKind
    block_tokens: int
    pages: Mapping[int, int]

    @property
    def layers(self) -> int:
        """Number of layers, over all page sizes."""
        return sum(self.pages.values())

    @property
    def deepest(self) -> int:
        """The largest number of layers that have the same page size."""
        return max(self.pages.values())

    def narrows(self, *, dealt: bool) -> bool:
        """Whether vLLM may split it down to one layer a group: rings, and windows where no other
        layers are dealt out."""
        return isinstance(self.kind, SlidingStates) and not (self.kind.window_tokens and dealt)

    def width_bytes(self, groups: int) -> int:
        """Bytes of a block of the widest group, with the layers dealt out to this many groups."""
        return sum(ceil(count / groups) * page for page, count in self.pages.items())


def _buckets(layers: Sequence[Layers], block_tokens: int) -> list[_Bucket]:
    buckets: dict[tuple[int, int], tuple[LayerKind, Counter[int]]] = {}
    for part in layers:
        kind = part.kind
        if isinstance(kind, SlidingStates):
            window, block = kind.window_tokens, kind.block_tokens
            vectors = block
        elif isinstance(kind, CompressedAttention):
            window, block = 0, block_tokens
            vectors = block_tokens // kind.tokens_per_vector
        else:
            raise TypeError(f"{type(kind).__name__} has no packed page")
        page = ceil(vectors * kind.vector_bytes / kind.page_bytes) * kind.page_bytes
        buckets.setdefault((window, block), (kind, Counter()))[1][page] += part.count
    return [_Bucket(kind, block, pages) for (_, block), (kind, pages) in buckets.items()]


def _least_padding(counts: Sequence[int], fewest: int) -> int:
    """Of the group sizes from `fewest` to the largest count, the one that pads the counts least; of
    equal ones the largest."""
    sizes = range(fewest, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _with_plain_ends(layers: Sequence[Layers], settings: KvSettings) -> KvSettings:
    """The settings for a format that keeps the first and last layers in 16 bit. With recurrent
    layers vLLM does not keep any in 16 bit: `plain_layers` is 0 then.

    Raises:
        SizingError: sliding layers; a census does not tell which layers are first and last.
    """
    kinds = {type(part.kind) for part in layers}
    if Recurrent in kinds:
        return replace(settings, kv_format=replace(settings.kv_format, plain_layers=0))
    if kinds != {FullAttention}:
        raise SizingError(
            f"a KV cache in {settings.kv_format.id} is modelled for full attention only",
            name="kv_cache_dtype",
        )
    return settings


def _alike(layers: Sequence[Layers]) -> bool:
    """Whether every layer stores the same tokens of a request: they form one group."""
    if all(isinstance(part.kind, _GROWING) for part in layers):
        return True
    windows = [
        part.kind.window_tokens for part in layers if isinstance(part.kind, SlidingAttention)
    ]
    return len(windows) == len(layers) and len(set(windows)) == 1


def _one_group(layers: Sequence[Layers], settings: KvSettings) -> KvLayout:
    block = default_block_tokens(layers, settings)
    counts = [ceil(part.count / settings.pipeline_parallel) for part in layers]
    costs = [token_bytes(part.kind, settings) for part in layers]
    held = sum(count * cost for count, cost in zip(counts, costs, strict=True))
    ends = settings.kv_format.plain_layers
    if ends:
        plain = max(token_bytes(p.kind, replace(settings, kv_format=PLAIN)) for p in layers)
        stages = 1 if settings.pipeline_parallel == 1 else 2
        held += min(ends * 2 // stages, sum(counts)) * (plain - max(costs))
        # The block grows until a page of the packed layers holds a plain one of 16 tokens.
        block *= ceil(_BLOCK_TOKENS * plain / (block * max(costs)))
    group = Group(layers[0].kind, sum(counts), 1, block, held / sum(counts))
    return KvLayout((group,), sum(counts), block * held / sum(counts), settings)


def _merged(layers: Sequence[Layers], settings: KvSettings) -> list[Layers]:
    """The layers, with kinds combined that become equal on one GPU once the heads are split."""
    merged: dict[tuple[object, ...], Layers] = {}
    for part in layers:
        kind = part.kind
        key: tuple[object, ...] = (kind,)
        if isinstance(kind, FullAttention | SlidingAttention):
            heads = heads_per_gpu(kind.kv_heads, settings.tensor_parallel)
            window = kind.window_tokens if isinstance(kind, SlidingAttention) else None
            key = (heads, kind.key_dim, kind.value_dim, window)
        same = merged.get(key)
        merged[key] = Layers(same.kind, same.count + part.count) if same else part
    return list(merged.values())


def group_size(counts: Sequence[int]) -> int:
    """Layers per group: the smallest count of any kind, or the largest of similar counts."""
    fewest, most = min(counts), max(counts)
    return most if most < fewest * _SIMILAR_COUNTS else fewest


def _unified(layers: Sequence[Layers]) -> list[Layers]:
    """The layers with sliding ones replaced by full ones, which store the whole context.

    Raises:
        SizingError: some layers cannot store the whole context; vLLM refuses to start.
    """
    unified = [
        Layers(
            FullAttention(part.kind.kv_heads, part.kind.key_dim, part.kind.value_dim), part.count
        )
        if isinstance(part.kind, SlidingAttention)
        else part
        for part in layers
    ]
    full = any(isinstance(part.kind, FullAttention | LatentAttention) for part in layers)
    latent = any(isinstance(part.kind, LatentAttention) for part in layers)
    # With full attention, vLLM refuses windows of several lengths before it ignores the windows.
    windows = {
        part.kind.window_tokens for part in layers if isinstance(part.kind, SlidingAttention)
    }
    if not full or not _alike(unified) or (len(windows) > 1 and not latent):
        raise SizingError(
            "vLLM cannot give every layer the whole context where layers are recurrent, have "
            "windows of several lengths, or all have windows",
            name="hybrid_pool",
            choices=("true",),
        )
    return unified
