"""Measured tensor-parallel degrees side by side, for reading and as JSON. Pure."""

from __future__ import annotations

from typing import Any

from kneewatch.diagnose.sizing.benchmark.scaling import Scaled, Scaling
from kneewatch.diagnose.sizing.steps import figure
from kneewatch.reports.words import duration

HEAD = ("TP", "in flight", "{unit}/s", "{unit}/s a GPU", "scaling", "USD/M tokens", "TTFT", "ITL")


def scaling_document(found: Scaling) -> dict[str, Any]:
    """Every degree, the cheapest within the targets, and what stands against comparing them."""
    return {
        "degrees": [_row(row) for row in found.rows],
        "cheapest_tensor_parallel": found.cheapest,
        "notes": list(found.notes),
    }


def _row(row: Scaled) -> dict[str, Any]:
    one = row.degree
    point, gpus = one.point, one.tensor_parallel
    tokens = None if point is None else point.output_tokens_per_s
    return {
        "tensor_parallel": gpus,
        "concurrency": None if point is None else point.concurrency,
        "output_tokens_per_s": tokens,
        "output_tokens_per_s_per_gpu": None if tokens is None else round(tokens / gpus, 4),
        "requests_per_s": None if point is None else point.requests_per_s,
        "requests_per_s_per_gpu": None if point is None else round(point.requests_per_s / gpus, 6),
        "ttft_p99_s": None if point is None else point.ttft_p99_s,
        "itl_p99_s": None if point is None else point.itl_p99_s,
        "scaling_efficiency_ratio": _rounded(row.efficiency_ratio),
        "usd_per_million_output_tokens": _rounded(row.usd_per_million_tokens),
        "is_lower_bound": not one.reached,
        "missed": one.missed,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def scaling_lines(found: Scaling) -> list[str]:
    """The same as a table in lines."""
    rows = [
        [name.format(unit=found.unit) for name in HEAD],
        *[_cells(row) for row in found.rows],
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    lines = [
        "Benchmark by tensor-parallel degree, each at C_max, without targets where it gave most"
    ]
    lines += [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines += [f"  {_name(row)}: {row.degree.missed}" for row in found.rows if row.degree.missed]
    if found.cheapest is not None:
        lines.append(f"  cheapest: TP {found.cheapest}, which gives most a GPU")
    return [*lines, *[f"  note: {note}" for note in found.notes]]


def _name(row: Scaled) -> str:
    return f"TP {row.degree.tensor_parallel}"


def _cells(row: Scaled) -> list[str]:
    one, cost = row.degree, row.usd_per_million_tokens
    if one.point is None or row.efficiency_ratio is None:
        return [str(one.tensor_parallel), *["-"] * (len(HEAD) - 1)]
    more = "" if one.reached else "+"
    return [
        str(one.tensor_parallel),
        f"{figure(one.point.concurrency)}{more}",
        f"{figure(round(one.per_s, 3))}{more}",
        f"{figure(round(one.per_s_per_gpu, 3))}{more}",
        f"{row.efficiency_ratio:.0%}",
        "-" if cost is None else f"{cost:.3g}",
        duration(one.point.ttft_p99_s),
        duration(one.point.itl_p99_s),
    ]
