"""Levers on limits: sequences, queue, context length, LoRA adapters and output length. Pure."""

from __future__ import annotations

import json
from math import ceil, floor, inf

from kneewatch.diagnose.causes.kv_and_queue import GPU_BUSY_DRIFT
from kneewatch.diagnose.recommend.context import (
    SETTLE_WORDS,
    Scene,
    advice,
    rounded_down,
    seats_held,
)
from kneewatch.diagnose.recommend.demand import KV_AIM_RATIO, KV_TARGET_RATIO
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_setup,
    latencies,
    predicted,
    present,
    resized_tokens,
)
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.sizing.memory.weights import Adapters

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


# --- Adapters, output limits: guide 2.5, 9.3, 9.4 -------------------------------------------------


SLOTS_GROWTH = 4.0
KV_ROOM_RATIO = 0.8
OUTPUT_MULTIPLE = 3.0
"""Over the mean of quiet times: few honest outputs are longer."""

OUTPUT_STEP_TOKENS = 64


def more_adapter_slots(scene: Scene) -> Recommendation | None:
    """More --max-loras, as far as requests are held back for a slot."""
    slots, held_back = scene.facts.values.get("lora_max"), scene.get("waiting_deferred_avg")
    if not slots:
        return None
    # A slot holds an adapter, not a request: more than there are adapters serve nobody.
    waiting, running = scene.get("lora_waiting"), scene.get("lora_running")
    wanted = ceil(waiting or held_back)
    to = _slots_that_fit(
        scene, int(slots), int(min(max(running, slots) + wanted, SLOTS_GROWTH * slots))
    )
    if to <= slots:
        return None
    short = to - slots < wanted
    launch = scene.server.stated.launch
    on_cpu = None if launch is None else launch.count("--max-cpu-loras")
    changes = [("--max-loras", int(slots), to)]
    if on_cpu is not None and on_cpu < to:
        # vLLM refuses fewer adapters in CPU memory than on the GPU.
        changes.append(("--max-cpu-loras", on_cpu, to))
    usage = scene.get("kv_usage_avg_ratio")
    checks = ["how many adapters are in use at once: more slots than that only cost memory"]
    if on_cpu is None and launch is None:
        checks.append(f"--max-cpu-loras, where it is set: at least {to}")
    if usage > KV_ROOM_RATIO:
        checks.append(f"KV room: the cache is {100 * usage:.0f} % full and loses what slots take")
    return advice(
        scene,
        "max-loras",
        changes,
        f"{held_back:.0f} requests are held back for {slots:.0f} "
        f"slot{'s' if slots != 1 else ''}"
        + (f", by {waiting:.0f} adapters that wait" if waiting else "")
        + f"; {to} let as many adapters run at once"
        + (": not enough alone, but seen first." if short else "."),
        before={**present(scene), "lora_max": slots, "waiting_deferred": held_back},
        predicted={
            **_kv_numbers(scene, to),
            "lora_max": to,
            "waiting_deferred": max(0.0, held_back * (1 - (to - slots) / wanted)),
        },
        checks=checks,
        risk="Each slot takes the memory of an adapter at --max-lora-rank from the KV cache.",
        verify=[
            f"waiting_deferred {'falls' if short else 'goes to 0'} and lora_change_per_s falls "
            f"{SETTLE_WORDS}"
        ],
        guide=("2.5", "9.3"),
    )


def _slots_that_fit(scene: Scene, now: int, wanted: int) -> int:
    """The most slots up to `wanted` whose buffers leave the load its KV cache."""
    fits, fails = now, wanted + 1
    while fails - fits > 1:
        # The most first: mostly all of them fit.
        slots = wanted if fails > wanted else (fits + fails) // 2
        if _kv_numbers(scene, slots).get("kv_demand_ratio", 0.0) <= KV_TARGET_RATIO:
            fits = slots
        else:
            fails = slots
    return fits


def _kv_numbers(scene: Scene, slots: int) -> dict[str, float]:
    """The KV cache beside so many slots; nothing where model, GPU or rank are not known."""
    setup = scene.server.setup
    if setup is None or setup.gpu is None or setup.adapters is None:
        return {}
    wider = changed_setup(scene, adapters=Adapters(slots, setup.adapters.rank))
    capacity = resized_tokens(scene, wider)
    if capacity is None:
        # vLLM would not start, or an override keeps the cache as it is.
        return {"kv_demand_ratio": inf} if scene.server.blocks_override is None else {}
    return predicted(scene, After(capacity_tokens=capacity, setup=wider))


def adapter_routing(scene: Scene) -> Recommendation | None:
    """Adapters spread over replicas, each replica with its own."""
    if not scene.server.stated.replicas or scene.server.replicas < 2:
        return None
    return advice(
        scene,
        "adapter-routing",
        [("router", "any replica", "by adapter")],
        f"Routed by adapter, each of the {scene.server.replicas} replicas sees a share of them "
        "and swaps less.",
        before={"waiting_deferred": scene.get("waiting_deferred_avg")},
        checks=["that the adapters' loads are of similar size"],
        risk="A popular adapter makes its replica hot.",
        verify=[f"lora_change_per_s falls on every replica {SETTLE_WORDS}"],
        guide=("2.5", "9.3"),
    )


def output_cap(scene: Scene) -> Recommendation | None:
    """A server-wide limit of the output, from what was usual in quiet times."""
    quiet = scene.facts.baseline.get("output_tokens_mean")
    if not quiet:
        return None
    cap = ceil(OUTPUT_MULTIPLE * quiet / OUTPUT_STEP_TOKENS) * OUTPUT_STEP_TOKENS
    if scene.get("output_tokens_p99") <= cap:
        return None
    return advice(
        scene,
        "output-cap",
        [("--override-generation-config", None, json.dumps({"max_new_tokens": cap}))],
        f"Outputs were {quiet:.0f} tokens long in quiet times; {cap} end a runaway after "
        f"{OUTPUT_MULTIPLE:g} times that. Better still: limits per use case at the gateway.",
        before={"output_tokens_p99": scene.get("output_tokens_p99")},
        predicted={"output_tokens_p99": cap},
        checks=["the longest output that any use case needs"],
        risk="Honest long answers are cut.",
        verify=[f"output_tokens_p99 falls to {cap} and running falls {SETTLE_WORDS}"],
        guide=("9.4",),
    )
