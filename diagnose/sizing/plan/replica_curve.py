"""Steps 7 and 10 of a plan: the load that one replica can serve, predicted or measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.arithmetic import Sheet, Step, seconds
from kneewatch.diagnose.sizing.benchmark.latency_curve import Benchmark, littles_gap
from kneewatch.diagnose.sizing.benchmark.operating_point import (
    matched,
    missed_targets,
    operating_point,
)
from kneewatch.diagnose.sizing.benchmark.reports import read_benchmark
from kneewatch.diagnose.sizing.memory.budget import Memory, memory
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.weights import DEFAULT_RANK, Adapters, Parallel
from kneewatch.diagnose.sizing.plan.plan_result import Part, PlanStep, Pool, Value
from kneewatch.diagnose.sizing.replica_count import FleetSize
from kneewatch.diagnose.sizing.serving_cost import HOURS_PER_YEAR
from kneewatch.diagnose.sizing.speed.performance import Drafting, Load, Performance, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import Costs, costs, margins, safe_targets
from kneewatch.diagnose.sizing.speed.slo_capacity import highest, step_line, strain
from kneewatch.rules.formatting import figure, plural

BUDGETS_TOKENS = (4096, 2048, 1024, 512, 256)
"""Token budgets to try besides vLLM's own (guide 6.4: 256 in its example, 512 or 1,024 in use)."""

GAIN_RATIO = 1.02
"""Smallest gain that justifies changing a setting; the roofline is not more accurate than that."""

_P99_STEP_RATIO = 0.01
_BATCH_GAIN_RATIO = 0.99
"""A batch runs at the lowest concurrency that has this share of the highest throughput."""


def replica_launch(
    pool: Pool, parallel: Parallel, *, quantization: str, kv_cache_dtype: str = "auto"
) -> Launch:
    """The launch of one replica, with its adapters and the draft's weights."""
    lora, drafted = pool.profile.lora, pool.profile.speculation
    return replace(
        pool.launch,
        parallel=parallel,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        adapters=None
        if lora is None
        else Adapters(
            lora.max_simultaneous_adapters, lora.max_lora_rank or DEFAULT_RANK, lora.adapter_bytes
        ),
        added_bytes=drafted.draft_weights_bytes / parallel.gpus if drafted else 0.0,
    )


class Serving(Struct, frozen=True, kw_only=True):
    """One replica as it would run.

    `hit_ratio` is the share of input tokens that hit. `tail_hit_ratio` is that of what a P99 prompt
    has more than a mean one. `stored_bytes` of one GPU's KV cache are reserved for prefixes.
    """

    pool: Pool
    memory: Memory
    costs: Costs
    hit_ratio: float = 0.0
    tail_hit_ratio: float = 0.0
    stored_bytes: float = 0.0
    drafting: Drafting | None = None

    @property
    def launch(self) -> Launch:
        return self.memory.launch

    @property
    def limit(self) -> int:
        """The most requests of P95 length that can run at once, given the KV cache and
        max_num_seqs. A prefill server computes one prompt at a time."""
        if not self.memory.starts:
            return 0
        engines = self.launch.parallel.data
        if self.pool.phase == "prefill":
            return engines
        free = self.memory.available_bytes.expected - self.stored_bytes
        held = self.memory.layout.held(free, self.launch.context)
        return max(min(int(held), self.launch.seqs), 0) * engines


def serving(pool: Pool, launch: Launch) -> Serving:
    """A replica of this launch, without prefix caching or speculation.

    A decode server computes no prompt.
    """
    cached = float(pool.phase == "decode")
    return Serving(
        pool=pool,
        memory=memory(launch),
        costs=costs(launch),
        hit_ratio=cached,
        tail_hit_ratio=cached,
    )


def at(replica: Serving, concurrency: float) -> Performance:
    """The roofline's prediction of one engine for a concurrency of the replica, with mean lengths.

    Data-parallel engines have equal parts of it.
    """
    lengths, engines = replica.pool.lengths, replica.launch.parallel.data
    load = Load(
        input_tokens=lengths.mean_input_tokens,
        output_tokens=max(lengths.mean_output_tokens, 1.0),
        concurrency=_per_engine(replica, concurrency),
        max_running=max(replica.limit / engines, 1),
        max_num_batched_tokens=replica.launch.batched_tokens,
        prefix_hit_ratio=replica.hit_ratio,
        drafting=replica.drafting,
    )
    return performance(replica.costs, load)


def _per_engine(replica: Serving, concurrency: float) -> float:
    return max(concurrency / replica.launch.parallel.data, min(concurrency, 1.0))


def point(replica: Serving, concurrency: float) -> BenchmarkPoint:
    """The prediction with P99s: TTFT of a P99 prompt, ITL of a step with a prompt's chunk, and the
    latency of a P99 answer at the mean ITL."""
    return _tail(replica, concurrency, at(replica, concurrency))


def _tail(replica: Serving, concurrency: float, predicted: Performance) -> BenchmarkPoint:
    lengths = replica.pool.lengths
    longer = max(lengths.input_p99_tokens - lengths.mean_input_tokens, 0.0)
    longer *= 1 - replica.tail_hit_ratio
    # Engines that share their experts step together: the prompt of one delays all.
    chunked = predicted.prefill_step_ratio * replica.launch.parallel.data > _P99_STEP_RATIO
    step = predicted.prefill_step if chunked else predicted.decode_step
    ttft_s = predicted.ttft_s + longer / predicted.prefill_tokens_per_s
    busy = concurrency / _per_engine(replica, concurrency)
    return BenchmarkPoint(
        concurrency=concurrency,
        requests_per_s=predicted.requests_per_s * busy,
        ttft_p99_s=ttft_s,
        itl_p99_s=max(step.total_s * predicted.loop.factor, predicted.itl_s),
        latency_p99_s=ttft_s + max(lengths.output_p99_tokens - 1, 0) * predicted.itl_s,
    )


def best_point(replica: Serving) -> BenchmarkPoint | None:
    """The predicted point at C_max, the highest concurrency at which P99s meet the targets, and
    means with the margin for the prediction's error that a search leaves too.

    None if no concurrency meets the targets. Without targets: None, or for batch traffic (offline
    jobs) the lowest concurrency that reaches 99% of the highest throughput.

    Source: guide 8.3 step 1, 1.4.
    """
    profile, limit = replica.pool.profile, replica.limit
    if limit < 1:
        return None
    if not profile.slo.are_set:
        return _busiest(replica, limit) if profile.traffic.kind == "batch" else None

    safe = safe_targets(profile.slo, replica.launch)

    def seen_at(count: int) -> tuple[BenchmarkPoint, Performance]:
        predicted = at(replica, count)
        return _tail(replica, count, predicted), predicted

    def exceeds(seen: tuple[BenchmarkPoint, Performance]) -> tuple[float, str]:
        tail, mean = seen
        return max(
            strain(profile.slo, tail.ttft_p99_s, tail.itl_p99_s, tail.latency_p99_s),
            strain(safe, mean.ttft_s, mean.itl_s),
        )

    count, (best, _), _ = highest(seen_at, exceeds, limit)
    return best if count else None


def predicted_misses(replica: Serving, tail: BenchmarkPoint) -> tuple[str, ...]:
    """The targets that a predicted point misses: by its P99s, or by its means with the margin for
    the prediction's error."""
    slo, mean = replica.pool.profile.slo, at(replica, tail.concurrency)
    safe = safe_targets(slo, replica.launch)
    return (
        *missed_targets(tail, slo),
        *(
            f"mean {name} {seconds(mean_s)} at {tail.concurrency:g} in flight, above the "
            f"{seconds(safe_s)} that the target leaves with a margin for the prediction's error"
            for name, mean_s, safe_s in safe.beside(mean.ttft_s, mean.itl_s)
            if mean_s > safe_s
        ),
    )


def _busiest(replica: Serving, limit: int) -> BenchmarkPoint:
    points = [point(replica, count) for count in sweep(limit)]
    most = max(candidate.requests_per_s for candidate in points)
    return next(
        candidate for candidate in points if candidate.requests_per_s >= _BATCH_GAIN_RATIO * most
    )


def sweep(limit: int) -> tuple[int, ...]:
    """Concurrencies to measure: powers of two up to the limit, and the limit itself."""
    powers = [2**power for power in range(int(math.log2(limit)) + 1)]
    return tuple(dict.fromkeys([*powers, limit]))


def usable_per_s(replica: Serving) -> float:
    """Requests/s at C_max; 0 if no concurrency meets the targets or no target is stated."""
    best = best_point(replica)
    return 0.0 if best is None else best.requests_per_s


def tuned(replica: Serving) -> tuple[Serving, list[tuple[int, float]]]:
    """The replica with the best token budget, and each budget tried with its requests/s.

    The best budget serves the most within the ITL target. Without an ITL target, or with a stated
    budget, the launch's own is kept. A smaller chunk delays decoding less, but prefills more slowly
    and changes the memory.

    Source: guide 6.4.
    """
    own, most = replica.launch.batched_tokens, usable_per_s(replica)
    is_stated = "max_num_batched_tokens" in replica.pool.deployment.flags
    if replica.pool.profile.slo.itl_p99_s is None or replica.limit < 1 or is_stated:
        return replica, []
    tried, chosen = [(own, most)], replica
    for tokens in BUDGETS_TOKENS:
        if tokens >= own:
            continue
        launch = replace(replica.launch, max_num_batched_tokens=tokens)
        smaller = replace(replica, memory=memory(launch))
        usable = usable_per_s(smaller)
        tried.append((tokens, usable))
        if usable > most * GAIN_RATIO:
            chosen, most = smaller, usable
    return chosen, tried


def refusal(pool: Pool, launch: Launch) -> str:
    """Why the launch is no replica: vLLM refuses its split, or the KV cache holds fewer requests of
    P95 length than planned; empty if it is.

    Raises:
        SizingError: another input is invalid.
    """
    concurrency = planned_concurrency(pool)
    try:
        held = memory(launch).fits(math.ceil(concurrency / launch.parallel.data))
    except SizingError as error:
        if error.name not in ("tensor_parallel", "dcp"):
            raise
        return str(error)
    return (
        ""
        if held
        else f"the KV cache would not hold {plural(concurrency, 'request')} of P95 length"
    )


def planned_concurrency(pool: Pool) -> int:
    """Requests that one replica must hold: the stated number, otherwise 1."""
    return pool.deployment.concurrency or 1


# --- Steps 7 and 10: the load of one replica, measured or predicted (guide 8.3) ------------------


_STALL_RATIO = 1.5
_SOURCE = "roofline; guide 3, 8.2"
_SWEEP = "a sweep over concurrency with production lengths (P50, P95 and P99), 500 requests "
_MORE = (
    "or more per point behind 1,000 requests of warm-up: TTFT and ITL P50 and P99, requests/s, "
    "tokens/s, GPU utilization; then a burst of two to three times the peak, with the time to "
    "recover"
)


class Sized(Struct, frozen=True, kw_only=True):
    """A fleet of one split and precision, with the settings of steps 8 and 9.

    It is predicted first, to be compared with others. The chosen one has its steps 4 to 10, and its
    rate is measured or stated where the profile says so.

    - `parts`: the decisions of step 9.
    - `point`: the replica at C_max; None if no concurrency is known to meet the targets.
    - `unmet`: the stated requirement that the replica does not keep; empty if it keeps all.
    - `usable_source`: measured, predicted, stated or unknown.
    - `usd_per_year_by_gpu`: None for a GPU that was not compared, or that cannot hold or serve the
      load.
    """

    replica: Serving
    parts: tuple[Part, ...]
    point: BenchmarkPoint | None
    unmet: str
    usable_requests_per_s: float | None
    usable_source: str = "predicted"
    usd_per_year_by_gpu: Mapping[str, float | None] = {}
    steps: tuple[PlanStep, ...] = ()

    @property
    def pool(self) -> Pool:
        """The load, and what is stated of the fleet."""
        return self.replica.pool

    @property
    def parallel(self) -> Parallel:
        return self.replica.launch.parallel

    @property
    def scheme_id(self) -> str:
        """The precision of the weights."""
        return self.replica.launch.scheme.id

    @property
    def fleet(self) -> FleetSize | None:
        """The fleet for the planned peak; None if usable requests/s are unknown."""
        return self.pool.fleet(self.usable_requests_per_s, self.parallel.gpus)

    @property
    def usd_per_year(self) -> float | None:
        """The price of all GPUs of the fleet; None if usable requests/s are unknown."""
        if self.fleet is None:
            return None
        return self.fleet.gpus * self.pool.usd_per_gpu_hour * HOURS_PER_YEAR

    @property
    def capacity_per_s(self) -> float | None:
        """Requests/s of the deployed fleet within the targets; None if unknown."""
        if self.fleet is None or self.usable_requests_per_s is None:
            return None
        return self.fleet.deployed_instances * self.usable_requests_per_s

    @property
    def utilization_ratio(self) -> float | None:
        """The stated average utilization, or else the average load divided by the capacity; None
        if unknown."""
        stated = self.pool.profile.traffic.utilization_ratio
        average, capacity_per_s = self.pool.average_requests_per_s, self.capacity_per_s
        if stated is not None or average is None or capacity_per_s is None:
            return stated
        return min(average / capacity_per_s, 1.0)

    def decided(self, number: int) -> Mapping[str, Value]:
        return next(step.output for step in self.steps if step.number == number)


class ReplicaCurve(Struct, frozen=True):
    """The load of one replica within the targets. `source` is measured, predicted or unknown."""

    best: BenchmarkPoint | None
    source: str
    part: Part


def measured_curve(pool: Pool, name: str, benchmarks: Mapping[str, str]) -> ReplicaCurve:
    """The operating point of a benchmark that the profile names.

    Raises:
        SizingError: the benchmark's text is missing or cannot be read.
    """
    if name not in benchmarks:
        raise SizingError(f"benchmark {name!r} is named in the profile but missing", name="plan")
    lengths, slo = pool.lengths, pool.profile.slo
    table = matched(
        read_benchmark(benchmarks[name]),
        pool.model,
        input_tokens=lengths.mean_input_tokens,
        output_tokens=lengths.mean_output_tokens,
    )
    if not slo.are_set:
        return _untargeted(pool, table)
    measured = operating_point(table, slo)
    part = Part(notes=[*table.notes])
    part.sheet.text(*measured.steps)
    part.notes += [flag.message for flag in measured.flags]
    best = measured.c_max
    if slo.e2e_p99_s is not None and any(row.latency_p99_s is None for row in table.points):
        part.to_measure.append(
            "E2E latency P99: the benchmark has none, so its target was not compared (vllm bench "
            "serve --percentile-metrics ttft,tpot,itl,e2el)"
        )
        if slo.ttft_p99_s is None and slo.itl_p99_s is None:
            return ReplicaCurve(None, "unknown", part)
    if best is None:
        return ReplicaCurve(None, "measured", part)
    # The targets stand for the latency where the benchmark has no mean.
    latency_s = slo.ttft_p99_s if best.latency_mean_s is None else best.latency_mean_s
    if latency_s is None:
        part.notes.append("Little's law was not checked: the benchmark reports no mean latency")
    else:
        gap = littles_gap(
            part.sheet,
            concurrency=best.concurrency,
            requests_per_s=best.requests_per_s,
            latency_s=latency_s,
            is_target=best.latency_mean_s is None,
        )
        part.notes.append(f"Little's law: {gap.meaning}")
    return ReplicaCurve(best, "measured", part)


def _untargeted(pool: Pool, table: Benchmark) -> ReplicaCurve:
    if pool.profile.traffic.kind != "batch":
        notes = ["no latency target is set: the benchmark has no C_max"]
        return ReplicaCurve(None, "unknown", Part(notes=notes))
    best = max(table.points, key=lambda row: row.requests_per_s)
    step = Step(
        title="Highest throughput",
        formula="highest requests/s of the benchmark",
        values=f"at {best.concurrency:g} in flight",
        result=f"{figure(best.requests_per_s)} requests/s",
        source="guide 1.4",
    )
    part = Part(notes=[*table.notes])
    part.sheet.text(step)
    return ReplicaCurve(best, "measured", part)


def predicted_curve(replica: Serving) -> ReplicaCurve:
    """The roofline's curve, with what to measure before relying on it."""
    profile, limit = replica.pool.profile, replica.limit
    part = Part(to_measure=[_SWEEP + _MORE])
    if limit < 1:
        longest = replica.launch.longest_tokens
        part.notes.append(f"the KV cache holds no request of {longest:,} tokens")
        return ReplicaCurve(None, "unknown", part)
    best = best_point(replica)
    part.notes.append("predicted, not measured, and without bursts: run a benchmark before you buy")
    if profile.slo.are_set:
        part.notes.append(
            "means have a margin to the targets as wide as the accuracy: "
            f"{margins(profile.slo, replica.launch)}"
        )
    if best is None and profile.slo.are_set:
        part.notes.append(
            "even a single request is predicted to miss a target, so no concurrency meets them"
        )
    elif best is None:
        part.notes.append("no latency target is set: C_max and usable RPS are unknown")
    elif best.concurrency < limit and profile.slo.are_set:
        beyond = point(replica, best.concurrency + 1)
        part.notes.append(
            f"with one more request in flight: {'; '.join(predicted_misses(replica, beyond))}"
        )
        if beyond.itl_p99_s > _STALL_RATIO * best.itl_p99_s:
            part.notes.append(
                "beyond C_max more than 1% of the steps contain a prefill chunk: a smaller token "
                "budget, more GPUs per replica or two pools would raise it"
            )
    elif best.concurrency >= limit:
        of = "of P95 length, by KV cache or max_num_seqs"
        if replica.pool.phase == "prefill":
            of = "because each engine computes a prompt at a time"
        part.notes.append(f"the limit is {plural(limit, 'concurrent request')} {of}")
    part.sheet.text(*(_sweep_step(replica, count) for count in sweep(limit)))
    if best is not None:
        _best(part.sheet, replica, best)
    return ReplicaCurve(best, "unknown" if best is None else "predicted", part)


def _sweep_step(replica: Serving, count: int) -> Step:
    measured = point(replica, count)
    slo = replica.pool.profile.slo
    verdict = ""
    if slo.are_set:
        verdict = (
            ", misses a target" if predicted_misses(replica, measured) else ", meets the targets"
        )
    return Step(
        title=f"{count} in flight",
        formula="predicted",
        values=f"TTFT P99 {seconds(measured.ttft_p99_s)}, ITL P99 {seconds(measured.itl_p99_s)}",
        result=f"{figure(measured.requests_per_s)} requests/s{verdict}",
        source=_SOURCE,
    )


def _best(sheet: Sheet, replica: Serving, best: BenchmarkPoint) -> None:
    predicted, lengths = at(replica, best.concurrency), replica.pool.lengths
    step_line(
        sheet,
        f"Decode step at {best.concurrency:g} in flight ({figure(predicted.running)} decoding)",
        predicted.decode_step,
        source="guide 3.3, 5.1",
    )
    sheet.line(
        "Usable RPS of one replica",
        "{requests in flight} / ({mean TTFT} + ({output tokens} - 1) x {mean ITL})",
        (best.concurrency, predicted.ttft_s, lengths.mean_output_tokens, predicted.itl_s),
        result="{} requests/s",
        source="Little's law; guide 8.3 step 2",
    )


def curve_step(pool: Pool, curve: ReplicaCurve, *, number: int) -> PlanStep:
    """Step 7 or 10 of the plan: one replica's benchmark, before or after the optimizations."""
    best = curve.best
    again = "Benchmark again with all optimizations on"
    step = PlanStep(
        number=number,
        title="Benchmark one replica" if number == 7 else again,
        decision="usable requests/s per replica are unknown",
        output={
            "source": curve.source,
            "c_max": None if best is None else best.concurrency,
            "usable_requests_per_s": None if best is None else best.requests_per_s,
            "ttft_p99_s": None if best is None else best.ttft_p99_s,
            "itl_p99_s": None if best is None else best.itl_p99_s,
        },
        tier=pool.name,
    )
    if best is not None:
        step.decision = (
            f"C_max {best.concurrency:g} in flight, {figure(best.requests_per_s)} requests/s per "
            f"replica ({curve.source})"
        )
    step.add(curve.part)
    return step
