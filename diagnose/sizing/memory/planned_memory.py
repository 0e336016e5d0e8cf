"""The fewest GPUs of a replica by the sum of its parts, for planning: overhead model "guide". Pure.

Guide 2.1 to 2.6.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import Gpu
from kneewatch.diagnose.sizing.arithmetic import Sheet, Step
from kneewatch.diagnose.sizing.memory.budget import (
    HEADROOM_HIGH_RATIO,
    HEADROOM_LOW_RATIO,
    kv_layout_of,
)
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.overhead import (
    ACTIVATION_RATIO,
    FRAMEWORK_HIGH_RATIO,
    guide_overhead,
)
from kneewatch.diagnose.sizing.memory.weights import (
    ONE_GPU,
    adapter_bytes,
    draft_weights,
    weights_per_gpu,
)
from kneewatch.rules.formatting import percent

_SUM = "({weights:GB} + {KV:GB} + {activations:GB} + {adapters:GB})"
_FREE = "({memory:GB} x (1 - {framework}))"
_FEWEST = f"ceil({_SUM} / {_FREE})"
_WITH_HEADROOM = f"ceil({_SUM} x (1 + {{headroom}}) / {_FREE})"


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
    sheet: Sheet

    def gpus(
        self,
        framework_ratio: float = FRAMEWORK_HIGH_RATIO,
        *,
        headroom_ratio: float = 0.0,
        title: str = "",
        sheet: Sheet | None = None,
    ) -> int:
        """The fewest GPUs, with this share of each for the framework, and headroom on the sum."""
        bytes_each = self.weights_bytes, self.kv_bytes, self.activation_bytes, self.adapters_bytes
        free = self.gpu.memory_bytes, framework_ratio
        headroom = (headroom_ratio,) if headroom_ratio else ()
        formula = _WITH_HEADROOM if headroom_ratio else _FEWEST
        sheet = Sheet() if sheet is None else sheet
        return int(
            sheet.line(title, formula, (*bytes_each, *headroom, *free), source="guide 2.4, 2.6")
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic."""
        sheet = Sheet()
        sheet.add(self.sheet)
        self.gpus(title="Fewest GPUs by memory (overhead guide)", sheet=sheet)
        for ratio in (HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO):
            title = f"Fewest GPUs with {percent(ratio)} headroom"
            self.gpus(headroom_ratio=ratio, title=title, sheet=sheet)
        return sheet.steps


def planned_memory(launch: Launch, gpu: Gpu, *, concurrency: float) -> PlannedMemory:
    """The parts for so many requests of the context's length.

    Raises:
        SizingError: the parameters cannot be counted, or the dtype is unknown.
    """
    alone = replace(launch, parallel=ONE_GPU, decode_context_parallel=1)
    request_bytes = kv_layout_of(alone).request_bytes(launch.context)
    weights, sheet = weights_per_gpu(launch.model, launch.scheme, ONE_GPU), Sheet()
    adapters = launch.adapters
    activation_bytes = guide_overhead(alone, sum(weights.values()), gpu).activation_bytes
    drafted_bytes = launch.added_bytes * launch.parallel.gpus
    if launch.draft is not None:
        drafted_bytes += sum(draft_weights(launch.draft, ONE_GPU).values())
    parts = {**weights, **({"draft": drafted_bytes} if drafted_bytes else {})}
    weights_bytes = sheet.line(
        f"Weights ({launch.scheme.id})",
        " + ".join(f"{{{name}:GB}}" for name in parts),
        (*parts.values(),),
        result="{:GB}",
        source="guide 2.1; census of the model",
    )
    kv_bytes = sheet.line(
        "KV cache",
        f"{{requests}} x {{bytes of a request:GB ({launch.context:,} tokens)}}",
        (concurrency, request_bytes),
        result="{:GB}",
        source="guide 2.2",
    )
    activation_bytes = sheet.line(
        "Activations (overhead guide)",
        "{share} x {published weights:GB}",
        (ACTIVATION_RATIO, activation_bytes / ACTIVATION_RATIO),
        result="{:GB}",
        source="guide 2.3",
    )
    return PlannedMemory(
        gpu=gpu,
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        request_bytes=request_bytes,
        activation_bytes=activation_bytes,
        adapters_bytes=adapter_bytes(launch.model, adapters, ONE_GPU) if adapters else 0.0,
        sheet=sheet,
    )
