"""Step 8 of a plan: the KV cache's dtype, prefixes, eviction and offloading. Pure. Guide 7."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kneewatch.diagnose.sizing.memory.guide import block_padding_tokens
from kneewatch.diagnose.sizing.memory.prefix import (
    RESERVE_HIGH_RATIO,
    computed_tokens,
    prefixes_held,
    reserve_bytes,
)
from kneewatch.diagnose.sizing.memory.transfer import contexts_held, link_bytes_per_s, transfer_s
from kneewatch.diagnose.sizing.plan.model import PlanStep, Pool, Value
from kneewatch.diagnose.sizing.plan.profile import Prefix
from kneewatch.diagnose.sizing.plan.speed import Serving, at, serving
from kneewatch.diagnose.sizing.steps import Step, figure

BLOCK_TOKENS = 16
"""vLLM's block for attention; only whole ones are shared."""

_STARVED_RATIO = 1.25
"""Twice the requests give at least this much more where the KV cache is what holds them back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefix:
    """What prefixes take of one GPU and save; None where nothing is shared."""

    instance: Serving
    output: dict[str, Value]
    steps: tuple[Step, ...]
    to_measure: tuple[str, ...]
    notes: tuple[str, ...]


def kv_step(pool: Pool, baseline: Serving, *, kv_cache_dtype: str) -> tuple[PlanStep, Serving]:
    """Step 8, and the instance with the KV cache as decided."""
    setup = replace(baseline.setup, kv_cache_dtype=kv_cache_dtype)
    prefix = _prefix(pool, serving(pool, setup))
    instance, offload = prefix.instance, _offload(pool, prefix.instance)
    cached = "prefix caching on, " if pool.profile.prefix else ""
    below = "offloading to be tried" if offload.wanted else "no offloading"
    to_measure = [*prefix.to_measure, "evictions: below 5 % of what is stored"]
    if kv_cache_dtype != baseline.setup.kv_cache_dtype:
        to_measure.insert(0, "quality with this KV cache on your longest contexts")
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
            "paged blocks and LRU are vLLM's own way; nothing to switch on",
            *prefix.notes,
            *offload.notes,
        ),
        tier=pool.name,
    )
    return step, instance


def _gain_step(baseline: Serving, instance: Serving) -> Step:
    before, after = (one.memory.concurrency.expected for one in (baseline, instance))
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
        note = "no shared prefix is stated: nothing is counted on"
        return _Prefix(instance=instance, output={}, steps=(), to_measure=(), notes=(note,))
    token_bytes = instance.memory.layout.token_bytes
    free = max(instance.memory.available_bytes.expected, 1.0)
    reserve = reserve_bytes(kv_budget_bytes=free, ratio=RESERVE_HIGH_RATIO)
    held = prefixes_held(
        reserve_bytes=reserve, prefix_tokens=shared.shared_tokens, kv_bytes_per_token=token_bytes
    )
    stored = min(held, shared.distinct) * shared.shared_tokens * token_bytes
    budget = Step(
        title="Prefixes that the reserve of one GPU holds",
        formula="30 % of the KV cache / (prefix tokens x bytes per token)",
        values=f"0.3 x {figure(free / 1e9)} GB / ({shared.shared_tokens:,} x "
        f"{figure(token_bytes / 1e3)} KB)",
        result=f"{held} (there are {shared.distinct})",
        source="guide 7.2",
    )
    few = f"the reserve holds {held} of {shared.distinct} prefixes: some requests will miss theirs"
    found = _Prefix(
        instance=replace(instance, stored_bytes=stored),
        output={
            "prefix_reserve_bytes_per_gpu": reserve,
            "prefixes_held": held,
            "prefix_hit_ratio": shared.hit_ratio,
        },
        steps=(budget,),
        to_measure=("the prefix hit ratio: not counted on until it is known",),
        notes=(few,) if held < shared.distinct else (),
    )
    return found if shared.hit_ratio is None else _hits(pool, found, shared, shared.hit_ratio)


def _hits(pool: Pool, found: _Prefix, shared: Prefix, hit_ratio: float) -> _Prefix:
    """The same with the prompt tokens that hits save."""
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
        found,
        instance=replace(found.instance, hit_ratio=1 - fresh / mean),
        output={**found.output, "computed_input_tokens": fresh},
        steps=(*found.steps, saved),
        to_measure=("the prefix hit ratio again, behind the router that will be used",),
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
    """Whether to keep contexts below HBM, and what fetching one takes."""

    wanted: bool
    output: dict[str, Value]
    steps: tuple[Step, ...]
    notes: tuple[str, ...]


def _offload(pool: Pool, instance: Serving) -> _Offload:
    profile, gpus = pool.profile, instance.setup.parallel.gpus
    each = instance.memory.layout.request_bytes(instance.setup.context)
    host = pool.gpu.host_bytes_per_s
    reload_s = transfer_s(moved_bytes=each, bandwidth_bytes_per_s=host)
    drive_s = transfer_s(moved_bytes=each * gpus, bandwidth_bytes_per_s=link_bytes_per_s("nvme"))
    steps = [
        Step(
            title="Fetching a P95 context from CPU memory",
            formula="KV bytes on one GPU / host link, all GPUs at once",
            values=f"{figure(each / 1e6)} MB / {figure(host / 1e9)} GB/s",
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
            context_bytes=each * gpus,
        )
        output |= {"contexts_in_hbm": hot, "contexts_with_host": both}
    elif batch and bound:
        notes.append("hosting.host_memory_bytes is not stated: offloading was not sized")
    if not batch:
        notes.append("offloading is for batches of long contexts; a user would feel the reload")
    return _Offload(wanted=wanted, output=output, steps=tuple(steps), notes=tuple(notes))
