"""An operating point found in a benchmark, for reading and as JSON. Pure."""

from __future__ import annotations

from typing import Any

from kneewatch.diagnose.sizing.benchmark.operating_point import OperatingPoint
from kneewatch.diagnose.sizing.benchmark.points import BenchmarkPoint
from kneewatch.diagnose.sizing.steps import figure
from kneewatch.reports.words import duration


def operating_point_document(found: OperatingPoint) -> dict[str, Any]:
    """C_max, the knee and what makes the benchmark doubtful."""
    return {
        "c_max": None if found.c_max is None else _point(found.c_max),
        "is_lower_bound": found.is_lower_bound,
        "first_miss": None if found.first_miss is None else _point(found.first_miss),
        "missed": list(found.missed),
        "knee": {"safe": _point(found.knee.safe), "basis": found.knee.basis},
        "peak_requests_per_s": found.peak_requests_per_s,
        "flags": [{"kind": flag.kind, "message": flag.message} for flag in found.flags],
        "steps": [step.line() for step in found.steps],
    }


def _point(point: BenchmarkPoint) -> dict[str, Any]:
    return {
        "concurrency": point.concurrency,
        "requests_per_s": point.requests_per_s,
        "ttft_p99_s": point.ttft_p99_s,
        "itl_p99_s": point.itl_p99_s,
    }


def operating_point_lines(found: OperatingPoint) -> list[str]:
    """The same in lines."""
    best = found.c_max
    if best is None:
        first = "Benchmark: no measured concurrency keeps the targets"
    else:
        bound = " or more" if found.is_lower_bound else ""
        first = (
            f"Benchmark: C_max {figure(best.concurrency)}{bound}, "
            f"{figure(best.requests_per_s)} requests/s usable, {_latencies(best)}"
        )
    lines = [first, *[f"  next: {missed}" for missed in found.missed]]
    lines += [f"  knee after {figure(found.knee.safe.concurrency)} ({found.knee.basis})"]
    return [*lines, *[f"  doubt: {flag.message}" for flag in found.flags]]


def _latencies(point: BenchmarkPoint) -> str:
    return f"TTFT P99 {duration(point.ttft_p99_s)}, ITL P99 {duration(point.itl_p99_s)}"
