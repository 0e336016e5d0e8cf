"""Replica levers: more or fewer replicas, and their tensor-parallel degree. Pure."""

from __future__ import annotations

from math import ceil

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import TENSOR_SPLIT
from kneewatch.diagnose.account_signals import CHANGED_FROM, STREAM_RATE, STREAM_USUAL
from kneewatch.diagnose.capacity import Degree, DegreeComparison
from kneewatch.diagnose.causes.tensor_parallel import degree_text
from kneewatch.diagnose.deployment.deployment import memory_of
from kneewatch.diagnose.recommend.advice import REPLICAS, Advice
from kneewatch.diagnose.recommend.context import (
    MORE_CACHE_FROM,
    SETTLE_WORDS,
    LeverContext,
    advice,
)
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO, Demand
from kneewatch.diagnose.recommend.prediction import (
    After,
    asked_tokens_per_s,
    changed_launch,
    predicted,
    present,
    resized_tokens,
    settled,
)
from kneewatch.diagnose.sizing.memory.budget import HEADROOM_HIGH_RATIO, HEADROOM_LOW_RATIO
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.replica_count import SAFETY_DEFAULT
from kneewatch.rules.formatting import (
    about,
    duration,
    figure,
    percent,
    plural,
    span,
    stated_duration,
)

DRAIN_S = 300.0
"""Seconds within which a backlog should drain. Replicas that only shorten the drain are extra."""

PEAK_OVER = SAFETY_DEFAULT
"""The safety factor leaves this much room for a peak over the mean."""

HELD_SAFETY = 1.2
"""Replicas recommended before stay while they have this safety factor: what is left of it is what
estimates of one load vary by."""

MOST_TENSOR_PARALLEL = 8
MOST_TIMES_REPEATED = 2
"""Times the present replicas, and one more: a step where clients repeat calls that they give up."""

HARDLY_ANY = 0.05
"""A load ratio that is told in words."""

MOST_TIMES = 100.0
"""Above this load ratio, the server has another problem than too few replicas."""


def more_replicas(context: LeverContext) -> Advice | None:
    """More replicas for the rate at which requests arrive; None while a backlog drains by itself.

    If the KV cache is too small, also for the tokens of the requests that run at that rate.
    """
    demand, server, ratio = context.demand, context.server, _load_ratio(context)
    if ratio is None or ratio > MOST_TIMES or _helps_nobody(context):
        return None
    now, is_step = server.replicas, demand.repeats or _serves_all(context) or _serves_none(demand)
    needed, drains = _counts(now * ratio)["replicas_needed"], _drains(demand)
    if needed <= now and drains:
        return None if context.for_kv else _wait(context, ratio)
    if needed <= now and REPLICAS not in context.held:
        return None
    # What is held is for the load that may return. It has not while a backlog drains.
    total, held = max(now + 1, needed), context.held.get(REPLICAS)
    total = total if drains else context.steady(REPLICAS, total)
    if isinstance(held, int) and not drains and held > now and now * ratio * HELD_SAFETY <= held:
        total = held
    if demand.repeats:
        total = min(total, MOST_TIMES_REPEATED * now + 1)
    if demand.callers is None:  # the backlog is served once
        running = at_once(demand)
        mean = min(demand.mean_requests, running)
        context = replace(context, demand=replace(demand, requests=running, mean_requests=mean))
    after = settled(context, After(share_ratio=now / total, replicas=total))
    numbers = predicted(context, after)
    load_now, load_then = {"load_ratio": ratio}, {"load_ratio": ratio * now / total}
    if demand.repeats:
        load_now = {"served_per_s": demand.served_per_s, "arrival_per_s": demand.arrival_per_s}
    elif is_step:
        load_now = {}
    if is_step or context.for_kv:  # unknown, or said by the predicted KV usage
        load_then = {}
    counts = {} if is_step else _counts(now * ratio)
    hourly, generated_per_s = server.usd_per_hour, context.get("generation_tokens_per_s")
    if hourly is not None and generated_per_s and "usd_per_million_tokens" not in numbers:
        # Without a rate of requests, the KV demand bounds the tokens/s from above.
        asked_per_s, key = asked_tokens_per_s(context), "usd_per_million_tokens"
        if asked_per_s is None:
            asked_per_s, key = now * generated_per_s * max(ratio, 1.0), f"{key}_at_least"
        numbers[key] = hourly * total / (min(asked_per_s, generated_per_s * total) * 3600) * 1e6
    backlog_words, backlog = backlog_of(context, total)
    return advice(
        context,
        REPLICAS,
        [(REPLICAS, now, total)],
        f"{_load_words(context, ratio, total)}{backlog_words}",
        before={**present(context), **load_now},
        predicted={**numbers, **backlog, **load_then, **counts},
        cost_usd_per_hour=None if hourly is None else hourly * (total - now),
        checks=[
            "confirm that the router balances the load and keeps requests that share a prefix "
            "together",
        ],
        verify=[
            "once the new replicas serve"
            + (" and the backlog is drained" if demand.waiting >= 1 else "")
            + ", waiting_by_capacity and preemption_per_s fall to 0 on each replica "
            f"{SETTLE_WORDS}"
        ],
    )


def _wait(context: LeverContext, ratio: float) -> Advice:
    """No change: the present replicas serve more than arrives, and drain the backlog."""
    words, backlog = backlog_of(context, context.server.replicas)
    rate = f"Requests arrive at {about(ratio)}x the rate that {_have(context)} can serve."
    arrive = rate if ratio >= HARDLY_ANY else "Hardly any request arrives."
    return advice(
        context,
        "backlog-drains",
        [],
        f"{arrive}{words}",
        before={**present(context), "load_ratio": ratio, "replicas": context.server.replicas},
        predicted={**backlog, "load_ratio": ratio},
    )


def _have(context: LeverContext) -> str:
    server, now = context.server, context.server.replicas
    assumed = "" if server.stated.replicas else " (assuming 1 replica; set --replicas)"
    return f"{plural(now, 'replica')}{assumed}"


def _counts(replicas: float) -> dict[str, int]:
    """The replicas that the load fills, and those with the safety factor, as whole numbers."""
    return {
        "replicas_needed_at_least": ceil(round(replicas, 6)),
        "replicas_needed": ceil(round(replicas * SAFETY_DEFAULT, 6)),
    }


def _load_words(context: LeverContext, ratio: float, total: int) -> str:
    """The load over what the present replicas carry, and the number that it needs."""
    now, have = context.server.replicas, _have(context)
    if context.demand.repeats:
        served_per_s, calls_per_s = context.demand.served_per_s, context.demand.arrival_per_s
        return (
            f"{have} served {about(served_per_s)} of {about(calls_per_s)} calls/s. Clients that "
            "give up may call again, so the number that the load needs is unknown: "
            f"{total} are a step."
        )
    if _serves_none(context.demand):
        return (
            f"No request completes on {have}, so the number that the load needs is unknown: "
            f"{total} are a step."
        )
    if _serves_all(context):
        return (
            f"No request waits for {have}, so the number that the load needs is unknown: {total} "
            "are a step to smaller batches."
        )
    least, needed = _counts(now * ratio).values()
    bare = f"{least}, or " if now < least < needed else ""
    held = f" The {total} recommended before stay: the load may return." if total > needed else ""
    if total < needed:
        held = f" The {total} recommended before stay: {needed} are hardly more."
    load = (
        f"The requests that run at the rate of arrivals take {about(ratio)}x the KV cache of {have}"
        if context.for_kv
        else f"Requests arrive at {about(ratio)}x the rate that {have} can serve"
    )
    return f"{load}: it needs {bare}{needed} with a safety factor of {SAFETY_DEFAULT:g}.{held}"


def _load_ratio(context: LeverContext) -> float | None:
    """Load divided by the capacity of the present replicas, 1 where they serve it all; None if
    unknown.

    By requests/s; if the KV cache is too small, also by the KV tokens of the requests that run.
    """
    demand, capacity = context.demand, context.server.capacity_tokens
    if _serves_all(context):
        return 1.0
    if not context.for_kv:
        ratio = _ratio_past_knee(context) or demand.asked_ratio
        if ratio is not None and not _drains(demand):
            ratio = max(1.0, ratio)
    elif demand.held_tokens is None or not capacity:
        return None
    else:
        running = at_once(demand)
        ratio = max(running * demand.held_tokens, demand.peak_tokens(running) / PEAK_OVER)
        ratio /= capacity
    # The number of replicas follows from the ratio as the document has it.
    return None if ratio is None else float(f"{ratio:.4g}")


def _ratio_past_knee(context: LeverContext) -> float | None:
    """Arrivals over the rate up to which latency stays as it is; None while requests wait, or if
    that rate was not learned."""
    knee, demand = context.facts.knee, context.demand
    if demand.waiting >= 1 or demand.repeats or knee is None or not knee.reached:
        return None
    return demand.arrival_per_s / knee.usable_requests_per_s.expected


def _serves_all(context: LeverContext) -> bool:
    """Whether nothing shows how much the present replicas can serve: no request waits, and no load
    beyond their knee was seen."""
    demand, knee = context.demand, context.facts.knee
    is_known = context.for_kv or demand.repeats or demand.waiting >= 1
    return not is_known and (knee is None or not knee.reached)


def _serves_none(demand: Demand) -> bool:
    """Whether requests wait and none completes: nothing shows how many could."""
    return demand.waiting >= 1 and not demand.proven_per_s


def _helps_nobody(context: LeverContext) -> bool:
    """Whether no request waits, streams are as fast as in quiet times, and no target asks for
    more."""
    now, usual = context.get(STREAM_RATE), context.get(STREAM_USUAL)
    as_usual = usual > 0 and now * CHANGED_FROM > usual
    return as_usual and _serves_all(context) and not context.facts.targets.are_set


def at_once(demand: Demand) -> float:
    """The requests that run at once on each present replica at the rate of arrivals."""
    ratio = demand.asked_ratio
    if ratio is None or demand.waiting < 1 or demand.repeats:
        return demand.requests
    # Requests run for as long as now; less where preempted ones are computed again. Those that wait
    # are the backlog, or callers of a loop.
    return max(1.0, demand.running * (ratio if _drains(demand) else max(1.0, ratio)))


def _drains(demand: Demand) -> bool:
    """Whether a backlog shrinks, so that fewer requests arrive than the replicas serve."""
    return demand.waiting >= 1 and demand.load_ratio is not None and demand.load_ratio < 1


def backlog_of(context: LeverContext, replicas: int) -> tuple[str, dict[str, float]]:
    """A sentence about the requests that wait, and its numbers; both empty if none do.

    It is not counted as demand, because it has to be served only once, and grows with every minute
    of the overload. In a closed loop nothing drains: clients that are served call again.
    """
    demand, now = context.demand, context.server.replicas
    queued = demand.waiting * now
    if queued < 1:
        return "", {}
    on_all = f" on {now} replicas" if now > 1 else ""
    if demand.is_closed and demand.callers and demand.load_ratio is not None:
        callers = demand.callers * now
        return (
            f" {callers:,.0f} clients wait for their answers before they call again: faster "
            f"answers bring more requests, at most {callers:,.0f} at once.",
            {"callers": callers},
        )
    spare_per_s = demand.proven_per_s * replicas - demand.arrival_per_s * now
    if spare_per_s <= 0:
        return f" {queued:,.0f} wait{on_all}.", {"backlog_requests": queued}
    seconds = queued / spare_per_s
    unless = "" if demand.callers is None else " unless clients call again"
    more = ceil((queued / DRAIN_S - spare_per_s) / demand.proven_per_s)
    sooner, numbers = "", {"backlog_requests": queued, "backlog_drain_s": seconds}
    if more > 0:
        numbers.update(extra_replicas=more, backlog_drain_with_extra_s=DRAIN_S)
        sooner = f", or in {span(DRAIN_S)} with {plural(more, 'more replica')} until then"
    return (
        f" {queued:,.0f} requests wait{on_all}: drained in about {span(seconds)}{sooner}{unless}.",
        numbers,
    )


def tensor_parallel(context: LeverContext) -> Advice | None:
    """Twice the tensor-parallel degree, if model and GPU are known."""
    server = context.server
    now, launch = server.stated.degree, server.sized_launch
    if launch is None or launch.gpu is None or now is None or not server.capacity_tokens:
        return None
    to = 2 * now
    if to > min(MOST_TENSOR_PARALLEL, launch.gpu.nvlink_gpus):
        return None
    spread = Parallel(to, launch.parallel.pipeline, launch.parallel.data, launch.parallel.experts)
    wider = changed_launch(context, parallel=spread)
    capacity = resized_tokens(context, wider)
    if wider is None or capacity is None:
        return None
    ratio = capacity / server.capacity_tokens
    more = ratio >= MORE_CACHE_FROM
    if context.for_kv and not more:  # fixed bytes, or each GPU has a copy of the same KV heads
        return None
    gpus = to * launch.parallel.pipeline
    after = After(capacity_tokens=capacity, launch=wider, gpus=gpus, other_steps=True)
    numbers = predicted(context, after)
    hourly = server.usd_per_hour
    cache_words = f" leave {ratio:.1f}x the KV cache per replica, and" if more else ":"
    return advice(
        context,
        "tensor-parallel",
        [(TENSOR_SPLIT, now, to)],
        f"Weights spread over {to} GPUs{cache_words} each GPU reads half the weight bytes per "
        "step.",
        before=present(context),
        predicted=numbers,
        cost_usd_per_hour=None if hourly is None else hourly * server.replicas,
        checks=[
            f"confirm that the {to} GPUs are connected by NVLink",
            "compare tokens per GPU-hour in a benchmark",
        ],
    )


# --- Fewer replicas, sized for the weekly peak (guide 2.6, 8.3, 9.2) ------------------------------


MOST_ITL_GROWTH = 2.0
"""Largest growth of ITL at the peak if no ITL target is set."""

LEAST_REPLICAS = 2
"""Fewest replicas to keep: if a single one fails, no other takes over."""


def fewer_replicas(context: LeverContext) -> Advice | None:
    """Fewer replicas if the weekly peak leaves spare capacity; otherwise the reason to keep them.

    Sized for the requests at the peak, by KV cache and max_num_seqs, with 50% headroom. At the
    peak, ITL must meet its target; without a target, it may grow by MOST_ITL_GROWTH at most.
    """
    now, peak = context.server.stated.replicas, context.weekly_peak_requests
    if now is None or now < 2:
        return None
    if peak is None:
        return _kept(
            context,
            f"{now} replicas look too many for the present load, but they must serve the weekly "
            "peak, and kneewatch has not observed a full week yet.",
        )
    used, present_requests = used_ratio(context, peak), context.demand.requests
    if used is None or present_requests <= 0:
        return _kept(
            context,
            "The capacity of a replica is unknown, and so is the number of replicas that are "
            "needed.",
        )
    least, total = (
        max(ceil(round(now * used * (1 + headroom), 6)), LEAST_REPLICAS)
        for headroom in (HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO)
    )
    share = peak / present_requests
    numbers = predicted(context, After(share_ratio=share * now / total, replicas=total))
    at_peak_s = predicted(context, After(share_ratio=share)).get("itl_s")
    why = _why_not(context, now, total, then_s=numbers.get("itl_s"), at_peak_s=at_peak_s)
    if why:
        return _kept(context, f"At the weekly peak of {peak:.0f} requests per replica, {why}.")
    hourly = context.server.usd_per_hour
    with_less = f" ({least} with {percent(HEADROOM_LOW_RATIO)})" if least < total else ""
    return advice(
        context,
        "fewer-replicas",
        [(REPLICAS, now, total)],
        f"The weekly peak of {peak:.0f} requests per replica uses {percent(used)} of its "
        f"capacity; {total} replicas serve that peak with {percent(HEADROOM_HIGH_RATIO)} "
        f"headroom{with_less}.",
        before={**present(context), "requests_at_weekly_peak": peak},
        predicted=numbers,
        cost_usd_per_hour=None if hourly is None else hourly * (total - now),
        checks=[
            "confirm that the week was typical: no holiday, and no product launch ahead",
            f"confirm that your users accept an ITL of {duration(numbers['itl_s'])} at the peak",
            "remove one replica at a time, and confirm that the rest can lose one",
        ],
    )


def used_ratio(context: LeverContext, peak: float) -> float | None:
    """Share of one replica that `peak` requests use; None if its capacity is unknown.

    It is the larger share of KV cache and max_num_seqs.
    """
    server, demand = context.server, context.demand
    if demand.held_tokens is None or not server.capacity_tokens:
        return None
    kv = max(demand.peak_tokens(peak), peak * demand.held_tokens / KV_TARGET_RATIO)
    seats = peak / server.launch.max_num_seqs if server.launch.max_num_seqs else 0.0
    return max(kv / server.capacity_tokens, seats)


def _why_not(
    context: LeverContext, now: int, total: int, *, then_s: float | None, at_peak_s: float | None
) -> str:
    """Why fewer replicas are not recommended, as the end of a sentence; "" if they are.

    `then_s` is ITL in seconds at the peak with `total` replicas; `at_peak_s` with the present
    replicas.
    """
    if total >= now:
        return f"{now} replicas are needed for {percent(HEADROOM_HIGH_RATIO)} headroom"
    now_s = context.get("itl_mean_s")
    if then_s is None or at_peak_s is None or not now_s:
        return "fewer replicas would have enough KV cache, but their ITL cannot be predicted"
    target_s, tail_s = context.facts.targets.itl_p99_s, context.get("itl_p99_s")
    if target_s is None and then_s > MOST_ITL_GROWTH * at_peak_s:
        return (
            f"{total} replicas would raise ITL from {duration(at_peak_s)} to "
            f"{duration(then_s)}; if users accept that, set --slo-itl"
        )
    if target_s is not None and max(tail_s, now_s) * then_s / now_s > target_s:
        return f"{total} replicas would miss the ITL target of {stated_duration(target_s)}"
    return ""


def _kept(context: LeverContext, why: str) -> Advice:
    """A recommendation without a change, which gives the reason to keep the present replicas."""
    return advice(
        context,
        "fewer-replicas",
        [],
        why,
        before={
            "kv_usage_max_ratio": context.get("kv_usage_max_ratio"),
            "replicas": context.server.replicas,
        },
        cost_usd_per_hour=None,
        checks=["read kv_usage_max_ratio, running_max and waiting over a whole week"],
    )


# --- Lower tensor-parallel degree, more replicas on the same GPUs (guide 5.1, 8.5) ----------------


KEPT = ("kv_capacity_tokens", "kv_demand_ratio", "kv_usage_ratio", "usd_per_hour")
"""Predicted numbers that are shown. Speed is not, because the benchmark has measured it."""


def lower_tensor_parallel(context: LeverContext) -> Advice | None:
    """The benchmark's smaller degree on the same GPUs.

    None unless weights and KV cache certainly fit with the present load.
    """
    server, split = context.server, context.facts.split
    if split is None or split.wide is None or split.narrow is None or not split.far_below:
        return None
    wide, narrow, now = split.wide, split.narrow, server.replicas
    to, total = narrow.tensor_parallel, now * wide.tensor_parallel // narrow.tensor_parallel
    after = _after(context, wide, narrow, total)
    if after is None:
        return None
    computed = predicted(context, after)
    if not _has_room(context, computed.get("kv_demand_ratio")):
        return None
    least = max(ceil(now * wide.per_s / narrow.per_s), 1)
    times = figure(round(total * narrow.per_s / (now * wide.per_s), 1))
    return advice(
        context,
        "tensor-parallel-down",
        [(TENSOR_SPLIT, wide.tensor_parallel, to), (REPLICAS, now, total)],
        f"In the benchmark, {total} replicas with TP {to} deliver {times}x the throughput of {now} "
        f"with TP {wide.tensor_parallel} on the same or fewer GPUs; {least} would match the "
        "present throughput.",
        before={**present(context), **_limits(context, split, wide)},
        predicted={
            **{name: computed[name] for name in KEPT if name in computed},
            **_limits(context, split, narrow),
        },
        cost_usd_per_hour=_more_usd_per_hour(context, after, wide),
        checks=[
            f"confirm that the latencies of TP {to} are acceptable",
            "confirm that the benchmark used your prompt and output lengths and your prefix reuse",
        ],
        risk=f"Each request is slower. {degree_text(wide)}; {degree_text(narrow)}. Each of the "
        f"{total} replicas has its own prefix cache.",
        verify=[_verify(split, narrow)],
    )


def _limits(context: LeverContext, split: DegreeComparison, degree: Degree) -> dict[str, float]:
    """The highest throughput per GPU at this degree, and its price per token."""
    numbers = {f"{split.unit}_per_s_per_gpu": degree.per_s_per_gpu}
    launch, hourly = context.server.sized_launch, context.server.stated.price_usd_per_gpu_hour
    if launch is not None and hourly is not None and split.unit == "tokens":
        stages = launch.parallel.pipeline
        numbers["usd_per_million_tokens_at_limit"] = (
            hourly * stages / (degree.per_s_per_gpu * 3600) * 1e6
        )
    return numbers


def _more_usd_per_hour(context: LeverContext, after: After, wide: Degree) -> float | None:
    """Extra USD/h; negative if the smaller degree leaves GPUs unused. None without a price."""
    launch, hourly = context.server.sized_launch, context.server.stated.price_usd_per_gpu_hour
    stages = 1 if launch is None else launch.parallel.pipeline
    now = context.server.replicas * wide.tensor_parallel * stages
    more = (after.replicas or 0) * (after.gpus or 0) - now
    return 0.0 if not more else None if hourly is None else more * hourly


def _verify(split: DegreeComparison, narrow: Degree) -> str:
    rises = "completed_per_s per GPU rises"
    if split.unit == "tokens":
        most = figure(round(narrow.per_s_per_gpu, 1))
        rises = f"generation_tokens_per_s per GPU rises towards {most}"
    return (
        f"{rises} {SETTLE_WORDS} while requests queue; ttft_p99_s and itl_p99_s meet their targets"
    )


def _after(context: LeverContext, wide: Degree, narrow: Degree, total: int) -> After | None:
    """The server with the smaller degree; None unless it certainly fits."""
    server, to = context.server, narrow.tensor_parallel
    launch = server.sized_launch
    if launch is None or launch.gpu is None or launch.parallel.tensor != wide.tensor_parallel:
        return None
    narrower = changed_launch(context, parallel=replace(launch.parallel, tensor=to))
    capacity = resized_tokens(context, narrower)
    if narrower is None or capacity is None:
        return None
    # If the KV cache's bytes are fixed, they do not show whether the weights fit beside it.
    fit = memory_of(narrower)
    if not fit.holds_one or fit.held_tokens.low < narrower.longest_tokens:
        return None
    return After(
        capacity_tokens=capacity,
        launch=narrower,
        share_ratio=server.replicas / total,
        replicas=total,
        gpus=to * launch.parallel.pipeline,
    )


def _has_room(context: LeverContext, demand_ratio: float | None) -> bool:
    """Whether the smaller KV caches hold the load since the cause began, and the weekly peak if
    known."""
    if demand_ratio is None:
        return False
    requests, peak = context.demand.requests, context.weekly_peak_requests
    at_peak = demand_ratio * peak / requests if peak is not None and requests > 0 else 0.0
    return max(demand_ratio, at_peak) <= KV_TARGET_RATIO
