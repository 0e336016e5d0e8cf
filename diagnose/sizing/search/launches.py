"""The launches of a search that vLLM would start, and their memory; others are counted. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from kneewatch.diagnose.catalogue.gpus import GIB, Gpu
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.budget import Memory, memory
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.memory.vllm_defaults import V1
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.search.rejections import (
    FORMAT,
    HEADS,
    KV,
    LAYERS,
    NODE,
    REQUANTIZED,
    WEIGHTS,
    Tally,
)
from kneewatch.diagnose.sizing.search.space import Space
from kneewatch.diagnose.sizing.steps import figure

_BF16_BITS = 16
# What of a launch an error of its memory is about.
_REASONS = {"tensor_parallel": HEADS, "draft_model": HEADS, "quantization": FORMAT}


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that starts, at its longest context, and how many shorter ones start like it.

    `configurations` counts the contexts, that one included; they differ in nothing else.
    """

    setup: Setup
    memory: Memory
    configurations: int


def launches(base: Setup, space: Space, tally: Tally) -> Iterator[Launch]:
    """Every launch of the space that starts; those that don't go to the tally.

    Raises:
        SizingError: an input of `base` that no launch can have.
    """
    base = replace(base, context_tokens=base.context_tokens or ceil(space.request_tokens))
    for gpu in space.gpus:
        for quantization in space.quantizations:
            for kv_cache_dtype in space.kv_cache_dtypes:
                setup = replace(
                    base,
                    gpu=gpu,
                    quantization=_as_flag(base, quantization),
                    kv_cache_dtype=kv_cache_dtype,
                    max_model_len=space.max_model_lens[0],
                )
                if _formats_fit(setup, gpu, tally, len(space.layouts) * len(space.max_model_lens)):
                    yield from _spread(setup, space, tally)


def _as_flag(base: Setup, quantization: str) -> str | None:
    """What `--quantization` says: nothing for the checkpoint's own."""
    return None if scheme(base.model.quantization).id == quantization else quantization


def _formats_fit(setup: Setup, gpu: Gpu, tally: Tally, configurations: int) -> bool:
    own, wanted = scheme(setup.model.quantization), setup.scheme
    if setup.quantization is not None and min(own.linear_bits, own.expert_bits) < _BF16_BITS:
        tally.reject(
            REQUANTIZED,
            setup,
            lambda: f"{setup.model.id} is published in {own.id}",
            configurations=configurations,
        )
        return False
    # A checkpoint's own format may still be unpacked by weight-only kernels, which `memory` knows.
    if setup.quantization is not None and (
        (wanted.compute == "fp8" and gpu.fp8_flop_per_s is None)
        or (wanted.compute == "fp4" and gpu.architecture != "blackwell")
    ):
        missing = wanted.id
    elif "fp8" in setup.kv_cache_dtype and gpu.fp8_flop_per_s is None:
        missing = f"{setup.kv_cache_dtype} KV cache"
    else:
        return True
    tally.reject(
        FORMAT, setup, lambda: f"{gpu.name} has no {missing}", configurations=configurations
    )
    return False


def _spread(setup: Setup, space: Space, tally: Tally) -> Iterator[Launch]:
    started = False
    for tensor, pipeline in space.layouts:
        for launch in _lengths(setup, tensor, pipeline, space.max_model_lens, tally):
            started = True
            yield launch
    if started:
        return
    heads = setup.model.attention_heads
    widest = max(
        (tensor for tensor in space.tensor_parallels if not heads % tensor),
        default=space.tensor_parallels[-1],
    )
    for pipeline in space.deeper:
        yield from _lengths(setup, widest, pipeline, space.max_model_lens, tally)


def _lengths(
    setup: Setup, tensor: int, pipeline: int, lengths: Sequence[int], tally: Tally
) -> Iterator[Launch]:
    spread = Parallel(tensor, pipeline, setup.parallel.data, setup.parallel.experts)
    gpu, every = setup.gpu, len(lengths)
    if gpu is not None and tensor * pipeline > 1 and _alone(gpu):
        failed = replace(setup, parallel=spread)
        tally.reject(
            NODE, failed, lambda: f"{gpu.name} is linked to its CPU only", configurations=every
        )
        return
    if pipeline > setup.model.depth:
        failed = replace(setup, parallel=spread)
        tally.reject(LAYERS, failed, lambda: f"{setup.model.depth} layers", configurations=every)
        return
    # V0 profiles whole prompts, so there every length has a memory of its own.
    parts = [lengths] if setup.version >= V1 else [[length] for length in lengths]
    for part in parts:
        launch = _start(replace(setup, parallel=spread, max_model_len=part[0]), part, tally)
        if launch is not None:
            yield launch


def _alone(gpu: Gpu) -> bool:
    """Whether it is a superchip without links to others."""
    return gpu.c2c_bytes_per_s is not None and gpu.nvlink_gpus == 1


def _start(setup: Setup, lengths: Sequence[int], tally: Tally) -> Launch | None:
    try:
        answer = memory(setup)
    except SizingError as error:
        reason = _REASONS.get(error.name)
        if reason is None:
            raise
        message = str(error)
        tally.reject(reason, setup, lambda: message, configurations=len(lengths))
        return None
    if answer.available_bytes.expected <= 0:
        _reject_weights(answer, len(lengths), tally)
        return None
    blocks = answer.layout.blocks(answer.available_bytes.expected)
    for short, length in enumerate(lengths):
        needed = answer.layout.request_blocks(length)
        # With no block to spare vLLM starts, but a request of that length waits for ever: the null
        # block is missing.
        if blocks > needed:
            fitting = setup if not short else replace(setup, max_model_len=length)
            return Launch(fitting, answer, len(lengths) - short)
        _reject_length(answer, length, needed / max(blocks, 1), tally)
    return None


def _reject_weights(answer: Memory, configurations: int, tally: Tally) -> None:
    setup, weights_bytes = answer.setup, answer.weights_bytes or 0.0
    usable = setup.utilization * (setup.gpu.memory_bytes if setup.gpu is not None else 0)
    overhead = answer.overhead.expected_bytes if answer.overhead is not None else 0.0
    tally.reject(
        WEIGHTS,
        setup,
        lambda: (
            f"{figure(weights_bytes / GIB)} GiB of weights and {figure(overhead / GIB)} GiB of "
            f"overhead a GPU, {figure(usable / GIB)} GiB usable"
        ),
        configurations=configurations,
        needed_ratio=(weights_bytes + overhead) / usable,
    )


def _reject_length(answer: Memory, length: int, needed_ratio: float, tally: Tally) -> None:
    needed = answer.layout.request_bytes(length)
    tally.reject(
        KV,
        replace(answer.setup, max_model_len=length),
        lambda: (
            f"it takes {figure(needed / GIB)} GiB a GPU, "
            f"{figure(answer.available_bytes.expected / GIB)} GiB are left"
        ),
        configurations=1,
        needed_ratio=needed_ratio,
    )
