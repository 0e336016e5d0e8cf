"""Made-up sweeps: a curve that rises to the most a degree gives, then stays there."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.sizing.benchmark.latency_curve import ordered
from kneewatch.diagnose.sizing.benchmark.operating_point import Sweeps

LOADS = (1.0, 8.0, 32.0, 64.0, 80.0)
"""Requests in flight a GPU; from 64 on nothing is gained."""


def sweep(
    tensor_parallel: int,
    per_gpu: float,
    *,
    tokens_per_request: float | None = 200.0,
    loads: Sequence[float] = LOADS,
) -> Sweeps:
    """A sweep with so many tokens a second and GPU at most; without lengths, as many requests of
    200 tokens. TTFT P99 is 1.2 s at the most, 2.4 s beyond."""
    points: list[BenchmarkPoint] = []
    for load in loads:
        tokens_per_s = tensor_parallel * per_gpu * min(load, 64.0) / 64.0
        points.append(
            BenchmarkPoint(
                concurrency=tensor_parallel * load,
                requests_per_s=tokens_per_s / (tokens_per_request or 200.0),
                ttft_p99_s=2.4 if load > 64 else 0.2 + load / 64,
                itl_p99_s=0.02 + load / 2000,
                output_tokens_per_s=None if tokens_per_request is None else tokens_per_s,
            )
        )
    return {tensor_parallel: ordered(points)}
