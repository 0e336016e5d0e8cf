"""Whether a benchmark can be believed: Little's law within it, production against it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kneewatch.diagnose.sizing.inputs import positive, within
from kneewatch.diagnose.sizing.steps import Step, exact, figure

GAP_LIMIT = 2.0
"""Guide 8.3: ceiling over measured RPS; above it the test's inputs are not production's."""

IMPOSSIBLE_GAP = 0.9
"""More served than Little's law allows, by more than ramps at a run's ends can explain."""

THIN_GAP = 1.25
"""A fifth of the stated concurrency missing on average: ramps take that much of a short run."""

TTFT_EXCESS_LIMIT = 0.30
"""Guide 9.1 step 13: production TTFT P99 above the benchmark's."""

GPU_SHORTFALL_LIMIT = 0.20
"""Guide 9.1 step 13: GPU utilization below the benchmark's, 20 points, at equal RPS."""

Basis = Literal["mean latency", "target"]
Verdict = Literal["consistent", "mismatch", "impossible"]


@dataclass(frozen=True, slots=True)
class LittleGap:
    """Little's ceiling against what was measured; `gap_ratio` is ceiling / measured."""

    ceiling_requests_per_s: float
    gap_ratio: float
    basis: Basis
    verdict: Verdict
    meaning: str
    steps: tuple[Step, ...]


def littles_gap(
    *, concurrency: float, requests_per_s: float, latency_s: float, basis: Basis = "mean latency"
) -> LittleGap:
    """How far the measured requests/s lie below concurrency / latency.

    With `basis="mean latency"`, the mean life of a request in seconds, the gap of a sound run is 1:
    Little's law is an identity. With `basis="target"` it is the guide's own example, which divides
    by the TTFT target; that gap also holds all of decode, so 2 and more is common with long
    outputs, and below 1 only says that requests end sooner than the target.

    Raises:
        SizingError: a number is not positive.
    Source: guide 8.3; Little 1961.
    """
    positive("concurrency", concurrency)
    positive("requests_per_s", requests_per_s)
    positive("latency_s", latency_s)
    ceiling = concurrency / latency_s
    gap = ceiling / requests_per_s
    verdict, meaning = _verdict(gap, basis)
    name = "mean latency" if basis == "mean latency" else "TTFT target"
    steps = (
        Step(
            title="Little's ceiling",
            formula=f"concurrency / {name}",
            values=f"{figure(concurrency)} / {figure(latency_s)} s",
            result=f"{figure(ceiling)} requests/s",
            source="guide 8.3",
        ),
        Step(
            title="Little's gap",
            formula="ceiling / measured",
            values=f"{figure(ceiling)} / {figure(requests_per_s)}",
            result=f"{figure(gap)} ({verdict})",
            source="guide 8.3",
        ),
    )
    return LittleGap(ceiling, gap, basis, verdict, meaning, steps)


def _verdict(gap: float, basis: Basis) -> tuple[Verdict, str]:
    if gap > GAP_LIMIT and basis == "mean latency":
        return "mismatch", (
            "the stated concurrency was not in flight (too few requests, a slow client, arrivals "
            "that never filled it), or the latencies leave out part of a request's life, such as "
            "tokens that the client did not see; fix the benchmark before sizing"
        )
    if gap > GAP_LIMIT:
        return "mismatch", (
            "by the guide the test's inputs are not production's; with long outputs the gap is "
            "decode time: compare with the mean latency before rejecting the benchmark"
        )
    if gap < IMPOSSIBLE_GAP and basis == "mean latency":
        return "impossible", "more was served than was in flight: two of the numbers do not belong"
    if gap > THIN_GAP and basis == "mean latency":
        return "consistent", (
            f"within the guide's limit, but only {1 / gap:.0%} of the stated concurrency was in "
            "flight on average: run longer at each step"
        )
    return "consistent", "the benchmark can be sized from"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Production against the benchmark; a shortfall or excess below 0 is the good direction.

    `resize`: the workload has to be characterized again. None: that half was not measured.
    """

    ttft_excess_ratio: float | None
    gpu_shortfall_ratio: float | None
    resize: bool
    steps: tuple[Step, ...]


def divergence(
    *,
    benchmark_ttft_p99_s: float | None = None,
    production_ttft_p99_s: float | None = None,
    benchmark_gpu_ratio: float | None = None,
    production_gpu_ratio: float | None = None,
) -> Divergence:
    """Whether the first week of production contradicts the benchmark at equal requests/s.

    It does with TTFT P99 more than 30 % above, or GPU utilization more than 20 points below.

    Raises:
        SizingError: a time is not positive or a utilization is outside 0..1.
    Source: guide 9.1, step 13.
    """
    excess = shortfall = None
    steps: list[Step] = []
    if benchmark_ttft_p99_s is not None and production_ttft_p99_s is not None:
        positive("benchmark_ttft_p99_s", benchmark_ttft_p99_s)
        positive("production_ttft_p99_s", production_ttft_p99_s)
        excess = float(exact(production_ttft_p99_s) / exact(benchmark_ttft_p99_s) - 1)
        steps.append(
            Step(
                title="TTFT P99 above the benchmark",
                formula="production / benchmark - 1",
                values=f"{figure(production_ttft_p99_s)} / {figure(benchmark_ttft_p99_s)} - 1",
                result=f"{excess:+.0%} (limit {TTFT_EXCESS_LIMIT:+.0%})",
                source="guide 9.1 step 13",
            )
        )
    if benchmark_gpu_ratio is not None and production_gpu_ratio is not None:
        within("benchmark_gpu_ratio", benchmark_gpu_ratio, low=0, high=1)
        within("production_gpu_ratio", production_gpu_ratio, low=0, high=1)
        shortfall = float(exact(benchmark_gpu_ratio) - exact(production_gpu_ratio))
        steps.append(
            Step(
                title="GPU utilization below the benchmark",
                formula="benchmark - production",
                values=f"{benchmark_gpu_ratio:.0%} - {production_gpu_ratio:.0%}",
                result=f"{shortfall * 100:.0f} points (limit {GPU_SHORTFALL_LIMIT * 100:.0f})",
                source="guide 9.1 step 13",
            )
        )
    resize = (excess is not None and excess > TTFT_EXCESS_LIMIT) or (
        shortfall is not None and shortfall > GPU_SHORTFALL_LIMIT
    )
    return Divergence(excess, shortfall, resize, tuple(steps))
