"""More KV cache, or less asked of it: guide 7.1, 7.4, 9.3. Pure."""

from __future__ import annotations

from math import floor

from kneewatch.diagnose.catalogue.gpus import GIB, Gpu
from kneewatch.diagnose.recommend.flags import FP8_KV_SINCE
from kneewatch.diagnose.recommend.levers_budget import room_shows
from kneewatch.diagnose.recommend.prediction import After, changed_setup, predicted, present
from kneewatch.diagnose.recommend.recommendation import Recommendation, Value
from kneewatch.diagnose.recommend.scene import Scene, advice
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of
from kneewatch.diagnose.sizing.memory.vllm_defaults import GRAPHS_TAKEN

UTILIZATION_MOST = 0.95
"""Above it the guide sees a risk of running out of memory at a spike (9.3)."""

UTILIZATION_LEAST = 0.01
"""No server starts with less: the page is wrong."""

UTILIZATION_STEP = 0.02
"""What is dared where neither GPU nor model is known."""

GRAPHS_BYTES = 2 * GIB
"""CUDA graphs and contexts that vLLM before 0.20 takes outside its share."""

RESERVE_BYTES = GIB
FP8_CAPABILITY = 8.9
QUALITY = (
    "validate answers on your longest contexts with the FP8 cache before it serves users; "
    "use calibrated scales where the checkpoint has them"
)


def kv_fp8(scene: Scene) -> Recommendation | None:
    """An FP8 KV cache: as many bytes hold twice the tokens."""
    server, gpu = scene.server, scene.server.stated.gpu
    if server.kv_is_fp8 or not server.capacity_tokens or not _fp8_kv_runs(scene, gpu):
        return None
    blocks = _fp8_blocks(scene)
    capacity = 2.0 * server.capacity_tokens
    if blocks is not None and server.blocks and server.blocks > 1:
        capacity = server.capacity_tokens * (blocks - 1) / (server.blocks - 1)
    dtype = server.kv_cache_dtype if "cache_dtype" in server.config else None
    changes: list[tuple[str, Value, Value]] = [("--kv-cache-dtype", dtype, "fp8")]
    if server.blocks_override is not None and blocks is not None:
        # The override counts blocks, not bytes: left alone, the cache would shrink instead.
        changes.append(("--num-gpu-blocks-override", server.blocks_override, blocks))
    if capacity <= server.capacity_tokens:
        return None
    told = predicted(
        scene,
        After(capacity_tokens=capacity, setup=changed_setup(scene, kv_cache_dtype="fp8")),
    )
    checks = [QUALITY]
    if gpu is None:
        checks.append(
            "that the GPU computes FP8 (compute capability 8.9 or MI300 and later); older ones "
            "and CPUs do not"
        )
    return advice(
        scene,
        "kv-fp8",
        changes,
        f"The same memory holds {'' if server.layout else 'up to '}"
        f"{capacity / server.capacity_tokens:.1f} times the KV blocks in "
        "FP8.",
        before=present(scene),
        predicted=told,
        checks=checks,
        risk="Quality can suffer on long contexts.",
        verify=room_shows(scene, told),
        guide=("4.2", "7.4", "8.5"),
    )


def _fp8_kv_runs(scene: Scene, gpu: Gpu | None) -> bool:
    version = scene.server.version
    if version is not None and version < FP8_KV_SINCE:
        return False
    if gpu is None:
        return True
    if gpu.fp8_flop_per_s is None:
        return False
    capability = gpu.compute_capability
    return gpu.vendor != "nvidia" or capability is None or float(capability) >= FP8_CAPABILITY


def _fp8_blocks(scene: Scene) -> int | None:
    """Blocks of the same memory in FP8: by the model's layout, else twice as many."""
    server = scene.server
    if server.blocks is None:
        return None
    then = changed_setup(scene, kv_cache_dtype="fp8")
    if then is None or server.layout is None:
        return 2 * server.blocks
    layout = kv_layout_of(then)
    ratio = server.layout.block_bytes / layout.block_bytes
    tokens = max(1, floor(scene.demand.held_tokens or 1))
    # Blocks of another size hold other numbers of tokens: what counts is requests held.
    ratio *= server.layout.request_blocks(tokens) / layout.request_blocks(tokens)
    return floor(server.blocks * ratio)


def gpu_memory_utilization(scene: Scene) -> Recommendation | None:
    """A higher --gpu-memory-utilization, where that is what decides the cache's size."""
    server, now = scene.server, scene.server.gpu_memory_utilization
    fixed = server.kv_memory_bytes is not None or server.blocks_override is not None
    if now is None or now < UTILIZATION_LEAST or fixed or not server.capacity_tokens:
        return None
    gpu = server.stated.gpu
    to = _utilization_to(scene, now, gpu)
    if to is None or to - now < 0.01 - 1e-9:
        return None
    # At most all of the share is KV cache, so this is the least that more of it gives.
    ratio, least = to / now, True
    if gpu is not None and server.layout is not None and server.blocks:
        gained = floor((to - now) * gpu.memory_bytes / server.layout.block_bytes)
        ratio, least = (server.blocks + gained - 1) / (server.blocks - 1), False
    told = predicted(scene, After(capacity_tokens=server.capacity_tokens * ratio))
    words = "at least " if least else ""
    return advice(
        scene,
        "gpu-memory-utilization",
        [("--gpu-memory-utilization", now, to)],
        f"vLLM takes {100 * (to - now):.0f} % more of each GPU, all of it for the KV cache: "
        f"{words}{ratio:.2f} times the blocks.",
        before=present(scene),
        predicted=told,
        checks=["that nothing else uses the GPU, and that the start-up log shows no OOM retry"],
        risk="Less room for spikes outside vLLM's share; 0.95 is the guide's limit.",
        verify=room_shows(scene, told),
        guide=("7.4", "9.3"),
    )


def _utilization_to(scene: Scene, now: float, gpu: Gpu | None) -> float | None:
    """The utilization that leaves room for what vLLM does not count."""
    if now >= UTILIZATION_MOST:
        return None
    if gpu is None:
        return round(min(now + UTILIZATION_STEP, UTILIZATION_MOST), 2)
    version = scene.server.version
    outside = RESERVE_BYTES + (
        0 if version is not None and version >= GRAPHS_TAKEN else GRAPHS_BYTES
    )
    most = min(UTILIZATION_MOST, 1 - outside / gpu.memory_bytes)
    return floor(most * 100 + 1e-9) / 100
