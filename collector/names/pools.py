"""One engine's own KV blocks where several share a page. Pure.

vLLM's front end adds up `num_gpu_blocks` over the data-parallel engines that it starts and writes
the sum on the row of each; `kv_cache_size_tokens` is one engine's. Of tensor-parallel ranks an
engine takes the smallest pool for all.

Source: vllm/v1/engine/core_client.py (`_apply_ready_response`) and vllm/v1/core/kv_cache_utils.py
(`min_num_blocks`) of 0.32; older ones add up in vllm/v1/engine/utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kneewatch.collector.names.binding import EngineBinding

CONFIG = "cache_config_info"
BLOCKS = "num_gpu_blocks"


def own_pools(engines: Sequence[EngineBinding]) -> Iterator[EngineBinding]:
    """The engines of a page, each with its own KV blocks where their rows show the sum."""
    beside: dict[tuple[str, str], list[EngineBinding]] = {}
    for engine in engines:
        beside.setdefault((engine.key.model, engine.key.replica), []).append(engine)
    for engine in engines:
        group = beside[engine.key.model, engine.key.replica]
        own = [one for one in group if one.infos.get(CONFIG) and CONFIG not in one.shared]
        rows = [dict(one.infos[CONFIG][0].labels) for one in own]
        blocks = own_blocks(rows) if len(rows) == len(group) else None
        yield engine if blocks is None else _with_blocks(engine, blocks)


def _with_blocks(engine: EngineBinding, blocks: str) -> EngineBinding:
    rows = tuple(
        replace(
            row,
            labels=tuple(
                (label, blocks if label == BLOCKS else value) for label, value in row.labels
            ),
        )
        for row in engine.infos[CONFIG]
    )
    return replace(engine, infos={**engine.infos, CONFIG: rows})


def own_blocks(rows: Sequence[Mapping[str, str]]) -> str | None:
    """The blocks of each engine by the rows of cache_config_info of all that share a page: the mean
    where the rows show their sum. None where the rows are each engine's own."""
    shown = {row.get(BLOCKS, "") for row in rows}
    if len(rows) < 2 or len(shown) > 1:
        return None
    total, fixed = _count(rows[0], BLOCKS), _count(rows[0], f"{BLOCKS}_override")
    block, size = _count(rows[0], "block_size"), _count(rows[0], "kv_cache_size_tokens")
    if not total or total == fixed or (block and size == total * block):
        return None
    each = total // len(rows)
    return str(each) if each else None


def _count(row: Mapping[str, str], label: str) -> int | None:
    text = row.get(label, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
