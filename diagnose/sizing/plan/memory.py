"""Steps 4 and 5 of a plan: the memory floor, before and after quantization. Pure. Guide 2, 4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.memory.adapters import Adapters, adapter_bytes, check_adapters
from kneewatch.diagnose.sizing.memory.budget import kv_layout_of
from kneewatch.diagnose.sizing.memory.guide import (
    ACTIVATION_RATIO,
    FRAMEWORK_HIGH_RATIO,
    FRAMEWORK_LOW_RATIO,
    HEADROOM_LOW_RATIO,
    MemoryNeed,
    activation_bytes,
    gpus_with_headroom,
    kv_quantization_gain,
    min_gpus,
)
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.memory.weights import ONE_GPU, weights_per_gpu
from kneewatch.diagnose.sizing.plan.model import (
    PlanStep,
    Pool,
    Value,
    counted,
    longest_request_tokens,
)
from kneewatch.diagnose.sizing.steps import Step, figure

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What one instance needs by the guide's sum, over all of its GPUs.

    `gpus_low` takes 5 % of each GPU for the framework, `gpus` 10 %; the headroom is the guide's
    30 and 50 %.
    """

    need: MemoryNeed
    concurrency: int
    request_bytes: float
    gpus_low: int
    gpus: int
    headroom_gpus: tuple[int, int]
    steps: tuple[Step, ...]


def planned_concurrency(pool: Pool) -> int:
    """Requests that one instance shall hold: stated, else the one without which it is useless."""
    return pool.deployment.concurrency or 1


def memory_floor(pool: Pool, *, quantization: str, kv_cache_dtype: str) -> Floor:
    """The floor at a precision. Activations stay as of the checkpoint's own precision.

    Raises:
        SizingError: parameters that cannot be counted, a dtype that is not known.
    Source: guide 2.6 and 9.1 step 4; 20 % and 5-10 %: 2.3, 2.4.
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
    """Bytes of one adapter: as stated, or of the buffers that its rank needs."""
    lora = pool.profile.lora
    if lora is None or lora.max_lora_rank is None:
        return lora.adapter_bytes if lora else 0.0
    one = Adapters(1, lora.max_lora_rank)
    check_adapters(one, pool.model)
    return adapter_bytes(pool.model, one, ONE_GPU)


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
            formula="20 % of the weights as published",
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
        notes.append("no concurrency is stated: the floor holds one request; step 7 finds how many")
    if pool.profile.lora is not None:
        lora = pool.profile.lora
        notes.append(
            f"at most {lora.max_simultaneous_adapters} of {lora.adapters} adapters at once: launch "
            f"with --max-loras {lora.max_simultaneous_adapters}, or all may be loaded"
        )
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
    """The floor by name."""
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
    """The weights' scheme and why: stated, the checkpoint's own, else what the GPU computes in.

    Raises:
        SizingError: a scheme that is not known.
    Source: guide 4.5 and 9.1 step 5; 9.5 (INT8 where there is no FP8 arithmetic).
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
    to_measure = [] if unchanged else [f"quality of {chosen} weights on your own requests"]
    if gain > 1:
        to_measure.append("quality of an FP8 KV cache on your longest contexts")
    if pool.model.quantization in {"bf16", "fp16"} and pool.gpu.fp8_flop_per_s is None:
        to_measure.append("an INT8 artifact built for this GPU: FP8 ones run without its gain")
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
        notes=("2:4 sparsity is for prefill that is still bound by compute after this step",),
        tier=pool.name,
    )
