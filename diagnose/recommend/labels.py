"""The labels of cache_config_info as numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.diagnose.recommend.launch import LARGEST

SIZE = "kv_cache_size_tokens"
_UNSET = ("", "None", "none", "null")


def capacity_tokens(size: float | None, block: int | None, blocks: int | None) -> float | None:
    """Tokens that requests can hold: all but the null block's."""
    if size is None and block and blocks:
        size = float(block * blocks)
    if size is None or blocks is None:
        return size
    if size > LARGEST:
        return None
    return size * (blocks - 1) / blocks if blocks > 1 else None


def longest(config: Mapping[str, str], size: float | None) -> int | None:
    """max_model_len, which the page shows as the capacity over the concurrency at it."""
    concurrency = number(config, "kv_cache_max_concurrency")
    if not size or not concurrency or size / concurrency > LARGEST:
        return None
    return round(size / concurrency)


def number(config: Mapping[str, str], label: str) -> float | None:
    """A label as a number above 0 that counts something; None where it is none."""
    text = config.get(label, "")
    if text in _UNSET:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= LARGEST else None


def count(config: Mapping[str, str], label: str) -> int | None:
    """The same as a whole number, 1 or more."""
    value = number(config, label)
    return None if value is None or value < 1 else int(value)


def truth(config: Mapping[str, str], label: str) -> bool | None:
    """A label as a truth; None where it says neither."""
    return {"True": True, "False": False}.get(config.get(label, ""))
