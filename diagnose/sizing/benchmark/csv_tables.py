"""Reads benchmark tables in CSV, with their columns and units, into measured points. Pure."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.sizing.benchmark.latency_curve import Benchmark, ordered, point_of, refuse

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
