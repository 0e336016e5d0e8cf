"""Reads benchmark reports of vllm bench serve, guidellm and aiperf into measured points. Pure."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from msgspec import Struct

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

# --- Reads benchmark tables in CSV, with their columns and units, into measured points ------------


_HEADINGS = packaged_tables("diagnose.sizing.benchmark", "csv_headings.toml")
ACCEPTED: tuple[str, ...] = tuple(_HEADINGS["accepted"])
AIPERF_ROWS: Mapping[str, str] = _HEADINGS["aiperf_rows"]
AIPERF_VALUES: Mapping[str, str] = _HEADINGS["aiperf_values"]

_UNITS = {
    **dict.fromkeys(("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"), 1000.0),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
}
"""Units per second. Values are divided by them, not multiplied: 1900 x 0.001 is slightly above
1.9."""

_P99 = {"p99", "99", "99th"}
_P50 = {"p50", "50", "50th", "median", "med"}
_PER_SECOND = {"s", "sec", "second", "throughput", "rate", "persec", "persecond"}
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z]*)")


class CsvColumn(Struct, frozen=True):
    """The field of a point that a column contains.

    `units_per_s`: for times, the unit in the column's name; None if it names none. `second_choice`:
    a better column for the same field replaces this one: ITL replaces TPOT, and the measured rate
    replaces the offered rate.
    """

    field: str
    units_per_s: float | None = None
    second_choice: bool = False


def _time(words: set[str]) -> str | None:
    if "ttft" in words or {"first", "token"} <= words:
        return "ttft"
    if words & {"itl", "tpot", "tbt"} or {"inter", "token"} <= words or "intertoken" in words:
        return "itl"
    if {"time", "per", "output", "token"} <= words:
        return "itl"
    if words & {"e2e", "e2el", "latency"} or {"end", "to"} <= words:
        return "latency"
    return None


def _time_field(quantity: str, words: set[str]) -> str | None:
    if quantity == "latency":
        if words & _P99:
            return "latency_p99_s"
        return None if words & (_P50 | {"p90", "p95"}) else "latency_mean_s"
    if words & _P99:
        return f"{quantity}_p99_s"
    if words & _P50:
        return f"{quantity}_p50_s"
    return None


def column(name: str) -> CsvColumn | None:
    """What a column with this name contains; None if sizing does not use it."""
    ordered = re.findall(r"[a-z0-9]+", name.lower().replace("tokens_per", "tokens per"))
    words = set(ordered)
    quantity = _time(words)
    if quantity is not None:
        field = _time_field(quantity, words)
        unit = next((_UNITS[w] for w in reversed(ordered) if w in _UNITS), None)
        is_tpot = "tpot" in words or {"per", "output"} <= words
        return None if field is None else CsvColumn(field, unit, is_tpot)
    if words & {"concurrency", "concurrent", "streams", "users", "clients"} or ordered == ["c"]:
        return CsvColumn("concurrency")
    if words & {"tok", "tokens", "token"}:
        generated = not words & {"input", "prompt", "prefill", "total", "max", "peak", "user"}
        return CsvColumn("output_tokens_per_s") if generated and words & _PER_SECOND else None
    if {"output", "throughput"} <= words:
        return CsvColumn("output_tokens_per_s")
    if words & {"failed", "errors", "errored"}:
        return CsvColumn("failed")
    if words & {"rps", "qps"}:
        return CsvColumn("requests_per_s")
    if words & {"req", "reqs", "request", "requests"} and "goodput" not in words:
        if words & _PER_SECOND:
            return CsvColumn("requests_per_s", second_choice="rate" in words)
        return CsvColumn("requests")
    return CsvColumn("requests") if ordered == ["completed"] else None


def cell_value(text: str, column: CsvColumn, *, where: str, decimal_comma: bool = False) -> float:
    """A cell as a number. Times are in seconds; the cell's own unit overrides the column's.

    Raises:
        SizingError: the cell is not a number, or is a time without a unit.
    """
    match = _NUMBER.fullmatch(text.replace(",", ".") if decimal_comma else text)
    unit = match[2].lower() if match else ""
    if match is None or (unit and unit not in _UNITS):
        raise refuse(f"{where}: {text!r} is not a number", "12", "0.45", "450 ms")
    value = float(match[1])
    if not math.isfinite(value):
        raise refuse(f"{where}: {text!r} is too large")
    if not column.field.endswith("_s") or column.field.endswith("_per_s"):
        return value
    units_per_s = _UNITS[unit] if unit else column.units_per_s
    if units_per_s is None:
        raise refuse(
            f"{where}: the unit of the time is missing; end the column's name in _ms or _s",
            column.field.removesuffix("_s") + "_ms",
            column.field,
        )
    return value / units_per_s


# --- A benchmark table as CSV, and the CSV of aiperf, to measured points --------------------------


_NEEDED = ("concurrency", "requests_per_s", "ttft_p99_s", "itl_p99_s")
_MIXED_ITL = "column {name!r} is a mean per request (TPOT): its P99 hides stalls of single tokens"


def _rows(text: str) -> tuple[list[tuple[int, list[str]]], bool]:
    """Number and cells of each non-empty line; whether a comma may be a decimal separator."""
    kept = [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not kept:
        raise refuse("the benchmark is empty", *ACCEPTED)
    delimiter = max(",;\t", key=kept[0][1].count)
    try:
        split = [
            (number, [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))])
            for number, line in kept
        ]
    except csv.Error as error:
        raise refuse(f"the benchmark is not a CSV: {error}", *ACCEPTED) from error
    return split, delimiter != ","


def _columns(header: Sequence[str]) -> dict[int, CsvColumn]:
    """The meaning of each column that sizing uses, by column number.

    Raises:
        SizingError: a required quantity is missing, or two columns contain the same quantity.
    """
    held = {i: matched for i, name in enumerate(header) if (matched := column(name)) is not None}
    first = {matched.field for matched in held.values() if not matched.second_choice}
    held = {i: c for i, c in held.items() if not (c.second_choice and c.field in first)}
    names: dict[str, str] = {}
    for position, matched in held.items():
        if matched.field in names:
            raise refuse(
                f"columns {names[matched.field]!r} and {header[position]!r} both mean "
                f"{matched.field}: remove one",
                *ACCEPTED,
            )
        names[matched.field] = header[position]
    missing = [field for field in _NEEDED if field not in names]
    if missing:
        raise refuse(
            f"no column for {', '.join(missing)} among {', '.join(map(repr, header))}; "
            f"accepted names are like {', '.join(ACCEPTED)}",
            *ACCEPTED,
        )
    return held


def table_points(text: str) -> Benchmark:
    """The points of a CSV with a header line and one line per concurrency.

    Raises:
        SizingError: the message names the row, the column and what is accepted.
    """
    rows, decimal_comma = _rows(text)
    header, lines = rows[0][1], rows[1:]
    columns = _columns(header)
    points: list[BenchmarkPoint] = []
    for number, cells in lines:
        if len(cells) != len(header):
            raise refuse(f"row {number} has {len(cells)} cells, the header {len(header)}")
        values: dict[str, float] = {}
        for position, held in columns.items():
            if not cells[position] and held.field not in _NEEDED:
                continue
            where = f"row {number}, column {header[position]!r}"
            values[held.field] = cell_value(
                cells[position], held, where=where, decimal_comma=decimal_comma
            )
        points.append(point_of(values, origin=f"row {number}"))
    tpot = [header[i] for i, held in columns.items() if held.second_choice and "itl" in held.field]
    return ordered(points, [_MIXED_ITL.format(name=name) for name in tpot])


def is_aiperf(text: str) -> bool:
    """Whether the text is a CSV in aiperf's form: one metric per line."""
    return text.lstrip().lower().startswith("metric,avg")


def aiperf_metrics(text: str) -> dict[str, dict[str, float]]:
    """Values by metric and statistic, in seconds and per second, in the form of aiperf's JSON."""
    metrics: dict[str, dict[str, float]] = {}
    statistics: list[str] = []
    for number, cells in _rows(text)[0]:
        name = cells[0].lower()
        if name == "metric":
            statistics = [cell.lower() for cell in cells[1:]]
        elif name in AIPERF_ROWS:
            quantity = AIPERF_ROWS[name]
            metrics[quantity] = {
                statistic: cell_value(
                    f"{cell} ms", CsvColumn("time_s"), where=f"row {number}, column {statistic!r}"
                )
                for statistic, cell in zip(statistics, cells[1:], strict=False)
                if cell
            }
        elif name in AIPERF_VALUES and len(cells) > 1:
            where = f"row {number}, column 'value'"
            metrics[AIPERF_VALUES[name]] = {
                "avg": cell_value(cells[1], CsvColumn("value"), where=where)
            }
    return metrics


Json: TypeAlias = Mapping[str, object]
Keys: TypeAlias = Mapping[str, Sequence[str]]
"""For each field of a point, the paths in a report that may contain it; the first match is used.

Paths with `_ms` are in milliseconds.
"""

_LONGEST_NAME = 200
TOOLS = ("vllm bench serve", "guidellm", "aiperf")
_UNITS_PER_S = {"ms": 1e3, "s": 1.0, "sec": 1.0, "us": 1e6, "ns": 1e9}
"""Units per second by aiperf's unit names; for users' spellings in headings see `_UNITS`."""
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
    for name in ("requests_per_s", "ttft_p99_s", "itl_p99_s"):
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
    named = _model(document, _keys_of(tool)["model"])
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
    - aiperf's JSON or CSV.

    Raises:
        SizingError: the message names the row and column, or the document and key, and what is
            accepted.
    """
    body = text.removeprefix("\ufeff").strip()
    if not body:
        raise refuse("the benchmark is empty", "CSV", *TOOLS)
    if body[0] in "[{":
        return _from_json(body)
    if is_aiperf(body):
        notes: list[str] = []
        return ordered([_aiperf_point("report", aiperf_metrics(body), notes)], notes)
    return table_points(body)


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
