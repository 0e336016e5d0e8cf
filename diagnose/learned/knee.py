"""The knee of an engine's latency-throughput curve, learned from its own load. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil, floor, fsum, log2, nan
from operator import mul, sub
from statistics import median, quantiles

from msgspec import Struct
from msgspec.structs import astuple, replace

from kneewatch.rules.facts import Targets

MEASURED = frozenset({"num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"})
"""Configuration labels that vLLM measures at each start: nearly equal values count as the same."""

ALIKE_RATIO = 0.05
"""Largest relative difference of "nearly equal": a curve's steps are further apart, so it does not
move a knee."""


def same_launch(config: Mapping[str, str], other_config: Mapping[str, str]) -> bool:
    """Whether two configurations are equal, up to small differences in measured labels."""
    return config.keys() == other_config.keys() and all(
        value == other_config[label] or (label in MEASURED and _alike(value, other_config[label]))
        for label, value in config.items()
    )


def _alike(text: str, other_text: str) -> bool:
    try:
        first, second = float(text), float(other_text)
    except ValueError:
        return False
    return abs(first - second) <= ALIKE_RATIO * min(abs(first), abs(second))


# The knee of a server's own latency-throughput curve, learned from the loads it has had. Pure.
#
# One point a window: requests in flight, what was served, how late. Points are gathered by
# concurrency in steps of the square root of two; a step counts once it holds enough of them.
# Without targets the knee is where power is highest, tokens per second over the time a token
# takes (Kleinrock 1979): beyond it latency grows by a larger factor than throughput. Both are
# means, which vLLM's histograms give exactly; a quantile inside a wide bucket would move the knee
# by a step. With targets C_max is the last step that keeps them. Only steps that were seen count:
# nothing is extrapolated.


STEPS_PER_DOUBLING = 2
HALF_A_STEP = 2 ** (0.5 / STEPS_PER_DOUBLING)
"""Factor from the middle of a step to its edge."""

POINTS_KEPT = 48
POINTS_MIN = 3
STEPS_MIN = 3
SPAN_MIN = 4.0
"""Smallest ratio of the highest to the lowest load seen: less is a point, not a curve."""

IN_FLIGHT_MIN = 0.5
REQUESTS_MIN = 4.0
"""Fewest finished requests for a window's latency to count."""

FORGOTTEN_S = 14 * 24 * 3600.0
"""Oldest points used: versions, models and prompts change."""


class Point(Struct, frozen=True):
    """One window of the curve. `token_s` is a request's total time per output token, in seconds.

    From `running` on it holds what `StepTimes` is made of: `context_tokens` that a running request
    attends to, `computed_tokens` of a prompt that no cache saved, and `outside_s` of TTFT that is
    neither queue nor prefill: the API server and the network. `prefill_s` and `outside_s` are None
    in a window with preemptions, which put prompts off and let requests end and begin in bursts.
    """

    t_s: float
    in_flight: float
    requests_per_s: float
    tokens_per_s: float
    token_s: float
    ttft_p99_s: float | None
    itl_p99_s: float | None
    running: float | None = None
    itl_s: float | None = None
    prefill_s: float | None = None
    context_tokens: float | None = None
    computed_tokens: float | None = None
    outside_s: float | None = None


FIELDS = len(Point.__struct_fields__)


LOAD_SIGNALS = ("running_avg", "waiting_avg")
SERVED_SIGNALS = (
    "completed_per_s",
    "generation_tokens_per_s",
    "e2e_mean_s",
    "output_tokens_mean",
)
"""Signals that a window needs to become a point."""

POINT_SIGNALS = (*LOAD_SIGNALS, *SERVED_SIGNALS, "ttft_p99_s", "itl_p99_s")
"""Signals of the curve."""

WINDOW_SIGNALS = (
    *POINT_SIGNALS,
    *("itl_mean_s", "prefill_mean_s", "prompt_tokens_mean", "prefix_saved_ratio"),
    *("preemption_per_s", "ttft_mean_s", "queue_mean_s"),
)
"""Signals that `point_of` reads: those of the curve, and those of the step times."""


class Range(Struct, frozen=True):
    """A value with the range that the middle half of its windows covers."""

    low: float
    expected: float
    high: float


class LearnedKnee(Struct, frozen=True):
    """The concurrency that one engine can serve, learned from its own history.

    `c_max` is in requests in flight: up to `low` is safe, above `high` is past the knee. `reached`
    is False if no load past the knee was seen; then C_max is a lower bound. `basis` says what
    decided.
    """

    c_max: Range
    usable_requests_per_s: Range
    reached: bool
    basis: str
    points: int
    steps: int

    @property
    def past_from(self) -> float | None:
        """Requests in flight above which the engine is overloaded for certain; None if no overload
        was seen."""
        return self.c_max.high * HALF_A_STEP if self.reached else None

    @property
    def before_to(self) -> float:
        """Requests in flight up to which the engine is not overloaded for certain."""
        return self.c_max.low * HALF_A_STEP


class _Step(Struct, frozen=True):
    """The points at one concurrency."""

    in_flight: float
    points: Sequence[Point]

    def power(self) -> Range:
        return _range([point.tokens_per_s / point.token_s for point in self.points])

    def kept(self, targets: Targets) -> float:
        """Share of windows that meet the targets."""
        kept = sum(1 for point in self.points if _keeps(point, targets))
        return kept / len(self.points)


class CurveLearner:
    """The newest points of each concurrency step, of one engine or of all engines of a tier.

    Stored as plain numbers: as objects, those of 1,000 engines took five times the memory.
    """

    def __init__(self, *, window_s: float, kept: int = POINTS_KEPT) -> None:
        self._window_s, self._kept = window_s, kept
        self._last_s = float("-inf")
        self._steps: dict[int, array[float]] = {}

    def learn(self, now_s: float, values: Mapping[str, float | None]) -> None:
        """Add a scrape's window; at most one per window, so that no observation counts twice."""
        if 0 <= now_s - self._last_s < self._window_s:
            return
        point = point_of(now_s, values, self._window_s)
        if point is None:
            return
        self._last_s = now_s
        self.take(point)

    def take(self, point: Point) -> None:
        """Add a stored window, as returned by `points`."""
        kept = self._steps.setdefault(step_of(point.in_flight), array("d"))
        kept.extend(_packed(point))
        del kept[: -self._kept * FIELDS]

    def recall(self, points: Sequence[Point]) -> None:
        """Add windows from before all learned ones, oldest first."""
        learned, self._steps = self.points(), {}
        for point in (*points, *learned):
            self.take(point)

    def points(self) -> list[Point]:
        """All points, for the store."""
        return [point for kept in self._steps.values() for point in _unpacked(kept)]

    def knee(self, now_s: float, targets: Targets) -> LearnedKnee | None:
        """The learned knee; None if too few loads were seen."""
        steps = self._current_steps(now_s)
        if len(steps) < STEPS_MIN or steps[-1].in_flight < SPAN_MIN * steps[0].in_flight:
            return None
        if targets.ttft_p99_s is not None or targets.itl_p99_s is not None:
            return _at_targets(steps, targets)
        return _at_power(steps)

    def _current_steps(self, now_s: float) -> list[_Step]:
        steps: list[_Step] = []
        for _, kept in sorted(self._steps.items()):
            fresh = [point for point in _unpacked(kept) if now_s - point.t_s <= FORGOTTEN_S]
            if len(fresh) >= POINTS_MIN:
                steps.append(_Step(median(point.in_flight for point in fresh), fresh))
        return steps


def _packed(point: Point) -> list[float]:
    return [nan if value is None else value for value in astuple(point)]


def _unpacked(kept: array[float]) -> list[Point]:
    return [
        # NaN makes the sum NaN: most points have every field, and need no look at each.
        Point(*row)
        if (total := sum(row)) == total
        else Point(*row[:5], *[None if x != x else x for x in row[5:]])
        for row in zip(*[iter(kept)] * FIELDS, strict=True)
    ]


def step_of(in_flight: float) -> int:
    """The index of a concurrency's step; two steps double the concurrency."""
    return round(STEPS_PER_DOUBLING * log2(in_flight))


def point_of(now_s: float, values: Mapping[str, float | None], window_s: float) -> Point | None:
    """A window as a point of the curve; None if it has no latency under load."""
    in_flight = (values.get("running_avg") or 0.0) + (values.get("waiting_avg") or 0.0)
    served_per_s, tokens_per_s = (
        values.get("completed_per_s"),
        values.get("generation_tokens_per_s"),
    )
    prompt, saved = values.get("prompt_tokens_mean"), values.get("prefix_saved_ratio") or 0.0
    prefill_s = None if values.get("preemption_per_s") else values.get("prefill_mean_s")
    e2e_s, length = values.get("e2e_mean_s"), values.get("output_tokens_mean")
    if not (served_per_s and tokens_per_s and e2e_s and length) or in_flight < IN_FLIGHT_MIN:
        return None
    if served_per_s * window_s < REQUESTS_MIN:
        return None
    return Point(
        t_s=now_s,
        in_flight=in_flight,
        requests_per_s=served_per_s,
        tokens_per_s=tokens_per_s,
        token_s=e2e_s / length,
        ttft_p99_s=values.get("ttft_p99_s"),
        itl_p99_s=values.get("itl_p99_s"),
        running=values.get("running_avg"),
        itl_s=token_gap_s(values),
        prefill_s=prefill_s,
        context_tokens=None if prompt is None else prompt + length / 2,
        computed_tokens=None if prompt is None else prompt * (1 - saved),
        outside_s=_outside_s(values, prefill_s),
    )


def _outside_s(values: Mapping[str, float | None], prefill_s: float | None) -> float | None:
    ttft_s, queue_s = values.get("ttft_mean_s"), values.get("queue_mean_s")
    if ttft_s is None or queue_s is None or prefill_s is None:
        return None
    return max(0.0, ttft_s - queue_s - prefill_s)


def token_gap_s(values: Mapping[str, float | None]) -> float | None:
    """Seconds between two tokens of a request that runs; None where unknown.

    vLLM counts the time that a preempted request waits as ITL of its next token. Where requests are
    preempted it is the running requests over the tokens per second (Little's law).
    """
    itl_s, tokens_per_s = values.get("itl_mean_s"), values.get("generation_tokens_per_s")
    if not itl_s or not values.get("preemption_per_s") or not tokens_per_s:
        return itl_s
    return min(itl_s, (values.get("running_avg") or 0.0) / tokens_per_s)


def _at_power(steps: Sequence[_Step]) -> LearnedKnee:
    """The knee: the load with the most power (tokens/s divided by seconds per token). Other loads
    whose better windows reach that power widen its range."""
    powers = [step.power() for step in steps]
    best = max(range(len(steps)), key=lambda at: powers[at].expected)
    near = [at for at, power in enumerate(powers) if power.high >= powers[best].expected]
    return _learned(
        steps,
        low=min(near),
        best=best,
        high=max(near),
        reached=best + 1 < len(steps),
        basis="latency rises faster than throughput beyond it",
    )


def _at_targets(steps: Sequence[_Step], targets: Targets) -> LearnedKnee | None:
    """C_max: the last of the consecutive steps in which most windows meet the targets."""
    kept = [step.kept(targets) for step in steps]
    start = next((at for at, share in enumerate(kept) if share >= 0.5), None)
    if start is None:
        return None
    best = _run_end(kept, start, least=0.5)
    return _learned(
        steps,
        low=_run_end(kept, start, least=0.9) if kept[start] >= 0.9 else start,
        best=best,
        high=_run_end(kept, start, least=0.1),
        reached=best + 1 < len(steps),
        basis="P99 within the targets",
    )


def _run_end(kept: Sequence[float], start: int, *, least: float) -> int:
    """Index of the last consecutive step, from `start`, in which at least this share of windows
    meets the targets."""
    end = start
    while end + 1 < len(kept) and kept[end + 1] >= least:
        end += 1
    return end


def _learned(
    steps: Sequence[_Step], *, low: int, best: int, high: int, reached: bool, basis: str
) -> LearnedKnee:
    served = [point.requests_per_s for point in steps[best].points]
    return LearnedKnee(
        c_max=Range(steps[low].in_flight, steps[best].in_flight, steps[high].in_flight),
        usable_requests_per_s=_range(served),
        reached=reached,
        basis=basis,
        points=sum(len(step.points) for step in steps),
        steps=len(steps),
    )


def _keeps(point: Point, targets: Targets) -> bool:
    pairs = ((point.ttft_p99_s, targets.ttft_p99_s), (point.itl_p99_s, targets.itl_p99_s))
    return all(
        target_s is None or (value_s is not None and value_s <= target_s)
        for value_s, target_s in pairs
    )


def _range(values: Sequence[float]) -> Range:
    if len(values) < 2:
        return Range(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Range(low, middle, high)


# --- The step times of one server, from its own windows -------------------------------------------


STEP_WINDOWS_MIN = 3
ERROR_WINDOWS_MAX = 32
"""Windows whose error is computed: it is shown, and nothing is decided by it."""


class StepTimes(Struct, frozen=True, dict=True):
    """The measured step times of this server, without any figure of a data sheet.

    A decode step takes a + b x running + c x context tokens of all running requests. The fit is by
    least squares, and windows count more the nearer their batch is to the requested one, because
    step times are no straight line from one request to hundreds. `windows` must be at least two.
    """

    windows: Sequence[Point]

    @classmethod
    def of(cls, points: Sequence[Point], now_s: float) -> StepTimes | None:
        """Step times from these windows; None where too few have all they need."""
        # Where nothing runs for a part of the window, the batch of its steps is above its mean.
        usable = [
            point if point.running >= 1 else replace(point, running=1.0)
            for point in points
            if now_s - point.t_s <= FORGOTTEN_S
            and point.running
            and point.itl_s
            and point.context_tokens
        ]
        return cls(usable) if len(usable) >= STEP_WINDOWS_MIN else None

    @property
    def least_running(self) -> int:
        """The smallest batch measured, in requests."""
        return floor(min(point.running or 0.0 for point in self.windows))

    @property
    def most_running(self) -> int:
        """The largest batch measured, in requests."""
        return ceil(max(point.running or 0.0 for point in self.windows))

    @property
    def since_s(self) -> float:
        """Time of the oldest window."""
        return min(point.t_s for point in self.windows)

    def itl_s(self, running: float, context_tokens: float, *, near: float | None = None) -> float:
        """Seconds of a step with that many decodes of that context each, prompts among them.

        `near` is the batch whose windows count most, by default `running`. For one value of it a
        larger batch never takes less, nor more than in proportion.
        """
        return self._decode.at(running, running * context_tokens, near=near)

    @cached_property
    def _decode(self) -> _NearFit:
        return _NearFit([_decode_row(point) for point in self.windows])

    def prefill_s(self, running: float, context_tokens: float, computed_tokens: float) -> float:
        """Seconds from a prompt's first step to its first token: one step, and the time that each
        computed token adds at that batch, where more prompts share the step."""
        added = self._added
        token_s = max(0.0, added.at(running, 0.0)) if added is not None else 0.0
        return self.itl_s(running, context_tokens) + computed_tokens * token_s

    @cached_property
    def _added(self) -> _NearFit | None:
        """Seconds that one computed prompt token adds to a step."""
        rows = [
            (point.running, 0.0, max(0.0, point.prefill_s - point.itl_s) / point.computed_tokens)
            for point in self.windows
            if point.running and point.itl_s and point.prefill_s and point.computed_tokens
        ]
        return _NearFit(rows) if rows else None

    def outside_s(self, running: float) -> float:
        """Seconds of a first token in the API server and the network, which serve the running
        streams too: the median of the windows with the nearest batches; 0 where not measured."""
        measured = sorted(
            (abs(log2(point.running / running)), point.outside_s)
            for point in self.windows
            if point.running and point.outside_s is not None
        )
        nearest = [outside_s for _, outside_s in measured[:STEP_WINDOWS_MIN]]
        return median(nearest) if nearest else 0.0

    @property
    def error_ratio(self) -> float:
        """Median relative error of a window's decode step by the fit of all other windows."""
        return median(self._decode.error_ratios(rows_max=ERROR_WINDOWS_MAX))


def _decode_row(point: Point) -> _Row:
    running, step_s = point.running or 0.0, point.itl_s or 0.0
    return running, running * (point.context_tokens or 0.0), step_s


COLLINEAR = 0.98
"""Squared correlation of batch and context above which their effects cannot be told apart."""

_BANDS_A_DOUBLING = 4
_SPREAD_MIN_RATIO = 1e-9
"""Smallest variance over mean square that is a spread and no rounding error."""

_Row = tuple[float, float, float]


class _NearFit:
    """Least squares of (batch, tokens, value) rows in which a row counts the more the nearer its
    batch is to the one asked for, in quarters of a doubling. Errors are relative to the value.

    Rows of one band count alike, so sums over each band are all that a fit needs: a row is left
    out by subtracting it from them.
    """

    def __init__(self, rows: Sequence[_Row]) -> None:
        self._rows = rows
        self._values = sorted(value for _, _, value in rows)
        self._products = [_products(row) for row in rows]
        bands: dict[int, list[tuple[float, ...]]] = {}
        for row, products in zip(rows, self._products, strict=True):
            bands.setdefault(_band(row[0]), []).append(products)
        self._bands = list(bands)
        sums = [map(fsum, zip(*group, strict=True)) for group in bands.values()]
        self._columns = list(zip(*sums, strict=True))
        self._weighted: dict[int, list[float]] = {}

    def at(self, running: float, tokens: float, *, near: float | None = None) -> float:
        """The value at a batch and its tokens, within the values measured. Rows `near` a batch, by
        default this one, count most."""
        value = _line(self._sums_near(_band(near or running)), running, tokens)
        return min(max(value, self._values[0]), self._values[-1])

    def error_ratios(self, *, rows_max: int) -> list[float]:
        """The relative error of each row's value by the fit of all others, of at most
        `rows_max` rows that are spread over all. There are two or more rows."""
        values, ratios = self._values, list[float]()
        for at in range(0, len(self._rows), ceil(len(self._rows) / rows_max)):
            (running, tokens, value), products = self._rows[at], self._products[at]
            sums = list(map(sub, self._sums_near(_band(running)), products))
            least = values[1] if value == values[0] else values[0]
            most = values[-2] if value == values[-1] else values[-1]
            ratios.append(abs(min(max(_line(sums, running, tokens), least), most) / value - 1))
        return ratios

    def _sums_near(self, band: int) -> list[float]:
        if band not in self._weighted:
            nearness = [
                (1 / (1 + ((other - band) / _BANDS_A_DOUBLING) ** 2)) ** 2 for other in self._bands
            ]
            self._weighted[band] = [fsum(map(mul, nearness, column)) for column in self._columns]
        return self._weighted[band]


def _band(batch: float) -> int:
    return round(_BANDS_A_DOUBLING * log2(batch))


def _products(row: _Row) -> tuple[float, ...]:
    """The row's terms of a fit's sums, each times its weight."""
    batch, tokens, value = row
    weight = 1 / (value or 1.0) ** 2
    return (
        weight,
        weight * batch,
        weight * tokens,
        weight * value,
        weight * (batch * batch),
        weight * (tokens * tokens),
        weight * (batch * tokens),
        weight * (batch * value),
        weight * (tokens * value),
    )


def _line(sums: Sequence[float], running: float, tokens: float) -> float:
    """The value of the weighted least squares plane at this batch and these context tokens.

    It slopes along the batch alone where the effects of batch and tokens cannot be told apart.
    A step never gets faster with more of either, nor grows faster than its batch: a plane that
    does so was fitted to different speeds of the machine.
    """
    weight = sums[0]
    batch, token, value = sums[1] / weight, sums[2] / weight, sums[3] / weight
    bb, tt = _spread(sums[4] / weight, batch), _spread(sums[5] / weight, token)
    bt = sums[6] / weight - batch * token
    bv = sums[7] / weight - batch * value
    tv = sums[8] / weight - token * value
    if bt * bt < COLLINEAR * bb * tt:
        scale = bb * tt - bt * bt
        per_request, per_token = (bv * tt - tv * bt) / scale, (tv * bb - bv * bt) / scale
        at_none = value - per_request * batch - per_token * token
        if min(per_request, per_token, at_none) >= 0:
            return value + per_request * (running - batch) + per_token * (tokens - token)
    per_request = min(max(0.0, bv / bb), value / batch) if bb else 0.0
    return value + per_request * (running - batch)


def _spread(square: float, mean: float) -> float:
    """The variance from a mean square and a mean; 0 where that is a rounding error."""
    variance = square - mean * mean
    return variance if variance > _SPREAD_MIN_RATIO * square else 0.0


# --- The knee of one engine as it is learned while it is watched ----------------------------------


LIVE_POINTS_KEPT = 12
"""Windows kept per concurrency step in a daemon, which has many engines."""


class LiveKnee:
    """One engine's knee, recomputed once per window. `window_s` is the short window."""

    def __init__(self, *, window_s: float, targets: Targets) -> None:
        self._window_s, self._targets = window_s, targets
        self.curve = CurveLearner(window_s=window_s, kept=LIVE_POINTS_KEPT)
        self._knee: LearnedKnee | None = None
        self._made_s = float("-inf")
        self._recalled: Sequence[Point] = ()
        self.first_s: float | None = None
        """When it was first scraped; None before that."""
        self.history_requested = False
        """Whether windows from before `first_s` were requested from the history."""

    def recall(self, points: Sequence[Point]) -> None:
        """Add windows from before the first scrape, oldest first; the next knee uses them. May be
        called once, from another thread."""
        self._recalled = points

    def update(self, now_s: float, values: Mapping[str, float | None]) -> LearnedKnee | None:
        """The knee after a scrape; None if too few loads were seen."""
        if self.first_s is None:
            self.first_s = now_s
        if self._recalled:
            points, self._recalled = self._recalled, ()
            self.curve.recall(points)
            self._made_s = float("-inf")
        self.curve.learn(now_s, values)
        if not 0 <= now_s - self._made_s < self._window_s:
            self._knee, self._made_s = self.curve.knee(now_s, self._targets), now_s
        return self._knee
