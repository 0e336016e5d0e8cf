"""KV cache levers: its size and dtype, prefix reuse, and transfer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor

from kneewatch.diagnose.catalogue.gpu_specs import GIB, Gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.causes.prefix_cache import WAS_SHARED_FROM
from kneewatch.diagnose.deployment.vllm_flags import FP8_KV_SINCE
from kneewatch.diagnose.recommend.context import SETTLE_WORDS, Scene, advice, rounded_up
from kneewatch.diagnose.recommend.demand import KV_AIM_RATIO
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_setup,
    costs_of,
    latencies,
    predicted,
    present,
)
from kneewatch.diagnose.recommend.recommendation import Recommendation, Value
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of, memory
from kneewatch.diagnose.sizing.memory.kv_reuse import LINK_BYTES_PER_S, transfer_s
from kneewatch.diagnose.sizing.memory.launch_setup import GRAPHS_TAKEN
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT

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


# --- More KV cache, or less asked of it: guide 7.1, 7.4, 9.3 --------------------------------------


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


# --- Prefixes found again, and KV that comes from elsewhere: guide 6.5, 7.2, 7.3, 7.7 -------------


FABRIC = "infiniband-ndr"
"""What a transfer between nodes is held against: 400 Gbit/s for each GPU (guide 5.6)."""


def prompt_order(scene: Scene) -> Recommendation | None:
    """The shared part of prompts in front again, where prompts did share one."""
    quiet, hits = scene.facts.baseline.get("prefix_hit_ratio"), scene.get("prefix_hit_ratio")
    if quiet is None or quiet < WAS_SHARED_FROM or hits >= quiet:
        return None
    left = (1 - quiet) / (1 - hits)
    return advice(
        scene,
        "prompt-order",
        [("prompt", None, "the shared part first")],
        f"{quiet:.0%} of prompt tokens hit in quiet times, fewer do now. A token that differs "
        "ends the match: what changes (a date, an id, a name) belongs behind what is shared."
        + _money_words(scene, left),
        before=_prefill_numbers(scene, hits),
        predicted=_prefill_numbers(scene, quiet, left=left),
        checks=["what was deployed when it began: a template, a gateway, a tokenizer"],
        risk="None for the server; the model sees its prompt in another order.",
        verify=[
            f"prefix_hit_ratio returns to about {quiet:.2f} and computed_prompt_tokens_per_s falls "
            f"to {left:.0%} of what it is {SETTLE_WORDS}"
        ],
        guide=("7.2", "7.3"),
    )


def sticky_routing(scene: Scene) -> Recommendation | None:
    """Requests of one prefix to one replica, where there are several."""
    if not scene.server.stated.replicas or scene.server.replicas < 2:
        return None
    hits, quiet = scene.get("prefix_hit_ratio"), scene.facts.baseline.get("prefix_hit_ratio")
    better = quiet is not None and hits < quiet < 1
    left = (1 - quiet) / (1 - hits) if quiet is not None and better else 1.0
    return advice(
        scene,
        "prefix-routing",
        [("router", "any replica", "by prefix")],
        f"Spread over {scene.server.replicas} replicas, each prefix is computed and kept on all of "
        "them; routed by prefix (or by session) it is found again, and takes room once."
        + (f" With the {quiet:.0%} of quiet times:{_money_words(scene, left)}" if better else ""),
        before=_prefill_numbers(scene, hits),
        predicted=_prefill_numbers(scene, quiet, left=left) if better else {},
        checks=["that the router falls back on load where one prefix is most of the traffic"],
        risk="A popular prefix makes its replica hot.",
        verify=[f"prefix_hit_ratio rises on every replica {SETTLE_WORDS}, running stays alike"],
        guide=("7.3", "9.3"),
    )


def _prefill_numbers(scene: Scene, hits: float | None, *, left: float = 1.0) -> dict[str, float]:
    """Hits, prefill work and first tokens, now or where `left` of that work remains.

    TTFT is the roofline's where model and GPU are stated, else what is measured less the prefill
    that is no longer done: both leave a queue that would shrink as it is.
    """
    numbers: dict[str, float] = {} if hits is None else {"prefix_hit_ratio": hits}
    values = scene.facts.values
    for key in ("computed_prompt_tokens_per_s", "prefill_mean_s"):
        value = values.get(key)
        if value is not None:
            numbers[key] = value * left
    ttft_s, prefill_s = values.get("ttft_mean_s"), values.get("prefill_mean_s")
    if ttft_s is None or prefill_s is None:
        return numbers
    numbers["ttft_s"] = max(ttft_s - prefill_s * (1 - left), 0.0)
    yielded = None
    if left < 1:
        saved = 1 - (1 - scene.demand.saved_ratio) * left
        yielded = latencies(scene, After(saved_ratio=saved))
    if yielded is not None:
        made, scale = yielded
        numbers["ttft_s"] = min(made.ttft_s * scale, ttft_s)
    return numbers


def _money_words(scene: Scene, left: float) -> str:
    """The GPU time that prompts computed once too often take, and its price where it is known.

    FLOP of the tokens over the reached share of the peak (guide 3.2, 8.4).
    """
    setup, hourly = scene.server.setup, scene.server.usd_per_hour
    again_per_s = scene.get("computed_prompt_tokens_per_s") * (1 - left)
    if setup is None or setup.gpu is None or again_per_s <= 0:
        return ""
    try:
        known = costs_of(setup)
    except SizingError:
        return ""
    reached_per_s = known.flop_per_s * DEFAULT.mfu_ratio
    share = again_per_s * known.body_flop_per_token / reached_per_s
    if not 0 < share <= 1:
        return ""
    dollars = "" if hourly is None else f", {hourly * share:.2f} USD an hour a replica"
    return f" It would free {100 * share:.0f} % of the GPUs' time{dollars}."


def transfer_path(scene: Scene) -> Recommendation | None:
    """Where to look when KV comes too slowly, with what the fabric should take."""
    mean_s = scene.facts.values.get("kv_transfer_mean_s")
    if mean_s is None:
        return None
    quiet_s, numbers = (
        scene.facts.baseline.get("kv_transfer_mean_s"),
        {"kv_transfer_mean_s": mean_s},
    )
    wanted_s, told = _fabric_s(scene), ""
    if wanted_s is not None:
        told = (
            f" A prompt's KV of {_moved_bytes(scene) / GIB:.2f} GiB a GPU takes "
            f"{1000 * wanted_s:.1f} ms at {LINK_BYTES_PER_S[FABRIC] * 8 / 1e9:.0f} Gbit/s a GPU."
        )
    aim_s = max((value for value in (quiet_s, wanted_s) if value), default=None)
    verify = f"kv_transfer_mean_s falls {SETTLE_WORDS}"
    if aim_s is not None and aim_s < mean_s:
        verify = f"kv_transfer_mean_s falls towards {aim_s:.2g} s {SETTLE_WORDS}"
    checks: Sequence[str] = (
        "that transfers go over RDMA and not TCP: the connector's start-up log says which",
        "errors, pause frames and the rate of the NICs and of PCIe on both sides",
        "that GPU and NIC sit on the same PCIe switch",
    )
    return advice(
        scene,
        "kv-transfer-path",
        [],
        f"KV transfers are slow: it is the data path, not the GPU.{told}",
        before=numbers,
        checks=checks,
        risk="Where the path cannot be mended, prefill and decode together are faster.",
        verify=[verify],
        guide=("6.5", "7.7"),
    )


def _moved_bytes(scene: Scene) -> float:
    """KV bytes of a mean prompt on one GPU; 0 where model or lengths are not known."""
    layout, tokens = scene.server.layout, scene.get("prompt_tokens_mean")
    return 0.0 if layout is None else tokens * layout.token_bytes


def _fabric_s(scene: Scene) -> float | None:
    moved_bytes = _moved_bytes(scene)
    if not moved_bytes:
        return None
    return transfer_s(moved_bytes=moved_bytes, bandwidth_bytes_per_s=LINK_BYTES_PER_S[FABRIC])
