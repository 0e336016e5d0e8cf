"""Reads benchmark reports of vllm bench serve, guidellm and aiperf into measured points. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.sizing.benchmark.latency_curve import (
    Benchmark,
    finite,
    in_flight,
    ordered,
    point_of,
    refuse,
)

Json: TypeAlias = Mapping[str, object]
Keys: TypeAlias = Mapping[str, Sequence[str]]
"""For each field of a point, the paths in a report that may contain it; the first match is used.

Paths with `_ms` are in milliseconds.
"""

_LONGEST_NAME = 200
TOOLS = ("vllm bench serve", "guidellm", "aiperf")
_NEEDED = ("requests_per_s", "ttft_p99_s", "itl_p99_s")
_UNITS_PER_S = {"ms": 1e3, "s": 1.0, "sec": 1.0, "us": 1e6, "ns": 1e9}
"""Units per second by aiperf's unit names."""
_AIPERF_TIMES = (
    *("time_to_first_token", "inter_token_latency"),
    *("inter_chunk_latency", "request_latency"),
)
_PER_REQUEST = (
    "ITL is aiperf's inter_token_latency, a mean per request, so stalls of single tokens do not "
    "show; the report has no inter_chunk_latency"
)
_CHUNKS = (
    "ITL is aiperf's inter_chunk_latency, gap by gap as in `vllm bench serve`; its "
    "inter_token_latency is a mean per request, which hides stalls"
)


_PER_REQUEST_ITL = (
    "{tool} reports ITL as a mean per request, so stalls of single tokens do not show; `vllm bench "
    "serve` and vLLM's own histogram include them"
)
_CLOSED_LOOP = (
    "the run had no arrival rate: a fixed number in flight has no bursts, so production queues "
    "earlier; confirm C_max with --request-rate"
)
_EVEN_ARRIVALS = (
    "burstiness {burstiness:g} spaces arrivals more evenly than in production: "
    "repeat the run with 1"
)
_UNIFORM = (
    "every {name} has the same length, but in production P99 comes from the longest: repeat "
    "the run "
    "with the lengths of real requests"
)
_FEW_PROMPTS = "{origin}: concurrency {stated:g} stated, but only {requests} requests were sent"


def _keys_of(tool: str) -> Keys:
    keys: Keys = packaged_tables("diagnose.sizing.benchmark", "report_fields.toml")[tool]
    return keys


def documents(text: str) -> Iterator[tuple[str, Json]]:
    """Yields every JSON object in the text, with its name.

    The text may contain a single object, a list of objects, one object per line, or several objects
    one after another.

    Raises:
        SizingError: the message names the line that is not JSON.
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


def _number(document: object, path: str) -> float | None:
    return finite(_inside(document, *path.split(".")))


def _figures(document: object, keys: Keys) -> dict[str, float]:
    """The figures in a document by field of a point, in seconds and per second."""
    held = [(name, path, _number(document, path)) for name, paths in keys.items() for path in paths]
    return {
        name: value / 1000 if "_ms" in path else value
        for name, path, value in reversed(held)
        if value is not None
    }


def _model(document: object, paths: Sequence[str]) -> str:
    """The name of the served model; empty if the report has none."""
    for path in paths:
        named = _inside(document, *path.split("."))
        if isinstance(named, list) and named:
            named = cast("list[object]", named)[0]
        if isinstance(named, str):
            return named[:_LONGEST_NAME]
    return ""


def _point(
    origin: str,
    document: object,
    figures: Mapping[str, float],
    notes: list[str],
    *,
    tool: str,
    advice: str,
) -> BenchmarkPoint:
    """The point from a report's figures.

    Raises:
        SizingError: a required figure is missing; the message has its key and `advice`.
    """
    for name in _NEEDED:
        if name not in figures:
            key = _keys_of(tool)[name][0]
            raise refuse(f"{origin}: no {key}; {advice}", key)
    concurrency = in_flight(
        origin,
        figures.get("concurrency"),
        figures["requests_per_s"],
        figures.get("latency_mean_s"),
        notes,
    )
    named = _model(document, _keys_of(tool).get("model", ()))
    return point_of({**figures, "concurrency": concurrency}, origin=origin, model=named)


def _vllm_point(origin: str, document: Json, notes: list[str]) -> BenchmarkPoint:
    """The point from one result file of `vllm bench serve`; SGLang's files have the same keys."""
    figures = _figures(document, _keys_of("vllm"))
    if not figures.get("latency_mean_s"):
        figures |= _derived(document)
    notes += _too_even(document)
    limit, requests = figures.get("concurrency"), figures.get("requests")
    prompt_tokens = _number(document, "total_input_tokens")
    if prompt_tokens and requests:
        figures["input_tokens"] = prompt_tokens / requests
    if limit is not None and requests is not None:
        sent = int(requests + figures.get("failed", 0.0))
        if sent < limit:
            notes.append(_FEW_PROMPTS.format(origin=origin, stated=limit, requests=sent))
    advice = (
        "run `vllm bench serve` with --percentile-metrics ttft,tpot,itl,e2el "
        "--metric-percentiles 50,99"
    )
    return _point(origin, document, figures, notes, tool="vllm", advice=advice)


def _too_even(document: Json) -> list[str]:
    """Notes on what production traffic has and this run lacked: bursts, varied lengths (guide
    8.2)."""
    notes: list[str] = []
    rate, evenness = document.get("request_rate"), _number(document, "burstiness")
    if rate == "inf":
        notes.append(_CLOSED_LOOP)
    elif evenness is not None and evenness > 1:
        notes.append(_EVEN_ARRIVALS.format(burstiness=evenness))
    for name in ("input_lens", "output_lens"):
        lengths = document.get(name)
        if isinstance(lengths, list) and len(cast("list[object]", lengths)) > 1:
            values = {finite(value) for value in cast("list[object]", lengths)}
            if len(values) == 1:
                notes.append(_UNIFORM.format(name=name.removesuffix("_lens")))
    return notes


def _derived(document: Json) -> dict[str, float]:
    """The mean latency: mean TTFT plus mean TPOT for each further token."""
    ttft_ms, tpot_ms = _number(document, "mean_ttft_ms"), _number(document, "mean_tpot_ms")
    tokens, requests = _number(document, "total_output_tokens"), _number(document, "completed")
    if ttft_ms is None or tpot_ms is None or tokens is None or not requests:
        return {}
    return {"latency_mean_s": (ttft_ms + tpot_ms * (tokens / requests - 1)) / 1000}


def _guidellm_point(origin: str, benchmark: object, notes: list[str]) -> BenchmarkPoint:
    """The point from one entry of guidellm's `benchmarks`; only successful requests count."""
    notes.append(_PER_REQUEST_ITL.format(tool="guidellm"))
    figures = {**_guidellm_concurrency(benchmark), **_figures(benchmark, _keys_of("guidellm"))}
    advice = "check that guidellm wrote it"
    return _point(origin, benchmark, figures, notes, tool="guidellm", advice=advice)


def _guidellm_concurrency(benchmark: object) -> dict[str, float]:
    """The number of streams of a concurrent run if reported, otherwise the mean requests in
    flight."""
    for where in ("config", "args"):
        kind = _inside(benchmark, where, "strategy", "type_")
        if kind == "synchronous":
            return {"concurrency": 1.0}
        for key in ("streams", "max_concurrency"):
            value = _number(benchmark, f"{where}.strategy.{key}")
            if value is not None and kind in ("concurrent", None):
                return {"concurrency": value}
    return _figures(benchmark, {"concurrency": ("metrics.request_concurrency.successful.mean",)})


def _aiperf_point(origin: str, metrics: Json, notes: list[str]) -> BenchmarkPoint:
    """The point from one aiperf report: its metrics by name and statistic, in seconds.

    ITL is measured per gap (inter_chunk_latency) if the report has it: targets on ITL P99, vLLM's
    histogram and `vllm bench serve` all mean single gaps.
    """
    by_gaps = _number(metrics, "inter_chunk_latency.p99") is not None
    notes.append(_CHUNKS if by_gaps else _PER_REQUEST)
    if by_gaps:
        metrics = {**metrics, "inter_token_latency": metrics["inter_chunk_latency"]}
    figures = {**_aiperf_concurrency(metrics), **_figures(metrics, _keys_of("aiperf"))}
    advice = "run aiperf with --streaming"
    return _point(origin, metrics, figures, notes, tool="aiperf", advice=advice)


def _in_seconds(document: Json, origin: str) -> Json:
    """An aiperf JSON report with its times converted to seconds.

    Raises:
        SizingError: a time has an unknown unit.
    """
    converted = dict(document)
    for name in _AIPERF_TIMES:
        metric = document.get(name)
        if not isinstance(metric, Mapping):
            continue
        held = cast("Json", metric)
        unit = str(held.get("unit"))
        if unit not in _UNITS_PER_S:
            raise refuse(f"{origin}: {name} has the unit {unit!r}", *_UNITS_PER_S)
        numbers = {statistic: finite(value) for statistic, value in held.items()}
        converted[name] = {
            statistic: number / _UNITS_PER_S[unit]
            for statistic, number in numbers.items()
            if number is not None
        }
    return converted


def _aiperf_concurrency(document: Json) -> dict[str, float]:
    """The concurrency in `input_config`: the profiling phase's, or that of the older `loadgen`."""
    config = document.get("input_config")
    if not isinstance(config, Mapping):
        return {}
    held = cast("Json", config)
    phases = held.get("phases")
    places: list[object] = [held.get("loadgen"), held]
    if isinstance(phases, Sequence):
        places = [*reversed(cast("Sequence[object]", phases)), *places]
    for place in places:
        if isinstance(place, Mapping):
            phase = cast("Json", place)
            value = finite(phase.get("concurrency"))
            if not phase.get("exclude_from_results") and value is not None:
                return {"concurrency": value}
    return {}


# --- A table as CSV -------------------------------------------------------------------------------


def _table_points(text: str) -> Benchmark:
    """The points of a CSV with a line of headings and one line per concurrency.

    Raises:
        SizingError: the message names the row, the column and what is accepted.
    """
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise refuse("the benchmark is empty", "CSV", *TOOLS)
    delimiter = max(",;\t", key=lines[0][1].count)
    header, *rows = ([cell.strip(' "') for cell in line.split(delimiter)] for _, line in lines)
    keys = _keys_of("csv")
    accepted = [paths[0] for paths in keys.values()]
    names = [re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in header]
    for field in ("concurrency", *_NEEDED):
        if not set(names) & set(keys[field]):
            raise refuse(
                f"no column for {field} among {', '.join(map(repr, header))}; "
                f"accepted names are like {', '.join(accepted)}",
                *accepted,
            )
    used = {path for paths in keys.values() for path in paths}
    points: list[BenchmarkPoint] = []
    for (number, _), cells in zip(lines[1:], rows, strict=True):
        origin = f"row {number}"
        if len(cells) != len(header):
            raise refuse(f"{origin} has {len(cells)} cells, the header {len(header)}")
        row = {
            name: _cell(cell, f"{origin}, column {heading!r}")
            for name, heading, cell in zip(names, header, cells, strict=True)
            if name in used and cell
        }
        points.append(_point(origin, row, _figures(row, keys), [], tool="csv", advice="add it"))
    return ordered(points)


def _cell(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise refuse(f"{where}: {text!r} is not a number", "12", "0.45") from None


# --- Any benchmark text to its measured points ----------------------------------------------------
#
# Guide 8.2: TTFT, ITL, requests and tokens per second at every step of a concurrency sweep.


def read_benchmark(text: str) -> Benchmark:
    """The points in a benchmark's text, by rising concurrency.

    The text is one of:

    - a CSV with one line per concurrency;
    - JSON of `vllm bench serve`, one object per point: alone, in a list, one per line, or several
      files one after another;
    - guidellm's JSON;
    - aiperf's JSON.

    Raises:
        SizingError: the message names the row and column, or the document and key, and what is
            accepted.
    """
    body = text.removeprefix("\ufeff").strip()
    if not body:
        raise refuse("the benchmark is empty", "CSV", *TOOLS)
    if body[0] in "[{":
        return _from_json(body)
    return _table_points(body)


def merged(benchmarks: Sequence[Benchmark]) -> Benchmark:
    """The points of several files as one benchmark: most tools write one file per concurrency.

    Raises:
        SizingError: there is no point.
    """
    return ordered(
        [point for benchmark in benchmarks for point in benchmark.points],
        [note for benchmark in benchmarks for note in benchmark.notes],
    )


def _from_json(body: str) -> Benchmark:
    points: list[BenchmarkPoint] = []
    notes: list[str] = []
    for origin, document in documents(body):
        runs = document.get("benchmarks")
        if isinstance(runs, list):
            for number, run in enumerate(cast("list[object]", runs), start=1):
                name = f"{origin}, benchmark {number}"
                points.append(_guidellm_point(name, run, notes))
        elif isinstance(document.get("request_throughput"), Mapping):
            points.append(_aiperf_point(origin, _in_seconds(document, origin), notes))
        elif "request_throughput" in document:
            points.append(_vllm_point(origin, document, notes))
        else:
            raise refuse(
                f"{origin} is not a supported benchmark report: it has neither "
                "`request_throughput` (vllm bench serve, aiperf) nor `benchmarks` (guidellm)",
                *TOOLS,
            )
    return ordered(points, notes)
