"""The knee of an engine's latency-throughput curve, learned from its own load. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain, compress
from math import ceil, floor, inf, log2, nan, sqrt
from operator import mul
from statistics import median

from msgspec import Struct
from msgspec.structs import astuple, replace

from kneewatch.diagnose.capacity import STEPS_PER_DOUBLING, LearnedKnee, Range
from kneewatch.diagnose.changed import alike
from kneewatch.rules.facts import Targets

MEASURED = frozenset({"num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"})
"""Configuration labels that vLLM measures at each start; nearly equal values count as equal."""


def same_launch(config: Mapping[str, str], other_config: Mapping[str, str]) -> bool:
    """Whether two configurations are equal, apart from small differences in measured labels."""
    return config.keys() == other_config.keys() and all(
        value == other_config[label] or (label in MEASURED and alike(value, other_config[label]))
        for label, value in config.items()
    )


# The knee of a server's own latency-throughput curve, learned from the loads it has had. Pure.
#
# One point a window: requests in flight, requests/s and tokens/s, latencies. Points are grouped by
# concurrency in steps of the square root of two; a step counts once it holds enough of them.
# Without targets the knee is where power is highest, tokens per second over the time a token
# takes (Kleinrock 1979): beyond it latency grows by a larger factor than throughput. Both are
# means, which vLLM's histograms give exactly; a quantile inside a wide bucket would move the knee
# by a step. With targets C_max is the last step that keeps them. Only steps that were seen count:
# nothing is extrapolated.


POINTS_KEPT = 48
POINTS_MIN = 3
STEPS_MIN = 3
SPAN_MIN = 4.0
"""Smallest ratio of the highest to the lowest observed load; below, there is no curve."""

QUEUE_RATIO = 0.05
"""From this ratio of waiting to running requests on, requests queue."""

QUEUE_STEPS = 2.0
"""Requests that wait for more steps (by Little's law) queue: that wait is part of their TTFT."""

IN_FLIGHT_MIN = 0.5
REQUESTS_MIN = 4.0
"""Fewest finished requests for a window's latency to count."""

FORGOTTEN_S = 14 * 24 * 3600.0
"""Greatest age of points in use, in seconds: versions, models and prompts change."""


class Point(Struct, frozen=True):
    """One window of the curve.

    `token_s` is a request's total time per output token, in seconds. The fields from `running` on
    are for `StepTimes`:

    - `context_tokens`: tokens that a running request attends to.
    - `computed_tokens`: tokens of a prompt that no cache saved.
    - `outside_s`: the part of TTFT that is not prefill: API server, network, and the wait for the
      next step. None for a window with a queue.
    - `prefill_s` and `outside_s` are None for a window with preemptions, because these delay
      prompts, and requests then start and end in bursts.
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
FIELD = {name: at for at, name in enumerate(Point.__struct_fields__)}


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
    *("preemption_per_s", "ttft_mean_s"),
)
"""Signals that `point_of` reads, for the curve and for the step times."""


class _Step(Struct, frozen=True):
    """The points at one step of concurrency."""

    windows: array[float]
    """All fields of all points, one point after another."""

    @property
    def points(self) -> int:
        return len(self.windows) // FIELDS

    @property
    def in_flight(self) -> float:
        return median(self.values("in_flight"))

    @property
    def at(self) -> int:
        return step_of(self.in_flight)

    @property
    def is_queued(self) -> bool:
        """Whether requests queued in most windows: latency is then that of the queue, not of the
        concurrency."""
        pairs = zip(self.values("in_flight"), self.values("running"), strict=True)
        queued = sum(load > (1 + QUEUE_RATIO) * active for load, active in pairs)
        return 2 * queued > self.points

    def values(self, name: str) -> array[float]:
        """One field of all points; NaN for None."""
        return self.windows[FIELD[name] :: FIELDS]

    def power(self) -> Range:
        pairs = zip(self.values("tokens_per_s"), self.values("token_s"), strict=True)
        return _range(tokens_per_s / token_s for tokens_per_s, token_s in pairs)

    def kept(self, targets: Targets) -> float:
        """Share of windows that meet the targets."""
        pairs = zip(self.values("ttft_p99_s"), self.values("itl_p99_s"), strict=True)
        kept = sum(1 for ttft_s, itl_s in pairs if _keeps(ttft_s, itl_s, targets))
        return kept / self.points


class CurveLearner:
    """The newest points of each concurrency step, for one engine or for all engines of a tier.

    Points are stored as plain numbers: as objects, those of 1,000 engines took five times the
    memory.
    """

    def __init__(self, *, window_s: float, kept: int = POINTS_KEPT) -> None:
        self._window_s, self._kept = window_s, kept
        self._last_s = float("-inf")
        self._steps: dict[int, array[float]] = {}

    def learn(self, now_s: float, values: Mapping[str, float | None]) -> None:
        """Add a scrape's window. At most one per window is added, so that no observation counts
        twice."""
        if 0 <= now_s - self._last_s < self._window_s:
            return
        point = point_of(now_s, values, self._window_s)
        if point is None:
            return
        self._last_s = now_s
        self.take(point)

    def take(self, point: Point) -> None:
        """Add a stored window, in the form that `points` returns."""
        kept = self._steps.setdefault(step_of(point.in_flight), array("d"))
        kept.extend(_packed(point))
        del kept[: -self._kept * FIELDS]

    def recall(self, points: Sequence[Point]) -> None:
        """Add windows that are older than all learned ones, oldest first."""
        learned, self._steps = self.points(), {}
        for point in (*points, *learned):
            self.take(point)

    def points(self) -> list[Point]:
        return [_unpacked(row) for kept in self._steps.values() for row in _rows(kept)]

    def column(self, name: str) -> array[float]:
        """One field of all points, NaN for None. Faster than `points`."""
        column = array("d")
        for kept in self._steps.values():
            column += kept[FIELD[name] :: FIELDS]
        return column

    def knee(self, now_s: float, targets: Targets) -> LearnedKnee | None:
        """The learned knee; None if too few different loads were seen."""
        steps = self._current_steps(now_s)
        if len(steps) < STEPS_MIN or steps[-1].in_flight < SPAN_MIN * steps[0].in_flight:
            return None
        if targets.ttft_p99_s is not None or targets.itl_p99_s is not None:
            return _at_targets(steps, targets)
        return _at_power(steps)

    def _current_steps(self, now_s: float) -> list[_Step]:
        steps: list[_Step] = []
        for _, kept in sorted(self._steps.items()):
            step = _Step(kept)
            if now_s - min(step.values("t_s")) > FORGOTTEN_S:
                fresh = [row for row in _rows(kept) if now_s - row[FIELD["t_s"]] <= FORGOTTEN_S]
                step = _Step(array("d", chain.from_iterable(fresh)))
            if step.points >= POINTS_MIN:
                steps.append(step)
        return steps


def _packed(point: Point) -> list[float]:
    return [nan if value is None else value for value in astuple(point)]


def _unpacked(row: tuple[float, ...]) -> Point:
    return Point(*row[:5], *[None if x != x else x for x in row[5:]])


def _rows(kept: array[float]) -> Iterator[tuple[float, ...]]:
    return zip(*[iter(kept)] * FIELDS, strict=True)


def step_of(in_flight: float) -> int:
    """The index of the step that contains a concurrency; every second step doubles the
    concurrency."""
    return round(STEPS_PER_DOUBLING * log2(in_flight))


def point_of(now_s: float, values: Mapping[str, float | None], window_s: float) -> Point | None:
    """The window as a point of the curve; None if it has no latency under load."""
    in_flight = (values.get("running_avg") or 0.0) + (values.get("waiting_avg") or 0.0)
    served_per_s, tokens_per_s = (
        values.get("completed_per_s"),
        values.get("generation_tokens_per_s"),
    )
    prompt, saved = values.get("prompt_tokens_mean"), values.get("prefix_saved_ratio") or 0.0
    prefill_s = None if values.get("preemption_per_s") else values.get("prefill_mean_s")
    e2e_s, length = values.get("e2e_mean_s"), values.get("output_tokens_mean")
    if not (served_per_s and tokens_per_s and e2e_s and length):
        return None
    if not IN_FLIGHT_MIN <= in_flight < inf:
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
    # vLLM counts TTFT at the first token and the queue at the end: where a queue grows or drains,
    # they are of different requests.
    ttft_s, waiting = values.get("ttft_mean_s"), values.get("waiting_avg") or 0.0
    step_s, served_per_s = token_gap_s(values), values.get("completed_per_s")
    if ttft_s is None or prefill_s is None or not step_s or not served_per_s:
        return None
    return max(0.0, ttft_s - prefill_s) if waiting <= QUEUE_STEPS * step_s * served_per_s else None


def token_gap_s(values: Mapping[str, float | None]) -> float | None:
    """Seconds between two tokens of a running request; None if unknown.

    vLLM includes the wait of a preempted request in the ITL of its next token. So if requests are
    preempted, the gap is running requests divided by tokens/s (Little's law).
    """
    itl_s, tokens_per_s = values.get("itl_mean_s"), values.get("generation_tokens_per_s")
    if not itl_s or not values.get("preemption_per_s") or not tokens_per_s:
        return itl_s
    return min(itl_s, (values.get("running_avg") or 0.0) / tokens_per_s)


def _at_power(steps: Sequence[_Step]) -> LearnedKnee:
    """The knee without targets: the load with the most power (tokens/s per second per token).

    If the better windows of another load reach this power too, that load is part of the knee's
    range.
    """
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
    """The knee by targets: C_max is the last of the consecutive steps that meet them.

    A step meets the targets if most of its windows do.
    """
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
    """Index of the last consecutive step, from `start` on, that meets the targets often enough.

    `kept` has each step's share of windows that meet the targets; `least` is the share that is
    enough.
    """
    end = start
    while end + 1 < len(kept) and kept[end + 1] >= least:
        end += 1
    return end


GAP_STEPS = 2
"""Seen loads that are further apart leave the limit between them unknown: a doubling."""


def _learned(
    steps: Sequence[_Step], *, low: int, best: int, high: int, reached: bool, basis: str
) -> LearnedKnee:
    usable = _range(steps[best].values("requests_per_s"))
    above = [_range(step.values("requests_per_s")).expected for step in steps[best + 1 :]]
    beyond = steps[best + 1] if above else None
    if beyond is not None and not beyond.is_queued and beyond.at - steps[best].at <= GAP_STEPS:
        above = []
    return LearnedKnee(
        c_max=Range(steps[low].in_flight, steps[best].in_flight, steps[high].in_flight),
        usable_requests_per_s=usable,
        most_requests_per_s=max([usable.expected, *above]),
        reached=reached,
        basis=basis,
        points=sum(step.points for step in steps),
        steps=len(steps),
    )


def _keeps(ttft_p99_s: float, itl_p99_s: float, targets: Targets) -> bool:
    # A comparison with NaN is false: what is not known keeps no target.
    return (targets.ttft_p99_s is None or ttft_p99_s <= targets.ttft_p99_s) and (
        targets.itl_p99_s is None or itl_p99_s <= targets.itl_p99_s
    )


def _range(values: Iterable[float]) -> Range:
    ordered = sorted(values)
    return Range(_quartile(ordered, 1), _quartile(ordered, 2), _quartile(ordered, 3))


def _quartile(ordered: Sequence[float], quarter: int) -> float:
    """A quartile by the inclusive method; faster than `statistics.quantiles`."""
    at, rest = divmod(quarter * (len(ordered) - 1), 4)
    if not rest:
        return ordered[at]
    return (ordered[at] * (4 - rest) + ordered[at + 1] * rest) / 4


# --- The step times of one server, from its own windows -------------------------------------------


STEP_FIELDS = (
    *("t_s", "running", "itl_s", "context_tokens"),
    *("prefill_s", "computed_tokens", "outside_s", "requests_per_s"),
)
"""The fields of a point that are `StepTimes`' columns, in their order."""

STEP_WINDOWS_MIN = 3
BUSY_MOST_RATIO = 0.95
"""Prompts keep an engine busy for at most this share of the time, as far as a wait is computed."""

ERROR_WINDOWS_MAX = 32
"""Most windows for which an error is computed. The error is only shown; nothing depends on it."""


class Prompts(Struct, frozen=True):
    """The seconds that prompts take of the engine's steps.

    Their mean, and the squared coefficient of variation.
    """

    mean_s: float
    varies: float

    def wait_s(self, per_s: float) -> float:
        """Mean wait for prompts ahead, by Pollaczek and Khinchine, where `per_s` arrive."""
        busy = min(BUSY_MOST_RATIO, per_s * self.mean_s)
        return busy * self._alone_s / (1 - busy)

    def per_s(self, requests: float, request_s: float) -> float:
        """Requests/s where so many are in flight, each for `request_s` and the wait (Little)."""
        # requests = per_s (request_s + wait_s(per_s)), solved for per_s.
        mean_s = self.mean_s
        linear = request_s + requests * mean_s
        square = mean_s * (self._alone_s - request_s)
        return 2 * requests / (linear + sqrt(max(0.0, linear**2 + 4 * requests * square)))

    @property
    def _alone_s(self) -> float:
        return self.mean_s * (1 + self.varies) / 2


def reaches(running: float, least: float, most: float) -> bool:
    """Whether a batch lies between the smallest and the largest that were measured, or beyond by
    no more than BEYOND_RATIO."""
    return least <= running <= BEYOND_RATIO * most


class StepTimes(Struct, frozen=True, dict=True):
    """Step times measured on this server, without any data sheet figure.

    A decode step takes a + b x running + c x context tokens of all running requests. The
    coefficients are fitted by least squares. Step times are not linear from one request to
    hundreds, so a window counts more the nearer its batch is to the requested batch.

    There are at least two windows; each has a value in every column, which may be NaN for prefills,
    computed tokens and times outside.
    """

    times_s: Sequence[float]
    batches: Sequence[float]
    steps_s: Sequence[float]
    contexts: Sequence[float]
    prefills_s: Sequence[float]
    computed: Sequence[float]
    outsides_s: Sequence[float]
    requests_per_s: Sequence[float]

    @classmethod
    def of(cls, curve: CurveLearner, now_s: float) -> StepTimes | None:
        """Step times from the curve's windows; None if too few windows have all the values
        needed."""
        columns = [curve.column(name) for name in STEP_FIELDS]
        # A comparison with NaN is false.
        usable = [
            now_s - t_s <= FORGOTTEN_S and running > 0 and step_s > 0 and context > 0
            for t_s, running, step_s, context in zip(*columns[:4], strict=True)
        ]
        if sum(usable) < STEP_WINDOWS_MIN:
            return None
        times_s, batches, *others = [list(compress(column, usable)) for column in columns]
        # Where nothing runs for a part of the window, the batch of its steps is above its mean.
        return cls(times_s, [running if running > 1 else 1.0 for running in batches], *others)

    @property
    def windows(self) -> int:
        """Number of windows measured."""
        return len(self.times_s)

    @property
    def least_running(self) -> int:
        """The smallest batch measured, in requests."""
        return floor(min(self.batches))

    @property
    def most_running(self) -> int:
        """The largest batch measured, in requests."""
        return ceil(max(self.batches))

    def reaches(self, running: float) -> bool:
        """Whether the times of a batch follow from those measured."""
        return reaches(running, self.least_running, self.most_running)

    @property
    def since_s(self) -> float:
        """Time of the oldest window."""
        return min(self.times_s)

    def itl_s(self, running: float, context_tokens: float, *, near: float | None = None) -> float:
        """Mean seconds of a step with `running` decodes of `context_tokens` each, prefill included.

        Windows near the batch `near` count most; by default it is `running`. For a fixed `near`, a
        larger batch never takes less time, and its time never grows faster than the batch.
        """
        return self._decode.at(running, running * context_tokens, near=near)

    @cached_property
    def _decode(self) -> _NearFit:
        tokens = map(mul, self.batches, self.contexts)
        rows = list(zip(self.batches, tokens, self.steps_s, strict=True))
        return _NearFit(rows, self._bands)

    @cached_property
    def _bands(self) -> list[int]:
        # As `_band`, without a call for each.
        return [round(_BANDS_A_DOUBLING * log2(batch)) for batch in self.batches]

    def prefill_s(self, running: float, context_tokens: float, computed_tokens: float) -> float:
        """Seconds from a prompt's first step to its first token.

        It is one step, plus the time that each computed token adds. In a larger batch more prompts
        share a step.
        """
        return self.itl_s(running, context_tokens) + self.prompt_s(running, computed_tokens)

    def prompt_s(self, running: float, computed_tokens: float) -> float:
        """Seconds that a prompt adds to steps."""
        return computed_tokens * self._added_s(running)

    def _added_s(self, running: float) -> float:
        """Seconds that one computed prompt token adds to a step at this batch; 0 if unknown."""
        near = _band(running)
        windows = zip(
            self._bands, self.batches, self.steps_s, self.prefills_s, self.computed, strict=True
        )
        rows = [
            (
                _nearness(band - near),
                batch,
                (prefill_s - step_s) / computed if prefill_s > step_s else 0.0,
            )
            for band, batch, step_s, prefill_s, computed in windows
            if prefill_s > 0 and computed > 0
        ]
        return _near_line(rows, running) if rows else 0.0

    def outside_s(self, running: float, prompts: Prompts, per_s: float) -> float:
        """Seconds of TTFT before the engine computes the prompt; 0 if not measured.

        The API server also serves the running streams, so it is the median of the windows with the
        nearest batches. If more prompts arrive than then, they wait longer for each other, as far
        as the windows show such waits at all.
        """
        prompts = replace(prompts, mean_s=min(prompts.mean_s, 1 / max(self.requests_per_s)))
        measured = sorted(
            (abs(log2(batch / running)), outside_s, prompts.wait_s(then_per_s))
            for batch, outside_s, then_per_s in zip(
                self.batches, self.outsides_s, self.requests_per_s, strict=True
            )
            if outside_s >= 0  # false for NaN
        )
        expected_s, wait_s = sum(each[2] for each in measured), prompts.wait_s(per_s)
        shown = min(1.0, sum(each[1] for each in measured) / expected_s) if expected_s else 0.0
        nearest = [
            outside_s + shown * max(0.0, wait_s - then_s)
            for _, outside_s, then_s in measured[:STEP_WINDOWS_MIN]
        ]
        return median(nearest) if nearest else 0.0

    @property
    def error_ratio(self) -> float:
        """Median relative error when each window's decode step is predicted from all other
        windows."""
        return median(self._decode.error_ratios(rows_max=ERROR_WINDOWS_MAX))


BEYOND_RATIO = 2.0
"""Up to this multiple of the largest batch measured, its line is followed."""

COLLINEAR = 0.98
"""Above this squared correlation, the effects of batch and context cannot be told apart."""

_BANDS_A_DOUBLING = 4
_SPREAD_MIN_RATIO = 1e-9
"""Smallest ratio of variance to mean square that is a real spread and not a rounding error."""

_Row = tuple[float, float, float]


class _NearFit:
    """A least-squares fit of rows (batch, tokens, value), weighted towards the requested batch.

    The nearer a row's batch, the more the row counts; distance is measured in bands of a quarter of
    a doubling. Errors are relative to the value. Rows of a band have equal weight, so a fit needs
    only sums over each band. To leave out a row, its terms are subtracted from the sums.
    """

    def __init__(self, rows: Sequence[_Row], bands: Sequence[int]) -> None:
        self._rows, self._row_bands = rows, bands
        self._values = sorted([value for _, _, value in rows])
        by_band = {band: [0.0] * 9 for band in bands}
        for row, band in zip(rows, bands, strict=True):
            _add(by_band[band], row, 1.0)
        self._bands = list(by_band)
        self._columns = list(zip(*by_band.values(), strict=True))
        self._weighted: dict[int, list[float]] = {}

    def at(self, running: float, tokens: float, *, near: float | None = None) -> float:
        """The fitted value for a batch and its tokens, limited to the range of measured values.

        Rows near the batch `near` count most; by default it is `running`.
        """
        value = _line(self._sums_near(_band(near or running)), running, tokens)
        return min(max(value, self._values[0]), self._values[-1])

    def error_ratios(self, *, rows_max: int) -> list[float]:
        """Relative errors when a row's value is predicted from all other rows.

        At most `rows_max` rows are used, evenly spaced. There must be two or more rows.
        """
        values, ratios = self._values, list[float]()
        for at in range(0, len(self._rows), ceil(len(self._rows) / rows_max)):
            row = running, tokens, value = self._rows[at]
            sums = self._sums_near(self._row_bands[at]).copy()
            _add(sums, row, -1.0)
            least = values[1] if value == values[0] else values[0]
            most = values[-2] if value == values[-1] else values[-1]
            ratios.append(abs(min(max(_line(sums, running, tokens), least), most) / value - 1))
        return ratios

    def _sums_near(self, band: int) -> list[float]:
        if band not in self._weighted:
            nearness = [_nearness(other - band) for other in self._bands]
            self._weighted[band] = [sum(map(mul, nearness, column)) for column in self._columns]
        return self._weighted[band]


def _band(batch: float) -> int:
    return round(_BANDS_A_DOUBLING * log2(batch))


@lru_cache(maxsize=256)
def _nearness(bands: int) -> float:
    """Weight of a row whose batch is this many bands away from the requested batch."""
    return (1 / (1 + (bands / _BANDS_A_DOUBLING) ** 2)) ** 2


def _add(sums: list[float], row: _Row, times: float) -> None:
    """Add a row's terms to a fit's sums, multiplied by a weight and by `times`."""
    batch, tokens, value = row
    weight = times / (value or 1.0) ** 2
    of_batch, of_tokens = weight * batch, weight * tokens
    sums[0] += weight
    sums[1] += of_batch
    sums[2] += of_tokens
    sums[3] += weight * value
    sums[4] += of_batch * batch
    sums[5] += of_tokens * tokens
    sums[6] += of_batch * tokens
    sums[7] += of_batch * value
    sums[8] += of_tokens * value


def _line(sums: Sequence[float], running: float, tokens: float) -> float:
    """The value of the weighted least-squares plane at this batch and these context tokens.

    If the effects of batch and tokens cannot be told apart, the plane slopes along the batch only.
    More of either never makes a step faster, and a step never grows faster than its batch. A plane
    that violates this was fitted to times at which the machine ran at different speeds.
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
    return value + _per_request(batch, value, bb, bv) * (running - batch)


def _near_line(rows: Sequence[tuple[float, float, float]], running: float) -> float:
    """Like `_NearFit.at` for values that depend on the batch only. Rows are (nearness, batch,
    value)."""
    batches = [batch for _, batch, _ in rows]
    values = [value for _, _, value in rows]
    weights = [nearness / (value or 1.0) ** 2 for nearness, _, value in rows]
    weight, weighted = sum(weights), list(map(mul, weights, batches))
    batch, value = sum(weighted) / weight, sum(map(mul, weights, values)) / weight
    bb = _spread(sum(map(mul, weighted, batches)) / weight, batch)
    bv = sum(map(mul, weighted, values)) / weight - batch * value
    near: float = value + _per_request(batch, value, bb, bv) * (running - batch)
    return min(max(near, min(values)), max(values))


def _per_request(batch: float, value: float, bb: float, bv: float) -> float:
    """The slope along the batch only, from means, variance and covariance."""
    return min(max(0.0, bv / bb), value / batch) if bb else 0.0


def _spread(square: float, mean: float) -> float:
    """The variance, computed from a mean square and a mean; 0 if it is only a rounding error."""
    variance = square - mean * mean
    return variance if variance > _SPREAD_MIN_RATIO * square else 0.0


# --- The knee of one engine as it is learned while it is watched ----------------------------------


LIVE_POINTS_KEPT = 12
"""Windows kept per concurrency step in a daemon, which monitors many engines."""


def capacity_used(values: Mapping[str, float | None], knee: LearnedKnee | None) -> float | None:
    """The GPU's activity; without a GPU source the requests in flight over the learned C_max."""
    busy, running = values.get("gpu_engine_active_ratio"), values.get("running_avg")
    if busy is not None or knee is None or not knee.reached or running is None:
        return busy
    return (running + (values.get("waiting_avg") or 0.0)) / knee.c_max.expected


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
        """Add windows from before the first scrape, oldest first; the next computed knee uses them.

        May be called once, from another thread.
        """
        self._recalled = points

    def update(self, now_s: float, values: Mapping[str, float | None]) -> LearnedKnee | None:
        """The knee after a scrape; None if too few different loads were seen."""
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
