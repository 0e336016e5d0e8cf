"""How many requests are let in: guide 7.4, 8.1, 9.3, 9.4. Pure."""

from __future__ import annotations

from math import ceil, floor, inf

from kneewatch.diagnose.causes.memory import GPU_BUSY_DRIFT
from kneewatch.diagnose.recommend.demand import KV_AIM_RATIO, KV_TARGET_RATIO
from kneewatch.diagnose.recommend.prediction import (
    After,
    latencies,
    predicted,
    present,
)
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.scene import (
    SETTLE_WORDS,
    Scene,
    advice,
    rounded_down,
    seats_held,
)

SEATS_GROWTH = 4.0
"""A batch is not raised further at once: ITL has to be seen first."""

SPARE_SEATS = 1.1
QUEUE_OF_LIMIT = 0.85
"""The circuit breaker trips at 80 to 90 % of the queue that breaks the target (9.4)."""


def fewer_seqs(scene: Scene) -> Recommendation | None:
    """A lower --max-num-seqs: what the KV cache holds runs, the rest waits instead of thrashing."""
    server, demand = scene.server, scene.demand
    held = seats_held(scene)
    if held is None or held < 1:
        return None
    seats, now = rounded_down(held), server.max_num_seqs
    if (now is not None and seats >= now) or seats >= demand.requests:
        return None
    waiting, served_per_s = demand.requests - seats, _served_per_s(scene)
    wait_s = waiting / served_per_s if served_per_s > 0 else None
    told = predicted(scene, After(seats=seats))
    told["waiting"] = ceil(waiting)
    if wait_s is not None:
        told["queue_wait_s"] = wait_s
    queue = "an unknown time" if wait_s is None else f"about {wait_s:.0f} s each"
    target_s = scene.facts.targets.ttft_p99_s
    missed = target_s is not None and wait_s is not None and wait_s > target_s
    return advice(
        scene,
        "max-num-seqs-down",
        [("--max-num-seqs", now, seats)],
        f"The KV cache holds {seats} requests of the present size ({demand.held_tokens:,.0f} "
        f"tokens); {waiting:.0f} would wait at the door, {queue}, instead of being evicted.",
        before=present(scene),
        predicted=told,
        checks=["that a longer queue is better than slow streams for your users"],
        risk=(
            f"The wait alone is over the TTFT target of {target_s:g} s: it ends the thrashing, "
            "not the shortage."
            if missed
            else "The shortage remains: requests wait for a seat, and where evicted work is cheap "
            "to repeat fewer tokens are made in all."
        ),
        verify=[
            f"preemption_per_s goes to 0 and running stays at or below {seats} {SETTLE_WORDS}",
            "itl_stall_time_ratio and itl_mean_s fall, generation_tokens_per_s by no more than "
            "running does",
        ],
        guide=("7.4", "9.3"),
    )


def _served_per_s(scene: Scene) -> float:
    """Requests served a second: by the tokens made, which come evenly where requests end in bursts;
    else as counted."""
    length_tokens = scene.get("output_tokens_mean")
    made_per_s = scene.get("generation_tokens_per_s")
    return made_per_s / length_tokens if length_tokens and made_per_s else scene.demand.served_per_s


def more_seqs(scene: Scene) -> Recommendation | None:
    """A higher --max-num-seqs: up to what KV cache and ITL allow."""
    server, demand = scene.server, scene.demand
    now = server.max_num_seqs or floor(scene.get("running_max"))
    held = seats_held(scene, usage_ratio=KV_AIM_RATIO)
    pinned = scene.get("running_max") >= 0.95 * now
    if now < 1 or held is None or not pinned or _gpu_is_busy(scene):
        return None
    wanted = min(demand.requests * SPARE_SEATS, held, SEATS_GROWTH * now)
    # vLLM refuses more seats than tokens in a step.
    wanted = min(wanted, _itl_seats(scene, now), server.max_num_batched_tokens or inf)
    seats = rounded_down(wanted)
    if seats <= now:
        return None
    told = predicted(scene, After(seats=seats))
    served_per_s = demand.served_per_s * seats / now
    told["served_per_s_at_most"] = served_per_s
    before = {**present(scene), "served_per_s": demand.served_per_s}
    before["max_concurrency"] = min(before.get("max_concurrency", now), now)
    known = server.max_num_seqs is not None
    short = served_per_s < demand.arrival_per_s
    if not short:
        told["waiting"] = 0
    return advice(
        scene,
        "max-num-seqs-up",
        [("--max-num-seqs", now, seats)],
        f"{seats} seats instead of {now}{'' if known else ' (as observed)'}; the KV cache would "
        f"be {100 * told.get('kv_usage_ratio', 0):.0f} % full"
        + f". At the present step time they serve up to {served_per_s:.1f} requests a second; "
        f"{demand.arrival_per_s:.1f} arrive" + (": not enough alone." if short else "."),
        before=before,
        predicted=told,
        checks=[
            "ITL on a replica with the larger batch, before all get it",
            *(
                []
                if server.max_num_batched_tokens
                else [f"--max-num-batched-tokens, where it is set: at least {seats}"]
            ),
        ],
        risk="Each step grows with the batch: ITL rises, and past the knee throughput does not.",
        verify=[
            f"running rises above {now}, waiting_by_capacity falls"
            + ("" if short else " to 0")
            + f" {SETTLE_WORDS}",
            "itl_p99_s stays within its target, kv_usage_avg_ratio below 0.9",
        ],
        guide=("8.1", "9.3"),
    )


def _gpu_is_busy(scene: Scene) -> bool:
    """Whether ITL has grown with the batch already: past the knee more seats give nothing."""
    drift = scene.facts.values.get("itl_mean_drift_ratio")
    if drift is None:
        # A batch that is not pinned says nothing of room.
        return scene.cause == "queue_saturation"
    return drift >= GPU_BUSY_DRIFT


def _itl_seats(scene: Scene, now: int) -> float:
    """Seats at which ITL still meets its target; without one, no limit.

    By the roofline where it is known, else as if ITL grew in proportion with the batch, which is
    the worst case.
    """
    target_s, tail_s = scene.facts.targets.itl_p99_s, scene.get("itl_p99_s")
    if target_s is None or not tail_s:
        return float("inf")
    mean_s = scene.get("itl_mean_s")
    best = now * target_s / tail_s
    for growth in (1.5, 2.0, 3.0, SEATS_GROWTH):
        yielded = latencies(scene, After(seats=floor(now * growth)))
        if yielded is None or not mean_s:
            break
        made, scale = yielded
        if made.itl_s * scale / mean_s * tail_s <= target_s:
            best = max(best, now * growth)
    return best


def queue_limit(scene: Scene) -> Recommendation | None:
    """A limit of the queue: what is above it would miss its target anyway (circuit breaker).

    vLLM counts what runs as well, over all data-parallel ranks (vllm/config/scheduler.py, 0.32).
    """
    target_s, demand, server = scene.facts.targets.ttft_p99_s, scene.demand, scene.server
    if target_s is None or demand.served_per_s <= 0 or server.max_num_seqs is None:
        return None
    # Rates and queues are those of one rank.
    ranks, served_per_s = server.data_parallel, demand.served_per_s * server.data_parallel
    depth = max(1, rounded_down(QUEUE_OF_LIMIT * target_s * served_per_s))
    if demand.waiting * ranks <= depth:
        return None
    limit = ranks * server.max_num_seqs + depth
    return advice(
        scene,
        "queue-limit",
        [("--max-num-queued-reqs", None, limit)],
        f"{depth} queued requests take {QUEUE_OF_LIMIT:.0%} of the TTFT target at "
        f"{served_per_s:.1f} served a second; with {ranks * server.max_num_seqs} seats, which the "
        f"limit counts as well, that is {limit}. More are refused at once instead of late.",
        before={"waiting": demand.waiting * ranks},
        predicted={"waiting": depth, "queue_wait_s": depth / served_per_s},
        checks=["that clients retry elsewhere on HTTP 503"],
        risk="Requests are refused.",
        verify=[f"waiting stays at or below {depth}, rejected_per_s shows the rest, at once"],
        guide=("9.4",),
    )


def max_model_len(scene: Scene) -> Recommendation | None:
    """A lower --max-model-len, where one request of it alone would be more than the cache."""
    server, capacity = scene.server, scene.server.capacity_tokens
    longest = server.max_model_len
    if longest is None or capacity is None or longest <= KV_TARGET_RATIO * capacity:
        return None
    seen = scene.get("prompt_tokens_p99") + scene.get("output_tokens_p99")
    to = floor(KV_TARGET_RATIO * capacity / 256) * 256
    if to <= 0 or not seen or to < 2 * seen:
        return None
    return advice(
        scene,
        "max-model-len",
        [("--max-model-len", longest, to)],
        f"One request of {longest:,} tokens fills the KV cache of {capacity:,.0f} alone; the "
        f"longest seen have about {seen:,.0f} (P99).",
        before={"max_model_len_tokens": longest},
        predicted={"max_model_len_tokens": to},
        checks=["that no user needs longer requests: they would be refused"],
        risk="Longer requests are refused with an error.",
        verify=["finished_error_ratio stays where it is, kv_usage_max_ratio below 1, within a day"],
        guide=("9.4",),
    )
