"""Which quantity a column of a benchmark table holds, by its name, and in which unit. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kneewatch.diagnose.sizing.benchmark.points import refuse

ACCEPTED = (
    "concurrency",
    "requests_per_s",
    "ttft_p99_ms",
    "itl_p99_ms",
    "ttft_p50_ms",
    "itl_p50_ms",
    "latency_mean_ms",
    "output_tokens_per_s",
    "requests",
    "failed",
)
"""One accepted spelling of each column; times in `_ms` or `_s`. The first four are needed."""

_UNITS = {
    **dict.fromkeys(("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"), 1000.0),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
}
"""Units in a second: to divide by, since 1900 / 1000 is 1.9 and 1900 x 0.001 is a little more."""

_P99 = {"p99", "99", "99th"}
_P50 = {"p50", "50", "50th", "median", "med"}
_PER_SECOND = {"s", "sec", "second", "throughput", "rate", "persec", "persecond"}
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Column:
    """A field of a point, and units per second where the name states one (times only).

    `second_choice`: another column for the same field is to be preferred (ITL over TPOT, the
    measured rate over the offered one).
    """

    field: str
    units_per_s: float | None = None
    second_choice: bool = False


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower().replace("tokens_per", "tokens per"))


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
        return None if words & (_P99 | _P50 | {"p90", "p95"}) else "latency_mean_s"
    if words & _P99:
        return f"{quantity}_p99_s"
    if words & _P50:
        return f"{quantity}_p50_s"
    return None


def column(name: str) -> Column | None:
    """What a column with this name holds; None for one that sizing has no use for."""
    ordered = _words(name)
    words = set(ordered)
    quantity = _time(words)
    if quantity is not None:
        field = _time_field(quantity, words)
        unit = next((_UNITS[w] for w in reversed(ordered) if w in _UNITS), None)
        is_tpot = "tpot" in words or {"per", "output"} <= words
        return None if field is None else Column(field, unit, is_tpot)
    if words & {"concurrency", "concurrent", "streams", "users", "clients"} or ordered == ["c"]:
        return Column("concurrency")
    if words & {"tok", "tokens", "token"}:
        generated = not words & {"input", "prompt", "prefill", "total", "max", "peak", "user"}
        return Column("output_tokens_per_s") if generated and words & _PER_SECOND else None
    if {"output", "throughput"} <= words:
        return Column("output_tokens_per_s")
    if words & {"failed", "errors", "errored"}:
        return Column("failed")
    if words & {"rps", "qps"}:
        return Column("requests_per_s")
    if words & {"req", "reqs", "request", "requests"} and "goodput" not in words:
        if words & _PER_SECOND:
            return Column("requests_per_s", second_choice="rate" in words)
        return Column("requests")
    return Column("requests") if ordered == ["completed"] else None


def cell_value(text: str, column: Column, *, where: str, decimal_comma: bool = False) -> float:
    """A cell as a number: times in seconds, by the cell's own unit or else the column's.

    Raises:
        SizingError: it is no number, or a time without a unit.
    """
    match = _NUMBER.fullmatch(text.replace(",", ".") if decimal_comma else text)
    unit = match[2].lower() if match else ""
    if match is None or (unit and unit not in _UNITS):
        raise refuse(f"{where}: {text!r} is not a number", "12", "0.45", "450 ms")
    value = float(match[1])
    if not math.isfinite(value):
        raise refuse(f"{where}: {text!r} is too large a number")
    if not column.field.endswith("_s") or column.field.endswith("_per_s"):
        return value
    units_per_s = _UNITS[unit] if unit else column.units_per_s
    if units_per_s is None:
        raise refuse(
            f"{where}: a time without a unit; end the column's name in _ms or _s",
            column.field.removesuffix("_s") + "_ms",
            column.field,
        )
    return value / units_per_s
