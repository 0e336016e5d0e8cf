"""The layout of vLLM's KV cache: bytes per token, pages, groups of layers, blocks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
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
from kneewatch.diagnose.sizing.arithmetic import Arithmetic, compiled, evaluated, names_of
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
    """The settings of a launch that determine the cache's layout.

    - `block_tokens`: None means vLLM's own choice.
    - `in_flight_tokens`: the token budget times the batches in flight.
    - `decode_tokens`: tokens in flight of a request that decodes.
    - `hybrid_pool`: False stores the whole context for every layer
      (`--disable-hybrid-kv-cache-manager`, and versions before the shared pool).
    - `state_blocks`: blocks of a recurrent layer per request: 1, or 2 with prefix caching
      (`--mamba-cache-mode align`), plus one per draft token.
    - `draft_tokens`: tokens that a draft proposes at a time.
    - `latent_hybrid_tokens`: beside recurrent layers, blocks of latent attention are multiples of
      this.
    - `indexed_format`: the format of latent vectors with an indexer, if it is not `kv_format`.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    kv_format: KvFormat = PLAIN
    block_tokens: int | None = None
    in_flight_tokens: int = 8192
    decode_tokens: int = 2
    hybrid_pool: bool = True
    padded_latent: bool = False
    indexed_format: KvFormat | None = None
    state_blocks: int = 1
    draft_tokens: int = 0
    latent_hybrid_tokens: int = _LATENT_BLOCK_TOKENS


def token_bytes(kind: LayerKind, settings: KvSettings) -> float:
    """Bytes of one token in one layer on one GPU; 0 for a recurrent state.

    If the tensor-parallel size exceeds the number of KV heads, heads are copied instead of split. A
    latent vector is copied to every rank.

    Raises:
        SizingError: the KV heads cannot be split over this many GPUs.
    """
    if isinstance(kind, Recurrent):
        return 0.0
    if isinstance(kind, CompressedAttention):
        return kind.vector_bytes / kind.tokens_per_vector
    if isinstance(kind, SlidingStates):
        return kind.vector_bytes
    return evaluated(row_arithmetic(kind, settings))


def row_arithmetic(
    kind: FullAttention | SlidingAttention | LatentAttention, settings: KvSettings
) -> Arithmetic:
    """The bytes of one token in one layer on one GPU, where each token has a row of its own."""
    if not isinstance(kind, LatentAttention):
        heads = heads_per_gpu(kind.kv_heads, settings.tensor_parallel)
        formula, quantities = settings.kv_format.head_arithmetic(kind.key_dim, kind.value_dim)
        return "{KV heads per GPU} x " + formula, [heads, *quantities]
    kept = (settings.indexed_format if kind.is_sparse else None) or settings.kv_format
    row, quantities = kept.latent_arithmetic(kind.latent_dim, kind.rope_dim)
    if settings.padded_latent:
        row = f"ceil(({row}) / {_LATENT_ROW_BYTES}) x {_LATENT_ROW_BYTES}"
    if kind.index_dim:
        row, quantities = row + " + {indexer}", [*quantities, index_bytes(kind)]
    return f"({row})", quantities


def index_bytes(kind: LatentAttention) -> int:
    """Bytes of a token's key in one layer's indexer; 0 without an indexer."""
    return kind.index_dim + INDEX_SCALE_BYTES if kind.index_dim else 0


def heads_per_gpu(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads per GPU of a tensor-parallel group.

    Raises:
        SizingError: neither number is a multiple of the other; vLLM refuses this.
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
    """Bytes of one request's state in one layer on one GPU; tensor parallelism splits the state."""
    return evaluated(state_arithmetic(kind, settings))


def state_arithmetic(kind: Recurrent, settings: KvSettings) -> Arithmetic:
    """The bytes of one request's state in one layer on one GPU."""
    quantities = [kind.conv_elements, kind.state_elements, kind.state_bytes_per_element]
    elements = "{convolution elements}"
    if settings.draft_tokens:
        elements = "({convolution elements} + {channels} x {draft tokens})"
        quantities[1:1] = [kind.conv_channels, settings.draft_tokens]
    formula = f"({elements} x {_CONVOLUTION_BYTES} + {{state elements}} x {{bytes of each}})"
    return formula + " / {TP}", [*quantities, settings.tensor_parallel]


def default_block_tokens(kinds: Sequence[Layers], settings: KvSettings) -> int:
    """Tokens per block: as stated, otherwise the choice of these layers' attention kernels."""
    if settings.block_tokens is not None:
        return settings.block_tokens
    if any(isinstance(part.kind, CompressedAttention) for part in kinds):
        return _COMPRESSED_BLOCK_TOKENS if _has_states(kinds) else _CHOSEN_BLOCK_TOKENS
    latent = any(isinstance(part.kind, LatentAttention) for part in kinds)
    return _LATENT_BLOCK_TOKENS if latent and not settings.padded_latent else _BLOCK_TOKENS


def _has_states(kinds: Sequence[Layers]) -> bool:
    return any(isinstance(part.kind, SlidingStates) for part in kinds)


def shared_page(kinds: Sequence[Layers], settings: KvSettings) -> tuple[float, list[int]] | None:
    """The common page size in bytes, and the tokens per block of each kind; None if there is none.

    If a smaller page divides the largest, its block gets more tokens; otherwise it is padded. A
    page of latent vectors cannot be padded, nor can a page with an indexer's keys.
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
    """Tokens of a block whose page can hold the largest recurrent state.

    Without recurrent states, the default block size.
    """
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
# window and the tokens in flight where it slides, one state where it is recurrent. In prefill a
# whole step's tokens are in flight, in decode one a step: blocks that leave the window are freed.
#
# Source: vllm/v1/core/kv_cache_utils.py and vllm/v1/kv_cache_interface.py (0.32), whose outcomes
# are recorded in tests/fixtures/kvlayout; guide 2.2, 7.1.


# Kinds of which a request keeps every token.
_GROWING = (FullAttention, LatentAttention, CompressedAttention)
# Kinds that differ by less than half in their number of layers share one group size.
_SIMILAR_COUNTS = 1.5


class LayerGroup(Struct, frozen=True):
    """Layers of one kind in the pool, divided into `groups` groups of the layout's common size.

    `layers` is the number in one pipeline stage. `token_bytes` is per token and layer on one GPU; 0
    for a recurrent state.
    """

    kind: LayerKind
    layers: int
    groups: int
    block_tokens: int
    token_bytes: float


BLOCKS = "max(floor({available KV cache:GiB} / ({page: B} x {layers per group})), 0)"
"""Blocks that fit, including the null block that vLLM keeps for itself."""
SERVED = "({blocks} - {more blocks in prefill}) / {blocks in decode}"
"""Requests that run at once, one of them in prefill."""


class KvLayout(Struct, frozen=True, dict=True):
    """How one GPU's KV memory is divided into blocks.

    `block_bytes` is one block of the pool on one GPU: `group_layers` pages of `page_bytes`.
    `token_bytes` is one more token of context. It excludes sliding windows and states, unless the
    model has nothing else.
    """

    groups: tuple[LayerGroup, ...]
    group_layers: int
    page_bytes: float
    settings: KvSettings

    @property
    def block_bytes(self) -> float:
        """Bytes of a block on one GPU."""
        return self.page_bytes * self.group_layers

    @property
    def token_bytes(self) -> float:
        """Bytes of one more token of context on one GPU."""
        growing = [g for g in self.groups if isinstance(g.kind, _GROWING)]
        kept = growing or [g for g in self.groups if isinstance(g.kind, SlidingAttention)]
        return sum(group.layers * group.token_bytes for group in kept)

    def blocks(self, available_bytes: float) -> int:
        """Number of blocks that fit, including the null block that vLLM keeps for itself."""
        return int(compiled(BLOCKS)(available_bytes, self.page_bytes, self.group_layers))

    @cached_property
    def request_formula(self) -> str:
        """Most blocks that a request can occupy, in prefill, with `request_quantities`."""
        return " + ".join(_group_formula(group, self.settings) for group in self.groups)

    @cached_property
    def decode_formula(self) -> str:
        """Blocks of a request in decode, with its `request_quantities`."""
        return " + ".join(
            _group_formula(group, self.settings, decodes=True) for group in self.groups
        )

    @property
    def has_windows(self) -> bool:
        """Whether a request in decode frees blocks that it needed in prefill."""
        return self.decode_formula != self.request_formula

    def request_quantities(self, formula: str, context_tokens: int) -> tuple[int, ...]:
        tokens = {
            "context": context_tokens,
            "tokens in flight": self.settings.in_flight_tokens,
            "decoded in flight": self.settings.decode_tokens,
        }
        return tuple(tokens[name] for name in names_of(formula))

    def request_blocks(self, context_tokens: int) -> int:
        """Most KV blocks that a request of this length can occupy."""
        return int(self._evaluated(self.request_formula, context_tokens))

    def decode_blocks(self, context_tokens: int) -> float:
        """Mean KV blocks of a request of this length while it decodes."""
        return self._evaluated(self.decode_formula, context_tokens)

    def _evaluated(self, formula: str, context_tokens: int) -> float:
        return compiled(formula)(*self.request_quantities(formula, context_tokens))

    def request_bytes(self, context_tokens: int) -> float:
        """Most bytes that a request of this length can occupy on one GPU."""
        return self.request_blocks(context_tokens) * self.block_bytes

    def concurrency(self, available_bytes: float, context_tokens: int) -> float:
        """How many requests of this length fit at once, all in prefill: vLLM's start-up figure."""
        return self.blocks(available_bytes) / self.request_blocks(context_tokens)

    def held(self, available_bytes: float, context_tokens: int) -> float:
        """How many requests of this length run at once: one in prefill, the others in decode.

        vLLM admits a request when its blocks in prefill are free. Without windows, this is the
        start-up figure.
        """
        blocks, prefill = self.blocks(available_bytes), self.request_blocks(context_tokens)
        if not self.has_windows:
            return blocks / prefill
        decode = self.decode_blocks(context_tokens)
        return max(compiled(SERVED)(blocks, prefill - decode, decode), blocks / prefill)

    def tokens_of_blocks(self, available_bytes: float) -> int:
        """The tokens that vLLM before 0.20.2 logs as "GPU KV cache size".

        They are the tokens of the blocks that fit, divided by the number of groups. For models with
        several kinds of layers this is not the capacity. Newer versions log requests times their
        length.
        """
        groups = sum(group.groups for group in self.groups)
        block = min(group.block_tokens for group in self.groups)
        parallel = self.settings.decode_context_parallel
        return self.blocks(available_bytes) // groups * block * parallel


def _group_formula(group: LayerGroup, settings: KvSettings, *, decodes: bool = False) -> str:
    """Most blocks that a request can occupy in these groups; in decode, its mean blocks."""
    kind, tokens = group.kind, group.block_tokens
    if isinstance(kind, _GROWING):
        need = f"ceil({{context}} / {tokens * settings.decode_context_parallel})"
    elif isinstance(kind, SlidingStates) and not kind.window_tokens:
        need = "1"
    elif isinstance(kind, SlidingAttention | SlidingStates):
        held = f"min({kind.window_tokens} - 1 + {{tokens in flight}}, {{context}})"
        # A window rarely starts where a block does: one block more.
        need = f"(ceil({held} / {tokens}) + 1)"
        if decodes:
            held = f"({kind.window_tokens} - 2 + {{decoded in flight}})"
            need = f"min({held} / {tokens} + 1, ceil({{context}} / {tokens}))"
    else:
        need = f"{settings.state_blocks}"
    return f"{group.groups} x {need}"


def kv_layout(layers: Sequence[Layers], settings: KvSettings) -> KvLayout:
    """The cache layout of a model under these settings.

    Groups are those of the whole model, and each pipeline stage has a share of every group. The
    largest stage is used, because the smallest number of blocks limits all stages.

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
        LayerGroup(
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
    """The layout of compressed attention, with pages of several sizes side by side in a block.

    A block has as many pages as the widest group.

    Raises:
        SizingError: vLLM does not accept this KV cache format for compressed attention.
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
    # Those are rings, and windows if no other layers are dealt out.
    narrow = [
        isinstance(bucket.kind, SlidingStates) and not (bucket.kind.window_tokens and repeats)
        for bucket in buckets
    ]
    splits = [ceil(b.deepest / repeats) if repeats and b in dealt else 1 for b in buckets]
    widest_bytes = max(
        sum(
            ceil(count / (bucket.layers if is_narrow else split)) * page
            for page, count in bucket.pages.items()
        )
        for bucket, split, is_narrow in zip(buckets, splits, narrow, strict=True)
    )
    groups: list[LayerGroup] = []
    block_bytes = 0
    for bucket, split, is_narrow in zip(buckets, splits, narrow, strict=True):
        if is_narrow:
            split = max(split, ceil(bucket.layers / max(widest_bytes // max(bucket.pages), 1)))
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
        groups.append(LayerGroup(bucket.kind, stage, split, bucket.block_tokens, layer_bytes))
    return KvLayout(tuple(groups), 1, block_bytes, settings)


_COMPRESSED_FORMATS = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")


class _Bucket(Struct, frozen=True):
    """Layers whose blocks cover the same tokens: the number of layers by page bytes."""

    kind: LayerKind
    block_tokens: int
    pages: Mapping[int, int]

    @property
    def layers(self) -> int:
        """Number of layers of all page sizes."""
        return sum(self.pages.values())

    @property
    def deepest(self) -> int:
        """Largest number of layers with the same page size."""
        return max(self.pages.values())


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
    """The group size, at least `fewest`, that pads the counts least; the largest if several do."""
    sizes = range(fewest, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _with_plain_ends(layers: Sequence[Layers], settings: KvSettings) -> KvSettings:
    """The settings for a format that keeps the first and last layers in 16 bit.

    `plain_layers` becomes 0 for models with recurrent layers, for which vLLM keeps none in 16 bit.

    Raises:
        SizingError: the model has sliding layers. Counts of layers do not show which are first and
            last.
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
    """Whether every layer stores the same tokens of a request, so that all layers form one
    group."""
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
    group = LayerGroup(layers[0].kind, sum(counts), 1, block, held / sum(counts))
    return KvLayout((group,), sum(counts), block * held / sum(counts), settings)


def _merged(layers: Sequence[Layers], settings: KvSettings) -> list[Layers]:
    """The layers, combining kinds that are equal on one GPU after the heads are split."""
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
    """Layers per group: the smallest count of any kind; if counts are similar, the largest."""
    fewest, most = min(counts), max(counts)
    return most if most < fewest * _SIMILAR_COUNTS else fewest


def _unified(layers: Sequence[Layers]) -> list[Layers]:
    """The layers, with sliding layers replaced by full ones, which store the whole context.

    Raises:
        SizingError: some layers cannot store the whole context; vLLM would not start.
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
