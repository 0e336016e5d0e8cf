"""The size and cost of a tier: the replicas that its peak needs, and the price of its GPUs.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import LONGEST_TOKENS
from kneewatch.collector.signals.table import PREFILL
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.deployment.deployment import Deployment, deployment
from kneewatch.diagnose.engine_history import PastAdvice
from kneewatch.diagnose.sizing.arithmetic import Sheet
from kneewatch.diagnose.sizing.configuration_search import search
from kneewatch.diagnose.sizing.memory.weights import ONE_GPU
from kneewatch.diagnose.sizing.replica_count import (
    SAFETY_DEFAULT,
    circuit_breaker,
    input_limit,
    size_fleet,
)
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.size import Size, size
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.advice import levers, live
from kneewatch.reports.weekly.figures import DOWN, UP, Trend
from kneewatch.reports.weekly.knee import SHORT_OF_CAPACITY, Curve
from kneewatch.reports.weekly.measures import Measure, Of, TierPeriod, trend, unknown
from kneewatch.reports.weekly.observed import EngineObserved, Span, TierObserved
from kneewatch.reports.weekly.report import (
    Lengths,
    MemoryPart,
    Option,
    Saving,
    TierMoney,
    TierSize,
    TierWorkload,
)
from kneewatch.reports.weekly.slo_and_workload import quantile, requests_per_s
from kneewatch.rules.formatting import number, plural
from kneewatch.rules.rule import HOUR_S, MINUTE_S, Severity


class Need(Struct, frozen=True):
    """The number of replicas that the peak needs.

    `usable_per_s` is the number of requests/s that one engine can serve; `source` says where this
    number comes from. `least`: it is a lower bound, because no higher load was observed.
    `in_time_per_s` is set if it is an upper bound: the highest rate that was observed in time.

    `fewest` replicas can serve the peak with the margin. `most` is the number according to the
    guide, which applies the margin to whole instances (9.1 step 11), at `in_time_per_s` if that is
    set. A fleet between the two has the right size.
    """

    peak_per_s: float | None
    usable_per_s: float | None
    source: str
    least: bool
    in_time_per_s: float | None = None
    fewest: int | None = None
    most: int | None = None

    def replicas(self, present: int) -> int | None:
        """The number of replicas between `fewest` and `most` that is nearest to `present`. None if
        the two are unknown."""
        if self.fewest is None or self.most is None:
            return None
        return min(max(present, self.fewest), self.most)


def need_of(work: TierWorkload, knee: Curve | None, answer: Size | None) -> Need:
    """The number of replicas that the measured peak needs."""
    peak = work.arrivals.p99_per_s.value
    usable, in_time, source, least = None, None, "", False
    if knee is not None:
        usable = knee.learned.most_requests_per_s
        expected = knee.learned.usable_requests_per_s.expected
        in_time = expected if expected < usable else None
        source, least = "learned", not knee.learned.reached
    elif answer is not None and answer.usable_requests_per_s is not None:
        usable, source = answer.usable_requests_per_s, answer.usable_source
    if peak is None or not usable:
        return Need(peak, usable, source, least, in_time)
    # `size_fleet` counts GPUs, by default one per instance: these are replicas.
    fewest, deployed = (
        size_fleet(Sheet(), peak_requests_per_s=max(peak, 1e-6), usable_requests_per_s=rate)
        for rate in (usable, in_time or usable)
    )
    return Need(
        peak, usable, source, least, in_time, fewest.gpus_rounded_once, deployed.deployed_instances
    )


def verdict_of(
    need: Need, replicas: int, roots: Mapping[str, Severity]
) -> tuple[str, tuple[str, ...]]:
    """The verdict on the size (right, too small, too large or unknown), and doubts about it.

    `roots` has the worst severity of each root cause: a queue behind a fault is no lack of
    capacity.
    """
    short = any(roots.get(cause, Severity.OK) >= Severity.WARNING for cause in SHORT_OF_CAPACITY)
    needed = need.replicas(replicas)
    if needed is None or not replicas:
        return ("too small" if short else "unknown"), ()
    if needed > replicas:
        if need.least and not short:
            note = (
                "all load was served and no engine reached its limit, so it is unknown whether "
                "the fleet is too small"
            )
            return "unknown", (note,)
        return "too small", _between(need)
    if short:
        note = "there were incidents of too little capacity: investigate them before resizing"
        return ("unknown" if needed < replicas else "right"), (note,)
    return ("too large" if needed < replicas else "right"), ()


def _between(need: Need) -> tuple[str, ...]:
    """A note, if the limit of one engine lies between two rates that are far apart."""
    if need.in_time_per_s is None:
        return ()
    return (
        f"one engine was in time at {number(need.in_time_per_s)} requests/s and late at "
        f"{number(need.usable_per_s or 0.0)}; loads between were not seen, so more replicas than "
        "these may be needed",
    )


def headroom(need: Need, replicas: int) -> float | None:
    """The capacity of the fleet divided by its peak, minus 1. None if unknown."""
    carried = None if need.usable_per_s is None else need.usable_per_s * replicas
    ratio = m.over(carried, need.peak_per_s)
    return None if ratio is None else ratio - 1


# --- Sizing of a tier for its measured workload ---------------------------------------------------
#
# The capacity of an engine is learned from the period's own windows, or else predicted from model
# and GPU (guide 8.3, 9.1 step 11).


PRESENT_S = 2 * HOUR_S
"""Seconds before the newest scrape of a tier over which its replicas are counted."""

NEAR = (0.9, 1.1)
"""The server's KV capacity counts as expected from 0.9 times the lower end to 1.1 times the upper
end of the predicted range."""


def sized(
    tier: TierObserved,
    work: TierWorkload,
    knee: Curve | None,
    now: TierPeriod,
    *,
    roots: Mapping[str, Severity],
    recommended: Sequence[PastAdvice],
) -> TierSize:
    """The sizing of a tier for its measured peak."""
    stated, replicas = tier.stated, replicas_present(tier.now.engines)
    newest = max(reversed(tier.now.engines), key=lambda engine: engine.last_s, default=None)
    launched = deployment(newest.config if newest else {}, stated.server)
    answer, problem = _answer(tier, work, launched, replicas)
    need = need_of(work, knee, answer)
    verdict, doubts = verdict_of(need, replicas, roots)
    # From the least that an engine can serve follows only the most that is needed.
    is_known = verdict != "unknown" or not need.least
    gpus_each, needed = launched.stated.engine_gpus, need.replicas(replicas) if is_known else None
    kv_peak = m.top(m.KV_USAGE, serving=True)(now.whole)
    exported = m.level("kv_capacity_tokens")(now.whole)
    capacity = launched.capacity_tokens or exported
    return TierSize(
        tier=tier.id,
        verdict=verdict,
        relative=launched.sized_launch is None or stated.server.gpu is None,
        replicas_present=replicas,
        replicas_needed=needed,
        gpus_present=replicas * gpus_each if gpus_each else None,
        gpus_needed=needed * gpus_each if gpus_each and needed else None,
        peak_requests_per_s=need.peak_per_s,
        usable_requests_per_s=need.usable_per_s,
        usable_source=need.source,
        safety=SAFETY_DEFAULT,
        headroom_ratio=headroom(need, replicas) if is_known else None,
        memory=_memory(answer),
        gpu_memory_bytes=stated.server.gpu.memory_bytes if stated.server.gpu else None,
        kv_capacity_tokens=capacity,
        kv_peak_tokens=capacity * kv_peak if capacity and kv_peak is not None else None,
        kv_peak_ratio=kv_peak,
        options=_options(answer),
        levers=levers(answer, replicas, needed, recommended),
        doubts=doubts,
        notes=(
            *problem,
            *_other_capacity(answer, exported or capacity),
            *((*answer.doubts, *answer.notes) if answer else ()),
        ),
        limits=limits(
            work.prompt,
            work.output,
            now,
            served_per_s=None if need.usable_per_s is None else need.usable_per_s * replicas,
            ttft_target_s=stated.profile.targets.ttft_p99_s,
            max_model_len=launched.launch.max_model_len,
        ),
        schedule=schedule(
            requests_per_s(tier.now),
            now,
            usable_per_s=None if need.least else need.usable_per_s,
        ),
        missing=_missing(launched, need),
    )


def replicas_present(engines: Sequence[EngineObserved]) -> int:
    """The number of replicas at the end of the period: the mean number of engines that ran at the
    same time in the last PRESENT_S seconds. Seconds in which no engine ran do not count.

    In a rollout, an old pod and its replacement count as one replica.
    """
    if not engines:
        return 0
    newest_s = max(engine.last_s for engine in engines)
    from_s = max(newest_s - PRESENT_S, min(engine.first_s for engine in engines))
    if newest_s <= from_s:
        return len(engines)
    lives = sorted(
        (max(engine.first_s, from_s), engine.last_s) for engine in engines if engine.last_s > from_s
    )
    alive_s = served_s = 0.0
    until_s = from_s
    for first_s, last_s in lives:
        alive_s += last_s - first_s
        served_s += max(0.0, last_s - max(first_s, until_s))
        until_s = max(until_s, last_s)
    return max(1, round(alive_s / served_s))


def _answer(
    tier: TierObserved, work: TierWorkload, launched: Deployment, replicas: int
) -> tuple[Size | None, tuple[str, ...]]:
    """The sizing result for the present launch. If there is none: None, and the reason."""
    if tier.program:
        return None, (f"sizes are not computed for {tier.program}",)
    if launched.sized_launch is None:
        return None, (launched.misfit,) if launched.misfit else ()
    targets = tier.stated.profile.targets
    question = Question(
        launch=launched.sized_launch,
        replicas=max(replicas, 1),
        input_tokens=work.prompt.mean.value or None,
        output_tokens=work.output.mean.value or None,
        peak_requests_per_s=work.arrivals.p99_per_s.value or None,
        targets=targets,
        usd_per_gpu_hour=tier.stated.server.price_usd_per_gpu_hour,
    )
    try:
        return size(question), ()
    except SizingError as error:
        return None, (f"sizing failed: {error}",)


def _other_capacity(answer: Size | None, capacity: float | None) -> tuple[str, ...]:
    """A note, if the KV cache of the server differs from the predicted size."""
    if answer is None or answer.question.launch.gpu is None or not capacity:
        return ()
    predicted = answer.memory.logged_tokens
    if NEAR[0] * predicted.low <= capacity <= NEAR[1] * predicted.high:
        return ()
    return (
        f"vLLM reports a KV cache of {capacity:,.0f} tokens, the prediction is "
        f"{predicted.expected:,.0f}: check that model, GPU and launch are set correctly",
    )


def _memory(answer: Size | None) -> tuple[MemoryPart, ...]:
    """The memory of one GPU by part."""
    if answer is None or answer.question.launch.gpu is None:
        return ()
    memory = answer.memory
    parts: list[MemoryPart] = []
    if memory.weights_bytes is not None:
        parts.append(MemoryPart("weights", memory.weights_bytes))
    if memory.overhead is not None:
        parts += [
            MemoryPart("activations", memory.overhead.activation_bytes),
            MemoryPart("framework", memory.overhead.framework_bytes),
            MemoryPart("CUDA graphs", memory.overhead.graphs_bytes),
        ]
    parts.append(MemoryPart("KV cache", max(memory.available_bytes.expected, 0.0)))
    used = sum(part.bytes for part in parts)
    left = answer.question.launch.gpu.memory_bytes - used
    return (*parts, MemoryPart("left free", max(left, 0.0)))


def _options(answer: Size | None) -> tuple[Option, ...]:
    """The cheapest launches that serve the measured workload, on the data-centre GPUs of the
    catalogue."""
    if answer is None or not answer.question.targets.are_set:
        return ()
    try:
        best = search(_unpriced(answer.question)).best
    except SizingError:
        return ()
    return tuple(
        Option(
            gpu=option.gpu.id,
            tensor_parallel=option.launch.parallel.tensor,
            replicas=option.replicas,
            gpus=option.gpus,
            usd_per_hour=option.usd_per_hour,
            usable_requests_per_s=option.requests_per_s,
            text=f"{option.replicas} x {option.gpu.name} TP {option.launch.parallel.tensor}, "
            f"weights {option.launch.scheme.id}, KV cache {option.launch.kv_cache_dtype}, "
            f"{ceil(option.concurrency)} requests in flight each",
        )
        for option in best
    )


def _unpriced(question: Question) -> Question:
    """The question without the present GPU, without its price, and without the parallelism of the
    present launch."""
    launch = replace(
        question.launch, gpu=None, parallel=ONE_GPU, gpu_memory_utilization=None, block_tokens=None
    )
    return replace(question, launch=launch, usd_per_gpu_hour=None)


def _missing(launched: Deployment, need: Need) -> str:
    lacking: list[str] = []
    if need.usable_per_s is None:
        alike = "the loads so far are too alike to learn the capacity of one engine"
        lacking.append(alike if need.peak_per_s else "no request was served")
    if launched.sized_launch is None and not launched.misfit:
        names = launched.stated.lacking or ["model", "gpu", "tensor_parallel"]
        lacking.append(f"set {', '.join(names)} (or launch_file) for memory and cheaper launches")
    return "; ".join(lacking)


# --- A tier's cost, output and idle hours (guide 9.1 step 12, 9.2) --------------------------------


HOURS_PER_MONTH = 730.0
"""A twelfth of a year."""

NO_GPUS = "number of GPUs per engine not set (gpus, or tensor_parallel)"
NO_PRICE = "no price set (usd_per_gpu_hour), and the GPU is unknown (gpu)"
NO_MEMORY = "the GPU is unknown (gpu), or the number of GPUs per engine (gpus)"
NO_TARGET = "no TTFT target set (slo.ttft_p99_s)"
NO_CURVE = "no GPU source, and the capacity of an engine is unknown"
SCALE_DOWN = "scale-down"


def money(
    tier: TierObserved,
    size: TierSize,
    knee: Curve | None,
    now: TierPeriod,
    before: TierPeriod,
    recommended: Sequence[PastAdvice],
) -> TierMoney:
    """The bill of a tier for the period."""
    gpus, price = tier.stated.server.engine_gpus, tier.stated.server.price_usd_per_gpu_hour
    missing = NO_GPUS if gpus is None else NO_PRICE if price is None else ""
    whole = now.whole
    hours = None if gpus is None else whole.engine_s / HOUR_S * gpus
    idle = None if gpus is None else whole.idle_s / HOUR_S * gpus
    rate = None if gpus is None or price is None else gpus * price
    used, basis = _utilization(knee, now, before)

    def figure(key: str, name: str, unit: str, of: Of, good: str = "", *, missing: str) -> Trend:
        return trend(Measure(key, name, unit, of, good, missing), now, before)

    return TierMoney(
        tier=tier.id,
        gpus=size.gpus_present,
        gpu_hours=hours,
        usd_per_gpu_hour=price,
        price_source=tier.stated.price_source,
        usd=figure("usd", "cost", "usd", _usd(rate), missing=missing),
        tokens_per_gpu_hour=figure(
            "tokens_per_gpu_hour", "tokens per GPU-hour", "tokens", m.tokens_per_gpu_hour(gpus), UP,
            missing=NO_GPUS if gpus is None else "no tokens counted",
        ),
        usd_per_million_tokens=figure(
            "usd_per_million_tokens", "cost per million generated tokens", "usd_per_million_tokens",
            _per_million(rate), DOWN, missing=missing or "no tokens counted",
        ),
        requests_per_s_per_gpu=figure(
            "requests_per_s_per_gpu", "requests/s per GPU", "per_s",
            m.per_gpu(m.COMPLETED, gpus), UP, missing=NO_GPUS,
        ),
        requests_in_time_per_usd=figure(
            "requests_in_time_per_usd", "requests within the targets per USD", "requests_per_usd",
            _in_time_per_usd(tier, rate), UP, missing=missing or NO_TARGET,
        ),
        tokens_per_s_per_hbm_gb=figure(
            "tokens_per_s_per_hbm_gb", "tokens/s per GB of GPU memory", "tokens_per_s",
            m.per_gpu(m.GENERATED, _hbm_gb(tier, gpus)), UP, missing=NO_MEMORY,
        ),
        usd_per_million_tokens_at_full=m.over(
            rate, knee.tokens_per_s * HOUR_S / 1e6 if knee else None
        ),
        utilization_ratio=used,
        utilization_basis=basis,
        idle_hours=idle,
        idle_ratio=m.over(whole.idle_s, whole.watched_s),
        idle_usd=None if idle is None or price is None else idle * price,
        savings=_savings(size, price, recommended),
        missing=missing,
    )  # fmt: skip


def _usd(rate: float | None) -> Of:
    """A function that returns the cost of a span in USD. Each hour of an engine counts, whether
    busy or idle."""
    return lambda span: None if rate is None else span.engine_s / HOUR_S * rate


def _in_time_per_usd(tier: TierObserved, rate: float | None) -> Of:
    """A function that returns the requests served within the targets per USD (guide 8.4: latency
    against cost)."""
    targets = tier.stated.profile.targets
    good = m.goodput(targets.ttft_p99_s, targets.itl_p99_s)

    def read(span: Span) -> float | None:
        good_per_s = good(span)
        return None if good_per_s is None else m.over(good_per_s * span.clock_s, _usd(rate)(span))

    return read


def _hbm_gb(tier: TierObserved, gpus: int | None) -> float | None:
    """GPU memory of one engine in units of 10^9 bytes. None if its GPUs are unknown."""
    gpu = tier.stated.server.gpu
    return None if gpu is None or gpus is None else gpus * gpu.memory_bytes / 1e9


def _per_million(rate: float | None) -> Of:
    def read(span: Span) -> float | None:
        paid, tokens = _usd(rate)(span), span.counts.get(m.GENERATED)
        return None if tokens is None else m.over(paid, tokens / 1e6)

    return read


def _utilization(knee: Curve | None, now: TierPeriod, before: TierPeriod) -> tuple[Trend, str]:
    """The share of the capacity that was used on average, and a text on how it was computed. It is
    GPU activity or, if that is unknown, the load divided by the capacity."""
    busy = Measure("utilization_ratio", "utilization", "ratio", m.level(m.GPU_BUSY), UP,
                   missing=NO_CURVE)  # fmt: skip
    if now.value(busy) is not None:
        return trend(busy, now, before), "share of time with GPU activity"
    if knee is None:
        return unknown(busy, NO_CURVE), ""
    usable = knee.learned.most_requests_per_s

    def load(span: Span) -> float | None:
        return m.over(span.counts.get(m.COMPLETED), span.engine_s * usable)

    basis = "requests served divided by the usable capacity of the engines"
    return trend(replace(busy, of=load), now, before), basis


def _savings(
    size: TierSize, price: float | None, recommended: Sequence[PastAdvice]
) -> tuple[Saving, ...]:
    """What resizing and each open recommendation save, the largest first; without those that save
    nothing."""
    savings: list[Saving] = []
    present, needed, replicas = size.gpus_present, size.gpus_needed, size.replicas_needed
    if size.verdict == "too large" and price is not None and present and needed and replicas:
        saved = (present - needed) * price
        savings.append(
            Saving(
                SCALE_DOWN, "", "",
                f"{plural(replicas, 'replica')} instead of {size.replicas_present}", "open", saved,
                saved * HOURS_PER_MONTH,
                "less headroom: remove one replica at a time and watch TTFT P99 at the next peak",
            )
        )  # fmt: skip
    subjects = {
        (each.recommendation.id, each.target, each.engine): each for each in live(recommended)
    }
    for (advised_id, target, engine), newest in subjects.items():
        of = newest.recommendation
        if (saved := -(of.cost_usd_per_hour or 0.0)) > 0:
            month = saved * HOURS_PER_MONTH
            savings.append(
                Saving(
                    advised_id, target, engine, of.summary, newest.outcome, saved, month, of.risk
                )
            )
    return tuple(sorted(savings, key=lambda saving: -(saving.saves_usd_per_hour or 0.0)))


# --- Limits for the gateway, and replicas by hour (guide 9.2, 9.4) --------------------------------


SCHEDULED = {"Mon-Fri": range(5), "Sat-Sun": range(5, 7)}
HOURS = range(24)


def limits(
    prompt: Lengths, output: Lengths, now: TierPeriod, *,
    served_per_s: float | None, ttft_target_s: float | None, max_model_len: int | None,
) -> tuple[str, ...]:  # fmt: skip
    """The limits on input, output and queue, or why one is unknown. `served_per_s` is the rate of
    the whole tier at its limit."""
    lines: list[str] = []
    p95, p99, answers = prompt.p95.value, prompt.p99.value, output.p99.value
    if p95 and p99 and answers:
        longest = (max_model_len or inf) - answers
        allowed = input_limit(
            Sheet(), p95_input_tokens=p95, p99_input_tokens=p99, max_model_len=max(longest, 1.0)
        )
        model = "" if max_model_len is None else f" (now {max_model_len:,})"
        lines += [
            f"max_input_tokens {allowed:,}: twice the P95 prompt, at least its P99",
            f"max_tokens {ceil(answers):,}: the P99 output. With both, {LONGEST_TOKENS} "
            f"{allowed + ceil(answers):,} is enough{model}",
        ]
    unknown = "the rate that the tier can serve is unknown" if served_per_s is None else ""
    if ttft_target_s is None:
        unknown = "no TTFT target set (slo.ttft_p99_s)"
    if unknown or ttft_target_s is None or not served_per_s:
        return (*lines, f"no queue limit: {unknown}")
    try:
        low, high = circuit_breaker(
            Sheet(),
            ttft_target_s=ttft_target_s,
            arrivals_per_s=served_per_s,
            served_per_s=served_per_s,
            quiet_ttft_s=m.mean(PREFILL)(now.whole) or 0.0,
        )
    except SizingError as error:
        return (*lines, f"no queue limit: {error}")
    return (*lines, f"HTTP 429 from {low:,} to {high:,} queued requests on, in the whole tier")


def schedule(
    rates_per_s: list[float | None], now: TierPeriod, *, usable_per_s: float | None
) -> tuple[str, ...]:
    """Replicas by hour for workdays and weekends, each rise an hour ahead; empty if they are always
    as many or hours are unknown. `rates_per_s`: the tier's requests/s by minute of the period."""
    busiest: dict[tuple[str, int], float] = {}
    for slot in now.grid.slots:
        at = [round((t_s - now.grid.from_s) / MINUTE_S) for t_s in (slot.start_s, slot.end_s)]
        rates = [rate for rate in rates_per_s[at[0] : at[1]] if rate is not None]
        name = next(name for name, days in SCHEDULED.items() if slot.weekday in days)
        if rates:
            place = (name, slot.hour)
            busiest[place] = max(busiest.get(place, 0.0), quantile(rates, 0.95))
    if not usable_per_s or len(busiest) < len(SCHEDULED) * len(HOURS):
        return ()
    needed = {
        place: size_fleet(
            Sheet(),
            peak_requests_per_s=max(rate, 1e-6),
            usable_requests_per_s=usable_per_s,
        ).gpus_rounded_once
        for place, rate in busiest.items()
    }
    lines: list[str] = []
    for name in SCHEDULED:
        warm = [max(needed[name, hour], needed[name, (hour + 1) % 24]) for hour in HOURS]
        steps = [
            f"from {hour:02}:00 {warm[hour]}" for hour in HOURS[1:] if warm[hour] != warm[hour - 1]
        ]
        lines.append(f"{name}: " + ", ".join([plural(warm[0], "replica"), *steps]))
    return tuple(lines) if len(set(needed.values())) > 1 else ()
