"""Which vLLM versions know a flag, and what they take by default. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kneewatch.diagnose.sizing.memory.vllm_defaults import Version


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of `vllm serve`: known from `since` on, and no longer from `until` on.

    `label` is its name in the labels of cache_config_info; a page that has it knows the flag.
    """

    since: Version
    until: Version | None = None
    label: str = ""


FLAGS: Mapping[str, Flag] = {
    "--kv-cache-dtype": Flag((0, 4, 0), label="cache_dtype"),
    "--gpu-memory-utilization": Flag((0, 1, 0), label="gpu_memory_utilization"),
    "--num-gpu-blocks-override": Flag((0, 4, 1), label="num_gpu_blocks_override"),
    "--kv-cache-memory-bytes": Flag((0, 11, 0), label="kv_cache_memory_bytes"),
    "--kv-offloading-size": Flag((0, 12, 0), label="kv_offloading_size"),
    "--enable-prefix-caching": Flag((0, 4, 0), label="enable_prefix_caching"),
    "--no-enable-prefix-caching": Flag((0, 6, 0), label="enable_prefix_caching"),
    "--enable-chunked-prefill": Flag((0, 4, 0)),
    "--no-enable-chunked-prefill": Flag((0, 6, 0)),
    "--long-prefill-token-threshold": Flag((0, 8, 0)),
    "--max-model-len": Flag((0, 1, 0)),
    "--max-num-batched-tokens": Flag((0, 1, 0)),
    "--max-num-seqs": Flag((0, 1, 0)),
    "--max-num-queued-reqs": Flag((0, 32, 0)),
    "--max-loras": Flag((0, 3, 0)),
    "--max-cpu-loras": Flag((0, 3, 0)),
    "--override-generation-config": Flag((0, 7, 0)),
    "--quantization": Flag((0, 2, 0)),
    "--speculative-config": Flag((0, 8, 3)),
    "--tensor-parallel-size": Flag((0, 1, 0)),
}
"""Source: vllm/engine/arg_utils.py of the releases, 0.33 the newest."""

CACHING_BY_DEFAULT: Version = (0, 9, 0)
"""Prefix caching and chunked prefill are on unless switched off: V1 only, from 0.9 on."""

FP8_KV_SINCE: Version = (0, 8, 3)
"""Older V1 engines took `--kv-cache-dtype fp8` and ignored or refused it (vLLM 14221)."""

FROM_LABELS: tuple[tuple[str, Version], ...] = (
    ("kv_cache_size_tokens", (0, 24, 0)),
    ("kv_cache_memory_bytes", (0, 11, 0)),
)
"""Labels of cache_config_info that came with a version: on the page, it is that or later."""


def oldest_version(config: Mapping[str, str]) -> Version | None:
    """The oldest vLLM that has these labels on its page; None where they say nothing."""
    return next((version for label, version in FROM_LABELS if label in config), None)


def knows(flag: str, *, version: Version | None, config: Mapping[str, str]) -> bool:
    """Whether the running version takes the flag; one that is no flag of vLLM's always passes.

    With no version known, only flags that are as old as anything in use pass, or those whose
    label is on the page.
    """
    if not flag.startswith("--"):
        return True
    known = FLAGS.get(flag.partition(".")[0])
    if known is None:
        return False
    if known.label and known.label in config:
        return True
    at = version or oldest_version(config) or (0, 6, 0)
    return known.since <= at and (known.until is None or at < known.until)
