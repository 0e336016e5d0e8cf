"""Replicas and the GPUs of each: guide 5.1, 8.3, 9.2. Pure."""

from __future__ import annotations

from math import ceil

from kneewatch.diagnose.recommend.prediction import (
    After,
    asked_tokens_per_s,
    changed_setup,
    predicted,
    present,
    resized_tokens,
)
from kneewatch.diagnose.recommend.recommendation import REPLICAS, Recommendation
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.sizing.fleet.fleet import SAFETY_DEFAULT
from kneewatch.diagnose.sizing.memory.weights import Parallel

DRAIN_S = 300.0
"""Within which more replicas must also work off the queue that stands."""

MOST_TENSOR_PARALLEL = 8
MOST_TIMES = 100.0
"""A server that serves next to nothing has another fault than too few copies."""


def more_replicas(scene: Scene) -> Recommendation | None:
    """More replicas: by KV tokens where the cache is short, else by requests a second."""
    server, ratio = scene.server, _load_ratio(scene)
    if ratio is None or ratio > MOST_TIMES:
        return None
    now = server.replicas
    total = max(now + 1, ceil(round(now * ratio * SAFETY_DEFAULT, 6)))
    told = predicted(scene, After(share_ratio=now / total, replicas=total))
    told["load_ratio"] = ratio * now / total
    hourly = server.usd_per_hour
    asked_per_s, made_per_s = asked_tokens_per_s(scene), scene.get("generation_tokens_per_s")
    if hourly is not None and "usd_per_million_tokens" not in told:
        if asked_per_s is not None:
            served_per_s = min(asked_per_s, made_per_s * total)
            told["usd_per_million_tokens"] = hourly * total / (served_per_s * 3600) * 1e6
        elif made_per_s:
            # The KV cache wanted bounds the tokens from above, so their price from below.
            most_per_s = min(now * made_per_s * max(ratio, 1.0), made_per_s * total)
            told["usd_per_million_tokens_at_least"] = hourly * total / (most_per_s * 3600) * 1e6
    assumed = "" if server.stated.replicas else " (this one counted alone: state --replicas)"
    return advice(
        scene,
        REPLICAS,
        [(REPLICAS, now, total)],
        f"The load is {ratio:.1f} times what {now} replica{'s' if now > 1 else ''} can hold"
        f"{assumed}; with the guide's safety factor of {SAFETY_DEFAULT:g} that takes {total}.",
        before=present(scene),
        predicted=told,
        cost_usd_per_hour=None if hourly is None else hourly * (total - now),
        checks=["that the router spreads the load, and keeps prefixes together where they repeat"],
        risk="A cold replica starts with an empty prefix cache.",
        verify=[
            f"waiting_by_capacity and preemption_per_s go to 0 on each replica {SETTLE_WORDS} once "
            "the new ones serve"
        ],
        guide=("8.3", "9.3"),
    )


def _load_ratio(scene: Scene) -> float | None:
    """The load over what one replica serves."""
    demand, capacity = scene.demand, scene.server.capacity_tokens
    if scene.cause == "kv_pressure":
        if demand.tokens is None or not capacity:
            return None
        return demand.tokens / capacity
    if demand.served_per_s <= 0:
        return None
    backlog_per_s = demand.waiting / DRAIN_S
    return max(1.0, (demand.arrival_per_s + backlog_per_s) / demand.served_per_s)


def tensor_parallel(scene: Scene) -> Recommendation | None:
    """Twice the tensor-parallel degree, where the sizing math knows model and GPU."""
    server = scene.server
    now, setup = server.tensor_parallel, server.setup
    if setup is None or setup.gpu is None or now is None or not server.capacity_tokens:
        return None
    to = 2 * now
    if to > min(MOST_TENSOR_PARALLEL, setup.gpu.nvlink_gpus):
        return None
    spread = Parallel(to, setup.parallel.pipeline, setup.parallel.data, setup.parallel.experts)
    wider = changed_setup(scene, parallel=spread)
    capacity = resized_tokens(scene, wider)
    if wider is None or capacity is None:
        return None
    ratio = capacity / server.capacity_tokens
    gpus = to * setup.parallel.pipeline
    told = predicted(scene, After(capacity_tokens=capacity, setup=wider, gpus=gpus))
    hourly = server.usd_per_hour
    return advice(
        scene,
        "tensor-parallel",
        [("--tensor-parallel-size", now, to)],
        f"The weights spread over {to} GPUs leave {ratio:.1f} times the KV cache a replica, and "
        "each step reads half as many bytes a GPU.",
        before=present(scene),
        predicted=told,
        cost_usd_per_hour=None if hourly is None else hourly * server.replicas,
        checks=[f"that the {to} GPUs are joined by NVLink", "tokens per GPU-hour in a benchmark"],
        risk="All-reduces eat part of the gain; replicas give more throughput a GPU.",
        verify=[f"kv_usage_avg_ratio, prefill_mean_s and itl_mean_s fall {SETTLE_WORDS}"],
        guide=("5.1", "7.4", "8.5"),
    )
