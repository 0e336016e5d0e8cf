"""Replica levers: more or fewer replicas, and the tensor-parallel degree of each. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from kneewatch.diagnose.causes.tensor_parallel import degree_words
from kneewatch.diagnose.deployment.deployment import memory_of
from kneewatch.diagnose.recommend.context import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.prediction import (
    After,
    asked_tokens_per_s,
    changed_setup,
    predicted,
    present,
    resized_tokens,
)
from kneewatch.diagnose.recommend.recommendation import REPLICAS, Recommendation
from kneewatch.diagnose.sizing.arithmetic import figure
from kneewatch.diagnose.sizing.benchmark.tensor_parallel import Comparison, Degree
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.memory.planning_formulas import (
    HEADROOM_HIGH_RATIO,
    HEADROOM_LOW_RATIO,
)
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.replicas.replica_count import SAFETY_DEFAULT

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


# --- Fewer replicas, only ever for a week's peak: guide 2.6, 8.3, 9.2 -----------------------------


MOST_ITL_GROWTH = 2.0
"""Without a target ITL at the peak may become this many times what it is there now."""

LEAST_REPLICAS = 2
"""One replica alone has none to take over."""

RISK = "A fleet cut to a quiet week preempts at the next peak."
VERIFY = ("kv_usage_max_ratio below 0.9 and no preemption through the next weekly peak",)


def fewer_replicas(scene: Scene) -> Recommendation | None:
    """Fewer replicas where a week's peak is known and leaves room; else why none are advised.

    Sized for the peak's requests, by KV cache and seats, with the guide's 50 % on top; ITL at the
    peak must keep its target, or hardly grow where there is none.
    """
    now, peak = scene.server.stated.replicas, scene.weekly_peak_requests
    if now is None or now < 2:
        return None
    if peak is None:
        return _kept(
            scene,
            f"{now} replicas look too many for the load seen here, but capacity is for the weekly "
            "peak: a window or a day says nothing about that.",
        )
    used, present_requests = used_ratio(scene, peak), scene.demand.requests
    if used is None or present_requests <= 0:
        return _kept(scene, "What a replica can hold is not known, so neither is how many do.")
    least, total = (
        max(ceil(round(now * used * (1 + headroom), 6)), LEAST_REPLICAS)
        for headroom in (HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO)
    )
    share = peak / present_requests
    told = predicted(scene, After(share_ratio=share * now / total, replicas=total))
    at_peak_s = predicted(scene, After(share_ratio=share)).get("itl_s")
    why = _why_not(scene, now, total, then_s=told.get("itl_s"), at_peak_s=at_peak_s)
    if why:
        return _kept(scene, f"At the weekly peak of {peak:.0f} requests a replica {why}.")
    hourly = scene.server.usd_per_hour
    with_less = f"; with {HEADROOM_LOW_RATIO:.0%} it would be {least}" if least < total else ""
    return advice(
        scene,
        "fewer-replicas",
        [(REPLICAS, now, total)],
        f"At the weekly peak of {peak:.0f} requests a replica {used:.0%} of it is used; {total} "
        f"replicas carry that peak with {HEADROOM_HIGH_RATIO:.0%} headroom{with_less}.",
        before={**present(scene), "requests_at_weekly_peak": peak},
        predicted=told,
        cost_usd_per_hour=None if hourly is None else hourly * (total - now),
        checks=[
            "that the week was a usual one: no holiday, no launch ahead",
            f"that ITL of {1000 * told['itl_s']:.0f} ms at the peak suits the users",
            "one replica at a time, and that a lost one is still carried",
        ],
        risk=RISK,
        verify=VERIFY,
        guide=("2.6", "8.3", "9.2"),
    )


def used_ratio(scene: Scene, peak: float) -> float | None:
    """The part of a replica that a peak of so many requests takes: KV cache or seats, whichever is
    more; None where what it can hold is not known."""
    server, demand = scene.server, scene.demand
    if demand.held_tokens is None or not server.capacity_tokens:
        return None
    kv = max(demand.peak_tokens(peak), peak * demand.held_tokens / KV_TARGET_RATIO)
    seats = peak / server.max_num_seqs if server.max_num_seqs else 0.0
    return max(kv / server.capacity_tokens, seats)


def _why_not(
    scene: Scene, now: int, total: int, *, then_s: float | None, at_peak_s: float | None
) -> str:
    """Why fewer replicas are not advised, as the end of a sentence; "" where they are.

    `then_s` is ITL at the peak with `total` of them, `at_peak_s` with those there are.
    """
    if total >= now:
        return f"{now} replicas are no more than it needs with the guide's headroom"
    now_s = scene.get("itl_mean_s")
    if then_s is None or at_peak_s is None or not now_s:
        return "the KV cache has room, but what ITL would be is not known"
    target_s, tail_s = scene.facts.targets.itl_p99_s, scene.get("itl_p99_s")
    if target_s is None and then_s > MOST_ITL_GROWTH * at_peak_s:
        return (
            f"{total} replicas would let ITL grow from {1000 * at_peak_s:.0f} to "
            f"{1000 * then_s:.0f} ms; state a target (--slo-itl)"
        )
    if target_s is not None and max(tail_s, now_s) * then_s / now_s > target_s:
        return f"{total} replicas would miss the ITL target of {1000 * target_s:g} ms"
    return ""


def _kept(scene: Scene, why: str) -> Recommendation:
    """What is told in place of a change."""
    checks = ["kv_usage_max_ratio, running_max and waiting over a whole week"]
    return advice(
        scene,
        "fewer-replicas",
        [],
        why,
        before={
            "kv_usage_max_ratio": scene.get("kv_usage_max_ratio"),
            "replicas": scene.server.replicas,
        },
        cost_usd_per_hour=None,
        checks=checks,
        risk=RISK,
        verify=VERIFY,
        guide=("8.3", "9.2"),
    )


# --- A lower tensor-parallel degree and more replicas on the same GPUs: guide 5.1, 8.5 ------------


KEPT = ("kv_capacity_tokens", "kv_demand_ratio", "kv_usage_ratio", "usd_per_hour")
"""What is computed of the change; its speed was measured, which says more than the roofline."""


def lower_tensor_parallel(scene: Scene) -> Recommendation | None:
    """The measured smaller degree on the GPUs there are, where the sizing math says that weights
    and KV cache fit and the load so far leaves room; None also where it does not know."""
    server, split = scene.server, scene.facts.split
    if split is None or split.wide is None or split.narrow is None or not split.far_below:
        return None
    wide, narrow, now = split.wide, split.narrow, server.replicas
    to, total = narrow.tensor_parallel, now * wide.tensor_parallel // narrow.tensor_parallel
    after = _after(scene, wide, narrow, total)
    if after is None:
        return None
    computed = predicted(scene, after)
    if not _has_room(scene, computed.get("kv_demand_ratio")):
        return None
    least = max(ceil(now * wide.per_s / narrow.per_s), 1)
    times = figure(round(total * narrow.per_s / (now * wide.per_s), 1))
    gives = f"TP {wide.tensor_parallel} {'gives' if now == 1 else 'give'}"
    return advice(
        scene,
        "tensor-parallel-down",
        [("--tensor-parallel-size", wide.tensor_parallel, to), (REPLICAS, now, total)],
        f"By the benchmark {total} replicas with TP {to} give {times} times what {now} with "
        f"{gives}, on no more GPUs; {least} of them would give as much as now.",
        before={**present(scene), **_limits(scene, split, wide)},
        predicted={
            **{name: computed[name] for name in KEPT if name in computed},
            **_limits(scene, split, narrow),
        },
        cost_usd_per_hour=_more_usd_per_hour(scene, after, wide),
        checks=[
            degree_words(narrow),
            "that the benchmark's prompts and answers are as long as yours, and as often alike",
        ],
        risk=f"Each request is slower. {degree_words(wide)}; {degree_words(narrow)}. Prefixes are "
        f"cached on {total} replicas apart.",
        verify=[_verify(split, narrow)],
        guide=("5.1", "8.2", "8.5"),
    )


def _limits(scene: Scene, split: Comparison, one: Degree) -> dict[str, float]:
    """What a degree gives a GPU at most, and what its tokens cost then."""
    told = {f"{split.unit}_per_s_per_gpu": one.per_s_per_gpu}
    setup, hourly = scene.server.setup, scene.server.usd_per_gpu_hour
    if setup is not None and hourly is not None and split.unit == "tokens":
        stages = setup.parallel.pipeline
        told["usd_per_million_tokens_at_limit"] = hourly * stages / (one.per_s_per_gpu * 3600) * 1e6
    return told


def _more_usd_per_hour(scene: Scene, after: After, wide: Degree) -> float | None:
    """What the GPUs cost more: those that are left over where the degrees do not divide, less."""
    setup, hourly = scene.server.setup, scene.server.usd_per_gpu_hour
    stages = 1 if setup is None else setup.parallel.pipeline
    now = scene.server.replicas * wide.tensor_parallel * stages
    more = (after.replicas or 0) * (after.gpus or 0) - now
    if not more:
        return 0.0
    return None if hourly is None else more * hourly


def _verify(split: Comparison, narrow: Degree) -> str:
    kept = f"ttft_p99_s and itl_p99_s keep their targets {SETTLE_WORDS}"
    if split.unit == "requests":
        return f"with a queue completed_per_s a GPU rises, {kept}"
    most = figure(round(narrow.per_s_per_gpu, 1))
    return f"with a queue generation_tokens_per_s a GPU rises towards {most}, {kept}"


def _after(scene: Scene, wide: Degree, narrow: Degree, total: int) -> After | None:
    """The server with the smaller degree; None where it does not fit, or nobody knows."""
    server, to = scene.server, narrow.tensor_parallel
    setup = server.setup
    if setup is None or setup.gpu is None or setup.parallel.tensor != wide.tensor_parallel:
        return None
    narrower = changed_setup(scene, parallel=replace(setup.parallel, tensor=to))
    capacity = resized_tokens(scene, narrower)
    if narrower is None or capacity is None or not _starts(narrower):
        return None
    return After(
        capacity_tokens=capacity,
        setup=narrower,
        share_ratio=server.replicas / total,
        replicas=total,
        gpus=to * setup.parallel.pipeline,
    )


def _starts(setup: Setup) -> bool:
    """Whether weights and one request of full length fit for certain: a cache whose size is fixed
    in bytes says nothing of the weights beside it."""
    found = memory_of(setup)
    return found.holds_one and found.held_tokens.low >= setup.longest_tokens


def _has_room(scene: Scene, demand_ratio: float | None) -> bool:
    """Whether the load since the cause began, and the week's peak where one is known, leave room
    in the smaller caches."""
    if demand_ratio is None:
        return False
    requests, peak = scene.demand.requests, scene.weekly_peak_requests
    at_peak = demand_ratio * peak / requests if peak is not None and requests > 0 else 0.0
    return max(demand_ratio, at_peak) <= KV_TARGET_RATIO
