"""Steps 4, 5 and 8 of a plan: the memory floor, quantization, and the KV cache. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import ADAPTER_SLOTS
from kneewatch.diagnose.catalogue.gpu_specs import LINK_BYTES_PER_S
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.arithmetic import gigabytes, seconds
from kneewatch.diagnose.sizing.memory.budget import HEADROOM_HIGH_RATIO, HEADROOM_LOW_RATIO
from kneewatch.diagnose.sizing.memory.kv_formats import kv_format
from kneewatch.diagnose.sizing.memory.memory_arithmetic import PlannedMemory, planned_memory
from kneewatch.diagnose.sizing.memory.overhead import FRAMEWORK_LOW_RATIO
from kneewatch.diagnose.sizing.memory.weights import (
    DEFAULT_RANK,
    ONE_GPU,
    Adapters,
    adapter_bytes,
)
from kneewatch.diagnose.sizing.plan.plan_result import (
    Part,
    PlanStep,
    Pool,
    Value,
)
from kneewatch.diagnose.sizing.plan.replica_curve import (
    Serving,
    at,
    planned_concurrency,
    replica_launch,
    serving,
)
from kneewatch.diagnose.sizing.plan.workload_profile import SessionShape
from kneewatch.rules.formatting import plural


def memory_floor(pool: Pool, *, quantization: str, kv_cache_dtype: str) -> PlannedMemory:
    """The memory floor with this quantization and KV dtype.

    Activations keep the checkpoint's own precision.

    Raises:
        SizingError: the parameters cannot be plural, or the dtype is unknown.

    Source: guide 2.1 to 2.6.
    """
    launch = replica_launch(pool, ONE_GPU, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    concurrency = planned_concurrency(pool)
    return planned_memory(replace(launch, overhead="guide"), pool.gpu, concurrency=concurrency)


def _floor(pool: Pool, needed: PlannedMemory) -> Part:
    """The part of the plan on the fewest GPUs by the sum of the replica's parts."""
    output: dict[str, Value] = {
        "weights_bytes": needed.weights_bytes,
        "kv_bytes": needed.kv_bytes,
        "kv_bytes_per_request": needed.request_bytes,
        "activation_bytes": needed.activation_bytes,
        "adapter_bytes": needed.adapters_bytes,
        "concurrency": planned_concurrency(pool),
        "min_gpus_low": needed.gpus(FRAMEWORK_LOW_RATIO),
        "min_gpus": needed.gpus(),
        "gpus_with_headroom_low": needed.gpus(headroom_ratio=HEADROOM_LOW_RATIO),
        "gpus_with_headroom_high": needed.gpus(headroom_ratio=HEADROOM_HIGH_RATIO),
    }
    part = Part(output=output)
    part.sheet.text(*needed.steps)
    return part


def floor_step(pool: Pool, floor: PlannedMemory) -> PlanStep:
    """Step 4: the memory floor before any optimization."""
    step = PlanStep(
        number=4,
        title="Calculate the memory floor",
        decision=f"at least {plural(floor.gpus(), 'GPU')} ({pool.gpu.id}) before optimization",
        to_measure=["weights and KV cache memory in the first start-up log"],
        tier=pool.name,
    )
    step.add(_floor(pool, floor))
    if pool.deployment.concurrency is None:
        step.notes.append(
            "no concurrency is set: the floor is for one request; step 7 computes how many fit"
        )
    lora = pool.profile.lora
    if lora is not None:
        step.notes.append(
            f"at most {lora.max_simultaneous_adapters} of {lora.adapters} adapters run at once: "
            f"launch with {ADAPTER_SLOTS} {lora.max_simultaneous_adapters}, otherwise vLLM may "
            "load them all"
        )
        buffer_bytes = adapter_bytes(pool.model, Adapters(1, DEFAULT_RANK), ONE_GPU)
        if lora.max_lora_rank is None and lora.adapter_bytes < buffer_bytes:
            step.notes.append(
                f"adapter_bytes {gigabytes(lora.adapter_bytes)} is an adapter's file; vLLM "
                f"keeps {gigabytes(buffer_bytes)} of buffers for each of rank "
                f"{DEFAULT_RANK}: set max_lora_rank instead"
            )
    step.notes += pool.model.notes
    return step


def quantizations(pool: Pool) -> Mapping[str, str]:
    """The weights' schemes to compare, each with its reason; of equal fleets the first is taken.

    It is the stated scheme, the checkpoint's own, or 8 bits as the GPU computes them.

    Raises:
        SizingError: the scheme is unknown.
    """
    if (stated := pool.deployment.flags.get("quantization")) is not None:
        return {scheme(stated).id: _as_stated(pool)}
    own = pool.model.quantization
    if own not in {"bf16", "fp16"}:
        return {own: "as published"}
    if pool.gpu.fp8_flop_per_s is not None:
        return {"fp8": f"{pool.gpu.id} computes in FP8"}
    compared = {"int8": f"{pool.gpu.id} has no FP8 arithmetic"}
    if pool.gpu.int8_op_per_s is not None:
        compared["w8a8"] = f"{pool.gpu.id} computes in INT8, not in FP8"
    return compared


def _as_stated(pool: Pool) -> str:
    return "as the prefill pool" if pool.phase == "decode" else "as set"


def four_bit_quantization(pool: Pool) -> str | None:
    """The 4-bit scheme that could be used in place of the compared ones; None if none could."""
    is_stated = "quantization" in pool.deployment.flags
    if is_stated or pool.model.quantization not in {"bf16", "fp16"}:
        return None
    return "nvfp4" if pool.gpu.fp4_flop_per_s is not None else "awq"


def chosen_kv_dtype(pool: Pool) -> tuple[str, str]:
    """The KV cache's dtype after step 8, and the reason.

    Source: guide 4.3, 7.5 and 9.1 step 8 (FP8 by default).
    """
    if (stated := pool.deployment.flags.get("kv_cache_dtype")) is not None:
        return stated, _as_stated(pool)
    if pool.gpu.fp8_flop_per_s is not None:
        return "fp8", "half the memory"
    return "auto", f"{pool.gpu.id} has no FP8 arithmetic"


def quantization_step(
    pool: Pool, chosen: str, before: PlannedMemory, after: PlannedMemory
) -> PlanStep:
    """Step 5 of the plan: the chosen quantization of the weights, and that of the KV cache.

    `before` and `after` are the memory floors without and with that quantization.
    """
    why = quantizations(pool)[chosen]
    kv, kv_why = chosen_kv_dtype(pool)
    gain = 2.0 if kv.startswith("fp8") else 1.0
    step = PlanStep(
        number=5,
        title="Apply quantization and sparsity",
        decision=f"weights {chosen} ({why}), KV cache {kv} ({kv_why}); no sparsity",
        output={"quantization": chosen, "kv_cache_dtype": kv, "kv_tokens_gain": gain},
        notes=["sparse weights (2:4) are not compared: vLLM no longer has kernels for them"],
        tier=pool.name,
    )
    step.add(_floor(pool, after))
    step.output["min_gpus_before"] = before.gpus()
    if scheme(chosen).id != pool.model.quantization:
        step.to_measure.append(f"answer quality with {chosen} weights on your own requests")
    if gain > 1:
        step.to_measure.append("answer quality with an FP8 KV cache on your longest contexts")
    if pool.model.quantization in {"bf16", "fp16"} and pool.gpu.fp8_flop_per_s is None:
        step.to_measure.append(
            "an INT8 checkpoint for this GPU: an FP8 checkpoint runs without its speedup"
        )
    if scheme(chosen).compute == "int8":
        step.notes.append("INT8 activations need a calibrated checkpoint, such as by SmoothQuant")
    return step


# --- Step 8: the KV cache's dtype, prefixes, eviction and offloading (guide 7) --------------------


BLOCK_TOKENS = 16
"""Tokens of vLLM's block for attention; only whole blocks are shared."""
_RESERVE_RATIO = 0.30
"""Share of the KV budget to reserve for stored prefixes (guide 7.2: 20 to 30%)."""
_STARVED_RATIO = 1.25
"""The KV cache is the limit if twice as many requests raise throughput at least by this factor."""


def kv_step(pool: Pool, baseline: Serving, *, kv_cache_dtype: str) -> PlanStep:
    """Step 8: the KV cache, compared with the baseline's."""
    launch = replace(baseline.launch, kv_cache_dtype=kv_cache_dtype)
    prefix, replica = stored_prefixes(pool, serving(pool, launch))
    offload = _offload(pool, replica)
    cached = "prefix caching on, " if pool.profile.prefix or pool.profile.session else ""
    before, after = (state.memory.held.expected for state in (baseline, replica))
    labels = [kv_format(dtype).label for dtype in (kv_cache_dtype, baseline.launch.kv_cache_dtype)]
    step = PlanStep(
        number=8,
        title="Configure the KV cache",
        decision=f"paged blocks, KV cache {kv_cache_dtype}, {cached}LRU eviction, "
        f"{offload.decision}",
        output={
            "kv_cache_dtype": kv_cache_dtype,
            "kv_concurrency_before": before,
            "kv_concurrency_after": after,
            "last_block_padding_tokens": -pool.tail_tokens % BLOCK_TOKENS,
        },
        notes=["paged blocks and LRU eviction are vLLM's defaults: nothing to set"],
        tier=pool.name,
    )
    if before > 0:
        step.sheet.line(
            "Concurrent requests of P95 length",
            f"{{with this KV cache:({labels[0]})}} / {{before quantization:({labels[1]})}}",
            (after, before),
            result="{}x",
            source="guide 4.3, 7.5",
        )
    if kv_cache_dtype != baseline.launch.kv_cache_dtype:
        step.to_measure.append("answer quality with this KV cache on your longest contexts")
    step.add(prefix)
    step.add(offload)
    step.to_measure.append("evictions: they should stay below 5% of the stored blocks")
    return step


def stored_prefixes(pool: Pool, replica: Serving) -> tuple[Part, Serving]:
    """The part of the plan on stored prefixes, and the replica with the tokens that they save.

    Only whole blocks are reused. Source: guide 7.2.
    """
    shared, part = pool.profile.prefix, Part()
    if pool.phase == "decode":
        part.notes.append("prompts come from the prefill pool with their KV cache")
        return part, replica
    if pool.profile.session is not None:
        return _session_hits(pool, pool.profile.session, replica)
    if shared is None:
        part.notes.append("no shared prefix is set: no prefix cache hits are assumed")
        return part, replica
    token_bytes = replica.memory.layout.token_bytes
    free, reserve = _reserve(replica)

    def needed(held: float) -> str:
        more = f", of which {min(held, shared.distinct)} are needed"
        return (
            f"{held}{more}" if held > shared.distinct else f"{held} of {shared.distinct} prefixes"
        )

    held = int(
        part.sheet.line(
            "Prefixes that fit in the reserve of one GPU",
            "floor({share} x {KV cache:GB} / ({prefix tokens} x {bytes per token: B}))",
            (_RESERVE_RATIO, free, shared.shared_tokens, token_bytes),
            result=needed,
            source="guide 7.2",
        )
    )
    stored = min(held, shared.distinct) * shared.shared_tokens * token_bytes
    part.output |= {
        "prefix_reserve_bytes_per_gpu": reserve,
        "prefixes_held": held,
        "prefix_hit_ratio": shared.hit_ratio,
    }
    if held < shared.distinct:
        part.notes.append(
            f"the reserve holds {held} of {shared.distinct} prefixes: some requests will miss the "
            "prefix cache"
        )
    if shared.hit_ratio is None:
        part.to_measure.append(
            "the prefix cache hit ratio: no hits are assumed until it is measured"
        )
        return part, replace(replica, stored_bytes=stored)
    mean = pool.lengths.mean_input_tokens
    fresh = part.sheet.line(
        "Prompt tokens computed",
        "{mean input} - {hit ratio} x floor(min({prefix}, {mean input}) / {block}) x {block}",
        (mean, shared.hit_ratio, shared.shared_tokens, BLOCK_TOKENS),
        result="{} tokens",
        source="guide 7.2",
    )
    part.output["computed_input_tokens"] = fresh
    part.to_measure.append("the prefix cache hit ratio again, behind the production router")
    return part, replace(replica, stored_bytes=stored, hit_ratio=1 - fresh / mean)


def _session_hits(pool: Pool, session: SessionShape, replica: Serving) -> tuple[Part, Serving]:
    """The part of the plan on what a session's calls sent before, and the replica that reuses it.

    A shared prefix is a part of that, so it isn't counted again. Between its calls a session's
    context is in the reserve.
    """
    if session.hit_ratio is None:
        missing = "session.hit_ratio: no hits within a session are assumed until it is measured"
        return Part(to_measure=[missing]), replica
    calls, mean = session.calls, pool.lengths.mean_input_tokens
    # Of the first call `held_tokens` were sent before, of each later one all but what it adds.
    sent = session.held_tokens / calls + (1 - 1 / calls) * (
        mean + (pool.lengths.mean_output_tokens + session.added_tokens) / 2 - session.added_tokens
    )
    sent = min(sent, mean)
    part = Part(
        to_measure=["the hit ratio within sessions again: a session must return to its replica"]
    )
    fresh = part.sheet.line(
        "Prompt tokens computed per call of a session",
        "{mean input} - {hit ratio} x {what was sent before}",
        (mean, session.hit_ratio, sent),
        result="{} tokens",
        source="guide 1.2, 7.2",
    )
    _, reserve = _reserve(replica)
    part.output = {
        "prefix_reserve_bytes_per_gpu": reserve,
        "prefix_hit_ratio": session.hit_ratio,
        "computed_input_tokens": fresh,
    }
    # The last call is the longest, by what its session sent before.
    tail_ratio = session.hit_ratio if calls > 1 else 0.0
    reused = replace(replica, hit_ratio=1 - fresh / mean, tail_hit_ratio=tail_ratio)
    return part, replace(reused, stored_bytes=reserve * bool(session.hit_ratio))


def _reserve(replica: Serving) -> tuple[float, float]:
    """The bytes of one GPU's KV cache, and those to reserve for what requests reuse."""
    free = max(replica.memory.available_bytes.expected, 1.0)
    return free, free * _RESERVE_RATIO


def _starved(replica: Serving) -> bool:
    """Whether throughput is still rising steeply when the KV cache is full (guide 7.6)."""
    limit = replica.limit
    if limit >= replica.launch.seqs:
        return False
    if limit < 2:
        return True
    full, half = (at(replica, count).requests_per_s for count in (limit, limit / 2))
    return full > _STARVED_RATIO * half


def _offload(pool: Pool, replica: Serving) -> Part:
    """The part of the plan on whether to store contexts outside HBM, with the seconds to fetch one.

    Guide 7.4, 7.6.
    """
    profile, gpus = pool.profile, replica.launch.parallel.gpus
    request_bytes = replica.memory.layout.request_bytes(replica.launch.context)
    host = pool.gpu.host_bytes_per_s
    drive_s = request_bytes * gpus / LINK_BYTES_PER_S["nvme"]
    part = Part(decision="no offloading")
    reload_s = part.sheet.line(
        "Reloading a P95 context from CPU memory, all GPUs in parallel",
        "{KV cache per GPU:GB} / {bandwidth to the CPU:GB/s}",
        (request_bytes, host),
        result=f"{{:s}} ({seconds(drive_s)} from one NVMe drive)",
        source="guide 7.4, 7.6",
    )
    part.output = {"host_reload_s": reload_s, "nvme_reload_s": drive_s}
    memory_bytes, batch = profile.hosting.host_memory_bytes, profile.traffic.kind == "batch"
    worth = batch and _starved(replica)
    if memory_bytes is not None:
        # An active context must be in HBM: if not even one fits, host memory does not help.
        context_bytes = request_bytes * gpus
        free_bytes = max(replica.memory.available_bytes.expected, 0.0) * gpus
        host_bytes = memory_bytes * gpus / max(profile.hosting.node_gpus, gpus)
        hot = int(free_bytes // context_bytes)
        below = int(host_bytes // context_bytes) if hot else 0
        part.output |= {"contexts_in_hbm": hot, "contexts_with_host": hot + below}
    if worth and memory_bytes is not None:
        part.decision = "test offloading"
    elif worth:
        part.notes.append("offloading was not sized: set hosting.host_memory_bytes")
    if not batch:
        part.notes.append(
            "offloading suits batches of long contexts; interactive users would notice the reload"
        )
    return part
