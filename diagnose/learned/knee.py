"""The knee of an engine's latency-throughput curve, learned from its own load. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf, log2, nan
from statistics import median

from msgspec import Struct
from msgspec.structs import astuple

from kneewatch.diagnose.account_signals import GIVEN_UP_MAX
from kneewatch.diagnose.capacity import STEPS_PER_DOUBLING, LearnedKnee, Range
from kneewatch.diagnose.latency_split import alike
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


class LoadPoint(Struct, frozen=True, array_like=True):
    """One window of the curve; stored without the names of its fields.

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


FIELDS = len(LoadPoint.__struct_fields__)
FIELD = {name: at for at, name in enumerate(LoadPoint.__struct_fields__)}


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
        """Add a scrape's window, at most one per window: no observation counts twice."""
        if 0 <= now_s - self._last_s < self._window_s:
            return
        point = point_of(now_s, values, self._window_s)
        if point is None:
            return
        self._last_s = now_s
        self.take(point)

    def take(self, point: LoadPoint) -> None:
        """Add a stored window, in the form that `points` returns."""
        kept = self._steps.setdefault(step_of(point.in_flight), array("d"))
        kept.extend(_packed(point))
        del kept[: -self._kept * FIELDS]

    def recall(self, points: Sequence[LoadPoint]) -> None:
        """Add windows that are older than all learned ones, oldest first."""
        learned, self._steps = self.points(), {}
        for point in (*points, *learned):
            self.take(point)

    def points(self) -> list[LoadPoint]:
        return [_unpacked(row) for kept in self._steps.values() for row in _rows(kept)]

    def stored(self) -> tuple[LoadPoint, ...]:
        """All points with four digits, to be stored."""
        return tuple(
            _unpacked((round(row[0]), *[float(f"{value:.4g}") for value in row[1:]]))
            for kept in self._steps.values()
            for row in _rows(kept)
        )

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


def _packed(point: LoadPoint) -> list[float]:
    return [nan if value is None else value for value in astuple(point)]


def _unpacked(row: tuple[float, ...]) -> LoadPoint:
    return LoadPoint(*row[:5], *[None if x != x else x for x in row[5:]])


def _rows(kept: array[float]) -> Iterator[tuple[float, ...]]:
    return zip(*[iter(kept)] * FIELDS, strict=True)


def step_of(in_flight: float) -> int:
    """The index of the step that contains a concurrency; every second step doubles it."""
    return round(STEPS_PER_DOUBLING * log2(in_flight))


def point_of(now_s: float, values: Mapping[str, float | None], window_s: float) -> LoadPoint | None:
    """The window as a point of the curve; None if it has no latency under load, or if clients
    leave: fewer requests end then than it can serve."""
    if (values.get("given_up_ratio") or 0.0) > GIVEN_UP_MAX:
        return None
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
    return LoadPoint(
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


def capacity_used(values: Mapping[str, float | None], knee: LearnedKnee | None) -> float | None:
    """The GPU's activity; without a GPU source the requests in flight over the learned C_max.

    At most 1, because a queue uses no more than all of it; None if unknown.
    """
    busy, running = values.get("gpu_engine_active_ratio"), values.get("running_avg")
    if busy is not None:
        return busy if busy <= 1.0 else None
    if knee is None or not knee.reached or running is None:
        return None
    return min(1.0, (running + (values.get("waiting_avg") or 0.0)) / knee.c_max.expected)
