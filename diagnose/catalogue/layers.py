"""What a model's layers keep for a token or a request, by kind. Pure.

A layer that mixes tokens is one of these kinds; layers that mix none (the MLP and expert layers
of a hybrid that counts them apart) are not listed. Sizes are of the whole model, before tensor
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Keys and values of every token (MHA, GQA, MQA)."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class SlidingAttention:
    """Keys and values of the last `window_tokens` tokens."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One compressed vector a token (MLA), the same on every tensor-parallel rank.

    `index_dim` is the key size of a sparse-attention indexer; 0 where there is none.
    """

    latent_dim: int
    rope_dim: int
    index_dim: int = 0


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state of constant size a request: a convolution's tail and the recurrence's own.

    `conv_elements` are kept in the cache's dtype unless the model says otherwise,
    `state_elements` in `state_bytes_per_element`.
    """

    conv_elements: int
    state_elements: int
    state_bytes_per_element: float


LayerKind = FullAttention | SlidingAttention | LatentAttention | Recurrent


@dataclass(frozen=True, slots=True)
class Layers:
    """So many layers of one kind."""

    kind: LayerKind
    count: int
