"""What vLLM does by default, by version and GPU, where it changes the memory. Pure.

Source: vLLM 0.32 (vllm/engine/arg_utils.py, vllm/v1/core/kv_cache_utils.py,
vllm/v1/kv_cache_interface.py, vllm/platforms/interface.py), its release notes, and start-up logs
of 0.6 to 0.31.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from kneewatch.diagnose.catalogue.gpus import GIB, Gpu
from kneewatch.diagnose.sizing.inputs import SizingError

Version = tuple[int, int, int]
LATEST: Version = (0, 33, 0)
# Utilization 0.92 instead of 0.90: 0.20.0 no longer lists 0.92 as a setting of the user's.
_UTILIZATION_092: Version = (0, 20, 0)
# The graph estimate is taken from the KV budget: some 0.3 to 1.5 GiB already with 0.20.0.
GRAPHS_TAKEN: Version = (0, 20, 0)
# "GPU KV cache size" became concurrency x context in place of blocks // groups x block.
_CAPACITY_BY_CONTEXT: Version = (0, 20, 2)
# Sliding layers reserve for two batches in flight (async scheduling, issue 49878).
_TWO_BATCHES: Version = (0, 26, 0)
# Layers of several kinds share one pool; before, sliding layers kept the whole context.
_HYBRID_POOL: Version = (0, 9, 2)
# V1 raised max_num_seqs to 1024 and the token budget on large GPUs.
_LARGE_BATCHES: Version = (0, 8, 3)
# GPUs of 160 GiB and more got a budget of 16,384 tokens; seen in 0.32, not in 0.20.
_LARGER_BUDGET: Version = (0, 26, 0)
# Prefixes of models with recurrent layers are cached by default (pull request 50991): a request
# keeps the state of its last whole block beside the present one.
_HYBRID_PREFIXES: Version = (0, 28, 0)
# Blocks of latent attention beside recurrent layers are whole multiples of 128 tokens, of 64 with
# 0.11; read in 0.32, the version between that brought it is not known.
_LATENT_HYBRID_128: Version = (0, 32, 0)
# V0 0.7 padded a latent entry of 576 elements to 640 (256-byte rows).
_PADDED_LATENT: tuple[Version, Version] = ((0, 7, 0), (0, 8, 0))
V1: Version = (0, 9, 0)


def parse_version(text: str) -> Version:
    """(major, minor, patch) of a vLLM version such as "0.11.0", "v0.20.1rc2" or "0.19".

    Raises:
        SizingError: no version can be read from it.
    """
    found = re.match(r"\s*v?(\d{1,3})\.(\d{1,4})(?:\.(\d{1,4}))?", text)
    if found is None:
        raise SizingError(f"vLLM version {text!r} is not of the form 0.20.1", name="vllm_version")
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch or 0)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a version of vLLM takes where the user says nothing."""

    version: Version
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    async_batches: bool
    hybrid_pool: bool
    capacity_by_context: bool
    padded_latent: bool
    state_blocks: int
    latent_hybrid_tokens: int

    def batches_in_flight(self, pipeline_parallel: int) -> int:
        """Steps whose tokens are not settled yet: one more than stages where steps overlap."""
        return pipeline_parallel + 1 if self.async_batches else 1


def defaults(version: Version, gpu: Gpu | None) -> Defaults:
    """The server's defaults on that GPU; without a GPU, those of an 80 GB H100."""
    if gpu is None:
        return _defaults(version, 80 * GIB, ampere=False)
    return _defaults(version, gpu.memory_bytes, ampere=gpu.id.startswith("a100"))


@lru_cache(maxsize=1024)
def _defaults(version: Version, memory_bytes: int, *, ampere: bool) -> Defaults:
    large = memory_bytes >= 70 * GIB and not ampere and version >= _LARGE_BATCHES
    budget = 8192 if large else 2048
    if memory_bytes >= 160 * GIB and version >= _LARGER_BUDGET:
        budget = 16384
    first, last = _PADDED_LATENT
    return Defaults(
        version=version,
        gpu_memory_utilization=0.92 if version >= _UTILIZATION_092 else 0.90,
        max_num_seqs=1024 if large else 256,
        max_num_batched_tokens=budget,
        async_batches=version >= _TWO_BATCHES,
        hybrid_pool=version >= _HYBRID_POOL,
        capacity_by_context=version >= _CAPACITY_BY_CONTEXT,
        padded_latent=first <= version < last,
        state_blocks=2 if version >= _HYBRID_PREFIXES else 1,
        latent_hybrid_tokens=128 if version >= _LATENT_HYBRID_128 else 64,
    )
