"""KV cache formats: bytes that one token takes in one head or in a latent vector. Pure.

Source: vllm/v1/kv_cache_interface.py and `customize_spec` of the attention backends (0.32).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.gpu_specs import Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Arithmetic, evaluated

_BYTE_BITS = 8
# Head size that the bytes per element of a format are computed for.
_USUAL_HEAD_DIM = 128
# Head sizes of FlashInfer's kernels (vllm/v1/attention/backends/flashinfer.py).
_FLASHINFER_HEADS = frozenset({64, 128, 256, 512})
_NO_GPU = "(?!)"


class KvFormat(Struct, frozen=True, kw_only=True):
    """One dtype that vLLM takes for its KV cache.

    - `key_bits`, `value_bits`: bits per element, including the scales of its group.
    - `key_bytes`, `value_bytes`: scales and norms of a whole head; `latent_bytes`: of a latent
      vector.
    - `rope_bytes`: bytes per rotary element, in formats of sparse latent attention in which these
      have another width.
    - `plain_layers`: this many layers at either end stay in 16 bit, unless the model has recurrent
      layers.
    """

    id: str
    key_bits: float
    value_bits: float
    key_bytes: int = 0
    value_bytes: int = 0
    latent_bytes: int = 0
    rope_bytes: int | None = None
    plain_layers: int = 0
    plain: str = _NO_GPU
    latent: str = _NO_GPU
    sparse: str = _NO_GPU
    flashinfer: str = _NO_GPU

    @property
    def element_bytes(self) -> float:
        """Bytes of one element in heads of 128 elements, including scales."""
        return self.head_bytes(_USUAL_HEAD_DIM, _USUAL_HEAD_DIM) / (2 * _USUAL_HEAD_DIM)

    @property
    def label(self) -> str:
        """The dtype as text; `auto` is shown with its width."""
        return f"auto ({self.key_bits:g}-bit)" if self.id == "auto" else self.id

    @property
    def is_quantized(self) -> bool:
        """Whether an element takes fewer than 16 bits, so that answer quality must be tested."""
        return self.element_bytes < 2

    def head_bytes(self, key_dim: int, value_dim: int) -> float:
        """Bytes of one token in one KV head: key plus value, each in whole bytes, even in total."""
        return evaluated(self.head_arithmetic(key_dim, value_dim))

    def head_arithmetic(self, key_dim: int, value_dim: int) -> Arithmetic:
        """The bytes of one token in one KV head, including the format's scales."""
        keys, values = self.key_bits / _BYTE_BITS, self.value_bits / _BYTE_BITS
        scaled = [key_dim, keys, self.key_bytes, value_dim, values, self.value_bytes]
        key, value = key_dim * keys + self.key_bytes, value_dim * values + self.value_bytes
        if keys == values and not (self.key_bytes or key % 1 or (key + value) % 2):
            formula = "({key elements} + {value elements}) x {bytes of each}"
            return formula, [key_dim, value_dim, keys]
        whole = "ceil({key elements} x {bytes of a key}) + {key scales} + "
        whole += "ceil({value elements} x {bytes of a value}) + {value scales}"
        return f"ceil(({whole}) / 2) x 2", scaled

    def latent_arithmetic(self, latent_dim: int, rope_dim: int) -> Arithmetic:
        """The bytes of one token's latent vector."""
        element_bytes = self.key_bits / _BYTE_BITS
        rope_bytes = element_bytes if self.rope_bytes is None else self.rope_bytes
        row = "{latent elements} x {bytes of each} + {rope elements} x {bytes of a rope element}"
        quantities = [latent_dim, element_bytes, rope_dim, rope_bytes]
        if not self.latent_bytes:
            return row, quantities
        return row + " + {scales}", [*quantities, self.latent_bytes]


@cache
def _formats() -> Mapping[str, KvFormat]:
    rows = packaged_tables("diagnose.sizing.memory", "kv_formats.toml")
    return {name: KvFormat(id=name, **row) for name, row in rows.items()}


def kv_formats() -> Collection[KvFormat]:
    return _formats().values()


def kv_format(kv_cache_dtype: str) -> KvFormat:
    """The format for a dtype of the KV cache, as vLLM spells it.

    Raises:
        SizingError: the dtype is unknown; the choices are listed.
    """
    named = _formats().get(kv_cache_dtype.lower())
    if named is None:
        raise SizingError(
            f"unknown KV cache dtype {kv_cache_dtype!r}",
            name="kv_cache_dtype",
            choices=tuple(_formats()),
        )
    return named


def kernel_missing(
    kept: KvFormat, *, gpu: Gpu | None, attention: str, heads: Collection[int], flashinfer: bool
) -> str | None:
    """Why vLLM 0.32 has no kernel for this attention with such a cache; None if it has one.

    `attention` is plain, latent or sparse, `heads` are the sizes of its heads. `flashinfer`:
    whether FlashInfer's kernels support the model's attention.
    """
    pattern, words = getattr(kept, attention), _ATTENTION[attention]
    missing = f"vLLM has no kernel for {words}"
    missing += "" if kept.id == "auto" else f" with a KV cache in {kept.id}"
    if pattern == _NO_GPU:
        return missing
    capability = "" if gpu is None else gpu.compute_capability or gpu.vendor
    has_kernels = flashinfer and _FLASHINFER_HEADS.issuperset(heads)
    lacks = attention == "plain" and not has_kernels and re.match(kept.flashinfer, capability)
    if gpu is None or (re.match(pattern, capability) and not lacks):
        return None
    return f"{missing} on {gpu.name} (compute capability {capability})"


_ATTENTION = {
    "plain": "this model's attention",
    "latent": "latent attention",
    "sparse": "sparse latent attention",
}
