"""What a benchmark measured: one point per concurrency, in seconds and per second. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kneewatch.diagnose.catalogue.inputs import SizingError


@dataclass(frozen=True, slots=True)
class BenchmarkPoint:
    """One run at one concurrency. None: the report does not say.

    `requests` completed and `failed` count the run; `origin` names the row or document.
    `latency_mean_s` is the whole life of a request, from sent to last token.
    """

    concurrency: float
    requests_per_s: float
    ttft_p99_s: float
    itl_p99_s: float
    ttft_p50_s: float | None = None
    itl_p50_s: float | None = None
    latency_mean_s: float | None = None
    output_tokens_per_s: float | None = None
    requests: int | None = None
    failed: int | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The points by rising concurrency, and what a reader must know about how they were read."""

    points: tuple[BenchmarkPoint, ...]
    notes: tuple[str, ...] = ()


def point_of(figures: Mapping[str, float], *, origin: str) -> BenchmarkPoint:
    """The point of figures by field; the first four fields have to be there."""
    counts = {name: int(figures[name]) for name in ("requests", "failed") if name in figures}
    fields: dict[str, Any] = {**figures, **counts}
    return BenchmarkPoint(**fields, origin=origin)


def refuse(message: str, *choices: str) -> SizingError:
    """The error for an unusable benchmark; `choices` say what would be read."""
    return SizingError(message, name="benchmark", choices=choices)


def finite(value: object) -> float | None:
    """A number of a JSON document; None for NaN, infinities and what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        return None
    return None if math.isnan(value) else float(value)


def in_flight(
    origin: str, stated: float | None, rate_per_s: float, latency_s: float | None, notes: list[str]
) -> float:
    """The stated concurrency, or the average one that Little's law gives, with a note.

    Raises:
        SizingError: neither a concurrency nor a mean latency is known.
    """
    if stated is not None:
        return stated
    if latency_s is None:
        raise refuse(
            f"{origin}: it has neither a concurrency nor a mean latency to derive it from; add one",
            "concurrency",
        )
    notes.append(
        f"{origin}: it has no concurrency, so requests/s x mean latency is used, the mean "
        "number in "
        "flight (Little's law)"
    )
    return rate_per_s * latency_s


def checked(point: BenchmarkPoint) -> BenchmarkPoint:
    """The point, if its numbers can be true.

    Raises:
        SizingError: a number is not positive, or a median lies above its P99.
    """
    needed = ("concurrency", "requests_per_s", "ttft_p99_s", "itl_p99_s")
    optional = ("ttft_p50_s", "itl_p50_s", "latency_mean_s", "output_tokens_per_s")
    for name in (*needed, *optional):
        value: float | None = getattr(point, name)
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name in needed[:3]):
            raise refuse(f"{point.origin}: {name} is {value:g}; it must be above 0")
    for name, median, p99 in (
        ("TTFT", point.ttft_p50_s, point.ttft_p99_s),
        ("ITL", point.itl_p50_s, point.itl_p99_s),
    ):
        if median is not None and median > p99:
            raise refuse(
                f"{point.origin}: the median {name} ({median:g} s) is above its P99 ({p99:g} s): "
                "check the columns and their units"
            )
    return point


def ordered(points: Sequence[BenchmarkPoint], notes: Sequence[str] = ()) -> Benchmark:
    """The points as one benchmark, by rising concurrency, each note once.

    Raises:
        SizingError: there is no point, or one has impossible numbers.
    """
    if not points:
        raise refuse("the benchmark has no measured point")
    return Benchmark(
        points=tuple(sorted((checked(p) for p in points), key=lambda p: p.concurrency)),
        notes=tuple(dict.fromkeys(notes)),
    )
