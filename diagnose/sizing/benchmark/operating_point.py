"""The load that one replica can serve within its targets, also by TP degree. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.capacity import (
    FAR_BELOW,
    BenchmarkPoint,
    Degree,
    DegreeComparison,
    Unit,
    alike,
)
from kneewatch.diagnose.catalogue.inputs import SizingError, positive
from kneewatch.diagnose.catalogue.models import Model, model
from kneewatch.diagnose.sizing.arithmetic import Step, seconds
from kneewatch.diagnose.sizing.benchmark.latency_curve import (
    Benchmark,
    Knee,
    RedFlag,
    knee,
    red_flags,
    refuse,
    worst_per_concurrency,
)
from kneewatch.diagnose.sizing.speed.performance import ClosedLoop, Load, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import Costs, decode_bytes
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import figure, number

BRACKET_RATIO = 1.25
"""If the next measured point is at most this far above C_max, no point between them is needed."""


class OperatingPoint(Struct, frozen=True):
    """What one replica can serve within the targets.

    - `c_max`: the measured point with the highest concurrency that meets the targets, or None.
    - `first_miss`: the next measured point, which misses them; the true limit is between the two.
      None if every point meets them: C_max is then a lower bound.
    - `missed`: the targets that `first_miss` misses.
    - `peak_requests_per_s`: the highest rate at any latency.
    """

    c_max: BenchmarkPoint | None
    first_miss: BenchmarkPoint | None
    missed: tuple[str, ...]
    knee: Knee
    peak_requests_per_s: float
    flags: tuple[RedFlag, ...]
    steps: tuple[Step, ...]

    @property
    def usable_requests_per_s(self) -> float | None:
        """Requests/s of one replica at C_max; None if no point meets the targets."""
        return None if self.c_max is None else self.c_max.requests_per_s

    @property
    def is_lower_bound(self) -> bool:
        """Whether every measured point meets the targets, so that C_max may be higher."""
        return self.c_max is not None and self.first_miss is None


def operating_point(benchmark: Benchmark, targets: Targets) -> OperatingPoint:
    """C_max and usable requests/s at the targets.

    Points are read upwards from the first one that meets both targets. C_max is the last one before
    a target is missed. If a higher point meets the targets again, this is noise and gets a flag.

    Raises:
        SizingError: no target is stated, or a target is not positive.

    Source: guide 8.3, steps 1 and 2.
    """
    if not targets.are_set:
        raise SizingError("C_max needs a TTFT P99 or ITL P99 target", name="ttft_slo")
    for name, _, target in targets.beside(0.0, 0.0):
        positive(f"{name.lower()}_slo", target)
    points = worst_per_concurrency(benchmark.points)
    misses = [missed_targets(p, targets) for p in points]
    start = next((i for i, missed in enumerate(misses) if not missed), None)
    bend = knee(points)
    peak = max(p.requests_per_s for p in points)
    if start is None:
        flag = RedFlag("none_meet", f"no measured concurrency meets the targets ({misses[0][0]})")
        flags = (flag, *red_flags(benchmark))
        return OperatingPoint(None, points[0], misses[0], bend, peak, flags, bend.steps)
    end = next((i for i in range(start, len(points)) if misses[i]), len(points))
    best, miss = points[end - 1], points[end] if end < len(points) else None
    load_flags = [
        *_point_flags(points, misses, start=start, end=end),
        *_place_flags(points[start:end], bend),
    ]
    return OperatingPoint(
        c_max=best,
        first_miss=miss,
        missed=misses[end] if miss else (),
        knee=bend,
        peak_requests_per_s=peak,
        flags=(*load_flags, *red_flags(benchmark)),
        steps=(*bend.steps, *_steps(best, targets)),
    )


def missed_targets(point: BenchmarkPoint, targets: Targets) -> tuple[str, ...]:
    """The targets that a point misses, with its numbers. A value equal to the target meets it."""
    return tuple(
        f"{name} P99 {seconds(measured)} at {point.concurrency:g} in flight, above the target of "
        f"{seconds(target)}"
        for name, measured, target in targets.beside(
            point.ttft_p99_s, point.itl_p99_s, point.latency_p99_s
        )
        if measured > target
    )


def _steps(best: BenchmarkPoint, targets: Targets) -> list[Step]:
    kept = [
        f"{name} {seconds(measured)} <= {seconds(target)}"
        for name, measured, target in targets.beside(
            best.ttft_p99_s, best.itl_p99_s, best.latency_p99_s
        )
    ]
    return [
        Step(
            title="C_max",
            formula="highest measured concurrency with P99 within the targets",
            values=", ".join(kept),
            result=f"{best.concurrency:g} in flight",
            source="guide 8.3 step 1",
        ),
        Step(
            title="Usable RPS of one replica",
            formula="requests/s measured at C_max",
            values=f"at {best.concurrency:g} in flight",
            result=f"{figure(best.requests_per_s)} requests/s",
            source="guide 8.3 step 2",
        ),
    ]


def _point_flags(
    points: Sequence[BenchmarkPoint],
    misses: Sequence[tuple[str, ...]],
    *,
    start: int,
    end: int,
) -> Iterator[RedFlag]:
    """Flags that question C_max, from the points that meet and miss the targets.

    The flags: a miss at the lowest concurrencies (cold start), no miss from `start` on, a wide gap
    between C_max and the first miss, and a point above the first miss that meets the targets again
    (noise). `points[start:end]` meet the targets; `points[end]` is the first miss.
    """
    first, best = points[start], points[end - 1]
    if start > 0:
        yield RedFlag(
            "cold_start",
            f"{misses[0][0]}, while {first.concurrency:g} in flight meets the targets: check that "
            "the server was warmed up",
        )
    if end == len(points):
        yield RedFlag(
            "all_meet",
            f"all points from {first.concurrency:g} in flight meet the targets: C_max is "
            f"{best.concurrency:g} or more, measure higher concurrencies",
        )
        return
    miss = points[end].concurrency
    if miss > BRACKET_RATIO * best.concurrency:
        yield RedFlag(
            "wide_bracket",
            f"C_max is between {best.concurrency:g} (used here) and {miss:g}: measure in between",
        )
    later = zip(points[end:], misses[end:], strict=True)
    again = [point.concurrency for point, missed in later if not missed]
    if again:
        yield RedFlag(
            "meets_again",
            f"{again[-1]:g} in flight meets the targets although {miss:g} misses them: the "
            "results are noisy; repeat both runs",
        )


def _place_flags(points: Sequence[BenchmarkPoint], bend: Knee) -> Iterator[RedFlag]:
    """Flags about C_max, the last of the points: whether it is at a good place on the curve."""
    best, top = points[-1], max(points, key=lambda p: p.requests_per_s)
    if bend.past is not None and best.concurrency >= bend.past.concurrency:
        yield RedFlag(
            "past_knee",
            f"C_max ({best.concurrency:g} in flight) is past the knee (after "
            f"{bend.safe.concurrency:g}), where a little more load costs much latency",
        )
    if top.requests_per_s > best.requests_per_s:
        yield RedFlag(
            "more_at_less",
            f"{top.concurrency:g} in flight served {figure(top.requests_per_s)} requests/s, more "
            f"than C_max ({figure(best.requests_per_s)}): limit concurrency to {top.concurrency:g}",
        )


# --- Sweeps at several tensor-parallel degrees: output per GPU of each ----------------------------
#
# Only like is compared with like (guide 8.4): requests of about the same length, and as much load
# on each GPU. Where a sweep ended before its degree gave all it can, nothing is said against it.
#
# Source: guide 5.1, 8.2, 8.5 (S5).


LEVEL_FROM = 0.95
"""Throughput has levelled off if the second-last point has at least this share of the last
one's."""

AS_LOADED_FROM = 0.9
"""Two sweeps count as equally loaded from this ratio of their requests in flight per GPU on.

It is below 1, because the concurrency that a tool measures is a mean.
"""


Sweeps = Mapping[int, Benchmark]
"""Benchmarks of one engine, by tensor-parallel degree."""


def degrees_of(sweeps: Sweeps, targets: Targets) -> tuple[Unit, tuple[Degree, ...]]:
    """The unit of throughput, and each degree's throughput within the targets, lowest degree first.

    The unit is tokens if every sweep counts generated tokens, otherwise requests.

    Raises:
        SizingError: a target is not positive.
    """
    points = [point for benchmark in sweeps.values() for point in benchmark.points]
    unit: Unit = "tokens" if all(point.output_tokens_per_s for point in points) else "requests"
    degrees = [
        _degree(tensor, benchmark, unit, targets) for tensor, benchmark in sorted(sweeps.items())
    ]
    return unit, tuple(degrees)


def _degree(tensor: int, benchmark: Benchmark, unit: Unit, targets: Targets) -> Degree:
    if not targets.are_set:
        points = worst_per_concurrency(benchmark.points)
        best = max(points, key=lambda point: throughput(point, unit))
        most = throughput(best, unit)
        last = [throughput(point, unit) for point in points[-2:]]
        # Throughput hardly rose at the last load: its maximum was reached.
        levelled = any(before >= LEVEL_FROM * after for before, after in pairwise(last))
        return Degree(tensor, best, most, most, levelled)
    at_targets = operating_point(benchmark, targets)
    if at_targets.c_max is None:
        return Degree(tensor, None, 0.0, 0.0, reached=True, missed=at_targets.missed[0])
    per_s = throughput(at_targets.c_max, unit)
    beyond = 0.0 if at_targets.first_miss is None else throughput(at_targets.first_miss, unit)
    return Degree(
        tensor, at_targets.c_max, per_s, max(per_s, beyond), not at_targets.is_lower_bound
    )


def throughput(point: BenchmarkPoint, unit: Unit) -> float:
    """The throughput at a point: generated tokens/s or requests/s."""
    return (point.output_tokens_per_s or 0.0) if unit == "tokens" else point.requests_per_s


def compared(unit: Unit, degrees: Sequence[Degree], tensor_parallel: int) -> DegreeComparison:
    """TP `tensor_parallel`, compared with the smaller TP that has the most throughput per GPU.

    If they cannot be compared, the result's `why` has the reason.
    """
    plain, name = DegreeComparison(unit), f"TP {tensor_parallel}"
    if tensor_parallel == 1:
        return plain
    wide = next((degree for degree in degrees if degree.tensor_parallel == tensor_parallel), None)
    smaller = [degree for degree in degrees if degree.tensor_parallel < tensor_parallel]
    if wide is None:
        return replace(plain, why=f"no sweep of {name} is given")
    if wide.point is None:
        return replace(
            plain, wide=wide, why=f"{name} misses a target at its lowest load: {wide.missed}"
        )
    if not smaller:
        return replace(plain, wide=wide, why=f"no sweep below {name} is given")
    doubts = [(degree, _doubt(wide, degree)) for degree in smaller]
    sound = [degree for degree, doubt in doubts if not doubt]
    if not sound:
        return replace(plain, wide=wide, why="; ".join(doubt for _, doubt in doubts))
    narrow = max(sound, key=lambda degree: degree.per_s_per_gpu)
    share = wide.per_s_per_gpu / narrow.per_s_per_gpu
    most = wide.most_per_s / wide.tensor_parallel / narrow.per_s_per_gpu
    gap = f"the limit of {name} is between two loads that are far apart: measure in between"
    why = gap if share < FAR_BELOW <= most else ""
    return DegreeComparison(unit, wide, narrow, share, most, why)


def _doubt(wide: Degree, narrow: Degree) -> str:
    """Why the two degrees cannot be compared; empty if they can."""
    of_wide, of_narrow = f"TP {wide.tensor_parallel}", f"TP {narrow.tensor_parallel}"
    if narrow.point is None:
        return f"{of_narrow} misses a target at its lowest load: {narrow.missed}"
    if not alike(wide.tokens_per_request, narrow.tokens_per_request):
        return (
            f"the sweeps used different requests: {wide.tokens_per_request:.0f} output tokens with "
            f"{of_wide}, {narrow.tokens_per_request:.0f} with {of_narrow}"
        )
    less_loaded = wide.in_flight_per_gpu < AS_LOADED_FROM * narrow.in_flight_per_gpu
    if not wide.reached and less_loaded:
        return (
            f"{of_wide} was measured up to {number(wide.in_flight_per_gpu)} requests in flight "
            f"per GPU, {of_narrow} up to {number(narrow.in_flight_per_gpu)}: extend the sweep of "
            f"{of_wide}"
        )
    return ""


# --- Whether a benchmark is of the launch to size, and the MBU and MFU that it reached ------------


def matched(
    benchmark: Benchmark,
    sized: Model,
    *,
    input_tokens: float | None = None,
    output_tokens: float | None = None,
) -> Benchmark:
    """The benchmark, with notes where it may be of another model, or of requests of other lengths.

    Raises:
        SizingError: it is of another model of the catalogue.
    """
    notes = [*_other_models(benchmark, sized)]
    for side, wanted, measured in (
        ("prompts", input_tokens, [point.input_tokens for point in benchmark.points]),
        ("answers", output_tokens, [_answer_tokens(point) for point in benchmark.points]),
    ):
        far = next((tokens for tokens in measured if not alike(tokens, wanted)), None)
        if far is not None and wanted is not None:
            notes.append(
                f"the benchmark's {side} have {figure(round(far))} tokens, those to size for "
                f"{figure(wanted)}: its rates are of other work"
            )
    return replace(benchmark, notes=(*benchmark.notes, *dict.fromkeys(notes)))


def _answer_tokens(point: BenchmarkPoint) -> float | None:
    tokens_per_s = point.output_tokens_per_s
    return None if tokens_per_s is None else tokens_per_s / point.requests_per_s


def _other_models(benchmark: Benchmark, sized: Model) -> Iterator[str]:
    for name in dict.fromkeys(point.model for point in benchmark.points if point.model):
        if name.rpartition("/")[2].lower() == sized.id.rpartition("/")[2].lower():
            continue
        try:
            named = model(name)
        except SizingError:
            yield f"the benchmark's model is {name!r}: check that it is {sized.id}"
            continue
        if (named.layers, named.hidden_size) != (sized.layers, sized.hidden_size):
            raise refuse(f"the benchmark is of {name}, not of {sized.id}")


SHARES = ("mbu_ratio", "mfu_ratio", "predicted_mbu_ratio", "predicted_mfu_ratio")


def achieved(point: BenchmarkPoint, loop: ClosedLoop, *, engines: int = 1) -> dict[str, float]:
    """What a measured point reached on each GPU over a whole run, and what was predicted for the
    same requests: shares of its bandwidth, by what the decode steps read, and of its FLOP/s, by the
    products with weights. Requests have the loop's lengths unless the point states its own.

    Source: text 001, 4.3 and 4.8, with the bytes that a batch shares.
    """
    in_flight = max(point.concurrency / engines, 1.0)
    load = loop.load
    own = replace(
        load,
        concurrency=in_flight,
        input_tokens=point.input_tokens or load.input_tokens,
        output_tokens=_answer_tokens(point) or load.output_tokens,
    )
    predicted = performance(loop.costs, own, loop.efficiency)
    rates = (point.requests_per_s / engines, predicted.requests_per_s)
    shares = [share for rate in rates for share in _shares(loop.costs, own, rate)]
    return dict(zip(SHARES, shares, strict=True))


def _shares(costs: Costs, load: Load, requests_per_s: float) -> tuple[float, float]:
    """MBU of the decode steps and MFU of all tokens, at a rate of one engine."""
    context = load.input_tokens + load.output_tokens / 2
    running = min(load.concurrency, load.max_running)
    weights_bytes, sequence_bytes = decode_bytes(costs, context_tokens=context, sequences=running)
    answers_per_s = requests_per_s * load.output_tokens
    read_per_s = answers_per_s * (weights_bytes / running + sequence_bytes)
    tokens_per_s = answers_per_s + requests_per_s * load.input_tokens
    flop_per_s = (
        tokens_per_s * costs.body_flop_per_token + answers_per_s * costs.head_flop_per_token
    )
    stages = costs.pipeline_parallel
    return (
        read_per_s / costs.bandwidth_bytes_per_s / stages,
        flop_per_s / costs.flop_per_s / stages,
    )
