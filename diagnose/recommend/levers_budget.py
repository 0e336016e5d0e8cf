"""A KV cache whose size the user fixed, in blocks or in bytes: guide 7.4, 9.3. Pure."""

from __future__ import annotations

from math import ceil, floor

from kneewatch.diagnose.catalogue.gpus import GIB
from kneewatch.diagnose.recommend.demand import KV_AIM_RATIO
from kneewatch.diagnose.recommend.prediction import After, predicted, present
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS, Scene, advice, rounded_up
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.budget import memory

FEW_TIMES = 2.0
"""How much more is asked for where the load's size is not known."""

LEAST_TIMES = 1.25
"""How much more at least: what preempts needs more, whatever its lengths say."""


def _times_needed(scene: Scene) -> float:
    """How many times the present cache the load needs, at the usage that is aimed at."""
    tokens, capacity = scene.demand.tokens, scene.server.capacity_tokens
    if scene.cause == "prefix_churn" or not tokens or not capacity:
        return FEW_TIMES
    peak = scene.demand.peak_tokens(scene.demand.requests)
    return max(tokens / capacity / KV_AIM_RATIO, peak / capacity, LEAST_TIMES)


def kv_blocks(scene: Scene) -> Recommendation | None:
    """A higher --num-gpu-blocks-override, where one is set: it alone decides the cache's size."""
    server, times = scene.server, _times_needed(scene)
    now = server.blocks_override
    if now is None or now < 2 or not server.capacity_tokens or times <= 1:
        return None
    usable = ceil((now - 1) * times)
    wanted = rounded_up(usable + 1)
    most, known = _most_blocks(scene)
    blocks = wanted if most is None else min(wanted, most)
    if blocks <= now:
        return None
    capacity = server.capacity_tokens * (blocks - 1) / (now - 1)
    told = predicted(scene, After(capacity_tokens=capacity))
    return advice(
        scene,
        "kv-blocks",
        [("--num-gpu-blocks-override", now, blocks)],
        f"An override caps the KV cache at {now} blocks, whatever memory is "
        f"free; {blocks} blocks hold {told['kv_capacity_ratio']:.1f} times as much.",
        before=present(scene),
        predicted=told,
        checks=[
            known
            or "that memory for them is free: the start-up log says how many bytes the KV cache "
            "may take; or drop the flag, and vLLM takes what it finds"
        ],
        risk="" if known else "Too many blocks for the memory end in an OOM at start.",
        verify=room_shows(scene, told),
        guide=("7.4", "9.3"),
    )


def _most_blocks(scene: Scene) -> tuple[int | None, str]:
    """Blocks that the memory holds, by the sizing math, and in words; None where not known."""
    server = scene.server
    if server.layout is None or server.setup is None:
        return None, ""
    free_bytes = server.kv_memory_bytes
    if free_bytes is None:
        if server.setup.gpu is None:
            return None, ""
        try:
            free_bytes = memory(server.setup).available_bytes.low
        except SizingError:
            return None, ""
    most = server.layout.blocks(free_bytes)
    return most, f"by the sizing math {most} blocks fit into {free_bytes / GIB:.1f} GiB a GPU"


def kv_memory_bytes(scene: Scene) -> Recommendation | None:
    """A higher --kv-cache-memory-bytes, where it is set and no override of the blocks is."""
    server, times = scene.server, _times_needed(scene)
    if server.kv_memory_bytes is None or server.blocks_override is not None or times <= 1:
        return None
    if not server.capacity_tokens:
        return None
    wanted, known = server.kv_memory_bytes * times, ""
    if server.setup is not None and server.setup.gpu is not None:
        try:
            most = memory(server.setup).available_bytes.low
        except SizingError:
            return None
        wanted, known = min(wanted, most), f"by the sizing math {most / GIB:.1f} GiB a GPU are free"
    to_bytes = floor(wanted / GIB * 4 + 0.999) * GIB // 4
    if known:
        to_bytes = floor(wanted / GIB * 4) * GIB // 4
    if to_bytes <= server.kv_memory_bytes:
        return None
    ratio = to_bytes / server.kv_memory_bytes
    told = predicted(scene, After(capacity_tokens=server.capacity_tokens * ratio))
    return advice(
        scene,
        "kv-memory-bytes",
        [("--kv-cache-memory-bytes", int(server.kv_memory_bytes), int(to_bytes))],
        f"The KV cache's bytes are fixed, and the memory utilization is not used: "
        f"{to_bytes / GIB:.2f} GiB hold {ratio:.1f} times as much.",
        before=present(scene),
        predicted=told,
        checks=[known or "the start-up log's own figure for what would use the GPU fully"],
        risk="" if known else "More bytes than are free end in an OOM at start.",
        verify=room_shows(scene, told),
        guide=("7.4", "9.3"),
    )


def room_shows(scene: Scene, told: dict[str, float]) -> list[str]:
    """The signals that more room for KV moves, and where to: what they are now is in `before`."""
    if scene.cause == "prefix_churn":
        return [f"prefix_hit_ratio rises {SETTLE_WORDS}, once the cache is warm"]
    usage = told.get("kv_usage_ratio")
    lines: list[str] = []
    if "kv_blocks" in told:
        lines.append(f"num_gpu_blocks in cache_config_info is about {told['kv_blocks']:.0f}")
    if usage is not None and usage < 1:
        lines.append(f"kv_usage_avg_ratio goes to about {usage:.2f} {SETTLE_WORDS}")
    if told.get("preemption_per_s") == 0:
        lines.append(f"preemption_per_s and waiting_by_capacity go to 0 {SETTLE_WORDS}")
    else:
        lines.append(f"preemption_per_s falls {SETTLE_WORDS}")
    return lines
