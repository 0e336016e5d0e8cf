"""The JSON of `vllm bench serve`, guidellm and aiperf to measured points. Pure.

Keys as written by vllm/benchmarks/serve.py (009e6d4), guidellm 0.3 to 0.6
(benchmark/schemas/generative) and aiperf 0.10 (profile_export_aiperf.json, schema 1.3).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TypeAlias, cast

from kneewatch.diagnose.sizing.benchmark.points import BenchmarkPoint, finite, in_flight, refuse

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
