"""KV cache formats: bytes that one token takes in one head or in a latent vector. Pure.

Source: vllm/v1/kv_cache_interface.py and `customize_spec` of the attention backends (0.32).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.gpu_specs import Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Arithmetic, evaluated

_BYTE_BITS = 8
# Head size that the bytes per element of a format are computed for.
_USUAL_HEAD_DIM = 128
_AMPERE, _BLACKWELL = 8.0, 10


class KvFormat(Struct, frozen=True, kw_only=True):
    """One dtype that vLLM takes for its KV cache.

    - `key_bits`, `value_bits`: bits per element, including the scales of its group.
    - `key_bytes`, `value_bytes`: scales and norms of a whole head.
    - `latent_bytes`: scales of a latent vector; None if vLLM refuses the format for latent
      attention.
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
    latent_bytes: int | None = None
    rope_bytes: int | None = None
    plain_layers: int = 0

    @property
    def element_bytes(self) -> float:
        """Bytes of one element in heads of 128 elements, including scales."""
        return self.head_bytes(_USUAL_HEAD_DIM, _USUAL_HEAD_DIM) / (2 * _USUAL_HEAD_DIM)

    @property
    def label(self) -> str:
        """The dtype as text; `auto` is shown with its width."""
        return "auto (16-bit)" if self.id == "auto" else self.id

    @property
    def needs_indexer(self) -> bool:
        """Whether only the kernels of sparse latent attention support this format."""
        return self.rope_bytes is not None

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
        """The bytes of one token's latent vector.

        Raises:
            SizingError: vLLM has no kernel for latent attention in this format.
        """
        if self.latent_bytes is None:
            raise SizingError(
                f"vLLM has no kernel for latent attention with a KV cache in {self.id}",
                name="kv_cache_dtype",
                choices=tuple(
                    kind.id for kind in _formats().values() if kind.latent_bytes is not None
                ),
            )
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


def kernel_missing(kind: KvFormat, gpu: Gpu) -> str | None:
    """Why no attention kernel of vLLM 0.32 supports the format on this GPU; None if one does.

    NVFP4 has kernels for NVIDIA GPUs from Ampere on. Its variants have kernels only for data-centre
    Blackwell.

    Source: vllm/v1/attention/backends/flashinfer.py and mla/flashmla_sparse.py (0.32).
    """
    if not kind.id.startswith("nvfp4"):
        return None
    if gpu.vendor != "nvidia":
        return f"{gpu.name} has no kernel for a {kind.id} KV cache"
    capability = float(gpu.compute_capability or 0)
    if kind.id != "nvfp4" and int(capability) != _BLACKWELL:
        return f"only data-centre Blackwell GPUs have a kernel for a {kind.id} KV cache"
    if capability < _AMPERE:
        return f"{gpu.name} is older than Ampere, the first with a kernel for {kind.id}"
    return None
