"""How many replicas a tier needs, and how to split them into prefill and decode. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import ceil

from msgspec.structs import replace

from kneewatch.diagnose.account_signals import DRAINS, STALL
from kneewatch.diagnose.catalogue.gpu_specs import recognise
from kneewatch.diagnose.catalogue.models import known_model
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.deployment.deployment import Deployment, Stated, deployment
from kneewatch.diagnose.deployment.server_facts import (
    GPU,
    GPUS,
    PAGE,
    POD,
    TENSOR_PARALLEL,
    VERSION,
    SourceReading,
    merge,
    printable,
)
from kneewatch.diagnose.deployment.vllm_flags import image_version
from kneewatch.diagnose.fleet.inventory import Group, Observed, Peak
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, middle
from kneewatch.diagnose.fleet.verdict import Split, TierSize
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.recommend.advice import REPLICAS, Advice
from kneewatch.diagnose.recommend.adviser import with_residual
from kneewatch.diagnose.recommend.context import LeverContext
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO, demand
from kneewatch.diagnose.recommend.levers_replicas import (
    at_once,
    fewer_replicas,
    more_replicas,
    used_ratio,
)
from kneewatch.diagnose.recommend.past_advice import HeldAdvice
from kneewatch.diagnose.sizing.arithmetic import Sheet
from kneewatch.diagnose.sizing.memory.budget import HEADROOM_HIGH_RATIO, HEADROOM_LOW_RATIO
from kneewatch.diagnose.sizing.replica_count import prefill_decode_ratio, ratio_text
from kneewatch.diagnose.verdict import Server, Value
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import percent, span
from kneewatch.rules.rule import DAY_S, Severity

SHARED_OUT = (
    "running",
    "running_avg",
    "waiting",
    "waiting_by_capacity",
    "waiting_slope_per_s",
    "expected_wait_s",
    "arrival_per_s",
    "completed_per_s",
    "generation_tokens_per_s",
    "computed_prompt_tokens_per_s",
    "kv_usage_ratio",
    "kv_usage_avg_ratio",
)
"""Signals whose total the load balancer divides; the average engine has their mean."""

PER_REQUEST = ("prompt_tokens_mean", "output_tokens_mean", "itl_mean_s", "prefix_hit_ratio")
"""Signals of single requests; the average engine has their median."""

WORST = ("itl_p99_s", "ttft_p99_s")
CONFIGURED = ("kv_capacity_tokens",)


def averaged(tier: Tier) -> dict[str, float | None]:
    """The signals of the tier's average engine; for P99s, those of the worst engine.

    What piles up on an engine that hangs is not the tier's demand.
    """
    working = [engine for engine in tier.engines if not engine.get(STALL)] or tier.engines

    def fold_signals(keys: tuple[str, ...], fold: Callable[[list[float]], float | None]) -> None:
        for key in keys:
            values = [value for e in working if (value := e.get(key)) is not None]
            signals[key] = fold(values) if values else None

    signals: dict[str, float | None] = {}
    fold_signals(SHARED_OUT, lambda values: sum(values) / len(values))
    fold_signals(PER_REQUEST, middle)
    fold_signals(WORST, max)
    fold_signals(CONFIGURED, min)
    computed, prompts = signals["computed_prompt_tokens_per_s"], signals["prompt_tokens_mean"]
    arrivals = signals["arrival_per_s"]
    if computed is not None and prompts and arrivals:
        signals["prefix_saved_ratio"] = max(0.0, 1 - computed / (prompts * arrivals))
    return signals


def server_of(tier: Tier, stated: Stated) -> Deployment:
    """The deployment of one engine of the tier: as stated, otherwise from its series."""
    return deployment(tier.engines[0].config, tier_facts(tier, stated, t_s=0.0)[1])


def tier_facts(tier: Tier, stated: Stated, *, t_s: float) -> tuple[Server, Stated]:
    """Facts about a tier's servers from its series at `t_s`, and the settings with these facts.

    The model comes from the label `model_name`, the version from the replicas' images, and the GPU
    from the tier's name. DCGM counts the GPUs of each pod; the pod's data-parallel engines share
    them evenly.
    """
    member, config = tier.engines[0].member, tier.engines[0].config
    pod = middle(engine.gpus.get("gpus") for engine in tier.engines)
    gpus = pod / (tier.engines_each or 1) if pod else 0.0
    gpus_each = int(gpus) if gpus and gpus == int(gpus) else None
    gpu = recognise(tier.tier) if tier.tier else None
    devices: dict[str, Value | None] = {
        GPU: None if gpu is None else gpu.id,
        "gpus": gpus_each,
        TENSOR_PARALLEL: gpus_each,
    }
    facts, completed = merge(
        replace(stated, replicas=tier.replicas),
        (
            SourceReading(PAGE, t_s, model=known_model(member.model)),
            _of_images({engine.image for engine in tier.engines}, t_s),
            SourceReading(GPUS, t_s, {k: v for k, v in devices.items() if v is not None}),
        ),
        config=config,
        model_names=(member.model,) if member.model else (),
        settings_s=t_s,
        page_s=t_s,
    )
    return facts, replace(completed, gpus=stated.gpus or gpus_each)


def _of_images(images: Set[str], t_s: float) -> SourceReading:
    """The vLLM version in the image tags of all replicas; if the tags differ, a note instead."""
    versions = sorted({image_version(image) or "" for image in images})
    if len(versions) > 1 and all(versions):
        note = f"replicas run different versions of vLLM: {', '.join(versions)}"
        return SourceReading(POD, t_s, notes=(note,))
    if len(versions) != 1 or not versions[0]:
        return SourceReading(POD, t_s)
    values: dict[str, Value] = {VERSION: versions[0]}
    if len(images) == 1:
        values["image"] = printable(next(iter(images)))
    return SourceReading(POD, t_s, values)


def average_engine(
    tier: Tier, server: Deployment, targets: Targets, cause: str, *, peak: float | None
) -> LeverContext:
    """The average engine and its server, as input of the levers against a cause.

    `peak`: the most requests on one engine within a week; None if unknown.
    """
    values = averaged(tier)
    if server.capacity_tokens is None:
        server = replace(server, capacity_tokens=values["kv_capacity_tokens"])
    facts = Facts(values, targets, config=server.config)
    asked = replace(demand(values, server), callers=None)  # new replicas serve a backlog once
    return LeverContext(cause, facts, server, asked, weekly_peak_requests=peak)


def at_load(context: LeverContext, requests: float) -> LeverContext:
    """The same context, but with `requests` running on each engine."""
    return replace(context, demand=replace(context.demand, requests=requests, waiting=0.0))


# --- How many replicas a tier needs for its measured peak (guide 2.6, 8.3, 9.1 step 11) -----------
#
# Arithmetic and guards are those of diagnose/recommend, applied to the tier's average engine.


LACKING = "more_replicas"
"""The lever of causes that are a lack of replicas. A stall, a router, or too few adapter slots are
none: more replicas would fill up too."""

MOST_OF = 0.5
"""A tier lacks replicas if more than this share of its engines lacks capacity: of two, the other
one has room."""

NO_PEAK = (
    "past load unknown: no series, or none with a label for the tier (--fleet-label tier=LABEL)"
)


def _size(
    tier: Tier,
    peak: Peak | None,
    stated: Stated,
    targets: Targets,
    *,
    problems: Sequence[FleetCause],
    incident: HeldAdvice,
    down: int,
    blind: bool,
    t_s: float,
) -> TierSize:
    """The size of a tier.

    `incident` has what was advised since the problems began. `problems` are the tier's causes at
    warning or worse: it is not reduced meanwhile, and its present shortage counts only if one of
    them is a lack of replicas. `needed` is None if the results are partial (`blind`) or replicas of
    the pool are `down`, because the replicas that answer are then not all of them.
    """
    server, now, engines = server_of(tier, stated), tier.replicas, tier.engines_each
    hourly, gpus = server.usd_per_hour, server.stated.engine_gpus
    unsized = TierSize(
        now,
        gpus_each=None if gpus is None or engines is None else gpus * engines,
        usd_per_hour=None if hourly is None else hourly * len(tier.engines),
        peak=peak,
    )
    if blind:
        return replace(unsized, why="the answer is partial")
    if any(engine.stage is None for engine in tier.engines):
        return replace(unsized, why="some of its engines cannot be judged yet")
    if down:
        verb = "is" if down == 1 else "are"
        return replace(unsized, why=f"{down} more of its pool {verb} down")
    if engines is None:
        return replace(unsized, why="its replicas differ in their number of data-parallel engines")
    if tier.role == "prefill":
        # A prefill replica is limited by compute, not by its cache; the P:D ratio sizes it.
        return replace(unsized, needed=now, why="prefill replicas are sized by the P:D ratio")
    if all(engine.member.throughput_only for engine in tier.engines):
        return replace(unsized, needed=now, why="throughput only: requests queue by design")
    lacks = not problems or any(LACKING in BY_ID[cause.id].levers for cause in problems)
    weekly = peak.requests / len(tier.engines) if peak and peak.weekly else None
    context = average_engine(tier, server, targets, "underused", peak=weekly)
    context = replace(context, facts=replace(context.facts, now_s=t_s), held=incident.values)
    if peak is None:
        more = _more_replicas(context, tier, 0.0, incident, lacks=lacks)
        if more is None:
            return replace(unsized, why=NO_PEAK)
        advice = _cost_of_replicas(more, tier)
        return replace(unsized, needed=_replicas_after(more, now), advice=advice)
    words = _problem_words(tier, problems)
    return _size_at_peak(unsized, tier, context, peak, words, incident, lacks=lacks)


def _size_at_peak(
    unsized: TierSize,
    tier: Tier,
    context: LeverContext,
    peak: Peak,
    problems: str,
    incident: HeldAdvice,
    *,
    lacks: bool,
) -> TierSize:
    now = unsized.present
    requests_each = peak.requests / len(tier.engines)
    used = used_ratio(context, requests_each)
    if used is None:
        return replace(unsized, why="the capacity of a replica is unknown")
    sized = replace(unsized, used_ratio=used)
    more = _more_replicas(context, tier, requests_each, incident, lacks=lacks)
    if more is not None:
        summary = f"{_peak_words(peak, used)}. {more.summary}"
        return replace(
            sized,
            needed=_replicas_after(more, now),
            advice=_cost_of_replicas(replace(more, summary=summary), tier),
        )
    kept = replace(sized, needed=now)
    if ceil(round(now * used * (1 + HEADROOM_LOW_RATIO), 6)) >= now:
        return replace(kept, why=f"{_peak_words(peak, used)}: the size is right")
    if problems:
        return replace(kept, why=f"not reduced while there is a problem: {problems}")
    if not peak.weekly:
        seen = f"{span(peak.seen_ratio * peak.span_s)} of load"
        return replace(kept, why=f"not reduced after only {seen}: it needs a week's peak")
    if context.demand.requests <= 0:
        return replace(kept, why="not reduced: no request is running now to measure ITL")
    fewer = fewer_replicas(context)
    if fewer is None or not fewer.changes:
        of_each = " Of each engine:" if tier.engines_each != 1 else ""
        detail = f".{of_each} {fewer.summary}" if fewer else ""
        return replace(kept, why=f"{_peak_words(peak, used)}{detail}")
    total = _replicas_after(fewer)
    summary = (
        f"{_peak_words(peak, used)}: {total} replicas are enough with "
        f"{percent(HEADROOM_HIGH_RATIO)} headroom."
    )
    return replace(
        sized, needed=total, advice=_cost_of_replicas(replace(fewer, summary=summary), tier)
    )


def _cost_of_replicas(advice: Advice, tier: Tier) -> Advice:
    """The advice, with the cost per engine multiplied by a replica's number of engines."""
    engines = tier.engines_each or 1

    def dollars(figures: Mapping[str, float]) -> dict[str, float]:
        return {
            key: value * (engines if key == "usd_per_hour" else 1) for key, value in figures.items()
        }

    cost = advice.cost_usd_per_hour
    return replace(
        advice,
        before=dollars(advice.before),
        predicted=dollars(advice.predicted),
        cost_usd_per_hour=None if cost is None else cost * engines,
    )


def _more_replicas(
    context: LeverContext, tier: Tier, requests_each: float, incident: HeldAdvice, *, lacks: bool
) -> Advice | None:
    """More replicas: enough for the peak with the guide's headroom, and for the present shortage.

    What was advised before in this incident is held. `requests_each` is the peak per engine (0:
    unknown). `lacks`: a present shortage is one of replicas. None if neither needs more replicas.
    """
    options: list[Advice | None] = []
    # A backlog has to be served only once; its growth is demand.
    evicting = lacks and _engines_ratio(tier, evicting=True) > MOST_OF
    present = at_once(context.demand)
    capacity = context.server.capacity_tokens
    at_peak = at_load(replace(context, cause="kv_pressure"), max(requests_each, present))
    if at_peak.demand.tokens is not None and capacity:
        ratio = at_peak.demand.tokens / capacity * (1 + HEADROOM_LOW_RATIO)
        now = tier.replicas
        if (requests_each and ceil(round(now * ratio, 6)) > now) or evicting:
            options.append(more_replicas(at_peak))
    queues = lacks and _engines_ratio(tier, evicting=False) > MOST_OF
    if queues and context.demand.waiting >= 1:
        options.append(more_replicas(replace(context, cause="queue_saturation")))
    most = max(filter(None, options), key=_replicas_after, default=None)
    if most is not None:
        incident.take([with_residual(most, context)], context.demand, context.facts.now_s)
    elif not queues:
        return None
    # While a queue ends, what was advised stays: nothing new follows from its absence.
    shown = (each for each in incident.recommendations if most is not None or each.changes)
    return next(shown, None)


def _engines_ratio(tier: Tier, *, evicting: bool) -> float:
    """With `evicting`, the share of engines that preempt; otherwise the share that only queue."""
    if evicting:
        shown = [engine for engine in tier.engines if (engine.stage or 0) >= 2]
    else:
        shown = [
            engine
            for engine in tier.engines
            if (
                (engine.get("waiting_min") or 0.0) >= 1
                or any(BY_ID[cause.id].queues for cause in engine.causes)
            )
            and not (engine.stage or 0) >= 2
            and not (engine.get(STALL) or engine.get(DRAINS))
        ]
    return len(shown) / len(tier.engines)


def _replicas_after(advice: Advice, now: int = 0) -> int:
    """The replicas after the advice; `now` if it changes none, as while a backlog drains."""
    after = (change.after for change in advice.changes if change.flag == REPLICAS)
    return int(next(after, now) or 0)


def _peak_words(peak: Peak, used: float) -> str:
    days = peak.span_s / DAY_S
    whole = "" if peak.seen_ratio >= 1 else f" ({percent(peak.seen_ratio)} of them seen)"
    return (
        f"Peak of {days:.3g} days{whole}: {peak.requests:.0f} requests running, "
        f"{percent(used)} of the tier's KV cache and seats"
    )


def _problems(tier: Tier, causes: Iterable[FleetCause]) -> list[FleetCause]:
    """The causes of a tier at warning or worse."""
    return [
        cause
        for cause in causes
        if cause.severity >= Severity.WARNING
        and cause.pool == tier.pool
        and cause.tier in ("", tier.tier)
    ]


def _problem_words(tier: Tier, problems: Sequence[FleetCause]) -> str:
    """The problems of a tier at warning or worse, and its engines with one; empty if none has."""
    ill = [e.member.name for e in tier.engines if e.severity >= Severity.WARNING]
    more = f" and {len(ill) - 1} more" if len(ill) > 1 else ""
    cause_ids = [cause.id for cause in problems]
    return ", ".join([*cause_ids, *([f"{ill[0]}{more}"] if ill else [])])


def sizes_of(
    tiers: Sequence[Tier],
    observed: Observed,
    causes: Sequence[FleetCause],
    stated: Stated,
    targets: Targets,
    incidents: dict[Group, HeldAdvice],
    *,
    blind: bool,
) -> list[TierSize]:
    """For each tier: its present replicas, the number that its measured peak needs, and advice.

    `incidents` has what was advised for each tier with a problem, and is brought up to date. With
    `blind` (the results are partial) the needed number is None.
    """
    down = Counter(replica.pool for replica in observed.gone if replica.down)
    problems = {tier.group: _problems(tier, causes) for tier in tiers}
    held = {group: incidents.get(group, HeldAdvice()) for group, own in problems.items() if own}
    incidents.clear()
    incidents.update(held)
    return [
        _size(
            tier,
            observed.past.peaks.get(tier.group),
            stated,
            targets,
            problems=problems[tier.group],
            incident=incidents.get(tier.group, HeldAdvice()),
            down=down[tier.pool],
            blind=blind,
            t_s=observed.t_s,
        )
        for tier in tiers
    ]


# --- Split of a disaggregated tier into prefill and decode (guide 6.5) ----------------------------
#
# A prefill replica's work is the share of time in which it has a request. A decode replica's is the
# share of its KV cache, or of its ITL target, that its requests use.


def splits_of(tiers: Sequence[Tier], stated: Stated, targets: Targets) -> list[Split]:
    """The split of each tier for which the roles and the work of the replicas are known."""
    return [
        split
        for prefill in tiers
        for decode in tiers
        if (prefill.role, decode.role) == ("prefill", "decode")
        and (prefill.pool, prefill.tier) == (decode.pool, decode.tier)
        and (split := _split(prefill, decode, stated, targets)) is not None
    ]


def _split(prefill: Tier, decode: Tier, stated: Stated, targets: Targets) -> Split | None:
    taken_each = [
        min(1.0, in_flight) for e in prefill.engines if (in_flight := e.in_flight) is not None
    ]
    # A replica with several engines counts with their mean.
    busy = sum(taken_each) * prefill.replicas / len(prefill.engines)
    taken = _decode_work(decode, stated, targets)
    arrivals = _total(prefill, "arrival_per_s")
    computed = _total(prefill, "computed_prompt_tokens_per_s")
    written = _total(decode, "generation_tokens_per_s")
    if taken is None or not (arrivals > 0 and computed > 0 and written > 0 and busy > 0):
        return None
    ratio = prefill_decode_ratio(
        Sheet(),
        peak_requests_per_s=arrivals,
        input_tokens=computed / arrivals,
        output_tokens=written / arrivals,
        prefill_tokens_per_s_per_gpu=computed / busy,
        decode_tokens_per_s_per_gpu=written / taken,
    )
    total = prefill.replicas + decode.replicas
    return Split(
        prefill.pool,
        prefill.tier or None,
        prefill.replicas,
        decode.replicas,
        ratio_text(ratio),
        busy / prefill.replicas,
        taken / decode.replicas,
        min(max(round(total * ratio / (1 + ratio)), 1), total - 1),
    )


def _decode_work(decode: Tier, stated: Stated, targets: Targets) -> float | None:
    """Decode work in replicas; None if unknown."""
    context = average_engine(decode, server_of(decode, stated), targets, "", peak=None)
    held, capacity = context.demand.held_tokens, context.server.capacity_tokens
    if held is None or not capacity:
        return None
    requests = context.demand.running + context.demand.waiting
    filled = requests * held / (KV_TARGET_RATIO * capacity)
    if targets.itl_p99_s:
        filled = max(filled, context.get("itl_p99_s") / targets.itl_p99_s)
    return filled * decode.replicas


def _total(tier: Tier, signal: str) -> float:
    return sum(engine.get(signal) or 0.0 for engine in tier.engines)
