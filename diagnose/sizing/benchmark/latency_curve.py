"""A benchmark's points, its latency-throughput curve with the knee, and its flaws. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.capacity import BenchmarkPoint
from kneewatch.diagnose.catalogue.inputs import SizingError, positive
from kneewatch.diagnose.sizing.arithmetic import Sheet, Step, seconds
from kneewatch.rules.formatting import figure, percent, plural


class Benchmark(Struct, frozen=True):
    """The points by rising concurrency. `notes` are doubts and assumptions about their figures."""

    points: tuple[BenchmarkPoint, ...]
    notes: tuple[str, ...] = ()


def point_of(figures: Mapping[str, float], *, origin: str, model: str = "") -> BenchmarkPoint:
    """A point from figures by field name; the first four fields are required."""
    counts = {name: int(figures[name]) for name in ("requests", "failed") if name in figures}
    fields: dict[str, Any] = {**figures, **counts}
    return BenchmarkPoint(**fields, origin=origin, model=model)


def refuse(message: str, *choices: str) -> SizingError:
    """The error for an unusable benchmark; `choices` are the valid values."""
    return SizingError(message, name="benchmark", choices=choices)


def finite(value: object) -> float | None:
    """A JSON value as a number; None for NaN, infinities and values that are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        return None
    return None if math.isnan(value) else float(value)


def in_flight(
    origin: str, stated: float | None, rate_per_s: float, latency_s: float | None, notes: list[str]
) -> float:
    """The stated concurrency. Without one, the average by Little's law, and a note is added.

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
        f"{origin}: it has no concurrency, so requests/s x mean latency is used, the mean number "
        "in flight (Little's law)"
    )
    return rate_per_s * latency_s


def checked(point: BenchmarkPoint) -> BenchmarkPoint:
    """The point, if its numbers are possible.

    Raises:
        SizingError: a number is not positive, or a median is above its P99.
    """
    needed = ("concurrency", "requests_per_s", "ttft_p99_s", "itl_p99_s")
    optional = ("ttft_p50_s", "itl_p50_s", "latency_mean_s", "latency_p99_s", "output_tokens_per_s")
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
    """The points as one benchmark, by rising concurrency; repeated notes are left out.

    Raises:
        SizingError: there is no point, or a point has impossible numbers.
    """
    if not points:
        raise refuse("the benchmark has no measured point")
    return Benchmark(
        points=tuple(sorted((checked(p) for p in points), key=lambda p: p.concurrency)),
        notes=tuple(dict.fromkeys(notes)),
    )


# --- The curve and its knee -----------------------------------------------------------------------


TAIL_RATIO = 2.0
"""At the knee, the P99/P50 of TTFT has grown to this multiple of its lowest value.

The same as in rules/rules.toml.
"""


class Knee(Struct, frozen=True):
    """Where latency starts to rise faster than throughput: between `safe` and `past`.

    `past` is None if the sweep ended before the knee. `basis` says how the knee was found.
    """

    safe: BenchmarkPoint
    past: BenchmarkPoint | None
    basis: str
    steps: tuple[Step, ...]


def worst_per_concurrency(points: Sequence[BenchmarkPoint]) -> tuple[BenchmarkPoint, ...]:
    """One point per concurrency: the lowest RPS and the highest latencies of repeated runs."""
    worst: list[BenchmarkPoint] = []
    for _, group in groupby(sorted(points, key=lambda p: p.concurrency), lambda p: p.concurrency):
        runs = list(group)
        slowest = max(runs, key=lambda p: p.ttft_p99_s)
        worst.append(
            replace(
                slowest,
                requests_per_s=min(p.requests_per_s for p in runs),
                itl_p99_s=max(p.itl_p99_s for p in runs),
            )
        )
    return tuple(worst)


def knee(points: Sequence[BenchmarkPoint]) -> Knee:
    """The knee of the curve, as the region between two measured points.

    If the points have medians: the first point whose P99/P50 of TTFT is `TAIL_RATIO` times the
    lowest ratio before it. The guide trusts this ratio more than throughput.

    Without medians: the point with the highest requests/s divided by TTFT P99 (Kleinrock's power).
    Beyond it, latency grows by a larger factor than throughput.

    Source: guide 8.1, 8.2; Kleinrock 1979, "Power and deterministic rules of thumb".
    """
    by_tail = _tail_knee(points)
    return by_tail if by_tail is not None else _power_knee(points)


def _tail_knee(points: Sequence[BenchmarkPoint]) -> Knee | None:
    if any(not p.ttft_p50_s for p in points):
        return None
    tails = [p.ttft_p99_s / (p.ttft_p50_s or 1.0) for p in points]
    lowest = tails[0]
    for (safe, past), tail in zip(pairwise(points), tails[1:], strict=True):
        if tail >= TAIL_RATIO * lowest:
            sheet = Sheet("guide 8.1")
            sheet.line(
                f"Knee, between {safe.concurrency:g} and {past.concurrency:g} in flight",
                "({TTFT P99} / {P50}) / {lowest (TTFT P99 / P50) before it}",
                (past.ttft_p99_s, past.ttft_p50_s or 1.0, lowest),
                result=f"{{}} (knee from {figure(TAIL_RATIO)})",
            )
            return Knee(safe, past, "TTFT P99 rises faster than P50", sheet.steps)
        lowest = min(lowest, tail)
    return None


def _power_knee(points: Sequence[BenchmarkPoint]) -> Knee:
    powers = [point.requests_per_s / point.ttft_p99_s for point in points]
    best = powers.index(max(powers))
    safe, past = points[best], points[best + 1] if best + 1 < len(points) else None
    sheet = Sheet("guide 8.1; Kleinrock 1979")
    sheet.line(
        f"Knee, at {safe.concurrency:g} in flight",
        "{requests/s} / {TTFT P99}",
        (safe.requests_per_s, safe.ttft_p99_s),
        result="{} per s², the highest"
        + ("" if past is None else f" (then {figure(powers[best + 1])})"),
    )
    basis = "latency grows faster than throughput" if past else "not reached"
    return Knee(safe, past, basis, sheet.steps)


# --- Little's law within a benchmark, and production against it -----------------------------------


GAP_LIMIT = 2.0
"""Ceiling over measured RPS: above this, the test's inputs differ from production's (guide 8.3)."""

IMPOSSIBLE_GAP = 0.9
"""Ceiling over measured RPS: below this, more is served than Little's law allows.

Ramp-up and ramp-down cannot explain such a difference.
"""

THIN_GAP = 1.25
"""Ceiling over measured RPS: above this, a fifth of the stated concurrency is missing on average.

In short runs, ramp-up and ramp-down explain up to that much.
"""

TTFT_EXCESS_LIMIT = 0.30
"""By how much production's TTFT P99 may exceed the benchmark's, as a share (guide 9.1 step 13)."""

GPU_SHORTFALL_LIMIT = 0.20
"""How far GPU utilization (0..1) may be below the benchmark's at equal RPS (guide 9.1 step 13)."""


class LittlesGap(NamedTuple):
    """The ratio of concurrency / latency to the measured requests/s, in a word, and its meaning."""

    ratio: float
    verdict: Literal["mismatch", "impossible", "consistent"]
    meaning: str


def littles_gap(
    sheet: Sheet,
    *,
    concurrency: float,
    requests_per_s: float,
    latency_s: float,
    is_target: bool = False,
) -> LittlesGap:
    """How far a benchmark is from Little's law.

    `latency_s` is the mean time from a request's arrival to its end. By Little's law, the gap of a
    sound run is 1.

    With `is_target`, `latency_s` is the TTFT target, so decode is part of the gap. A gap of 2
    or more is then common for long outputs. Below 1, requests only end sooner than the target.

    Raises:
        SizingError: a number is not positive.

    Source: guide 8.3; Little 1961.
    """
    positive("concurrency", concurrency)
    positive("requests_per_s", requests_per_s)
    positive("latency_s", latency_s)
    name = "TTFT target" if is_target else "mean latency"
    ceiling = sheet.line(
        "Little's ceiling",
        f"{{concurrency}} / {{{name}: s}}",
        (concurrency, latency_s),
        result="{} requests/s",
        source="guide 8.3",
    )
    ratio = sheet.line(
        "Little's gap",
        "{ceiling} / {measured}",
        (ceiling, requests_per_s),
        result=lambda ratio: f"{figure(ratio)} ({_gap(ratio, is_target=is_target).verdict})",
        source="guide 8.3",
    )
    return _gap(ratio, is_target=is_target)


def _gap(ratio: float, *, is_target: bool) -> LittlesGap:
    if ratio > GAP_LIMIT and not is_target:
        return LittlesGap(
            ratio,
            "mismatch",
            "the stated concurrency was not reached (too few requests, a slow client, too few "
            "arrivals), or the latencies leave out part of each request; fix the benchmark before "
            "sizing",
        )
    if ratio > GAP_LIMIT:
        return LittlesGap(
            ratio,
            "mismatch",
            "the test inputs may differ from production's; with long outputs the gap is decode "
            "time: compare with the mean latency before you reject the benchmark",
        )
    if ratio < IMPOSSIBLE_GAP and not is_target:
        return LittlesGap(
            ratio,
            "impossible",
            "more requests were served than were in flight: the numbers contradict each other",
        )
    if ratio > THIN_GAP and not is_target:
        return LittlesGap(
            ratio,
            "consistent",
            f"only {percent(1 / ratio)} of the stated concurrency was in flight on average: run "
            "longer at each step",
        )
    return LittlesGap(ratio, "consistent", "the benchmark is consistent")


# --- Flaws that make a curve unfit, or less fit, to size from (guide 8.2, 8.3) --------------------


MIN_POINTS = 5
"""Fewest points of a curve: two on the flat part, the knee, and two beyond it."""

MIN_REQUESTS = 500
"""Fewest requests for a P99: at least five are then beyond it. aiperf and vLLM have no minimum."""

SATURATED_ELASTICITY = 0.5
"""Relative gain of RPS divided by relative gain of concurrency at the last point.

Above this, RPS is still rising.
"""

NOISE_RATIO = 0.05
"""Two runs of one configuration differ by this much; a smaller dip is noise."""


class RedFlag(Struct, frozen=True):
    """Why a curve may be misleading. `kind` is a stable word; `message` has the numbers and what to
    do."""

    kind: str
    message: str


def red_flags(benchmark: Benchmark) -> Iterator[RedFlag]:
    """Each reason why the curve cannot, or should not, be used for sizing.

    Source: guide 8.2 (a sweep from 1 to beyond the knee, warmed up); thresholds as named above.
    """
    points = worst_per_concurrency(benchmark.points)
    yield from _coverage(benchmark, points)
    yield from _shape(points)
    yield from _runs(benchmark)
    yield from _law(points)
    for note in benchmark.notes:
        yield RedFlag("as_read", note)


def _coverage(benchmark: Benchmark, points: Sequence[BenchmarkPoint]) -> Iterator[RedFlag]:
    if len(points) < MIN_POINTS:
        yield RedFlag(
            "few_points",
            f"only {len(points)} concurrencies were measured; the knee needs {MIN_POINTS} or more, "
            "from 1 in flight to past saturation",
        )
    if len(points) > 1 and points[0].concurrency * 4 > points[-1].concurrency:
        yield RedFlag(
            "no_baseline",
            f"the sweep starts at {points[0].concurrency:g} in flight, too close to its end at "
            f"{points[-1].concurrency:g} to show the latency without load",
        )
    if len(points) < len(benchmark.points):
        yield RedFlag(
            "repeated_runs",
            "a concurrency has several runs: their lowest RPS and highest latencies are used",
        )


def _shape(points: Sequence[BenchmarkPoint]) -> Iterator[RedFlag]:
    """Flags: throughput that still rises at the end; throughput or latency that falls before the
    end."""
    for before, last in list(pairwise(points))[-1:]:
        rps_gain = last.requests_per_s / before.requests_per_s - 1
        load_gain = last.concurrency / before.concurrency - 1
        if rps_gain > SATURATED_ELASTICITY * load_gain:
            yield RedFlag(
                "not_saturated",
                f"throughput still rises at the end ({rps_gain:+.0%} RPS for {load_gain:+.0%} "
                f"concurrency): measure above {last.concurrency:g} in flight",
            )
    for before, after in pairwise(points):
        step = f"from {before.concurrency:g} to {after.concurrency:g} in flight"
        if after.requests_per_s < before.requests_per_s * (1 - NOISE_RATIO):
            yield RedFlag(
                "rps_falls",
                f"RPS falls {step} ({figure(before.requests_per_s)} to "
                f"{figure(after.requests_per_s)}): preemption past saturation, or a bad run",
            )
        for name, low, high in (
            ("TTFT", before.ttft_p99_s, after.ttft_p99_s),
            ("ITL", before.itl_p99_s, after.itl_p99_s),
        ):
            if high < low * (1 - 2 * NOISE_RATIO):
                yield RedFlag(
                    "latency_falls",
                    f"{name} P99 falls {step} ({seconds(low)} to {seconds(high)}): the server was "
                    "not warmed up (send 1,000 requests first), or there were too few requests",
                )


def _runs(benchmark: Benchmark) -> Iterator[RedFlag]:
    counts = [point.requests for point in benchmark.points if point.requests is not None]
    few = [requests for requests in counts if requests < MIN_REQUESTS]
    if few:
        yield RedFlag(
            "few_requests",
            f"{len(few)} of {len(benchmark.points)} runs have fewer than {MIN_REQUESTS} requests "
            f"(the smallest {min(few)}): P99 rests on the "
            f"slowest {plural(max(1, min(few) // 100), 'request')}",
        )
    failed = [f"{point.concurrency:g}" for point in benchmark.points if point.failed]
    if failed:
        yield RedFlag(
            "failed_requests",
            f"requests failed at {', '.join(failed)} in flight: RPS and latencies include "
            "successful requests only",
        )


def _law(points: Sequence[BenchmarkPoint]) -> Iterator[RedFlag]:
    """Flags: points that contradict Little's law, and points without a latency."""
    unchecked: list[str] = []
    for point in points:
        latency_s = _latency_s(point)
        if not latency_s:
            unchecked.append(f"{point.concurrency:g}")
            continue
        gap = littles_gap(
            Sheet(),
            concurrency=point.concurrency,
            requests_per_s=point.requests_per_s,
            latency_s=latency_s,
        )
        expected_per_s = gap.ratio * point.requests_per_s
        if gap.verdict != "consistent":
            yield RedFlag(
                "littles_law",
                f"at {point.concurrency:g} in flight {figure(point.requests_per_s)} requests/s "
                f"were measured, and Little's law gives {figure(expected_per_s)}: "
                f"{gap.meaning}",
            )
    if unchecked:
        yield RedFlag(
            "littles_law_unchecked",
            f"Little's law was not checked at {', '.join(unchecked)} in flight: it needs the mean "
            "latency, or the medians of TTFT and ITL with output tokens/s",
        )


def _latency_s(point: BenchmarkPoint) -> float | None:
    """A request's mean latency: measured, otherwise from median TTFT, median ITL and output
    tokens."""
    if point.latency_mean_s:
        return point.latency_mean_s
    ttft_s, itl_s, tokens_per_s = point.ttft_p50_s, point.itl_p50_s, point.output_tokens_per_s
    if ttft_s is None or itl_s is None or not tokens_per_s:
        return None
    return ttft_s + itl_s * max(tokens_per_s / point.requests_per_s - 1, 0.0)
