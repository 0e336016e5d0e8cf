"""Benchmark reports of vllm bench serve, guidellm and aiperf, read into measured points. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from kneewatch.diagnose.sizing.benchmark.csv_tables import aiperf_metrics, is_aiperf, table_points
from kneewatch.diagnose.sizing.benchmark.points import (
    Benchmark,
    BenchmarkPoint,
    finite,
    in_flight,
    ordered,
    refuse,
)

Metrics: TypeAlias = Mapping[str, Mapping[str, float]]

_UNITS_PER_S = {"ms": 1e3, "s": 1.0, "sec": 1.0, "us": 1e6, "ns": 1e9}
_JSON_METRICS = {
    "time_to_first_token": "ttft",
    "inter_chunk_latency": "chunk",
    "inter_token_latency": "itl",
    "request_latency": "latency",
    "request_throughput": "requests_per_s",
    "output_token_throughput": "output_tokens_per_s",
    "request_count": "requests",
    "error_request_count": "failed",
}
_PER_REQUEST = (
    "aiperf's inter_token_latency is averaged over each request before P99 is taken: stalls of "
    "single tokens do not show, and there is no inter_chunk_latency to use instead"
)
_CHUNKS = (
    "ITL from aiperf's inter_chunk_latency, gap by gap as in `vllm bench serve`; its "
    "inter_token_latency is averaged over each request first and hides stalls"
)


def json_metrics(document: Mapping[str, object], origin: str) -> Metrics:
    """Metric to statistic to value of an aiperf JSON report, in seconds and per second.

    Raises:
        SizingError: a time has a unit that is not known.
    """
    metrics: dict[str, dict[str, float]] = {}
    for key, name in _JSON_METRICS.items():
        metric = document.get(key)
        if not isinstance(metric, Mapping):
            continue
        held = cast("Mapping[str, object]", metric)
        unit = str(held.get("unit"))
        is_time = name in ("ttft", "chunk", "itl", "latency")
        if is_time and unit not in _UNITS_PER_S:
            raise refuse(f"{origin}: {key} has the unit {unit!r}", *_UNITS_PER_S)
        units = _UNITS_PER_S[unit] if is_time else 1.0
        metrics[name] = {
            statistic: number / units
            for statistic, value in held.items()
            if (number := finite(value)) is not None
        }
    return metrics


def stated_concurrency(document: Mapping[str, object]) -> float | None:
    """The concurrency in `input_config`: of the profiling phase, or the older `loadgen`."""
    config = document.get("input_config")
    if not isinstance(config, Mapping):
        return None
    held = cast("Mapping[str, object]", config)
    phases = held.get("phases")
    places: list[object] = [held.get("loadgen"), held]
    if isinstance(phases, Sequence):
        places = [*reversed(cast("Sequence[object]", phases)), *places]
    for place in places:
        if isinstance(place, Mapping):
            phase = cast("Mapping[str, object]", place)
            value = finite(phase.get("concurrency"))
            if not phase.get("exclude_from_results") and value is not None:
                return value
    return None


def aiperf_point(
    origin: str, metrics: Metrics, stated: float | None, notes: list[str]
) -> BenchmarkPoint:
    """The point of one aiperf report.

    ITL is taken gap by gap (inter_chunk_latency) where the report has it, because a target on
    ITL P99, vLLM's histogram and `vllm bench serve` all mean single gaps.

    Raises:
        SizingError: a needed metric is missing.
    """

    def value(name: str, statistic: str) -> float | None:
        return metrics.get(name, {}).get(statistic)

    gaps = "chunk" if value("chunk", "p99") is not None else "itl"
    rate, ttft, itl = value("requests_per_s", "avg"), value("ttft", "p99"), value(gaps, "p99")
    if rate is None or ttft is None or itl is None:
        raise refuse(
            f"{origin}: needs request_throughput, and P99 of time_to_first_token and "
            "inter_token_latency (run aiperf with --streaming)",
            "request_throughput",
            "time_to_first_token",
            "inter_token_latency",
        )
    notes.append(_CHUNKS if gaps == "chunk" else _PER_REQUEST)
    latency_s = value("latency", "avg")
    requests, failed = value("requests", "avg"), value("failed", "avg")
    return BenchmarkPoint(
        concurrency=in_flight(origin, stated, rate, latency_s, notes),
        requests_per_s=rate,
        ttft_p99_s=ttft,
        itl_p99_s=itl,
        ttft_p50_s=value("ttft", "p50"),
        itl_p50_s=value(gaps, "p50"),
        latency_mean_s=latency_s,
        output_tokens_per_s=value("output_tokens_per_s", "avg"),
        requests=None if requests is None else int(requests),
        failed=None if failed is None else int(failed),
        origin=origin,
    )


# --- The JSON of `vllm bench serve`, guidellm and aiperf to measured points. Pure -----------------
#
# Keys as written by vllm/benchmarks/serve.py (009e6d4), guidellm 0.3 to 0.6
# (benchmark/schemas/generative) and aiperf 0.10 (profile_export_aiperf.json, schema 1.3).


TOOLS = ("vllm bench serve", "guidellm", "aiperf")
_PER_REQUEST_ITL = (
    "{tool} averages ITL over each request before it takes P99: stalls of single tokens, which "
    "`vllm bench serve` and the server's own histogram count, do not show"
)
_FEW_PROMPTS = "{origin}: concurrency {stated:g} stated, but only {requests} requests were sent"
Json: TypeAlias = Mapping[str, object]


def documents(text: str) -> Iterator[tuple[str, Json]]:
    """Every JSON object in the text with its name: one, a list, lines, or several in a row.

    Raises:
        SizingError: naming the line that is not JSON.
    """
    decoder = json.JSONDecoder()
    position, count = 0, 0
    while position < len(text):
        if text[position].isspace() or text[position] == ",":
            position += 1
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise refuse(f"line {error.lineno} is not JSON: {error.msg}", *TOOLS) from error
        except (ValueError, RecursionError) as error:
            raise refuse(f"the benchmark is not usable JSON: {error}", *TOOLS) from error
        for item in cast("list[object]", value) if isinstance(value, list) else [value]:
            count += 1
            if not isinstance(item, dict):
                raise refuse(f"document {count} is {type(item).__name__}, not an object", *TOOLS)
            yield f"document {count}", cast("Json", item)


def _inside(document: object, *path: str) -> object:
    for key in path:
        if not isinstance(document, Mapping):
            return None
        document = cast("Json", document).get(key)
    return document


def _number(document: object, *path: str) -> float | None:
    return finite(_inside(document, *path))


def _needed(origin: str, value: float | None, key: str, advice: str) -> float:
    if value is None:
        raise refuse(f"{origin}: no {key}; {advice}", key)
    return value


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


def _vllm_latency_s(document: Json) -> float | None:
    """Mean seconds from sent to last token: measured, or TTFT and the rest at mean TPOT."""
    measured = _number(document, "mean_e2el_ms") or _number(document, "mean_e2e_latency_ms")
    if measured is not None:
        return measured / 1000
    ttft, tpot = _number(document, "mean_ttft_ms"), _number(document, "mean_tpot_ms")
    tokens, requests = _number(document, "total_output_tokens"), _number(document, "completed")
    if ttft is None or tpot is None or tokens is None or not requests:
        return None
    return (ttft + tpot * (tokens / requests - 1)) / 1000


def vllm_point(
    origin: str, document: Json, stated: float | None, notes: list[str]
) -> BenchmarkPoint:
    """The point of one result file of `vllm bench serve` (SGLang's has the same keys)."""
    rate = _needed(origin, _number(document, "request_throughput"), "request_throughput", "")
    advice = (
        "run `vllm bench serve` with --percentile-metrics ttft,tpot,itl,e2el "
        "--metric-percentiles 50,99"
    )
    p99 = {
        name: _needed(origin, _number(document, f"p99_{name}_ms"), f"p99_{name}_ms", advice) / 1000
        for name in ("ttft", "itl")
    }
    p50 = {
        name: _seconds(
            _number(document, f"p50_{name}_ms") or _number(document, f"median_{name}_ms")
        )
        for name in ("ttft", "itl")
    }
    latency_s = _vllm_latency_s(document)
    requests, failed = _number(document, "completed"), _number(document, "failed")
    limit = stated if stated is not None else _number(document, "max_concurrency")
    if limit is not None and requests is not None and requests + (failed or 0) < limit:
        sent = int(requests + (failed or 0))
        notes.append(_FEW_PROMPTS.format(origin=origin, stated=limit, requests=sent))
    return BenchmarkPoint(
        concurrency=in_flight(origin, limit, rate, latency_s, notes),
        requests_per_s=rate,
        ttft_p99_s=p99["ttft"],
        itl_p99_s=p99["itl"],
        ttft_p50_s=p50["ttft"],
        itl_p50_s=p50["itl"],
        latency_mean_s=latency_s,
        output_tokens_per_s=_number(document, "output_throughput"),
        requests=None if requests is None else int(requests),
        failed=None if failed is None else int(failed),
        origin=origin,
    )


def _guidellm_concurrency(benchmark: object) -> float | None:
    """Streams of a concurrent run, where its version keeps them; else the mean in flight."""
    for where in ("config", "args"):
        kind = _inside(benchmark, where, "strategy", "type_")
        if kind == "synchronous":
            return 1.0
        for key in ("streams", "max_concurrency"):
            value = _number(benchmark, where, "strategy", key)
            if value is not None and kind in ("concurrent", None):
                return value
    return _number(benchmark, "metrics", "request_concurrency", "successful", "mean")


def guidellm_point(
    origin: str, benchmark: object, stated: float | None, notes: list[str]
) -> BenchmarkPoint:
    """The point of one entry of guidellm's `benchmarks`; its successful requests count."""

    def held(metric: str, *path: str) -> float | None:
        return _number(benchmark, "metrics", metric, "successful", *path)

    def p99_s(metric: str) -> float:
        key = f"metrics.{metric}.successful.percentiles.p99"
        return _needed(origin, held(metric, "percentiles", "p99"), key, "is it guidellm's?") / 1000

    rate = _needed(
        origin,
        held("requests_per_second", "mean"),
        "metrics.requests_per_second",
        "is it guidellm's?",
    )
    notes.append(_PER_REQUEST_ITL.format(tool="guidellm"))
    latency_s = held("request_latency", "mean")
    limit = stated if stated is not None else _guidellm_concurrency(benchmark)
    requests = _number(benchmark, "metrics", "request_totals", "successful")
    failed = _number(benchmark, "metrics", "request_totals", "errored")
    return BenchmarkPoint(
        concurrency=in_flight(origin, limit, rate, latency_s, notes),
        requests_per_s=rate,
        ttft_p99_s=p99_s("time_to_first_token_ms"),
        itl_p99_s=p99_s("inter_token_latency_ms"),
        ttft_p50_s=_seconds(held("time_to_first_token_ms", "median")),
        itl_p50_s=_seconds(held("inter_token_latency_ms", "median")),
        latency_mean_s=latency_s,
        output_tokens_per_s=held("output_tokens_per_second", "mean"),
        requests=None if requests is None else int(requests),
        failed=None if failed is None else int(failed),
        origin=origin,
    )


# --- A benchmark as text, whichever tool wrote it, to its measured points. Pure -------------------
#
# Guide 8.2: TTFT, ITL, requests and tokens per second at every step of a concurrency sweep.


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
        [point for benchmark in benchmarks for point in benchmark.points],
        [note for benchmark in benchmarks for note in benchmark.notes],
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
