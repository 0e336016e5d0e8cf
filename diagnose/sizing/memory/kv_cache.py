"""The KV cache as vLLM lays it out: pages, groups of layers, blocks, requests. Pure.

vLLM keeps one pool of blocks. Layers are put into groups of equally many layers of one kind; a
block of the pool is one page in each layer of a group, so a block of any group weighs the same.
A request takes blocks of every group: for its whole context where attention is full, for the
window and the tokens in flight where it slides, one state where it is recurrent.

Source: vllm/v1/core/kv_cache_utils.py and vllm/v1/kv_cache_interface.py (0.32), whose outcomes
are recorded in tests/fixtures/kvlayout; guide 2.2, 7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kneewatch.diagnose.catalogue.layers import (
    FullAttention,
    LatentAttention,
    LayerKind,
    Layers,
    Recurrent,
    SlidingAttention,
)
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.kv_pages import (
    KvSettings,
    default_block_tokens,
    heads_per_gpu,
    kv_element_bytes,
    shared_page,
    state_bytes,
    token_bytes,
)

__all__ = [
    "Group",
    "KvLayout",
    "KvSettings",
    "group_size",
    "heads_per_gpu",
    "kv_element_bytes",
    "kv_layout",
    "state_bytes",
    "token_bytes",
]

# Kinds that differ by less than half in their number of layers share one group size.
_SIMILAR_COUNTS = 1.5


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one kind as the pool sees them: `groups` groups of the layout's common size.

    `layers` are those of one pipeline stage. `token_bytes` is what one token of one layer takes
    on one GPU, 0 for a recurrent state.
    """

    kind: LayerKind
    layers: int
    groups: int
    block_tokens: int
    token_bytes: float


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How one GPU's KV memory is cut into blocks.

    `block_bytes` is what one block of the pool takes on one GPU (`group_layers` pages of
    `page_bytes`); `token_bytes` is what one more token of context takes, sliding windows and
    states left out unless the model has nothing else.
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
        """Bytes that one more token of context takes on one GPU."""
        growing = [g for g in self.groups if isinstance(g.kind, FullAttention | LatentAttention)]
        kept = growing or [g for g in self.groups if isinstance(g.kind, SlidingAttention)]
        return sum(group.layers * group.token_bytes for group in kept)

    def blocks(self, available_bytes: float) -> int:
        """Blocks that fit; vLLM keeps one of them for itself (the null block)."""
        return max(int(available_bytes // self.block_bytes), 0)

    def request_blocks(self, context_tokens: int) -> int:
        """Blocks that a request of that length takes at most."""
        return sum(
            group.groups * _blocks_of(group, context_tokens, self.settings) for group in self.groups
        )

    def request_bytes(self, context_tokens: int) -> float:
        """Bytes on one GPU that a request of that length takes at most."""
        return self.request_blocks(context_tokens) * self.block_bytes

    def concurrency(self, available_bytes: float, context_tokens: int) -> float:
        """Requests of that length that fit at once, as vLLM's start-up line counts them."""
        return self.blocks(available_bytes) / self.request_blocks(context_tokens)

    def logged_tokens(
        self, available_bytes: float, context_tokens: int, *, by_context: bool
    ) -> int:
        """The tokens that vLLM's line "GPU KV cache size" shows.

        `by_context` is the meaning since 0.20.2, requests times their length; before, blocks
        divided over the groups, which for models of several kinds is no capacity.
        """
        if by_context:
            return int(self.concurrency(available_bytes, context_tokens) * context_tokens)
        groups = sum(group.groups for group in self.groups)
        block = min(group.block_tokens for group in self.groups)
        parallel = self.settings.decode_context_parallel
        return self.blocks(available_bytes) // groups * block * parallel


def _blocks_of(group: Group, context_tokens: int, settings: KvSettings) -> int:
    kind = group.kind
    if isinstance(kind, Recurrent):
        return settings.state_blocks
    if isinstance(kind, SlidingAttention):
        held = min(kind.window_tokens - 1 + settings.in_flight_tokens, context_tokens)
        # A window rarely starts where a block does: one block more.
        return ceil(held / group.block_tokens) + 1
    return ceil(context_tokens / (group.block_tokens * settings.decode_context_parallel))


def kv_layout(layers: Sequence[Layers], settings: KvSettings) -> KvLayout:
    """The layout of a model's cache under those settings.

    Groups are those of the whole model; a pipeline stage holds a share of each. The largest stage
    is laid out, as the smallest number of blocks binds them all.

    Raises:
        SizingError: the model keeps nothing, its heads cannot be split, or vLLM has no layout for
            its kinds of layers.
    """
    if not layers:
        raise SizingError("the model has no layer that keeps a KV cache", name="model")
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


def _alike(layers: Sequence[Layers]) -> bool:
    """True where every layer needs the same tokens of a request: they form one group."""
    if all(isinstance(part.kind, FullAttention | LatentAttention) for part in layers):
        return True
    windows = [
        part.kind.window_tokens for part in layers if isinstance(part.kind, SlidingAttention)
    ]
    return len(windows) == len(layers) and len(set(windows)) == 1


def _one_group(layers: Sequence[Layers], settings: KvSettings) -> KvLayout:
    block = default_block_tokens(layers, settings)
    counts = [ceil(part.count / settings.pipeline_parallel) for part in layers]
    held = sum(
        count * token_bytes(part.kind, settings) for part, count in zip(layers, counts, strict=True)
    )
    group = Group(layers[0].kind, sum(counts), 1, block, held / sum(counts))
    return KvLayout((group,), sum(counts), block * held / sum(counts), settings)


def _merged(layers: Sequence[Layers], settings: KvSettings) -> list[Layers]:
    """Layers that one GPU cannot tell apart as one kind: heads are split over the GPUs."""
    found: dict[tuple[object, ...], Layers] = {}
    for part in layers:
        kind = part.kind
        key: tuple[object, ...] = (kind,)
        if isinstance(kind, FullAttention | SlidingAttention):
            heads = heads_per_gpu(kind.kv_heads, settings.tensor_parallel)
            window = kind.window_tokens if isinstance(kind, SlidingAttention) else None
            key = (heads, kind.key_dim, kind.value_dim, window)
        known = found.get(key)
        found[key] = Layers(known.kind, known.count + part.count) if known else part
    return list(found.values())


def group_size(counts: Sequence[int]) -> int:
    """Layers a group: the fewest of any kind, or the most where the kinds are about as many."""
    fewest, most = min(counts), max(counts)
    return most if most < fewest * _SIMILAR_COUNTS else fewest


def _unified(layers: Sequence[Layers]) -> list[Layers]:
    """Sliding layers beside full ones as full ones: they keep the whole context.

    Raises:
        SizingError: some layers cannot keep a whole context, where vLLM refuses to start.
    """
    found = [
        Layers(
            FullAttention(part.kind.kv_heads, part.kind.key_dim, part.kind.value_dim), part.count
        )
        if isinstance(part.kind, SlidingAttention)
        else part
        for part in layers
    ]
    full = any(isinstance(part.kind, FullAttention | LatentAttention) for part in layers)
    latent = any(isinstance(part.kind, LatentAttention) for part in layers)
    # Among plain full layers vLLM looks for the one window, before it would do without.
    windows = {
        part.kind.window_tokens for part in layers if isinstance(part.kind, SlidingAttention)
    }
    if not full or not _alike(found) or (len(windows) > 1 and not latent):
        raise SizingError(
            "vLLM cannot give every layer the whole context where layers are recurrent, have "
            "windows of several lengths, or all have windows",
            name="hybrid_pool",
            choices=("true",),
        )
    return found
