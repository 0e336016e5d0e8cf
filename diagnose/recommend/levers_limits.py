"""Levers on limits: sequences, queue, context length, LoRA adapters and output length. Pure."""

from __future__ import annotations

import json
from math import ceil, floor, inf

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import (
    ADAPTER_SLOTS,
    LONGEST_TOKENS,
    QUEUE_LIMIT,
    SEATS,
    STEP_TOKENS,
)
from kneewatch.diagnose.causes.kv_and_queue import SLOW_FROM_DRIFT
from kneewatch.diagnose.learned.derived_signals import OUTPUT_MULTIPLE, QUEUE_OF_LIMIT
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.context import (
    MOVED,
    SETTLE_WORDS,
    LeverContext,
    advice,
    in_flight,
    maybe_closed_words,
    rounded_down,
    rounded_up,
    seats_held,
)
from kneewatch.diagnose.recommend.demand import KV_AIM_RATIO, KV_TARGET_RATIO
from kneewatch.diagnose.recommend.ledger import SEATS_UP
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_launch,
    computed_memory,
    latencies,
    predicted,
    present,
    resized_tokens,
    running_at_arrivals,
    speed_of,
)
from kneewatch.diagnose.recommend.queueing import BURST, HELD_BURST, with_bursts
from kneewatch.diagnose.sizing.memory.weights import Adapters
from kneewatch.rules.formatting import figure, percent, plural, span, stated_duration

REPEATED_GROWTH = 2.0
"""Growth of the batch where clients repeat calls that they give up."""

SEATS_GROWTH = 4.0
"""Largest growth of the batch in one change; ITL must be measured before growing further. Only
known callers get a seat each."""


def fewer_seqs(context: LeverContext) -> Advice | None:
    """Fewer seats: only as many requests run as the KV cache holds, the others queue."""
    server, demand = context.server, context.demand
    held = seats_held(context)
    if held is None or held < 1:
        return None
    seats = context.steady("max-num-seqs-down", rounded_down(held), lowers=True)
    now = server.launch.max_num_seqs
    if (now is not None and seats >= now) or seats >= max(demand.requests, demand.in_flight):
        return None
    # Fewer seats serve no more, so the backlog stays.
    waiting, served_per_s = max(0.0, demand.in_flight - seats), _served_per_s(context)
    wait_s = waiting / served_per_s if served_per_s > 0 else None
    # A peak beyond the seats waits as briefly as it lasts: the times are those of the mean queue.
    at_once = max(demand.in_flight, min(demand.requests, seats))
    queued = replace(demand, requests=at_once, mean_requests=demand.in_flight)
    numbers = predicted(replace(context, demand=queued), After(seats=seats))
    numbers["waiting"] = ceil(waiting)
    if wait_s is not None:
        numbers["queue_wait_s"] = wait_s
    fitting = (server.capacity_tokens or 0.0) / (demand.held_tokens or 1.0)
    queue = f"{ceil(waiting)} requests" if waiting else "Requests beyond these"
    each = f" for about {span(wait_s)} each" if waiting and wait_s is not None else ""
    target_s = context.facts.targets.ttft_p99_s
    return advice(
        context,
        "max-num-seqs-down",
        [(SEATS, now, seats)],
        f"The KV cache of {server.capacity_tokens:,.0f} tokens holds {fitting:.1f} requests of the "
        f"present mean size ({demand.held_tokens:,.0f} tokens), and {seats} with room for longer "
        "ones. "
        f"{queue} would queue{each} instead of being preempted.",
        before={
            **present(context),
            "request_kv_tokens": demand.held_tokens or 1.0,
            "requests_of_mean_size": fitting,
        },
        predicted={**numbers, "max_num_seqs": seats},
        risk=(
            f"The queue wait alone exceeds the TTFT target of {stated_duration(target_s)}: this "
            "stops the preemptions but not the shortage of capacity."
            if target_s is not None and wait_s is not None and wait_s > target_s
            else "The shortage of capacity remains: requests queue, and throughput falls if "
            "preempted work was cheap to recompute."
        ),
        verify=[
            f"preemption_per_s falls to 0 and running stays at or below {seats} {SETTLE_WORDS}",
            "itl_stall_time_ratio and itl_mean_s fall; generation_tokens_per_s falls by no more "
            "than running does",
        ],
    )


def _served_per_s(context: LeverContext) -> float:
    """Requests served/s: from generated tokens if their rate is known, otherwise as counted.

    Tokens are generated evenly, while requests can finish in bursts.
    """
    length_tokens = context.get("output_tokens_mean")
    generated_per_s = context.get("generation_tokens_per_s")
    return (
        generated_per_s / length_tokens
        if length_tokens and generated_per_s
        else context.demand.served_per_s
    )


def more_seqs(context: LeverContext) -> Advice | None:
    """More seats, as far as the KV cache and ITL allow."""
    server, demand = context.server, context.demand
    now = context.seats or floor(context.get("running_max"))
    held = seats_held(context, usage_ratio=KV_AIM_RATIO)
    pinned = context.get("running_max") >= 0.95 * now
    if not server.launch.max_num_seqs:
        # A limit that is only observed binds where the batch is at it while requests wait.
        queued = context.get("waiting_by_capacity") > 0
        pinned = max(context.get("running") * queued, context.get("running_avg")) >= 0.9 * now
    pinned = pinned or SEATS_UP in context.held
    if now < 1 or held is None or not pinned or _steps_are_slow(context):
        return None
    # vLLM refuses to start with more sequences than tokens per step.
    limit = min(held, server.launch.max_num_batched_tokens or inf, _itl_seats(context, now))
    if limit <= now:
        return None
    if not demand.is_measured and SEATS_UP not in context.held:
        return _seats_unknown(context, now)
    if demand.repeats:
        return _seats_for_repeated_calls(context, now, limit)
    running = running_at_arrivals(context, most=limit)
    callers = demand.callers or 0.0
    limit = min(limit, max(SEATS_GROWTH * now, demand.is_closed * callers))
    wanted, least = (
        max(callers, 0.0 if demand.is_closed else with_bursts(running, deviations))
        for deviations in (BURST, HELD_BURST)
    )
    seats = min(rounded_up(wanted), rounded_down(limit))
    seats = context.steady(SEATS_UP, seats, least=min(least, seats), most=held)
    if seats <= now:
        return None
    before = {
        **present(context),
        "served_per_s": demand.served_per_s,
        "arrival_per_s": demand.arrival_per_s,
        "max_num_seqs": now,
        **({"callers": callers} if demand.is_closed else in_flight(demand)),
    }
    short = running >= seats or not demand.served_per_s
    served_per_s = demand.arrival_per_s * seats / running if running else 0.0
    rates = f"{figure(round(demand.arrival_per_s, 2))} requests/s arrive"
    if demand.is_closed:
        rates = f"{callers:.0f} clients send their next request when the last is answered."
    elif not served_per_s:
        rates = "No request completes at present."
    elif short:
        rates += f", of which they complete up to {figure(round(served_per_s, 2))}: "
        rates += "not enough alone."
    elif callers:
        rates += f".{maybe_closed_words(demand, holds=seats)}"
    else:
        rates += f" and keep {running:.0f} running on average: the other seats are for bursts."
    target_s = context.facts.targets.itl_p99_s
    if target_s is not None and _alone_itl_s(context) > target_s:
        rates += (
            f" No batch keeps the ITL P99 target of {stated_duration(target_s)}: a request alone "
            "misses it. Faster steps do: quantized weights, tensor parallelism or a faster GPU."
        )
    waiting = max(0, ceil(demand.mean_requests - seats))
    if not short and not callers:
        # The queue drains, and then TTFT is that of the requests that run at the rate of arrivals.
        waiting = 0
        drained = replace(demand, requests=running, mean_requests=running)
        context = replace(context, demand=drained)
    numbers = predicted(context, After(seats=seats))
    if not demand.is_closed and (short or callers > seats):
        # The queue grows, or may be one of more callers than seats, and with it TTFT.
        numbers = {key: value for key, value in numbers.items() if not key.startswith("ttft_")}
    numbers |= {"served_per_s_at_most": served_per_s, "max_num_seqs": seats, "running": running}
    if not short:
        numbers["waiting"] = waiting
    return advice(
        context,
        SEATS_UP,
        [(SEATS, now, seats)],
        f"Up to {seats} requests would run at once instead of {now}"
        f"{'' if server.launch.max_num_seqs else ' (observed)'}; those that arrive now fill "
        f"{percent(numbers.get('kv_usage_ratio', 0))} of the KV cache. {rates}",
        before=before,
        predicted=numbers,
        checks=[
            "measure ITL on one replica with the larger batch before you change all",
            *(
                []
                if server.launch.max_num_batched_tokens
                else [f"set {STEP_TOKENS}, where given, to at least {seats}"]
            ),
        ],
        verify=[
            f"running rises above {now} and waiting_by_capacity falls"
            + ("" if short or waiting else " to 0")
            + f" {SETTLE_WORDS}",
            "itl_p99_s stays within its target and kv_usage_avg_ratio below 0.9",
        ],
    )


def _seats_for_repeated_calls(context: LeverContext, now: int, limit: float) -> Advice | None:
    """Some more seats, where clients give up and may call again: the number needed is unknown.

    None unless that batch is predicted to make clearly more tokens/s: otherwise its slower steps
    let more clients give up.
    """
    demand, seats = context.demand, rounded_down(min(limit, REPEATED_GROWTH * now))
    is_now, then = speed_of(context, now), speed_of(context, seats)
    if is_now is None or then is None or then.tokens_per_s < MOVED * is_now.tokens_per_s:
        return None
    calls_per_s, answered_per_s = (
        figure(round(per_s, 2)) for per_s in (demand.arrival_per_s, demand.served_per_s)
    )
    return advice(
        context,
        SEATS_UP,
        [(SEATS, now, seats)],
        f"{answered_per_s} of {calls_per_s} calls/s are answered. Clients that give up may call "
        f"again, so the number of seats that the load needs is unknown: {seats} are a step. Raise "
        "the timeout of clients, or let them wait longer between tries, before it.",
        before={
            **present(context),
            "served_per_s": demand.served_per_s,
            "arrival_per_s": demand.arrival_per_s,
            "max_num_seqs": now,
        },
        predicted={"itl_s": then.itl_s, "max_num_seqs": seats},
    )


def _seats_unknown(context: LeverContext, now: int) -> Advice:
    """More seats, without a number as long as the rate of arrivals is that of a few scrapes."""
    return advice(
        context,
        SEATS_UP,
        [],
        f"Raise {SEATS}: {now} requests run at once and others wait. The number is being measured: "
        f"it follows once the queue was seen for a window of {span(context.facts.window_s)}.",
        before={**present(context), "max_num_seqs": now, "window_s": context.facts.window_s},
    )


def _steps_are_slow(context: LeverContext) -> bool:
    """Whether ITL has already grown with the batch. Beyond the knee a larger batch gains
    nothing."""
    drift = context.facts.values.get("itl_mean_drift_ratio")
    if drift is None:
        # Without a baseline, only a saturated queue points at slow steps.
        return context.cause == "queue_saturation"
    return drift >= SLOW_FROM_DRIFT


def _itl_seats(context: LeverContext, now: int) -> float:
    """Concurrent requests at which ITL still meets its target; infinite without a target, and where
    no batch meets it.

    From the roofline if available. Otherwise ITL is assumed to grow in proportion to the batch,
    which is the worst case.
    """
    target_s, tail_s = context.facts.targets.itl_p99_s, context.get("itl_p99_s")
    if target_s is None or not tail_s or _alone_itl_s(context) > target_s:
        return float("inf")
    mean_s = context.get("itl_mean_s")
    best = now * target_s / tail_s
    for growth in (1.5, 2.0, 3.0, SEATS_GROWTH):
        prediction = latencies(context, After(seats=floor(now * growth)))
        if prediction is None or not mean_s:
            break
        if prediction.itl_s / mean_s * tail_s <= target_s:
            best = max(best, now * growth)
    return best


def _alone_itl_s(context: LeverContext) -> float:
    """ITL P99 of a request that runs alone; 0 if unknown."""
    mean_s, alone = context.get("itl_mean_s"), latencies(context, After(seats=1))
    return alone.itl_s / mean_s * context.get("itl_p99_s") if alone and mean_s else 0.0


def queue_limit(context: LeverContext) -> Advice | None:
    """A queue limit (circuit breaker): requests beyond it would miss the TTFT target anyway.

    vLLM's limit also counts running requests, over all data-parallel ranks
    (vllm/config/scheduler.py, 0.32).
    """
    target_s, demand, server = context.facts.targets.ttft_p99_s, context.demand, context.server
    if target_s is None or demand.served_per_s <= 0 or server.launch.max_num_seqs is None:
        return None
    # Rates and queues are per data-parallel rank.
    ranks, served_per_s = server.stated.engines, demand.served_per_s * server.stated.engines
    depth = max(1, rounded_down(QUEUE_OF_LIMIT * target_s * served_per_s))
    if demand.waiting * ranks <= depth:
        return None
    seats = ranks * server.launch.max_num_seqs
    limit = context.steady("queue-limit", seats + depth, lowers=True)
    depth = limit - seats
    return advice(
        context,
        "queue-limit",
        [(QUEUE_LIMIT, None, limit)],
        f"At {served_per_s:.1f} requests/s, {depth} queued requests use "
        f"{percent(depth / served_per_s / target_s)} of the TTFT target. The flag counts running "
        f"requests too: {seats} + {depth} = {limit}. vLLM then rejects further requests instead "
        "of serving them late.",
        before={
            "waiting": demand.waiting * ranks,
            "served_per_s": served_per_s,
            "max_num_seqs": seats,
        },
        predicted={
            "waiting": depth,
            "queue_wait_s": depth / served_per_s,
            "ttft_target_used_ratio": depth / served_per_s / target_s,
        },
        verify=[
            f"waiting stays at or below {depth}, and rejected_per_s counts the rejected requests"
        ],
    )


def max_model_len(context: LeverContext) -> Advice | None:
    """A shorter longest request, if one request of full length would fill the KV cache."""
    server, capacity = context.server, context.server.capacity_tokens
    longest = server.launch.max_model_len
    if longest is None or capacity is None or longest <= KV_TARGET_RATIO * capacity:
        return None
    seen = context.get("prompt_tokens_p99") + context.get("output_tokens_p99")
    to = floor(KV_TARGET_RATIO * capacity / 256) * 256
    if to <= 0 or not seen or to < 2 * seen:
        return None
    return advice(
        context,
        "max-model-len",
        [(LONGEST_TOKENS, longest, to)],
        f"One request of {longest:,} tokens would fill the KV cache of {capacity:,.0f} tokens; the "
        f"longest observed have about {seen:,.0f} tokens (P99).",
        before={
            "max_model_len_tokens": longest,
            "kv_capacity_tokens": floor(capacity),
            "longest_request_tokens": seen,
        },
        predicted={"max_model_len_tokens": to},
        checks=[
            f"confirm that no user needs requests of more than {to:,} tokens: vLLM would "
            "reject them"
        ],
    )


# --- LoRA adapters and output length (guide 2.5, 9.3, 9.4) ----------------------------------------


SLOTS_GROWTH = 4.0
KV_ROOM_RATIO = 0.8
OUTPUT_STEP_TOKENS = 64


def more_adapter_slots(context: LeverContext) -> Advice | None:
    """More adapter slots, if requests wait for an adapter slot."""
    slots, held_back = context.facts.values.get("lora_max"), context.get("waiting_deferred_avg")
    if not slots:
        return None
    # A slot holds an adapter, not a request: more slots than adapters gain nothing.
    waiting, running = context.get("lora_waiting"), context.get("lora_running")
    slots_wanted = ceil(waiting or held_back)
    to = _slots_that_fit(
        context, int(slots), int(min(max(running, slots) + slots_wanted, SLOTS_GROWTH * slots))
    )
    if to <= slots:
        return None
    short = to - slots < slots_wanted
    launch = context.server.stated.command_line
    on_cpu = None if launch is None else launch.count("--max-cpu-loras")
    changes = [(ADAPTER_SLOTS, int(slots), to)]
    if on_cpu is not None and on_cpu < to:
        # vLLM refuses to start with --max-cpu-loras below the adapter slots.
        changes.append(("--max-cpu-loras", on_cpu, to))
    usage = context.get("kv_usage_avg_ratio")
    checks = ["count the adapters that are in use at once: more slots than that only cost memory"]
    if on_cpu is None and launch is None:
        checks.append(f"set --max-cpu-loras, where given, to at least {to}")
    if usage > KV_ROOM_RATIO:
        checks.append(
            f"check KV usage: the cache is {percent(usage)} full, and the slots take memory from it"
        )
    return advice(
        context,
        "max-loras",
        changes,
        f"{held_back:.1f} requests on average wait for "
        f"{'the only adapter slot' if slots == 1 else f'one of {slots:.0f} adapter slots'}"
        + (f", now for {plural(round(waiting), 'other adapter')}" if waiting else "")
        + f". {to} slots let {to} adapters run concurrently"
        + (": a first step, not enough alone." if short else "."),
        before={
            **present(context),
            "lora_max": slots,
            "lora_waiting": waiting,
            "waiting_deferred": held_back,
        },
        predicted={
            **_kv_numbers(context, to),
            "lora_max": to,
            "waiting_deferred": max(0.0, held_back * (1 - (to - slots) / slots_wanted)),
        },
        checks=checks,
        verify=[
            f"waiting_deferred falls{'' if short else ' to 0'} and lora_change_per_s falls "
            f"{SETTLE_WORDS}"
        ],
    )


def _slots_that_fit(context: LeverContext, now: int, most: int) -> int:
    """The most adapter slots, up to `most`, that leave enough KV cache for the load."""
    fits, fails = now, most + 1
    while fails - fits > 1:
        # Try the maximum first: in most cases it fits.
        slots = most if fails > most else (fits + fails) // 2
        if _kv_numbers(context, slots).get("kv_demand_ratio", 0.0) <= KV_TARGET_RATIO:
            fits = slots
        else:
            fails = slots
    return fits


def _kv_numbers(context: LeverContext, slots: int) -> dict[str, float]:
    """KV cache numbers for this many adapter slots; {} if model, GPU or rank are unknown."""
    launch = context.server.sized_launch
    if launch is None or launch.gpu is None or launch.adapters is None:
        return {}
    wider = changed_launch(context, adapters=Adapters(slots, launch.adapters.rank))
    capacity, blocks = resized_tokens(context, wider), context.server.blocks_override
    if capacity is None:
        # Blocks that are overridden keep their number, as far as the slots leave memory for them.
        memory = None if blocks is None else computed_memory(wider)
        most = 0 if memory is None else memory.layout.blocks(memory.available_bytes.low)
        fits = blocks is not None and most >= blocks
        return {} if fits else {"kv_demand_ratio": inf}
    return predicted(context, After(capacity_tokens=capacity, launch=wider))


def adapter_routing(context: LeverContext) -> Advice | None:
    """Routing by adapter, so that each replica serves only some of the adapters."""
    if not context.server.stated.replicas or context.server.replicas < 2:
        return None
    return advice(
        context,
        "adapter-routing",
        [("router", "any replica", "by adapter")],
        f"Route requests by adapter: each of the {context.server.replicas} replicas then serves "
        "fewer adapters and swaps less often.",
        before={
            "waiting_deferred": context.get("waiting_deferred_avg"),
            "replicas": context.server.replicas,
        },
    )


def output_cap(context: LeverContext) -> Advice | None:
    """A server-wide limit on the output length, computed from its baseline."""
    quiet = context.facts.baseline.get("output_tokens_mean")
    if not quiet:
        return None
    cap = ceil(OUTPUT_MULTIPLE * quiet / OUTPUT_STEP_TOKENS) * OUTPUT_STEP_TOKENS
    if context.get("output_tokens_p99") <= cap:
        return None
    return advice(
        context,
        "output-cap",
        [("--override-generation-config", None, json.dumps({"max_new_tokens": cap}))],
        f"The baseline output length is {quiet:.0f} tokens; a limit of {cap} tokens stops runaway "
        f"outputs at about {OUTPUT_MULTIPLE:g}x that. Limits per use case at the gateway are "
        "better.",
        before={
            "output_tokens_p99": context.get("output_tokens_p99"),
            "output_tokens_usual": quiet,
        },
        predicted={"output_tokens_p99": cap, "times_usual_ratio": OUTPUT_MULTIPLE},
        verify=[f"output_tokens_p99 falls to {cap} or less and running falls {SETTLE_WORDS}"],
    )
