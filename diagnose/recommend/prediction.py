"""Predicts numbers before and after a change, with a roofline fitted to the server. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil, floor, inf

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.deployment.deployment import memory_of
from kneewatch.diagnose.halving import end_of
from kneewatch.diagnose.learned.knee import token_gap_s
from kneewatch.diagnose.recommend.context import OWN_STEPS, STEP_TIMES, LeverContext
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.queueing import CallerQueue, Latencies, SeatQueue, Steps, tails
from kneewatch.diagnose.recommend.step_times import Prompts
from kneewatch.diagnose.sizing.memory.budget import Memory
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.speed.performance import Load, Performance, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import (
    Costs,
    Efficiency,
    costs,
    on_gpu,
)

costs_of = lru_cache(maxsize=256)(costs)
performance_of = lru_cache(maxsize=256)(performance)

_CALIBRATION_ROUNDS = 12
_SETTLE_HALVINGS = 12
_SETTLE_ROUNDS = 8
_CALIBRATED_RATIO = 0.02
"""How close the calibrated roofline must come to the measured ITL."""


def computed_costs(launch: Launch | None) -> Costs | None:
    """What a step of the launch costs; None if its GPU is unknown, or vLLM would refuse it."""
    if launch is None or launch.gpu is None:
        return None
    try:
        return costs_of(launch)
    except SizingError:
        return None


def computed_memory(launch: Launch | None) -> Memory | None:
    """The memory of the launch; None if it is unknown, or vLLM would refuse it."""
    try:
        return None if launch is None else memory_of(launch)
    except SizingError:
        return None


def load_of(
    context: LeverContext, launch: Launch, *, requests: float, most: float, saved_ratio: float
) -> Load:
    """The context's load on a launch.

    Raises:
        SizingError: the lengths are unknown.
    """
    demand = context.demand
    if not demand.input_tokens or not demand.output_tokens:
        raise SizingError("the lengths are not known", name="input_tokens")
    return Load(
        input_tokens=demand.input_tokens,
        output_tokens=max(1.0, demand.output_tokens),
        concurrency=requests,
        max_running=most,
        max_num_batched_tokens=launch.batched_tokens,
        prefix_hit_ratio=saved_ratio,
    )


# --- Numbers before and after a change ------------------------------------------------------------
#
# KV usage: tokens of the load over tokens of the cache. Latency: the roofline, with factors so that
# its ITL and prefill time are the measured ones; without a known GPU, the step times that this
# server measured itself, and nothing far beyond the batches that it has run.


LAYOUT = ("parallel", "quantization", "adapters")
"""Settings that decide how many bytes of weights are on each GPU."""

SCALE_LOW, SCALE_HIGH = 0.4, 2.5
"""Accepted range of measured ITL divided by predicted ITL; outside, the roofline does not fit."""


class After(Struct, frozen=True, kw_only=True):
    """A server after a change; None means unchanged.

    It keeps `share_ratio` of the load. `other_steps`: a step for the same requests takes another
    time, so measured step times do not apply.
    """

    capacity_tokens: float | None = None
    seats: int | None = None
    share_ratio: float = 1.0
    launch: Launch | None = None
    replicas: int | None = None
    gpus: int | None = None
    saved_ratio: float | None = None
    other_steps: bool = False


def present(context: LeverContext) -> dict[str, float]:
    """The present numbers: measured values, and the load's KV demand."""
    if "present" not in context.memo:
        context.memo["present"] = _present(context)
    return context.memo["present"]


def _present(context: LeverContext) -> dict[str, float]:
    server, values = context.server, context.facts.values
    numbers = {**_sizes(context, After()), **tails_now(context)}
    for key, signal in (
        ("kv_usage_ratio", "kv_usage_avg_ratio"),
        ("preemption_per_s", "preemption_per_s"),
        ("ttft_s", "ttft_mean_s"),
        ("itl_s", "itl_mean_s"),
        ("waiting", "waiting_avg"),
    ):
        value = values.get(signal)
        if value is not None:
            numbers[key] = value
    hourly, generated_per_s = server.usd_per_hour, values.get("generation_tokens_per_s")
    if generated_per_s is not None:
        numbers["output_tokens_per_s"] = generated_per_s * server.replicas
    if hourly is not None:
        numbers["usd_per_hour"] = hourly * server.replicas
        if generated_per_s:
            numbers["usd_per_million_tokens"] = hourly / (generated_per_s * 3600) * 1e6
    return numbers


def tails_now(context: LeverContext) -> dict[str, float]:
    """The measured P99 of TTFT and ITL, in seconds; without those that are unknown."""
    values = {key: context.facts.values.get(key) for key in ("ttft_p99_s", "itl_p99_s")}
    return {key: value for key, value in values.items() if value is not None}


def _shared_usage(context: LeverContext, share_ratio: float) -> float:
    """The most of the same KV cache that a share of the requests fills: no more than all fill now,
    and the share of it where none waits. Infinite if the present usage is unknown."""
    now_ratio = context.facts.values.get("kv_usage_avg_ratio")
    if now_ratio is None:
        return inf
    return now_ratio if context.demand.waiting >= 1 else now_ratio * share_ratio


def predicted(context: LeverContext, change: After) -> dict[str, float]:
    """The numbers predicted after a change at the present load; unknown numbers are left out."""
    numbers = _sizes(context, change)
    demand_ratio = numbers.get("kv_demand_ratio")
    if demand_ratio is not None:
        demand = context.demand  # as measured before, in the mean
        mean_ratio = min(1.0, demand.mean_requests / max(demand.requests, 1.0))
        usage_ratio = min(1.0, demand_ratio * mean_ratio)
        if change.capacity_tokens is None and change.share_ratio < 1 and not demand.repeats:
            usage_ratio = min(usage_ratio, _shared_usage(context, change.share_ratio))
        numbers["kv_usage_ratio"] = usage_ratio
        if demand_ratio <= KV_TARGET_RATIO and _peak_fits(context, numbers):
            numbers["preemption_per_s"] = 0.0
    server = context.server
    hourly, gpus = server.stated.price_usd_per_gpu_hour, change.gpus or server.stated.engine_gpus
    if hourly is not None and gpus is not None:
        numbers["usd_per_hour"] = hourly * gpus * (change.replicas or server.replicas)
    speed = latencies(context, change)
    if speed is not None:
        numbers["ttft_s"], numbers["itl_s"] = speed.ttft_s, speed.itl_s
        requests = max(context.demand.mean_requests * change.share_ratio, 1.0)
        places = min(requests, max(1.0, numbers.get("max_concurrency", inf)))
        waits = _wait_for_seats(context, numbers, requests, speed)
        if waits is not None and requests <= places:
            numbers["ttft_s"] += waits.mean_s
        steps = _steps(context, change, speed)
        numbers.update(
            tails(context.curve, steps, speed, waits, running=places, queues=requests > places)
        )
        asked_per_s = asked_tokens_per_s(context)
        if asked_per_s is not None:
            possible_per_s = speed.tokens_per_s * (change.replicas or server.replicas)
            # Throughput cannot exceed the demand, whatever the capacity.
            generated_per_s = min(possible_per_s, asked_per_s)
            if context.demand.callers is None or possible_per_s <= asked_per_s:
                # How much more callers ask for when answers come sooner is unknown.
                numbers["output_tokens_per_s"] = generated_per_s
            if "usd_per_hour" in numbers:
                numbers["usd_per_million_tokens"] = (
                    numbers["usd_per_hour"] / (generated_per_s * 3600) * 1e6
                )
    return numbers


def _steps(context: LeverContext, change: After, speed: Latencies) -> Steps:
    demand, launch = context.demand, change.launch or context.server.launch
    return Steps(
        speed.itl_s,
        speed.prompt_s,
        speed.tokens_per_s / max(1.0, demand.output_tokens or 0.0),
        demand.prompts_vary,
        max(1, ceil(demand.computed_tokens / launch.batched_tokens)),
    )


def _wait_for_seats(
    context: LeverContext, numbers: Mapping[str, float], requests: float, speed: Latencies
) -> SeatQueue | CallerQueue | None:
    """The wait for a seat; None where that of a backlog changes all the time."""
    demand, seats = context.demand, floor(numbers.get("max_concurrency", 0))
    if demand.callers is None and requests < seats:
        stay_s = speed.ttft_s + (demand.output_tokens or 0.0) * speed.itl_s
        return SeatQueue(seats, requests, stay_s, demand.outputs_vary)
    if demand.callers is not None and requests > seats >= 1 and demand.output_tokens:
        per_s = speed.tokens_per_s / demand.output_tokens
        return CallerQueue(requests - seats, per_s, seats, demand.outputs_vary)
    return None


def speed_of(context: LeverContext, requests: float) -> Latencies | None:
    """Latencies and throughput where so many requests run at once and none queues."""
    full = replace(context.demand, requests=requests, mean_requests=requests)
    return latencies(replace(context, demand=full), After(seats=ceil(requests)))


def running_at_arrivals(context: LeverContext, *, most: float) -> float:
    """Requests that run at once where all that arrive find a seat (Little's law), `most` at most.

    Each stays as long as those that run now, times what a larger batch slows its steps by, as far
    as that is predicted.
    """
    demand, now = context.demand, max(context.demand.running, 1.0)
    if not demand.served_per_s:
        return demand.requests

    def stay_s(requests: float) -> float | None:
        then = speed_of(context, requests)
        if then is None:
            return None
        return then.ttft_s + (demand.output_tokens or 0.0) * then.itl_s

    running = at_present_speed = now * demand.arrival_per_s / demand.served_per_s
    now_s = stay_s(now)
    for _ in range(_SETTLE_ROUNDS if now_s else 0):
        then_s = stay_s(min(running, most))
        if then_s is None or running >= most:
            break
        running = at_present_speed * then_s / (now_s or then_s)
    return min(running, most)


def settled(context: LeverContext, change: After) -> After:
    """A smaller share of the load with the requests that then run at once (Little's law).

    Smaller batches take shorter steps, so requests also stay for a shorter time: fewer run than the
    share of those that run now. Unchanged in a closed loop, and where the predicted times and the
    measured rate do not give the requests that run now. A batch of unknown latency counts as too
    small.
    """
    demand, full = context.demand, change.share_ratio
    if demand.callers is not None:
        return change

    def stay_s(requests: float) -> float:
        share = requests / max(demand.mean_requests, 1.0)
        then = latencies(context, replace(change, share_ratio=share))
        return inf if then is None else then.ttft_s + (demand.output_tokens or 0.0) * then.itl_s

    running = max(demand.running, 1.0)
    if not SCALE_LOW <= demand.served_per_s * stay_s(running) / running <= SCALE_HIGH:
        return change

    def too_few(share: float) -> bool:
        requests = share * demand.mean_requests
        return demand.arrival_per_s * full * stay_s(requests) > requests

    share_ratio = end_of(too_few, holds=0.0, falls=full, halvings=_SETTLE_HALVINGS)
    return replace(change, share_ratio=share_ratio)


def asked_tokens_per_s(context: LeverContext) -> float | None:
    """Output tokens/s that users demand from all replicas: the present rate, scaled to the arrival
    rate."""
    demand, generated_per_s = context.demand, context.get("generation_tokens_per_s")
    if not generated_per_s or demand.served_per_s <= 0:
        return None
    grown = max(1.0, demand.arrival_per_s / demand.served_per_s)
    return generated_per_s * grown * context.server.replicas


def _peak_fits(context: LeverContext, numbers: Mapping[str, float]) -> bool:
    """Whether the requests fit also at their peak, not only on average."""
    capacity, held = numbers["kv_capacity_tokens"], context.demand.held_tokens or 1.0
    requests = numbers["kv_demand_ratio"] * capacity / held
    return context.demand.peak_tokens(requests) <= capacity


def _sizes(context: LeverContext, change: After) -> dict[str, float]:
    server, held = context.server, context.demand.held_tokens
    capacity = change.capacity_tokens or server.capacity_tokens
    seats = change.seats or context.seats
    numbers: dict[str, float] = {}
    if capacity is None:
        return numbers
    numbers["kv_capacity_tokens"] = floor(capacity)
    if server.launch.block_tokens and server.blocks:
        ratio = capacity / (server.capacity_tokens or capacity)
        usable = ratio * (server.blocks - 1)
        numbers["kv_blocks"] = floor(usable + 1 + 1e-6)
    if server.capacity_tokens:
        numbers["kv_capacity_ratio"] = capacity / server.capacity_tokens
    if held:
        most = floor(capacity / held)
        numbers["max_concurrency"] = min(most, seats) if seats else most
        requests = min(context.demand.requests * change.share_ratio, seats or inf)
        numbers["kv_demand_ratio"] = requests * held / capacity
    return numbers


def latencies(context: LeverContext, change: After) -> Latencies | None:
    """Latencies and throughput after a change; None if unknown.

    They are predicted by a roofline that is fitted to the server's step times. If the GPU is
    unknown or no roofline fits, they are computed from the measured step times alone.
    """
    performance = _by_roofline(context, change)
    if performance is None:
        return None if STEP_TIMES in context.memo else _by_own_steps(context, change)
    prompt_s = max(0.0, performance.prefill_s - performance.itl_s)
    ttft_s, itl_s = performance.ttft_s, performance.itl_s
    return Latencies(ttft_s, itl_s, performance.decode_tokens_per_s, prompt_s)


def _by_roofline(context: LeverContext, change: After) -> Performance | None:
    server, demand = context.server, context.demand
    itl_s = token_gap_s(context.facts.values)
    if server.sized_launch is None or server.sized_launch.gpu is None or not itl_s:
        return None
    try:
        load = _present_load(context, server.sized_launch)
        own = calibrated(
            costs_of(server.sized_launch),
            load,
            on_gpu(server.sized_launch.gpu),
            itl_s=itl_s,
            prefill_s=context.get("prefill_mean_s"),
        )
        if own is None:
            return None
        context.memo[STEP_TIMES] = {
            "decode_factor": own.decode_factor,
            "prefill_factor": own.prefill_factor,
        }
        launch = change.launch or server.sized_launch
        after = load_of(
            context,
            launch,
            requests=max(demand.requests * change.share_ratio, 1.0),
            most=max(1.0, _sizes(context, change).get("max_concurrency", inf)),
            saved_ratio=demand.saved_ratio if change.saved_ratio is None else change.saved_ratio,
        )
        return performance_of(costs_of(launch), after, own)
    except SizingError:
        return None


def _by_own_steps(context: LeverContext, change: After) -> Latencies | None:
    """Latencies and throughput of the present requests, from step times measured on this server.

    None if the server's batches were all larger or far smaller, or if the change makes its steps
    different.
    """
    facts, demand = context.facts, context.demand
    if not demand.input_tokens or not demand.output_tokens:
        return None
    steps = context.own_steps
    if steps is None or change.other_steps or change.saved_ratio is not None:
        return None
    context.memo[OWN_STEPS] = {
        "windows": len(steps.times_s),
        "least_running": steps.least_running,
        "most_running": steps.most_running,
        "age_s": facts.now_s - min(steps.times_s),
    }
    seats = change.seats or context.seats or inf
    requests = max(demand.mean_requests * change.share_ratio, 1.0)
    places = min(requests, max(1.0, _sizes(context, change).get("max_concurrency", seats)))
    if not steps.reaches(places):
        return None
    context_tokens = demand.input_tokens + demand.output_tokens / 2
    computed_tokens = demand.computed_tokens
    # A machine that has slowed down since its older windows is as slow after the change.
    gap_s, running = token_gap_s(facts.values), context.get("running_avg")
    # Compute both batches from one fit: other windows may be from times when the machine was
    # slower.
    now_s = steps.itl_s(running, context_tokens, near=places) if running else 0.0
    pace = gap_s / now_s if gap_s and now_s else 1.0
    context.memo[OWN_STEPS].update(pace_ratio=pace, error_ratio=steps.error_ratio, running=places)
    step_s, prompt_s = steps.itl_s(places, context_tokens), steps.prompt_s(places, computed_tokens)
    itl_s, was_s = pace * step_s, 0.0
    if running:
        was_s = steps.itl_s(running, context_tokens) + steps.prompt_s(running, computed_tokens)
    is_s = 0.0 if context.get("preemption_per_s") else context.get("prefill_mean_s")
    prompt_pace = is_s / was_s if is_s and was_s else pace
    prefill_s = (step_s + prompt_s) * prompt_pace
    prompts = Prompts(prompt_pace * prompt_s, demand.prompts_vary)
    request_s = prefill_s + (demand.output_tokens - 1) * itl_s
    queue_s = (requests - places) * request_s / places
    outside_s = steps.outside_s(places, prompts, prompts.per_s(places, request_s))
    ttft_s = outside_s + queue_s + prefill_s
    tokens_per_s = places * demand.output_tokens / request_s
    return Latencies(ttft_s, itl_s, tokens_per_s, prompts.mean_s, outside_s)


def calibrated(
    costs: Costs, load: Load, shares: Efficiency, *, itl_s: float, prefill_s: float
) -> Efficiency | None:
    """Roofline inputs that reproduce the measured ITL and prefill time at this load.

    Plain steps and the prompts in a step have a factor each. So a change in the number of requests
    changes TTFT and ITL as on this server. If the prefill time is not measured (0), or no two
    factors within the accepted range reproduce the ITL, one factor is used for both. None if the
    ITL is far from the roofline's.
    """
    scale = itl_s / performance_of(costs, load, shares).itl_s
    if not SCALE_LOW <= scale <= SCALE_HIGH:
        return None
    alike = replace(
        shares, request_s=shares.request_s * scale, decode_factor=scale, prefill_factor=scale
    )
    if not prefill_s:
        return alike
    own = alike
    for _ in range(_CALIBRATION_ROUNDS):
        now = performance(costs, load, own)
        own = replace(
            own,
            decode_factor=_accepted(own.decode_factor * itl_s / now.itl_s, shares.mbu_ratio),
            prefill_factor=_accepted(
                own.prefill_factor * prefill_s / now.prefill_s, shares.mfu_ratio
            ),
        )
    met = abs(performance(costs, load, own).itl_s / itl_s - 1)
    return own if met <= _CALIBRATED_RATIO else alike


def _accepted(factor: float, share: float) -> float:
    """The factor within the accepted range. One below the share of the peak would exceed it."""
    return min(max(factor, SCALE_LOW, share), SCALE_HIGH)


def _present_load(context: LeverContext, launch: Launch) -> Load:
    demand = context.demand
    running = max(demand.running, 1.0)
    return load_of(
        context,
        launch,
        requests=max(demand.requests, running),
        most=running if demand.waiting >= 1 else inf,
        saved_ratio=demand.saved_ratio,
    )


def changed_launch(context: LeverContext, **values: object) -> Launch | None:
    """The server's launch with some values changed; None if the launch is unknown.

    If the layout of the weights changes, the bytes that the server reported are dropped.
    """
    launch = context.server.sized_launch
    if launch is not None and not values.keys().isdisjoint(LAYOUT):
        launch = replace(launch, weights_bytes=None, available_kv_bytes=None)
    return None if launch is None else replace(launch, **values)


def resized_tokens(context: LeverContext, changed: Launch | None) -> float | None:
    """KV cache tokens of this server with another launch.

    The measured capacity times the computed ratio of new to present capacity. None if the ratio is
    unknown, if vLLM would not start, or if a block override fixes the capacity.
    """
    server = context.server
    if (
        changed is None
        or server.sized_launch is None
        or server.layout is None
        or not server.capacity_tokens
    ):
        return None
    if server.blocks_override is not None:
        return None
    now, then = computed_memory(server.sized_launch), computed_memory(changed)
    if now is None or then is None:
        return None
    if server.kv_memory_bytes is not None:
        return server.capacity_tokens * server.layout.block_bytes / then.layout.block_bytes
    held_now, held_then = (int(each.held.expected * each.launch.context) for each in (now, then))
    if not then.holds_one or held_now <= 0:
        return None
    return server.capacity_tokens * held_then / held_now
