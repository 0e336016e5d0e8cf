"""Why configurations fail: counts by reason, each with the one that came nearest. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kneewatch.diagnose.sizing.memory.setup import Setup

NODE = "only one GPU in a node"
FORMAT = "number format not supported by the GPU"
REQUANTIZED = "the checkpoint is quantized already"
HEADS = "tensor parallelism does not divide the heads"
LAYERS = "more pipeline stages than layers"
WEIGHTS = "weights do not fit"
KV = "KV cache does not hold one request of the longest length"
TTFT_MISSED = "TTFT above the target with a single request"
ITL_MISSED = "ITL above the target with a single request"
GPUS = "needs more GPUs than allowed"
REASONS = (NODE, FORMAT, REQUANTIZED, HEADS, LAYERS, WEIGHTS, KV, TTFT_MISSED, ITL_MISSED, GPUS)


def name_of(setup: Setup) -> str:
    """A launch in few words: GPU, parallelism, weights, KV dtype and longest context."""
    gpu = setup.gpu.id if setup.gpu is not None else "no GPU"
    stages = f" PP {setup.parallel.pipeline}" if setup.parallel.pipeline > 1 else ""
    return (
        f"{gpu} TP {setup.parallel.tensor}{stages}, {setup.scheme.id} weights, "
        f"{setup.kv_cache_dtype} KV cache, {setup.longest_tokens:,} tokens"
    )


@dataclass(frozen=True, slots=True)
class Rejection:
    """One reason, how many configurations fail for it, and the nearest of them in words."""

    reason: str
    configurations: int
    example: str


@dataclass(slots=True)
class _Count:
    configurations: int
    needed_ratio: float
    setup: Setup
    detail: Callable[[], str]


class Tally:
    """Counts failures while a search runs; of each reason the nearest one is kept."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def reject(
        self,
        reason: str,
        setup: Setup,
        detail: Callable[[], str],
        *,
        configurations: int,
        needed_ratio: float = 1.0,
    ) -> None:
        """Count configurations that need `needed_ratio` times what there is."""
        count = self._counts.get(reason)
        if count is None:
            self._counts[reason] = _Count(configurations, needed_ratio, setup, detail)
            return
        count.configurations += configurations
        if needed_ratio < count.needed_ratio:
            count.needed_ratio, count.setup, count.detail = needed_ratio, setup, detail

    def rejections(self) -> tuple[Rejection, ...]:
        """The reasons met, in the order in which a launch runs into them."""
        return tuple(
            Rejection(reason, count.configurations, f"{name_of(count.setup)}: {count.detail()}")
            for reason in REASONS
            if (count := self._counts.get(reason)) is not None
        )
