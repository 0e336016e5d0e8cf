"""The fewest GPUs of a replica by the sum of its parts, for planning: overhead model "guide". Pure.

Guide 2.1 to 2.6.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import Gpu
from kneewatch.diagnose.sizing.arithmetic import Step, gigabytes
from kneewatch.diagnose.sizing.memory.budget import (
    HEADROOM_HIGH_RATIO,
    HEADROOM_LOW_RATIO,
    kv_layout_of,
)
from kneewatch.diagnose.sizing.memory.launch_setup import Setup
from kneewatch.diagnose.sizing.memory.overhead import (
    ACTIVATION_RATIO,
    FRAMEWORK_HIGH_RATIO,
    guide_overhead,
)
from kneewatch.diagnose.sizing.memory.weights import ONE_GPU, weights_per_gpu
from kneewatch.rules.formatting import figure

_ROUNDING = 1e-9  # a need that fits exactly must not cost one more GPU


class PlannedMemory(Struct, frozen=True):
    """Bytes of one replica over all its GPUs; the framework takes a share of each GPU.

    `weights_bytes` includes the draft's.
    """

    gpu: Gpu
    weights_bytes: float
    kv_bytes: float
    request_bytes: float
    activation_bytes: float
    adapters_bytes: float
    steps: tuple[Step, ...]

    @property
    def sum_bytes(self) -> float:
        """What all parts take, without the framework."""
        return self.weights_bytes + self.kv_bytes + self.activation_bytes + self.adapters_bytes

    def gpus(
        self, framework_ratio: float = FRAMEWORK_HIGH_RATIO, *, headroom_ratio: float = 0.0
    ) -> int:
        """The fewest GPUs, with this share of each for the framework, and headroom on the sum."""
        free_bytes = self.gpu.memory_bytes * (1 - framework_ratio)
        return max(1, math.ceil(self.sum_bytes * (1 + headroom_ratio) / free_bytes - _ROUNDING))


def planned_memory(
    setup: Setup,
    gpu: Gpu,
    *,
    concurrency: float,
    draft_bytes: float = 0.0,
    adapters_bytes: float = 0.0,
) -> PlannedMemory:
    """The parts for so many requests of the context's length.

    Raises:
        SizingError: the parameters cannot be counted, or the dtype is unknown.
    """
    alone = replace(setup, parallel=ONE_GPU, decode_context_parallel=1)
    request_bytes = kv_layout_of(alone).request_bytes(setup.context)
    model_bytes = weights_per_gpu(setup.model, setup.scheme, ONE_GPU).total_bytes
    needed = PlannedMemory(
        gpu=gpu,
        weights_bytes=model_bytes + draft_bytes,
        kv_bytes=concurrency * request_bytes,
        request_bytes=request_bytes,
        activation_bytes=guide_overhead(alone, model_bytes, gpu).activation_bytes,
        adapters_bytes=adapters_bytes,
        steps=(),
    )
    return replace(needed, steps=_steps(setup, needed, concurrency))


def _steps(setup: Setup, needed: PlannedMemory, concurrency: float) -> tuple[Step, ...]:
    counted = setup.model.parameters
    billions = counted.total / 1e9 if counted else 0.0
    parts = (
        gigabytes(needed.weights_bytes),
        gigabytes(needed.kv_bytes),
        gigabytes(needed.activation_bytes),
        gigabytes(needed.adapters_bytes),
    )
    low, high = (
        needed.gpus(headroom_ratio=ratio) for ratio in (HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO)
    )
    return (
        Step(
            title="Weights",
            formula="parameters x bytes each, some of them in 16 bit",
            values=f"{figure(billions)} billion in {setup.scheme.id}",
            result=parts[0],
            source="guide 2.1; census of the model",
        ),
        Step(
            title="KV cache",
            formula="requests x bytes of a request",
            values=f"{figure(concurrency)} x {gigabytes(needed.request_bytes)} "
            f"({setup.context:,} tokens)",
            result=parts[1],
            source="guide 2.2",
        ),
        Step(
            title="Activations (overhead guide)",
            formula="20% of the published weights",
            values=f"{ACTIVATION_RATIO} x {gigabytes(needed.activation_bytes / ACTIVATION_RATIO)}",
            result=parts[2],
            source="guide 2.3",
        ),
        Step(
            title="Fewest GPUs by memory (overhead guide)",
            formula="ceil((weights + KV + activations + adapters) / (memory x (1 - 10%)))",
            values=f"ceil(({' + '.join(parts)}) / ({gigabytes(needed.gpu.memory_bytes)} x 0.9))",
            result=f"{needed.gpus()}",
            source="guide 2.4, 2.6",
        ),
        Step(
            title="Fewest GPUs with headroom",
            formula="the same with 30% and with 50% more memory",
            values=f"{gigabytes(needed.sum_bytes)} x 1.3 and x 1.5",
            result=f"{low} and {high}",
            source="guide 2.6",
        ),
    )
