"""Steps 4, 5 and 8 of a plan: the memory floor, quantization, and the KV cache. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.arithmetic import Step, figure
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of
from kneewatch.diagnose.sizing.memory.kv_reuse import (
    RESERVE_HIGH_RATIO,
    computed_tokens,
    contexts_held,
    link_bytes_per_s,
    prefixes_held,
    reserve_bytes,
    transfer_s,
)
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.memory.overhead import (
    ACTIVATION_RATIO,
    FRAMEWORK_HIGH_RATIO,
    FRAMEWORK_LOW_RATIO,
    HEADROOM_LOW_RATIO,
    MemoryNeed,
    activation_bytes,
    block_padding_tokens,
    gpus_with_headroom,
    kv_quantization_gain,
    min_gpus,
)
from kneewatch.diagnose.sizing.memory.weights import (
    DEFAULT_RANK,
    ONE_GPU,
    Adapters,
    adapter_bytes,
    check_adapters,
    weights_per_gpu,
)
from kneewatch.diagnose.sizing.plan.instance_curve import Serving, at, serving
from kneewatch.diagnose.sizing.plan.plan_result import (
    PlanStep,
    Pool,
    Value,
    counted,
    longest_request_tokens,
)
from kneewatch.diagnose.sizing.plan.workload_profile import Prefix

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Memory that one instance needs by the guide's sum, over all its GPUs.

    `gpus_low` reserves 5% of each GPU for the framework, `gpus` 10%; headroom is the guide's 30%
    and 50%.
    """

    need: MemoryNeed
    concurrency: int
    request_bytes: float
    gpus_low: int
    gpus: int
    headroom_gpus: tuple[int, int]
    steps: tuple[Step, ...]


def planned_concurrency(pool: Pool) -> int:
    """Requests that one instance must hold: as stated, else the minimum to be useful."""
    return pool.deployment.concurrency or 1


def memory_floor(pool: Pool, *, quantization: str, kv_cache_dtype: str) -> Floor:
    """The floor at a precision. Activations stay at the checkpoint's own precision.

    Raises:
        SizingError: parameters that cannot be counted, or an unknown dtype.
    """
    profile, weights = pool.profile, _weights_bytes(pool, quantization)
    setup = Setup(
        model=pool.model,
        gpu=pool.gpu,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=longest_request_tokens(pool),
    )
    request_bytes = kv_layout_of(setup).request_bytes(pool.tail_tokens)
    concurrency, lora = planned_concurrency(pool), profile.lora
    draft_bytes = profile.speculation.draft_weights_bytes if profile.speculation else 0.0
    need = MemoryNeed(
        weights_bytes=weights + draft_bytes,
        kv_bytes=request_bytes * concurrency,
        activation_bytes=activation_bytes(
            weights_bytes=_weights_bytes(pool, pool.model.quantization)
        ),
        simultaneous_adapters=lora.max_simultaneous_adapters if lora else 0,
        adapter_bytes=_adapter_bytes(pool),
    )
    total, vram = need.total_bytes, pool.gpu.memory_bytes
    fewest = partial(min_gpus, needed_bytes=total, vram_bytes=vram)
    spare = partial(
        gpus_with_headroom, needed_bytes=total, vram_bytes=vram * (1 - FRAMEWORK_HIGH_RATIO)
    )
    gpus = fewest(framework_ratio=FRAMEWORK_HIGH_RATIO)
    return Floor(
        need=need,
        concurrency=concurrency,
        request_bytes=request_bytes,
        gpus_low=fewest(framework_ratio=FRAMEWORK_LOW_RATIO),
        gpus=gpus,
        headroom_gpus=(spare(headroom_ratio=HEADROOM_LOW_RATIO), spare()),
        steps=_floor_steps(pool, need, gpus, request_bytes, concurrency, quantization),
    )


def _adapter_bytes(pool: Pool) -> float:
    """Bytes of one adapter: as stated, or of the buffers for its rank."""
    lora = pool.profile.lora
    if lora is None or lora.max_lora_rank is None:
        return lora.adapter_bytes if lora else 0.0
    adapter = Adapters(1, lora.max_lora_rank)
    check_adapters(adapter, pool.model)
    return adapter_bytes(pool.model, adapter, ONE_GPU)


def _small_adapters(pool: Pool) -> list[str]:
    """The note that an adapter's stated bytes are below vLLM's buffers; empty where not."""
    lora = pool.profile.lora
    if lora is None or lora.max_lora_rank is not None:
        return []
    buffers = adapter_bytes(pool.model, Adapters(1, DEFAULT_RANK), ONE_GPU)
    if lora.adapter_bytes >= buffers:
        return []
    return [
        f"adapter_bytes {figure(lora.adapter_bytes / 1e6)} MB is an adapter's file; vLLM keeps "
        f"{figure(buffers / 1e6)} MB of buffers for each of rank {DEFAULT_RANK}: state "
        "max_lora_rank instead"
    ]


def _weights_bytes(pool: Pool, quantization: str) -> float:
    return weights_per_gpu(pool.model, scheme(quantization), ONE_GPU).total_bytes


def _floor_steps(
    pool: Pool,
    need: MemoryNeed,
    gpus: int,
    request_bytes: float,
    concurrency: int,
    quantization: str,
) -> tuple[Step, ...]:
    parameters = pool.model.parameters
    count = parameters.total / 1e9 if parameters else 0.0
    kv, activations = need.kv_bytes / _GB, need.activation_bytes / _GB
    parts = [need.weights_bytes / _GB, kv, activations, need.adapters_bytes / _GB]
    lengths = pool.lengths
    vram = pool.gpu.memory_bytes / _GB
    return (
        Step(
            title="Weights",
            formula="parameters x bytes each, what stays in 16 bit included",
            values=f"{figure(count)} billion in {quantization}",
            result=f"{figure(parts[0])} GB",
            source="guide 2.1; census of the model",
        ),
        Step(
            title="KV cache",
            formula="requests x bytes of one at P95 input and output",
            values=f"{concurrency} x {figure(request_bytes / 1e6)} MB "
            f"({lengths.input_p95_tokens:,} + {lengths.output_p95_tokens:,} tokens)",
            result=f"{figure(kv)} GB",
            source="guide 2.2",
        ),
        Step(
            title="Activations",
            formula="20% of the published weights",
            values=f"{ACTIVATION_RATIO} x {figure(need.activation_bytes / ACTIVATION_RATIO / _GB)}",
            result=f"{figure(activations)} GB",
            source="guide 2.3",
        ),
        Step(
            title="Fewest GPUs by memory",
            formula="ceil((weights + KV + activations + adapters) / (memory x (1 - 10 %)))",
            values=f"ceil(({' + '.join(figure(part) for part in parts)}) / ({figure(vram)} x 0.9))",
            result=f"{gpus}",
            source="guide 2.4, 2.6",
        ),
    )


def floor_step(pool: Pool, floor: Floor) -> PlanStep:
    """Step 4: the floor before any optimisation."""
    notes: list[str] = []
    if pool.deployment.concurrency is None:
        notes.append(
            "no concurrency is stated: the floor is for one request; step 7 computes how many fit"
        )
    if pool.profile.lora is not None:
        lora = pool.profile.lora
        notes.append(
            f"at most {lora.max_simultaneous_adapters} of {lora.adapters} adapters at once: launch "
            f"with --max-loras {lora.max_simultaneous_adapters}, or all of them may be loaded"
        )
        notes += _small_adapters(pool)
    notes.extend(pool.model.notes)
    return PlanStep(
        number=4,
        title="Calculate the memory floor",
        decision=f"at least {counted(floor.gpus, 'GPU')} of {pool.gpu.id}, before optimisation",
        output=floor_output(floor),
        steps=floor.steps,
        to_measure=("resident weights and KV bytes of the first start-up log",),
        notes=tuple(notes),
        tier=pool.name,
    )


def floor_output(floor: Floor) -> dict[str, Value]:
    """The floor's values, by name."""
    need = floor.need
    return {
        "weights_bytes": need.weights_bytes,
        "kv_bytes": need.kv_bytes,
        "kv_bytes_per_request": floor.request_bytes,
        "activation_bytes": need.activation_bytes,
        "adapter_bytes": need.adapters_bytes,
        "concurrency": floor.concurrency,
        "min_gpus_low": floor.gpus_low,
        "min_gpus": floor.gpus,
        "gpus_with_headroom_low": floor.headroom_gpus[0],
        "gpus_with_headroom_high": floor.headroom_gpus[1],
    }


def chosen_quantization(pool: Pool) -> tuple[str, str]:
    """The weights' scheme and the reason: stated, the checkpoint's own, or what the GPU computes
    in.

    Raises:
        SizingError: an unknown scheme.
    """
    if pool.deployment.quantization is not None:
        return scheme(pool.deployment.quantization).id, "stated"
    own = pool.model.quantization
    if own not in {"bf16", "fp16"}:
        return own, "the checkpoint's own"
    if pool.gpu.fp8_flop_per_s is not None:
        return "fp8", f"{pool.gpu.id} computes in FP8"
    return "int8", f"{pool.gpu.id} has no FP8 arithmetic"


def chosen_kv_dtype(pool: Pool) -> tuple[str, str]:
    """The KV cache's dtype after step 8, and why.

    Source: guide 4.3, 7.5 and 9.1 step 8 (FP8 by default).
    """
    if pool.deployment.kv_cache_dtype is not None:
        return pool.deployment.kv_cache_dtype, "stated"
    if pool.gpu.fp8_flop_per_s is not None:
        return "fp8", "the default of step 8"
    return "auto", f"{pool.gpu.id} has no FP8 arithmetic"


def quantization_step(pool: Pool, before: Floor, after: Floor) -> PlanStep:
    """Step 5: the floor with quantized weights and KV cache."""
    chosen, why = chosen_quantization(pool)
    kv, kv_why = chosen_kv_dtype(pool)
    gain = kv_quantization_gain(before="bf16", after="fp8") if kv.startswith("fp8") else 1.0
    unchanged = scheme(chosen).id == pool.model.quantization
    to_measure = [] if unchanged else [f"answer quality with {chosen} weights on your own requests"]
    if gain > 1:
        to_measure.append("answer quality with an FP8 KV cache on your longest contexts")
    if pool.model.quantization in {"bf16", "fp16"} and pool.gpu.fp8_flop_per_s is None:
        to_measure.append(
            "an INT8 checkpoint for this GPU: an FP8 checkpoint runs without its speedup"
        )
    return PlanStep(
        number=5,
        title="Apply quantization and sparsity",
        decision=f"weights {chosen} ({why}), KV cache {kv} ({kv_why}); no sparsity",
        output={
            "quantization": chosen,
            "kv_cache_dtype": kv,
            "kv_tokens_gain": gain,
            **floor_output(after),
            "min_gpus_before": before.gpus,
        },
        steps=after.steps,
        to_measure=tuple(to_measure),
        notes=("consider 2:4 sparsity only if prefill is still compute-bound after this step",),
        tier=pool.name,
    )


# --- Step 8 of a plan: the KV cache's dtype, prefixes, eviction and offloading. Pure. Guide 7 -----


BLOCK_TOKENS = 16
"""vLLM's block for attention; only whole ones are shared."""

_STARVED_RATIO = 1.25
"""If doubling the requests gains at least this factor, the KV cache is the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefix:
    """Bytes that shared prefixes take on one GPU, and the tokens that they save; None without
    sharing."""

    instance: Serving
    output: dict[str, Value]
    steps: tuple[Step, ...]
    to_measure: tuple[str, ...]
    notes: tuple[str, ...]


def kv_step(pool: Pool, baseline: Serving, *, kv_cache_dtype: str) -> tuple[PlanStep, Serving]:
    """Step 8, and the instance with the chosen KV cache."""
    setup = replace(baseline.setup, kv_cache_dtype=kv_cache_dtype)
    prefix = _prefix(pool, serving(pool, setup))
    instance, offload = prefix.instance, _offload(pool, prefix.instance)
    cached = "prefix caching on, " if pool.profile.prefix else ""
    below = "test offloading" if offload.wanted else "no offloading"
    to_measure = [*prefix.to_measure, "evictions: below 5% of the stored blocks"]
    if kv_cache_dtype != baseline.setup.kv_cache_dtype:
        to_measure.insert(0, "answer quality with this KV cache on your longest contexts")
    step = PlanStep(
        number=8,
        title="Configure the KV cache",
        decision=f"paged blocks, KV cache {kv_cache_dtype}, {cached}LRU eviction, {below}",
        output={
            "kv_cache_dtype": kv_cache_dtype,
            "kv_concurrency_before": baseline.memory.concurrency.expected,
            "kv_concurrency_after": instance.memory.concurrency.expected,
            "last_block_padding_tokens": block_padding_tokens(tokens=pool.tail_tokens),
            **prefix.output,
            **offload.output,
        },
        steps=(_gain_step(baseline, instance), *prefix.steps, *offload.steps),
        to_measure=tuple(to_measure),
        notes=(
            "paged blocks and LRU eviction are vLLM's defaults; nothing to enable",
            *prefix.notes,
            *offload.notes,
        ),
        tier=pool.name,
    )
    return step, instance


def _gain_step(baseline: Serving, instance: Serving) -> Step:
    before, after = (state.memory.concurrency.expected for state in (baseline, instance))
    return Step(
        title="Requests of P95 length held",
        formula="with the baseline's KV cache, with the decided one",
        values=f"{figure(before)} ({baseline.setup.kv_cache_dtype}), {figure(after)} "
        f"({instance.setup.kv_cache_dtype})",
        result=f"{figure(after / before)} times" if before > 0 else "no request before",
        source="guide 4.3, 7.5",
    )


def _prefix(pool: Pool, instance: Serving) -> _Prefix:
    shared = pool.profile.prefix
    if shared is None:
        note = "no shared prefix is stated: no prefix cache hits are assumed"
        return _Prefix(instance=instance, output={}, steps=(), to_measure=(), notes=(note,))
    token_bytes = instance.memory.layout.token_bytes
    free = max(instance.memory.available_bytes.expected, 1.0)
    reserve = reserve_bytes(kv_budget_bytes=free, ratio=RESERVE_HIGH_RATIO)
    held = prefixes_held(
        reserve_bytes=reserve, prefix_tokens=shared.shared_tokens, kv_bytes_per_token=token_bytes
    )
    stored = min(held, shared.distinct) * shared.shared_tokens * token_bytes
    budget = Step(
        title="Prefixes that fit into the reserve of one GPU",
        formula="30 % of the KV cache / (prefix tokens x bytes per token)",
        values=f"0.3 x {figure(free / 1e9)} GB / ({shared.shared_tokens:,} x "
        f"{figure(token_bytes / 1e3)} KB)",
        result=f"{held} (there are {shared.distinct})",
        source="guide 7.2",
    )
    few = (
        f"the reserve holds {held} of {shared.distinct} prefixes: some requests will miss the "
        "prefix cache"
    )
    prefix = _Prefix(
        instance=replace(instance, stored_bytes=stored),
        output={
            "prefix_reserve_bytes_per_gpu": reserve,
            "prefixes_held": held,
            "prefix_hit_ratio": shared.hit_ratio,
        },
        steps=(budget,),
        to_measure=("the prefix cache hit ratio: no hits are assumed until it is measured",),
        notes=(few,) if held < shared.distinct else (),
    )
    return prefix if shared.hit_ratio is None else _hits(pool, prefix, shared, shared.hit_ratio)


def _hits(pool: Pool, prefix: _Prefix, shared: Prefix, hit_ratio: float) -> _Prefix:
    """The prefix result with the prompt tokens that cache hits save."""
    mean = pool.lengths.mean_input_tokens
    usual = min(float(shared.shared_tokens), mean)
    fresh = computed_tokens(
        prompt_tokens=mean, prefix_tokens=usual, hit_ratio=hit_ratio, block_tokens=BLOCK_TOKENS
    )
    saved = Step(
        title="Prompt tokens computed",
        formula="input - hit ratio x whole blocks of the prefix",
        values=f"{figure(mean)} - {figure(hit_ratio)} x {usual // BLOCK_TOKENS * BLOCK_TOKENS:g}",
        result=f"{figure(fresh)} tokens",
        source="guide 7.2",
    )
    return replace(
        prefix,
        instance=replace(prefix.instance, hit_ratio=1 - fresh / mean),
        output={**prefix.output, "computed_input_tokens": fresh},
        steps=(*prefix.steps, saved),
        to_measure=("the prefix cache hit ratio again, behind the production router",),
    )


def _starved(instance: Serving) -> bool:
    """Whether throughput still rises steeply where the KV cache is full (guide 7.6)."""
    limit = instance.limit
    if limit >= instance.setup.seqs:
        return False
    if limit < 2:
        return True
    full, half = (at(instance, count).requests_per_s for count in (limit, limit / 2))
    return full > _STARVED_RATIO * half


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offload:
    """Whether to store contexts below HBM, and the seconds to fetch one."""

    wanted: bool
    output: dict[str, Value]
    steps: tuple[Step, ...]
    notes: tuple[str, ...]


def _offload(pool: Pool, instance: Serving) -> _Offload:
    profile, gpus = pool.profile, instance.setup.parallel.gpus
    request_bytes = instance.memory.layout.request_bytes(instance.setup.context)
    host = pool.gpu.host_bytes_per_s
    reload_s = transfer_s(moved_bytes=request_bytes, bandwidth_bytes_per_s=host)
    drive_s = transfer_s(
        moved_bytes=request_bytes * gpus, bandwidth_bytes_per_s=link_bytes_per_s("nvme")
    )
    steps = [
        Step(
            title="Fetching a P95 context from CPU memory",
            formula="KV bytes on one GPU / host link, all GPUs at once",
            values=f"{figure(request_bytes / 1e6)} MB / {figure(host / 1e9)} GB/s",
            result=f"{figure(reload_s * 1e3)} ms ({figure(drive_s * 1e3)} ms from one NVMe drive)",
            source="guide 7.4, 7.6",
        )
    ]
    output: dict[str, Value] = {"host_reload_s": reload_s, "nvme_reload_s": drive_s}
    memory_bytes, batch = profile.hosting.host_memory_bytes, profile.traffic.kind == "batch"
    bound = _starved(instance)
    wanted = batch and bound and memory_bytes is not None
    notes: list[str] = []
    if memory_bytes is not None:
        hot, both = contexts_held(
            hbm_free_bytes=max(instance.memory.available_bytes.expected, 0.0) * gpus,
            tier_free_bytes=memory_bytes * gpus / max(profile.hosting.node_gpus, gpus),
            context_bytes=request_bytes * gpus,
        )
        output |= {"contexts_in_hbm": hot, "contexts_with_host": both}
    elif batch and bound:
        notes.append("offloading was not sized: set hosting.host_memory_bytes")
    if not batch:
        notes.append(
            "offloading suits batches of long contexts; interactive users would notice the reload"
        )
    return _Offload(wanted=wanted, output=output, steps=tuple(steps), notes=tuple(notes))
