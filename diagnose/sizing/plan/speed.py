"""What one instance of a plan would do at a concurrency, by the roofline, and its C_max. Pure.

The roofline gives means of a steady closed loop. P99s are derived from it: the TTFT of a P99
prompt, and the ITL of a step that carries a prompt's chunk where more than 1 % of the steps do.
Queueing by bursts is not in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.adapters import Adapters
from kneewatch.diagnose.sizing.memory.budget import Memory, memory
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.memory.weights import Parallel, weights_per_gpu
from kneewatch.diagnose.sizing.plan.model import Point, Pool, longest_request_tokens
from kneewatch.diagnose.sizing.plan.profile import Slo
from kneewatch.diagnose.sizing.speed.costs import Costs, launch_costs
from kneewatch.diagnose.sizing.speed.roofline import Drafting, Load, Performance, performance
from kneewatch.diagnose.sizing.steps import figure

BUDGETS_TOKENS = (4096, 2048, 1024, 512, 256)
"""Chunks to try beside vLLM's own budget (guide 6.4: 256 in its example, 512 or 1,024 in use)."""

GAIN_RATIO = 1.02
"""Less gain than this is no reason for another setting: the roofline is not that exact."""

_P99_STEP_RATIO = 0.01
_BATCH_GAIN_RATIO = 0.99
"""A batch runs at the lowest concurrency that gives this much of the highest throughput."""


def launch(
    pool: Pool, parallel: Parallel, *, quantization: str, kv_cache_dtype: str = "auto"
) -> Setup:
    """The launch of one instance; adapters and a draft's weights count as weights."""
    plain = weights_per_gpu(pool.model, scheme(quantization), parallel).total_bytes
    lora, drafted = pool.profile.lora, pool.profile.speculation
    extra_bytes = lora.max_simultaneous_adapters * lora.adapter_bytes if lora else 0.0
    adapters = None
    if lora and lora.max_lora_rank is not None:
        # Buffers of a rank are split over the GPUs by their own rule.
        adapters = Adapters(lora.max_simultaneous_adapters, lora.max_lora_rank)
    extra_bytes += drafted.draft_weights_bytes if drafted else 0.0
    longest = longest_request_tokens(pool)
    return Setup(
        model=pool.model,
        gpu=pool.gpu,
        parallel=parallel,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=longest,
        context_tokens=min(pool.tail_tokens, longest),
        weights_bytes=plain + extra_bytes / parallel.gpus,
        adapters=adapters,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One instance as it would run; `hit_ratio` is of input tokens, `stored_bytes` of the KV cache
    of one GPU is kept for prefixes."""

    pool: Pool
    setup: Setup
    memory: Memory
    costs: Costs
    hit_ratio: float = 0.0
    stored_bytes: float = 0.0
    drafting: Drafting | None = None

    @property
    def limit(self) -> int:
        """Requests of P95 length that run at once: what the KV cache and max_num_seqs admit."""
        if not self.memory.holds_one:
            return 0
        free = self.memory.available_bytes.expected - self.stored_bytes
        held = self.memory.layout.concurrency(free, self.setup.context)
        return max(min(int(held), self.setup.seqs), 0)


def serving(pool: Pool, setup: Setup) -> Serving:
    """An instance of that launch, with nothing cached and nothing drafted."""
    known = launch_costs(setup)
    return Serving(pool=pool, setup=setup, memory=memory(setup), costs=known)


def at(instance: Serving, concurrency: float) -> Performance:
    """The roofline's prediction at mean lengths."""
    lengths = instance.pool.lengths
    load = Load(
        input_tokens=lengths.mean_input_tokens,
        output_tokens=max(lengths.mean_output_tokens, 1.0),
        concurrency=concurrency,
        max_running=max(instance.limit, 1),
        max_num_batched_tokens=instance.setup.batched_tokens,
        prefix_hit_ratio=instance.hit_ratio,
        drafting=instance.drafting,
    )
    return performance(instance.costs, load)


def point(instance: Serving, concurrency: float) -> Point:
    """The same with P99s: of a P99 prompt, and of a step with a prompt's chunk."""
    lengths, found = instance.pool.lengths, at(instance, concurrency)
    longer = max(lengths.input_p99_tokens - lengths.mean_input_tokens, 0.0)
    chunked = found.prefill_step_ratio > _P99_STEP_RATIO
    step = found.prefill_step if chunked else found.decode_step
    return Point(
        concurrency=concurrency,
        requests_per_s=found.requests_per_s,
        ttft_p99_s=found.ttft_s + longer / found.prefill_tokens_per_s,
        itl_p99_s=max(step.total_s * found.draft_factor, found.itl_s),
    )


def keeps(found: Point, slo: Slo) -> bool:
    """Whether a point keeps every stated target."""
    return not missed(found, slo)


def missed(found: Point, slo: Slo) -> tuple[str, ...]:
    """The targets that a point misses, with its figures."""
    pairs = (("TTFT", found.ttft_p99_s, slo.ttft_p99_s), ("ITL", found.itl_p99_s, slo.itl_p99_s))
    return tuple(
        f"{name} P99 {figure(value)} s above {figure(target)} s"
        for name, value, target in pairs
        if target is not None and value > target
    )


def has_target(slo: Slo) -> bool:
    """Whether any target is stated."""
    return slo.ttft_p99_s is not None or slo.itl_p99_s is not None


def best_point(instance: Serving) -> Point | None:
    """C_max: the highest concurrency that keeps the targets; None where none does, or none is.

    A batch without targets runs at the lowest concurrency with 99 % of the highest throughput.
    Source: guide 8.3 step 1, 1.4.
    """
    profile, limit = instance.pool.profile, instance.limit
    if limit < 1:
        return None
    if not has_target(profile.slo):
        return _busiest(instance, limit) if profile.traffic.kind == "batch" else None
    if not keeps(point(instance, 1), profile.slo):
        return None
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if keeps(point(instance, middle), profile.slo) else (low, middle - 1)
        )
    return point(instance, low)


def _busiest(instance: Serving, limit: int) -> Point:
    found = [point(instance, count) for count in sweep(limit)]
    most = max(one.requests_per_s for one in found)
    return next(one for one in found if one.requests_per_s >= _BATCH_GAIN_RATIO * most)


def sweep(limit: int) -> tuple[int, ...]:
    """Concurrencies to measure at: powers of two up to the limit, and the limit."""
    powers = [2**power for power in range(int(math.log2(limit)) + 1)]
    return tuple(dict.fromkeys([*powers, limit]))


def usable_per_s(instance: Serving) -> float:
    """Requests/s at C_max; 0 where no concurrency keeps the targets, or none is stated."""
    best = best_point(instance)
    return 0.0 if best is None else best.requests_per_s


@dataclass(frozen=True, slots=True)
class Budgets:
    """Token budgets of a step with requests/s at the targets, and the instance with the best."""

    tried: tuple[tuple[int, float], ...]
    instance: Serving


def tuned(instance: Serving) -> Budgets:
    """The instance with the token budget that carries most at an ITL target; else vLLM's own.

    A smaller chunk stalls decoding less and lets prompts in slower; it takes other memory too.
    Source: guide 6.4.
    """
    own, most = instance.setup.batched_tokens, usable_per_s(instance)
    if instance.pool.profile.slo.itl_p99_s is None or instance.limit < 1:
        return Budgets((), instance)
    tried, chosen = [(own, most)], instance
    for tokens in BUDGETS_TOKENS:
        if tokens >= own:
            continue
        setup = replace(instance.setup, max_num_batched_tokens=tokens)
        smaller = replace(instance, setup=setup, memory=memory(setup))
        usable = usable_per_s(smaller)
        tried.append((tokens, usable))
        if usable > most * GAIN_RATIO:
            chosen, most = smaller, usable
    return Budgets(tuple(tried), chosen)


def fits(pool: Pool, setup: Setup, *, concurrency: int) -> bool:
    """Whether vLLM starts and holds that many requests of P95 length.

    Raises:
        SizingError: an input that cannot be, other than a split that the heads forbid.
    """
    try:
        return memory(setup).fits(concurrency)
    except SizingError as error:
        if error.name != "tensor_parallel":
            raise
        return False
