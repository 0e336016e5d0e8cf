"""aiperf's report, JSON or CSV, as a measured point. Pure.

Its JSON has a metric per key with its unit and statistics; its CSV has the same metrics without
the concurrency, which the caller states or Little's law gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from kneewatch.diagnose.sizing.benchmark.points import BenchmarkPoint, finite, in_flight, refuse

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
    found: dict[str, dict[str, float]] = {}
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
        found[name] = {
            statistic: number / units
            for statistic, value in held.items()
            if (number := finite(value)) is not None
        }
    return found


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
