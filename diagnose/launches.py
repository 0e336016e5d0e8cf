"""Whether an engine was started as before, by the labels of cache_config_info. Pure."""

from __future__ import annotations

from collections.abc import Mapping

MEASURED = frozenset({"num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"})
"""Labels of the configuration that vLLM measures at each start: alike is the same."""

ALIKE_RATIO = 0.05
"""A curve's steps are further apart: blocks that differ by less do not move a knee."""


def same_launch(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two configurations are the same but for what is measured at a start."""
    return one.keys() == other.keys() and all(
        value == other[label] or (label in MEASURED and _alike(value, other[label]))
        for label, value in one.items()
    )


def _alike(one: str, other: str) -> bool:
    try:
        first, second = float(one), float(other)
    except ValueError:
        return False
    return abs(first - second) <= ALIKE_RATIO * min(abs(first), abs(second))
