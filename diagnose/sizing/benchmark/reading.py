"""A benchmark as text, whichever tool wrote it, to its measured points. Pure.

Guide 8.2: TTFT, ITL, requests and tokens per second at every step of a concurrency sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from kneewatch.diagnose.sizing.benchmark.aiperf import (
    aiperf_point,
    json_metrics,
    stated_concurrency,
)
from kneewatch.diagnose.sizing.benchmark.csv_table import aiperf_metrics, is_aiperf, table_points
from kneewatch.diagnose.sizing.benchmark.json_reports import (
    TOOLS,
    documents,
    guidellm_point,
    vllm_point,
)
from kneewatch.diagnose.sizing.benchmark.points import Benchmark, BenchmarkPoint, ordered, refuse


def read_benchmark(text: str, *, concurrency: float | None = None) -> Benchmark:
    """The points that a benchmark's text holds, by rising concurrency.

    The text is a CSV with one line per concurrency, the JSON of `vllm bench serve` (one object per
    point: alone, in a list, one per line, or several files one after the other), guidellm's JSON,
    or aiperf's JSON or CSV. `concurrency` is for a report of one point that does not state its own.

    Raises:
        SizingError: naming the row and column, or the document and key, and what is accepted.
    """
    body = text.removeprefix("\ufeff").strip()
    if not body:
        raise refuse("the benchmark is empty", "CSV", *TOOLS)
    if body[0] in "[{":
        return _from_json(body, concurrency)
    if is_aiperf(body):
        notes: list[str] = []
        return ordered([aiperf_point("report", aiperf_metrics(body), concurrency, notes)], notes)
    return table_points(body)


def merged(benchmarks: Sequence[Benchmark]) -> Benchmark:
    """Several files' points as one benchmark: most tools write one file per concurrency.

    Raises:
        SizingError: there is no point at all.
    """
    return ordered(
        [point for one in benchmarks for point in one.points],
        [note for one in benchmarks for note in one.notes],
    )


def _from_json(body: str, concurrency: float | None) -> Benchmark:
    points: list[BenchmarkPoint] = []
    notes: list[str] = []
    for origin, document in documents(body):
        runs = document.get("benchmarks")
        if isinstance(runs, list):
            for number, run in enumerate(cast("list[object]", runs), start=1):
                name = f"{origin}, benchmark {number}"
                points.append(guidellm_point(name, run, concurrency, notes))
        elif isinstance(document.get("request_throughput"), Mapping):
            stated = concurrency if concurrency is not None else stated_concurrency(document)
            metrics = json_metrics(document, origin)
            points.append(aiperf_point(origin, metrics, stated, notes))
        elif "request_throughput" in document:
            points.append(vllm_point(origin, document, concurrency, notes))
        else:
            raise refuse(
                f"{origin} is no known benchmark report: no `request_throughput` (vllm bench "
                "serve, aiperf) and no `benchmarks` (guidellm)",
                *TOOLS,
            )
    if concurrency is not None and len(points) > 1:
        raise refuse(
            f"concurrency {concurrency:g} was stated for {len(points)} points; it fits one only"
        )
    return ordered(points, notes)
