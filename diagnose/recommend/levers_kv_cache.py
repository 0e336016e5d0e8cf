"""KV cache levers: its size and dtype, prefix reuse, and transfer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf

from kneewatch.collector.engines.engine_kind import KV_DTYPE, MEMORY_SHARE, OFFLOAD_GIB
from kneewatch.collector.names.vllm_metrics import VLLM_PREFIX
from kneewatch.collector.names.vllm_resolver import CONFIG
from kneewatch.diagnose.catalogue.gpu_specs import GIB, LINK_BYTES_PER_S, Gpu
from kneewatch.diagnose.causes.common_conditions import GIANT_FROM
from kneewatch.diagnose.causes.prefix_cache import WAS_SHARED_FROM
from kneewatch.diagnose.deployment.vllm_flags import FP8_KV_SINCE
from kneewatch.diagnose.recommend.advice import Advice, Value
from kneewatch.diagnose.recommend.context import (
    MORE_CACHE_FROM,
    SETTLE_WORDS,
    LeverContext,
    advice,
    in_flight,
    maybe_closed_words,
    rounded_up,
)
from kneewatch.diagnose.recommend.demand import KV_AIM_RATIO, KV_TARGET_RATIO
from kneewatch.diagnose.recommend.ledger import PREFIX_ROUTING
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_launch,
    computed_costs,
    computed_memory,
    latencies,
    predicted,
    present,
)
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of
from kneewatch.diagnose.sizing.memory.launch import GRAPHS_TAKEN
from kneewatch.diagnose.sizing.speed.roofline_inputs import on_gpu
from kneewatch.rules.formatting import duration, percent

FEW_TIMES = 2.0
"""Factor by which to enlarge the cache if the size of the load is unknown."""

LEAST_TIMES = 1.25
"""Smallest factor by which to enlarge the cache: an engine that preempts needs more in any case."""


GIANT_MARGIN = 1.05
"""A prompt's share is to be below the bound of its cause, not at it."""

MOST_TIMES = 8.0
"""Largest factor in one change: ITL grows with the batch, so measure it before growing further."""


def _times_needed(context: LeverContext, aim_ratio: float = KV_AIM_RATIO) -> float:
    """KV cache that the load needs at this mean usage, divided by the present cache."""
    tokens, capacity = context.demand.tokens, context.server.capacity_tokens
    if context.cause == "prefix_churn" or not tokens or not capacity:
        return FEW_TIMES
    peak = context.demand.peak_tokens(context.demand.requests)
    # Giant prompts block the queue until they take a smaller share of the cache.
    blocks = context.cause == "kv_pressure" and not context.get("preemption_per_s")
    giant = blocks * GIANT_MARGIN * context.get("prompt_p99_kv_share_ratio") / GIANT_FROM
    return min(max(tokens / capacity / aim_ratio, peak / capacity, giant, LEAST_TIMES), MOST_TIMES)


def kv_blocks(context: LeverContext) -> Advice | None:
    """A higher --num-gpu-blocks-override, if it is set: it alone then decides the cache size."""
    now = context.server.blocks_override
    if now is None or now < 2:
        return None
    most, fit_check = _most_blocks(context)
    needed = rounded_up(ceil((now - 1) * _times_needed(context)) + 1)
    least = ceil((now - 1) * _times_needed(context, KV_TARGET_RATIO)) + 1
    blocks = context.steady("kv-blocks", needed, least=least)
    blocks = blocks if most is None else min(blocks, most)
    return _unfixed(
        context,
        "kv-blocks",
        ("--num-gpu-blocks-override", now, blocks),
        (blocks - 1) / (now - 1),
        f"--num-gpu-blocks-override limits the KV cache to {now} blocks, however much memory is "
        f"free; {blocks} blocks hold",
        checks=[
            fit_check
            or "compare with the available KV cache memory in vLLM's start-up log, or remove the "
            "override and let vLLM size the cache"
        ],
        risk="" if fit_check else "vLLM runs out of memory at start if the blocks do not fit.",
    )


def _unfixed(
    context: LeverContext,
    lever_id: str,
    change: tuple[str, int, int],
    times: float,
    words: str,
    *,
    checks: Sequence[str],
    risk: str,
) -> Advice | None:
    """A higher value of the flag that fixes the cache, which then holds so many times the tokens;
    None if the load needs no more, or no more fits."""
    capacity = context.server.capacity_tokens
    if not capacity or _times_needed(context) <= 1 or times < MORE_CACHE_FROM:
        return None
    return _larger(
        context,
        lever_id,
        [change],
        f"{words} {times:.1f}x as many tokens.{maybe_closed_words(context.demand)}",
        After(capacity_tokens=capacity * times),
        checks=checks,
        risk=risk,
    )


def _larger(
    context: LeverContext,
    lever_id: str,
    changes: Sequence[tuple[str, Value, Value]],
    summary: str,
    after: After,
    *,
    checks: Sequence[str] = (),
    risk: str = "",
) -> Advice:
    """A recommendation of a larger KV cache, with what it changes."""
    numbers = predicted(context, after)
    return advice(
        context,
        lever_id,
        changes,
        summary,
        before={**present(context), **in_flight(context.demand)},
        predicted=numbers,
        checks=checks,
        risk=risk,
        verify=kv_verify_steps(context, numbers),
    )


def _most_blocks(context: LeverContext) -> tuple[int | None, str]:
    """The most blocks that fit into GPU memory (None if unknown), and the check to recommend."""
    server = context.server
    free_bytes = server.kv_memory_bytes or _available_bytes(context)
    if server.layout is None or free_bytes is None:
        return None, ""
    most = server.layout.blocks(free_bytes)
    return most, f"computed: at most {most} blocks fit in {free_bytes / GIB:.1f} GiB per GPU"


def _available_bytes(context: LeverContext) -> float | None:
    """The memory that the launch leaves for the KV cache on each GPU, at least; None if unknown."""
    launch = context.server.sized_launch
    sized = None if launch is None or launch.gpu is None else computed_memory(launch)
    return None if sized is None else sized.available_bytes.low


def kv_memory_bytes(context: LeverContext) -> Advice | None:
    """A higher --kv-cache-memory-bytes, if it is set and no block override is."""
    server = context.server
    if server.kv_memory_bytes is None or server.blocks_override is not None:
        return None
    most, now = _available_bytes(context), int(server.kv_memory_bytes)
    needed = min(now * _times_needed(context), inf if most is None else most) / GIB * 4
    quarters = ceil(needed - 1e-3) if most is None else floor(needed)
    least = now * _times_needed(context, KV_TARGET_RATIO)
    to = context.steady("kv-memory-bytes", quarters * GIB // 4, least=min(least, most or inf))
    return _unfixed(
        context,
        "kv-memory-bytes",
        ("--kv-cache-memory-bytes", now, to),
        to / now,
        "--kv-cache-memory-bytes fixes the size of the KV cache, so vLLM ignores "
        f"{MEMORY_SHARE}: {to / GIB:.2f} GiB hold",
        checks=[
            "compare with the value that vLLM's start-up log suggests to use the GPU fully"
            if most is None
            else f"computed: {most / GIB:.1f} GiB per GPU are available for the KV cache"
        ],
        risk="vLLM runs out of memory at start if the bytes do not fit." * (most is None),
    )


def kv_verify_steps(context: LeverContext, numbers: dict[str, float]) -> list[str]:
    """Signals that a larger KV cache changes, and the value that each should reach."""
    if context.cause == "prefix_churn":
        return [f"prefix_hit_ratio rises {SETTLE_WORDS}, after the cache has warmed up"]
    usage = numbers.get("kv_usage_ratio")
    lines: list[str] = []
    if "kv_blocks" in numbers:
        lines.append(f"num_gpu_blocks in {VLLM_PREFIX}{CONFIG} is about {numbers['kv_blocks']:.0f}")
    if usage is not None and usage < 1:
        lines.append(f"kv_usage_avg_ratio moves to about {usage:.2f} {SETTLE_WORDS}")
    if numbers.get("preemption_per_s") == 0:
        lines.append(f"preemption_per_s and waiting_by_capacity fall to 0 {SETTLE_WORDS}")
    else:
        lines.append(f"preemption_per_s falls {SETTLE_WORDS}")
    return lines


# --- FP8 KV cache and memory utilization (guide 7.1, 7.4, 9.3) ------------------------------------


UTILIZATION_MOST = 0.95
"""Highest utilization that the guide accepts: above, a spike can run out of memory (9.3)."""

UTILIZATION_LEAST = 0.01
"""No server starts with less; a lower value on the page is an error."""

UTILIZATION_STEP = 0.02
"""Recommended step if the GPU is unknown."""

GRAPHS_BYTES = 2 * GIB
"""CUDA graphs and contexts, which vLLM before 0.20 allocates outside its share of memory."""

RESERVE_BYTES = GIB
FP8_CAPABILITY = 8.9
QUALITY = (
    "test answer quality on your longest contexts with the FP8 cache before it serves users; "
    "use calibrated scales if the checkpoint has them"
)


def kv_fp8(context: LeverContext) -> Advice | None:
    """An FP8 KV cache, which holds about twice the tokens in the same memory."""
    server, gpu = context.server, context.server.stated.gpu
    if server.kv_is_quantized or not server.capacity_tokens or not _fp8_kv_runs(context, gpu):
        return None
    blocks = _fp8_blocks(context)
    capacity = 2.0 * server.capacity_tokens
    if blocks is not None and server.blocks and server.blocks > 1:
        capacity = server.capacity_tokens * (blocks - 1) / (server.blocks - 1)
    dtype = server.launch.kv_cache_dtype if "cache_dtype" in server.config else None
    changes: list[tuple[str, Value, Value]] = [(KV_DTYPE, dtype, "fp8")]
    if server.blocks_override is not None and blocks is not None:
        # The override counts blocks, not bytes: left alone, the cache would shrink instead.
        changes.append(("--num-gpu-blocks-override", server.blocks_override, blocks))
    if capacity <= server.capacity_tokens:
        return None
    checks = [QUALITY]
    if gpu is None:
        checks.append(
            "confirm that the GPU supports FP8 (compute capability 8.9, MI300, or newer); older "
            "GPUs and CPUs do not"
        )
    fp8_launch = changed_launch(context, kv_cache_dtype="fp8")
    return _larger(
        context,
        "kv-fp8",
        changes,
        f"In FP8 the same memory holds {'' if server.layout else 'up to '}"
        f"{capacity / server.capacity_tokens:.1f}x as many KV tokens.",
        After(capacity_tokens=capacity, launch=fp8_launch, other_steps=True),
        checks=checks,
    )


def _fp8_kv_runs(context: LeverContext, gpu: Gpu | None) -> bool:
    version = context.server.version
    if version is not None and version < FP8_KV_SINCE:
        return False
    if gpu is None:
        return True
    if gpu.fp8_flop_per_s is None:
        return False
    capability = gpu.compute_capability
    return gpu.vendor != "nvidia" or capability is None or float(capability) >= FP8_CAPABILITY


def _fp8_blocks(context: LeverContext) -> int | None:
    """FP8 blocks that fit into the same memory: from the model's layout, or else twice as many."""
    server = context.server
    if server.blocks is None:
        return None
    fp8_launch = changed_launch(context, kv_cache_dtype="fp8")
    if fp8_launch is None or server.layout is None:
        return 2 * server.blocks
    layout = kv_layout_of(fp8_launch)
    ratio = server.layout.block_bytes / layout.block_bytes
    tokens = max(1, floor(context.demand.held_tokens or 1))
    # FP8 blocks can hold a different number of tokens, so compare by requests held.
    ratio *= server.layout.request_blocks(tokens) / layout.request_blocks(tokens)
    return floor(server.blocks * ratio)


def gpu_memory_utilization(context: LeverContext) -> Advice | None:
    """A larger share of the GPU's memory, if this flag decides the cache size."""
    server, now = context.server, context.server.launch.gpu_memory_utilization
    fixed = server.kv_memory_bytes is not None or server.blocks_override is not None
    if now is None or now < UTILIZATION_LEAST or fixed or not server.capacity_tokens:
        return None
    gpu = server.stated.gpu
    to = _utilization_to(context, now, gpu)
    if to is None or to - now < 0.01 - 1e-9:
        return None
    # The KV cache is at most the whole share, so this ratio is a lower bound of the gain.
    ratio, least = to / now, True
    if gpu is not None and server.layout is not None and server.blocks:
        gained = floor((to - now) * gpu.memory_bytes / server.layout.block_bytes)
        ratio, least = (server.blocks + gained - 1) / (server.blocks - 1), False
    return _larger(
        context,
        "gpu-memory-utilization",
        [(MEMORY_SHARE, now, to)],
        f"vLLM takes {percent(to)} of each GPU's memory instead of {percent(now)}, and the "
        f"difference goes to the KV cache: {'at least ' * least}{ratio:.2f}x the blocks.",
        After(capacity_tokens=server.capacity_tokens * ratio),
    )


def _utilization_to(context: LeverContext, now: float, gpu: Gpu | None) -> float | None:
    """The highest utilization that leaves enough memory for what vLLM does not count.

    If the GPU is unknown, one step higher than now. None if the utilization is already at the
    guide's maximum.
    """
    if now >= UTILIZATION_MOST:
        return None
    if gpu is None:
        return round(min(now + UTILIZATION_STEP, UTILIZATION_MOST), 2)
    version = context.server.version
    outside = RESERVE_BYTES + (
        0 if version is not None and version >= GRAPHS_TAKEN else GRAPHS_BYTES
    )
    most = min(UTILIZATION_MOST, 1 - outside / gpu.memory_bytes)
    return floor(most * 100 + 1e-9) / 100


LONG_CONTEXT_TOKENS = 8000.0
"""Mean context of a running request from which host memory for evicted KV blocks is considered."""
OFFLOADING_SINCE = (0, 12, 0)
"""The first vLLM that offloads KV blocks so."""


def host_cache(context: LeverContext) -> Advice | None:
    """Host memory for evicted KV blocks, for long contexts without latency targets (batch work).

    None where a block is computed again in less time than it is reloaded.
    """
    server, held_tokens = context.server, context.demand.held_tokens
    launch = server.sized_launch
    evicts = context.get("preemption_per_s") or context.cause == "prefix_churn"
    if not evicts or context.facts.targets.are_set or (held_tokens or 0.0) < LONG_CONTEXT_TOKENS:
        return None
    if launch is None or launch.gpu is None or server.layout is None or not server.capacity_tokens:
        return None
    too_old = server.version is None or server.version < OFFLOADING_SINCE
    if too_old or launch.kv_offloading_bytes or server.launch.prefix_caching is False:
        return None
    costs = computed_costs(launch)
    if costs is None:
        return None
    tokens, gpu = held_tokens or 0.0, launch.gpu
    reload_s = server.layout.request_bytes(floor(tokens)) / gpu.host_bytes_per_s
    again_s = tokens * costs.body_flop_per_token / (costs.flop_per_s * on_gpu(gpu).mfu_ratio)
    if reload_s >= again_s:
        return None
    # As much again as all ranks hold.
    ranks = launch.parallel.tensor * launch.parallel.pipeline
    size_gib = rounded_up(server.layout.token_bytes * server.capacity_tokens * ranks / GIB)
    return advice(
        context,
        "kv-offloading",
        [(OFFLOAD_GIB, None, size_gib)],
        f"Host memory keeps evicted KV blocks: a context of {tokens:,.0f} tokens is reloaded in "
        f"{duration(reload_s)} over PCIe or NVLink-C2C, and computed again in "
        f"{duration(again_s)} or more. No more requests run at once.",
        before={**present(context), "context_tokens": tokens, "kv_recompute_s": again_s},
        predicted={"kv_reload_s": reload_s},
        checks=[f"confirm that the host has {size_gib} GiB of free memory"],
    )


# --- Prefix reuse and KV transfer (guide 6.5, 7.2, 7.3, 7.7) --------------------------------------


FABRIC = "infiniband-ndr"
"""The link that transfers between nodes are compared with: 400 Gbit/s per GPU (guide 5.6)."""


def prompt_order(context: LeverContext) -> Advice | None:
    """Put the shared part of prompts in front again, if prompts used to share a prefix."""
    quiet, hits = context.facts.baseline.get("prefix_hit_ratio"), context.get("prefix_hit_ratio")
    if quiet is None or quiet < WAS_SHARED_FROM or hits >= quiet:
        return None
    left = (1 - quiet) / (1 - hits)
    predicted = _prefill_numbers(context, quiet, left=left)
    return advice(
        context,
        "prompt-order",
        [("prompt", None, "with the shared part first")],
        f"The baseline of the prefix-cache hit ratio is {percent(quiet)}. The first token that "
        "differs ends the match: put dates, ids and names after the shared prefix.",
        before=_prefill_numbers(context, hits),
        predicted=predicted,
        verify=[
            f"prefix_hit_ratio returns to about {quiet:.2f} and computed_prompt_tokens_per_s falls "
            f"to {percent(left)} of its present value {SETTLE_WORDS}"
        ],
    )


def sticky_routing(context: LeverContext) -> Advice | None:
    """Routing by prefix, so that requests with the same prefix go to the same replica."""
    if not context.server.stated.replicas or context.server.replicas < 2:
        return None
    hits, quiet = context.get("prefix_hit_ratio"), context.facts.baseline.get("prefix_hit_ratio")
    better = quiet is not None and hits < quiet < 1
    left = (1 - quiet) / (1 - hits) if quiet is not None and better else 1.0
    predicted = _prefill_numbers(context, quiet, left=left) if better else {}
    return advice(
        context,
        PREFIX_ROUTING,
        [("router", "any replica", "by prefix")],
        f"Each of the {context.server.replicas} replicas computes and caches every prefix. Route "
        "by prefix or session, so that only one replica computes and caches each prefix."
        + (
            f" The baseline of the hit ratio is {percent(quiet)}."
            if quiet is not None and better
            else ""
        ),
        before={**_prefill_numbers(context, hits), "replicas": context.server.replicas},
        predicted=predicted,
    )


def _prefill_numbers(
    context: LeverContext, hits: float | None, *, left: float = 1.0
) -> dict[str, float]:
    """Hit ratio, prefill work and TTFT if only the share `left` of the prefill work remains.

    TTFT comes from the roofline if model and GPU are stated. Otherwise it is the measured TTFT
    minus the saved prefill time. Both leave the queue as it is, although it would shrink.
    """
    numbers = {} if hits is None else {"prefix_hit_ratio": hits}
    values = context.facts.values
    for key in ("computed_prompt_tokens_per_s", "prefill_mean_s"):
        value = values.get(key)
        if value is not None:
            numbers[key] = value * left
    ttft_s, prefill_s = values.get("ttft_mean_s"), values.get("prefill_mean_s")
    if ttft_s is None or prefill_s is None:
        return numbers
    numbers["ttft_s"] = max(ttft_s - prefill_s * (1 - left), 0.0)
    prediction = None
    if left < 1:
        saved = 1 - (1 - context.demand.saved_ratio) * left
        prediction = latencies(context, After(saved_ratio=saved))
    if prediction is not None:
        numbers["ttft_s"] = min(prediction.ttft_s, ttft_s)
    return numbers


def transfer_path(context: LeverContext) -> Advice | None:
    """What to inspect if KV transfers are slow, and how long the fabric should need."""
    mean_s = context.facts.values.get("kv_transfer_mean_s")
    if mean_s is None:
        return None
    quiet_s = context.facts.baseline.get("kv_transfer_mean_s")
    # KV bytes of a mean prompt on one GPU.
    layout, fabric_s, fabric_words = context.server.layout, None, ""
    gbit_per_s = LINK_BYTES_PER_S[FABRIC] * 8 / 1e9
    moved_bytes = layout.token_bytes * context.get("prompt_tokens_mean") if layout else 0.0
    if moved_bytes:
        fabric_s = moved_bytes / LINK_BYTES_PER_S[FABRIC]
        fabric_words = (
            f" One prompt's KV of {moved_bytes / GIB:.2f} GiB per GPU should take "
            f"{duration(fabric_s)} at {gbit_per_s:.0f} Gbit/s per GPU."
        )
    aim_s = max((value for value in (quiet_s, fabric_s) if value), default=None)
    verify = f"kv_transfer_mean_s falls {SETTLE_WORDS}"
    if aim_s is not None and aim_s < mean_s:
        verify = f"kv_transfer_mean_s falls towards {duration(aim_s)} {SETTLE_WORDS}"
    checks: Sequence[str] = (
        "confirm that transfers use RDMA, not TCP: the connector logs this at start",
        "read errors, pause frames and link speed of the NICs and of PCIe on both sides",
        "confirm that GPU and NIC are on the same PCIe switch",
    )
    return advice(
        context,
        "kv-transfer-path",
        [],
        f"KV transfers are slow: inspect the data path, not the GPU.{fabric_words}",
        before={"kv_transfer_mean_s": mean_s, "moved_bytes": moved_bytes},
        predicted={}
        if fabric_s is None
        else {"kv_transfer_at_link_rate_s": fabric_s, "link_gbit_per_s": gbit_per_s},
        checks=checks,
        verify=[verify],
    )
