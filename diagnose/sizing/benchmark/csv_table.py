"""A benchmark table as CSV, and the CSV of aiperf, to measured points. Pure."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence

from kneewatch.diagnose.sizing.benchmark.columns import ACCEPTED, Column, cell_value, column
from kneewatch.diagnose.sizing.benchmark.points import Benchmark, BenchmarkPoint, ordered, refuse

_NEEDED = ("concurrency", "requests_per_s", "ttft_p99_s", "itl_p99_s")
_MIXED_ITL = "the column {name!r} is a time per output token: its P99 is over requests, not gaps"
AIPERF_ROWS = {
    "time to first token (ms)": "ttft",
    "inter chunk latency (ms)": "chunk",
    "inter token latency (ms)": "itl",
    "request latency (ms)": "latency",
}
AIPERF_VALUES = {
    "request throughput (requests/sec)": "requests_per_s",
    "output token throughput (tokens/sec)": "output_tokens_per_s",
    "request count": "requests",
}


def _rows(text: str) -> tuple[list[tuple[int, list[str]]], bool]:
    """The filled lines with their numbers, split, and whether a comma may be a decimal mark."""
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
        raise refuse(f"the benchmark is no CSV: {error}", *ACCEPTED) from error
    return split, delimiter != ","


def _columns(header: Sequence[str]) -> dict[int, Column]:
    """Column number to what it holds.

    Raises:
        SizingError: a needed quantity is missing, or two columns hold the same one.
    """
    held = {i: found for i, name in enumerate(header) if (found := column(name)) is not None}
    first = {found.field for found in held.values() if not found.second_choice}
    held = {i: c for i, c in held.items() if not (c.second_choice and c.field in first)}
    names: dict[str, str] = {}
    for position, found in held.items():
        if found.field in names:
            raise refuse(
                f"the columns {names[found.field]!r} and {header[position]!r} both look like "
                f"{found.field}: drop one",
                *ACCEPTED,
            )
        names[found.field] = header[position]
    missing = [field for field in _NEEDED if field not in names]
    if missing:
        raise refuse(
            f"no column for {', '.join(missing)} among {', '.join(map(repr, header))}; "
            f"accepted names are like {', '.join(ACCEPTED)}",
            *ACCEPTED,
        )
    return held


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _point(values: Mapping[str, float], *, origin: str) -> BenchmarkPoint:
    return BenchmarkPoint(
        concurrency=values["concurrency"],
        requests_per_s=values["requests_per_s"],
        ttft_p99_s=values["ttft_p99_s"],
        itl_p99_s=values["itl_p99_s"],
        ttft_p50_s=values.get("ttft_p50_s"),
        itl_p50_s=values.get("itl_p50_s"),
        latency_mean_s=values.get("latency_mean_s"),
        output_tokens_per_s=values.get("output_tokens_per_s"),
        requests=_count(values.get("requests")),
        failed=_count(values.get("failed")),
        origin=origin,
    )


def table_points(text: str) -> Benchmark:
    """The points of a CSV with a header line and one line per concurrency.

    Raises:
        SizingError: naming the row and the column, and what is accepted.
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
        points.append(_point(values, origin=f"row {number}"))
    tpot = [header[i] for i, held in columns.items() if held.second_choice and "itl" in held.field]
    return ordered(points, [_MIXED_ITL.format(name=name) for name in tpot])


def is_aiperf(text: str) -> bool:
    """Whether the text is the CSV that aiperf writes: one metric per line."""
    return text.lstrip().lower().startswith("metric,avg")


def aiperf_metrics(text: str) -> dict[str, dict[str, float]]:
    """Metric to statistic to value, in seconds and per second, as aiperf's JSON has them."""
    found: dict[str, dict[str, float]] = {}
    statistics: list[str] = []
    for number, cells in _rows(text)[0]:
        name = cells[0].lower()
        if name == "metric":
            statistics = [cell.lower() for cell in cells[1:]]
        elif name in AIPERF_ROWS:
            quantity = AIPERF_ROWS[name]
            found[quantity] = {
                statistic: cell_value(
                    f"{cell} ms", Column("time_s"), where=f"row {number}, column {statistic!r}"
                )
                for statistic, cell in zip(statistics, cells[1:], strict=False)
                if cell
            }
        elif name in AIPERF_VALUES and len(cells) > 1:
            where = f"row {number}, column 'value'"
            found[AIPERF_VALUES[name]] = {"avg": cell_value(cells[1], Column("value"), where=where)}
    return found
